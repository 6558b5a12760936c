"""Decoding on a CPU: keys and values in contiguous slots.

A CPU has no attention kernel that reads pages; gathering them would copy the whole context at every step. So each row
has a slot, into which a prompt's keys and values, computed once for its group, are copied when a sample starts there.
The prompt's pass also gives the logits of the first token. See docs/decisions/0003-cpu-cache.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo.errors import ModelError
from dapo.model.attention import AttentionSpec, seen_keys, step_attention
from dapo.model.forward import hidden_states, output_head
from dapo.model.loading import key_value_heads
from dapo.model.packed import PackedAttention
from dapo.rollout.native.decoder import Decoder
from dapo.rollout.native.exact import attend_in_blocks
from dapo.rollout.native.pages import PageArray
from dapo.rollout.native.rows import IDLE, Rows, RowsRunner, untouched_zeros
from dapo.rollout.native.runner import Progress, RowStart, Variant
from dapo.rollout.native.sampler import RowSettings, sample, top_logprobs, uniforms
from dapo.rollout.native.stopping import StopTexts
from dapo.util.files import size_text

KEPT_BYTES = 2**26  # of keys and values, which stay when the engine sleeps: the system would clear all pages again
PREFILL_TOKENS = 4096  # prompts computed in one pass: enough to fill the cores, little memory


def slot_decoder(
    model: Any,
    stop_token_ids: Sequence[int],
    *,
    max_sequence_tokens: int,
    max_concurrent_samples: int,
    deterministic: bool = False,
    exact_temperature: float | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Decoder:
    """A decoder for ``model``, which is on the CPU; arguments as of :class:`~dapo.rollout.native.engine.NativeEngine`.
    Where it is to be deterministic, shapes are pinned (:class:`SlotRunner`) and prompts computed one by one.
    Raises ModelError: the machine cannot give the cache's memory."""
    runner = SlotRunner(model, stop_token_ids, max_concurrent_samples, max_sequence_tokens, pinned=deterministic)
    runner.exact_temperature = exact_temperature
    return Decoder(
        runner,
        pages=max_concurrent_samples + 4,  # enough to keep aside for rows to grow by; none is taken
        page_tokens=0,
        max_sequence_tokens=max_sequence_tokens,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        stop_token_ids=stop_token_ids,
        stop_texts=None if decode is None else StopTexts(decode),
        stretch=1,
        prefill_tokens=-1 if deterministic else PREFILL_TOKENS,
    )


