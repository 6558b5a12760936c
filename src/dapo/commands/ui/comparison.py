"""The page's routes over the comparison that a run belongs to: table and curves, and blind votes on what two recipes'
models answered in their last evaluations. Votes go to votes.jsonl in the folder of the comparison."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from dapo.commands.ui.models import Question
from dapo.commands.ui.playground import PairWanted, give_out, result_of, who_votes
from dapo.commands.ui.runs import WHILE_THERE, NotHere, Run, RunAsked, run_named
from dapo.commands.ui.texts import sendable
from dapo.comparison.folder import Cell, Comparison, is_comparison
from dapo.comparison.pages import WIN_HEADER, win_lines
from dapo.comparison.table import Table
from dapo.comparison.wins import answers_of
from dapo.errors import DataError
from dapo.evaluation.votes import Shown, read_votes

router = APIRouter(prefix="/api/comparison", dependencies=WHILE_THERE)


def _found(run: Run) -> Path | None:
    return next((p for p in list(run.folder.root.parents)[:2] if is_comparison(p)), None)


def _root(run: Run) -> Path:
    """Raises NotHere: the run is of no comparison."""
    if (found := _found(run)) is None:
        raise NotHere(f"{run.name} belongs to no comparison; dapo compare makes one")
    return found


@router.get("")
def about(run: RunAsked) -> dict[str, Any] | None:
    """null: the run belongs to none."""
    if (root := _found(run)) is None:
        return None
    table = Table.read(root)
    return {
        "name": table.comparison.root.name,
        "recipes": table.names,
        "metric": table.metric,
        "lines": table.lines(),
        "failures": table.failures(),
        "wins": [WIN_HEADER, *win_lines(table)],
        "curves": {axis: {name: table.mean_curve(name, axis) for name in table.names} for axis in table.ends},
    }


@router.get("/votes")
def result(run: RunAsked) -> dict[str, Any]:
    return result_of(_root(run))


@router.post("/votes/pair")
def next_pair(request: Request, wanted: PairWanted) -> dict[str, Any]:
    """Raises DataError: there is nothing to compare, or nothing more."""
    root = _root(run_named(request, wanted.run))
    if len(both := set(wanted.models)) < 2:
        raise DataError("two different recipes are needed to compare them")
    who, comparison = who_votes(wanted), Comparison.read(root)
    seen = {v.row for v in read_votes(root) if v.who == who and {v.left.model, v.right.model} == both}
    found: dict[int, list[Any]] = {}
    for seed in comparison.seeds:
        first, other = (answers_of(Cell(root, name, seed)) for name in wanted.models)
        for key in first.keys() & other.keys():
            if first[key]["response"] != other[key]["response"]:
                found.setdefault(first[key]["row"], []).append((first[key], other[key]))
    left = sorted(found.keys() - seen - set(wanted.skip))
    if not left:
        raise DataError("there are no more answers in which these two differ")
    row = random.Random("|".join(sorted(both))).choice(left)
    answers = random.choice(found[row])
    question = Question(answers[0]["prompt"], sendable(answers[0]["prompt"]), None, row)
    shown = [Shown(n, sendable(a["response"])) for n, a in zip(wanted.models, answers, strict=True)]
    return give_out(request, root, question, shown, None) | {
        **{"row": row, "held_out": True, "same": 0, "rows_left": len(left) - 1}
    }
