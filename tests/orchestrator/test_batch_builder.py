"""From admitted groups to updates: the pure functions of ``algorithm/`` wired as the recipe says.

The functions themselves are tested in tests/algorithm; here, that each option reaches the right one, and in the right
order. The number of an entry is that of shared/cases/failures.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dapo.algorithm.advantage import advantages
from dapo.algorithm.objective import DapoObjective, TokenInputs
from dapo.config import Config, build_config, nested
from dapo.model.loading import load_model
from dapo.orchestrator.batch_builder import BatchBuilder, batch_mismatch
from dapo.records import Group, Prompt, Reward, Sample, TokenBatch
from dapo.training.learner import LocalLearner
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport
from helpers import random_model

L_MAX = 10


def make_config(**changes: Any) -> Config:
    tree = {
        "model.path": "tiny",
        "data.max_prompt_length": 4,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "rollout.max_response_length": L_MAX,
        "algorithm.overlong_buffer.len": 4,
        "training.groups_per_update": 1,
        "training.tokens_per_micro_batch": 200,
    }
    return build_config(nested(tree | {key.replace("__", "."): value for key, value in changes.items()}))


def trainer() -> Trainer:
    return Trainer(load_model(random_model("qwen2")), make_config().training, 1.0)


def make_group(
    rewards: Sequence[float | None], lengths: Sequence[int], *, draw: int = 0, truncated: Sequence[int] = ()
) -> Group:
    """Reward None: the score failed."""
    rng = np.random.default_rng(draw)
    samples = []
    for i, (value, length) in enumerate(zip(rewards, lengths, strict=True)):
        reward = Reward(None, 0.0, error="time-out") if value is None else Reward(value > 0, value)
        samples.append(
            Sample(
                request_id=draw,
                index=i,
                token_ids=rng.integers(2, 40, length).astype(np.int32),
                logprobs=rng.normal(-3.9, 0.3, length).astype(np.float32),
                versions=np.zeros(length, np.int32),
                finish_reason="length" if i in truncated else "stop",
                reward=reward,
            )
        )
    return Group(draw, Prompt(draw, "", (5, 6, 7)), tuple(samples))


GROUPS = [make_group([1, -1, -1, -1], [3, 2, 4, 1]), make_group([1, 1, -1, -1], [5, 1, 2, 2], draw=1)]


@dataclass
class Prepared:
    """What a recipe makes of some groups."""

    builder: BatchBuilder
    learner: LocalLearner
    groups: list[Group]
    batch: TokenBatch
    updates: list[tuple[TokenBatch, TokenInputs]]


def prepare(groups: Sequence[Group], made: Trainer | None = None, **changes: Any) -> Prepared:
    config = make_config(**changes)
    builder = BatchBuilder(config)
    learner = LocalLearner(made or trainer(), config, builder.kl)
    shaped, batch = builder.finish(groups, learner.annotated(builder.build(groups)))
    updates = [(mini, learner.inputs(mini)) for _, mini in builder.minibatches(batch)]
    return Prepared(builder, learner, shaped, batch, updates)


def per_sample(batch: TokenBatch, values: torch.Tensor) -> list[float]:
    """The value of each sample's first token."""
    firsts = np.cumsum(batch.response_lengths) - batch.response_lengths
    return values[torch.from_numpy(firsts)].tolist()


def only(values: torch.Tensor) -> float:
    """The one value that all of them have."""
    (value,) = set(values.tolist())
    return float(value)


def test_defaults_are_the_worked_values_token_by_token() -> None:
    """Rewards [1, -1, -1, -1] give [1.5, -0.5, -0.5, -0.5] at each token; the divisor is the mini-batch's tokens."""
    found = prepare(GROUPS)
    (first, inputs), (_, second) = found.updates
    assert per_sample(first, inputs.advantages) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert inputs.advantages.tolist() == pytest.approx([1.5] * 3 + [-0.5] * 7, abs=1e-5)
    assert inputs.weights.tolist() == second.weights.tolist() == pytest.approx([1 / 10] * 10)
    assert inputs.proximal_logprobs is inputs.behaviour_logprobs  # proximal: engine
    assert inputs.importance.tolist() == [1.0] * 10
    assert inputs.reference_logprobs is None
    assert [s.shaped_reward for s in found.groups[0].samples] == [1, -1, -1, -1]


