"""The numbers that follow from a recipe: what a step holds, how much of it, and at most how many tokens.

Shown at the start of a run and by ``--dry-run``, because sizes multiply and the reader should not have to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.config.data import DataItem, names_a_data_set
from dapo.config.tree import Config
from dapo.errors import ConfigError, DataError
from dapo.util.terminal import counted

MINUTES = "minutes of steps, at most"
"""The name of ``training.minutes`` among them."""

UNBOUNDED = 1_000_000
"""``training.steps`` of a run that another budget ends, as in dapo compare. It stands for no number of steps."""


def budget_of(training: Mapping[str, Any]) -> str | None:
    """What ends a run in place of its steps, such as ``10 minutes``; None: its steps do."""
    steps, given = training.get("steps"), [key for key in ("minutes", "samples", "tokens") if training.get(key)]
    if not isinstance(steps, int) or steps < UNBOUNDED or not given:
        return None
    return " or ".join(f"{round(training[key], 2):,}".removesuffix(".0") + f" {key}" for key in given)


def plan_of(config: Config) -> dict[str, int | str]:
    rollout, training = config.rollout, config.training
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = config.data.max_prompt_length + rollout.max_response_length
    most = "" if training.minutes is None else ", at most"  # the minutes may be over first
    budget = budget_of(dict(training))
    plan: dict[str, int | str] = {
        "steps": training.steps if budget is None else f"for {budget}",
        "prompts per step": rollout.prompts_per_step,
        "samples per prompt": rollout.samples_per_prompt,
        "samples per step": samples,
        "prompts drawn per step, at most": rollout.prompts_per_step * config.max_draw_rounds,
        "updates per step": config.updates_per_step,
        "groups per update": training.groups_per_update,
        "samples per update": training.groups_per_update * rollout.samples_per_prompt,
        **({f"updates in all{most}": config.updates_per_step * training.steps} if budget is None else {}),
        "tokens per sample, at most": longest,
        "tokens per step, at most": samples * longest,
        "tokens per micro-batch, at most": training.tokens_per_micro_batch,
        "samples per micro-batch, at least": min(samples, training.tokens_per_micro_batch // longest),
        "proximal policy": config.proximal,
        "staleness, at most": rollout.max_staleness,
    }
    if training.minutes is not None:
        plan[MINUTES] = f"{training.minutes:g}"
    evaluation = config.evaluation
    if evaluation.data:
        rows = evaluated_rows(evaluation.data, evaluation.rows)
        shown = rows if rows is not None else "all" if evaluation.rows is None else f"up to {evaluation.rows}"
        per_row = counted(evaluation.samples_per_prompt, "sample")
        plan["evaluation"] = f"{shown} rows x {per_row}, temperature {evaluation.temperature:g}"
        between = -(-training.steps // evaluation.every) - 1 if evaluation.every and training.steps else 0
        if budget is None:
            plan[f"evaluations{most}"] = between + (2 if training.steps else 1)
    else:
        plan["evaluation"] = "none"
    return plan


def plan_line(plan: Mapping[str, object]) -> str:
    if "rows per update" in plan:  # of a stage
        each = counted(plan["rows per update"], "row")
        return f"{counted(plan['steps'], 'update')} of {each}, of {plan['rows']:,} rows"
    steps = f"steps {plan['steps']}" if isinstance(plan["steps"], str) else counted(plan["steps"], "step")
    return (
        f"{steps}, each {counted(plan['prompts per step'], 'prompt')} x "
        f"{counted(plan['samples per prompt'], 'sample')} = {counted(plan['samples per step'], 'sample')}, "
        f"{counted(plan['updates per step'], 'update')} of {counted(plan['groups per update'], 'group')}"
    )


def missing_files(config: Config) -> list[str]:
    """Files of the recipe that do not exist, as ``key: file``. What the hub has shows when it is loaded."""
    named = [("data.train", item) for item in config.data.train]
    named += [("evaluation.data", item) for item in config.evaluation.data]
    missing = [
        f"{key}: {item.path!r} does not exist{_HUB if not Path(item.path).suffix else ''}"
        for key, item in named
        if not _is_file(item.path) and not names_a_data_set(item)
    ]
    template = getattr(config.data, "chat_template", None)  # a reward model has its own
    if template is not None and not _is_file(template):
        missing.append(f"data.chat_template: {template!r} does not exist")
    return missing


def require_files(config: Config, recipe: Path | None = None) -> None:
    """Raises DataError if a file that the recipe names does not exist."""
    missing = missing_files(config)
    if missing:
        hint = remedy(recipe) if recipe is not None else ""
        raise DataError("\n".join(filter(None, [*missing, hint])))


def remedy(recipe: Path) -> str:
    """How the files of a recipe are made, or where it says so, if it begins with a comment of more than its name; else
    empty."""
    if command := demo_of(recipe):
        return f"`{command}` makes what this recipe trains on, and runs it"
    with recipe.open("rb") as file:
        told = file.readline(1000).split()
        return f"see the comment at the top of {recipe}" if told[:1] == [b"#"] and len(told) > 2 else ""


_HUB = " (a data set of the hub is named owner/name, or has a split: or name:)"


def _is_file(name: str) -> bool:
    return os.path.isfile(name)  # noqa: PTH113  (Path.is_file raises for a name that is too long)


def evaluated_rows(items: list[DataItem], limit: int | None) -> int | None:
    """How many rows will be used, up to ``limit``, as far as it shows without reading more than plain JSON lines (their
    lines that are not blank are counted). None: it does not."""
    if not all(_is_file(item.path) and item.path.endswith((".jsonl", ".ndjson")) for item in items):
        return None
    count = 0
    for item in items:
        with Path(item.path).open("rb") as lines:
            for line in lines:
                count += bool(line.strip())
                if limit is not None and count >= limit:
                    return limit
    return count


def steps_that_fit(minutes: float, used: float, seconds: float) -> int:
    return max(0, int((60 * minutes - used) // seconds))


_INSTALLED = Path(__file__).parents[1] / "shipped_recipes"
_CHECKOUT = Path(__file__).parents[3] / "recipes"


def shipped_recipes() -> list[Path]:
    root = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    return [*sorted(root.glob("*.yaml")), *sorted(root.glob("method/*.yaml"))]


def _by_name() -> dict[str, Path]:
    return {path.stem: path for path in shipped_recipes()}


def existing_recipe(recipe: str | Path) -> Path:
    """``recipe``, or where there is no such file and it is only the name of a shipped one, that one's file."""
    return Path(recipe) if os.path.exists(recipe) else _by_name().get(str(recipe), Path(recipe))  # noqa: PTH110


def name_run_folder(tree: dict[str, Any], recipe: Path) -> None:
    """Of a recipe that names none: by the recipe's own name."""
    run = tree["run"] = {} if tree.get("run") is None else tree["run"]
    if isinstance(run, dict) and run.get("dir") is None:
        run["dir"] = f"runs/{recipe.stem}"


def demo_of(recipe: Path) -> str | None:
    """The command that makes model and data of the demo's recipe; None for any other recipe."""
    return "dapo demo" if recipe.resolve() == recipe_path("cpu-demo").resolve() else None


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, such as ``cpu-demo``. Raises ConfigError: there is none of this name."""
    known = _by_name()
    if name not in known:
        raise ConfigError(f"no recipe {name!r} comes with dapo; there are: {', '.join(known)}")
    return known[name]
