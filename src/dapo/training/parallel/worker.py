"""One rank of the learner: the trainer of one process, which exchanges what it has to with the others.

All methods are called on all ranks, in the same order, one at a time and from one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo.algorithm.kl import AdaptiveKL
from dapo.config import Config
from dapo.errors import UserError
from dapo.model.placement import determinism, set_threads
from dapo.records import FloatArray, TokenBatch
from dapo.training.faults import FaultFolder
from dapo.training.learner import LocalLearner
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.objective_protocol import Objective
from dapo.training.parallel.holding import Replica, Sharded
from dapo.training.parallel.ranks import ProcessRanks
from dapo.training.policy import Policy
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport

_LOST = ("Connection closed", "Connection reset", "Socket closed", "gloo", "NCCL", "Broken pipe", "Timed out")


class PeerLostError(Exception):
    """This rank is well, but another one is gone or does not answer."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What others want to know of the trainer."""

    version: int
    updates: int
    skipped_updates: int
    learning_rate: float


class RankWorker:
    """A rank, from its start to its end.

    Attributes:
        learner: that of one process, whose trainer is one of several; it is there once :meth:`build` was called.
    """

    learner: LocalLearner

    def __init__(self, ranks: ProcessRanks, device: torch.device | str = "cpu") -> None:
        """``ranks``: from :func:`dapo.training.parallel.ranks.join`. ``device``: of this rank."""
        self.ranks, self.device = ranks, torch.device(device)
        self._closing = contextlib.ExitStack()
        self._done: tuple[Any, UpdateReport] | None = None

    def build(
        self,
        config: Config,
        source: Any = None,
        sharded: bool = True,
        cpu_offload: bool = False,
        objective: Objective | None = None,
        faults: Path | None = None,
    ) -> Facts:
        """Load the model, and make the trainer.

        Args:
            source: folder or name of the model; None: that of the recipe.
            sharded: FSDP2, or the whole model on each rank, as an adapter's has to be.
            cpu_offload: of a sharded model, see :class:`~dapo.training.parallel.holding.Sharded`.
            objective: in place of the recipe's.
            faults: folder of updates that were not finite.

        Raises:
            UserError: it cannot be loaded, or not be trained this way.
        """
        self._closing.enter_context(determinism(config, self.device))
        dtype = getattr(torch, config.model.compute_dtype)

        def load(turn_into: Callable[[Any, Replica], Any]) -> Any:
            """One rank after the other where each reads all of it: the host's memory holds one whole model at a time."""
            found = None
            for rank in range(self.ranks.size):
                if rank == self.ranks.rank or not sharded:
                    model = load_trainable(source or config.model.path, config.model, "cpu" if sharded else self.device)
                    held = Sharded(self.ranks, self.device, cpu_offload) if sharded else Replica(self.ranks, self.device)
                    found = turn_into(begin_adapter(model, config.model, config.seed), held)
                    if not sharded:
                        return found
                self.ranks.gather(None)
            return found

        def trainer(model: Any, held: Replica) -> Trainer:
            set_threads(config, model)
            return Trainer(model, config.training, config.rollout.temperature, dtype, held)

        def frozen(model: Any, held: Replica) -> Policy:
            return Trainer(model.requires_grad_(False), config.training, config.rollout.temperature, dtype, held).policy

        reference = load(frozen) if sharded and config.algorithm.kl.mode != "off" else None
        kl = AdaptiveKL(0.0, None, 1)
        self.learner = LocalLearner(load(trainer), config, kl, objective, reference=reference)
        if faults is not None and self.ranks.rank == 0:
            self.learner.trainer.faults = FaultFolder(faults)
        self._kl = kl
        return self.facts

    @property
    def facts(self) -> Facts:
        trainer = self.learner.trainer
        return Facts(trainer.version, trainer.updates, trainer.skipped_updates, trainer.learning_rate)

    def perform(self, method: str, *args: Any) -> tuple[Any, Facts]:
        """``self.method(*args)``, and the facts after it; of ranks other than the first, no result.

        Raises:
            UserError: as every rank raises it.
            PeerLostError: another rank is gone.
        """
        try:
            result = getattr(self, method)(*args)
        except UserError:
            raise
        except BaseException as error:
            self.ranks.abort()  # the others wait for this one
            if isinstance(error, dist.DistError) or (
                isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
            ):
                raise PeerLostError(str(error)) from error
            raise
        return (result if self.ranks.rank == 0 else None), self.facts

    def annotate(self, batch: TokenBatch) -> dict[str, FloatArray]:
        """The columns that the recipe asks for."""
        return dict(self.learner.annotated(batch).columns)

    def update(
        self, rate: tuple[int, float], fixed_rate: float | None, index: int, mini: TokenBatch, kl_coef: float
    ) -> UpdateReport:
        """Update ``index`` of step ``rate[0]``; asked for a second time, its report.

        Args:
            rate: step and spent share of the run, for the learning rate.
            fixed_rate: in place of that.
            mini: all of the mini-batch, on every rank.
            kl_coef: of a KL in the loss.
        """
        ...

    def publish(self) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
        """As :meth:`dapo.training.trainer.Trainer.publish`: whole tensors, one by one. Every rank takes all of them."""
        return self.learner.publish()

    def save(self, folder: Path) -> None:
        """Write ``model`` and ``optimizer`` into ``folder``. Each is there whole or not at all."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from :meth:`save`, of any number of ranks or of one process."""
        ...
