"""The native engine: a :class:`~dapo.rollout.native.decoder.Decoder` in a thread of its own, behind the asynchronous
protocol.

The thread waits for requests and for nothing else. A consumer waits for its samples; the wait ends with the last one,
with an :class:`EngineError` if the decoder fails, or with :meth:`NativeEngine.close`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dapo.model.adapters import changing_parameters
from dapo.model.exact import row_invariant
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request, check_arrived, check_given, check_known, some_elements
from dapo.rollout.native.decoder import Decoder
from dapo.rollout.native.in_flight import Told
from dapo.rollout.native.slots import slot_decoder

CLOSE_SECONDS, END_SECONDS = 10.0, 60.0  # to end in: on request, and at the end of the process
DRAFT_SECONDS = 4e-4  # for each stream, between two times that they are told of drafts: so much of the lock it takes

_Event = Sample | Draft | BaseException | None  # None: a sample that was cancelled
_Stream = tuple[asyncio.AbstractEventLoop, asyncio.Queue[_Event]]
_T = TypeVar("_T")


class NativeEngine:
    """In-process rollout of Hugging Face causal language models; see ``dapo.model.loading.SUPPORTED``."""

    def __init__(
        self,
        model: Any,
        stop_token_ids: Sequence[int],
        *,
        max_sequence_tokens: int,
        max_concurrent_samples: int,
        cache_bytes: int | None = None,
        spare_bytes: int = 0,
        deterministic: bool = False,
        exact_temperature: float | None = None,
        threads: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """
        Args:
            model: from :func:`dapo.model.loading.copy_model`; no parameter that changes is another's.
            stop_token_ids: each ends a response and belongs to it.
            max_sequence_tokens: longest prompt and response together.
            max_concurrent_samples: decoded at once.
            cache_bytes: for keys and values on a GPU; None: what is free, as far as it can be of use.
            spare_bytes: of a GPU, to leave to others where ``cache_bytes`` is None.
            deterministic: pin all shapes, so that a sample's bits do not depend on what else is in flight.
            exact_temperature: as in :class:`~dapo.rollout.native.rows.RowsRunner`.
            threads: for the tensor work of the engine's thread.
            decode: text of token ids, without which requests with stop texts are refused.

        Raises ModelError: the model and the cache of a single sequence do not fit into the device's memory."""
        options: dict[str, Any] = {"deterministic": deterministic, "decode": decode}
        options["exact_temperature"] = exact_temperature
        options |= {"max_sequence_tokens": max_sequence_tokens, "max_concurrent_samples": max_concurrent_samples}
        self._decoder: Decoder
        self._device = next(model.parameters()).device
        if self._device.type == "cpu":
            self._decoder = slot_decoder(model, stop_token_ids, **options)
        else:
            from dapo.rollout.native.paged.build import paged_decoder  # needs Triton

            options |= {"cache_bytes": cache_bytes, "spare_bytes": spare_bytes}
            with torch.cuda.device(self._device):
                self._decoder = paged_decoder(model, stop_token_ids, **options)
        self._parameters = changing_parameters(model)
        self._threads, self._exact = threads, exact_temperature is not None
        self._keys = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._watched: dict[int, dict[tuple[int, int], int]] = {}  # that are told of drafts, and how much
        self._due = 0.0  # when all of them are told next
        self._paused = False
        self._commands: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        self.broken: EngineError | None = None
        """Why it has ended; None: it has not."""
        self._incomplete: int | None = None  # version of weights that have not arrived whole
        self._missing: set[str] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        return self._decoder.version

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights that it is handed, by name."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    @property
    def decode_steps(self) -> int:
        """Times that the weights were read to give all rows in flight a token, so far."""
        return self._decoder.decode_steps

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        return cast(AsyncIterator[Sample], self.stream(requests, drafts=False))

    async def stream(self, requests: Sequence[Request], *, drafts: bool = True) -> AsyncIterator[Sample | Draft]:
        for request in requests:
            self._decoder.check(request)
        expected = sum(len(r.seeds) for r in requests)
        queue: asyncio.Queue[_Event] = asyncio.Queue()
        stream = asyncio.get_running_loop(), queue
        key = next(self._keys)

        def submit() -> None:
            if self._incomplete is not None:
                raise EngineError(f"the weights of version {self._incomplete} arrived in part; load them again")
            self._streams[key] = stream
            if drafts:
                self._watched[key] = {}
            for request in requests:
                self._decoder.submit(key, request)

        def refused(submitted: Future[None]) -> None:
            if error := submitted.exception():
                _deliver({key: stream}, [(key, error)])

        future: Future[None] = Future()
        future.add_done_callback(refused)  # nobody waits for it: each wake-up of the loop costs the thread its lock
        try:
            self._post(submit, future)
            while expected:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                expected -= not isinstance(event, Draft)
                if event is not None:
                    yield event
        finally:
            if not (self._closing or self.broken):
                self._post(lambda: self._forget(key, bool(expected)), None)

    def check(self, request: Request) -> None:
        """Raises EngineError: the request cannot be served; says why."""
        self._decoder.check(request)

    async def cancel(self, request_ids: Collection[int]) -> list[Draft]:
        def cancel() -> list[Draft]:
            self._advance(lambda: [self._decoder.finished()])
            drafts = [draft for _, draft in self._decoder.drafts() if draft.request_id in request_ids]
            ended = self._decoder.cancel(lambda _, request: request.id in request_ids)
            self._hand_out([(key, None) for key in ended])
            return drafts

        return await self._call(cancel)

    async def pause(self) -> None:
        await self._call(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_paused", False))

    async def begin(self, version: int) -> None:
        await self._call(lambda: self._begin(version))

    def _begin(self, version: int) -> None:
        if version < self.version:
            raise EngineError(f"weights: version {version} was given after version {self.version}")
        self._incomplete, self._missing = version, set(self._parameters)

    async def put(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        await self._call(lambda: self._put(bucket))

    @torch.no_grad()
    def _put(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        check_known(bucket, self.shapes)
        given: dict[str, Tensor] = {}
        for name, tensor in bucket:
            before = given.get(name, None if name in self._missing else self._parameters[name])
            if before is not None and not torch.equal(tensor.to(before), before):
                raise EngineError(f"weights: {name} came twice, with other values")
            given[name] = tensor
        if given:  # in one call: launches would take longer than the bytes
            torch._foreach_copy_([self._parameters[name] for name in given], list(given.values()))
        self._missing.difference_update(given)

    async def commit(self, fingerprint: Mapping[str, Tensor]) -> None:
        await self._call(lambda: self._commit(fingerprint))

    @torch.no_grad()
    def _commit(self, fingerprint: Mapping[str, Tensor]) -> None:
        if self._incomplete is None:
            raise EngineError("weights: a commit without a begin")
        check_given(self._missing)
        check_arrived(fingerprint, {name: some_elements(value) for name, value in self._parameters.items()})
        self._decoder.use_weights(self._incomplete)
        self._incomplete = None

    async def sleep(self) -> None:
        def drop() -> None:
            if self._decoder.busy:
                raise EngineError("cannot sleep while requests are in flight")
            self._decoder.sleep()

        await self._call(drop)

    async def wake(self) -> None:
        await self._call(self._decoder.wake)

    async def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
            if self._thread.is_alive():  # one inside of PyTorch when the interpreter ends aborts the process
                atexit.register(self._thread.join, END_SECONDS)
                error = EngineError(f"the engine's thread did not stop within {CLOSE_SECONDS:g} s")
                self._fail_streams(error)
                raise error

    # -- the thread ------------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], Any], future: Future[Any] | None) -> None:
        """Have ``command`` run between two steps of the decoder; ``future`` hears how it went.

        Without a future nobody would hear of a failure, so then it ends the engine.
        """
        with self._changed:
            if self.broken is not None:
                raise self.broken
            if self._closing:
                raise EngineError("the engine is closed")
            if self._thread is None:
                # A daemon, so that a crashed run never hangs on its way out. In the context of now: settings of
                # torch.compile are part of it.
                run = contextvars.copy_context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="dapo-engine", daemon=True)
                self._thread.start()
            self._commands.append((command, future))
            self._changed.notify()

    async def _call(self, command: Callable[[], _T]) -> _T:
        future: Future[_T] = Future()
        self._post(command, future)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        """The thread's life. However it ends, nobody is left waiting."""
        try:
            with row_invariant(self._exact):
                self._serve()
        except BaseException as fault:
            self.broken = EngineError(f"the engine broke down: {type(fault).__name__}: {fault}")
        error = self.broken or EngineError("the engine was closed")
        self._fail_streams(error)
        with self._changed:
            for _, future in self._commands:
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self._commands.clear()

    def _serve(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread: kernels and graphs go to the current one
        while True:
            with self._changed:
                while not (self._commands or self._closing or (self._decoder.busy and not self._held)):
                    self._changed.wait()
                if self._closing:
                    return
                command = self._commands.popleft() if self._commands else None
            if command is not None:
                _execute(*command)
            else:
                self._advance(lambda: self._decoder.stretch(self._told()))

    @property
    def _held(self) -> bool:
        """Whether to leave what is in flight: paused, or new weights have come in part."""
        return self._paused or self._incomplete is not None

    def _advance(self, work: Callable[[], Iterable[Sequence[tuple[int, _Event]]]]) -> None:
        """Hand out what ``work`` comes to; where it fails, fail everything."""
        try:
            for events in work():
                self._hand_out(events)
        except Exception as error:
            self._decoder.reset()
            if not isinstance(error, EngineError):
                error = EngineError(f"decoding failed: {type(error).__name__}: {error}")
            self._fail_streams(error)

    def _told(self) -> Told:
        """The streams that are told of drafts now: at once those that have heard nothing yet."""
        if (now := time.monotonic()) < self._due:
            return {key: told for key, told in self._watched.items() if not told}
        self._due = now + DRAFT_SECONDS * len(self._watched)
        return self._watched

    def _hand_out(self, events: Sequence[tuple[int, _Event]]) -> None:
        for key, event in events:
            if isinstance(event, Draft) and key in self._watched:
                self._watched[key][event.request_id, event.index] = event.start + len(event.token_ids)
        for key in _deliver(self._streams, events):
            self._forget(key)

    def _forget(self, key: int, unfinished: bool = True) -> None:
        self._streams.pop(key, None)
        self._watched.pop(key, None)
        if unfinished:  # which to find takes a look at all rows
            self._decoder.cancel(lambda other, _: other == key)

    def _fail_streams(self, error: EngineError) -> None:
        streams, self._streams = self._streams, {}
        _deliver(streams, [(key, error) for key in list(streams)])


def _deliver(streams: Mapping[int, _Stream], events: Iterable[tuple[int, _Event]]) -> list[int]:
    """Put events into their streams, with one wake-up of each event loop. Returns the streams whose loop is gone."""
    found = defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[_Event], _Event]]](list)
    for key, event in events:
        if key in streams:
            loop, queue = streams[key]
            found[loop].append((queue, event))
    lost: list[int] = []
    for loop, ready in found.items():
        try:
            loop.call_soon_threadsafe(_put, ready)
        except RuntimeError:
            lost += [key for key, stream in streams.items() if stream[0] is loop]
    return lost


def _put(ready: Sequence[tuple[asyncio.Queue[_Event], _Event]]) -> None:
    for queue, event in ready:
        queue.put_nowait(event)


def _execute(command: Callable[[], Any], future: Future[Any] | None) -> None:
    if future is None:
        command()
        return
    if not future.set_running_or_notify_cancel():
        return  # whoever asked has gone
    try:
        future.set_result(command())
    except Exception as error:
        future.set_exception(error)
