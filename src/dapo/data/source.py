"""Where prompts come from: rows become prompts, over-long ones are left out and counted, and are drawn for ever.

Consumes rows (``jsonl.py``) and a template; produces :class:`~dapo.records.Prompt` records. Waits for nothing. Its
position is two numbers, from which a resumed run draws the very same prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dapo.config import DataConfig
from dapo.data.jsonl import Keys, Row, read_rows, rows_from_python
from dapo.data.template import PromptTemplate
from dapo.errors import DataError
from dapo.records import Prompt

_ANSWER_STREAM = 1
"""Keeps the permutation of the answers apart from those of the rows (whose second seed word is 0)."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """What is in the data. All counts are rows.

    ``duplicates``: rows whose prompt stood in an earlier row already; ``conflicts``: those of them whose answer
    differs from that of the first one. They are kept: a row is a prompt of its own.
    """

    rows: int
    too_long: int
    duplicates: int
    conflicts: int
    longest: int
    """Length in tokens of the longest prompt that is used."""

    @property
    def usable(self) -> int:
        """Rows that prompts are drawn from."""
        return self.rows - self.too_long


def load_prompts(
    data: DataConfig,
    source: Sequence[str] | Sequence[Mapping[str, Any]],
    template: PromptTemplate,
    *,
    seed: int = 0,
    evaluation: bool = False,
    answer_required: bool = True,
    limit: int | None = None,
) -> PromptSource:
    """Read, check, filter: the prompts of a run.

    Args:
        data: the recipe's ``data`` section.
        source: files, or rows from Python.
        template: the one that the rollout uses too.
        seed: of the run.
        evaluation: exactly the rows given, in their order, with their own answers, whatever ``data`` says for training.
        answer_required: whether a row without an answer is a fault (``reward.build.needs_answer``).
        limit: use the first so many rows.

    Raises:
        DataError: a file or row is bad, or no prompt is short enough.
    """
    keys = Keys(data.prompt_key, data.answer_key, answer_required)
    files = [item for item in source if isinstance(item, str)]
    if len(files) == len(source):
        rows = read_rows(files, keys)
    else:
        rows = rows_from_python([item for item in source if not isinstance(item, str)], keys)
    return PromptSource(
        rows[:limit],
        template,
        seed=seed,
        shuffle=data.shuffle and not evaluation,
        max_prompt_length=data.max_prompt_length,
        shuffle_answers=data.shuffle_answers and not evaluation,
    )


class PromptSource:
    """Prompts to draw from, without end: each epoch holds every usable row once."""

    def __init__(
        self,
        rows: Sequence[Row],
        template: PromptTemplate,
        *,
        seed: int,
        shuffle: bool,
        max_prompt_length: int,
        shuffle_answers: bool = False,
    ) -> None:
        """
        Args:
            rows: in the order of the data; the place of a row here is its identity (``Prompt.row``).
            template: turns a row into token ids.
            seed: of the run.
            shuffle: a seeded order, another one each epoch; otherwise the order of ``rows``.
            max_prompt_length: longest prompt in tokens, template included.
            shuffle_answers: give every row the answer of another one (a control experiment).

        Raises:
            DataError: no row is short enough.
        """
        self._seed = seed
        self._shuffle = shuffle
        encoded = [_encode(row, template) for row in rows]
        short = [len(ids) <= max_prompt_length for ids in encoded]
        if not any(short):
            raise DataError(
                f"no prompt is left: {len(rows)} rows were read, all of them longer than data.max_prompt_length="
                f"{max_prompt_length} tokens (the shortest has {min(map(len, encoded), default=0)})"
            )
        answers = _shuffled([row.answer for row in rows], seed) if shuffle_answers else [row.answer for row in rows]
        self.prompts: tuple[Prompt, ...] = tuple(
            Prompt(k, row.text, tuple(ids), answer, row.meta)
            for k, (row, ids, answer, fits) in enumerate(zip(rows, encoded, answers, short, strict=True))
            if fits
        )
        self.report = replace(
            _count(rows), too_long=short.count(False), longest=max(len(p.token_ids) for p in self.prompts)
        )
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.prompts)

    def draw(self) -> Prompt:
        """The next prompt."""
        if self._position == len(self.prompts):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        prompt = self.prompts[self._order[self._position]]
        self._position += 1
        return prompt

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""
        return self._epoch + self._position / len(self.prompts)

    def state(self) -> dict[str, int]:
        """The position, as JSON."""
        return {"epoch": self._epoch, "position": self._position, "prompts": len(self.prompts)}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go to a position that :meth:`state` gave.

        Raises:
            DataError: it was given by a source of another size.
        """
        if state["prompts"] != len(self.prompts):
            raise DataError(
                f"the data has changed since the checkpoint: it held {state['prompts']} usable prompts, now it holds "
                f"{len(self.prompts)}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        """The order of an epoch follows from seed and epoch alone, so that it can be entered anywhere."""
        if not self._shuffle:
            return list(range(len(self.prompts)))
        order: list[int] = np.random.default_rng((self._seed, 0, epoch)).permutation(len(self.prompts)).tolist()
        return order


def _encode(row: Row, template: PromptTemplate) -> list[int]:
    try:
        ids = template.encode(row.prompt)
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from None
    if not ids:
        raise DataError(f"{row.place}: the tokenizer makes no tokens of this prompt: {row.text[:60]!r}")
    return ids


def _shuffled(answers: Sequence[str | None], seed: int) -> list[str | None]:
    """Answers along one random cycle through all rows: no row keeps its own. (Equal answers may still meet.)"""
    order = np.random.default_rng((seed, _ANSWER_STREAM)).permutation(len(answers)).tolist()
    shuffled: list[str | None] = list(answers)
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        shuffled[here] = answers[there]
    return shuffled


def _count(rows: Sequence[Row]) -> DataReport:
    answers: defaultdict[str, list[str | None]] = defaultdict(list)
    for row in rows:
        answers[row.text].append(row.answer)
    duplicates = sum(len(found) - 1 for found in answers.values())
    conflicts = sum(answer != found[0] for found in answers.values() for answer in found[1:])
    return DataReport(rows=len(rows), too_long=0, duplicates=duplicates, conflicts=conflicts, longest=0)
