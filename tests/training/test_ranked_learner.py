"""The learner over ranks behind its door: what it gives, and what becomes of it when a rank fails."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from training_cases import SHAPE, packed, random_groups, weights_of

from dapo.algorithm.kl import AdaptiveKL
from dapo.config import build_config, nested
from dapo.errors import ConfigError, ModelError, NumericalError
from dapo.model.loading import load_model
from dapo.training.learner import LocalLearner
from dapo.training.parallel.front import RankDied, RankedLearner, RankError
from dapo.training.parallel.worker import Facts, PeerLostError
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport
from dapo.util.asynchronous import in_thread
from helpers import random_model
from rank_cases import WaitingWorker
from rank_processes import RankProcess

RECIPE = {"rollout.max_response_length": 20, "algorithm.overlong_buffer.len": 4, "data.max_prompt_length": 8,
          "rollout.prompts_per_step": 4, "training.groups_per_update": 2, "training.tokens_per_micro_batch": 64,
          "training.learning_rate": 1e-3, "training.adam_epsilon": 1e-4, "training.warmup_steps": 2,
          "algorithm.kl.mode": "loss", "algorithm.kl.coef": 0.05, "algorithm.proximal": "recompute"}  # fmt: skip
BATCH = packed(random_groups(SHAPE))


@dataclass
class Step:
    reports: list[UpdateReport] = field(default_factory=list)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model") / "qwen2")
    random_model("qwen2").save_pretrained(folder)
    return folder


def config_of(model: str) -> Any:
    return build_config(nested(RECIPE | {"model.path": model}))


async def with_ranks(work: Any, *args: Any, **keywords: Any) -> Any:
    """``work(learner, processes)`` over two ranks, none of which is there afterwards."""
    processes = [RankProcess(WaitingWorker, rank, 2) for rank in range(2)]
    learner = RankedLearner(processes, AdaptiveKL(0.05, None, 1))
    try:
        await learner.start("127.0.0.1", *args, **keywords)
        return await work(learner, processes)
    finally:
        await learner.close()
        assert None not in [process.exit_code() for process in processes]


def local(config: Any, model: str) -> LocalLearner:
    trainer = Trainer(load_model(model), config.training, config.rollout.temperature)
    return LocalLearner(trainer, config, AdaptiveKL(0.05, None, 1))


async def two_updates(learner: Any, step: Step) -> Any:
    """Of step 1, with a KL to the reference that is not 0 at the second; the annotated batch."""
    learner.begin_step(1, 0.0)
    batch = await learner.annotate(BATCH)
    for index, mini in enumerate(batch.minibatches(2)):
        await learner.update(1, index, mini, step)
    return batch


def spoiled(mini: Any) -> Any:
    return mini.with_columns(advantages=np.full_like(mini.columns["advantages"], np.nan))


def contents(folder: Path) -> dict[str, bytes]:
    """By the names of the tensors, in whatever file they are."""
    return {
        name: tensor.tobytes() for file in folder.rglob("*.safetensors") for name, tensor in load_file(file).items()
    }


def norms_of(folder: Path) -> dict[str, Any]:
    """Of the weights, in the report of the only fault."""
    (report,) = folder.glob("*/report.json")
    return {name: found["weight"] for name, found in json.loads(report.read_text())["norms"].items()}


def test_two_ranks_are_one_learner_until_one_is_killed(model, tmp_path):
    """One pair of processes for all of it: columns, reports, a call that came before, a checkpoint, and a death."""
    config, expected = config_of(model), Step()
    alone = local(config, model)
    expected_batch = asyncio.run(two_updates(alone, expected))
    columns = expected_batch.columns

    async def work(learner: RankedLearner, processes: list[RankProcess]) -> None:
        with pytest.raises(ModelError, match="no such folder"):  # on every rank, and they go on
            elsewhere = config.model.model_copy(update={"path": str(tmp_path / "none")})
            await learner.call("build", config.model_copy(update={"model": elsewhere}))
        step = Step()
        batch = await two_updates(learner, step)
        assert batch.columns.keys() == columns.keys() and "reference" in columns
        for name, values in columns.items():
            np.testing.assert_allclose(batch.columns[name], values, atol=1e-5)
        for one, other in zip(step.reports, expected.reports, strict=True):
            assert one.loss == pytest.approx(other.loss, abs=1e-6) and one.learning_rate == other.learning_rate
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
            assert one.statistics["reference_kl"] == pytest.approx(other.statistics["reference_kl"], abs=1e-5)
        mini = next(iter(batch.minibatches(2)))
        await learner.update(1, 1, mini, step)  # it is there
        assert len(step.reports) == 2 and learner.facts.updates == 2
        again = await learner.call("update", (1, 0.0), None, 1, mini, 0.05)  # its answer was lost
        assert learner.facts.updates == 2 and again.loss == step.reports[1].loss

        with pytest.raises(ValueError, match="update 3 of a step of which 2 were made"):
            await learner.update(1, 3, mini, step)
        learner.keep_faults(tmp_path / "ranks", str)
        await learner.update(1, 2, spoiled(mini), step)
        taken = await learner.snapshot()
        await in_thread(taken.write, tmp_path / "checkpoint", (1,))
        await learner.load(tmp_path / "checkpoint")
        assert await learner.call("published") == 1 and learner.version == 1

        taken = await learner.snapshot()
        with pytest.raises(FileExistsError, match=r"rank 0: .*checkpoint/model exists"):  # of all, and they go on
            await in_thread(taken.write, tmp_path / "checkpoint", (1,))

        await learner.call("slow_disk", 1.0)
        writing = asyncio.create_task(in_thread(taken.write, tmp_path / "more", ()))  # again, as the first time failed
        await learner.update(1, 3, mini, step)
        assert not writing.done() and step.reports[3].skipped is None
        await writing
        assert contents(tmp_path / "more") == contents(tmp_path / "checkpoint")  # without that update
        assert learner.expected_bytes == alone.expected_bytes
        assert 0 <= taken.bytes - learner.expected_bytes < 1000, "a number for each parameter: Adam's step"

        begun = asyncio.ensure_future(learner.call("wait", 60.0))  # rank 0 waits for rank 1, which sleeps
        await asyncio.sleep(0.5)
        processes[1].process.kill()
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 failed in wait: .*exit code -9"):
            await begun
        assert time.monotonic() - start < 20
        with pytest.raises(RankError, match="rank 1 of 2"):
            await learner.update(1, 4, mini, step)

    asyncio.run(with_ranks(work, config))
    alone.keep_faults(tmp_path / "alone")
    asyncio.run(alone.update(1, 2, spoiled(next(iter(expected_batch.minibatches(2)))), expected))
    norms, same = (norms_of(tmp_path / name) for name in ("ranks", "alone"))
    assert norms == {name: pytest.approx(both, rel=1e-4, abs=1e-6) for name, both in same.items()} and norms
    asyncio.run(alone.load(tmp_path / "checkpoint"))
    after = local(config, model)
    asyncio.run(two_updates(after, Step()))
    np.testing.assert_allclose(weights_of(alone.trainer), weights_of(after.trainer), atol=1e-5)


def test_a_diagnosis_that_fails_on_one_rank_ends_all(model):
    async def work(learner: RankedLearner, processes: list[RankProcess]) -> None:
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 2 failed in undiagnosed: no memory to diagnose"):
            await learner.call("undiagnosed", BATCH)
        assert time.monotonic() - start < 20

    asyncio.run(with_ranks(work, config_of(model), timeout_s=60))


# --- without processes --------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A rank whose answers are given: an error, a result, or seconds until then."""

    answer: Any = None
    seconds: float = 0.0
    ended: bool = False
    calls: int = 0

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        self.calls += 1
        await asyncio.sleep(self.seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, Facts(3, 4, 0, 1e-3)

    async def end(self) -> None:
        self.ended = True


def failing(*answers: Any, grace_s: float = 1.0) -> tuple[Any, list[Fake]]:
    ranks = [answer if isinstance(answer, Fake) else Fake(answer) for answer in answers]
    with pytest.raises(Exception) as caught:
        asyncio.run(RankedLearner(ranks, AdaptiveKL(0.0, None, 1), grace_s).call("update"))
    return caught.value, ranks


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ((PeerLostError("closed"), RankDied("exit code -9")), "rank 1 of 2 failed in update: exit code -9"),
        ((RuntimeError("CUDA error"), PeerLostError("closed")), "rank 0 of 2 failed in update: CUDA error"),
        ((PeerLostError("timed out"), Fake(None, 60)), "rank 1 of 2 failed in update: it did not answer"),
        ((Fake(None, 60), RuntimeError("out of memory")), "rank 1 of 2 failed in update: out of memory"),
        ((ConfigError("too long"), Fake(None)), "rank 0 of 2 failed in update: too long"),
    ],
)
def test_the_rank_that_failed_is_named_and_all_are_ended(answers, named):
    error, ranks = failing(*answers, grace_s=0.1)
    assert isinstance(error, RankError) and all(rank.ended for rank in ranks)
    assert re.match(named, str(error))