def test_fewer_groups_than_planned_give_ceil_updates_with_divisors_of_their_own() -> None:
    groups = [make_group([1, -1, -1, -1], [n] * 4, draw=n) for n in (1, 2, 3, 4, 5)]
    found = prepare(groups, rollout__prompts_per_step=6, training__groups_per_update=2)
    assert [mini.num_groups for mini, _ in found.updates] == [2, 2, 1]
    assert [only(inputs.weights) for _, inputs in found.updates] == pytest.approx([1 / 12, 1 / 28, 1 / 20])


def test_each_epoch_holds_the_same_updates_and_a_resumed_step_the_rest() -> None:
    found = prepare(GROUPS, training__epochs_per_rollout=3)
    assert [mini.draws[0] for mini, _ in found.updates] == [0, 1, 0, 1, 0, 1]
    assert torch.equal(found.updates[0][1].advantages, found.updates[4][1].advantages)
    assert [(i, int(m.draws[0])) for i, m in found.builder.minibatches(found.batch, start=3)] == [
        (3, 1),
        (4, 0),
        (5, 1),
    ]


def test_no_group_is_no_update() -> None:
    for mode in ("off", "measure", "reward"):
        found = prepare([], algorithm__kl__mode=mode, algorithm__proximal="recompute")
        assert (found.groups, found.batch.num_samples, found.updates) == ([], 0, [])


def test_the_length_penalty_is_that_of_the_recipe() -> None:
    """Eq. 13 with L_max 10, L_cache 4: 6 tokens cost 0, 7 a quarter, 10 one; then times the factor."""
    group = make_group([1, 1, -1, -1], [6, 7, 10, 1])
    (shaped,) = prepare([group], algorithm__overlong_buffer__penalty_factor=2.0).groups
    assert [s.shaped_reward for s in shaped.samples] == [1, 0.5, -3, -1]
    (plain,) = prepare([group], algorithm__overlong_buffer__enable=False).groups
    assert [s.shaped_reward for s in plain.samples] == [1, 1, -1, -1]


def test_truncated_samples_count_in_the_statistics_and_not_in_the_loss() -> None:
    """Entries 4 and 21: they leave loss and divisor, and the group's mean and deviation keep them."""
    group = make_group([1, -1, -1, -1], [3, 10, 4, 1], truncated=(1,))
    found = prepare([group], algorithm__overlong_filtering=True, algorithm__overlong_buffer__enable=False)
    ((_, inputs),) = found.updates
    assert [s.advantage for s in found.groups[0].samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert inputs.mask.tolist() == [True] * 3 + [False] * 10 + [True] * 5
    assert inputs.weights[inputs.mask].tolist() == pytest.approx([1 / 8] * 8)
    assert not inputs.weights[~inputs.mask].any()


def test_a_truncated_sample_gets_minus_one_under_the_hard_punishment() -> None:
    group = make_group([1, 1, -1, -1], [3, 10, 4, 10], truncated=(1,))
    (shaped,) = prepare(
        [group], algorithm__overlong_hard_punishment=True, algorithm__overlong_buffer__enable=False
    ).groups
    assert [s.shaped_reward for s in shaped.samples] == [1, -1, -1, -1]


def test_a_constant_divisor_is_l_max_unless_said() -> None:
    (_, inputs), _ = prepare(GROUPS, algorithm__loss_agg_mode="constant").updates
    assert only(inputs.weights) == pytest.approx(1 / (L_MAX * 4))
    (_, inputs), _ = prepare(GROUPS, algorithm__loss_agg_mode="constant", algorithm__loss_constant=1000).updates
    assert only(inputs.weights) == pytest.approx(1 / (1000 * 4))


def test_the_proximal_policy_is_recomputed_before_the_first_update() -> None:
    made = trainer()
    found = prepare(GROUPS, made, algorithm__proximal="recompute")
    (_, inputs), _ = found.updates
    proximal = found.batch.columns["proximal"]
    np.testing.assert_allclose(proximal, made.policy.logprobs(found.batch).numpy())
    assert inputs.proximal_logprobs.tolist() == proximal[:10].tolist()
    assert not torch.allclose(inputs.proximal_logprobs, inputs.behaviour_logprobs)


def test_a_recomputed_proximal_policy_measures_the_mismatch_with_the_engine() -> None:
    """By hand: of the 6 tokens of this version the engine is 0.5 above the trainer at one, 0.25 below at another; those
    of the version before, which are 9 off, do not count."""
    group = make_group([1, -1, -1, -1], [3, 2, 4, 1])
    made = trainer()
    batch = prepare([group], made, algorithm__proximal="recompute").batch
    off = np.array([0.5, 0, 0, 0, -0.25, *[-9] * 4, 0], np.float32)
    engine = np.split(made.policy.logprobs(batch).numpy() + off, [3, 5, 9])
    samples = [replace(s, logprobs=lp, versions=s.versions + 4) for s, lp in zip(group.samples, engine, strict=True)]
    samples[2] = replace(samples[2], versions=samples[2].versions - 1)
    again = prepare([replace(group, samples=tuple(samples))], made, algorithm__proximal="recompute")
    mismatch = batch_mismatch(again.batch, version=4)
    assert mismatch is not None and mismatch.tokens == 6
    assert mismatch.mean == pytest.approx(0.75 / 6, rel=1e-5) and mismatch.maximum == pytest.approx(0.5, rel=1e-5)
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(0.25) - 1 - 0.25)
    assert mismatch.k3 == pytest.approx(k3 / 6, rel=1e-4)


