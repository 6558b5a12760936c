"""Checkpoints: written beside the run, whole or not at all, checked when a run goes on, and kept as asked for.

The number of an entry is that of the public failure cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from dapo.algorithm.kl import AdaptiveKL
from dapo.commands.inspect.run_report import facts
from dapo.commands.train import _where_it_goes_on
from dapo.config import EvaluationConfig
from dapo.errors import LostError, UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.observe import checkpoints as module
from dapo.observe.checkpoints import MANIFEST, CheckpointId, Checkpoints, CheckpointWriter, Snapshot, damages
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.orchestrator import checkpointer as keeping
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.checkpointer import Checkpointer
from dapo.orchestrator.encoded_state import EncodedState, read_state
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.orchestrator.model_writer import ModelWriter
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.run_state import RunState
from dapo.orchestrator.step_state import StepState
from dapo.training import checkpoint
from dapo.training.checkpoint import load_tensors, save_tensors
from dapo.training.learner import LocalLearner
from dapo.training.snapshot import expected_bytes, snapshot, snapshot_bytes
from dapo.training.trainer import Trainer
from dapo.util.files import write_json
from dapo.util.shutdown import Shutdown
from run_cases import PROMPTS, TOKENIZER, Recorder, config_for, run, steps_of, text_sum, tiny_model, weights_hash

EACH = {"run.save_every": 1, "training.steps": 3}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.01)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("done") / "run"
    run(folder, EACH | {"run.keep_last": None})
    return folder


@pytest.fixture
def three(done: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(done, tmp_path / "run"))


def go_on(folder: Path, changes: dict[str, Any] | None = None) -> tuple[dict[str, Any], Recorder]:
    listener = Recorder()
    inputs = RunOverrides(
        model=tiny_model(), tokenizer=TOKENIZER, rows=PROMPTS, reward=text_sum, resume=RunFolder(folder)
    )
    return run_experiment(config_for(folder, EACH | (changes or {})), listener, inputs), listener


def goes_on_from(folder: Path) -> str:
    return _where_it_goes_on(folder, config_for(folder, EACH))["goes on from"]


def names(folder: Path) -> list[str]:
    return [place.name for place in Checkpoints(RunFolder(folder).checkpoints).places()]


# --- damage -------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated weights": ("model/model.safetensors", truncate, "bytes, not"),
    "a bit of the weights": ("model/model.safetensors", flip_a_bit, "SHA-256 differs"),
    "a bit of the optimizer": ("optimizer/trainer.safetensors", flip_a_bit, "SHA-256 differs"),
    "no optimizer": ("optimizer/trainer.safetensors", Path.unlink, "is missing"),
    "a bit of the state": ("state.json", flip_a_bit, "SHA-256 differs"),
    "no state": ("state.safetensors", Path.unlink, "is missing"),
    "no manifest": (MANIFEST, Path.unlink, "manifest.json is missing"),
    "half a manifest": (MANIFEST, truncate, "manifest.json cannot be read"),
    "a manifest of nothing": (MANIFEST, lambda path: write_json(path, {"files": {}}), "names no files"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_found_and_named(three: Path, kind: str) -> None:
    name, damage, said = DAMAGES[kind]
    folder = RunFolder(three).checkpoints / "step-00003"
    assert damages(folder) == []
    damage(folder / name)
    found = damages(folder)
    assert found is not None and len(found) == 1 and name in found[0] and said in found[0]


def test_a_run_goes_on_from_the_newest_intact_one_and_comes_to_the_same(three: Path, done: Path) -> None:
    checkpoints = RunFolder(three).checkpoints
    flip_a_bit(checkpoints / "step-00003" / "model" / "model.safetensors")
    (checkpoints / "step-00002" / "state.json").unlink()
    summary, listener = go_on(three)
    assert summary["steps"] == 3 and [entry["step"] for entry in steps_of(three)] == [1, 2, 3]
    said = [w for w in listener.warnings if "is damaged" in w]
    assert len(said) == 2 and "going on from step-00001" in said[0] and "damaged-step-00003" in said[0]
    assert weights_hash(RunFolder(three).model_after) == weights_hash(RunFolder(done).model_after)
    assert damages(checkpoints / "step-00003") == []  # written anew, not taken for the damaged one
    assert (checkpoints / "damaged-step-00003").is_dir()


def test_a_dry_run_of_a_resume_says_where_it_would_go_on_and_changes_nothing(three: Path) -> None:
    checkpoints = RunFolder(three).checkpoints
    assert goes_on_from(three) == str(checkpoints / "step-00003")
    flip_a_bit(checkpoints / "step-00003" / "model" / "model.safetensors")
    (checkpoints / "step-00002" / "state.json").unlink()
    told = goes_on_from(three)
    assert told.startswith(f"{checkpoints / 'step-00001'}; step-00003 is damaged: model/model.safetensors is not what")
    assert "; step-00002 is damaged: state.json is missing" in told
    assert len(names(three)) == 3
    truncate(checkpoints / "step-00001" / "state.json")
    assert goes_on_from(three).startswith("none of its checkpoints; ")
    shutil.rmtree(checkpoints)
    assert goes_on_from(three) == "no checkpoint yet: from the start"


def test_an_overview_finds_what_is_cut_and_shows_what_was_put_aside(three: Path) -> None:
    checkpoints = RunFolder(three).checkpoints
    assert RunView.read(three).damage is None
    truncate(checkpoints / "step-00003" / "state.json")
    (checkpoints / "step-00001").rename(checkpoints / "damaged-step-00001")
    shown = dict(facts(RunView.read(three)))["checkpoints"]
    assert shown.startswith("step-00002, step-00003 (damaged: state.json has ")
    assert "), damaged-step-00001, " in shown


def test_if_all_are_damaged_nothing_is_loaded_and_nothing_started(three: Path) -> None:
    for folder in RunFolder(three).checkpoints.glob("step-*"):
        truncate(folder / "state.json")
    with pytest.raises(UserError, match=r"step-00003 is damaged: state.json has (.|\n)*no other checkpoint"):
        go_on(three)
    assert len(names(three)) == 3


def test_a_best_step_whose_checkpoint_is_damaged_is_not_the_best_any_longer(tmp_path: Path) -> None:
    changes = EACH | {"evaluation.every": 1, "run.keep_last": None}
    run(tmp_path, changes, heldout=PROMPTS[:4])
    checkpoints = Checkpoints(RunFolder(tmp_path).checkpoints)
    checkpoints.set_best({"step": 3, "metric": "eval/accuracy", "value": 2.0, "path": "checkpoints/step-00003"})
    truncate(RunFolder(tmp_path).checkpoints / "step-00003" / "state.json")
    inputs = RunOverrides(
        model=tiny_model(),
        tokenizer=TOKENIZER,
        rows=PROMPTS,
        reward=text_sum,
        heldout=PROMPTS[:4],
        resume=RunFolder(tmp_path),
    )
    run_experiment(config_for(tmp_path, changes), Recorder(), inputs)
    best = checkpoints.best
    assert best is not None and best["value"] <= 1.0 and (tmp_path / best["path"]).is_dir()


# --- which are kept -----------------------------------------------------------------------------------------------


def test_keep_two_and_resume_three_times_leaves_two(tmp_path: Path) -> None:
    """Entry 83."""
    changes: dict[str, Any] = {"run.keep_last": 2}
    run(tmp_path, EACH | changes)
    for steps in (4, 5, 6):
        go_on(tmp_path, changes | {"training.steps": steps})
        assert names(tmp_path) == [f"step-{steps - 1:05d}", f"step-{steps:05d}"]
    go_on(tmp_path, changes | {"training.steps": 6, "run.keep_last": 1})  # nothing to do, but fewer to keep
    assert names(tmp_path) == ["step-00006"]


def test_those_after_a_multiple_of_keep_every_are_written_and_stay(tmp_path: Path) -> None:
    changes = {"run.keep_last": 1, "run.keep_every": 2, "run.save_every": 0, "training.steps": 5}
    run(tmp_path, changes)
    assert names(tmp_path) == ["step-00002", "step-00004", "step-00005"]
    go_on(tmp_path, changes | {"training.steps": 7})
    assert names(tmp_path) == ["step-00002", "step-00004", "step-00006", "step-00007"]


# --- writing ------------------------------------------------------------------------------------------------------


def a_snapshot(step: int, size: int = 100, write: Callable[[Path], None] | None = None) -> Snapshot:
    def fill(folder: Path) -> None:
        (folder / "data").write_bytes(b"x" * size)

    return Snapshot(CheckpointId(step), write or fill, size)


def test_the_loop_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, slow = Trainer.save_state, []

    def save_state(self: Trainer, folder: Path) -> None:
        deadline = time.monotonic() + 20
        while not slow and len(steps_of(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        slow.append(len(steps_of(tmp_path)))
        plain(self, folder)

    monkeypatch.setattr(Trainer, "save_state", save_state)
    run(tmp_path, {"run.save_every": 2, "training.steps": 4, "run.keep_last": None})
    assert slow[0] > 2  # steps had been made by the time that the one after step 2 was on the disk
    assert names(tmp_path) == ["step-00002", "step-00004"]
    state = json.loads((RunFolder(tmp_path).checkpoints / "step-00002" / "optimizer" / "trainer.json").read_text())
    assert state["version"] == 2  # of when it was taken


def test_a_snapshot_is_not_changed_by_what_the_trainer_does_next(tmp_path: Path) -> None:
    trainer = Trainer(tiny_model(), config_for(tmp_path).training, 1.0)
    loss = sum(p.sum() for p in trainer.policy.model.parameters())
    torch.autograd.backward(loss)
    trainer._optimizer.step()
    trainer.save(tmp_path / "then")
    trainer.save_state(tmp_path / "then-state")
    frozen = snapshot(trainer)
    torch.autograd.backward(sum(p.square().sum() for p in trainer.policy.model.parameters()))
    trainer._optimizer.step()
    trainer.publish()
    frozen.save(tmp_path / "frozen")
    frozen.save_state(tmp_path / "frozen-state")
    assert weights_hash(tmp_path / "frozen") == weights_hash(tmp_path / "then")
    for name in ("trainer.json", "trainer.safetensors"):
        assert (tmp_path / "frozen-state" / name).read_bytes() == (tmp_path / "then-state" / name).read_bytes()
    files = [tmp_path / "frozen" / "model.safetensors", tmp_path / "frozen-state" / "trainer.safetensors"]
    assert 0 <= sum(f.stat().st_size for f in files) - snapshot_bytes(frozen) < 20_000


def test_one_that_fails_once_is_told_of_and_written(tmp_path: Path) -> None:
    said: list[str] = []
    attempts: list[int] = []

    def write(folder: Path) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError(5, "Input/output error")
        (folder / "data").touch()

    async def main() -> Path | None:
        writer = CheckpointWriter(Checkpoints(tmp_path), said.append)
        writer.begin(a_snapshot(1, write=write))
        with pytest.raises(RuntimeError, match="already"):
            writer.begin(a_snapshot(2))
        return await writer.settle()

    assert asyncio.run(main()) == tmp_path / "step-00001"
    assert len(said) == 1 and "Input/output error" in said[0] and "tried again" in said[0]


def test_one_of_a_learner_that_is_gone_is_not_tried_again(tmp_path: Path) -> None:
    said: list[str] = []

    def write(folder: Path) -> None:
        raise LostError("rank 1 of 2 failed")

    async def main() -> None:
        writer = CheckpointWriter(Checkpoints(tmp_path), said.append)
        writer.begin(a_snapshot(1, write=write))
        await writer.settle()

    with pytest.raises(LostError, match="rank 1"):
        asyncio.run(main())
    assert said == []


def test_one_that_fails_twice_ends_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Trainer, folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Trainer, "save_state", broken)
    told = Recorder()
    with pytest.raises(UserError, match=r"cannot be written: Input/output(.|\n)*could not be saved") as caught:
        run(tmp_path / "run", {"run.save_every": 1, "training.steps": 200}, told)
    assert "\n".join([str(caught.value), *told.warnings]).count("Input/output") == 1
    assert len(steps_of(tmp_path / "run")) < 100


def test_room_is_looked_for_first_and_both_numbers_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(a_snapshot(1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 3 * 2**20))
    written: list[Path] = []
    with pytest.raises(UserError, match=r"it takes 5\.0 MiB, and 3\.0 MiB are free"):
        checkpoints.save(a_snapshot(2, 5 * 2**20, written.append))
    assert not written and [p.name for p in tmp_path.iterdir()] == ["step-00001"]


def test_room_is_looked_for_for_small_files_too_as_many_as_the_one_before_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one says 1,000 bytes and writes 3,000: another 1,000 take 3,000 too, which is what there has to be."""
    free = [10**9]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free[0]))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(a_snapshot(1, 1000, lambda folder: (folder / "data").write_bytes(b"x" * 3000) and None))
    free[0] = 2999
    with pytest.raises(UserError, match="No space left on device"):
        checkpoints.save(a_snapshot(2, 1000))
    free[0] = 3000
    checkpoints.save(a_snapshot(2, 1000))
    assert checkpoints.places() == [CheckpointId(1), CheckpointId(2)]


