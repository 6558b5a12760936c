"""Sampling ahead (``max_staleness`` >= 1) over an engine and a learner that take time, by a clock that is not waited
for."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.errors import StarvedError
from dapo.orchestrator.loop import train
from dapo.orchestrator.run_state import Plan
from dapo.records import Group, Prompt, Reward, Sample
from dapo.rollout.engine import Draft, EngineError, InterruptibleEngine
from dapo.rollout.seeds import sample_seed
from loop_fakes import FakeBuilder, FakeLearner, World

N, G = 4, 2
TOTALS = ("trained", "filtered", "stale", "surplus", "cancelled", "carried", "unfinished")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time, and threads none of the clock's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        real = self._selector.select

        def select(timeout: float | None = None) -> Any:
            ready = real(0)
            if not ready:
                assert timeout is not None, "everybody waits for somebody else"
                self.now += timeout
            return ready

        self._selector.select = select

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except BaseException as error:
            done.set_exception(error)
        return done


@dataclass
class Tracked:
    """A sample that is being written."""

    request: Any
    index: int
    length: int
    versions: list[int]
    done: asyncio.Queue[Any]
    task: Any = None

    def arrays(self) -> tuple[Any, Any, Any]:
        tokens = np.arange(len(self.versions), dtype=np.int32) + self.request.seeds[self.index] % 10_000
        return tokens, np.full(len(tokens), -0.5, np.float32), np.array(self.versions, np.int32)


@dataclass
class SlowEngine:
    """Writes so many samples at once, each token in ``beat`` seconds; a sample's seed says how long it gets."""

    rows: int = N * G
    beat: float = 1.0
    tail: bool = False
    version: int = 0
    asleep: bool = False
    paused: bool = False
    writing: list[Tracked] = field(default_factory=list)
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    busy: float = 0.0

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.rows)
        self.moving = asyncio.Event()
        self.moving.set()

    def length(self, seed: int) -> int:
        dice = random.Random(seed)
        return min(1 + int(dice.paretovariate(1.2)), 60) if self.tail else 5

    async def generate(self, requests: Any) -> Any:
        assert not self.asleep and self.moving.is_set()
        done: asyncio.Queue[Any] = asyncio.Queue()
        mine = []
        for request in requests:
            drafts = {draft.index: draft for draft in request.drafts}
            for index, seed in enumerate(request.seeds):
                begun = list(drafts[index].versions) if index in drafts else []
                sample = Tracked(request, index, self.length(seed), begun, done)
                self.lengths[request.id, seed] = sample.length
                sample.task = asyncio.create_task(self.write(sample))
                mine.append(sample)
        self.writing += mine
        try:
            for _ in mine:
                if (found := await done.get()) is not None:
                    yield found
        finally:
            for sample in mine:
                sample.task.cancel()
            self.writing = [sample for sample in self.writing if sample not in mine]

    async def write(self, sample: Tracked) -> None:
        async with self.free:
            while len(sample.versions) < sample.length:
                await asyncio.sleep(self.beat)
                await self.moving.wait()
                sample.versions.append(self.version)
        tokens, logprobs, versions = sample.arrays()
        self.writing.remove(sample)
        sample.done.put_nowait(Sample(sample.request.id, sample.index, tokens, logprobs, versions, "stop"))

    async def stream(self, requests: Any) -> Any:
        raise NotImplementedError
        yield

    async def cancel(self, request_ids: Any) -> list[Draft]:
        gone = [sample for sample in self.writing if sample.request.id in request_ids]
        for sample in gone:
            sample.task.cancel()
            sample.done.put_nowait(None)
        self.writing = [sample for sample in self.writing if sample not in gone]
        begun = [sample for sample in gone if sample.versions]
        return [Draft(s.request.id, s.index, *(tuple(a.tolist()) for a in s.arrays())) for s in begun]

    async def pause(self) -> None:
        self.paused = True
        self.moving.clear()

    async def resume(self) -> None:
        self.paused = False
        self.moving.set()

    async def begin(self, version: int) -> None:
        self.moving.clear()
        self.coming = version

    async def put(self, bucket: Any) -> None:
        await asyncio.sleep(0.01)

    async def commit(self, fingerprint: Any) -> None:
        self.version = self.coming
        if not self.paused:
            self.moving.set()

    async def sleep(self) -> None:
        assert not self.writing
        self.asleep = True

    async def wake(self) -> None:
        await asyncio.sleep(0.01)  # others have a turn
        self.asleep = False

    async def close(self) -> None: ...


