"""The device's side of the decoder on a GPU: one step of decoding, from token to token, and what surrounds it.

On CUDA a step (embedding, layers, head, sampling, stop test) is captured once for each number of rows of a ladder, and
replayed. Everything it reads and writes stands at fixed addresses: weights, rows, block tables. The pool of keys and
values does not: a kernel reads where it is, so its memory can be given away between two rollouts. Elsewhere the same
step runs as it is, which is what the tests compare with Transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo.model.attention import AttentionSpec
from dapo.model.forward import hidden_states, output_head
from dapo.model.packed import PackedAttention
from dapo.rollout.engine import EngineError, NoMemoryError
from dapo.rollout.native.exact import attend_exactly
from dapo.rollout.native.paged.attention import attend, choose_programs, copy_pages, store
from dapo.rollout.native.paged.draw import draw, record
from dapo.rollout.native.paged.pool import Pool
from dapo.rollout.native.pages import PageArray, slots_of
from dapo.rollout.native.rows import IDLE, Rows, RowsRunner
from dapo.rollout.native.runner import Progress, RowStart, Variant
from dapo.rollout.native.sampler import top_logprobs

PREFILL_MULTIPLE = 64  # tokens of a prefill pass are filled up to a multiple of it: aligned rows for matrix products

FIRST_TOKENS = 67
LONG_STRETCH = 24  # steps that take about as long as capturing one for fewer rows

_CAPTURING = threading.Lock()
"""Giving memory back waits for the whole device, which breaks a capture that another engine has begun on it."""


class PagedRunner(RowsRunner):
    """Implements :class:`~dapo.rollout.native.runner.Runner` over pages."""

    def __init__(self, model: Any, pool: Pool, rows: Rows, *, max_sequence_tokens: int, pinned: bool = False) -> None:
        """
        Args:
            model: from :func:`dapo.model.loading.load_model`, on the device of ``rows``.
            pool: keys and values.
            rows: the state of all rows.
            max_sequence_tokens: longest prompt and response together.
            pinned: every step computes all rows, so that the bits of a row never depend on how many are in use.
        """
        super().__init__(model, rows)
        self.pool = pool
        self._head = output_head(model)
        self._max_sequence = max_sequence_tokens
        self._ladder = [rows.count] if pinned else ladder(rows.count)
        self._steps = _CudaSteps(self._step, rows) if rows.device.type == "cuda" else None
        self._ahead: list[tuple[int, Variant]] = []  # of what to capture next, the first that is not captured yet

    def rung(self, rows: int) -> int:
        return next(rung for rung in self._ladder if rung >= rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Have the layers compiled.

        A first number of tokens that happens to be a size of the model, such as its heads', is taken for that size, and
        the layers are compiled a second time for all others. A prime is no such size.
        """
        tokens = torch.zeros(FIRST_TOKENS, dtype=torch.int64, device=self.state.device)
        positions = torch.arange(FIRST_TOKENS, device=self.state.device)
        page_0 = positions % self.pool.shape.page_tokens
        hidden_states(self.model, tokens, positions, _Prefill(self.pool, self.packed([FIRST_TOKENS]), page_0))

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[npt.NDArray[np.int64]], pages: Sequence[PageArray]) -> list[None]:
        lengths = [len(prompt) - 1 for prompt in prompts if len(prompt) > 1]
        if not lengths:
            return [None] * len(prompts)
        page_tokens = self.pool.shape.page_tokens
        tokens = np.concatenate([prompt[:-1] for prompt in prompts])
        slots = np.concatenate([slots_of(p, len(ids) - 1, page_tokens) for p, ids in zip(pages, prompts, strict=True)])
        padding = -len(tokens) % PREFILL_MULTIPLE
        if padding:  # a sequence of its own, stored in page 0
            lengths.append(padding)
            tokens = np.concatenate([tokens, np.zeros(padding, np.int64)])
            slots = np.concatenate([slots, np.arange(padding) % page_tokens])
        positions = np.concatenate([np.arange(n) for n in lengths])
        context = _Prefill(self.pool, self.packed(lengths), self._send(slots))
        hidden_states(self.model, self._send(tokens), self._send(positions), context)
        return [None] * len(prompts)

    @torch.inference_mode()
    def copy_pages(self, sources: PageArray, targets: PageArray) -> None:
        copy_pages(self.pool.tensor, self._send(sources.astype(np.int64)), self._send(targets.astype(np.int64)))

    @torch.inference_mode()
    def start(self, starts: Sequence[RowStart]) -> None:
        self.state.start(starts)

    @torch.inference_mode()
    def run(self, rows: int, steps: int, variant: Variant, table: npt.NDArray[np.int32]) -> None:
        if not self.pool.attached:  # a graph would read address 0, which no program survives on a GPU
            raise EngineError("the engine is asleep: wake() comes first")
        self.state.set_tables(table)
        if variant.top and self.state.keep_top(variant.top) and self._steps:
            self._steps.forget()
        for _ in range(steps):
            if self._steps:
                self._steps.replay(rows, variant)
            else:
                self._step(rows, variant)
        fewer = self._ladder[: self._ladder.index(rows)] if steps >= LONG_STRETCH else []
        self._ahead = [(rung, variant) for rung in reversed(fewer)]

    @torch.inference_mode()
    def progress(self) -> Progress:
        """While the device is at work, a step for fewer rows is captured: towards the end there will be fewer."""
        if self._steps:
            self._steps.prepare_one(self._ahead, 8 * self._head.weight.shape[0])
        return super().progress()

    def sleep(self) -> None:
        """Everything but the pool stays: weights, rows, and what the graphs hold."""
        self.pool.detach()
        if self.state.device.type == "cuda":
            torch.cuda.empty_cache()  # the trainer may want it in other pieces

    def wake(self) -> None:
        """Raises NoMemoryError: the memory is not free; says how much is."""
        if self.pool.attached:
            return
        shape, device = self.pool.shape, self.state.device
        try:
            self.pool.attach(torch.empty(shape.sizes, dtype=shape.dtype, device=device))
        except torch.OutOfMemoryError:
            free = torch.cuda.mem_get_info(device)[0]
            raise NoMemoryError(
                f"the cache needs {shape.bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of {device} are free: give "
                "rollout.cache_gib a smaller value"
            ) from None

    def _send(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.state.device)

    def _step(self, rows: int, variant: Variant) -> None:
        """One token for each of the first ``rows`` rows."""
        state = self.state
        lengths = state.lengths[:rows]
        programs: tuple[int, bool] | None = None
        if self.exact_temperature is None:
            programs = choose_programs(rows, self.pool.shape, self._max_sequence, _processors(state.device))
        context = _Decode(self.pool, state.table[:rows], lengths, programs)
        positions = lengths.clamp(min=0).long()
        hidden = hidden_states(self.model, state.last_tokens[:rows], positions, context)
        raw = self._head.raw(hidden)
        logits = self._head.shaped(raw)
        settings = state.settings.of_rows(slice(rows))
        uniform = state.uniforms[:rows].gather(1, state.generated[:rows, None])[:, 0]
        tokens, logprobs = draw(logits, uniform, settings, truncate=variant.truncate)
        logprobs = self.as_trained(logprobs, raw, self._head, tokens, settings)
        if variant.top:
            state.record_top(*top_logprobs(logits, settings, variant.top))
        record(state, tokens, logprobs)


