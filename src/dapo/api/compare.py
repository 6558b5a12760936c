"""``dapo.compare``: recipes by name, a budget and seeds are a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import flat
from dapo.observe.progress import Listener, make_listener

if TYPE_CHECKING:
    from dapo.comparison.table import Table


def compare(
    recipes: Mapping[str, Any] | Sequence[str | Path],
    changes: Sequence[str] = (),
    *,
    minutes: float | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    seeds: Sequence[int] = (1, 2, 3),
    out: str | Path = "runs/compare",
    only: Sequence[str] = (),
    allow: Sequence[str] = (),
    evaluation: str | None = None,
    judge: str | None = None,
    listener: Listener | None = None,
) -> Table:
    """Train by several recipes with the same data, budget and seeds, as ``dapo compare`` does; what is in ``out`` goes
    on, and what is done there stays.

    Args:
        recipes: files; or by name a file, or a file and settings: ``{"a": "a.yaml", "b": ("a.yaml", {"seed": 2})}``.
        changes: ``section.key=value`` of all of them.
        minutes, samples, tokens: one of them is the budget of each cell.
        only, allow, evaluation, judge: as the options of the command.
        listener: hears how far it is; by default progress is printed.

    Returns the table: ``lines()``, a label and a text for each recipe; ``names``, of these; ``cells()``, the numbers of
    each cell; ``failures()``, what went wrong. It is in ``out`` as table.md, table.csv and table.json, too.

    Raises UserError: something in a recipe is wrong, they cannot be compared, or another comparison is in ``out``."""
    from dapo.comparison.cells import run_cells
    from dapo.comparison.folder import declare
    from dapo.comparison.pages import write_tables
    from dapo.comparison.recipes import Variant, named_variants
    from dapo.comparison.wins import judge as judge_answers

    if isinstance(recipes, Mapping):
        variants = {}
        for name, one in recipes.items():
            file, settings = (one, {}) if isinstance(one, str | Path) else one
            own = (f"{key}={json.dumps(value)}" for key, value in flat(settings))
            variants[name] = Variant(str(file), (*changes, *own))
    else:
        variants = named_variants(list(map(str, recipes)), changes)
    root, budget = Path(out), {"minutes": minutes, "samples": samples, "tokens": tokens}
    with closing(listener or make_listener()) as listener:
        judged = declare(root, variants, seeds, budget, allow, evaluation, listener.phase)
        run_cells(root, variants, seeds, judged, only, listener.phase)
        if judge is not None:
            judge_answers(root, judge, listener.phase)
    return write_tables(root)
