"""Continuous batching: requests wait, are prefilled once per prompt, and their samples decode side by side.

Synchronous and single-threaded; ``engine.py`` runs it in a thread. The three calls of a cycle are *admit* (start as
many waiting samples as there is room for), *decode* (one token for every row) and *collect* (finished samples out,
their rows free for the next).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dapo.model.forward import hidden_states, output_head
from dapo.records import FinishReason, Sample
from dapo.rollout.engine import Draft, Request, Sampling
from dapo.rollout.native.cache import KVCache, PromptEntry, SlotCache
from dapo.rollout.native.checks import check_request, not_finite
from dapo.rollout.native.sampler import most_likely, sample, uniforms
from dapo.rollout.native.stopping import StopTexts

PREFILL_TOKENS = 4096  # prompts prefilled in one pass: enough to fill the cores, little memory
Told = Mapping[int, Mapping[tuple[int, int], int]]
"""By key, request and index of a sample: how many of its tokens whoever watches has been told."""
NO_DRAFT = Draft(0, 0, (), (), ())


class AnyDecoder(Protocol):
    """What the engine's thread does with a decoder."""

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        ...

    @property
    def decode_steps(self) -> int:
        """Times that all rows were given a token, so far."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        ...

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be served, with an :class:`EngineError`."""
        ...

    def submit(self, key: int, request: Request) -> None:
        """Queue a request; its samples come back under ``key``."""
        ...

    def cancel(self, gone: Callable[[int, Request], bool]) -> list[int]:
        """Forget the samples of which ``gone(key, request)``; returns the key of each."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...

    def stretch(self, told: Told) -> Iterator[list[tuple[int, Sample | Draft]]]:
        """Decode for a while. Yields what has finished, and the drafts of the keys in ``told``, once it is there: what
        is done with it may cost no time of the device."""
        ...

    def finished(self) -> list[tuple[int, Sample]]:
        """What has finished already and was not returned yet."""
        ...

    def drafts(self, told: Told | None = None) -> list[tuple[int, Draft]]:
        """What is in flight and has tokens, as far as it is; ``told``: less these tokens, and of its keys only."""
        ...

    def use_weights(self, version: int) -> None:
        """The model's weights are others now."""
        ...

    def sleep(self) -> None:
        """Give the cache's memory back."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """Samples of a request that start from the same tokens. After the prefill it holds these and their logits."""

    key: int
    request: Request
    indices: deque[int]
    draft: Draft = NO_DRAFT
    prompt: PromptEntry | None = None
    logits: Tensor | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids + self.draft.token_ids


@dataclass(slots=True, eq=False)
class _Row:
    key: int
    request: Request
    index: int
    limit: int
    uniform: Tensor
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Ids and log-probabilities of the most likely tokens at each place, if they are asked for."""


