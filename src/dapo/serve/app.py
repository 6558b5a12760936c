"""The policy server as an application: OpenAI's completions and chat completions, answered by a served model.

Consumes requests (``protocol.py``), produces replies in whole or as server-sent events. Waits for the engine only. A
client that goes away frees what its request held; one that reads slowly gets larger pieces. Ends as the reward server
does: what runs is finished within a bounded time, and new requests are answered with 503.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dapo.errors import RewardError, UserError
from dapo.inference.stream import Part
from dapo.ranking import endpoints
from dapo.ranking.endpoints import Rankers
from dapo.rollout.engine import EngineError
from dapo.serve import live, weights
from dapo.serve.best_of import choose, ranker_of
from dapo.serve.door import Refused, Restarted
from dapo.serve.live import Journal
from dapo.serve.model import Job, Limits, ServedModel
from dapo.serve.protocol import ChatRequest, CompletionRequest, Reply, SamplingRequest, error_body
from dapo.util.asynchronous import in_thread
from dapo.util.gate import Room, WorkGate, add_reports, place_in_body, unless_gone
from dapo.util.serving import Address, Progress, run_service
from dapo.util.version import VERSION

_ASKED: dict[str, type[SamplingRequest]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
_WORK = (*_ASKED, *weights.PATHS, *endpoints.PATHS)
_SHORT = 2**13  # bytes of a body: its texts are read in less time than a thread takes to get the lock
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_READERS = ThreadPoolExecutor(2, "dapo-texts")  # large texts take no thread that others wait for
_Numbered = tuple[int, Part]
_log = logging.getLogger(__name__)


class Service(Progress):
    """What is served, once it is loaded, and what was counted."""

    def __init__(
        self,
        limits: Limits,
        token: str | None = None,
        served: ServedModel | None = None,
        rankers: Rankers | None = None,
    ) -> None:
        super().__init__()
        self.limits, self.token, self.loaded, self.rankers = limits, token, served, rankers or Rankers({})
        self.room = Room(limits.max_waiting, "candidates")  # of all requests that rank; those of best_of from the start
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("dapo_policy_requests", "Requests answered", ["path", "code"], registry=registry)
        self.tokens = Counter("dapo_policy_tokens", "Tokens of prompts and responses", ["kind"], registry=registry)
        self.first = Histogram("dapo_policy_first_seconds", "To the first part", buckets=_BUCKETS, registry=registry)
        self.seconds = Histogram("dapo_policy_seconds", "Of a whole request", buckets=_BUCKETS, registry=registry)
        waiting = Gauge("dapo_policy_waiting", "Samples that wait or are written", registry=registry)
        waiting.set_function(lambda: self.loaded.room.waiting if self.loaded else 0)
        version = Gauge("dapo_policy_version", "Policy version of the weights in use", registry=registry)
        version.set_function(lambda: self.loaded.doors[self.loaded.name].version if self.loaded else 0)

    @property
    def served(self) -> ServedModel:
        """To be asked for by requests that the gate lets pass: it is loaded by then."""
        assert self.loaded is not None
        return self.loaded


class _Events(StreamingResponse):
    """Server-sent events. However it ends, so does what makes them."""

    def __init__(self, events: AsyncGenerator[str], headers: Mapping[str, str]) -> None:
        super().__init__(events, 200, {"Cache-Control": "no-cache", **headers}, "text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def create_app(service: Service, weights_dir: Path | None = None, journal: Journal | None = None) -> ASGIApp:
    app = FastAPI(title="dapo policy server", version=VERSION, docs_url=None, redoc_url=None)

    app.include_router(weights.router(lambda: service.served, service.token, weights_dir))
    app.include_router(endpoints.router(lambda: service.rankers, service.limits.max_waiting, service.room))
    _add_models(app, service)
    if journal is not None:
        app.include_router(live.router(journal))
    add_reports(app, service, service.registry, lambda: service.loaded.refusal if service.loaded else None)
    for kind in (RequestValidationError, HTTPException, Refused, EngineError, UserError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _told)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        """Samples are asked for often: these requests go past FastAPI, whose layers would cost as much as the rest."""
        if scope.get("path") not in _ASKED:
            await app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await _answer(service, request, journal)
        except Exception as error:
            response = await _told(request, error)
        await response(scope, receive, send)

    count = service.requests.labels
    return WorkGate(
        answer,
        service.token,
        service.limits.max_body,
        service,
        _WORK.__contains__,
        lambda status, text, headers: JSONResponse(error_body(status, text), status, headers),
        lambda *of: count(*of).inc(),
        lambda path: weights.largest_body(service.loaded, path),
    )


async def _read(request: Request) -> tuple[SamplingRequest, int]:
    """What is asked for, and its bytes. Raises ValidationError: it is wrong."""
    if request.method != "POST":
        raise HTTPException(405, "Method Not Allowed", {"Allow": "POST"})
    kind, content = request.headers.get("content-type", "").partition(";")[0].strip().lower(), await request.body()
    if kind != "application/json":  # a form of a page elsewhere could be sent as any text
        raise Refused(400, f"body: its type is {kind or 'not given'}; it has to be application/json")
    return _ASKED[request.scope["path"]].model_validate_json(content), len(content)


async def _answer(service: Service, request: Request, journal: Journal | None) -> Response:
    started, served = time.perf_counter(), service.served
    body, size = await _read(request)
    chooser = ranker_of(body, service.rankers)
    with served.reserved(body.model, body.each * len(body.given)):
        # long texts are read in a thread: others are answered meanwhile
        job = body.job(served) if size < _SHORT else await in_thread(body.job, served, pool=_READERS)
    reply = Reply(body, job, served)

    def count() -> None:
        service.seconds.observe(time.perf_counter() - started)
        service.tokens.labels("prompt").inc(job.prompt_tokens)
        service.tokens.labels("response").inc(reply.completion_tokens)

    async def keep() -> None:  # before the answer ends: feedback on it stands behind it, and a kill does not lose it
        if journal is not None and (entry := _entry(body, reply)):
            try:
                await in_thread(journal.add, entry)  # as it waits for the disk
            except HTTPException as error:  # the answer is none the worse for it
                _log.warning("%s", error.detail)

    with service.room.taken(0 if chooser is None else body.each * len(body.given)):
        told, parts = await unless_gone(request, _begun(served, job, body.stream))  # what is refused has its status
        if body.stream:
            service.first.observe(time.perf_counter() - started)
            headers = {"version": str(max(told[0][1].versions, default=0))}
            return _Events(_events(reply, told[0], parts, keep, count), headers)
        if chooser is None:
            whole = reply.whole(told)
        else:
            whole = await unless_gone(request, choose(chooser, body, served, told, reply))
    await keep()
    count()
    return JSONResponse(whole, headers={"version": str(reply.version)})


def _entry(body: SamplingRequest, reply: Reply) -> dict[str, Any] | None:
    """Prompt, id and first response of a request; None: no consent, no whole answer, or several prompts."""
    prompt: Any = body.messages if isinstance(body, ChatRequest) else getattr(body, "prompt", None)
    consents = isinstance(body.metadata, dict) and body.metadata.get("consent") == live.CONSENT
    if (
        not consents
        or (body.stream and not reply.ended)
        or not (isinstance(prompt, str) or isinstance(body, ChatRequest))
    ):
        return None
    return {"id": reply.id, "prompt": prompt, "response": reply.first}


async def _begun(served: ServedModel, job: Job, stream: bool) -> tuple[list[_Numbered], AsyncGenerator[_Numbered]]:
    """The first part, or all of them unless they are streamed, and where the others come from."""
    while True:
        with suppress(Restarted):
            parts = served.submit(job)
            return [await anext(parts)] if stream else [part async for part in parts], parts


async def _events(
    reply: Reply,
    first: _Numbered | None,
    parts: AsyncGenerator[_Numbered],
    keep: Callable[[], Awaitable[None]],
    count: Callable[[], None],
) -> AsyncGenerator[str]:
    try:
        async with aclosing(parts):
            while first is not None:
                told = [reply.chunk(*first), reply.last_chunk()]
                # the end comes in one piece, as each takes a call of the system
                event = "".join(_event(chunk) for chunk in told if chunk) + "data: [DONE]\n\n" * reply.ended
                if reply.ended:
                    await keep()
                if event:
                    yield event
                first = await anext(parts, None)
    except Exception as error:  # the status is sent; clients read this as an error
        yield _event(_body_of(error)[1])
    finally:
        count()


def _event(content: dict[str, Any]) -> str:
    # in ASCII: some clients take other characters, such as U+2028, for line ends
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def _add_models(app: FastAPI, service: Service) -> None:
    def models() -> dict[str, dict[str, Any]]:
        served = service.loaded
        if served is None:
            return {}
        about = {"object": "model", "owned_by": "dapo", "created": 0, "max_model_len": served.context}
        return {
            name: {"id": name, **about, "version": door.version}
            | {"parent": None if name == served.name else served.name}
            for name, door in served.doors.items()
        }

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": list(models().values())}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        if (found := models().get(name)) is None:
            raise Refused(404, f"model {name!r}: not served here", "model", "model_not_found")
        return found


async def _told(_: Request, error: Exception) -> Response:
    """The answer to a request that ended with an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it; it is what the metrics count it as
    status, body = _body_of(error)
    later = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(body, status, {**later, **(getattr(error, "headers", None) or {})})


