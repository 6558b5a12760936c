"""What ``dapo inspect RUN --samples`` says of samples: text as it was, verdict, and what training made of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dapo.errors import ConfigError, UserError
from dapo.observe.run_view import RunView
from dapo.observe.samples import STATUSES, SampleFilter, read_samples, samples_path
from dapo.terminal import visible

Order = Literal["length", "reward", "advantage"]

_MOST_LETTERS = 1000
"""Of a text that is cut: so many are shown, the beginning and the end."""


def statuses(text: str | None) -> tuple[str, ...]:
    """The statuses in a list such as ``kept,all_wrong``.

    Raises:
        ConfigError: one of them is unknown.
    """
    names = tuple(filter(None, (part.strip() for part in (text or "").split(","))))
    for name in names:
        if name not in STATUSES:
            raise ConfigError(f"--status {name}: there is no such status; there are {', '.join(STATUSES)}")
    return names


def samples_of(run: RunView, steps: tuple[int, int] | None) -> list[dict[str, Any]]:
    """The samples of some steps (None: of the last one that has any), each with its ``step``.

    Raises:
        UserError: there are none.
    """
    there = run.steps_with_samples
    if not there:
        why = "none yet" if run.saves_samples else "its recipe says run.save_samples=false"
        raise UserError(f"{run.folder.root}: no samples were saved: {why}")
    first, last = steps or (there[-1], there[-1])
    wanted = [step for step in there if first <= step <= last]
    if not wanted:
        asked = f"step {first}" if first == last else f"steps {first} to {last}"
        raise UserError(f"{run.folder.root}: no samples of {asked}; there are those of {_ranges(there)}")
    found = []
    for step in wanted:
        found += [{"step": step, **sample} for sample in read_samples(samples_path(run.folder.samples, step))]
    return found


def select(samples: Sequence[dict[str, Any]], wanted: SampleFilter, order: Order | None) -> list[dict[str, Any]]:
    """The samples that are wanted; ordered from the largest value down, those without one last."""
    found = [sample for sample in samples if wanted.admits(sample)]
    if order is not None:
        found.sort(key=lambda sample: (sample.get(order) is None, -(sample.get(order) or 0)))
    return found


def show(sample: Mapping[str, Any], width: int, full: bool) -> Iterator[str]:
    """One sample, as lines."""
    status = str(sample.get("status"))
    place = "  ".join(f"{name} {sample.get(name)}" for name in ("step", "row", "draw", "index"))
    yield f"{place}  {status} ({STATUSES.get(status, 'unknown')})"
    for name in ("prompt", "response"):
        yield from _text(name, str(sample.get(name)), width, full)
    yield f"  extracted {_value(sample.get('extracted'))}  gold {_value(sample.get('gold'))}  {_verdict(sample)}"
    yield f"  {_numbers(sample)}"


def _text(name: str, text: str, width: int, full: bool) -> Iterator[str]:
    if not full and len(text) > _MOST_LETTERS:
        half = _MOST_LETTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} letters; --full shows them]\n{text[-half:]}"
    label = f"  {name:<8} "
    for line in visible(text).split("\n"):
        for part in textwrap.wrap(line, max(20, width - 11), drop_whitespace=False, tabsize=1) or [""]:
            yield f"{label}| {part}"
            label = " " * 11


def _verdict(sample: Mapping[str, Any]) -> str:
    if sample.get("error"):
        return f"no verdict: {visible(sample['error'])}"
    words: dict[Any, str] = {True: "right", False: "wrong"}
    return words.get(sample.get("correct"), "neither right nor wrong")


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


def _value(text: Any) -> str:
    return "none" if text is None else visible(text).replace("\n", "\\n")


def _ranges(steps: Sequence[int]) -> str:
    """Numbers in order, runs of them as a range: ``steps 1 to 4, 7``."""
    pieces: list[list[int]] = []
    for step in steps:
        if pieces and step == pieces[-1][-1] + 1:
            pieces[-1].append(step)
        else:
            pieces.append([step])
    words = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in pieces]
    shown = words if len(words) <= 12 else [*words[:11], "...", words[-1]]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"
