"""Rows of responses to rank: candidates, pairs, rankings and labelled texts in one form.

Consumes files or rows; produces :class:`Candidates`. Which form a row has is told by its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.config.data import DataItem
from dapo.config.stages import PairKeys
from dapo.data.examples import ranked
from dapo.data.parts import open_table
from dapo.data.rows import BadRow, Messages, Row, Table, listed, plain_value, text_or_messages, unicode_text
from dapo.errors import DataError

PAIRS = (("chosen", "rejected"), ("correct_code", "incorrect_code"))
"""Keys of a pair, the better one first. Where a row has candidates, too, it is these that are ranked."""
_LABELS = {"candidates": "labels", "responses": "scores", "response": "label"}
"""Keys of other rows, and where each has its labels."""
EVERY = "*"
"""Stands for whichever language model wrote a response."""
FORMS = (
    "candidates (with labels, if known), responses (best first, or with scores), chosen and rejected, correct_code and "
    "incorrect_code, or response (with label)"
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Responses to one prompt. ``labels``: of each, higher is better, 1 or 0 where it is right or wrong; empty: not
    known. ``model``: the language model that wrote them. ``row``: all that the row holds."""

    prompt: str | Messages
    texts: tuple[str, ...]
    labels: tuple[float, ...] = ()
    answer: str | None = None
    model: str = EVERY
    row: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def prompt_text(self) -> str:
        return Row(self.prompt, None).text

    @property
    def binary(self) -> bool:
        return bool(self.labels) and set(self.labels) <= {0.0, 1.0}


def read_candidates(data: Sequence[str] | Table, limit: int | None = None, bare: bool = False) -> list[Candidates]:
    """All rows of files, or of a table, in their order. ``bare``: a prompt will do, without any response.
    Raises DataError: a row is bad; names all of them."""
    tables = [data] if isinstance(data, Table) else [open_table(DataItem(path=file)) for file in data]
    every = [(one, number) for one in tables for number in range(min(len(one), limit or len(one)))]
    found, faults = list[Candidates](), list[str]()
    for table, number in every:
        try:
            found.append(candidates(table.raw(number), table.place(number), bare))
        except BadRow as fault:
            faults.append(f"{table.place(number)}: {fault}")
    if faults:
        raise DataError(listed(faults))
    return found


def candidates(row: Any, place: str = "", bare: bool = False) -> Candidates:
    """A raw row as candidates. Raises BadRow: it holds none (``bare``: and no prompt), or what it must not."""
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object with keys, got {type(row).__name__}")
    row = {str(key): plain_value(value) for key, value in row.items()}
    held = {key for key, value in row.items() if value is not None}
    prompt = text_or_messages(row, "prompt") if "prompt" in held else ""
    key, texts, labels = next((key for key in _LABELS if key in held), ""), tuple[str, ...](), tuple[float, ...]()
    if pair := next((pair for pair in PAIRS if held.issuperset(pair) and "candidates" not in held), None):
        found = ranked(row, PairKeys(chosen_key=pair[0], rejected_key=pair[1], responses_key="-"), needs_prompt=False)
        prompt, texts, labels = found.prompt, found.responses, (1.0, 0.0)
    elif key:
        texts, labels = _all(row, key, str), _all(row, _LABELS[key], int, float, bool)
        if key == "responses" and "scores" not in held:
            labels = tuple(float(-k) for k in range(len(texts)))
    elif not (bare and prompt):
        raise BadRow(f"holds nothing to rank; what would work: {FORMS}")
    if labels and len(labels) != len(texts):
        raise BadRow(f"{len(labels)} labels for {len(texts)} responses")
    answer, model = row.get("answer"), row.get("model")
    writer = model if isinstance(model, str) and model else EVERY
    answer = None if answer is None else str(answer)
    return Candidates(prompt, texts, labels, answer, writer, row, place)


def _all(row: Mapping[str, Any], key: str, *types: type) -> tuple[Any, ...]:
    """What a list holds, or a single response or label; nothing: the row has no such key."""
    value = row.get(key)
    if value is None:
        return ()
    found, single = ([value], "") if key in ("response", "label") else (value, "a list of ")
    if not isinstance(found, list) or not all(
        type(one) in types and (str in types or abs(one) < 2**1023) for one in found
    ):
        raise BadRow(f"{key!r} must be {single}{'text' if str in types else 'finite numbers'}")
    return tuple(unicode_text(one, key) if str in types else float(one) for one in found)


def pairs_of(rows: Sequence[Candidates]) -> Iterator[tuple[int, int, int]]:
    """``(row, better, worse)`` for all pairs of each row that its labels tell apart."""
    for number, row in enumerate(rows):
        for a, higher in enumerate(row.labels):
            yield from ((number, a, b) for b, lower in enumerate(row.labels) if higher > lower)
