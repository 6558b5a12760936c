"""The experience buffer: groups from the moment their prompts are drawn until they are trained on.

Consumes: prompts from a source, samples from an engine, rewards from a scorer. Produces: for each rollout step a
:class:`RolloutBatch` with the N groups to train on (raw rewards), those that were turned down, and counts. Computes no
loss, shapes no reward.

A task of its own produces them (:meth:`Collector.running`), one batch for each :meth:`Collector.take`: on-policy, a
prompt is sampled only under the weights that it will train. It ends with a reason (starved, exhausted, failed), which
``take`` raises; the engine and the scorer's deadline end each of its waits, and the number of draws is bounded. The
first exception of engine, scorer or decoder ends a round at once, as does a cancellation: all its tasks are cancelled
and all streams closed. The next round goes on with the samples that had come; in deterministic mode the collector is
where it was before the round, which is drawn again from its seeds.

Order: draws are numbered through the run, and the first N kept ones *in that order* are admitted, whatever the order
they finish in. Each sample has its own seed. So what a round returns depends on when things finish only through the
number of prompts drawn, and under ``runtime.deterministic`` not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.config import Config
from dapo.errors import DataError, StarvedError
from dapo.orchestrator.dynamic_sampling import DynamicSampling
from dapo.orchestrator.encoded_state import lost, require_lasting
from dapo.orchestrator.group_sampler import GroupSampler
from dapo.orchestrator.pending_group import AcceptanceRate, PendingGroup
from dapo.orchestrator.protocols import PromptSource
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.records import Group
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine
from dapo.util.asynchronous import Channel, task_group, until_done

Progress = Callable[[int, int, str], object]
"""Hears how much is done, of how much, and a note."""


@dataclass(slots=True)
class _Position:
    """Between two rounds: all that the next one depends on, but for the source."""

    draws: int = 0
    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    carried: tuple[Group, ...] = ()
    under_way: tuple[Group, ...] = ()
    """Draws of a round that was interrupted, each with the samples that had come; none in deterministic mode."""
    rounds: int = 0
    """Times that it had drawn prompts."""


class Collector:
    """Groups from requested to trained."""

    def __init__(
        self,
        source: PromptSource,
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        config: Config,
        progress: Progress = lambda done, total, note: None,
    ) -> None:
        self.engine = engine
        self._source = source
        self._scorer = scorer
        self._decode = decode
        self._config = config
        self._progress = progress
        self._position = _Position()
        self._before: dict[str, Any] | None = None
        self.unsettled = False
        """Whether the last round did not come to its end, so that there is more here than between two steps."""
        self._untaken: RolloutBatch | None = None
        """Ready in the moment in which whoever waited for it was cancelled."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, batches are produced. Nothing of it is left behind, however it ends."""
        self._asked: Channel[tuple[int, int, int]] = Channel()
        self._ready: Channel[RolloutBatch] = Channel()
        producer = asyncio.create_task(self._produce(), name="dapo-collector")
        try:
            yield
        finally:
            producer.cancel()
            try:
                await until_done(producer)
            finally:
                for batch in self._ready.drain():
                    self._untaken, self.unsettled = batch, True

    async def take(self, step: int, count: int, version: int) -> RolloutBatch:
        """The groups of a rollout step: sampled until ``count`` hold something to learn from (Eq. 11).

        With ``max_staleness`` 0, draws that can no longer be admitted are cancelled. Otherwise they are left to finish,
        and good groups beyond ``count`` wait for the next step, as long as they are fresh. In deterministic mode all
        draws finish, and new ones are made only when none is in flight.

        Args:
            step: rollout step, from 0; for messages.
            version: policy version that will be trained on these groups, which staleness is counted to.

        Returns:
            Exactly ``count`` groups; fewer if the budget was spent and ``on_starved`` is ``train``. With filtering off:
            ``count`` draws, whatever their verdict, less those with fewer than two scores.

        Raises:
            StarvedError: the budget is spent and ``on_starved`` is ``stop``. What was kept waits for the next step.
            DataError: the source has no more prompts, and those drawn do not fill the step.
            RewardError: too many scores failed, or the reward leaves `correct` open under metric ``acc``.
            EngineError: the engine failed, or did not give back each requested sample exactly once.
        """
        if self._untaken is None:
            self._asked.put((step, count, version))
            return await self._ready.get()
        batch, self._untaken, self.unsettled = self._untaken, None, False
        return batch

    def release(self, batch: RolloutBatch) -> None:
        """The step of ``batch`` is done: the source hears what became of its prompts.
        Raises UserError: a checkpoint cannot keep the state that the source now has."""
        self._feed_back(batch)
        require_lasting("data.source", self._source.state())

    @contextlib.asynccontextmanager
    async def parked(self, colocated: bool) -> AsyncIterator[None]:
        """Inside, the memory of the engine's cache is the trainer's, if they share a device. After an error the engine
        stays asleep: its weights may be in part another version's."""
        if colocated:
            await self.engine.sleep()
        yield
        if colocated:
            await self.engine.wake()

    def state(self) -> dict[str, Any]:
        """The position, for a checkpoint (``state.py``). While a round is running: that before it.
        A source's state that no checkpoint can keep is left out; :meth:`release` raises for it, and nothing here, as
        this may be what is saved of a run that has failed."""
        state = self._state() if self._before is None else self._before
        return {key: value for key, value in state.items() if key != "source" or not lost(value)}

    def _state(self) -> dict[str, Any]:
        at = self._position
        return {
            "draws": at.draws,
            "keep_rate_kept": at.rate.kept,
            "keep_rate_finished": at.rate.finished,
            "source": self._source.state(),
            "carried": at.carried,
            "under_way": at.under_way,
            "rounds": at.rounds,
            "untaken": self._untaken,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`. Raises DataError: it was taken over other data, or without the source's state."""
        rate = AcceptanceRate(state["keep_rate_kept"], state["keep_rate_finished"])
        self._position = _Position(state["draws"], rate, state["carried"], state["under_way"], state["rounds"])
        if "source" not in state:
            raise DataError(
                "data.source: this checkpoint lacks the source's state, which could not be kept. What would work: mend "
                "the source's state() and move this checkpoint elsewhere, to go on from the one before it; or start a "
                "new run from its weights (model.path)"
            )
        self._source.load_state(state["source"])
        self._untaken = state.get("untaken")

    def drop_longer(self) -> int:
        """Drop carried groups with a response over ``rollout.max_response_length``, once larger; returns how many."""
        before, limit = self._position.carried, self._config.rollout.max_response_length
        self._position.carried = tuple(group for group in before if max(s.length for s in group.samples) <= limit)
        return len(before) - len(self._position.carried)

    # -- the producer --------------------------------------------------------------------------------------------------

    async def _produce(self) -> None:
        """One batch after the other, as they are asked for; whoever waits hears why there are no more."""
        try:
            while True:
                self._ready.put(await self._round(*await self._asked.get()))
        except BaseException as error:
            self._ready.close(error)
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _round(self, step: int, count: int, version: int) -> RolloutBatch:
        """Sample for one step, and decide what waits for the next one."""
        self._before = self._state()
        at = self._position
        sampling = DynamicSampling(self._config, step, count, version, at.rate, at.carried, at.under_way, at.rounds)
        try:
            await self._sample(sampling)
            at.rate.learn(*sampling.settled_draws())
            batch = sampling.batch(at.rate.value())
            starved = sampling.starved and self._config.algorithm.filter_groups.on_starved == "stop"
            waiting = tuple(group for group, status in batch.rejected if status == "carried")
            at.carried = batch.groups if starved else waiting
            at.under_way, at.rounds, self.unsettled = (), 0, starved
        except BaseException:
            if self._config.runtime.deterministic:
                self.load_state(self._before)
            else:  # what is finished is finished: the next round goes on from there
                at.under_way, at.rounds = sampling.under_way(), sampling.rounds
                self.unsettled = bool(at.under_way)
            raise
        finally:
            self._before = None
        if starved:  # a later step trains on its groups, but does not count them as its own
            self._feed_back(batch)
            raise StarvedError(_starved_message(batch, self._config), batch)
        return batch

    async def _sample(self, sampling: DynamicSampling) -> None:
        """Draw, sample and score until no draw can change the outcome, or the budget is spent."""
        early = self._config.rollout.max_staleness == 0 and not self._config.runtime.deterministic
        decoded = self._decode_steps
        async with task_group() as tasks:
            sampler = GroupSampler(self.engine, self._scorer, self._decode, self._config, sampling, tasks)
            sampler.resume(sampling.resumed)
            exhausted = False
            while not (early and sampling.admission().complete):
                if not exhausted and (count := sampling.refill(sampler.in_flight)):
                    drawn = [sampling.add(draw) for draw in self._draw(count)]
                    exhausted = len(drawn) < count
                    if drawn:
                        sampler.start(drawn)
                if not sampler.in_flight:
                    if exhausted and not sampling.admission().complete:
                        draws = self._position.draws
                        raise DataError(f"the prompt source has no more prompts after {draws} draws")
                    break
                await sampler.next_finished()
                note = f"groups of {len(sampling.own)} drawn, {sampler.tokens_per_second:,.0f} tok/s"
                self._progress(sampling.kept, sampling.wanted, note)
            sampler.cancel()  # all that is left serves draws after the last admitted one
        sampling.scores.check(final=True)
        sampling.reward_wait_s = sampler.seconds_since_last
        sampling.decode_steps = self._decode_steps - decoded

    @property
    def _decode_steps(self) -> int:
        """Of the engine so far; 0 of one that does not count them."""
        return int(getattr(self.engine, "decode_steps", 0))

    def _draw(self, count: int) -> Iterator[PendingGroup]:
        """As many draws; fewer if the source has no more prompts."""
        for _ in range(count):
            prompt = self._source.next()
            if prompt is None:
                return
            self._position.draws += 1
            yield PendingGroup(self._position.draws - 1, prompt)

    def _feed_back(self, batch: RolloutBatch) -> None:
        self._source.feedback(sorted(batch.sampled, key=lambda group: group.draw))


def _starved_message(batch: RolloutBatch, config: Config) -> str:
    stats, wanted, filters = batch.stats, config.rollout.prompts_per_step, config.algorithm.filter_groups
    others = {"without spread in the reward": stats.flat, "with fewer than two scores": stats.too_few_scored}
    counts = {"all wrong": stats.all_wrong, "mixed": stats.mixed, "all right": stats.all_right}
    counts |= {name: count for name, count in others.items() if count}
    failed = f"{stats.failed_scores} of {stats.scores} scores failed. " if stats.failed_scores else ""
    kept, run = float(config.run.save_samples), config.run.dir or "runs/run"
    shown = f"\nWhat was drawn: dapo inspect {run} --samples" if kept else ""
    prompts = "harder prompts" if stats.all_right > stats.all_wrong else "easier prompts"
    return (
        f"step {batch.step + 1}: dynamic sampling kept {stats.kept} of the {wanted} groups wanted; in {stats.drawn} "
        f"draws (algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} x {wanted}) there were "
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}.\n"
        f"{failed}What may help: {prompts}; a larger rollout.samples_per_prompt (now "
        f"{config.rollout.samples_per_prompt}); a larger "
        "algorithm.filter_groups.max_num_gen_batches; algorithm.filter_groups.on_starved=train, to train on the groups "
        "there are. If nearly all are wrong, check that the reward finds the answer in the responses at all."
        f"{shown}"
    )
