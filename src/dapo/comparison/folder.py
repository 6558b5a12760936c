"""The folder of a comparison.

::

    runs/compare/
      comparison.json          what is compared: recipes, seeds, budget
      NAME-seed-1/             a run, or a folder with one for each phase
      NAME-seed-1.json         what came of the cell: the last evaluation row by row, or why it failed
      NAME-seed-1.answers.jsonl  what its model answered there
      NAME-seed-1.log          what its process said
      table.md, table.csv, table.json, report/
      wins.json, votes.jsonl   answers of two recipes compared by a judge, by people
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from dapo.comparison.recipes import BUDGETS, Phases, Variant, by_key, measured, needs, require_alike, run_of
from dapo.config import Config, flat, load_config
from dapo.config.plan import require_files
from dapo.config.secrets import redact
from dapo.errors import ConfigError, UserError
from dapo.model.hub import require_at_hand
from dapo.util.differences import differences
from dapo.util.files import lock_file, read_json, write_json, writing

DECLARED = "comparison.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """One recipe with one seed."""

    root: Path
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe}-seed-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    def file(self, kind: str) -> Path:
        """``json``, ``answers.jsonl`` or ``log``."""
        return self.root / f"{self.name}.{kind}"

    @property
    def result(self) -> Mapping[str, Any]:
        """Of a cell that is done, or failed; empty: neither yet."""
        try:
            return dict(read_json(self.file("json"), 2**28))
        except (OSError, ValueError):
            return {}


def is_comparison(root: Path) -> bool:
    return os.path.isfile(root / DECLARED)  # noqa: PTH113  (the methods of Path raise for a name that is too long)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparison.json says. ``recipes``: by name ``phases``, what it ``needs``, whether its evaluations are a
    ``curve`` of what is compared. ``budget``: a key of ``training``, and how much of it each cell has. ``measured``:
    how the models are evaluated."""

    root: Path
    recipes: Mapping[str, Any]
    seeds: list[int]
    budget: tuple[str, float]
    measured: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path) -> Comparison:
        """Raises UserError: there is none in ``root``."""
        if not is_comparison(root):
            raise UserError(f"{root}: is not the folder of a comparison: it has no {DECLARED}; dapo compare makes one")
        try:
            tree = read_json(root / DECLARED)
            (budget,) = tree["budget"].items()
            return cls(root, tree["recipes"], tree["seeds"], budget, tree["measured"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{root / DECLARED}: cannot be read: {type(error).__name__}: {error}") from None

    @property
    def differ(self) -> dict[str, dict[str, Any]]:
        """What the recipes are compared for: keys of their runs that differ, without folders and budgets, by recipe."""
        kinds = {name: {"phases": ", ".join(told["settings"])} for name, told in self.recipes.items()}
        trees = [(name, tree) for name, told in self.recipes.items() for tree in told["settings"].values()]
        runs = {name: dict(flat(tree)) for name, tree in trees if "rollout" in tree}  # the last one of its phases
        left_out = {f"training.{key}" for key in ("steps", *BUDGETS)} | {"evaluation.patience"}
        return dict(by_key(kinds)) | {key: values for key, values in by_key(runs) if key not in left_out}


def declare(
    root: Path,
    variants: Mapping[str, Variant],
    seeds: Sequence[int],
    budget: Mapping[str, float | None],
    allowed: Sequence[str] = (),
    evaluation: str | None = None,
    tell: Callable[[str], object] = lambda text: None,
) -> Config:
    """Look at everything and write comparison.json; a comparison that is there may get more recipes and seeds. Returns
    the recipe that measures all models: ``evaluation``, or the first one with held-out rows. ``tell``: hears that the
    file system has no locks, without which it goes on.
    Raises UserError: something in a recipe is wrong, they cannot be compared, or another comparison is there."""
    given = {key: amount for key, amount in budget.items() if amount is not None}
    if len(given) != 1 or not 0 < min(given.values()) < inf:
        said = ", ".join(f"{key} {amount:g}" for key, amount in given.items()) or "none"
        raise ConfigError(
            f"one budget is needed, the same for all: {', '.join(BUDGETS)}; such as --minutes 10 (given: {said})"
        )
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds: expected different whole numbers from 0 up, such as 1,2,3; got {list(seeds)}")
    if len(variants) < 2:
        raise ConfigError("two recipes at least are needed to compare them")
    phases = {name: variant.phases(Path(name)) for name, variant in variants.items()}
    require_alike(phases, allowed)
    for of in phases.values():
        require_at_hand("model.path:", next(iter(of.values())).model.path)
    runs = [load_config(evaluation)] if evaluation else map(run_of, phases.values())
    judged = next((run for run in runs if run is not None and run.evaluation.data), None)
    if judged is None:
        raise ConfigError(
            "nothing says how good the models are: give evaluation.data (held-out rows) in a recipe of dapo train, or "
            "such a recipe as --evaluation"
        )
    require_files(judged)
    now = {
        "budget": given,
        "measured": redact(measured(judged)),
        "seeds": list(seeds),
        "recipes": {name: _told(name, variants[name].recipe, of, judged) for name, of in phases.items()},
    }
    held = root.is_dir() and any(path.name[0] != "." for path in root.iterdir())  # another's half file
    if root.is_file() or (held and not is_comparison(root)):
        raise ConfigError(f"--out {root}: exists and is no comparison; give another folder")
    with writing(root), ExitStack() as stack:
        root.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((root / ".lock").open("w"))
        if missing := lock_file(lock, fcntl.LOCK_EX):  # others may be adding their recipes
            tell(f"{root}: its file system has no locks ({missing.strerror}): let no other process work on it")
        write_json(root / DECLARED, _joined(Comparison.read(root), now) if is_comparison(root) else now)
    return judged


def _told(name: str, recipe: str, phases: Phases, judged: Config) -> dict[str, Any]:
    run = run_of(phases)
    settings = {name: redact(c.model_dump(mode="json", exclude={"run", "seed"})) for name, c in phases.items()}
    folders = [str(Path(config.run.dir).relative_to(name)) for config in phases.values()]
    curve = run is not None and run is list(phases.values())[-1] and measured(run) == measured(judged)
    return {"recipe": recipe, "phases": folders, "needs": needs(phases), "curve": curve, "settings": settings}


def _joined(old: Comparison, now: dict[str, Any]) -> dict[str, Any]:
    """Both. Raises ConfigError: what is in both is not the same."""
    then, both = old.recipes, now["recipes"]
    pairs = [("budget.", dict([old.budget]), now["budget"]), ("measured.", old.measured, now["measured"])]
    pairs += [(f"{name}: ", then[name]["settings"], both[name]["settings"]) for name in then if name in both]
    if changed := [str(found) for key, a, b in pairs for found in differences(a, b, key)]:
        text = "\n".join(changed)
        raise ConfigError(f"--out {old.root}: another comparison is there; give another folder:\n{text}")
    return now | {"recipes": then | both, "seeds": sorted({*old.seeds, *now["seeds"]})}
