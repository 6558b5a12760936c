"""The folder of a comparison.

::

    runs/compare/
      comparison.json          what is compared: recipes, seeds, budget, in what they differ
      NAME-seed-1/             a run, or a folder with one for each phase
      NAME-seed-1.json         what came of the cell: the last evaluation row by row, or why it failed
      NAME-seed-1.answers.jsonl  what its model answered there
      NAME-seed-1.log          what its process said
      table.md, table.csv, table.json, report/
      wins.json, votes.jsonl   answers of two recipes compared by a judge, by people
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.comparison.recipes import (
    BUDGETS,
    Phases,
    Variant,
    differing,
    kind_of,
    limited,
    measured,
    needs,
    require_alike,
    run_of,
)
from dapo.config import Config, load_config
from dapo.config.plan import require_files
from dapo.config.reading import with_values
from dapo.config.secrets import redact
from dapo.errors import ConfigError, UserError
from dapo.util.differences import differences
from dapo.util.files import read_json, write_json, writing

DECLARED = "comparison.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """One recipe with one seed."""

    root: Path
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-seed-{self.seed}"

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
    return (root / DECLARED).is_file()


@dataclass(frozen=True, slots=True)
class Declared:
    """What comparison.json says. ``cells``: in the order of the recipes and seeds."""

    root: Path
    tree: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path) -> Declared:
        """Raises UserError: there is no comparison in ``root``."""
        if not is_comparison(root):
            raise UserError(f"{root}: is not the folder of a comparison: it has no {DECLARED}; dapo compare makes one")
        try:
            return cls(root, dict(read_json(root / DECLARED)))
        except (OSError, ValueError) as error:
            raise UserError(f"{root / DECLARED}: cannot be read: {error}") from None

    @property
    def variants(self) -> Mapping[str, Any]:
        return dict(self.tree["recipes"])

    @property
    def cells(self) -> list[Cell]:
        return [Cell(self.root, name, seed) for name in self.variants for seed in self.tree["seeds"]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be compared: ``budget`` is a key of ``training`` and how much of it each cell has, ``judged`` the
    recipe whose evaluation measures all of them."""

    root: Path
    variants: Mapping[str, Variant]
    seeds: Sequence[int]
    budget: tuple[str, float]
    judged: Config

    @classmethod
    def declare(
        cls,
        root: Path,
        variants: Mapping[str, Variant],
        seeds: Sequence[int],
        budget: Mapping[str, float | None],
        allowed: Sequence[str] = (),
        evaluation: str | None = None,
    ) -> Comparison:
        """Look at everything, and write comparison.json; a comparison that is there goes on, with more recipes or
        seeds than it had. ``evaluation``: a recipe in place of the first one with held-out rows.
        Raises UserError: something in a recipe is wrong, they cannot be compared, or another comparison is there."""
        given = {key: amount for key, amount in budget.items() if amount is not None}
        if len(given) != 1 or min(given.values()) <= 0:
            said = ", ".join(f"{key} {amount:g}" for key, amount in given.items()) or "none"
            raise ConfigError(f"one budget is needed, the same for all: {', '.join(BUDGETS)} (given: {said})")
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ConfigError(f"seeds: expected different whole numbers from 0 up, such as 1,2,3; got {list(seeds)}")
        if len(variants) < 2:
            raise ConfigError("two recipes at least are needed to compare them")
        phases = {name: variant.phases(root / name) for name, variant in variants.items()}
        require_alike(phases, allowed)
        judged = load_config(evaluation) if evaluation else next(filter(_measures, map(run_of, phases.values())), None)
        if not _measures(judged):
            raise ConfigError(
                "nothing says how good the models are: give evaluation.data (held-out rows) in a recipe of dapo train, "
                "or such a recipe as --evaluation"
            )
        require_files(judged)
        found = cls(root, variants, seeds, next(iter(given.items())), judged)
        found._write(phases)
        return found

    def _write(self, phases: Mapping[str, Phases]) -> None:
        now = {
            "budget": dict([self.budget]),
            "measured": redact(measured(self.judged)),
            "seeds": list(self.seeds),
            "differ": differing(phases),
            "recipes": {name: self._told(name, of) for name, of in phases.items()},
        }
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            if not is_comparison(self.root):
                raise ConfigError(f"--out {self.root}: exists and is no comparison; give another folder")
            old = Declared.read(self.root).tree
            both = {name: now["recipes"][name]["settings"] for name in old["recipes"] if name in now["recipes"]}
            then = {name: old["recipes"][name]["settings"] for name in both}
            fixed = {key: (old[key], now[key]) for key in ("budget", "measured")} | {"": (then, both)}
            if changed := [
                str(d) for key, (a, b) in fixed.items() for d in differences(a, b, f"{key}." if key else "")
            ]:
                text = "\n".join(changed)
                raise ConfigError(f"--out {self.root}: another comparison is there; give another folder:\n{text}")
            now["recipes"] = old["recipes"] | now["recipes"]
            now["differ"] = old["differ"] | now["differ"]
            now["seeds"] = sorted({*old["seeds"], *self.seeds})
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            write_json(self.root / DECLARED, now)

    def _told(self, name: str, phases: Phases) -> dict[str, Any]:
        variant, run = self.variants[name], run_of(phases)
        settings = {
            n or kind_of(c): redact(c.model_dump(mode="json", exclude={"run", "seed"})) for n, c in phases.items()
        }
        curve = run is not None and run is list(phases.values())[-1] and measured(run) == measured(self.judged)
        return {
            "recipe": variant.recipe,
            "changes": [one for one in variant.changes if redact({one.partition("=")[0].rpartition(".")[2]: "x"})],
            "phases": list(phases),
            "needs": needs(phases),
            "curve": curve,
            "settings": settings,
        }

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed: what is cut off early has all recipes."""
        return [Cell(self.root, name, seed) for seed in self.seeds for name in self.variants]

    def job(self, cell: Cell) -> dict[str, Any]:
        """What the process of a cell is told; secrets are in it."""
        phases = self.variants[cell.variant].phases(cell.folder, cell.seed)
        key, amount = self.budget
        last = list(phases)[-1]
        phases[last] = limited(phases[last], key, amount)
        engine = self.judged.rollout.engine if self.judged.rollout.engine in ("native", "vllm") else "native"
        return {
            "root": str(self.root),
            "cell": [cell.variant, cell.seed],
            "phases": {name: [kind_of(config), config.model_dump(mode="json")] for name, config in phases.items()},
            "budget": [key, amount],
            "judged": with_values(self.judged, {"rollout.engine": engine}).model_dump(mode="json"),
        }


def _measures(config: Config | None) -> bool:
    return config is not None and bool(config.evaluation.data)
