"""``runtime.exact``: the engine's log-probabilities have the trainer's bits, whatever else either of them computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import distance, gradient, make_inputs, packed

from dapo.algorithm.objective import DapoObjective
from dapo.config import TrainingConfig, build_config, nested
from dapo.config.sections import ModelConfig
from dapo.errors import ConfigError
from dapo.model.adapters import adapter_parameters
from dapo.model.loading import copy_model, load_model
from dapo.records import Group, Prompt, Reward, Sample
from dapo.rollout.engine import Draft, Request, Sampling, hand_over
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.exact import RowAttention
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.packing import pack
from dapo.training.trainer import Trainer
from helpers import ARCHITECTURES, VOCAB, put_operations_back, random_model
from run_cases import ON_GPU, run, steps_of

PROMPTS = (1, 3, 20, 33)
LONGEST, TEMPERATURE = 90, 0.8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Other tests of this process have PyTorch's own operations."""
    yield
    put_operations_back()


def exact_trainer(model: Any, dtype: torch.dtype, checkpointing: bool = False) -> Trainer:
    config = TrainingConfig(
        learning_rate=1e-3, warmup_steps=0, tokens_per_micro_batch=2048, activation_checkpointing=checkpointing
    )
    return Trainer(model, config, TEMPERATURE, dtype, attention=RowAttention)


def exact_engine(trainer: Trainer, samples: int = 7, stop_ids: tuple[int, ...] = (1,), **options: Any) -> NativeEngine:
    twin = copy_model(trainer.policy.model, trainer.policy.compute_dtype)
    sizes = {"max_sequence_tokens": LONGEST, "max_concurrent_samples": samples} | options
    return NativeEngine(twin, stop_ids, exact_temperature=TEMPERATURE, **sizes)


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
    longest = int(pack(groups).lengths.max())
    for order, budget in ((groups, 2**14), (groups[::-1], longest), (groups[1:], 3 * longest)):
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


@pytest.mark.parametrize("device", DEVICES)
def test_without_it_they_differ(device: str) -> None:
    model = load_model(random_model("qwen2"), device=device)
    trainer = Trainer(model, TrainingConfig(tokens_per_micro_batch=2048), TEMPERATURE, torch.bfloat16)
    engine = NativeEngine(
        copy_model(model, torch.bfloat16), (1,), max_sequence_tokens=LONGEST, max_concurrent_samples=7
    )
    batch = pack(sampled(engine))
    assert not torch.equal(trainer.logprobs(batch).cpu(), torch.from_numpy(batch.behaviour_logprobs))


def gradient_of(trainer: Trainer, groups: list[Group]) -> torch.Tensor:
    batch = packed(groups)
    return gradient(trainer, batch, make_inputs(batch, device=trainer.device)).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("family", ["qwen2-sliding", "gemma2", "gpt2"])
def test_the_gradient_is_the_ordinary_one(family, dtype, close, checkpointing, device) -> None:
    trainer = exact_trainer(load_model(random_model(family), device=device), dtype, checkpointing)
    ordinary = Trainer(load_model(random_model(family), device=device), trainer._config, TEMPERATURE, torch.float32)
    groups = sampled(exact_engine(trainer))
    expected = gradient_of(ordinary, groups)
    assert expected.norm() > 0.01
    assert distance(gradient_of(trainer, groups), expected) < close


def test_the_first_ratios_are_one_and_after_an_update_they_are_not() -> None:
    trainer = exact_trainer(load_model(random_model("qwen2")), torch.bfloat16)
    batch = packed(sampled(exact_engine(trainer)))
    first = trainer.update(batch, make_inputs(batch), DapoObjective())
    assert first.mismatch.tokens == batch.num_response_tokens and first.mismatch.maximum == 0.0
    again = exact_engine(trainer)
    asyncio.run(hand_over(again, *trainer.publish()))
    assert not torch.equal(trainer.logprobs(batch), torch.from_numpy(batch.behaviour_logprobs))
    assert_equal_bits(trainer, sampled(again))