def test_one_from_inside_of_a_step_stays_until_there_is_a_later_one(tmp_path: Path) -> None:
    """Neither the number to keep nor the multiples of steps count those."""
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_every=2)
    seen = []
    for place in (
        CheckpointId(1),
        CheckpointId(2),
        CheckpointId(2, updates=3),
        CheckpointId(2, updates=4),
        CheckpointId(3),
        CheckpointId(4, sampling=True),
    ):
        checkpoints.save(Snapshot(place, lambda folder: (folder / "data").touch(), 0))
        seen.append([one.name for one in checkpoints.places()])
    assert seen == [
        ["step-00001"],
        ["step-00002"],
        ["step-00002", "step-00002-update-00003"],
        ["step-00002", "step-00002-update-00004"],
        ["step-00002", "step-00003"],
        ["step-00002", "step-00003", "step-00004-rollout"],
    ]


def test_the_slowest_write_is_remembered_and_one_of_nothing_is_none(tmp_path: Path) -> None:
    async def main() -> None:
        writer = CheckpointWriter(Checkpoints(tmp_path), print)
        writer.begin(a_snapshot(1, write=lambda folder: time.sleep(0.3)))
        await writer.settle()
        slowest = writer.longest_s
        assert slowest >= 0.3
        writer.begin(a_snapshot(2))
        await writer.settle()
        assert writer.longest_s >= slowest
        writer.longest_s = 0.0
        writer.begin(a_snapshot(3, 0))
        await writer.settle()
        assert writer.longest_s == 0.0

    asyncio.run(main())


