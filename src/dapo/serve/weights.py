"""New weights for a served model: from a checkpoint in an allowed folder, or in buckets from a run (:class:`Weights`).

Consumes what clients send, hands it to the engines of one name. Of each model only one update is under way; the next
``begin`` takes its place. Meanwhile new requests wait. Of a client that says nothing for a while, nothing more is
expected: the engines hold weights of two versions then, so that requests are refused until an update is whole.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from dapo.serve.model import Door, Refused, ServedModel
from dapo.util.asynchronous import in_thread

DEADLINE_S = 60.0
"""Longest silence of a client between ``begin`` and ``commit``."""

InFlight = Literal["keep", "drain", "restart"]
_Update = Annotated[str, Query(max_length=100)]


class Begin(BaseModel):
    """``in_flight``: whether requests under way go on with the new weights, are waited for (after the deadline they
    begin anew), or begin anew. ``model``: whose weights; None: those of the model itself, otherwise of an adapter.
    ``update``: names it; each reply that is sampled with these weights has this name."""

    version: int = Field(ge=0, lt=2**31)
    in_flight: InFlight = "keep"
    model: str | None = None
    update: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=100)


class FromCheckpoint(Begin):
    """``checkpoint``: its folder, below that of ``--weights-dir``. ``version``: None: the next one."""

    checkpoint: str
    version: int | None = Field(None, ge=0, lt=2**31)  # type: ignore[assignment]


class Weights:
    """The updates of one model."""

    def __init__(self, door: Door, folder: Path | None) -> None:
        self._door, self._folder, self._engines = door, folder, door.engines
        self._lock = asyncio.Lock()
        self.under_way = self._coming = ""  # names of updates; the second may still wait for requests to end
        self._expiry: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._engines[0].version

    def knows(self, update: str) -> bool:
        return update in (self.under_way, self._door.update)

    async def begin(self, begin: Begin) -> int:
        """Returns the version in use. Raises Refused: it is as new or newer; another update has begun."""
        async with self._lock:
            if begin.version < self.version or (begin.version == self.version and begin.update != self._door.update):
                text = f"{begin.version} was given, and {self.version} is in use: versions rise with each update"
                raise Refused(409, f"version: {text}; do two runs share this server?", "version")
            before, self.under_way, self._coming = self.under_way, "", begin.update
            self._door.hold()
        if begin.in_flight == "drain" and not before:  # otherwise engines wait themselves
            with suppress(TimeoutError):
                await asyncio.wait_for(self._door.drained(), DEADLINE_S)
        async with self._lock:
            self._require(begin.update, self._coming)
            self.under_way = begin.update
            async with self._or_abandoned():
                if begin.in_flight != "keep":
                    await self._door.restart()
                for engine in self._engines:
                    await engine.begin(begin.version)
            self._wait_on(begin.update)
            return self.version

    async def put(self, update: str, body: Callable[[], Awaitable[bytes]]) -> None:
        """``body``: safetensors. Raises Refused: they are none of the model, or not of the update under way."""
        async with self._taken(update, body) as tensors:
            for engine in self._engines:
                await engine.put(list(tensors.items()))
            self._wait_on(update)

    async def commit(self, update: str, body: Callable[[], Awaitable[bytes]]) -> int:
        """``body``: safetensors of some elements of each. Returns the version that is in use now; for an update that is
        done already too. Raises Refused: some weights are missing, or are not what was sent."""
        if update in ("", self.under_way) or update != self._door.update:
            async with self._taken(update, body) as fingerprint:
                if other := set(fingerprint) ^ set(self._engines[0].shapes):
                    raise EngineError(
                        f"the fingerprint is not of all weights: {len(other)} differ, such as {min(other)}"
                    )
                for engine in self._engines:
                    await engine.commit(fingerprint)
                self._finish()
        return self.version

    async def load(self, asked: FromCheckpoint) -> int:
        """Take the weights of a checkpoint; returns their version. Raises Refused: there is no such one in the folder,
        or it is of another model."""
        tensors = await in_thread(_tensors, self._folder, asked.checkpoint, self._engines[0].shapes)
        version = self.version + 1 if asked.version is None else asked.version
        await self.begin(asked.model_copy(update={"version": version}))
        async with self._lock:
            self._require(asked.update, self.under_way)
            async with self._or_abandoned():
                for engine in self._engines:
                    await hand_over(engine, version, tensors.items())
            self._finish()
        return version

    def _require(self, update: str, expected: str) -> None:
        if update != expected or not update:
            text = f"update {update!r} is not under way: it took too long, failed, or another one has begun"
            raise Refused(409, text, "update")

    @asynccontextmanager
    async def _taken(self, update: str, body: Callable[[], Awaitable[bytes]]) -> AsyncIterator[dict[str, torch.Tensor]]:
        """The tensors that a client sends for an update, which nothing else changes meanwhile."""
        if update == self.under_way:
            self._wait_on("")  # a slow line is not silence: serving.py ends what does not come on
        try:
            content = await body()
        finally:
            if update == self.under_way:
                self._wait_on(update)
        async with self._lock:
            self._require(update, self.under_way)
            try:
                tensors = await in_thread(load, content)
            except (SafetensorError, ValueError, KeyError) as error:
                raise Refused(400, f"the body is not safetensors: {error}") from None
            async with self._or_abandoned():
                yield tensors

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
        self.under_way, self._door.update = "", self.under_way
        self._wait_on("")
        self._door.release()

    def _wait_on(self, update: str) -> None:
        """Expect to hear of ``update`` within the deadline; empty: of none."""

        async def expire() -> None:
            await asyncio.sleep(DEADLINE_S)
            async with self._lock:
                if self.under_way == update:
                    await self._abandon(f"nothing came for {DEADLINE_S:g} s")

        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.create_task(expire()) if update else None

    async def _abandon(self, why: str) -> None:
        self.under_way = ""
        self._door.release(f"the weights are in part another version's ({why}); new ones have to be handed over")
        await self._door.restart()


def _tensors(root: Path | None, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Those of a checkpoint by the names that the engine has for them; read from the disk when used.
    Raises Refused: there is none, a link leads out of the folder, or it is of another model."""
    if root is None:
        raise Refused(403, "checkpoints are not taken; start the server with --weights-dir FOLDER")
    root, found, wanted = root.resolve(), dict[str, torch.Tensor](), {file_key(name): name for name in shapes}
    try:
        folder = (root / name).resolve(strict=True)
        files = list(Path(find_model(str(folder)).path).glob("*.safetensors")) if folder.is_relative_to(root) else []
        for file in files:
            found |= {wanted.get(file_key(key), key): tensor for key, tensor in _read(file, root).items()}
    except (OSError, ValueError, RuntimeError, ModelError):
        files = []
    except SafetensorError as error:
        raise Refused(400, f"checkpoint {name}: cannot be read: {error}", "checkpoint") from None
    if not files:
        raise Refused(404, f"checkpoint {name[:200]!r}: there is no such one below --weights-dir", "checkpoint")
    if "lm_head.weight" not in shapes:  # it is the embedding
        found.pop("lm_head.weight", None)
    have = {key: tuple(tensor.shape) for key, tensor in found.items()}
    if other := sorted(key for key in {**have, **shapes} if have.get(key) != shapes.get(key)):
        text = f"checkpoint {name}: is of another model: {len(other)} parameters differ, such as {other[0]}"
        raise Refused(400, text, "checkpoint")
    return found


