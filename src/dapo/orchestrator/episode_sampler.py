"""From drawn prompts to whole groups of episodes: one task plays each, and asks the engine for one turn at a time.

New weights come between two turns or within one, as ``rollout.in_flight`` says: ``keep`` goes on under them, ``drain``
waits for the whole episode, ``restart`` begins it anew. Each turn has a seed of its own, so an episode depends on
nothing else in flight, but for what takes too long.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from dapo.config import Config
from dapo.environments.player import Player
from dapo.orchestrator.group_sampler import GroupSampler
from dapo.orchestrator.in_flight import InFlight
from dapo.orchestrator.pending_group import PendingGroup
from dapo.records import Sample
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine
from dapo.rollout.seeds import turn_seed
from dapo.util.asynchronous import task_group

_FIRST_REQUEST = 2**40
"""Request ids of turns, which are no numbers of draws."""


class EpisodeSampler(GroupSampler):
    """As its base, with an episode for each sample."""

    def __init__(self, player: Player, *given: Any) -> None:
        super().__init__(*given)
        self._player = player
        self._requests = itertools.count(_FIRST_REQUEST)

    def resume(self, draws: Sequence[PendingGroup]) -> None:
        """An episode without a verdict is begun anew: what it was in is gone."""
        for draw in draws:
            draw.received = dict(draw.scored)
        super().resume(draws)

    def start(self, draws: Sequence[PendingGroup]) -> None:
        for draw in draws:
            for index in range(self._size):
                if index not in draw.received:
                    self._spawn(self._episode(draw, index))

    async def _episode(self, draw: PendingGroup, index: int) -> None:
        async with self._player.seat() as session, self.in_flight.playing():
            while True:
                lengths = list[int]()
                try:
                    ask = partial(self._ask, draw, index, self._engine.version, lengths)
                    played = await self._player.play(session, draw.prompt, ask)
                except _BeginAnew:
                    draw.restarted += 1
                    draw.dropped_tokens += sum(lengths)
                else:
                    break
        sample = draw.received[index] = played.sample(draw.number, index, draw.prompt)
        await self._judge(draw, sample, played.scored(sample, draw.prompt, self._scorer))

    async def _ask(
        self, draw: PendingGroup, index: int, version: int, lengths: list[int], context: Any, turn: int, most: int
    ) -> Sample:
        seed = turn_seed(self._config.seed, draw.prompt.row, draw.number, index, turn)
        one = PendingGroup(next(self._requests), replace(draw.prompt, token_ids=context), turn=(seed, most))
        await self._read([one])
        lengths.append(one.received[0].length)
        if self.in_flight.policy == "restart" and self._engine.version != version:
            raise _BeginAnew
        return one.received[0]


@asynccontextmanager
async def sampling(
    player: Callable[[], Player] | None,
    engine: Engine,
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
    config: Config,
    in_flight: InFlight,
    heard: Callable[[], object],
) -> AsyncIterator[GroupSampler]:
    """Inside, there is a sampler of what the recipe asks for: episodes, for which ``player`` makes one that plays them,
    or single responses."""
    async with AsyncExitStack() as stack:
        playing = await stack.enter_async_context(player()) if player else None
        tasks = await stack.enter_async_context(task_group())
        work = (engine, scorer, decode, config, in_flight, tasks, heard)
        yield EpisodeSampler(playing, *work) if playing else GroupSampler(*work)


class _BeginAnew(Exception):
    """There are new weights, and ``rollout.in_flight`` is ``restart``."""
