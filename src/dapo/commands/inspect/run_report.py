"""What ``dapo inspect`` says of a run, of its metrics and of several runs."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo.commands.inspect.tables import ASCII, BLOCKS, curve, number
from dapo.commands.shared.output import columns
from dapo.errors import ConfigError
from dapo.observe.metrics import METRICS, describe
from dapo.observe.progress import duration, finite
from dapo.observe.run_view import RunView
from dapo.util.terminal import counted, visible

WATCHED = (
    *("accuracy", "reward/mean", "response_length/mean", "response_length/truncated", "entropy"),
    *("clip/low", "clip/high", "groups/kept", "groups/drawn", "grad_norm", "mismatch/mean", "time/step", "objective/*"),
    *("preference/accuracy", "preference/margin", "preference/chosen_logprob"),
)
"""The metrics that are shown unless others are asked for, and patterns of their names."""
WATCHED_AHEAD = ("staleness/mean", "groups/stale", "overlap/seconds", "overlap/won", "idle/learner", "idle/engine")
"""Those that are shown, too, where ``rollout.max_staleness`` is 1 or more."""

_MOST_STEPS, _CURVE = 8, 16

Steps = tuple[int, int] | None  # first and last step to look at, both included; None: all


def report(run: RunView, steps: Steps, width: int | None, ascii_only: bool) -> Iterator[str]:
    """The overview: what the run is, metrics over its steps, evaluations, checkpoints, warnings."""
    for name, value in facts(run):
        yield f"{name:<12} {visible(value)}"
    entries = [e for e in in_range(run.metrics, steps) if e["step"]]
    watched = WATCHED + (WATCHED_AHEAD if _get(run.config, "rollout", "max_staleness") not in ("", "0") else ())
    known = {name: value for e in entries for name, value in e.items() if value is not None}
    names = [name for pattern in watched for name in _present([known], pattern)]
    if entries:
        yield ""
        yield from _course(entries, names, width, ASCII if ascii_only else BLOCKS)
    evaluations = in_range(run.evaluations, steps)
    if evaluations:
        yield ""
        found = _present(evaluations, "eval/*")
        rows = [[_when(e["step"]), *(number(n, e.get(n)) for n in found)] for e in _spread(evaluations, 20)]
        yield from columns(["evaluation", *(name.removeprefix("eval/") for name in found)], rows, width)
    for warning in run.warnings():
        yield f"warning: {warning}"


def facts(run: RunView) -> list[tuple[str, str]]:
    checkpoints, best, engine = [*run.checkpoints], run.best, _get(run.config, "rollout", "engine")
    if run.damage:
        checkpoints[-1] += f" (damaged: {run.damage})"
    weights = [f.name for f in (run.folder.model_before, run.folder.model_after) if f.is_dir()]
    sampled = run.steps_with_samples
    found = {
        "run": str(run.folder.root),
        "state": run.why,
        "steps": run.progress,
        "wall time": "" if run.seconds is None else duration(run.seconds),
        "started": run.environment.get("started", ""),
        "command": run.command,
        "model": _get(run.config, "model", "path"),
        "engine": f"{engine} {_get(run.environment, 'packages', engine)}".strip(),
        "seed": run.config.get("seed", ""),
        "checkpoints": ", ".join([*checkpoints, *run.damaged_checkpoints, *weights]) or "none yet",
        "best": f"{best['metric']} {number(best['metric'], best['value'])} {_when(best['step'])}"
        if {"metric", "value", "step"} <= set(best)
        else "",
        "changed": "; ".join(map(str, run.changes)),
        "samples": f"of {counted(len(sampled), 'step')}, {sampled[0]} to {sampled[-1]}" if sampled else "none",
    }
    return [(name, str(value)) for name, value in found.items() if value != ""]


def as_json(run: RunView, steps: Steps) -> dict[str, Any]:
    """The overview for programs; metrics under their registered names, all of them."""
    before, after = run.accuracies
    return {
        "run_dir": str(run.folder.root),
        "state": run.state,
        "why": run.why,
        "steps": run.steps_done,
        "steps_planned": run.steps_planned,
        "seconds": run.seconds,
        "engine": _get(run.config, "rollout", "engine") or None,
        "seed": run.config.get("seed"),
        "model": _get(run.config, "model", "path") or None,
        "accuracy_before": before,
        "accuracy_after": after,
        "checkpoints": run.checkpoints,
        "newest_checkpoint_damaged": run.damage,
        "damaged_checkpoints": run.damaged_checkpoints,
        "best": dict(run.best) or None,
        "steps_with_samples": run.steps_with_samples,
        "changes": [asdict(change) for change in run.changes],
        "warnings": run.warnings(),
        "metrics": in_range(run.metrics, steps),
    }


BRIEF = ("run_dir", "state", "why", "steps", "steps_planned", "accuracy_before", "accuracy_after", "seconds")
"""What is told of each of several runs."""


def in_range(entries: Sequence[dict[str, Any]], steps: Steps) -> list[dict[str, Any]]:
    return [e for e in entries if steps is None or steps[0] <= e["step"] <= steps[1]]


def _course(
    entries: Sequence[Mapping[str, Any]], names: Sequence[str], width: int | None, letters: str
) -> Iterator[str]:
    """Metrics as rows and some of the steps as columns, with the curve over all of them."""
    longest = max(map(len, names), default=0)
    fit = _MOST_STEPS if width is None else max(2, min(_MOST_STEPS, (width - longest - _CURVE - 2) // 9))
    shown = _spread(entries, fit)
    header = ["step", *(str(e["step"]) for e in shown), "course"]
    rows = []
    for name in names:
        course = curve([finite(e.get(name)) for e in entries], _CURVE, letters)
        rows.append([name, *(number(name, e.get(name)) for e in shown), course.ljust(min(_CURVE, len(entries)))])
    yield from columns(header, rows, width)


def _when(step: int) -> str:
    return f"after step {step}" if step else "before training"


def _spread(entries: Sequence[Any], most: int) -> list[Any]:
    if len(entries) <= most:
        return list(entries)
    return [entries[round(place * (len(entries) - 1) / (most - 1))] for place in range(most)]


def chosen(patterns: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that a list of names and patterns, such as ``accuracy,clip/*``, stands for, in its order.
    Raises ConfigError: a name is not registered, or nothing that is registered fits a pattern."""
    names: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        found = _present(entries, pattern)
        if not found and describe(pattern) is not None:
            found = [pattern]
        if not found and not any(fnmatch.fnmatchcase(name, pattern) for name in METRICS):
            near = difflib.get_close_matches(pattern, METRICS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "docs/metrics.md lists them; * stands for any text"
            raise ConfigError(f"--metrics {pattern}: no metric has this name; {hint}")
        names += [name for name in found if name not in names]
    return names


def _present(entries: Sequence[Mapping[str, Any]], pattern: str) -> list[str]:
    """Names in the metrics that fit a pattern, in the order of the registry."""
    names = dict.fromkeys(name for e in entries for name in e if fnmatch.fnmatchcase(name, pattern))
    order = {metric: place for place, metric in enumerate(METRICS.values())}
    known = [(order[metric], name) for name in names if (metric := describe(name)) is not None]
    return [name for _, name in sorted(known)]


def metrics_table(entries: Sequence[Mapping[str, Any]], names: Sequence[str], width: int | None) -> Iterator[str]:
    rows = [[str(e["step"]), *(number(name, e.get(name)) for name in names)] for e in entries]
    yield from columns(["step", *names], rows, width)


def runs_table(runs: Sequence[RunView], width: int | None) -> Iterator[str]:
    """One line for each run: how far it came and what it learned."""
    rows = []
    for run in runs:
        before, after = (number("eval/accuracy", value) for value in run.accuracies)
        seconds = "-" if run.seconds is None else duration(run.seconds)
        name = visible(Path(run.folder.root).name)
        rows.append([name, run.state, run.progress.replace(" of ", "/"), before, after, seconds])
    yield from columns(["run", "state", "steps", "accuracy before", "after", "wall time"], rows, width)


def _get(config: Mapping[str, Any], section: str, key: str) -> str:
    values = config.get(section)
    return str(values.get(key, "")) if isinstance(values, dict) else ""
