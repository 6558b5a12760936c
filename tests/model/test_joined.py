"""Joined products give what the layers themselves give, and their parameters the same gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from dapo.model.compiling import compile_layers
from dapo.model.forward import hidden_states
from dapo.model.joined import SIBLINGS, join_products
from dapo.model.loading import copy_model, load_model
from dapo.model.packed import PackedAttention
from helpers import ARCHITECTURES, random_model

TOKENS, POSITIONS = torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([0, 1, 2, 3, 0, 1])


def linears(model: Any) -> list[nn.Linear]:
    return [module for name, module in model.named_modules() if name.endswith(SIBLINGS)]


def run(model: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The hidden states, and the gradients of some sum over them."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
        hidden = hidden_states(model, TOKENS, POSITIONS, PackedAttention([4, 2]))
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_joined_products_are_the_products(architecture: str) -> None:
    plain = load_model(random_model(architecture)).float()
    joined = copy.deepcopy(plain)
    join_products(joined, torch.float32)
    assert [type(x) is not nn.Linear for x in linears(joined)] == [True] * len(linears(plain))
    assert joined.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(run(joined), run(plain), atol=1e-5, rtol=1e-5)


def test_compiled_layers_share_one_piece_of_code_and_round_as_plain_ones() -> None:
    plain = load_model(random_model("qwen2", num_hidden_layers=3)).float()
    joined = copy.deepcopy(plain)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(joined, torch.bfloat16, backend="aot_eager")
    assert nn.Linear not in {type(x) for x in linears(joined)}
    (want, slopes), exact = run(plain, torch.bfloat16), run(plain)[1]
    have, found = run(joined, torch.bfloat16)
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(have, want, atol=0.02, rtol=0.02)
    for name, slope in slopes.items():
        error, noise = ((x - exact[name]).norm() for x in (found[name], slope))
        assert error < 1.3 * noise + 1e-3 * exact[name].norm(), name


def test_a_copy_is_plain_and_so_are_layers_with_an_adapter() -> None:
    joined = load_model(random_model("qwen2"))
    join_products(joined, torch.float32)
    copied = copy_model(joined)
    assert {type(x) for x in linears(copied)} == {nn.Linear}
    torch.testing.assert_close(run_frozen(copied), run_frozen(joined), atol=1e-5, rtol=1e-5)
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM")
    model = peft.inject_adapter_in_model(adapter, load_model(random_model("qwen2")))
    before = [type(x) for x in linears(model)]
    join_products(model, torch.float32)
    assert [type(x) for x in linears(model)] == before


@torch.no_grad()
def run_frozen(model: Any) -> torch.Tensor:
    return hidden_states(model, TOKENS, POSITIONS, PackedAttention([4, 2]))
