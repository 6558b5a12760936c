"""Dynamic sampling, shaping and advantages of a stored step against what the functions of training make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dapo.algorithm.admission import GroupVerdict, judge
from dapo.algorithm.objective import DapoObjective, TokenInputs, policy_ratio
from dapo.commands.replay.stored import StoredStep
from dapo.config import Config
from dapo.orchestrator.step_metrics import soft_penalty
from dapo.records import Group, Sample, TokenBatch
from dapo.training.learner import loss_weights
from dapo.training.micro_batch import micro_batch, select_tokens
from dapo.training.objective_protocol import Objective
from dapo.training.packing import pack
from dapo.training.policy import Policy
from dapo.util.files import plain

_VERDICTS = ("all_right", "all_wrong", "flat", "too_few_scored")
"""Statuses of groups that dynamic sampling did not want."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that does not come out as it was recorded. ``draw`` and ``index`` say of which sample, ``update`` of
    which update; None: it is of none. ``recorded`` and ``recomputed`` are the two values, or None where the words of
    ``what`` say all."""

    what: str
    recorded: Any = None
    recomputed: Any = None
    draw: int | None = None
    index: int | None = None
    update: int | None = None

    def as_json(self) -> dict[str, Any]:
        place = {"draw": self.draw, "index": self.index, "update": self.update}
        known = {name: value for name, value in place.items() if value is not None}
        return {"what": self.what, **known, "recorded": self.recorded, "recomputed": self.recomputed}


def faults(found: Iterable[tuple[int, int, str]], prefix: str = "") -> Iterator[Difference]:
    """Of samples, by draw and index, that were changed after they were written."""
    yield from (Difference(f"{prefix}{fault}", draw=draw, index=index) for draw, index, fault in found)


def compare_groups(recorded: Sequence[Group], again: Sequence[Group]) -> Iterator[Difference]:
    """Where shaped reward, advantage or part in the loss is not, to the last bit, what was recorded."""
    for old_group, new_group in zip(recorded, again, strict=True):
        for old, new in zip(old_group.samples, new_group.samples, strict=True):
            place = {"draw": old_group.draw, "index": old.index}
            for what, was, now in (
                ("shaped reward", old.shaped_reward, new.shaped_reward),
                ("advantage", old.advantage, new.advantage),
                ("part in the loss", old.in_loss, new.in_loss),
            ):
                if not same(was, now):
                    yield Difference(what, plain(was), plain(now), **place)


def compare_decisions(stored: StoredStep, config: Config) -> Iterator[Difference]:
    """Where dynamic sampling, with the recorded rewards, decides otherwise than was recorded."""
    filters = config.algorithm.filter_groups
    if not filters.enable:
        return
    for group, status in stored.groups:
        is_open = any(sample.verdict.correct is None for sample in group.scored)
        verdict = judge(group, metric="score" if is_open else filters.metric, tolerance=filters.tolerance)
        expected = status if status in _VERDICTS else GroupVerdict.MIXED
        if verdict != expected:
            yield Difference("decision of dynamic sampling", str(expected), str(verdict), draw=group.draw)


def compare_versions(stored: StoredStep, version: int, max_staleness: int) -> Iterator[Difference]:
    """Where tokens that were trained on are of a policy that training could not have had them from.
    ``max_staleness``: versions that a token may be older."""
    oldest = version - max_staleness
    allowed = str(version) if oldest == version else f"{oldest} to {version}"
    for group in stored.trained:
        for sample in group.samples:
            for odd in (v for v in sample.version_range or () if not oldest <= v <= version):
                yield Difference("policy version of a token", odd, allowed, draw=group.draw, index=sample.index)
                break


def sample_as_json(draw: int, sample: Sample, config: Config) -> dict[str, Any]:
    return {
        "draw": draw,
        "index": sample.index,
        "length": sample.length,
        "reward": sample.verdict.value if sample.scored else None,
        "overlong_penalty": _penalty(sample, config) if sample.scored else None,
        "shaped_reward": plain(sample.shaped_reward),
        "advantage": plain(sample.advantage),
        "in_loss": sample.in_loss,
    }


def _penalty(sample: Sample, config: Config) -> float:
    if config.algorithm.overlong_hard_punishment:
        return -1.0 - sample.verdict.value if sample.truncated else 0.0
    return soft_penalty(sample, config)


def planned_updates(groups: Sequence[Group], config: Config) -> list[dict[str, Any]]:
    """What the updates of the step consist of, as far as it follows without weights: groups, samples, tokens in the
    loss and the range of a loss token's weight. A correction that masks tokens may still take some out of the loss.
    ``groups``: that were trained on, with advantages and tokens, or zeros in place of these."""
    # of prompts nothing here depends on the tokens, where these are not known
    packed = pack([g if g.prompt.token_ids else replace(g, prompt=replace(g.prompt, token_ids=(0,))) for g in groups])
    found: list[dict[str, Any]] = []
    for _ in range(config.training.epochs_per_rollout):
        for batch in packed.minibatches(config.training.groups_per_update):
            mask = torch.from_numpy(batch.mask)
            used = loss_weights(batch, config.algorithm, config.rollout.max_response_length, mask)[mask]
            found.append(
                {
                    "update": len(found),
                    "draws": list(dict.fromkeys(batch.draws.tolist())),
                    "samples": batch.num_samples,
                    "response_tokens": batch.num_response_tokens,
                    "loss_tokens": int(batch.mask.sum()),
                    "token_weight": [float(used.min()), float(used.max())] if len(used) else [0.0, 0.0],
                }
            )
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two recorded values are equal, to the bit; NaN, and what JSON makes of it, equals itself."""
    return bool(one == other) or all(value is None or value != value for value in (one, other))


