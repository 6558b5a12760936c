"""The critic reads values where tokens are predicted, and the packer, the cut and the order change none of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_cases import SHAPE, objective_inputs, random_groups

from dapo.algorithm.gae import ValueObjective
from dapo.algorithm.objective import DapoObjective
from dapo.config import build_config, nested
from dapo.errors import ConfigError, ModelError
from dapo.model.loading import load_model
from dapo.training.critic import make_critic, one_token_longer
from dapo.training.packing import pack
from dapo.training.reference import reference_policy
from dapo.training.trainer import Trainer
from helpers import VOCAB, random_model

PPO = {"model.path": "tiny", "algorithm.kind": "ppo", "data.max_prompt_length": 8, "rollout.max_response_length": 17}
PPO |= {"algorithm.overlong_buffer.enable": False, "training.tokens_per_micro_batch": 32, "training.warmup_steps": 0}


def settings(**changes):
    return build_config(nested(PPO | {key.replace("__", "."): value for key, value in changes.items()}))


def critic_of(head=True, **changes):
    config = settings(**changes)
    found = make_critic(config, load_model(random_model("qwen2")))
    assert found is not None
    if head:
        torch.manual_seed(1)
        with torch.no_grad():
            found.trainer.policy.model.score.weight.normal_()
    return found


def batch_of(seed=0):
    batch = pack(random_groups(SHAPE, seed))
    rng = np.random.default_rng(seed)
    columns = {name: rng.normal(size=batch.num_response_tokens).astype(np.float32) for name in ("values", "returns")}
    return batch.with_columns(**columns)


def test_values_are_those_of_the_states_before_and_behind_each_token():
    """By Transformers' own model and attention, of each text alone."""
    critic, batch = critic_of(), batch_of()
    found = critic.columns(batch)
    head, plain, first = critic.trainer.policy.model.score.weight, random_model("qwen2"), 0
    for number, start in enumerate(np.cumsum(batch.lengths) - batch.lengths):
        ids = torch.from_numpy(batch.token_ids[start : start + batch.lengths[number]])[None]
        with torch.no_grad():
            hidden = plain.base_model(input_ids=ids, use_cache=False).last_hidden_state
            scores = (hidden @ head.T)[0, :, 0].numpy()
        prompt, tokens = batch.prompt_lengths[number], batch.response_lengths[number]
        part = slice(first, first + tokens)
        assert found["values"][part] == pytest.approx(scores[prompt - 1 : -1], abs=1e-4)
        assert found["after"][part] == pytest.approx(scores[prompt:], abs=1e-4)  # the last one: behind all of it
        first += tokens


def test_a_batch_with_a_token_more_is_the_same_before_it():
    batch = batch_of()
    longer = one_token_longer(batch)
    assert longer.num_tokens == batch.num_tokens + batch.num_samples and not longer.columns
    again = np.delete(longer.token_ids, np.cumsum(longer.lengths) - 1)
    assert again.tolist() == batch.token_ids.tolist() and longer.mask.sum() == batch.mask.sum()


@pytest.mark.parametrize("shared", [False, True])
def test_packing_cuts_and_order_change_neither_values_nor_gradient(shared):
    batch, found = batch_of(3), []
    rng = np.random.default_rng(0)
    for budget, order in ((32, None), (400, None), (64, rng.permutation(batch.num_samples))):
        critic = critic_of(training__tokens_per_micro_batch=budget, algorithm__critic__share_backbone=shared)
        cut = batch if order is None else batch.select(order)
        back = slice(None) if order is None else np.argsort(batch.response_index(order))
        values = critic.columns(cut)["values"][back]
        report = critic.trainer.update(cut, critic.inputs(cut), ValueObjective(0.5))
        found.append((values, report))
    (values, first), *others = found
    for other, report in others:
        assert other == pytest.approx(values, abs=1e-5)
        assert (report.loss, report.grad_norm) == pytest.approx((first.loss, first.grad_norm), rel=1e-4)
    assert first.micro_batches > others[0][1].micro_batches


def test_the_gradient_is_that_of_a_plain_model(monkeypatch):
    """Of every parameter: Transformers' own model, text by text, and the formula of the loss with autograd."""
    critic, batch, original, ours = critic_of(), batch_of(2), Trainer._apply, {}
    batch = replace(batch, mask=np.random.default_rng(0).random(batch.num_response_tokens) < 0.7)
    plain, start, losses = random_model("qwen2"), 0, []
    head = critic.trainer.policy.model.score.weight.detach().clone().requires_grad_()
    for number, first in enumerate(np.cumsum(batch.lengths) - batch.lengths):
        ids = torch.from_numpy(batch.token_ids[first : first + batch.lengths[number]])[None]
        hidden = plain.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = (hidden @ head.T)[0, batch.prompt_lengths[number] - 1 : -1, 0]
        part = slice(start, start := start + len(found))
        old, returns = (torch.from_numpy(batch.columns[name][part]) for name in ("values", "returns"))
        held = torch.min(torch.max(found, old - 0.5), old + 0.5)
        loss = torch.max((found - returns) ** 2, (held - returns) ** 2) / 2
        losses.append(loss[torch.from_numpy(batch.mask[part])])
    expected = torch.cat(losses).mean()
    expected.backward()

    def kept(self, totals):
        ours.update({name: p.grad.clone() for name, p in self._parameters.items()})
        return original(self, totals)

    monkeypatch.setattr(Trainer, "_apply", kept)
    told = critic.learn(batch, lambda: False)
    assert told["critic/loss"][0] / told["critic/loss"][1] == pytest.approx(expected.item(), abs=1e-5)
    theirs = {f"model.{name}": p.grad for name, p in plain.base_model.named_parameters()} | {"score.weight": head.grad}
    assert ours.keys() == theirs.keys() and theirs["score.weight"].abs().max() > 1e-2
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-5, msg=name)