class SlowLearner(FakeLearner):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def update(self, step: int, index: int, mini: Any, into: Any) -> None:
        await asyncio.sleep(self.seconds)
        await super().update(step, index, mini, into)


class LongBuilder(FakeBuilder):
    """Its batch has the two tokens a sample that the fake learner wants, whatever the samples have."""

    def build(self, groups: Any) -> Any:
        def short(sample: Sample) -> Sample:
            two = np.zeros(2, np.int32)
            return Sample(sample.request_id, sample.index, two, np.zeros(2, np.float32), two, "stop")

        return super().build([Group(g.draw, g.prompt, tuple(map(short, g.samples))) for g in groups])

    def finish(self, groups: Any, batch: Any, version: int) -> Any:
        ones = np.ones(batch.num_response_tokens, np.float32)
        return groups, batch.with_columns(advantages=ones)


class Source:
    def __init__(self) -> None:
        self.position, self.heard = 0, list[int]()

    def next(self) -> Prompt:
        self.position += 1
        return Prompt(self.position, "p", (1, 2))

    def feedback(self, groups: Any) -> None:
        self.heard += [group.draw for group in groups]

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Half:
    """So many rewards are right; takes its time."""

    def __init__(self, share: float) -> None:
        self.share = share

    async def score(self, prompt: Prompt, text: str, finish_reason: str | None = None) -> Reward:
        dice = random.Random(f"{prompt.row} {text}")
        await asyncio.sleep(0.1 * dice.random())
        right = dice.random() < self.share
        return Reward(right, float(right))


class Asynchronous(World):
    """A world by the virtual clock. ``batches``: what was trained on."""

    def __init__(self, changes: Mapping[str, Any], *, update_s: float = 2.5, colocated: bool = False, **engine: Any):
        self.filtered = "share" in engine
        share = engine.pop("share", 0.5)
        fixed = {"runtime.deterministic": False, "rollout.samples_per_prompt": G, "evaluation.every": 0}
        fixed |= {"rollout.max_concurrent_samples": engine.get("rows", N * G)}
        fixed |= {"algorithm.filter_groups.enable": self.filtered}
        super().__init__(fixed | dict(changes), Source(), SlowEngine(**engine))
        self.learner = SlowLearner(update_s)
        self.collector._scorer = Half(share)
        self.collector._tokens = str, None
        self.colocated = colocated
        self.batches: list[Any] = []

    async def run(self) -> None:
        plan = Plan(self.config.rollout.prompts_per_step, self.early_stopping, self.colocated)
        builder: Any = LongBuilder()
        await train(self.state, plan, self.collector, builder, self.learner, self, self, self, self)

    async def maybe(self, after: Any) -> Mapping[str, float]:
        async with self.collector.paused():
            asked = len(self.engine.lengths)
            await asyncio.sleep(0.3)
            assert len(self.engine.lengths) == asked
        return {}

    async def write(self, step: Any, after: Any, evaluation: Any) -> None:
        self.batches.append((step.rollout, step.version))

    def check(self) -> None:
        """What must hold at any moment."""
        state = self.collector.state()
        counts, taken = state["counts"], self.state.step
        settled = sum(counts.get(name, 0) for name in TOTALS)
        here = len(state["under_way"]) + len(state["carried"])
        assert counts.get("produced", 0) == state["draws"] == settled + here, (counts, here)
        trained = sum(len(rollout.groups) for rollout, _ in self.batches)
        open_step = taken.rollout if taken else state["untaken"]
        if open_step is not None and (not self.batches or self.batches[-1][0] is not open_step):
            trained += len(open_step.groups)
        assert counts.get("trained", 0) in (trained, trained + N)  # a batch may be on its way to the loop


