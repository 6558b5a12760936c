"""Faults done to whole runs. A few of them at each change; all of them, with a table, by ``make test-faults``."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fault_cases import DRAWS, FAULTS, SEED, accounted_for, killed_at
from fault_harness import Ended, Fault, Kept, Running, Scene, Stage, differences, make_scene, try_fault
from fault_inside import POINTS, Strike
from fault_table import try_all
from rich.console import Console

from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples
from run_cases import run

CI = [fault for fault in FAULTS if fault.ci]
OTHERS = [fault for fault in FAULTS if not fault.ci]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A recipe of seconds, and what it comes to undisturbed."""
    return make_scene(tmp_path_factory.mktemp("faults"), fast=True)


@pytest.mark.parametrize(
    "fault", [*CI, *(pytest.param(fault, marks=pytest.mark.nightly) for fault in OTHERS)], ids=lambda fault: fault.name
)
def test_a_run_survives(fault: Fault, scene: Scene) -> None:
    verdict = try_fault(fault, scene)
    assert not verdict.lost, f"{verdict.lost}\n{verdict.ended.note}\n{verdict.ended.output}"


def test_there_are_enough_faults_and_each_declares_what_is_demanded() -> None:
    assert len(FAULTS) >= 25 and len(CI) == 9
    assert sum(fault.name.startswith("kill -9 at a random moment") for fault in FAULTS) == 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.exit and 0 < fault.seconds <= 60 for fault in FAULTS)
    unheard = [fault.name for fault in FAULTS if set(fault.exit) & {1, 2, 3} and not fault.says]
    assert unheard == []


def test_a_sample_that_was_kept_and_has_other_versions_now_is_found(tmp_path: Path) -> None:
    changes = {"rollout.max_staleness": 1, "runtime.deterministic": False, "run.save_every": 1, "training.steps": 2}
    run(tmp_path / "run", changes)
    line = read_samples(RunFolder(tmp_path / "run").samples / "step-00001.jsonl")[0]
    stage = cast(Stage, SimpleNamespace(run=tmp_path / "run", folder=tmp_path))
    for versions, found in ((line["versions"], None), ([0, 7], "had come, and is another one now")):
        kept = [[line["draw"], line["index"], line["response"], versions]]
        (tmp_path / "kept.json").write_text(json.dumps(kept))
        assert (told := accounted_for(stage)) == found or (found and told and found in told)


class PreparingStage(Stage):
    """Notes the strikes of a run in place of starting it."""

    class Prepared(Exception):
        """The run would be started now."""

    strikes: Sequence[Strike] = ()

    def start(self, *changes: str, strikes: Sequence[Strike] = (), **around: object) -> Running:
        self.strikes = strikes
        raise self.Prepared

    resume = start


def test_every_fault_of_the_table_can_be_laid_and_strikes(scene: Scene) -> None:
    """All strikes of the table in one run that they do no harm to: a renamed function, or one that is no longer called
    so often or so late, leaves a strike that never comes."""
    strikes: dict[str, Strike] = {}
    for fault in FAULTS:
        stage = PreparingStage(scene.stage("prepared").folder, scene)
        with stage.clean_up, pytest.raises(PreparingStage.Prepared):
            fault.do(stage)
        strikes |= {f"{number} {fault.name}": strike for number, strike in enumerate(stage.strikes)}
    assert {strike.point for strike in strikes.values()} == {*POINTS, "save"}
    signals = {strike.target for strike in strikes.values() if strike.what.startswith("signal")}
    assert all(isinstance(getattr(signal, name), signal.Signals) for name in signals)
    stage = scene.stage("harmless")
    targets = {name: stage.folder / f"struck-{number}" for number, name in enumerate(strikes)}
    harmless = [replace(strike, what="touch", target=str(targets[name])) for name, strike in strikes.items()]
    ended = stage.start(strikes=harmless).end()
    assert ended.code == 0, ended.output
    assert [name for name, target in targets.items() if not target.exists()] == []


# --- what does not survive must show ------------------------------------------------------------------------------

UNDISTURBED = Ended(0, 0.1, "all is well")


def leaves(change: Callable[[Path], object]) -> Callable[[Stage], Ended]:
    """An undisturbed run that something is taken from afterwards."""

    def do(stage: Stage) -> Ended:
        shutil.copytree(stage.scene.folder / "whole" / "run", stage.run)
        change(stage.run)
        return UNDISTURBED

    return do


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def forget_a_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


