"""One fill of the experience buffer under way: dynamic sampling (Eq. 11) for one rollout step.

Consumes: prompts, carried-over groups, the samples of an engine, the verdicts of a scorer. Produces: a
:class:`RolloutBatch`. Waits for: the next finished group; the engine and the scorer's deadline end that wait. One
task reads each stream of the engine, one scores each sample as soon as it comes; the loop in :meth:`Filling.run` only
decides when to draw more and when to stop. A failure in any task cancels all the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo.algorithm.admission import Admission, GroupVerdict, admit, judge, refill_size
from dapo.config import Config
from dapo.errors import RewardError
from dapo.orchestrator.pending_group import AcceptanceRate, PendingGroup, Scores
from dapo.records import Group, Prompt, Sample
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine, EngineError, Request, Sampling
from dapo.rollout.seeds import sample_seed

Progress = Callable[[int, int, str], object]
"""Hears how much is done, of how much, and a note."""


@dataclass(frozen=True, slots=True)
class FillStats:
    """What it took to fill one step. Counts are of this step's own draws, unless they say otherwise."""

    drawn: int
    """Prompts drawn."""
    rounds: int
    """Times that prompts were drawn, one or many at once."""
    samples: int
    """Samples that came from the engine."""
    tokens: int
    """Response tokens of these samples."""
    all_right: int
    mixed: int
    all_wrong: int
    flat: int
    too_few_scored: int
    kept: int
    """Groups handed out, carried-over ones included."""
    surplus: int
    """Good groups beyond N, discarded."""
    carried: int
    """Good groups beyond N (of earlier steps too), kept for the next step."""
    stale: int
    """Good groups, of earlier steps too, that became too old and were dropped."""
    cancelled: int
    """Draws that were stopped because N groups had been found."""
    wasted_tokens: int
    """Tokens of surplus, stale and cancelled draws, as far as their samples had come."""
    scores: int
    """Scores made, failed ones included."""
    failed_scores: int
    keep_rate: float
    """Running estimate of the share of draws that are kept, over this and earlier steps."""
    staleness_mean: float
    """Versions between the oldest token of a group handed out and the policy it will train; 0 if there is none."""
    staleness_max: int
    reward_wait_s: float
    """Seconds from the last sample's arrival to the end of the fill."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """What one rollout step trains on.

    ``groups``: with raw rewards, in draw order. ``rejected``: the other finished groups with what became of them, in
    draw order: the name of a :class:`GroupVerdict`, ``surplus``, ``carried`` or ``stale``. ``first_draw``: number of
    the first draw of this step; groups with a lower one were sampled in earlier steps.
    """

    step: int
    first_draw: int
    groups: tuple[Group, ...]
    rejected: tuple[tuple[Group, str], ...]
    stats: FillStats

    @property
    def sampled(self) -> list[Group]:
        """The finished groups of this step's own draws, kept or not. Carried ones were counted when they came."""
        finished = [*self.groups, *(group for group, _ in self.rejected)]
        return [group for group in finished if group.draw >= self.first_draw]


