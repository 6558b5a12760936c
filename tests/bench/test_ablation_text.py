"""What docs/results.md says of the ablation is in the results of its cells."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import ablation

ROOT = Path(__file__).parents[2]
LADDER = ["naive", "overlong-filtering", "clip-higher", "soft-overlong", "token-level", "dynamic-sampling"]


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


# --- of the cells on the CPU --------------------------------------------------------------------------------------


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
