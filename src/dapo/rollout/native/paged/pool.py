"""The memory of a paged cache.

The keys and values of all layers lie in one tensor, the *pool*: ``[layers, 2, pages, Hkv, page_tokens, D]``, where the
2 are key and value. It is freed and allocated anew between rollouts, while the CUDA graphs that read it are kept. A
graph fixes the arguments of its kernels, so they are given not the pool but ``address``, a tensor at a fixed place that
holds the pool's present address.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The sizes of a pool. ``dtype`` is bfloat16 or float32; ``page_tokens`` a power of two."""

    layers: int
    pages: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"a paged cache holds bfloat16 or float32, not {self.dtype}")
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            raise ValueError(f"tokens per page must be a power of two, got {self.page_tokens}")
        if self.head_dim % 8:  # reads of 16 bytes
            raise ValueError(f"a paged cache needs heads of a multiple of 8, got {self.head_dim}")

    @classmethod
    def of(cls, pool: Tensor) -> PoolShape:
        layers, _, pages, kv_heads, page_tokens, head_dim = pool.shape
        return cls(layers, pages, kv_heads, page_tokens, head_dim, pool.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the pool tensor."""
        return self.layers, 2, self.pages, self.kv_heads, self.page_tokens, self.head_dim

    @property
    def page_bytes(self) -> int:
        """Of one page, keys and values of all layers."""
        return self.layers * 2 * self.kv_heads * self.page_tokens * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes


class Pool:
    """Where the pool is now. Outlives the pool's memory, as do the CUDA graphs that find it through ``address``."""

    def __init__(self, shape: PoolShape, device: torch.device | str) -> None:
        self.shape = shape
        self.address = torch.zeros(1, dtype=torch.int64, device=device)
        """``[1]``: the pool's address, 0 without one; what the kernels read."""
        self._tensor: Tensor | None = None

    @property
    def attached(self) -> bool:
        """Whether there is memory now."""
        return self._tensor is not None

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError("the cache has no memory now: attach(...) comes first")
        return self._tensor

    def attach(self, tensor: Tensor) -> None:
        """This is the pool from now on, in the order of the current stream. Its contents need not be initialised."""
        if tuple(tensor.shape) != self.shape.sizes or tensor.dtype != self.shape.dtype or not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous {self.shape.dtype} tensor of {self.shape.sizes}")
        if tensor.device != self.address.device or tensor.data_ptr() % 16:
            raise ValueError(f"expected memory on {self.address.device}, aligned to 16 bytes")
        self._tensor = tensor
        self.address.fill_(tensor.data_ptr())

    def detach(self) -> None:
        """Let go of the pool's memory. A kernel that runs before the next :meth:`attach` fails, at address 0."""
        self._tensor = None
        self.address.zero_()
