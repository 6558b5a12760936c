"""The scorer in front of any server: batches, retries, hedging. How one request is made is a subclass's affair.

Consumes single responses, produces exactly one verdict for each. Those that wait are sent together; a verdict is handed
on as soon as it is there, and what a broken reply lacks is asked for again. Waits for the server: while it is down,
busy or failing, requests are repeated with growing pauses, until ``give_up_after_s`` have passed without a verdict.
"""

from __future__ import annotations

import abc
import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dapo.config.reward import RemoteReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.batching import Batcher
from dapo.reward.client.connections import token_in
from dapo.reward.client.faults import BadReply, Fault
from dapo.reward.contract import Doubt

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_REACHED_WITHIN_S = 60.0
_CHANCES = 2
"""Replies that may break the agreement about one response before its score has failed."""


@dataclass(eq=False, slots=True)
class Call:
    """A response whose verdict is asked for."""

    prompt: Prompt
    response: str
    verdict: asyncio.Future[Reward]
    bad_replies: int = 0


@dataclass(slots=True)
class _Pauses:
    """Exponential back-off with jitter."""

    chance: random.Random
    seconds: float = _FIRST_PAUSE_S

    def next(self, at_least: float) -> float:
        """The next pause in seconds. Jitter, so that clients that failed together do not come back together."""
        pause = max(self.seconds, at_least) * self.chance.uniform(1.0, 1.5)
        self.seconds = min(_LONGEST_PAUSE_S, 2 * self.seconds)
        return pause


class RemoteScorer(abc.ABC):
    """Belongs to the event loop that it is first used in."""

    def __init__(self, config: RemoteReward) -> None:
        self._config = config
        self._name = f"reward server {config.url}"
        self._token = token_in(config.token_env, "reward.token_env")
        self._batcher: Batcher[Call, None] = Batcher(self._work, size=config.batch_size, concurrency=config.concurrency)
        self._submitted: set[asyncio.Task[None]] = set()
        self._most_connections = config.concurrency * (1 if config.hedge_after_s is None else 2)
        self._chance = random.Random()
        self._silent_since: float | None = None  # the first fault since the last verdict

    @abc.abstractmethod
    def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        """Make one request. Yields, by place in ``calls``, verdicts or what is wrong with them.

        Raises:
            Fault: ask again later.
            BadReply: the whole reply breaks the agreement.
            RewardError: asking again would not help.
        """

    @abc.abstractmethod
    async def _check_ready(self) -> None:
        """Return if scores can be asked for.

        Raises:
            Fault: not yet.
            RewardError: asking again would not help.
        """

    @abc.abstractmethod
    async def _close_connections(self) -> None: ...

    async def start(self) -> None:
        """Wait until the server is ready: for a minute if it cannot be reached, longer if it says that it starts.

        Raises:
            RewardError: it is not, or refuses.
        """
        await self._patiently(self._check_ready)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of ``ask``, which is asked again as :meth:`start` says.

        Raises:
            RewardError: there is none.
        """
        begun, pauses, longest = time.monotonic(), _Pauses(self._chance), self._config.give_up_after_s
        while True:
            within = min(_REACHED_WITHIN_S, longest)
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await ask()
            except TimeoutError:
                cause = f"no answer within {self._config.timeout_s:g} s"
            except (Fault, BadReply) as error:
                cause = str(error)
                if isinstance(error, Fault) and error.alive:
                    within = longest
            left = begun + within - time.monotonic()
            if left <= 0:
                raise RewardError(f"{self._name}: not ready after {within:g} s: {cause}; is it the right address?")
            await asyncio.sleep(min(pauses.next(0), left))

    @abc.abstractmethod
    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """See :class:`Scorer`."""

    async def score(self, prompt: Prompt, response: str) -> Reward:
        """See :class:`Scorer`."""
        call = Call(prompt, response, asyncio.get_running_loop().create_future())
        submitted = asyncio.create_task(self._batcher.submit(call))
        self._submitted.add(submitted)  # the batch may go on for others after this verdict is there
        submitted.add_done_callback(self._settle)
        try:
            either: set[asyncio.Future[Any]] = {submitted, call.verdict}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not call.verdict.done():
                await submitted  # raises what ended the batch
            return await call.verdict
        finally:
            if not call.verdict.done():  # the caller has gone
                call.verdict.cancel()
                submitted.cancel()

    def _settle(self, submitted: asyncio.Task[None]) -> None:
        self._submitted.discard(submitted)
        if not submitted.cancelled():
            submitted.exception()  # taken note of, also if the caller has gone

    async def close(self) -> None:
        """Break off what runs and close the connections."""
        await self._batcher.close()
        await self._close_connections()

    async def _work(self, calls: Sequence[Call]) -> Sequence[None]:
        """Ask until each call has its verdict."""
        size, pauses, since = len(calls), _Pauses(self._chance), time.monotonic()
        waiting = list(calls)
        while waiting := [call for call in waiting if not call.verdict.done()]:
            asked = waiting[:size]
            try:
                await self._attempt(asked)
                fault = None
            except Fault as error:
                fault = error
            except BadReply as error:
                fault = None
                for call in asked:
                    self._strike(call, error)
            if fault is None or any(call.verdict.done() for call in asked):
                size, pauses, since = min(2 * size, len(calls)), _Pauses(self._chance), time.monotonic()
                continue
            if self._should_give_up(since):
                for call in waiting:
                    _settle(call, Reward(None, 0.0, error=f"{self._name}: {fault}"))
            else:
                waiting = waiting[size:] + asked  # one that brings the server down must not keep the others waiting
                size = max(1, len(asked) // 2) if fault.smaller else size
                await asyncio.sleep(self._pause(pauses, fault, since))
        return [None] * len(calls)

    async def _attempt(self, calls: Sequence[Call]) -> None:
        """One request, and a second one beside it if the first takes long."""
        hedge_s = self._config.hedge_after_s
        requests = {asyncio.create_task(self._request(calls))}
        try:
            done, running = await asyncio.wait(requests, timeout=hedge_s)
            if not done:
                requests.add(asyncio.create_task(self._request(calls)))
            while True:
                done, running = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
                succeeded = [request for request in done if request.exception() is None]
                if succeeded or not running:
                    (succeeded or list(done))[0].result()
                    return
                requests = running
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _request(self, calls: Sequence[Call]) -> None:
        """One request within its time."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async for place, verdict in self._ask(calls):
                    self._silent_since = None
                    if isinstance(verdict, Reward):
                        _settle(calls[place], verdict)
                    else:
                        self._strike(calls[place], verdict)
        except TimeoutError:
            raise Fault(f"no answer within {self._config.timeout_s:g} s", smaller=True) from None

    def _strike(self, call: Call, problem: BadReply) -> None:
        call.bad_replies += 1
        if call.bad_replies >= _CHANCES:
            _settle(call, Reward(None, 0.0, error=f"{self._name}: {problem}"))

    def _should_give_up(self, since: float) -> bool:
        """When this batch has got nothing for too long; or no batch has, and then each further one is tried once."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        return now - min(since, self._silent_since) >= self._config.give_up_after_s

    def _pause(self, pauses: _Pauses, fault: Fault, since: float) -> float:
        """Never beyond the time to give up, so that there is a last attempt then."""
        left = since + self._config.give_up_after_s - time.monotonic()
        return max(0.0, min(pauses.next(fault.pause_s), left))


def _settle(call: Call, reward: Reward) -> None:
    if not call.verdict.done():  # by a hedged request, or nobody waits any more
        call.verdict.set_result(reward)
