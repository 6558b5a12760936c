"""Groups, flattened: the only place where samples become token rows.

Consumes: admitted :class:`~dapo.records.Group` records with their advantages. Produces: a :class:`PackedBatch`, all
sequences end to end without padding, which the trainer cuts into mini-batches of whole groups (``updates``) and those
into micro-batches of whole sequences (``micro_batches``). Waits for nothing.

Samples of one draw have one and the same prompt. The model computes it once for all of them that are in the same
micro-batch (``shared_prompts``), forward and backward: a prompt attends to nothing but itself.

Token ids and lengths are the engine's own: nothing is decoded, encoded or searched for a stop token.

Worked example: prompt [5, 6] with response [7, 8] is the sequence 5 6 7 8. T = 4, R = 2; the response tokens 7 and 8
(``targets``) are predicted at positions 1 and 2 of the row (``predictors``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dapo.errors import ConfigError
from dapo.records import Group, Sample

IntArray = npt.NDArray[np.int64]
Record = TypeVar("Record")

DEMONSTRATION_VERSION = -1
"""The policy version of tokens that no policy sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """S sequences (prompt + response) of G groups, end to end: T tokens, R of them in responses.

    Per sequence, ``[S]``, on the host: ``lengths`` (tokens), ``prompt_lengths`` (tokens), ``draws`` (identity of the
    group), ``indices`` (of the sample in its group). Per token, ``[T]`` int64: ``token_ids``. Per response token,
    ``[R]``, in sequence order: ``behaviour_logprobs`` (nats, as sampled), ``advantages``, ``mask`` (bool: in the loss),
    ``versions`` (policy version sampled under) and, once computed, ``proximal_logprobs`` and ``reference_logprobs``:
    attached with :func:`dataclasses.replace`, they are cut together with the rest.
    """

    lengths: IntArray
    prompt_lengths: IntArray
    draws: IntArray
    indices: IntArray
    token_ids: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    versions: torch.Tensor
    proximal_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None

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
    def position_ids(self) -> torch.Tensor:
        """``[T]``: place of each token in its own sequence, from 0."""
        return self._tensor(_ranges(np.zeros_like(self.lengths), self.lengths))

    @property
    def predictors(self) -> torch.Tensor:
        """``[R]``: index in ``token_ids`` of the token whose hidden state predicts each response token."""
        starts = _starts(self.lengths) + self.prompt_lengths - 1
        return self._tensor(_ranges(starts, self.response_lengths))

    @property
    def targets(self) -> torch.Tensor:
        """``[R]``: the response tokens themselves."""
        return self.token_ids[self.predictors + 1]

    @property
    def sample_ids(self) -> torch.Tensor:
        """``[R]``: number of each response token's sequence in this batch, 0 .. S - 1."""
        return self._tensor(np.repeat(np.arange(self.num_samples), self.response_lengths))

    @property
    def group_ids(self) -> torch.Tensor:
        """``[R]``: number of each response token's group in this batch, 0 .. G - 1 by first appearance."""
        return self._tensor(np.repeat(self._group_numbers(), self.response_lengths))

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model, where the prompt of a group does so once."""
        _, firsts = np.unique(self.draws, return_index=True)
        return int(self.response_lengths.sum() + self.prompt_lengths[firsts].sum())

    def shared_prompts(self) -> SharedPrompts:
        """The row that the model computes: the prompt of a group stands in it once, however many samples it has."""
        starts = _starts(self.lengths)
        _, firsts, inverse = np.unique(self.draws, return_index=True, return_inverse=True)
        first = firsts[inverse]
        shared = np.where(first == np.arange(self.num_samples), 0, self.prompt_lengths)
        elsewhere = _ranges(starts, shared)
        source, own = np.arange(self.num_tokens), np.ones(self.num_tokens, dtype=np.bool_)
        source[elsewhere] = _ranges(starts[first], shared)
        own[elsewhere] = False
        place = (np.cumsum(own) - 1)[source]
        return SharedPrompts(self._tensor(np.flatnonzero(own)), self._tensor(place), shared)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on ``device``."""
        moved: dict[str, Any] = {name: _upload(tensor, device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def updates(self, groups_per_update: int) -> Iterator[PackedBatch]:
        """Mini-batches of whole groups, in admission order: ceil(G / groups_per_update), the last may be smaller."""
        if groups_per_update < 1:
            raise ValueError(f"groups_per_update must be at least 1, got {groups_per_update}")
        numbers = self._group_numbers()
        for first in range(0, self.num_groups, groups_per_update):
            wanted = (numbers >= first) & (numbers < first + groups_per_update)
            yield self.select(np.flatnonzero(wanted)).batch

    def micro_batches(self, token_budget: int) -> list[MicroBatch]:
        """Parts of whole sequences with at most ``token_budget`` computed tokens each, few and of similar size.

        Every sequence is in exactly one of them, and a group in as few as can be, for its prompt is computed in each
        of them. The cut depends on lengths and groups only.

        Raises:
            ConfigError: one sequence alone is longer than the budget.
        """
        if self.num_samples and self.lengths.max() > token_budget:
            longest = int(self.lengths.argmax())
            tokens, prompt = int(self.lengths[longest]), int(self.prompt_lengths[longest])
            raise ConfigError(
                f"training.tokens_per_micro_batch: is {token_budget}, but sample {self.indices[longest]} of draw "
                f"{self.draws[longest]} has {prompt} (prompt) + {tokens - prompt} (response) = {tokens} tokens; use at "
                f"least {tokens}"
            )
        pieces = list(self._pieces(token_budget))
        sizes = [self._computed(rows) for rows in pieces]
        plan = plan_micro_batches(sizes, token_budget)
        return [self.select(np.sort(np.concatenate([pieces[i] for i in chosen]))) for chosen in plan]

    def _pieces(self, token_budget: int) -> Iterator[IntArray]:
        """The sequences of each group, ascending; of a group that is above the budget, parts that are not."""
        numbers = self._group_numbers()
        order = np.argsort(numbers, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if not len(rows):
                continue
            room = token_budget - int(self.prompt_lengths[rows[0]])
            if self.response_lengths[rows].sum() <= room:
                yield rows
            else:
                yield from (rows[chosen] for chosen in plan_micro_batches(self.response_lengths[rows], room))

    def _computed(self, rows: IntArray) -> int:
        """Tokens to compute for some sequences of one group."""
        return int(self.prompt_lengths[rows[0]] + self.response_lengths[rows].sum())

    def select(self, sequences: IntArray) -> MicroBatch:
        """Some of the sequences as a batch of their own.
        ``sequences``: numbers of the wanted ones, none twice, in the order wanted."""
        tokens = _ranges(_starts(self.lengths)[sequences], self.lengths[sequences])
        index = self._tensor(_ranges(_starts(self.response_lengths)[sequences], self.response_lengths[sequences]))
        cut: dict[str, Any] = {name: getattr(self, name)[sequences] for name in PER_SEQUENCE}
        cut |= {name: tensor[index] for name, tensor in self._tensors().items() if name != "token_ids"}
        cut["token_ids"] = self.token_ids[self._tensor(tokens)]
        return MicroBatch(replace(self, **cut), index)

    def _group_numbers(self) -> IntArray:
        """``[S]``: groups numbered by first appearance. By draw and never by position: a group may be scattered."""
        _, first, inverse = np.unique(self.draws, return_index=True, return_inverse=True)
        rank: IntArray = np.argsort(np.argsort(first))
        return rank[inverse]

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return _upload(torch.from_numpy(array), self.token_ids.device)


PER_SEQUENCE = ("lengths", "prompt_lengths", "draws", "indices")
"""The fields of a :class:`PackedBatch` that are arrays ``[S]`` on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """Where the T tokens of a batch stand in the row of U tokens that the model computes.

    ``kept`` ``[U]``: the tokens that are in the row. ``place`` ``[T]``: where in it each token stands. ``shared``
    ``[S]``, on the host: how many tokens of each sequence, its prompt or none, stand in the place of another's.
    """

    kept: torch.Tensor
    place: torch.Tensor
    shared: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A part of a batch, and where its response tokens stand in the whole: ``index`` ``[R of the part]`` int64."""

    batch: PackedBatch
    index: torch.Tensor


# --- making one ---------------------------------------------------------------------------------------------------


def pack(groups: Iterable[Group], device: torch.device | str = "cpu") -> PackedBatch:
    """Flatten groups into one batch, samples without a verdict left out.

    They are dropped here, after their group's statistics, so that leaving them out cannot shift a group's border.

    Raises:
        ValueError: an empty prompt (its first response token would have no predictor), or a sample in the loss
            without a finite advantage.
    """
    return _flatten([(g.draw, g.prompt.token_ids, s) for g in groups for s in g.samples if s.scored], device)


def pack_demonstrations(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu"
) -> PackedBatch:
    """Pairs (prompt ids, response ids) to imitate, each a group of its own.

    Behaviour log-probs are 0, advantages 1 and versions :data:`DEMONSTRATION_VERSION`: nobody sampled these tokens.

    Raises:
        ValueError: an empty prompt.
    """
    return _flatten([(i, prompt, _demonstration(i, response)) for i, (prompt, response) in enumerate(pairs)], device)


def _demonstration(number: int, response: Sequence[int]) -> Sample:
    token_ids = np.asarray(response, dtype=np.int32)
    return Sample(
        request_id=number,
        index=0,
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=np.full(len(token_ids), DEMONSTRATION_VERSION, dtype=np.int32),
        finish_reason="stop",
        advantage=1.0,
    )


def _flatten(rows: Sequence[tuple[int, Sequence[int], Sample]], device: torch.device | str) -> PackedBatch:
    """``rows``: draw, prompt ids and sample of each sequence."""
    for draw, prompt, sample in rows:
        if not len(prompt):
            raise ValueError(f"draw {draw}: empty prompt: nothing predicts the first token of its responses")
        if sample.in_loss and not math.isfinite(sample.advantage):
            raise ValueError(
                f"draw {draw}, sample {sample.index}: in the loss, but its advantage is {sample.advantage}"
            )
    samples = [sample for _, _, sample in rows]
    prompt_lengths = _ints(len(prompt) for _, prompt, _ in rows)
    response_lengths = _ints(sample.length for sample in samples)

    def per_token(values: list[Any], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), response_lengths)).to(device)

    return PackedBatch(
        lengths=prompt_lengths + response_lengths,
        prompt_lengths=prompt_lengths,
        draws=_ints(draw for draw, _, _ in rows),
        indices=_ints(sample.index for sample in samples),
        token_ids=_joined(
            [part for _, prompt, sample in rows for part in (prompt, sample.token_ids)], np.int64, device
        ),
        behaviour_logprobs=_joined([sample.logprobs for sample in samples], np.float32, device),
        advantages=per_token([sample.advantage for sample in samples], np.float32),
        mask=per_token([sample.in_loss for sample in samples], np.bool_),
        versions=_joined([sample.versions for sample in samples], np.int64, device),
    )


def _joined(parts: Sequence[Any], dtype: Any, device: torch.device | str) -> torch.Tensor:
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.empty(0, dtype)).to(device)


