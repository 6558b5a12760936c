"""One episode: who plays it, an environment's class or an agent, asks the model through :meth:`Episode.complete`.

Consumes conversations, asks an engine for one turn after the other, and keeps the trace. Its caps end it: turns, tokens
(those of an answer are reserved before it is asked for) and seconds, which count while the model is not at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from dapo.config.environment import EnvironmentConfig
from dapo.data.template import PromptTemplate
from dapo.environments.calls import Call, Malformed, Message, Schema, calls_in, knows_tools, told_otherwise
from dapo.environments.trace import Opening, Trace
from dapo.records import Sample

Ask = Callable[[tuple[int, ...], int, int], Awaitable[Sample]]
"""``(context, turn, most)``: has the model go on from ``context`` in turn number ``turn``, for ``most`` tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens: ``context`` of a sequence with its prompt, ``response`` of all sequences together without theirs."""

    context: int
    response: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said in a turn: ``raw`` as the template would have to write it, ``text`` before the first of the
    ``calls``, and ``said`` all of it without control tokens. ``stop``: one of ``TURN_ENDS``; ``fault``: of a call."""

    raw: str
    text: str
    said: str
    calls: Sequence[Call]
    stop: str
    prompt_tokens: int
    tokens: int
    turns_left: int
    fault: str = ""


class Over(Exception):
    """The episode is over: nothing more is asked of the model. The message is one of ``EPISODE_ENDS``."""


class Episode:
    """See the module.

    Attributes:
        ended: why it is over; None: it is not.
        last: the last answer.
        failed: what the engine raised, which is no fault of the episode's.
    """

    def __init__(self, template: PromptTemplate, ask: Ask, config: EnvironmentConfig, limits: Limits) -> None:
        self._template, self._ask, self._config, self._limits = template, ask, config, limits
        self.trace = Trace(template)
        self.ended: str | None = None
        self.last: Answer | None = None
        self.failed: BaseException | None = None
        self._turns = 0
        self._clock: asyncio.Timeout | None = None
        self._asking: asyncio.Future[Sample] | None = None
        self._one = asyncio.Lock()

    def timed(self) -> asyncio.Timeout:
        """The time that it may take."""
        self._clock = asyncio.timeout(self._config.timeout_s)
        return self._clock

    def end(self, why: str) -> str:
        """Nothing more is asked of the model; what is being asked is given up. Returns why it ended, which the first
        reason says."""
        self.ended = self.ended or why
        if self._asking is not None:
            self._asking.cancel()
        return self.ended

    async def quiet(self) -> None:
        """Returns when nothing is asked of the model any more."""
        async with self._one:
            pass

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), most: int | None = None, may_call: bool = True
    ) -> Answer:
        """The model's next answer in a conversation.

        Args:
            messages: all of it; earlier answers with the content that they came with (``raw``).
            tools: of the conversation; without those that it began with a new sequence begins.
            most: tokens that it may say.
            may_call: False: calls are not read.

        Raises:
            Over: the episode is over, or a cap ends it.
            DataError: the chat template refuses the messages.
        """
        async with self._one:
            if self._turns >= self._config.max_turns:
                self.end("max_turns")
            if self.ended:
                raise Over(self.ended)
            messages = [self._harmless(message) for message in messages]
            if not knows_tools(self._template.source) and self._template.source:
                messages, tools = told_otherwise(messages, tools), ()
            text = self._template.conversation(messages, tools)
            opening = self.trace.open(text.encode(errors="replace").decode())  # lone surrogates, from JSON, are "?"
            used = sum(len(one.ids) for one in self.trace.sequences) + len(opening.tail)
            room = min(self._limits.context - len(opening.context), self._limits.response - used)
            if room < 1:
                raise Over(self.end("max_tokens"))
            sample = await self._sampled(opening, min(room, *filter(None, (self._config.max_turn_tokens, most, room))))
            self.last = self._read(opening, sample, may_call)
            self.trace.add(opening, sample, self.last.stop)
            if sample.truncated and sample.length == room:
                self.end("max_tokens")
            return self.last

    def _harmless(self, message: Message) -> Message:
        """What a tool or a user has said ends no turn and begins none."""
        content = message.get("content")
        if message["role"] in ("assistant", "system", "developer") or not isinstance(content, str):
            return message
        return {**message, "content": self._template.without_special(content)}

    async def _sampled(self, opening: Opening, most: int) -> Sample:
        clock, now = self._clock, asyncio.get_running_loop().time
        when = clock.when() if clock is not None and not clock.expired() else None
        if clock is not None and when is not None:
            clock.reschedule(None)
            when -= now()
        self._asking = asyncio.ensure_future(self._ask(opening.context, self._turns, most))
        try:
            sample = await self._asking
        except asyncio.CancelledError:
            if self.ended and self._asking.cancelled():
                raise Over(self.ended) from None
            raise
        except BaseException as error:
            self.failed = error
            self.end("died")
            raise
        finally:
            if clock is not None and when is not None and not self.ended:
                clock.reschedule(now() + when)
        self._turns += 1
        return sample

    def _read(self, opening: Opening, sample: Sample, may_call: bool) -> Answer:
        raw, said = self.trace.said(sample), self._template.decode(sample.token_ids.tolist())
        text, calls, stop, fault = raw, list[Call](), "length" if sample.truncated else "stop", ""
        if may_call and not sample.truncated:  # of a turn that was cut, no call is read, nor missed
            try:
                text, calls = calls_in(raw, self._template.source)
                stop = "tool_calls" if calls else "stop"
            except Malformed as error:
                stop, fault = "malformed", str(error)
        left = self._config.max_turns - self._turns
        return Answer(raw, text, said, calls, stop, len(opening.context), sample.length, left, fault)
