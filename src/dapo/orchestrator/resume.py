"""Going on with a run: which recipe it has, and what may be another one than before."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from dapo.config import Config, build_config, flat, load_config, load_yaml
from dapo.config.on_resume import (
    BETWEEN_STEPS,
    BY_CONTENT,
    FIXED,
    FROM_THE_NEXT_STEP,
    MAY_CHANGE_UNLESS_DETERMINISTIC,
    is_one_of,
    may_change,
)
from dapo.config.secrets import redact, require_secrets
from dapo.config.user_parts import own_parts
from dapo.errors import ConfigError
from dapo.observe.changes import Change, read_changes
from dapo.observe.checkpoints import CheckpointId, Checkpoints
from dapo.observe.run_folder import RunFolder
from dapo.util.differences import Difference, differences
from dapo.util.files import read_json, read_text


def resume_config(run: Path, recipe: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The recipe of a run that goes on: its own, or ``recipe`` if that is the same but for keys that may change.
    Raises ConfigError: ``run`` is no run, a key differs that may not, or ``run.dir`` is to be another folder."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ConfigError(f"--resume {run}: not a run folder: it holds no config.yaml")
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "run.dir" and Path(value).resolve() != run.resolve():
            raise ConfigError(f"--resume {run}: {override}: a run goes on in its folder; to keep both, copy it first")
    config = load_config(recipe or folder.config, [*overrides, f"run.dir={run}"])
    remedy = "as section.key=value or by naming the recipe: dapo train RECIPE --resume RUN"
    require_secrets(config.model_dump(mode="json"), f"--resume {run}", remedy)
    _require_paths(folder, config)
    check_resumable(folder, config)
    return config


def how_to_resume(run: Path, in_memory: Sequence[str]) -> str:
    """What goes on with a run. ``in_memory``: arguments of ``dapo.train`` that its folder does not hold."""
    if not in_memory:
        return f"dapo train --resume {shlex.quote(str(run))}"
    # a loaded model was trained in place, so it is no longer what the run began with
    model = f'"{run}/model-before"' if "model" in in_memory else "..."
    same = [name for name in in_memory if name not in ("model", "tokenizer")]
    return f'dapo.train({model}, ..., resume="{run}") with the same {", ".join([*same, "settings"])}'


def require_nothing_in_memory(run: Path) -> None:
    """Raises ConfigError: the run was given something by ``dapo.train`` that its folder does not hold."""
    named: list[str] = []
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):  # there may be no such run
        named = list(read_json(RunFolder(run).fingerprint)["in_memory"])
    if named:
        raise ConfigError(
            f"--resume {run}: was begun in Python, and its folder does not hold what was passed there as "
            f"{', '.join(named)}; go on in Python: {how_to_resume(run, named)}"
        )


def _require_paths(folder: RunFolder, config: Config) -> None:
    """Raises ConfigError: files that the recipe names are not here but in the folder that the run was at work in."""
    try:
        environment = read_json(folder.environment)
        begun = Path(environment.get("resumed", [environment])[-1]["folder"])
    except (OSError, ValueError, AttributeError, LookupError, TypeError):  # damaged, or of an earlier version
        return
    named = [(key, value) for key, value in flat(config.model_dump(mode="json")) if is_one_of(key, BY_CONTENT)]
    named += own_parts(config).items()
    items = [(key, one) for key, value in named for one in (value if isinstance(value, list) else [value]) if one]
    files = [(key, one["path"] if isinstance(one, dict) else re.sub(r"(\.py):\w+$", r"\1", one)) for key, one in items]
    lost = [f"{key}: {f}" for key, f in files if not os.path.exists(f) and os.path.exists(begun / f)]  # noqa: PTH110
    if lost:
        raise ConfigError(
            f"--resume {folder.root}: not found in {Path.cwd()}, where relative paths start: {', '.join(lost)}.\n"
            f"They are in {begun}, where the run was at work: go on from there, or give their paths as key=value"
        )


def check_resumable(folder: RunFolder, config: Config) -> None:
    """Raises ConfigError: ``folder`` is no run's, or ``config`` would make it another run, or cannot hold yet."""
    refused = [
        f"{found} ({_why_not(found.key)})"
        for found in _differences(folder, config)
        if not may_change(found.key, config.runtime.deterministic)
    ]
    if refused:
        lines = "\n".join(refused)
        raise ConfigError(
            f"{folder.root}: these settings differ from those of the run, and would make it another one:\n{lines}\n"
            f"To train on with other settings, start a new run from its weights (model.path)"
        )
    changes_at(folder, config, Checkpoints(folder.checkpoints).latest())