def test_a_quick_look_at_a_checkpoint_compares_sizes_only(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path).save(
        a_snapshot(1, write=lambda folder: (folder / "data").write_bytes(b"abc") and None)
    )
    (folder / "data").write_bytes(b"xyz")
    assert damages(folder, quick=True) == [] and damages(folder) == [
        "data is not what was written: its SHA-256 differs"
    ]


def test_a_writer_that_hangs_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "WAIT_S", 0.1)

    def hang(folder: Path) -> None:
        release.wait(5)

    async def main() -> None:
        writer = CheckpointWriter(Checkpoints(tmp_path), print)
        writer.begin(a_snapshot(1, write=hang))
        with pytest.raises(UserError, match="step-00001: the checkpoint of 100 bytes is still not written"):
            await writer.settle()

    asyncio.run(main())
    release.set()


def test_the_run_folder_stays_locked_as_long_as_a_writer_hangs_that_is_not_waited_for(tmp_path: Path) -> None:
    release, said, lock = threading.Event(), list[str](), contextlib.ExitStack()
    folder = RunFolder(tmp_path)
    lock.enter_context(folder.lock())

    async def main() -> None:
        writer = CheckpointWriter(Checkpoints(tmp_path), said.append)
        writer.begin(a_snapshot(1, write=lambda folder: release.wait(5) and None))
        await writer.close(0.05, then=lock.close)

    asyncio.run(main())
    assert said == [
        "step-00001: was waited for another 0.05 s and is still not written; the run folder stays locked until it is, "
        "or until this process ends"
    ]
    with pytest.raises(UserError, match="another process is writing"), folder.lock():
        pass
    release.set()
    with folder.lock():  # which is waited for for a second
        assert Checkpoints(tmp_path).places() == [CheckpointId(1)]


