"""The records that flow through a run, in one direction: ``Prompt -> Sample -> Group -> PackedBatch``.

All are frozen; a later stage makes a new record with :func:`dataclasses.replace` and never edits one in place. A
:class:`Group` (a prompt and its samples) is the only unit until admission. It is flattened once, in
``training/packing.py``, whose ``PackedBatch`` is the last record of the chain.

This module needs numpy only, so that clients can use the records without loading a tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length"]

LONGEST_TEXT = 10_000
"""Characters that a reward may say of a response: a program fits. They go into memory and files for every sample."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, ready to be sampled from.

    ``row`` is the identity of the prompt: its place in the data source. Two rows with equal text are two prompts.
    ``end`` is what a response goes on from: the text that the prompt as the model sees it has behind its last control
    token, such as a ``<think>`` of the chat template; empty where it is not known.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    answer: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    end: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """The verdict on one response.

    ``correct`` (None: the task has no notion of it) decides dynamic sampling; ``value`` is what training sees. They
    are two fields and never confused. ``error`` says that scoring failed: such a sample has no verdict at all.
    ``error`` and ``extracted`` (the answer that was read) are cut after :data:`LONGEST_TEXT`, with a mark that says so.
    """

    correct: bool | None
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    extracted: str | None = None

    def __post_init__(self) -> None:
        if self.error is None and not math.isfinite(self.value):
            raise ValueError(f"a reward must be finite, got {self.value!r}")
        for name in ("error", "extracted"):
            text = getattr(self, name)
            if isinstance(text, str) and len(text) > LONGEST_TEXT:
                mark = f" ... (cut, it had {len(text):,} characters)"
                object.__setattr__(self, name, text[: LONGEST_TEXT - len(mark)] + mark)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response. The engine fills the first block, the reward server the second, shaping and advantage the third.

    Shapes: ``token_ids``, ``logprobs`` and ``versions`` are ``[T]`` with ``T`` the response length in tokens, the stop
    token counted. ``logprobs`` are natural logs under the very distribution sampled from, temperature included.
    ``versions`` holds the policy version that each token was sampled under.

    ``top_ids`` and ``top_logprobs``, ``[T, k]``: the k most likely tokens at each place, the most likely first, and
    their log-probabilities at the temperature of sampling (greedy: 1), before any truncation. None unless they were
    asked for, as training never does.
    """

    request_id: int
    index: int
    token_ids: TokenArray
    logprobs: FloatArray
    versions: TokenArray
    finish_reason: FinishReason
    top_ids: TokenArray | None = field(default=None, kw_only=True)
    top_logprobs: FloatArray | None = field(default=None, kw_only=True)

    text: str = ""
    reward: Reward | None = None

    shaped_reward: float = math.nan
    advantage: float = math.nan
    in_loss: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"token_ids, logprobs and versions differ in length: {sorted(lengths)}")
        ids, logprobs = (None if top is None else top.shape for top in (self.top_ids, self.top_logprobs))
        if ids != logprobs or (ids is not None and ids[0] != len(self.token_ids)):
            raise ValueError(f"top_ids and top_logprobs must both be [T, k], got {ids} and {logprobs}")

    @property
    def length(self) -> int:
        """|y|: response length in tokens, the stop token counted."""
        return len(self.token_ids)

    @property
    def truncated(self) -> bool:
        """Cut at the limit. A response whose stop token is the last allowed one is not truncated."""
        return self.finish_reason == "length"

    @property
    def scored(self) -> bool:
        """Whether there is a verdict: a failed score is not a wrong answer."""
        return self.reward is not None and self.reward.error is None

    @property
    def verdict(self) -> Reward:
        """The reward of a scored sample. Raises ValueError: the sample has not been scored, or scoring failed."""
        if self.reward is None or self.reward.error is not None:
            raise ValueError(f"sample {self.index} of request {self.request_id} has no verdict")
        return self.reward


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and its samples: the unit of dynamic sampling, of the advantage and of mini-batches.

    ``draw`` is the running number of the prompt draw over the whole run. It orders admission and identifies the group:
    a row that is drawn again in a later epoch is another group.
    """

    draw: int
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def scored(self) -> tuple[Sample, ...]:
        """The samples that have a verdict. Statistics run over these."""
        return tuple(s for s in self.samples if s.scored)

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token: what staleness is counted from."""
        return min(int(s.versions.min()) for s in self.samples if s.length)
