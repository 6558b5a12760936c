"""From requests to text, while it is written: what ``dapo generate``, the playground and the policy server share.

Consumes requests and an engine. Produces for each sample its parts, the last one with the whole sample. Waits for the
engine only: who takes the parts slowly gets larger ones, and nobody else waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dapo.data.template import PromptTemplate
from dapo.records import Sample
from dapo.rollout.engine import Draft, InterruptibleEngine, Request
from dapo.rollout.native.stopping import NO_TEXT

Likely = tuple[int, str, float]
"""A token: its id, its text and its log-probability, in nats."""


class Pieces:
    """What tokens add to the text of a response; put together it is the whole.

    A token is decoded behind the one before it, which it may owe a space. A character that is spread over several
    tokens comes with the last of them; those before it, and tokens that are not text, add nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._open: list[int] = []  # the last token, and those that it needs to be read rightly
        self._before = ""  # the text of what was told of these
        self._most = 0  # so many are open before they are read again

    def add(self, token_ids: Sequence[int], last: bool = False) -> list[str]:
        """One text for each token. ``last``: nothing follows, so what is no character will not become one."""
        return [self.join([one], last and place == len(token_ids)) for place, one in enumerate(token_ids, start=1)]

    def join(self, token_ids: Sequence[int], last: bool = False) -> str:
        """One text for all of them."""
        self._open += token_ids
        if not last and len(self._open) < self._most:
            return ""
        text = self._decode(self._open)
        told = text if last or text == self._before else text.rstrip(NO_TEXT)
        piece = told[len(self._before) :]
        if last:
            return piece
        self._before += piece
        for size in range(1, 5) if told == text else ():  # a character has four bytes at most
            alone = self._decode(self._open[-size:])
            if alone and NO_TEXT not in alone:  # otherwise a part of a character, or no text
                self._open, self._before = self._open[-size:], alone
                break
        self._most = len(self._open) * 9 // 8  # what stays open is read ever more rarely, lest long texts take n² steps
        return piece


@dataclass(frozen=True, slots=True)
class Part:
    """What came of a sample since its last part: the tokens from number ``start`` on. ``text``: as far as it can be
    shown. ``pieces``: the text of each token, if they were asked for. ``sample``: the whole one; no part follows."""

    request_id: int
    index: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    text: str
    pieces: Sequence[str]
    sample: Sample | None


class _Writer:
    """The text of one sample. Stop texts that are ``hidden`` are never shown, nor what may become one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], pieces: bool, hidden: Collection[str]) -> None:
        self._pieces, self._each, self._hidden = Pieces(decode), pieces, hidden
        self._told = 0  # tokens
        self._back = ""  # text that is held back
        self._stopped = False

    def part(self, events: Sequence[Sample | Draft]) -> Part:
        start = self._told
        ids, logprobs, versions = list[int](), list[float](), list[int]()
        for event in events:
            new = self._told - (event.start if isinstance(event, Draft) else 0)
            # at once: numbers of an array take longer one by one than their text
            ids += np.asarray(event.token_ids[new:]).tolist()
            logprobs += np.asarray(event.logprobs[new:]).tolist()
            versions += np.asarray(event.versions[new:]).tolist()
            self._told = start + len(ids)
        sample = event if isinstance(event, Sample) else None
        pieces = self._pieces.add(ids, sample is not None) if self._each else []
        text = "".join(pieces) if self._each else self._pieces.join(ids, sample is not None)
        text = self._shown(text, sample is not None)
        return Part(event.request_id, event.index, start, ids, logprobs, versions, text, pieces, sample)

    def _shown(self, text: str, last: bool) -> str:
        whole = "" if self._stopped else self._back + text
        if found := [place for one in self._hidden if (place := whole.find(one)) >= 0]:
            self._stopped, self._back = True, ""
            return whole[: min(found)]
        held = 0 if last else max((_overlap(whole, one) for one in self._hidden), default=0)
        self._back = whole[len(whole) - held :]
        return whole[: len(whole) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


async def written(
    engine: InterruptibleEngine,
    template: PromptTemplate,
    requests: Sequence[Request],
    *,
    drafts: bool = True,
    pieces: bool = False,
    hidden: Collection[str] = (),
    period: Callable[[], float] = lambda: 0.0,
    done: Callable[[], object] = lambda: None,
) -> AsyncGenerator[Part]:
    """The parts of all samples of ``requests``, in the order in which they come. To be closed, which ends what is left.

    Args:
        drafts: whether to tell of samples while they are written; otherwise each is one part.
        pieces: whether to give the text of each token, which takes longer.
        hidden: stop texts that end the text before them.
        period: seconds in which drafts are gathered; what has finished is told at once.
        done: called when the engine is done with all of them, even if their parts wait to be taken.

    Raises EngineError: a request cannot be served, or the engine failed."""
    news: dict[tuple[int, int], list[Sample | Draft]] = {}  # of each sample, what was not told yet
    changed, clock, due = asyncio.Event(), asyncio.get_running_loop().time, 0.0

    async def read() -> None:
        events = engine.stream(requests) if drafts else engine.generate(requests)
        try:
            async with aclosing(cast(AsyncGenerator[Sample | Draft], events)) as found:
                async for event in found:
                    news.setdefault((event.request_id, event.index), []).append(event)
                    if isinstance(event, Sample) or clock() >= due:  # otherwise it is told with the next draft
                        changed.set()
        finally:
            done()
            changed.set()

    writers: dict[tuple[int, int], _Writer] = {}
    reading = asyncio.create_task(read())
    ended = False
    try:
        while not ended:
            await changed.wait()
            await asyncio.sleep(0)
            changed.clear()
            due = clock() + period()
            ended = reading.done()
            while news:
                key = next(iter(news))
                writer = writers.setdefault(key, _Writer(template.decode, pieces, hidden))
                yield writer.part(news.pop(key))
        await reading
    finally:
        reading.cancel()


def likeliest(template: PromptTemplate, sample: Sample) -> list[tuple[Likely, list[Likely]]]:
    """Each token of a sample, and the most likely ones in its place, for which the request asked."""

    def told(ids: Any, logprobs: Any) -> list[Likely]:
        return [(i, template.text([i]), p) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]

    tops = map(told, cast(Any, sample.top_ids), cast(Any, sample.top_logprobs))
    return list(zip(told(sample.token_ids, sample.logprobs), tops, strict=True))
