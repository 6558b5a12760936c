"""The page as an application: reads run folders and answers the browser. Writes nothing but the sample index and votes.

Consumes files of runs; produces JSON and the static page. Routes below ``/api/`` name runs as
:class:`~dapo.commands.ui.runs.Runs` does; those of samples are in ``samples.py``. How the process starts and ends is in
``serving.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlencode

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Scope

from dapo.commands.ui import comparison, curves, playground, queries, samples
from dapo.commands.ui.answering import Answerer
from dapo.commands.ui.runs import WHILE_THERE, Points, Refused, Run, RunAsked, Runs, run_named, stamps_of
from dapo.config import Config, flat
from dapo.config.reference import keys_in
from dapo.errors import UserError
from dapo.observe.index import open_database
from dapo.observe.metrics import METRICS
from dapo.observe.run_view import RunView
from dapo.observe.spans import read_spans
from dapo.util.files import plain
from dapo.util.gate import Gate
from dapo.util.version import VERSION

STATIC = Path(__file__).parent / "static"

_LAST = (
    *("reward/mean", "response_length/mean", "entropy", "accuracy", "tokens_per_second/total"),
    *("alarms/count", "monitor/alarms"),
)
"""Metrics of the list of runs."""
_SPEEDS = (*(f"tokens_per_second/{of}" for of in ("rollout", "update", "total")), "samples_per_second")
_IDLE = ("overlap/seconds", "idle/learner", "idle/engine")
_FINAL = ("eval/accuracy", "accuracy", "reward/mean", "response_length/mean", "entropy", "time/elapsed")

router = APIRouter(prefix="/api", dependencies=WHILE_THERE)


def create_app(folders: Sequence[Path], token: str | None = None) -> FastAPI:
    """The application.

    Args:
        folders: run folders, or folders that hold runs; nothing else is read.
        token: what a client must show; None: only this machine's own names are answered.
    """
    app = FastAPI(title="dapo", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.runs = Runs(folders)
    app.add_middleware(Guard, token=token)
    app.include_router(router)
    app.include_router(samples.router)
    app.include_router(comparison.router)
    playground.add_to(app, Answerer())

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    tell_errors(app)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def tell_errors(app: FastAPI) -> None:
    """Answer with ``error``, a text for people, where the request is at fault. Faults of ours are 500 and logged."""
    for kind in (UserError, Refused, RequestValidationError):
        app.add_exception_handler(kind, _told)


async def _told(_: Request, error: Exception) -> Response:
    text, status = str(error), 422
    if isinstance(error, Refused):
        status = error.status
    elif isinstance(error, RequestValidationError):  # without what was sent: JSON has no word for an infinite number
        text = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
    return JSONResponse({"error": text}, status)


# --- several runs -----------------------------------------------------------------------------------------------------


def _views(
    request: Request, names: Annotated[list[str], Query(alias="run", min_length=1, max_length=50)]
) -> dict[str, RunView]:
    return {name: run_named(request, name).view for name in names}


Views = Annotated[dict[str, RunView], Depends(_views)]  # the runs that are asked for, by name


@router.get("/runs")
def list_runs(request: Request) -> list[dict[str, Any]]:
    """All runs, the newest first; one that cannot be read says why."""
    return [_card(run) for run in request.app.state.runs.all()]


@router.get("/changes")
def list_changes(
    request: Request,
    names: Annotated[list[str], Query(alias="run", max_length=50)] = [],  # noqa: B006
) -> dict[str, Any]:
    """What is other than before once something is new: the runs that there are, and for each that is shown the marks of
    its files and its state; nothing of one that is being replaced. A page asks every second."""
    there = request.app.state.runs.all()
    return {"runs": sorted(run.name for run in there), "of": {r.name: _marks(r) for r in there if r.name in names}}


def _marks(run: Run) -> dict[str, Any]:
    folder = run.folder
    try:
        return {"metrics": stamps_of(folder.metrics), "samples": stamps_of(folder.samples), "state": run.view.state}
    except (UserError, OSError):
        return {}


@router.get("/metrics")
def list_metrics(views: Views) -> dict[str, Any]:
    """What the metrics are, which of them these runs have, which to show first, and which runs are of one experiment
    with other seeds."""
    have = curves.names_in([entry for view in views.values() for entry in view.metrics])
    return {
        "known": {m.name: {"unit": m.unit, "meaning": m.meaning} for m in METRICS.values()},
        "available": have,
        "headlines": [n for n in curves.HEADLINES if n in have],
        "experiments": _experiments(views),
        "seeds": {name: view.recipe.get("seed") for name, view in views.items()},
    }


@router.get("/curves")
def list_curves(
    views: Views,
    metrics: Annotated[list[str], Query(alias="metric", min_length=1, max_length=120)],
    points: Points = 400,
    x: Literal["step", "time/elapsed", "tokens"] = "step",
    together: bool = False,
) -> dict[str, dict[str, list[list[Any]]]]:
    """By run and metric the points of its curve; under ``changes`` where settings were changed.
    ``together``: by the first run of each experiment, of all its seeds."""
    entries = {name: _with_tokens(v.metrics) if x == "tokens" else v.metrics for name, v in views.items()}
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for first, *others in _experiments(views) if together else [[name] for name in views]:
        drawn = curves.curves(entries[first], metrics, points, x, [entries[name] for name in others])
        found[first] = drawn | {"changes": curves.marks(entries[first], views[first].changes, x)}
    return found


@router.get("/ablation")
def ablation(views: Views) -> dict[str, Any]:
    recipes = {name: dict(flat(view.recipe)) for name, view in views.items()}
    keys = [key for key in curves.differing(list(recipes.values())) if not key.startswith(curves.OF_THE_RUN)]
    rows = [
        {
            "run": name,
            "steps": view.steps_done,
            "config": {key: recipes[name].get(key) for key in keys},
            "final": {metric: curves.final(view.metrics, metric) for metric in _FINAL},
        }
        for name, view in views.items()
    ]
    return {"keys": keys, "metrics": list(_FINAL), "rows": rows}


@router.get("/config")
def config(views: Views) -> dict[str, Any]:
    """Every key of the recipes, which of them differ, and the defaults of each run (null: of another version)."""
    tables = [dict(flat(view.recipe)) for view in views.values()]
    return {
        "values": {key: [table.get(key) for table in tables] for table in tables for key in table},
        "differing": curves.differing(tables),
        "defaults": [_defaults(view) for view in views.values()],
    }


def _experiments(views: Mapping[str, RunView]) -> list[list[str]]:
    """The runs, those together that are the same but for the seed, of which each counts once."""
    sets: dict[tuple[str, int], dict[Any, str]] = {}
    for name, view in views.items():
        key, seed = curves.experiment(view.recipe, view.started_from, view.changes) or name, view.recipe.get("seed")
        number = next(k for k in range(len(views)) if seed not in sets.get((key, k), {}))
        sets.setdefault((key, number), {})[seed] = name
    return [list(runs.values()) for runs in sets.values()]


def _with_tokens(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With ``tokens``: generated so far."""
    total, found = 0.0, []
    for entry in entries:
        total += entry.get("tokens/generated") or 0.0
        found.append(entry | {"tokens": total})
    return found


