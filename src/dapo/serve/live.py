"""Prompts and feedback for training from those who use a model: ``dapo serve --live FILE`` and ``dapo data receive``.

Consumes requests whose users consent (``"metadata": {"consent": "training"}``) with what was answered, prompts that an
application posts, and feedback by id; appends them to a file of JSON lines that ``data.live`` of a run reads. What the
user's redaction makes of an entry is what is written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from dapo.errors import ConfigError, UserError
from dapo.util.files import append_lines
from dapo.util.gate import WorkGate, add_reports
from dapo.util.serving import Address, Progress, run_service
from dapo.util.user_code import call_own, load_named

CONSENT = "training"
_MOST_BODY = 16 * 2**20


class Journal:
    def __init__(self, file: Path, redact: str | None = None) -> None:
        """``redact``: ``file.py:function``, which is given each entry and returns what to write; None: nothing.
        Raises ConfigError: it cannot be loaded."""
        self.file = file
        self._redact: Callable[[dict[str, Any]], dict[str, Any] | None] = (
            load_named(redact, "--redact") if redact else lambda entry: entry
        )

    def add(self, entry: dict[str, Any]) -> bool:
        """Write a line at once; whether there was anything left to write.
        Raises HTTPException: 503, the redaction failed, or the file cannot be written."""
        try:
            kept = call_own("--redact", self._redact, {**entry, "time": time.time()})
            if kept is None:
                return False
            if not isinstance(kept, dict):
                raise ConfigError(f"--redact: it returned a {type(kept).__name__}, not an entry (a dict) or None")
            append_lines(self.file, [kept], rights=0o600)  # what users wrote is for the owner's eyes
        except (UserError, OSError) as error:
            raise HTTPException(503, f"{self.file}: nothing was kept of {entry['id']}: {error}") from None
        return True


class PromptEntry(BaseModel):
    prompt: str | list[dict[str, str]]
    answer: str | int | float | None = None
    id: str | None = None
    consent: Literal["training"]


class FeedbackEntry(BaseModel):
    id: str
    thumbs: Literal[1, -1] | None = None
    edit: str | None = None
    outcome: str | int | float | None = None

    @model_validator(mode="after")
    def _says_something(self) -> FeedbackEntry:
        if self.thumbs is None and self.edit is None and self.outcome is None:
            raise ValueError("says nothing; give thumbs (1 or -1), edit or outcome")
        return self


def router(journal: Journal) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/prompts")
    def prompt(entry: PromptEntry) -> dict[str, Any]:
        found = entry.model_dump(exclude_none=True, exclude={"consent"})
        found["id"] = entry.id or f"prompt-{secrets.token_hex(12)}"
        return {"id": found["id"], "kept": journal.add(found)}

    @routes.post("/v1/feedback")
    def feedback(entry: FeedbackEntry) -> dict[str, Any]:
        said = entry.model_dump(exclude_none=True, exclude={"id"})
        return {"id": entry.id, "kept": journal.add({"id": entry.id, "feedback": said})}

    return routes


def create_receiver(journal: Journal, address: Address, progress: Progress) -> ASGIApp:
    """An application of its own, beside a server that is not this project's."""
    app, registry = FastAPI(title="dapo data receive", docs_url=None, redoc_url=None), CollectorRegistry()
    count = Counter("dapo_received", "Requests answered", ["path", "code"], registry=registry)
    app.include_router(router(journal))
    add_reports(app, progress, registry)
    return WorkGate(
        *(app, address.token, _MOST_BODY, progress, lambda path: path in ("/v1/prompts", "/v1/feedback")),
        lambda status, text, headers: JSONResponse({"error": text}, status, headers),
        lambda *of: count.labels(*of).inc(),
    )


async def receive(journal: Journal, address: Address, *, drain_s: float, say: Callable[[str], object]) -> None:
    """Serve until a signal comes. Raises ConfigError: the address cannot be listened on."""
    progress = Progress()

    async def nothing() -> None:
        pass

    how: dict[str, Any] = {"drain_s": drain_s, "say": say, "starting": f"writing to {journal.file}"}
    how["ready"] = "POST {}/v1/prompts and /v1/feedback (also /ready, /metrics)"
    await run_service(create_receiver(journal, address, progress), address, progress, nothing, nothing, **how)