def _body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    match error:
        case RequestValidationError() | ValidationError():
            problem = error.errors()[0]
            where = problem["loc"][isinstance(error, RequestValidationError) :]  # FastAPI puts "body" before it
            param = next((part for part in where[:1] if isinstance(part, str)), None)
            return 400, error_body(400, f"{place_in_body(('body', *where)) or 'body'}: {problem['msg']}", param)
        case HTTPException():
            return error.status_code, error_body(error.status_code, str(error.detail))
        case Refused():
            return error.status, error_body(error.status, str(error), error.param, error.code)
        case RewardError():
            return 503, error_body(503, f"the ranker could not score this: {error}")
        case EngineError() | UserError():
            return 503, error_body(503, f"the engine could not serve this: {error}")
        case _:
            _log.error("a request failed", exc_info=error)
            return 500, error_body(500, f"a fault of the server's: {type(error).__name__}: {error}")


async def serve(
    load: Callable[[], ServedModel],
    address: Address,
    limits: Limits,
    *,
    drain_s: float,
    say: Callable[[str], object],
    weights_dir: Path | None = None,
    journal: Journal | None = None,
    rankers: Rankers | None = None,
) -> None:
    """Serve what ``load`` returns, called in a thread, until a signal comes. ``drain_s``: longest time for running
    requests to finish. Raises ConfigError: the address cannot be listened on; UserError: what ``load`` raises, or an
    engine has ended."""
    # each launch lets the interpreter go, and while the event loop is at work, the engine's thread waits so long for it
    sys.setswitchinterval(1e-4)
    service = Service(limits, address.token, rankers=rankers)

    async def start() -> None:
        service.loaded = served = await asyncio.to_thread(load)
        for engine in (engine for door in served.doors.values() for engine in door.engines):
            await engine.cancel(())  # from now on it is heard if the engine ends
        served.prompting.template.decode(())  # reads the vocabulary, which would hold up the first answer
        for name, ranker in service.rankers.items():
            say(f"loading the ranker {name}")
            await ranker.start()
        gc.freeze()  # what is loaded stays: looking through it again and again takes 0.1 s each time
        say(f"serving {', '.join(served.doors)}, up to {served.context} tokens a sample")

    why: list[str] = []

    async def until() -> None:  # whoever has started the server may start it again
        while not why:
            await asyncio.sleep(1)
            why.extend(filter(None, [service.served.ended]))
        service.served.turn_away(why[0])

    async def close() -> None:
        for ranker in service.rankers.values():
            await ranker.close()
        if service.loaded is not None:
            for problem in await service.loaded.close():
                say(problem)
        elif service.state == "draining":  # a signal came, and no thread that loads can be told
            os._exit(0)

    how: dict[str, Any] = {"starting": "loading the model", "ready": "{}/v1 (also /health, /ready, /metrics)"}
    how |= {"until": until, "drain_s": drain_s, "say": say}
    await run_service(create_app(service, weights_dir, journal), address, service, start, close, **how)
    if why:
        raise UserError(why[0])
