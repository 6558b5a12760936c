"""Groups, flattened, and batches, cut: the only place where samples become token rows. On the host, numpy only.

Consumes: admitted :class:`~dapo.records.Group` records. Produces: a :class:`~dapo.records.TokenBatch`, all sequences
end to end without padding, and the plan by which the trainer cuts one into micro-batches of whole sequences. Waits for
nothing.

Token ids and lengths are the engine's own: nothing is decoded, encoded or searched for a stop token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dapo.errors import ConfigError
from dapo.records import NOBODY, FloatArray, Group, IntArray, Sample, TokenBatch


def pack(groups: Iterable[Group]) -> TokenBatch:
    """Flatten groups into one batch, samples without a verdict left out.

    They are dropped here, after their group's statistics, so that leaving them out cannot shift a group's border.
    Raises ValueError: an empty prompt: its first response token would have no predictor."""
    return _flatten(
        [
            (g.draw, g.prompt.token_ids if part.prompt_ids is None else part.prompt_ids.tolist(), part)
            for g in groups
            for s in g.samples
            if s.scored
            for part in (replace(one, in_loss=s.in_loss) for one in s.parts)
        ]
    )


def advantage_column(groups: Iterable[Group]) -> FloatArray:
    """``[R]``: the advantage of each response token of what :func:`pack` makes of the groups.
    Raises ValueError: a sample is in the loss without a finite advantage."""
    rows = [(group.draw, sample) for group in groups for sample in group.samples if sample.scored]
    for draw, sample in rows:
        if sample.in_loss and not math.isfinite(sample.advantage):
            raise ValueError(f"draw {draw}, sample {sample.index}: in the loss, its advantage is {sample.advantage}")
    found = [_advantages(part, sample.advantage) for _, sample in rows for part in sample.parts]
    joined: FloatArray = _joined(found, np.float32)
    return joined


def _advantages(part: Sample, advantage: float) -> FloatArray:
    """``[T]`` of a part of a sample with this advantage: those of turns, where they have their own."""
    found = np.full(len(part.token_ids), advantage, np.float32)
    for turn in part.turns:
        if turn.advantage is not None:
            found[turn.start : turn.end] = turn.advantage
    return found


def pack_demonstrations(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TokenBatch:
    """Pairs (prompt ids, response ids) to imitate, each a group of its own.

    Behaviour log-probs are 0 and versions :data:`~dapo.records.NOBODY`.
    Raises ValueError: an empty prompt."""
    return _flatten([(i, prompt, _demonstration(i, response)) for i, (prompt, response) in enumerate(pairs)])


def _demonstration(number: int, response: Sequence[int]) -> Sample:
    token_ids = np.asarray(response, dtype=np.int32)
    return Sample(
        request_id=number,
        index=0,
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=np.full(len(token_ids), NOBODY, dtype=np.int32),
        finish_reason="stop",
    )


def _flatten(rows: Sequence[tuple[int, Sequence[int], Sample]]) -> TokenBatch:
    """``rows``: draw, prompt ids and sample of each sequence."""
    for draw, prompt, _ in rows:
        if not len(prompt):
            raise ValueError(f"draw {draw}: empty prompt: nothing predicts the first token of its responses")
    samples = [sample for _, _, sample in rows]
    prompt_lengths = _ints(len(prompt) for _, prompt, _ in rows)
    response_lengths = _ints(len(sample.token_ids) for sample in samples)
    return TokenBatch(
        lengths=prompt_lengths + response_lengths,
        prompt_lengths=prompt_lengths,
        draws=_ints(draw for draw, _, _ in rows),
        indices=_ints(sample.index for sample in samples),
        token_ids=_joined([part for _, prompt, sample in rows for part in (prompt, sample.token_ids)], np.int64),
        mask=_joined([sample.loss_mask & sample.in_loss for sample in samples], np.bool_),
        behaviour_logprobs=_joined([sample.logprobs for sample in samples], np.float32),
        versions=_joined([sample.versions for sample in samples], np.int64),
    )


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _ints(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)


# --- cutting one --------------------------------------------------------------------------------------------------


def cut(batch: TokenBatch, token_budget: int, whole_groups: bool = False, ranks: int = 1) -> list[IntArray]:
    """The sequences of each micro-batch: whole ones, at most ``token_budget`` tokens to compute, few and of like size.

    Every sequence is in exactly one of them, and a group in as few as can be, for its prompt is computed in each of
    them. The cut depends on lengths and groups only. ``whole_groups``: none is divided.

    Several ``ranks`` compute them side by side, so many at a time, the k-th of each that of rank k. So their number is
    a multiple of it, some may be empty, and a group is divided where they are done sooner for that.
    Raises ConfigError: one sequence alone is longer than the budget, or a group that is not to be divided."""
    if batch.num_samples and batch.lengths.max() > token_budget:
        longest = int(batch.lengths.argmax())
        tokens, prompt = int(batch.lengths[longest]), int(batch.prompt_lengths[longest])
        raise ConfigError(
            f"training.tokens_per_micro_batch: is {token_budget}, but sample {batch.indices[longest]} of draw "
            f"{batch.draws[longest]} has {prompt} (prompt) + {tokens - prompt} (response) = {tokens} tokens; use at "
            f"least {tokens}"
        )
    largest = _largest_group(batch) if whole_groups and batch.num_samples else 0
    if largest > token_budget:
        raise ConfigError(
            f"training.tokens_per_micro_batch: is {token_budget}, which not every group fits in, and the objective has "
            f"to see a group as a whole; use at least {largest}"
        )
    limits = [token_budget]
    if ranks > 1 and batch.num_samples and not whole_groups:
        share = -(-batch.num_tokens // ranks)
        limits += [min(token_budget, max(int(batch.lengths.max()), share // n)) for n in (1, 2, 4, 8)]
    units = batch.group_numbers if whole_groups else batch.prompt_numbers
    plans = [_plan(batch, units, limit, token_budget, ranks) for limit in sorted(set(limits), reverse=True)]
    return min(plans, key=lambda plan: plan[0])[1]


def _plan(batch: TokenBatch, units: IntArray, limit: int, token_budget: int, ranks: int) -> tuple[int, list[IntArray]]:
    """The tokens of the largest of each ``ranks`` micro-batches, and all of them, where no part of a unit has more
    tokens than ``limit``. ``units`` ``[S]``: what is kept together, groups or those of them with the same prompt."""
    pieces = list(_pieces(batch, units, limit))
    prompts = batch.prompt_numbers
    sizes = [_computed(batch, prompts, rows) for rows in pieces]
    plan = plan_micro_batches(sizes, token_budget, ranks)
    loads = [sum(sizes[i] for i in chosen) for chosen in plan]
    none = np.empty(0, np.int64)
    parts = [np.sort(np.concatenate([none, *(pieces[i] for i in chosen)])) for chosen in plan]
    return sum(loads[::ranks]), parts


def _largest_group(batch: TokenBatch) -> int:
    prompts = batch.prompt_numbers
    return max(_computed(batch, prompts, np.flatnonzero(batch.draws == draw)) for draw in np.unique(batch.draws))


def _computed(batch: TokenBatch, prompts: IntArray, rows: IntArray) -> int:
    """Tokens to compute for these sequences: each prompt once."""
    return int(batch.prompt_lengths[np.unique(prompts[rows])].sum() + batch.response_lengths[rows].sum())


def _pieces(batch: TokenBatch, numbers: IntArray, token_budget: int) -> Iterator[IntArray]:
    """The sequences of each unit, ascending; of one that is above the budget, parts that are not."""
    response_lengths = batch.response_lengths
    order = np.argsort(numbers, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        if not len(rows):
            continue
        room = token_budget - int(batch.prompt_lengths[rows[0]])
        if response_lengths[rows].sum() <= room:
            yield rows
        else:
            yield from (rows[chosen] for chosen in plan_micro_batches(response_lengths[rows], room))


def plan_micro_batches(lengths: Sequence[int] | IntArray, token_budget: int, multiple: int = 1) -> list[IntArray]:
    """Distribute sequences, or pieces of groups, over few micro-batches of similar size, none above ``token_budget``.

    Their number is what first-fit decreasing needs (at most 11/9 of the optimum). With that many, each sequence then
    goes to the least loaded one instead: equal parts, where first-fit leaves a small rest. If that breaks the budget,
    first-fit's own answer stands. ``lengths``: tokens of each, each within the budget. ``multiple``: their number
    is one of it; if it is not 1, they come largest first, empty ones last.
    Returns numbers of those in each micro-batch, ascending."""
    sizes = [int(n) for n in lengths]
    longest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])  # stable, so ties keep their order
    bins = _first_fit(longest_first, sizes, token_budget)
    bins += [[] for _ in range(-len(bins) % multiple)]
    even = _least_loaded(longest_first, sizes, len(bins))
    fits = all(sum(sizes[i] for i in rows) <= token_budget for rows in even)
    chosen = even if fits else bins
    if multiple > 1:
        chosen.sort(key=lambda rows: -sum(sizes[i] for i in rows))
    return [np.sort(_ints(rows)) for rows in chosen]


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
