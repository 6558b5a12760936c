"""Distillation: what a ranker chooses is learned, in one folder that goes on, and the share of the gain is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_cases import write_rows as write
from dapo.commands import app
from dapo.stages.run import run_stage
from ranking_cases import save_tiny
from run_cases import Recorder
from stage_cases import SUMS, stage_config

FIRST_DIGITS = """
def early(response):  # low digits are good, and nothing else
    return -float(ord(response[0])) if response else -100.0
"""


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "early.py").write_text(FIRST_DIGITS)
    (tmp_path / "early.yaml").write_text("reward: {kind: function, function: 'early.py:early', workers: 1}\n")
    prompts = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a, b in SUMS]
    return {
        "policy": save_tiny(tmp_path / "base"),
        "ranker": tmp_path / "early.yaml",
        "--data": write(tmp_path / "train.jsonl", prompts[:20]),
        "--heldout": write(tmp_path / "heldout.jsonl", prompts[20:]),
        "--dir": tmp_path / "run",
    }


QUICK = ("training.steps=3", "training.learning_rate=3e-3", "training.rows_per_update=8", "data.max_length=64")


def distil(task: dict[str, Path], *more: str) -> tuple[int, str]:
    words = [str(word) for pair in task.items() for word in (pair if pair[0].startswith("-") else pair[1:])]
    done = CliRunner().invoke(app, ["distil", *words, "--max-tokens", "6", *QUICK, *more])
    return done.exit_code, done.output


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_it_makes_rows_trains_and_tells_the_gain(task: dict[str, Path], method: str) -> None:
    code, said = distil(task, "--method", method, "--samples", "4", "--gold", str(task["ranker"]))
    assert code == 0, said
    run = task["--dir"]
    report = json.loads((run / "report.json").read_text())
    assert report["prompts"] == 16 and report["samples"] == 4
    by = report["ranker"]
    assert by["best_of_n"]["value"] > by["one_sample"]["value"] and by == report["gold"]
    kept = (by["distilled"]["value"] - by["one_sample"]["value"]) / (
        by["best_of_n"]["value"] - by["one_sample"]["value"]
    )
    assert by["kept"]["value"] == pytest.approx(kept)
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    samples = {r["prompt"]: r["candidates"] for r in map(json.loads, (run / "train.jsonl").read_text().splitlines())}
    best = "response" if method == "sft" else "chosen"
    assert all(row[best][:1] == min(text[:1] for text in samples[row["prompt"]] if text.strip()) for row in rows)
    assert "share of the gain kept" in said and (run / "distilled" / "summary.json").is_file()

    assert "--resume goes on" in " ".join(distil(task)[1].split())
    before = (run / "report.json").read_text()
    code, said = distil(task, "--method", method, "--samples", "4", "--gold", str(task["ranker"]), "--resume")
    assert code == 0 and (run / "report.json").read_text() == before, said
    assert "ranking" not in said  # a judge might choose others
    assert "other settings" in " ".join(distil(task, "--samples", "3", "--resume")[1].split())
    (run.parent / "other.yaml").write_text(task["ranker"].read_text())
    other = distil(task | {"ranker": run.parent / "other.yaml"}, "--method", method, "--samples", "4", "--resume")
    assert "other settings" in " ".join(other[1].split())  # the model was not distilled from this one


def test_a_gain_that_may_be_none_has_no_share(task: dict[str, Path], tmp_path: Path) -> None:
    """By gold every second prompt has the best of four the worse, so that all in all next to nothing is gained."""
    (tmp_path / "gold.py").write_text(
        "def mixed(response, prompt):\n"
        "    return (1 if int(prompt[0]) % 2 else -1) * float(ord(response[0]) if response else 0)\n"
    )
    (tmp_path / "gold.yaml").write_text("reward: {kind: function, function: 'gold.py:mixed', workers: 1}\n")
    code, said = distil(task, "--samples", "4", "--gold", str(tmp_path / "gold.yaml"))
    by = json.loads((task["--dir"] / "report.json").read_text())["gold"]
    assert code == 0 and by["gain"]["low"] < 0 < by["gain"]["high"], said
    assert "kept" not in by
    gain = "{value:.3f} ({low:.3f} to {high:.3f})".format(**by["gain"])
    assert f"too little gain to speak of a share: {gain}" in (task["--dir"] / "report.md").read_text()


@pytest.mark.parametrize("line", ["{bad", '{"prompt": "1+1=", "answer": "2", "x": ' + "[" * 900 + "]" * 900 + "}"])
def test_a_row_that_cannot_be_used_is_named(task: dict[str, Path], line: str) -> None:
    task["--data"].write_text(line + "\n")
    code, said = distil(task)
    assert code == 2 and "train.jsonl:1: n" in "".join(said.split("\n")), said


def test_a_filter_that_lets_nothing_through_is_told(task: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"ranker": "x", "models": {"*": {"threshold": 1e9}}}))
    code, said = distil(task, "--calibration", str(tmp_path / "t.json"), "--samples", "2")
    assert code == 2 and "no sample passes the threshold" in " ".join(said.split())
    assert "with --calibration sft" in distil(task, "--calibration", "t.json", "--method", "dpo")[1].replace("\n", " ")
    same = task | {"--heldout": task["--data"], "--dir": tmp_path / "same"}
    said = " ".join(distil(same, "--calibration", str(tmp_path / "t.json"), "--samples", "2")[1].split())
    assert "held-out prompts are trained on, too" in said


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_at_least_half_of_the_gain_is_kept(tmp_path: Path, method: str) -> None:
    """A policy that works in steps half of the time, and a reward model that learned from pairs that steps are better.
    Best-of-8 beats single samples on held-out prompts; the distilled policy keeps half of that and more, by the ranker
    and by what the ranker stands for."""
    base = save_tiny(tmp_path / "base")
    steps = [(f"{a}+{b}=", f"{a}+{b}={(a + b) % 10};#{(a + b) % 10}", f"#{(a + b) % 10}") for a, b in SUMS * 2]
    half = [{"prompt": p, "response": one[k % 2]} for k, (p, *one) in enumerate(steps[::1])]
    half += [{"prompt": p, "response": one[(k + 1) % 2]} for k, (p, *one) in enumerate(steps)]
    pairs = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in steps[:20]]
    for stage, rows in (("sft", half), ("reward_model", pairs)):
        data = str(write(tmp_path / f"{stage}.jsonl", rows))
        changes = {"model.path": str(base), "data.train": data, "evaluation.data": data, "run.save_every": 1000}
        changes |= {"training.steps": 150 if stage == "sft" else 40, "training.learning_rate": 3e-3}
        changes |= {"training.tokens_per_micro_batch": 512, "training.rows_per_update": 16, "evaluation.every": 0}
        run_stage(stage_config(stage, tmp_path / f"{stage}-run", changes), Recorder())
    prompts = [{"prompt": f"{a}+{b}="} for a, b in SUMS]
    (tmp_path / "gold.py").write_text("def steps(response):\n    return float('=' in response)\n")
    (tmp_path / "gold.yaml").write_text("reward: {kind: function, function: 'gold.py:steps', workers: 1}\n")
    task = {
        "policy": tmp_path / "sft-run",
        "ranker": tmp_path / "reward_model-run",
        "--data": write(tmp_path / "train.jsonl", prompts[::2]),
        "--heldout": write(tmp_path / "heldout.jsonl", prompts[1::2]),
        "--gold": tmp_path / "gold.yaml",
        "--dir": tmp_path / "run",
    }
    more = ("--method", method, "training.steps=60", "training.learning_rate=1e-3", "--max-tokens", "12")
    code, said = distil(task, *more)
    assert code == 0, said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    print((tmp_path / "run" / "report.md").read_text())
    for by in ("ranker", "gold"):
        best, single = report[by]["best_of_n"], report[by]["one_sample"]
        least = best["value"] if best["low"] is None else best["low"]  # the best of all prompts may be the same
        assert least > single["high"]
        assert report[by]["kept"]["value"] >= 0.5
