"""New weights for a served model: from a checkpoint in an allowed folder, or in buckets from a run (:class:`Weights`).

Consumes what clients send, hands it to the engines of one name. Only one update is under way; the next ``begin`` takes
its place. Meanwhile new requests wait. Of a client that says nothing for a while, nothing more is expected: the engines
hold weights of two versions then, so that requests are refused until an update is whole.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from dapo.errors import ModelError
from dapo.inference.model import find_model
from dapo.model.adapters import file_key
from dapo.rollout.engine import EngineError, hand_over
from dapo.rollout.native.engine import NativeEngine
from dapo.serve.model import Refused, ServedModel
from dapo.util.asynchronous import in_thread

DEADLINE_S = 60.0
"""Longest silence of a client between ``begin`` and ``commit``."""

InFlight = Literal["keep", "drain", "restart"]
_Update = Annotated[str, Query(max_length=100)]


class Begin(BaseModel):
    """``in_flight``: whether requests under way go on with the new weights, are waited for (after the deadline they
    begin anew), or begin anew. ``model``: whose weights; None: those of the model itself, otherwise of an adapter."""

    version: int = Field(ge=0, lt=2**31)
    in_flight: InFlight = "keep"
    model: str | None = None
    update: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=100)


class FromCheckpoint(BaseModel):
    """``checkpoint``: its folder, below that of ``--weights-dir``. ``version``: None: the next one."""

    checkpoint: str
    version: int | None = Field(None, ge=0, lt=2**31)
    in_flight: InFlight = "keep"
    model: str | None = None


class Weights:
    """The updates of a served model."""

    def __init__(self, served: ServedModel, folder: Path | None) -> None:
        self._served, self._folder = served, folder
        self._lock = asyncio.Lock()
        self._under_way = self._done = ""  # names of updates
        self._engines: Sequence[NativeEngine] = ()
        self._expiry: asyncio.Task[None] | None = None

    def of(self, model: str | None) -> Sequence[NativeEngine]:
        """Raises Refused: there are none of this name, or others compute with its weights."""
        name = model or self._served.name
        if name not in self._served.engines:
            raise Refused(404, f"model {name!r}: not served here; there is {', '.join(self._served.engines)}", "model")
        if name == self._served.name and len(self._served.engines) > 1:
            raise Refused(409, f"the adapters served here are on the weights of {name}, which therefore stay", "model")
        return self._served.engines[name]

    async def begin(self, begin: Begin) -> int:
        """Returns the version in use. Raises Refused: it is newer, or there is no such model."""
        async with self._lock:
            engines = self.of(begin.model)
            if begin.version < engines[0].version:
                text = f"{begin.version} was given after {engines[0].version}, and versions never fall"
                raise Refused(409, f"version: {text}", "version")
            before, self._under_way = self._under_way, begin.update
            self._served.hold()
            async with self._or_abandoned():
                # what is in engines waits for an update that never ends, unless this one is asked for again
                if begin.in_flight == "restart" or before not in ("", begin.update):
                    await self._served.restart()
                elif begin.in_flight == "drain":
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._served.drained(), DEADLINE_S)
                    await self._served.restart()
                self._engines = engines
                for engine in engines:
                    await engine.begin(begin.version)
            self._wait_on(begin.update)
            return engines[0].version

    async def put(self, update: str, body: bytes) -> None:
        """``body``: safetensors. Raises Refused: they are none of the model, or not of the update under way."""
        async with self._lock:
            tensors = await self._read(update, body)
            async with self._or_abandoned():
                for engine in self._engines:
                    await engine.put(list(tensors.items()))
            self._wait_on(update)

    async def commit(self, update: str, body: bytes) -> int:
        """``body``: safetensors of some elements of each. Returns the version that is in use now; for an update that is
        done already too. Raises Refused: some weights are missing, or are not what was sent."""
        async with self._lock:
            if update != self._done or not update:
                fingerprint = await self._read(update, body)
                async with self._or_abandoned():
                    for engine in self._engines:
                        await engine.commit(fingerprint)
                self._finish()
            return self._engines[0].version

    async def load(self, asked: FromCheckpoint) -> int:
        """Take the weights of a checkpoint; returns their version. Raises Refused: there is no such one in the folder,
        or it is of another model."""
        engines = self.of(asked.model)
        tensors = await in_thread(self._opened, asked.checkpoint, engines[0].shapes)
        version = engines[0].version + 1 if asked.version is None else asked.version
        begin = Begin(version=version, in_flight=asked.in_flight, model=asked.model)
        await self.begin(begin)
        async with self._lock:
            self._require(begin.update)
            async with self._or_abandoned():
                for engine in engines:
                    await hand_over(engine, version, tensors.items())
            self._finish()
        return version

    def _opened(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint by the names that the engine has for them; read from the disk when used."""
        wanted = {file_key(parameter): parameter for parameter in shapes}
        try:
            read = [item for file in _files(self._folder, name) for item in load_file(file).items()]
        except (OSError, SafetensorError) as error:
            raise Refused(400, f"checkpoint {name}: cannot be read: {error}", "checkpoint") from None
        found = {wanted.get(file_key(key), key): tensor for key, tensor in read}
        if "lm_head.weight" not in shapes:  # it is the embedding
            found.pop("lm_head.weight", None)
        have = {key: tuple(tensor.shape) for key, tensor in found.items()}
        other = sorted(key for key in {**have, **shapes} if have.get(key) != shapes.get(key))
        if other:
            text = f"checkpoint {name}: is of another model: {len(other)} parameters differ, such as {other[0]}"
            raise Refused(400, text, "checkpoint")
        return found

    def _require(self, update: str) -> None:
        if update != self._under_way or not update:
            text = f"update {update!r} is not under way: it took too long, failed, or another one has begun"
            raise Refused(409, text, "update")

    async def _read(self, update: str, body: bytes) -> dict[str, torch.Tensor]:
        self._require(update)
        try:
            return await in_thread(load, body)
        except (SafetensorError, ValueError, KeyError) as error:
            raise Refused(400, f"the body is not safetensors: {error}") from None

    @asynccontextmanager
    async def _or_abandoned(self) -> AsyncIterator[None]:
        """Around changes to engines. Raises Refused: the weights are not what they have to be."""
        try:
            yield
        except BaseException as error:
            await self._abandon(str(error) or type(error).__name__)
            if isinstance(error, EngineError):
                raise Refused(400, str(error)) from None
            raise

    def _finish(self) -> None:
        self._under_way, self._done = "", self._under_way
        self._wait_on("")
        self._served.release()

    def _wait_on(self, update: str) -> None:
        """Expect to hear of ``update`` within the deadline; empty: of none."""

        async def expire() -> None:
            await asyncio.sleep(DEADLINE_S)
            async with self._lock:
                if self._under_way == update:
                    await self._abandon(f"nothing came for {DEADLINE_S:g} s")

        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.create_task(expire()) if update else None

    async def _abandon(self, why: str) -> None:
        self._under_way = ""
        self._served.release(f"the weights are in part another version's ({why}); new ones have to be handed over")
        await self._served.restart()


