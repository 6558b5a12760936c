"""The runner: what is refused, what a side leaves behind, and what a comparison is."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

import cycle
import rollout
import runner
import train
from peers import named, trl, vllm


@pytest.mark.parametrize("bench", [cycle, train])
@pytest.mark.parametrize("text", ["training.steps", "=3", "training.betas=[1"])
def test_a_key_without_a_value_is_refused_before_anything_runs(
    bench: ModuleType, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["ours", "--out", str(tmp_path), "--set", "training.steps=2", text])
    assert f"--set: {text}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "arguments", "told"),
    [
        (cycle, ["compare"], "on a GPU it needs --model and --rows"),
        (cycle, ["ours", "--device", "cpu", "--prompts", "6"], "cannot be cut into 4 updates"),
        (cycle, ["ours", "--cycles", "4"], "4: must be odd"),
        (cycle, ["compare", "--device", "cpu", "--rows", "r"], "--rows: for a GPU only"),
        (cycle, ["search", "--search", "micro8+quick"], "unknown setting 'quick'"),
        (rollout, ["compare", "--best", "sync+quick"], "unknown setting 'quick'"),
        (rollout, ["ours", "--prompts", "file"], "a number above 0, or with --model a file"),
        (rollout, ["ours", "--points", "8x100"], "--points 8x100: a context of 32 + --limit or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    bench: ModuleType, arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse([*arguments, "--out", str(tmp_path)])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("bench", [cycle, rollout, train])
def test_without_a_gpu_nothing_is_timed(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU is seen"):
        real = ["--model", str(tmp_path), "--rows", str(tmp_path)] if bench is cycle else []
        bench.main(["ours", "--out", str(tmp_path / "out"), *real])
    assert not (tmp_path / "out").exists()


def test_names_of_settings_are_joined() -> None:
    setting = named(vllm.PARTS, "sync+graphs1024+full+flat+runner2")
    assert setting == {
        "engine": {"async_scheduling": False},
        "compilation": {"max_cudagraph_capture_size": 1024, "cudagraph_mode": "FULL"},
        "sampling": {"flat_logprobs": True},
        "environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    }
    assert named(trl.PARTS, "micro8+micro16")["trainer"] == {"per_device_train_batch_size": 16}


def test_a_side_that_was_ended_in_the_middle_of_a_line_is_known_up_to_it(tmp_path: Path) -> None:
    assert runner.read_records(tmp_path / "none.jsonl") == []
    (tmp_path / "side.jsonl").write_text('{"kind": "cycle"}\n{"kind": "mem')
    assert runner.read_records(tmp_path / "side.jsonl") == [{"kind": "cycle"}]


def test_what_a_side_said_before_it_was_ended_counts_where_no_time_is_left_to_run_it_again(tmp_path: Path) -> None:
    options = Namespace(out=tmp_path, keep=True, patience=None, peer_path=None, ends=0.0)
    job = {"do": "ours:rollout", "repeats": 3}
    (tmp_path / "ours.job.json").write_text(json.dumps(job))
    (tmp_path / "ours.jsonl").write_text('{"kind": "rollout", "time": 1.0}\n{"kind": "roll')
    found = runner.run_side(options, "ours", job)
    assert len(found.of("rollout")) == 1 and found.error == "ours not started: --within is over; begun once"
    assert runner.run_side(options, "ours", job | {"repeats": 2}).records == []  # another job


def test_sides_take_turns_and_the_ratio_is_the_median_over_rounds() -> None:
    order = []

    def side(name: str, speeds: list[float], **more: str) -> object:
        def measure(number: int) -> runner.Side:
            order.append(name)
            return {"speed": speeds[number], "cpu_seconds": 1 / speeds[number], **more}

        return measure

    sides = {"ours": side("ours", [8.0, 2.0, 9.0]), "TRL": side("TRL", [1.0, 1.0, 3.0], setting="micro8")}
    rounds = runner.alternate(sides, 3)  # type: ignore[arg-type]
    assert order == ["ours", "TRL", "TRL", "ours", "ours", "TRL"]
    found = runner.conclude({}, rounds, [])
    assert found["ratios"] == {"ours / TRL": 3.0, "ours / TRL, processor time": pytest.approx(3.0)}
    assert [side["speed"] for side in found["sides"]] == [8.0, 1.0]
    void = runner.conclude({}, rounds, ["TRL was slow"])
    assert void["ratios"] == {} and void["void"] == ["TRL was slow"]
    assert runner.failed({"ours": [{"speed": 1.0}, {"speed": None}]}) == ["ours was not measured"]
