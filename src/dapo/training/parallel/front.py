"""The learner over ranks, as the loop sees it: one door, numpy and numbers through it.

Consumes: token batches. Produces: columns and reports, as :class:`~dapo.training.learner.LocalLearner` does. Every call
goes to all ranks at once. Waits for them; for those that hang after one has failed, a bounded time.

Whoever starts the ranks (Ray, or a test) makes a :class:`~dapo.training.parallel.worker.RankWorker` in each process and
gives a :class:`RankHandle` of each, by rank, to :meth:`RankedLearner.start`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from dapo.algorithm.kl import AdaptiveKL
from dapo.config import Config
from dapo.errors import LostError
from dapo.records import TokenBatch
from dapo.training.base_learner import Facts, UpdatesOfAStep
from dapo.training.parallel.ranks import AGREED
from dapo.training.parallel.worker import Built, PeerLostError
from dapo.training.snapshot import LearnerSnapshot
from dapo.training.trainer import rate_of_step
from dapo.util.asynchronous import until_done

T = TypeVar("T")
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.2


class RankDied(Exception):
    """A rank's process is gone. The message says what is known of its end."""


class RankError(LostError):
    """A rank failed, so the learner is of no use any more. The run goes on from its last checkpoint."""


class RankHandle(Protocol):
    """One rank, wherever it is."""

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """``worker.method(...)`` there. Raises what it raised, or :class:`RankDied`."""

    async def end(self) -> None:
        """End its process, by force, if it is there."""


