"""From admitted groups to updates: the pure functions of ``algorithm/`` wired as the recipe says.

The functions themselves are tested in tests/algorithm; here, that each option reaches the right one, and in the right
order. The number of an entry is that of shared/cases/failures.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo.algorithm.advantage import advantages
from dapo.config import Config, build_config, nested
from dapo.model.loading import load_model
from dapo.orchestrator.batch_builder import BatchBuilder, Update
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.packing import PackedBatch
from dapo.training.policy import Policy
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
    }
    return build_config(nested(tree | {key.replace("__", "."): value for key, value in changes.items()}))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(load_model(random_model("qwen2")), 1.0, 200)


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


def prepare(
    policy: Policy, groups: Sequence[Group], **changes: Any
) -> tuple[BatchBuilder, list[Group], PackedBatch, list[Update]]:
    preparer = BatchBuilder(make_config(**changes), policy)
    batch = preparer.batch(groups, version=0)
    return preparer, list(batch.groups), batch.packed, list(preparer.updates(batch.packed))


def per_sample(update: Update, values: torch.Tensor) -> list[float]:
    """The value of each sample's first token."""
    firsts = np.cumsum(update.batch.response_lengths) - update.batch.response_lengths
    return values[torch.from_numpy(firsts)].tolist()


def only(values: torch.Tensor) -> float:
    """The one value that all of them have."""
    (value,) = set(values.tolist())
    return float(value)


def test_defaults_are_the_worked_values_token_by_token(policy: Policy) -> None:
    """Rewards [1, -1, -1, -1] give [1.5, -0.5, -0.5, -0.5] at each token; the divisor is the mini-batch's tokens."""
    _, shaped, _, updates = prepare(policy, GROUPS)
    first, second = updates
    assert per_sample(first, first.inputs.advantages) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert first.inputs.advantages.tolist() == pytest.approx([1.5] * 3 + [-0.5] * 7, abs=1e-5)
    assert first.inputs.weights.tolist() == pytest.approx([1 / 10] * 10)
    assert second.inputs.weights.tolist() == pytest.approx([1 / 10] * 10)
    assert first.inputs.proximal_logprobs is first.batch.behaviour_logprobs  # proximal: engine
    assert first.inputs.importance.tolist() == [1.0] * 10
    assert first.inputs.reference_logprobs is None
    assert [s.shaped_reward for s in shaped[0].samples] == [1, -1, -1, -1]


def test_fewer_groups_than_planned_give_ceil_updates_with_divisors_of_their_own(policy: Policy) -> None:
    groups = [make_group([1, -1, -1, -1], [n] * 4, draw=n) for n in (1, 2, 3, 4, 5)]
    _, _, _, updates = prepare(policy, groups, rollout__prompts_per_step=6, training__groups_per_update=2)
    assert [u.batch.num_groups for u in updates] == [2, 2, 1]
    assert [only(u.inputs.weights) for u in updates] == pytest.approx([1 / 12, 1 / 28, 1 / 20])


def test_each_epoch_holds_the_same_updates(policy: Policy) -> None:
    _, _, _, updates = prepare(policy, GROUPS, training__epochs_per_rollout=3)
    assert [u.batch.draws[0] for u in updates] == [0, 1, 0, 1, 0, 1]
    assert torch.equal(updates[0].inputs.advantages, updates[4].inputs.advantages)


def test_no_group_is_no_update(policy: Policy) -> None:
    for mode in ("off", "measure", "reward"):
        _, shaped, packed, updates = prepare(policy, [], algorithm__kl__mode=mode, algorithm__proximal="recompute")
        assert (shaped, packed.num_samples, updates) == ([], 0, [])


