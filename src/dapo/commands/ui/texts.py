"""The texts of samples: the pieces that tokens are, with numbers for each; searching; what of a text can be sent."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dapo.errors import UserError
from dapo.inference.stream import Pieces
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import samples_path, steps_with_samples, tokens_path
from dapo.util.files import lines_of, parse_json

SIGNALS = {"logprobs": "logprob_engine", "trainer_logprobs": "logprob_trainer", "entropy": "entropy"}
"""Arrays with a number per response token, and what the page calls them."""
MOST_SECONDS, MOST_FINDS, AROUND = 2.0, 50, 80  # of one answer of a search, and characters before and after each find


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
        numbers = {name: values.astype(float).tolist() for name, values in sample.items()}
        signals = {name: [round(n, 5) if math.isfinite(n) else None for n in each] for name, each in numbers.items()}
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


def sendable(text: str) -> str:
    """Lone surrogates, which data may hold, are no text that can be sent: they become question marks."""
    return text.encode("utf-8", "replace").decode()


def summary_of(line: Mapping[str, Any], characters: int = 110) -> str:
    """The beginning of a prompt and its end, where the question is mostly, which tells prompts with one beginning
    apart."""
    prompt = str(line.get("prompt") or "")
    end = characters * 2 // 3
    return prompt if len(prompt) <= characters else f"{prompt[: characters - end]} … {prompt[-end:]}"


def search(samples: Path, text: str, start: tuple[int, int] | None, seconds: float = MOST_SECONDS) -> dict[str, Any]:
    """Where ``text`` is in prompts, responses and extracted answers, whatever the case of its letters, the newest step
    first. The index has no texts, so files are read, until :data:`MOST_FINDS` or ``seconds`` are reached.

    ``samples``: the folder of a run. ``start``: ``next`` of an earlier answer, a step and lines of it to skip.
    Returns ``finds`` (a prompt once for its group); how many steps were ``searched``, from ``last`` down to ``first``;
    ``left``, which were not, or not wholly; ``next``: where to go on, None if that was all.

    Raises UserError: a file cannot be read."""
    steps = [step for step in reversed(steps_with_samples(samples)) if start is None or step <= start[0]]
    finds, told, deadline = list[dict[str, Any]](), set[Any](), time.monotonic() + seconds
    first, last = min(steps, default=None), max(steps, default=None)
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    for place, number, sample in _lines(samples, steps, start):
        finds += _finds(sample, steps[place], pattern, text.lower(), told)
        if len(finds) >= MOST_FINDS or time.monotonic() > deadline:
            here = {"searched": place + 1, "first": steps[place], "left": len(steps) - place}
            return here | {"finds": finds, "last": last, "next": (steps[place], number)}
    return {"finds": finds, "searched": len(steps), "first": first, "last": last, "left": 0, "next": None}


def _lines(
    samples: Path, steps: Sequence[int], start: tuple[int, int] | None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The samples of these steps, each with its step's place among them and the number of its line."""
    for place, step in enumerate(steps):
        path, skip = samples_path(samples, step), start[1] if start is not None and step == start[0] else 0
        try:
            for number, line in enumerate(islice(lines_of(path), skip, None), skip + 1):
                yield place, number, dict(parse_json(line))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: cannot be searched: {error}") from None


def _finds(
    sample: Mapping[str, Any], step: int, pattern: re.Pattern[str], text: str, told: set[Any]
) -> Iterator[dict[str, Any]]:
    names = {"draw": "draw", "sample": "index", "correct": "correct"}  # of a file that somebody may have edited
    facts = {"step": step} | {k: v if isinstance(v := sample.get(n), int) else None for k, n in names.items()}
    for where in ("prompt", "extracted", "response"):
        value, group = str(sample.get(where) or ""), (step, facts["draw"])
        # a plain search first: it is many times as fast, and nearly always there is nothing
        if text not in value.lower() or (where == "prompt" and group in told) or not (found := pattern.search(value)):
            continue
        if where == "prompt":
            told.add(group)
        texts = (value[max(0, found.start() - AROUND) : found.start()], found[0], value[found.end() :][:AROUND])
        yield facts | {"where": where} | dict(zip(("before", "found", "after"), map(sendable, texts), strict=True))
