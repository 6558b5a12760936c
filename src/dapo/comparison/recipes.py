"""The recipes of a comparison: what has to be the same in all of them, in what they differ, and what each needs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import Config, flat, load_config
from dapo.config.composed_reward import plain_rewards
from dapo.config.plan import UNBOUNDED, existing_recipe, require_files
from dapo.config.reading import read_recipe, with_values
from dapo.config.secrets import require_secrets
from dapo.config.stages import STAGES, load_stage
from dapo.errors import ConfigError
from dapo.stages.phases import load_phases
from dapo.util.differences import shown

BUDGETS = ("minutes", "samples", "tokens")
"""Keys of ``training`` that may be the budget."""
_HOW_OFTEN = ("every", "patience", "min_improvement", "while_sampling")
"""Keys of ``evaluation`` that say nothing of what is measured."""
Phases = dict[str, Any]
"""Configs of runs and stages by name, in their order; each in the folder ``run.dir``. A recipe without phases is one,
named by its kind."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One recipe with its own changes."""

    recipe: str
    changes: tuple[str, ...] = ()

    def phases(self, root: Path, seed: int = 0) -> Phases:
        """As they run with ``seed`` in the folder ``root``. Raises ConfigError: with what is wrong in the recipe."""
        tree, _ = read_recipe(existing_recipe(self.recipe), self.changes)
        stage, place, found = str(tree.get("stage")), json.dumps(str(root)), Phases()
        if "phases" in tree:
            found |= load_phases(self.recipe, [*self.changes, f"dir={place}"])[1]
        else:
            changes = [*self.changes, f"run.dir={place}"]
            only = load_stage(stage, self.recipe, changes) if stage in STAGES else load_config(self.recipe, changes)
            found[kind_of(only)] = only
        for config in found.values():
            require_secrets(config.model_dump(mode="json"), self.recipe, "as section.key=value")
            require_files(config, existing_recipe(self.recipe))
        return {
            name: with_values(config.model_copy(update={"seed": seed}), {"run.if_exists": "fail"})
            for name, config in found.items()
        }


def named_variants(words: Sequence[str], changes: Sequence[str] = ()) -> dict[str, Variant]:
    """From the command line: each word is ``[NAME=]RECIPE [KEY=VALUE ...]``; ``changes`` are those of all.
    Raises ConfigError: two are the same."""
    found: dict[str, Variant] = {}
    for word in words:
        first, *own = [word] if Path(word).is_file() else shlex.split(word)
        name, _, recipe = first.rpartition("=") if re.match(r"[\w-]+=[^=]+\.ya?ml$", first) else ("", "", first)
        tags = [re.sub(r"^[\w.]*\.(?=\w+=)|[^\w.]+", "-", one).strip("-") for one in own]
        name = name or "-".join([Path(recipe).stem, *tags])
        if name in found:
            raise ConfigError(
                f"{name}: is given twice; what is compared has to differ: another recipe, or the same one with changes "
                f"of its own and a name, as in '{name}-2={recipe} algorithm.clip_ratio_high=0.2'"
            )
        found[name] = Variant(recipe, (*changes, *own))
    return found


def limited(config: Any, key: str, amount: float) -> Any:
    """``config`` with ``amount`` of a budget. That ends a run, whatever its steps; a stage keeps its own end, too:
    passes over rows cannot be made longer."""
    values: dict[str, Any] = {f"training.{name}": None for name in BUDGETS}
    values[f"training.{key}"] = amount if key == "minutes" else int(amount)
    if isinstance(config, Config):
        values |= {"training.steps": UNBOUNDED, "evaluation.patience": None}
        # a cell's checkpoints go at its end, and for all of so many steps the disk would be found too small
        values |= {"run.keep_last": config.run.keep_last or 1, "run.keep_every": 0}
    return with_values(config, values)


def run_of(phases: Phases) -> Config | None:
    """The last one that is a run of reinforcement learning, if any."""
    return next((config for config in reversed(phases.values()) if isinstance(config, Config)), None)


def measured(config: Config) -> dict[str, Any]:
    """What decides what an evaluation of this recipe measures."""
    tree = config.model_dump(mode="json", include={"reward", "evaluation"})
    tree["evaluation"] = {key: v for key, v in tree["evaluation"].items() if key not in _HOW_OFTEN}
    return tree | {"evaluation": tree["evaluation"] | {"max_response_length": config.evaluated_length}}


def _to_be_the_same(phases: Phases) -> dict[str, Any]:
    first, run = next(iter(phases.values())), run_of(phases)
    model = {f"model.{key}": getattr(first.model, key) for key in ("path", "tokenizer")}
    if run is None:
        return model
    data = run.model_dump(mode="json", include={"data"})
    return model | dict(flat(data)) | (dict(flat(measured(run))) if run.evaluation.data else {})


def by_key(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys that several of the tables have, and not with one value, with the value of each."""
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        values = {name: table[key] for name, table in tables.items() if key in table}
        if len({json.dumps(value, default=str) for value in values.values()}) > 1:
            yield key, values


def require_alike(variants: Mapping[str, Phases], allowed: Sequence[str]) -> None:
    """Raises ConfigError: recipes differ in what has to be the same, and ``allowed`` keys or sections do not say that
    they may."""
    refused = {
        key: "; ".join(f"{name} has {shown(value, 80)}" for name, value in values.items())
        for key, values in by_key({name: _to_be_the_same(phases) for name, phases in variants.items()})
        if not any(key == one or key.startswith(f"{one}.") for one in allowed)
    }
    if refused:
        lines = "\n".join(f"{key}: {told}" for key, told in refused.items())
        raise ConfigError(
            f"these recipes differ in what has to be the same:\n{lines}\nwhat would work: the same value in all, as a "
            f"change of all recipes (KEY=VALUE), or {' '.join(f'--allow {key}' for key in refused)}"
        )


def kind_of(config: Any) -> str:
    return getattr(config, "stage", "dapo")


def needs(phases: Phases) -> list[str]:
    """What training by this recipe takes beside the policy and prompts."""
    found: list[str] = []
    for config in phases.values():
        if isinstance(config, Config):
            found += ["reference"] * (config.algorithm.kl.mode != "off")
            found += ["critic"] * (config.algorithm.kind == "ppo")
            rewards: list[Any] = list(plain_rewards(config.reward))
            found += [f"reward ({one.kind})" for one in rewards]
        elif config.stage == "dpo":
            found += ["preference pairs", *["reference"] * (config.dpo.loss != "simpo")]
        else:
            found.append({"sft": "demonstrations", "reward_model": "preference pairs"}[config.stage])
    return list(dict.fromkeys(found))