LOST = {
    "weights": leaves(lambda run: flip(run / "model-after" / "model.safetensors")),
    "samples": leaves(lambda run: flip(run / "samples" / "step-00002.jsonl")),
    "metrics": leaves(lambda run: forget_a_line(run / "metrics.jsonl")),
    "did not come to its end": leaves(lambda run: (run / "summary.json").unlink()),
}


@pytest.mark.parametrize("what", LOST)
def test_a_planted_loss_is_seen(what: str, scene: Scene) -> None:
    (lost,) = try_fault(Fault(f"planted {what}", LOST[what], (0,), Kept.DONE), scene).lost
    assert what in lost


@pytest.mark.parametrize(
    ("ended", "seen"),
    [
        (Ended(1, 1.0, "cause"), "exit code 1, declared 0"),
        (Ended(None, 1.0, "cause"), "did not end"),
        (Ended(0, 99.0, "cause"), "took 99.0 s, declared 60 s"),
        (Ended(0, 1.0, "nothing"), "does not say 'cause'"),
        (Ended(0, 1.0, "cause\nTraceback (most recent call last):"), "prints a traceback"),
        (Ended(0, 1.0, "cause", ("17: sleep",)), "left a process behind: 17: sleep"),
    ],
)
def test_an_end_that_was_not_declared_is_seen(ended: Ended, seen: str, scene: Scene) -> None:
    (lost,) = try_fault(Fault("planted end", lambda stage: ended, (0,), Kept.NOTHING_BEGUN, ("cause",)), scene).lost
    assert lost.startswith(seen)


def test_a_run_that_was_begun_where_nothing_should_be_is_seen(scene: Scene) -> None:
    planted = Fault("planted beginning", leaves(lambda run: None), (0,), Kept.NOTHING_BEGUN)
    assert "was begun" in try_fault(planted, scene).lost[0]


def test_the_table_says_who_was_lost_and_counts(scene: Scene) -> None:
    good = Fault("undisturbed", leaves(lambda run: None), (0,), Kept.DONE)
    bad = Fault("planted", LOST["weights"], (0,), Kept.DONE)
    text = io.StringIO()
    assert not try_all([good, bad], scene, Console(file=text, width=180))
    lines = text.getvalue().splitlines()
    assert lines[-1] == "1 of 2 survived"
    assert any("undisturbed" in line and "survived" in line for line in lines)
    assert any("planted" in line and "LOST" in line for line in lines)
    assert try_all([good], scene, Console(file=text, width=180))
    assert text.getvalue().splitlines()[-1] == "1 of 1 survived"


class LateStage:
    """Runs that end with these codes, whatever is sent to them."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.run, self._codes, self.sent = folder / "run", codes, 0

    def start(self) -> LateStage:
        self.run.mkdir()
        return self

    def lines(self) -> int:
        return 9

    def until(self, there: Callable[[], bool]) -> None:
        assert there()

    def poll(self) -> int | None:
        return self._codes[0] or None

    def send(self, number: int) -> None:
        self.sent += 1

    def end(self, since: float) -> Ended:
        return Ended(self._codes.pop(0), 0.0, "")


def test_a_kill_that_comes_after_the_end_is_not_tried_and_another_moment_is_drawn(tmp_path: Path) -> None:
    ended = killed_at(3)(LateStage(tmp_path, [0, 0, -9]))  # type: ignore[arg-type]
    assert ended.code == -9 and f"seed {SEED}: " in ended.note and "2 not tried" in ended.note


def test_a_kill_that_never_comes_in_time_is_lost(tmp_path: Path) -> None:
    ended = killed_at(3)(LateStage(tmp_path, [0] * DRAWS))  # type: ignore[arg-type]
    fault = next(fault for fault in FAULTS if fault.name == "kill -9 at a random moment (3)")
    assert list(differences(fault, ended)) == ["exit code 0, declared -9"]


@pytest.mark.nightly
def test_a_process_that_is_left_behind_is_seen(scene: Scene) -> None:
    """A reward function that starts one out of its worker's reach: the worker does not adopt it."""

    def do(stage: Stage) -> Ended:
        code = "import ctypes, subprocess\n\ndef reward(prompt, response, answer):\n"
        code += "    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)\n"
        code += (
            "    subprocess.run('sleep 60 &', shell=True, start_new_session=True)\n    return len(response) % 2 == 0\n"
        )
        return stage.start(f"reward.function={stage.file('reward.py', code)}:reward", "training.steps=1").end()

    lost = try_fault(Fault("planted process", do, (0,), Kept.FINISHED), scene).lost
    assert any(one.startswith("left a process behind") and "sleep 60" in one for one in lost)