def _upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` on ``device``. From pageable memory the copy would wait for all that the GPU has still to do."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _ints(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)


def _starts(lengths: IntArray) -> IntArray:
    starts: IntArray = np.cumsum(lengths) - lengths
    return starts


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """``starts[i], starts[i] + 1, ...``, ``lengths[i]`` of them, for each i, joined."""
    ranges: IntArray = np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
    return ranges


# --- cutting one --------------------------------------------------------------------------------------------------


def plan_micro_batches(lengths: Sequence[int] | IntArray, token_budget: int) -> list[IntArray]:
    """Distribute sequences, or pieces of groups, over few micro-batches of similar size, none above ``token_budget``.

    Their number is what first-fit decreasing needs (at most 11/9 of the optimum). With that many, each sequence then
    goes to the least loaded one instead: equal parts, where first-fit leaves a small rest. If that breaks the budget,
    first-fit's own answer stands. ``lengths``: tokens of each, each within the budget.

    Returns:
        Numbers of those in each micro-batch, ascending.
    """
    sizes = [int(n) for n in lengths]
    longest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])  # stable, so ties keep their order
    bins = _first_fit(longest_first, sizes, token_budget)
    even = _least_loaded(longest_first, sizes, len(bins))
    fits = all(sum(sizes[i] for i in rows) <= token_budget for rows in even)
    return [np.sort(_ints(rows)) for rows in (even if fits else bins)]


def _first_fit(order: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((b for b, left in enumerate(room) if left >= sizes[i]), None)
        if place is None:
            bins.append([i])
            room.append(budget - sizes[i])
        else:
            bins[place].append(i)
            room[place] -= sizes[i]
    return bins


def _least_loaded(order: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    for i in order:
        load, place = loads[0]
        bins[place].append(i)
        heapq.heapreplace(loads, (load + sizes[i], place))
    return bins


def select_tokens(record: Record, index: torch.Tensor) -> Record:
    """A dataclass of per-token tensors, cut to some tokens.

    Every field that holds a tensor (``[R, ...]``) is indexed by ``index``; other fields (None, numbers) stay.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]
    cut = {name: value[index] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(record, **cut)  # type: ignore[type-var]
