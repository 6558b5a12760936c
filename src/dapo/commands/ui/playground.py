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
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from dapo.commands.ui.answering import Answerer, Asked, Event
from dapo.commands.ui.models import MOST_SAMPLES, MOST_TOKENS, Question, Questions, models_of, pick_models, recipe_of
from dapo.commands.ui.runs import WHILE_THERE, RunAsked, run_named
from dapo.errors import DataError, UserError
from dapo.evaluation.votes import Choice, Shown, Vote, add_vote, read_votes, tallies

LONGEST_PROMPT = 100_000  # characters that may be typed

WAITING = 100  # pairs that are remembered until they are voted on; older ones are forgotten
DRAWN = 10_000  # rows that prompts are drawn from, at most
SAME = 8  # prompts in a row with the same answer twice, after which it is said that there is nothing to compare


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
    pair: str
    vote: Choice
    who: Annotated[str, Field(max_length=200)] = ""


@dataclass(frozen=True, slots=True)
class _Pair:
    root: Path
    question: Question
    left: Shown
    right: Shown
    temperature: float | None


@asynccontextmanager
async def _until_the_end(app: FastAPI) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await app.state.answerer.close()


router = APIRouter(prefix="/api", lifespan=_until_the_end, dependencies=WHILE_THERE)


def add_to(app: FastAPI, answerer: Answerer) -> None:
    """Add the routes to an application, which answers ``UserError`` and ``Refused`` and knows the runs.
    ``answerer`` is closed with it."""
    app.state.answerer = answerer
    app.state.pairs = dict[str, _Pair]()  # that were given out and not voted on
    app.include_router(router)


@router.get("/playground")
def about(run: RunAsked) -> dict[str, Any]:
    root = run.folder.root
    config, best = recipe_of(root), run.view.best.get("step")
    names = models_of(root)
    return {
        "models": [{"name": name, "best": name == f"step-{best:05d}" if best else False} for name in names],
        "max_samples": MOST_SAMPLES,
        "max_tokens": min(config.evaluated_length, MOST_TOKENS),
        "temperature": config.rollout.temperature,
        "reward": config.reward.kind,
    }


@router.get("/questions")
def questions(
    run: RunAsked, first: Annotated[int, Query(ge=0)] = 0, count: Annotated[int, Query(ge=1, le=200)] = 50
) -> dict[str, Any]:
    found = Questions(run.folder.root)
    shown = [question.as_json() for question in found.some(first, count)]
    return {"held_out": found.held_out, "total": len(found), "questions": shown}


@router.post("/playground")
async def ask(request: Request, wanted: Ask) -> Response:
    asked = await asyncio.to_thread(_asked, request, wanted)  # reads files: others are answered meanwhile
    return StreamingResponse(_as_text(request.app.state.answerer.begin(asked)), media_type="text/event-stream")


@router.get("/votes")
def result(run: RunAsked) -> dict[str, Any]:
    return result_of(run.folder.root)


@router.post("/votes")
def vote(request: Request, verdict: VoteRequest) -> JSONResponse:
    pairs: dict[str, _Pair] = request.app.state.pairs
    pair = pairs.pop(verdict.pair, None)
    if pair is None:
        raise DataError("this pair was voted on before, or is forgotten; ask for the next one")
    now, who, question = round(time.time(), 3), who_votes(verdict), pair.question
    kept = Vote(question.text, pair.left, pair.right, verdict.vote, who, now, question.row, pair.temperature)
    try:
        add_vote(pair.root, kept)
    except UserError as error:
        pairs[verdict.pair] = pair  # it was not voted on after all
        return JSONResponse({"error": str(error)}, 507)
    return JSONResponse({})


def who_votes(request: PairWanted | VoteRequest) -> str:
    return request.who.strip() or "somebody"


def _asked(request: Request, wanted: Ask) -> Asked:
    """Raises NotHere if there is no such run, UserError if no such model or row, or nothing was typed."""
    root = run_named(request, wanted.run).folder.root
    models = pick_models(root, wanted.models)
    if wanted.row is not None:
        question = Questions(root)[wanted.row]
    elif not (wanted.prompt or "").strip():
        raise DataError("the prompt is empty; type one, or pick a row")
    else:
        question = Question(str(wanted.prompt), str(wanted.prompt), wanted.answer or None)
    return Asked(root, models, question, wanted.samples, wanted.temperature, wanted.max_tokens, wanted.seed)


async def _as_text(events: AsyncGenerator[Event]) -> AsyncIterator[str]:
    async with aclosing(events) as found:
        async for event in found:
            yield f"data: {json.dumps(event)}\n\n"


@router.post("/votes/pair")
async def next_pair(request: Request, wanted: PairWanted) -> dict[str, Any]:
    """Files are read in threads: others are answered meanwhile. Raises NotHere: there is no such run; UserError: there
    is nothing to compare, or nothing more; Busy: other answers are being written."""
    if len(set(wanted.models)) < 2:
        raise DataError("two different models are needed to compare them")
    root, models, questions, rows = await asyncio.to_thread(_to_compare, request, wanted)
    for same, row in enumerate(rows[: SAME + 1]):
        try:
            question = await asyncio.to_thread(questions.__getitem__, row)
        except DataError:
            continue
        asked = Asked(root, models, question, 1, wanted.temperature, seed=secrets.randbits(32), judged=False)
        responses = await _answers(request.app.state.answerer, asked)
        if responses[0] == responses[1]:
            continue
        shown = [Shown(name, text) for name, text in zip(wanted.models, responses, strict=True)]
        given = give_out(request, root, question, shown, wanted.temperature)
        return given | {"row": row, "held_out": questions.held_out, "same": same, "rows_left": len(rows) - same - 1}
    if len(rows) > SAME:
        raise DataError(f"both models gave the same answer to {SAME + 1} prompts in a row: there is nothing to compare")
    raise DataError("there are no more prompts to compare these models on")


def give_out(
    request: Request, root: Path, question: Question, shown: list[Shown], temperature: float | None
) -> dict[str, Any]:
    """What a voter sees of two answers, on sides that are drawn here; the vote goes to ``root``."""
    pairs: dict[str, _Pair] = request.app.state.pairs
    secrets.SystemRandom().shuffle(shown)
    left, right = shown
    while len(pairs) >= WAITING:
        del pairs[next(iter(pairs))]
    name = secrets.token_urlsafe(12)
    pairs[name] = _Pair(root, question, left, right, temperature)
    return {"pair": name, "prompt": question.text, "left": left.response, "right": right.response}


def result_of(root: Path) -> dict[str, Any]:
    """What the votes there come to."""
    votes = read_votes(root)
    told = [
        asdict(tally) | {"share": tally.share and asdict(tally.share), "verdict": tally.verdict}
        for tally in tallies(votes)
    ]
    return {"votes": len(votes), "tallies": told}


def _to_compare(request: Request, wanted: PairWanted) -> tuple[Path, list[Path], Questions, list[int]]:
    """The run, folders of its models, what they can be asked, and the rows that this person has not seen answered by
    these two, in an order that is the same every time."""
    root = run_named(request, wanted.run).folder.root
    models, questions = pick_models(root, wanted.models), Questions(root)
    rows = random.Random("|".join(sorted(wanted.models))).sample(range(len(questions)), min(len(questions), DRAWN))
    both = set(wanted.models)
    votes = (vote for vote in read_votes(root) if {vote.left.model, vote.right.model} == both)
    seen = {vote.row for vote in votes if vote.who == who_votes(wanted)} | set(wanted.skip)
    return root, models, questions, [row for row in rows if row not in seen]


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
