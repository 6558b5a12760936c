"""Replies of a judge on disk: one JSON file with the judge's text for each question that was answered with a grade. A
file that is missing or damaged counts as a question not asked yet."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from dapo.errors import RewardError
from dapo.util.files import write_json

_log = logging.getLogger(__name__)


class ReplyCache:
    """A folder of replies; None: nothing is kept."""

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
