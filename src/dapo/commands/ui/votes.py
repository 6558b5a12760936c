"""Blind comparison: two models of a run answer a held-out prompt, and a person says which answer is better.

``POST /votes/pair`` has the next prompt answered by both; which model is on which side is drawn anew each time and
stays here. ``POST /votes`` says what the person thinks of that pair. ``GET /votes?run=NAME`` says what the votes come
to. What is kept, and where, is in ``observe/votes.py``.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from dapo.commands.ui.answering import Answerer, Asked, Busy
from dapo.commands.ui.playground import FolderOf
from dapo.commands.ui.questions import Question, Questions, pick_models
from dapo.errors import DataError, UserError
from dapo.evaluation.votes import Choice, Shown, Vote, add_vote, read_votes, tallies

WAITING = 100
"""Pairs that are remembered until they are voted on; older ones are forgotten."""
DRAWN = 10_000
"""Rows that prompts are drawn from, at most."""
SAME = 8
"""Prompts in a row with the same answer twice, after which it is said that there is nothing to compare."""


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
    """The routes. ``UserError`` and ``NotHere`` are the application's to turn into answers."""
    routes = APIRouter()
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

    @routes.get("/votes")
    def result(run: str) -> dict[str, Any]:
        votes = read_votes(folder_of(run))
        told = [
            asdict(tally) | {"share": tally.share and asdict(tally.share), "verdict": tally.verdict}
            for tally in tallies(votes)
        ]
        return {"votes": len(votes), "tallies": told}

    return routes


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
