"""The page's routes that ask models: the playground, and blind votes between two models of a run.

``GET /playground?run=NAME`` says which models there are, and how much may be asked for. ``GET /questions?run=NAME``
lists prompts. ``POST /playground`` has two models answer one, as server-sent events (``answering.py``).

``POST /votes/pair`` has two models answer the next held-out prompt; which model is on which side is drawn anew each
time and stays here. ``POST /votes`` says what a person thinks of that pair. ``GET /votes?run=NAME`` says what the votes
come to. They are kept by ``evaluation/votes.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from dapo.commands.ui.answering import Answerer, Asked, Busy, Event
from dapo.commands.ui.models import MOST_SAMPLES, MOST_TOKENS, Question, Questions, models_of, pick_models, recipe_of
from dapo.errors import DataError, UserError
from dapo.evaluation.votes import Choice, Shown, Vote, add_vote, read_votes, tallies
from dapo.observe.run_view import RunView

LONGEST_PROMPT = 100_000
"""Characters that may be typed."""

WAITING = 100
"""Pairs that are remembered until they are voted on; older ones are forgotten."""
DRAWN = 10_000
"""Rows that prompts are drawn from, at most."""
SAME = 8
"""Prompts in a row with the same answer twice, after which it is said that there is nothing to compare."""

FolderOf = Callable[[str], Path]
"""The run folder of a name; NotHere: there is none."""


class Ask(BaseModel):
    """What the page sends. Of ``row`` and ``prompt`` one is given; ``answer`` is the reference for a typed prompt."""

    run: str
    models: Annotated[list[str], Field(min_length=2, max_length=2)]
    row: int | None = None
    prompt: Annotated[str | None, Field(max_length=LONGEST_PROMPT)] = None
    answer: Annotated[str | None, Field(max_length=LONGEST_PROMPT)] = None
    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 4
    temperature: Annotated[float, Field(ge=0, le=5)] = 1.0
    max_tokens: Annotated[int | None, Field(ge=1, le=MOST_TOKENS)] = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class PairWanted(BaseModel):
    """``skip``: rows of pairs that the voter has before them."""

    run: str
    models: Annotated[list[str], Field(min_length=2, max_length=2)]
    who: Annotated[str, Field(max_length=200)] = ""
    temperature: Annotated[float, Field(ge=0, le=5)] = 1.0
    skip: Annotated[list[int], Field(max_length=WAITING)] = []


class VoteRequest(BaseModel):
    """A vote on a pair that was given out."""

    pair: str
    vote: Choice
    who: Annotated[str, Field(max_length=200)] = ""


@dataclass(frozen=True, slots=True)
class _Pair:
    root: Path
    question: Question
    left: Shown
    right: Shown
    temperature: float


class _Pairs:
    """Pairs that were given out and not voted on."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Pair] = {}

    def add(self, pair: _Pair) -> str:
        while len(self._waiting) >= WAITING:
            del self._waiting[next(iter(self._waiting))]
        name = secrets.token_urlsafe(12)
        self._waiting[name] = pair
        return name

    def put_back(self, name: str, pair: _Pair) -> None:
        """It was not voted on after all."""
        self._waiting[name] = pair

    def take(self, name: str) -> _Pair:
        """Raises DataError if there is none of this name."""
        pair = self._waiting.pop(name, None)
        if pair is None:
            raise DataError("this pair was voted on before, or is forgotten; ask for the next one")
        return pair


