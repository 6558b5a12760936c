"""The trainer on a GPU: the gradient of a plain padded float32 reference, whatever is compiled, packed and shared."""

from __future__ import annotations

import copy
import os
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from training_cases import distance, gradient, make_inputs, make_trainer, packed, random_groups

from dapo.algorithm.objective import DapoObjective, TokenInputs
from dapo.model import head as head_module
from dapo.model.forward import Head
from dapo.model.head import token_logprobs
from dapo.records import TokenBatch
from dapo.training.micro_batch import MicroBatch, micro_batch
from helpers import ARCHITECTURES, random_model

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products, before there is a handle
pytestmark = pytest.mark.gpu

# prompts that their samples share, an empty response, one longer than the kernels' blocks
SHAPE = [(40, [50, 1, 190, 33]), (7, [20, 0, 120]), (130, [300, 4]), (2, [17])]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def random_batch(shape: Any = SHAPE, seed: int = 0) -> TokenBatch:
    return packed(random_groups(shape, seed=seed))


def whole(batch: TokenBatch) -> MicroBatch:
    return micro_batch(batch, np.arange(batch.num_samples), torch.device("cuda"))


def trainer_on_gpu(model: Any = None, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    model = random_model("qwen2", **WIDE) if model is None else model
    return make_trainer(model.cuda(), compute_dtype=dtype, **({"tokens_per_micro_batch": 1024} | settings))


def plain_gradient(model: Any, batch: TokenBatch, inputs: TokenInputs) -> torch.Tensor:
    """By Transformers alone: a row per sequence, padded, float32, whole logits."""
    model = model.float().cuda()
    rows = torch.zeros(batch.num_samples, int(batch.lengths.max()), dtype=torch.long, device="cuda")
    mask = torch.zeros_like(rows)
    start = 0
    for row, length in enumerate(batch.lengths.tolist()):
        rows[row, :length] = torch.from_numpy(batch.token_ids[start : start + length])
        mask[row, :length] = 1
        start += length
    logprobs = model(rows, attention_mask=mask).logits.float().log_softmax(-1)
    found = [
        logprobs[row, prompt - 1 : length - 1].gather(1, rows[row, prompt:length, None])[:, 0]
        for row, (prompt, length) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True))
    ]
    loss, _ = DapoObjective()(torch.cat(found), torch.zeros_like(inputs.weights), inputs)
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def alone(batch: TokenBatch) -> TokenBatch:
    """Each sample a group of its own."""
    return replace(batch, draws=np.arange(batch.num_samples))


def near_policy(trainer: Any, batch: TokenBatch) -> TokenInputs:
    """Inputs whose old log-probs are the policy's own, so that no ratio is clipped by chance."""
    behaviour = trainer.logprobs(batch).cpu().numpy()
    return make_inputs(replace(batch, behaviour_logprobs=behaviour), device=trainer.device)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_heads_kernels_are_the_formulas(softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 64, device="cuda"), torch.randn(5000, 64, device="cuda") / 4
    targets = torch.randint(5000, (700,), device="cuda")
    results = []
    for device, dtype, chunk in (
        ("cpu", torch.float64, None),
        ("cuda", torch.float32, None),
        ("cuda", torch.float32, 256),
    ):
        leaves = [x.bfloat16().to(device, dtype).requires_grad_() for x in (hidden, weight)]
        logprobs, entropy = token_logprobs(
            leaves[0], Head(leaves[1], None, softcap), targets.to(device), 0.8, chunk, torch.bfloat16
        )
        (logprobs * torch.linspace(-1, 1, 700, device=device)).sum().add(0.1 * entropy.sum()).backward()
        results.append([logprobs, entropy, *(x.grad for x in leaves)])
    for found in results[1:]:
        for have, want, tolerance in zip(found, results[0], (1e-5, 1e-5, 0.01, 0.01), strict=True):
            assert distance(have.cpu().double(), want) < tolerance


