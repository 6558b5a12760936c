"""What runs in Ray's processes: a rank of the learner, an engine, or both of them; or a scorer.

Every call is ``call(method, packed arguments)`` and is answered with ``(result, error)``, the error of our code as it
was raised. What Ray itself raises then says one thing only: the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import Config
from dapo.config.composed_reward import RewardConfig
from dapo.data.template import PromptTemplate
from dapo.model.adapters import has_adapter
from dapo.model.placement import set_threads
from dapo.orchestrator.inputs import RunOverrides, make_engine
from dapo.orchestrator.runtime.ray.weights import Sender, Sent, received
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.build import make_scorer
from dapo.reward.contract import Doubt
from dapo.rollout.engine import EngineError, InterruptibleEngine, Request, hand_over, portable
from dapo.rollout.group import Group, GroupError, Layout, unpacked
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.parallel.worker import RankWorker
from dapo.util.asynchronous import in_thread

if TYPE_CHECKING:
    import torch

WORD_SECONDS = 30.0
"""Between two words of an engine that has nothing to tell, at most."""
ENDED = None
"""In place of an event: a stream has no more."""


class Actor:
    """A process of a run. Its methods but the first three are for :meth:`call`."""

    def __init__(self, folder: str, path: Sequence[str]) -> None:
        """``folder``, ``path``: working folder and import path of the driver, as far as they are here."""
        if Path(folder).is_dir():
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]

    async def call(self, method: str, packed: bytes) -> bytes:
        """In pickles of our own: arrays that Ray carries can be read only."""
        args, keywords = pickle.loads(packed)
        try:
            return pickle.dumps((await getattr(self, method)(*args, **keywords), None))
        except Exception as error:
            return pickle.dumps((None, _sendable(error)))

    async def where(self) -> tuple[int, str]:
        """Process and node."""
        import ray

        return os.getpid(), ray.util.get_node_ip_address()

    async def forever(self) -> None:
        """For those who want to hear of the end of the process."""
        await asyncio.Event().wait()


def _sendable(error: Exception) -> Exception:
    traceback.print_exception(error)  # into Ray's log of this process
    return portable(error, RuntimeError)


class Rank(RankWorker):
    """One that hands its weights to engines: that of its own process, or those of others."""

    engine: Any = None

    @cached_property
    def _sender(self) -> Sender:
        return Sender()

    def hand_over(
        self, engines: Sequence[Any], at: int | None = None, backend: str | None = None
    ) -> tuple[int, list[int] | None, str | None] | None:
        """Publish, all ranks together.

        Args:
            engines: actors to send to; without effect where there is an engine in this process.
            at: only if so many updates were made.
            backend: see :meth:`Sender.send`.

        Returns:
            The version; which of ``engines`` have it (None: every rank's own); and what was made up for on the way.
            None: there were more updates.
        """
        if at is not None and self.learner.trainer.updates != at:
            return None
        version, tensors = self.publish()
        if self.engine is not None:
            asyncio.run(hand_over(self.engine, version, tensors))
            return version, None, None
        if self.rank:
            for _ in tensors:
                pass
            return version, [], None
        policy = self.learner.trainer.policy
        dtype = None if has_adapter(policy.model) else policy.compute_dtype
        self._sender.send(engines, version, tensors, dtype, backend)
        return version, self._sender.reached, self._sender.word


class Worker(Actor):
    """A rank, an engine, or both."""

    _rank: Rank
    _engine: InterruptibleEngine

    def __init__(self, folder: str, path: Sequence[str]) -> None:
        super().__init__(folder, path)
        self._thread = ThreadPoolExecutor(1, "dapo-rank")  # of all that a rank does
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._events: list[tuple[int, Any]] = []
        self._heard = asyncio.Event()
        self._group: Group | None = None
        self._meeting = ""

    # --- a rank -------------------------------------------------------------------------------------------------------

    async def make_rank(self, rank: int, size: int, device: str) -> None:
        self._rank = Rank(rank, size, device)

    async def rank(self, method: str, *args: Any, **keywords: Any) -> Any:
        return await in_thread(lambda: getattr(self._rank, method)(*args, **keywords), pool=self._thread)

    # --- an engine ----------------------------------------------------------------------------------------------------

    async def make_engine(
        self, config: Config, template: PromptTemplate, heldout: Sequence[Prompt], own: Any, stop_ids: Sequence[int]
    ) -> None:
        """As :func:`dapo.orchestrator.inputs.make_engine`. Beside a rank that holds the whole model it is that one's.
        Raises UserError: it cannot be made, or its requests cannot be interrupted."""

        def make() -> Any:
            rank: Rank | None = getattr(self, "_rank", None)
            spare = 0 if rank is None else rank.learner.trainer.bytes_to_come
            if rank is None or rank.learner.trainer.policy.held.lockstep:
                model = load_trainable(config.model.path, config.model, "cpu")
                set_threads(config, model)
                model = begin_adapter(model, config.model, config.seed)
            else:
                model = rank.learner.trainer.policy.model
            return make_engine(config, RunOverrides(engine=own), model, stop_ids, template, heldout, spare)

        engine = await in_thread(make, pool=self._thread)
        if not isinstance(engine, InterruptibleEngine):
            raise EngineError("rollout.engine: with runtime.kind=ray an engine must be an InterruptibleEngine")
        self._engine = engine
        if hasattr(self, "_rank"):
            self._rank.engine = engine

    async def version(self) -> int:
        return self._engine.version

    async def engine(self, method: str, *args: Any) -> Any:
        return await getattr(self._engine, method)(*args)

    async def ask(self, requests: Sequence[tuple[int, Request, bool]]) -> None:
        """Have events of each come under its key, with drafts or without."""
        for key, request, drafts in requests:
            self._reading[key] = asyncio.create_task(self._read(key, request, drafts))

    async def forget(self, keys: Sequence[int]) -> None:
        """Nobody waits for these any more."""
        tasks = [self._reading.pop(key) for key in keys if key in self._reading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, key: int, request: Request, drafts: bool) -> None:
        stream: Any = self._engine.stream([request]) if drafts else self._engine.generate([request])
        try:
            async for event in stream:
                self._tell(key, event)
            self._tell(key, ENDED)
        except Exception as error:
            self._tell(key, _sendable(error))
        finally:
            self._reading.pop(key, None)
            await stream.aclose()

    def _tell(self, key: int, event: Any) -> None:
        self._events.append((key, event))
        self._heard.set()

    async def events(self) -> bytes:
        """Wait for events, for half a minute at most; all that there are, and how many steps were decoded so far."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_SECONDS):
                await self._heard.wait()
        self._heard.clear()
        events, self._events = self._events, []
        return pickle.dumps((int(getattr(self._engine, "decode_steps", 0)), events))

    async def take(self, bucket: Sent) -> Exception | None:
        """New weights, as :meth:`~dapo.rollout.engine.Engine.put`; the error, if there is one."""
        self._leave()  # whoever sends this way has given it up
        return await self._put(received(bucket))

    async def meet(self, backend: str, where: str, rank: int, size: int, device: str) -> Exception | None:
        """Be in a group that weights come by, in place of the one before; the error, if there is one."""
        self._leave()
        self._meeting = where
        try:
            group = await in_thread(Group, backend, where, rank, size, device)
        except EngineError as error:
            return error
        if self._meeting == where:
            self._group = group
        return None

    async def receive(self, layout: Layout, size: int) -> Exception | None:
        """As :meth:`take`, by the group."""
        if (group := self._group) is None:
            return GroupError("an engine has left its group")
        try:
            buffer = await in_thread(group.receive, size)
        except GroupError as error:
            return error
        if group is not self._group:  # given up meanwhile
            return GroupError("an engine has left its group")
        return await self._put([*unpacked(buffer, layout).items()])

    async def _put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> Exception | None:
        try:
            await self._engine.put(bucket)
        except Exception as error:
            return _sendable(error)
        return None

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group, self._meeting = None, ""


class ScoringActor(Actor):
    async def make(self, config: RewardConfig, function: Callable[..., Any] | None) -> None:
        self._scorer = make_scorer(config, function)
        await self._scorer.start()

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        return await self._scorer.examine(prompts)

    async def score(self, items: Sequence[tuple[Prompt, str, FinishReason | None]]) -> Sequence[Reward]:
        return await asyncio.gather(*(self._scorer.score(*item) for item in items))

    async def close(self) -> None:
        await self._scorer.close()
