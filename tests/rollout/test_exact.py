"""``runtime.exact``: the engine's log-probabilities have the trainer's bits, whatever else either of them computes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dapo.config import TrainingConfig
from dapo.model.exact import row_invariant
from dapo.model.loading import copy_model, load_model
from dapo.records import Group, Prompt, Reward
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.exact import RowAttention
from dapo.training.packing import pack
from dapo.training.trainer import Trainer
from helpers import ARCHITECTURES, VOCAB, random_model

PROMPTS = (1, 3, 20, 33)
LONGEST, TEMPERATURE = 90, 0.8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


def exact_trainer(model: Any, dtype: torch.dtype) -> Trainer:
    config = TrainingConfig(learning_rate=1e-3, warmup_steps=0, tokens_per_micro_batch=2048)
    return Trainer(model, config, TEMPERATURE, dtype, exact=RowAttention)


def exact_engine(trainer: Trainer, samples: int = 7, **options: Any) -> NativeEngine:
    twin = copy_model(trainer.policy.model, trainer.policy.compute_dtype)
    sizes = {"max_sequence_tokens": LONGEST, "max_concurrent_samples": samples} | options
    return NativeEngine(twin, (1,), exact=TEMPERATURE, **sizes)


def sampled(engine: NativeEngine, prompts=PROMPTS, samples: int = 3, tokens: int = 40) -> list[Group]:
    """Groups of ``samples`` for prompts of these lengths."""
    rng = np.random.default_rng(0)
    asked = [Prompt(row=i, text="", token_ids=tuple(rng.integers(2, VOCAB, n).tolist())) for i, n in enumerate(prompts)]

    async def run() -> list[Group]:
        requests = [
            Request(i, p.token_ids, tuple(range(samples * i, samples * (i + 1))), Sampling(TEMPERATURE, tokens))
            for i, p in enumerate(asked)
        ]
        try:
            found = [sample async for sample in engine.generate(requests)]
        finally:
            await engine.close()
        rewarded = [replace(s, reward=Reward(True, 1.0), advantage=float(s.index) - 1) for s in found]
        return [
            Group(i, p, tuple(sorted((s for s in rewarded if s.request_id == i), key=lambda s: s.index)))
            for i, p in enumerate(asked)
        ]

    return asyncio.run(run())


def assert_equal_bits(trainer: Trainer, groups: list[Group]) -> None:
    for order, budget in ((groups, 2048), (groups[::-1], 100), (groups[1:], 300)):
        batch = pack(order)
        trainer.policy = replace(trainer.policy, tokens_per_micro_batch=budget)
        found = trainer.logprobs(batch).cpu()
        assert torch.equal(found, torch.from_numpy(batch.behaviour_logprobs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_engine_and_trainer_have_the_same_bits(family: str, dtype: torch.dtype, device: str) -> None:
    trainer = exact_trainer(load_model(random_model(family), device=device), dtype)
    groups = sampled(exact_engine(trainer))
    assert sum(len(s.token_ids) for g in groups for s in g.samples) > 100
    assert_equal_bits(trainer, groups)
