"""What can be asked of the trainer on a GPU, where its layers are compiled: each option beside the plain way.

Checkpointing of activations, adapters, an optimizer whose moments lie on the host, and more responses than fit into one
chunk of the output head.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from training_cases import distance, gradient, make_inputs, make_trainer, packed, random_groups, weights_of

from dapo.algorithm.objective import DapoObjective
from dapo.config.sections import ModelConfig, TrainingConfig
from dapo.model.adapters import adapter_parameters
from dapo.model.forward import output_head
from dapo.model.head import chunks
from dapo.model.packed import PackedAttention
from dapo.records import TokenBatch
from dapo.training import policy
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.moments import StoredAdamW
from dapo.training.trainer import Trainer
from helpers import random_model

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products, before there is a handle
pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPE = [(40, [50, 1, 190, 33]), (7, [20, 0, 120]), (2, [17])]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = 3


def random_batch(shape: Any = SHAPE) -> TokenBatch:
    return packed(random_groups(shape))


def wide_trainer(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Trainer:
    model = random_model("qwen2", **WIDE, num_hidden_layers=LAYERS).to(DEVICE)
    return make_trainer(model, compute_dtype=dtype, **({"tokens_per_micro_batch": 1024} | settings))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_compiled_layers_are_computed_again_in_the_backward_pass(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    forward = PackedAttention.forward

    def counted(self: PackedAttention, *args: Any) -> Any:
        calls.append(None)
        return forward(self, *args)

    monkeypatch.setattr(PackedAttention, "forward", counted)
    batch = random_batch()
    inputs = make_inputs(batch, device=DEVICE)
    found = []
    for checkpointing in (False, True):
        trainer = wide_trainer(activation_checkpointing=checkpointing)
        calls.clear()
        found.append((gradient(trainer, batch, inputs), len(calls)))
    (plain, once), (recomputed, twice) = found
    assert (once, twice) == (LAYERS, 2 * LAYERS)
    assert distance(recomputed, plain) < 1e-3


def adapter_trainer(base: Path, dtype: str) -> Trainer:
    """With numbers in both matrices of the adapter."""
    config = ModelConfig(path=str(base), compute_dtype=dtype, lora={"rank": 4})
    model = begin_adapter(load_trainable(base, config), config, 0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    settings = TrainingConfig(learning_rate=1e-3, warmup_steps=0, tokens_per_micro_batch=1024, max_grad_norm=1e9)
    return Trainer(model.to(DEVICE), settings, 1.0, getattr(torch, dtype))


def test_an_adapter_trains_compiled_as_it_does_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float32, in gradient and after an update, as layers that are not compiled."""
    pytest.importorskip("peft")
    random_model("qwen2", **WIDE).save_pretrained(tmp_path)
    torch._dynamo.reset()
    compiled = adapter_trainer(tmp_path, "bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr("dapo.training.trainer.compile_layers", lambda model: None)
        plain, exact = (adapter_trainer(tmp_path, dtype) for dtype in ("bfloat16", "float32"))
    batch = random_batch()
    behaviour = exact.logprobs(batch).cpu().numpy()  # no ratio is clipped by chance
    inputs = make_inputs(replace(batch, behaviour_logprobs=behaviour), device=DEVICE)
    graphs, gradients, changes, logprobs = [], [], [], []
    for trainer in (compiled, plain, exact):
        counters.clear()
        gradients.append(gradient(trainer, batch, inputs))
        graphs.append(counters["stats"]["unique_graphs"])
        before = weights_of(trainer)
        assert trainer.update(batch, inputs, DapoObjective()).skipped is None
        changes.append(weights_of(trainer) - before)
        logprobs.append(trainer.logprobs(batch))
    assert graphs[0] > 0 == graphs[1] == graphs[2]
    for found, bound in ((gradients, 0.4), (changes, 0.8), (logprobs, 0.1)):  # Adam's first step is mostly signs
        noise = distance(found[1], found[2])
        assert distance(found[0], found[2]) < 1.3 * noise + 1e-3 < bound


def test_moments_on_the_host_give_the_weights_that_those_on_the_gpu_give(
    deterministic: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo.training.moments.StoredAdamW", partial(StoredAdamW, part=2**13))
    batch = random_batch()
    inputs = make_inputs(batch, device=DEVICE)

    def updated(trainer: Trainer) -> torch.Tensor:
        assert trainer.update(batch, inputs, DapoObjective()).skipped is None
        return weights_of(trainer)

    plain, offloaded = wide_trainer(), wide_trainer(offload_optimizer=True)
    for _ in range(2):
        assert torch.equal(updated(plain), updated(offloaded))
    state = next(iter(offloaded._optimizer.state.values()))
    assert state["exp_avg"].device.type == "cpu" and state["exp_avg"].is_pinned() == (DEVICE == "cuda")
    offloaded.save(tmp_path / "model")
    offloaded.save_state(tmp_path / "optimizer")
    resumed = wide_trainer(offload_optimizer=True)
    resumed.load(tmp_path / "model")
    resumed.load_state(tmp_path / "optimizer")
    assert torch.equal(updated(plain), updated(resumed))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_several_chunks_of_the_head_give_the_gradient_of_one(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(
        [(5, [240] * 18), (9, [200] * 24)]
    )  # 9,120 responses' tokens: on a GPU chunks have 8,192 at most
    inputs = make_inputs(batch, device=DEVICE)
    results = []
    for at_once in (None, 2**20):
        trainer = wide_trainer(dtype, tokens_per_micro_batch=16384)
        if at_once is not None:
            for place in ("dapo.training.policy.chunk_rows", "dapo.model.head.chunk_rows"):
                monkeypatch.setattr(place, lambda *_, at_once=at_once: at_once)
        vocabulary = output_head(trainer.policy.model).weight.shape[0]
        at_a_time = policy.chunk_rows(torch.device(DEVICE), vocabulary)
        parts = len(list(chunks(batch.num_response_tokens, at_a_time)))
        found = gradient(trainer, batch, inputs)
        report = trainer.update(batch, inputs, DapoObjective())
        assert report.micro_batches == 1 and report.logprobs is not None
        results.append((parts, found, report))
    (parts, chunked, first), (whole, alone, second) = results
    assert parts > 1 == whole
    assert distance(chunked, alone) < tolerance
    assert first.loss == pytest.approx(second.loss, rel=1e-3, abs=1e-3)
    assert distance(*map(torch.from_numpy, (first.logprobs, second.logprobs))) < tolerance
