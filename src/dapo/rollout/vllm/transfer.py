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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save, save_file

from dapo.errors import ConfigError
from dapo.model.adapters import changing_parameters, has_adapter, save_adapter
from dapo.rollout.engine import EngineError, NoMemoryError, check_given, check_known
from dapo.rollout.group import Group, meeting_point, packed, wire
from dapo.rollout.vllm.options import own_folder
from dapo.util.asynchronous import in_thread, until_done
from dapo.util.files import size_text, writing

_SHARED_MEMORY = "/dev/shm"


class WeightTransfer:
    """From one learner to the workers of one vLLM engine.

    Attributes:
        shapes: of the tensors of an update, by name; each of them has to come.
        kind: how the last ones got there, ``auto`` until the first have come.
        adapter: the folder that the adapter was last taken from, if that is what is sent.
    """

    def __init__(
        self, call: Callable[..., Awaitable[Sequence[Any]]], model: Any, dtype: torch.dtype, kind: str = "auto"
    ) -> None:
        """``call``: of a method of all workers, which raises EngineError. They have
        :class:`~dapo.rollout.vllm.worker.Receiver` (``worker_extension_cls``). ``model``: as the learner has it; on the
        meta device, as from :func:`dapo.training.lora.trainable_shape`. ``dtype``: that vLLM computes with. ``kind``:
        ``runtime.sync``, other than `copy`."""
        self.shapes = {name: tuple(parameter.shape) for name, parameter in changing_parameters(model).items()}
        self._call, self._model, self._dtype = call, model, dtype
        self.kind = self._asked = "files" if has_adapter(model) else kind
        self._ways = {"files": self._files, "ipc": self._ipc, "nccl": self._broadcast, "gloo": self._broadcast}
        self._missing: set[str] = set()
        self._adapter_tensors: dict[str, torch.Tensor] = {}
        self.adapter: Path | None = None
        self._group: Any = None
        self._workers: list[dict[str, Any]] = []
        self._sent = 0

    @cached_property
    def _folders(self) -> list[TemporaryDirectory[str]]:
        """For files: in shared memory, and for what does not fit there."""
        return [*([own_folder(_SHARED_MEMORY)] if Path(_SHARED_MEMORY).is_dir() else []), own_folder()]

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
            if name in together and not torch.equal(together[name], tensor):
                raise EngineError(f"weights: {name} came twice, with other values")
            together[name] = tensor.detach()
        if together:
            await self._send(together)
        self._missing.difference_update(name for name, _ in bucket)

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """All have come: they are in place when this returns, though vLLM's cache still holds what older ones made.
        Raises EngineError: some are missing, are not what was sent, or are not what vLLM computes with."""
        check_given(self._missing)
        elements = save({name: tensor.detach().cpu().contiguous() for name, tensor in fingerprint.items()})
        if has_adapter(self._model):
            self.adapter = self._room_for("adapter", self._adapter_tensors)
            self.adapter.mkdir(exist_ok=True)
            with writing(self.adapter):
                await in_thread(save_adapter, self._model, self.adapter, self._adapter_tensors)
            await self._tell("adapter", str(self.adapter), elements)
        else:
            await self._tell("commit", elements)
            if self.kind == "ipc":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # memory that the workers have let go of

    async def close(self) -> None:
        """Leave no file behind."""
        self._group = None
        for folder in self.__dict__.get("_folders", ()):
            await in_thread(folder.cleanup)

    # -- the ways --------------------------------------------------------------------------------------------------

    async def _send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if has_adapter(self._model):
            for name, tensor in tensors.items():
                before = self._adapter_tensors.setdefault(name, tensor.to("cpu", copy=True))
                if not torch.equal(before, tensor.cpu()):
                    raise EngineError(f"weights: {name} came twice, with other values")
            return
        device = next(iter(tensors.values())).device
        self.kind = chosen(self._asked, device, self._workers)  # they may come from elsewhere than before
        await self._ways[self.kind](tensors, device)

    async def _files(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        def on_host() -> dict[str, torch.Tensor]:
            return {name: t.to("cpu", wire(t, self._dtype), copy=True).contiguous() for name, t in tensors.items()}

        there = await in_thread(on_host)
        self._sent += 1  # workers may still read the file before
        path = self._room_for(f"{self._sent}.safetensors", there)
        try:
            with writing(path):
                await in_thread(save_file, there, path)
            await self._tell("take", "files", str(path))
        finally:
            path.unlink(missing_ok=True)

    def _room_for(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Where there is room. Raises NoMemoryError: nowhere."""
        size = 2**20 + sum(tensor.nbytes for tensor in tensors.values())
        for folder in self._folders:
            if shutil.disk_usage(folder.name).free > size:
                return Path(folder.name, name)
        where = " and ".join(str(Path(folder.name).parent) for folder in self._folders)
        raise NoMemoryError(
            f"weights: no room for {size_text(size)} in {where}; give TMPDIR a folder with room, or /dev/shm more of it"
        )

    async def _ipc(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        from torch.multiprocessing import reductions

        reduce: Any = reductions.reduce_tensor
        buffer, layout = packed(tensors, device, self._dtype)
        torch.cuda.current_stream(device).synchronize()
        await self._tell("take", "ipc", layout, pickle.dumps(reduce(buffer)[1]))

    async def _broadcast(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        if self._group is None:
            await self._join(device)
        buffer, layout = packed(tensors, device, self._dtype)
        await self._both(self._tell("take", "group", layout, buffer.numel()), partial(self._group.broadcast, buffer))

    async def _join(self, device: torch.device) -> None:
        (store, where), size = meeting_point("127.0.0.1"), 1 + len(self._workers)

        def join() -> None:
            self._group = Group(self.kind, store, 0, size, device)

        await self._both(self._tell("join", self.kind, where, size), join)

    async def _both(self, theirs: Any, ours: Callable[[], object]) -> None:
        """Each waits for the other. If the workers fail, ours would wait for them in vain."""
        work = asyncio.ensure_future(in_thread(ours))
        try:
            await theirs
        except BaseException:
            group, self._group = self._group, None  # to be made anew
            if group is not None:
                group.leave()
            await until_done(work)
            raise
        await work

    async def _tell(self, step: str, *args: Any) -> list[Any]:
        """Have all workers do a step. Raises EngineError: one of them refused or failed."""
        try:
            answers = await self._call("dapo_weights", args=(step, *args))
        except EngineError as error:  # a worker that died, for one
            raise type(error)(f"weights: vLLM failed while it was handed new ones ({step}): {error}") from error
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
