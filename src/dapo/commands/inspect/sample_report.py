"""What ``dapo inspect RUN`` says of samples (``--samples``): text as it was, verdict, and what training made of it; and
of one prompt's samples in two steps, side by side and line by line (``--diff A B --prompt ROW``)."""

from __future__ import annotations

import difflib
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from dapo.commands.inspect.tables import columns
from dapo.environments.trace import EPISODE_ENDS, TURN_ENDS
from dapo.errors import ConfigError
from dapo.observe.run_view import RunView
from dapo.observe.sample_query import find, ranges, rows_drawn, steps_asked_for, steps_of_row
from dapo.observe.samples import STATUSES, SampleFilter
from dapo.util.terminal import visible

_MOST_LETTERS = 1000  # of a text that is cut: so many are shown, the beginning and the end

RIGHT: Mapping[Any, str] = {True: "right", False: "wrong"}


def statuses(text: str | None) -> tuple[str, ...]:
    """The statuses in a list such as ``kept,all_wrong``. Raises ConfigError if one is unknown."""
    names = tuple(filter(None, (part.strip() for part in (text or "").split(","))))
    for name in names:
        if name not in STATUSES:
            raise ConfigError(f"--status {name}: there is no such status; there are {', '.join(STATUSES)}")
    return names


def show(sample: Mapping[str, Any], width: int, full: bool) -> Iterator[str]:
    status = str(sample.get("status"))
    sample = {"index": sample.get("sample"), **sample}
    place = "  ".join(f"{name} {sample.get(name)}" for name in ("step", "row", "draw", "index"))
    yield f"{place}  {status} ({STATUSES.get(status, 'unknown')})"
    for name in ("prompt", "response"):
        text = str(sample.get(name, "(the texts of this step are gone)"))
        pieces = list(episode_pieces(sample)) if name == "response" else []
        for label, piece in pieces or [(name, text)]:
            yield from text_lines(label, piece, width, full)
    yield f"  extracted {one_line(sample.get('extracted'))}  gold {one_line(sample.get('gold'))}  {verdict(sample)}"
    yield f"  {_numbers(sample)}"
    if measures := _measures(sample):
        yield f"  {measures}"


def episode_pieces(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The response of an episode in pieces, each with whose it is; nothing of a single response."""
    text, at = str(sample.get("response", "")), 0
    for number, (_, _, stop, reward, _, (start, end)) in enumerate(sample.get("turns") or (), 1):
        if text[at:start].strip():
            yield "reply", text[at:start].strip("\n")
        paid = f" [reward {reward:+g}]" * bool(reward)
        yield f"turn {number}", text[start:end] + f" [{TURN_ENDS.get(stop, stop)}]" * (stop != "stop") + paid
        at = end
    if sample.get("ended"):
        yield "ended", f"{EPISODE_ENDS.get(sample['ended'], sample['ended'])}; {sample.get('sampled')} tokens sampled"


def text_lines(name: str, text: str, width: int, full: bool) -> Iterator[str]:
    """A text of a sample behind its name, ``width`` cells wide; cut in the middle unless ``full``."""
    if not full and len(text) > _MOST_LETTERS:
        half = _MOST_LETTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} letters; --full shows them]\n{text[-half:]}"
    label = f"  {name:<8} "
    for line in visible(text).split("\n"):
        for part in textwrap.wrap(line, max(20, width - 11), drop_whitespace=False, tabsize=1) or [""]:
            yield f"{label}| {part}"
            label = " " * 11


def verdict(sample: Mapping[str, Any]) -> str:
    if sample.get("error"):
        return f"no verdict: {visible(sample['error'])}"
    return RIGHT.get(sample.get("correct"), "neither right nor wrong")


def _numbers(sample: Mapping[str, Any]) -> str:
    parts = "".join(f", {visible(name)} {value:g}" for name, value in (sample.get("parts") or {}).items())
    shaped, advantage = sample.get("shaped_reward"), sample.get("advantage")
    versions = sample.get("versions") or []
    fields = [
        f"reward {_number(sample.get('reward'))}{parts}",
        "" if shaped is None else f"shaped {_number(shaped)}",
        "" if advantage is None else f"advantage {_number(advantage)}",
        "" if sample.get("in_loss") or sample.get("status") != "kept" else "not in the loss",
        f"length {sample.get('length')} ({'truncated' if sample.get('finish_reason') == 'length' else 'ended'})",
        f"version {'-'.join(str(v) for v in dict.fromkeys(versions))}" if versions else "",
    ]
    return "  ".join(filter(None, fields))


def _number(value: Any) -> str:
    return f"{value:+.4g}" if isinstance(value, int | float) else "-"


def one_line(text: Any) -> str:
    """A text that was found, or that there is none."""
    return "none" if text is None else visible(text).replace("\n", "\\n")


def _measures(sample: Mapping[str, Any]) -> str:
    names = {"entropy": "entropy", "logprob_engine": "log-prob of engine", "logprob_trainer": "of trainer"}
    fields = [f"{text} {sample[name]:.4g}" for name, text in names.items() if sample.get(name) is not None]
    if sample.get("gap_max") is not None:
        fields.append(f"largest difference {sample['gap_max']:.2g}")
    if sample.get("check_correct") is not None:
        fields.append(f"held-out check {'right' if sample['check_correct'] else 'wrong'}")
    return "  ".join(fields)


_COLUMNS = ("step", "row", "draw", "#", "status", "verdict", "reward", "adv.", "length", "entropy", "answer", "gold")
_LONGEST_ANSWER, _LEAST_RESPONSE = 16, 10


def table(samples: Sequence[Mapping[str, Any]], width: int) -> Table:
    """A line of ``width`` cells for each, with as much of its response as there is room for."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        left = name in ("status", "verdict", "answer", "gold")
        found.add_column(name, justify="left" if left else "right", no_wrap=True)
    rows = [_cells({"index": sample.get("sample"), **sample}) for sample in samples]
    room = width - sum(max(map(cell_len, column)) + 2 for column in zip(_COLUMNS, *rows, strict=True))
    if room >= _LEAST_RESPONSE:
        found.add_column("response", no_wrap=True)
    for row, sample in zip(rows, samples, strict=True):
        response = [_cut(one_line(str(sample.get("response", ""))[:room]), room)] if room >= _LEAST_RESPONSE else []
        found.add_row(*map(Text, [*row, *response]))
    return found


def _cells(sample: Mapping[str, Any]) -> list[str]:
    said = "failed" if sample.get("error") else RIGHT.get(sample.get("correct"), "-")
    entropy = "-" if sample.get("entropy") is None else f"{sample['entropy']:.3f}"
    places = [str(sample.get(name)) for name in ("step", "row", "draw", "index", "status")]
    numbers = [_number(sample.get("reward")), _number(sample.get("advantage")), str(sample.get("length")), entropy]
    answers = [_cut(one_line(sample.get(name)), _LONGEST_ANSWER) for name in ("extracted", "gold")]
    return [*places, said, *numbers, *answers]


def _cut(text: str, cells: int) -> str:
    return set_cell_size(text, min(cell_len(text), cells))


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
        yield from _changes(_response_lines(old), _response_lines(new))
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


def _response_lines(sample: Mapping[str, Any] | None) -> list[str]:
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