def changes_at(
    folder: RunFolder, config: Config, checkpoint: Path | None, contents: Sequence[Difference] = ()
) -> list[Change]:
    """All changes of a run that goes on with ``config``, the earlier ones first. Those recorded after ``checkpoint``,
    which it goes on from, count no more: what differs from the settings that were in force there is changed there now.
    None: it starts anew, and no step had other settings. ``contents``: what has changed in files since the last start.
    Raises ConfigError: a setting that changes between two steps only, and ``checkpoint`` is inside of one; or fewer
    steps; UserError: the record of earlier changes is damaged."""
    if checkpoint is None:
        return []
    place = CheckpointId.parse(checkpoint.name) or CheckpointId(0)
    begun, later = place.begun, [*FROM_THE_NEXT_STEP, *BETWEEN_STEPS]  # begun: the last step that has its settings
    later += ["fingerprint.advantage"] * (place.updates > 0)  # the step under way has its advantages
    if config.training.steps < place.steps:
        raise ConfigError(f"training.steps={config.training.steps}: {place.steps} steps of {folder.root} are done")

    def first(key: str) -> int:
        return begun + 1 if is_one_of(key, later) else place.steps + 1

    recorded = read_changes(folder.fingerprint)
    earlier = [one for one in recorded if one.step < first(one.key)]
    moved = ("run.", *(key for key in BY_CONTENT if not key.startswith("reward.")))
    new = [one for one in _differences(folder, config) if not one.key.startswith(moved)]
    new += [one._replace(key=f"fingerprint.{one.key}") for one in contents]
    merged: dict[str, Difference] = {}
    for one in [*(Difference(c.key, c.old, c.new) for c in recorded if c not in earlier), *new]:
        merged[one.key] = one._replace(was=merged.get(one.key, one).was)
    found = [one for one in merged.values() if one.was != one.now]
    methods = [one.key for one in found if is_one_of(one.key, ("algorithm.objective", "algorithm.advantage.kind"))]
    later += [f"fingerprint.{key.split('.')[1]}" for key in methods]  # another file: from the same step on
    inside = [] if place.between_steps else [str(one) for one in found if is_one_of(one.key, BETWEEN_STEPS)]
    if inside:
        raise ConfigError(
            f"{folder.root}: {place.name} is inside of step {begun}, and these settings change between steps only:\n"
            + "\n".join(inside)
            + f"\nWhat would work: finish that step without them, with training.steps={begun}; or move "
            f"checkpoints/{place.name} elsewhere, to go on from the checkpoint before it"
        )
    return earlier + [Change(first(one.key), *one, f"{date.today()}") for one in found]


def on_its_day(config: Config, folder: RunFolder) -> Config:
    """``config`` with the date that the prompts of a run tell, unless it names one itself."""
    told = (_settings(folder).get("data") or {}).get("today")
    return on_day(config, date.fromisoformat(str(told))) if told and config.data.today is None else config


def on_day(config: Config, today: date | None) -> Config:
    """``config`` with a date for the chat template; None: the template asks for none."""
    return config.model_copy(update={"data": config.data.model_copy(update={"today": today})})


def _settings(folder: RunFolder) -> Any:
    """Those that the run had when it last began. Its config.yaml may have been edited since, as a recipe is."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        settings = read_json(folder.fingerprint).get("settings")
        if isinstance(settings, dict):
            return settings
    try:  # of an earlier version, or killed before its fingerprint was written
        return load_yaml(read_text(folder.config))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder.config}: cannot be read: {error}") from None


def _differences(folder: RunFolder, config: Config) -> list[Difference]:
    """From the settings of a run. Those that have come with a later version were at their defaults."""
    stored = _settings(folder)
    with contextlib.suppress(ConfigError):  # it has keys that are gone: the comparison will name them
        stored = build_config(stored, file=folder.config).model_dump(mode="json")
    return list(differences(redact(stored), redact(config.model_dump(mode="json"))))


def _why_not(key: str) -> str:
    if is_one_of(key, MAY_CHANGE_UNLESS_DETERMINISTIC):
        return "with runtime.deterministic it would change the last bits"
    return next((why for why, keys in FIXED.items() if is_one_of(key, keys)), "no key of this version")
