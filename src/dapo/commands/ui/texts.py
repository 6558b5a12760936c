"""What one group holds: numbers per token from the step's arrays, and the pieces of text that
the tokens are. Reads the bytes of the group and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dapo.commands.ui.pieces import Pieces
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import tokens_path

SIGNALS = {"logprobs": "logprob_engine", "trainer_logprobs": "logprob_trainer", "entropy": "entropy"}
"""Arrays with a number per response token, and what the page calls them."""


def tokens_of(folder: RunFolder, step: int, positions: Sequence[int], most: int | None = None) -> list[dict[str, Any]]:
    """Per sample its ``pieces`` of text and the signals that were stored, one number for each piece; empty where the
    arrays are missing. ``positions``: of the samples among those of the step. ``most``: tokens of each, from its first
    one on; None: all."""
    path, tokenizer = tokens_path(folder.samples, step), tokenizer_of(folder)
    arrays = _slices(path, positions, most) if path.is_file() else None
    if arrays is None:
        return [{} for _ in positions]
    found = []
    for sample in arrays:
        ids = sample.pop("token_ids").tolist()
        signals = {name: [_number(value) for value in values] for name, values in sample.items()}
        found.append({"pieces": pieces(tokenizer, ids) if tokenizer is not None else None, **signals})
    return found


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, those that end a response too."""
    texts = Pieces(lambda some: str(tokenizer.decode(some, skip_special_tokens=False))).add(ids, last=True)
    return [text if tokenizer.id_to_token(i) is not None else "\ufffd" for text, i in zip(texts, ids, strict=True)]


def tokenizer_of(folder: RunFolder) -> Any:
    """The tokenizer that the run has saved, or None: there is none that can be read."""
    path = folder.model_before / "tokenizer.json"
    try:
        return _load(path, path.stat().st_mtime_ns)
    except Exception:  # a file that is cut is a bare Exception to tokenizers; the texts are shown without it
        return None


@lru_cache(maxsize=8)
def _load(path: Path, _changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _slices(path: Path, positions: Sequence[int], most: int | None) -> list[dict[str, Any]] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = {"token_ids": "token_ids"} | {k: v for k, v in SIGNALS.items() if k in file.keys()}  # noqa: SIM118
            lengths = file.get_tensor("lengths").astype(np.int64)
            starts = np.cumsum(lengths) - lengths
            counts = lengths if most is None else np.minimum(lengths, most)
            slices = {shown: file.get_slice(stored) for stored, shown in names.items()}
            return [
                {name: array[int(starts[p]) : int(starts[p] + counts[p])] for name, array in slices.items()}
                for p in positions
            ]
    except (OSError, SafetensorError, IndexError, KeyError):
        return None


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 5) if np.isfinite(number) else None


def sendable(text: str) -> str:
    """Lone surrogates, which data may hold, are no text that can be sent: they become question marks."""
    return text.encode("utf-8", "replace").decode()


def summary_of(line: Mapping[str, Any], characters: int = 110) -> str:
    """The beginning of a prompt and its end, where the question is mostly, which tells prompts with one beginning
    apart."""
    prompt = str(line.get("prompt") or "")
    end = characters * 2 // 3
    return prompt if len(prompt) <= characters else f"{prompt[: characters - end]} … {prompt[-end:]}"