@dataclass(slots=True)
class _Prompt:
    """Keys and values ``[Hkv, T, D]`` of a prompt in each layer, and the raw logits ``[1, V]`` that follow it."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None


class SlotRunner(RowsRunner):
    """Implements :class:`~dapo.rollout.native.runner.Runner` over ``[rows, Hkv, tokens, D]`` in each layer.

    Memory is taken page by page as sequences reach it, and given back by :meth:`sleep` unless it is little.
    """

    def __init__(self, model: Any, stop_ids: Sequence[int], slots: int, max_tokens: int, pinned: bool = False) -> None:
        """
        Args:
            max_tokens: longest sequence, prompt and response.
            pinned: every step computes all rows over the full length, so that the shapes of matrix products, and with
                them the bits of a row, never depend on what else is in flight.

        Raises ModelError: the machine cannot give so much memory.
        """
        text_config = model.config.get_text_config()
        heads, dim = key_value_heads(text_config)
        self.layers = text_config.num_hidden_layers
        self.max_tokens = max_tokens
        self.pinned = pinned
        self._shape = (slots, heads, max_tokens, dim)
        self._dtype = next(model.parameters()).dtype
        self._bytes = 2 * self.layers * math.prod(self._shape) * self._dtype.itemsize
        self.keys: list[Tensor]
        self.values: list[Tensor]
        self._take_memory()  # pages that nobody writes cost nothing: where it fails, it does so before there is work
        self.sleep()
        super().__init__(model, rows := Rows(slots, max_tokens, 0, stop_ids, "cpu"))
        every = vars(rows) | {name: getattr(rows.settings, name) for name in RowSettings.__slots__}
        self._arrays = {name: tensor.numpy() for name, tensor in every.items() if isinstance(tensor, Tensor)}
        self._index = np.arange(slots)
        self.use_weights()

    def use_weights(self) -> None:
        """The head is held in float32, which it computes in: that saves widening it for every token. Costs as much
        memory as a float32 embedding where weights are narrower."""
        self._head = output_head(self.model).in_float32()

    def rung(self, rows: int) -> int:
        return self.rows if self.pinned else rows

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[npt.NDArray[np.int64]], pages: Sequence[PageArray]) -> list[_Prompt]:
        lengths = [len(prompt) for prompt in prompts]
        found = [_Prompt() for _ in prompts]
        token_ids = torch.from_numpy(np.concatenate(prompts))
        position_ids = torch.cat([torch.arange(n) for n in lengths])
        hidden = hidden_states(self.model, token_ids, position_ids, _Prefill(found, self.packed(lengths)))
        for prompt, state in zip(found, hidden[torch.tensor(lengths).cumsum(0) - 1], strict=True):
            prompt.logits = self._head.raw(state[None])
        return found

    def copy_pages(self, sources: PageArray, targets: PageArray) -> None:
        """Nothing to do: a start copies."""

    @torch.inference_mode()
    def start(self, starts: Sequence[RowStart]) -> None:
        if not self.keys:
            self._take_memory()
        for _, some in itertools.groupby(starts, lambda start: id(start.prompt)):
            first, *others = some
            taken, run = [first.row, *(start.row for start in others)], range(first.row, first.row + 1 + len(others))
            # mostly neighbours, to which it is copied in half the time
            place = slice(run.start, run.stop) if taken == [*run] else torch.tensor(taken)
            computed = (*first.prompt.keys, *first.prompt.values)
            for store, new in zip((*self.keys, *self.values), computed, strict=True):
                store[place, :, : first.cached + 1] = new
        for start in starts:
            self._begin(start)
        rows = np.array([start.row for start in starts])
        logits = torch.cat([start.prompt.logits for start in starts])
        self._draw(rows, logits, Variant.of([start.sampling for start in starts]))

    def _begin(self, start: RowStart) -> None:
        """:meth:`Rows.start`, of one and in numpy."""
        asked, row = start.sampling, start.row
        self._arrays["uniforms"][row, : asked.max_tokens] = uniforms(start.seed, asked.max_tokens)
        for name, value in (
            ("generated", len(start.done.tokens)),
            ("limits", asked.max_tokens),
            ("lengths", start.cached),
            ("temperature", asked.temperature),
            ("top_k", min(asked.top_k, 2**31 - 1)),
            ("top_p", asked.top_p),
            ("min_p", asked.min_p),
        ):
            self._arrays[name][row] = value
        self.state.restore(start)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            used = int(self.state.lengths[source])
            for store in (*self.keys, *self.values):
                store[target, :, :used] = store[source, :, :used]
        self.state.move(sources, targets, int(self._arrays["limits"][list(sources)].max()))

    @torch.inference_mode()
    def run(self, rows: int, steps: int, variant: Variant, table: npt.NDArray[np.int32]) -> None:
        for _ in range(steps):
            if int(self._arrays["lengths"][:rows].max()) < 0:  # the first token was the last one
                return
            context = _Decode(self, rows)
            token_ids = self.state.last_tokens[:rows, None]
            hidden = hidden_states(self.model, token_ids, context.position_ids[:, None], context)
            self._draw(slice(rows), self._head.raw(hidden[:, 0]), variant)

    def progress(self) -> Progress:
        return Progress(self._arrays["lengths"].astype(np.int64), self._arrays["generated"].copy())

    def _draw(self, rows: slice | npt.NDArray[np.int64], raw: Tensor, variant: Variant) -> None:
        """Draw the next token of ``rows``, write it down and see who is done, as :meth:`Rows.record` does on a GPU. In
        numpy, which takes a third of the time for so few numbers."""
        state, rows_of, index = self.state, self._arrays, self._index[rows]
        at, settings = rows_of["generated"][rows], state.settings.of_rows(rows)
        logits = self._head.shaped(raw if self.exact_temperature is None else raw.clone())
        if top := min(variant.top, logits.shape[1]):
            state.keep_top(top)
            assert state.top_ids is not None and state.top_logprobs is not None
            ids, _ = top_logprobs(logits, settings, top)
            values = torch.log_softmax(logits / settings.divisors, dim=-1).gather(1, ids)  # the bits of a token drawn
            state.top_ids.numpy()[index, at, :top] = ids.numpy()
            state.top_logprobs.numpy()[index, at, :top] = values.numpy()
        uniform = torch.from_numpy(rows_of["uniforms"][index, at])
        drawn, found = sample(logits, uniform, settings, truncate=variant.truncate)
        found = self.as_trained(found, raw, self._head, drawn, settings)
        tokens, logprobs = drawn.numpy(), found.numpy()
        rows_of["tokens"][index, at], rows_of["logprobs"][index, at] = tokens, logprobs
        lengths = rows_of["lengths"][rows]
        active = lengths >= 0
        generated = at + active
        stays = active & (generated < rows_of["limits"][rows]) & (tokens[:, None] != rows_of["stop_ids"]).all(axis=1)
        stays &= np.isfinite(logprobs)  # the decoder refuses it
        rows_of["generated"][rows], rows_of["last_tokens"][rows] = generated, tokens
        rows_of["lengths"][rows] = np.where(stays, lengths + 1, IDLE)

    def sleep(self) -> None:
        if self._bytes > KEPT_BYTES:
            self.keys, self.values = [], []

    def wake(self) -> None:
        """Nothing to do: memory is taken with the next start."""

    def _take_memory(self) -> None:
        try:
            stores = [untouched_zeros(self._shape, self._dtype) for _ in range(2 * self.layers)]
        except (OSError, OverflowError, ValueError, MemoryError):
            raise ModelError(
                f"keys and values of {self._shape[0]:,} sequences of {self.max_tokens:,} tokens take "
                f"{size_text(self._bytes)}, "
                "which this machine does not give; lower rollout.max_concurrent_samples or rollout.max_response_length"
            ) from None
        self.keys, self.values = stores[::2], stores[1::2]  # both or neither


class _Prefill:
    """Packed causal attention that also keeps each prompt's keys and values."""

    def __init__(self, prompts: Sequence[_Prompt], packed: PackedAttention) -> None:
        self._prompts, self._lengths, self._packed = prompts, packed.lengths, packed

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = 0
        for prompt, length in zip(self._prompts, self._lengths, strict=True):
            start, end = end, end + length
            prompt.keys.append(key[0, :, start:end])
            prompt.values.append(value[0, :, start:end])
        return self._packed.attend(spec, query, key, value)


