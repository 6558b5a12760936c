"""Cells as they run: each in its process, resumed where it was killed, and one that fails costs itself alone."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import dapo
from compared import write_recipes
from dapo.comparison import cells
from dapo.errors import ConfigError, UserError
from dapo.observe.checkpoints import Checkpoints
from dapo.observe.metrics import read_metrics
from dapo.observe.progress import PlainListener
from dapo.observe.run_view import RunView
from run_cases import Recorder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_recipes(tmp_path, model=True)
    return tmp_path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process costs some seconds of imports."""

    def attempt(job: Any, lock: Any) -> str | None:
        try:
            cells.run(pickle.loads(pickle.dumps(job)), PlainListener())
        except UserError as error:
            return str(error)
        return None

    monkeypatch.setattr(cells, "_attempt", attempt)


@pytest.mark.usefixtures("in_this_process")
def test_runs_stages_and_phases_have_one_budget_and_are_measured_alike(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = {"a": "a.yaml", "dpo": ("dpo.yaml", {"training.epochs": 9}), "phases": "phases.yaml"}
    table = dapo.compare(recipes, samples=48, seeds=[3], out="out", listener=Recorder())
    assert table.failures() == [] and [len(cells) for cells in table.done.values()] == [1, 1, 1]
    assert "step 3  samples 48/48  " in (said := capsys.readouterr().out) and "000000" not in said
    a, dpo, phases = table.cells()
    # 16 samples a step; 4 rows an update; two of these are the first phase, and leave 40 samples: two steps
    assert [cell["samples"] for cell in (a, dpo, phases)] == [48, 48, 8 + 32]
    assert [cell["steps"] for cell in (a, dpo, phases)] == [3, 12, 2 + 2]
    entries = list(read_metrics(here / "out/a-seed-3/metrics.jsonl"))
    assert a["tokens"] == a["tokens sampled"] == sum(e["tokens/generated"] for e in entries if e["step"])
    assert a["minutes"] == pytest.approx(sum(e["time/step"] for e in entries if e["step"]) / 60)
    assert dpo["tokens"] == dpo["tokens trained"] and dpo["tokens sampled"] == 0
    assert RunView.read(here / "out/a-seed-3").config["seed"] == 3
    rows = json.loads((here / "out/a-seed-3.json").read_text())["rows"]
    assert list(rows) == [f"held:{row}" for row in range(8)]
    assert table.every["a"][0].value == pytest.approx(entries[-1]["eval/accuracy"])  # the same rows, by the same model
    answers = [json.loads(line) for line in (here / "out/dpo-seed-3.answers.jsonl").read_text().splitlines()]
    assert [one["row"] for one in answers] == list(range(8)) and answers[0]["prompt"] == "0+0="
    assert table.ends["samples"] == 40 and table.every["phases"][0].curve[0][0]["samples"] == 8
    assert not (here / "out/a-seed-3/checkpoints").exists() and (here / "out/a-seed-3/model-after").is_dir()


@pytest.mark.usefixtures("in_this_process")
def test_no_checkpoint_is_written_that_is_dropped_at_once_and_none_is_needed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that ends in its last evaluation trains no second time."""
    measure = cells.evaluate_files

    def unmeasured(*args: Any) -> Any:
        raise UserError("the disk was full")

    given: dict[str, Any] = {"samples": 48, "seeds": [3], "out": "out", "listener": Recorder()}
    recipes = ["a.yaml", "phases.yaml"]
    monkeypatch.setattr(cells, "evaluate_files", unmeasured)
    assert len(dapo.compare(recipes, **given).failures()) == 2
    last = {"a-seed-3": 3, "phases-seed-3/sft": 2, "phases-seed-3/rl": 2}
    runs = {name: RunView.read(here / "out" / name) for name in last}
    assert {name: (run.state, run.steps_done) for name, run in runs.items()} == {n: ("finished", last[n]) for n in last}
    kept = {name: [place.steps for place in Checkpoints(run.folder.checkpoints).places()] for name, run in runs.items()}
    assert all(step not in kept[name] for name, step in last.items()) and kept["a-seed-3"]
    monkeypatch.setattr(cells, "evaluate_files", measure)
    assert dapo.compare(recipes, **given).failures() == []
    assert not any("resumed" in RunView.read(run.folder.root).environment for run in runs.values())


@pytest.mark.usefixtures("in_this_process")
def test_phases_that_leave_nothing_to_the_last_one_are_a_failure_that_is_named(here: Path) -> None:
    table = dapo.compare(["a.yaml", "phases.yaml"], samples=8, seeds=[1], out="out", listener=Recorder())
    (failure,) = table.failures()
    assert failure.startswith("phases-seed-1 failed: the phases before rl used 8 samples of 8: nothing is left for rl")
    assert [len(cells) for cells in table.done.values()] == [1, 0]


BAD = ["a.yaml", "bad=a.yaml model.tokenizer=none"]
FEW = ["evaluation.every=10"]
LONG: dict[str, Any] = {"changes": FEW, "samples": 480, "seeds": [1], "out": "out", "allow": ["model"]}


def test_a_killed_cell_goes_on_from_its_checkpoint_and_one_that_fails_costs_itself(
    here: Path, monkeypatch: Any
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            begun.append(self)

    monkeypatch.setattr(cells.subprocess, "Popen", Kept)
    first = threading.Thread(target=lambda: dapo.compare(BAD, listener=Recorder(), **LONG))
    first.start()
    wait_for_steps(here, 4)
    begun[0].kill()
    first.join()
    assert json.loads((here / "out/a-seed-1.json").read_text()) == {"failed": "ended by SIGKILL"}
    done = RunView.read(here / "out/a-seed-1").steps_done
    listener = Recorder()
    table = dapo.compare(BAD, only=["a"], listener=listener, **LONG)
    assert listener.phases[0].startswith("a-seed-1 (1 of 2): goes on") and len(begun) == 3
    run = RunView.read(here / "out/a-seed-1")
    assert 4 <= done < 30 and [entry["step"] for entry in run.metrics] == list(range(31))
    assert len(run.environment["resumed"]) == 1
    assert [len(one) for one in table.done.values()] == [1, 0]
    (failure,) = table.failures()
    assert failure.startswith("bad-seed-1 failed: ") and "none" in failure
    assert "phases." not in failure
    dapo.compare(BAD, only=["a"], listener=listener, **LONG)
    assert listener.phases[-1] == "a-seed-1 (1 of 2): done before"


def wait_for_steps(here: Path, steps: int) -> None:
    metrics, until = here / "out/a-seed-1/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > steps):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.nightly
def test_the_cell_of_a_killed_caller_writes_a_checkpoint_and_lets_go_of_its_lock(here: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dapo",
        "compare",
        *BAD,
        *FEW,
        "--allow",
        "model",
        "--samples",
        "480",
        "--seeds",
        "1",
    ]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    caller = subprocess.Popen([*command, "--seeds", "1", "--out", "out"], env=environment, stdout=subprocess.DEVNULL)
    wait_for_steps(here, 1)
    caller.kill()
    caller.wait()
    with (here / "out/.a-seed-1.lock").open("w") as lock:
        cells.fcntl.flock(lock, cells.fcntl.LOCK_EX)  # once its process has ended
    run = RunView.read(here / "out/a-seed-1")
    assert run.state == "stopped" and run.checkpoints
    dapo.compare(BAD, only=["a"], listener=Recorder(), **LONG)
    assert RunView.read(here / "out/a-seed-1").steps_done == 30


def test_a_file_system_without_locks_is_told_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("dapo.util.files.fcntl.flock", no_locks)
    monkeypatch.setattr(cells, "_attempt", lambda *_: "not tried")
    where = f"its file system has no locks ({os.strerror(errno.ENOLCK)}): let no other process work on it"
    for only, refused in ((["none"], pytest.raises(ConfigError, match="no such cell")), ([], nullcontext())):
        listener = Recorder()
        with refused:  # comparison.json is written before
            dapo.compare(["a.yaml", "phases.yaml"], samples=8, seeds=[1], out="out", only=only, listener=listener)
        assert [phase for phase in listener.phases if "no locks" in phase] == [f"out: {where}"]


def test_a_cell_that_is_ended_by_a_signal_says_so_and_its_lock_holds_others_off(here: Path, monkeypatch: Any) -> None:
    from dapo.comparison.folder import Cell, declare
    from dapo.comparison.recipes import named_variants

    variants = named_variants(["a.yaml", "b=a.yaml algorithm.clip_ratio_high=0.2"])
    judged = declare(here / "out", variants, [1], {"minutes": 1.0})
    monkeypatch.setattr(sys, "executable", str(here / "dies"))
    (here / "dies").write_text("#!/bin/sh\necho 'error: first'\nkill -SEGV $$\n")
    (here / "dies").chmod(0o755)
    told: list[str] = []
    with (here / "out/.b-seed-1.lock").open("w") as lock:
        cells.fcntl.flock(lock, cells.fcntl.LOCK_EX)
        cells.run_cells(here / "out", variants, [1], judged, [], told.append)
    assert Cell(here / "out", "a", 1).result == {"failed": f"ended by {signal.SIGSEGV.name}"}
    assert told[-1] == "b-seed-1 (2 of 2): another process is at it"
