"""Layers that are computed once more in the backward pass: the same gradient from less memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from dapo.model.activation_checkpointing import checkpoint_layers
from dapo.model.compiling import compile_layers, decoder_layers
from dapo.model.forward import hidden_states, output_head
from dapo.model.head import token_logprobs
from dapo.model.loading import copy_model, load_model
from dapo.model.packed import PackedAttention
from helpers import VOCAB, random_model

LENGTHS = [20, 9, 31]
IDS = torch.randint(2, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def forward(model: Any, autocast: bool = False) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        hidden = hidden_states(model, IDS, POSITIONS, PackedAttention(LENGTHS))
    logprobs, entropy = token_logprobs(hidden, output_head(model), IDS.roll(-1), 1.0)
    return logprobs.sum() + 0.1 * entropy.sum()


def gradients(model: Any, autocast: bool = False) -> dict[str, torch.Tensor]:
    """As a GPU makes them: the backward pass runs in another thread, which knows of no attention context."""
    model.zero_grad()
    loss, failed = forward(model, autocast), []

    def backward() -> None:
        try:
            torch.autograd.backward(loss)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_the_gradient_is_the_same_to_the_bit(name: str, autocast: bool) -> None:
    model = load_model(random_model(name))
    expected = gradients(model, autocast)
    checkpoint_layers(model)
    assert_same(gradients(model, autocast), expected, atol=0, rtol=0)


def test_compiled_layers_are_recomputed_by_their_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer has them on a GPU. Nobody but the graph holds on to the layout of the row."""
    monkeypatch.setattr("dapo.model.compiling.keep_compiled_code", lambda: None)
    plain = load_model(random_model("gemma2"))
    model = copy_model(plain).requires_grad_()
    torch._dynamo.reset()
    compile_layers(model, backend="aot_eager")
    expected = gradients(model)
    assert_same(expected, gradients(plain), atol=1e-5, rtol=1e-4)
    before = counters["stats"]["unique_graphs"]
    checkpoint_layers(model)
    monkeypatch.delattr(PackedAttention, "attend")  # which only layers that are not compiled call
    assert_same(gradients(model), expected, atol=0, rtol=0)
    assert counters["stats"]["unique_graphs"] == before > 0, "nothing was compiled anew"


def kept_bytes(model: Any) -> int:
    """Of the tensors that a forward pass keeps for the backward pass, the inputs of the layers included."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> None:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        note(tensor)
        return tensor

    parameters = {p.data_ptr() for p in model.parameters()}
    hooks = [layer.register_forward_pre_hook(lambda _, given: note(given[0])) for layer in decoder_layers(model)]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model)
    for hook in hooks:
        hook.remove()
    assert loss.requires_grad
    return sum(size for place, size in kept.items() if place not in parameters)


def test_far_less_is_kept_for_the_backward_pass() -> None:
    model = load_model(random_model("qwen2", num_hidden_layers=6))
    plain = kept_bytes(model)
    checkpoint_layers(model)
    assert kept_bytes(model) < plain / 4


def test_without_gradient_nothing_is_kept_and_a_copy_is_a_plain_model() -> None:
    model = load_model(random_model("qwen2"))
    with torch.no_grad():
        expected = forward(model)
    checkpoint_layers(model)
    with torch.no_grad():
        assert torch.equal(forward(model), expected)
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(copy_model(model, torch.float32)))
