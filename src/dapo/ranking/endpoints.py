"""``POST /v1/rank`` and ``POST /v1/filter``: of the policy server and of the reward server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, FiniteFloat
from starlette.exceptions import HTTPException

from dapo.data.rows import BadRow
from dapo.errors import ConfigError
from dapo.ranking.calibrate import passing, read_thresholds
from dapo.ranking.rows import EVERY, Candidates, candidates
from dapo.ranking.score import Scored, best_first, load_ranker, score
from dapo.reward.contract import Scorer
from dapo.util.gate import Room, unless_gone

PATHS = ("/v1/rank", "/v1/filter")


class Rankers(dict[str, Scorer]):
    """By the names that requests give. ``thresholds``: of each, by the language model that wrote."""

    def __init__(self, found: Mapping[str, Scorer], thresholds: Mapping[str, Mapping[str, float]] | None = None):
        super().__init__(found)
        self.thresholds = thresholds or {}

    def named(self, name: str | None) -> tuple[str, Scorer]:
        """The only one, if no name is given. Raises KeyError: there is none of this name; says what there is."""
        if name is None and len(self) == 1:
            name = next(iter(self))
        if name is None or name not in self:
            known = ", ".join(self) or "none; start the server with --ranker NAME=MODEL"
            raise KeyError(f"ranker: {f'{name!r} is not served' if name else 'say which one'}; there is {known}")
        return name, self[name]


class Asked(BaseModel):
    """One row of candidates, as in files of ``dapo rank``. ``ranker``: None: the only one. ``threshold``: in place of
    the calibrated one."""

    model_config = ConfigDict(extra="allow")
    ranker: str | None = None
    threshold: FiniteFloat | None = None


def load_rankers(named: Mapping[str, str], calibrations: Mapping[str, str]) -> Rankers:
    """Raises UserError: one is no ranker, or a calibration is of none of them."""
    if unknown := calibrations.keys() - named.keys():
        raise ConfigError(f"--calibration {min(unknown)}=...: there is no --ranker of this name")
    found = {name: load_ranker(model) for name, model in named.items()}
    return Rankers(found, {name: read_thresholds(Path(file), named[name]) for name, file in calibrations.items()})


def router(rankers: Callable[[], Rankers], most: int, room: Room) -> APIRouter:
    """``most``: candidates of one request. ``room``: for those of all requests."""
    routes = APIRouter(prefix="/v1")

    def read(asked: Asked) -> tuple[str, Scorer, Candidates]:
        try:
            name, ranker = rankers().named(asked.ranker)
            row = candidates(asked.model_extra or {})
        except (KeyError, BadRow) as fault:
            raise HTTPException(400, str(fault.args[0] if isinstance(fault, KeyError) else fault)) from None
        if len(row.texts) > most:
            raise HTTPException(400, f"candidates: {len(row.texts)} in one request; this server takes {most}")
        return name, ranker, row

    async def scores(ranker: Scorer, row: Candidates, request: Request) -> list[Scored]:
        with room.taken(len(row.texts)):
            return await unless_gone(request, score(ranker, row))

    @routes.post("/rank")
    async def rank(asked: Asked, request: Request) -> dict[str, Any]:
        """The candidates with their scores, the best first."""
        name, ranker, row = read(asked)
        return {"ranker": name, "ranking": [one.told for one in best_first(await scores(ranker, row, request))]}

    @routes.post("/filter")
    async def filter_candidates(asked: Asked, request: Request) -> dict[str, Any]:
        """Those that score above the threshold, in their order: of the language model ``model``, if it is given."""
        name, ranker, row = read(asked)
        given = rankers().thresholds.get(name, {}) if asked.threshold is None else {EVERY: asked.threshold}
        if not given:
            raise HTTPException(400, f"threshold: {name} has no calibration here (--calibration); give one")
        try:
            kept = passing([row], [scored := await scores(ranker, row, request)], given)[0]
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None
        failed = sum(one.score is None for one in scored)
        return {"ranker": name, "kept": [one.told for one in kept], "candidates": len(scored), "failed": failed}

    return routes
