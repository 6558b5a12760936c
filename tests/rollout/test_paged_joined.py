"""Joined products give what the layers themselves give, and their parameters stay what they were: names, and
the place that new weights are written to. Without a copy of any number."""

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
from dapo.model.loading import copy_model, load_model
from dapo.model.packed import PackedAttention
from dapo.rollout.native.paged.joined import join_products
from helpers import ARCHITECTURES, VOCAB, random_model

NARROW = ("q_proj", "k_proj", "v_proj")
JOINED = (*NARROW, "gate_proj", "up_proj")
PRODUCTS = {"gpt2": 0}  # joined as it comes; all others: two a layer


def forward(model: Any, lengths: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return hidden_states(model, tokens, positions, PackedAttention(lengths))


def decoded(model: Any, lengths: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return forward(model, lengths)


def joined(model: Any) -> Any:
    twin = copy_model(model, torch.float32).requires_grad_(False)
    join_products(twin)
    return twin


def layers_by_themselves(model: Any, names: tuple[str, ...] = JOINED) -> list[str]:
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


def test_a_copy_has_layers_of_its_own() -> None:
    model = load_model(random_model("qwen2"))
    twin = joined(model)
    narrow, same = copy_model(twin, torch.bfloat16), copy.deepcopy(twin)
    assert layers_by_themselves(narrow) == layers_by_themselves(same) == layers_by_themselves(model)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(decoded(same, [5]), decoded(model, [5]), atol=1e-5, rtol=1e-5)


def test_layers_that_cannot_be_joined_stay_as_they_are() -> None:
    """Of a base under an adapter, which may be another engine's too; and of layers that differ."""
    pytest.importorskip("peft")
    model = load_model(random_model("qwen2"))
    adapted = new_adapter(copy.deepcopy(model), 2, 4.0, ["q_proj"], seed=0)
    before = layers_by_themselves(adapted)
    join_products(adapted)
    assert layers_by_themselves(adapted) == before
    for layer in model.base_model.layers:
        layer.self_attn.k_proj.bias = None
    assert layers_by_themselves(joined(model), NARROW) == layers_by_themselves(model, NARROW)


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
