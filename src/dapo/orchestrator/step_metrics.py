"""The metrics of one rollout step, by the names of ``observe/metrics.py``, from what the roles report of it.

Rates are token- or sample-weighted over the whole step, never means of means.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev

from dapo.algorithm.shaping import overlong_penalty
from dapo.config import Config
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.records import Group, Sample
from dapo.training.update_report import CRITIC_ONLY, Mismatch, UpdateReport
from dapo.util.spans import Span, covered

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

_FILTERED = ("all_right", "all_wrong", "flat", "too_few_scored")
"""What becomes of a group that there is nothing to learn from."""

WATCHED = (
    *("response_length/mean", "response_length/max", "response_length/truncated", "reward/mean", "accuracy"),
    *("entropy", "probability/mean", "clip/low", "clip/high", "clip/high_probability"),
    *("groups/share_all_right", "groups/share_all_wrong", "grad_norm", "staleness/mean"),
    *("mismatch/mean", "mismatch/max", "mismatch/k3", "mismatch/tail"),
)
"""What the paper's section 4.3 watches: in every step; None where there is no number, as in a step without update."""


def step_metrics(
    rollout: RolloutBatch,
    trained: Sequence[Group],
    reports: Sequence[UpdateReport],
    mismatch: Mismatch,
    times: Mapping[str, float],
    config: Config,
) -> dict[str, float | None]:
    """Metrics of a step. What there is no number for is left out, or None if it is in :data:`WATCHED`.

    ``trained``: the groups of ``rollout`` after shaping, with advantages. ``times``: seconds by role: rollout (with the
    wait for rewards), prepare, update, sync, evaluation, writing (of the step before), rest.
    """
    drawn = [s for g in rollout.sampled for s in g.samples]
    nothing: dict[str, float | None] = dict.fromkeys(WATCHED)
    return (
        nothing
        | _lengths(drawn, trained)
        | _rewards(drawn)
        | _trained(trained, config)
        | _groups(rollout)
        | (_ahead(rollout, config.rollout.max_staleness) if config.rollout.max_staleness else {})
        | _updates(reports)
        | mismatch_metrics(mismatch)
        | _speed(rollout, reports, times)
    )


def step_warnings(rollout: RolloutBatch, reports: Sequence[UpdateReport]) -> Iterator[str]:
    if not rollout.groups:
        stats = rollout.stats
        yield (
            f"nothing to train on: of {stats.drawn} prompts {stats.all_wrong} were all wrong, {stats.all_right} all "
            f"right, {stats.flat} without spread in the reward; the weights stay"
        )
    errors = Counter(s.reward.error for g in rollout.sampled for s in g.samples if s.reward and s.reward.error)
    if errors:
        (error, _), *_ = errors.most_common(1)
        yield f"{rollout.stats.failed_scores} of {rollout.stats.scores} scores failed, such as: {error}"
    for report in reports:
        if report.skipped not in (None, CRITIC_ONLY):
            yield f"an update was skipped: {report.skipped}"
        if report.statistics.get("critic/skipped", (0.0, 0.0))[0]:
            yield "an update of the critic was skipped, as a number was not finite; faults/critic says why"


def _lengths(samples: Sequence[Sample], trained: Sequence[Group]) -> dict[str, float]:
    found: dict[str, float] = {}
    if samples:
        found = {
            "response_length/mean": fmean(s.length for s in samples),
            "response_length/max": max(s.length for s in samples),
            "response_length/truncated": fmean(s.truncated for s in samples),
        }
    kept = [s.length for g in trained for s in g.samples]
    return found | ({"response_length/kept_mean": fmean(kept)} if kept else {})


def _rewards(samples: Sequence[Sample]) -> dict[str, float]:
    scored = [s for s in samples if s.scored]
    if not scored:
        return {}
    verdicts = [s.verdict for s in scored]
    found = {"reward/mean": fmean(v.value for v in verdicts), "reward/std": pstdev(v.value for v in verdicts)}
    judged = [v.correct for v in verdicts if v.correct is not None]
    if judged:
        found["accuracy"] = fmean(judged)
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            parts[name].append(value)
    if "answer_found" in parts:
        found["reward/no_answer"] = 1 - fmean(parts.pop("answer_found"))
    return found | {f"reward/part/{_path_element(name)}": fmean(values) for name, values in parts.items()}