def test_the_length_penalty_is_that_of_the_recipe(policy: Policy) -> None:
    """Eq. 13 with L_max 10, L_cache 4: 6 tokens cost 0, 7 a quarter, 10 one; then times the factor."""
    group = make_group([1, 1, -1, -1], [6, 7, 10, 1])
    _, (shaped,), _, _ = prepare(policy, [group], algorithm__overlong_buffer__penalty_factor=2.0)
    assert [s.shaped_reward for s in shaped.samples] == [1, 0.5, -3, -1]
    _, (plain,), _, _ = prepare(policy, [group], algorithm__overlong_buffer__enable=False)
    assert [s.shaped_reward for s in plain.samples] == [1, 1, -1, -1]


def test_truncated_samples_count_in_the_statistics_and_not_in_the_loss(policy: Policy) -> None:
    """Entries 4 and 21: they leave loss and divisor, and the group's mean and deviation keep them."""
    group = make_group([1, -1, -1, -1], [3, 10, 4, 1], truncated=(1,))
    _, (shaped,), _, (update,) = prepare(
        policy, [group], algorithm__overlong_filtering=True, algorithm__overlong_buffer__enable=False
    )
    assert [s.advantage for s in shaped.samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert update.inputs.mask.tolist() == [True] * 3 + [False] * 10 + [True] * 5
    assert update.inputs.weights[update.inputs.mask].tolist() == pytest.approx([1 / 8] * 8)
    assert not update.inputs.weights[~update.inputs.mask].any()


def test_a_truncated_sample_gets_minus_one_under_the_hard_punishment(policy: Policy) -> None:
    group = make_group([1, 1, -1, -1], [3, 10, 4, 10], truncated=(1,))
    _, (shaped,), _, _ = prepare(
        policy, [group], algorithm__overlong_hard_punishment=True, algorithm__overlong_buffer__enable=False
    )
    assert [s.shaped_reward for s in shaped.samples] == [1, -1, -1, -1]


def test_a_constant_divisor_is_l_max_unless_said(policy: Policy) -> None:
    _, _, _, (update, _) = prepare(policy, GROUPS, algorithm__loss_agg_mode="constant")
    assert only(update.inputs.weights) == pytest.approx(1 / (L_MAX * 4))
    _, _, _, (update, _) = prepare(policy, GROUPS, algorithm__loss_agg_mode="constant", algorithm__loss_constant=1000)
    assert only(update.inputs.weights) == pytest.approx(1 / (1000 * 4))


def test_the_proximal_policy_is_recomputed_before_the_first_update(policy: Policy) -> None:
    _, _, packed, (update, _) = prepare(policy, GROUPS, algorithm__proximal="recompute")
    assert packed.proximal_logprobs is not None
    torch.testing.assert_close(packed.proximal_logprobs, policy.logprobs(packed))
    assert torch.equal(update.inputs.proximal_logprobs, packed.proximal_logprobs[:10])
    assert not torch.allclose(update.inputs.proximal_logprobs, update.inputs.behaviour_logprobs)


def test_a_recomputed_proximal_policy_measures_the_mismatch_with_the_engine(policy: Policy) -> None:
    """By hand: of the 6 tokens of this version the engine is 0.5 above the trainer at one, 0.25 below at another; those
    of the version before, which are 9 off, do not count."""
    group = make_group([1, -1, -1, -1], [3, 2, 4, 1])
    _, _, packed, _ = prepare(policy, [group], algorithm__proximal="recompute")
    off = np.array([0.5, 0, 0, 0, -0.25, *[-9] * 4, 0], np.float32)
    engine = np.split(policy.logprobs(packed).numpy() + off, [3, 5, 9])
    samples = [replace(s, logprobs=lp, versions=s.versions + 4) for s, lp in zip(group.samples, engine, strict=True)]
    samples[2] = replace(samples[2], versions=samples[2].versions - 1)
    preparer = BatchBuilder(make_config(algorithm__proximal="recompute"), policy)
    mismatch = preparer.batch([replace(group, samples=tuple(samples))], version=4).mismatch
    assert mismatch is not None and mismatch.tokens == 6
    assert mismatch.mean == pytest.approx(0.75 / 6, rel=1e-5) and mismatch.maximum == pytest.approx(0.5, rel=1e-5)
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(0.25) - 1 - 0.25)
    assert mismatch.k3 == pytest.approx(k3 / 6, rel=1e-4)


