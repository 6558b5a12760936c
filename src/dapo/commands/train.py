"""``dapo train``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapo.commands.shared.errors import complain, exit_code
from dapo.commands.shared.options import Overrides, Quiet, is_setting
from dapo.commands.shared.output import print_lines, say
from dapo.errors import ConfigError, UserError

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.util.shutdown import Shutdown


def train(
    recipe: Annotated[
        str | None,  # and not a path, which would make one slash of the two in an override's address
        typer.Argument(help="YAML file that describes the run.", metavar="RECIPE"),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on with the run in this folder, from its latest checkpoint. RECIPE may be left out."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print it with the numbers that follow, start nothing.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Show the run in the browser while it trains (dapo ui shows it afterwards).")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a model as RECIPE says."""
    from dapo.config.plan import existing_recipe
    from dapo.config.secrets import require_secrets
    from dapo.observe.run_folder import RunFolder

    changes = list(overrides or ())
    if resume is not None and recipe is not None and is_setting(recipe):
        changes, recipe = [recipe, *changes], None  # no recipe: it is the first of the overrides
    named = existing_recipe(recipe) if recipe is not None else None
    config = _config(named, changes, resume)
    named = named or RunFolder(resume or Path()).config
    if dry_run:
        _dry_run(config, named, resume)
        return
    _require_data(config, named)
    if resume is None:
        RunFolder.require_free(config)  # before the data are read
    require_secrets(config.model_dump(mode="json"), named, "as section.key=value")  # a run's config.yaml, perhaps
    with _page(Path(config.run.dir or resume or "runs/run")) if ui else nullcontext():
        _train(config, resume, quiet)


def _config(recipe: Path | None, overrides: list[str], resume: Path | None) -> Config:
    from dapo.config import load_config

    if resume is not None:
        from dapo.orchestrator.resume import require_nothing_in_memory, resume_config

        require_nothing_in_memory(resume)
        return resume_config(resume, recipe, overrides)
    if recipe is None:
        raise ConfigError("a recipe is needed: dapo train RECIPE; or dapo train --resume RUN to go on with a run")
    return load_config(recipe, overrides)


def _page(folder: Path) -> AbstractContextManager[None]:
    from dapo.commands.ui.command import require_ui

    require_ui("--ui")
    from dapo.commands.ui.serving import beside

    return beside(folder, lambda text: print(text, flush=True))


def _train(config: Config, resume: Path | None, quiet: bool) -> None:
    from dapo.observe.progress import make_listener
    from dapo.observe.run_folder import RunFolder
    from dapo.util.memory import collecting_later

    with closing(make_listener(quiet)) as listener, collecting_later():
        with stopped_by_signals(config.run.stop_within_s, resume) as shutdown:
            listener.phase("loading")
            from dapo.orchestrator.inputs import RunOverrides
            from dapo.orchestrator.launch import run_experiment

            folder = RunFolder(resume) if resume else None
            summary = run_experiment(config, listener, RunOverrides(resume=folder), shutdown)
        listener.finished(summary)
    if not quiet:
        say(next_commands(summary.get("run_dir") or config.run.dir))


@contextmanager
def stopped_by_signals(
    within_s: float = math.inf, resume: Path | None = None, again: str = "dapo train --resume {run}"
) -> Iterator[Shutdown]:
    """The signals to stop end the run that is inside of the block, within a bounded time, with its exit code.

    ``within_s``: seconds from the signal to the end, until the run that begins says how many it has. ``resume``: the
    run that goes on, if it is none that begins. ``again``: the command that goes on."""
    from dapo.util.shutdown import Shutdown, Stopped

    with Shutdown(within_s, lambda error: exit_code(error) if isinstance(error, UserError) else 70) as shutdown:
        shutdown.run = shutdown.saved = resume
        try:
            yield shutdown
        except (Stopped, KeyboardInterrupt):
            if shutdown.signal is None:
                raise
            code = shutdown.exit_code
            can = (
                f"to go on: {again.format(run=shlex.quote(str(shutdown.run)))}"
                if shutdown.run
                else "before the run had begun"
            )
            complain(f"stopped by {shutdown.signal.name}, {can} (exit code {code})")
            raise typer.Exit(code) from None


