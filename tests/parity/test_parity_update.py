"""The same model, responses and rewards: the gradient of every parameter from our trainer and from TRL's.

Everything is real on both sides: TRL pads, masks, runs the model and its own head; we pack. Temperature, advantages,
clipping against an older policy and the divisor have to agree for the gradients to be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conformance.scripted import word_tokenizer
from conformance.trl_trainer import make_trainer

from dapo.config import Config, build_config, nested
from dapo.model.loading import load_model
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.learner import LocalLearner
from dapo.training.micro_batch import micro_batches, select_tokens
from dapo.training.trainer import Trainer
from helpers import VOCAB, random_model

GROUPS, SIZE, LIMIT, TEMPERATURE = 2, 4, 9, 0.8
LOSS_TYPES = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "constant"}


def _responses() -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts, responses that end with the stop token 1 or at the limit, rewards."""
    rng = np.random.default_rng(0)
    prompts = [prompt for prompt in (rng.integers(2, VOCAB, n).tolist() for n in (3, 5)) for _ in range(SIZE)]
    responses = []
    for n in (LIMIT, 3, 1, 7, 2, LIMIT, 5, 8):
        body = rng.integers(2, VOCAB, n).tolist()
        responses.append(body if n == LIMIT else [*body[:-1], 1])
    return prompts, responses, [1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 0.5]


def _moved(model: Any) -> None:
    """A step away from the policy that sampled, the same for both trainers."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))


def _theirs(model: Any, loss_type: str, cut: int) -> Mapping[str, torch.Tensor]:
    prompts, responses, rewards = _responses()
    settings: dict[str, Any] = {
        "loss_type": loss_type,
        "temperature": TEMPERATURE,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": 3.0,
        "num_generations": SIZE,
        "max_completion_length": LIMIT,
        "per_device_train_batch_size": GROUPS * SIZE // cut,
        "gradient_accumulation_steps": cut,
    }

    def rollout(_: Any, __: Any) -> dict[str, Any]:
        return {"prompt_ids": prompts, "completion_ids": responses, "logprobs": None}

    trainer = make_trainer(model, word_tokenizer(VOCAB, 1, 0), rollout, **settings)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = cut
    batch = trainer._generate_and_score_completions([{"prompt": "t2", "given": r} for r in rewards])
    _moved(model)
    for part in torch.arange(GROUPS * SIZE).chunk(cut):
        rows = {k: v[part] if torch.is_tensor(v) and v.dim() else v for k, v in batch.items()}
        trainer.compute_loss(trainer.model, rows).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _config(loss_type: str) -> Config:
    settings = {
        "model.path": "m",
        "data.max_prompt_length": 8,
        "rollout.prompts_per_step": GROUPS,
        "rollout.samples_per_prompt": SIZE,
        "rollout.max_response_length": LIMIT,
        "rollout.temperature": TEMPERATURE,
        "algorithm.overlong_buffer.enable": False,
        "algorithm.clip_ratio_c": 3.0,
        "algorithm.loss_agg_mode": LOSS_TYPES[loss_type],
        "algorithm.advantage.epsilon": 1e-4,
        "algorithm.proximal": "recompute",
        "training.groups_per_update": GROUPS,
        "training.tokens_per_micro_batch": 30,
    }
    return build_config(nested(settings), "parity")


def _ours(model: Any, loss_type: str) -> Mapping[str, torch.Tensor]:
    config = _config(loss_type)
    trainer = Trainer(load_model(model), config.training, TEMPERATURE)
    builder = BatchBuilder(config)
    learner = LocalLearner(trainer, config, builder.kl)
    prompts, responses, rewards = _responses()
    samples = [
        Sample(
            request_id=i // SIZE,
            index=i % SIZE,
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.zeros(len(ids), dtype=np.float32),
            versions=np.zeros(len(ids), dtype=np.int32),
            finish_reason="stop" if ids[-1] == 1 else "length",
            reward=Reward(reward > 0, reward),
        )
        for i, (ids, reward) in enumerate(zip(responses, rewards, strict=True))
    ]
    groups = [
        Group(g, Prompt(g, "", tuple(prompts[g * SIZE])), tuple(samples[g * SIZE : (g + 1) * SIZE]))
        for g in range(GROUPS)
    ]
    _, batch = builder.finish(groups, learner.annotated(builder.build(groups)))
    _moved(model)
    ((_, mini),) = builder.minibatches(batch)
    inputs = learner.inputs(mini)
    for part in micro_batches(mini, config.training.tokens_per_micro_batch, trainer.device):
        logprobs, entropy = trainer.policy.evaluate(part)
        loss, _ = learner.objective(logprobs, entropy, select_tokens(inputs, part.index))
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_of_all_parameters_are_equal(loss_type: str, cut: int) -> None:
    model = random_model("qwen2")
    ours = _ours(copy.deepcopy(model), loss_type)
    theirs = _theirs(copy.deepcopy(model), loss_type, cut)
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in ours.values())
    assert largest > 1e-3
    for name, gradient in ours.items():
        # two programs that add in another order: equal to 1e-5 of the largest entry
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5 * max(1.0, largest), rtol=1e-4, msg=name)
