"""How new weights get to vLLM's workers. (A stand-in with files alone, until the kinds are here.)"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class WeightTransfer:
    """From ``begin`` to ``commit`` the engine is held: nothing is sampled."""

    adapter: Path | None = None

    def __init__(
        self, call: Callable[..., Awaitable[Sequence[Any]]], model: Any, dtype: torch.dtype, kind: str = "auto"
    ) -> None:
        self._call, self._dtype = call, dtype
        self._folder = tempfile.TemporaryDirectory(prefix="dapo-weights-")

    async def begin(self, version: int) -> None:
        await self._call("dapo_begin", args=(version,))

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        from safetensors.torch import save_file

        path = Path(self._folder.name) / "bucket.safetensors"
        save_file({name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in bucket}, path)
        await self._call("dapo_load", args=(str(path),))
        path.unlink()

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        await self._call("dapo_commit", args=())

    async def close(self) -> None:
        self._folder.cleanup()
