"""New weights on their way from the learner to vLLM's workers, bucket by bucket.

Consumes tensors by the names of Transformers' model, on any device. They go in the type that vLLM computes with, by
`files` (safetensors, in shared memory where there is enough), `ipc` (the workers read the learner's memory on the same
GPU) or `nccl` (to other GPUs). An adapter is small, and goes as the files that PEFT has for it. What is asked of an
update at the other end is in :mod:`dapo.rollout.vllm.worker`. Waits for all workers; nothing is kept after a bucket.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from dapo.errors import ConfigError
from dapo.model.adapters import changing_parameters, has_adapter, save_adapter
from dapo.rollout.engine import BUCKET_BYTES, EngineError, check_known
from dapo.rollout.vllm.worker import Layout, process_group, store_at, unpacked
from dapo.util.asynchronous import in_thread

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNED = 16  # bytes, for any type


class WeightTransfer:
    """From one learner to the workers of one vLLM engine.

    Attributes:
        shapes: of the tensors of an update, by name; each of them has to come.
        kind: how they get there, ``auto`` until the first have come.
        adapter: the folder that the adapter was last taken from, if that is what is sent.
    """

    def __init__(
        self, call: Callable[..., Awaitable[Sequence[Any]]], model: Any, dtype: torch.dtype, kind: str = "auto"
    ) -> None:
        """
        Args:
            call: of a method of all workers, which raises EngineError. They have
                :class:`~dapo.rollout.vllm.worker.Receiver` (``worker_extension_cls``).
            model: as the learner has it; on the meta device, as from :func:`dapo.training.lora.trainable_shape`.
            dtype: that vLLM computes with.
            kind: ``runtime.sync``, other than `copy`.
        """
        self.shapes = {name: tuple(parameter.shape) for name, parameter in changing_parameters(model).items()}
        self._call, self._model, self._dtype = call, model, dtype
        self.kind = "files" if has_adapter(model) else kind
        self._ways = {"files": self._files, "ipc": self._ipc, "nccl": self._broadcast, "gloo": self._broadcast}
        self._missing: set[str] = set()
        self._adapter_tensors: dict[str, torch.Tensor] = {}
        self._folder: Path | None = None
        self._group: Any = None
        self._workers: list[dict[str, Any]] = []
        self._sent = 0

    @property
    def adapter(self) -> Path | None:
        return self._folder / "adapter" if self._folder and has_adapter(self._model) else None

    async def begin(self, version: int) -> None:
        """Begin with all of them. Until :meth:`commit` vLLM must not compute."""
        self._missing = set(self.shapes)
        self._adapter_tensors.clear()
        if not self._workers:
            self._workers = await self._tell("describe")
        if not has_adapter(self._model):
            await self._tell("begin", version)

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Some of them, copied when this returns.
        Raises EngineError: the model has no such parameter, one came twice with other values, or vLLM failed."""
        check_known(bucket, self.shapes)
        together: dict[str, torch.Tensor] = {}
        for name, tensor in bucket:
            if name in together:  # the other side knows whether it is another one
                await self._send(together)
                together = {}
            together[name] = tensor.detach()
        if together:
            await self._send(together)
        self._missing.difference_update(name for name, _ in bucket)

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """All have come: they are in place when this returns, though vLLM's cache still holds what older ones made.
        Returns how many tensors were ``found`` in place, of how many ``tensors``.
        Raises EngineError: some are missing, are not what was sent, or are not what vLLM computes with."""
        if self._missing:
            text = f"{len(self._missing)} parameters were not given, such as {min(self._missing)}"
            raise EngineError(f"weights: {text}")
        elements = save({name: tensor.detach().cpu().contiguous() for name, tensor in fingerprint.items()})
        if has_adapter(self._model):
            folder = self._shared_folder() / "adapter"
            await in_thread(self._save_adapter, folder)
            found = await self._tell("adapter", str(folder), elements)
        else:
            found = await self._tell("commit", elements)
            if self.kind == "ipc":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # memory that the workers have let go of
        return dict(min(found, key=lambda one: one["found"]))

    async def close(self) -> None:
        """Leave no file behind."""
        self._group = None
        if self._folder is not None:
            await in_thread(shutil.rmtree, self._folder, True)
            self._folder = None

    # -- the ways --------------------------------------------------------------------------------------------------

    async def _send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if has_adapter(self._model):
            for name, tensor in tensors.items():
                before = self._adapter_tensors.setdefault(name, tensor.to("cpu", copy=True))
                if not torch.equal(before, tensor.cpu()):
                    raise EngineError(f"weights: {name} came twice, with other values")
            return
        device = next(iter(tensors.values())).device
        self.kind = chosen(self.kind, device, self._workers)
        await self._ways[self.kind](tensors, device)

    async def _files(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._sent += 1
        path = self._shared_folder() / f"{self._sent}.safetensors"
        try:
            await in_thread(self._write, tensors, path)
            await self._tell("take", "files", str(path))
        finally:
            path.unlink(missing_ok=True)

    def _write(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        there = {name: t.to("cpu", self._wire(t), copy=True).contiguous() for name, t in tensors.items()}
        save_file(there, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    async def _ipc(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        from torch.multiprocessing import reductions

        reduce: Any = reductions.reduce_tensor
        buffer, layout = self._packed(tensors, device)
        torch.cuda.current_stream(device).synchronize()
        await self._tell("take", "ipc", layout, pickle.dumps(reduce(buffer)[1]))

    async def _broadcast(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        if self._group is None:
            await self._join(device)
        buffer, layout = self._packed(tensors, device)

        def broadcast() -> None:
            self._group.broadcast(buffer, 0).wait()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

        await self._both(self._tell("take", "group", layout, buffer.numel()), broadcast)

    async def _join(self, device: torch.device) -> None:
        host, size = "127.0.0.1", 1 + len(self._workers)
        store = store_at(host, 0, size, first=True)

        def join() -> None:
            self._group = process_group(self.kind, store, 0, size)

        await self._both(self._tell("join", self.kind, host, store.port, size), join)

    async def _both(self, theirs: Any, ours: Callable[[], None]) -> None:
        """Each waits for the other. If the workers fail, ours would wait for them in vain."""
        work = asyncio.ensure_future(in_thread(ours))
        try:
            await theirs
        except BaseException:
            group, self._group = self._group, None  # to be made anew
            if hasattr(group, "abort"):
                group.abort()
            await asyncio.wait([work])
            raise
        await work

    def _packed(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Layout]:
        layout, size = [], 0
        for name, tensor in tensors.items():
            dtype = self._wire(tensor)
            layout.append((name, str(dtype).removeprefix("torch."), tuple(tensor.shape), size))
            size += -(-tensor.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        for name, view in unpacked(buffer, layout).items():
            view.copy_(tensors[name])
        return buffer, layout

    def _wire(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _save_adapter(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        save_adapter(self._model, folder, self._adapter_tensors)

    def _shared_folder(self) -> Path:
        if self._folder is None:
            room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 4 * BUCKET_BYTES
            self._folder = Path(tempfile.mkdtemp(prefix="dapo-weights-", dir=_SHARED_MEMORY if room else None))
        return self._folder

    async def _tell(self, step: str, *args: Any) -> list[Any]:
        """Have all workers do a step. Raises EngineError: one of them refused or failed."""
        try:
            answers = await self._call("dapo_weights", args=(step, *args))
        except EngineError as error:  # a worker that died, for one
            raise EngineError(f"weights: vLLM failed while it was handed new ones ({step}): {error}") from error
        for answer in answers:
            if "error" in answer:
                raise EngineError(answer["error"])
        return [answer["found"] for answer in answers]


def chosen(kind: str, learner: torch.device, workers: Sequence[Mapping[str, Any]]) -> str:
    """The way, `auto` resolved. ``workers``: what each says of its device, ``type`` and ``uuid``.
    Raises ConfigError: the devices do not allow it."""
    uuid = str(torch.cuda.get_device_properties(learner).uuid) if learner.type == "cuda" else ""
    uuids = [worker["uuid"] for worker in workers]
    same = bool(uuid) and all(one == uuid for one in uuids)
    apart = bool(uuid) and all(uuids) and uuid not in uuids
    if (kind == "ipc" and not same) or (kind == "nccl" and not apart):
        need = "on one GPU" if kind == "ipc" else "on different GPUs"
        theirs = ", ".join(" ".join(filter(None, (worker["type"], worker["uuid"]))) for worker in workers)
        raise ConfigError(
            f"runtime.sync: {kind} needs learner and engine {need}, but the learner is on {learner.type} {uuid}, "
            f"and vLLM on {theirs}; use auto or files"
        )
    return kind if kind != "auto" else "ipc" if same else "nccl" if apart else "files"
