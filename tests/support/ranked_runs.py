"""A run whose learner is over ranks of a pool of processes: what a placement is, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dapo.model.loading import stop_token_ids
from dapo.orchestrator.inputs import make_engine, model_elsewhere
from dapo.orchestrator.runtime.placed import Placed
from dapo.rollout.engine import hand_over
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.parallel.front import RankedLearner
from dapo.training.parallel.ranks import ProcessRanks
from dapo.training.parallel.worker import RankWorker
from rank_processes import RankProcess, on_all


class RankOfRuns(RankWorker):
    """A process of the pool, which is a rank of one run after the other."""

    def join(self, address: str, timeout_s: float = 600.0) -> None:
        super().join(address, timeout_s)
        sizes = range(1, self.size + 1)
        groups = {size: (dist.new_group(list(range(size))), dist.new_group(list(range(size)))) for size in sizes}
        self.sets = {size: [*map(ProcessRanks, both)] for size, both in groups.items() if self.rank < size}

    def be_of(self, size: int) -> None:
        """From now on one of the first ``size``."""
        self.size, (self.ranks, self._beside) = size, self.sets[size]

    def hand_over(self, file: str) -> int:
        """Publish into ``file``. Returns the version."""
        version, weights = self.publish()
        found = {name: tensor.clone() for name, tensor in weights}
        if self.rank == 0:
            save_file(found, file)
        return version


@dataclass
class Seat:
    """The handle of a rank: its process is for other runs too."""

    process: RankProcess
    size: int

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        if method in ("open", "join"):  # they have met already
            return await self.process.call("be_of", self.size)
        return await self.process.call(method, *args, **keywords)

    async def end(self) -> None: ...


@dataclass
class SyncByFile:
    """Through ``file``."""

    file: Path

    async def push(self, learner: Any, engine: Any) -> None:
        version = await learner.call("hand_over", str(self.file))
        await hand_over(engine, version, load_file(self.file).items())


def pool_of(size: int) -> list[RankProcess]:
    """Processes that have met."""
    processes = [RankProcess(RankOfRuns, rank, size) for rank in range(size)]
    processes[0].send("open", "127.0.0.1")
    on_all(processes, "join", processes[0].receive(), 60)
    return processes


def over(processes: Sequence[RankProcess], sharded: bool, folder: Path) -> Any:
    """In place of :func:`dapo.orchestrator.runtime.place`: ranks in the pool, a native engine here."""

    def place(setup: Any, kl: Any, out_of_time: Any, wait: Any, tell: Any) -> Placed:
        config = setup.config
        learner = RankedLearner([Seat(process, len(processes)) for process in processes], kl, grace_s=2.0)
        wait(learner.start("", config, sharded=sharded, objective=setup.overrides.objective))
        model = model_elsewhere(config)
        stop_ids = stop_token_ids(model, setup.tokenizer, config.rollout.stop_token_ids)
        own = begin_adapter(load_trainable(config.model.path, config.model), config.model, config.seed)
        engine = make_engine(config, setup.overrides, own, stop_ids, setup.template, setup.heldout, 0)
        sync = SyncByFile(folder / "weights.safetensors")
        return Placed(learner, engine, None, sync, model, stop_ids, learner.built.fingerprint)

    return place
