"""The metrics of a step by hand: rates within [0, 1], weighted by tokens or samples, no means of means (entry 41)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.config import Config, build_config, nested
from dapo.observe.metrics import METRICS, describe
from dapo.orchestrator.rollout_batch import RolloutBatch, RolloutStats
from dapo.orchestrator.step_metrics import mismatch_metrics, overlap_metrics, statistic, step_metrics, step_warnings
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.spans import Span, covered

STATS = RolloutStats(
    drawn=4, rounds=2, samples=8, tokens=100, all_right=1, mixed=1, all_wrong=2, flat=0, too_few_scored=0, kept=1,
    surplus=0, carried=0, stale=0, cancelled=0, wasted_tokens=0, scores=8, failed_scores=1, keep_rate=0.25,
    staleness_mean=0.5, staleness_max=1, reward_wait_s=0.25, window_tokens=90,
)  # fmt: skip
TIMES = {"rollout": 2.0, "prepare": 0.5, "update": 1.0, "sync": 0.5}


def make_config(**changes: Any) -> Config:
    tree = {"model.path": "m", "rollout.max_response_length": 100, "algorithm.overlong_buffer.len": 20}
    return build_config(nested(tree | {key.replace("__", "."): value for key, value in changes.items()}))


def make_group(draw: int, samples: Sequence[tuple[int, bool | None]], **reward: Any) -> Group:
    """``samples``: for each its length in tokens and whether it is right; None: the score failed."""
    made = []
    for i, (length, correct) in enumerate(samples):
        verdict = (
            Reward(None, 0.0, error="time-out")
            if correct is None
            else Reward(correct, 1.0 if correct else -1.0, **reward)
        )
        made.append(
            Sample(
                request_id=draw,
                index=i,
                token_ids=np.zeros(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                versions=np.zeros(length, np.int32),
                finish_reason="length" if length == 100 else "stop",
                reward=verdict,
                shaped_reward=math.nan if correct is None else verdict.value,
                advantage=0.0 if correct is None else verdict.value,
                in_loss=correct is not None,
            )
        )
    return Group(draw, Prompt(draw, "", (1,)), tuple(made))


def make_report(loss_tokens: int, skipped: str | None = None, **fields: Any) -> UpdateReport:
    values = {"loss": 1.0, "grad_norm": 2.0, "statistics": {}, "mismatch": Mismatch()} | fields
    return UpdateReport(
        learning_rate=0.1, skipped=skipped, tokens=2 * loss_tokens, response_tokens=loss_tokens,
        loss_tokens=loss_tokens, micro_batches=1,
        seconds_forward=0.0, seconds_backward=0.0, seconds_optimizer=0.0, **values,
    )  # fmt: skip


def metrics(
    groups: Sequence[Group] = (),
    rejected: Sequence[tuple[Group, str]] = (),
    reports: Sequence[UpdateReport] = (),
    *,
    trained: Sequence[Group] | None = None,
    stats: RolloutStats = STATS,
    first_draw: int = 0,
    config: Config | None = None,
    step: int = 0,
) -> dict[str, float]:
    fill = RolloutBatch(step, first_draw, tuple(groups), tuple(rejected), stats)
    mismatch = sum((r.mismatch for r in reports), Mismatch())
    groups = groups if trained is None else trained
    found = step_metrics(fill, groups, reports, mismatch, TIMES, config or make_config())
    assert all(describe(name) for name in found)
    return found


def test_lengths_and_rewards_are_of_all_samples_of_the_step() -> None:
    kept = make_group(0, [(10, True), (30, False)])
    wrong = make_group(1, [(100, False), (20, False), (40, None)])
    found = metrics([kept], [(wrong, "all_wrong")])
    assert found["response_length/mean"] == 40 and found["response_length/max"] == 100
    assert found["response_length/truncated"] == pytest.approx(1 / 5)
    assert found["response_length/kept_mean"] == 20
    assert found["reward/mean"] == pytest.approx(-0.5)  # of the four that have a score
    assert found["reward/std"] == pytest.approx(math.sqrt(0.75))
    assert found["reward/errors"] == pytest.approx(1 / 8)  # of all scores made, cancelled draws included
    assert found["accuracy"] == 0.25
    assert found["advantage/mean_abs"] == 1.0


def test_a_carried_group_counts_in_the_step_that_sampled_it() -> None:
    """Its samples were in the step before already; what is trained on holds it."""
    old = make_group(3, [(10, True), (30, False)])
    new = make_group(5, [(50, False), (50, False)])
    found = metrics([old], [(new, "all_wrong")], first_draw=4)
    assert found["response_length/mean"] == 50 and found["accuracy"] == 0
    assert found["response_length/kept_mean"] == 20
    found = metrics([old], first_draw=4)
    assert found["accuracy"] is None and found["response_length/kept_mean"] == 20


def test_advantages_are_weighted_by_loss_tokens() -> None:
    """(1 x 10 + 3 x 30) / 40; the sample that is not in the loss does not count."""
    group = make_group(0, [(10, True), (30, False), (1000, True)])
    samples = [replace(s, advantage=a) for s, a in zip(group.samples, (1.0, -3.0, 50.0), strict=True)]
    samples[2] = replace(samples[2], in_loss=False)
    assert metrics([replace(group, samples=tuple(samples))])["advantage/mean_abs"] == 2.5


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.5),
        ({"algorithm__overlong_buffer__len": 0}, 0.0),
        ({"algorithm__overlong_buffer__penalty_factor": 0.0}, 0.0),
        ({"algorithm__overlong_buffer__enable": False}, 0.0),
        ({"algorithm__overlong_buffer__enable": False, "algorithm__overlong_hard_punishment": True}, 0.25),
    ],
)
def test_the_share_of_punished_samples_is_by_length_and_not_by_what_the_kl_took(
    changes: dict[str, Any], share: float
) -> None:
    """L_max 100, L_cache 20: 80 is free, 81 and 100 are not. A KL in the reward lowers all four."""
    group = make_group(0, [(10, True), (80, False), (81, True), (100, False)])
    group = replace(group, samples=tuple(replace(s, shaped_reward=s.shaped_reward - 0.5) for s in group.samples))
    assert metrics([group], config=make_config(**changes))["reward/overlong"] == share


def test_parts_of_the_reward_and_missing_answers() -> None:
    found = metrics([make_group(0, [(1, True), (1, False)], parts={"answer_found": 0.0, "my part / odd": 2.0})])
    assert found["reward/no_answer"] == 1.0
    assert found["reward/part/my_part___odd"] == 2.0


def test_without_right_and_wrong_there_is_no_accuracy() -> None:
    group = make_group(0, [(1, True), (1, False)])
    samples = tuple(replace(s, reward=Reward(None, 0.3)) for s in group.samples)
    assert metrics([replace(group, samples=samples)])["accuracy"] is None


def test_groups_are_counted_and_shares_are_of_the_judged_ones() -> None:
    found = metrics()
    assert found["groups/share_all_right"] == 0.25 and found["groups/share_all_wrong"] == 0.5
    assert (found["groups/drawn"], found["groups/kept"], found["groups/mixed"]) == (4, 1, 1)
    assert (found["staleness/mean"], found["staleness/max"], found["groups/keep_rate"]) == (0.5, 1, 0.25)
    nothing = replace(STATS, all_right=0, mixed=0, all_wrong=0, too_few_scored=4)
    assert metrics(stats=nothing)["groups/share_all_right"] is None


def test_every_count_of_the_fill_is_under_its_own_name() -> None:
    """No two are equal, so that none can stand for another; shares are of the 3 + 23 + 7 + 5 judged groups."""
    stats = RolloutStats(
        drawn=47, rounds=2, samples=160, tokens=1000, all_right=3, mixed=23, all_wrong=7, flat=5, too_few_scored=8,
        kept=16, surplus=11, carried=13, stale=17, cancelled=1, wasted_tokens=190, scores=150, failed_scores=30,
        keep_rate=0.625, staleness_mean=0.75, staleness_max=4, reward_wait_s=0.25, window_tokens=700,
    )  # fmt: skip
    kept, old = make_group(9, [(10, True), (30, False)]), make_group(2, [(5, True), (5, False)])
    late = make_group(10, [(7, True), (8, False), (9, False)])
    found = metrics([old, kept], [(late, "surplus")], stats=stats, first_draw=8)
    assert {name: value for name, value in found.items() if name.startswith(("groups/", "staleness/"))} == {
        "groups/drawn": 47, "groups/rounds": 2, "groups/all_right": 3, "groups/mixed": 23, "groups/all_wrong": 7,
        "groups/flat": 5, "groups/unscored": 8, "groups/kept": 16, "groups/surplus": 11, "groups/carried": 13,
        "groups/stale": 17, "groups/cancelled": 1, "groups/keep_rate": 0.625, "groups/draws_per_kept": 47 / 16,
        "groups/share_all_right": 3 / 38, "groups/share_all_wrong": 7 / 38,
        "staleness/mean": 0.75, "staleness/max": 4,
    }  # fmt: skip
    assert (found["tokens/generated"], found["tokens/wasted"], found["tokens/filtered"]) == (1000, 190, 0)
    assert found["reward/errors"] == 0.2
    assert found["tokens_per_second/rollout"] == 700 / 1.75 and found["tokens_per_second/total"] == 250
    assert found["samples_per_second"] == 1.0  # the four trained on, in 4 s; not the surplus ones


def test_statistics_are_sums_over_sums() -> None:
    """One update of 1 token with entropy 4, one of 3 tokens with entropy 0: 1, and not the mean of means 2."""
    reports = [
        make_report(1, statistics={"entropy": (4.0, 1.0), "clip_high": (1.0, 1.0)}),
        make_report(3, statistics={"entropy": (0.0, 3.0), "clip_high": (0.0, 3.0)}),
    ]
    found = metrics(reports=reports)
    assert found["entropy"] == 1.0 and found["clip/high"] == 0.25
    assert statistic(reports, "entropy") == 1.0 and math.isnan(statistic(reports, "nothing"))
    assert found["clip/high_probability"] is None  # nothing was clipped from above: no number, and not 0


def test_skipped_updates_are_counted_and_their_numbers_left_out() -> None:
    reports = [make_report(5), make_report(0, "not finite: loss nan", loss=math.nan, grad_norm=math.nan)]
    found = metrics(reports=reports)
    assert (found["updates"], found["updates/skipped"], found["tokens/loss"]) == (1, 1, 5)
    assert (found["loss"], found["grad_norm"], found["grad_norm/max"]) == (1.0, 2.0, 2.0)
    assert "loss" not in metrics(reports=reports[1:])


def test_the_largest_gradient_norm_is_that_of_all_updates_and_the_loss_their_mean() -> None:
    reports = [make_report(5, loss=n / 2, grad_norm=n) for n in (2.0, 9.0, 4.0)]
    found = metrics(reports=reports)
    assert (found["grad_norm"], found["grad_norm/max"], found["loss"]) == (5.0, 9.0, 2.5)


def test_lengths_of_what_is_trained_on_are_of_all_its_samples_scored_or_not() -> None:
    assert metrics([make_group(0, [(10, True), (30, False), (50, None)])])["response_length/kept_mean"] == 30


def test_the_commonest_error_of_a_reward_is_the_one_that_is_quoted() -> None:
    errors = ["time-out", "no JSON", "no JSON"]
    group = make_group(0, [(1, None)] * 3)
    samples = (replace(s, reward=Reward(None, 0.0, error=e)) for s, e in zip(group.samples, errors, strict=True))
    fill = RolloutBatch(0, 0, (replace(group, samples=tuple(samples)),), (), STATS)
    assert list(step_warnings(fill, ())) == ["1 of 8 scores failed, such as: no JSON"]


def test_mismatch_is_of_all_tokens_compared() -> None:
    reports = [
        make_report(1, mismatch=Mismatch(1, 0.4, 0.4, 0.1, 1)),
        make_report(3, mismatch=Mismatch(3, 0.0, 0.0, 0.1)),
    ]
    found = metrics(reports=reports)
    assert found["mismatch/mean"] == pytest.approx(0.1)
    assert found["mismatch/max"] == 0.4 and found["mismatch/k3"] == pytest.approx(0.05)
    assert found["mismatch/tail"] == 0.25
    assert mismatch_metrics(Mismatch()) == {}


def test_speeds_are_tokens_over_seconds() -> None:
    found = metrics([make_group(0, [(1, True), (1, False)])], reports=[make_report(30), make_report(20)])
    assert found["time/step"] == 4.0 and found["time/reward_wait"] == 0.25
    assert found["tokens_per_second/rollout"] == pytest.approx(90 / 1.75)  # the wait for rewards is not its
    assert found["tokens_per_second/update"] == 100  # prompts and responses: 2 x 50
    assert found["tokens_per_second/total"] == 25
    assert found["samples_per_second"] == 0.5


def test_the_phases_add_up_to_the_wall_time() -> None:
    """2 + 0.5 + 1 + 0.5, an evaluation of 3, 0.125 of writing and 0.25 of other things; of the update 0.75 is known."""
    report = replace(make_report(5), seconds_forward=0.25, seconds_backward=0.375, seconds_optimizer=0.125)
    fill = RolloutBatch(0, 0, (), (), STATS)
    found = step_metrics(
        fill, (), [report], Mismatch(), TIMES | {"evaluation": 3.0, "writing": 0.125, "rest": 0.25}, make_config()
    )
    assert found["time/wall"] == 7.375 and found["time/step"] == 4.25 and found["time/update"] == 1.0
    names = ["rollout", "reward_wait", "prepare", "forward", "backward", "optimizer", "sync", "evaluation", "rest"]
    assert [found[f"time/{name}"] for name in names] == [1.75, 0.25, 0.5, 0.25, 0.375, 0.125, 0.5, 3.0, 0.625]
    table = [name.removeprefix("time/") for name in METRICS if name.startswith("time/")]
    assert table[: len(names) + 1] == ["wall", *names]  # as the meaning of time/wall says


def test_a_wait_for_rewards_is_never_longer_than_the_rollout_it_is_part_of() -> None:
    """It began in a rollout that was interrupted, and 3 s of it are in that one's laps."""
    fill = RolloutBatch(0, 0, (), (), replace(STATS, reward_wait_s=5.0))
    found = step_metrics(fill, (), [], Mismatch(), TIMES, make_config())
    assert (found["time/rollout"], found["time/reward_wait"], found["time/wall"]) == (0.0, 2.0, 4.0)


