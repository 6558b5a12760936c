"""The records that flow through a run, in one direction: ``Prompt -> Sample -> Group -> TokenBatch``.

All are frozen; a later stage makes a new record with :func:`dataclasses.replace` and never edits one in place. A
:class:`Group` (a prompt and its samples) is the only unit until admission. It is flattened once, in
``training/packing.py``; the trainer cuts a :class:`TokenBatch` into micro-batches on its device.

This module needs numpy only, so that clients can use the records without loading a tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dapo.util.verdict import Reward as Reward

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
FinishReason = Literal["stop", "length"]
NOBODY = -1
"""The policy version of tokens that no policy sampled."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, ready to be sampled from.

    ``row`` is the identity of the prompt: its place in the data source. Two rows with equal text are two prompts.
    ``end`` is what a response goes on from: the text that the prompt as the model sees it has behind its last control
    token, such as a ``<think>`` of the chat template; empty where it is not known. ``messages``: of a chat's row.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    answer: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    end: str = ""
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model within an episode: the tokens from ``start`` up to ``end`` of its sample.

    ``stop``: why it ended, see :data:`~dapo.environments.trace.TURN_ENDS`; a turn that was ``cut`` is context for those
    after it and nothing to learn from. ``reward``: what the environment gave for it. ``advantage``: of its own, under
    ``environment.credit: turn``; else that of the sample counts. ``chars``: where it stands in the sample's text.
    """

    start: int
    end: int
    stop: str = "stop"
    reward: float = 0.0
    advantage: float | None = None
    chars: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chars", tuple(self.chars))  # of JSON, a list

    @property
    def cut(self) -> bool:
        return self.stop == "length"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response, or one episode of several turns. The engine fills the first block, the reward server the second,
    shaping and advantage the third.

    Shapes: ``token_ids``, ``logprobs`` and ``versions`` are ``[T]`` with ``T`` the response length in tokens, the stop
    token counted. ``logprobs`` are natural logs under the very distribution sampled from, temperature included.
    ``versions`` holds the policy version that each token was sampled under.

    An episode has ``turns``. What stands between them is the environment's: its tokens have log-prob 0 and the version
    :data:`NOBODY`. ``ended`` is why the episode ended. ``prompt_ids``: what it began with, where that is not the
    prompt of its group. ``more``: conversations that could not be appended to it, each with a prompt of its own; reward
    and advantage are those of the episode.

    ``top_ids`` and ``top_logprobs``, ``[T, k]``: the k most likely tokens at each place, the most likely first, and
    their log-probabilities at the temperature of sampling (greedy: 1), before any truncation. None unless they were
    asked for, as training never does.
    """

    request_id: int
    index: int
    token_ids: TokenArray
    logprobs: FloatArray
    versions: TokenArray
    finish_reason: FinishReason
    top_ids: TokenArray | None = field(default=None, kw_only=True)
    top_logprobs: FloatArray | None = field(default=None, kw_only=True)
    turns: tuple[Turn, ...] = field(default=(), kw_only=True)
    ended: str = field(default="", kw_only=True)
    prompt_ids: TokenArray | None = field(default=None, kw_only=True)
    more: tuple[Sample, ...] = field(default=(), kw_only=True)

    text: str = ""
    reward: Reward | None = None

    shaped_reward: float = math.nan
    advantage: float = math.nan
    in_loss: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            of = f"sample {self.index} of request {self.request_id}"
            raise ValueError(f"{of}: token_ids, logprobs and versions differ in length: {sorted(lengths)}")
        ids, logprobs = (None if top is None else top.shape for top in (self.top_ids, self.top_logprobs))
        if ids != logprobs or (ids is not None and ids[0] != len(self.token_ids)):
            raise ValueError(f"top_ids and top_logprobs must both be [T, k], got {ids} and {logprobs}")

    @property
    def parts(self) -> tuple[Sample, ...]:
        """The sequences of tokens that it is made of: itself, and those that could not be appended."""
        return (self, *self.more)

    @property
    def length(self) -> int:
        """|y|: tokens that the model sampled, stop tokens counted."""
        if not self.turns and not self.more:
            return len(self.token_ids)
        return sum(turn.end - turn.start for part in self.parts for turn in part.turns)

    def _of(self, turns: Iterable[Turn]) -> npt.NDArray[np.bool_]:
        """``[T]``: the tokens of these turns; of a single response all."""
        mask = np.full(len(self.token_ids), not self.turns)
        for turn in turns:
            mask[turn.start : turn.end] = True
        return mask

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """``[T]``: which tokens may be learned from: the model's, but for turns that were cut."""
        return self._of(turn for turn in self.turns if not turn.cut)

    @property
    def loss_tokens(self) -> int:
        """How many tokens of it, all sequences of an episode counted, are in the loss."""
        return sum(int(part.loss_mask.sum()) for part in self.parts) if self.in_loss else 0

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version of its tokens; None: it has none."""
        found = np.concatenate([part.versions[part._of(part.turns)] for part in self.parts])
        return (int(found.min()), int(found.max())) if len(found) else None

    @property
    def truncated(self) -> bool:
        """Cut at the limit. A response whose stop token is the last allowed one is not truncated."""
        return self.finish_reason == "length"

    @property
    def continued(self) -> bool:
        """Whether it went on under new weights: its tokens are of more than one version."""
        versions = self.version_range
        return versions is not None and versions[0] != versions[1]

    @property
    def scored(self) -> bool:
        """Whether there is a verdict: a failed score is not a wrong answer."""
        return self.reward is not None and self.reward.error is None

    @property
    def verdict(self) -> Reward:
        """The reward of a scored sample. Raises ValueError: the sample has not been scored, or scoring failed."""
        if self.reward is None or self.reward.error is not None:
            raise ValueError(f"sample {self.index} of request {self.request_id} has no verdict")
        return self.reward


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and its samples: the unit of dynamic sampling, of the advantage and of mini-batches.

    ``draw`` is the running number of the prompt draw over the whole run. It orders admission and identifies the group:
    a row that is drawn again in a later epoch is another group.
    """

    draw: int
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def scored(self) -> tuple[Sample, ...]:
        """The samples that have a verdict. Statistics run over these."""
        return tuple(s for s in self.samples if s.scored)

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token: what staleness is counted from."""
        return min(versions[0] for s in self.samples if (versions := s.version_range))


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """S sequences (prompt + response) of G groups, end to end: T tokens, R of them in responses. On the host.

    Per sequence, ``[S]`` int64: ``lengths`` and ``prompt_lengths`` (tokens), ``draws`` (identity of the group) and
    ``indices`` (of the sample in its group). ``token_ids`` ``[T]`` int64. Per response token, ``[R]``, in sequence
    order: ``mask`` (bool: in the loss), ``behaviour_logprobs`` (float32, nats, as sampled) and ``versions`` (int64,
    policy version sampled under, :data:`NOBODY` for tokens of an environment). ``columns``: further numbers of each
    response token, ``[R]`` float32, by name, such as ``advantages``, ``proximal`` and ``reference`` (log-probabilities
    of these policies) and ``updates_behind`` (optimizer updates from the token's weights to those that training on the
    batch began at). All are cut together.
    """

    lengths: IntArray
    prompt_lengths: IntArray
    draws: IntArray
    indices: IntArray
    token_ids: IntArray
    mask: npt.NDArray[np.bool_]
    behaviour_logprobs: FloatArray
    versions: IntArray
    columns: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """S, samples with an empty response included."""
        return len(self.lengths)

    @property
    def num_groups(self) -> int:
        """G."""
        return len(np.unique(self.draws))

    @property
    def num_tokens(self) -> int:
        """T: prompts and responses."""
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        """R."""
        return len(self.mask)

    @property
    def response_lengths(self) -> IntArray:
        """``[S]``, tokens."""
        return self.lengths - self.prompt_lengths

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """``[R]``: which tokens a policy sampled."""
        return np.asarray(self.versions != NOBODY)

    @property
    def prompt_numbers(self) -> IntArray:
        """``[S]``: number of the first sequence of its group that has the same prompt."""
        starts, first = starts_of(self.lengths), dict[tuple[int, bytes], int]()
        spans = zip(self.draws.tolist(), starts, starts + self.prompt_lengths, strict=True)
        return np.array(
            [first.setdefault((draw, self.token_ids[a:b].tobytes()), i) for i, (draw, a, b) in enumerate(spans)],
            dtype=np.int64,
        )

    @property
    def sample_ids(self) -> IntArray:
        """``[R]``: number of each response token's sequence in this batch, 0 .. S - 1."""
        return np.repeat(np.arange(self.num_samples), self.response_lengths)

    @property
    def group_ids(self) -> IntArray:
        """``[R]``: number of each response token's group in this batch, 0 .. G - 1 by first appearance."""
        return np.repeat(self.group_numbers, self.response_lengths)

    @property
    def group_numbers(self) -> IntArray:
        """``[S]``: groups numbered by first appearance. By draw and never by position: a group may be scattered."""
        _, first, inverse = np.unique(self.draws, return_index=True, return_inverse=True)
        rank: IntArray = np.argsort(np.argsort(first))
        return rank[inverse]

    @property
    def sample_numbers(self) -> IntArray:
        """``[S]``: a number for each sample, which the sequences of an episode share."""
        found: IntArray = self.group_numbers * (1 + self.indices.max(initial=0)) + self.indices
        return found

    @property
    def proximal(self) -> FloatArray:
        """``[R]``, log pi_prox: recomputed where that was asked for, else the engine's."""
        return self.columns.get("proximal", self.behaviour_logprobs)

    def with_columns(self, **columns: FloatArray) -> TokenBatch:
        """The same batch with more columns, or with others of the same names."""
        return replace(self, columns={**self.columns, **columns})

    def response_index(self, sequences: IntArray) -> IntArray:
        """Where the response tokens of some sequences stand among the R of the batch, one sequence after the other."""
        return joined_ranges(starts_of(self.response_lengths)[sequences], self.response_lengths[sequences])

    def select(self, sequences: IntArray) -> TokenBatch:
        """Some of the sequences as a batch of their own.
        ``sequences``: numbers of the wanted ones, none twice, in the order wanted."""
        tokens = joined_ranges(starts_of(self.lengths)[sequences], self.lengths[sequences])
        index = self.response_index(sequences)
        return TokenBatch(
            lengths=self.lengths[sequences],
            prompt_lengths=self.prompt_lengths[sequences],
            draws=self.draws[sequences],
            indices=self.indices[sequences],
            token_ids=self.token_ids[tokens],
            mask=self.mask[index],
            behaviour_logprobs=self.behaviour_logprobs[index],
            versions=self.versions[index],
            columns={name: values[index] for name, values in self.columns.items()},
        )

    def minibatches(self, groups_per_update: int) -> Iterator[TokenBatch]:
        """Mini-batches of whole groups, in admission order: ceil(G / groups_per_update), the last may be smaller."""
        if groups_per_update < 1:
            raise ValueError(f"groups_per_update must be at least 1, got {groups_per_update}")
        numbers = self.group_numbers
        for first in range(0, self.num_groups, groups_per_update):
            yield self.select(np.flatnonzero((numbers >= first) & (numbers < first + groups_per_update)))


def starts_of(lengths: IntArray) -> IntArray:
    """Where each of several parts that stand end to end begins."""
    starts: IntArray = np.cumsum(lengths) - lengths
    return starts


def joined_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """``starts[i], starts[i] + 1, ...``, ``lengths[i]`` of them, for each i, joined."""
    ranges: IntArray = np.repeat(starts - starts_of(lengths), lengths) + np.arange(lengths.sum())
    return ranges
