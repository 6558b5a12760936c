"""The ablation's cells are what was declared, its comparisons are right by hand, and a lost runner loses one cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import ablation
from dapo.commands.demo.task import make_tokenizer
from dapo.config import load_config
from helpers import random_model

ROOT = Path(__file__).parents[2]
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


def test_on_the_cpu_each_variant_leaves_one_technique_out() -> None:
    cells = ablation.declared(ablation.DECLARED, "arithmetic")
    whole = config_of(cells[0]).algorithm
    assert cells[0].variant == "dapo" and whole.overlong_buffer.enable and whole.filter_groups.enable
    assert (whole.clip_ratio_high, whole.loss_agg_mode) == (0.28, "token-mean") and not whole.overlong_filtering
    seeds = {v: [c.seed for c in cells if c.variant == v] for v in dict.fromkeys(c.variant for c in cells)}
    assert set(map(tuple, seeds.values())) == {(2, 3, 4, 5, 6, 7)}  # the trials had seed 1
    for cell in cells:
        assert len(cell.settings) == {"dapo": 0, "naive": 4}.get(cell.variant, 1)
        assert cell.variant == "dapo" or config_of(cell).algorithm != whole
        assert cell.limit_s <= 1200


# --- comparing --------------------------------------------------------------------------------------------------------


def test_noise_is_pooled_over_variants_and_single_seeds_say_nothing_of_it() -> None:
    # variances 2 (1 and 3; 1 d.f.) and 1 (1, 2, 3; 2 d.f.): (1 * 2 + 2 * 1) / 3
    found = ablation.noise([[1.0, 3.0], [1.0, 2.0, 3.0], [9.0]])
    assert found == (pytest.approx((4 / 3) ** 0.5), 3)
    assert ablation.half(found, 4) == pytest.approx(3.182 * (4 / 3) ** 0.5 / 2)
    assert ablation.half(found, 2, 2) == pytest.approx(3.182 * (4 / 3) ** 0.5)
    with pytest.raises(SystemExit, match="no variant has two seeds"):
        ablation.noise([[1.0]])


def result(minutes: list[float], trained: list[int], drawn: list[int], accuracy: list[float]) -> dict[str, Any]:
    return {
        "evaluations": {"minutes": minutes, "samples_trained": trained, "samples_drawn": drawn, "accuracy": accuracy}
    }


def test_variants_are_compared_where_all_have_come_on_straight_lines_between_evaluations() -> None:
    lines = ablation.accuracies(
        {
            "slow": [result([0, 2], [0, 100], [0, 100], [0.2, end]) for end in (0.4, 0.6)],
            "fast": [result([0, 4], [0, 200], [0, 400], [0.2, 0.6])],
        }
    )
    # ends: minute 2, 100 samples trained on, 100 drawn; fast is at 40, 40 and 30% there; deviation of 40 and 60: 14.14
    assert [cell.strip() for cell in lines[2].split("|")[1:6]] == ["slow", "2", *3 * ["50.0 ± 127.1"]]
    fast = [cell.strip() for cell in lines[3].split("|")[1:8]]
    assert fast[2:5] == ["40.0 ± 179.7", "40.0 ± 179.7", "30.0 ± 179.7"]
    assert fast[5:] == ["-10.0 ± 220.1"] * 2  # 12.706 * 14.142 * sqrt(1 + 1/2)


def test_a_table_that_is_not_cumulative_compares_with_its_first_variant_only() -> None:
    ends = {"whole": (0.4, 0.6), "other": (0.8, 0.6), "less": (0.3, 0.3)}
    results = {v: [result([0, 2], [0, 1], [0, 1], [0.2, end]) for end in both] for v, both in ends.items()}
    head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in ablation.accuracies(results, False))
    assert head[5:] == ["minus the first"]
    # variances 200, 200 and 0 of 3 d.f.: 3.182 * sqrt(400 / 3)
    assert [line[5:] for line in lines] == [[""], ["+20.0 ± 36.7"], ["-20.0 ± 36.7"]]


def cut(steps: list[int], shares: list[float]) -> dict[str, Any]:
    return {"evaluations": {"step": steps, "minutes": [step / 100 for step in steps], "truncated": shares}}


def test_guessing_is_found_after_responses_were_cut_and_not_before_any_was() -> None:
    at = [0, 10, 20, 30, 40]
    assert ablation.uncut(cut(at, [0.0, 0.05, 0.1, 0.099, 0.3]), 0.1) == 3
    assert ablation.uncut(cut(at, [0.2, 0.3, 0.1, 0.2, 0.0]), 0.1) == 4
    assert ablation.uncut(cut(at, [0.0, 0.3, 0.1, 0.2, 0.1]), 0.1) is None  # never found
    assert ablation.uncut(cut(at, [0.0, 0.05, 0.0, 0.0, 0.0]), 0.1) is None  # nothing to find


def test_cells_that_do_not_find_it_are_counted_and_have_no_part_in_the_means() -> None:
    found, never = [0.0, 0.3, 0.05, 0.0], [0.0, 0.3, 0.3, 0.3]
    results = {
        "whole": [cut([0, 10, 20, 30], found), cut([0, 20, 40, 60], found)],
        "other": [cut([0, 10, 50, 60], found), cut([0, 10, 70, 80], found), cut([0, 10, 20, 30], never)],
        "none": [cut([0, 10, 20, 30], never)],
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ablation.first_uncut(results, 0.1)[2:]]
    # steps 20 and 40, 50 and 70: variance 200 of 2 d.f.; 4.303 * sqrt(200 / 2) = 43, * sqrt(200) = 61 for a difference
    assert lines[0] == ["whole", "2 of 2", "30 ± 43", "", "0.30 ± 0.43", ""]
    assert lines[1] == ["other", "2 of 3", "60 ± 43", "+30 ± 61", "0.60 ± 0.43", "+0.30 ± 0.61"]
    assert lines[2] == ["none", "0 of 1", "", "", "", ""]


def test_a_step_in_which_nothing_was_learned_is_none_of_the_last_ones() -> None:
    assert ablation.ends([9.0, 1.0, 2.0, None, 3.0, None]) == [1.0, 2.0, 3.0]


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
        "training": {"minutes": 0.02, "groups_per_update": 1, "tokens_per_micro_batch": 1024},
        "evaluation": {"data": "rows.jsonl", "rows": 4},
        "run": {"save_every": 0},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    variants = {"naive": {}, "token-level": {"algorithm.clip_ratio_high": 0.28}}
    table = {
        "recipe": "tiny.yaml",
        "limit_s": 600,
        "variants": variants,
        "cells": ["naive 1", "token-level 1", "naive 2"],
    }
    (tmp_path / "cells.yaml").write_text(yaml.safe_dump({"tiny": table}))
    return tmp_path


def places(folder: Path) -> list[str]:
    return ["--declared", str(folder / "cells.yaml"), "--results", str(folder / "results")]


@pytest.mark.nightly
def test_missing_cells_are_run_by_dapo_compare_and_those_that_are_filled_stay(tiny: Path, capsys: Any) -> None:
    options = ["run", "tiny", *places(tiny), "--out", str(tiny / "runs"), "--commit", "abc"]
    assert ablation.main([*options, "--only", "tiny-token-level-seed1"]) == ["tiny-token-level-seed1"]
    kept = (tiny / "results/tiny-token-level-seed1.json").read_bytes()
    assert ablation.main(options) == ["tiny-naive-seed1", "tiny-naive-seed2"]
    assert (tiny / "results/tiny-token-level-seed1.json").read_bytes() == kept
    found = json.loads(kept)
    assert found["settings"] == {"algorithm.clip_ratio_high": 0.28} and found["commit"] == "abc"
    steps = found["steps"]["step"]
    assert found["evaluations"]["step"] == [0, steps[-1]] and len(found["steps"]["minutes"]) == len(steps)
    assert found["evaluations"]["samples_trained"] == [0, len(steps) * 16]
    capsys.readouterr()
    lines = ablation.main(["table", "tiny", *places(tiny), "--plots", str(tiny)])
    assert lines[2].startswith("| naive | 2 |") and lines[3].startswith("| token-level | 1 |")
    assert (tiny / "ablation-tiny.svg").exists()
