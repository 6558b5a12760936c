"""The reward server as an application: HTTP requests in, the verdicts of one scorer out.

Consumes batches of items (``protocol.py``), produces one result for each: all together in order, or one by one as they
finish. Waits for the scorer only; what is more than can wait is turned away with 429. A signal drains: new requests are
answered with 503, running ones are finished within a bounded time. A second one ends the process and its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp

from dapo.config import RewardConfig
from dapo.config.secrets import BLANK, redact
from dapo.errors import RewardError
from dapo.records import Reward
from dapo.reward.batching import retrieve
from dapo.reward.build import make_scorer
from dapo.reward.contract import Doubt, Scorer
from dapo.reward.protocol import (
    NDJSON,
    DoubtfulRow,
    ErrorReply,
    ExamineReply,
    ExamineRequest,
    Item,
    Result,
    Row,
    ScoreReply,
    ScoreRequest,
)
from dapo.util.gate import Room, WorkGate, add_reports, disconnected, place_in_body, unless_gone
from dapo.util.serving import Address, Progress, run_service
from dapo.util.version import VERSION

_WORK = ("/score", "/examine", "/v1/rank", "/v1/filter")
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SHOWN_PROBLEMS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What is more is refused. ``max_waiting``: items and rows that wait or are at work; ``max_items``: of one request;
    ``max_body``: bytes of one request; ``max_text``: characters of one prompt, response or answer."""

    max_waiting: int = 4096
    max_items: int = 1024
    max_body: int = 16 * 2**20
    max_text: int = 1_000_000


class Service(Progress):
    """A scorer with what the server knows of it: whether it is ready, what waits, what was counted."""

    def __init__(self, scorer: Scorer, config: RewardConfig, limits: ServerLimits, token: str | None = None) -> None:
        super().__init__()
        self.scorer, self.config, self.limits, self.token = scorer, config, limits, token
        self.room = Room(limits.max_waiting, "items")  # also rows that are examined, and candidates that are ranked
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("dapo_reward_requests", "Requests answered", ["path", "code"], registry=registry)
        self._items = Counter("dapo_reward_items", "Items scored, failed ones counted", registry=registry)
        self._failures = Counter("dapo_reward_failures", "Items whose score failed", registry=registry)
        self._seconds = Histogram(
            "dapo_reward_seconds", "From the arrival of an item to its result", buckets=_BUCKETS, registry=registry
        )
        waiting = Gauge("dapo_reward_waiting", "Items that wait or are scored", registry=registry)
        waiting.set_function(lambda: self.room.waiting)

    def scores(self, items: Sequence[Item]) -> _Scores:
        """Begin to score. Raises HTTPException: 429, too much waits already."""
        self.room.take(len(items))
        return _Scores(self, items)

    async def doubts(self, rows: Sequence[Row], request: Request) -> Sequence[Doubt]:
        """What is wrong with ``rows``. Dropped when the client goes away.
        Raises HTTPException: 429, too much waits already; ClientDisconnect: it has gone."""
        prompts = [row.as_prompt(place) for place, row in enumerate(rows)]
        with self.room.taken(len(rows)):
            return await unless_gone(request, self.scorer.examine(prompts))

    async def score(self, index: int, item: Item) -> Result:
        """The result for one item. Raises RewardError: the reward broke its contract."""
        started = time.perf_counter()
        try:
            reward = await self.scorer.score(item.as_prompt(index), item.response, item.finish_reason)
            result = Result.of(index, item, reward)
        except RewardError:
            raise
        except Exception as error:  # a fault of the scorer's: this item has no verdict, others go on
            _log.exception("a score failed")
            reward = Reward(None, 0.0, error=f"{type(error).__name__}: {error}")
            result = Result.of(index, item, reward)
        self._items.inc()
        self._failures.inc(reward.error is not None)
        self._seconds.observe(time.perf_counter() - started)
        return result

    def check(self, name: str, rows: Sequence[Row]) -> None:
        """Raises HTTPException: 422, there are too many ``rows``, or one holds too long a text."""
        most, longest = self.limits.max_items, self.limits.max_text
        if len(rows) > most:
            raise HTTPException(422, f"{name}: {len(rows)} in one request; this server takes {most} (--max-items)")
        for place, row in enumerate(rows):
            for key in ("prompt", "response", "answer", "prompt_end"):
                length = len(getattr(row, key, None) or "")
                if length > longest:
                    text = f"{name}[{place}].{key}: {length} characters; this server takes {longest} (--max-text)"
                    raise HTTPException(422, text)

    def info(self) -> dict[str, Any]:
        config = redact(self.config.model_dump(mode="json"))
        return {"kind": config["kind"], "reward": _without_args(config), "version": VERSION}


