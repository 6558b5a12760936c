"""Trackers: what TensorBoard and the services show of a run, and what happens when one is missing, fails or waits."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dapo.config import build_config
from dapo.errors import ConfigError
from dapo.observe import tracker_services
from dapo.observe.metrics import MetricsLog, read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.observe.tracker import Background
from dapo.observe.tracker_services import TensorBoardTracker
from dapo.observe.trackers import check_trackers, make_trackers
from run_cases import PROMPTS, Recorder, run

ROOT = Path(__file__).parents[2]


def events(folder: Path) -> EventAccumulator:
    """The event files as TensorBoard reads them."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(name)]


def test_every_number_of_a_run_is_there_under_its_name(tmp_path: Path) -> None:
    changes = {"run.trackers": ["tensorboard"], "training.steps": 3, "evaluation.every": 2}
    run(tmp_path / "run", changes, heldout=PROMPTS[:4])
    folder = RunFolder(tmp_path / "run")
    found = events(folder.tensorboard)
    lines = list(read_metrics(folder.metrics))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    names = {name for line in lines for name, value in line.items() if isinstance(value, int | float)} - {"step"}
    assert set(found.Tags()["scalars"]) == names and len(names) > 50
    for name in names:
        expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        assert [event.step for event in found.Scalars(name)] == [step for step, _ in expected]
        assert [event.value for event in found.Scalars(name)] == pytest.approx([v for _, v in expected], rel=1e-6)
    assert [step for step, _ in points(folder.tensorboard, "eval/accuracy")] == [0, 2, 3]
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    training:" in text and "steps: 3" in text


def test_without_being_asked_for_there_is_nothing(tmp_path: Path) -> None:
    run(tmp_path / "run")
    assert not RunFolder(tmp_path / "run").tensorboard.exists()


def test_a_step_is_on_the_disk_before_the_next_begins(tmp_path: Path) -> None:
    """The tracker is neither flushed nor closed by the test: so it would be if the process were killed here."""
    tracker = TensorBoardTracker(tmp_path, "seed: 1")
    for step in (1, 2):
        tracker.log(step, {"lr": 0.5 * step})
        assert points(tmp_path, "lr")[-1] == (step, 0.5 * step)
    tracker.close()


def test_a_resumed_run_has_no_point_twice(tmp_path: Path) -> None:
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    for keep_until, first, last in ((None, 0, 5), (3, 4, 7), (5, 6, 8)):  # killed, resumed, killed, resumed
        tracker = TensorBoardTracker(folder, "seed: 1", keep_until)
        with MetricsLog(path, keep_until, [tracker]) as log:
            for step in range(first, last + 1):
                log.append(step, {"lr": float(step + 100 * (keep_until or 0))})
    expected = [(line["step"], line["lr"]) for line in read_metrics(path)]
    assert [step for step, _ in expected] == list(range(9))
    assert points(folder, "lr") == expected
    assert len(events(folder).Tensors("config/text_summary")) == 1


def test_a_run_that_begins_again_from_nothing_drops_all_of_the_first_try(tmp_path: Path) -> None:
    for keep_until, value in ((None, 1.0), (-1, 2.0)):
        tracker = TensorBoardTracker(tmp_path, "seed: 1", keep_until)
        tracker.log(0, {"lr": value})
        tracker.close()
    assert points(tmp_path, "lr") == [(0, 2.0)]
    assert len(events(tmp_path).Tensors("config/text_summary")) == 1


def test_what_is_not_finite_stays_so_and_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, "seed: 1")
    tracker.log(1, {"loss": float("nan"), "grad_norm": math.inf, "lr": None})
    tracker.close()
    assert math.isnan(points(tmp_path, "loss")[0][1]) and points(tmp_path, "grad_norm") == [(1, math.inf)]
    assert "lr" not in events(tmp_path).Tags()["scalars"]


def test_a_missing_package_is_said_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_tensorboard(name: str, *rest: Any) -> Any:
        return None if name == "tensorboard" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_tensorboard)
    config = build_config({"model": {"path": "m"}, "run": {"trackers": "tensorboard"}})
    with pytest.raises(ConfigError, match=r"run\.trackers: tensorboard .*pip install 'dapo-rl\[tensorboard\]'"):
        check_trackers(config)
    with pytest.raises(ConfigError, match=r"run\.trackers"):
        run(tmp_path / "run", {"run.trackers": ["tensorboard"]})
    assert not (tmp_path / "run").exists()
    check_trackers(build_config({"model": {"path": "m"}}))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_service_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"run\.trackers: {name} .*pip install 'dapo-rl\[{name}\]'"):
        check_trackers(build_config({"model": {"path": "m"}, "run": {"trackers": [name]}}))


# --- a tracker never ends a run ---------------------------------------------------------------------------------------


