"""The protocol that every rollout engine implements: prompts in, samples out, new weights in between.

Consumes: :class:`Request` (token ids, one seed per sample). Produces: :class:`~dapo.records.Sample`, each exactly
once, in the order in which they finish. Waits for: nothing but its own device. A consumer that stops iterating
cancels what is left of its requests. What only some engines can do is in :class:`InterruptibleEngine`.

An engine never sees a reward. It may serve several ``generate`` streams at once and is free to batch them together.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dapo.config import Config
from dapo.errors import ConfigError, NumericalError, UserError
from dapo.records import Sample

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 256 * 2**20
_ROUNDING = 1e-3  # by which the log of a probability of 1 may be above 0
FINGERPRINT_ELEMENTS = 64  # of a tensor: a lost one differs in some of them, and reading them takes no time


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy.

    ``top_k`` (0: off), ``top_p`` (1: off) and ``min_p`` (0: off) are for evaluation only. They apply in this order,
    after the temperature: the k most likely tokens; of what is left, renormalised, the fewest that together hold
    ``top_p``; of those the ones at least ``min_p`` times as likely as the first. Tokens as likely as the last that
    stays, stay too. ``stop``: texts that end a response; the token that completes one is its last. ``top_logprobs``:
    how many of the most likely tokens to report at each position, with their log-probabilities before truncation.
    """

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A sample in flight, as far as it is: tokens, logprobs and versions, as :class:`Sample` will have them, from
    number ``start`` on."""

    request_id: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to sample from. ``seeds`` holds one seed per wanted sample, so ``len(seeds)`` samples come back.

    ``id`` comes back as ``Sample.request_id`` and must be unique among the requests in flight; the samples carry
    ``index`` 0 .. len(seeds) - 1 in the order of the seeds. ``drafts``: of unfinished samples of an earlier request, by
    index. Each is continued as if it had never stopped, by an :class:`InterruptibleEngine` only; its keys and values
    are computed anew, by the weights in use.
    """

    id: int
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    drafts: tuple[Draft, ...] = ()

    @property
    def fresh(self) -> list[int]:
        """Indices of the samples without a draft."""
        return sorted(set(range(len(self.seeds))) - {draft.index for draft in self.drafts})


@runtime_checkable
class Engine(Protocol):
    """What the rest of the program may ask of an engine."""

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Sample from every request; yields each of the ``sum(len(r.seeds))`` samples once, as it finishes.
        Raises EngineError: a request cannot be served (too long, unknown token id) or the engine failed."""

    async def begin(self, version: int) -> None:
        """New weights are to come. Until :meth:`commit` no request may be made, and those in flight wait.
        Raises EngineError: of an older version than those in use."""

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Some of them, with the names and shapes of the model's ``state_dict``, copied when this returns.
        Raises EngineError: the model has no such parameter."""

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """All have come, or all of the adapter's if the model has one: they are in use when this returns. Tokens of
        requests in flight that are sampled later carry the new version. ``fingerprint`` holds :func:`some_elements` of
        what was sent, by name. Raises EngineError: some are missing, or are not what was sent."""

    async def sleep(self) -> None:
        """Give the cache memory back; refused while requests are in flight."""

    async def wake(self) -> None:
        """Take the cache memory again; a no-op when awake."""

    async def close(self) -> None:
        """Stop, within a bounded time. Requests in flight fail with :class:`EngineError`."""


@runtime_checkable
class InterruptibleEngine(Engine, Protocol):
    """An engine whose requests can be watched, stopped and continued (:class:`Request` with ``drafts``)."""

    def stream(self, requests: Sequence[Request]) -> AsyncIterator[Sample | Draft]:
        """As :meth:`generate`, with drafts of each sample before it comes: its tokens since the draft before."""

    async def cancel(self, request_ids: Collection[int]) -> list[Draft]:
        """End these requests: what has finished still comes, then their streams go on without them, or end at once if
        they have no others; also while paused or while weights come. Returns what the unfinished samples have; those
        that have no token yet are left out. Unknown ids are ignored."""

    async def pause(self) -> None:
        """No token is sampled from when this returns until :meth:`resume`. Requests stay in flight, more may be made,
        and weights may be changed."""

    async def resume(self) -> None:
        """Go on; a no-op when not paused."""


