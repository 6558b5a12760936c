"""What the decoder knows of samples that are not finished."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo.records import Sample
from dapo.rollout.engine import Draft, Request
from dapo.rollout.native.checks import not_finite
from dapo.rollout.native.pages import PageArray
from dapo.rollout.native.runner import NOTHING, Response
from dapo.rollout.native.sampler import uniforms

DRAWN_AHEAD = 128  # samples: more than end in a stretch of 1,024 rows
Told = Mapping[int, Mapping[tuple[int, int], int]]
"""By key, request and index of a sample: how many of its tokens whoever watches has been told."""


@dataclass(slots=True, eq=False)
class SampleInFlight:
    """A sample that is not finished. ``marks``: from which token on which policy version was at work."""

    key: int
    request: Request
    index: int
    age: int = -1
    done: Response = NOTHING  # what it had when it was interrupted
    stopped: bool = False  # by a stop text
    marks: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, key: int, request: Request, draft: Draft) -> SampleInFlight:
        """One that goes on from ``draft``."""
        done = Response(np.array(draft.token_ids, np.int32), np.array(draft.logprobs, np.float32))
        marks = [(i, v) for i, v in enumerate(draft.versions) if not i or v != draft.versions[i - 1]]
        return cls(key, request, draft.index, done=done, marks=marks)

    def draft(self, response: Response, told: Told | None) -> Draft:
        """What it has by now, which is ``response``, less what was told."""
        start = (told or {}).get(self.key, {}).get((self.request.id, self.index), 0)
        versions = self.versions(len(response.tokens))
        arrays = (response.tokens, response.logprobs, versions)
        tokens, logprobs, sampled_under = (tuple(array[start:].tolist()) for array in arrays)
        return Draft(self.request.id, self.index, tokens, logprobs, sampled_under, start)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and response so far, as it waits."""
        return np.array([*self.request.prompt_ids, *self.done.tokens], np.int64)

    @property
    def seed(self) -> int:
        return self.request.seeds[self.index]

    @property
    def limit(self) -> int:
        return self.request.sampling.max_tokens

    def versions(self, count: int) -> npt.NDArray[np.int32]:
        ends = [start for start, _ in self.marks[1:]] + [count]
        sizes = [end - start for (start, _), end in zip(self.marks, ends, strict=True)]
        return np.repeat(np.array([v for _, v in self.marks], np.int32), sizes)

    def sample(self, response: Response, stop_ids: frozenset[int]) -> Sample:
        """The finished sample. Raises NotFiniteError: the model's logits were not finite."""
        request, top = self.request, self.request.sampling.top_logprobs
        if not np.isfinite(response.logprobs).all():
            raise not_finite(request, self.index, int(np.flatnonzero(~np.isfinite(response.logprobs))[0]))
        stopped = self.stopped or int(response.tokens[-1]) in stop_ids
        return Sample(
            request_id=request.id,
            index=self.index,
            token_ids=response.tokens,
            logprobs=response.logprobs,
            versions=self.versions(len(response.tokens)),
            finish_reason="stop" if stopped else "length",
            top_ids=response.top_ids[:, :top] if top and response.top_ids is not None else None,
            top_logprobs=response.top_logprobs[:, :top] if top and response.top_logprobs is not None else None,
        )


@dataclass(slots=True, eq=False)
class Waiting:
    """Sequences that start from the same tokens. Once these are computed, ``pages`` hold all of them but the last, and
    ``prompt`` is what the runner made of them."""

    tokens: npt.NDArray[np.int64]
    sequences: deque[SampleInFlight]
    pages: PageArray | None = None
    prompt: Any = None

    @property
    def cached(self) -> int:
        return len(self.tokens) - 1


def draw_ahead(queue: Iterable[Waiting]) -> None:
    """Have :func:`uniforms` draw, and keep, the numbers of the samples that start next."""
    coming = (sequence for waiting in queue for sequence in waiting.sequences)
    for sequence in itertools.islice(coming, DRAWN_AHEAD):
        uniforms(sequence.seed, sequence.limit)