def _trained(groups: Sequence[Group], config: Config) -> dict[str, float]:
    kept = [s for g in groups for s in g.scored]
    if not kept:
        return {}
    tokens = [s.loss_tokens for s in kept]
    hard = config.algorithm.overlong_hard_punishment
    stakes = sum(abs(s.advantage) * n for s, n in zip(kept, tokens, strict=True))
    return {
        "reward/shaped_mean": fmean(s.shaped_reward for s in kept),
        "reward/overlong": fmean(soft_penalty(s, config) < 0 or (hard and s.truncated) for s in kept),
        "advantage/mean_abs": stakes / max(sum(tokens), 1),
    }


def soft_penalty(sample: Sample, config: Config) -> float:
    """What its length took off the reward. (Not told from the shaped reward, which may have a KL inside.)"""
    buffer, longest = config.algorithm.overlong_buffer, config.rollout.max_response_length
    how = {"max_response_length": longest, "buffer_len": buffer.len}
    return overlong_penalty(sample.length, **how, penalty_factor=buffer.penalty_factor) if buffer.enable else 0.0


def _path_element(name: str) -> str:
    """A part's name as one path element: a user may call a part anything."""
    return "_".join(name.replace("/", "_").split()) or "_"


def _groups(rollout: RolloutBatch) -> dict[str, float]:
    stats = rollout.stats
    judged = stats.all_right + stats.all_wrong + stats.flat + stats.mixed
    names = "drawn kept mixed all_right all_wrong flat surplus carried stale cancelled rounds keep_rate"
    found: dict[str, float] = {f"groups/{name}": getattr(stats, name) for name in names.split()} | {
        "groups/unscored": stats.too_few_scored,
        "staleness/mean": stats.staleness_mean,
        "staleness/max": stats.staleness_max,
        "tokens/generated": stats.tokens,
        "tokens/wasted": stats.wasted_tokens,
        "tokens/filtered": sum(s.length for g, status in rollout.rejected if status in _FILTERED for s in g.samples),
    }
    if stats.kept:
        found["groups/draws_per_kept"] = stats.drawn / stats.kept
    if stats.scores:
        found["reward/errors"] = stats.failed_scores / stats.scores
    if judged:
        found["groups/share_all_right"] = stats.all_right / judged
        found["groups/share_all_wrong"] = stats.all_wrong / judged
    return found


def _ahead(rollout: RolloutBatch, bound: int) -> dict[str, float]:
    """What became of draws that outlive their step, with ``max_staleness`` of ``bound``."""
    stats = rollout.stats  # no group is older than the run
    ages = dict.fromkeys(range(min(bound, rollout.step) + 1), 0) | dict(enumerate(stats.ages))
    return {
        "groups/unfinished": stats.unfinished,
        "samples/continued": stats.continued,
        "samples/restarted": stats.restarted,
        **{f"staleness/groups/{age}": count for age, count in ages.items()},
        **{f"draws/{fate}": count for fate, count in stats.totals.items()},
    }


def overlap_metrics(
    rollout: RolloutBatch, spans: Sequence[Span], earlier: Sequence[Span], parked: bool, apart: bool
) -> dict[str, float]:
    """Sampling and the learner's work side by side, between the handing out of the batch before and that of this one.

    Spans that cross either border count as far as they lie inside, and evaluations are left out. Taking turns, the same
    work would take ``overlap/seconds`` longer than ``overlap/wall``; the share of that time saved is told where engine
    and learner are ``apart``: on the same cores each is slower beside the other, so that more may be lost than won.

    ``spans``: of the step, as far as the loop makes them; ``earlier``: those of the step before, empty if another
    process made it. ``parked``: the engine is, during updates.
    """
    waits, waits_before = ([s for s in some if s[0] == "rollout"] for some in (spans, earlier))
    if not waits:
        return {}
    begin, end = waits_before[-1][2] if waits_before else waits[-1][1], waits[-1][2]
    updating = [s for s in earlier if s[0] in ("prepare", "update", "sync")] if parked else []
    asleep = [("asleep", min(s[1] for s in updating), max(s[2] for s in updating))] if updating else []

    def seconds(*roles: str) -> float:
        return covered((s for s in (*earlier, *spans, *rollout.spans, *asleep) if s[0] in roles), begin, end)

    both = seconds("sampling", "rollout", "evaluation") - seconds("rollout", "evaluation")
    wall = end - begin - seconds("evaluation")
    found = {
        "overlap/wall": wall,
        "overlap/seconds": both,
        "idle/learner": seconds("rollout"),
        "idle/engine": end - begin - seconds("sampling", "evaluation", "asleep"),
    }
    return found | ({"overlap/won": both / (wall + both)} if apart and wall else {})


