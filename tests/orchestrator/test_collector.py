"""Dynamic sampling end to end, with an engine and a scorer that finish in any order.

The number of an entry is that of shared/cases/failures.md.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.algorithm.shaping import shape_rewards
from dapo.config import build_config, nested
from dapo.config.reading import merged
from dapo.errors import DataError, RewardError, StarvedError, UserError
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.dynamic_sampling import DynamicSampling, starved_message
from dapo.orchestrator.encoded_state import EncodedState, lost, read_state
from dapo.orchestrator.rollout_batch import RolloutStats
from dapo.records import Group, Prompt, Reward, Sample
from dapo.rollout.engine import Engine, EngineError, SampleError
from dapo.rollout.seeds import sample_seed

N, G = 4, 3
MIXED, RIGHT, WRONG = (1, 0, 1), (1, 1, 1), (0, 0, 0)


@dataclass
class FakeSource:
    """Rows 0, 1, 2, ... for ever, or to an end. All prompts have the same text (entry 74)."""

    rows: int = 10**6
    position: int = 0
    end: int = 10**9
    heard: list = field(default_factory=list)

    def next(self):
        if self.position == self.end:
            return None
        self.position += 1
        row = (self.position - 1) % self.rows
        return Prompt(row, "2+2?", (5, 6), answer=str(row), meta={"row": row})

    def feedback(self, groups):
        self.heard += groups

    def state(self):
        return {"position": self.position}

    def load_state(self, state):
        self.position = state["position"]


@dataclass
class FakeEngine:
    """Finishes samples in random order after random pauses. The tokens of a sample are [request id, index in the group
    (told from its seed), 9]."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rows: int = 10**6
    run_seed: int = 0
    version: int = 0
    slow: tuple[int, ...] = ()
    """Requests that finish long after all others."""
    requests: list = field(default_factory=list)
    came_back: Counter = field(default_factory=Counter)
    open_streams: int = 0
    asleep: bool = False
    spoil: object = None
    """Called with (engine, sample) before a sample is handed out; returns samples to hand out."""

    async def generate(self, requests):
        self.requests += requests
        self.open_streams += 1
        try:
            order = [(r, i) for r in requests for i in range(len(r.seeds))]
            self.rng.shuffle(order)
            order.sort(key=lambda item: item[0].id in self.slow)
            for request, index in order:
                for _ in range(400 if request.id in self.slow else self.rng.randrange(4)):
                    await asyncio.sleep(0)
                sample = self._sample(request, index)
                for out in self.spoil(self, sample) if self.spoil else [sample]:
                    self.came_back[out.request_id, out.index] += 1
                    yield out
        finally:
            self.open_streams -= 1

    def _sample(self, request, index):
        seeds = [sample_seed(self.run_seed, request.id % self.rows, request.id, i) for i in range(G)]
        tokens = np.array([request.id, seeds.index(request.seeds[index]), 9], np.int32)
        return Sample(request.id, index, tokens, np.full(3, -0.1, np.float32), tokens * 0 + self.version, "stop")

    async def begin(self, version):
        self.version = version

    async def put(self, bucket):
        pass

    async def commit(self, fingerprint):
        pass

    async def sleep(self):
        self.asleep = True

    async def wake(self):
        self.asleep = False

    async def close(self):
        pass


@dataclass
class FakeScorer:
    """Scores sample ``i`` of a prompt by ``rule(row)[i]``: 1 right, 0 wrong, None failed, "open" without `correct`."""

    rule: object
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    running: int = 0

    async def score(self, prompt, response, finish_reason=None):
        self.running += 1
        try:
            for _ in range(self.rng.randrange(6)):
                await asyncio.sleep(0)
            outcome = self.rule(prompt.row)[int(response.split()[1])]
        finally:
            self.running -= 1
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            return Reward(None, float("nan"), error="time-out")
        if outcome == "open":
            return Reward(None, 0.5)
        return Reward(bool(outcome), 1.0 if outcome else -1.0)

    async def close(self):
        pass


def decode(tokens):
    return " ".join(map(str, tokens))


def make(rule, *, seed=0, changes=None, rows=10**6, **engine):
    """A collector on fakes; ``changes`` are dotted config keys."""
    tree = {
        "model": {"path": "none"},
        "rollout": {"prompts_per_step": N, "samples_per_prompt": G, "max_concurrent_samples": 12},
        "training": {"groups_per_update": 1},
    }
    tree = merged(tree, nested(changes or {}))
    rng = random.Random(seed)
    source, scorer = FakeSource(rows), FakeScorer(rule, random.Random(seed))
    return Collector(source, FakeEngine(rng, rows, tree.get("seed", 0), **engine), scorer, decode, build_config(tree))


def run(work):
    """Run to the end within a time limit, and see that nothing is left behind."""

    async def guarded():
        result = await asyncio.wait_for(work, 20)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    return asyncio.run(guarded())


async def taken(collector, step=0, version=None):
    count = collector._config.rollout.prompts_per_step
    return await collector.take(step, count, collector.engine.version if version is None else version)


async def one_round(collector, step=0, version=None):
    async with collector.running():
        return await taken(collector, step, version)