def test_what_dynamic_sampling_costs() -> None:
    kept, wrong = make_group(0, [(10, True), (30, False)]), make_group(1, [(100, False), (20, False)])
    surplus = make_group(2, [(7, True), (8, False)])
    report = replace(make_report(20), computed_tokens=33)
    found = metrics([kept], [(wrong, "all_wrong"), (surplus, "surplus")], [report])
    assert found["tokens/filtered"] == 120 and found["groups/draws_per_kept"] == 4
    assert (found["tokens/trained"], found["tokens/computed"]) == (40, 33)
    assert "groups/draws_per_kept" not in metrics(stats=replace(STATS, kept=0))


def test_a_step_of_nothing_has_numbers_all_the_same() -> None:
    found = metrics()
    assert found["updates"] == 0 and "loss" not in found and found["reward/mean"] is None
    assert all(math.isfinite(value) for value in found.values() if value is not None)


def test_what_the_paper_watches_is_in_every_step() -> None:
    """Section 4.3 and figures, as listed in the notes on the algorithm: present, if only as null."""
    watched = """response_length/mean response_length/max response_length/truncated reward/mean accuracy entropy
        probability/mean clip/low clip/high clip/high_probability groups/share_all_right groups/share_all_wrong
        grad_norm groups/drawn groups/kept staleness/mean mismatch/mean mismatch/max mismatch/k3 mismatch/tail"""
    assert set(watched.split()) <= set(metrics())