def router(folder_of: FolderOf, answerer: Answerer) -> APIRouter:
    """The routes; the application answers ``UserError`` and ``NotHere``. ``answerer`` is closed with it."""

    @asynccontextmanager
    async def until_the_end(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await answerer.close()

    routes = APIRouter(lifespan=until_the_end)

    @routes.get("/playground")
    def about(run: str) -> dict[str, Any]:
        root = folder_of(run)
        config, best = recipe_of(root), RunView.read(root).best.get("step")
        return {
            "models": [
                {"name": name, "best": name == f"step-{best:05d}" if best else False} for name in models_of(root)
            ],
            "max_samples": MOST_SAMPLES,
            "max_tokens": min(config.evaluated_length, MOST_TOKENS),
            "temperature": config.rollout.temperature,
            "reward": config.reward.kind,
        }

    @routes.get("/questions")
    def questions(
        run: str, first: Annotated[int, Query(ge=0)] = 0, count: Annotated[int, Query(ge=1, le=200)] = 50
    ) -> dict[str, Any]:
        found = Questions(folder_of(run))
        shown = [question.as_json() for question in found.some(first, count)]
        return {"held_out": found.held_out, "total": len(found), "questions": shown}

    @routes.post("/playground")
    async def ask(wanted: Ask) -> Response:
        asked = await asyncio.to_thread(_asked, folder_of, wanted)  # reads files: others are answered meanwhile
        try:
            events = answerer.begin(asked)
        except Busy as busy:
            return JSONResponse({"error": str(busy)}, 409)
        return StreamingResponse(_as_text(events), media_type="text/event-stream")

    @routes.get("/votes")
    def result(run: str) -> dict[str, Any]:
        votes = read_votes(folder_of(run))
        told = [
            asdict(tally) | {"share": tally.share and asdict(tally.share), "verdict": tally.verdict}
            for tally in tallies(votes)
        ]
        return {"votes": len(votes), "tallies": told}

    _add_voting(routes, folder_of, answerer)
    return routes


def _add_voting(routes: APIRouter, folder_of: FolderOf, answerer: Answerer) -> None:
    pairs = _Pairs()

    @routes.post("/votes/pair", response_model=None)
    async def next_pair(wanted: PairWanted) -> dict[str, Any] | JSONResponse:
        try:
            return await _next_pair(folder_of, wanted, answerer, pairs)
        except Busy as busy:
            return JSONResponse({"error": str(busy)}, 409)

    @routes.post("/votes", response_model=None)
    def vote(verdict: VoteRequest) -> dict[str, Any] | JSONResponse:
        pair = pairs.take(verdict.pair)
        kept = Vote(
            prompt=pair.question.text,
            left=pair.left,
            right=pair.right,
            choice=verdict.vote,
            who=verdict.who.strip() or "somebody",
            time=round(time.time(), 3),
            row=pair.question.row,
            temperature=pair.temperature,
        )
        try:
            return {"votes": add_vote(pair.root, kept)}
        except UserError as error:
            pairs.put_back(verdict.pair, pair)
            return JSONResponse({"error": str(error)}, 507)


def _asked(folder_of: FolderOf, wanted: Ask) -> Asked:
    """Raises NotHere if there is no such run, UserError if no such model or row, or nothing was typed."""
    root = folder_of(wanted.run)
    models, question = pick_models(root, wanted.models), _question(root, wanted)
    return Asked(root, models, question, wanted.samples, wanted.temperature, wanted.max_tokens, wanted.seed)


def _question(root: Path, wanted: Ask) -> Question:
    """Raises UserError if there is no such row, or nothing was typed."""
    if wanted.row is not None:
        return Questions(root)[wanted.row]
    if not (wanted.prompt or "").strip():
        raise DataError("the prompt is empty; type one, or pick a row")
    return Question(str(wanted.prompt), str(wanted.prompt), wanted.answer or None)


async def _as_text(events: AsyncGenerator[Event]) -> AsyncIterator[str]:
    async with aclosing(events) as found:
        async for event in found:
            yield f"data: {json.dumps(event)}\n\n"


async def _next_pair(folder_of: FolderOf, wanted: PairWanted, answerer: Answerer, pairs: _Pairs) -> dict[str, Any]:
    """Files are read in threads: others are answered meanwhile. Raises NotHere: there is no such run; UserError: there
    is nothing to compare, or nothing more; Busy: other answers are being written."""
    if len(set(wanted.models)) < 2:
        raise DataError("two different models are needed to compare them")
    root, models, questions, rows = await asyncio.to_thread(_to_compare, folder_of, wanted)
    for same, row in enumerate(rows[: SAME + 1]):
        try:
            question = await asyncio.to_thread(questions.__getitem__, row)
        except DataError:
            continue
        seed = secrets.randbits(32)
        responses = await _answers(
            answerer, Asked(root, list(models.values()), question, 1, wanted.temperature, seed=seed, judged=False)
        )
        if responses[0] == responses[1]:
            continue
        shown = [Shown(name, text) for name, text in zip(models, responses, strict=True)]
        secrets.SystemRandom().shuffle(shown)
        left, right = shown
        name = pairs.add(_Pair(root, question, left, right, wanted.temperature))
        return {
            "pair": name,
            "row": row,
            "prompt": question.text,
            "left": left.response,
            "right": right.response,
            "held_out": questions.held_out,
            "same": same,
            "rows_left": len(rows) - same - 1,
        }
    if len(rows) > SAME:
        raise DataError(f"both models gave the same answer to {SAME + 1} prompts in a row: there is nothing to compare")
    raise DataError("there are no more prompts to compare these models on")


def _to_compare(folder_of: FolderOf, wanted: PairWanted) -> tuple[Path, dict[str, Path], Questions, list[int]]:
    """The run, folders of its models by name, what they can be asked, and the rows that are left to ask."""
    root = folder_of(wanted.run)
    models = dict(zip(wanted.models, pick_models(root, wanted.models), strict=True))
    questions = Questions(root)
    return root, models, questions, _rows_left(questions, root, wanted)


def _rows_left(questions: Questions, root: Path, wanted: PairWanted) -> list[int]:
    """Rows that this person has not seen answered by these two, in an order that is the same every time."""
    rows = random.Random("|".join(sorted(wanted.models))).sample(range(len(questions)), min(len(questions), DRAWN))
    who = wanted.who.strip() or "somebody"
    seen = {
        vote.row
        for vote in read_votes(root)
        if vote.who == who and {vote.left.model, vote.right.model} == set(wanted.models)
    }
    return [row for row in rows if row not in seen and row not in wanted.skip]


async def _answers(answerer: Answerer, asked: Asked) -> list[str]:
    """One response of each model, in their order. Raises UserError if it went wrong."""
    found: dict[int, str] = {}
    async with aclosing(answerer.begin(asked)) as events:
        async for event in events:
            match event:
                case {"event": "sample", "side": side, "text": text}:
                    found[side] = text
                case {"event": "error", "message": message}:
                    raise UserError(message)
    return [found[side] for side in range(len(asked.models))]
