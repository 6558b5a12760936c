"""What ``dapo inspect RUN --diff A B --prompt ROW`` says: one prompt's samples in two steps, side by side and line by
line."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from dapo.commands.inspect.sample_report import one_line, verdict
from dapo.commands.inspect.tables import columns
from dapo.errors import ConfigError
from dapo.observe.run_view import RunView
from dapo.observe.sample_query import find, ranges, rows_drawn, steps_asked_for, steps_of_row
from dapo.observe.samples import SampleFilter
from dapo.util.terminal import visible

Samples = Sequence[Mapping[str, Any]]


def two_steps(run: RunView, steps: tuple[int, int], row: int | None) -> tuple[Samples, Samples]:
    """The samples of a prompt in two steps.

    Raises:
        UserError: there are no samples of one of the steps.
        ConfigError: the prompt was not drawn in one of them, or none is named; says what would work.
    """
    for step in steps:
        steps_asked_for(run, (step, step))
    if row is None:
        both = sorted(set(rows_drawn(run, steps[0])) & set(rows_drawn(run, steps[1])))
        hint = f"drawn in both steps: {_some(both)}" if both else "no prompt was drawn in both of these steps"
        raise ConfigError(f"--diff {steps[0]} {steps[1]}: name a prompt with --prompt ROW; {hint}")
    found = [find(run, (step, step), SampleFilter(row=row), None, 0).samples for step in steps]
    for step, samples in zip(steps, found, strict=True):
        if not samples:
            others = steps_of_row(run, row)
            hint = f"it was in {ranges(others)}" if others else f"rows of this step: {_some(rows_drawn(run, step))}"
            raise ConfigError(f"--prompt {row}: this row was not drawn in step {step}; {hint}")
    return found[0], found[1]


def diff_report(before: Samples, after: Samples, width: int | None, limit: int) -> Iterator[tuple[str, str]]:
    """Lines, each with what it is: "" or, of a difference, ``-`` (before), ``+`` (after) or ``@``. ``width``: cells in
    a line; None: no limit. ``limit``: of the pairs that are shown; 0: all."""
    yield "", f"prompt of row {before[0]['row']}: {one_line(before[0].get('prompt'))}"
    yield "", f"gold {one_line(before[0].get('gold'))}"
    header = ["step", "status", "samples", "right", "reward", "length", "entropy", "most frequent answer"]
    for line in columns(header, [_summary(samples) for samples in (before, after)], width):
        yield "", line
    pairs = list(zip_longest(before, after))
    for old, new in pairs[: limit or None]:
        yield "", ""
        sides = [f"step {s['step']} draw {s['draw']} index {s['index']} ({verdict(s)})" for s in (old, new) if s]
        yield "@", " -> ".join(sides)
        yield from _changes(_lines(old), _lines(new))
    if limit and limit < len(pairs):
        yield "", ""
        yield "", f"{limit} of {len(pairs)} pairs shown (--limit)"


def _summary(samples: Samples) -> list[str]:
    answers = Counter(s["extracted"] for s in samples if s.get("extracted") is not None).most_common(1)
    answer = f"{one_line(answers[0][0])} ({answers[0][1]} times)" if answers else "-"
    numbers = [_mean(samples, name) for name in ("correct", "reward", "length", "entropy")]
    statuses = ", ".join(dict.fromkeys(str(s.get("status")) for s in samples))
    return [str(samples[0]["step"]), statuses, str(len(samples)), *numbers, answer]


def _mean(samples: Samples, name: str) -> str:
    values = [float(s[name]) for s in samples if s.get(name) is not None]
    return f"{fmean(values):.3g}" if values else "-"


def _lines(sample: Mapping[str, Any] | None) -> list[str]:
    return visible(sample.get("response", "")).split("\n") if sample else []


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    if list(old) == list(new):
        yield "", "  the same response"
        return
    for line in difflib.ndiff(old, new):
        if not line.startswith("?"):
            yield line[0].strip(), line


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 12 else shown or "none"