def reports_differ(
    recorded: Mapping[str, Any], made: Mapping[str, Any], tolerance: float, update: int
) -> Iterator[Difference]:
    """Where numbers of an update are not what was recorded.
    ``recorded``: by name; only names in both are compared. ``tolerance``: relative; 0: to the bit."""
    for name, now in made.items():
        was = recorded.get(name)
        if name in recorded and not _close(was, now, tolerance):
            yield Difference(name, was, plain(now), update=update)


def _close(was: Any, now: Any, tolerance: float) -> bool:
    if same(was, plain(now)) or not tolerance:
        return same(was, plain(now))
    numbers = isinstance(was, int | float) and isinstance(now, int | float)
    return numbers and math.isclose(was, now, rel_tol=tolerance, abs_tol=tolerance / 100)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer step: the mini-batch and the objective's inputs for its R response tokens."""

    batch: TokenBatch
    inputs: TokenInputs


def stored_tokens(sample: Sample, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    return [
        {"token": int(token), "text": decode(int(token)), "version": int(version), "engine_logprob": float(logprob)}
        for token, logprob, version in zip(sample.token_ids, sample.logprobs, sample.versions, strict=True)
    ]


@torch.no_grad()
def traced_tokens(policy: Policy, update: Update, objective: Objective, number: int) -> list[dict[str, Any]]:
    """What the objective makes of each token of a sample: ``trainer_logprob``, ``ratio`` (to the proximal policy),
    ``advantage``, ``importance``, ``in_loss``, ``clip`` (``low``, ``high``, ``dual`` or None), ``entropy`` in nats and
    ``loss``, its contribution to the loss of the update. Of an objective of the user's there is neither ``clip`` nor
    ``loss``.

    Args:
        policy: with the weights before the update.
        number: of the sample in the update's batch.
    """
    part = micro_batch(update.batch, np.array([number]), policy.device)
    inputs = select_tokens(update.inputs, part.index)
    if not len(part.targets):
        return []
    logprobs, entropy = policy.evaluate(part)
    inputs = inputs.resolved(logprobs)
    compared = logprobs, inputs.proximal_logprobs
    if isinstance(objective, DapoObjective):
        compared = objective.compared(logprobs, inputs)
    columns = {
        "trainer_logprob": logprobs,
        "ratio": policy_ratio(*compared),
        "advantage": inputs.advantages,
        "importance": inputs.importance,
        "in_loss": inputs.mask,
        "entropy": entropy,
    }
    if isinstance(objective, DapoObjective):
        known = inputs.selected()
        columns["loss"] = known.weights * objective.token_losses(torch.where(inputs.mask, logprobs, 0), known)
    lists = {name: [plain(value) for value in column.tolist()] for name, column in columns.items()}
    rows = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return [{**row, "clip": _clip(row, objective)} if isinstance(objective, DapoObjective) else row for row in rows]


def _clip(row: dict[str, Any], objective: DapoObjective) -> str | None:
    """On which side a token is clipped, so that it has no gradient; as the objective counts it."""
    ratio, advantage = row["ratio"], row["advantage"]
    if not row["in_loss"] or ratio is None or advantage is None:
        return None
    both = objective.clips_both_ways
    if (both or advantage > 0) and ratio > 1 + objective.clip_ratio_high:
        return "high"
    if (both or advantage < 0) and ratio < 1 - objective.clip_ratio_low:
        return "low"
    c = None if both else objective.clip_ratio_c
    return "dual" if advantage < 0 and c is not None and ratio > c else None
