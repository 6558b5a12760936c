"""Examples as token batches: what their losses need to know of each token stands in the columns of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dapo.algorithm.preference import LabelledTokens, RankedTokens
from dapo.data.examples import Example
from dapo.model.placement import upload
from dapo.records import FloatArray, TokenBatch
from dapo.training.packing import pack_demonstrations


def pack_examples(examples: Sequence[Example]) -> TokenBatch:
    """All responses, each example a draw of its own, with the column ``values``: of the token's response."""
    batch = pack_demonstrations([(one.prompt, response) for one in examples for response in one.responses])
    counts = [len(one.responses) for one in examples]
    learned = [one.learned or (True,) * len(r) for one in examples for r in one.responses]
    batch = replace(
        batch,
        draws=np.repeat(np.arange(len(examples)), counts),
        indices=np.concatenate([np.arange(0), *map(np.arange, counts)]),
        mask=np.concatenate([np.zeros(0, np.bool_), *(np.asarray(one, np.bool_) for one in learned)]),
    )
    return batch.with_columns(values=_by_token(batch, [value for one in examples for value in one.values]))


def demonstrations(examples: Sequence[Example]) -> TokenBatch:
    """With ``weights``: of N tokens that are learned 1 / N each."""
    batch = pack_examples(examples)
    return batch.with_columns(weights=(batch.mask / max(batch.mask.sum(), 1)).astype(np.float32))


def rankings(
    examples: Sequence[Example], *, scored: bool = False, nll: float = 0.0, reference: Sequence[float] | None = None
) -> TokenBatch:
    """With the columns of :class:`~dapo.algorithm.preference.RankedTokens`.

    Args:
        scored: only the last token of a response is in the loss.
        nll: weight of the mean NLL over the tokens of the best responses.
        reference: log-probability of each response under the reference policy.
    """
    batch = pack_examples(examples)
    pairs = [sum(a < b for a in one.values for b in one.values) for one in examples]
    each = [1 / (n * len(examples)) for n, one in zip(pairs, examples, strict=True) for _ in one.responses]
    weights = _by_token(batch, each) * (_last(batch) if scored else 1)
    best = _by_token(batch, [value == min(one.values) for one in examples for value in one.values])
    return batch.with_columns(
        weights=weights.astype(np.float32),
        margins=_by_token(batch, [one.margin for one in examples for _ in one.responses]),
        reference=_by_token(batch, [0.0] * batch.num_samples if reference is None else reference),
        nll=(nll * best / max(best.sum(), 1)).astype(np.float32),
    )


def labels(examples: Sequence[Example]) -> TokenBatch:
    """With ``weights``: of N texts 1 / N at the last token of each."""
    batch = pack_examples(examples)
    return batch.with_columns(weights=(_last(batch) / max(batch.num_samples, 1)).astype(np.float32))


def ranked_inputs(batch: TokenBatch, device: torch.device) -> RankedTokens:
    """What a loss over pairs gets to know of :func:`rankings`."""
    columns: dict[str, Any] = {name: upload(values, device) for name, values in batch.columns.items()}
    ids = {"sample_ids": upload(batch.sample_ids, device), "group_ids": upload(batch.group_ids, device)}
    return RankedTokens(ranks=columns.pop("values"), **columns, **ids)


def labelled_inputs(batch: TokenBatch, device: torch.device) -> LabelledTokens:
    """What an outcome loss gets to know of :func:`labels`."""
    return LabelledTokens(upload(batch.columns["weights"], device), upload(batch.columns["values"], device))


def _by_token(batch: TokenBatch, values: Sequence[float]) -> FloatArray:
    return np.repeat(np.asarray(values, np.float32), batch.response_lengths)


def _last(batch: TokenBatch) -> FloatArray:
    """1 at the last token of each response, else 0."""
    found = np.zeros(batch.num_response_tokens, np.float32)
    found[np.cumsum(batch.response_lengths) - 1] = 1
    return found
