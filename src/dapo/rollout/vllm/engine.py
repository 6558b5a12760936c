"""The engine over vLLM: its core works in processes of its own, and this is the client that feeds it.

Each sample is one request of vLLM, so that it has a seed of its own; samples of a prompt share its cache as prefix. The
client keeps what has come of each sample, so a cancelled one loses nothing, and knows the version of each token: before
weights change the core is paused, and all that it had sampled has been taken. Stop texts are found here, by the rules
of the native engine.

``AsyncLLM``, vLLM's own client, is not used: it makes texts and objects for each token, which takes longer than to
sample them, and does not say when it has taken all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from dapo.config import Config
from dapo.config.tree import vllm_problems
from dapo.model.loading import embedding_rows
from dapo.model.placement import engine_device
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request
from dapo.rollout.native.checks import check_request
from dapo.rollout.native.stopping import StopTexts
from dapo.rollout.vllm.flight import Event, Flight
from dapo.rollout.vllm.options import engine_arguments, find_vllm, model_folder
from dapo.rollout.vllm.processes import Processes, StartError
from dapo.rollout.vllm.transfer import WeightTransfer
from dapo.rollout.vllm.worker import ADAPTER
from dapo.util.user_code import describe


class VLLMEngine:
    """Rollout by vLLM. Weights come by :meth:`begin`, :meth:`put` and :meth:`commit`, first of all those of version 0,
    unless they were loaded."""

    def __init__(
        self,
        config: Config,
        model: Any,
        stop_token_ids: Sequence[int],
        *,
        max_sequence_tokens: int,
        max_concurrent_samples: int,
        spare_bytes: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        loaded: bool = False,
        adapter: Path | None = None,
    ) -> None:
        """Starts vLLM and waits for it. What is not named here is as for the native engine.

        Args:
            model: whose weights are to be handed over, or those of its adapter if it has one; on the meta device, too.
            loaded: whether vLLM loads the weights from ``model.path``, as version 0; otherwise there are none at first.
            adapter: with ``loaded``, the folder of the adapter that is on ``model``.

        Raises:
            ConfigError: vLLM is missing or too old, or ``rollout.engine_args`` names what cannot be set there.
            ModelError: vLLM does not cover the model.
            StartError: vLLM did not start; says why.
        """
        self.version, self._read_adapter = 0 if loaded else -1, adapter
        self._incomplete: int | None = None  # version of weights that have not arrived whole
        self._vocabulary, self._stop_ids = embedding_rows(model) or 2**31, list(stop_token_ids)
        self._longest, self._decode = max_sequence_tokens, decode
        self._stop_texts = StopTexts(decode) if decode else None
        self._names = itertools.count()
        self._flights: dict[str, Flight] = {}
        self._holds: set[str] = set()
        self._control = asyncio.Lock()
        self._asleep: list[str] = []  # of its memory, in the order of waking
        self._can_sleep = engine_device(config).type == "cuda"
        self.broken: EngineError | None = None
        """Why it has ended; None: it has not, or nobody has asked it anything yet."""
        self._reader: asyncio.Task[None] | None = None
        with model_folder(config, model, loaded) as folder:
            arguments = engine_arguments(
                *(config, model, folder, loaded), max_sequence_tokens, max_concurrent_samples, spare_bytes
            )
            self._processes = Processes(arguments, engine_device(config), torch.get_num_threads())
        self._core = self._processes.core
        dtype = getattr(torch, config.model.compute_dtype)
        self._transfer = WeightTransfer(self._rpc, model, dtype, config.runtime.sync)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._transfer.shapes

    @property
    def about(self) -> str:
        """What samples, for people."""
        return f"vLLM {find_vllm().__version__}, weights by {self._transfer.kind}"

    def check(self, request: Request) -> None:
        check_request(
            request,
            vocabulary=self._vocabulary,
            max_sequence=self._longest,
            can_decode=self._decode is not None,
            stop_ids=self._stop_ids,
        )
        for problem in vllm_problems(request.sampling):
            raise EngineError(f"request {request.id}: {problem}")

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        return cast(AsyncIterator[Sample], self.stream(requests, drafts=False))

    async def stream(self, requests: Sequence[Request], *, drafts: bool = True) -> AsyncIterator[Sample | Draft]:
        for request in requests:
            self.check(request)
        self._require_weights()
        queue: asyncio.Queue[Event] = asyncio.Queue()
        flights = [
            Flight(f"{next(self._names)}", request, index, queue.put_nowait, drafts)
            for request in requests
            for index in range(len(request.seeds))
        ]
        expected = len(flights)
        self._flights |= {flight.name: flight for flight in flights}
        # in a task: the first may have come before the last is asked for
        submitting = asyncio.ensure_future(self._submit(flights))
        try:
            while expected:
                event = await queue.get()
                if isinstance(event, EngineError):
                    raise event
                expected -= not isinstance(event, Draft)
                if event is not None:
                    yield event
        finally:
            submitting.cancel()
            self._forget([flight for flight in flights if flight.name in self._flights])

    async def _submit(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            try:
                if flight.name in self._flights:  # otherwise it was cancelled meanwhile
                    asked = flight.asked(self._stop_ids, self._vocabulary, self._adapter)
                    await self._ask("add_request_async", asked)
            except Exception as error:
                what = f"request {flight.request.id}: vLLM does not take it: {describe(error)}"
                flight.deliver(error if isinstance(error, EngineError) else EngineError(what))
                return

    def _require_weights(self) -> None:
        """Raises EngineError: there are none to sample from."""
        if self.broken:
            raise self.broken
        if self._incomplete is not None:
            raise EngineError(f"the weights of version {self._incomplete} arrived in part; load them again")
        if self.version < 0:
            raise EngineError("the engine has no weights yet")
        if self._asleep:
            raise EngineError("the engine is asleep: wake() comes first")

    @property
    def _adapter(self) -> Any:
        from vllm.lora.request import LoRARequest

        folder = self._transfer.adapter or self._read_adapter
        return LoRARequest(*ADAPTER, str(folder)) if folder else None

    # -- what comes back -----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Take what vLLM samples, until it ends. However that comes, nobody is left waiting."""
        try:
            while True:
                outputs = await self._core.get_output_async()
                if isinstance(outputs, asyncio.Future):  # our own mark
                    outputs.set_result(None)
                    continue
                for output in outputs.outputs:
                    if (flight := self._flights.get(output.request_id)) is not None:
                        self._take(flight, output)
                await asyncio.sleep(0)  # streams hear of these before the next are taken: a full queue is no wait
        except asyncio.CancelledError:
            self.broken = self.broken or EngineError("the engine was closed")
        except Exception as error:
            words = self._processes.last_words(describe(error))
            hint = "; where memory was short, a lower rollout.cache_gib or rollout.max_concurrent_samples helps"
            self.broken = StartError(f"vLLM ended: {words}{hint}")
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.deliver(self.broken)

    def _take(self, flight: Flight, output: Any) -> None:
        try:
            end = flight.take(output, self.version, self._stop_ids, self._stop_texts)
        except Exception as error:  # of the tokenizer's, where it looks for stop texts
            end = EngineError(f"request {flight.request.id}: what vLLM sampled cannot be read: {describe(error)}")
        if end is None:
            flight.tell()
            return
        if output.finish_reason is None:
            self._forget([flight])
        else:
            del self._flights[flight.name]
        flight.deliver(end)

    def _forget(self, flights: Sequence[Flight]) -> None:
        """Have vLLM forget them, too, without waiting for it."""
        for flight in flights:
            del self._flights[flight.name]
        if flights and not self.broken:
            task = asyncio.ensure_future(self._core.abort_requests_async([flight.name for flight in flights]))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def cancel(self, request_ids: Collection[int]) -> list[Draft]:
        await self._settled()
        gone = [flight for flight in self._flights.values() if flight.request.id in request_ids]
        self._forget(gone)
        for flight in gone:
            flight.deliver(None)
        return [flight.draft() for flight in gone if flight.ids]

    # -- holding it ----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        async with self._control:
            await self._hold("paused")

    async def resume(self) -> None:
        async with self._control:
            await self._release("paused")

    async def _hold(self, why: str) -> None:
        """From now on nothing is sampled, and all that was has been taken. Asked for each time, as the one before may
        have been cancelled halfway."""
        self._holds.add(why)
        await self._ask("pause_scheduler_async", "keep", False)
        await self._settled()

    async def _release(self, why: str) -> None:
        if self._holds == {why}:
            await self._ask("resume_scheduler_async")
        self._holds.discard(why)

    async def _settled(self) -> None:
        """All that has come from vLLM so far has been taken."""
        reader = self._start_reading()
        mark = asyncio.get_running_loop().create_future()
        self._core.outputs_queue.put_nowait(mark)
        await self._unless_broken(mark, reader)

    async def begin(self, version: int) -> None:
        async with self._control:
            if version < self.version:
                raise EngineError(f"weights: version {version} was given after version {self.version}")
            self._incomplete = version
            await self._hold("weights")
            await self._wake(("weights",))  # the cache follows once they are there
            await self._transfer.begin(version)

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        async with self._control:
            if bucket:
                await self._transfer.put(bucket)

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        async with self._control:
            if self._incomplete is None:
                raise EngineError("weights: a commit without a begin")
            await self._transfer.commit(fingerprint)
            # the samples in flight, too, are read in again by the new weights
            await self._ask("reset_prefix_cache_async", True, False)
            self.version, self._incomplete = self._incomplete, None
            await self._release("weights")

    async def sleep(self) -> None:
        async with self._control:
            if self._asleep:
                return
            if self._flights:
                raise EngineError("cannot sleep while requests are in flight")
            if self._can_sleep:
                await self._ask("sleep_async", 1, "keep")  # 1: the weights move to the host's memory, and are not lost
            else:
                await self._ask("reset_prefix_cache_async", False, False)
            self._asleep = ["weights", "kv_cache"]

    async def wake(self) -> None:
        async with self._control:
            await self._wake(tuple(self._asleep))

    async def _wake(self, parts: Sequence[str]) -> None:
        for part in parts:
            if part in self._asleep:
                if self._can_sleep:
                    torch.cuda.empty_cache()  # the learner holds on to what it has let go of, and vLLM needs it
                    await self._ask("wake_up_async", [part])
                    if self._holds:  # vLLM goes on when it wakes
                        await self._ask("pause_scheduler_async", "keep", False)
                self._asleep.remove(part)

    # -- the processes -------------------------------------------------------------------------------------------------

    async def _rpc(self, method: str, args: Sequence[Any]) -> Any:
        """What ``method`` of each worker returns, as a list."""
        return await self._ask("collective_rpc_async", method, None, tuple(args), None)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Raises EngineError: vLLM failed at it, or has ended."""
        reader = self._start_reading()
        call = asyncio.ensure_future(getattr(self._core, method)(*args))
        try:
            return await self._unless_broken(call, reader)
        except EngineError:
            raise
        except Exception as error:
            await asyncio.wait({reader}, timeout=2.0)  # where a process has died, the reader is told why
            if self.broken:
                raise self.broken from None
            raise EngineError(f"vLLM: {method.removesuffix('_async')}: {type(error).__name__}: {error}") from error

    async def _unless_broken(self, work: asyncio.Future[Any], reader: asyncio.Task[None]) -> Any:
        try:
            await asyncio.wait({work, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
        if work.cancelled():
            raise self.broken or EngineError("the engine was closed")
        return work.result()

    def _start_reading(self) -> asyncio.Task[None]:
        if self.broken:
            raise self.broken
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read(), name="dapo-vllm")
        return self._reader

    async def close(self) -> None:
        self.broken = self.broken or EngineError("the engine was closed")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        with contextlib.suppress(Exception):
            await self._transfer.close()
        await asyncio.to_thread(self._processes.close)
