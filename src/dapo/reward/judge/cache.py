"""Replies of a judge on disk: one JSON file for each question that was answered with a grade.

Consumes and produces the judge's text, never a grade: what is read is parsed again, so that a file cannot say what the
judge did not. A file that is missing or damaged is a question that was not asked yet. Works in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from dapo.errors import RewardError
from dapo.util.files import write_json

_log = logging.getLogger(__name__)


class ReplyCache:
    """A folder of replies; with None as the folder nothing is kept."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._told = False

    async def start(self) -> None:
        """Make the folder. Raises RewardError: it cannot be made."""
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        except OSError as error:
            raise RewardError(f"reward.cache: cannot make {str(self._folder)!r}: {error.strerror or error}") from None

    async def read(self, key: str) -> str | None:
        """The reply to the question ``key``; None: it is not known."""
        return None if self._folder is None else await asyncio.to_thread(_read, self._folder / f"{key}.json")

    async def write(self, key: str, reply: str) -> None:
        """Keep a reply. A disk that is full costs the cache, not the grade; it is said once."""
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