def _read(file: Path, root: Path) -> dict[str, torch.Tensor]:
    """Raises OSError: it is not an ordinary file (opening others may block), or a link leads out of ``root``."""
    file = file.resolve(strict=True)
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        if not (stat.S_ISREG(os.fstat(opened.fileno()).st_mode) and file.is_relative_to(root)):
            raise OSError
        return load_file(f"/dev/fd/{opened.fileno()}")


_WITH_TENSORS = ("/weights/bucket", "/weights/commit")
PATHS = ("/weights", "/weights/begin", *_WITH_TENSORS)


def router(loaded: Callable[[], ServedModel], token: str | None, folder: Path | None) -> APIRouter:
    """``loaded``: the model, once there is one."""

    def needs_token() -> None:
        if token is None:
            raise Refused(403, "weights: this server has no token, so it takes none; start it with --token-env NAME")

    @cache
    def every() -> dict[str, Weights]:
        return {name: Weights(door, folder) for name, door in loaded().doors.items()}

    def of(model: str | None) -> Weights:
        """Raises Refused: there is no such model, or others compute with its weights."""
        served = loaded()
        name = model or served.name
        served.door(name)
        if name == served.name and len(served.doors) > 1:
            raise Refused(409, f"the adapters served here are on the weights of {name}, which therefore stay", "model")
        return every()[name]

    def by(update: str) -> Weights:
        """Whose update it is; if nobody's, anyone refuses it."""
        return next((one for one in every().values() if one.knows(update)), next(iter(every().values())))

    routes = APIRouter(prefix="/weights", dependencies=[Depends(needs_token)])

    @routes.get("")
    async def state(model: str | None = None) -> dict[str, Any]:
        """The version in use, why no request is served, if that is so, and the rank of the adapter, if it has one."""
        weights, door = of(model), loaded().door(model or loaded().name)
        ranks = [shape[0] for name, shape in door.engines[0].shapes.items() if ".lora_A." in name]
        reason = door.refusal or ("an update is under way" if weights.under_way else None)
        return {"version": weights.version, "reason": reason, "adapter_rank": max(ranks, default=0)}

    @routes.post("")
    async def load_checkpoint(asked: FromCheckpoint) -> dict[str, Any]:
        """Take the weights of a checkpoint."""
        return {"version": await of(asked.model).load(asked)}

    @routes.post("/begin")
    async def begin(begin: Begin) -> dict[str, Any]:
        """New weights are to come, in buckets. ``update`` names them to the other two."""
        return {"update": begin.update, "version": await of(begin.model).begin(begin)}

    @routes.put("/bucket")
    async def bucket(request: Request, update: _Update) -> dict[str, Any]:
        await by(update).put(update, request.body)
        return {}

    @routes.post("/commit")
    async def commit(request: Request, update: _Update) -> dict[str, Any]:
        return {"version": await by(update).commit(update, request.body)}

    return routes


def largest_body(served: ServedModel | None, path: str) -> int | None:
    """Bytes of all weights in float32, with their names, where some are sent; None: elsewhere."""
    if served is None or path not in _WITH_TENSORS:
        return None
    every = (door.engines[0].shapes.values() for door in served.doors.values())
    return max(sum(4 * math.prod(shape) + 1024 for shape in shapes) for shapes in every)