def fill(collector, step=0, version=None):
    try:
        return run(one_round(collector, step, version))
    finally:
        assert collector.engine.open_streams == 0 and collector._scorer.running == 0


def through_a_file(folder, state):
    EncodedState(state).write(folder)
    return read_state(folder)


def draws(groups):
    return [g.draw for g in groups]


def every_second(row):
    return MIXED if row % 2 else (RIGHT, WRONG)[row // 2 % 2]


# --- what is admitted ---------------------------------------------------------------------------------------------


def test_fake_is_an_engine():
    assert isinstance(FakeEngine(), Engine)


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 2**31), st.integers(0, 2**31), st.floats(0.15, 1), st.sampled_from([(0, 0), (0, 1), (1, 0)]))
def test_first_n_in_draw_order(task, timing, rate, mode):
    """Exactly N, the first N kept in draw order, whatever finishes first; every sample asked for comes once."""

    def rule(row):
        return MIXED if random.Random(task + row).random() < rate else random.Random(-task - row).choice([RIGHT, WRONG])

    good = [row for row in range(400) if rule(row) == MIXED]
    staleness, deterministic = mode
    changes = {
        "rollout.max_staleness": staleness,
        "runtime.deterministic": bool(deterministic),
        "algorithm.filter_groups.max_num_gen_batches": 50,
    }
    collector = make(rule, seed=timing, changes=changes, slow=(1, 5))
    result = fill(collector)
    assert draws(result.groups) == good[:N]
    engine, stats = collector.engine, result.stats
    drawn = stats.drawn + stats.carried + stats.unfinished
    assert [r.id for r in engine.requests] == list(range(drawn))
    assert set(engine.came_back.values()) == {1}
    finished = {g.draw for g in result.groups} | {g.draw for g, _ in result.rejected}
    assert len(finished) + stats.cancelled == stats.drawn and drawn == collector._source.position
    assert stats.all_right + stats.all_wrong + stats.mixed == len(finished)
    assert stats.tokens == 3 * stats.samples
    assert staleness or (stats.samples == sum(engine.came_back.values()) and drawn == stats.drawn)
    for group in result.groups:
        assert [s.index for s in group.samples] == list(range(G))
        assert all(s.request_id == group.draw and s.token_ids[0] == group.draw for s in group.samples)
        assert tuple(int(s.reward.correct) for s in group.samples) == MIXED
        assert group.samples[1].text == f"{group.draw} 1 9"


def test_short_responses_are_not_favoured():
    """Draws 0 and 1 finish last and are admitted all the same."""
    result = fill(make(lambda row: MIXED, slow=(0, 1)))
    assert draws(result.groups) == [0, 1, 2, 3]


def test_refill_instead_of_shrinking():
    """Entry 26."""
    result = fill(make(every_second))
    assert draws(result.groups) == [1, 3, 5, 7]
    assert result.stats.kept == N and result.stats.rounds > 1


def test_requests():
    changes = {"seed": 7, "rollout.temperature": 0.5, "rollout.max_response_length": 4096}
    collector = make(every_second, changes=changes, rows=3)
    fill(collector)
    for request in collector.engine.requests:
        assert request.prompt_ids == (5, 6)
        assert request.seeds == tuple(sample_seed(7, request.id % 3, request.id, i) for i in range(G))
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 4096)
        assert (request.sampling.top_p, request.sampling.top_k) == (1.0, 0)


def test_same_row_again_is_another_group():
    """Entries 20 and 74: two rows only, with the same text; groups do not mix and their seeds differ."""
    collector = make(lambda row: MIXED, rows=2)
    result = fill(collector)
    assert [(g.draw, g.prompt.row) for g in result.groups] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert len({seed for r in collector.engine.requests for seed in r.seeds}) == N * G


def test_shaped_reward_is_not_looked_at():
    """Entry 27: what leaves the collector is raw, and a group of wrong answers never gets through for its lengths."""
    collector = make(lambda row: MIXED if row >= N else WRONG, changes={"algorithm.overlong_buffer.enable": True})
    result = fill(collector)
    assert draws(result.groups) == [4, 5, 6, 7]
    assert all(np.isnan(s.shaped_reward) for g in result.groups for s in g.samples)
    group, status = result.rejected[0]
    shaped = shape_rewards(
        group, max_response_length=3, soft=True, buffer_len=2, penalty_factor=1, hard=False, filter_truncated=False
    )
    assert status == "all_wrong" and shaped.samples[0].shaped_reward == -2


def test_filtering_off():
    """N draws, whatever their verdict, less those without two scores."""
    rules = {0: RIGHT, 1: WRONG, 2: (None, None, 1), 3: MIXED}
    changes = {"algorithm.filter_groups.enable": False, "reward.max_error_rate": 0.5}
    result = fill(make(rules.__getitem__, changes=changes))
    assert draws(result.groups) == [0, 1, 3]
    assert [(g.draw, status) for g, status in result.rejected] == [(2, "too_few_scored")]
    assert result.stats.drawn == N


def test_by_score_without_correct():
    def rule(row):
        return ("open", 1, 0) if row % 2 else ("open",) * G

    result = fill(make(rule, changes={"algorithm.filter_groups.metric": "score"}))
    assert draws(result.groups) == [1, 3, 5, 7] and result.stats.flat >= 4