def log_ratio(found: Prepared) -> torch.Tensor:
    """log pi_prox - log pi_engine of the first update's tokens."""
    return torch.from_numpy(found.batch.columns["proximal"] - found.batch.behaviour_logprobs)[:10]


def test_tokens_masked_by_a_correction_leave_the_divisor() -> None:
    found = prepare(
        GROUPS,
        algorithm__proximal="recompute",
        algorithm__correction__kind="mask",
        algorithm__correction__low=0.0,
        algorithm__correction__high=1.0,
    )
    (_, inputs), _ = found.updates
    kept = log_ratio(found).exp() <= 1.0
    assert 0 < kept.sum() < 10
    assert torch.equal(inputs.mask, kept)
    assert inputs.weights[kept].tolist() == pytest.approx([1 / int(kept.sum())] * int(kept.sum()))


def test_truncated_importance_is_that_of_proximal_over_engine() -> None:
    found = prepare(
        GROUPS, algorithm__proximal="recompute", algorithm__correction__kind="truncate", algorithm__correction__cap=0.8
    )
    (_, inputs), _ = found.updates
    torch.testing.assert_close(inputs.importance, log_ratio(found).exp().clamp(max=0.8))


# --- KL to the initial policy -------------------------------------------------------------------------------------


def test_kl_is_taken_off_the_reward_before_the_group_is_normalised() -> None:
    """By hand, with k1 = log pi - log pi_ref summed over each sample; a failed score in between shifts nothing."""
    groups = [make_group([1, None, -1, -1], [3, 9, 4, 6]), make_group([1, -1, None, 1], [2, 5, 9, 1], draw=1)]
    made = trainer()
    found = prepare(groups, made, algorithm__kl__mode="reward", algorithm__kl__estimator="k1", algorithm__kl__coef=0.5)
    assert cast(DapoObjective, found.learner.objective).kl_in_loss is False
    reference = made.policy.logprobs(found.batch)  # nothing was trained: the reference is the policy itself
    assert found.batch.columns["reference"].tolist() == reference.tolist()
    lengths = [s.length for g in groups for s in g.scored]
    kl = iter(sum(part) for part in torch.split(torch.from_numpy(found.batch.behaviour_logprobs) - reference, lengths))
    for group, (mini, inputs) in zip(found.groups, found.updates, strict=True):
        expected = [s.verdict.value - 0.5 * float(next(kl)) for s in group.scored]
        assert [s.shaped_reward for s in group.scored] == pytest.approx(expected, abs=1e-5)
        normalised = advantages(expected, kind="group-norm").tolist()
        assert per_sample(mini, inputs.advantages) == pytest.approx(normalised, abs=1e-5)
    shaped = found.groups
    assert math.isnan(shaped[0].samples[1].shaped_reward) and math.isnan(shaped[1].samples[2].shaped_reward)
    assert [s.verdict.value for g in shaped for s in g.scored] == [1, -1, -1, 1, -1, 1]  # the raw rewards stay


