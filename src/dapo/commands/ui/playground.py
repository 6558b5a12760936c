"""The playground: type or pick a prompt, and see two models of a run answer it.

``GET /playground?run=NAME`` says which models there are, and how much may be asked for. ``GET /questions?run=NAME``
lists prompts. ``POST /playground`` answers with server-sent events, those of ``answering.py``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from dapo.commands.ui.answering import Answerer, Asked, Busy, Event
from dapo.commands.ui.models import MOST_SAMPLES, MOST_TOKENS
from dapo.commands.ui.questions import Question, Questions, models_of, pick_models, recipe_of
from dapo.errors import DataError
from dapo.observe.run_view import RunView

LONGEST_PROMPT = 100_000
"""Characters that may be typed."""

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


def router(folder_of: FolderOf, answerer: Answerer) -> APIRouter:
    """The routes. The models of ``answerer`` are let go of when the application ends.

    ``UserError`` and ``NotHere`` are the application's to turn into answers.
    """

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

    return routes


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
