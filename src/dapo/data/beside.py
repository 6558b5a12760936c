"""What is drawn from beside the rows of ``data.train``: prompts that arrive (``live.py``) or are made up meanwhile
(``proposer.py``). When such a source has nothing ready, its draw goes to the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from dapo.data.parts import encode
from dapo.data.rows import BadRow
from dapo.data.template import PromptTemplate
from dapo.records import Group, Prompt

if TYPE_CHECKING:
    from dapo.data.live import LiveRows
    from dapo.data.proposer import Proposer

Side: TypeAlias = "LiveRows | Proposer"


class Beside:
    """All of them. Their prompts are numbered from ``first`` on, behind the rows of the data."""

    def __init__(self, sides: Sequence[Side], template: PromptTemplate, longest: int, first: int) -> None:
        self._sides, self._template, self._longest, self._first = sides, template, longest, first
        self._made = 0

    def next(self, at: float) -> Prompt | None:
        """The prompt of a draw; None: it goes to the rows. ``at``: from 0 to 1, at random."""
        for side in self._sides:
            if at < side.share:
                return self._take(side)
            at -= side.share
        return None

    def _take(self, side: Side) -> Prompt | None:
        while (row := side.take()) is not None:
            harmless = self._template.without_special  # strangers wrote it
            messages = tuple({key: harmless(said) for key, said in m.items()} for m in row.messages)
            row = replace(row, prompt=messages or harmless(row.text))
            try:
                ids = encode(row, self._template)
                if len(ids) > self._longest:
                    raise BadRow(f"{len(ids)} tokens are longer than data.max_prompt_length={self._longest}")
            except BadRow as fault:
                side.refuse(f"{row.place}: {fault}")
                continue
            self._made += 1
            number = self._first + self._made - 1
            meta, end = {**row.meta, "source": side.kind}, self._template.end(ids)
            return Prompt(number, row.text, ids, row.answer, meta, end, row.messages)
        return None

    def heard(self, groups: Sequence[Group]) -> None:
        """What became of prompts: those whose source wants to know are told to it."""
        for side in self._sides:
            made = [g for g in groups if g.prompt.row >= self._first and g.prompt.meta.get("source") == side.kind]
            if made and hasattr(side, "heard"):
                side.heard(made)

    def metrics(self) -> dict[str, float]:
        return {name: value for side in self._sides for name, value in side.metrics().items()}

    def state(self) -> dict[str, Any]:
        return {"made": self._made, **{side.kind: side.state() for side in self._sides}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._made = state["made"]
        for side in self._sides:
            if side.kind in state:
                side.load_state(state[side.kind])
