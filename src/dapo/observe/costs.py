"""What a run took, and what that makes for each point it gained. Numbers in, numbers out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dapo.observe.run_view import RunView
from dapo.util.files import lines_of, parse_json

Entry = Mapping[str, Any]

ENDS = 5
"""Steps at the start, and at the end, of a run whose means are compared where there was no evaluation; of a run of less
than twice as many it is the two halves."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What went from ``before`` to ``after``, and until which step. One point is ``point`` of it."""

    what: str
    before: float
    after: float
    step: int
    point: float = 1.0

    @property
    def points(self) -> float:
        return (self.after - self.before) / self.point

    def cost(self, spent: float | None) -> float | None:
        """Of one point; None: there is no gain, or nobody knows what was spent."""
        return spent / self.points if spent is not None and self.points > 0 else None


@dataclass(frozen=True, slots=True)
class Costs:
    """Up to and with some step: ``seconds`` of rollout steps (evaluation and writing files apart), ``gpus`` that the
    run had (None: it was not recorded), and response tokens."""

    seconds: float
    gpus: int | None
    tokens: int
    wasted: int

    @property
    def gpu_seconds(self) -> float | None:
        """GPUs times seconds, whether they were busy or not: that is what is paid for."""
        return None if self.gpus is None else self.gpus * self.seconds


def costs(run: RunView, until: int | None = None) -> Costs:
    entries = [e for e in run.metrics if until is None or e["step"] <= until]
    tokens, wasted = (int(total(entries, f"tokens/{name}")) for name in ("generated", "wasted"))
    return Costs(total(entries, "time/step"), gpus_of(run), tokens, wasted)


def total(entries: Sequence[Entry], name: str) -> float:
    return float(sum(e[name] for e in entries if e.get(name) is not None))


def gpus_of(run: RunView) -> int | None:
    """GPUs of the run: those that its resources were watched on, or none if it could not use any."""
    watched = _watched_gpus(run.folder.resources)
    if watched is not None:
        return watched
    runtime, packages = run.config.get("runtime"), run.environment.get("packages")
    on_cpu = isinstance(runtime, dict) and runtime.get("device") == "cpu"
    built_for_cpu = isinstance(packages, dict) and str(packages.get("torch")).endswith("+cpu")
    return 0 if on_cpu or built_for_cpu else None


def _watched_gpus(path: Path) -> int | None:
    """The most GPUs that each host had in a line, summed over the hosts; a spoilt line is left out."""
    hosts: dict[str, int] = {}
    if not path.is_file():
        return None
    with contextlib.suppress(ValueError):
        for line in lines_of(path):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                entry = parse_json(line)
                host = str(entry["host"])
                hosts[host] = max(hosts.get(host, 0), len(entry.get("gpu") or []))
    return sum(hosts.values()) if hosts else None


def gains(run: RunView) -> list[Gain]:
    """Of accuracy and reward: on held-out rows where there was an evaluation before and after, else in training."""
    found = []
    for name, metric, what, point in (
        ("accuracy", "accuracy", "accuracy, percentage points", 0.01),
        ("reward", "reward/mean", "reward, points of 1", 1.0),
    ):
        held_out = [pair for pair in _values(run.metrics, f"eval/{name}") if pair[0] >= run.comparable_from]
        trained = [pair for pair in _values(run.metrics, metric) if pair[0]]
        if len(held_out) > 1:
            found.append(Gain(f"held-out {what}", held_out[0][1], held_out[-1][1], held_out[-1][0], point))
        elif len(trained) > 1:
            n = min(ENDS, len(trained) // 2)
            first, last = (fmean(value for _, value in part) for part in (trained[:n], trained[-n:]))
            compared = f"means of the first {n} and the last {n} steps" if n > 1 else "the first and the last step"
            found.append(Gain(f"training {what}: {compared}", first, last, trained[-1][0], point))
    return found


def _values(entries: Sequence[Entry], name: str) -> list[tuple[int, float]]:
    return [(e["step"], e[name]) for e in entries if e.get(name) is not None]
