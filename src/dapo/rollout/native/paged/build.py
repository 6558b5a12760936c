"""Setting up the paged decoder: how much memory there is, and how many pages that makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dapo.errors import ModelError
from dapo.model.compiling import compile_ends, compile_layers
from dapo.model.loading import key_value_heads
from dapo.rollout.native.decoder import PREFILL_TOKENS, STRETCH, Decoder
from dapo.rollout.native.paged.joined import join_products
from dapo.rollout.native.paged.pool import Pool, PoolShape
from dapo.rollout.native.paged.runner import PagedRunner
from dapo.rollout.native.pages import minimum_pages, pages_for
from dapo.rollout.native.rows import Rows
from dapo.rollout.native.stopping import StopTexts
from dapo.util.files import size_text

PAGE_TOKENS = 32
"""Half a page per sequence is wasted, and a table entry is read per page: 32 tokens keep both under 5% and 1%."""
FREE_SHARE = 0.9
"""Of the memory left over, what a cache of unstated size may take: other programs and fragments need the rest."""


def paged_decoder(
    model: Any,
    stop_token_ids: Sequence[int],
    *,
    max_sequence_tokens: int,
    max_concurrent_samples: int,
    cache_bytes: int | None = None,
    spare_bytes: int = 0,
    deterministic: bool = False,
    exact_temperature: float | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Decoder:
    """A decoder for ``model``, on the device that it is on; arguments as of
    :class:`~dapo.rollout.native.engine.NativeEngine`. The model's products are joined, and on CUDA its layers compiled,
    unless its log-probs are to be exact.
    Raises ModelError: the memory does not hold the cache of a single sequence."""
    device = next(model.parameters()).device
    shape = pool_shape(model)
    join_products(model)
    per_row = pages_for(max_sequence_tokens, PAGE_TOKENS)
    rows = Rows(max_concurrent_samples, max_sequence_tokens, per_row, stop_token_ids, device)
    most = max_concurrent_samples * (per_row + 1) + 1  # each may have the copy of a prompt's last page; and page 0
    if cache_bytes is None:
        spare = spare_bytes + _working_bytes(model, max_concurrent_samples, max_sequence_tokens)
        cache_bytes = _free_bytes(device, spare) if device.type == "cuda" else most * shape.page_bytes
    pages = min(most, cache_bytes // shape.page_bytes)
    least = minimum_pages(max_sequence_tokens, PAGE_TOKENS)
    if pages < least:
        raise ModelError(
            f"the cache of one sequence of {max_sequence_tokens} tokens takes {size_text(least * shape.page_bytes)}, "
            f"but there is room for {size_text(cache_bytes)} on {device}; shorten rollout.max_response_length, lower "
            "rollout.max_concurrent_samples, or raise rollout.cache_gib"
        )
    pool = Pool(replace(shape, pages=pages), device)
    runner = PagedRunner(model, pool, rows, max_sequence_tokens=max_sequence_tokens, pinned=deterministic)
    runner.exact_temperature = exact_temperature
    runner.wake()
    if device.type == "cuda" and exact_temperature is None:
        compile_layers(model, options={"combo_kernels": True})  # queries and keys are turned by one kernel then
        compile_ends(model)  # 15 kernels of a step less, for seconds of a start with nothing compiled
        runner.warm_up()
    return Decoder(
        runner,
        pages=pages,
        page_tokens=PAGE_TOKENS,
        max_sequence_tokens=max_sequence_tokens,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        stop_token_ids=stop_token_ids,
        stop_texts=None if decode is None else StopTexts(decode),
        stretch=STRETCH,
        prefill_tokens=1 if deterministic else PREFILL_TOKENS,
    )


def pool_shape(model: Any) -> PoolShape:
    """Of a pool for ``model``, in the type of its weights and with no page yet."""
    config = model.config.get_text_config()
    kv_heads, head_dim = key_value_heads(config)
    if head_dim % 8:
        raise ModelError(
            f"model: its heads have {head_dim} numbers; the paged cache of the native engine needs a multiple of 8. "
            "runtime.device=cpu can serve it"
        )
    return PoolShape(
        layers=config.num_hidden_layers,
        pages=0,
        kv_heads=kv_heads,
        page_tokens=PAGE_TOKENS,
        head_dim=head_dim,
        dtype=next(model.parameters()).dtype,
    )


def _working_bytes(model: Any, rows: int, longest: int) -> int:
    """Of a step's logits and of the activations of a prefill pass, of many prompts or of one long sequence alone."""
    config = model.config.get_text_config()
    copies = 3 if getattr(config, "final_logit_softcapping", None) else 1
    logits = copies * rows * config.vocab_size * 4
    wide = 4 * config.hidden_size + 3 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    return int(logits + 2 * max(PREFILL_TOKENS, longest) * wide * next(model.parameters()).dtype.itemsize)


def _free_bytes(device: torch.device, spare: int) -> int:
    """What keys and values may take of a card of which ``spare`` bytes are wanted for other things."""
    free = torch.cuda.mem_get_info(device)[0]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int((free + kept - spare) * FREE_SHARE))