def test_accuracy_without_correct():
    with pytest.raises(RewardError, match=r"filter_groups\.metric=score"):
        fill(make(lambda row: ("open",) * G))
    result = fill(make(lambda row: ("open", 1, 0), changes={"algorithm.filter_groups.enable": False}))
    assert result.stats.kept == N


# --- surplus, staleness, budget -----------------------------------------------------------------------------------


def test_surplus_is_cancelled_or_counted_on_policy():
    """Entry 25: with max_staleness 0 no group is carried over, and none disappears without being counted."""
    for seed in range(10):
        collector = make(every_second, seed=seed, changes={"rollout.max_concurrent_samples": 200})
        stats = fill(collector).stats
        assert stats.mixed == N + stats.surplus and stats.carried == 0
        assert stats.all_right + stats.all_wrong + stats.mixed + stats.cancelled == stats.drawn
        assert collector.state()["carried"] == ()


def test_stops_early():
    """Draws that can no longer be admitted are cancelled: the fill does not wait for the slow ones."""

    def rule(row):
        return MIXED if row != 0 else WRONG

    collector = make(rule, changes={"rollout.max_concurrent_samples": 60}, slow=tuple(range(6, 60)))
    collector._position.rate.learn(1, 60)  # so low that far too many are drawn
    result = fill(collector)
    assert draws(result.groups) == [1, 2, 3, 4]
    assert result.stats.cancelled > 10 and result.stats.wasted_tokens >= 3 * 3 * result.stats.surplus
    assert result.stats.samples < result.stats.drawn * G
    # the estimate learns from draws 0 to 4 only: those that finish after them are the short ones
    assert result.stats.keep_rate == pytest.approx((0.7 * 1 + 4 + 1) / (0.7 * 60 + 5 + 1))


def test_surplus_is_carried_over():
    """Entry 25: batch 4; the surplus of one step comes first in the next, while it is fresh."""
    changes = {"rollout.max_staleness": 1, "rollout.max_concurrent_samples": 60}
    collector = make(every_second, changes=changes)
    collector._position.rate.learn(10, 60)
    first = fill(collector)
    assert first.stats.surplus == first.stats.cancelled == 0
    kept = [group for group in collector.state()["under_way"] if len(group.scored) == G]
    carried = [group.draw for group in kept if group.draw % 2]
    collector.engine.version = 1
    second = fill(collector, 1)
    numbers = draws(second.groups)
    assert draws(first.groups) + numbers == [1, 3, 5, 7, 9, 11, 13, 15]
    assert numbers[: len(carried)] == carried[:N]
    assert second.stats.staleness_max == 1
    old = sum(any(s.versions[0] == 0 for s in group.samples) for group in second.groups)
    assert old >= min(len(carried), N) and second.stats.staleness_mean == old / N
    assert second.stats.ages == ((N - old, old) if old < N else (0, N))


def test_carried_groups_over_the_limit_are_dropped_and_counted():
    changes = {"rollout.max_staleness": 1, "rollout.max_response_length": 5, "algorithm.overlong_buffer.len": 1}
    carried = [waiting_group(0, 5, 0), waiting_group(1, 6, 0), waiting_group(2, 9, 0)]
    collector = in_order(every_second, carried, version=0, changes=changes)
    assert collector.drop_unfit() == 2 and collector.drop_unfit() == 0
    assert [group.draw for group in collector.state()["carried"]] == [0]


def test_stale_groups_are_dropped_and_counted():
    changes = {"rollout.max_staleness": 1, "rollout.max_concurrent_samples": 60}
    collector = make(every_second, changes=changes)
    collector._position.rate.learn(10, 60)
    fill(collector)
    old = [g.draw for g in collector.state()["under_way"] if g.draw % 2 and len(g.samples)]
    collector.engine.version = 1
    second = fill(collector, 1, version=2)  # that of the trainer
    stale = [g.draw for g, status in second.rejected if status == "stale"]
    assert stale == old and second.stats.stale == len(old) > 1 and second.stats.kept == N
    assert all(s.versions[0] >= 1 for g in second.groups for s in g.samples)


def sample_of(number, index, length, version, reward=None):
    tokens = np.array([number, index, *(9,) * (length - 2)], np.int32)
    return Sample(number, index, tokens, np.full(length, -0.1, np.float32), tokens * 0 + version, "stop", reward=reward)


def waiting_group(number, length, version):
    """A good group of an earlier step, each of its three samples of so many tokens."""
    rewards = [Reward(bool(right), 2.0 * right - 1) for right in MIXED]
    samples = (sample_of(number, index, length, version, reward) for index, reward in enumerate(rewards))
    return Group(number, Prompt(number, "2+2?", (5, 6)), tuple(samples))


class InOrder(FakeEngine):
    """Samples in the order asked for, each of request ``r`` of r + 2 tokens; those of ``never`` do not come."""

    never = ()

    async def generate(self, requests):
        self.open_streams += 1
        asked = [(r.id, i) for r in requests for i in range(len(r.seeds))]
        try:
            for number, index in asked:
                if (number, index) not in self.never:
                    yield sample_of(number, index, number + 2, self.version)
            if set(asked) & set(self.never):
                await asyncio.Event().wait()
        finally:
            self.open_streams -= 1


