"""Linear layers of one input as one product: query, key and value, and gate and up.

A narrow product fills a GPU badly, and in decoding below some hundred rows the number of kernels sets the pace.
Parameters keep their names, shapes and values, and nothing is held twice: they become parts of what lies together.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.model.adapters import has_adapter

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that it calls on one input, in this order."""


@torch.no_grad()
def join_products(model: Any) -> None:
    """Join those of ``model``, which computes without gradients from now on. One with an adapter stays as it is: the
    adapter adds to single layers, and the weights below may be another engine's."""
    if has_adapter(model):
        return
    for module in list(model.base_model.modules()):
        for names in _TOGETHER:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            # compared as a type: a layer of a kind of its own may compute something else
            if not all(type(layer) is nn.Linear for layer in layers):
                continue
            if len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) == 1:
                _join(layers)
    torch.cuda.empty_cache()  # of what the layers had by themselves: the cache may want it in one piece


def _join(layers: list[Any]) -> None:
    first, *others = layers
    first.__class__, first.others = _First, tuple(others)  # in a tuple they are no children
    for other in others:
        other.__class__, other.found = _Other, None
    for name in ("weight", "bias"):  # buffers, as they are no parameters of their own
        first.register_buffer(f"joined_{name}", None, persistent=False)
        if (parts := [getattr(layer, name) for layer in layers])[0] is not None:
            whole = torch.cat(parts)
            setattr(first, f"joined_{name}", whole)
            for part, place in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
                part.data = place


class _Part(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A layer by itself again: a copy may be of another type, be decoded with, or be written to disk."""
        single = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        single.weight, single.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return single.train(self.training)


class _First(_Part):
    """Computes the product of all, and leaves the others theirs."""

    others: tuple[_Other, ...]
    joined_weight: Tensor
    joined_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        sizes = [layer.out_features for layer in (self, *self.others)]
        mine, *rest = torch.split(F.linear(input, self.joined_weight, self.joined_bias), sizes, -1)
        for other, found in zip(self.others, rest, strict=True):
            other.found = found
        return mine


class _Other(_Part):
    """Takes what the first one left, once."""

    found: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        found, self.found = self.found, None
        assert found is not None, "the first of the joined layers is called before the others"
        return found