def test_a_writer_that_is_done_or_was_never_begun_frees_the_folder_at_once(tmp_path: Path) -> None:
    said, freed = list[str](), list[int]()

    async def main() -> None:
        writer = CheckpointWriter(Checkpoints(tmp_path), said.append)
        await writer.close(5, then=lambda: freed.append(1))
        writer.begin(a_snapshot(1))
        await writer.close(5, then=lambda: freed.append(2))

    asyncio.run(main())
    assert freed == [1, 2] and not said and Checkpoints(tmp_path).places() == [CheckpointId(1)]


def test_metrics_are_on_the_disk_before_a_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    plain = os.fsync

    def fsync(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink())
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    run(tmp_path / "run", {"training.steps": 1})
    manifests = [i for i, file in enumerate(flushed) if file.name.startswith(f".{MANIFEST}")]
    marker = next(i for i in manifests if "checkpoints" in flushed[i].parts)  # the index of samples has one, too
    assert "metrics.jsonl" in [file.name for file in flushed[:marker]]


def test_before_a_checkpoint_was_timed_its_size_says_what_to_set_aside(tmp_path: Path) -> None:
    trainer = Trainer(tiny_model(), config_for(tmp_path).training, 1.0)
    count = sum(p.numel() for p in trainer.policy.model.parameters())
    assert expected_bytes(trainer) == 12 * count  # before the first update too
    folder, best = RunFolder(tmp_path), EarlyStopping(EvaluationConfig())
    config = config_for(tmp_path, {"run.stop_within_s": 100})
    learner = LocalLearner(trainer, config, AdaptiveKL(0.0, None, 1))
    models = ModelWriter(folder, learner, TOKENIZER, print)
    checkpointer = Checkpointer(folder, config.run, RunState(Budget(config.training)), best, {}, models, Shutdown())
    assert checkpointer.seconds_to_save == pytest.approx(3 * 12 * count / 100e6 + 2)
    checkpointer._writer.longest_s = 7.0
    assert checkpointer.seconds_to_save == 23
    checkpointer._writer.longest_s = 70.0
    assert checkpointer.seconds_to_save == 50  # half of the time


