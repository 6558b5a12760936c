"""``dapo sft``, ``dapo dpo``, ``dapo reward-model`` and ``dapo phases``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dapo.commands.shared.options import Overrides, Quiet, is_setting
from dapo.commands.shared.output import say
from dapo.commands.train import stopped_by_signals
from dapo.errors import ConfigError
from dapo.util.terminal import Terminal, counted

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.config.stages import StageConfig

Recipe = Annotated[str | None, typer.Argument(help="YAML file that describes the stage.", metavar="RECIPE")]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check recipe and rows, print what follows, start nothing.")]
Curve = Annotated[
    int, typer.Option(min=0, metavar="K", help="Train K times, on growing parts of the rows, each twice the last.")
]


def _command(stage: str, told: str) -> Callable[..., None]:
    def command(
        recipe: Recipe = None,
        overrides: Overrides = None,
        resume: Resume = None,
        curve: Curve = 0,
        dry_run: DryRun = False,
        quiet: Quiet = False,
    ) -> None:
        _stage(stage, recipe, list(overrides or ()), resume, curve, dry_run, quiet)

    command.__name__, command.__doc__ = stage, told
    return command


sft = _command("sft", "Fine-tune a model on demonstrations: prompts with responses, or conversations.")
dpo = _command("dpo", "Train a model on preferences: pairs or rankings of responses (DPO, IPO, SimPO).")
reward_model = _command("reward_model", "Train a reward model on pairs, rankings or labelled texts.")


def phases(
    recipe: Annotated[str, typer.Argument(help="YAML file with phases.", metavar="RECIPE")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: phases that are done stay as they are.")] = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Run several stages one after the other, such as sft, reward_model and dapo, as phases.NAME of RECIPE say."""
    from dapo.observe.progress import make_listener
    from dapo.stages.phases import REPORT, check_phases, load_phases, run_phases

    root, found = load_phases(recipe, overrides or ())
    if dry_run:
        for name, (config, state) in check_phases(found, resume).items():
            kind, steps = getattr(config, "stage", "dapo"), counted(config.training.steps, "step")
            print(f"phase {name}: {state}; {kind} from {config.model.path}, {steps}, in {root / name}")
        return
    again = f"dapo phases {recipe} --resume"
    with closing(make_listener(quiet)) as listener, stopped_by_signals(again=again) as shutdown:
        run_phases(root, found, listener, resume, shutdown)
    if not quiet:
        say([f"what each phase changed: {root / REPORT}"])


def _stage(
    stage: str, recipe: str | None, changes: list[str], resume: Path | None, curve: int, dry_run: bool, quiet: bool
) -> None:
    from dapo.config.plan import existing_recipe, require_files
    from dapo.config.stages import load_stage
    from dapo.observe.progress import make_listener
    from dapo.observe.run_folder import RunFolder
    from dapo.util.memory import collecting_later

    if resume is not None and recipe is not None and is_setting(recipe):
        changes, recipe = [recipe, *changes], None
    if (recipe is None) == (resume is None):
        name = f"dapo {stage.replace('_', '-')}"
        raise ConfigError(f"give a recipe, {name} RECIPE, or a run to go on with, {name} --resume RUN")
    if resume is not None:
        from dapo.stages.run import resume_stage

        config = resume_stage(stage, resume, changes)
    else:
        config = load_stage(stage, recipe or "", changes)
    if curve and (resume is not None or not config.evaluation.data):
        raise ConfigError("--curve compares runs from the start on held-out rows: give a RECIPE with evaluation.data")
    if dry_run:
        show_plan(config)
        return
    require_files(cast("Config", config), existing_recipe(recipe) if recipe else None)
    with closing(make_listener(quiet)) as listener, collecting_later():
        again = f"dapo {stage.replace('_', '-')} " + (f"{recipe} --curve {curve}" if curve else "--resume {run}")
        with stopped_by_signals(config.run.stop_within_s, resume, again) as shutdown:
            listener.phase("loading")
            from dapo.orchestrator.inputs import RunOverrides
            from dapo.stages.run import run_curve, run_stage

            inputs = RunOverrides(resume=RunFolder(resume) if resume else None)
            if curve:
                summary = run_curve(config, curve, listener, shutdown)
            else:
                summary = run_stage(config, listener, inputs, shutdown)
        listener.finished(summary)
    if not quiet:
        say([_next(config, f"{summary['run_dir']}/model-after")])


def _next(config: Any, model: str) -> str:
    if config.stage != "reward_model":
        return f"train on from here: dapo train RECIPE model.path={model}"
    section = f"kind: model, path: {model}, template: {config.reward_model.template}"
    return f"train a policy by it: dapo train RECIPE 'reward={{{section}, max_length: {config.data.max_length}}}'"


def show_plan(config: StageConfig) -> None:
    """The recipe with what follows, once rows, tokenizer and template have been tried. Raises UserError: one is bad."""
    from dapo.checks.memory import predicted_from
    from dapo.config.plan import require_files
    from dapo.observe.progress import PlainListener
    from dapo.observe.run_folder import config_yaml
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.stages.run import StageSetup

    require_files(cast("Config", config))
    setup = StageSetup.of(config, PlainListener(Terminal(stderr=True)), RunOverrides())
    print(config_yaml(setup.config), end="")
    print(f"# rows: {setup.source.rows:,}, held out: {len(setup.heldout):,}; updates: {setup.config.training.steps:,}")
    print(f"# memory: {predicted_from(setup.config)}")
