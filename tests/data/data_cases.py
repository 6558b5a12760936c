"""What the tests of data share: a template at character level, files, and reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers_for_tests import char_tokenizer

from dapo.config import DataConfig
from dapo.config.data import DataItem
from dapo.data.parts import Rows, open_parts
from dapo.data.rows import Row
from dapo.data.source import PromptSource, load_prompts, read_prompts
from dapo.data.template import PromptTemplate

PLAIN = PromptTemplate(DataConfig(template="plain"), char_tokenizer())


def write(folder: Path, *lines: str | bytes, name: str = "rows.jsonl") -> Path:
    """A file of these lines."""
    path = folder / name
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def numbered(folder: Path, count: int, name: str = "rows.jsonl", start: int = 0) -> Path:
    """``count`` rows: prompt p<k>, answer <k>."""
    return write(
        folder, *(json.dumps({"prompt": f"p{k}", "answer": k}) for k in range(start, start + count)), name=name
    )


def items(*files: Any) -> list[DataItem]:
    return [DataItem.model_validate(file if isinstance(file, dict) else str(file)) for file in files]


def read(*files: Any, answer_required: bool = True, **keys: str) -> list[Row]:
    """All rows, as an evaluation reads them: any fault raises."""
    data = DataConfig(template="plain", **keys)
    read_prompts(data, items(*files), PLAIN, answer_required=answer_required)
    rows = Rows(open_parts(data, items(*files), answer_required)[0])
    return [rows[number] for number in range(len(rows))]


def source(*files: Any, seed: int = 1, warn: Any = lambda text: None, **options: Any) -> PromptSource:
    """To train on: files, or one list of rows from Python."""
    rows = files[0] if len(files) == 1 and isinstance(files[0], list) else items(*files)
    options = {"template": "plain", "max_prompt_length": 100, **options}
    return load_prompts(DataConfig(**options), rows, PLAIN, seed=seed, warn=warn)


def draws(prompts: PromptSource, count: int) -> list[int]:
    return [prompts.next().row for _ in range(count)]
