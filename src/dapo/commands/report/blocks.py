"""What a report is made of, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be read, or typed, as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A table. The first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure; ``name`` is its file's, ``caption`` says what it shows to who cannot see it."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample. ``prompt`` and ``response`` are the model's and the data's: they may hold anything."""

    title: str
    prompt: str
    response: str


Block = Text | Code | Rows | Plot | Answer


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what is below it."""

    title: str
    blocks: Sequence[Block]