def test_with_staleness_ages_and_the_fate_of_draws_are_told_and_without_it_nothing_of_them() -> None:
    totals = {"produced": 9, "trained": 3, "filtered": 2, "stale": 1, "surplus": 0, "cancelled": 0, "carried": 1}
    stats = replace(STATS, ages=(2, 1), unfinished=2, continued=5, restarted=4, totals=totals | {"unfinished": 2})
    found = metrics(stats=stats, config=make_config(rollout__max_staleness=2), step=9)
    ages = [found[f"staleness/groups/{age}"] for age in range(3)]
    assert ages == [2, 1, 0] and "staleness/groups/3" not in found
    draws = {name: count for name, count in found.items() if name.startswith("draws/")}
    assert draws.pop("draws/produced") == sum(draws.values()) == 9
    assert (found["groups/unfinished"], found["samples/continued"], found["samples/restarted"]) == (2, 5, 4)
    before = metrics(stats=stats)
    assert found.keys() - before.keys() == {
        *("groups/unfinished", "samples/continued", "samples/restarted"),
        *(name for name in found if name.startswith(("staleness/groups/", "draws/"))),
    }


@pytest.mark.parametrize(("step", "wanted"), [(0, 2), (1, 2), (5, 6), (64, 65), (900, 65)])
def test_no_age_is_told_that_cannot_occur(step: int, wanted: int) -> None:
    found = metrics(stats=replace(STATS, ages=(2, 1)), config=make_config(rollout__max_staleness=64), step=step)
    assert sum(name.startswith("staleness/groups/") for name in found) == wanted


