"""The ablation's cells are what was declared, its comparisons are right by hand, and a lost runner loses one cell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import ablation  # noqa: E402

from dapo.config import load_config  # noqa: E402
from dapo.demo.task import make_tokenizer  # noqa: E402
from helpers import random_model  # noqa: E402

LADDER = ["naive", "overlong-filtering", "clip-higher", "soft-overlong", "token-level", "dynamic-sampling"]


def config_of(cell: ablation.Cell) -> Any:
    return load_config(cell.recipe, [f"{key}={json.dumps(value)}" for key, value in cell.settings.items()])


# --- what is declared -------------------------------------------------------------------------------------------------


def test_the_ladder_has_three_seeds_at_its_ends_and_two_between() -> None:
    cells = ablation.declared(ablation.DECLARED, "gsm8k")
    seeds = {variant: sorted(cell.seed for cell in cells if cell.variant == variant) for variant in LADDER}
    assert seeds == {v: [1, 2, 3] if v in ("naive", "dynamic-sampling") else [1, 2] for v in LADDER}
    assert len(cells) == 14 and max(cell.limit_s for cell in cells) <= 300


def test_each_rung_turns_on_one_technique_and_keeps_those_below() -> None:
    cells = {cell.variant: cell for cell in ablation.declared(ablation.DECLARED, "gsm8k")}
    for number, variant in enumerate(LADDER):
        algorithm = config_of(cells[variant]).algorithm
        assert algorithm.overlong_filtering == (number >= 1)
        assert algorithm.clip_ratio_high == (0.28 if number >= 2 else 0.2)
        assert algorithm.overlong_buffer.enable == (number >= 3)
        assert algorithm.loss_agg_mode == ("token-mean" if number >= 4 else "seq-mean-token-mean")
        assert algorithm.filter_groups.enable == (number >= 5)
        assert algorithm.kl.mode == "off"


def test_the_clip_has_something_to_do_and_the_test_set_is_not_read() -> None:
    config = config_of(ablation.declared(ablation.DECLARED, "gsm8k")[0])
    assert config.rollout.prompts_per_step // config.training.groups_per_update >= 4
    assert config.training.final_learning_rate is None  # so that equal samples had equal rates
    assert [Path(item.path).name for item in config.data.train] == ["rest.jsonl"]
    assert [Path(item.path).name for item in config.evaluation.data] == ["judge.jsonl"]


# --- comparing --------------------------------------------------------------------------------------------------------


def test_a_curve_is_read_on_straight_lines_between_its_points() -> None:
    curve = {"minutes": [0, 1, 3], "accuracy": [0.2, 0.4, 0.5]}
    found = [ablation.at(curve, "minutes", minute) for minute in (0, 0.5, 1, 2, 3, 9)]
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.45, 0.5, 0.5])


def test_noise_is_pooled_over_variants_and_single_seeds_say_nothing_of_it() -> None:
    # variances 2 (1 and 3; 1 d.f.) and 1 (1, 2, 3; 2 d.f.): (1 * 2 + 2 * 1) / 3
    spread = ablation.Spread.of([[1.0, 3.0], [1.0, 2.0, 3.0], [9.0]])
    assert spread.freedom == 3 and spread.deviation == pytest.approx((4 / 3) ** 0.5)
    assert spread.half(4) == pytest.approx(3.182 * (4 / 3) ** 0.5 / 2)
    assert spread.half(2, 2) == pytest.approx(3.182 * (4 / 3) ** 0.5)
    with pytest.raises(SystemExit, match="no variant has two seeds"):
        ablation.Spread.of([[1.0]])


def test_axes_count_all_that_was_drawn_and_not_the_capture_of_the_first_step(tmp_path: Path) -> None:
    step = {"groups/drawn": 6, "groups/kept": 4, "accuracy": 0.25, "groups/mixed": 4}
    lines = [
        {"step": 0, "eval/accuracy": 0.1},
        {"step": 1, "time/step": 50.0, **step},
        {"step": 2, "time/step": 30.0, "eval/accuracy": 0.3, **step},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("rollout: {samples_per_prompt: 8}\n")
    found = ablation.curves(tmp_path)
    assert found["steps"]["minutes"] == [0.5, 1.0]  # 30 s for the first step, as for the second
    assert found["evaluations"] == {
        "step": [0, 2],
        "minutes": [0, 1.0],
        "samples_drawn": [0, 96],
        "samples_trained": [0, 64],
        **{name: [None, None] for name in ablation.EVALUATION},
        "accuracy": [0.1, 0.3],
    }


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a table of three cells that take seconds."""
    tokenizer = make_tokenizer()
    random_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i}+{j}=", "answer": str((i + j) % 10)} for i in range(10) for j in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": "rows.jsonl", "template": "plain", "max_prompt_length": 8},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_length": 12},
        "reward": {"kind": "exact"},
        "algorithm": {"filter_groups": {"enable": False}, "overlong_buffer": {"len": 4}},
        "training": {"steps": 40, "groups_per_update": 1, "tokens_per_micro_batch": 1024},
        "evaluation": {"data": "rows.jsonl", "rows": 8},
        "run": {"save_every": 0},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    variants = {"naive": {}, "token-level": {"algorithm.clip_ratio_high": 0.28}}
    table = {
        "recipe": "tiny.yaml",
        "limit_s": 120,
        "variants": variants,
        "cells": ["naive 1", "token-level 1", "naive 2"],
    }
    (tmp_path / "cells.yaml").write_text(yaml.safe_dump({"tiny": table}))
    return tmp_path


