"""The metrics of one rollout step, by the names of ``observe/metrics.py``, from what the roles report of it.

Rates are token- or sample-weighted over the whole step, never means of means.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from dapo.buffer import Fill
from dapo.records import Group, Sample
from dapo.training.mismatch import Mismatch
from dapo.training.trainer import UpdateReport

_OBJECTIVE_NAMES = {
    "entropy": "entropy",
    "probability": "probability/mean",
    "clip_low": "clip/low",
    "clip_high": "clip/high",
    "clip_dual": "clip/dual",
    "clip_up_probability": "clip/high_probability",
    "ratio": "ratio/mean",
    "proximal_kl": "kl/proximal",
    "importance": "correction/mean",
    "reference_kl": "kl/reference",
}


def step_metrics(
    fill: Fill, trained: Sequence[Group], reports: Sequence[UpdateReport], times: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of a step; what there is no number for is left out.

    Args:
        fill: as the buffer returned it.
        trained: its groups after shaping, with advantages.
        reports: of the optimizer updates.
        times: seconds by phase: rollout, prepare, update, sync.
    """
    drawn = [s for g in fill.groups for s in g.samples] + [s for g, _ in fill.rejected for s in g.samples]
    return (
        _lengths(drawn, trained)
        | _rewards(drawn, trained)
        | _groups(fill)
        | _updates(reports)
        | mismatch_metrics(sum((r.mismatch for r in reports), Mismatch()))
        | _speed(fill, reports, times)
    )


def _lengths(samples: Sequence[Sample], trained: Sequence[Group]) -> dict[str, float]:
    if not samples:
        return {}
    found = {
        "response_length/mean": fmean(s.length for s in samples),
        "response_length/max": max(s.length for s in samples),
        "response_length/truncated": fmean(s.truncated for s in samples),
    }
    kept = [s.length for g in trained for s in g.samples]
    return found | ({"response_length/kept_mean": fmean(kept)} if kept else {})


def _rewards(samples: Sequence[Sample], trained: Sequence[Group]) -> dict[str, float]:
    scored = [s for s in samples if s.scored]
    if not scored:
        return {}
    verdicts = [s.verdict for s in scored]
    found = {
        "reward/mean": fmean(v.value for v in verdicts),
        "reward/std": pstdev(v.value for v in verdicts),
        "reward/errors": 1 - len(scored) / len(samples),
    }
    if all(v.correct is not None for v in verdicts):
        found["accuracy"] = fmean(bool(v.correct) for v in verdicts)
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            parts[name].append(value)
    if "answer_found" in parts:
        found["reward/no_answer"] = 1 - fmean(parts.pop("answer_found"))
    found |= {f"reward/part/{_path_element(name)}": fmean(values) for name, values in parts.items()}
    kept = [s for g in trained for s in g.scored]
    if kept:
        found["reward/shaped_mean"] = fmean(s.shaped_reward for s in kept)
        found["advantage/mean_abs"] = _token_mean((abs(s.advantage), s.length) for s in kept if s.in_loss)
        found["reward/overlong"] = fmean(s.shaped_reward < s.verdict.value for s in kept)
    return found


def _path_element(name: str) -> str:
    """A part's name as one path element: a user may call a part anything."""
    return "_".join(name.replace("/", "_").split()) or "_"


def _token_mean(values: Iterable[tuple[float, int]]) -> float:
    total, tokens = 0.0, 0
    for value, length in values:
        total, tokens = total + value * length, tokens + length
    return total / tokens if tokens else 0.0


def _groups(fill: Fill) -> dict[str, float]:
    stats = fill.stats
    judged = stats.all_right + stats.all_wrong + stats.flat + stats.mixed
    found: dict[str, float] = {
        "groups/drawn": stats.drawn,
        "groups/kept": stats.kept,
        "groups/mixed": stats.mixed,
        "groups/all_right": stats.all_right,
        "groups/all_wrong": stats.all_wrong,
        "groups/flat": stats.flat,
        "groups/unscored": stats.too_few_scored,
        "groups/surplus": stats.surplus,
        "groups/carried": stats.carried,
        "groups/stale": stats.stale,
        "groups/rounds": stats.rounds,
        "groups/keep_rate": stats.keep_rate,
        "staleness/mean": stats.staleness_mean,
        "staleness/max": stats.staleness_max,
        "tokens/generated": stats.tokens,
    }
    if judged:
        found["groups/share_all_right"] = stats.all_right / judged
        found["groups/share_all_wrong"] = stats.all_wrong / judged
    return found


def _updates(reports: Sequence[UpdateReport]) -> dict[str, float]:
    done = [r for r in reports if r.skipped is None]
    found: dict[str, float] = {
        "updates": len(done),
        "updates/skipped": len(reports) - len(done),
        "tokens/loss": sum(r.loss_tokens for r in reports),
    }
    if done:
        found |= {
            "loss": fmean(r.loss for r in done),
            "grad_norm": fmean(r.grad_norm for r in done),
            "grad_norm/max": max(r.grad_norm for r in done),
        }
    return found | {name: statistic(reports, key) for key, name in _OBJECTIVE_NAMES.items() if _has(reports, key)}


def _has(reports: Sequence[UpdateReport], key: str) -> bool:
    return any(r.statistics.get(key, (0.0, 0.0))[1] for r in reports)


def statistic(reports: Sequence[UpdateReport], key: str) -> float:
    """Mean of a statistic of the objective over all tokens of all updates; NaN if nothing was counted."""
    pairs = [r.statistics[key] for r in reports if key in r.statistics]
    count = sum(count for _, count in pairs)
    return sum(total for total, _ in pairs) / count if count else math.nan


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Engine against trainer, if there were tokens of the current version to compare."""
    if not mismatch.tokens:
        return {}
    return {"mismatch/mean": mismatch.mean, "mismatch/max": mismatch.maximum, "mismatch/k3": mismatch.k3}


def _speed(fill: Fill, reports: Sequence[UpdateReport], times: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds for phase, seconds in times.items() if phase != "evaluation")
    found = {f"time/{phase}": seconds for phase, seconds in times.items()}
    found |= {"time/step": total, "time/reward_wait": fill.stats.reward_wait_s}
    if times.get("rollout"):
        found["tokens_per_second/rollout"] = fill.stats.tokens / times["rollout"]
    if times.get("update"):
        found["tokens_per_second/update"] = sum(r.tokens for r in reports) / times["update"]
    if total:
        found["tokens_per_second/total"] = fill.stats.tokens / total
        found["samples_per_second"] = sum(len(g.samples) for g in fill.groups) / total
    return found