class AtOnce(random.Random):
    def randrange(self, *_):
        return 0


def in_order(rule, carried, *, version, changes, never=()):
    """A collector with groups of earlier steps, numbered from 0, whose engine and scorer finish things in order."""
    collector = make(rule, changes=changes)
    collector.engine, collector._scorer = InOrder(version=version), FakeScorer(rule, AtOnce())
    collector.engine.never = never
    count = len(carried)
    position = {"draws": count, "source": {"position": count}, "counts": {"produced": count}}
    collector.load_state(collector.state() | position | {"carried": tuple(carried)})
    return collector


def test_counts_of_a_fill_with_carried_and_stale_groups():
    """By hand. Waiting: draws 0 and 2 of version 0, too old for version 2; draw 1 of version 1, of age 1. Four are
    drawn for the three that are missing, and with 4 of them wrong that does: 6 is admitted, and all is settled."""
    changes = {"rollout.max_staleness": 1, "rollout.ahead": 0}
    waiting = [waiting_group(0, 5, version=0), waiting_group(1, 7, version=1), waiting_group(2, 8, version=0)]
    collector = in_order(lambda row: WRONG if row == 4 else MIXED, waiting, version=2, changes=changes)
    result = fill(collector, 1)
    assert draws(result.groups) == [1, 3, 5, 6]
    assert [(g.draw, status) for g, status in result.rejected] == [(0, "stale"), (2, "stale"), (4, "all_wrong")]
    stats = result.stats
    assert (stats.drawn, stats.samples, stats.tokens) == (4, 12, 3 * (5 + 6 + 7 + 8))
    assert (stats.mixed, stats.all_wrong, stats.kept, stats.stale, stats.surplus) == (3, 1, 4, 2, 0)
    assert stats.wasted_tokens == 3 * 5 + 3 * 8
    assert stats.keep_rate == (3 + 1) / (4 + 1)
    assert (stats.staleness_mean, stats.staleness_max, stats.ages) == (0.25, 1, (3, 1))
    going_on = stats.carried + stats.unfinished
    assert stats.totals == {"produced": 7 + going_on, "trained": 4, "filtered": 1, "stale": 2, "surplus": 0} | {
        "cancelled": 0,
        "carried": stats.carried,
        "unfinished": stats.unfinished,
    }


@pytest.mark.parametrize("at_once", [16, 18])
def test_counts_of_a_fill_with_surplus_stale_and_cancelled_draws(at_once):
    """By hand. Waiting: draw 0, too old. Drawn: 1 to 4, of which 1 is wrong; then, for the one missing, as many as the
    engine has room for: 16 or 18 samples are 6 groups. 5 is kept, 6 one too many, of 7 one sample came (9 tokens)."""
    changes = {"rollout.max_concurrent_samples": at_once}
    never = {(7, 1), (7, 2), *((number, index) for number in (8, 9, 10) for index in range(G))}
    rule, waiting = (lambda row: WRONG if row == 1 else MIXED), [waiting_group(0, 5, version=0)]
    collector = in_order(rule, waiting, version=1, changes=changes, never=never)
    collector._position.rate.learn(1, 60)  # so low that more are drawn than the engine has room for
    result = fill(collector, 1)
    assert draws(result.groups) == [2, 3, 4, 5]
    assert [(g.draw, status) for g, status in result.rejected] == [(0, "stale"), (1, "all_wrong"), (6, "surplus")]
    assert result.stats == RolloutStats(
        drawn=10,
        rounds=2,
        samples=6 * G + 1,
        tokens=3 * (3 + 4 + 5 + 6 + 7 + 8) + 9,
        all_right=0,
        mixed=5,
        all_wrong=1,
        flat=0,
        too_few_scored=0,
        kept=4,
        surplus=1,
        carried=0,
        stale=1,
        cancelled=4,
        wasted_tokens=3 * 5 + 3 * 8 + 9,
        scores=6 * G + 1,
        failed_scores=0,
        keep_rate=(0.7 * 1 + 4 + 1) / (0.7 * 60 + 5 + 1),  # of draws 1 to 5
        staleness_mean=0.0,
        staleness_max=0,
        reward_wait_s=result.stats.reward_wait_s,
        window_tokens=result.stats.tokens,
        ages=(4,),
        totals={"produced": 11, "trained": 4, "filtered": 1, "stale": 1, "surplus": 1, "cancelled": 4}
        | {"carried": 0, "unfinished": 0},
    )


def test_bounded():
    """Entry 23: a reward that is always wrong ends the step, with the counts and with advice."""
    changes = {"algorithm.filter_groups.max_num_gen_batches": 3}
    for rule, counts, advice in [
        (lambda row: WRONG, "12 all wrong, 0 mixed, 0 all right", "easier prompts"),
        (lambda row: RIGHT, "0 all wrong, 0 mixed, 12 all right", "harder prompts"),
        (lambda row: MIXED if row < 2 else WRONG, "kept 2 of the 4 .* 10 all wrong, 2 mixed", "on_starved=train"),
    ]:
        collector = make(rule, changes=changes)
        with pytest.raises(StarvedError, match=counts) as caught:
            fill(collector, 6)
        assert advice in str(caught.value) and str(caught.value).startswith("step 7: ")
        assert collector._source.position == len(collector.engine.requests) == 3 * N