def places(folder: Path) -> list[str]:
    return ["--declared", str(folder / "cells.yaml"), "--results", str(folder / "results")]


def test_a_cell_without_time_and_one_of_another_runner_are_not_begun(tiny: Path, capsys: Any) -> None:
    options = ["run", "tiny", *places(tiny), "--out", str(tiny / "runs")]
    assert ablation.main([*options, "--until", str(time.time() + 60)]) == []
    assert "tiny-naive-seed1: not begun" in capsys.readouterr().out
    with ablation.claimed(tiny / "runs" / "tiny-naive-seed1.lock") as mine:
        assert mine
        assert ablation.main([*options, "--until", "0", "--only", "tiny-naive-seed1"]) == []
    assert capsys.readouterr().out == ""


@pytest.mark.nightly
def test_a_runner_that_is_killed_loses_the_cell_under_way_and_no_more(tiny: Path, capsys: Any) -> None:
    options = ["run", "tiny", *places(tiny), "--out", str(tiny / "runs")]
    runner = subprocess.Popen([sys.executable, str(ROOT / "bench/ablation.py"), *options], start_new_session=True)
    first, second = (tiny / "results" / f"tiny-{name}-seed1.json" for name in ("naive", "token-level"))
    until = time.monotonic() + 300
    while not (first.exists() and (tiny / "runs/tiny-token-level-seed1/metrics.jsonl").exists()):
        assert time.monotonic() < until and runner.poll() is None
        time.sleep(0.05)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    kept = first.read_bytes()
    assert not second.exists()
    assert ablation.main([*options, "--commit", "abc"]) == ["tiny-token-level-seed1", "tiny-naive-seed2"]
    assert first.read_bytes() == kept
    found = json.loads(second.read_text())
    assert found["settings"] == {"algorithm.clip_ratio_high": 0.28} and found["commit"] == "abc"
    assert found["evaluations"]["step"] == [0, 40] and len(found["steps"]["minutes"]) == 40
    assert found["evaluations"]["samples_trained"] == [0, 40 * 16]
    assert not (tiny / "runs/tiny-token-level-seed1/model-after").exists()
    capsys.readouterr()
    rows = ablation.main(["table", "tiny", *places(tiny), "--plots", str(tiny)])
    assert [(row["variant"], row["seeds"]) for row in rows] == [("naive", 2), ("token-level", 1)]
    assert (tiny / "tiny.svg").exists()