def test_arrays_of_one_type_and_numbers_that_are_none_come_back_from_their_places(tmp_path: Path) -> None:
    state = {
        "one": np.arange(6).reshape(2, 3),
        "other": np.arange(10, 14).reshape(4, 1),
        "last": np.array([7]),
        "numbers": [math.inf, -math.inf, math.nan, 0.1],
    }
    EncodedState(state).write(tmp_path)
    found = read_state(tmp_path)
    assert all(np.array_equal(found[name], state[name]) for name in ("one", "other", "last"))
    assert found["numbers"][:2] == [math.inf, -math.inf] and math.isnan(found["numbers"][2])
    assert found["numbers"][3] == 0.1


def test_where_a_run_stands_comes_back_number_by_number(tmp_path: Path) -> None:
    config = config_for(tmp_path).training
    state = {
        "steps_done": 3,
        "budget": {"seconds": 9.0, "last": 4.0, "samples": 7, "last_samples": 3, "tokens": 90, "last_tokens": 40},
        "step": None,
        "laps": {"rollout": 1.5, "sync": 0.25},
        "spans": [("rollout", 100.0, 101.5), ("sync", 101.5, 101.75)],
        "scores": {"before": {"accuracy": 0.5, "response_length": 7.0}},
        "seconds": {"rollout": 7.0, "update": 2.0},
    }
    where = RunState(Budget(config))
    where.load_state(state)
    found = where.state()
    assert all(found[name].pop("rest") == 0 for name in ("laps", "seconds"))  # nothing counts in this process
    assert found == state and where.steps_done == 3


