"""What the page tells of metrics and recipes: curves, thinned out for the screen, phases, alarms, what differs. Pure
functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, TypeGuard

import numpy as np

from dapo.config import flat
from dapo.config.plan import steps_that_fit
from dapo.observe.alarms import RULES
from dapo.observe.changes import Change
from dapo.observe.metrics import METRICS, PHASES
from dapo.observe.run_view import HACKING
from dapo.util.spans import Span

Entry = Mapping[str, Any]
Run = Sequence[Entry]

HEADLINES = (
    *("eval/accuracy", "accuracy", "reward/mean", "response_length/mean", "entropy", "probability/mean"),
    *("groups/share_all_right", "clip/high", "grad_norm", "mismatch/mean", "kl/reference", "tokens_per_second/total"),
    *("eval/loss", "preference/accuracy", "preference/margin", "preference/chosen_logprob"),
)
"""What is worth a look first: section 4.3 of the paper, then what tells of trouble."""


def names_in(entries: Sequence[Entry]) -> list[str]:
    """Metrics that have a number in some line, in the order of the registry."""
    order = {name: place for place, name in enumerate(METRICS)}
    found = {"step"}
    for entry in entries:
        found.update(name for name in entry.keys() - found if _is_number(entry[name]))
    return sorted(found - {"step"}, key=lambda name: (order.get(name, len(order)), name))


def curve(entries: Run, name: str, points: int, x: str = "step", others: Sequence[Run] = ()) -> list[list[float]]:
    """Points ``[x, mean, lowest, highest]`` of a metric, at most ``points`` of them, each of as many steps.

    What was measured before training stands at 0, whatever ``x`` is. ``others``: of further runs, which become one
    curve with the first one, over the steps that all of them have measured.
    """
    measured = [_measured(run, name, x) for run in (entries, *others)]
    steps = [step for step in measured[0] if all(step in run for run in measured)]
    table = np.array([[run[step] for run in measured] for step in steps], np.float64)  # [steps, runs, (x, value)]
    parts = np.array_split(table, min(points, len(table))) if len(table) else ()
    spread = ((part[..., 1].mean(), part[..., 1].min(), part[..., 1].max()) for part in parts)
    places = (sum(part[-1, :, 0].tolist()) / len(measured) for part in parts)
    return [[_round(place), *map(_round, values)] for place, values in zip(places, spread, strict=True)]


def _measured(entries: Run, name: str, x: str) -> dict[int, tuple[float, float]]:
    places = ((e.get("step") or 0, e.get(x) if e.get("step") else 0.0, e.get(name)) for e in entries)
    return {step: (place, v) for step, place, v in places if _is_number(place) and _is_number(v)}


def curves(
    entries: Run, names: Iterable[str], points: int, x: str = "step", others: Sequence[Run] = ()
) -> dict[str, list[list[float]]]:
    return {name: curve(entries, name, points, x, others) for name in names}


def time_left(entries: Sequence[Entry], steps: int | None, minutes: Any) -> dict[str, Any] | None:
    """Of a run that goes on, at the pace of its last ten steps: ``steps`` left of ``training.steps``, or as many as fit
    into ``training.minutes`` if ``by`` says that those end first, ``pace`` (seconds of a step, evaluations included),
    ``of`` (how many steps that is from), ``seconds`` left at the end of the last step. None: no step is done yet."""
    done = [entry for entry in entries if entry.get("step")]
    if not done:
        return None
    last = done[-1]
    left, by = inf if steps is None else max(steps - last["step"], 0), "steps"
    if _is_number(minutes) and (seconds := last.get("time/step")) and _is_number(used := last.get("time/training")):
        fit = steps_that_fit(minutes, used, seconds)
        left, by = (fit, "minutes") if fit < left else (left, by)
    if left == inf:
        return None
    pace = float(np.mean([sum(_phases_of(entry)) for entry in done[-10:]]))
    return {"steps": left, "by": by, "pace": pace, "of": len(done[-10:]), "seconds": left * pace}


def marks(entries: Sequence[Entry], changes: Sequence[Change], x: str = "step") -> list[list[Any]]:
    """``[x, text]`` of each step from which on settings were others; of one that is not done yet nothing."""
    places = {entry["step"]: entry.get(x) for entry in entries}
    texts: dict[int, list[str]] = {}
    for change in changes:
        texts.setdefault(change.step, []).append(str(change))
    return [[places[step], "\n".join(said)] for step, said in texts.items() if _is_number(places.get(step))]


def phases(entries: Sequence[Entry], points: int) -> dict[str, Any]:
    """Seconds of each phase per step, as :func:`_stack` has them.

    ``other`` is what no phase has, such as writing samples and checkpoints.
    """
    steps = [entry for entry in entries if entry.get("step")]
    return _stack([*PHASES, "other"], [[entry["step"], *_phases_of(entry)] for entry in steps], points)


def ages(entries: Sequence[Entry], points: int) -> dict[str, Any]:
    """Groups trained on in each step by how many versions old they were, as :func:`_stack` has them."""
    prefix = "staleness/groups/"
    names = sorted({int(name.removeprefix(prefix)) for e in entries for name in e if name.startswith(prefix)})
    steps = [entry for entry in entries if names and _is_number(entry.get(f"{prefix}{names[0]}"))]
    rows = [[entry["step"], *(entry.get(f"{prefix}{age}") or 0 for age in names)] for entry in steps]
    return _stack([str(age) for age in names], rows, points)


def _stack(names: Sequence[str], steps: Sequence[Sequence[float]], points: int) -> dict[str, Any]:
    """Of ``[step, value of each name]``: series for the screen (means over neighbours) and totals over the run."""
    table = np.array(steps, np.float64).reshape(-1, len(names) + 1)
    parts = np.array_split(table, min(points, len(steps))) if steps else ()
    rows = [[_round(part[-1, 0]), *map(_round, part[:, 1:].mean(axis=0))] for part in parts]
    return {
        "names": list(names),
        "rows": rows,
        "totals": dict(zip(names, map(_round, table[:, 1:].sum(axis=0)), strict=True)),
    }


def overlap_told(entries: Sequence[Entry]) -> str:
    """What sampling ahead saved, or could save where sampling and updates took turns. Empty: no times are known."""

    def total(*names: str) -> float:
        return sum(float(e.get(name) or 0.0) for name in names for e in entries if e.get("step"))

    wall, both, waited, idle = map(total, ("overlap/wall", "overlap/seconds", "idle/learner", "idle/engine"))
    over = "Over all steps, evaluation left out,"
    if wall and all(e.get("overlap/won") is None for e in entries):
        told = f"{over} sampling ran beside the learner's work for {both / wall:.0%} of the time. No device of the "
        return f"{told}engine's own is known: compare time/step with that of a run with rollout.max_staleness=0."
    if wall:
        saved = both / (wall + both)
        told = f"{over} sampling beside the updates saved {saved:.0%} of the time that taking turns would have taken. "
        told += f"Of the rest, the learner waited for samples {waited / wall:.0%}; the engine idled {idle / wall:.0%}."
        return told + (" There is little to win where one of the two is most of a step." if saved < 0.05 else "")
    seconds, sampling = total("time/step"), total("time/rollout", "time/reward_wait")
    if not seconds:
        return ""
    told = f"Sampling and updates took turns. Sampling is {sampling / seconds:.0%} of a step: side by side, with "
    most = max(min(sampling, seconds - sampling), 0.0) / seconds
    return told + f"rollout.max_staleness=1 and a device of its own, it could save {most:.0%} at most."


def lanes(steps: Sequence[tuple[int, Sequence[Span]]], idle: float = 10.0) -> dict[str, list[list[float]]]:
    """By role the spans of some steps, ``[step, begin, end]`` in seconds since the first began. Where no role was at
    work for longer than ``idle`` seconds the run had been stopped: that time is left out."""
    found: dict[str, list[list[float]]] = {}
    ordered = sorted((begin, end, role, step) for step, spans in steps for role, begin, end in spans)
    since = ended = ordered[0][0] if ordered else 0.0
    for begin, end, role, step in ordered:
        since += begin - ended if begin - ended > idle else 0.0
        ended = max(ended, end)
        found.setdefault(role, []).append([step, _round(begin - since), _round(end - since)])
    return found


OF_THE_RUN = ("run.", "monitor.every")  # keys in which runs differ without being different experiments


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that do not have the same value in all these recipes (flat); one that is missing is as good as null."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def experiment(recipe: Mapping[str, Any], content: Any = None, changes: Sequence[Change] = ()) -> str:
    """What stands for a recipe without its seed, for the ``content`` of what it names and for changes under way: the
    same for runs that repeat an experiment. Empty: no recipe. Longer runs differ where the rate follows the length."""
    values = {k: v for k, v in flat(recipe) if v is not None and k != "seed" and not k.startswith(OF_THE_RUN)}
    length = () if "training.final_learning_rate" in values else ("training.steps", "training.minutes")
    changed = [(c.step, c.key, c.old, c.new) for c in changes if not c.key.startswith((*OF_THE_RUN, *length))]
    text = json.dumps([values, content, sorted(changed, key=str)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest() if values else ""


def final(entries: Sequence[Entry], name: str, over: int = 10) -> float | None:
    """The end of a curve: the last value of an evaluation or of the time so far, of other metrics the mean over the
    last ``over`` steps."""
    values = [entry[name] for entry in entries[-200:] if _is_number(entry.get(name))]
    if not values:
        return None
    return float(values[-1] if name.startswith(("eval/", "time/elapsed")) else np.mean(values[-over:]))


def alarm_history(
    entries: Sequence[Entry], raised: Iterable[tuple[int, Mapping[str, str], list[str]]]
) -> list[dict[str, Any]]:
    """Rules whose metrics there are, raised last first: ``name``, ``advice``, ``steps`` it was on in, ``seen`` last.
    ``raised``: as ``RunView.alarms`` has them."""
    found: dict[str, dict[str, Any]] = {
        rule.name: {"name": rule.name, "advice": rule.advice, "reads": list(rule.reads), "steps": [], "seen": None}
        for rule in RULES
        if any(entry.get(name) is not None for entry in entries for name in rule.reads)
    }
    for step, seen, _ in raised:
        for name, text in seen.items():
            found[name]["steps"].append(step)
            found[name]["seen"] = text
    return sorted(found.values(), key=lambda alarm: -(alarm["steps"] or [0])[-1])


def hacking_history(steps: Mapping[str, Sequence[int]], checked: bool) -> list[dict[str, Any]]:
    """The signs of reward hacking, told in the same way; ``steps`` as ``RunView.hacking`` has them. Without a held-out
    check (``checked``) lengths alone are watched."""
    return [
        {
            "name": "reward and length" if sign == "length" else f"reward hacking: {sign.replace('_', ' ')}",
            "advice": "see reward against length in the view Hacking, and read samples",
            "reads": [f"monitor/alarms/{sign}"],
            "steps": list(steps.get(sign, ())),
            "seen": seen,
        }
        for sign, seen in HACKING.items()
        if checked or sign == "length" or sign in steps
    ]


def _phases_of(entry: Entry) -> list[float]:
    seconds = {name: float(entry.get(f"time/{name}") or 0.0) for name in PHASES}
    wall = float(entry.get("time/wall") or 0.0)
    return [*seconds.values(), max(wall - sum(seconds.values()), 0.0)]


def _round(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