def test_the_head_begins_with_zeros_and_a_shared_one_leaves_the_policy_alone():
    """Not the policy's weights, nor their gradients: what the critic learns is its head."""
    for shared in (False, True):
        model = load_model(random_model("qwen2"))
        config = settings(algorithm__critic__share_backbone=shared, algorithm__critic__learning_rate=0.01)
        critic = make_critic(config, model)
        policy = Trainer(model, config.training, 1.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        batch = batch_of()
        assert not critic.columns(batch)["values"].any()
        report = critic.trainer.update(batch, critic.inputs(batch), ValueObjective(None))
        assert report.grad_norm > 0 and critic.columns(batch)["values"].any()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        mine = {id(p) for p in critic.trainer._parameters.values()}
        assert mine.isdisjoint(id(p) for p in policy._parameters.values()) and (len(mine) == 1) is shared


@pytest.mark.parametrize("kept", ["copy", "offload"])
def test_a_reference_stays_what_the_policy_was(kept):
    trainer = Trainer(load_model(random_model("qwen2")), settings(training__learning_rate=0.01).training, 1.0)
    batch = batch_of()
    before, reference = trainer.logprobs(batch), reference_policy(trainer.policy, kept)
    assert torch.equal(reference.logprobs(batch), before)
    given = batch.with_columns(advantages=batch.columns["returns"])
    trainer.update(batch, objective_inputs(given, settings().algorithm, 17, trainer.device), DapoObjective())
    assert torch.equal(reference.logprobs(batch), before) and not torch.equal(trainer.logprobs(batch), before)


def test_the_base_is_a_reference_without_a_copy():
    """An adapter that adds something, and is on again afterwards."""
    pytest.importorskip("peft")
    from dapo.model.adapters import adapter_parameters, new_adapter

    base = load_model(random_model("qwen2"))
    plain = Trainer(load_model(random_model("qwen2")), settings().training, 1.0)
    model = new_adapter(base, 4, 8.0, "all-linear", 0)
    trainer, batch = Trainer(model, settings().training, 1.0), batch_of()
    reference = reference_policy(trainer.policy, "base")
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.1)
    trained = trainer.logprobs(batch)
    with pytest.raises(ConfigError, match="use reference=copy"):
        reference_policy(trainer.policy, "base")
    assert reference.model is trainer.policy.model
    torch.testing.assert_close(reference.logprobs(batch), plain.logprobs(batch))
    assert torch.equal(trainer.logprobs(batch), trained) and not torch.equal(trained, plain.logprobs(batch))
    assert all(p.requires_grad for p in adapter_parameters(model).values())


def test_an_update_that_was_made_ahead_of_the_policys_is_not_made_again(tmp_path):
    critic, batch = critic_of(), batch_of()
    told = critic.learn(batch, lambda: False)
    weights = critic.trainer.policy.model.score.weight.detach().clone()
    critic.save(tmp_path)
    other = replace(critic, ahead=None)
    other.load(tmp_path)
    assert other.learn(batch, lambda: False) == told and told["critic/loss"][1] == batch.mask.sum()
    assert torch.equal(critic.trainer.policy.model.score.weight, weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": VOCAB - 1}, f"has {VOCAB - 1} embedding rows, the policy {VOCAB}"),
        ({"max_position_embeddings": 25}, "has 25 positions, but .* are 26"),
        ({"max_position_embeddings": 26}, None),
    ],
)
def test_a_critic_that_cannot_read_what_the_policy_writes_is_refused(tmp_path, changes, said):
    random_model("qwen2", **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"algorithm.critic.model: .*{said}") if said else nullcontext():
        critic_of(algorithm__critic__model=str(tmp_path))


def test_a_critic_of_the_same_tokens_may_have_fewer_rows_and_one_of_others_is_refused(tmp_path):
    from served import byte_tokenizer

    for name, tokens in (("same", byte_tokenizer()), ("policy", byte_tokenizer()), ("other", byte_tokenizer())):
        random_model("qwen2", vocab_size=VOCAB - 1).save_pretrained(tmp_path / name)
        if name == "other":
            tokens.add_tokens(["<new>"])  # the policy's, too, by another number
        tokens.save_pretrained(tmp_path / name)
    paths = {"model__path": str(tmp_path / "policy"), "algorithm__critic__model": str(tmp_path / "same")}
    weight = critic_of(**paths).trainer.policy.model.get_input_embeddings().weight
    assert len(weight) == VOCAB and not weight[-1].any() and weight[-2].any()
    paths["model__path"], paths["algorithm__critic__model"] = str(tmp_path / "other"), str(tmp_path / "same")
    with pytest.raises(ModelError, match=r"for 1 of .* tokens, such as '<new>'"):
        critic_of(**paths)
