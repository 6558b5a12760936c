"""The rollout engine behind HTTP: ``dapo serve``, and to evaluate any server that speaks OpenAI's completions API.

Consumes requests, produces samples and hands on weights. Waits for the server, within bounds: a request that fails is
made again, with the same seeds, for ``rollout.give_up_after_s``; a reply counts as a whole or not at all, so nothing
comes twice. Replies are not trusted. A server's versions never fall, so a run that begins anew has an offset to them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import numpy as np
from pydantic import BaseModel, ValidationError

from dapo.config import Config
from dapo.config.request_template import ASKED
from dapo.errors import UserError
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request, Sampling, fault_of
from dapo.util.asynchronous import in_thread
from dapo.util.http.connections import HttpConnections, checked, token_in, whole
from dapo.util.http.faults import BadReply, Fault, Pauses, Refusal, from_json, one_line
from dapo.util.http.mapping import filled, pick
from dapo.util.http.mapping import shown as told
from dapo.util.http.secrecy import Secrets, shown

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_LARGEST_REPLY = 2**28
LOOK_S, SILENT_S = 10.0, 60.0
"""While an answer is waited for: after how long without a sign of life a server is asked for one, and is given up."""


class RemoteError(EngineError, UserError):
    """A server is gone, refuses, or breaks the contract; the message names its address."""


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"]
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    versions: list[int] | None = None


class _Reply(BaseModel):
    choices: list[_Choice]
    update: Any = None


class OpenAIEngine:
    """Samples on the server at ``rollout.url``."""

    def __init__(
        self, config: Config, vocabulary: int | None, stop_ids: Sequence[int] = (), tokenizer: Any = None
    ) -> None:
        """
        Args:
            vocabulary: how many token ids there are; None: not known.
            stop_ids: end a response, beside those that the server knows of its model; (): not known.
            tokenizer: of the model, to evaluate: servers may give text alone; None: to train.

        Raises RemoteError: the environment variable of the token is not set.
        """
        self._config, rollout = config, config.rollout
        self._rollout = rollout
        self._vocabulary, self._stop_ids = vocabulary or 2**31, list(stop_ids)
        self._tokenizer, self._training = tokenizer, tokenizer is None
        token = token_in(rollout.token_env, "rollout.token_env", RemoteError)
        self._blanked = Secrets(token, "").blanked
        url = rollout.url or ""
        self._url = url if rollout.request else url.rstrip("/").removesuffix("/v1")
        self._sampling, self._control = (
            HttpConnections(token, rollout.max_concurrent_samples),
            HttpConnections(token, 2),
        )
        self._model, self._ours = "", False  # as the server calls it; a `dapo serve` takes a seed for each sample
        self._longest, self._served = 2**60, 0  # tokens that it takes; the version that it had at first
        self._offset: int | None = None  # of its versions to the run's, if it has weights of the run
        self._heard = self._looked = 0.0  # when it showed a sign of life, and was asked for one
        self._slots: asyncio.Semaphore | None = None  # of requests at once
        self.version = self._coming = -1  # the server has none of ours yet
        self._updates, self._committed, self._told = [""], asyncio.Event(), False  # names of all that were begun
        self._running: dict[asyncio.Task[list[Sample]], int] = {}

    async def start(self, prompt_ids: Sequence[int], longest: int) -> None:
        """Try all that training needs of the server but new weights. ``longest``: tokens of prompt and response.
        Raises RemoteError: what is missing."""
        if self._rollout.request is not None:
            raise RemoteError("rollout.request: the server takes no weights; it can be evaluated, not trained through")
        await self._name()
        if self._longest < longest:
            text = f"takes {self._longest} tokens, but prompt and response may have {longest}"
            raise RemoteError(f"policy server {shown(self._url)}: {text}")
        try:
            state = await self._call(f"GET /weights?model={quote(self._model)}")
        except RemoteError as error:
            text = "no run can train through a server that takes no weights; it can be evaluated"
            raise RemoteError(f"{error}; {text}") from None
        from dapo.model.adapters import find_adapter

        theirs, ours = state.get("adapter_rank"), self._config.model.lora.rank
        if theirs not in (None, ours) and not find_adapter(self._config.model.path):
            has, trains = (f"an adapter (rank {rank})" if rank else "no adapter" for rank in (theirs, ours))
            text = f"its model has {has}, and the run trains {trains}: use model.lora.rank={theirs}"
            raise RemoteError(f"policy server {shown(self._url)}: {text}")
        if state.get("reason") is None:  # otherwise it waits for weights, such as those of the run
            await self._ask(Request(0, tuple(prompt_ids), (0,), Sampling(1.0, 1)), [0])

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Sample]:
        await self._name()
        ours, counts = self._ours, [range(len(r.seeds)) for r in requests]
        if self._slots is None:
            settings = self._rollout if self._training else self._config.evaluation
            at_once = self._rollout.max_concurrent_samples // (settings.samples_per_prompt if ours else 1)
            self._slots = asyncio.Semaphore(max(1, at_once))
        tasks = {
            asyncio.create_task(self._sampled(request, places, self._slots)): request.id
            for request, every in zip(requests, counts, strict=True)
            for places in ([every] if ours else [[place] for place in every])
        }
        self._running |= tasks
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    found = await finished
                except asyncio.CancelledError:
                    if (me := asyncio.current_task()) is not None and me.cancelling():
                        raise
                    continue  # by request
                for sample in found:
                    yield sample
        finally:
            for task in tasks:
                del self._running[task]
                task.cancel()  # which closes its connection, and so ends its samples
            await asyncio.gather(*tasks, return_exceptions=True)

    stream = generate  # drafts would cost a message for each token

    async def cancel(self, request_ids: Collection[int]) -> list[Draft]:
        """Has them end at once only if ``rollout.in_flight`` is ``restart``; otherwise they come to their end, as what
        they have so far is not known here."""
        for task, number in self._running.items():
            if number in request_ids and self._rollout.in_flight == "restart":
                task.cancel()
        return []

    async def pause(self) -> None:
        raise EngineError("a server is not paused: it may have others to serve")

    async def resume(self) -> None:
        """Nothing, as it never paused."""

    async def _sampled(self, request: Request, places: Sequence[int], slots: asyncio.Semaphore) -> list[Sample]:
        async with slots:
            found = await self._ask(request, places)
            if self._coming > self.version and any(sample.versions[-1] > self.version for sample in found):
                await self._committed.wait()  # the server was faster than its word that it has the weights
            return found

    async def _ask(self, request: Request, places: Sequence[int]) -> list[Sample]:
        sampling, seeds, since = request.sampling, [request.seeds[place] for place in places], self.version
        if sampling.top_logprobs or request.drafts:
            raise EngineError("rollout.engine=openai neither reports the most likely tokens nor continues samples")
        if (template := self._rollout.request) is not None:
            return await self._ask_for_text(template, request, places[0])
        await self._name()
        maybe = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop": list(sampling.stop)}
        maybe |= {"stop_token_ids": self._stop_ids}
        ours = {"seeds": seeds, "return_tokens_as_token_ids": True}  # which spares it to decode each token
        body: dict[str, Any] = {
            **{"model": self._model, "prompt": list(request.prompt_ids), "n": len(seeds)},
            **{"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p},
            **{"logprobs": 0, "return_token_ids": True},
            **(ours if self._ours else {"seed": seeds[0] % 2**63}),  # others' are signed
            **{name: value for name, value in maybe.items() if value},
        }

        def take(reply: Any) -> list[Sample]:
            told = _Reply.model_validate(reply)
            choices = sorted(told.choices, key=lambda choice: choice.index)
            if [choice.index for choice in choices] != list(range(len(places))):
                raise BadReply(f"choices {[choice.index for choice in choices]} came for {len(places)} samples")
            if self._offset is not None and told.update not in self._updates:
                raise BadReply("its weights are not of this run: it was started again, or others give it weights, too")
            return [self._sample(request, *both, since) for both in zip(places, choices, strict=True)]

        found: list[Sample] = await self._call("POST /v1/completions", body, take)
        return found

    async def _ask_for_text(self, template: dict[str, Any], request: Request, place: int) -> list[Sample]:
        sampling, prompt = request.sampling, self._tokenizer.decode(request.prompt_ids)
        known = asdict(sampling) | {"prompt": prompt, "seed": request.seeds[place] % 2**63, "stop": list(sampling.stop)}

        def take(reply: Any) -> list[Sample]:
            if not isinstance(text := pick(reply, self._rollout.text, "rollout.text"), str):
                raise BadReply(f"text was expected (rollout.text={self._rollout.text}), got {told(text)}")
            return [self._sample(request, place, _Choice(index=0, finish_reason="stop", text=text), self.version)]

        body = filled(template, ASKED, [lambda found: known[found[0][1:]]])
        found: list[Sample] = await self._call("POST ", body, take)
        return found

    async def _name(self) -> None:
        if not self._model and self._rollout.request is None:
            await self._call("GET /v1/models", take=self._find)

    def _find(self, reply: Any) -> None:
        """Raises BadReply: it has not the model, or it is not known which."""
        models = {str(one["id"]): one for one in reply["data"]}
        if not models:
            raise Fault("it serves no model yet")
        name = self._rollout.model or (next(iter(models)) if len(models) == 1 else "")
        if name not in models:
            raise BadReply(f"rollout.model: is {name or 'not given'}; its models are {', '.join(models) or 'none'}")
        self._model, self._ours = name, models[name].get("owned_by") == "dapo"
        self._longest = models[name].get("max_model_len") or self._longest
        self._served = models[name].get("version") or 0

    def _sample(self, request: Request, place: int, choice: _Choice, since: int) -> Sample:
        """Raises BadReply: it is not what was asked for, or lacks what training needs."""
        sampling, reason, ids = request.sampling, choice.finish_reason, choice.token_ids
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        versions = [version - (self._offset or 0) for version in choice.versions or ()]
        if self._training:
            needed = {"token ids (token_ids)": ids, "log-probabilities (logprobs)": logprobs, "versions": versions}
            if lacking := [name for name, column in needed.items() if not column]:
                raise BadReply(f"it gives no {' and no '.join(lacking)}; it can be evaluated, but not trained through")
        if ids is None:
            # not every service is told of these limits, or keeps to them
            ends = [place + len(one) for one in sampling.stop if (place := choice.text.find(one)) >= 0]
            every = self._tokenizer.encode(choice.text[: min(ends, default=None)], add_special_tokens=False)
            ids, logprobs = every[: sampling.max_tokens], None
            reason = "length" if len(every) > len(ids) else "stop" if ends else reason
        elif len(ids) > sampling.max_tokens or (reason == "length" and len(ids) < sampling.max_tokens):
            raise BadReply(f"a response of {len(ids)} tokens came ({reason}), where {sampling.max_tokens} may be")
        if any(len(column) != len(ids) for column in (logprobs, versions) if column):
            many = f"{len(ids)} token ids, {len(logprobs or ())} log-probabilities and {len(versions)} versions"
            raise BadReply(f"{many} came")
        columns = np.array(ids, np.int32), np.array(logprobs or [0.0] * len(ids), np.float32)
        sample = Sample(request.id, place, *columns, np.array(versions or [0] * len(ids), np.int32), reason)
        if wrong := fault_of(sample, self._vocabulary):
            raise BadReply(f"{wrong}; is it another model?")
        if not self._training:
            if choice.token_ids and not _reads(choice.text, self._tokenizer.decode(ids)):
                raise BadReply("its text is not that of its token ids; has it another tokenizer?")
            return sample if logprobs else replace(sample, logprobs=np.full(len(ids), math.nan, np.float32))
        if reason == "stop" and self._stop_ids and not sampling.stop and ids[-1] not in self._stop_ids:
            raise BadReply(f"a response ends with token {ids[-1]}, which is no stop token of the run")
        newest = max(self.version, self._coming)
        if self._offset is not None and not since <= versions[0] <= versions[-1] <= newest:
            text = f"versions {versions[0]} to {versions[-1]} came where {since} to {newest} were expected"
            raise BadReply(f"{text}: the server was started again, or others give it weights, too")
        return sample

    async def begin(self, version: int) -> None:
        if version < self.version:
            raise EngineError(f"weights: version {version} was given after version {self.version}")
        if version != self._coming:  # otherwise it may be done, but for the word of it
            self._updates.append(uuid.uuid4().hex)
        self._coming = version
        self._committed.clear()
        await self._name()
        if self._offset is None:
            self._offset = max(0, self._served + 1 - version)
        in_flight = "keep" if self._rollout.in_flight == "auto" else self._rollout.in_flight
        said = {"update": self._updates[-1], "version": self._offset + version, "in_flight": in_flight}
        await self._call("POST /weights/begin", said | {"model": self._model})

    async def put(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        if bucket:
            await self._send("PUT /weights/bucket", dict(bucket))

    async def commit(self, fingerprint: Mapping[str, torch.Tensor]) -> None:
        await self._send("POST /weights/commit", fingerprint)
        self.version = self._coming
        self._committed.set()

    async def _send(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        body = await in_thread(_packed, tensors, self._config.model.compute_dtype)
        await self._call(f"{what}?update={self._updates[-1]}", body)

    async def sleep(self) -> None:
        """Nothing: the server has a memory of its own, and others to serve. So for :meth:`wake`."""

    wake = sleep

    async def close(self) -> None:
        await self._sampling.close()
        await self._control.close()

    async def _unless_silent(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What ``work`` comes to. Raises Fault: meanwhile the server shows no sign of life."""
        task, self._heard = asyncio.ensure_future(work), time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if (now := time.monotonic()) - max(self._heard, self._looked) >= LOOK_S:
                    self._looked = now
                    with suppress(TimeoutError, Fault):
                        async with asyncio.timeout(LOOK_S), self._control.send("GET", f"{self._url}/health"):
                            self._heard = time.monotonic()
                if time.monotonic() - self._heard >= SILENT_S:
                    raise Fault(f"no sign of life for {SILENT_S:g} s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _call(
        self, what: str, body: dict[str, Any] | bytes | None = None, take: Callable[[Any], Any] = lambda reply: reply
    ) -> Any:
        """What ``take`` makes of the reply to method and path. Raises RemoteError: it broke the contract, did not come
        within the limits, or asking again is no use."""
        name, (method, path) = f"policy server {shown(self._url)}", what.split(" ")
        connections = self._sampling if path in ("", "/v1/completions") else self._control
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        pauses, limit_s, patience_s = Pauses(0.1, 5.0), self._rollout.timeout_s, self._rollout.give_up_after_s
        failing_since: float | None = None

        async def send() -> Any:
            async with connections.send(method, self._url + path, sent, kind=kind) as got:
                self._heard = time.monotonic()
                await checked(got, name, "rollout", RemoteError)
                return from_json(await whole(got, _LARGEST_REPLY))

        while True:
            try:
                async with asyncio.timeout(limit_s):
                    taken, self._told = take(await self._unless_silent(send())), False
                return taken
            except TimeoutError:
                problem = f"no answer within {limit_s:g} s (rollout.timeout_s)"
            except (KeyError, TypeError, AttributeError, OverflowError, ValidationError) as error:
                problem = one_line(f"the reply to {method} {path} is not as it should be: {error}")
            except RemoteError as error:
                raise RemoteError(self._blanked(str(error))) from None
            except (BadReply, Refusal, RuntimeError) as error:  # the last one: the session is closed
                problem = str(error)
            except Fault as fault:
                failing_since = failing_since or time.monotonic()
                left_s = failing_since + patience_s - time.monotonic()
                if left_s > 0:
                    if not self._told:  # once per outage
                        _log.warning(self._blanked(f"{name}: {fault}; asking again for up to {patience_s:g} s"))
                    self._told = True
                    await asyncio.sleep(min(pauses.next(fault.pause_s), left_s))
                    continue
                problem = f"{fault}; it was tried for {patience_s:g} s (rollout.give_up_after_s)"
            raise RemoteError(self._blanked(f"{name}: {problem}"))


def _reads(text: str, whole: str) -> bool:
    """Whether ``text`` is ``whole``, but for spaces, characters that are cut, and what a server leaves out."""
    rest = iter(whole)
    return all(one in rest for one in text if not (one.isspace() or one == "\ufffd"))


def _packed(tensors: Mapping[str, torch.Tensor], dtype: str) -> bytes:
    """As safetensors; floating-point numbers in the ``dtype`` that is computed with."""
    import torch
    from safetensors.torch import save

    def there(tensor: torch.Tensor) -> torch.Tensor:
        wanted = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", wanted, copy=True).contiguous()

    return save({name: there(tensor) for name, tensor in tensors.items()})
