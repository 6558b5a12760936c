"""The scorer in front of any server: batches, retries. Subclasses make single requests.

Responses that wait are sent together; a verdict is returned as soon as it arrives, and what a broken reply lacks is
asked for again. While the server is down, busy or failing, requests are repeated with growing pauses, until
``give_up_after_s`` have passed without a verdict.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from dapo.config.reward import RemoteReward
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import Batcher, begin
from dapo.reward.contract import Scorer
from dapo.util.http.connections import HttpConnections, checked, token_in
from dapo.util.http.faults import BadReply, Fault, Pauses, Refusal
from dapo.util.http.secrecy import Secrets, shown

_log = logging.getLogger(__name__)
T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_REACHED_WITHIN_S = 60.0
LARGEST_REPLY = 64 * 2**20
_CHANCES = 2  # bad replies about one response after which its score has failed


@dataclass(eq=False, slots=True)
class Call:
    prompt: Prompt
    response: str
    finish_reason: FinishReason | None
    verdict: asyncio.Future[Reward]
    bad_replies: int = 0


class RemoteScorer(Scorer, ABC):
    """Belongs to the event loop that it is first used in."""

    def __init__(self, config: RemoteReward) -> None:
        self._config = config
        self._name = f"reward server {shown(config.url)}"
        token = token_in(config.token_env, "reward.token_env", RewardError)
        self._secrets = Secrets(token, config.url)
        self._connections = HttpConnections(token, config.concurrency)
        self._send = self._connections.send
        self._batcher: Batcher[Call, None] = Batcher(
            self._work, size=config.responses_per_call, concurrency=config.concurrency
        )
        self._submitted: set[asyncio.Task[None]] = set()
        self._told = False  # of the outage that is on
        self._silent_since: float | None = None  # the first fault since the last verdict, while scores are asked for

    @abstractmethod
    def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        """Make one request. Yields verdicts, or what is wrong with them, by place in ``calls``.
        Raises Fault, Refusal; BadReply: about the whole reply; RewardError: asking again would not help."""

    @abstractmethod
    async def _check_ready(self) -> None:
        """Raises Fault: the server is not ready yet; RewardError: asking again would not help."""

    async def start(self) -> None:
        """Wait until the server is ready: for a minute if it cannot be reached, longer if it says that it starts.
        Raises RewardError: it is not, or refuses."""
        try:
            await self._patiently(self._check_ready, min(_REACHED_WITHIN_S, self._config.give_up_after_s))
        except Refusal as refusal:
            raise self._error(f"{self._name}: {refusal}; is it the right address?") from None

    async def _patiently(self, ask: Callable[[], Awaitable[T]], reached_within_s: float) -> T:
        """The result of ``ask``, called at least twice: for ``reached_within_s``, or, if the server says that it is not
        ready, for ``give_up_after_s``. Raises Refusal; RewardError: there is no result."""
        begun, pauses, again = time.monotonic(), Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
        while True:
            within, requested_s = reached_within_s, 0.0
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await ask()
            except TimeoutError:
                cause = f"no answer within {self._config.timeout_s:g} s"
            except BadReply as error:
                cause = str(error)
            except Fault as error:
                cause, requested_s = str(error), error.pause_s
                within = self._config.give_up_after_s if error.alive else within
            except RewardError as error:
                raise self._error(str(error)) from None
            left = begun + within - time.monotonic()
            if left <= 0 and again:
                raise self._error(f"{self._name}: not ready after {within:g} s: {cause}; is it the right address?")
            again = True
            await asyncio.sleep(max(0.0, min(pauses.next(requested_s), left)))

    def _error(self, text: str) -> RewardError:
        return RewardError(self._secrets.blanked(text))

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        if not self._submitted:
            self._silent_since = None  # no answer was expected
        call = Call(prompt, response, finish_reason, asyncio.get_running_loop().create_future())
        submitted = begin(self._submitted, self._batcher.submit(call))  # the batch may go on after this verdict
        try:
            either: set[asyncio.Future[Any]] = {submitted, call.verdict}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not call.verdict.done():
                await submitted  # raises what ended the batch
            return await call.verdict
        finally:
            if not call.verdict.done():  # the caller was cancelled
                call.verdict.cancel()
                submitted.cancel()

    async def close(self) -> None:
        await self._batcher.close()
        await self._connections.close()

    async def _checked(self, reply: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
        return await checked(reply, self._name, "reward", RewardError)

    async def _work(self, calls: Sequence[Call]) -> Sequence[None]:
        """Ask until each call has its verdict."""
        size, pauses, since = len(calls), Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), time.monotonic()
        waiting = list(calls)
        while waiting := [call for call in waiting if not call.verdict.done()]:
            asked = waiting[:size]
            problem = await self._try(asked)
            if problem is None or any(call.verdict.done() and not call.verdict.cancelled() for call in asked):
                size, pauses = min(2 * size, len(calls)), Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                since = time.monotonic()
            elif isinstance(problem, Refusal):
                size, since = max(1, len(asked) // 2), time.monotonic()
                if len(asked) == 1:
                    self._fail(asked, problem)
            elif self._should_give_up(since):
                self._fail(waiting, problem)
            else:
                if not self._told:  # once per outage
                    self._told, limit_s = True, self._config.give_up_after_s
                    cause = self._secrets.blanked(str(problem))
                    _log.warning("%s does not answer: %s; asking again for up to %g s", self._name, cause, limit_s)
                waiting = waiting[size:] + asked  # one that crashes the server must not keep the others waiting
                size = max(1, len(asked) // 2) if problem.smaller else size
                left = since + self._config.give_up_after_s - time.monotonic()  # the last attempt is made then
                await asyncio.sleep(max(0.0, min(pauses.next(problem.pause_s), left)))
        return [None] * len(calls)

    async def _try(self, calls: Sequence[Call]) -> Fault | Refusal | None:
        """One attempt; returns why there was no reply. However much is wrong with a reply, it counts once per call."""
        struck: dict[Call, BadReply] = {}
        try:
            await self._request(calls, struck)
        except (Fault, Refusal) as problem:
            return problem
        except BadReply as error:
            struck = dict.fromkeys(calls, error) | struck
        finally:
            for call, problem_of_call in struck.items():
                call.bad_replies += 1
                if call.bad_replies >= _CHANCES:
                    self._fail([call], problem_of_call)
        return None

    async def _request(self, calls: Sequence[Call], struck: dict[Call, BadReply]) -> None:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async for place, verdict in self._ask(calls):
                    self._silent_since, self._told = None, False
                    if isinstance(verdict, Reward):
                        self._answer(calls[place], verdict)
                    else:
                        struck[calls[place]] = verdict
        except TimeoutError:
            raise Fault(f"no answer within {self._config.timeout_s:g} s", smaller=True) from None
        except Refusal:
            self._silent_since = None
            raise
        except RewardError as error:
            raise self._error(str(error)) from None

    def _fail(self, calls: Sequence[Call], problem: Exception) -> None:
        for call in calls:
            self._answer(call, Reward(None, 0.0, error=f"{self._name}: {problem}"))

    def _answer(self, call: Call, reward: Reward) -> None:
        if call.verdict.done():  # cancelled
            return
        error = None if reward.error is None else self._secrets.blanked(reward.error)
        call.verdict.set_result(replace(reward, error=error))

    def _should_give_up(self, since: float) -> bool:
        """Whether this batch, or any batch at all, has got no verdict for too long. In the second case each further
        batch is tried once."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        return now - min(since, self._silent_since) >= self._config.give_up_after_s