class Decoder:
    """Decodes samples for requests; each result carries the key that its request was submitted under."""

    def __init__(
        self,
        model: Any,
        stop_token_ids: Sequence[int],
        *,
        max_sequence_tokens: int,
        max_concurrent_samples: int,
        deterministic: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """
        Args:
            model: from :func:`dapo.model.loading.copy_model`; its parameters are this decoder's own.
            stop_token_ids: each ends a response and belongs to it.
            max_sequence_tokens: longest prompt and response together.
            max_concurrent_samples: rows decoded at once.
            deterministic: pin all shapes (see :class:`SlotCache`) and prefill prompts one by one.
            decode: token ids to text, for requests with stop texts; without it they are refused.
        """
        self.model = model
        self.version = 0
        self.decode_steps = 0
        self._head = output_head(model).in_float32()
        self._stop = frozenset(stop_token_ids)
        self.check: Callable[[Request], None] = functools.partial(
            check_request,
            vocabulary=self._head.weight.shape[0],
            max_sequence=max_sequence_tokens,
            can_decode=decode is not None,
            stop_ids=self._stop,
        )
        self._deterministic = deterministic
        self._stop_texts = StopTexts(decode) if decode else None
        self.cache: KVCache = SlotCache(
            model.config, max_concurrent_samples, max_sequence_tokens, next(model.parameters()).dtype, deterministic
        )
        self._waiting: deque[_Waiting] = deque()
        self._rows: list[_Row] = []
        self._finished: list[tuple[int, Sample]] = []

    def use_weights(self, version: int) -> None:
        """To be called when the model's weights are others: the head is held in float32, which it computes in.

        That saves widening it for every token. Costs as much memory as a float32 embedding where weights are narrower.
        """
        self.version = version
        self._head = output_head(self.model).in_float32()
        for waiting in self._waiting:  # prompts computed ahead are computed anew
            waiting.prompt = waiting.logits = None

    def sleep(self) -> None:
        """Give the cache's memory back. Only while nothing is left to do."""
        self.cache.drop()

    def wake(self) -> None:
        """Nothing to do: the cache takes its memory with the next request."""

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._rows or self._finished)

    def submit(self, key: int, request: Request) -> None:
        """Queue a request that :meth:`check` accepts; its samples come back under ``key``."""
        self._waiting += [_Waiting(key, request, deque([draft.index]), draft) for draft in request.drafts]
        if fresh := request.fresh:
            self._waiting.append(_Waiting(key, request, deque(fresh)))

    @torch.inference_mode()  # rows are moved, and the cache was made in this mode
    def cancel(self, gone: Callable[[int, Request], bool]) -> list[int]:
        """Forget the samples of which ``gone(key, request)``; returns the key of each."""
        keys = [w.key for w in self._waiting if gone(w.key, w.request) for _ in w.indices]
        self._waiting = deque(w for w in self._waiting if not gone(w.key, w.request))
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            if gone(row.key, row.request):
                keys.append(row.key)
                self._remove(index)
        return keys

    def reset(self) -> None:
        """Forget all requests: the way out after an error, in whatever state that left the cache."""
        self._waiting.clear()
        self._rows.clear()
        self._finished.clear()
        self.cache.clear()

    def drafts(self, told: Told | None = None) -> list[tuple[int, Draft]]:
        """The samples in flight that have tokens, as far as they are; ``told``: less these, and of its keys only."""
        waiting = [(w.key, w.draft) for w in self._waiting if w.draft.token_ids and (told is None or w.key in told)]
        found = []
        for row in self._rows:
            if told is None or row.key in told:
                start = told_of(told, row.key, row.request.id, row.index)
                tokens, logprobs, versions = row.tokens[start:], row.logprobs[start:], row.versions[start:]
                columns = tuple(tokens), tuple(logprobs), tuple(versions)
                found.append((row.key, Draft(row.request.id, row.index, *columns, start)))
        return waiting + found

    def stretch(self, told: Told) -> Iterator[list[tuple[int, Sample | Draft]]]:
        """One cycle, and what has come of it."""
        yield [*self.step(), *(self.drafts(told) if told else ())]

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Sample]]:
        """One cycle: admit, decode one token per row, and return the samples that finished."""
        while self._waiting and self.cache.room():
            if self._waiting[0].prompt is None:
                self._prefill()
            self._start_first()
        if self._rows:
            self.decode_steps += 1
            self._decode()
        return self.finished()

    def finished(self) -> list[tuple[int, Sample]]:
        """The samples that have finished and were not returned yet."""
        finished, self._finished = self._finished, []
        return finished

    def _prefill(self) -> None:
        """Compute the prompts at the head of the queue in one packed pass, each once for all its samples."""
        batch = [self._waiting[0]]
        tokens, samples = len(batch[0].token_ids), len(batch[0].indices)
        for waiting in list(self._waiting)[1:]:
            tokens += len(waiting.token_ids)
            if self._deterministic or tokens > PREFILL_TOKENS or samples >= self.cache.room():
                break
            samples += len(waiting.indices)
            batch.append(waiting)
        prompts = [w.token_ids for w in batch]
        lengths = [len(p) for p in prompts]
        context, entries = self.cache.add_prompts(lengths, [len(w.indices) for w in batch])
        token_ids = torch.tensor([t for p in prompts for t in p])
        position_ids = torch.cat([torch.arange(n) for n in lengths])
        hidden = hidden_states(self.model, token_ids, position_ids, context)
        last = hidden[torch.tensor(lengths).cumsum(0) - 1]
        for waiting, entry, state in zip(batch, entries, last, strict=True):
            waiting.prompt = entry
            waiting.logits = self._head.logits(state[None])

    def _start_first(self) -> None:
        """Start samples of the first waiting request while there is room, and draw their first token."""
        waiting = self._waiting[0]
        request, prompt, logits = waiting.request, waiting.prompt, waiting.logits
        assert prompt is not None and logits is not None
        count = min(self.cache.room(), len(waiting.indices))
        limit, had = request.sampling.max_tokens, waiting.draft
        for _ in range(count):
            index = waiting.indices.popleft()
            known = list(had.token_ids), list(had.logprobs), list(had.versions)
            self.cache.start(prompt)
            self._rows.append(_Row(waiting.key, request, index, limit, uniforms(request.seeds[index], limit), *known))
        if not waiting.indices:
            self._waiting.popleft()
        self._append_tokens(logits.repeat(count, 1), len(self._rows) - count, self._rows[-count:])

    def _decode(self) -> None:
        context = self.cache.decode_context()
        last_tokens = [row.tokens[-1] for row in self._rows]
        idle = self.cache.rows_computed - len(last_tokens)
        token_ids = torch.tensor(last_tokens + [0] * idle)[:, None]
        hidden = hidden_states(self.model, token_ids, context.position_ids[:, None], context)
        self.cache.advance()
        logits = self._head.logits(hidden[:, 0])[: len(self._rows)]
        self._append_tokens(logits, 0, list(self._rows))

    def _append_tokens(self, logits: Tensor, first_row: int, rows: list[_Row]) -> None:
        """Draw the next token of ``rows`` (which start at ``first_row``) and take out those that are done."""
        uniform = torch.stack([row.uniform[len(row.tokens)] for row in rows])
        settings: list[Sampling] = [row.request.sampling for row in rows]
        if any(s.top_logprobs for s in settings):
            for row, top in zip(rows, most_likely(logits, settings), strict=True):
                row.top += [top] if top else []
        tokens, logprobs = sample(logits, uniform, settings)
        if not bool(logprobs.isfinite().all()):
            row = rows[int((~logprobs.isfinite()).nonzero()[0])]
            raise not_finite(row.request, row.index, len(row.tokens))
        done = []
        for offset, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            stopped = self._stops(row)
            if stopped or len(row.tokens) == row.limit:
                done.append(first_row + offset)
                self._finished.append((row.key, _sample(row, "stop" if stopped else "length")))
        for index in reversed(done):  # from the end, so that the rows still to be removed keep their numbers
            self._remove(index)

    def _stops(self, row: _Row) -> bool:
        """Whether the last token ends the response: it is a stop token, or completes a stop text."""
        if row.tokens[-1] in self._stop:
            return True
        texts = row.request.sampling.stop
        if not texts or self._stop_texts is None:
            return False
        return self._stop_texts.ends_at(row.tokens, len(row.tokens) - 1, texts) is not None

    def _remove(self, index: int) -> None:
        moved = self.cache.release(index)
        last = self._rows.pop()
        if moved is not None:
            self._rows[index] = last


def told_of(told: Told | None, key: int, request_id: int, index: int) -> int:
    """How many tokens of a sample were told."""
    return (told or {}).get(key, {}).get((request_id, index), 0)


def _sample(row: _Row, finish_reason: FinishReason) -> Sample:
    return Sample(
        request_id=row.request.id,
        index=row.index,
        token_ids=np.array(row.tokens, dtype=np.int32),
        logprobs=np.array(row.logprobs, dtype=np.float32),
        versions=np.array(row.versions, dtype=np.int32),
        finish_reason=finish_reason,
        top_ids=torch.stack([ids for ids, _ in row.top]).int().numpy() if row.top else None,
        top_logprobs=torch.stack([logprobs for _, logprobs in row.top]).numpy() if row.top else None,
    )