def test_starved_groups_wait_for_the_next_fill():
    """What was kept is still on-policy when the run goes on from its checkpoint."""
    collector = make(
        lambda row: MIXED if row in (2, 3) or row > 8 else WRONG,
        changes={"algorithm.filter_groups.max_num_gen_batches": 2},
    )
    with pytest.raises(StarvedError):
        fill(collector)
    assert draws(fill(collector).groups) == [2, 3, 9, 10]


def test_the_source_hears_once_of_the_groups_of_a_starved_round(tmp_path):
    changes = {"algorithm.filter_groups.max_num_gen_batches": 2, "runtime.deterministic": True}
    collector = make(lambda row: MIXED if row in (2, 3) or row > 8 else WRONG, changes=changes)
    with pytest.raises(StarvedError):
        fill(collector)
    assert draws(collector._source.heard) == list(range(2 * N))
    again = make(collector._scorer.rule, changes=changes)
    again.load_state(through_a_file(tmp_path, collector.state()))
    again.release(fill(again))
    assert draws(again._source.heard) == list(range(2 * N, again._source.position))


def test_starved_but_told_to_train():
    changes = {"algorithm.filter_groups.max_num_gen_batches": 2, "algorithm.filter_groups.on_starved": "train"}
    result = fill(make(lambda row: MIXED if row in (2, 6) else RIGHT, changes=changes))
    assert draws(result.groups) == [2, 6] and result.stats.drawn == 2 * N
    result = fill(make(lambda row: RIGHT, changes=changes))
    assert result.groups == () and result.stats.staleness_mean == 0


def test_keep_rate_sizes_the_refills():
    """Entry 104: at a steady keep-rate of one half, later steps draw about 2 N, in few rounds, and waste little."""
    collector = make(every_second, changes={"runtime.deterministic": True})
    results = [fill(collector, step) for step in range(8)]
    assert all(r.stats.kept == N and r.stats.rounds <= 3 for r in results)
    assert all(2 * N <= r.stats.drawn <= 3 * N for r in results)
    assert results[-1].stats.keep_rate == pytest.approx(0.5, abs=0.1)


def test_deterministic_in_all_numbers():
    """Under runtime.deterministic nothing depends on timing: neither the groups nor any count."""
    changes = {"runtime.deterministic": True}

    def trace(seed):
        collector = make(every_second, seed=seed, changes=changes, slow=(1, 2))
        for step in range(3):
            result = fill(collector, step)
            s = result.stats
            yield draws(result.groups), [(g.draw, status) for g, status in result.rejected]
            yield s.drawn, s.rounds, s.samples, s.tokens, s.surplus, s.cancelled, s.wasted_tokens, s.keep_rate
        yield json.dumps(collector.state())

    assert len({str(list(trace(seed))) for seed in range(8)}) == 1


# --- failed scores ------------------------------------------------------------------------------------------------


def test_failed_scores_are_left_out():
    """Entry 60: no wrong answers; a group with fewer than two scores is dropped."""
    rules = {0: (1, None, 0), 1: (None, 1, None), 2: (1, None, 1)}
    collector = make(lambda row: rules.get(row, MIXED), changes={"reward.max_error_rate": 0.5})
    result = fill(collector)
    assert draws(result.groups) == [0, 3, 4, 5]
    assert [s.scored for s in result.groups[0].samples] == [True, False, True]
    assert [(g.draw, status) for g, status in result.rejected][:2] == [(1, "too_few_scored"), (2, "all_right")]
    assert result.stats.failed_scores == 4 and result.stats.too_few_scored == 1


def test_failed_scores_with_a_value():
    changes = {"reward.on_error": "value", "reward.error_value": -0.25, "reward.max_error_rate": 0.5}
    result = fill(make(lambda row: (1, None, 1), changes=changes))
    reward = result.groups[0].samples[1].reward
    assert (reward.correct, reward.value, reward.parts) == (False, -0.25, {})
    assert result.stats.failed_scores == result.stats.scores // 3


def test_too_many_failed_scores():
    """Entry 91: the run stops with the cause, long before the budget is spent."""
    collector = make(lambda row: (None,) * G)
    with pytest.raises(RewardError, match=r"20 of 20 scores failed \(100%; .* allows 20%\): time-out"):
        fill(collector, 2)
    assert len(collector.engine.requests) < 5 * N
    few = make(lambda row: (None, 1, 0), changes={"rollout.prompts_per_step": 1, "training.groups_per_update": 1})
    with pytest.raises(RewardError, match="1 of 3 scores failed"):  # at the end, though there were few
        fill(few)
    assert fill(make(lambda row: (None, 1, 0) if row == 0 else MIXED)).stats.failed_scores == 1


# --- failures, cancellation, resume -------------------------------------------------------------------------------


def explode_at(number):
    def spoil(engine, sample):
        if sample.request_id == number:
            raise EngineError("the device fell off")
        return [sample]

    return spoil


