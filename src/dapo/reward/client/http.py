"""Clients of servers that speak JSON over HTTP: ``dapo reward-server``, and services of the user's own. The reply of a
reward server is read line by line, so that verdicts are kept when the connection breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp

from dapo.config.reward import HttpReward, ServerReward, fields_of
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.client.mapping import fill, to_json, to_verdict, to_verdicts, unfillable
from dapo.reward.client.scorer import LARGEST_REPLY, Call, RemoteScorer
from dapo.reward.contract import Doubt
from dapo.util.http.connections import whole
from dapo.util.http.faults import BadReply, Refusal, from_json, one_line
from dapo.util.http.mapping import pick

_ROWS_AT_ONCE = 64
_NOT_THERE = (401, 403, 502, 503, 504)  # statuses of a server that is not ready, or does not let us in


class ServerScorer(RemoteScorer):
    """Asks a ``dapo reward-server``."""

    def __init__(self, config: ServerReward) -> None:
        super().__init__(config)
        self._url = config.url.rstrip("/")

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Waits for the server, at most ``give_up_after_s`` at a time. Raises RewardError: it does not answer."""
        doubts: list[Doubt] = []
        for begin in range(0, len(prompts), _ROWS_AT_ONCE):
            doubts += await self._examine(prompts[begin : begin + _ROWS_AT_ONCE], begin)
        return doubts

    async def _examine(self, prompts: Sequence[Prompt], begin: int) -> list[Doubt]:
        """In one request, or in halves if the server refuses it. ``begin``: position of the first row."""
        body = to_json({"rows": [_row(prompt) for prompt in prompts]})
        try:
            doubts = await self._patiently(partial(self._ask_doubts, body), self._config.give_up_after_s)
        except Refusal as refusal:
            if len(prompts) == 1:
                text = self._secrets.blanked(f"the reward server does not take it: {refusal}")
                return [Doubt(begin, text, unusable=True)]
            half = len(prompts) // 2
            first = await self._examine(prompts[:half], begin)
            return first + await self._examine(prompts[half:], begin + half)
        return [replace(d, position=begin + d.position, text=self._secrets.blanked(d.text)) for d in doubts]

    async def _ask_doubts(self, body: bytes) -> list[Doubt]:
        async with self._send("POST", f"{self._url}/examine", body) as reply:
            answer = from_json(await whole(await self._checked(reply), LARGEST_REPLY))
        try:
            return [Doubt(int(d["position"]), str(d["text"]), bool(d["unusable"])) for d in answer["doubts"]]
        except (KeyError, TypeError, ValueError):
            raise BadReply(f"the reply is no list of doubts: {answer}") from None

    async def _check_ready(self) -> None:
        async with self._send("GET", f"{self._url}/ready") as reply:
            await self._checked(reply)

    async def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        items = [{**_row(c.prompt), "response": c.response, "finish_reason": c.finish_reason} for c in calls]
        body = to_json({"items": items})
        missing = set(range(len(calls)))
        async with self._send("POST", f"{self._url}/score", body, "application/x-ndjson") as reply:
            await self._checked(reply)
            async for line in _lines(reply):
                place, verdict = self._verdict(from_json(line))
                if place not in missing:
                    raise BadReply(f"a result for item {place + 1} of {len(calls)}, which is not waited for")
                missing.remove(place)
                yield place, verdict
        if missing:
            raise BadReply(f"{len(calls) - len(missing)} results came for {len(calls)} responses")

    def _verdict(self, line: Any) -> tuple[int, Reward | BadReply]:
        if isinstance(line, dict) and type(line.get("index")) is int:
            place = line["index"]
            kept = {key: line.get(key) for key in ("correct", "value", "parts", "extracted", "error")}
            return place, to_verdict(kept, place, "", self._name)
        if isinstance(line, dict) and "error" in line:
            raise RewardError(f"{self._name}: {one_line(str(line['error']))}")
        raise BadReply("a line of the reply is no result")


class HttpScorer(RemoteScorer):
    """Asks a service of the user's own, with the mapping in the recipe."""

    def __init__(self, config: HttpReward) -> None:
        super().__init__(config)
        self._mapping = config
        self._in_list = any(in_list for _, in_list in fields_of(config.request))

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        return unfillable(self._mapping.request, prompts)

    async def _check_ready(self) -> None:
        """Any answer to a GET shows that the server is there."""
        async with self._send("GET", self._mapping.url) as reply:
            if reply.status in _NOT_THERE:
                await self._checked(reply)

    async def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        body = to_json(fill(self._mapping.request, calls))
        async with self._send("POST", self._mapping.url, body) as reply:
            answer = from_json(await whole(await self._checked(reply), LARGEST_REPLY))
        results = pick(answer, self._mapping.results, "reward.results")
        if not self._in_list:
            results = [results]
        for place, verdict in enumerate(to_verdicts(results, len(calls), self._mapping.value, self._name)):
            yield place, verdict


def _row(prompt: Prompt) -> dict[str, Any]:
    said = {"prompt": prompt.text, "answer": prompt.answer, "meta": dict(prompt.meta)}
    return {**said, "row": prompt.row, "prompt_end": prompt.end}


async def _lines(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whole lines. Raises BadReply: the last one is cut off, or too long."""
    rest: list[bytes] = []
    size = 0
    async for chunk in reply.content.iter_any():
        first, *others = chunk.split(b"\n")
        rest.append(first)
        size += len(first)
        if size > LARGEST_REPLY:
            raise BadReply("a line of the reply has no end")
        for other in others:
            yield b"".join(rest)
            rest, size = [other], len(other)
    if b"".join(rest).strip():
        raise BadReply("the last line of the reply is cut off")
