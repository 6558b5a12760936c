"""The messages of reward servers and their clients, in JSON. One protocol for all kinds of reward.

``POST /score`` takes a :class:`ScoreRequest` and answers with a :class:`ScoreReply`; or, if ``application/x-ndjson`` is
accepted, with one :class:`Result` a line, each as soon as it is there. ``POST /examine`` takes an
:class:`ExamineRequest` and answers with an :class:`ExamineReply`. Every other status than 200 comes with an
:class:`ErrorReply`, which is also the last line of a stream that cannot be finished.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.contract import Doubt
from dapo.reward.convert import reward_to_json

NDJSON = "application/x-ndjson"


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Row(_Message):
    """A row of the data, as far as a reward needs it."""

    prompt: str
    """The prompt as text."""
    answer: str | None = None
    """The reference answer."""
    meta: dict[str, Any] = Field(default_factory=dict)
    """The row's other keys."""
    row: int | None = Field(None, ge=0)
    """Number of the row in the data, counted from 0: messages name it."""
    prompt_end: str = ""
    """What the response goes on from: the text that the prompt, as the model saw it, has behind its last control
    token."""

    def as_prompt(self, position: int) -> Prompt:
        """``position``: in the request, for a row without a number."""
        number = position if self.row is None else self.row
        return Prompt(number, self.prompt, (), self.answer, self.meta, self.prompt_end)


class Item(Row):
    """A response to score."""

    response: str
    """The response as text."""
    finish_reason: FinishReason | None = None
    """Why it ended: by itself (`stop`), or at the limit (`length`); null: not known."""
    id: str | int | None = None
    """Comes back with the result."""

    @field_validator("id")
    @classmethod
    def _can_be_sent_back(cls, value: str | int | None) -> str | int | None:
        if isinstance(value, str):
            value.encode()  # raises a ValueError for lone surrogates
        return value


class ScoreRequest(_Message):
    items: list[Item]
    """Responses to score. They may belong to different rows."""


class Result(_Message):
    """The verdict on one item. With an ``error`` there is none: a failed score is not a wrong answer."""

    index: int = Field(ge=0)
    """Place of the item in the request, counted from 0."""
    id: str | int | None = None
    """What the item came with."""
    correct: bool | None
    """Right or wrong; null: the reward has no notion of it."""
    value: float
    """The reward."""
    parts: dict[str, float]
    """What it is made of, by name."""
    extracted: str | None
    """The answer that was found in the response."""
    error: str | None
    """Why there is no verdict."""

    @classmethod
    def of(cls, index: int, item: Item, reward: Reward) -> Result:
        """Raises ValueError: the reward is none that JSON can hold."""
        try:
            return cls(index=index, id=item.id, **_writable(reward_to_json(reward)))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
            raise ValueError(f"the reward cannot be sent: {'; '.join(problems)}") from None


class ScoreReply(_Message):
    results: list[Result]
    """One for each item, in order."""


class ExamineRequest(_Message):
    rows: list[Row]
    """Rows of the data."""


class DoubtfulRow(_Message):
    position: int = Field(ge=0)
    """Place of the row in the request, counted from 0."""
    text: str
    """What is wrong with it."""
    unusable: bool = False
    """No response to this row can be scored."""

    @classmethod
    def of(cls, doubt: Doubt) -> DoubtfulRow:
        return cls(position=doubt.position, text=_writable(doubt.text), unusable=doubt.unusable)


class ExamineReply(_Message):
    doubts: list[DoubtfulRow]
    """The rows with which something is wrong, in order."""


class ErrorReply(_Message):
    error: str
    """What was wrong, and where."""
    retry: bool = False
    """Whether the same request may well be answered later. If not, it is the client or the reward that must change."""

    @classmethod
    def of(cls, text: str, retry: bool) -> ErrorReply:
        return cls(error=_writable(text), retry=retry)


def _writable(value: Any) -> Any:
    """Lone surrogates, which UTF-8 cannot hold, become question marks."""
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
