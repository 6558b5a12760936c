"""Phases: several stages and runs in one recipe, each of which may begin from what an earlier one made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.config import Config, build_config
from dapo.config.composed_reward import plain_rewards
from dapo.config.plan import existing_recipe, require_files
from dapo.config.reading import beside as run_beside
from dapo.config.reading import read_recipe, with_values
from dapo.config.stages import STAGES, RewardModelConfig, StageConfig, beside, build_stage
from dapo.errors import ConfigError, UserError
from dapo.model.hub import is_name
from dapo.observe.progress import Listener, before_and_after
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView, is_run
from dapo.orchestrator.inputs import RunOverrides
from dapo.util.files import write_atomic
from dapo.util.shutdown import Shutdown

REPORT = "report.md"
BEGINS, GOES_ON, DONE = "begins", "goes on", "done before"
_KEYS = ("phases", "dir")
Begun = dict[str, tuple[StageConfig | Config, str]]
"""By name, in their order: the phase as it goes on, and whether it begins, goes on, or was done before."""


def load_phases(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[Path, dict[str, StageConfig | Config]]:
    """The folder of a method, and its phases by name, in their order.

    The recipe has ``phases``, a mapping from names to recipes with ``stage``: one of the stages, or ``dapo``. Text that
    is ``$NAME`` there, such as a path, stands for the model that the phase of this name, an earlier one, leaves.
    Raises ConfigError: with what is wrong in any of them."""
    path = existing_recipe(recipe)
    tree, _ = read_recipe(path, overrides)
    phases = tree.get("phases")
    if "phases" not in tree:
        stages = ", ".join(STAGES).replace("_", "-")  # as commands are named
        raise ConfigError(f"{path}: has no phases; a run is started by dapo train, a stage by dapo {stages}")
    if unknown := [key for key in tree if key not in _KEYS]:
        raise ConfigError(f"{path}: {unknown[0]}: unknown key; valid here: {', '.join(_KEYS)}")
    if not isinstance(phases, dict) or not phases or not all(isinstance(one, dict) for one in phases.values()):
        raise ConfigError(f"{path}: phases: must be a mapping from names to recipes, such as sft: {{stage: sft, ...}}")
    root = Path(str(tree.get("dir") or f"runs/{path.stem}"))
    found: dict[str, StageConfig | Config] = {}
    for name, given in phases.items():
        phase = _filled(dict(given), {one: str(root / one / "model-after") for one in found}, f"{path}: phases.{name}")
        phase["run"] = {**(phase.get("run") or {}), "dir": str(root / name)}
        source, kind = f"{path}: phases.{name}", phase.pop("stage", None)
        if kind == "dapo":
            found[name] = run_beside(build_config(phase, source), path.parent)
        elif kind in STAGES:
            found[name] = beside(build_stage(kind, phase, source), path.parent)
        else:
            raise ConfigError(f"{source}.stage: is {kind}, and can be {', '.join([*STAGES, 'dapo'])}")
    return root, found


def _filled(value: Any, models: Mapping[str, str], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, models, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, models, where) for one in value]
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    if value[1:] not in models and not where.endswith(".path"):  # such as the places of a reward's request
        return value
    if value[1:] not in models:
        known = ", ".join(f"${name}" for name in models) or "none, as this is the first phase"
        raise ConfigError(f"{where}: {value} names no earlier phase; there are: {known}")
    return models[value[1:]]


def run_phases(
    root: Path,
    phases: Mapping[str, StageConfig | Config],
    listener: Listener,
    resume: bool,
    shutdown: Shutdown,
    last_checkpoint: bool = True,
) -> dict[str, Any]:
    """Each phase, one after the other; ``resume``: those that are done are left as they are, and one that was stopped,
    or has more steps now, goes on. ``last_checkpoint``: whether one is written at the end of each. Returns the
    summary of each by name; ``report.md`` in ``root`` tells of all.
    Raises ConfigError: a phase is there already, or was another one; Stopped and UserError as the phases do."""
    from dapo.orchestrator.launch import run_experiment
    from dapo.stages.run import run_stage

    found: dict[str, Any] = {}
    trained = ""
    for name, (config, state) in check_phases(phases, resume).items():
        folder = RunFolder(Path(str(config.run.dir)))
        if state == DONE:
            listener.phase(f"phase {name}: done before")
            if trained:
                listener.warning(f"phase {name} is not done again after {trained}; for that remove {folder.root}")
            found[name] = RunView.read(folder.root).summary
            continue
        listener.phase(f"phase {name}")
        trained = name
        again = RunOverrides(resume=folder if state == GOES_ON else None, last_checkpoint=last_checkpoint)
        if isinstance(config, Config):
            found[name] = run_experiment(config, listener, again, shutdown)
        else:
            found[name] = run_stage(config, listener, again, shutdown)
        write_atomic(root / REPORT, report(found))
    return found


def _as_begun(config: StageConfig | Config, resume: bool) -> tuple[StageConfig | Config, str]:
    """Raises ConfigError: it is another one there."""
    from dapo.orchestrator.resume import check_resumable
    from dapo.stages.run import as_begun

    folder = RunFolder(Path(str(config.run.dir)))
    if not is_run(folder.root):
        return config, BEGINS
    if not resume:
        raise ConfigError(f"{folder.root}: is there already; --resume goes on, or give another dir=FOLDER")
    if isinstance(config, Config):
        check_resumable(folder, config)
    else:
        config = as_begun(folder, config)
    view = RunView.read(folder.root)
    done = view.state == "finished" and view.config["training"]["steps"] == config.training.steps
    return config, DONE if done else GOES_ON


def check_phases(phases: Mapping[str, StageConfig | Config], resume: bool) -> Begun:
    """Look at files, keys, rows and tokenizer of all phases that are to come. A model that a phase is to leave has the
    tokenizer of the one that it begins with. Nothing is written. Raises UserError: what is wrong, in which phase."""
    from dapo.orchestrator.build import Setup
    from dapo.stages.run import StageSetup

    begun = {name: _as_begun(config, resume) for name, config in phases.items()}  # all, at once
    made: dict[str, tuple[str, bool]] = {}  # by path: the model it comes from, and whether it is a reward model
    for name, (config, state) in begun.items():
        base, scores = made.get(config.model.path, (config.model.path, False))
        made[str(RunFolder(Path(str(config.run.dir))).model_after)] = base, isinstance(config, RewardModelConfig)
        if state != BEGINS:
            continue
        looked: Any = with_values(config, {"model.path": base})
        try:
            if scores:
                raise ConfigError(f"model.path: {config.model.path} will be a reward model, which is for reward.path")
            require_files(looked)
            if not isinstance(config, Config):
                steps = StageSetup.of(looked, Listener(), RunOverrides()).config.training.steps
                begun[name] = with_values(config, {"training.steps": steps, "training.epochs": None}), state
                continue
            Setup.of(looked, Listener(), RunOverrides())
            for reward in plain_rewards(config.reward):
                path = getattr(reward, "path", None)
                if path is not None and not made.get(path, (path, True))[1]:
                    raise ConfigError(f"reward.path: {path} will be a policy, and no reward model")
                if path is not None and path not in made and not is_name(path) and not Path(path).expanduser().exists():
                    raise ConfigError(f"reward.path: {path}: no such folder")
        except UserError as error:
            raise type(error)(f"phase {name}: {error}") from None
    return begun


def report(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# Phases", ""]
    for name, summary in summaries.items():
        lines += [
            f"## {name}",
            "",
            f"{summary.get('steps')} steps, {summary.get('stopped')}: `{summary['run_dir']}`",
            "",
        ]
        if rows := before_and_after(summary):
            lines += ["| | before | after |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)
