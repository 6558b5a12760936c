"""What the decoder asks of a device, and the records that pass between them.

There are two runners: :class:`~dapo.rollout.native.slots.SlotRunner` on a CPU, and on a GPU
:class:`~dapo.rollout.native.paged.runner.PagedRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dapo.rollout.engine import Sampling
from dapo.rollout.native.pages import PageArray


@dataclass(frozen=True, slots=True)
class Response:
    """Arrays of one response: ``[T]`` tokens and log-probabilities, ``[T, k]`` the most likely ones if asked for."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None


NOTHING = Response(np.zeros(0, np.int32), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class RowStart:
    """What a row begins with. ``last_token`` is the one that the first step computes, unless ``prompt``, which the
    runner's prefill returned, holds more; ``cached`` come before it. ``done``: its response, if it was interrupted."""

    row: int
    last_token: int
    cached: int
    seed: int
    sampling: Sampling
    done: Response = NOTHING
    prompt: Any = None


@dataclass(frozen=True, slots=True)
class Variant:
    """What steps have to compute beside a token: whether any row truncates its distribution, and how many of the most
    likely tokens any row wants reported."""

    truncate: bool = False
    top: int = 0

    @classmethod
    def of(cls, asked: Sequence[Sampling]) -> Variant:
        different = {id(one): one for one in asked}.values()  # samples of a request share theirs
        truncates = any(one.top_k or one.top_p < 1 or one.min_p for one in different)
        return cls(truncates, max(one.top_logprobs for one in different))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the rows stand: ``lengths`` ``[R]`` tokens in the cache (-1: finished or idle), ``generated`` ``[R]``."""

    lengths: npt.NDArray[np.int64]
    generated: npt.NDArray[np.int64]


class Fetch(Protocol):
    """Responses on their way from the device."""

    def result(self) -> list[Response]:
        """Waits until they are here."""


class Runner(Protocol):
    """The device's side: model, cache and rows."""

    @property
    def rows(self) -> int:
        """Sequences that can be decoded side by side."""

    def rung(self, rows: int) -> int:
        """Rows that are computed when the first ``rows`` are in use."""

    def prefill(self, prompts: Sequence[npt.NDArray[np.int64]], pages: Sequence[PageArray]) -> Sequence[Any]:
        """Compute keys and values of each of ``prompts``, in one packed pass. ``pages[i]`` are for all tokens of prompt
        i but the last. Returns what the starts from each prompt are given."""

    def copy_pages(self, sources: PageArray, targets: PageArray) -> None:
        """Copy whole pages, in all layers."""

    def start(self, starts: Sequence[RowStart]) -> None:
        """Begin sequences in idle rows. Where a prompt's logits were kept, that draws the first token."""

    def stop(self, rows: Sequence[int]) -> None:
        """Make rows idle."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give rows other numbers; the targets are idle."""

    def run(self, rows: int, steps: int, variant: Variant, table: npt.NDArray[np.int32]) -> None:
        """Decode ``steps`` tokens for the first ``rows`` rows. Need not wait for the device."""

    def progress(self) -> Progress:
        """Where the rows stand; waits for the device."""

    def use_weights(self) -> None:
        """The model's weights are others now."""

    def sleep(self) -> None:
        """Give the cache's memory back."""

    def wake(self) -> None:
        """Take it again; a no-op when awake."""

    def fetch(self, rows: Sequence[int], counts: Sequence[int], top: int) -> Fetch:
        """The first ``counts[i]`` tokens of each of ``rows``; these may be reused at once."""
