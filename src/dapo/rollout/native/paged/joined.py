"""Linear layers of one input as one product: query, key and value, and gate and up.

A small product fills a GPU badly, and below some hundred rows the number of kernels sets the pace. The weights of such
layers are put into one tensor, of which their parameters are parts from then on: names and shapes stay what they were,
new weights are written through them, and no number is held twice.
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
    """Join them in ``model``, which computes without gradients from now on. One with an adapter stays as it is: the
    adapter adds to single layers, and the weights below may be another engine's."""
    if has_adapter(model):
        return
    for module in list(model.base_model.modules()):
        for names in _TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            # compared as a type: a layer of a kind of its own may compute something else
            if all(type(layer) is nn.Linear for layer in layers):
                _join(layers)
    torch.cuda.empty_cache()  # of what the layers had by themselves: the cache may want it in one piece


def _join(layers: list[Any]) -> None:
    if len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) > 1:
        return
    product = _Product(layers)
    for number, layer in enumerate(layers):
        layer.__class__ = _Part
        layer.product, layer.number = product, number


class _Product(nn.Module):
    """``results``: of the present input, those that their layers have not taken yet."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.results: dict[int, Tensor] = {}
        self.weight: Tensor
        self.bias: Tensor | None
        for name in ("weight", "bias"):  # buffers, as they are no parameters of their own
            parts = [getattr(layer, name) for layer in layers]
            joined = None if parts[0] is None else torch.cat(parts)
            self.register_buffer(name, joined, persistent=False)
            if joined is not None:
                for part, place in zip(parts, torch.split(joined, self.sizes), strict=True):
                    part.data = place


class _Part(nn.Linear):
    """One of the layers: the first computes the results of all."""

    product: _Product
    number: int

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        if self.number == 0:
            joined = F.linear(x, product.weight, product.bias)
            for number, result in enumerate(torch.split(joined, product.sizes, dim=-1)):
                product.results[number] = result
        return product.results.pop(self.number)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A layer by itself again: the parameters of a copied model may be of another type, or another model's."""
        single = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        single.weight, single.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return single.train(self.training)
