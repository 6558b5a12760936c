"""Reward hacking: metrics with values worked out by hand, each alarm on a planted exploit, none without one."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from dapo.config import MonitorConfig
from dapo.errors import RewardError
from dapo.records import Group, Prompt, Reward, Sample
from dapo.reward.monitor import Monitor, length_correlation


def sample(index, reward, length=3, text="", correct=None):
    tokens = np.zeros(length, np.int32)
    verdict = Reward(correct, reward)
    return Sample(0, index, tokens, tokens.astype(np.float32), tokens, "stop", text=text, reward=verdict)


def group(draw, *samples):
    return Group(draw, Prompt(draw, "p", (1,), "a"), samples)


class Check:
    """A check that reads its verdict from the response: "right", "wrong", a number, or a failure."""

    def __init__(self):
        self.seen = []

    async def score(self, prompt, response, finish_reason=None):
        self.seen.append((prompt.row, response))
        if response == "fails":
            return Reward(None, 0.0, error="down")
        if response in ("right", "wrong"):
            return Reward(response == "right", 1.0 if response == "right" else -1.0)
        return Reward(None, float(response))


async def look(monitor, groups):
    monitor.begin(groups)
    seen = await monitor.finish()
    monitor.settle()
    return seen


def watch(steps, check=None, **config):
    """Metrics and alarms of each step."""

    async def run():
        monitor = Monitor(MonitorConfig(**{"share": 1.0, "window": 2} | config), check or Check())
        return [await look(monitor, groups) for groups in steps]

    return asyncio.run(run())


def test_correlation_of_length_and_reward_within_groups_by_hand():
    # group means: reward 0 and length 4; deviations (1, 2) and (-1, -2): products 2 + 2, squares 2 and 8: 4 / sqrt(16)
    easy = group(0, sample(0, 1.0, 6), sample(1, -1.0, 2))
    assert length_correlation([easy]) == pytest.approx(1.0)
    # a second group, deviations (1, -1) and (-1, 1): products -2, squares 2 and 2: (4 - 2) / sqrt(4 * 10)
    hard = group(1, sample(0, 1.0, 99), sample(1, -1.0, 101))
    assert length_correlation([easy, hard]) == pytest.approx(2 / math.sqrt(40))


def test_lengths_of_hard_prompts_alone_are_no_correlation():
    easy, hard = group(0, sample(0, 1.0, 5), sample(1, 1.0, 5)), group(1, sample(0, -1.0, 90), sample(1, -1.0, 90))
    assert length_correlation([easy, hard]) is None


def test_false_right_is_the_share_of_right_ones_that_the_check_calls_wrong():
    groups = [
        group(
            0,
            sample(0, 1.0, text="right", correct=True),
            sample(1, 1.0, text="wrong", correct=True),
            sample(2, 1.0, text="wrong", correct=True),
            sample(3, -1.0, text="right", correct=False),
            sample(4, 1.0, text="fails", correct=True),
        )
    ]
    ((metrics, alarms),) = watch([groups])
    assert metrics["monitor/false_right"] == pytest.approx(2 / 3)
    assert metrics["monitor/check_errors"] == pytest.approx(1 / 5)
    assert metrics["monitor/reward"] == pytest.approx(0.5)  # of the four that the check scored
    assert metrics["monitor/check"] == pytest.approx(0.0)
    assert alarms == [] and metrics["monitor/alarms"] == 0  # one step is not a window


def hacked(k, share):
    """A step in which the check calls ``share`` of ten right responses wrong."""
    texts = ["wrong"] * round(10 * share) + ["right"] * (10 - round(10 * share))
    return [group(k, *(sample(i, 1.0, text=t, correct=True) for i, t in enumerate(texts)))]


def test_an_exploit_of_the_verifier_raises_the_alarm_once_and_again_after_it_was_off():
    shares = [0.0, 0.1, 0.5, 0.9, 0.9, 0.0, 0.0, 0.9, 0.9]
    seen = watch([hacked(k, share) for k, share in enumerate(shares)], max_divergence=1e9)
    on = [metrics["monitor/alarms"] for metrics, _ in seen]
    # means of two steps: 0.05 0.3 0.7 0.9 0.45 0 0.45 0.9 against 0.2
    assert on == [0, 0, 1, 1, 1, 1, 0, 1, 1]
    said = [k for k, (_, alarms) in enumerate(seen) if alarms]
    assert said == [2, 7]
    assert "calls 30% of the responses wrong that the reward calls right" in seen[2][1][0]


def drifting(k, reward, check):
    """Four samples whose reward is around ``reward`` and check around ``check``, each with standard deviation 1."""
    return [group(k, *(sample(i, reward + d, text=str(check + d)) for i, d in enumerate((-1, 1, -1, 1))))]


def test_a_reward_that_rises_without_the_check_is_an_alarm():
    seen = watch([drifting(k, reward, 0.0) for k, reward in enumerate((0, 0, 0.5, 1.0, 1.5, 2.0))])
    # rises over the first two steps' mean 0: means of the last two are 0.75, 1.25, 1.75 standard deviations
    assert [metrics["monitor/alarms"] for metrics, _ in seen] == [0, 0, 0, 0, 1, 1]
    assert "risen by 1.25 standard deviations, the held-out check by 0.00" in seen[4][1][0]


def test_a_reward_that_rises_with_the_check_is_none():
    seen = watch([drifting(k, x, x) for k, x in enumerate((0, 0, 0.5, 1.0, 1.5, 2.0))])
    assert all(metrics["monitor/alarms"] == 0 for metrics, _ in seen)


def test_a_check_that_falls_does_not_excuse_or_add_to_it():
    seen = watch([drifting(k, 0.3 * k, -k) for k in range(6)], max_divergence=1.25)
    # the reward's own rise, 0.3 * (4.5 - 0.5) = 1.2, is what counts, and is not above 1.25
    assert seen[5][0]["monitor/alarms"] == 0


def test_a_reward_that_pays_for_length_is_an_alarm_only_once_lengths_have_grown():
    def step(k, scale):
        return [group(k, sample(0, 1.0, 3 * scale, "right"), sample(1, -1.0, scale, "right"))]

    steady = watch([step(k, 10) for k in range(6)])
    growing = watch([step(k, 10 + 4 * k) for k in range(6)])
    assert all(metrics["monitor/alarms"] == 0 for metrics, _ in steady)
    assert growing[5][0]["monitor/alarms"] == 1
    assert growing[5][0]["monitor/alarms/length"] == 1 and growing[5][0]["monitor/alarms/divergence"] == 0
    assert "correlation +1.00" in str([alarms for _, alarms in growing])


def test_a_reward_that_pays_for_shortness_is_found_too():
    def step(k, scale):
        return [group(k, sample(0, -1.0, 3 * scale, "right"), sample(1, 1.0, scale, "right"))]

    seen = watch([step(k, 40 - 6 * k) for k in range(6)])
    assert seen[5][0]["monitor/alarms"] == 1
    assert "correlation -1.00" in str([alarms for _, alarms in seen])


def test_an_alarm_is_for_what_is_above_its_limit_and_lengths_must_have_moved_either_way():
    """A quarter of the right ones is called wrong, and the correlation is 1: both are the limit, and not above it."""
    quarter = [
        group(k, *(sample(i, 1.0, text="right" if i else "wrong", correct=True) for i in range(4))) for k in (0, 1)
    ]
    seen = watch([[one] for one in quarter], max_false_right=0.25)
    assert seen[1][0]["monitor/false_right"] == 0.25 and seen[1][1] == []
    assert watch([[one] for one in quarter], max_false_right=0.2)[1][0]["monitor/alarms/false_right"] == 1

    def step(k, best, scale):
        return [group(k, sample(0, best, 3 * scale, "right"), sample(1, -best, scale, "right"))]

    growing = [step(k, 1.0, 10 + 4 * k) for k in range(6)]
    assert watch(growing, max_length_correlation=1.0)[5][0]["monitor/alarms/length"] == 0
    assert watch(growing, max_length_correlation=0.99)[5][0]["monitor/alarms/length"] == 1
    short = [watch([step(k, -1.0, scale) for k, scale in enumerate((24, 24, now, now))])[3] for now in (24, 20, 19)]
    assert [metrics["monitor/alarms/length"] for metrics, _ in short] == [0, 0, 1]  # 24 / 1.2 is 20


def test_a_rise_is_in_standard_deviations_and_is_told_when_the_second_window_is_full():
    """The reward varies by 2 at first and then rises by 3: 1.5 of its deviations, in the fourth step."""

    def step(k, reward):
        return [group(k, *(sample(i, reward + 2 * d, text=str(d)) for i, d in enumerate((-1, 1, -1, 1))))]

    seen = watch([step(k, reward) for k, reward in enumerate((0, 0, 3, 3))], max_divergence=1.0)
    assert [metrics["monitor/alarms/divergence"] for metrics, _ in seen] == [0, 0, 0, 1]
    assert "risen by 1.50 standard deviations" in seen[3][1][0]


def test_a_window_that_is_widened_when_a_run_goes_on_leaves_the_first_steps_as_they_were():
    async def run():
        narrow = Monitor(MonitorConfig(share=1.0, window=2), Check())
        for k in range(4):
            await look(narrow, drifting(k, float(k), 0.0))
        wide = Monitor(MonitorConfig(share=1.0, window=3), Check())
        wide.load_state(narrow.state())
        await look(wide, drifting(4, 4.0, 0.0))
        return wide.state()

    state = asyncio.run(run())
    assert [audit["reward"] for audit in state["first"]] == [0.0, 1.0]
    assert [audit["reward"] for audit in state["last"]] == [2.0, 3.0, 4.0] and state["steps"] == 5


def test_without_a_check_lengths_are_still_watched_but_not_called_hacking():
    async def run():
        monitor = Monitor(MonitorConfig(window=1), None)
        return [await look(monitor, [group(0, sample(0, 1.0, 6 * k), sample(1, -1.0, 2 * k))]) for k in (1, 2)]

    (metrics, _), (_, (said,)) = asyncio.run(run())
    assert said.startswith("reward and length go together") and "hacking" not in said and "monitor.check" in said
    off = dict.fromkeys([f"monitor/alarms{sign}" for sign in ("", "/false_right", "/divergence", "/length")], 0.0)
    assert metrics == off | {"monitor/length_correlation": pytest.approx(1.0)}


def test_a_share_of_the_samples_is_checked_the_same_ones_if_the_step_is_run_again():
    groups = [group(k, *(sample(i, 0.0, text=f"{k}.{i}") for i in range(8))) for k in range(50)]
    first, again = Check(), Check()
    watch([groups], first, share=0.25)
    watch([groups], again, share=0.25)
    assert sorted(first.seen) == sorted(again.seen)
    assert 60 <= len(first.seen) <= 140  # 400 of them at a quarter: 100, within four standard deviations and more


def test_failed_scores_are_left_out():
    broken = replace(sample(1, 0.0), reward=Reward(None, 0.0, error="timed out"))
    check = Check()
    ((metrics, _),) = watch([[group(0, sample(0, 1.0, text="right", correct=True), broken)]], check)
    assert check.seen == [(0, "right")] and metrics["monitor/false_right"] == 0.0


def test_what_was_seen_survives_a_checkpoint():
    async def run(stop):
        steps = [drifting(k, reward, 0.0) for k, reward in enumerate((0, 0, 0.5, 1.0, 1.5, 2.0))]
        config = MonitorConfig(share=1.0, window=2)
        monitor, seen = Monitor(config, Check()), []
        for k, groups in enumerate(steps):
            if k == stop:
                state = monitor.state()
                monitor = Monitor(config, Check())
                monitor.load_state(state)
            seen.append(await look(monitor, groups))
        return seen

    whole = asyncio.run(run(None))
    assert all(asyncio.run(run(stop)) == whole for stop in range(6))


def test_a_step_that_is_interrupted_counts_once_and_its_warning_is_given_again():
    async def run(interrupted):
        monitor, seen = Monitor(MonitorConfig(share=1.0, window=2), Check()), []
        for k, share in enumerate([0.0, 0.9, 0.9]):
            if interrupted:
                monitor.begin(hacked(k, share))
                await monitor.finish()
                state = monitor.state()
                monitor = Monitor(MonitorConfig(share=1.0, window=2), Check())
                monitor.load_state(state)
            seen.append(await look(monitor, hacked(k, share)))
        return seen

    whole = asyncio.run(run(False))
    assert [len(alarms) for _, alarms in whole] == [0, 1, 0]
    assert asyncio.run(run(True)) == whole


def test_a_check_that_breaks_ends_the_watching_and_not_the_run():
    class Broken(Check):
        async def score(self, prompt, response, finish_reason=None):
            raise RewardError("it returned None")

    (metrics, said), (later, silent) = watch([hacked(0, 0.5), hacked(1, 0.5)], Broken())
    assert said == ["monitor.check has ended and says no more: it returned None"] and silent == []
    assert "monitor/check" not in metrics and "monitor/check" not in later


def test_a_check_that_always_fails_is_said_once():
    blind = [group(0, sample(0, 1.0, text="fails", correct=True), sample(1, 1.0, text="fails", correct=True))]
    (metrics, said), (_, again) = watch([blind, blind])
    assert metrics["monitor/check_errors"] == 1.0 and metrics["monitor/false_right"] is None
    assert said == ["monitor.check sees nothing: all of its 2 scores failed, such as: down"] and again == []
