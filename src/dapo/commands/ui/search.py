"""Searching the texts of a run's samples, the newest step first. The index has no texts, so the files of the steps are
read line by line, for a while and for so many finds; what comes back says how far it came and where to go on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dapo.commands.ui.texts import sendable
from dapo.errors import UserError
from dapo.observe.samples import samples_path, steps_with_samples
from dapo.util.files import lines_of, parse_json

MOST_SECONDS, MOST_FINDS, AROUND = 2.0, 50, 80
"""Of one answer, and characters before and after each find."""


def search(samples: Path, text: str, start: tuple[int, int] | None, seconds: float = MOST_SECONDS) -> dict[str, Any]:
    """Where ``text`` is in prompts, responses and extracted answers, whatever the case of its letters.

    ``samples``: the folder of a run. ``start``: ``next`` of an earlier answer, a step and lines of it to skip.

    Returns:
        ``finds`` (a prompt once for its group); how many steps were ``searched``, from ``last`` down to ``first``;
        ``left``, which were not, or not wholly; ``next``: where to go on, None if that was all.

    Raises:
        UserError: a file cannot be read.
    """
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
