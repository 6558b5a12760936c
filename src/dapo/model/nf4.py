"""Linear layers of a frozen base in 4 bits (NF4 of QLoRA, arXiv 2305.14314), widened whenever they are computed with.

Engine, trainer and reference policy hold the same codes, so they compute with the same weights.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dapo.errors import ModelError
from dapo.model.adapters import can_be_compiled, has_adapter
from dapo.model.compiling import decoder_layers

BLOCK = 64
"""Numbers of a row that share a scale, which is the largest of them."""
_OFFSET = 0.9677083
"""The quantile that becomes 1, as in the paper's code."""


@cache
def levels() -> tuple[float, ...]:
    """The 16 numbers: quantiles of the normal distribution, 8 above 0, 7 below it and 0, as a share of the largest."""
    above = [NormalDist().inv_cdf(_OFFSET + (0.5 - _OFFSET) * i / 8) for i in range(8)]
    below = [-NormalDist().inv_cdf(_OFFSET + (0.5 - _OFFSET) * i / 7) for i in range(7)]
    return tuple(value / above[0] for value in sorted([*above, 0.0, *below]))


class NF4Linear(nn.Module):
    """What ``linear`` computes, with its weights rounded to 4 bits. ``scales`` have the type that is computed in."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = quantise(linear.weight.detach())
        self.codes, self.scales = (nn.Parameter(values, requires_grad=False) for values in (codes, scales))
        self.bias = linear.bias
        table = torch.tensor(levels(), device=codes.device)
        self.register_buffer("pairs", torch.cartesian_prod(table, table).to(scales.dtype), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = product(inputs.to(self.scales.dtype), self.codes, self.scales, self.pairs, False)
        return found if self.bias is None else found + self.bias.to(found.dtype)


@torch.library.custom_op("dapo::nf4_product", mutates_args=())
def product(
    inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """``inputs @ weight.T``, or ``inputs @ weight``, as one operation that the compiler does not look into: it would
    keep the wide weights of all layers for the backward pass, in which they are to be made again."""
    weight = widened(codes, scales, pairs)
    return inputs @ weight if transposed else functional.linear(inputs, weight)


@product.register_fake
def _(
    inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor, transposed: bool
) -> torch.Tensor:
    return inputs.new_empty(*inputs.shape[:-1], 2 * codes.shape[1] if transposed else codes.shape[0])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *base, ctx.transposed = inputs
    ctx.save_for_backward(*base)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return product(gradient.contiguous(), *ctx.saved_tensors, not ctx.transposed), None, None, None, None


product.register_autograd(_backward, setup_context=_keep_for_backward)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]`` as codes ``[out, in / 2]``, two numbers in a byte, and scales ``[out, in / 64]``."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty(rows, columns // BLOCK)
    if weight.is_meta:
        return codes, scales
    table = torch.tensor(levels(), device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    for some in range(0, rows, 1024):  # of a large tensor all at once would take far more than the tensor
        blocks = weight[some : some + 1024].float().view(-1, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(2).to(weight.dtype)
        ratio = blocks / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        found = torch.bucketize(ratio, borders).to(torch.uint8).view(-1, columns // 2, 2)
        codes[some : some + 1024] = found[..., 0] * 16 + found[..., 1]
        scales[some : some + 1024] = scale
    return codes, scales


def widened(codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The weights that :func:`quantise` left, in the type of the scales. ``pairs``: the two numbers of each byte."""
    if codes.is_cuda:
        from dapo.model.nf4_kernel import widen

        return widen(codes, scales, pairs)
    values = functional.embedding(codes.int(), pairs).view(*scales.shape, BLOCK)
    return (values * scales[..., None]).view(codes.shape[0], -1)


def narrow_base(model: Any) -> Any:
    """``model``, changed in place: of the base under its adapter, the linear layers between embedding and head are in
    4 bits from now on. Layers whose rows are no whole blocks stay.
    Raises ModelError: there is no adapter, or one that computes with the weights themselves, or no such layer."""
    if not has_adapter(model) or not can_be_compiled(model):
        raise ModelError(
            "model.lora.base: nf4 is for the frozen base under a LoRA adapter (not DoRA, which changes with its "
            "weights); give model.lora.rank, such as 16, or use base=full"
        )
    owners = [owner for owner in decoder_layers(model).modules() if not isinstance(owner, nn.ModuleDict)]  # PEFT's own
    found = [
        (owner, name, part)
        for owner in owners
        for name, part in owner.named_children()
        if isinstance(part, nn.Linear) and part.in_features % BLOCK == 0
    ]
    if not found:
        raise ModelError(
            f"model.lora.base: nf4 is for linear layers with a multiple of {BLOCK} inputs, of which "
            f"{model.config.model_type} has none; use base=full"
        )
    while found:  # which lets go of each wide layer when its narrow one is there
        owner, name, linear = found.pop()
        setattr(owner, name, NF4Linear(linear))
        del linear
    return model


def in_4_bits(model: Any) -> str:
    """How much of ``model`` :func:`narrow_base` has made small, for people."""
    parts = [part for name, part in decoder_layers(model).named_modules() if ".lora_" not in name]
    small = [part for part in parts if isinstance(part, NF4Linear)]
    layers = [part for part in parts if isinstance(part, nn.Linear | NF4Linear)]
    now = sum(one.nbytes for part in small for one in (part.codes, part.scales))
    before = sum(2 * part.codes.numel() * part.scales.itemsize for part in small)
    told = f"{now / 2**20:.1f} MiB in place of {before / 2**20:.1f}"
    return f"the base in 4 bits: {len(small)} of {len(layers)} linear layers, {told}"


def numbers(parameter: torch.Tensor) -> int:
    """How many weights a parameter holds."""
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
