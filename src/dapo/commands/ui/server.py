"""The page as an application: reads run folders and answers the browser. Writes nothing but the sample index
and votes.

Consumes files of runs; produces JSON, server-sent events and the static page. Every route below ``/api/`` names runs as
:class:`~dapo.commands.ui.runs.Runs` does. How the process starts and ends is in ``serving.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from dapo.commands.ui import curves, playground, queries, votes
from dapo.commands.ui.alarm_history import alarm_history, hacking_history, readable_recipe
from dapo.commands.ui.answering import Answerer
from dapo.commands.ui.live import PERIOD, Full, Live, LiveResponse
from dapo.commands.ui.queries import Whole
from dapo.commands.ui.runs import NotHere, Run, Runs
from dapo.commands.ui.search import search
from dapo.commands.ui.serving import Guard
from dapo.commands.ui.texts import sendable, summary_of, tokens_of
from dapo.commands.ui.thinned import thinned
from dapo.config import Config, flat
from dapo.config.reference import keys_in
from dapo.errors import UserError
from dapo.observe.index import open_database
from dapo.observe.metrics import METRICS
from dapo.observe.run_view import OUTCOMES, RunView
from dapo.observe.sample_rows import read_line
from dapo.observe.samples import STATUSES
from dapo.util.files import plain
from dapo.util.version import VERSION

STATIC = Path(__file__).parent / "static"

MOST_TOKENS = 25_000
"""Whose numbers are in one answer: a megabyte of JSON. A response of the paper's 20,480 fits."""
BEGINNING = 2_000
"""Characters of a response that is not shown whole."""

_LAST = (
    *("reward/mean", "response_length/mean", "entropy", "accuracy", "tokens_per_second/total"),
    *("alarms/count", "monitor/alarms"),
)
_SAMPLING = (
    *("groups/all_wrong", "groups/mixed", "groups/all_right", "groups/flat", "groups/drawn", "groups/kept"),
    *("groups/keep_rate", "groups/rounds", "tokens/generated", "tokens/wasted", "tokens/filtered"),
)
_HACKING = (
    *("monitor/reward", "monitor/check", "monitor/false_right", "monitor/length_correlation"),
    *("reward/mean", "response_length/mean"),
)
_SPEEDS = (*(f"tokens_per_second/{of}" for of in ("rollout", "update", "total")), "samples_per_second")
"""Metrics of the list of runs, and of the views that have some of their own."""

Names = Annotated[list[str], Query(alias="run", min_length=1, max_length=50)]
Name = Annotated[str, Query(alias="run")]
Text = Annotated[str, Query(min_length=1, max_length=200)]
Points = Annotated[int, Query(ge=10, le=5000)]