def test_kl_in_the_reward_is_of_a_sample_that_is_not_in_the_loss_too() -> None:
    """It counts in the group's mean and deviation, and its reward without its KL would shift all the others."""
    group = make_group([1, -1, -1, -1], [3, 10, 4, 1], truncated=(1,))
    made = trainer()
    found = prepare(
        [group],
        made,
        algorithm__kl__mode="reward",
        algorithm__kl__estimator="k1",
        algorithm__kl__coef=0.5,
        algorithm__overlong_filtering=True,
        algorithm__overlong_buffer__enable=False,
    )
    (shaped,) = found.groups
    assert [s.in_loss for s in shaped.samples] == [True, False, True, True]
    difference = found.batch.behaviour_logprobs - made.policy.logprobs(found.batch).numpy()
    kl = [float(part.sum()) for part in np.split(difference, [3, 13, 17])]
    assert abs(kl[1]) > 0.1
    expected = [reward - 0.5 * part for reward, part in zip([1, -1, -1, -1], kl, strict=True)]
    assert [s.shaped_reward for s in shaped.samples] == pytest.approx(expected, abs=1e-5)


def test_the_reference_is_the_policy_as_it_was_at_the_start() -> None:
    made = trainer()
    found = prepare(GROUPS, made, algorithm__kl__mode="measure")
    before = made.policy.logprobs(found.batch)
    with torch.no_grad():
        for parameter in made.policy.model.parameters():
            parameter.mul_(1.1)
    again = found.learner.annotated(found.builder.build(GROUPS))
    assert again.columns["reference"].tolist() == before.tolist()
    assert not torch.allclose(made.policy.logprobs(again), before)


@pytest.mark.parametrize(("mode", "in_loss"), [("measure", False), ("loss", True), ("reward", False)])
def test_kl_reaches_the_objective_as_the_recipe_says(mode: str, in_loss: bool) -> None:
    found = prepare(GROUPS, algorithm__kl__mode=mode, algorithm__kl__coef=0.3, algorithm__kl__estimator="k2")
    objective = cast(DapoObjective, found.learner.objective)
    assert (objective.kl_in_loss, objective.kl_coef, objective.kl_estimator) == (in_loss, 0.3, "k2")
    assert all(inputs.reference_logprobs is not None for _, inputs in found.updates)


def report(kl: float, tokens: float) -> Any:
    """What an update reports, as far as it matters here."""
    return SimpleNamespace(statistics={"reference_kl": (kl * tokens, tokens)})


ADAPTIVE = {
    "algorithm__kl__mode": "loss",
    "algorithm__kl__coef": 0.1,
    "algorithm__kl__target": 0.2,
    "algorithm__kl__horizon": 16,
}


def test_the_adaptive_coefficient_follows_its_formula() -> None:
    """beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon, and a KL of NaN says nothing."""
    found = prepare(GROUPS, **ADAPTIVE)  # 8 samples, so n / horizon is a half
    for kl, beta in ((0.22, 0.1 * 1.05), (9.0, 0.1 * 1.05 * 1.1), (math.nan, 0.1 * 1.05 * 1.1)):
        found.builder.observe([report(kl, 3.0), report(kl, 1.0)], found.batch)
        assert found.builder.kl.coef == pytest.approx(beta)
        assert cast(DapoObjective, found.learner.objective).kl_coef == found.builder.kl.coef
    assert found.builder.kl.state() == {"coef": found.builder.kl.coef}


def test_the_adaptive_coefficient_sees_the_mean_over_tokens_and_not_over_updates() -> None:
    """(0.22 x 3 + 0.18 x 1) / 4 = 0.21 is 5% above the target of 0.2; the mean of the two means would be on it."""
    found = prepare(GROUPS, **ADAPTIVE)
    found.builder.observe([report(0.22, 3.0), report(0.18, 1.0)], found.batch)
    assert found.builder.kl.coef == pytest.approx(0.1 * (1 + 0.05 * 8 / 16))


def test_a_fixed_coefficient_stays() -> None:
    found = prepare(GROUPS, algorithm__kl__mode="loss", algorithm__kl__coef=0.1)
    found.builder.observe([report(100.0, 1.0)], found.batch)
    assert found.builder.kl.coef == 0.1 and found.builder.kl.state() == {}


# --- the learner's door -------------------------------------------------------------------------------------------


@dataclass
class Step:
    reports: list[UpdateReport] = field(default_factory=list)


