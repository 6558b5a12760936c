"""Attention over packed sequences of any lengths on CUDA: PyTorch's flash attention kernels, without padding.

The kernels are called below ``torch.nn.attention.varlen``, whose arguments differ between PyTorch 2.11 and 2.13.
Queries that are fewer than their sequence's keys are its last ones: so the samples of a group, whose prompt stands in
the row once, attend to a gathered copy of the prompt's keys and values, which are small (512 bytes a token and layer
for a model of half a billion parameters). The gradients of the copies are added up in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

LARGEST_HEAD = 256
OLDEST_CARD = (8, 0)  # compute capability that the kernels need: a T4 or V100 has less


def flash_can(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether the kernels compute this: ``query`` and ``value`` ``[..., D]``; decided by card, type and shape alone."""
    dim = query.shape[-1]
    fits = dim == value.shape[-1] and dim % 8 == 0 and dim <= LARGEST_HEAD and softcap is None
    if not (fits and query.is_cuda and value.dtype in (torch.bfloat16, torch.float16)):
        return False
    return torch.cuda.get_device_capability(query.device) >= OLDEST_CARD


class FlashLayout:
    """Where the sequences of a packed row begin and end, for queries and for keys."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int], place: Tensor, device: torch.device) -> None:
        """
        Args:
            lengths: of the sequences, in tokens.
            shared: how many tokens at the start of each stand in the place of another one's.
            place: ``[sum(lengths)]``, where in the row each token stands. The tokens that a sequence does not share
                stand in the row in their order.
            device: CUDA.
        """
        own = [length - first for length, first in zip(lengths, shared, strict=True)]
        borders = [list(itertools.accumulate(counts, initial=0)) for counts in (own, lengths)]
        queries, keys = torch.tensor(borders, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
        self._borders = (queries, keys, max(own, default=0), max(lengths, default=0))
        self._place, self._tokens = place if any(shared) else None, sum(own)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Causal attention without gradient.

        Args:
            query: ``[1, H, T, D]``, of the T tokens of the row.
            key, value: ``[1, Hkv, T, D]``.
            window: how many keys a query sees, its own one included; None: all before it.

        Returns:
            ``[1, T, H, D]``, and the logarithm of each softmax's divisor ``[H, T]``, float32.
        """
        out, divisors, *_ = torch.ops.aten._flash_attention_forward(
            *self._rows(query, key, value), *self._borders, 0.0, True, False, scale=scaling, **_left(window)
        )
        return out.unsqueeze(0), divisors

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        divisors: Tensor,
        scaling: float,
        window: int | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key and value, shaped as these, from that of ``out``."""
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the state of a dropout that there is not
        grads = torch.ops.aten._flash_attention_backward(
            grad[0].contiguous(),
            *self._rows(query, key, value),
            out[0],
            divisors,
            *self._borders,
            0.0,
            True,
            unused,
            unused,
            scale=scaling,
            **_left(window),
        )
        of_query, *of_copies = grads
        return tuple(g.transpose(0, 1).unsqueeze(0) for g in (of_query, *map(self._add_up, of_copies)))

    def _rows(self, query: Tensor, *pairs: Tensor) -> list[Tensor]:
        """``[tokens, heads, D]`` each, keys and values with a copy for each sequence that shares them."""
        across = [x[0].transpose(0, 1) for x in (query, *pairs)]
        if self._place is not None:
            across[1:] = [x.index_select(0, self._place) for x in across[1:]]
        return across

    def _add_up(self, grad: Tensor) -> Tensor:
        """From the gradient of the copies that of the tokens of the row."""
        if self._place is None:
            return grad
        from dapo.model.flash_kernels import add_up_copies

        return add_up_copies(grad, *self._copies)

    @cached_property
    def _copies(self) -> tuple[Tensor, Tensor]:
        """Where in the second those of each token of the row begin, and all copies by token."""
        assert self._place is not None
        places, order = self._place.sort(stable=True)
        return torch.searchsorted(places, torch.arange(self._tokens + 1, device=places.device)), order


def _left(window: int | None) -> dict[str, int]:
    """The kernels count the keys before a query's own one."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
