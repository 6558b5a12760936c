"""Queries, keys and values as one product with their input.

Three write three gradients of the same input, which then have to be read and added up, and those of keys and values are
too narrow for a GPU. Parameters stay as they are: a pass lays their casts, which autocast would make, side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIBLINGS = ("q_proj", "k_proj", "v_proj")  # in the order of their calls

GATED = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP")
"""Modules that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""


def join_products(model: Any, dtype: torch.dtype) -> None:
    """Join those of ``model``, and gate and up, but for layers with an adapter. ``dtype``: that of products."""
    from transformers.activations import SiLUActivation

    for module in model.modules():
        linears: list[Any] = [getattr(module, name, None) for name in SIBLINGS]
        if all(type(linear) is nn.Linear for linear in linears) and len({x.bias is None for x in linears}) == 1:
            first, *others = linears
            first.__class__ = _First
            first.others, first.dtype = tuple(others), dtype  # in a tuple, modules are nobody's children
            for other in others:
                other.__class__, other.found = _Other, None
        linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj")]
        plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
        if plain and type(module).__name__ in GATED and isinstance(module.act_fn, SiLUActivation | nn.SiLU):
            module.__class__, module.dtype = _gated_kind(type(module)), dtype


@cache
def _gated_kind(kind: Any) -> Any:
    """One for all layers, which then share their compiled code."""
    return type(f"Joined{kind.__name__}", (_Gated, kind), {})


def part_products(model: Any) -> Any:
    """``model`` with :func:`join_products` undone: who decodes would lay weights side by side for each token."""
    for module in model.modules():
        if isinstance(module, _First | _Other):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, _Gated):
            module.__class__ = type(module).__bases__[1]
    return model


class _First(nn.Linear):
    """Computes the product of all, and leaves the others theirs."""

    others: tuple[_Other, ...]
    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        linears = (self, *self.others)
        weight = torch.cat([linear.weight.to(self.dtype) for linear in linears])
        bias = None if self.bias is None else torch.cat([linear.bias.to(self.dtype) for linear in linears])
        product = F.linear(input, weight, bias)
        mine, *rest = torch.split(product, [linear.out_features for linear in linears], -1)
        for other, found in zip(self.others, rest, strict=True):
            other.found = found.contiguous()  # it may be kept for the backward pass, and all of the product with it
        return mine


class _Other(nn.Linear):
    """Takes what the first one left, once."""

    found: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        found, self.found = self.found, None
        assert found is not None, "the first of the joined layers is called before the others"
        return found


class _Gated(nn.Module):
    """In compiled code; who runs layers as they are written may want to watch each of them."""

    dtype: torch.dtype
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[misc,no-any-return]
        weight = torch.cat([linear.weight.to(self.dtype) for linear in (self.gate_proj, self.up_proj)])
        found: Tensor = self.down_proj(torch.ops.dapo.gated(F.linear(x, weight)))
        return found


@torch.library.custom_op("dapo::gated", mutates_args=())
def _gated(both: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[..., 2 I]``."""
    if both.is_cuda:
        from dapo.model.gated_kernels import gated

        return gated(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@_gated.register_fake
def _(both: Tensor) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


@torch.library.custom_op("dapo::gated_backward", mutates_args=())
def _gated_backward(grad: Tensor, both: Tensor) -> Tensor:
    if both.is_cuda:
        from dapo.model.gated_kernels import gated_gradient

        return gated_gradient(grad, both)
    gate, up = both.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], -1)


@_gated_backward.register_fake
def _(grad: Tensor, both: Tensor) -> Tensor:
    return torch.empty_like(both)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_gated.register_autograd(lambda ctx, grad: torch.ops.dapo.gated_backward(grad, *ctx.saved_tensors), setup_context=_keep)