def in_flight_policy(config: Config, engine: Any) -> str:
    """``rollout.in_flight`` with `auto` resolved. ``engine``: one, a class, or None: that of the package; of what a
    function will make, nothing is known. Raises ConfigError: it cannot do what is asked."""
    asked, methods = config.rollout.in_flight, [name for name in vars(InterruptibleEngine) if name[0] != "_"]
    if callable(engine) and not isinstance(engine, type):
        return asked
    able = engine is None or all(hasattr(engine, name) for name in methods)
    if asked == "restart" and not able and config.rollout.max_staleness:
        raise ConfigError(
            "rollout.in_flight: restart needs an engine whose requests can be cancelled (InterruptibleEngine in "
            "dapo.rollout.engine), and this one lacks such methods; use drain or keep"
        )
    return asked if asked != "auto" else "keep" if able and not config.runtime.exact else "drain"


def some_elements(tensor: torch.Tensor) -> torch.Tensor:
    """At most :data:`FINGERPRINT_ELEMENTS` elements, evenly spread and copied: no view that would keep a bucket."""
    step = math.ceil(math.prod(tensor.shape) / FINGERPRINT_ELEMENTS) | 1  # odd: not all in one column
    return tensor.reshape(-1)[::step] + 0  # copies arrays of NumPy too: an engine without PyTorch may be given those


def check_known(bucket: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises EngineError: an engine has no parameter of this name or of this shape, or it is not given such numbers."""
    for name, tensor in bucket:
        if not tensor.is_floating_point():
            raise EngineError(f"weights: {name} is of {tensor.dtype}; parameters are floating-point numbers")
        if (shape := shapes.get(name)) != tuple(tensor.shape):
            have = "no such parameter" if shape is None else f"shape {shape}"
            raise EngineError(f"weights: {name} {tuple(tensor.shape)}: the engine's model has {have}")


def check_given(missing: Collection[str]) -> None:
    """``missing``: what has not come when all should have. Raises EngineError: something has not."""
    if missing:
        raise EngineError(f"weights: {len(missing)} parameters were not given, such as {min(missing)}")


def check_arrived(sent: Mapping[str, torch.Tensor], have: Mapping[str, torch.Tensor]) -> None:
    """Compares :func:`some_elements` of what was sent and of what an engine has, in the type of the latter.
    Raises EngineError: they differ, or some did not come."""

    def same(name: str) -> bool:
        return sent[name].shape == have[name].shape and bool((sent[name].to(have[name]) == have[name]).all())

    absent = [name for name in sent if name not in have]
    lost = absent or [name for name in sent if not same(name)]
    if lost:
        damaged = "are not what was sent: they were lost or damaged on the way to the engine"
        problem = "did not arrive" if absent else damaged
        raise EngineError(f"weights: {len(lost)} of {len(sent)} parameters, such as {lost[0]}, {problem}")


def fault_of(sample: Sample, vocabulary: int) -> str | None:
    """What no sample of a model with ``vocabulary`` tokens can have; None: nothing."""
    if not sample.length:
        return None
    ids, logprobs, versions = sample.token_ids, sample.logprobs, sample.versions
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"token ids from {ids.min()} to {ids.max()}, and the model knows those from 0 to {vocabulary - 1}"
    if not ((logprobs > -math.inf) & (logprobs <= _ROUNDING)).all():
        return f"log-probs must be finite and at most 0, not {logprobs.min()} to {logprobs.max()}"
    if (versions[1:] < versions[:-1]).any():
        return f"tokens of the versions {versions[0]} to {versions[-1]}, which fall"
    return None


async def hand_over(engine: Engine, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give an engine new weights, so many bytes at a time that no second model has to be in memory."""
    await engine.begin(version)
    bucket: list[tuple[str, torch.Tensor]] = []
    fingerprint: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        fingerprint[name] = some_elements(tensor)
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            await engine.put(bucket)
            bucket, size = [], 0
    await engine.put(bucket)
    await engine.commit(fingerprint)


class EngineError(RuntimeError):
    """An engine could not serve a request; the message says which and why."""


def portable(error: Exception, otherwise: type[Exception] = EngineError) -> Exception:
    """Itself, if another process can make it again; else what it says, as ``otherwise``."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return otherwise(f"{type(error).__name__}: {error}")
    return error


class NoMemoryError(EngineError, UserError):
    """The device's memory does not suffice; the message says which setting to lower."""


class SampleError(EngineError, UserError):
    """What an engine gave back is no sample of the model's; the message says which and why."""


class NotFiniteError(EngineError, NumericalError):
    """The model's logits were not finite: its weights are damaged, or went astray in training."""
