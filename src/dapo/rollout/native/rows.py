"""The sequences being decoded, one row each, as tensors on the device.

Everything that a step of decoding reads or changes is here, at addresses that never change: a captured graph refers to
them, and the host looks in only between stretches of steps. A row whose length is -1 is idle: it is computed along with
the others, but reads and writes nothing.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo.model.forward import Head
from dapo.model.head import read_logprobs
from dapo.model.packed import PackedAttention
from dapo.rollout.engine import Sampling
from dapo.rollout.native.exact import RowAttention
from dapo.rollout.native.runner import Progress, Response, RowStart
from dapo.rollout.native.sampler import RowSettings, uniforms

IDLE = -1


class Rows:
    """State of ``rows`` sequences. The response arrays have a column more than the longest response: an idle row that
    is computed along writes its token there, beyond what it has."""

    def __init__(
        self, rows: int, max_tokens: int, pages_per_row: int, stop_ids: Sequence[int], device: torch.device | str
    ) -> None:
        """``max_tokens``: longest response. ``pages_per_row``: width of the block tables."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return untouched_zeros(shape, dtype, self.device)

        self.count = rows
        self.device = torch.device(device)
        self.lengths = torch.full((rows,), IDLE, dtype=torch.int32, device=device)  # tokens in the cache
        self.generated = zeros(rows, dtype=torch.int64)  # tokens of the response so far
        self.limits = zeros(rows, dtype=torch.int64)
        self.last_tokens = zeros(rows, dtype=torch.int64)
        self.table = zeros(rows, pages_per_row, dtype=torch.int32)
        self.uniforms = zeros(rows, max_tokens + 1, dtype=torch.float64)
        self.tokens = zeros(rows, max_tokens + 1, dtype=torch.int32)
        self.logprobs = zeros(rows, max_tokens + 1, dtype=torch.float32)
        self.settings = RowSettings.of([Sampling(0.0, 1)] * rows, device)
        self.stop_ids = torch.tensor(list(stop_ids) or [-1], dtype=torch.int64, device=device)
        self.top_ids: Tensor | None = None
        self.top_logprobs: Tensor | None = None

    def _per_row(self) -> list[Tensor]:
        """What moves with a row; the block tables are the host's."""
        settings = self.settings
        return [
            *(self.lengths, self.generated, self.limits, self.last_tokens, self.uniforms, self.tokens, self.logprobs),
            *(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
            *(t for t in (self.top_ids, self.top_logprobs) if t is not None),
        ]

    def start(self, starts: Sequence[RowStart]) -> None:
        """Begin sequences in rows that are idle."""
        row = self._index([s.row for s in starts])
        wide = self.uniforms.shape[1]
        self.uniforms[row] = self._send(
            _stacked([uniforms(s.seed, s.sampling.max_tokens).numpy() for s in starts], wide)
        )
        for start in starts:
            self.restore(start)
        settings = RowSettings.of([s.sampling for s in starts], self.device)
        for ours, theirs in (
            (self.generated, self._index([len(s.done.tokens) for s in starts])),
            (self.limits, self._index([s.sampling.max_tokens for s in starts])),
            (self.last_tokens, self._index([s.last_token for s in starts])),
            (self.lengths, self._index([s.cached for s in starts]).int()),
            (self.settings.temperature, settings.temperature),
            (self.settings.top_k, settings.top_k),
            (self.settings.top_p, settings.top_p),
            (self.settings.min_p, settings.min_p),
        ):
            ours[row] = theirs

    def restore(self, start: RowStart) -> None:
        """Put back what an interrupted response had."""
        done, n = start.done, len(start.done.tokens)
        if not n:
            return
        self.tokens[start.row, :n] = self._send(done.tokens)
        self.logprobs[start.row, :n] = self._send(done.logprobs)
        if done.top_ids is not None and done.top_logprobs is not None:
            k = done.top_ids.shape[1]
            assert self.top_ids is not None and self.top_logprobs is not None  # it had them before
            self.top_ids[start.row, :n, :k] = self._send(done.top_ids)
            self.top_logprobs[start.row, :n, :k] = self._send(done.top_logprobs)

    def stop(self, rows: Sequence[int]) -> None:
        if rows:
            self.lengths[self._index(rows)] = IDLE

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int | None = None) -> None:
        """Rows get other numbers; ``targets`` are idle and no row is in both. ``width``: so many places of a response
        are in use; None: all."""
        if not sources:
            return
        source, target = self._index(sources), self._index(targets)
        for tensor in self._per_row():
            used = tensor[:, :width] if tensor.dim() > 1 else tensor
            used[target] = used[source]
        self.lengths[source] = IDLE

    def set_tables(self, table: npt.NDArray[np.int32]) -> None:
        """``table``: of all rows."""
        self.table.copy_(torch.from_numpy(table), non_blocking=True)

    def keep_top(self, count: int) -> bool:
        """Make room for the ``count`` most likely tokens at each place of a response; whether there was none before.

        Graphs that refer to the old arrays, if any, must not be used again.
        """
        old_ids, old_logprobs = self.top_ids, self.top_logprobs
        have = 0 if old_ids is None else old_ids.shape[2]
        if count <= have:
            return False
        shape = (*self.tokens.shape, count)
        ids = untouched_zeros(shape, torch.int32, self.device)
        logprobs = untouched_zeros(shape, torch.float32, self.device)
        if old_ids is not None and old_logprobs is not None:
            ids[..., :have], logprobs[..., :have] = old_ids, old_logprobs
        self.top_ids, self.top_logprobs = ids, logprobs
        return True

    def record(self, tokens: Tensor, logprobs: Tensor) -> None:
        """A step has drawn ``tokens`` ``[n]`` for the first n rows: write them down and see who is done.

        Runs inside of a captured graph: no value is looked at.
        """
        n = len(tokens)
        at = self.generated[:n, None]
        active = self.lengths[:n] >= 0
        self.tokens[:n].scatter_(1, at, tokens[:, None].int())
        self.logprobs[:n].scatter_(1, at, logprobs[:, None])
        self.generated[:n] += active
        self.last_tokens[:n] = torch.where(active, tokens, self.last_tokens[:n])
        done = (tokens[:, None] == self.stop_ids).any(dim=1) | (self.generated[:n] >= self.limits[:n])
        self.lengths[:n] = torch.where(active & ~done, self.lengths[:n] + 1, IDLE)

    def record_top(self, ids: Tensor, logprobs: Tensor) -> None:
        """To be called before :meth:`record`: the most likely tokens ``[n, k]`` at the place about to be filled."""
        assert self.top_ids is not None and self.top_logprobs is not None
        n, k = ids.shape
        at = self.generated[:n, None, None].expand(n, 1, k)
        self.top_ids[:n, :, :k].scatter_(1, at, ids[:, None].int())
        self.top_logprobs[:n, :, :k].scatter_(1, at, logprobs[:, None])

    def progress(self) -> Progress:
        both = torch.stack([self.lengths.long(), self.generated]).cpu().numpy()
        return Progress(both[0], both[1])

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def _send(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class RowsRunner:
    """What all runners have in common: a Transformers model, and :class:`Rows`."""

    exact_temperature: float | None = None
    """The trainer's temperature, if tokens drawn at it are to have log-probs with the trainer's bits."""

    def __init__(self, model: Any, rows: Rows) -> None:
        self.model = model
        self.state = rows

    @property
    def rows(self) -> int:
        return self.state.count

    @torch.inference_mode()
    def stop(self, rows: Sequence[int]) -> None:
        self.state.stop(rows)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.state.move(sources, targets)

    def progress(self) -> Progress:
        return self.state.progress()

    def packed(self, lengths: Sequence[int]) -> PackedAttention:
        """The attention of prompts of these lengths."""
        return (PackedAttention if self.exact_temperature is None else RowAttention)(lengths, self.state.device)

    def as_trained(self, logprobs: Tensor, raw: Tensor, head: Head, tokens: Tensor, settings: RowSettings) -> Tensor:
        """``logprobs`` of ``tokens``, where ``exact_temperature`` asks for it those that the trainer reads from the
        same ``raw`` logits (:meth:`Head.raw`)."""
        if self.exact_temperature is None:
            return logprobs
        whole = (settings.top_k == 0) & (settings.top_p == 1) & (settings.min_p == 0)
        theirs = read_logprobs(raw, head, tokens, self.exact_temperature)
        return torch.where(whole & (settings.temperature == self.exact_temperature), theirs, logprobs)

    @torch.inference_mode()
    def fetch(self, rows: Sequence[int], counts: Sequence[int], top: int) -> _Arriving:
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.state.device)
        longest = max(counts)
        wanted = [self.state.tokens, self.state.logprobs]
        if top and self.state.top_ids is not None and self.state.top_logprobs is not None:
            wanted += [self.state.top_ids[..., :top], self.state.top_logprobs[..., :top]]
        return _Arriving([tensor[:, :longest].index_select(0, index) for tensor in wanted], counts)

    def use_weights(self) -> None:
        """Nothing to do: it computes with the model's own."""


class _Arriving:
    """Arrays on their way to the host, which need not wait for them before it has the device go on."""

    def __init__(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> None:
        self._counts = list(counts)
        self._event: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._tensors = list(tensors)
            return
        self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for here, there in zip(self._tensors, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def result(self) -> list[Response]:
        if self._event is not None:
            self._event.synchronize()
        arrays = [tensor.numpy() for tensor in self._tensors]
        return [Response(*(a[i, :n].copy() for a in arrays)) for i, n in enumerate(self._counts)]


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Zeros that take no memory of a CPU until they are written: most responses are far shorter than the limit. They
    are pages of the system's own, whatever the allocator does.

    Zeros and not garbage: masked keys get weight 0, and 0 times a stray NaN would still be NaN.
    """
    if torch.device(device).type != "cpu" or 0 in shape:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def _stacked(parts: Sequence[npt.NDArray[np.generic]], width: int) -> npt.NDArray[np.generic]:
    """Arrays of several lengths as rows of one, filled up with zeros."""
    out = np.zeros((len(parts), width), parts[0].dtype)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out