def _files(root: Path | None, name: str) -> list[Path]:
    """Those with the weights of a checkpoint. Raises Refused: there is none, or a link leads out of the folder."""
    if root is None:
        raise Refused(403, "checkpoints are not taken; start the server with --weights-dir FOLDER")
    root = root.resolve()
    try:
        folder = (root / name).resolve(strict=True)
        files = sorted(Path(find_model(str(folder)).path).glob("*.safetensors")) if folder.is_relative_to(root) else []
        if files and all(file.resolve(strict=True).is_relative_to(root) for file in files):
            return files
    except (OSError, ValueError, RuntimeError, ModelError):
        pass
    raise Refused(404, f"checkpoint {name[:200]!r}: there is no such one below --weights-dir", "checkpoint")


_WITH_TENSORS = ("/weights/bucket", "/weights/commit")
PATHS = ("/weights", "/weights/begin", *_WITH_TENSORS)


def router(loaded: Callable[[], ServedModel], token: str | None, folder: Path | None) -> APIRouter:
    """``loaded``: the model, once there is one."""

    def needs_token() -> None:
        if token is None:
            raise Refused(403, "weights: this server has no token, so it takes none; start it with --token-env NAME")

    @cache
    def weights() -> Weights:
        return Weights(loaded(), folder)

    routes = APIRouter(prefix="/weights", dependencies=[Depends(needs_token)])

    @routes.get("")
    async def state(model: str | None = None) -> dict[str, Any]:
        """The version in use, and why no request is served, if that is so."""
        return {"version": weights().of(model)[0].version, "reason": loaded().refusal}

    @routes.post("")
    async def load_checkpoint(asked: FromCheckpoint) -> dict[str, Any]:
        """Take the weights of a checkpoint."""
        return {"version": await weights().load(asked)}

    @routes.post("/begin")
    async def begin(begin: Begin) -> dict[str, Any]:
        """New weights are to come, in buckets. ``update`` names them to the other two."""
        return {"update": begin.update, "version": await weights().begin(begin)}

    @routes.put("/bucket")
    async def bucket(request: Request, update: _Update) -> dict[str, Any]:
        await weights().put(update, await request.body())
        return {}

    @routes.post("/commit")
    async def commit(request: Request, update: _Update) -> dict[str, Any]:
        return {"version": await weights().commit(update, await request.body())}

    return routes


def largest_body(served: ServedModel | None, path: str) -> int | None:
    """Bytes of all weights in float32, with their names, where some are sent; None: elsewhere."""
    if served is None or path not in _WITH_TENSORS:
        return None
    every = (engines[0].shapes.values() for engines in served.engines.values())
    return max(sum(4 * math.prod(shape) + 1024 for shape in shapes) for shapes in every)
