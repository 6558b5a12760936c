"""The scorer around a judge, a language model behind an OpenAI-compatible chat endpoint. The same question asked twice
at the same time is sent once; with a cache also at different times."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from dapo.config import JudgeReward
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import begin
from dapo.reward.client.scorer import Call, RemoteScorer
from dapo.reward.contract import Doubt
from dapo.reward.judge.rubric import Rubric, RubricError
from dapo.util.files import write_json
from dapo.util.http.connections import beginning, whole
from dapo.util.http.faults import BadReply, Refusal, error_text, from_json
from dapo.util.http.secrecy import shown

_LARGEST_REPLY = 2**21


class JudgeScorer(RemoteScorer):
    """The grade of a language model (:class:`~dapo.config.JudgeReward`), mapped from the scale to -1..1; ``parts``
    holds the ``grade`` itself. A question without a grade is a failed score, never a low one. Belongs to one event
    loop. Raises RewardError: the rubric cannot be read, or the key is missing."""

    def __init__(self, config: JudgeReward) -> None:
        super().__init__(config)
        self._name = f"judge {config.model} at {shown(config.url)}"
        self._judge, self._base = config, config.url.rstrip("/")
        self._rubric, self._cache = Rubric(config.rubric, config.scale), ReplyCache(config.cache)
        self._asked: dict[str, asyncio.Task[Reward]] = {}
        self._grading: set[asyncio.Task[Reward]] = set()

    async def start(self) -> None:
        await self._cache.start()
        await super().start()

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Rows that the rubric cannot be filled for: a key is missing, or a value that it prints is null."""

        def doubts() -> list[Doubt]:
            found = []
            for position, prompt in enumerate(prompts):
                try:
                    self._rubric.message(prompt, "")
                except RubricError as error:
                    found.append(Doubt(position, str(error), unusable=True))
            return found

        return await asyncio.to_thread(doubts)

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        try:
            question = self._question(prompt, response, finish_reason)
        except RubricError as error:
            return Reward(None, 0.0, error=f"judge: {error}")
        key = self._key(question)
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = begin(self._grading, self._grade(key, prompt, question))
            task.add_done_callback(lambda _: self._asked.pop(key))
        # others may wait for the same question if this caller is cancelled
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._grading)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def _grade(self, key: str, prompt: Prompt, question: str) -> Reward:
        """What the client hands on as the response is the whole question."""
        kept = await self._cache.read(key)
        grade = None if kept is None else self._rubric.grade(kept)
        return await super().score(prompt, question) if grade is None else self._verdict(grade)

    async def _check_ready(self) -> None:
        """Any answer but that the key is wrong shows that the endpoint is there: not all list their models."""
        async with self._send("GET", f"{self._base}/models") as reply:
            if reply.status == 401:
                await self._checked(reply)

    async def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        for place, call in enumerate(calls):
            async with self._send("POST", f"{self._base}/chat/completions", call.response.encode()) as reply:
                text = _written(await whole(await self._checked(reply), _LARGEST_REPLY))
            grade = self._rubric.grade(text)
            if grade is None:
                end = " ".join(self._secrets.blanked(text).split())[-80:]
                yield place, BadReply(f'the reply does not end with a grade on the scale, but with "{end}"')
            else:
                await self._cache.write(self._key(call.response), text)
                yield place, self._verdict(grade)

    async def _checked(self, reply: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
        if reply.status == 400:  # so most endpoints call a question that is too long
            raise Refusal(f"400: {error_text(await beginning(reply, 2**16))[0]}")
        return await super()._checked(reply)

    def _question(self, prompt: Prompt, response: str, finish_reason: FinishReason | None) -> str:
        """Raises RubricError: it cannot be made from this row."""
        message = self._rubric.message(prompt, response, finish_reason)
        body = {
            "model": self._judge.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self._judge.temperature,
            "max_tokens": self._judge.max_tokens,
        }
        return json.dumps(body, sort_keys=True)  # ASCII: lone surrogates are escaped

    def _key(self, question: str) -> str:
        return hashlib.sha256(f"{self._judge.url}\n{question}".encode()).hexdigest()

    def _verdict(self, grade: float) -> Reward:
        low, high = self._judge.scale
        bar = self._judge.correct_at
        value = 2.0 * (grade - low) / (high - low) - 1.0
        return Reward(None if bar is None else grade >= bar, value, {"grade": grade})


def _written(data: bytes) -> str:
    """The complete text in a reply of the chat protocol. Raises BadReply: there is none."""
    try:
        choice = from_json(data)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise BadReply(f"the reply is not one of the chat protocol: {data[:80]!r}") from None
    if reason == "length":  # a cut "Grade: 1" may have been a 10
        raise BadReply("the reply was cut off; raise reward.max_tokens")
    if not isinstance(text, str):
        raise BadReply("the reply holds no text")
    return text


_log = logging.getLogger(__name__)


class ReplyCache:
    """A folder with a JSON file for each question that was answered with a grade, the judge's text; None: nothing is
    kept. A file that is missing or damaged counts as a question not asked yet."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._told = False

    async def start(self) -> None:
        """Raises RewardError: the folder cannot be made."""
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        except OSError as error:
            raise RewardError(f"reward.cache: cannot make {str(self._folder)!r}: {error.strerror or error}") from None

    async def read(self, key: str) -> str | None:
        return None if self._folder is None else await asyncio.to_thread(_read, self._folder / f"{key}.json")

    async def write(self, key: str, reply: str) -> None:
        """Warns once if that fails, such as on a full disk."""
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(write_json, self._folder / f"{key}.json", {"reply": reply})
        except OSError as error:
            if not self._told:
                _log.warning("reward.cache: replies are not kept: %s", error)
            self._told = True


def _read(file: Path) -> str | None:
    try:
        reply = json.loads(file.read_text(encoding="utf-8"))["reply"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return reply if isinstance(reply, str) else None