def create_app(folders: Sequence[Path], token: str | None = None, period: float = PERIOD) -> FastAPI:
    """The application.

    Args:
        folders: run folders, or folders that hold runs; nothing else is read.
        token: what a client must show; None: only this machine's own names are answered.
        period: seconds between two looks at the files for what is new.
    """
    app = FastAPI(title="dapo", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    runs, closing = Runs(folders), threading.Event()
    app.state.closing = closing
    following = Live(runs, closing, period)
    app.add_middleware(Guard, token=token)
    app.include_router(_overview(runs), prefix="/api")
    app.include_router(_samples(runs), prefix="/api")
    app.include_router(_details(runs), prefix="/api")
    answerer = Answerer()
    for module in (playground, votes):
        app.include_router(module.router(lambda name: runs.get(name).folder.root, answerer), prefix="/api")

    @app.get("/api/events")
    async def live(run: Annotated[list[str], Query(max_length=50)] = []) -> Response:  # noqa: B006
        try:
            return LiveResponse(following, run)
        except Full as full:
            return JSONResponse({"error": str(full)}, 503, {"Retry-After": "30"})

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    tell_errors(app)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def tell_errors(app: FastAPI) -> None:
    """Answer with ``error``, a text for people, where the request is at fault. Faults of ours are 500 and logged."""

    @app.exception_handler(UserError)
    async def wrong(_: Request, error: UserError) -> Response:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(NotHere)
    async def missing(_: Request, error: NotHere) -> Response:
        return JSONResponse({"error": str(error)}, 404)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        # without what was sent, as by default: JSON has no word for an infinite number
        return JSONResponse({"error": "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())}, 422)


def _overview(runs: Runs) -> APIRouter:
    router = APIRouter()

    @router.get("/runs")
    def list_runs() -> list[dict[str, Any]]:
        """All runs, the newest first; one that cannot be read says why."""
        return [_card(run) for run in runs.all()]

    @router.get("/metrics")
    def list_metrics(names: Names) -> dict[str, Any]:
        """What the metrics are, which of them these runs have, which to show first, and which runs are of one
        experiment with other seeds."""
        views = {name: runs.get(name).view for name in names}
        have = curves.names_in([entry for view in views.values() for entry in view.metrics])
        known = {m.name: {"unit": m.unit, "meaning": m.meaning} for m in METRICS.values()}
        seeds = {name: view.recipe.get("seed") for name, view in views.items()}
        headlines = [n for n in curves.HEADLINES if n in have]
        experiments = _experiments(views)
        return {"known": known, "available": have, "headlines": headlines, "experiments": experiments, "seeds": seeds}

    @router.get("/curves")
    def list_curves(
        names: Names,
        metrics: Annotated[list[str], Query(alias="metric", min_length=1, max_length=120)],
        points: Points = 400,
        x: Literal["step", "time/elapsed", "tokens"] = "step",
        together: bool = False,
    ) -> dict[str, dict[str, list[list[Any]]]]:
        """By run and metric the points of its curve; under ``changes`` where settings were changed.
        ``together``: by the first run of each experiment, of all its seeds."""
        views = {name: runs.get(name).view for name in names}
        entries = {name: _with_tokens(v.metrics) if x == "tokens" else v.metrics for name, v in views.items()}
        sets = _experiments(views) if together else [[name] for name in views]
        found: dict[str, dict[str, list[list[Any]]]] = {}
        for first, *others in sets:
            drawn = curves.curves(entries[first], metrics, points, x, [entries[name] for name in others])
            found[first] = drawn | {"changes": curves.marks(entries[first], views[first].changes, x)}
        return found

    @router.get("/ablation")
    def ablation(names: Names) -> dict[str, Any]:
        """Final values against what is different in the recipes."""
        views = {name: runs.get(name).view for name in names}
        recipes = {name: view.recipe for name, view in views.items()}
        keys = curves.ablation_keys(list(recipes.values()))
        metrics = ("eval/accuracy", "accuracy", "reward/mean", "response_length/mean", "entropy", "time/elapsed")
        rows = [
            {
                "run": name,
                "steps": view.steps_done,
                "config": {key: dict(flat(recipes[name])).get(key) for key in keys},
                "final": {metric: curves.final(view.metrics, metric) for metric in metrics},
            }
            for name, view in views.items()
        ]
        return {"keys": keys, "metrics": list(metrics), "rows": rows}

    @router.get("/config")
    def config(names: Names) -> dict[str, Any]:
        """Every key of the recipes, which of them differ, and the defaults of each run (null: of another version)."""
        views = [runs.get(name).view for name in names]
        configs = [view.recipe for view in views]
        tables = [dict(flat(one)) for one in configs]
        keys = dict.fromkeys(key for table in tables for key in table)
        values = {key: [table.get(key) for table in tables] for key in keys}
        defaults = [_defaults(view.config) for view in views]
        return {"values": values, "differing": curves.differing(configs), "defaults": defaults}

    return router


def _samples(runs: Runs) -> APIRouter:
    router = APIRouter()

    @router.get("/groups")
    def groups(name: Name, wanted: Annotated[queries.GroupFilter, Query()]) -> dict[str, Any]:
        """Groups, with the end of each prompt."""
        run = runs.get(name)
        found = queries.groups(run.samples(), wanted)
        total = found[0].pop("total") if found else 0
        for group in found:
            group.pop("total", None)
            group["prompt"] = summary_of(_line(run, group))
            del group["text_offset"], group["text_length"]
        return {"total": total, "groups": found, "statuses": STATUSES, **queries.bounds(run.samples())}

    @router.get("/search")
    def find(name: Name, text: Text, step: Whole | None = None, skip: Whole = 0) -> dict[str, Any]:
        """Where the text is in the samples, newest first; ``step`` and ``skip``: ``next`` of the answer before."""
        return search(runs.get(name).folder.samples, text, None if step is None else (step, skip))

    @router.get("/group")
    def group(name: Name, step: Whole, draw: Whole) -> dict[str, Any]:
        """One group: its prompt, and every sample with text, tokens and numbers.

        Of a group with more than :data:`MOST_TOKENS` tokens there is the beginning of each text alone, ``whole`` is
        false, and ``/sample`` has what is missing.
        """
        run = runs.get(name)
        found = _group_of(run, step, draw)
        lines = [_line(run, row) for row in found]
        whole = sum(row["length"] or 0 for row in found) <= MOST_TOKENS
        tokens = tokens_of(run.folder, step, [row["position"] for row in found]) if whole else [{} for _ in found]
        samples = [
            row | {"response": _beginning(line.get("response"), whole), "tokens": arrays}
            for row, line, arrays in zip(found, lines, tokens, strict=True)
        ]
        status = found[0]["status"]
        return {
            "whole": whole,
            "prompt": lines[0].get("prompt"),
            "gold": found[0]["gold"],
            "status": status,
            "step": step,
            "draw": draw,
            "row": found[0]["row"],
            "why": STATUSES.get(status, status),
            "samples": samples,
        }

    @router.get("/sample")
    def sample(name: Name, step: Whole, draw: Whole, sample: Whole) -> dict[str, Any]:
        """Text and tokens of one sample; of the tokens the first :data:`MOST_TOKENS`."""
        run = runs.get(name)
        row = next((row for row in _group_of(run, step, draw) if row["sample"] == sample), None)
        if row is None:
            raise NotHere(f"draw {draw} of step {step} of {name} has no sample {sample}")
        tokens = tokens_of(run.folder, step, [row["position"]], MOST_TOKENS)[0]
        return {"response": _line(run, row).get("response"), "tokens": tokens}

    @router.get("/sampling")
    def sampling(name: Name, points: Points = 300) -> dict[str, Any]:
        """Dynamic sampling over time, what became of the groups, and how hard the prompts were."""
        run = runs.get(name)
        view, connection = run.view, run.samples()
        tenth = max(view.steps_done // 10, 1)
        found = queries.outcomes(connection, tenth, view.steps_done - tenth)
        return {
            "curves": curves.curves(view.metrics, _SAMPLING, points),
            "difficulty": found["difficulty"],
            "drawn": sum(e.get("groups/drawn") or 0 for e in view.metrics),
            "statuses": _outcomes(view, found["statuses"]),
            "tenth": tenth,
        }

    @router.get("/hacking")
    def hacking(name: Name, points: Points = 300) -> dict[str, Any]:
        """Trained reward against the held-out check and against length; the samples that they disagree on."""
        run = runs.get(name)
        view, connection = run.view, run.samples()
        found = queries.disagreements(connection)
        for row in found:
            line = _line(run, row)
            row["prompt"], row["response"] = summary_of(line), str(line.get("response") or "")[:600]
        return {
            "curves": curves.curves(view.metrics, _HACKING, points),
            "lengths": queries.reward_by_length(connection),
            "disagreements": found,
            **queries.bounds(connection),
        }

    return router


def _details(runs: Runs) -> APIRouter:
    router = APIRouter()

    @router.get("/time")
    def seconds(name: Name, points: Points = 240) -> dict[str, Any]:
        """Where the seconds of each step went, speeds, and what each role used."""
        run = runs.get(name)
        view = run.view
        return {
            "phases": curves.phases(view.metrics, points),
            "speeds": curves.curves(view.metrics, _SPEEDS, points),
            "memory": curves.curve(view.metrics, "memory/rss", points),
            "resources": _resources(run.folder.root / "resources.jsonl"),
        }

    @router.get("/alarms")
    def alarms(name: Name) -> dict[str, Any]:
        """Alarms with the steps they were on in, and what else a person should know."""
        view = runs.get(name).view
        return {
            "readable": readable_recipe(view.config) is not None,
            "alarms": [*hacking_history(view.hacking), *alarm_history(view.config, view.metrics, view.changes)],
            "warnings": view.warnings(),
            "steps": view.steps_done,
        }

    @router.get("/evaluation")
    def evaluation(name: Name) -> dict[str, Any]:
        """Every evaluation of the run, what it came to, and which was the best."""
        view = runs.get(name).view
        ended = view.state in ("finished", "stopped")  # else the summary is of an earlier part
        stopped = view.summary.get("stopped") if ended else None
        return {"evaluations": view.evaluated, "stopped": stopped, "best": view.best, "checkpoints": view.checkpoints}

    return router


def _card(run: Run) -> dict[str, Any]:
    try:
        view = run.card
        before, after = view.accuracies
        last = view.metrics[-1] if view.metrics else {}
        return {
            "name": run.name,
            "path": str(run.folder.root),
            "state": view.state,
            "status": view.why,
            "steps": view.steps_done,
            "planned": view.steps_planned,
            "seconds": view.seconds,
            "left": _left(run) if view.state == "running" else None,
            "before": before,
            "after": after,
            "last": {name: last.get(name) for name in _LAST},
        }
    except (UserError, OSError) as error:  # one that is spoilt, or somebody else's, hides no other
        return {"name": run.name, "path": str(run.folder.root), "state": "unreadable", "status": str(error)}


def _left(run: Run) -> dict[str, Any] | None:
    """As :func:`curves.time_left`, with ``since``: seconds since the last step."""
    view = run.view
    left = curves.time_left(view.metrics, view.steps_planned, dict(flat(view.config)).get("training.minutes"))
    return left and left | {"since": max(0.0, time.time() - run.folder.metrics.stat().st_mtime)}


def _experiments(views: Mapping[str, RunView]) -> list[list[str]]:
    """The runs, those together that are the same but for the seed, of which each counts once."""
    sets: dict[tuple[str, int], dict[Any, str]] = {}
    for name, view in views.items():
        key, seed = curves.experiment(view.recipe, view.started_from, view.changes) or name, view.recipe.get("seed")
        number = next(k for k in range(len(views)) if seed not in sets.get((key, k), {}))
        sets.setdefault((key, number), {})[seed] = name
    return [list(runs.values()) for runs in sets.values()]


def _defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What each key of a recipe has where nothing is said; required ones are left out."""
    recipe = readable_recipe(config)
    if recipe is None:
        return None
    found = {name: key.default for name, key in keys_in(recipe).items() if not key.required}
    return dict(flat(plain(found | {"reward.kind": Config.model_fields["reward"].default.kind})))


def _outcomes(view: RunView, stored: Sequence[queries.Row]) -> list[dict[str, Any]]:
    """What became of all groups, by the metrics; ``samples`` and ``tokens`` of those whose samples are stored."""
    there = {row["status"]: row for row in stored}
    found = []
    for status, groups in sorted(view.outcomes.items(), key=lambda item: -item[1]):
        row = there.get(status, {})
        found.append({"status": status, "groups": groups, "why": OUTCOMES[status]})
        found[-1] |= {name: row.get(name) for name in ("samples", "tokens")}
    return found


def _group_of(run: Run, step: int, draw: int) -> list[queries.Row]:
    """Raises NotHere if there is no such group."""
    found = queries.group(run.samples(), step, draw)
    if not found:
        raise NotHere(f"step {step} of {run.name} has no draw {draw}")
    return found


def _beginning(text: str | None, whole: bool) -> str | None:
    return text if whole or text is None or len(text) <= BEGINNING else text[:BEGINNING] + " …"


def _line(run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of a sample; empty where they are gone, as the numbers may be there without them."""
    try:
        line = read_line(run.folder.samples, row)
    except UserError:
        return {}
    return {k: sendable(v) if isinstance(v, str) else v for k, v in line.items()}


def _with_tokens(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With ``tokens``: generated so far."""
    total, found = 0.0, []
    for entry in entries:
        total += entry.get("tokens/generated") or 0.0
        found.append(entry | {"tokens": total})
    return found


def _resources(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with open_database() as connection, thinned(path) as shorter:
        return queries.resources(connection, shorter)