class _Decode:
    """One token per row: store its key and value, attend over the row's own tokens. Idle rows are at position 0."""

    def __init__(self, slots: SlotRunner, rows: int) -> None:
        self._keys, self._values = slots.keys, slots.values
        self._rows, self._exact = rows, slots.exact_temperature is not None
        self.position_ids = positions = slots.state.lengths[:rows].clamp(min=0).long()
        longest = slots.max_tokens if slots.pinned else int(self.position_ids.max()) + 1
        self._reach = reach = min(slots.max_tokens, -(-longest // 16) * 16)  # few shapes, little beyond the longest
        self._seen = functools.cache(lambda window: seen_keys(positions[:, None], reach, window, "cpu"))
        _, heads, tokens, _ = slots._shape
        self._place = (torch.arange(rows * heads).view(rows, heads) * tokens + positions[:, None]).view(-1)

    def attend(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[spec.layer], self._values[spec.layer]
        for store, new in ((keys, key), (values, value)):
            store.view(-1, store.shape[3]).index_copy_(0, self._place, new.reshape(len(self._place), -1))
        rows, reach, seen = self._rows, self._reach, self._seen(spec.window)
        keys, values = keys[:rows, :, :reach], values[:rows, :, :reach]
        if self._exact:
            return attend_in_blocks(spec, query[:, :, 0], keys, values, self.position_ids)[:, None]
        out = step_attention(spec, query, keys, values, seen)
        return out.transpose(1, 2)
