"""What every learner has: a trainer, the one thread that it works in, and the door to both.

Whoever derives from it says what a mini-batch means to the loss: ``inputs`` and ``watched_objective``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from dapo.algorithm.objective import Stats
from dapo.records import TokenBatch
from dapo.training.faults import FaultFolder
from dapo.training.objective_protocol import Objective, Unit, unit_of
from dapo.training.snapshot import (
    LearnerSnapshot,
    expected_bytes,
    load_snapshot,
    share_rounded_back,
    snapshot,
    snapshot_bytes,
    write_snapshot,
)
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport
from dapo.util.asynchronous import in_thread
from dapo.util.memory import give_back_memory
from dapo.util.shutdown import Stopped


@dataclass(frozen=True, slots=True)
class Facts:
    """What others want to know of a trainer: its version, updates made and skipped so far, the present rate."""

    version: int
    updates: int
    skipped_updates: int
    learning_rate: float


class UpdatesOfAStep(Protocol):
    """What an update leaves its report in, after those before it."""

    reports: list[UpdateReport]


class BaseLearner(ABC):
    """A learner in this process, over one trainer, without an algorithm.
    ``trainer``: to be used between two calls only."""

    def __init__(self, trainer: Trainer, out_of_time: Callable[[], bool] = lambda: False) -> None:
        """``out_of_time``: whether an update under way is to end with :class:`~dapo.util.shutdown.Stopped`, between two
        chunks of tokens. Weights and optimizer are those before it then."""
        self.trainer, self._out_of_time = trainer, out_of_time
        self._trainers = {"": trainer}  # by the folder that theirs are in, inside of a checkpoint
        self._pool = ThreadPoolExecutor(1, "dapo-training")
        self._compute = partial(in_thread, pool=self._pool)

    @property
    @abstractmethod
    def watched_objective(self) -> Objective:
        """What is trained on: with all statistics, and an eye on the time (:class:`Watched`)."""

    @abstractmethod
    def inputs(self, mini: TokenBatch) -> Any:
        """What the objective gets to know of an optimizer mini-batch, which is the next one to be trained on."""

    # --- the door (orchestrator/protocols.py) -------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        trainer = self.trainer
        return Facts(trainer.version, trainer.updates, trainer.skipped_updates, trainer.learning_rate)

    @property
    def version(self) -> int:
        return self.trainer.version

    @property
    def expected_bytes(self) -> int:
        return sum(map(expected_bytes, self._trainers.values()))

    def keep_faults(self, folder: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        for name, trainer in self._trainers.items():
            trainer.faults = FaultFolder(folder / name, decode)

    def begin_step(self, step: int, spent: float) -> None:
        for trainer in self._trainers.values():
            trainer.begin_step(step, spent)

    async def update(self, step: int, index: int, mini: TokenBatch, into: UpdatesOfAStep) -> None:
        await self._compute(self._update, index, mini, into)

    def publish(self) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
        """The weights for the rollout engine, see :meth:`dapo.training.trainer.Trainer.publish`."""
        return self.trainer.publish()

    async def snapshot(self) -> LearnerSnapshot:
        frozen = {name: await self._compute(snapshot, trainer) for name, trainer in self._trainers.items()}

        def write(folder: Path, stop_ids: Sequence[int]) -> None:
            for name, one in frozen.items():
                write_snapshot(one, folder / name, () if name else stop_ids)

        return LearnerSnapshot(sum(map(snapshot_bytes, frozen.values())), write)

    async def load(self, folder: Path) -> None:
        for name, trainer in self._trainers.items():
            await self._compute(load_snapshot, trainer, folder / name)

    async def export(self, folder: Path, **how: Any) -> None:
        await in_thread(partial(self.trainer.save, folder, **how))

    async def share_rounded_back(self, before: Path, dtype: torch.dtype) -> float:
        return await in_thread(share_rounded_back, self.trainer, before, dtype)

    async def close(self) -> None:
        """Let go of the training thread; what it is doing is not waited for."""
        self._pool.shutdown(wait=False)

    # --- in its thread --------------------------------------------------------------------------------------------

    def _update(self, index: int, mini: TokenBatch, into: UpdatesOfAStep) -> None:
        made = len(into.reports)
        if index < made:
            return
        if index > made:
            raise ValueError(f"update {index} of a step of which {made} were made")
        if into.reports:  # a step that was resumed inside of it has one rate
            self.trainer.set_learning_rate(into.reports[0].learning_rate)
        into.reports.append(self._train(index, mini))
        give_back_memory()

    def _train(self, index: int, mini: TokenBatch) -> UpdateReport:
        return self.trainer.update(mini, self.inputs(mini), self.watched_objective)


@dataclass(frozen=True, slots=True)
class Watched:
    """An objective that ends an update which there is no time left for, between two chunks of tokens."""

    objective: Objective
    out_of_time: Callable[[], bool]

    @property
    def unit(self) -> Unit:
        return unit_of(self.objective)

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, Stats]:
        if self.out_of_time():
            raise Stopped("there is no time left for this update")
        return self.objective(logprobs, entropy, inputs)
