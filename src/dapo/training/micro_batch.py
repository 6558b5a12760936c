"""A part of a batch on the trainer's device: what one forward and backward pass works on.

Samples of one draw mostly have one and the same prompt. The model computes it once for all of them that are in the same
micro-batch, forward and backward: a prompt attends to nothing but itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch

from dapo.model.placement import upload
from dapo.records import IntArray, TokenBatch, joined_ranges, starts_of
from dapo.training.packing import cut

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """S sequences with T tokens, R of them in responses, and the row of U < T tokens that the model computes.

    The last token of a response is not among them: it predicts nothing, and no other attends to it.

    Attributes:
        batch: the sequences, on the host.
        index: ``[R]``: where their response tokens stand in the batch that this is a part of.
        row_ids: ``[U]``: the tokens of the row, in which the prompt of a group stands once.
        row_positions: ``[U]``: place of each in its own sequence, from 0.
        lengths: of the sequences, as far as they are computed.
        place: ``[sum(lengths)]``: where in the row each of these tokens stands; on the host.
        shared: for each sequence, how many tokens of it, its prompt or none, stand in the place of another's.
        predictors: ``[R]``: where in the row the token stands whose hidden state predicts each response token.
        targets: ``[R]``: the response tokens.
        last: whether there is none after it.
    """

    batch: TokenBatch
    index: torch.Tensor
    row_ids: torch.Tensor
    row_positions: torch.Tensor
    lengths: Sequence[int]
    place: torch.Tensor
    shared: Sequence[int]
    predictors: torch.Tensor
    targets: torch.Tensor
    last: bool = False

    @property
    def num_computed_tokens(self) -> int:
        """U."""
        return len(self.row_ids)

    @property
    def empty(self) -> bool:
        """Whether it has no response token of the batch."""
        return not len(self.index)


def micro_batch(whole: TokenBatch, sequences: IntArray, device: torch.device) -> MicroBatch:
    """Some sequences of a batch, in the order wanted."""
    batch = whole.select(sequences)
    starts = starts_of(batch.lengths)
    first = batch.prompt_numbers
    shared = np.where(first == np.arange(batch.num_samples), 0, batch.prompt_lengths)
    elsewhere = joined_ranges(starts, shared)
    lengths = batch.lengths - (batch.response_lengths > 0)
    computed = joined_ranges(starts, lengths)
    source, own = np.arange(batch.num_tokens), np.zeros(batch.num_tokens, dtype=np.bool_)
    source[elsewhere] = joined_ranges(starts[first], shared)
    own[computed] = True
    own[elsewhere] = False
    place = (np.cumsum(own) - 1)[source]
    positions = joined_ranges(np.zeros_like(batch.lengths), batch.lengths)
    predictors = joined_ranges(starts + batch.prompt_lengths - 1, batch.response_lengths)
    return MicroBatch(
        batch,
        index=upload(whole.response_index(sequences), device),
        row_ids=upload(batch.token_ids[own], device),
        row_positions=upload(positions[own], device),
        lengths=lengths.tolist(),
        place=torch.from_numpy(place[computed]),
        shared=shared.tolist(),
        predictors=upload(place[predictors], device),
        targets=upload(batch.token_ids[predictors + 1], device),
    )


def micro_batches(
    batch: TokenBatch,
    token_budget: int,
    device: torch.device,
    whole_groups: bool = False,
    share: tuple[int, int] = (0, 1),
    lockstep: bool = False,
) -> Iterator[MicroBatch]:
    """Parts of whole sequences with at most ``token_budget`` computed tokens each, see :func:`cut`.

    Args:
        share: (rank, ranks): of all parts those of this rank.
        lockstep: compute two tokens that count for nothing in the place of a part without a response token.

    Raises ConfigError: one that is not to be divided is longer than the budget.
    """
    rank, ranks = share
    plan = [rows for rows in cut(batch, token_budget, whole_groups, ranks)[rank::ranks] if lockstep or len(rows)]
    for number, sequences in enumerate(plan, 1):
        if lockstep and not batch.response_lengths[sequences].any():
            part = micro_batch(_NOTHING, np.arange(1), device)
            part = replace(part, index=part.index[:0])
        else:
            part = micro_batch(batch, sequences, device)
        yield replace(part, last=number == len(plan))


_NOTHING = TokenBatch(
    lengths=np.array([3]),
    prompt_lengths=np.array([2]),
    draws=np.array([0]),
    indices=np.array([0]),
    token_ids=np.array([0, 0, 0]),
    mask=np.zeros(1, np.bool_),
    behaviour_logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int64),
)
"""For a rank that has nothing of its own and whose forward and backward passes others wait for. Two of its tokens are
computed: for a row of one, layers would be compiled anew."""


def select_tokens(record: Record, index: torch.Tensor) -> Record:
    """A dataclass of per-token tensors, cut to some tokens.

    Every field that holds a tensor (``[R, ...]``) is indexed by ``index``; other fields (None, numbers) stay.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]
    cut = {name: value[index] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(record, **cut)  # type: ignore[type-var]