def test_tokens_masked_by_a_correction_leave_the_divisor(policy: Policy) -> None:
    _, _, packed, (update, _) = prepare(
        policy,
        GROUPS,
        algorithm__proximal="recompute",
        algorithm__correction__kind="mask",
        algorithm__correction__low=0.0,
        algorithm__correction__high=1.0,
    )
    assert packed.proximal_logprobs is not None
    ratio = (packed.proximal_logprobs - packed.behaviour_logprobs)[:10].exp()
    kept = ratio <= 1.0
    assert 0 < kept.sum() < 10
    assert torch.equal(update.inputs.mask, kept)
    assert update.inputs.weights[kept].tolist() == pytest.approx([1 / int(kept.sum())] * int(kept.sum()))


def test_truncated_importance_is_that_of_proximal_over_engine(policy: Policy) -> None:
    _, _, packed, (update, _) = prepare(
        policy,
        GROUPS,
        algorithm__proximal="recompute",
        algorithm__correction__kind="truncate",
        algorithm__correction__cap=0.8,
    )
    assert packed.proximal_logprobs is not None
    ratio = (packed.proximal_logprobs - packed.behaviour_logprobs)[:10].exp()
    torch.testing.assert_close(update.inputs.importance, ratio.clamp(max=0.8))


# --- KL to the initial policy -------------------------------------------------------------------------------------


def test_kl_is_taken_off_the_reward_before_the_group_is_normalised(policy: Policy) -> None:
    """By hand, with k1 = log pi - log pi_ref summed over each sample; a failed score in between shifts nothing."""
    groups = [make_group([1, None, -1, -1], [3, 9, 4, 6]), make_group([1, -1, None, 1], [2, 5, 9, 1], draw=1)]
    preparer, shaped, packed, updates = prepare(
        policy, groups, algorithm__kl__mode="reward", algorithm__kl__estimator="k1", algorithm__kl__coef=0.5
    )
    assert preparer.objective.kl_in_loss is False
    reference = policy.logprobs(packed)  # nothing was trained: the reference is the policy itself
    assert packed.reference_logprobs is not None and torch.equal(packed.reference_logprobs, reference)
    lengths = [s.length for g in groups for s in g.scored]
    kl = iter(sum(part) for part in (packed.behaviour_logprobs - reference).split(lengths))
    for group, update in zip(shaped, updates, strict=True):
        expected = [s.verdict.value - 0.5 * float(next(kl)) for s in group.scored]
        assert [s.shaped_reward for s in group.scored] == pytest.approx(expected, abs=1e-5)
        normalised = advantages(expected, kind="group-norm").tolist()
        assert per_sample(update, update.inputs.advantages) == pytest.approx(normalised, abs=1e-5)
    assert math.isnan(shaped[0].samples[1].shaped_reward) and math.isnan(shaped[1].samples[2].shaped_reward)
    assert [s.verdict.value for g in shaped for s in g.scored] == [1, -1, -1, 1, -1, 1]  # the raw rewards stay


def test_kl_in_the_reward_is_of_a_sample_that_is_not_in_the_loss_too(policy: Policy) -> None:
    """It counts in the group's mean and deviation, and its reward without its KL would shift all the others."""
    group = make_group([1, -1, -1, -1], [3, 10, 4, 1], truncated=(1,))
    _, (shaped,), packed, _ = prepare(
        policy,
        [group],
        algorithm__kl__mode="reward",
        algorithm__kl__estimator="k1",
        algorithm__kl__coef=0.5,
        algorithm__overlong_filtering=True,
        algorithm__overlong_buffer__enable=False,
    )
    assert [s.in_loss for s in shaped.samples] == [True, False, True, True]
    kl = [float(part.sum()) for part in (packed.behaviour_logprobs - policy.logprobs(packed)).split([3, 10, 4, 1])]
    assert abs(kl[1]) > 0.1
    expected = [reward - 0.5 * part for reward, part in zip([1, -1, -1, -1], kl, strict=True)]
    assert [s.shaped_reward for s in shaped.samples] == pytest.approx(expected, abs=1e-5)


