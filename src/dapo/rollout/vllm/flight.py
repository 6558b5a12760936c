"""A sample in flight: what vLLM is asked for, and what has come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request
from dapo.rollout.native.checks import not_finite
from dapo.rollout.native.stopping import StopTexts

Event = Sample | Draft | EngineError | None
"""What a stream hears. None: a sample that was cancelled."""


@dataclass(eq=False, slots=True)
class Flight:
    """``name``: of vLLM's request. ``deliver``: to its stream. ``drafts``: whether that is told of it before it is
    whole, and ``only_new`` without what it was told of before."""

    name: str
    request: Request
    index: int
    deliver: Callable[[Event], None]
    drafts: bool
    only_new: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[Any, Any]] = field(default_factory=list)
    told: int = 0

    def __post_init__(self) -> None:
        for draft in self.request.drafts:
            if draft.index == self.index:
                self.ids += draft.token_ids
                self.logprobs += draft.logprobs
                self.versions += draft.versions

    def asked(self, stop_ids: Sequence[int], adapter: Any) -> Any:
        """vLLM's request for the rest of it."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling, begun = self.request.sampling, len(self.ids)
        seed = self.request.seeds[self.index] + begun * 0x9E3779B97F4A7C15  # what is left has a stream of its own
        try:
            parameters = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=seed % 2**63 if sampling.temperature else None,
                max_tokens=sampling.max_tokens - begun,
                stop_token_ids=list(stop_ids),
                ignore_eos=True,
                logprobs=sampling.top_logprobs,
                detokenize=False,
            )
        except Exception as error:  # what a version refuses that was not known here
            raise EngineError(f"request {self.request.id}: vLLM refuses it: {error}") from error
        return EngineCoreRequest(
            request_id=self.name,
            prompt_token_ids=[*self.request.prompt_ids, *self.ids],
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def take(self, output: Any, version: int, stop_ids: Sequence[int], texts: StopTexts | None) -> Event:
        """Add what vLLM has sampled. Returns what the sample ends with; None: it goes on."""
        new, found, first = list(output.new_token_ids), output.new_logprobs, len(self.ids)
        if new:
            self.ids += new
            self.versions += [version] * len(new)
            self.logprobs += found.logprobs[: len(new), 0].tolist()
            if self.request.sampling.top_logprobs:
                self.top += zip(found.logprob_token_ids[: len(new), 1:], found.logprobs[: len(new), 1:], strict=True)
        for place in range(first, len(self.ids)):
            if not math.isfinite(self.logprobs[place]):
                return not_finite(self.request, self.index, place)
        end = texts and texts.ends_at(self.ids, first, self.request.sampling.stop)
        if end:
            return self._sample(end, "stop")
        if output.finish_reason is None:
            return None
        if (reason := str(output.finish_reason)) not in ("stop", "length"):
            return EngineError(f"request {self.request.id}, sample {self.index}: vLLM did not finish it ({reason})")
        return self._sample(len(self.ids), "stop" if self.ids[-1] in stop_ids else "length")

    def _sample(self, count: int, reason: Literal["stop", "length"]) -> Sample:
        ids, versions = (np.array(values[:count], np.int32) for values in (self.ids, self.versions))
        top: dict[str, Any] = {}
        if self.top:
            most, logprobs = zip(*self.top[:count], strict=True)
            top = {"top_ids": np.stack(most).astype(np.int32), "top_logprobs": np.stack(logprobs)}
        logprobs_of = np.array(self.logprobs[:count], np.float32)
        return Sample(self.request.id, self.index, ids, logprobs_of, versions, reason, **top)

    def draft(self, start: int = 0) -> Draft:
        """As far as it is."""
        ids, logprobs, versions = self.ids[start:], self.logprobs[start:], self.versions[start:]
        return Draft(self.request.id, self.index, tuple(ids), tuple(logprobs), tuple(versions), start)

    def tell(self) -> None:
        """Tell the stream how far it is, if it wants to know and there is more than it knows."""
        if self.drafts and len(self.ids) > self.told:
            self.deliver(self.draft(self.told if self.only_new else 0))
            self.told = len(self.ids)
