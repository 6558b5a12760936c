"""The ablation's cells are what was declared, its comparisons are right by hand, and a lost runner loses one cell."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
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
        "evaluations": {
            "minutes": minutes,
            "samples_trained": trained,
            "samples_drawn": drawn,
            "accuracy": accuracy,
        }
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
        "training": {"steps": 10, "groups_per_update": 1, "tokens_per_micro_batch": 1024},
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


def test_a_cell_without_time_and_one_of_another_runner_are_not_begun(tiny: Path, capsys: Any) -> None:
    options = ["run", "tiny", *places(tiny), "--out", str(tiny / "runs")]
    assert ablation.main([*options, "--until", str(time.time() + 500)]) == []
    assert "tiny-naive-seed1: not begun" in capsys.readouterr().out
    with (tiny / "runs" / "tiny-naive-seed1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
    assert found["evaluations"]["step"] == [0, 10] and len(found["steps"]["minutes"]) == 10
    assert found["evaluations"]["samples_trained"] == [0, 10 * 16]
    assert not (tiny / "runs/tiny-token-level-seed1/model-after").exists()
    capsys.readouterr()
    lines = ablation.main(["table", "tiny", *places(tiny), "--plots", str(tiny)])
    assert lines[2].startswith("| naive | 2 |") and lines[3].startswith("| token-level | 1 |")
    assert (tiny / "ablation-tiny.svg").exists()


# --- what docs/results.md says ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> ablation.Results:
    return ablation.read_results(ablation.parse(["table", "gsm8k"]))


@pytest.fixture(scope="module")
def page() -> str:
    text = (ROOT / "docs/results.md").read_text()
    section = text.partition("## The paper's Table 1 in small\n")[2].partition("\n## ")[0]
    assert section
    return section


@pytest.fixture(scope="module")
def prose(page: str) -> str:
    """The same, whatever the length of its lines."""
    return " ".join(page.split())


def test_every_result_is_of_a_declared_cell_and_ran_as_declared(results: ablation.Results, prose: str) -> None:
    cells = {cell.name: cell for cell in ablation.declared(ablation.DECLARED, "gsm8k")}
    files = {file.stem: json.loads(file.read_text()) for file in ablation.RESULTS.glob("gsm8k-*.json")}
    assert files.keys() <= cells.keys()
    assert f"**{len(files)} of {len(cells)} cells are filled**" in prose
    for name, found in files.items():
        assert (found["cell"], found["seed"]) == (name, cells[name].seed)
        assert found["settings"] == dict(cells[name].settings)
        assert found["seconds"] < cells[name].limit_s and found["evaluations"]["minutes"][-1] < 2.5
        assert found["card"]["device"] == "NVIDIA H200" and f"commit {found['commit'][:7]}" in prose
        assert found["versions"]["torch"] == "2.11.0" and found["versions"]["transformers"] == "5.17.0"
    every = list(files.values())
    rates = [found["card"]["operations_per_second"] / 1e12 for found in every]
    assert f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s" in prose
    seconds = [found["seconds"] for found in every]
    assert f"in {min(seconds):.0f} to {max(seconds):.0f} s with" in prose
    steps = [len(found["steps"]["step"]) for found in every]
    assert f"({min(steps)} to {max(steps)} of them)" in prose
    cut = [100 * found["steps"]["truncated"][0] for found in every]
    assert f"{min(cut):.0f} to {max(cut):.0f}% of the samples of the first step are cut" in prose
    assert {f"{found['evaluations']['accuracy'][0]:.1%}" for found in every} == {"29.8%"} and "29.8% are right" in prose


def test_the_tables_are_those_of_the_results(results: ablation.Results, page: str) -> None:
    assert "\n".join(ablation.accuracies(results)) in page
    assert "\n".join(ablation.mechanisms(results)) in page


def accuracy(group: list[dict[str, Any]], axis: str, value: float) -> list[float]:
    curves = [found["evaluations"] for found in group]
    return [100 * float(np.interp(value, curve[axis], curve["accuracy"])) for curve in curves]


def last(group: list[dict[str, Any]], name: str) -> list[float]:
    return [fmean(found["steps"][name][-3:]) for found in group]


def test_what_the_text_says_of_accuracy_is_in_the_results(results: ablation.Results, prose: str) -> None:
    every = [found["evaluations"] for group in results.values() for found in group]
    axes = {axis: min(found[axis][-1] for found in every) for axis in ablation.AXES}
    at = {axis: {v: accuracy(g, axis, end) for v, g in results.items()} for axis, end in axes.items()}
    mean = {axis: {v: fmean(values) for v, values in groups.items()} for axis, groups in at.items()}
    spread = {axis: ablation.noise(groups.values()) for axis, groups in at.items()}
    deviations = [f"{deviation:.1f}" for deviation, _ in spread.values()]
    assert f"({deviations[0]}, {deviations[1]} and {deviations[2]} points, 8 degrees of freedom)" in prose
    assert {freedom for _, freedom in spread.values()} == {8}

    time, noise = mean["minutes"], spread["minutes"]
    above, first = ablation.half(noise, 3, 2), ablation.half(noise, 3, 3)
    assert f"+{time['dynamic-sampling'] - time['token-level']:.1f} ± {above:.1f} points over the rung above" in prose
    assert f"+{time['dynamic-sampling'] - time['naive']:.1f} ± {first:.1f} over naive GRPO" in prose
    wide = 3.355 * noise[0] * (1 / 3 + 1 / 2) ** 0.5  # t of 8 degrees of freedom at 99%: five comparisons
    assert f"± {wide:.1f} that allow for five" in prose and time["dynamic-sampling"] - time["token-level"] > wide
    for number, variant in enumerate(LADDER[1:5]):  # "within noise", and none above naive GRPO
        assert abs(time[variant] - time[LADDER[number]]) < ablation.half(noise, len(results[LADDER[number]]), 2)
        assert -above < time[variant] - time["naive"] < 0
    trained, drawn = mean["samples_trained"], mean["samples_drawn"]
    numbers = [trained[v] for v in ("dynamic-sampling", "token-level", "naive")]
    assert f"({numbers[0]:.1f} against {numbers[1]:.1f} and {numbers[2]:.1f}%)" in prose
    assert f"({drawn['dynamic-sampling']:.1f} against {drawn['naive']:.1f}%)" in prose
    below = trained["naive"] - trained["soft-overlong"], ablation.half(spread["samples_trained"], 3, 2)
    assert f"{trained['soft-overlong']:.1f}%, {below[0]:.1f} ± {below[1]:.1f} below naive GRPO" in prose
    token = time["token-level"] - time["soft-overlong"]
    assert f"**Token-level loss**: {token:.1f} ± {ablation.half(noise, 2, 2):.1f} points" in prose


def test_what_the_text_says_of_mechanisms_is_in_the_results(results: ablation.Results, prose: str) -> None:
    naive, filtered, higher = (results[v] for v in LADDER[:3])
    soft, dynamic = results["soft-overlong"], results["dynamic-sampling"]
    flat = [128 - fmean(last(group, "mixed")) for group in list(results.values())[:5]]
    assert f"there are {min(flat):.0f} to {max(flat):.0f} in a batch of 128" in prose
    seconds = [fmean(60 * f["steps"]["minutes"][-1] / len(f["steps"]["step"]) for f in g) for g in (dynamic, naive)]
    assert f"takes {seconds[0]:.1f} s and not {seconds[1]:.1f} s" in prose
    assert f"for {fmean(last(dynamic, 'drawn')) / 128:.1f} times as many" in prose
    cut = fmean(found["steps"]["truncated"][0] for found in naive), fmean(last(naive, "truncated"))
    assert f"fall from {100 * cut[0]:.1f} to {cut[1]:.1%}" in prose
    held = [fmean(found["evaluations"]["truncated"][-1] for found in group) for group in (filtered, naive)]
    assert f"they are {fmean(last(filtered, 'truncated')):.1%} at the end, and {held[0]:.1%} of the held-out" in prose
    assert f"in place of {held[1]:.1%}" in prose
    ends = [
        [100 * f["evaluations"]["accuracy"][-1] / (1 - f["evaluations"]["truncated"][-1]) for f in group]
        for group in ([*filtered, *higher], naive)
    ]
    texts = [f"{min(found):.0f} to {max(found):.0f}%" for found in ends]
    assert f"({texts[0]} on these two rungs, {texts[1]} with naive" in prose
    assert f"{fmean(f['steps']['all_wrong'][0] for f in soft):.0%} of the groups are so at first" in prose
    lengths = fmean(found["steps"]["length"][0] for found in soft), fmean(last(soft, "length"))
    assert f"from {lengths[0]:.0f} to {lengths[1]:.0f} tokens" in prose
    assert f"is cut ({fmean(last(soft, 'truncated')):.1%})" in prose
    assert f"the length stays at {fmean(last(dynamic, 'length')):.0f}" in prose

    entropies = {variant: last(group, "entropy") for variant, group in results.items()}
    pair = fmean(entropies["clip-higher"]), fmean(entropies["overlong-filtering"])
    half = ablation.half(ablation.noise(entropies.values()), 2, 2)
    assert f"{pair[0]:.3f} where filtering alone has {pair[1]:.3f}" in prose
    assert f"a difference of {pair[0] - pair[1]:.3f} ± {half:.3f}" in prose
    first = [found["steps"]["entropy"][0] for group in results.values() for found in group]
    end = [value for values in entropies.values() for value in values]
    falls = f"from {min(first):.2f} to {max(first):.2f} nats to {min(end):.2f} to {max(end):.2f}"
    assert falls in prose
    low, high = ([fmean(last(g, name)) for g in results.values()] for name in ("clip_low", "clip_high"))
    shares = (
        f"{min(high):.1%} to {max(high):.1%}".replace("%", "", 1),
        f"{min(low):.1%} to {max(low):.1%}".replace("%", "", 1),
    )
    assert f"{shares[0]} of the tokens above and {shares[1]} below" in prose
    likely = [found["steps"]["clip_high_probability"][-1] for group in results.values() for found in group]
    assert f"mean probability of {min(likely):.2f} to {max(likely):.2f}" in prose


# --- and of the cells on the CPU --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left_out() -> ablation.Results:
    return ablation.read_results(ablation.parse(["table", "arithmetic"]))


def against_dapo(values: dict[str, list[float]], variant: str) -> tuple[float, float]:
    """The difference of the means and half of its interval."""
    own, whole = values[variant], values["dapo"]
    return fmean(own) - fmean(whole), ablation.half(ablation.noise(values.values()), len(own), len(whole))


def test_every_cell_on_the_cpu_ran_as_declared(left_out: ablation.Results, prose: str) -> None:
    cells = {cell.name: cell for cell in ablation.declared(ablation.DECLARED, "arithmetic")}
    files = {file.stem: json.loads(file.read_text()) for file in ablation.RESULTS.glob("arithmetic-*.json")}
    assert files.keys() <= cells.keys()
    assert f"**{len(files)} of {len(cells)} are filled**" in prose
    for name, found in files.items():
        assert (found["cell"], found["seed"], found["commit"]) == (name, cells[name].seed, "69257dd")
        assert found["settings"] == dict(cells[name].settings) and found["card"]["device"] == "CPU"
        assert found["seconds"] < cells[name].limit_s and 4.9 < found["evaluations"]["minutes"][-1] < 5.05
        assert found["versions"]["torch"] == "2.11.0" and found["versions"]["transformers"] == "5.17.0"
        assert found["evaluations"]["accuracy"][0] == 0.202 and "20.2% before training" in prose
    steps = {name: len(found["steps"]["step"]) for name, found in files.items()}
    assert f"({min(steps.values())} to {max(steps.values())} of them)" in prose
    seconds = [found["seconds"] for found in files.values()]
    assert f"in {min(seconds):.0f} to {max(seconds):.0f} s with start" in prose
    first, second = (fmean(n for name, n in steps.items() if name[-1] in seeds) for seeds in ("23", "4567"))
    assert f"{second / first:.1f} times as many steps in the same time" in prose


def test_the_tables_of_the_cpu_are_those_of_the_results(left_out: ablation.Results, page: str) -> None:
    for lines in (
        ablation.accuracies(left_out, False),
        ablation.mechanisms(left_out),
        ablation.first_uncut(left_out, 0.1),
    ):
        assert "\n".join(lines) in page


def test_what_the_text_says_of_accuracy_on_the_cpu_is_in_the_results(left_out: ablation.Results, prose: str) -> None:
    every = [found["evaluations"] for group in left_out.values() for found in group]
    at = {
        axis: {v: accuracy(g, axis, min(found[axis][-1] for found in every)) for v, g in left_out.items()}
        for axis in ablation.AXES
    }
    spread = {axis: ablation.noise(groups.values()) for axis, groups in at.items()}
    deviations = [f"{deviation:.1f}" for deviation, _ in spread.values()]
    assert (
        f"({deviations[0]}, {deviations[1]} and {deviations[2]} points between seeds, 35 degrees of freedom)" in prose
    )
    assert {freedom for _, freedom in spread.values()} == {35}

    axes = ("minutes", "samples_trained", "samples_drawn")
    without = {axis: against_dapo(at[axis], "no-dynamic-sampling") for axis in axes}
    texts = [f"{abs(d) if axis == 'minutes' else d:.1f} ± {half:.1f}" for axis, (d, half) in without.items()]
    assert f"accuracy is {texts[0]} points lower, {texts[1]} at equal samples trained on and {texts[2]} at" in prose
    wide = [2.80 * spread[axis][0] * (1 / 3) ** 0.5 for axis in axes[:2]]  # t of 35 degrees of freedom at 1 - 0.05 / 6
    assert f"± {wide[0]:.1f} at equal time and ± {wide[1]:.1f} at equal samples trained on" in prose
    for variant in left_out.keys() - {"dapo", "no-dynamic-sampling"}:  # within noise at equal time
        difference, half = against_dapo(at["minutes"], variant)
        assert abs(difference) < half
    assert without["minutes"][0] < -without["minutes"][1]

    ends = sorted(value for group in at["minutes"].values() for value in group)
    usual = [value for value in ends if 53 < value < 75]
    assert f"{len(usual)} of the {len(ends)} cells end between 53 and 75%" in prose
    assert sum(value < 50 for value in at["minutes"]["no-dynamic-sampling"]) == 2 and ends[1] < 50 < ends[2]
    soft, low = (dict(zip(range(2, 8), at["minutes"][v], strict=True)) for v in ("no-soft-overlong", "no-clip-higher"))
    assert f"ended at {soft[4]:.1f} and {low[4]:.1f}%; another reached {soft[2]:.1f}%" in prose
    assert ends[-3:] == sorted([soft[4], low[4], soft[2]])
    better = [against_dapo(at["minutes"], v)[0] for v in ("no-soft-overlong", "no-clip-higher")]
    assert f"({better[0]:+.1f} and {better[1]:+.1f}, within noise)" in prose
    token, half = against_dapo(at["minutes"], "no-token-level")
    assert f"| {token:+.1f} ± {half:.1f} points without it" in prose
    naive, half = against_dapo(at["minutes"], "naive")
    assert f"only {-naive:.1f} ± {half:.1f} points below" in prose
    lost = {
        v: fmean(100 * (max(f["evaluations"]["accuracy"]) - f["evaluations"]["accuracy"][-1]) for f in g)
        for v, g in left_out.items()
    }
    rest = [value for v, value in lost.items() if v not in ("naive", "no-dynamic-sampling")]
    numbers = f"(`naive` {lost['naive']:.1f}, all others {min(rest):.1f} to {max(rest):.1f})"
    assert f"loses {lost['no-dynamic-sampling']:.1f} points on average {numbers}" in prose


def first_under(group: list[dict[str, Any]], name: str, axis: str) -> list[float]:
    places = [ablation.uncut({"evaluations": {"truncated": found["evaluations"][name]}}, 0.1) for found in group]
    return [found["evaluations"][axis][i] for found, i in zip(group, places, strict=True) if i is not None]


def test_what_the_text_says_of_guessing_is_in_the_results(left_out: ablation.Results, prose: str) -> None:
    cut = {v: first_under(g, "truncated", "step") for v, g in left_out.items()}
    assert [len(cut[v]) for v in ("no-soft-overlong", "dapo", "no-dynamic-sampling")] == [3, 5, 6]
    later = {v: against_dapo(cut, v) for v in cut}
    soft, drawn, filtered, naive = (
        f"{abs(later[v][0]):.0f} ± {later[v][1]:.0f} steps"
        for v in ("no-soft-overlong", "no-dynamic-sampling", "with-overlong-filtering", "naive")
    )
    minutes = {v: first_under(g, "truncated", "minutes") for v, g in left_out.items()}
    earlier, half = against_dapo(minutes, "no-dynamic-sampling")
    assert f"later by {soft} in three cells, never in three (`dapo`: never in one)" in prose
    assert f"earlier by {drawn}, {-earlier:.2f} ± {half:.2f} minutes, within noise; all six get there" in prose
    assert f"all six get there, later by {filtered}, within noise" in prose and len(cut["with-overlong-filtering"]) == 6
    assert f"gets there last, {naive} after" in prose
    assert {v for v, (difference, half) in later.items() if abs(difference) > half} == {"naive"}

    never = [f["evaluations"] for g in left_out.values() for f in g if ablation.uncut(f, 0.1) is None]
    shares = [100 * found["no_answer"][1] for found in never]
    assert len(never) == 6 and f"{min(shares):.0f} to {max(shares):.0f}% of their responses at step 10" in prose
    assert f"at most {max(found['no_answer'][-1] for found in never):.1%} at the end" in prose

    other = {v: first_under(g, "no_answer", "step") for v, g in left_out.items()}
    assert {len(values) for values in other.values()} == {6}
    minutes = {v: first_under(g, "no_answer", "minutes") for v, g in left_out.items()}
    earlier, half = against_dapo(minutes, "no-dynamic-sampling")
    naive, soft = against_dapo(other, "naive"), against_dapo(other, "no-soft-overlong")
    assert f"`naive` {naive[0]:.0f} ± {naive[1]:.0f} steps after" in prose
    assert f"sampling {-earlier:.2f} ± {half:.2f} minutes before it" in prose
    assert f"({soft[0]:+.0f} ± {soft[1]:.0f} steps)" in prose


def test_what_the_text_says_of_entropy_on_the_cpu_is_in_the_results(left_out: ablation.Results, prose: str) -> None:
    ends = {v: [fmean(ablation.ends(found["steps"]["entropy"])) for found in g] for v, g in left_out.items()}
    difference, half = against_dapo(ends, "no-clip-higher")
    assert f"no: {fmean(ends['no-clip-higher']):.3f} against {fmean(ends['dapo']):.3f} over the last three" in prose
    assert f"(a difference of {difference:.3f} ± {half:.3f})" in prose
    whole = {
        v: fmean(fmean(x for x in found["steps"]["entropy"] if x is not None) for found in g)
        for v, g in left_out.items()
    }
    assert f"{whole['no-clip-higher']:.3f} against {whole['dapo']:.3f} over all steps" in prose
