"""Searching the texts of a run's samples, the newest step first. The index has no texts, so the files of the steps are
read line by line, for a while and for so many finds; what comes back says how far it came and where to go on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from dapo.errors import UserError
from dapo.files import lines_of, parse_json
from dapo.observe.samples import samples_path, steps_with_samples
from dapo.ui.texts import sendable

MOST_SECONDS, MOST_FINDS = 2.0, 50
"""Of one answer."""
AROUND = 80
"""Characters before and after a find."""


def search(samples: Path, text: str, start: tuple[int, int] | None, seconds: float = MOST_SECONDS) -> dict[str, Any]:
    """Where ``text`` is in prompts, responses and extracted answers, whatever the case of its letters. ``samples``: the
    folder of a run. ``start``: ``next`` of an earlier answer, a step and lines of it to skip. ``seconds``: at most.

    Returns:
        ``finds`` (a prompt once for its group); how many steps were ``searched``, from ``last`` down to ``first``;
        ``left``, which were not, or not wholly; ``next``: where to go on, None if that was all.

    Raises:
        UserError: a file cannot be read.
    """
    steps = [step for step in reversed(steps_with_samples(samples)) if start is None or step <= start[0]]
    finds: list[dict[str, Any]] = []
    told: set[Any] = set()
    pattern, deadline, following, place = re.compile(re.escape(text), re.IGNORECASE), time.monotonic() + seconds, None, -1
    for place, step in enumerate(steps):
        path, skip = samples_path(samples, step), start[1] if start is not None and step == start[0] else 0
        try:
            for number, line in enumerate(islice(lines_of(path), skip, None), skip + 1):
                finds += _finds(dict(parse_json(line)), step, pattern, text.lower(), told)
                if len(finds) >= MOST_FINDS or time.monotonic() > deadline:
                    following = (step, number)
                    break
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: cannot be searched: {error}") from None
        if following:
            break
    said = {"searched": place + 1, "last": steps[0] if steps else None, "next": following}
    said["first"] = steps[place] if steps else None
    return said | {"finds": finds, "left": len(steps) - place if following else 0}


def _finds(
    sample: Mapping[str, Any], step: int, pattern: re.Pattern[str], text: str, told: set[Any]
) -> Iterator[dict[str, Any]]:
    for where in ("prompt", "extracted", "response"):
        value, key = str(sample.get(where) or ""), (step, sample.get("draw"), where, where == "prompt" or sample.get("index"))
        # a plain search first: it is many times as fast, and nearly always there is nothing
        if text in value.lower() and key not in told and (found := pattern.search(value)):
            told.add(key)
            begin, end = found.span()
            texts = {"before": value[max(0, begin - AROUND) : begin], "found": found[0], "after": value[end:][:AROUND]}
            verdict = {"draw": sample.get("draw"), "sample": sample.get("index"), "correct": sample.get("correct")}
            yield {"step": step, "where": where} | verdict | {name: sendable(part) for name, part in texts.items()}
