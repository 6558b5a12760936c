"""Trackers: what TensorBoard shows of a run, and what happens when it is not installed or the run is resumed."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dapo.config import build_config
from dapo.errors import ConfigError
from dapo.observe.metrics import MetricsLog, read_metrics
from dapo.observe.tensorboard import TensorBoardTracker
from dapo.observe.trackers import check_trackers, make_trackers
from dapo.run_folder import RunFolder
from run_cases import PROMPTS, run


def events(folder: Path) -> EventAccumulator:
    """The event files as TensorBoard reads them."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(name)]


def test_every_number_of_a_run_is_there_under_its_name(tmp_path: Path) -> None:
    changes = {"run.tensorboard": True, "training.steps": 3, "evaluation.every": 2}
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
    config = build_config({"model": {"path": "m"}, "run": {"tensorboard": True}})
    with pytest.raises(ConfigError, match=r"run\.tensorboard: .*pip install 'dapo\[tensorboard\]'"):
        check_trackers(config)
    with pytest.raises(ConfigError, match=r"run\.tensorboard"):
        run(tmp_path / "run", {"run.tensorboard": True})
    assert not (tmp_path / "run").exists()
    check_trackers(build_config({"model": {"path": "m"}}))


def test_no_secret_reaches_a_tracker(tmp_path: Path) -> None:  # failure 79
    tree = {"model": {"path": "m"}, "run": {"tensorboard": True, "dir": str(tmp_path)}}
    headers = {"X-API-Key": "sk-secret-1", "Authorization": "Bearer sk-secret-2"}
    tree["reward"] = {"kind": "function", "function": "f.py:g", "args": {"headers": headers}}
    for tracker in make_trackers(build_config(tree), RunFolder(tmp_path)):
        tracker.close()
    written = b"".join(path.read_bytes() for path in RunFolder(tmp_path).tensorboard.iterdir())
    assert b"X-API-Key" in written and b"sk-secret" not in written
