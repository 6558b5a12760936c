"""When each role of a rollout step was at work: ``spans.jsonl``, a line with ``step`` and ``spans`` for each step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dapo.observe.metrics import LENIENT
from dapo.util.files import json_line, lines_of, parse_json, write_atomic, writing
from dapo.util.spans import Span

_LINE = re.compile(rb'\{"step": (\d+), .*\}\n')


def write_spans(path: Path, step: int, spans: Sequence[Span]) -> None:
    """Add the line of a step. Raises UserError: the file cannot be written."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json_line({"step": step, "spans": [[role, round(b, 4), round(e, 4)] for role, b, e in spans]}))


def discard_spans(path: Path, after: int) -> None:
    """Take out the lines of later steps, and any that is cut off."""
    if path.exists():
        write_atomic(path, b"".join(line for step, line in _lines(path) if step <= after))


def read_spans(path: Path, around: int | None = None) -> list[tuple[int, list[Span]]]:
    """Of a step, the one before it and the one after it; None: of the last three. Empty: none are there, or spoilt."""
    try:
        lines = _lines(path)
        chosen = lines[-3:] if around is None else [found for found in lines if abs(found[0] - around) <= 1]
        found = [(step, parse_json(line, LENIENT)["spans"]) for step, line in chosen]
        return [(step, [(str(role), float(b), float(e)) for role, b, e in spans]) for step, spans in found if spans]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _lines(path: Path) -> list[tuple[int, bytes]]:
    return [(int(found[1]), found[0]) for found in map(_LINE.fullmatch, lines_of(path)) if found]
