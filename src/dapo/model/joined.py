"""Queries, keys and values as one product with their input.

Three write three gradients of the same input, which then have to be read and added up, and those of keys and values are
too narrow for a GPU. Parameters stay as they are: a pass lays their casts, which autocast would make, side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIBLINGS = ("q_proj", "k_proj", "v_proj")  # in the order of their calls


def join_products(model: Any, dtype: torch.dtype) -> None:
    """Join those of ``model``, but for layers with an adapter. ``dtype``: that products are computed in."""
    for module in model.modules():
        linears: list[Any] = [getattr(module, name, None) for name in SIBLINGS]
        if all(type(linear) is nn.Linear for linear in linears) and len({x.bias is None for x in linears}) == 1:
            first, *others = linears
            first.__class__ = _First
            first.others, first.dtype = tuple(others), dtype  # in a tuple, modules are nobody's children
            for other in others:
                other.__class__, other.found = _Other, None


def part_products(model: Any) -> Any:
    """``model`` with :func:`join_products` undone: who decodes would lay weights side by side for each token."""
    for module in model.modules():
        if isinstance(module, _First | _Other):
            module.__class__ = nn.Linear  # type: ignore[assignment]
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
