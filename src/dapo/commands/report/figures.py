"""The plots of a report: metrics over steps. Uses matplotlib's figures without its global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dapo.observe.metrics import PHASES

Entry = Mapping[str, Any]

PANELS: Sequence[tuple[str, Sequence[str]]] = (
    ("accuracy", ("accuracy", "eval/accuracy")),
    ("reward", ("reward/mean", "eval/reward", "monitor/check")),
    ("response length, tokens", ("response_length/mean", "response_length/kept_mean", "eval/response_length")),
    ("truncated, share", ("response_length/truncated",)),
    ("entropy, nats", ("entropy",)),
    ("clipped, share of loss tokens", ("clip/low", "clip/high")),
    ("gradient norm", ("grad_norm", "grad_norm/max")),
    ("engine against trainer, nats", ("mismatch/mean",)),
    ("KL, nats", ("kl/reference", "kl/proximal")),
    ("side by side, and idle, seconds", ("overlap/seconds", "idle/learner", "idle/engine")),
)
"""What is drawn of each run that has it: a title and the metrics of one panel."""

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by the colour-blind, too
_AGES = "staleness/groups/"
_GREY = "#999999"
_SMOOTH_FROM = 40  # steps from which on a curve is drawn as a running mean, over its raw values


def learning(entries: Sequence[Entry], changes: Sequence[int] = ()) -> Figure | None:
    """The metrics that matter, a panel each; None: there are none yet. ``changes``: steps from which on settings were
    others, each a vertical line."""
    panels = {title: there for title, names in PANELS if (there := [n for n in names if _has(entries, n)])}
    if not panels:
        return None
    figure, places = _grid(len(panels))
    for place, (title, names) in zip(places, panels.items(), strict=True):
        _draw_all(place, entries, names)
        for step in changes:
            place.axvline(step, color=_GREY, linestyle=":", linewidth=1)
        _finish(place, title, legend=len(names) > 1)
    return figure


def sampling(entries: Sequence[Entry]) -> Figure | None:
    """What dynamic sampling saw, and the tokens it cost; None: nothing was sampled yet."""
    if not _has(entries, "groups/drawn"):
        return None
    ages = sorted({int(name.rpartition("/")[2]) for e in entries for name in e if name.startswith(_AGES)})
    figure, (groups, tokens, *stale) = _grid(3 if ages else 2)
    steps = [e["step"] for e in entries if e.get("groups/drawn") is not None]
    wrong, right = (_column(entries, steps, f"groups/share_all_{name}") for name in ("wrong", "right"))
    mixed = np.clip(1 - wrong - right, 0, 1)
    groups.stackplot(
        steps, wrong, mixed, right, labels=["all wrong", "mixed", "all right"], colors=["#d55e00", "#0072b2", "#009e73"]
    )
    groups.set_ylim(0, 1)
    _finish(groups, "groups, share of those scored", legend=True)
    _draw_all(tokens, entries, ("tokens/generated", "tokens/loss", "tokens/wasted"))
    _finish(tokens, "tokens of a step", legend=True)
    for place in stale:
        columns = (_column(entries, steps, f"{_AGES}{age}") for age in ages)
        place.stackplot(steps, *columns, labels=[f"{age} old" for age in ages])
        _finish(place, "groups trained on, by age in versions", legend=True)
    return figure


def time(entries: Sequence[Entry]) -> Figure | None:
    """Where the seconds of each step went, and how fast it was; None: no times are known."""
    names = [f"time/{phase}" for phase in PHASES if _has(entries, f"time/{phase}")]
    steps = [e["step"] for e in entries if e["step"] and any(e.get(name) is not None for name in names)]
    if not steps:
        return None
    figure, (seconds, speed) = _grid(2)
    columns = [_column(entries, steps, name) for name in names]
    labels = [phase_name(name.removeprefix("time/"), entries) for name in names]
    seconds.stackplot(steps, *columns, labels=labels, colors=_COLOURS)
    _finish(seconds, "seconds of a step", legend=True)
    _draw_all(speed, entries, [f"tokens_per_second/{of}" for of in ("rollout", "update", "total")])
    _finish(speed, "tokens per second", legend=True)
    return figure


def phase_name(phase: str, entries: Sequence[Entry]) -> str:
    """What a phase is called; of a run that samples ahead, the rollout is no more than the wait for it."""
    return "wait for a batch" if phase == "rollout" and _has(entries, "overlap/wall") else phase.replace("_", " ")


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(9.6, 2.6 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def _draw_all(place: Axes, entries: Sequence[Entry], names: Sequence[str]) -> None:
    for name, colour in zip(names, _COLOURS, strict=False):
        if _has(entries, name):
            _draw(place, entries, name, colour)


def _draw(place: Axes, entries: Sequence[Entry], name: str, colour: str) -> None:
    found = [e for e in entries if e.get(name) is not None]
    steps, values = [e["step"] for e in found], np.array([float(e[name]) for e in found])
    if name.startswith("eval/"):
        low, high = ([e.get(f"{name}_{end}", e[name]) for e in found] for end in ("low", "high"))
        errors = np.clip(np.array([values - low, high - values]), 0, None)
        place.errorbar(steps, values, yerr=errors, fmt="o-", color=colour, markersize=4, capsize=3, label=name)
    elif len(values) < _SMOOTH_FROM:
        place.plot(steps, values, color=colour, linewidth=1.5, marker="o" if len(values) == 1 else None, label=name)
    else:
        place.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
        place.plot(steps, _running_mean(values), color=colour, linewidth=1.6, label=name)


def _running_mean(values: Any) -> Any:
    """Over the 1/20 of the run around each step: at its ends over what there is."""
    window = np.ones(2 * max(1, len(values) // 40) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def _finish(place: Axes, title: str, legend: bool) -> None:
    place.set_title(title, fontsize=10, loc="left")
    if place.dataLim.ymin >= 0 > place.get_ylim()[0]:  # a share or a length is never below 0
        place.set_ylim(bottom=0)
    place.set_xlabel("step", fontsize=8)
    place.tick_params(labelsize=8)
    place.xaxis.set_major_locator(MaxNLocator(integer=True))
    place.grid(color=_GREY, alpha=0.25, linewidth=0.5)
    place.spines[["top", "right"]].set_visible(False)
    if legend and place.get_legend_handles_labels()[0]:
        place.legend(fontsize=7, loc="best", framealpha=0.9)  # framed: over areas of the same colours


def _has(entries: Sequence[Entry], name: str) -> bool:
    return any(e.get(name) is not None for e in entries)


def _column(entries: Sequence[Entry], steps: Sequence[int], name: str) -> Any:
    """Values at these steps; 0 where there is none."""
    values = {e["step"]: e.get(name) for e in entries}
    return np.array([float(values.get(step) or 0.0) for step in steps])