EARLIER: list[Span] = [("rollout", 0, 10), ("prepare", 10, 11), ("update", 11, 15), ("sync", 15, 16)]


@pytest.mark.parametrize(
    ("sampling", "extra", "wanted"),
    [  # the batch before at 10, work of the learner until 17, this batch at 20
        ([(10, 20)], [], (10, 7, 3, 0, 0)),
        ([(5, 14), (12, 13), (18, 30)], [], (10, 4, 3, 4, 2)),  # spans that cross the borders, and one inside another
        ([(17, 20)], [], (10, 0, 3, 7, 1)),
        ([], [], (10, 0, 3, 10, 4)),
        ([(10, 20)], [("evaluation", 16, 17)], (9, 6, 3, 0, 0)),  # on a copy, beside the sampling: left out
        ([(10, 16), (17, 20)], [("evaluation", 16, 17)], (9, 6, 3, 0, 0)),  # sampling has paused for it
    ],
)
def test_overlap_is_of_the_time_between_two_batches(
    sampling: Sequence[tuple[float, float]], extra: list[Span], wanted: tuple[float, ...]
) -> None:
    spans: list[Span] = [("writing", 16, 17), ("rollout", 17, 20), ("update", 20, 25)]
    batch = RolloutBatch(1, 0, (), (), STATS, tuple(("sampling", begin, end) for begin, end in sampling))
    found = overlap_metrics(batch, spans, [*EARLIER, *extra], parked=False, apart=True)
    assert found.pop("overlap/won") == wanted[1] / (wanted[0] + wanted[1])
    assert tuple(found.values()) == wanted[:4] and all(map(describe, [*found, "overlap/won"]))
    turns = overlap_metrics(batch, spans, [*EARLIER, *extra], parked=True, apart=False)
    assert "overlap/won" not in turns and turns["idle/engine"] == wanted[4]  # parked from 10 to 16