def test_an_update_is_made_once_however_often_it_is_asked_for_and_though_its_caller_is_cancelled() -> None:
    found = prepare(GROUPS)
    learner, step = found.learner, Step()
    (mini, _), (other, _) = found.updates

    async def ask() -> None:
        asked = asyncio.create_task(learner.update(0, 0, mini, step))
        await asyncio.sleep(0)  # it has begun
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert len(step.reports) == learner.trainer.updates == 1
        await learner.update(0, 0, mini, step)
        assert len(step.reports) == learner.trainer.updates == 1
        await learner.update(0, 1, other, step)
        assert len(step.reports) == learner.trainer.updates == 2
        with pytest.raises(ValueError, match="update 3 of a step of which 2 were made"):
            await learner.update(0, 3, other, step)

    asyncio.run(ask())
    asyncio.run(learner.close())


def test_a_learner_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    found, step = prepare(GROUPS), Step()
    learner, other = found.learner, prepare(GROUPS).learner
    minis = [mini for mini, _ in found.updates]

    async def go_on() -> None:
        await learner.update(0, 0, minis[0], step)
        (await learner.snapshot()).write(tmp_path, ())
        await other.load(tmp_path)
        await other.update(0, 1, minis[1], Step([*step.reports]))
        await learner.update(0, 1, minis[1], step)

    asyncio.run(go_on())
    weights = [torch.cat([t.flatten() for _, t in each.publish()[1]]) for each in (learner, other)]
    assert torch.equal(*weights) and learner.version == other.version == 1
    asyncio.run(learner.close())
    asyncio.run(other.close())


# --- PPO ----------------------------------------------------------------------------------------------------------


def with_values(batch: TokenBatch, values: np.ndarray[Any, Any]) -> TokenBatch:
    """Each state's value is also what the state before it leads to; behind the last token stands that token's."""
    last = np.cumsum(batch.response_lengths) - 1
    after = np.append(values[1:], 0)
    after[last] = values[last]
    return batch.with_columns(values=values, after=after)


@pytest.mark.parametrize(("bootstrap", "first", "limit"), [(False, 0.0, -1.0), (True, 0.0, 0.0), (True, 0.3, 0.3)])
def test_values_of_cut_responses_stay_within_their_rewards(bootstrap: bool, first: float, limit: float) -> None:
    """All are cut and punished, and a critic learns its returns exactly, again and again. Its value becomes the
    punishment; where the cut is bootstrapped there is no reward, and it stays what it was. Score and value together
    would take it down by one each time."""
    ppo = {"kind": "ppo", "overlong_buffer__enable": False, "critic__bootstrap": bootstrap, "critic__whiten": False}
    builder = BatchBuilder(make_config(**{f"algorithm__{key}": value for key, value in ppo.items()}))
    groups = [make_group([-1.0] * 4, [L_MAX] * 4, truncated=range(4))]
    batch, values = builder.build(groups), np.full(4 * L_MAX, first)
    for _ in range(60):
        values = builder.finish(groups, with_values(batch, values))[1].columns["returns"].astype(float)
    assert values == pytest.approx(limit, abs=1e-3)


def test_with_the_mean_of_the_others_as_its_critic_ppo_is_leave_one_out() -> None:
    """gamma and lambda 1: score less value, at every token, in responses of any length, cut or not."""
    groups = [
        make_group([1.0, 0.0, 0.0, 1.0], [3, 1, L_MAX, 5], truncated=[2]),
        make_group([-1.0, 1.0, 0.5, 0.0], [2, 2, 7, 4], draw=1),
    ]
    alike = {"algorithm__overlong_buffer__enable": False}
    plain = BatchBuilder(make_config(**alike, algorithm__advantage__kind="leave-one-out"))
    expected = plain.finish(groups, plain.build(groups))[1].columns["advantages"]
    ppo = {"algorithm__kind": "ppo", "algorithm__critic__lam": 1.0, "algorithm__critic__whiten": False}
    builder = BatchBuilder(make_config(**alike, **ppo))
    scores = np.array([[s.reward.value for s in group.samples if s.reward] for group in groups])
    others = (scores.sum(1, keepdims=True) - scores) / 3
    batch = builder.build(groups)
    found = builder.finish(groups, with_values(batch, np.repeat(others.ravel(), batch.response_lengths)))[1]
    assert found.columns["advantages"] == pytest.approx(expected, abs=1e-6)
    assert found.columns["returns"] == pytest.approx(np.repeat(scores.ravel(), batch.response_lengths), abs=1e-6)