class Filling:
    """One fill under way: its draws, carried-over ones first, its tasks, and when to draw more and when to stop."""

    def __init__(
        self,
        step: int,
        *,
        draw: Callable[[], tuple[int, Prompt]],
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        config: Config,
        keep_rate: AcceptanceRate,
        carried: Sequence[Group],
        resumed: Sequence[Group] = (),
        rounds: int = 0,
        train_version: int | None,
        progress: Progress = lambda done, total, note: None,
    ) -> None:
        """
        Args:
            draw: the next prompt and the number of its draw.
            carried: good groups of earlier steps.
            resumed: the draws of an interrupted fill of this step, each with the samples that it had.
            rounds: times that it had drawn prompts.
            train_version: policy version that will be trained, or None for the engine's.
        """
        self._draw = draw
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._config = config
        self._keep_rate = keep_rate
        self._filter = config.algorithm.filter_groups
        self._step = step
        self._train_version = train_version
        self._version = self._newest_version()
        self._wanted = config.rollout.prompts_per_step
        self._size = config.rollout.samples_per_prompt
        self._streaming = not config.runtime.deterministic
        self._stop_early = self._streaming and config.rollout.max_staleness == 0
        self.filtering = self._filter.enable
        self.scores = Scores(config.reward, self._filter.metric, step)
        self._draws = [PendingGroup.carry(g) for g in sorted(carried, key=lambda g: g.draw)]
        self._budget = self._wanted * self._filter.max_num_gen_batches if self.filtering else self._missing()
        self._resumed = [PendingGroup.resume(g) for g in resumed]
        self._draws += self._resumed
        self._budget -= len(self._resumed)
        self._rounds = rounds
        self._in_flight = 0
        self._progress = progress
        self._tokens, self._began = 0, time.perf_counter()
        self._last_sample = self._began
        self._finished = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Draw, sample and score until no draw can change the outcome, or the budget is spent."""
        failure: BaseException | None = None
        try:
            async with self._tasks:
                self._take_up()
                while not (self._stop_early and self.admission().complete):
                    self._refill()
                    if not self._in_flight:
                        break
                    await self._finished.wait()
                    self._finished.clear()
                    self._tell()
                    # read here only: weights that arrive later must not undo what has been decided
                    self._version = self._newest_version()
                for task in self._running:  # all of them serve draws after the last admitted one
                    task.cancel()
        except BaseExceptionGroup as group:
            failure = group.exceptions[0]  # the others followed from it, or came in the same moment
        if failure is not None:  # out here, so that the wrapping is not shown as its context
            raise failure

    def _tell(self) -> None:
        """How far it is."""
        drawn = sum(not d.carried for d in self._draws)
        rate = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        kept = self._wanted - max(self._missing(), 0)
        self._progress(kept, self._wanted, f"groups of {drawn} drawn, {rate:,.0f} tok/s")

    @property
    def rounds(self) -> int:
        """Times that prompts were drawn."""
        return self._rounds

    def under_way(self) -> tuple[Group, ...]:
        """This step's draws with the samples that have come, for a fill that goes on later."""
        return tuple(d.under_way() for d in self._draws if not d.carried)

    def _take_up(self) -> None:
        """Go on with the draws of an interrupted fill: score what is not scored, ask for what is missing."""
        self._in_flight += len(self._resumed)
        for draw in self._resumed:
            self.scores.made += len(draw.scored)
            self._finish_if_whole(draw)
            for sample in draw.received.values():
                if sample.index not in draw.scored:
                    self._spawn(self._score(draw, sample))
        short = [d for d in self._resumed if len(d.received) < self._size]
        if short:
            self._spawn(self._read(short))

    def _newest_version(self) -> int:
        return self._engine.version if self._train_version is None else self._train_version

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Draw as many prompts as will probably do, in one request to the engine."""
        if self._in_flight and not self._streaming:
            return  # what to draw must not depend on what happens to have finished
        new = [d for d in self._draws if d.verdict is not None and not d.carried]
        kept = sum(d.verdict is GroupVerdict.MIXED for d in new)
        count = refill_size(
            wanted=self._missing(),
            in_flight=self._in_flight,
            # the first round is N prompts; what comes of them sizes the others
            keep_rate=self._keep_rate.value(kept, len(new)) if self._rounds else 1.0,
            budget_left=self._budget,
        )
        if self._streaming:
            count = min(count, self._room(len(new)))
        if count <= 0:
            return
        self._rounds += 1
        self._budget -= count
        self._in_flight += count
        draws = [PendingGroup(*self._draw()) for _ in range(count)]
        self._draws += draws
        self._spawn(self._read(draws))

    def _room(self, finished: int) -> int:
        """Draws that the engine has room for. More would only queue, and be in vain if the keep-rate rises.

        N at most while fewer than N draws have ``finished``: the first ones are few, and the short ones.
        """
        at_once = -(-self._config.rollout.max_concurrent_samples // self._size)
        trusted = self._keep_rate.finished + finished >= self._wanted
        return (max(self._wanted, at_once) if trusted else self._wanted) - self._in_flight

    def _missing(self) -> int:
        return self._wanted - sum(outcome is True for outcome in self._outcomes())

    def _request(self, draw: PendingGroup) -> Request:
        rollout = self._config.rollout
        draw.asked = tuple(i for i in range(self._size) if i not in draw.received)
        seeds = (sample_seed(self._config.seed, draw.prompt.row, draw.number, i) for i in draw.asked)
        sampling = Sampling(rollout.temperature, rollout.max_response_length, stop=tuple(rollout.stop))
        return Request(draw.number, draw.prompt.token_ids, tuple(seeds), sampling)

    # -- sampling and scoring ------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _read(self, draws: Sequence[PendingGroup]) -> None:
        """Take the samples of ``draws`` as they finish; cancelling this task closes the engine's stream."""
        by_number = {d.number: d for d in draws}
        stream = self._engine.generate([self._request(d) for d in draws])
        wanted = missing = sum(len(d.asked) for d in draws)
        try:
            async for sample in stream:
                self._receive(by_number.get(sample.request_id), sample)
                missing -= 1
                if not missing:
                    return  # without waiting for the engine to say so
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        raise EngineError(f"{missing} of {wanted} samples never came back")

    def _receive(self, draw: PendingGroup | None, sample: Sample) -> None:
        known = draw is not None and 0 <= sample.index < len(draw.asked)
        if draw is None or not known or draw.asked[sample.index] in draw.received:
            raise EngineError(f"sample {sample.index} of request {sample.request_id} was not asked for, or came twice")
        sample = replace(sample, index=draw.asked[sample.index])  # the engine numbers them as they were asked for
        draw.received[sample.index] = sample
        self._tokens += sample.length
        self._last_sample = time.perf_counter()
        self._spawn(self._score(draw, sample))

    async def _score(self, draw: PendingGroup, sample: Sample) -> None:
        text = self._decode(sample.token_ids.tolist())
        reward = self.scores.take(await self._scorer.score(draw.prompt, text, sample.finish_reason))
        draw.scored[sample.index] = replace(sample, text=text, reward=reward)
        self._finish_if_whole(draw)

    def _finish_if_whole(self, draw: PendingGroup) -> None:
        if len(draw.scored) == self._size:
            samples = tuple(draw.scored[i] for i in range(self._size))
            group = Group(draw.number, draw.prompt, samples)
            draw.finish(group, self._judge(group))
            self._in_flight -= 1
            self._finished.set()

    def _judge(self, group: Group) -> GroupVerdict:
        metric = self._filter.metric
        open_verdict = any(s.verdict.correct is None for s in group.scored)
        if metric == "acc" and open_verdict:
            if self.filtering:
                raise RewardError(
                    f"step {self._step + 1}: the reward of prompt row {group.prompt.row} does not say whether the "
                    "response is correct, which algorithm.filter_groups.metric=acc decides by; return a bool or "
                    "dapo.records.Reward(correct=..., value=...), or use algorithm.filter_groups.metric=score"
                )
            metric = "score"  # for the counts only
        return judge(group, metric=metric, tolerance=self._filter.tolerance)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def admission(self) -> Admission:
        """Which draws are trained on, as far as that is settled."""
        return admit(self._outcomes(), self._wanted)

    def _outcomes(self) -> list[bool | None]:
        """For each draw, in order: good, not good, or None while pending."""
        horizon = self._version - self._config.rollout.max_staleness
        return [
            None if d.verdict is None else self._good(d) and (d.oldest is None or d.oldest >= horizon)
            for d in self._draws
        ]

    def _good(self, draw: PendingGroup) -> bool:
        return draw.verdict is GroupVerdict.MIXED if self.filtering else draw.verdict is not GroupVerdict.TOO_FEW_SCORED

    def settled_draws(self, admission: Admission) -> tuple[int, int]:
        """(kept, all) of this step's draws up to the last admitted one: free of the bias to what finishes early."""
        until = admission.admitted[-1] + 1 if admission.complete else len(self._draws)
        draws = [d for d in self._draws[:until] if not d.carried]
        return sum(d.verdict is GroupVerdict.MIXED for d in draws), len(draws)

    def result(self, admission: Admission, keep_rate: float) -> RolloutBatch:
        """The groups, each with what became of it, and the counts."""
        admitted = set(admission.admitted)
        outcomes = self._outcomes()
        groups, rejected = [], []
        for place, draw in enumerate(self._draws):
            if draw.group is None:
                continue
            if place in admitted:
                groups.append(draw)
            else:
                rejected.append((draw, self._status(draw, outcomes[place] is True)))
        return RolloutBatch(
            step=self._step,
            first_draw=next((d.number for d in self._draws if not d.carried), self._draws[-1].number + 1),
            groups=tuple(d.group for d in groups if d.group),
            rejected=tuple((d.group, status) for d, status in rejected if d.group),
            stats=self._stats(groups, rejected, keep_rate),
        )

    def _status(self, draw: PendingGroup, good: bool) -> str:
        """What became of a finished draw that is not trained on now."""
        if good:
            return "carried" if self._config.rollout.max_staleness else "surplus"
        return "stale" if self._good(draw) else str(draw.verdict)

    def _stats(self, kept: list[PendingGroup], rejected: list[tuple[PendingGroup, str]], keep_rate: float) -> FillStats:
        own = [d for d in self._draws if not d.carried]
        verdicts = Counter(d.verdict for d in own)
        statuses = Counter(status for _, status in rejected)
        lost = [d for d, status in rejected if status in ("surplus", "stale")] + [d for d in own if d.group is None]
        ages = [self._version - d.oldest for d in kept if d.oldest is not None]
        return FillStats(
            drawn=len(own),
            rounds=self._rounds,
            samples=sum(len(d.received) for d in own),
            tokens=sum(d.tokens for d in own),
            all_right=verdicts[GroupVerdict.ALL_RIGHT],
            mixed=verdicts[GroupVerdict.MIXED],
            all_wrong=verdicts[GroupVerdict.ALL_WRONG],
            flat=verdicts[GroupVerdict.FLAT],
            too_few_scored=verdicts[GroupVerdict.TOO_FEW_SCORED],
            kept=len(kept),
            surplus=statuses["surplus"],
            carried=statuses["carried"],
            stale=statuses["stale"],
            cancelled=verdicts[None],
            wasted_tokens=sum(d.tokens for d in lost),
            scores=self.scores.made,
            failed_scores=self.scores.failed,
            keep_rate=keep_rate,
            staleness_mean=sum(ages) / len(ages) if ages else 0.0,
            staleness_max=max(ages, default=0),
            reward_wait_s=time.perf_counter() - self._last_sample,
        )