class _Scores:
    """Of items that have taken their room; each gives its own back, whoever reads the results or goes away."""

    def __init__(self, service: Service, items: Sequence[Item]) -> None:
        self._service = service
        self._finished: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(service.score(index, item)) for index, item in enumerate(items)]
        for task in self._tasks:
            task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._service.room.give(1)
        retrieve(task)
        self._finished.put_nowait(task)

    async def results(self, request: Request) -> AsyncIterator[Result]:
        """As they finish. What is not begun when the client goes away is not done.
        Raises ClientDisconnect: it has gone; RewardError: the reward broke its contract."""
        gone: asyncio.Task[Any] = asyncio.create_task(disconnected(request))
        gone.add_done_callback(self._finished.put_nowait)
        try:
            for _ in self._tasks:
                task = await self._finished.get()
                if task is gone:
                    raise ClientDisconnect
                yield task.result()
        finally:
            for task in (gone, *self._tasks):
                task.cancel()


def create_app(service: Service, more: Callable[[Service], Any] | None = None) -> ASGIApp:
    """``more``: makes further routes."""
    app = FastAPI(title="dapo reward server", version=VERSION, docs_url=None, redoc_url=None)
    errors: dict[int | str, dict[str, Any]] = {code: {"model": ErrorReply} for code in (401, 413, 422, 429, 500, 503)}

    @app.post("/score", response_model=ScoreReply, responses=errors)
    async def score(body: ScoreRequest, request: Request, stream: bool = False) -> Response:
        """Score a batch. With `Accept: application/x-ndjson` or `?stream=true`: one result a line, as they finish."""
        service.check("items", body.items)
        scores = service.scores(body.items)
        if stream or NDJSON in request.headers.get("accept", ""):
            return StreamingResponse(_lines(scores, request), media_type=NDJSON)
        results = [result async for result in scores.results(request)]
        return _json(ScoreReply(results=sorted(results, key=lambda result: result.index)))

    @app.post("/examine", response_model=ExamineReply, responses=errors)
    async def examine(body: ExamineRequest, request: Request) -> Response:
        """Say what is wrong with rows of the data: answers that cannot be read, tests that are missing."""
        service.check("rows", body.rows)
        doubts = await service.doubts(body.rows, request)
        return _json(ExamineReply(doubts=[DoubtfulRow.of(doubt) for doubt in doubts]))

    if more is not None:
        app.include_router(more(service))
    add_reports(app, service, service.registry)

    @app.get("/info")
    async def info() -> dict[str, Any]:
        """What is served."""
        return service.info()

    for kind in (RequestValidationError, HTTPException, RewardError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _told)
    count = service.requests.labels
    return WorkGate(
        app, service.token, service.limits.max_body, service, _WORK.__contains__, _error, lambda *of: count(*of).inc()
    )


async def _told(_: Request, error: Exception) -> Response:
    """The answer to a request that ended with an error."""
    match error:
        case RequestValidationError():
            problems = [f"{place_in_body(problem['loc']) or 'body'}: {problem['msg']}" for problem in error.errors()]
            more = len(problems) - _SHOWN_PROBLEMS
            return _error(422, "; ".join(problems[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else ""))
        case HTTPException():
            return _error(error.status_code, str(error.detail), error.headers)
        case RewardError():
            return _error(500, str(error), retry=False)
        case ClientDisconnect():
            return Response(status_code=499)  # nobody reads it; it is what the metrics count it as
        case _:
            return _error(500, f"a fault of the server's: {type(error).__name__}: {error}", retry=True)


async def _lines(scores: _Scores, request: Request) -> AsyncIterator[str]:
    with contextlib.suppress(ClientDisconnect):
        try:
            async for result in scores.results(request):
                yield result.model_dump_json() + "\n"
        except RewardError as error:
            yield ErrorReply.of(str(error), retry=False).model_dump_json() + "\n"


def _json(message: ScoreReply | ExamineReply) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _error(
    code: int, text: str, headers: Mapping[str, str] | None = None, *, retry: bool | None = None
) -> JSONResponse:
    """Whether to ``retry`` is in the status, but for 500, which may be either."""
    later = code in (429, 503) if retry is None else retry
    return JSONResponse(ErrorReply.of(text, retry=later).model_dump(), code, headers)


def _without_args(config: Any) -> Any:
    """What a function is given may hold a secret under any name."""
    if isinstance(config, dict):
        return {key: BLANK if key == "args" and value else _without_args(value) for key, value in config.items()}
    return [_without_args(item) for item in config] if isinstance(config, list) else config


async def serve(
    config: RewardConfig,
    address: Address,
    limits: ServerLimits,
    *,
    drain_s: float,
    say: Callable[[str], object],
    more: Callable[[Service], Any] | None = None,
) -> None:
    """Serve until a signal comes. ``drain_s``: longest time for running requests to finish. ``more``: further routes.
    Raises ConfigError: the address cannot be listened on; RewardError: the reward cannot be started."""
    scorer = make_scorer(config)
    service = Service(scorer, config, limits, address.token)
    starting, ready = f"starting the reward ({config.kind})", "POST {}/score (also /ready, /metrics, /info)"
    work = create_app(service, more), address, service, scorer.start, scorer.close
    await run_service(*work, drain_s=drain_s, say=say, starting=starting, ready=ready)