class Odd:
    """Keeps what it hears, and fails at the step that it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.heard: list[Any] = []
        self._fails_at = fails_at

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self._fails_at:
            raise SystemExit("no network")  # as a package does that cannot log in
        self.heard.append((step, dict(metrics)))

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self.heard.append(dict(summary))

    def close(self) -> None:
        self.heard.append("closed")


def test_all_that_was_given_is_there_when_the_log_is_closed(tmp_path: Path) -> None:
    odd, said = Odd(), []  # type: ignore[var-annotated]
    with MetricsLog(tmp_path / "metrics.jsonl", trackers=[Background("odd", lambda: odd, said.append)]) as log:
        log.append(1, {"lr": 0.5})
        log.append(2, {"lr": 0.25})
        log.summarise({"steps": 2})
    assert odd.heard == [(1, {"lr": 0.5}), (2, {"lr": 0.25}), {"steps": 2}, "closed"] and said == []


def test_a_tracker_that_fails_is_said_once_and_the_file_is_whole(tmp_path: Path) -> None:
    odd, said = Odd(fails_at=2), []  # type: ignore[var-annotated]
    with MetricsLog(tmp_path / "metrics.jsonl", trackers=[Background("odd", lambda: odd, said.append)]) as log:
        for step in range(1, 6):
            log.append(step, {"lr": 0.5})
    assert said == ["tracker odd failed, and the run goes on without it: SystemExit: no network"]
    assert odd.heard == [(1, {"lr": 0.5}), "closed"]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_be_made_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.observe.trackers.check_trackers", lambda config: None)
    monkeypatch.setattr("dapo.orchestrator.build.check_trackers", lambda config: None)
    heard = Recorder()
    monkeypatch.setitem(tracker_services.TRACKERS, "wandb", lambda folder, key, recipe: 1 / 0)
    summary = run(tmp_path / "other", {"training.steps": 2, "run.trackers": ["wandb"]}, heard)
    assert summary["steps"] == 2
    assert len([text for text in heard.warnings if "wandb failed" in text and "ZeroDivisionError" in text]) == 1


def test_one_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.observe.tracker.CLOSE_SECONDS", 0.05)
    gate, said = threading.Event(), []  # type: ignore[var-annotated]
    tracker = Background("odd", lambda: gate.wait() and Odd(), said.append)  # type: ignore[arg-type,return-value]
    tracker.log(1, {"lr": 0.5})
    tracker.close()
    gate.set()
    assert len(said) == 1 and "did not end within 0.05 s" in said[0]


def test_several_that_hang_are_waited_for_as_long_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.observe.tracker.CLOSE_SECONDS", 0.2)
    gate, said, waited = threading.Event(), [], []  # type: ignore[var-annotated]
    join = threading.Thread.join

    def counted(thread: threading.Thread, timeout: float | None = None) -> None:
        waited.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", counted)
    names = ("one", "two", "three")
    trackers = [Background(name, lambda: gate.wait() and Odd(), said.append) for name in names]  # type: ignore[arg-type,return-value]
    MetricsLog(tmp_path / "metrics.jsonl", trackers=trackers).close()
    gate.set()
    assert [text.split()[1] for text in said] == list(names)
    assert waited[0] > 0 and waited[1:] == [0.0, 0.0]  # the first one took all there was


def test_a_run_keeps_the_key_that_services_know_it_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def make(folder: Path, key: str, recipe: Mapping[str, Any]) -> Odd:
        keys.append(key)
        assert recipe["run"]["trackers"] == ["wandb"]
        return Odd()

    monkeypatch.setattr("dapo.observe.trackers.check_trackers", lambda config: None)
    monkeypatch.setitem(tracker_services.TRACKERS, "wandb", make)
    config = build_config({"model": {"path": "m"}, "run": {"trackers": "wandb"}})
    for _ in range(2):
        for tracker in make_trackers(config, RunFolder(tmp_path)):
            tracker.close()
    assert len(keys) == 2 and keys[0] == keys[1] and keys[0].startswith(f"{tmp_path.name}-")


# --- the real packages ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(tracker_services.TRACKERS))
def test_the_real_package_has_a_run_and_its_second_part(name: str, tmp_path: Path) -> None:
    python = ROOT / ".venv-trackers" / "bin" / "python"
    assert python.exists(), "the trackers' packages are not installed: make trackers"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW", "TRACKIO"))
    }
    environment |= {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'support'}",
    }
    command = [str(python), str(ROOT / "tests" / "observe" / "real_trackers.py"), name, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout == "all there\n"  # and nothing that the package says


def test_no_secret_reaches_a_tracker(tmp_path: Path) -> None:  # failure 79
    tree = {"model": {"path": "m"}, "run": {"trackers": ["tensorboard"], "dir": str(tmp_path)}}
    headers = {"X-API-Key": "sk-secret-1", "Authorization": "Bearer sk-secret-2"}
    tree["reward"] = {"kind": "function", "function": "f.py:g", "args": {"headers": headers}}
    for tracker in make_trackers(build_config(tree), RunFolder(tmp_path)):
        tracker.close()
    written = b"".join(path.read_bytes() for path in RunFolder(tmp_path).tensorboard.iterdir())
    assert b"X-API-Key" in written and b"sk-secret" not in written