def test_exceptions_come_through_at_once():
    """Entry 94: the exception itself, no task or stream left, and what had come is there for the next fill."""
    cause = OSError("socket closed")
    broken = RuntimeError("scorer died")
    broken.__cause__ = cause
    for rule, spoil, kind in [
        (every_second, explode_at(2), EngineError),
        (lambda row: (broken,) * G if row == 3 else every_second(row), None, RuntimeError),
    ]:
        collector = make(rule, spoil=spoil)
        with pytest.raises(kind) as caught:
            fill(collector)
        assert type(caught.value) is kind
        assert caught.value.__cause__ is (cause if kind is RuntimeError else None)
        assert collector.engine.came_back
        collector.engine.spoil, collector._scorer.rule = None, every_second
        assert draws(fill(collector).groups) == [1, 3, 5, 7]
        sampled = Counter(draw for draw, _ in collector.engine.came_back.elements())
        assert all(sampled[draw] == G for draw in (1, 3, 5, 7))  # what had come was not sampled again


def test_a_starved_step_tells_how_many_groups_were_too_old():
    config = build_config({"model": {"path": "none"}, "rollout": {"max_staleness": 1}})
    batch = fill(make(every_second))
    batch = replace(batch, stats=replace(batch.stats, all_wrong=4, mixed=5, all_right=0, stale=3))
    assert "4 all wrong, 5 mixed (3 of them too old: rollout.max_staleness=1), 0 all right" in starved_message(
        batch, config
    )


def test_engine_must_return_each_sample_once():
    def lose(engine, sample):
        return [] if (sample.request_id, sample.index) == (1, 1) else [sample]

    def repeat(engine, sample):
        return [sample, sample]

    def stranger(engine, sample):
        return [Sample(99, 0, sample.token_ids, sample.logprobs, sample.versions, "stop")]

    for spoil, message in [(lose, "1 of 12 samples"), (repeat, "came twice"), (stranger, "not asked for")]:
        with pytest.raises(EngineError, match=message):
            fill(make(every_second, spoil=spoil))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"token_ids": np.array([1, -1, 2])}, "token ids from -1 to 2"),
        (
            {"token_ids": np.array([1, 10**6, 2])},
            "token ids from 1 to 1000000, and the model knows those from 0 to 999",
        ),
        ({"token_ids": np.ones(3)}, "token_ids must be a NumPy array .* not float64"),
        ({"token_ids": [1, 2, 3]}, "token_ids must be a NumPy array .* not list"),
        ({"logprobs": np.full((3, 1), -0.1, np.float32)}, "logprobs must be a NumPy array of one dimension"),
        ({"logprobs": np.full(3, 0.5, np.float32)}, "log-probs must be finite and at most 0, not 0.5"),
        ({"logprobs": np.array([-1, -np.inf, -1], np.float32)}, "log-probs must be finite"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "log-probs must be finite"),
        ({"versions": np.array([1, 0, 0])}, "tokens of the versions 1 to 0"),
    ],
)
def test_what_is_no_sample_of_the_model_is_refused(columns, message):
    collector = make(every_second, spoil=lambda engine, sample: [replace(sample, **columns)])
    collector._tokens = decode, 1000
    with pytest.raises(SampleError, match=rf"rollout.engine FakeEngine: sample \d of request \d+: {message}"):
        fill(collector)


def test_columns_of_different_lengths_are_the_engines_fault():
    def cut(engine, sample):
        return [replace(sample, logprobs=sample.logprobs[:2])]

    with pytest.raises(SampleError, match=r"rollout.engine own.py:One: ValueError: sample \d of request \d+: .*length"):
        fill(make(every_second, changes={"rollout.engine": "own.py:One"}, spoil=cut))


def test_streams_are_closed_after_the_last_sample():
    """A stream that stays open when all has come is not waited for, and closed."""

    class Lingering(FakeEngine):
        def generate(self, requests):
            streams.append(self.linger(requests))  # kept, so that the garbage collector does not close them
            return streams[-1]

        async def linger(self, requests):
            self.open_streams += 1
            try:
                async for sample in FakeEngine.generate(self, requests):
                    yield sample
                await asyncio.Event().wait()
            finally:
                self.open_streams -= 1

    streams = []
    collector = make(every_second)
    collector.engine = Lingering()
    assert draws(fill(collector).groups) == [1, 3, 5, 7]


