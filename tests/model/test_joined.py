"""Joined products give what the layers themselves give, and their parameters stay what they were: names, gradients,
and the place that new weights are written to. Without a copy of any number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from dapo.model.adapters import new_adapter
from dapo.model.compiling import compile_layers
from dapo.model.forward import hidden_states
from dapo.model.joined import join_products
from dapo.model.loading import copy_model, load_model
from dapo.model.packed import PackedAttention
from helpers import ARCHITECTURES, VOCAB, random_model

NARROW, WIDE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
PRODUCTS = {"gpt2": 0}  # joined as it comes; all others: two a layer


def forward(model: Any, lengths: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return hidden_states(model, tokens, positions, PackedAttention(lengths))


def decoded(model: Any, lengths: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return forward(model, lengths)


def trained(model: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The hidden states, and the gradients of some sum over them."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
        hidden = forward(model, [4, 2])
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(model: Any, dtype: torch.dtype | None = None) -> Any:
    twin = copy_model(model, torch.float32).requires_grad_(dtype is not None)
    join_products(twin, dtype)
    return twin


def layers_by_themselves(model: Any, names: tuple[str, ...] = NARROW + WIDE) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and name.endswith(names)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_weights_are_written_through_the_parameters(architecture: str) -> None:
    model, other = (load_model(random_model(architecture, seed=seed)) for seed in (1, 2))
    twin = joined(model)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert layers_by_themselves(twin) == []
    torch.testing.assert_close(decoded(twin, [7, 3]), decoded(model, [7, 3]), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(twin.named_parameters(), other.named_parameters(), strict=True):
            mine.copy_(theirs)
    torch.testing.assert_close(decoded(twin, [7, 3]), decoded(other, [7, 3]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gpt2"])
def test_no_weight_is_held_twice(architecture: str) -> None:
    def held(model: Any) -> int:
        tensors = [*model.parameters(), *model.buffers()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    model = load_model(random_model(architecture))
    twin = joined(model)
    assert held(twin) == held(model)
    products = [name for name, buffer in twin.named_buffers() if name.endswith("joined_weight")]
    assert len(products) == PRODUCTS.get(architecture, 2 * model.config.num_hidden_layers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_have_the_gradients_of_single_products(architecture: str) -> None:
    model = load_model(random_model(architecture))
    twin = joined(model, torch.float32)
    assert layers_by_themselves(twin) == layers_by_themselves(model, WIDE)
    assert twin.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(trained(twin), trained(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_copy_has_layers_of_its_own(dtype: torch.dtype | None) -> None:
    model = load_model(random_model("qwen2"))
    twin = joined(model, dtype)
    narrow, same = copy_model(twin, torch.bfloat16), copy.deepcopy(twin)
    for copied in (narrow, same):
        assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(decoded(same, [5]), decoded(model, [5]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_layers_that_cannot_be_joined_stay_as_they_are(dtype: torch.dtype | None) -> None:
    """Of a base under an adapter, which may be another engine's too; and of layers that differ."""
    pytest.importorskip("peft")
    model = load_model(random_model("qwen2"))
    adapted = new_adapter(copy.deepcopy(model), 2, 4.0, ["q_proj"], seed=0)
    before = layers_by_themselves(adapted)
    join_products(adapted, dtype)
    assert layers_by_themselves(adapted) == before
    for layer in model.base_model.layers:
        layer.self_attn.k_proj.bias = None
    assert layers_by_themselves(joined(model, dtype), NARROW) == layers_by_themselves(model, NARROW)


def test_compiled_layers_share_one_piece_of_code_with_four_products() -> None:
    model = load_model(random_model("qwen2", num_hidden_layers=4))
    twin = joined(model)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    compile_layers(twin, backend=keep)
    for lengths in ([67], [5, 3], [16], [40, 2]):
        torch.testing.assert_close(decoded(twin, lengths), decoded(model, lengths), atol=1e-5, rtol=1e-5)
    (graph,) = graphs
    products = [node for node in graph.graph.nodes if node.target is torch._C._nn.linear]
    assert len(products) == 4  # query with key and value, output, gate with up, down


def test_layers_that_are_trained_compiled_share_one_piece_of_code_and_round_as_plain_ones() -> None:
    plain = load_model(random_model("qwen2", num_hidden_layers=3))
    twin = copy.deepcopy(plain)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(twin, torch.bfloat16, backend="aot_eager")
    assert layers_by_themselves(twin, NARROW) == []
    (want, slopes), exact = trained(plain, torch.bfloat16), trained(plain)[1]
    have, found = trained(twin, torch.bfloat16)
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(have, want, atol=0.02, rtol=0.02)
    for name, slope in slopes.items():
        error, noise = ((x - exact[name]).norm() for x in (found[name], slope))
        assert error < 1.5 * noise + 1e-3 * exact[name].norm(), name