def test_a_rollout_that_an_earlier_version_kept_with_its_seconds_goes_on(tmp_path: Path) -> None:
    rollout = RolloutBatch(0, 0, (), (), cast("Any", None))
    step = {"fill": rollout, "seconds": {"rollout": 1.5}, "batch": None, "reports": [], "decode_steps": 3}
    where = RunState(Budget(config_for(tmp_path).training))
    where.load_state({"steps_done": 0, "step": step, "laps": {}, "scores": {}, "seconds": {"start": 1.0, "rl": 2.0}})
    assert (
        where.step == StepState(rollout)
        and where.spans.seconds["rollout"] == 1.5
        and where.seconds.seconds == {"start": 1.0, "rest": 2.0}
    )


def test_who_fails_to_keep_a_run_does_not_lock_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no thread")

    monkeypatch.setattr(keeping, "CheckpointWriter", fail)
    folder, config = RunFolder(tmp_path), config_for(tmp_path)
    state, best = RunState(Budget(config.training)), EarlyStopping(EvaluationConfig())
    models = ModelWriter(folder, cast("Any", None), TOKENIZER, print)
    with pytest.raises(OSError, match="no thread") as caught:
        Checkpointer(folder, config.run, state, best, {}, models, Shutdown())
    with folder.lock():
        assert caught.tb  # keeps what failed alive, and the lock with it, if it had taken one


def test_a_best_that_cannot_be_recorded_is_said_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "best.json").mkdir()
    with pytest.raises(UserError, match=r"best\.json: cannot be written"):
        Checkpoints(tmp_path).set_best({"step": 3})


def test_moments_that_are_no_numbers_are_named_and_not_the_weights(tmp_path: Path) -> None:
    save_tensors(tmp_path / "optimizer", {"lm_head.weight/exp_avg_sq": torch.tensor([1.0, float("nan")])}, {})
    with pytest.raises(UserError, match=r"the optimizer's exp_avg_sq of lm_head\.weight"):
        load_tensors(tmp_path / "optimizer")


def test_an_optimizer_that_is_too_large_for_one_file_goes_into_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.full((size,), float(size)) for name, size in (("a", 3), ("b", 4), ("c", 20), ("d", 1))}
    save_tensors(tmp_path / "one", tensors, {"version": 3})
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 32)
    save_tensors(tmp_path / "many", tensors, {"version": 3})
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"trainer.safetensors", "trainer.json"}
    shards = [f"trainer-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    index = json.loads((tmp_path / "many" / "trainer.safetensors.index.json").read_text())
    assert index["weight_map"] == {"c": shards[0], "a": shards[1], "b": shards[1], "d": shards[1]}
    assert index["metadata"] == {"total_size": 112}
    for folder in ("one", "many"):
        found, metadata = load_tensors(tmp_path / folder)
        assert metadata == {"version": 3} and found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    (tmp_path / "many" / shards[1]).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_tensors(tmp_path / "many")


def test_a_run_goes_on_from_an_optimizer_in_several_files_as_from_one(
    tmp_path: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    run(tmp_path / "run", EACH | {"training.steps": 2})
    assert len(list((RunFolder(tmp_path / "run").checkpoints / "step-00002" / "optimizer").glob("*-of-*"))) > 2
    go_on(tmp_path / "run")
    assert weights_hash(RunFolder(tmp_path / "run").model_after) == weights_hash(RunFolder(done).model_after)


def test_a_cancelled_wait_leaves_the_write_alone(tmp_path: Path) -> None:
    async def main() -> Path | None:
        writer = CheckpointWriter(Checkpoints(tmp_path), print)
        writer.begin(a_snapshot(1, write=lambda folder: time.sleep(0.2)))
        waiting = asyncio.create_task(writer.settle())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await writer.settle()

    assert asyncio.run(main()) == tmp_path / "step-00001"


def test_what_is_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    """Entry 81: killed inside of a save, there is a staging folder, which no name of a checkpoint fits."""
    seen: list[list[CheckpointId]] = []
    checkpoints = Checkpoints(tmp_path)

    def write(folder: Path) -> None:
        (folder / "data").touch()
        seen.append(checkpoints.places())

    checkpoints.save(a_snapshot(1, write=write))
    assert seen == [[]] and checkpoints.places() == [CheckpointId(1)]
    assert set(json.loads((tmp_path / "step-00001" / MANIFEST).read_text())["files"]) == {"data"}
