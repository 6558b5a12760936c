"""The trainer: worked values of the failure list, and the equality of every way to cut a mini-batch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from training_cases import (
    SHAPE,
    distance,
    gradient,
    make_group,
    make_inputs,
    make_sample,
    make_trainer,
    packed,
    random_groups,
    weights_of,
    with_budget,
)

from dapo.algorithm.objective import DapoObjective
from dapo.errors import ConfigError, NumericalError, UserError
from dapo.model.compiling import decoder_layers
from dapo.training.micro_batch import select_tokens
from dapo.training.packing import pack_demonstrations
from dapo.training.policy import Policy
from dapo.training.trainer import NO_LOSS_TOKENS
from helpers import VOCAB, random_model


@dataclass(frozen=True)
class GivenLosses:
    """Inputs for :func:`given_losses`: a stage of its own making, to show that the trainer knows no algorithm."""

    weights: torch.Tensor
    losses: torch.Tensor


def given_losses(logprobs, entropy, inputs):
    """Each token has the loss it is told, and the gradient of its log-prob times that."""
    loss = (inputs.weights * inputs.losses * (1 + logprobs - logprobs.detach())).sum()
    return loss, {"losses": (inputs.losses.sum(), torch.tensor(len(inputs.losses)))}


# --- failures 1 to 7: how losses are averaged ---------------------------------------------------------------------


@pytest.mark.parametrize("budget, parts", [(10, 1), (5, 2)])
@pytest.mark.parametrize("order", [1, -1])
def test_loss_does_not_depend_on_the_cut_failures_1(budget, parts, order):
    """One sequence with 1 token of loss 4, one with 3 tokens of loss 0: 1.0, and not 2.0."""
    trainer = make_trainer(tokens_per_micro_batch=budget)
    batch = packed([make_group(i, [1, 2], [make_sample(ids)]) for i, ids in enumerate([[5], [6, 7, 8]][::order])])
    losses = torch.tensor([4.0, 0, 0, 0] if order == 1 else [0, 0, 0, 4.0])
    report = trainer.update(batch, GivenLosses(torch.full((4,), 1 / 4), losses), given_losses)
    assert report.micro_batches == parts
    assert report.loss == pytest.approx(1.0, abs=1e-6)
    assert report.statistics["losses"] == (4.0, 4.0)  # merged exactly, not a mean of means


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("mode", ["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_ranks_add_up_failures_2(ranks, mode):
    """Each rank takes some sequences with weights made over all of them; gradients are summed."""
    trainer = make_trainer()
    batch = packed(random_groups(SHAPE))
    inputs = make_inputs(batch, mode)
    total = torch.zeros_like(whole := gradient(trainer, batch, inputs))
    for rank in range(ranks):
        own = np.arange(rank, batch.num_samples, ranks)
        index = torch.from_numpy(batch.response_index(own))
        total += gradient(trainer, batch.select(own), select_tokens(inputs, index))
    assert distance(total, whole) < 1e-5


def test_accumulation_does_not_divide_again_failures_3():
    batch = packed(random_groups([(2, [6, 6, 6, 6]), (2, [6, 6, 6, 6])]))
    reports = []
    for budget in (64, 16):
        trainer = make_trainer(tokens_per_micro_batch=budget)
        reports.append(trainer.update(batch, make_inputs(batch), DapoObjective()))
    assert [report.micro_batches for report in reports] == [1, 4]
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
    assert reports[1].loss == pytest.approx(reports[0].loss, abs=1e-5)


def test_divisor_counts_loss_tokens_only_failures_4():
    """4 tokens kept, 6 masked, loss 1 each: 1.0, and not 0.4."""
    trainer = make_trainer()
    group = make_group(0, [1], [make_sample([2] * 4), make_sample([3] * 6, in_loss=False)])
    batch = packed([group])
    weights = make_inputs(batch).weights
    report = trainer.update(batch, GivenLosses(weights, torch.ones(10)), given_losses)
    assert report.loss == pytest.approx(1.0, abs=1e-6)
    assert (report.tokens, report.response_tokens, report.loss_tokens) == (12, 10, 4)


@pytest.mark.parametrize("rows", [1, 5])
def test_loss_and_gradient_do_not_depend_on_the_chunks_of_the_head(monkeypatch, rows):
    """The loss is taken so many response tokens at a time; only long micro-batches have more than one chunk."""
    batch = packed(random_groups(SHAPE, in_loss=lambda draw, index: (draw, index) != (0, 2)))
    inputs = make_inputs(batch)

    def found():
        trainer = make_trainer(tokens_per_micro_batch=40)
        return gradient(trainer, batch, inputs), trainer.update(batch, inputs, DapoObjective())

    whole, report = found()
    monkeypatch.setattr("dapo.training.policy.chunk_rows", lambda device, vocabulary: rows)
    cut, cut_report = found()
    assert report.micro_batches > 1
    assert distance(cut, whole) < 1e-5
    assert cut_report.loss == pytest.approx(report.loss, abs=1e-6)
    for name, pair in report.statistics.items():
        assert cut_report.statistics[name] == pytest.approx(pair, rel=1e-5, abs=1e-6), name
    np.testing.assert_allclose(cut_report.logprobs, report.logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cut_report.entropy, report.entropy, rtol=1e-3, atol=1e-3)


def test_one_masked_micro_batch_is_harmless_failures_5():
    groups = random_groups([(2, [6, 6])], in_loss=lambda draw, index: index == 0)
    batch, alone = packed(groups), packed([replace(groups[0], samples=groups[0].samples[:1])])
    trainer = make_trainer(tokens_per_micro_batch=8)
    expected = gradient(trainer, alone, make_inputs(alone))
    assert distance(gradient(trainer, batch, make_inputs(batch)), expected) < 1e-5
    report = trainer.update(batch, make_inputs(batch), DapoObjective())
    assert report.micro_batches == 2 and report.skipped is None and math.isfinite(report.loss)
    assert all(math.isfinite(number) for pair in report.statistics.values() for number in pair)


def test_nothing_in_the_loss_is_a_skip_and_no_failure_failures_5():
    trainer = make_trainer(max_skipped_updates=1)
    batch = packed(random_groups(SHAPE, in_loss=lambda draw, index: False))
    before = weights_of(trainer)
    for _ in range(3):
        report = trainer.update(batch, make_inputs(batch), DapoObjective())
        assert report.skipped == NO_LOSS_TOKENS and report.loss == 0 and report.grad_norm == 0
    assert torch.equal(weights_of(trainer), before)
    assert trainer.version == 0 and trainer.skipped_updates == 0


def test_constant_divisor_knows_no_padding_failures_6():
    """C x sequences, whatever the lengths: loss 1 on 5 + 3 tokens, C 8, 2 sequences: 0.5."""
    batch = packed([make_group(0, [1], [make_sample([2] * 5), make_sample([3] * 3)])])
    weights = make_inputs(batch, "constant", constant=8.0).weights
    for budget in (6, 64):
        trainer = make_trainer(tokens_per_micro_batch=budget)
        report = trainer.update(batch, GivenLosses(weights, torch.ones(8)), given_losses)
        assert report.loss == pytest.approx(0.5, abs=1e-6)


def test_nan_at_masked_tokens_stays_there_failures_7():
    good = make_sample([4, 5], logprobs=[-1.0, -2.0])
    bad = make_sample([6, 7], logprobs=[math.nan, math.nan], advantage=math.nan, in_loss=False)
    trainer = make_trainer()
    alone, batch = packed([make_group(0, [1], [good])]), packed([make_group(0, [1], [good, bad])])
    expected = gradient(trainer, alone, make_inputs(alone))
    assert distance(gradient(trainer, batch, make_inputs(batch)), expected) < 1e-5


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_temperature_is_that_of_the_rollout_failures_12():
    batch = packed([make_group(0, [3, 4], [make_sample([5, 6, 7])])])
    model = random_model("qwen2")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(batch.token_ids)[None]).logits[0, 1:4]
    for temperature in (0.5, 1.0, 1.7):
        expected = torch.log_softmax(logits / temperature, -1)[range(3), [5, 6, 7]]
        got = make_trainer(temperature=temperature).logprobs(batch)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_ratio_is_exactly_one_under_recompute_with_one_update():
    """Same weights, same micro-batches: the same bits, so nothing is clipped and the ratio cannot drift."""
    trainer = make_trainer(tokens_per_micro_batch=30)
    batch = packed(random_groups(SHAPE))
    inputs = replace(make_inputs(batch), proximal_logprobs=trainer.logprobs(batch))
    report = trainer.update(batch, inputs, DapoObjective())
    total, count = report.statistics["ratio"]
    assert total == count == batch.num_response_tokens


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_logprobs_do_not_depend_on_the_budget(name):
    trainer = make_trainer(name)
    batch = packed(random_groups(SHAPE))
    whole = with_budget(trainer, 1000).logprobs(batch)
    assert not whole.requires_grad and whole.dtype == torch.float32
    for budget in (19, 25, 40):
        torch.testing.assert_close(with_budget(trainer, budget).logprobs(batch), whole, rtol=0, atol=1e-5)


def test_dropout_is_off_so_that_ratios_start_at_one():
    trainer = make_trainer("gpt2")  # its config asks for dropout 0.1
    batch = packed(random_groups(SHAPE))
    assert torch.equal(trainer.logprobs(batch), trainer.logprobs(batch))
    assert not trainer.policy.model.training


def test_bfloat16_compute_is_close_and_masters_stay_float32():
    batch = packed(random_groups(SHAPE))
    model = random_model("qwen2")
    with torch.no_grad():  # the size of weights in practice: the helper's own are large
        for parameter in model.parameters():
            parameter.mul_(0.5)
    exact, narrow = make_trainer(model), make_trainer(model, compute_dtype=torch.bfloat16)
    difference = (narrow.logprobs(batch) - exact.logprobs(batch)).abs()
    assert 0 < difference.mean() < 0.03
    inputs = make_inputs(batch)
    assert distance(gradient(narrow, batch, inputs), gradient(exact, batch, inputs)) < 0.1
    narrow.update(batch, inputs, DapoObjective())
    assert all(tensor.dtype == torch.float32 for _, tensor in narrow.publish()[1])


def test_activation_checkpointing_computes_layers_twice_and_the_same_gradient():
    batch = packed(random_groups(SHAPE))
    plain, checkpointed = make_trainer(), make_trainer(activation_checkpointing=True)
    gradients, calls = [], []
    for trainer in (plain, checkpointed):
        seen = []
        trainer.policy.model.model.layers[0].self_attn.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        gradients.append(gradient(trainer, batch, make_inputs(batch)))
        calls.append(len(seen))
    assert torch.equal(*gradients)
    assert calls[1] == 2 * calls[0] > 0


def test_frozen_reference_stays_where_it_was():
    trainer = make_trainer()
    batch = packed(random_groups(SHAPE))
    reference = trainer.policy.frozen_copy()
    before = trainer.logprobs(batch)
    assert torch.equal(reference.logprobs(batch), before)
    trainer.update(batch, make_inputs(batch), DapoObjective())
    assert torch.equal(reference.logprobs(batch), before)
    assert not torch.equal(trainer.logprobs(batch), before)
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_the_reference_is_compiled_where_the_policy_is(monkeypatch):
    policy = make_trainer(activation_checkpointing=True).policy
    assert not any(layer._compiled_call_impl for layer in decoder_layers(policy.frozen_copy().model))
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    assert all(layer._compiled_call_impl for layer in decoder_layers(policy.frozen_copy().model))


# --- learning rate and optimizer ----------------------------------------------------------------------------------


def test_first_update_moves_the_weights_failures_34():
    trainer = make_trainer(warmup_steps=0, learning_rate=1e-6)
    before, batch = weights_of(trainer), packed(random_groups(SHAPE))
    report = trainer.update(batch, make_inputs(batch), DapoObjective())
    assert report.learning_rate == 1e-6
    assert (weights_of(trainer) != before).float().mean() > 0.5  # float32 masters: most move even at 1e-6


def test_the_rate_falls_in_a_straight_line_to_the_final_one():
    trainer = make_trainer(learning_rate=1e-3, final_learning_rate=2e-4, warmup_steps=2)
    rates = []
    for step, spent in enumerate([0.0, 0.25, 0.5, 1.0]):
        trainer.begin_step(step, spent)
        rates.append(trainer.learning_rate)
    assert rates == pytest.approx([0.5e-3, 0.8e-3, 0.6e-3, 0.2e-3])


def test_warm_up_by_rollout_step_failures_34_35():
    trainer = make_trainer(learning_rate=1e-3, warmup_steps=4)
    assert trainer.learning_rate == pytest.approx(0.25e-3)
    rates = []
    for step in range(6):
        trainer.begin_step(step)
        rates.append(trainer.learning_rate)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    resumed = make_trainer(learning_rate=1e-3, warmup_steps=4)
    resumed.begin_step(2)
    assert resumed.learning_rate == rates[2]  # neither forgotten nor advanced twice
    batch = packed(random_groups(SHAPE))
    for _ in range(2):  # constant inside a rollout step
        assert resumed.update(batch, make_inputs(batch), DapoObjective()).learning_rate == rates[2]


def test_first_step_is_plain_adamw_with_decay_on_everything():
    """After one step Adam moves each weight by lr x sign(g), after decay by lr x weight_decay x weight."""
    trainer = make_trainer(learning_rate=1e-3, weight_decay=0.1, adam_epsilon=1e-12)
    before, batch = weights_of(trainer), packed(random_groups(SHAPE))
    inputs = make_inputs(batch)
    grad = gradient(trainer, batch, inputs)
    trainer.update(batch, inputs, DapoObjective())
    moved = grad.abs() > 1e-6
    expected = before * (1 - 1e-3 * 0.1) - 1e-3 * grad.sign()
    torch.testing.assert_close(weights_of(trainer)[moved], expected[moved], rtol=1e-5, atol=1e-7)


def test_gradient_is_clipped_by_its_global_norm():
    batch = packed(random_groups(SHAPE))
    inputs = make_inputs(batch)
    free, clipped = make_trainer(), make_trainer(max_grad_norm=1e-3)
    whole, cut = gradient(free, batch, inputs), gradient(clipped, batch, inputs)
    assert float(cut.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert distance(cut / cut.norm(), whole / whole.norm()) < 1e-5
    report = clipped.update(batch, inputs, DapoObjective())
    assert report.grad_norm == pytest.approx(float(whole.norm()), rel=1e-5)  # reported before clipping


# --- failures 96: numbers that are not finite ---------------------------------------------------------------------


def poisoned(value):
    def objective(logprobs, entropy, inputs):
        loss, stats = DapoObjective()(logprobs, entropy, inputs)
        return loss + value * logprobs.sum(), stats

    return objective


def finite_loss_infinite_gradient(logprobs, entropy, inputs):
    """sqrt has an infinite slope at 0."""
    return (logprobs - logprobs.detach()).sum().abs().sqrt(), {}


def infinite_loss_finite_gradient(logprobs, entropy, inputs):
    """As when a constant overflows: the gradient looks fine, the number it belongs to is not."""
    return logprobs.sum() + math.inf, {}


@pytest.mark.parametrize(
    "bad, named",
    [
        (poisoned(math.nan), "model.embed_tokens"),
        (poisoned(math.inf), "model.embed_tokens"),
        (finite_loss_infinite_gradient, "model.embed_tokens"),
        (infinite_loss_finite_gradient, "loss inf"),
    ],
)
def test_not_finite_is_skipped_and_counted_then_stops_failures_96(bad, named):
    trainer = make_trainer(max_skipped_updates=3)
    batch = packed(random_groups(SHAPE))
    inputs = make_inputs(batch)
    trainer.update(batch, inputs, DapoObjective())
    trainer.publish()
    before = weights_of(trainer)
    moments = {name: dict(trainer._optimizer.state[p]) for name, p in trainer._parameters.items()}
    moments = {name: {k: t.clone() for k, t in state.items()} for name, state in moments.items()}
    for _ in range(2):
        report = trainer.update(batch, inputs, bad)
        assert report.skipped.startswith("not finite: loss ")
    assert trainer.skipped_updates == 2
    assert torch.equal(weights_of(trainer), before) and trainer.version == 1
    for name, parameter in trainer._parameters.items():
        assert all(torch.equal(t, moments[name][k]) for k, t in trainer._optimizer.state[parameter].items())

    trainer.update(batch, inputs, DapoObjective())  # a good one in between: the count in a row starts again
    for _ in range(2):
        trainer.update(batch, inputs, bad)
    with pytest.raises(NumericalError, match=f"3 updates in a row .*{re.escape(named)}"):
        trainer.update(batch, inputs, bad)
    assert all(tensor.isfinite().all() for _, tensor in trainer.publish()[1])


def test_the_first_bad_parameter_is_named():
    trainer = make_trainer()
    batch = packed(random_groups(SHAPE))
    name, parameter = list(trainer.policy.model.named_parameters())[5]
    parameter.register_hook(lambda gradient: gradient * math.inf)
    assert name in trainer.update(batch, make_inputs(batch), DapoObjective()).skipped


# --- weights out, state in and out --------------------------------------------------------------------------------


def test_an_update_leaves_no_gradients_and_only_a_fresh_policys_log_probabilities():
    """The rollout needs their memory; later log-probabilities are those of other weights than were sampled from."""
    trainer = make_trainer(tokens_per_micro_batch=20)
    batch = packed(random_groups(SHAPE))
    expected = trainer.logprobs(batch)
    first = trainer.update(batch, make_inputs(batch), DapoObjective())
    assert first.micro_batches > 1 and np.allclose(first.logprobs, expected, atol=1e-5)
    assert all(parameter.grad is None for parameter in trainer._parameters.values())
    second = trainer.update(batch, make_inputs(batch), DapoObjective())
    assert second.logprobs is None and second.entropy.shape == expected.shape
    trainer.publish()
    assert trainer.update(batch, make_inputs(batch), DapoObjective()).logprobs is not None


def test_skipped_updates_in_a_row_are_counted_anew_after_one_that_was_made():
    trainer = make_trainer(max_skipped_updates=2)
    batch = packed(random_groups(SHAPE))
    for objective in (poisoned(math.nan), DapoObjective(), poisoned(math.nan), DapoObjective()):
        trainer.update(batch, make_inputs(batch), objective)
    assert (trainer.updates, trainer.skipped_updates) == (2, 2)


def test_version_counts_published_changes():
    trainer = make_trainer()
    batch = packed(random_groups(SHAPE))
    inputs = make_inputs(batch)
    assert trainer.publish()[0] == 0
    trainer.update(batch, inputs, DapoObjective())
    trainer.update(batch, inputs, DapoObjective())
    version, tensors = trainer.publish()
    assert version == trainer.version == 1  # a rollout step, not an update
    assert trainer.publish()[0] == 1  # nothing new
    names = dict(tensors)
    state = trainer.policy.model.state_dict()
    assert set(state) - set(names) == {"lm_head.weight"}  # tied: once
    assert all(torch.equal(tensor, state[name]) for name, tensor in names.items())  # failures 36


def test_mismatch_is_measured_before_the_first_update_on_own_tokens_only():
    trainer = make_trainer()
    groups = random_groups([(2, [4, 4])])
    logprobs = trainer.logprobs(packed(groups)).view(2, 4) + torch.tensor([[0.5], [9.0]])
    fresh, stale = (replace(s, logprobs=row.numpy()) for s, row in zip(groups[0].samples, logprobs, strict=True))
    batch = packed([replace(groups[0], samples=(fresh, replace(stale, versions=stale.versions - 1)))])
    first = trainer.update(batch, make_inputs(batch), DapoObjective()).mismatch
    assert first.tokens == 4
    assert first.mean == pytest.approx(0.5, abs=1e-5) and first.maximum == pytest.approx(0.5, abs=1e-5)
    assert first.k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-5)
    assert first.exceeds(0.4) and not first.exceeds(0.6)
    second = trainer.update(batch, make_inputs(batch), DapoObjective()).mismatch
    assert second.tokens == 0 and not second.exceeds(0.0)
    trainer.publish()
    assert trainer.update(batch, make_inputs(batch), DapoObjective()).mismatch.tokens == 0  # version 1 by now


def test_nan_from_the_engine_sets_off_the_alarm():
    trainer = make_trainer(tokens_per_micro_batch=5)
    samples = [make_sample([4, 5]), make_sample([4, 5], logprobs=[math.nan, -1.0], in_loss=False)]
    batch = packed([make_group(0, [1], samples)])
    mismatch = trainer.update(batch, make_inputs(batch), DapoObjective()).mismatch
    assert mismatch.exceeds(1e9) and math.isnan(mismatch.maximum)


def test_saved_weights_load_and_give_the_same_logprobs(tmp_path):
    trainer = make_trainer()
    batch = packed(random_groups(SHAPE))
    trainer.update(batch, make_inputs(batch), DapoObjective())
    trainer.save(tmp_path / "model")
    from dapo.model.loading import load_model

    again = make_trainer(load_model(tmp_path / "model"))
    assert torch.equal(again.logprobs(batch), trainer.logprobs(batch))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no temporary left
    with pytest.raises(FileExistsError):
        trainer.save(tmp_path / "model")


def test_two_plus_two_updates_equal_four_failures_87(tmp_path):
    updates = list(packed(random_groups(SHAPE)).minibatches(1))

    def train(trainer, batches):
        for batch in batches:
            trainer.update(batch, make_inputs(batch), DapoObjective())

    straight = make_trainer(weight_decay=0.1)
    train(straight, updates[:4])

    first = make_trainer(weight_decay=0.1)
    train(first, updates[:2])
    first.publish()
    first.save(tmp_path / "model")
    first.save_state(tmp_path / "state")
    from dapo.model.loading import load_model

    second = make_trainer(load_model(tmp_path / "model"), weight_decay=0.1)
    second.load_state(tmp_path / "state")
    assert second.version == 1
    states = [second._optimizer.state[p] for p in second._parameters.values()]
    assert all(state["exp_avg_sq"].any() and float(state["step"]) == 2 for state in states)
    train(second, updates[2:4])
    assert torch.equal(weights_of(second), weights_of(straight))

    forgetful = make_trainer(load_model(tmp_path / "model"), weight_decay=0.1)
    train(forgetful, updates[2:4])
    assert not torch.equal(weights_of(forgetful), weights_of(straight))


def test_state_before_the_first_update(tmp_path):
    make_trainer().save_state(tmp_path / "state")
    trainer = make_trainer()
    trainer.load_state(tmp_path / "state")
    batch = packed(random_groups(SHAPE))
    assert trainer.update(batch, make_inputs(batch), DapoObjective()).skipped is None


def test_counters_survive(tmp_path):
    batch = packed(random_groups(SHAPE))
    trainer = make_trainer(max_skipped_updates=2)
    trainer.update(batch, make_inputs(batch), DapoObjective())
    trainer.update(batch, make_inputs(batch), poisoned(math.nan))
    trainer.save_state(tmp_path / "state")
    again = make_trainer(max_skipped_updates=2)
    again.load_state(tmp_path / "state")
    assert again.skipped_updates == 1 and again.publish()[0] == 1  # the unpublished update is not forgotten
    with pytest.raises(NumericalError, match="2 updates in a row"):
        again.update(batch, make_inputs(batch), poisoned(math.nan))
    assert again.skipped_updates == 1  # the one that ends a run is made again when that goes on, and counted then


def test_damaged_or_foreign_state_is_refused(tmp_path):
    batch = packed(random_groups(SHAPE))
    trainer = make_trainer()
    trainer.update(batch, make_inputs(batch), DapoObjective())
    trainer.save_state(tmp_path / "state")
    with pytest.raises(UserError, match="cannot be read"):
        trainer.load_state(tmp_path / "nowhere")
    with pytest.raises(UserError, match="another model"):
        make_trainer("gpt2").load_state(tmp_path / "state")
    metadata = tmp_path / "state" / "trainer.json"
    metadata.write_text(metadata.read_text().replace("model.norm.weight/exp_avg_sq", "model.norm.weight/lost"))
    with pytest.raises(UserError, match="does not hold what"):
        trainer.load_state(tmp_path / "state")
    tensors = tmp_path / "state" / "trainer.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        trainer.load_state(tmp_path / "state")


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    trainer = make_trainer()

    def disk_full(folder):
        (folder / "half").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(trainer.policy.model, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# --- odd batches --------------------------------------------------------------------------------------------------


def test_empty_responses_break_nothing_failures_73():
    full = [make_sample([4, 5, 6]), make_sample([7])]
    trainer = make_trainer(tokens_per_micro_batch=5)
    alone = packed([make_group(0, [1, 2], full)])
    mixed = packed([make_group(0, [1, 2], [make_sample([]), full[0], make_sample([]), full[1]])])
    assert torch.equal(trainer.logprobs(mixed), trainer.logprobs(alone))
    expected = gradient(trainer, alone, make_inputs(alone))
    assert distance(gradient(trainer, mixed, make_inputs(mixed)), expected) < 1e-5
    nothing = packed([make_group(0, [1, 2], [make_sample([])])])
    assert trainer.logprobs(nothing).shape == (0,)
    assert trainer.update(nothing, make_inputs(nothing), DapoObjective()).skipped == NO_LOSS_TOKENS


def test_a_sequence_above_the_budget_stops_before_anything_moves_failures_100():
    trainer = make_trainer(tokens_per_micro_batch=10)
    before, batch = weights_of(trainer), packed(random_groups(SHAPE))
    with pytest.raises(ConfigError, match="use at least 19"):
        trainer.update(batch, make_inputs(batch), DapoObjective())
    assert torch.equal(weights_of(trainer), before)


def test_demonstrations_are_learned():
    """Another stage, the same trainer: cross-entropy falls."""

    @dataclass(frozen=True)
    class Weights:
        weights: torch.Tensor

    def cross_entropy(logprobs, entropy, inputs):
        return -(inputs.weights * logprobs).sum(), {}

    trainer = make_trainer(learning_rate=3e-3)
    batch = pack_demonstrations([([1, 2, i], [(i * 7) % VOCAB, 3]) for i in range(10, 20)])
    inputs = Weights(torch.full((batch.num_response_tokens,), 1 / batch.num_response_tokens))
    losses = [trainer.update(batch, inputs, cross_entropy) for _ in range(30)]
    assert losses[-1].loss < 0.2 * losses[0].loss
    assert losses[0].mismatch.tokens == 0


def test_entropy_is_differentiable_through_the_trainer():
    def entropy_bonus(logprobs, entropy, inputs):
        return -(inputs.weights * entropy).sum(), {}

    trainer = make_trainer(learning_rate=1e-3)
    batch = packed(random_groups(SHAPE))
    losses = [trainer.update(batch, make_inputs(batch), entropy_bonus).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
