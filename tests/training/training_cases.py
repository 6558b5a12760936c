"""What the training tests share: groups with random tokens, inputs of the objective, and gradients made visible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dapo.algorithm.objective import DapoObjective
from dapo.config import AlgorithmConfig, TrainingConfig
from dapo.model.loading import load_model
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.learner import objective_inputs
from dapo.training.packing import advantage_column, pack
from dapo.training.trainer import Trainer
from helpers import VOCAB, random_model

CORRECT = Reward(correct=True, value=1.0)


def make_sample(token_ids, *, index=0, logprobs=None, version=0, **fields):
    n = len(token_ids)
    return Sample(
        request_id=0,
        index=index,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(np.full(n, -1.0) if logprobs is None else logprobs, dtype=np.float32),
        versions=np.full(n, version, dtype=np.int32),
        finish_reason="stop",
        **({"reward": CORRECT, "advantage": 1.0} | fields),
    )


def make_group(draw, prompt_ids, samples):
    numbered = tuple(replace(sample, index=i) for i, sample in enumerate(samples))
    return Group(draw, Prompt(row=draw, text="", token_ids=tuple(prompt_ids)), numbered)


def random_groups(shape, seed=0, in_loss=lambda draw, index: True):
    """``shape``: for each group (prompt length, response lengths)."""
    rng = np.random.default_rng(seed)
    groups = []
    for draw, (prompt_length, response_lengths) in enumerate(shape):
        samples = [
            make_sample(
                rng.integers(VOCAB, size=n),
                logprobs=-4.0 + rng.normal(size=n),
                advantage=float(rng.normal()),
                in_loss=in_loss(draw, i),
            )
            for i, n in enumerate(response_lengths)
        ]
        groups.append(make_group(draw, rng.integers(VOCAB, size=prompt_length).tolist(), samples))
    return groups


SHAPE = [(3, [5, 1, 9]), (1, [2, 0, 12]), (6, [4, 4]), (2, [17, 3])]


def packed(groups):
    """With the advantages that the samples have."""
    return pack(groups).with_columns(advantages=advantage_column(groups))


def make_inputs(batch, mode="token-mean", constant=None, device="cpu"):
    """Inputs as the loop makes them, with pi_prox = pi_engine."""
    return objective_inputs(batch, AlgorithmConfig(loss_agg_mode=mode, loss_constant=constant), 1, torch.device(device))


def make_trainer(model="qwen2", *, temperature=1.0, compute_dtype=torch.float32, seed=0, **settings):
    if isinstance(model, str):
        model = random_model(model, seed=seed)
    defaults = {"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9, "tokens_per_micro_batch": 64}
    config = TrainingConfig(**(defaults | settings))
    return Trainer(load_model(model), config, temperature, compute_dtype)


def with_budget(trainer, tokens):
    trainer.policy = replace(trainer.policy, tokens_per_micro_batch=tokens)
    return trainer


def weights_of(trainer):
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.publish()[1]])


class GradientTaken(Exception):
    """Ends an update before it changes the weights."""


def gradient(trainer, batch, inputs, objective=None):
    """The gradient of one update as a flat vector; the weights stay as they are."""
    taken = []

    def take(optimizer, args, kwargs):
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in optimizer.param_groups[0]["params"]]
        taken.append(torch.cat([g.flatten() for g in grads]))
        raise GradientTaken

    hook = trainer._optimizer.register_step_pre_hook(take)
    try:
        trainer.update(batch, inputs, objective or DapoObjective())
    except GradientTaken:
        return taken[0]
    finally:
        hook.remove()
    raise AssertionError("the update was skipped")


def distance(a, b):
    """Relative difference of two vectors."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))
