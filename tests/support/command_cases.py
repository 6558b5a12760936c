"""What the tests of ``dapo evaluate`` and ``dapo generate`` share: a tiny random model on disk, rows, and a reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dapo.commands import app
from helpers import random_model
from run_cases import TOKENIZER

REWARD = "def score(prompt, response, answer):\n    return sum(map(ord, response)) % 4 == 0\n"
"""Right for about a quarter of a random model's responses."""


def save_model(folder: Path, name: str = "qwen2", chat_template: str | None = None, **changes: Any) -> Path:
    """A random model with the demo's tokenizer, in Hugging Face layout."""
    random_model(name, **({"vocab_size": len(TOKENIZER)} | changes)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"{k % 10}+{k // 10 % 10}=", "answer": str(k % 10)} for k in range(start, start + count)]


def dapo(*arguments: Any, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