def test_the_first_step_of_a_process_has_overlapped_nothing() -> None:
    batch = RolloutBatch(0, 0, (), (), STATS, (("sampling", 1, 3),))
    found = overlap_metrics(
        batch, [("rollout", -90, -80), ("rollout", 1, 4), ("update", 4, 9)], [], parked=False, apart=True
    )
    wanted = {"overlap/wall": 3, "overlap/seconds": 0, "idle/learner": 3, "idle/engine": 1, "overlap/won": 0}
    assert found == wanted
    assert overlap_metrics(batch, [("update", 4, 9)], [], parked=False, apart=True) == {}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8), st.integers(0, 30), st.integers(0, 30))
def test_covered_seconds_are_those_of_a_count_by_hand(pairs: list[tuple[int, int]], begin: int, end: int) -> None:
    spans = [("any", start, start + length) for start, length in pairs]
    inside = sum(any(b <= second < e for _, b, e in spans) for second in range(begin, end))
    assert covered(spans, begin, end) == inside


def test_the_rate_of_sampling_ahead_is_over_the_time_of_sampling() -> None:
    """The learner waited 2 s for a batch (1.75 without the wait for rewards) that took 10 s to sample."""
    batch = RolloutBatch(0, 0, (), (), STATS, (("sampling", 0, 6), ("sampling", 5, 10), ("scoring", 0, 50)))
    found = step_metrics(batch, (), (), Mismatch(), TIMES, make_config())
    assert found["tokens_per_second/rollout"] == 9 and metrics()["tokens_per_second/rollout"] == 90 / 1.75
