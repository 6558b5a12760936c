"""What an episode was: token ids as they were sampled and appended, in one sequence or several.

Consumes conversations as whoever plays the episode has them, and samples of single turns. Produces one
:class:`~dapo.records.Sample`. Ids are appended and never made anew from text: of a longer conversation only the text
behind what is there already is tokenized. Where it is not there in the beginning (a template that rewrites earlier
turns, an agent that changes its history), a new sequence of the same episode begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dapo.data.template import PromptTemplate
from dapo.records import NOBODY, Sample, Turn

TURN_ENDS: Mapping[str, str] = {
    "stop": "ended by itself",
    "tool_calls": "called tools",
    "malformed": "held a call of a tool that cannot be read",
    "length": "was cut",
}
EPISODE_ENDS: Mapping[str, str] = {
    "done": "came to its end",
    "max_turns": "had all turns that it may have",
    "max_tokens": "had all tokens that it, or its last turn, may have",
    "timeout": "took too long",
    "died": "its environment or agent failed",
}


@dataclass(slots=True, eq=False)
class Sequence:
    """A conversation under way. ``texts``: how a longer one may begin to be appended: with the stop token of the last
    turn and without it, as some templates end a turn in another way."""

    prompt_ids: list[int]
    texts: tuple[str, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Opening:
    """A place for the model to speak: ``tail`` is what the environment has said since, up to it."""

    sequence: Sequence
    tail: list[int]
    text: str

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.sequence.prompt_ids, *self.sequence.ids, *self.tail)


class Trace:
    """The sequences of one episode."""

    def __init__(self, template: PromptTemplate) -> None:
        self._template = template
        self.sequences: list[Sequence] = []
        self._last: Sequence | None = None

    def open(self, text: str) -> Opening:
        """``text``: of the whole conversation, up to where the model is to speak. Nothing is appended yet."""
        begun = [(len(said), one) for one in self.sequences for said in one.texts if text.startswith(said)]
        if begun:
            length, sequence = max(begun, key=lambda found: found[0])
            return Opening(sequence, self._template.continuing_ids(text[length:]), text)
        first = self._template.encode_text(text) if not self._template.source else None
        return Opening(Sequence(first or self._template.continuing_ids(text), ()), [], text)

    def add(self, opening: Opening, sample: Sample, stop: str) -> None:
        """Append what the environment said, and the model's answer. ``stop``: one of :data:`TURN_ENDS`."""
        at, ids = opening.sequence, sample.token_ids.tolist()
        self._last = at
        if at not in self.sequences:
            self.sequences.append(at)
        at.ids += opening.tail
        at.logprobs += [0.0] * len(opening.tail)
        at.versions += [NOBODY] * len(opening.tail)
        at.turns.append(Turn(len(at.ids), len(at.ids) + len(ids), stop))
        at.ids += ids
        at.logprobs += sample.logprobs.tolist()
        at.versions += sample.versions.tolist()
        whole, said = self._template.text(ids), self.said(sample)
        at.texts = (opening.text + whole, *([opening.text + said] if said != whole else ()))

    def said(self, sample: Sample) -> str:
        """The text of a turn, control tokens too but for the one that ended it."""
        ids = sample.token_ids.tolist()
        ended = not sample.truncated and ids and ids[-1] in self._template.control
        return self._template.text(ids[:-1] if ended else ids)

    def reward(self, value: float) -> None:
        """For the last turn."""
        if self._last is not None:
            last = self._last.turns.pop()
            self._last.turns.append(replace(last, reward=last.reward + value))

    def sample(self, request_id: int, index: int, ended: str, prompt_ids: tuple[int, ...]) -> Sample:
        """``prompt_ids``: of the group, which need not be kept with each of its samples."""

        def part(one: Sequence, first: bool) -> Sample:
            text, turns = self._text(one)
            own = None if first and tuple(one.prompt_ids) == prompt_ids else np.asarray(one.prompt_ids, np.int32)
            return Sample(
                request_id,
                index,
                np.asarray(one.ids, np.int32),
                np.asarray(one.logprobs, np.float32),
                np.asarray(one.versions, np.int32),
                "length" if ended in ("max_tokens", "max_turns", "timeout") else "stop",
                prompt_ids=own,
                turns=turns,
                text=text,
            )

        head, *others = [part(one, not place) for place, one in enumerate(self.sequences)] or [
            part(Sequence(list(prompt_ids), ()), True)
        ]
        return replace(head, ended=ended, more=tuple(others))

    def _text(self, one: Sequence) -> tuple[str, tuple[Turn, ...]]:
        """What was said, piece by piece, and the turns with their places in it."""
        text, at, turns = "", 0, []
        for turn in one.turns:
            text += self._template.decode(one.ids[at : turn.start])
            said = self._template.decode(one.ids[turn.start : turn.end])
            turns.append(replace(turn, chars=(len(text), len(text) + len(said))))
            text, at = text + said, turn.end
        return text, tuple(turns)
