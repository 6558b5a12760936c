"""The experience buffer: groups from the moment their prompts are drawn until they are trained on.

Consumes: prompts from a source, samples from an engine, rewards from a scorer. Produces: for each rollout step a
:class:`RolloutBatch` with the N groups to train on (raw rewards), those that were turned down, and counts. Computes no
loss, shapes no reward.

A task of its own produces them (:meth:`Collector.running`). On-policy (``max_staleness`` 0) a prompt is drawn only for
a step that waits. Otherwise as many are drawn as will probably give the groups of ``rollout.ahead`` steps beyond the
one that waits, or that is trained on. The task ends with a reason (starved, exhausted, failed), which ``take`` raises;
the engine and the scorer's deadline end each of its waits, and the number of draws is bounded. The first exception of
engine, scorer or decoder ends it at once, as does a cancellation: all its tasks are cancelled and all streams closed.
What had come is in the state; in deterministic mode that is the state before the round, which is drawn again from its
seeds.

Order: draws are numbered through the run, and the first N kept ones *in that order* are admitted, whatever the order
they finish in. Each sample has its own seed. Under ``runtime.deterministic`` nothing depends on when things finish.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from dapo.config import Config
from dapo.environments.player import Player
from dapo.errors import DataError, StarvedError
from dapo.orchestrator.dynamic_sampling import DynamicSampling, starved_message
from dapo.orchestrator.encoded_state import lost, require_lasting
from dapo.orchestrator.episode_sampler import sampling
from dapo.orchestrator.group_sampler import GroupSampler
from dapo.orchestrator.in_flight import Hold, InFlight
from dapo.orchestrator.pending_group import AcceptanceRate, PendingGroup
from dapo.orchestrator.protocols import PromptSource
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.records import Group
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine, InterruptibleEngine
from dapo.util.asynchronous import Channel, next_event, until_done

Progress = Callable[[int, int, str], object]
"""Hears how much is done, of how much, and a note."""


@dataclass(slots=True)
class _Position:
    """All that the next step depends on, but for the source and the draws that a producer has in hand."""

    draws: int = 0
    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    carried: tuple[Group, ...] = ()
    under_way: tuple[Group, ...] = ()
    """Draws that are not settled, each with the samples that had come; none in deterministic mode."""
    rounds: int = 0
    """Times that prompts were drawn for the step that waits."""
    steps: int = 0
    """Those that groups were handed out for."""
    counts: Counter[str] = field(default_factory=Counter)
    """What became of settled draws, by the names of ``RolloutStats.totals``."""
    starved: bool = False
    learning: bool = False
    """Whether a step is between its batch and its push."""
    ready: bool = False
    """Whether the engine has weights to sample with. Inside of a step that is resumed it has not, until the push."""


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
        vocabulary: int | None = None,
        player: Callable[[], Player] | None = None,
    ) -> None:
        """``vocabulary``: how many tokens the model knows; None: not known. ``player``: makes one, for episodes."""
        self.engine = engine
        self._source = source
        self._scorer = scorer
        self._tokens, self._player = (decode, vocabulary), player
        self._config = config
        self._progress = progress
        self._position = _Position()
        self._before: dict[str, Any] | None = None
        self._ledger: DynamicSampling | None = None
        self._in_flight: InFlight | None = None
        self._wanted: tuple[int, int, int] | None = None
        """Step, groups and version that are waited for."""
        self._untaken: RolloutBatch | None = None
        """Ready in the moment in which whoever waited for it was cancelled."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, batches are produced. Nothing of it is left behind, however it ends."""
        self._ready: Channel[RolloutBatch] = Channel()
        self._heard = asyncio.Event()
        self._in_flight = InFlight(self.engine, self._config, self._heard.set, self._tokens[1])
        producer = asyncio.create_task(self._produce(self._in_flight), name="dapo-collector")
        try:
            yield
        finally:
            producer.cancel()
            try:
                await until_done(producer)
            finally:
                self._in_flight, self._wanted = None, None
                for batch in self._ready.drain():
                    self._untaken = batch

    async def take(self, step: int, count: int, version: int) -> RolloutBatch:
        """The groups of a rollout step: sampled until ``count`` hold something to learn from (Eq. 11).

        With ``max_staleness`` 0, draws that can no longer be admitted are cancelled. Otherwise they go on, and groups
        beyond ``count`` wait for the next step, as long as they are fresh. In deterministic mode all draws finish, and
        new ones are made only when none is in flight.

        Args:
            step: rollout step, from 0.
            version: policy version that will be trained on these groups, which staleness is counted to, and that the
                engine has.

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
            self._wanted = (step, count, version)
            self._heard.set()
            return await self._ready.get()
        batch, self._untaken = self._untaken, None
        return batch

    def release(self, batch: RolloutBatch) -> None:
        """The step of ``batch`` is done: the source hears what became of its prompts.
        Raises UserError: a checkpoint cannot keep the state that the source now has."""
        self._feed_back(batch)
        require_lasting("data.source", self._source.state())

    # -- when the engine does something else ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def parked(self, colocated: bool) -> AsyncIterator[None]:
        """Inside, the device is the trainer's if they share it, and so is the memory of the engine's cache unless that
        stays. After an error the engine stays asleep: its weights may be in part another version's."""
        if not colocated:
            yield
        elif self._config.cache_stays and isinstance(self.engine, InterruptibleEngine):
            async with self._held("pause"):
                await self.engine.pause()
                yield
                await self.engine.resume()
        else:
            async with self._held("sleep"):
                await self.engine.sleep()
                yield
                await self.engine.wake()

    @contextlib.asynccontextmanager
    async def changing_weights(self) -> AsyncIterator[None]:
        """Inside, new weights are handed to the engine; ``rollout.in_flight`` says what becomes of samples meanwhile.
        From then on there is room for another step's groups."""
        self._ready.check()  # the reason rather than what follows from it
        async with self._held("weights"):
            try:
                yield
            except Exception:
                self._ready.check()
                raise
            self._position.learning, self._position.ready = False, True
            if self._ledger is not None:
                self._ledger.version = self.engine.version

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, no prompts are drawn: an evaluation has the engine, but for samples that are in flight."""
        async with self._held("evaluation"):
            before = self._decode_steps
            yield
            if self._ledger is not None:
                self._ledger.decode_steps += self._decode_steps - before

    def _held(self, before: Hold) -> AbstractAsyncContextManager[None]:
        return self._in_flight.holding(before) if self._in_flight else contextlib.nullcontext()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether there is more here than between two steps of a run that samples for the step that waits only."""
        at, lasting = self._position, self._ledger is not None and self._config.rollout.max_staleness > 0
        return self._untaken is not None or at.starved or bool(at.under_way) or lasting

    def state(self) -> dict[str, Any]:
        """The position, for a checkpoint (``state.py``); on-policy, while a round is running, that before it.
        A source's state that no checkpoint can keep is left out; :meth:`release` raises for it, and nothing here, as
        this may be what is saved of a run that has failed."""
        state = self._state() if self._before is None else self._before
        return {key: value for key, value in state.items() if key != "source" or not lost(value)}

    def _state(self) -> dict[str, Any]:
        at, ledger = self._position, self._ledger
        return {
            "draws": at.draws,
            "keep_rate_kept": at.rate.kept,
            "keep_rate_finished": at.rate.finished,
            "source": self._source.state(),
            "carried": ledger.waiting() if ledger else at.carried,
            "under_way": ledger.under_way() if ledger else at.under_way,
            "rounds": ledger.rounds if ledger else at.rounds,
            "steps": at.steps,
            "counts": dict(at.counts),
            "untaken": self._untaken,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`. Raises DataError: it was taken over other data, or without the source's state."""
        rate = AcceptanceRate(state["keep_rate_kept"], state["keep_rate_finished"])
        groups = state["carried"], state["under_way"]
        counts = Counter(state.get("counts", {"produced": sum(map(len, groups))}))
        self._position = _Position(state["draws"], rate, *groups, state["rounds"], state.get("steps", 0), counts)
        if "source" not in state:
            raise DataError(
                "data.source: this checkpoint lacks the source's state, which could not be kept. What would work: mend "
                "the source's state() and move this checkpoint elsewhere, to go on from the one before it; or start a "
                "new run from its weights (model.path)"
            )
        self._source.load_state(state["source"])
        self._untaken = state.get("untaken")

    def drop_unfit(self) -> int:
        """Drop groups with a response over ``rollout.max_response_length``, or with more samples than are wanted of a
        prompt, once larger; returns how many."""
        at, rollout = self._position, self._config.rollout
        longest, size = rollout.max_response_length, rollout.samples_per_prompt

        def fits(group: Group) -> bool:
            return all(s.length <= longest for s in group.samples) and len(group.samples) <= size

        before = len(at.carried) + len(at.under_way)
        at.carried, at.under_way = (tuple(filter(fits, groups)) for groups in (at.carried, at.under_way))
        dropped = before - len(at.carried) - len(at.under_way)
        at.counts["cancelled"] += dropped
        return dropped

    # -- the producer --------------------------------------------------------------------------------------------------

    async def _produce(self, in_flight: InFlight) -> None:
        """One batch after the other, as they are asked for; whoever waits hears why there are no more."""
        try:
            work = (self.engine, self._scorer, self._tokens[0], self._config, in_flight)
            async with sampling(self._player, *work, self._heard.set) as sampler:
                while True:
                    self._ready.put(await self._next_batch(sampler))
        except BaseException as error:
            self._keep_what_there_is()
            self._ready.close(error)
            if isinstance(error, asyncio.CancelledError):
                raise

    def _keep_what_there_is(self) -> None:
        """For whoever goes on later. In deterministic mode, that the round had never begun."""
        at, ledger, before = self._position, self._ledger, self._before
        self._ledger = self._before = None
        if ledger is not None and before is not None and self._config.runtime.deterministic:
            self.load_state(before)
        elif ledger is not None:
            at.carried, at.under_way, at.rounds = ledger.waiting(), ledger.under_way(), ledger.rounds

    async def _next_batch(self, sampler: GroupSampler) -> RolloutBatch:
        """Draw, sample and score until no draw can change what the next step gets, or the budget is spent."""
        while self._ledger is None:
            if self._batches:
                self._begin(sampler)
            else:
                await next_event(self._heard)
        ledger = self._ledger
        while True:
            if self._wanted is not None:
                ledger.begin(*self._wanted)
            drew = self._draw_more(ledger, sampler)
            if self._wanted is not None and not drew and self._found(ledger):
                return await self._hand_out(ledger, sampler)
            await next_event(self._heard)
            if self._wanted is not None:
                note = f"groups of {ledger.drawn} drawn, {sampler.tokens_per_second:,.0f} tok/s"
                self._progress(ledger.kept, ledger.wanted, note)

    @property
    def _batches(self) -> int:
        """How many steps to have groups for: of the one that waits, and of those after it, as far as there are any."""
        at, waits = self._position, self._wanted is not None
        ahead = self._config.ahead if at.ready or waits else 0
        wanted = ahead + (waits or (ahead > 0 and not at.learning))
        return max(min(wanted, self._config.training.steps - at.steps), int(waits))

    def _begin(self, sampler: GroupSampler) -> None:
        """A ledger for draws that were kept, and for those to come."""
        at = self._position
        if self._config.rollout.max_staleness == 0:
            self._before = self._state()
        place = self._wanted or (at.steps, self._config.rollout.prompts_per_step, self.engine.version)
        ledger = DynamicSampling(self._config, *place, at.rate, at.carried, at.under_way, at.rounds)
        self._ledger = sampler.ledger = ledger
        ledger.decode_steps = self._decode_steps
        self._heard.clear()  # so that the next draws are sized by what becomes of the first ones
        sampler.restart()
        sampler.resume(ledger.resumed)

    def _draw_more(self, ledger: DynamicSampling, sampler: GroupSampler) -> bool:
        """Whether prompts were drawn."""
        able = not (sampler.in_flight.held or ledger.exhausted)
        if not able or not (count := ledger.refill(self._batches, self._wanted is not None)):
            return False
        drawn = [ledger.add(draw) for draw in self._draw(count)]
        ledger.exhausted = len(drawn) < count
        if drawn:
            sampler.start(drawn)
        return bool(drawn)

    def _found(self, ledger: DynamicSampling) -> bool:
        """Whether the step that waits can have its groups. Raises DataError: there will never be enough."""
        complete = ledger.complete
        if not ledger.decided:
            return complete and not self._config.runtime.deterministic
        if ledger.exhausted and not complete and not ledger.going_on:
            raise DataError(f"the prompt source has no more prompts after {self._position.draws} draws")
        return True

    async def _hand_out(self, ledger: DynamicSampling, sampler: GroupSampler) -> RolloutBatch:
        """The batch of a step, once it is found, and what goes on to the next one."""
        at, lasting = self._position, self._config.rollout.max_staleness > 0
        if not lasting:
            await sampler.stop()  # all that is left serves draws after the last admitted one
            ledger.reward_wait_s = sampler.seconds_since_last
        ledger.scores.check(final=True)
        ledger.decode_steps = self._decode_steps - ledger.decode_steps
        at.rate.learn(*ledger.settled_draws())
        batch = ledger.batch(at.rate.value(), sampler.in_flight.spans.cut()[1])
        at.starved = ledger.starved and self._config.algorithm.filter_groups.on_starved == "stop"
        at.carried = batch.groups if at.starved else ()
        totals = self._count(batch)
        batch = replace(batch, stats=replace(batch.stats, totals=totals, window_tokens=sampler.tokens))
        sampler.restart()
        self._ledger = self._before = None
        going_on = ledger.going_on
        at.under_way, at.rounds, self._wanted = tuple(draw.under_way() for draw in going_on), 0, None
        if at.starved:  # a later step trains on its groups, but does not count them as its own
            self._feed_back(batch)
            raise StarvedError(starved_message(batch, self._config), batch)
        at.under_way, at.steps, at.learning, at.ready = (), batch.step + 1, True, True
        if lasting:
            place = (self._config, at.steps, ledger.wanted, self.engine.version, at.rate)
            self._ledger = sampler.ledger = DynamicSampling(*place, going_on=going_on)
            self._ledger.scores.before, self._ledger.decode_steps = ledger.scores, self._decode_steps
            ledger.scores.before = None
        return batch

    def _count(self, batch: RolloutBatch) -> dict[str, int]:
        """What became of all draws, with those of this batch."""
        at, stats = self._position, batch.stats
        trained = 0 if at.starved else len(batch.groups)
        filtered = sum(status not in ("stale", "surplus") for _, status in batch.rejected)
        lost = {"stale": stats.stale, "surplus": stats.surplus, "cancelled": stats.cancelled}
        at.counts.update(trained=trained, filtered=filtered, **lost)
        waiting = stats.carried + len(at.carried)
        names = ("produced", "trained", "filtered", "stale", "surplus", "cancelled")
        return {name: at.counts[name] for name in names} | {"carried": waiting, "unfinished": stats.unfinished}

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
            self._position.counts["produced"] += 1
            yield PendingGroup(self._position.draws - 1, prompt)

    def _feed_back(self, batch: RolloutBatch) -> None:
        self._source.feedback(sorted(batch.sampled, key=lambda group: group.draw))