def test_the_reference_is_the_policy_as_it_was_at_the_start() -> None:
    policy = Policy(load_model(random_model("qwen2")), 1.0, 200)
    preparer = BatchBuilder(make_config(algorithm__kl__mode="measure"), policy)
    packed = preparer.batch(GROUPS, version=0).packed
    before = policy.logprobs(packed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    packed = preparer.batch(GROUPS, version=0).packed
    assert packed.reference_logprobs is not None
    assert torch.equal(packed.reference_logprobs, before)
    assert not torch.allclose(policy.logprobs(packed), before)


@pytest.mark.parametrize(("mode", "in_loss"), [("measure", False), ("loss", True), ("reward", False)])
def test_kl_reaches_the_objective_as_the_recipe_says(policy: Policy, mode: str, in_loss: bool) -> None:
    preparer, _, _, updates = prepare(
        policy, GROUPS, algorithm__kl__mode=mode, algorithm__kl__coef=0.3, algorithm__kl__estimator="k2"
    )
    objective = preparer.objective
    assert (objective.kl_in_loss, objective.kl_coef, objective.kl_estimator) == (in_loss, 0.3, "k2")
    assert all(u.inputs.reference_logprobs is not None for u in updates)


def report(kl: float, tokens: float) -> Any:
    """What an update reports, as far as it matters here."""
    return SimpleNamespace(statistics={"reference_kl": (kl * tokens, tokens)})


def test_the_adaptive_coefficient_follows_its_formula(policy: Policy) -> None:
    """beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon, and a KL of NaN says nothing."""
    preparer, *_ = prepare(
        policy, [], algorithm__kl__mode="loss", algorithm__kl__coef=0.1, algorithm__kl__target=0.2,
        algorithm__kl__horizon=16,
    )  # fmt: skip
    batch = preparer.batch(GROUPS, version=0)  # 8 samples, so n / horizon is a half
    for kl, beta in ((0.22, 0.1 * 1.05), (9.0, 0.1 * 1.05 * 1.1), (math.nan, 0.1 * 1.05 * 1.1)):
        preparer.observe([report(kl, 3.0), report(kl, 1.0)], batch)
        assert preparer.kl_coef == pytest.approx(beta)
        assert preparer.objective.kl_coef == preparer.kl_coef
    assert preparer.state() == {"coef": preparer.kl_coef}


def test_the_adaptive_coefficient_sees_the_mean_over_tokens_and_not_over_updates(policy: Policy) -> None:
    """(0.22 x 3 + 0.18 x 1) / 4 = 0.21 is 5% above the target of 0.2; the mean of the two means would be on it."""
    preparer, *_ = prepare(
        policy, [], algorithm__kl__mode="loss", algorithm__kl__coef=0.1, algorithm__kl__target=0.2,
        algorithm__kl__horizon=16,
    )  # fmt: skip
    preparer.observe([report(0.22, 3.0), report(0.18, 1.0)], preparer.batch(GROUPS, version=0))
    assert preparer.kl_coef == pytest.approx(0.1 * (1 + 0.05 * 8 / 16))


def test_a_fixed_coefficient_stays(policy: Policy) -> None:
    preparer, *_ = prepare(policy, [], algorithm__kl__mode="loss", algorithm__kl__coef=0.1)
    preparer.observe([report(100.0, 1.0)], preparer.batch(GROUPS, version=0))
    assert preparer.kl_coef == 0.1