class _CudaSteps:
    """A captured graph for each number of rows and variant of a step, made when it is first wanted, or before."""

    def __init__(self, step: Any, rows: Rows) -> None:
        self._step = step
        self._rows = rows
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, Variant], torch.cuda.CUDAGraph] = {}

    def replay(self, rows: int, variant: Variant) -> None:
        key = (rows, variant)
        if key not in self._graphs:
            with _CAPTURING:
                self._try(rows, variant)
                torch.cuda.empty_cache()  # the graph takes its memory from elsewhere
                self._graphs[key] = self._capture(rows, variant)
        self._graphs[key].replay()

    def prepare_one(self, wanted: Sequence[tuple[int, Variant]], row_bytes: int) -> None:
        """Capture the first that has no graph yet, if there is memory to spare: ``row_bytes`` for each row, for the
        trial and for the graph. Nothing here waits for the device, which goes on meanwhile."""
        key = next((key for key in wanted if key not in self._graphs), None)
        if key and torch.cuda.mem_get_info(self._rows.device)[0] > 2 * key[0] * row_bytes:
            with _CAPTURING:
                self._try(*key)
                self._graphs[key] = self._capture(*key)

    def forget(self) -> None:
        """The addresses of something have changed."""
        self._graphs.clear()
        self._memory = torch.cuda.graph_pool_handle()

    def _try(self, rows: int, variant: Variant) -> None:
        """The first run loads and compiles kernels, which capturing cannot; with all rows idle it changes nothing."""
        lengths = self._rows.lengths.clone()
        self._rows.lengths.fill_(IDLE)
        self._step(rows, variant)
        self._rows.lengths.copy_(lengths)

    def _capture(self, rows: int, variant: Variant) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # not by torch.cuda.graph(), which waits for the device first
        with torch.cuda.stream(self._stream):
            # what other threads do on the device meanwhile is not this graph's concern
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                self._step(rows, variant)
            finally:
                graph.capture_end()
        return graph


class _Prefill:
    """Packed causal attention that also stores keys and values in the pool."""

    def __init__(self, pool: Pool, packed: PackedAttention, slots: Tensor) -> None:
        self._pool, self._packed, self._slots = pool, packed, slots

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store(self._pool.tensor, spec.layer, key[0].transpose(0, 1), value[0].transpose(0, 1), self._slots)
        return self._packed.attend(spec, query, key, value)


class _Decode:
    """One token per row over its pages; the rows lie side by side like the tokens of one packed row."""

    def __init__(self, pool: Pool, table: Tensor, lengths: Tensor, programs: tuple[int, bool] | None) -> None:
        """``programs``: None: as the trainer attends (:mod:`dapo.rollout.native.exact`)."""
        self._pool, self._table, self._lengths, self._programs = pool, table, lengths, programs

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [R, heads, D] each
        if self._programs is None:
            return attend_exactly(self._pool, spec, query, key, value, self._table, self._lengths).unsqueeze(0)
        return attend(self._pool, spec, query, key, value, self._table, self._lengths, *self._programs).unsqueeze(0)


def ladder(rows: int) -> list[int]:
    """Numbers of rows that steps are captured for: doubling at first, then by halves and quarters of a power of two,
    so that a step computes at most a third more rows than are in use beyond 128."""
    rungs = [8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896]
    rungs += range(1024, rows + 1, 256)
    return [rung for rung in rungs if rung < rows] + [rows]


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
