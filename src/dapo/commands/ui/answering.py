"""Two models answer one prompt, side by side, while somebody watches.

Consumes: a question and two models of a run. Produces: events (plain mappings) as the answers are written, and for
each that is done the verdict of the run's reward. One question is answered at a time; once the models are loaded, it is
given up after :data:`MOST_SECONDS`, or when nobody watches any more.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.commands.ui.models import Loaded, Models, Question, recipe_of
from dapo.commands.ui.runs import Refused
from dapo.config import RewardConfig
from dapo.config.composed_reward import off_gpu
from dapo.errors import UserError
from dapo.inference.stream import likeliest, written
from dapo.observe.run_view import RunView
from dapo.records import FinishReason, Prompt, Sample
from dapo.reward.build import make_scorer, needs_answer
from dapo.reward.contract import Scorer
from dapo.rollout.engine import EngineError, Request, Sampling
from dapo.rollout.seeds import sample_seed

MOST_SECONDS = 120.0
PERIOD = 0.05  # seconds in which what is being written is gathered
TOP = 5  # most likely tokens told of each place

Event = dict[str, Any]
Emit = Callable[[Event], None]


class Busy(Refused):
    """Somebody else's answers are being written."""

    status = 409

    def __str__(self) -> str:
        return "other answers are being written just now; try again in a moment"


@dataclass(frozen=True, slots=True)
class Asked:
    """What to ask which models of a run, and how to sample. ``max_tokens`` None: as many as the model may. ``judged``:
    whether the run's reward says what it thinks of the answers; its code may be anybody's."""

    root: Path
    models: Sequence[Path]
    question: Question
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    judged: bool = True


class Answerer:
    """Has models answer, one question at a time, on one event loop; each is given up after ``seconds``."""

    def __init__(self, seconds: float = MOST_SECONDS) -> None:
        self._models = Models()
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._scorer: tuple[Path, Scorer] | None = None

    def begin(self, asked: Asked) -> AsyncGenerator[Event]:
        """Start; the events come from what is returned, and end with ``done`` or ``error``.
        Raises Busy: at once, if another question is being answered."""
        if self._task is not None and not self._task.done():
            raise Busy
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        task = self._task = asyncio.create_task(self._run(asked, events.put_nowait))
        task.add_done_callback(lambda _: events.put_nowait(None))
        return _watched(task, events)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._models.close()
        if self._scorer is not None:
            await self._scorer[1].close()
            self._scorer = None

    async def _run(self, asked: Asked, emit: Emit) -> None:
        started = time.perf_counter()
        try:
            await self._answer(asked, emit)
        except TimeoutError:
            emit({"event": "error", "message": f"not done after {self._seconds:g} s, and given up"})
        except Exception as error:
            emit({"event": "error", "message": _told(error)})
        else:
            emit({"event": "done", "seconds": round(time.perf_counter() - started, 2)})

    async def _answer(self, asked: Asked, emit: Emit) -> None:
        loaded = []
        for path in asked.models:
            if not await self._models.holds(path):
                emit({"event": "status", "message": f"loading {path.relative_to(asked.root)}"})
            loaded.append(await self._models.get(path))
        prompts = [model.encode(asked.question) for model in loaded]  # before any of them begins
        emit({"event": "status", "message": "answering"})
        scorer = await self._scorer_of(asked)
        async with asyncio.timeout(self._seconds), asyncio.TaskGroup() as sides:
            for side, (model, ids) in enumerate(zip(loaded, prompts, strict=True)):
                sides.create_task(_Side(side, model, asked, scorer, emit).answer(ids))

    async def _scorer_of(self, asked: Asked) -> Scorer | str:
        config = await asyncio.to_thread(_reward_of, asked)  # reads the run: others are answered meanwhile
        if isinstance(config, str):
            return config
        if self._scorer is not None and self._scorer[0] != asked.root:
            await self._scorer[1].close()
            self._scorer = None
        if self._scorer is None:
            scorer = make_scorer(config)
            try:
                await scorer.start()
            except UserError as error:  # an answer without a verdict is better than none
                await scorer.close()
                return str(error)
            self._scorer = asked.root, scorer
        return self._scorer[1]


