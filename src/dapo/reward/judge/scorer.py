"""The scorer around a judge. The same question asked twice at the same time is sent once; with a cache also at
different times."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from dapo.config import JudgeReward
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import retrieve
from dapo.reward.contract import Doubt, Scorer
from dapo.reward.judge.endpoint import Endpoint, NoReply
from dapo.reward.judge.rubric import Rubric, RubricError
from dapo.util.files import write_json


class JudgeScorer(Scorer):
    """The grade of a language model (:class:`~dapo.config.JudgeReward`), mapped from the scale to -1..1; ``parts``
    holds the ``grade`` itself. A question without a grade is a failed score, never a low one. Belongs to one event
    loop."""

    def __init__(self, config: JudgeReward) -> None:
        self._config = config
        self._cache = ReplyCache(config.cache)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._starting = asyncio.Lock()
        self._rubric: Rubric | None = None
        self._endpoint: Endpoint | None = None
        self._asked: dict[str, asyncio.Task[Reward]] = {}

    async def start(self) -> None:
        """Raises RewardError: the rubric cannot be read, the key is missing, or there is no server at the address."""
        await self._ready()

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Rows that the rubric cannot be filled for: a key is missing, or a value that it prints is null."""
        rubric = await self._read_rubric()

        def doubts() -> list[Doubt]:
            found = []
            for position, prompt in enumerate(prompts):
                try:
                    rubric.message(prompt, "")
                except RubricError as error:
                    found.append(Doubt(position, str(error), unusable=True))
            return found

        return await asyncio.to_thread(doubts)

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        """See :class:`Scorer`. Raises RewardError: the endpoint refuses all questions (key, address, model)."""
        rubric, endpoint = await self._ready()
        try:
            message = rubric.message(prompt, response, finish_reason)
        except RubricError as error:
            return Reward(None, 0.0, error=f"judge: {error}")
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        question = json.dumps(body, sort_keys=True).encode()  # ASCII: lone surrogates are escaped
        key = hashlib.sha256(config.url.encode() + b"\n" + question).hexdigest()
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._grade(key, question, rubric, endpoint))
            task.add_done_callback(lambda _: self._asked.pop(key))
            task.add_done_callback(retrieve)
        # others may wait for the same question if this caller is cancelled
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _ready(self) -> tuple[Rubric, Endpoint]:
        rubric = await self._read_rubric()
        async with self._starting:
            if self._endpoint is None:
                await self._cache.start()
                endpoint = await asyncio.to_thread(Endpoint, self._config)  # aiohttp and certificates: 0.3 s
                try:
                    await endpoint.reach()
                except BaseException:
                    await endpoint.close()
                    raise
                self._endpoint = endpoint
        return rubric, self._endpoint

    async def _read_rubric(self) -> Rubric:
        if self._rubric is None:
            self._rubric = await asyncio.to_thread(Rubric, self._config.rubric, self._config.scale)
        return self._rubric

    async def _grade(self, key: str, question: bytes, rubric: Rubric, endpoint: Endpoint) -> Reward:
        kept = await self._cache.read(key)
        known = None if kept is None else rubric.grade(kept)
        if known is not None:
            return self._verdict(known)
        try:
            async with self._slots:  # in the pauses too: a failing endpoint gets no more calls than before
                reply, grade = await endpoint.ask(question, rubric.grade)
        except NoReply as error:
            return Reward(None, 0.0, error=str(error))
        await self._cache.write(key, reply)
        return self._verdict(grade)

    def _verdict(self, grade: float) -> Reward:
        low, high = self._config.scale
        bar = self._config.correct_at
        value = 2.0 * (grade - low) / (high - low) - 1.0
        return Reward(None if bar is None else grade >= bar, value, {"grade": grade})


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
