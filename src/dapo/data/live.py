"""Prompts that arrive while a run goes on: a growing file of JSON lines, from an application or ``dapo serve --live``.

Consumes lines of two kinds, joined by ``id``: prompts, ``{"id", "prompt", "answer"?, "response"?, "time"?}``, and
feedback on them, ``{"id", "feedback": {"edit" | "outcome" | "thumbs": ...}, "time"?}``, which may come late. Produces
rows: a prompt is drawn once when it has an answer (or the reward needs none), and once more for each feedback, whose
edit or outcome is its answer then; a thumb up makes the logged response the answer. The feedback is in the row's
``meta``, for rewards of the user's. What is older than ``expire_s`` is dropped.

The position is a place in the file, so each line is used once, by resumed runs too."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo.config.data import LiveConfig
from dapo.data.rows import SHOWN_FAULTS, BadRow, Keys, Row, check_row
from dapo.errors import DataError
from dapo.util.files import parse_json

_MOST = 10_000
"""Prompts that may wait, and that feedback may be for; the oldest ones are dropped."""
_AT_ONCE = 2**16
"""Bytes that a draw reads, so that a large file holds nobody up."""
_FEEDBACK = 100
"""What may be said of one prompt."""


class LiveRows:
    kind = "live"

    def __init__(
        self,
        config: LiveConfig,
        answer_required: bool,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """``answer_required``: whether a prompt waits until it has an answer."""
        self.share = config.share
        self._file, self._expire_s = Path(config.path or ""), config.expire_s
        self._needs_answer, self._warn, self._now = answer_required, warn, now
        self._offset = self._line = 0
        self._tail = ""
        """The end of what was read, by which the file is known again."""
        self._size = 0  # of the file when all was read: a long line without an end is not read at each draw
        self._known: dict[str, dict[str, Any]] = {}
        """Prompts that feedback may come for, by id, the oldest first."""
        self._ready: deque[dict[str, Any]] = deque()
        self._counts: Counter[str] = Counter()

    def take(self) -> Row | None:
        """The next row; None: nothing is ready."""
        self._read()
        while self._ready:
            entry = self._ready.popleft()
            if self._is_old(entry):
                self._counts["expired"] += 1
                continue
            self._counts["drawn"] += 1
            meta = {key: value for key, value in entry.items() if key not in ("prompt", "answer")}
            raw = {"prompt": entry["prompt"], "answer": entry.get("answer")}
            try:
                row = check_row(raw, Keys(answer_required=False), f"{self._file}: id {entry['id']}")
            except BadRow as fault:
                self.refuse(f"id {entry['id']}: {fault}")
                continue
            return Row(row.prompt, row.answer, meta, row.place)
        return None

    def refuse(self, fault: str) -> None:
        """Go on without a line or a row that cannot be used."""
        self._counts["bad"] += 1
        if self._counts["bad"] <= SHOWN_FAULTS:
            self._warn(f"data.live: {self._file}: {fault}: it is skipped")

    def _read(self) -> None:
        """Take in the lines that are whole. A file that was cut or replaced is read from its beginning."""
        try:
            file = self._file.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"data.live: {self._file}: {error.strerror}") from None
        with file:
            if (size := os.fstat(file.fileno()).st_size) == self._size:
                return
            file.seek(self._offset - len(self._tail))
            if file.read(len(self._tail)) != self._tail.encode("latin-1"):
                self._warn(f"data.live: {self._file} is another file now, or was cut: it is read anew")
                self._offset, self._line, self._tail = file.seek(0), 0, ""
            most = self._offset + _AT_ONCE
            for line in file:
                if self._offset > most:
                    break
                if not line.endswith(b"\n"):  # the last one; what is written next would be read as a line of its own
                    self._size = size
                    break
                self._offset, self._line = self._offset + len(line), self._line + 1
                self._tail = line[-200:].decode("latin-1")
                try:
                    self._hear(parse_json(line.decode("utf-8-sig")))
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                    self.refuse(f"line {self._line}: {type(error).__name__}: {error}")
            else:
                self._size = size
        while len(self._ready) > _MOST:
            self._ready.popleft()
            self._counts["expired"] += 1

    def _hear(self, entry: dict[str, Any]) -> None:
        name, now = str(entry["id"]), self._now()
        at = min(now, float(entry.get("time") or now))  # a clock that is ahead, or NaN, makes nothing last for ever
        if "feedback" in entry:
            self._hear_feedback(self._known.get(name), entry["feedback"], at)
            return
        if name in self._known:
            raise ValueError(f"id {name} was there before")
        entry = {**entry, "prompt": entry["prompt"], "id": name, "time": at, "heard": []}
        self._known[name] = entry
        while len(self._known) > _MOST or (self._known and self._is_old(next(iter(self._known.values())))):
            self._known.pop(next(iter(self._known)))
        if entry.get("answer") is not None or not self._needs_answer:
            self._ready.append({key: value for key, value in entry.items() if key != "heard"})

    def _is_old(self, entry: Mapping[str, Any]) -> bool:
        return bool(self._now() - entry["time"] > self._expire_s)

    def _hear_feedback(self, entry: dict[str, Any] | None, said: dict[str, Any], at: float) -> None:
        if entry is None or self._is_old(entry):
            self._counts["expired"] += 1
            return
        if said in entry["heard"]:  # it was sent twice
            return
        if len(entry["heard"]) == _FEEDBACK:
            raise ValueError(f"there were {_FEEDBACK} times feedback on {entry['id']} before")
        entry["heard"].append(said)
        liked = entry.get("response") if said.get("thumbs") == 1 else None
        answer = next((text for text in (said.get("edit"), said.get("outcome"), liked) if text is not None), None)
        row = {key: value for key, value in entry.items() if key != "heard"} | {"feedback": said, "time": at}
        if answer is not None:
            row["answer"] = answer
        if row.get("answer") is not None or not self._needs_answer:
            self._counts["feedback"] += 1
            self._ready.append(row)

    def metrics(self) -> dict[str, float]:
        names = ("drawn", "feedback", "expired", "bad")
        return {
            **{f"live/{name}": float(self._counts[name]) for name in names},
            "live/waiting": float(len(self._ready)),
        }

    def state(self) -> dict[str, Any]:
        return {
            **{"offset": self._offset, "line": self._line, "tail": self._tail, "counts": dict(self._counts)},
            **{"known": list(self._known.values()), "ready": list(self._ready)},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._offset, self._line, self._tail, self._size = state["offset"], state["line"], state["tail"], 0
        self._counts = Counter(state["counts"])
        self._known = {entry["id"]: dict(entry) for entry in state["known"]}
        self._ready = deque(state["ready"])
