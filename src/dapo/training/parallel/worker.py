"""One rank of the learner: the trainer of one process, which exchanges what it has to with the others.

All methods are called on all ranks, in the same order, one at a time and from one thread.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dapo.algorithm.kl import AdaptiveKL
from dapo.config import Config
from dapo.model.compiling import compile_layers
from dapo.model.fingerprint import fingerprint_model
from dapo.model.placement import determinism, set_threads
from dapo.records import FloatArray, TokenBatch
from dapo.training.base_learner import Facts
from dapo.training.learner import LocalLearner
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.objective_protocol import Objective
from dapo.training.parallel.holding import Replica
from dapo.training.parallel.ranks import ProcessRanks
from dapo.training.parallel.sharded import Sharded
from dapo.training.policy import Policy
from dapo.training.snapshot import (
    expected_bytes,
    load_snapshot,
    share_rounded_back,
    snapshot,
    snapshot_bytes,
    write_snapshot,
)
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport
from dapo.util.memory import give_back_memory

T = TypeVar("T")
_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
_LOST = ("Connection closed", "Connection reset", "Socket closed", "gloo", "NCCL", "Broken pipe", "Timed out")


class PeerLostError(Exception):
    """This rank is well, but another one is gone or does not answer."""


@dataclass(frozen=True, slots=True)
class Built:
    """What the ranks have loaded: the fingerprint of the model, and what a checkpoint of all of it takes."""

    fingerprint: Mapping[str, Any]
    checkpoint_bytes: int


class RankWorker:
    """A rank, from its start to its end.
    ``learner``: that of one process, whose trainer is one of several; it is there once :meth:`build` was called."""

    ranks: ProcessRanks
    learner: LocalLearner

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu") -> None:
        """``rank`` of ``size``, computing on ``device``: ``cpu``, or one GPU."""
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._closing = contextlib.ExitStack()
        self._writer = ThreadPoolExecutor(1, "dapo-checkpoint")
        self._frozen: Trainer | None = None
        self._meeting: Any = None
        self._done: tuple[Any, UpdateReport] | None = None

    def open(self, host: str) -> str:
        """On rank 0 only: have the ranks meet on this machine, by the name or number ``host``. Returns the address."""
        self._meeting = _STORE(host, 0, self.size, is_master=True, wait_for_workers=False)
        return f"{host}:{self._meeting.port}"

    def join(self, address: str, timeout_s: float = 600.0) -> None:
        """Meet the others at ``address``, which rank 0 has opened; all ranks at the same time.
        ``timeout_s``: how long one waits for another at most, then and later."""
        host, _, port = address.rpartition(":")
        common: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        store = self._meeting or _STORE(host, int(port), self.size, is_master=False, **common)
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, **common)
        self.ranks = ProcessRanks(control=dist.new_group(backend="gloo", **common) if gpu else None)
        self._beside = ProcessRanks(dist.new_group(backend="gloo", **common))  # of the thread that writes checkpoints

    def build(
        self, config: Config, sharded: bool = True, cpu_offload: bool = False, objective: Objective | None = None
    ) -> Built:
        """Load the model, and make the trainer.

        Args:
            sharded: FSDP2, or the whole model on each rank, as an adapter's has to be.
            cpu_offload: of a sharded model, see :class:`~dapo.training.parallel.sharded.Sharded`.
            objective: in place of the recipe's.

        Raises UserError: it cannot be loaded, or not be trained this way.
        """
        self._closing.enter_context(determinism(config, self.device))
        training, temperature = config.training, config.rollout.temperature
        dtype = getattr(torch, config.model.compute_dtype)

        def trainer() -> Trainer:
            model = load_trainable(config.model.path, config.model, "cpu" if sharded else self.device)
            if self.rank == 0:
                found.update(fingerprint_model(model, self.device))
            set_threads(config, model)
            return Trainer(begin_adapter(model, config.model, config.seed), training, temperature, dtype, held())

        def reference() -> Policy:
            model, own = load_trainable(config.model.path, config.model, "cpu").requires_grad_(False), held()
            own.take(model, dtype)
            if self.device.type == "cuda":  # as the trainer's: its KL to itself is exactly 0 then
                compile_layers(model)
            return Policy(model, temperature, training.tokens_per_micro_batch, dtype, own)

        def held() -> Replica:
            return Sharded(self.ranks, self.device, cpu_offload) if sharded else Replica(self.ranks, self.device)

        found: dict[str, Any] = {}
        apart = self._in_turn(reference) if sharded and config.algorithm.kl.mode != "off" else None
        made = self._in_turn(trainer) if sharded else self.ranks.together(trainer)
        self._kl = AdaptiveKL(0.0, None, 1)
        self.learner = LocalLearner(made, config, self._kl, objective, reference=apart)
        return Built(found, self._of_all(expected_bytes(made)))

    def _in_turn(self, load: Callable[[], T]) -> T:
        """One rank of each host after the other, so that the memory of a host holds one whole model at a time."""
        hosts = self.ranks.gather(socket.gethostname())
        turns = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        several = [[rank for rank, its in enumerate(turns) if its == turn] for turn in range(max(turns) + 1)]
        found = [self.ranks.together(load, alone=ranks) for ranks in several]
        return found[turns[self.rank]]

    def _of_all(self, size: int) -> int:
        """Bytes of the whole, where ``size`` is this rank's."""
        sizes = self.ranks.gather(size)
        return sum(sizes) if self._sharded else sizes[0]

    @property
    def _sharded(self) -> bool:
        return isinstance(self.learner.trainer.policy.held, Sharded)

    def use(self, config: Config) -> None:
        self.learner.use(config)

    def keep_faults(self, folder: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """See :meth:`dapo.training.learner.LocalLearner.keep_faults`; rank 0 writes."""
        if self.rank == 0:
            self.learner.keep_faults(folder, decode)

    def perform(self, method: str, *args: Any, **keywords: Any) -> tuple[Any, Facts]:
        """``self.method(...)``, and the facts after it; of ranks other than the first, no result.
        Raises UserError: as every rank raises it; PeerLostError: another rank is gone."""
        try:
            result = getattr(self, method)(*args, **keywords)
        except Exception as error:
            lost = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
            if lost or isinstance(error, dist.DistError):
                raise PeerLostError(str(error)) from error
            raise
        return (result if self.ranks.rank == 0 else None), self.learner.facts

    def annotate(self, batch: TokenBatch) -> dict[str, FloatArray]:
        return dict(self.learner.annotated(batch).columns)

    def update(
        self, rate: tuple[int, float], fixed_rate: float | None, index: int, mini: TokenBatch, kl_coef: float
    ) -> UpdateReport:
        """Update ``index`` of step ``rate[0]``; the last one once more is its report.
        ``rate``: step and spent share of the run, for the learning rate. ``fixed_rate``: in place of that. ``mini``:
        all of the mini-batch, on every rank. ``kl_coef``: of a KL in the loss."""
        name = (rate[0], index)
        if self._done is not None and self._done[0] == name:
            return self._done[1]
        trainer = self.learner.trainer
        trainer.begin_step(*rate)
        if fixed_rate is not None:  # a step that was resumed inside of it has one rate
            trainer.set_learning_rate(fixed_rate)
        self._kl.coef = kl_coef
        report = trainer.update(mini, self.learner.inputs(mini), self.learner.watched_objective)
        give_back_memory()
        self._done = (name, report)
        return report

    def publish(self) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
        """As :meth:`dapo.training.trainer.Trainer.publish`: whole tensors, one by one. Every rank takes all of them."""
        return self.learner.publish()

    def export(self, folder: Path, **how: Any) -> None:
        self.learner.trainer.save(folder, **how)

    def share_rounded_back(self, before: Path, dtype: torch.dtype) -> float:
        return share_rounded_back(self.learner.trainer, before, dtype)

    def snapshot(self) -> int:
        """Keep a copy of what this rank would write of a checkpoint in main memory. Returns the bytes of all ranks."""
        self._frozen = None  # before the next one is made
        self._frozen = snapshot(self.learner.trainer, self._beside)
        return self._of_all(snapshot_bytes(self._frozen))

    def begin_write(self, folder: Path, stop_ids: Sequence[int]) -> None:
        """Write it in a thread, beside updates. See :func:`dapo.training.snapshot.write_snapshot`."""
        assert self._frozen is not None
        self._writing = self._writer.submit(write_snapshot, self._frozen, folder, stop_ids)

    def written(self) -> bool:
        """Whether all ranks have. Raises what it raised."""
        if not all(self.ranks.gather(self._writing.done())):
            return False
        self._writing.result()
        self._frozen = None
        return True

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint of any number of ranks or of one process."""
        load_snapshot(self.learner.trainer, folder)
        self._done = None