def test_nobody_waits_for_a_producer_that_is_gone():
    """Failed, starved or out of prompts: who asks again hears the same, at once."""
    few = {"algorithm.filter_groups.max_num_gen_batches": 1}
    ending = make(every_second)
    ending._source.end = 6
    for collector, reason in [
        (make(every_second, spoil=explode_at(2)), EngineError),
        (make(lambda row: WRONG, changes=few), StarvedError),
        (ending, DataError),
    ]:

        async def twice(collector=collector, reason=reason):
            async with collector.running():
                for _ in range(2):
                    with pytest.raises(reason):
                        await taken(collector)

        run(twice())
    with pytest.raises(DataError, match="after 6 draws"):
        fill(ending)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_source_that_ends_fills_the_step_that_its_draws_can_fill(tmp_path, seed, deterministic):
    changes = {"runtime.deterministic": deterministic, "algorithm.filter_groups.max_num_gen_batches": 5}
    collector = make(every_second, seed=seed, changes=changes, slow=(1,))
    collector._source.end = 8
    assert draws(fill(collector).groups) == [1, 3, 5, 7]
    collector = make(every_second, seed=seed, changes=changes, slow=(1,))
    collector._source.end = 7
    for _ in range(2):
        with pytest.raises(DataError, match="after 7 draws"):
            fill(collector)
    assert len(collector.state()["under_way"]) == (0 if deterministic else 7)
    again = make(every_second, changes=changes)
    again.load_state(through_a_file(tmp_path, collector.state()))  # with more prompts than before
    assert draws(fill(again).groups) == [1, 3, 5, 7]


def test_rounds_of_one_producer_and_what_the_source_hears_of_them():
    collector = make(every_second, changes={"runtime.deterministic": True})

    async def steps():
        async with collector.running():
            for step in range(3):
                batch = await taken(collector, step)
                async with collector.parked(True):
                    assert collector.engine.asleep
                assert not collector.engine.asleep
                collector.release(batch)

    run(steps())
    assert draws(collector._source.heard) == list(range(collector._source.position))


def test_after_an_error_the_engine_stays_asleep():
    collector = make(every_second)

    async def fail():
        async with collector.parked(True):
            raise ValueError

    with pytest.raises(ValueError):
        run(fail())
    assert collector.engine.asleep


def interrupt(collector, turns):
    """Cancel a fill after so many turns of the event loop; False: it was done before that."""

    async def cancel():
        task = asyncio.create_task(one_round(collector))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    try:
        return run(cancel())
    finally:
        assert collector.engine.open_streams == collector._scorer.running == 0


def test_the_state_of_a_running_round_is_that_before_it():
    collector = make(every_second, slow=(0,))
    before = collector.state()

    async def look():
        task = asyncio.create_task(one_round(collector))
        for _ in range(20):
            await asyncio.sleep(0)
        assert collector.engine.open_streams and collector.state() == before
        task.cancel()
        await asyncio.wait([task])

    run(look())


def test_an_interrupted_fill_is_drawn_again_in_deterministic_mode():
    collector = make(every_second, slow=(0,), changes={"runtime.deterministic": True})
    before = collector.state()
    assert interrupt(collector, 20)
    assert collector.state() == before
    assert draws(fill(collector).groups) == [1, 3, 5, 7]


@pytest.mark.parametrize("metric", ["acc", "score"])
@pytest.mark.parametrize("turns", [2, 5, 9, 14, 20, 30, 40])
def test_an_interrupted_fill_goes_on_with_the_samples_that_had_come(tmp_path, turns, metric):
    """Through a checkpoint and into another collector. No sample that had come is asked for again, none is missing."""
    changes = {"algorithm.filter_groups.metric": metric}
    whole = fill(make(every_second, seed=3, changes=changes))
    collector = make(every_second, seed=3, changes=changes)
    assert interrupt(collector, turns)
    kept = {(g.draw, s.index) for g in collector.state()["under_way"] for s in g.samples}
    assert kept == set(collector.engine.came_back) and (kept or turns <= 5)
    again = make(every_second, seed=turns, changes=changes)
    again.load_state(through_a_file(tmp_path, collector.state()))
    result = fill(again)
    assert draws(result.groups) == draws(whole.groups)
    for one, two in zip(result.groups, whole.groups, strict=True):
        assert [s.index for s in one.samples] == list(range(G))
        for a, b in zip(one.samples, two.samples, strict=True):
            assert a.reward == b.reward
    for request in again.engine.requests:
        missing = [i for i in range(G) if (request.id, i) not in kept]
        assert request.seeds == tuple(sample_seed(0, request.id, request.id, i) for i in missing)
    assert again.state()["under_way"] == () and again.state()["rounds"] == 0


def test_failed_scores_of_an_interrupted_fill_are_made_again():
    changes = {"reward.max_error_rate": 0.99}
    collector = make(lambda row: (None, 1, 0), slow=(1, 2, 3), changes=changes)
    assert interrupt(collector, 200)
    assert any(s.reward and s.reward.error for g in collector.state()["under_way"] for s in g.samples)
    collector._scorer.rule = lambda row: (1, 1, 0)
    result = fill(collector)
    stats, samples = result.stats, [s for group in result.groups for s in group.samples]
    assert stats.failed_scores == 0 and stats.kept == N and stats.scores >= N * G
    assert len(samples) == N * G and all(s.reward is not None and s.reward.error is None for s in samples)


def test_an_interrupted_fill_keeps_to_its_budget():
    """The draws made before count: at most max_num_gen_batches x N in one step, however often it is interrupted."""
    changes = {"algorithm.filter_groups.max_num_gen_batches": 2}
    collector = make(lambda row: WRONG, slow=(2,), changes=changes)
    assert interrupt(collector, 60)
    with pytest.raises(StarvedError):
        fill(collector)
    assert collector._position.draws == 2 * N