def _defaults(view: RunView) -> dict[str, Any] | None:
    """What each key of the recipe has where nothing is said; required ones are left out. None: of another version."""
    try:
        recipe = view.settings()
    except UserError:
        return None
    found = {name: key.default for name, key in keys_in(recipe).items() if not key.required}
    if isinstance(recipe, Config):
        found["reward.kind"] = Config.model_fields["reward"].default.kind
    return dict(flat(plain(found)))


# --- one run ----------------------------------------------------------------------------------------------------------


@router.get("/time")
def seconds(run: RunAsked, points: Points = 240, step: int | None = None) -> dict[str, Any]:
    metrics = run.view.metrics
    return {
        "phases": curves.phases(metrics, points),
        "ages": curves.ages(metrics, points),
        "overlap": curves.overlap_told(metrics),
        "idle": curves.curves(metrics, _IDLE, points),
        "lanes": curves.lanes(read_spans(run.folder.spans, step)),
        "speeds": curves.curves(metrics, _SPEEDS, points),
        "memory": curves.curve(metrics, "memory/rss", points),
        "resources": _resources(run.folder.resources),
    }


def _resources(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with open_database() as connection, queries.thinned(path) as shorter:
        return queries.resources(connection, shorter)


@router.get("/alarms")
def alarms(run: RunAsked) -> dict[str, Any]:
    view = run.view
    try:
        raised, readable = list(view.alarms()), True
    except UserError:  # of another version
        raised, readable = [], False
    checked = any(entry.get("monitor/check") is not None for entry in view.metrics)
    return {
        "readable": readable,
        "alarms": [*curves.hacking_history(view.hacking, checked), *curves.alarm_history(view.metrics, raised)],
        "warnings": view.warnings(),
        "steps": view.steps_done,
    }


@router.get("/evaluation")
def evaluation(run: RunAsked) -> dict[str, Any]:
    view = run.view
    ended = view.state in ("finished", "stopped")  # else the summary is of an earlier part
    stopped = view.summary.get("stopped") if ended else None
    return {"evaluations": view.evaluated, "stopped": stopped, "best": view.best, "checkpoints": view.checkpoints}


def _card(run: Run) -> dict[str, Any]:
    named = {"name": run.name, "path": str(run.folder.root)}
    try:
        view = run.card
        before, after = view.accuracies
        last = view.metrics[-1] if view.metrics else {}
        return named | {
            "state": view.state,
            "status": view.why,
            "steps": view.steps_done,
            "planned": view.steps_planned,
            "budget": view.budget,
            "seconds": view.seconds,
            "left": _left(run) if view.state == "running" else None,
            "before": before,
            "after": after,
            "last": {name: last.get(name) for name in _LAST},
        }
    except (UserError, OSError) as error:  # one that is spoilt, or somebody else's, hides no other
        return named | {"state": "unreadable", "status": str(error)}


def _left(run: Run) -> dict[str, Any] | None:
    """As :func:`curves.time_left`, with ``since``: seconds since the last step."""
    view = run.view
    left = curves.time_left(view.metrics, view.steps_planned, dict(flat(view.config)).get("training.minutes"))
    return left and left | {"since": max(0.0, time.time() - run.folder.metrics.stat().st_mtime)}


# --- who may ask, and the headers of the answers ----------------------------------------------------------------------


_COOKIE = "dapo_token"
_HEADERS: Mapping[str, str] = {  # so that samples never run as script
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard(Gate):
    """Turns away who has not the token, or, where there is none, who does not ask for this machine by its name.

    The token comes as ``Authorization: Bearer``, as a cookie, or once in the address (``?token=``), which sets the
    cookie. What changes something is taken from this page only.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        super().__init__(app, token, 4 * 2**20)

    def begins(self, scope: Scope, message: Message) -> None:
        MutableHeaders(scope=message).update(_HEADERS)

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        origin = headers.get("origin") if scope["method"] not in ("GET", "HEAD") else None
        if origin and origin.partition("://")[2] != headers.get("host", ""):
            return _error(403, "this page takes changes from itself only")
        if self.announces_more(scope, headers):
            return _error(413, self.too_large(scope["path"]))
        if wrong := self.wrong_name(headers, "--token"):
            return _error(403, wrong)
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._token is not None and "token" in query:
            right = self.is_token(query["token"][0].encode())
            return self._welcome(scope, query) if right else _error(401, "a wrong token")
        if self._token is None or self.is_token(_given(headers).encode()):
            return None
        how = "open the address that dapo ui has printed, or send Authorization: Bearer"
        return _error(401, f"a token is needed: {how}")

    def _welcome(self, scope: Scope, query: dict[str, list[str]]) -> Response:
        """Keep the token in a cookie and out of the address, which people copy and servers log."""
        rest = urlencode({name: values for name, values in query.items() if name != "token"}, doseq=True)
        path = "/" + scope["path"].lstrip("/")  # two slashes in front would be another machine
        answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(_COOKIE, quote(query["token"][0], safe=""), httponly=True, samesite="strict")
        return answer


def _given(headers: Headers) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
    except CookieError:
        return ""
    return unquote(found.value) if found else ""


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
