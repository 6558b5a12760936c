"""Whole runs whose learner is over ranks: what they leave is what a run in one process leaves."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.training.parallel.front import RankedLearner, RankError
from rank_processes import RankProcess
from ranked_runs import over, pool_of
from run_cases import PROMPTS, TOKENIZER, Recorder, config_for, steps_of, text_sum, tiny_model

THREE_STEPS = {
    "training.steps": 3,
    "run.save_every": 1,
    "run.keep_last": 9,
    "training.adam_epsilon": 1e-4,
    "algorithm.kl.mode": "loss",
}
HOW: dict[str, dict[str, Any]] = {"sharded": {}, "replicated": {"model.lora.rank": 4}}


class Runs:
    """Runs of one recipe in a folder, over any number of ranks."""

    def __init__(self, root: Path, base: Path, how: str) -> None:
        self.root, self.how = root, how
        self._changes = THREE_STEPS | {"model.path": str(base)} | HOW[how]

    def __call__(self, name: str, processes: list[RankProcess], going_on: bool = False, listener: Any = None) -> Path:
        """Over so many ranks; none: in this process."""
        folder = self.root / name
        given: dict[str, Any] = {"rows": PROMPTS, "reward": text_sum, "heldout": PROMPTS[:2]}
        given |= {"resume": RunFolder(folder)} if going_on else {}
        with pytest.MonkeyPatch.context() as patch:
            if processes:
                placed = over(processes, self.how == "sharded", self.root)
                patch.setattr("dapo.orchestrator.roles.place", placed)
            run_experiment(config_for(folder, self._changes), listener or Recorder(), RunOverrides(**given))
        return folder


class Pool:
    """Processes for runs, which are made again if one was killed."""

    def __init__(self) -> None:
        self._processes: list[RankProcess] = []

    def __getitem__(self, some: slice) -> list[RankProcess]:
        if not all(process.process.is_alive() for process in self._processes) or not self._processes:
            self.stop()
            self._processes = pool_of(3)
        return self._processes[some]

    def stop(self) -> None:
        for process in self._processes:
            process.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.stop()


@pytest.fixture(scope="module", params=HOW)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Runs:
    """With one on two ranks that was done without a stop, ``whole``."""
    root = tmp_path_factory.mktemp(request.param)
    tiny_model().save_pretrained(root / "base")
    TOKENIZER.save_pretrained(root / "base")
    found = Runs(root, root / "base", request.param)
    found("whole", pool[:2])
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys() and found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps_of(folder)]


def left_by(folder: Path) -> tuple[Any, ...]:
    """What does not hang on float noise: fingerprint, summary, settings of the model, files but those of weights."""
    of_run = RunFolder(folder)
    begun, ended = (json.loads(file.read_text()) for file in (of_run.fingerprint, of_run.summary))
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if ".safetensors" not in path.name]
    return (
        {name: begun[name] for name in ("device", "model", "tokenizer", "prompt")},
        {name: ended[name] for name in ("steps", "updates", "stopped")},
        {file.name: file.read_text() for file in of_run.model_after.glob("*.json") if ".index." not in file.name},
        sorted(name for name in names if not name.startswith("samples")),
    )


def test_a_run_over_two_ranks_leaves_what_one_in_this_process_does(runs: Runs) -> None:
    two, alone = runs.root / "whole", runs("alone", [])
    assert left_by(two) == left_by(alone)
    for one, other in zip(steps_of(two), steps_of(alone), strict=True):
        assert one.keys() == other.keys() and one["version"] == other["version"]
        for name in ("reward/mean", "loss", "grad_norm", "lr", "updates/total", "kl/reference"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    for place in ("model-before", "model-after", *(f"checkpoints/step-{step:05d}/model" for step in (1, 2, 3))):
        assert_same_weights(two / place, alone / place)


def test_a_run_goes_on_inside_of_a_step_on_any_number_of_ranks(runs: Runs, pool: Pool) -> None:
    update = RankedLearner.update

    async def stops(self: RankedLearner, step: int, index: int, *args: Any, **keywords: Any) -> None:
        if (step, index) == (1, 1):
            raise KeyboardInterrupt
        await update(self, step, index, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RankedLearner, "update", stops)
        runs("stopped", pool[:2])
    assert (runs.root / "stopped/checkpoints/step-00001-update-00001").is_dir()
    for ranks in (1, 2, 3) if runs.how == "sharded" else (3,):
        shutil.copytree(runs.root / "stopped", runs.root / str(ranks))
        found = runs(str(ranks), pool[:ranks], going_on=True)
        assert_same_weights(found / "model-after", runs.root / "whole/model-after")
        assert losses(found) == pytest.approx(losses(runs.root / "whole"), abs=1e-4)


def test_a_rank_that_is_killed_ends_the_run_which_goes_on_from_its_last_checkpoint(tmp_path: Path, pool: Pool) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    runs, processes, killed = Runs(tmp_path, tmp_path / "base", "sharded"), pool[:2], []

    def kill(step: int) -> None:
        if step == 3:  # the checkpoint of step 1 is written by now
            killed.append(time.monotonic())
            processes[1].process.kill()

    with pytest.raises(RankError, match=r"^rank 1 of 2 failed in .*exit code -9") as caught:
        runs("run", processes, listener=Recorder(kill))
    assert time.monotonic() - killed[0] < 20
    said = str(caught.value)
    assert re.search(r"could not be saved; the last checkpoint is .*/step-0000[12]; to go on: dapo\.train", said)
    assert said.count("exit code") == 1
    assert [step["step"] for step in steps_of(runs("run", [], going_on=True))] == [1, 2, 3]