def test_samples_that_were_interrupted_and_go_on() -> None:
    """What one engine had of them is read in as a prompt by the next one."""
    trainer = exact_trainer(load_model(random_model("qwen3")), torch.bfloat16)
    whole = sampled(exact_engine(trainer))
    engine = exact_engine(trainer, samples=4)

    async def go_on() -> list[Sample]:
        requests = [
            Request(
                group.draw,
                group.prompt.token_ids,
                tuple(range(3 * group.draw, 3 * group.draw + 3)),
                Sampling(TEMPERATURE, 40),
                tuple(
                    Draft(group.draw, s.index, *(tuple(a[:n].tolist()) for a in (s.token_ids, s.logprobs, s.versions)))
                    for s in group.samples
                    if len(s.token_ids) > (n := 7 + s.index)
                ),
            )
            for group in whole
        ]
        found = [sample async for sample in engine.generate(requests)]
        await engine.close()
        return found

    continued = {(s.request_id, s.index): s for s in asyncio.run(go_on())}
    for group in whole:
        for sample in group.samples:
            again = continued[group.draw, sample.index]
            assert np.array_equal(again.token_ids, sample.token_ids)
            assert np.array_equal(again.logprobs, sample.logprobs)


def test_rows_of_other_settings_keep_their_own_log_probabilities() -> None:
    trainer = exact_trainer(load_model(random_model("qwen2")), torch.float32)
    cut = Sampling(TEMPERATURE, 12, top_k=1)

    async def both() -> list[Sample]:
        engine = exact_engine(trainer)
        requests = [Request(0, (4, 5, 6), (1,), cut), Request(1, (4, 5, 6), (2,), Sampling(0.0, 12))]
        found = [sample async for sample in engine.generate(requests)]
        await engine.close()
        return sorted(found, key=lambda sample: sample.request_id)

    first, greedy = asyncio.run(both())
    assert np.array_equal(first.token_ids, greedy.token_ids)
    assert not first.logprobs.any(), "of the one token that is left"
    assert (greedy.logprobs < 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    random_model("qwen2").save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), compute_dtype=str(dtype)[6:], lora={"rank": 4})
    model = begin_adapter(load_trainable(str(tmp_path), settings, device), settings, 0)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.1)
    trainer = exact_trainer(model, dtype)
    groups = sampled(exact_engine(trainer))
    assert_equal_bits(trainer, groups)
    assert gradient_of(trainer, groups).norm() > 0


def test_threads_do_not_matter() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        large = random_model("qwen2", hidden_size=256, intermediate_size=1000, num_hidden_layers=2)
        trainer = exact_trainer(load_model(large), torch.float32)
        assert_equal_bits(trainer, sampled(exact_engine(trainer, threads=2)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_samples_that_lost_their_pages() -> None:
    trainer = exact_trainer(load_model(random_model("qwen2"), device="cuda"), torch.bfloat16)
    page = 3 * 2 * 2 * 32 * 8 * 2  # layers, keys and values, heads, tokens, numbers, bytes
    engine = exact_engine(trainer, 12, (), max_sequence_tokens=250, cache_bytes=32 * page)
    groups = sampled(engine, tokens=200)
    assert engine._decoder.preemptions > 0
    assert_equal_bits(trainer, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_and_real_sizes(dtype: torch.dtype) -> None:
    """Products by both tiles, and steps of many numbers of rows."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    trainer = exact_trainer(load_model(random_model("qwen2", **sizes), device="cuda"), dtype)
    assert_equal_bits(trainer, sampled(exact_engine(trainer, 100), samples=48, tokens=50))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_has_no_mismatch(dtype: str, device: str, tmp_path: Path) -> None:
    changes = {"runtime.exact": True, "runtime.deterministic": False, "training.steps": 2}
    if device == "cuda":
        changes = ON_GPU | changes
    run(tmp_path / "run", changes | {"model.compute_dtype": dtype, "algorithm.kl.mode": "measure"})
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["mismatch/max"] == step["mismatch/mean"] == step["mismatch/k3"] == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.engine", "vllm"),
        ("rollout.device", "cuda:1"),
        ("runtime.kind", "ray"),
        ("rollout.in_flight", "keep"),
    ],
)
def test_what_cannot_be_exact_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"runtime.exact: does not go with {key}={value}; .*{key}="):
        build_config(nested({"model.path": "tiny", "runtime.exact": True, key: value}))


def test_an_engine_from_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.exact: needs the native engine"):
        run(tmp_path / "run", {"runtime.exact": True, "algorithm.proximal": "recompute"}, engine=lambda *_: None)
