"""The table of metrics and the log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dapo.errors import UserError
from dapo.observe.metrics import METRICS, MetricsLog, describe, read_metrics


def test_what_the_paper_says_to_watch_is_in_the_table() -> None:
    names = """response_length/mean response_length/max response_length/truncated reward/mean accuracy entropy
    probability/mean clip/low clip/high clip/dual clip/high_probability groups/drawn groups/kept groups/all_right
    groups/all_wrong groups/surplus grad_norm mismatch/mean mismatch/max mismatch/k3 staleness/mean kl/reference lr
    time/rollout time/reward_wait time/prepare time/update time/sync tokens_per_second/rollout tokens_per_second/update
    eval/accuracy"""
    assert [name for name in names.split() if name not in METRICS] == []


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    assert all(m.unit and m.meaning and " | " not in m.meaning for m in METRICS.values())
    assert all(name == m.name for name, m in METRICS.items())


def test_patterns_take_one_name() -> None:
    assert describe("reward/part/format") is METRICS["reward/part/{}"]
    assert describe("accuracy") is METRICS["accuracy"]
    assert describe("reward/part/") is None
    assert describe("reward/part/a/b") is None
    assert describe("acuracy") is None


def test_lines_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(1, {"accuracy": 0.5, "groups/kept": np.int64(4), "reward/mean": np.float32(-0.5)})
        assert path.read_text() == '{"step": 1, "accuracy": 0.5, "groups/kept": 4, "reward/mean": -0.5}\n'  # flushed
        log.append(2, {"accuracy": 1, "kl/reference": None})
        assert [entry["step"] for entry in read_metrics(path)] == [1, 2]
    with MetricsLog(path) as log:
        log.append(3, {})
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]


def test_what_is_not_finite_becomes_null_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        entry = log.append(1, {"grad_norm": math.inf, "loss": np.float32("nan"), "accuracy": 0.0})
    assert json.loads(path.read_text()) == entry
    assert entry["grad_norm"] is None and entry["loss"] is None and entry["accuracy"] == 0.0
    assert entry["non_finite"] == {"grad_norm": "inf", "loss": "nan"}


def test_a_name_that_is_not_in_the_table_is_refused_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log, pytest.raises(KeyError, match="acuracy"):
        log.append(1, {"lr": 1.0, "acuracy": 0.5})
    assert path.read_text() == ""


def test_half_a_line_at_the_end_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lr": 0.1}\n{"step": 2, "lr"')
    assert [entry["step"] for entry in read_metrics(path)] == [1]
    with MetricsLog(path) as log:
        log.append(2, {"lr": 0.2})
    assert list(read_metrics(path)) == [{"step": 1, "lr": 0.1}, {"step": 2, "lr": 0.2}]


def test_a_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(1, 6):
            log.append(step, {"lr": step})
    with MetricsLog(path, keep_until=3) as log:
        log.append(4, {"lr": 40})
    assert [entry["lr"] for entry in read_metrics(path)] == [1, 2, 3, 40]


def test_a_spoilt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nspoilt\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        list(read_metrics(path))


def test_what_is_no_number_in_a_line_is_read_as_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lr": NaN, "entropy": -Infinity, "loss": "x", "accuracy": [1], "epoch": 2}\n')
    nothing = dict.fromkeys(["lr", "entropy", "loss", "accuracy"])
    assert list(read_metrics(path)) == [{"step": 1, **nothing, "epoch": 2}]


def test_a_number_with_more_digits_than_a_float_is_read_as_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "tokens/generated": {"9" * 400}, "updates": {"9" * 15}}}\n')
    assert list(read_metrics(path)) == [{"step": 1, "tokens/generated": None, "updates": 10**15 - 1}]


def test_in_brief_there_are_the_ends_and_the_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(6):
            log.append(step, {"lr": 1.0} | ({"eval/accuracy": 0.5} if step == 3 else {}))
    assert [entry["step"] for entry in read_metrics(path, brief=True)] == [0, 3, 5]
    path.write_text('{"step": 1}\n{"step": 2, "l')  # being written
    assert list(read_metrics(path, brief=True)) == [{"step": 1}]


@pytest.mark.parametrize("line", ['{"step": true}', '{"step": "1"}', "[" * 100_000, "\0" * 512, "\ufffe"])
def test_a_line_without_a_step_is_spoilt(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:1"):
        list(read_metrics(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read: "):
        list(read_metrics(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log._file.close()
    log._file = Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(UserError, match="cannot be written: No space left"), log:
        log.append(7, {"lr": 1.0})
