"""``dapo train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from dapo.cli.errors import errors_for_people
from dapo.cli.options import Debug, Overrides, Quiet
from dapo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dapo.config import Config


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML file that describes the run.", metavar="RECIPE")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print it with the numbers that follow, start nothing.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a model as RECIPE says."""
    with errors_for_people(debug):
        from dapo.config import load_config

        config = load_config(recipe, overrides or ())
        if dry_run:
            _dry_run(config)
            return
        _require_data(config, recipe)
        _train(config, recipe, quiet)


def _train(config: Config, recipe: Path, quiet: bool) -> None:
    from dapo.progress import make_listener

    listener = make_listener(quiet)
    try:
        listener.phase("loading")
        from dapo.experiment import run_experiment

        summary = run_experiment(config, listener)
        listener.finished(summary)
    finally:
        listener.close()
    if not quiet:
        for line in next_commands(recipe, summary.get("run_dir") or config.run.dir):
            Console().print(line, markup=False, highlight=False, soft_wrap=True)


def next_commands(recipe: Path, run_dir: str | None) -> list[str]:
    """What to do after a run, as far as the files for it exist."""
    if run_dir is None:
        return []
    folder = Path(run_dir)
    lines = []
    first = next(iter(sorted((folder / "samples").glob("step-*.jsonl"))), None)
    if first is not None:
        lines.append(f"read what the model wrote: less {first}")
    if (folder / "model-after").is_dir():
        lines.append(
            f"train on from here: dapo train {recipe} model.path={folder / 'model-after'} run.dir={folder}-more"
        )
    return lines


def _dry_run(config: Config) -> None:
    from dapo.config import warnings_for
    from dapo.plan import missing_files, plan_of
    from dapo.run_folder import config_yaml

    console = Console()
    plan = {name: f"{value:,}" if isinstance(value, int) else value for name, value in plan_of(config).items()}
    notes = [*(f"{name}: {value}" for name, value in plan.items()), *(f"warning: {w}" for w in warnings_for(config))]
    if console.is_terminal:
        from rich.syntax import Syntax

        console.print(Syntax(config_yaml(config), "yaml", background_color="default", word_wrap=True))
        for name, value in plan.items():
            console.print(Text.assemble(f"{name:>34}  ", (value, "bold")))
        for warning in warnings_for(config):
            console.print(Text.assemble(("warning: ", "bold yellow"), warning))
    else:  # as comments, so that the whole is YAML
        print(config_yaml(config) + "\n".join(f"# {note}" for note in notes))
    missing = missing_files(config)
    if missing:
        raise DataError("\n".join(missing))


def _require_data(config: Config, recipe: Path) -> None:
    """What can be told before torch is loaded."""
    from dapo.plan import missing_files

    if not config.data.train and config.training.steps:
        raise ConfigError(f"{recipe}: data.train: required but not given; files of prompts to train on (JSONL)")
    missing = missing_files(config)
    if missing:
        raise DataError("\n".join(missing))