def _updates(reports: Sequence[UpdateReport]) -> dict[str, float]:
    done = [r for r in reports if r.skipped is None]
    found: dict[str, float] = {
        "updates": len(done),
        "updates/skipped": sum(r.skipped not in (None, CRITIC_ONLY) for r in reports),
        "tokens/loss": sum(r.loss_tokens for r in done),
        "tokens/trained": sum(r.tokens for r in reports),
        "tokens/computed": sum(r.computed_tokens for r in reports),
    }
    if done:
        found |= {
            "loss": fmean(r.loss for r in done),
            "grad_norm": fmean(r.grad_norm for r in done),
            "grad_norm/max": max(r.grad_norm for r in done),
        }
    critic = {key: statistic(reports, key) for r in reports for key in r.statistics if key.startswith("critic/")}
    keys = dict.fromkeys([*_OBJECTIVE_NAMES, *(key for report in done for key in report.statistics)])
    counted = [key for key in keys if any(r.statistics.get(key, (0.0, 0.0))[1] for r in done)]
    return found | {_OBJECTIVE_NAMES.get(key, key): statistic(done, key) for key in counted} | critic


def statistic(reports: Sequence[UpdateReport], key: str) -> float:
    """Mean of a statistic of the objective over all tokens of all updates; NaN if nothing was counted."""
    pairs = [r.statistics[key] for r in reports if key in r.statistics]
    count = sum(count for _, count in pairs)
    return sum(total for total, _ in pairs) / count if count else math.nan


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Engine against trainer, if there were samples of the current version to compare."""
    if not mismatch.tokens:
        return {}
    sizes = {"mismatch/mean": mismatch.mean, "mismatch/max": mismatch.maximum, "mismatch/k3": mismatch.k3}
    return sizes | {"mismatch/tail": mismatch.tail / mismatch.tokens}


def step_seconds(times: Mapping[str, float]) -> float:
    """Of a step, less evaluation and writing: what ``training.minutes`` counts. ``times``: seconds by role."""
    return sum(seconds for role, seconds in times.items() if role not in ("evaluation", "writing"))


def phases(rollout: RolloutBatch, reports: Sequence[UpdateReport], times: Mapping[str, float]) -> dict[str, float]:
    """Where the seconds of a step went: the spans of its roles, cut so finely as is known, with the same sum."""
    wait = min(rollout.stats.reward_wait_s, times.get("rollout", 0.0))
    updates = {
        "forward": sum(r.seconds_forward for r in reports),
        "backward": sum(r.seconds_backward for r in reports),
        "optimizer": sum(r.seconds_optimizer for r in reports),
    }
    between = times.get("update", 0.0) - sum(updates.values())
    cut = {"rollout": times.get("rollout", 0.0) - wait, "reward_wait": wait, **updates}
    others = {role: seconds for role, seconds in times.items() if role not in ("rollout", "update", "writing")}
    return cut | others | {"rest": times.get("rest", 0.0) + times.get("writing", 0.0) + between}


def _speed(rollout: RolloutBatch, reports: Sequence[UpdateReport], times: Mapping[str, float]) -> dict[str, float]:
    total = step_seconds(times)
    found = {f"time/{phase}": seconds for phase, seconds in phases(rollout, reports, times).items()}
    found |= {"time/wall": sum(found.values()), "time/update": times.get("update", 0.0), "time/step": total}
    if sampling := max(found.get("time/rollout", 0.0), rollout.seconds_sampling):
        found["tokens_per_second/rollout"] = rollout.stats.window_tokens / sampling
    if times.get("update"):
        found["tokens_per_second/update"] = sum(r.tokens for r in reports) / times["update"]
    if total:
        found["tokens_per_second/total"] = rollout.stats.tokens / total
        found["samples_per_second"] = sum(len(g.samples) for g in rollout.groups) / total
    return found