def finished(world: Asynchronous, seconds: float = 1e9) -> float:
    """Run it to its end; when that was, by its clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def whole() -> float:
            await asyncio.wait_for(world.run(), seconds)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return asyncio.get_running_loop().time()

        return runner.run(whole())


def ages(world: Asynchronous) -> Counter[int]:
    """Of every trained token."""
    return Counter(
        version - int(v)
        for rollout, version in world.batches
        for g in rollout.groups
        for s in g.samples
        for v in s.versions
    )


STALE = {"rollout.max_staleness": 1, "training.steps": 12}


def test_the_fake_is_an_engine_that_can_be_interrupted() -> None:
    assert isinstance(SlowEngine(), InterruptibleEngine)


@pytest.mark.parametrize(("engine", "update_s"), [({}, 2.5), ({"share": 0.5, "rows": 4 * N * G}, 5)])
def test_one_step_ahead_takes_little_more_than_half_of_the_time(engine: dict[str, Any], update_s: float) -> None:
    """Engine and learner of equal latency: a rollout and two updates take 5 s each; with half of the samples right, and
    so half of the groups filtered, a rollout takes two rounds, and an update twice the time."""
    took = [finished(Asynchronous(STALE | {"rollout.max_staleness": s}, update_s=update_s, **engine)) for s in (0, 1)]
    assert took[1] <= 0.6 * took[0], took


CASES = st.fixed_dictionaries(
    {
        "rollout.max_staleness": st.integers(0, 4),
        "rollout.in_flight": st.sampled_from(["keep", "drain", "restart"]),
        "training.steps": st.integers(1, 8),
        "seed": st.integers(0, 2**20),
        "algorithm.filter_groups.max_num_gen_batches": st.just(50),
    }
)


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    CASES,
    st.floats(0, 1),
    st.sampled_from([0.2, 0.5, 0.9]),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from([0.1, 2.5, 40]),
)
def test_every_draw_is_accounted_for(
    changes: dict[str, Any], depth: float, share: float, colocated: bool, rows: int, update_s: float
) -> None:
    """Produced = trained + filtered + stale + carried + unfinished at any moment, each draw in one batch, nothing
    trained on that is older than S, and the versions of a sample as ``rollout.in_flight`` allows them."""
    bound = changes["rollout.max_staleness"]
    changes = changes | {"rollout.ahead": round(depth * bound), "rollout.cache_gib": 1.0 if rows % 2 else None}
    world = Asynchronous(
        changes, update_s=update_s, colocated=colocated or not bound, share=share, rows=rows, tail=True
    )
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def watched() -> None:
            run = asyncio.create_task(world.run())
            while not run.done():
                world.check()
                await asyncio.wait([run], timeout=0.7)
            await run

        runner.run(watched())
    seen = Counter(group.draw for rollout, _ in world.batches for group in rollout.sampled)
    assert set(seen.values()) == {1} and len(world.batches) == changes["training.steps"]
    assert sorted(world.source.heard) == sorted(seen)
    assert max(ages(world)) <= bound and min(ages(world)) >= 0
    last = world.batches[-1][0].stats.totals
    assert last["produced"] == sum(last[name] for name in TOTALS) and last["trained"] == N * len(world.batches)
    came, settled = (sum(getattr(r.stats, of) for r, _ in world.batches) for of in ("window_tokens", "tokens"))
    assert came == settled if not bound else came >= settled
    for rollout, _ in world.batches:
        assert len(rollout.groups) == N and [g.draw for g in rollout.groups] == sorted(g.draw for g in rollout.groups)
        assert sum(rollout.stats.ages) == N
        for sample in (s for g in rollout.groups for s in g.samples):
            versions = sample.versions.tolist()
            written = {length for (draw, _), length in world.engine.lengths.items() if draw == sample.request_id}
            assert versions == sorted(versions) and len(versions) in written
            assert changes["rollout.in_flight"] == "keep" or len({*versions}) == 1


def test_long_samples_are_not_crowded_out() -> None:
    """The lengths that are trained on are those that were written, but for the filter: a median of 2 with a tail up to
    60 tokens."""
    large = {"training.steps": 60, "rollout.prompts_per_step": 32, "training.groups_per_update": 16}
    world = Asynchronous(STALE | large, rows=128, tail=True, update_s=4, share=0.5)
    finished(world)
    groups = [(group, True) for rollout, _ in world.batches for group in rollout.groups]
    groups += [(group, False) for rollout, _ in world.batches for group, _ in rollout.rejected]
    trained = [s.length for group, kept in groups if kept for s in group.samples]
    written = [s.length for group, _ in groups for s in group.samples]
    for quantile in (0.5, 0.9, 0.97):
        assert np.quantile(trained, quantile) == pytest.approx(np.quantile(written, quantile), rel=0.25)
    assert np.mean(trained) == pytest.approx(np.mean(written), rel=0.1) and max(trained) == 60
    last = world.batches[-1][0].stats.totals
    print(last)
    assert last["stale"] < 0.05 * last["trained"]


@pytest.mark.parametrize("policy", ["keep", "drain", "restart"])
@pytest.mark.parametrize("place", ["side by side", "by turns", "by turns with a cache that stays"])
def test_what_is_in_flight_at_a_push(policy: str, place: str) -> None:
    changes = STALE | {"rollout.in_flight": policy, "rollout.cache_gib": 1.0 if "stays" in place else None}
    world = Asynchronous(changes, tail=True, colocated="turns" in place, share=0.5)
    cancel, asked = world.engine.cancel, []
    world.engine.cancel = lambda ids: (asked.append(ids), cancel(ids))[1]  # type: ignore[method-assign]
    update, beside = world.learner.update, []

    async def watched(*given: Any, **named: Any) -> None:
        spans = world.collector._in_flight.spans  # type: ignore[union-attr]
        before = spans.seconds.get("sampling", 0.0)
        await update(*given, **named)
        beside.append(spans.seconds.get("sampling", 0.0) > before)

    world.learner.update = watched  # type: ignore[method-assign]
    finished(world)
    assert any(beside) == (place == "side by side")
    stats = [rollout.stats for rollout, _ in world.batches]
    continued, restarted = (sum(getattr(s, name) for s in stats) for name in ("continued", "restarted"))
    assert (continued > 0) == (policy == "keep") and (restarted > 0) == (policy == "restart")
    assert bool(asked) == (policy == "restart" or (policy == "keep" and place == "by turns"))


def test_an_engine_that_cannot_continue_samples_is_waited_for() -> None:
    class Plain:
        """Nothing but the protocol every engine has."""

        def __init__(self, engine: SlowEngine) -> None:
            self.engine = engine
            for name in ("generate", "begin", "put", "commit", "sleep", "wake", "close"):
                setattr(self, name, getattr(engine, name))

        version = property(lambda self: self.engine.version)
        lengths = property(lambda self: self.engine.lengths)

    world = Asynchronous(STALE, tail=True, share=0.5)
    world.engine = world.collector.engine = Plain(world.engine)
    finished(world)
    assert len(world.batches) == 12 and not sum(rollout.stats.continued for rollout, _ in world.batches)


def test_nothing_is_sampled_for_steps_that_will_not_come() -> None:
    world = Asynchronous({"rollout.max_staleness": 2, "training.steps": 3})
    finished(world)
    assert world.source.position == 3 * N


def test_a_source_that_ends_fills_the_steps_that_it_can_fill() -> None:
    world = Asynchronous(STALE)
    world.source.next = lambda: Source.next(world.source) if world.source.position < 2 * N + 1 else None
    with pytest.raises(Exception, match=f"no more prompts after {2 * N + 1} draws"):
        finished(world)
    assert len(world.batches) == 2


def test_too_few_groups_are_told_of_when_the_step_asks_for_them() -> None:
    few = {"algorithm.filter_groups.max_num_gen_batches": 2}
    told = r"kept 0 of the 4 groups wanted; in 8 draws \(.*max_num_gen_batches=2 x 4\)"
    with pytest.raises(StarvedError, match=told):
        finished(Asynchronous(STALE | few, share=0.0))


def through(world: Asynchronous, folder: Path) -> Asynchronous:
    """A world that goes on from the state of ``world``, as another process would."""
    folder.mkdir()
    world.save(folder)
    again = Asynchronous(dict(world.changes), tail=True, share=0.5, rows=24)
    again.load(folder, {})
    again.batches = list(world.batches)
    return again


@pytest.mark.parametrize("moment", range(12))
def test_a_run_that_is_stopped_at_any_moment_loses_nothing_that_had_come(tmp_path: Path, moment: int) -> None:
    changes = STALE | {"training.steps": 6}
    world = Asynchronous(changes, tail=True, share=0.5, rows=24)
    world.changes = changes
    with pytest.raises(TimeoutError):
        finished(world, 3 + 5.3 * moment)
    world.check()
    came = {
        sample_seed(world.config.seed, group.prompt.row, group.draw, sample.index)
        for group in world.collector.state()["under_way"]
        for sample in group.samples
    }
    again = through(world, tmp_path / "state")
    asked: list[int] = []
    generate = again.engine.generate

    def noted(requests: Any) -> Any:
        asked.extend(seed for request in requests for seed in request.seeds)
        inside = again.state.step is not None and len(again.state.step.reports) < 2
        assert not (inside and again.engine.version < again.learner.version), "sampled with weights that are gone"
        return generate(requests)

    again.engine.generate = noted
    finished(again)
    again.check()
    assert len(again.batches) == 6 and max(ages(again)) <= 1
    settled = Counter(group.draw for rollout, _ in again.batches for group in rollout.sampled)
    assert set(settled.values()) == {1}
    assert not came & set(asked)


@pytest.mark.parametrize("bound", [0, 1])
def test_a_lower_bound_does_not_starve_a_run_of_the_draws_that_waited(tmp_path: Path, bound: int) -> None:
    changes = {"rollout.max_staleness": 4, "training.steps": 8, "algorithm.filter_groups.max_num_gen_batches": 7}
    for seed in range(6):
        world = Asynchronous(changes | {"seed": seed}, share=0.5, rows=64, update_s=10)
        with pytest.raises(TimeoutError):
            finished(world, 60)
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        world.save(folder)
        again = Asynchronous(changes | {"seed": seed, "rollout.max_staleness": bound}, share=0.5, rows=64)
        again.load(folder, {})
        again.batches = list(world.batches)
        finished(again)
        again.check()
        assert len(again.batches) == 8 and max(ages(again)) <= 4


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_step_that_is_resumed_on_a_shared_device_asks_no_sleeping_engine(tmp_path: Path, moment: int) -> None:
    """Nothing is asked of it between its sleep and the end of its waking, which gives others a turn."""
    changes = STALE | {"training.steps": 4}
    world = Asynchronous(changes, colocated=True, share=0.5)
    with pytest.raises(TimeoutError):
        finished(world, 2 + moment)
    world.save(tmp_path)
    again = Asynchronous(changes, colocated=True, share=0.5)
    again.load(tmp_path, {})
    again.batches = list(world.batches)
    finished(again)  # the engine asserts that it is awake
    assert len(again.batches) == 4


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: replace(s, versions=s.versions[::-1] * 0 + np.arange(s.length)[::-1].astype(np.int32)), "versions"),
        (lambda s: replace(s, versions=s.versions * 0 - 5), "versions -5 to -5, with weights of the versions 0 to"),
        (lambda s: replace(s, versions=s.versions + 7), "versions 7 to 7"),
    ],
)
def test_versions_that_a_sample_cannot_have_are_an_error(spoil: Any, said: str) -> None:
    world = Asynchronous(STALE)
    generate = world.engine.generate

    async def lying(requests: Any) -> Any:
        async for sample in generate(requests):
            yield spoil(sample)

    world.engine.generate = lying
    with pytest.raises(EngineError, match=said):
        finished(world)


def test_samples_that_are_lost_after_an_interruption_are_missed() -> None:
    """That a stream was told to end early excuses that stream only."""
    world = Asynchronous(STALE | {"rollout.in_flight": "restart"}, tail=True, share=0.5)
    generate, cancelled = world.engine.generate, []
    cancel = world.engine.cancel

    async def noted(ids: Any) -> Any:
        cancelled.append(ids)
        return await cancel(ids)

    async def losing(requests: Any) -> Any:
        lost = bool(cancelled)
        async for sample in generate(requests):
            if not lost or world.engine.version < 3:
                yield sample
            lost = False

    world.engine.cancel, world.engine.generate = noted, losing
    with pytest.raises(EngineError, match="never came back"):
        finished(world)


@pytest.mark.parametrize("drafts", [None, [Draft(10**6, 0, (1,), (-1.0,), (0,))], [Draft(0, 99, (1,), (-1.0,), (0,))]])
def test_drafts_that_are_none_name_the_engine(drafts: Any) -> None:
    world = Asynchronous(STALE, tail=True, share=0.5, colocated=True)
    cancel = world.engine.cancel

    async def wrong(ids: Any) -> Any:
        await cancel(ids)
        return drafts

    world.engine.cancel = wrong
    with pytest.raises(EngineError, match=r"SlowEngine: cancel\(\) returned"):
        finished(world)


def test_a_few_failed_scores_of_a_short_window_end_no_run() -> None:
    """What is scored between two batches may be three samples; they are judged with those of the batch before."""
    for seed in range(8):
        world = Asynchronous(STALE | {"seed": seed, "training.steps": 30, "rollout.prompts_per_step": 16}, share=0.5)
        scorer, dice = world.collector._scorer, random.Random(seed)

        class Sometimes:
            async def score(self, *asked: Any, scorer: Any = scorer, dice: Any = dice) -> Reward:
                found = await scorer.score(*asked)
                return Reward(None, math.nan, error="time-out") if dice.random() < 0.02 else found

        world.collector._scorer = Sometimes()
        finished(world)
        assert len(world.batches) == 30


def test_why_an_engine_died_is_told_and_not_what_follows_from_it() -> None:
    world = Asynchronous(STALE)

    async def dying(requests: Any) -> Any:
        await asyncio.sleep(2)
        calls.append("dead")
        raise EngineError("the device fell off")
        yield

    async def closed(version: int) -> None:
        if "dead" in calls:
            raise EngineError("the engine is closed")
        await begin(version)

    first, begin = world.engine.generate, world.engine.begin
    calls: list[Any] = []
    world.engine.generate = lambda requests: (calls.append(1), first(requests) if len(calls) < 2 else dying(requests))[
        1
    ]
    world.engine.begin = closed
    with pytest.raises(EngineError, match="fell off"):
        finished(world)


def test_tokens_that_were_dropped_count_as_wasted() -> None:
    world = Asynchronous(STALE | {"rollout.in_flight": "restart"}, tail=True, share=0.5)
    finished(world)
    stats = [rollout.stats for rollout, _ in world.batches]
    stale = sum(s.length for r, _ in world.batches for g, what in r.rejected if what == "stale" for s in g.samples)
    assert sum(s.restarted for s in stats) and sum(s.wasted_tokens for s in stats) > stale