class RankedLearner:
    """N ranks behind the door of a learner (``orchestrator/protocols.Learner``).
    ``built``: what was loaded, once :meth:`start` was called."""

    built: Built
    _facts: Facts

    def __init__(self, ranks: Sequence[RankHandle], kl: AdaptiveKL, grace_s: float = GRACE_SECONDS) -> None:
        """
        Args:
            ranks: of workers that nobody has called yet.
            kl: the coefficient of a KL in the loss; others may change it.
            grace_s: for the other ranks to come to an end by themselves, once one has failed.
        """
        self._ranks, self._kl, self._grace = ranks, kl, grace_s
        self._rate = (0, 0.0)
        self._news: dict[str, tuple[Any, ...]] = {}
        self._failure: RankError | None = None
        self._one_at_a_time = asyncio.Lock()

    async def start(self, host: str, config: Config, timeout_s: float = 600.0, **how: Any) -> None:
        """Have the ranks meet at ``host``, the machine of rank 0, and load the model.
        ``timeout_s``: how long a rank waits for another at most, then and later; other arguments are those of
        :meth:`~dapo.training.parallel.worker.RankWorker.build`. Raises as :meth:`call`."""
        [address] = await self._now_on(self._ranks[:1], "open", "open", host)
        await self._now_on(self._ranks, "join", "join", address, timeout_s)
        self._config = config
        self.built = await self.call("build", config, **how)

    @property
    def facts(self) -> Facts:
        """Of the trainer after the last call, with the learning rate of :meth:`begin_step`."""
        return replace(self._facts, learning_rate=rate_of_step(self._config.training, *self._rate))

    @property
    def version(self) -> int:
        return self._facts.version

    @property
    def expected_bytes(self) -> int:
        return self.built.checkpoint_bytes

    def begin_step(self, step: int, spent: float) -> None:
        self._rate = (step, spent)

    def use(self, config: Config) -> None:
        """Go on with other settings, of which the ranks hear with the next call: it raises what is wrong with them."""
        if config is not self._config:
            self._config = config
            self._news["use"] = (config,)

    def keep_faults(self, folder: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """See :meth:`dapo.training.learner.LocalLearner.keep_faults`. ``decode`` can be pickled."""
        self._news["keep_faults"] = (folder, decode)

    async def annotate(self, batch: TokenBatch) -> TokenBatch:
        return batch.with_columns(**(await self.call("annotate", batch)))

    async def update(self, step: int, index: int, mini: TokenBatch, into: UpdatesOfAStep) -> None:
        """Raises as of any learner, and RankError: a rank failed; names it."""
        if index > (made := len(into.reports)):
            raise ValueError(f"update {index} of a step of which {made} were made")
        if index == made:
            await _to_its_end(self._update(index, mini, into))

    async def _update(self, index: int, mini: TokenBatch, into: UpdatesOfAStep) -> None:
        rate = into.reports[0].learning_rate if into.reports else None
        into.reports.append(await self.call("update", self._rate, rate, index, mini, self._kl.coef))

    async def snapshot(self) -> LearnerSnapshot:
        """Each rank keeps a copy of what is its to write, and later writes it in a thread of its own.
        Raises NumericalError or UserError: it is of no use."""
        size, loop = await self.call("snapshot"), asyncio.get_running_loop()

        def write(folder: Path, stop_ids: Sequence[int] = ()) -> None:
            asyncio.run_coroutine_threadsafe(self._write(folder, stop_ids), loop).result()

        return LearnerSnapshot(size, write)

    async def _write(self, folder: Path, stop_ids: Sequence[int]) -> None:
        await self.call("begin_write", folder, stop_ids)
        while not await self.call("written"):
            await asyncio.sleep(POLL_SECONDS)

    async def load(self, folder: Path) -> None:
        """Go on from a snapshot, of any number of ranks. Raises UserError: missing, damaged, or of another model."""
        await self.call("load", folder)

    async def export(self, folder: Path, **how: Any) -> None:
        await self.call("export", folder, **how)

    async def share_rounded_back(self, before: Path, dtype: torch.dtype) -> float:
        return float(await self.call("share_rounded_back", before, dtype))

    async def close(self) -> None:
        """End all ranks."""
        await asyncio.gather(*(rank.end() for rank in self._ranks))

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """What ``method`` of the workers gives on rank 0. It is made to its end, also if the caller is cancelled.
        Raises UserError, FileExistsError: what every rank raised: they can go on; RankError: a rank died or failed
        alone. The others were told and are ended."""
        result, self._facts = (await _to_its_end(self._perform(method, *args, **keywords)))[0]
        return result

    async def _perform(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        async with self._one_at_a_time:
            while self._news:
                name = next(iter(self._news))
                await self._now_on(self._ranks, name, "perform", name, *self._news.pop(name))
            return await self._now_on(self._ranks, method, "perform", method, *args, **keywords)

    async def _now_on(self, ranks: Sequence[RankHandle], what: str, *request: Any, **keywords: Any) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        calls = [asyncio.ensure_future(rank.call(*request, **keywords)) for rank in ranks]
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        errors = [call.exception() if call.done() else None for call in calls]
        if any(errors):
            # others may be about to say the same, or to say whose fault it was
            patient = all(error is None or isinstance(error, (*AGREED, PeerLostError)) for error in errors)
            await asyncio.wait(calls, timeout=self._grace if patient else 0)
            errors = [call.exception() if call.done() else TimeoutError("it did not answer") for call in calls]
            if errors[0] is not None and all(isinstance(error, AGREED) for error in errors):
                raise errors[0]
            self._failure = RankError(_told(what, errors, len(self._ranks)))
            await self.close()
            for call in calls:
                call.cancel()
            raise self._failure
        return [call.result() for call in calls]


def _told(what: str, errors: Sequence[BaseException | None], size: int) -> str:
    """Whose error came before those of the others, which only lost it."""
    weight = {RankDied: 0, TimeoutError: 2, PeerLostError: 3, type(None): 4}
    number = min(range(len(errors)), key=lambda rank: weight.get(type(errors[rank]), 1))
    return (
        f"rank {number} of {size} failed in {what}: {str(errors[number]) or type(errors[number]).__name__}. "
        "All ranks are ended; resume the run, which goes on from its last checkpoint, on as many ranks as there are"
    )


async def _to_its_end(work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    await until_done(task)
    return task.result()
