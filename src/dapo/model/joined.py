"""Linear layers of one input as one product: query, key and value, and in an engine gate and up.

A narrow product fills a GPU badly, and in decoding below some hundred rows the number of kernels sets the pace. In
training, three products write three gradients of the same input, which then have to be read and added up. Parameters
keep their names, shapes and values, and nothing is held twice.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.model.adapters import has_adapter

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that it calls on one input, in this order."""
_GATED = ("Qwen2MLP", "Qwen3MLP", "LlamaMLP", "MistralMLP")
"""Modules that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""


@torch.no_grad()
def join_products(model: Any, trained: torch.dtype | None = None) -> None:
    """Join those of ``model``. One with an adapter stays as it is: the adapter adds to single layers, and the weights
    below may be another engine's.

    Args:
        trained: the type that products are computed in, of a model that is trained. A pass lays casts of the weights
            side by side, which autocast would make too; gate and up are joined in compiled code alone. None: the model
            computes without gradients from now on. The weights lie side by side for good, and its parameters are parts
            of them.
    """
    if has_adapter(model):
        return
    for module in list(model.base_model.modules()):
        for names in _TOGETHER[: None if trained is None else 1]:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            # compared as a type: a layer of a kind of its own may compute something else
            if not all(type(layer) is nn.Linear for layer in layers):
                continue
            if len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) == 1:
                _join(layers, trained)
        if trained is not None and type(module).__name__ in _GATED:
            _join_gated(module, trained)
    if trained is None:
        torch.cuda.empty_cache()  # of what the layers had by themselves: the cache may want it in one piece


def _join(layers: list[Any], trained: torch.dtype | None) -> None:
    first, *others = layers
    first.__class__, first.others, first.trained = _First, tuple(others), trained  # in a tuple they are no children
    for other in others:
        other.__class__, other.found = _Other, None
    for name in ("weight", "bias") if trained is None else ():  # buffers, as they are no parameters of their own
        first.register_buffer(f"joined_{name}", None, persistent=False)
        if (parts := [getattr(layer, name) for layer in layers])[0] is not None:
            whole = torch.cat(parts)
            setattr(first, f"joined_{name}", whole)
            for part, place in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
                part.data = place


def _join_gated(module: Any, trained: torch.dtype) -> None:
    kind, layers = cast(Any, type(module)), (module.gate_proj, module.up_proj)
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in layers)
    if plain and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
        module.__class__, module.trained = _gated_kind(kind), trained


@cache
def _gated_kind(kind: Any) -> Any:
    """One for all layers, which then share their compiled code."""
    return type(f"Joined{kind.__name__}", (_Gated, kind), {})


class _Part(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A layer by itself again: a copy may be of another type, be decoded with, or be written to disk."""
        single = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        single.weight, single.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return single.train(self.training)


class _First(_Part):
    """Computes the product of all, and leaves the others theirs."""

    others: tuple[_Other, ...]
    trained: torch.dtype | None
    joined_weight: Tensor
    joined_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        layers = (self, *self.others)
        if self.trained is None:
            weight, bias = self.joined_weight, self.joined_bias
        else:
            weight = torch.cat([layer.weight.to(self.trained) for layer in layers])
            bias = None if self.bias is None else torch.cat([layer.bias.to(self.trained) for layer in layers])
        mine, *rest = torch.split(F.linear(input, weight, bias), [layer.out_features for layer in layers], -1)
        for other, found in zip(self.others, rest, strict=True):
            # what is kept for a backward pass is not to keep all of the product
            other.found = found if self.trained is None else found.contiguous()
        return mine


class _Other(_Part):
    """Takes what the first one left, once."""

    found: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        found, self.found = self.found, None
        assert found is not None, "the first of the joined layers is called before the others"
        return found


class _Gated(nn.Module):
    """In compiled code; who runs layers as they are written may want to watch each of them."""

    trained: torch.dtype
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[no-any-return]
        weight = torch.cat([linear.weight.to(self.trained) for linear in (self.gate_proj, self.up_proj)])
        found: Tensor = self.down_proj(torch.ops.dapo.gated(F.linear(x, weight)))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A module as it is written, as in :class:`_Part`."""
        kind: Any = type(self).__bases__[1]
        twin: nn.Module = kind.__new__(kind)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


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
