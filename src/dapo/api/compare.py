"""``dapo.compare``: recipes by name, a budget and seeds are a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import flat
from dapo.observe.progress import Listener, make_listener


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonResult:
    """``path``: the folder, with a run of each recipe and seed. ``table``: a label, and a text for each recipe.
    ``cells``: the numbers of each cell. ``failed``: what went wrong, a line for each cell. ``wins``: win rates."""

    path: Path
    recipes: Sequence[str]
    table: Sequence[Sequence[str]]
    cells: Sequence[Mapping[str, Any]]
    failed: Sequence[str]
    wins: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        lines = [["", *self.recipes], *self.table]
        return "\n".join("  ".join(line) for line in lines)


def compare(
    recipes: Mapping[str, Any] | Sequence[str | Path],
    *,
    minutes: float | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    seeds: Sequence[int] = (1, 2, 3),
    out: str | Path = "runs/compare",
    only: Sequence[str] = (),
    allow: Sequence[str] = (),
    evaluation: str | Path | None = None,
    judge: str | Path | None = None,
    listener: Listener | None = None,
) -> ComparisonResult:
    """Train by several recipes with the same data, budget and seeds, as ``dapo compare`` does; what is in ``out`` goes
    on, and what is done there stays.

    Args:
        recipes: files; or by name a file, or a file and settings: ``{"a": "a.yaml", "b": ("a.yaml", {"seed": 2})}``.
        minutes, samples, tokens: one of them is the budget of each cell.
        only, allow, evaluation, judge: as the options of the command.
        listener: hears how far it is; by default progress is printed.

    Raises UserError: something in a recipe is wrong, they cannot be compared, or another comparison is in ``out``.
    """
    from dapo.comparison.cells import run_cells
    from dapo.comparison.folder import Comparison
    from dapo.comparison.pages import write_tables
    from dapo.comparison.recipes import Variant, named_variants
    from dapo.comparison.table import Table
    from dapo.comparison.wins import judge as judge_answers
    from dapo.comparison.wins import read_wins

    if isinstance(recipes, Mapping):
        pairs = {name: (one, {}) if isinstance(one, str | Path) else one for name, one in recipes.items()}
        variants = {
            name: Variant(str(file), tuple(f"{key}={json.dumps(value)}" for key, value in flat(settings)))
            for name, (file, settings) in pairs.items()
        }
    else:
        variants = named_variants(list(map(str, recipes)))
    root, budget = Path(out), {"minutes": minutes, "samples": samples, "tokens": tokens}
    with closing(listener or make_listener()) as listener:
        by = None if evaluation is None else str(evaluation)
        run_cells(Comparison.declare(root, variants, seeds, budget, allow, by), only, listener.phase)
        if judge is not None:
            judge_answers(root, str(judge), tell=listener.phase)
    table = Table.read(root)
    write_tables(table)
    cells = table.as_json()["cells"]
    return ComparisonResult(root, table.names, table.lines(), cells, table.failures(), read_wins(root))