def next_commands(run_dir: str | None) -> list[str]:
    """What to do after a run, as far as the files for it exist."""
    if run_dir is None:
        return []
    folder, named = Path(run_dir), shlex.quote(str(Path(run_dir)))
    lines = []
    if any((folder / "samples").glob("step-*.jsonl")):
        lines.append(f"read what the model wrote: dapo inspect {named} --samples")
    if (folder / "model-after").is_dir():
        more = [f"{folder / 'config.yaml'}", f"model.path={folder / 'model-after'}", f"run.dir={folder}-more"]
        lines.append(f"train on from here: dapo train {shlex.join(more)}")
    if (folder / "metrics.jsonl").is_file():
        lines.append(f"what changed, what it cost and what it wrote, as one page: dapo report {named}")
        lines.append(f"see it in the browser: dapo ui {named}")
    return lines


def _dry_run(config: Config, recipe: Path, resume: Path | None) -> None:
    from dapo.checks.context import config_at_hand
    from dapo.config import warnings_for
    from dapo.config.plan import plan_of, require_files
    from dapo.config.user_parts import own_parts
    from dapo.observe.run_folder import RunFolder, config_yaml

    plan = {name: f"{value:,}" if isinstance(value, int) else value for name, value in plan_of(config).items()}
    plan["memory"] = "not predicted, as the model is not on this machine"
    if config_at_hand(config.model.path):  # otherwise torch is not loaded for it
        from dapo.checks.memory import predicted_from

        plan["memory"] = predicted_from(config)
    if resume is not None:
        plan |= _where_it_goes_on(resume, config)
    if config.rollout.max_staleness or own_parts(config):  # looking at these needs torch
        from dapo.checks.start import check_own_parts

        check_own_parts(config)
        plan |= own_parts(config)
    plan["not looked into here"] = "weights, reward function, rows of the data (dapo doctor)"
    notes = [*plan.items(), *(("warning", text) for text in warnings_for(config))]
    comments = (f"# {name}: {value}" for name, value in notes)  # so that the whole is YAML
    print_lines([config_yaml(config).rstrip("\n"), *comments])
    require_files(config, recipe)
    if resume is None:
        RunFolder.require_free(config)
    _try_model(config)


def _try_model(config: Config) -> None:
    """Raises UserError: there is no folder of the model or of its tokenizer, or a tokenizer that lies in one cannot
    write prompts as the recipe says."""
    from dapo.model.hub import require_folder

    name = config.model.tokenizer or config.model.path
    require_folder("model.path:", config.model.path)
    require_folder("model.tokenizer:" if config.model.tokenizer is not None else "model.path:", name)
    if Path(name).expanduser().is_dir():
        from dapo.data.template import PromptTemplate
        from dapo.model.loading import load_tokenizer

        PromptTemplate(config.data, load_tokenizer(name, config.model.trust_remote_code))


def _where_it_goes_on(run: Path, config: Config) -> dict[str, str]:
    """The checkpoint that a resumed run would begin with (all of its files are read, as they will be then), and what
    is changed from which step on."""
    from dapo.observe.checkpoints import CheckpointId, Checkpoints
    from dapo.observe.run_folder import RunFolder
    from dapo.orchestrator.resume import changes_at

    intact, damaged = Checkpoints(RunFolder(run).checkpoints).find_intact()
    told = [f"{bad.name} is damaged: {why}" for bad, why in damaged]
    where = f"{intact}" if intact else "none of its checkpoints" if told else "no checkpoint yet: from the start"
    changes, place = changes_at(RunFolder(run), config, intact), intact and CheckpointId.parse(intact.name)
    new = "; ".join(str(change) for change in changes if place and change.step > place.steps)
    return {"goes on from": "; ".join([where, *told]), **({"changes": new} if new else {})}


def _require_data(config: Config, recipe: Path) -> None:
    """What can be told before torch is loaded."""
    from dapo.config.plan import require_files
    from dapo.model.hub import require_at_hand
    from dapo.observe.trackers import check_trackers

    check_trackers(config)
    if not config.data.train and config.training.steps:
        raise ConfigError(f"{recipe}: data.train: required but not given; files of prompts to train on (JSONL)")
    require_files(config, recipe)
    require_at_hand("model.path:", config.model.path)