async def _watched(task: asyncio.Task[None], events: asyncio.Queue[Event | None]) -> AsyncGenerator[Event]:
    """Who stops watching ends it."""
    try:
        while (event := await events.get()) is not None:
            yield event
    finally:
        task.cancel()


def _reward_of(asked: Asked) -> RewardConfig | str:
    if not asked.judged:
        return "nobody asked"
    config = recipe_of(asked.root)
    function = RunView.read(asked.root).reward_from_python
    if function is not None:
        return f"the reward was the Python function {function}, which only the training had"
    if asked.question.answer is None and needs_answer(config.reward):
        return "the reward needs a reference answer"
    return off_gpu(config.reward)  # a run may need its GPU


def _told(error: BaseException) -> str:
    """What went wrong, for people: of several things at once the first one."""
    if isinstance(error, BaseExceptionGroup):
        return _told(error.exceptions[0])
    return str(error) if isinstance(error, UserError | EngineError) else f"{type(error).__name__}: {error}"


async def _verdict(scorer: Scorer | str, prompt: Prompt, response: str, finish_reason: FinishReason) -> Event:
    none: Event = {"correct": None, "reward": None, "extracted": None, "parts": {}}
    if isinstance(scorer, str):
        return none | {"error": scorer}
    try:
        reward = await scorer.score(prompt, response, finish_reason)
    except UserError as error:
        return none | {"error": str(error)}
    value = None if reward.error else reward.value
    told = {"extracted": reward.extracted, "parts": dict(reward.parts), "error": reward.error}
    return {"correct": reward.correct, "reward": value, **told}


class _Side:
    def __init__(self, side: int, model: Loaded, asked: Asked, scorer: Scorer | str, emit: Emit) -> None:
        self._side, self._model, self._asked, self._scorer, self._emit = side, model, asked, scorer, emit
        self._template = model.prompting.template
        self._pieces: dict[int, list[str]] = {}  # by sample

    async def answer(self, ids: tuple[int, ...]) -> None:
        asked, question = self._asked, self._asked.question
        # typed prompts have no row; rewards that count them see one that no row has
        row, end = -1 if question.row is None else question.row, self._template.end(ids)
        prompt = Prompt(row, question.text, (), question.answer, question.meta, end=end)
        limit = min(asked.max_tokens or self._model.max_tokens, self._model.max_tokens)
        sampling = Sampling(asked.temperature, limit, top_logprobs=TOP)
        seeds = tuple(sample_seed(asked.seed, 0, 0, index) for index in range(asked.samples))  # the same on both sides
        requests = [Request(self._side, ids, seeds, sampling)]
        parts = written(self._model.engine, self._template, requests, pieces=True, period=lambda: PERIOD)
        async with asyncio.TaskGroup() as tasks, aclosing(parts):
            async for part in parts:
                self._pieces.setdefault(part.index, []).extend(part.pieces)
                if part.sample is not None:
                    tasks.create_task(self._finish(part.sample, prompt))
                elif part.pieces:
                    told = zip(part.pieces, map(_probability, part.logprobs), strict=True)
                    event = {"event": "tokens", "side": self._side, "index": part.index, "start": part.start}
                    self._emit(event | {"tokens": list(map(list, told))})

    async def _finish(self, sample: Sample, prompt: Prompt) -> None:
        text = self._template.decode(sample.token_ids.tolist())
        pieces = zip(self._pieces[sample.index], likeliest(self._template, sample), strict=True)
        self._emit(
            {
                "event": "sample",
                "side": self._side,
                "index": sample.index,
                "text": text,
                "tokens": [  # text, probability and, as text and probability each, the most likely ones in its place
                    [piece, _probability(logprob), [[token, _probability(p)] for _, token, p in top]]
                    for piece, ((_, _, logprob), top) in pieces
                ],
                "length": sample.length,
                "finish_reason": sample.finish_reason,
                "verdict": await _verdict(self._scorer, prompt, text, sample.finish_reason),
            }
        )


def _probability(logprob: float) -> float:
    return round(math.exp(logprob), 4)
