"""The door to a model's engines (:class:`Door`): requests pass it, but wait while weights change.

New weights come from a checkpoint, or in buckets from a run. Of each model only one update is under way; the next
``begin`` takes its place. Of a client that says nothing for a while, nothing more is expected: the engines hold weights
of two versions then, so that requests are refused until an update is whole.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from dapo.rollout.engine import EngineError, Request, hand_over
from dapo.util.asynchronous import in_thread

if TYPE_CHECKING:
    import torch

    from dapo.inference.model import LocalEngine

DEADLINE_S = 60.0
"""Longest silence of a client between ``begin`` and ``commit``."""

InFlight = Literal["keep", "drain", "restart"]


class Begin(BaseModel):
    """``in_flight``: whether requests under way go on with the new weights, are waited for (after the deadline they
    begin anew), or begin anew. ``model``: whose weights; None: those of the model itself, otherwise of an adapter.
    ``update``: names it; each reply that is sampled with these weights has this name."""

    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=0, lt=2**31)
    in_flight: InFlight = "keep"
    model: str | None = None
    update: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=100)


class FromCheckpoint(Begin):
    """``checkpoint``: its folder, below that of ``--weights-dir``. ``version``: None: the next one."""

    checkpoint: str
    version: int | None = Field(None, ge=0, lt=2**31)  # type: ignore[assignment]


class Refused(Exception):
    """A request is turned away. ``status``: of HTTP; ``param``: what of the request is wrong, if that is it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Restarted(Refused):
    """Other weights came, under which the request is to begin again."""


class Door:
    """The engines of one model, whether requests get to them, and the updates of their weights.

    ``update``: the one that the weights came with; empty: they are those that it was started with. ``running``:
    requests in engines, with how many samples they have."""

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self.engines = engines
        self.running: dict[int, tuple[LocalEngine, int]] = {}
        self.update = self._under_way = self._coming = ""  # the last may still wait for requests to end
        self._reason: str | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._lock = asyncio.Lock()
        self._expiry: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self.engines[0].version

    @property
    def ended(self) -> str | None:
        """That one of the engines has ended, and why; None: they all work."""
        return next((f"the engine ended: {one.broken}; restart the server" for one in self.engines if one.broken), None)

    @property
    def refusal(self) -> str | None:
        """Why no request gets to an engine; None: they do."""
        return self.ended or self._reason

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def enter(self, requests: Sequence[Request]) -> LocalEngine:
        """The engine with the fewest samples, once requests may be made. Raises Refused: none may."""
        await self._open.wait()
        if self.refusal is not None:
            raise Refused(503, self.refusal)
        engine = self.engines[0]
        if len(self.engines) > 1:  # otherwise it takes a while for nothing
            engine = min(self.engines, key=lambda one: sum(n for other, n in self.running.values() if other is one))
        self.running |= {request.id: (engine, len(request.seeds)) for request in requests}
        return engine

    def hold(self) -> None:
        """From now on requests wait before they get to an engine, until :meth:`release`."""
        self._open.clear()

    def release(self, reason: str | None = None) -> None:
        """Let requests go on, or turn them all away with this reason."""
        self._reason = reason
        self._open.set()

    async def _drained(self) -> None:
        """Returns when no engine has a request. To be called while they are held."""
        while self.running:
            await asyncio.sleep(0.01)

    async def _restart(self) -> None:
        """End the requests in engines with :class:`Restarted`: whose client has seen nothing begin again by themselves,
        the others are an error. To be called while requests are held."""
        for _ in range(3):
            await asyncio.sleep(0)  # what passed before the hold is in its engine then
        for engine in {id(engine): engine for engine, _ in self.running.values()}.values():
            await engine.cancel(set(self.running))

    def knows(self, update: str) -> bool:
        return update in (self._under_way, self.update)

    async def begin(self, begin: Begin) -> int:
        """Returns the version in use. Raises Refused: it is as new or newer; another update has begun."""
        async with self._lock:
            if begin.version < self.version or (begin.version == self.version and begin.update != self.update):
                text = f"{begin.version} was given, and {self.version} is in use: versions rise with each update"
                raise Refused(409, f"version: {text}; do two runs share this server?", "version")
            before, self._under_way, self._coming = self._under_way, "", begin.update
            self.hold()
        if begin.in_flight == "drain" and not before:  # otherwise engines wait themselves
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained(), DEADLINE_S)
        async with self._lock:
            self._require(begin.update, self._coming)
            self._under_way = begin.update
            async with self._or_abandoned():
                if begin.in_flight != "keep":
                    await self._restart()
                for engine in self.engines:
                    await engine.begin(begin.version)
            self._wait_on(begin.update)
            return self.version

    async def put(self, update: str, body: Callable[[], Awaitable[bytes]]) -> None:
        """``body``: safetensors. Raises Refused: they are none of the model, or not of the update under way."""
        async with self._taken(update, body) as tensors:
            for engine in self.engines:
                await engine.put(list(tensors.items()))
            self._wait_on(update)

    async def commit(self, update: str, body: Callable[[], Awaitable[bytes]]) -> int:
        """``body``: safetensors of some elements of each. Returns the version that is in use now; for an update that is
        done already too. Raises Refused: some weights are missing, or are not what was sent."""
        if update in ("", self._under_way) or update != self.update:
            async with self._taken(update, body) as fingerprint:
                if other := set(fingerprint) ^ set(self.engines[0].shapes):
                    raise EngineError(
                        f"the fingerprint is not of all weights: {len(other)} differ, such as {min(other)}"
                    )
                for engine in self.engines:
                    await engine.commit(fingerprint)
                self._finish()
        return self.version

    async def load(self, asked: FromCheckpoint, tensors: Mapping[str, torch.Tensor]) -> int:
        """Take those of a checkpoint; returns their version."""
        version = self.version + 1 if asked.version is None else asked.version
        await self.begin(asked.model_copy(update={"version": version}))
        async with self._lock:
            self._require(asked.update, self._under_way)
            async with self._or_abandoned():
                for engine in self.engines:
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
        if update == self._under_way:
            self._wait_on("")  # a slow line is not silence: serving.py ends what does not come on
        try:
            content = await body()
        finally:
            if update == self._under_way:
                self._wait_on(update)
        async with self._lock:
            self._require(update, self._under_way)
            from safetensors import SafetensorError
            from safetensors.torch import load

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
                raise Refused(503 if self.ended else 400, self.ended or str(error)) from None
            raise

    def _finish(self) -> None:
        self._under_way, self.update = "", self._under_way
        self._wait_on("")
        self.release()

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
        self.release(f"the weights are in part another version's ({why}); new ones have to be handed over")
        await self._restart()