def test_resume_is_exact(tmp_path):
    """Entries 85 and 88: one restored from a file goes on as the first one does, carried-over groups included."""
    changes = {"runtime.deterministic": True}

    def steps(collector, numbers):
        for step in numbers:
            collector.engine.version = step
            result = fill(collector, step)
            yield draws(result.groups), [(g.draw, status) for g, status in result.rejected], result.stats.keep_rate

    whole = make(every_second, changes=changes)
    first = list(steps(whole, range(3)))
    again = make(every_second, seed=5, changes=changes)
    again.load_state(through_a_file(tmp_path, whole.state()))
    assert list(steps(again, range(3, 6))) == list(steps(whole, range(3, 6)))
    assert first


def test_state_keeps_every_field_of_a_carried_group(tmp_path):
    changes = {"rollout.max_staleness": 1, "rollout.max_concurrent_samples": 60, "reward.max_error_rate": 0.9}
    collector = make(lambda row: (1, None, 0), changes=changes)
    collector._position.rate.learn(10, 60)
    fill(collector)
    other = make(every_second)
    other.load_state(through_a_file(tmp_path, collector.state()))
    assert any(len(group.samples) == G for group in collector._position.under_way)
    for one, two in zip(collector._position.under_way, other._position.under_way, strict=True):
        assert (one.draw, one.prompt) == (two.draw, two.prompt)
        for a, b in zip(one.samples, two.samples, strict=True):
            assert (a.request_id, a.index, a.finish_reason, a.text) == (b.request_id, b.index, b.finish_reason, b.text)
            for name in ("token_ids", "logprobs", "versions"):
                left, right = getattr(a, name), getattr(b, name)
                assert left.dtype == right.dtype and np.array_equal(left, right)
            assert a.scored == b.scored
            if a.reward is None or a.scored:
                assert a.reward == b.reward
            else:
                assert a.index == 1 and a.reward.error == b.reward.error == "time-out"


def test_a_checkpoint_with_the_earlier_name_of_a_record_is_read(tmp_path):
    stats = fill(make(every_second)).stats
    EncodedState({"stats": stats}).write(tmp_path)
    path = tmp_path / "state.json"
    path.write_text(path.read_text().replace("RolloutStats", "FillStats"))
    assert read_state(tmp_path) == {"stats": stats}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, 2.5, float("nan"), None, True, "b", (3, np.arange(2), np.float32(1))]}, None),
        ({"solved": {3: 1}}, "state()['solved'] has the key 3"),
        ({"seen": [{1, 2}]}, "state()['seen'][0] is a set"),
        ({"rng": random.Random(0)}, "state()['rng'] is a Random"),
    ],
)
def test_what_a_checkpoint_cannot_give_back_is_named(value, said):
    assert lost(value) == said


def test_a_source_whose_state_cannot_be_kept_ends_the_run_and_spoils_no_rescue():
    collector = make(every_second)
    result = fill(collector)
    collector._source.state = lambda: {"position": 4, "solved": {3: 1}}
    with pytest.raises(UserError, match=r"data.source: state\(\)\['solved'\] has the key 3, .* dicts with text keys"):
        collector.release(result)
    state = collector.state()
    assert state["draws"] == collector._position.draws and "source" not in state
    with pytest.raises(DataError, match="lacks the source's state"):
        make(every_second).load_state(state)


# --- how much is drawn at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finished", "concurrent", "room"), [(4, 13, 5), (4, 12, 4), (3, 13, 4), (4, 2, 4)])
def test_draws_at_once_are_those_that_the_engine_has_rows_for(finished, concurrent, room):
    """13 rows are begun by 5 groups of 3; at least N = 4, and no more as long as fewer than N draws have finished."""
    collector = make(every_second, changes={"rollout.max_concurrent_samples": concurrent})
    rate = collector._position.rate
    rate.learn(1, finished)
    assert DynamicSampling(collector._config, 0, N, 0, rate)._slots(0) == room


def test_the_first_round_is_n_prompts_whatever_the_keep_rate():
    """What comes of them sizes the others: a rate of one in sixty would draw the whole budget at once."""
    collector = make(every_second, changes={"runtime.deterministic": True})
    collector._position.rate.learn(1, 60)
    sizes, generate = [], collector.engine.generate

    def noted(requests):
        sizes.append(len(requests))
        return generate(requests)

    collector.engine.generate = noted
    result = fill(collector)
    assert sizes[0] == N and len(sizes) == result.stats.rounds > 1 and sum(sizes) == result.stats.drawn


def test_groups_carried_over_are_taken_in_the_order_of_their_draws():
    """And so are trained on in that order, whatever order a checkpoint has them in; new draws go on behind them."""
    waiting = [waiting_group(number, 5, version=0) for number in (2, 0, 1)]
    result = fill(in_order(every_second, waiting, version=0, changes={}))
    assert draws(result.groups) == [0, 1, 2, 3]
    assert draws(result.sampled)[0] == 3  # of this step alone


def test_every_number_of_a_position_comes_back():
    collector = make(every_second)
    state = collector.state() | {"draws": 7, "keep_rate_kept": 2.5, "keep_rate_finished": 8.0, "rounds": 3}
    collector.load_state(state)
    assert collector.state() == state