def test_what_every_rank_raises_ends_no_rank():
    error, ranks = failing(NumericalError("3 updates in a row"), NumericalError("3 updates"))
    assert isinstance(error, NumericalError) and str(error) == "3 updates in a row"
    assert not any(rank.ended for rank in ranks)


def test_ranks_that_cannot_meet_are_ended():
    ranks = [Fake(OSError("the port is taken")), Fake(None)]
    with pytest.raises(RankError, match="rank 0 of 2 failed in open: the port is taken"):
        asyncio.run(RankedLearner(ranks, AdaptiveKL(0.0, None, 1)).start("localhost", config_of("none")))
    assert all(rank.ended for rank in ranks) and ranks[1].calls == 0


def test_an_update_whose_caller_is_cancelled_is_made_and_reported():
    async def work() -> None:
        ranks, step = [Fake("report", 0.2), Fake(None, 0.3)], Step()
        learner = RankedLearner(ranks, AdaptiveKL(0.0, None, 1))
        task = asyncio.ensure_future(learner.update(0, 0, BATCH, step))
        await asyncio.sleep(0.05)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert step.reports == ["report"] and learner.version == 3
        await learner.update(0, 0, BATCH, step)
        assert [rank.calls for rank in ranks] == [1, 1]

    asyncio.run(work())