@pytest.mark.parametrize("how", ["as it can", "by a sum"])
def test_chunks_of_the_head_add_to_the_gradient_that_is_there(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whether or not PyTorch's products can."""
    if how == "by a sum":
        monkeypatch.setattr(head_module, "_adds_wide", lambda device: False)
    torch.manual_seed(0)
    hidden, weight = ((torch.randn(n, 64, device="cuda") / 2).bfloat16() for n in (700, 5000))
    targets, slopes = torch.randint(5000, (700,), device="cuda"), torch.linspace(-1, 1, 700, device="cuda")
    exact = [x.cpu().double().requires_grad_() for x in (hidden, weight)]
    logprobs, _ = token_logprobs(exact[0], Head(exact[1]), targets.cpu(), 0.8)
    (logprobs * slopes.cpu()).sum().backward()
    leaf, head = hidden.float().requires_grad_(), Head(weight.float().requires_grad_())
    before = head.weight.grad = torch.randn_like(head.weight)
    was, head = before.clone(), head_module.for_chunks(head, leaf, torch.bfloat16)
    for rows in head_module.chunks(700, 256):
        found, _ = token_logprobs(leaf[rows], head, targets[rows], 0.8, product_dtype=torch.bfloat16)
        (found * slopes[rows]).sum().backward()
    assert head.weight.grad is before
    for have, want in ((before - was, exact[1].grad), (leaf.grad, exact[0].grad)):
        assert distance(have.cpu().double(), want) < 0.01


def test_a_copy_of_the_policy_computes_the_same_bits() -> None:
    """So that the KL term of what has learned nothing is 0."""
    trainer, batch = trainer_on_gpu(), random_batch()
    assert torch.equal(trainer.policy.frozen_copy().logprobs(batch), trainer.logprobs(batch))


def test_the_gradient_is_that_of_a_padded_float32_reference() -> None:
    model = random_model("qwen2", **WIDE)
    batch = random_batch()
    narrow, exact = trainer_on_gpu(copy.deepcopy(model)), trainer_on_gpu(copy.deepcopy(model), torch.float32)
    inputs = near_policy(exact, batch)
    want = plain_gradient(model, batch, inputs)
    assert distance(gradient(exact, batch, inputs), want) < 1e-4
    with torch.autocast("cuda", torch.bfloat16):
        noise = distance(plain_gradient(model, batch, inputs), want)
    assert distance(gradient(narrow, batch, inputs), want) < 1.2 * noise < 0.2


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_trains_compiled(architecture: str) -> None:
    model = random_model(architecture)
    batch = random_batch([(9, [5, 12]), (3, [20])])
    narrow, exact = trainer_on_gpu(copy.deepcopy(model)), make_trainer(model.cpu(), tokens_per_micro_batch=64)
    inputs = near_policy(exact, batch)
    moved = TokenInputs(
        **{f.name: None if (v := getattr(inputs, f.name)) is None else v.cuda() for f in fields(inputs)}
    )
    want = gradient(exact, batch, inputs)
    assert distance(gradient(narrow, batch, moved).cpu(), want) < 0.15  # weights this large amplify bfloat16


def test_sharing_prompts_does_not_change_the_gradient() -> None:
    batch = random_batch()
    trainer = trainer_on_gpu()
    inputs = near_policy(trainer, batch)
    shared = gradient(trainer, batch, inputs)
    apart = alone(batch)
    assert whole(apart).num_computed_tokens > 1.25 * whole(batch).num_computed_tokens
    # in bfloat16; float32 is compared with a plain reference in test_packing_properties
    assert distance(gradient(trainer, apart, inputs), shared) < 0.02


def test_nothing_is_compiled_again_and_memory_does_not_grow() -> None:
    trainer = trainer_on_gpu(learning_rate=1e-5)
    held = []
    for step in range(30):
        lengths = [[5 + (7 * step + 11 * i + 3 * g) % 60 for i in range(4)] for g in range(6)]
        batch = random_batch([(3 + (step + g) % 9, some) for g, some in enumerate(lengths)], seed=step)
        report = trainer.update(batch, near_policy(trainer, batch), DapoObjective())
        assert report.skipped is None
        if step == 3:
            counters.clear()
        if step in (4, 29):
            held.append(torch.cuda.memory_allocated())
    assert not counters["stats"].get("unique_graphs")
    assert held[1] <= 1.01 * held[0]


def test_an_update_is_the_same_twice_when_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            trainer = trainer_on_gpu(random_model("qwen2", **WIDE))
            batch = random_batch()
            inputs = near_policy(trainer, batch)
            losses = [trainer.update(batch, inputs, DapoObjective()).loss for _ in range(3)]
            found.append((losses, [p.clone() for _, p in trainer.publish()[1]]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_fault_is_named_though_layers_are_compiled() -> None:
    trainer = trainer_on_gpu()
    with torch.no_grad():
        trainer.policy.model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 3] = torch.nan
    batch = random_batch()
    said = trainer.update(batch, make_inputs(batch, device="cuda"), DapoObjective()).skipped
    assert said is not None and "the weights of model.layers.1.mlp.up_proj.weight are not finite themselves" in said
    assert "not finite is model.layers.1.mlp.up_proj;" in said
