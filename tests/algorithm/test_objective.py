"""The clipped token-level loss (Eq. 8, 10, 12). The number of an entry is that of shared/cases/failures.md."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from algorithm_support import (
    MODES,
    column,
    inputs_of,
    plain_objective,
    plain_weight,
    properties,
    random_tokens,
    weights_of,
)
from hypothesis import given
from hypothesis import strategies as st

OPTIONS = {"low": 0.2, "high": 0.28, "c": 10.0}


def one_token(algo, ratio, advantage, importance=1.0, **changes):
    """Loss of a token with this ratio, and the derivative by its log-probability."""
    logprob = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
    loss = algo.objective.clipped_loss(
        logprob,
        torch.tensor([-1.0]).double(),
        torch.tensor([advantage]).double(),
        torch.tensor([importance]).double(),
        **(OPTIONS | changes),
    )
    (slope,) = torch.autograd.grad(loss.sum(), logprob)
    return loss.item(), slope.item()


def run(algo, tokens, weights, objective=None):
    """Loss, gradient by log-probability and statistics of (a part of) a mini-batch."""
    logprobs = column(tokens, "logprob").requires_grad_()
    objective = objective or algo.objective.DapoObjective()
    loss, stats = objective(logprobs, column(tokens, "entropy"), inputs_of(algo, tokens, weights))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist(), stats


def means(stats):
    return {name: (total / count).item() for name, (total, count) in stats.items()}


# --- the clip -----------------------------------------------------------------------------------------------------


def test_clip_table(algo):
    """Entries 15 and 16: the values of algorithm.md, point 7."""
    for ratio, advantage, loss, slope in [
        (0.5, -1, 0.8, 0),
        (2, -1, 2, 2),
        (0.5, 1, -0.5, -0.5),
        (2, 1, -1.28, 0),
        (20, -1, 10, 0),
        (1.1, 1, -1.1, -1.1),
        (1.1, -1, 1.1, 1.1),
        (1.27, 1, -1.27, -1.27),
        (1.29, 1, -1.28, 0),
        (0.81, -1, 0.81, 0.81),
        (0.79, -1, 0.8, 0),
        (9.9, -1, 9.9, 9.9),
        (20, 1, -1.28, 0),
        (1, 2, -2, -2),
        (20, -3, 30, 0),
        (1, 0, 0, 0),
    ]:
        assert one_token(algo, ratio, advantage) == pytest.approx((loss, slope)), (ratio, advantage)


def test_clip_options_have_an_effect(algo):
    """Entry 17: every option changes the loss."""
    assert one_token(algo, 2, 1, high=0.5) == pytest.approx((-1.5, 0))
    assert one_token(algo, 0.5, -1, low=0.4) == pytest.approx((0.6, 0))
    assert one_token(algo, 20, -1, c=3.0) == pytest.approx((3, 0))
    assert one_token(algo, 2, -1, c=1.5) == pytest.approx((1.5, 0))
    assert one_token(algo, 20, -1, c=None) == pytest.approx((20, 20))


def test_ratio_does_not_overflow(algo):
    for gap in (1000.0, -1000.0):
        logprob = torch.tensor([gap], requires_grad=True)
        zero, one = torch.zeros(1), torch.ones(1)
        loss = algo.objective.clipped_loss(logprob, zero, -one, one, **(OPTIONS | {"c": None}))
        loss.sum().backward()
        assert loss.item() == pytest.approx(math.exp(20) if gap > 0 else 0.8) and logprob.grad.item() == 0


def test_importance_is_a_constant_factor(algo):
    assert one_token(algo, 1.1, -1, importance=0.5) == pytest.approx((0.55, 0.55))
    assert one_token(algo, 20, -1, importance=0.5) == pytest.approx((5, 0))
    importance = torch.ones(1, requires_grad=True)
    zero = torch.zeros(1, requires_grad=True)
    loss = algo.objective.clipped_loss(zero, torch.zeros(1), torch.ones(1), importance, **OPTIONS)
    loss.sum().backward()
    assert importance.grad is None


@properties
@given(st.floats(-6, 6), st.floats(-5, 5), st.floats(0, 3), st.floats(1.01, 20))
def test_dual_clip_bound(algo, log_ratio, advantage, importance, c):
    """A token costs at most w c |A|, and one with A > 0 gains at most w (1 + high) A and is left alone by c."""
    loss, _ = one_token(algo, math.exp(log_ratio), advantage, importance, c=c)
    free, _ = one_token(algo, math.exp(log_ratio), advantage, importance, c=None)
    noise = 1 + 1e-5  # the loss is float32
    assert loss <= importance * c * abs(advantage) * noise
    assert loss >= -importance * 1.28 * abs(advantage) * noise
    assert loss <= free
    if advantage >= 0:
        assert loss == free


# --- weights ------------------------------------------------------------------------------------------------------


def test_token_mean_over_uneven_micro_batches(algo):
    """Entries 1, 2 and 3: one token with loss 4 and three with loss 0 make 1.0, not 2.0, and no further division."""
    mask = torch.ones(4, dtype=torch.bool)
    ids = torch.tensor([0, 1, 1, 1])
    weights = algo.objective.token_weights("token-mean", mask=mask, sample_ids=ids, group_ids=ids * 0, num_samples=2)
    losses = torch.tensor([4.0, 0, 0, 0])
    assert sum((weights[part] * losses[part]).sum() for part in ([0], [1, 2, 3])).item() == 1.0
    assert sum((weights[part] * losses[part]).sum() for part in ([3], [2], [1], [0])).item() == 1.0


def test_divisor_counts_loss_tokens_only(algo):
    """Entry 4: four tokens kept and six masked, loss 1 each, make 1.0 and not 0.4."""
    mask = torch.tensor([True] * 4 + [False] * 6)
    ids = torch.tensor([0] * 4 + [1] * 6)
    for mode in ("token-mean", "prompt-mean", "seq-mean-token-mean"):
        weights = algo.objective.token_weights(mode, mask=mask, sample_ids=ids, group_ids=ids, num_samples=2)
        assert weights.sum().item() == pytest.approx(1.0)
        assert weights[4:].tolist() == [0] * 6
    weights = algo.objective.token_weights(
        "seq-mean-token-sum", mask=mask, sample_ids=ids, group_ids=ids, num_samples=2
    )
    assert weights.tolist() == [1] * 4 + [0] * 6


def test_weights_by_hand(algo):
    """Two groups; responses of 2, 1 and 3 tokens (one of them masked), and a response of 1 token, masked."""
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0]).bool()
    samples, groups = torch.tensor([5, 5, 3, 9, 9, 9, 7]), torch.tensor([1, 1, 1, 0, 0, 0, 0])
    for mode, right in [
        ("token-mean", [1 / 5] * 5),
        ("prompt-mean", [1 / 6] * 3 + [1 / 4] * 2),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", [1 / 3] * 5),
        ("constant", [1 / 40] * 5),
    ]:
        weights = algo.objective.token_weights(
            mode, mask=mask, sample_ids=samples, group_ids=groups, num_samples=4, constant=10
        )
        assert weights.tolist() == pytest.approx([*right, 0, 0]), mode


def test_everything_masked(algo):
    """Entry 5: all weights 0 and no NaN; the loss is 0, with a gradient, and no statistic is NaN before dividing."""
    tokens = [replace(t, in_loss=False) for t in random_tokens(1)]
    for mode in MODES:
        weights = weights_of(algo, tokens, mode)
        assert weights.tolist() == [0] * len(tokens)
        loss, gradient, stats = run(algo, tokens, weights)
        assert loss == 0 and gradient == [0] * len(tokens)
        assert all(total == 0 and count == 0 for total, count in stats.values())


def test_no_tokens_at_all(algo):
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(0)
    empty = torch.zeros(0, dtype=torch.long)
    for mode in MODES:
        weights = algo.objective.token_weights(
            mode, mask=empty.bool(), sample_ids=empty, group_ids=empty, num_samples=1, constant=1
        )
        inputs = algo.objective.TokenInputs(nothing, nothing, nothing, nothing, empty.bool(), weights, empty, empty)
        loss, _ = algo.objective.DapoObjective()(none, nothing, inputs)
        loss.backward()
        assert loss.item() == 0


def test_constant_divisor_ignores_padding(algo):
    """Entry 6: the same two responses padded to width 8 and to 16 have the same loss, C x 2 is the divisor."""
    for width in (8, 16):
        mask = torch.zeros(2, width, dtype=torch.bool)
        mask[0, :3] = mask[1, :5] = True
        ids = torch.arange(2).repeat_interleave(width)
        weights = algo.objective.token_weights(
            "constant", mask=mask.flatten(), sample_ids=ids, group_ids=ids * 0, num_samples=2, constant=20
        )
        assert weights.sum().item() == pytest.approx(8 / 40)


def test_constant_counts_masked_responses(algo):
    mask, ids = torch.tensor([True, False]), torch.tensor([0, 1])
    for num_samples, right in [(2, 1 / 6), (4, 1 / 12)]:
        weights = algo.objective.token_weights(
            "constant", mask=mask, sample_ids=ids, group_ids=ids, num_samples=num_samples, constant=3
        )
        assert weights.tolist() == pytest.approx([right, 0])
    for wrong in ({"num_samples": 2}, {"num_samples": 0, "constant": 3}, {"num_samples": 2, "constant": 0}):
        with pytest.raises(ValueError, match="constant"):
            algo.objective.token_weights("constant", mask=mask, sample_ids=ids, group_ids=ids, **wrong)
    with pytest.raises(ValueError, match="seq-sum"):
        algo.objective.token_weights("seq-sum", mask=mask, sample_ids=ids, group_ids=ids, num_samples=2)


@properties
@given(st.integers(0, 10**6), st.sampled_from(MODES))
def test_weights_against_counting(algo, seed, mode):
    tokens = random_tokens(seed)
    right = [plain_weight(t, tokens, mode) for t in tokens]
    assert weights_of(algo, tokens, mode).tolist() == pytest.approx(right, rel=1e-6)


# --- the whole objective ------------------------------------------------------------------------------------------


def test_parity_with_plain_implementation(algo):
    """Value and gradient, every mode and KL estimator, with and without the dual clip."""
    for seed in range(6):
        tokens = random_tokens(seed)
        for mode in MODES:
            for c, kl_coef, kind in [(10.0, 0.0, "k3"), (None, 0.0, "k3"), (3.0, 0.7, "k1"), (1.5, 0.7, "k2")]:
                objective = algo.objective.DapoObjective(0.2, 0.28, c, kl_coef, kind, kl_in_loss=kl_coef > 0)
                loss, gradient, _ = run(algo, tokens, weights_of(algo, tokens, mode), objective)
                right = plain_objective(tokens, mode, low=0.2, high=0.28, c=c, kl_coef=kl_coef, kind=kind)
                assert loss == pytest.approx(right[0], rel=1e-5, abs=1e-6)
                assert gradient == pytest.approx(right[1], rel=1e-5, abs=1e-7)


def test_gradient_by_finite_differences(algo):
    objective = algo.objective.DapoObjective(kl_coef=0.5, kl_in_loss=True)
    tokens = random_tokens(11)
    weights = weights_of(algo, tokens, "token-mean")
    _, gradient, _ = run(algo, tokens, weights, objective)
    for i, token in enumerate(tokens):
        nudged = [
            run(algo, [*tokens[:i], replace(token, logprob=token.logprob + h), *tokens[i + 1 :]], weights, objective)[0]
            for h in (1e-6, -1e-6)
        ]
        assert (nudged[0] - nudged[1]) / 2e-6 == pytest.approx(gradient[i], abs=1e-7)


@properties
@given(st.integers(0, 10**6), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_split_and_order_change_nothing(algo, seed, mode, rng):
    """Entries 1, 2, 3 and 41: any order, cut anywhere, gives the same loss, gradient and metrics."""
    tokens = random_tokens(seed)
    objective = algo.objective.DapoObjective(kl_coef=0.3, kl_in_loss=True)
    whole_loss, whole_gradient, whole_stats = run(algo, tokens, weights_of(algo, tokens, mode), objective)

    order = rng.sample(range(len(tokens)), len(tokens))
    shuffled = [tokens[i] for i in order]
    weights = weights_of(algo, shuffled, mode)
    cuts = sorted({0, len(tokens), *(rng.randrange(len(tokens)) for _ in range(3))})
    loss, gradient, sums = 0.0, [0.0] * len(tokens), {}
    for a, b in itertools.pairwise(cuts):
        part_loss, part_gradient, stats = run(algo, shuffled[a:b], weights[a:b], objective)
        loss += part_loss
        for place, value in zip(order[a:b], part_gradient, strict=True):
            gradient[place] = value
        for name, (total, count) in stats.items():
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + total, before[1] + count)
    assert loss == pytest.approx(whole_loss, abs=1e-9)
    assert gradient == pytest.approx(whole_gradient, abs=1e-12)
    for name, (total, count) in whole_stats.items():
        assert sums[name][0].item() == pytest.approx(total.item(), abs=1e-9)
        assert sums[name][1] == count


def test_masked_nan_does_not_leak(algo):
    """Entry 7: NaN, inf or nonsense at masked positions, in any input, changes neither loss, gradient nor metrics."""
    tokens = [*random_tokens(5), *random_tokens(6)]
    weights = weights_of(algo, tokens, "token-mean")
    objective = algo.objective.DapoObjective(kl_coef=0.3, kl_in_loss=True)
    loss, gradient, stats = run(algo, tokens, weights, objective)
    assert any(not t.in_loss for t in tokens)
    fields = ("logprob", "behaviour", "proximal", "reference", "entropy", "advantage", "importance")
    for bad in (math.nan, math.inf, -math.inf, 10.0):
        for touched in [(name,) for name in fields] + [fields]:
            spoilt = [t if t.in_loss else replace(t, **dict.fromkeys(touched, bad)) for t in tokens]
            got_loss, got_gradient, got_stats = run(algo, spoilt, weights, objective)
            assert got_loss == loss and got_gradient == gradient
            assert {n: (a.item(), b.item()) for n, (a, b) in got_stats.items()} == {
                n: (a.item(), b.item()) for n, (a, b) in stats.items()
            }
    spoilt_weights = torch.where(column(tokens, "in_loss"), weights, math.nan)
    assert run(algo, tokens, spoilt_weights, objective)[:2] == (loss, gradient)


def test_nan_at_a_loss_token_is_not_hidden(algo):
    """Entry 96: a real NaN has to reach the trainer, which skips the update."""
    tokens = [replace(t, in_loss=True) for t in random_tokens(5)]
    weights = weights_of(algo, tokens, "token-mean")
    for name in ("logprob", "proximal", "advantage", "importance"):
        spoilt = [replace(tokens[0], **{name: math.nan}), *tokens[1:]]
        assert math.isnan(run(algo, spoilt, weights)[0])


def test_padding_values_do_not_matter(algo):
    """Entry 8: advantages [1, 1, 10, 10] under mask [1, 1, 0, 0] make a loss of -1, in every mean."""
    mask, ids = torch.tensor([True, True, False, False]), torch.zeros(4, dtype=torch.long)
    for mode in ("token-mean", "prompt-mean", "seq-mean-token-mean"):
        weights = algo.objective.token_weights(mode, mask=mask, sample_ids=ids, group_ids=ids, num_samples=1)
        zeros = torch.zeros(4)
        ids = torch.arange(4)
        advantages = torch.tensor([1.0, 1, 10, 10])
        inputs = algo.objective.TokenInputs(zeros, zeros, advantages, torch.ones(4), mask, weights, ids, ids)
        loss, _ = algo.objective.DapoObjective()(zeros.clone().requires_grad_(), zeros, inputs)
        assert loss.item() == pytest.approx(-1)


def test_bfloat16_is_computed_in_float32(algo):
    mask = torch.ones(2, dtype=torch.bool)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    half = logprobs.detach()
    ids = torch.arange(2)
    inputs = algo.objective.TokenInputs(
        half, half, torch.tensor([1.0, -1.0]), torch.ones(2), mask, torch.ones(2) / 3, ids, ids
    )
    loss, _ = algo.objective.DapoObjective()(logprobs, half, inputs)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == 0
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, 1 / 3], rel=1e-2)


def test_kl_in_the_loss_has_a_gradient(algo):
    """Entries 17 and 40: beta 0 and beta 1 give different gradients; without a reference it is an error."""
    tokens = random_tokens(3)
    weights = weights_of(algo, tokens, "token-mean")
    penalised = [algo.objective.DapoObjective(kl_coef=beta, kl_in_loss=True) for beta in (0.0, 1.0)]
    gradients = [run(algo, tokens, weights, objective)[1] for objective in penalised]
    assert gradients[0] != gradients[1]
    measured = run(algo, tokens, weights, algo.objective.DapoObjective(kl_coef=1.0, kl_in_loss=False))
    assert measured[1] == gradients[0] and "reference_kl" in measured[2]
    inputs = replace(inputs_of(algo, tokens, weights), reference_logprobs=None)
    with pytest.raises(ValueError, match="reference"):
        algo.objective.DapoObjective(kl_in_loss=True)(column(tokens, "logprob"), column(tokens, "entropy"), inputs)
    _, stats = algo.objective.DapoObjective()(column(tokens, "logprob"), column(tokens, "entropy"), inputs)
    assert "reference_kl" not in stats


def test_statistics_by_hand(algo):
    """Entry 41: eight tokens, one of them masked; shares within [0, 1]."""
    ratios = [1.25, 2.0, 0.5, 2.0, 0.75, 20.0, 1.5, 99.0]
    advantages = torch.tensor([1.0, 1, 1, -1, -1, -1, 1, 1])
    proximal = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.6, 0.04, 0.2, 0.001]).log()
    logprobs = (proximal + torch.tensor(ratios).log()).requires_grad_()
    mask = torch.tensor([True] * 7 + [False])
    importance = torch.tensor([1.0, 0.5, 0.5, 1, 1, 1, 2, 50])
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 99])
    reference = logprobs.detach() - 0.1
    ids = torch.arange(8)
    inputs = algo.objective.TokenInputs(
        proximal, proximal, advantages, importance, mask, mask / 7, ids, ids, reference_logprobs=reference
    )
    _, stats = algo.objective.DapoObjective()(logprobs, entropy, inputs)
    assert all(not total.requires_grad and total.dtype == torch.float64 for total, _ in stats.values())
    assert all(count == (2 if name == "clip_up_probability" else 7) for name, (_, count) in stats.items())
    assert means(stats) == pytest.approx(
        {
            "entropy": 0.4,
            "probability": (0.625 + 0.2 + 0.2 + 0.4 + 0.45 + 0.8 + 0.3) / 7,
            "clip_low": 1 / 7,
            "clip_high": 2 / 7,
            "clip_dual": 1 / 7,
            "clip_up_probability": (0.2 + 0.3) / 2,
            "ratio": 4.0,
            "proximal_kl": sum(r - 1 - math.log(r) for r in ratios[:7]) / 7,
            "reference_kl": math.exp(-0.1) - 1 + 0.1,
            "importance": 1.0,
        },
        rel=1e-5,
    )
    _, stats = algo.objective.DapoObjective(clip_ratio_c=None)(logprobs, entropy, inputs)
    assert "clip_dual" not in stats


def test_on_policy_statistics(algo):
    """Entry 12: before the first update every ratio is 1, nothing is clipped, the KL is 0."""
    tokens = [replace(t, logprob=t.proximal) for t in random_tokens(2)]
    _, _, stats = run(algo, tokens, weights_of(algo, tokens, "token-mean"))
    found = means(stats)
    assert found["ratio"] == 1
    assert found["clip_low"] == found["clip_high"] == found["clip_dual"] == found["proximal_kl"] == 0


# --- correction ---------------------------------------------------------------------------------------------------

PROXIMAL = torch.tensor([4.0, 0.25, 1.0, 3.0, 2.0, 7.0]).log()
SAMPLES = torch.tensor([1, 1, 0, 0, 0, 0])
MASK = torch.tensor([True, True, True, True, True, False])


def correct(algo, kind, level, proximal=PROXIMAL, **changes):
    options = {"cap": 2.0, "low": 0.5, "high": 2.0, "sample_ids": SAMPLES, "mask": MASK} | changes
    weights, mask = algo.objective.importance_weights(proximal, torch.zeros(6), kind=kind, level=level, **options)
    return weights.tolist(), mask.tolist()


def test_correction_by_hand(algo):
    """Ratios 4, 1/4 | 1, 3, 2; of the responses 1 | 6. A masked position has weight 1 and stays masked."""
    on = MASK.tolist()
    assert correct(algo, "none", "token") == ([1] * 6, on)
    assert correct(algo, "truncate", "token") == (pytest.approx([2, 0.25, 1, 2, 2, 1]), on)
    assert correct(algo, "truncate", "sequence", cap=5.0) == (pytest.approx([1, 1, 5, 5, 5, 1]), on)
    assert correct(algo, "mask", "token") == ([1] * 6, [False, False, True, False, True, False])
    assert correct(algo, "mask", "sequence") == ([1] * 6, [True, True, False, False, False, False])


def test_correction_borders_are_inside(algo):
    ratio = torch.tensor([0.5, 2.0, 1.0, 0.49, 2.01, 1.0]).log()
    inside = [True, True, True, False, False, False]
    assert correct(algo, "mask", "token", ratio, low=0.4999999, high=2.0000002)[1] == inside
    assert correct(algo, "mask", "token", torch.zeros(6), low=1.0, high=1.0)[1] == MASK.tolist()


def test_correction_ignores_masked_nan(algo):
    """Entry 7, at the level of the sequence too."""
    spoilt = torch.where(MASK, PROXIMAL, math.nan)
    for kind in ("none", "truncate", "mask"):
        for level in ("token", "sequence"):
            assert correct(algo, kind, level, spoilt) == correct(algo, kind, level)


def test_correction_is_finite_and_a_constant(algo):
    far = torch.full((6,), 500.0, requires_grad=True)
    weights, _ = algo.objective.importance_weights(
        far, -far, kind="truncate", level="sequence", cap=3.0, low=0, high=1, sample_ids=SAMPLES, mask=MASK
    )
    assert weights.tolist() == [3, 3, 3, 3, 3, 1] and not weights.requires_grad
    for wrong in (("clip", "token"), ("mask", "group")):
        with pytest.raises(ValueError, match="unknown correction"):
            correct(algo, *wrong)


def test_correction_leaves_the_divisor(algo):
    """Tokens masked by a correction leave the divisor too."""
    _, mask = correct(algo, "mask", "token")
    weights = algo.objective.token_weights(
        "token-mean", mask=torch.tensor(mask), sample_ids=SAMPLES, group_ids=SAMPLES, num_samples=2
    )
    assert weights.tolist() == [0, 0, 0.5, 0, 0.5, 0]
