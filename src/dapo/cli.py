"""The command line: ``dapo train``, ``dapo demo``.

Help, version and every error in a recipe come before torch is imported, so they come at once. Errors of the user's are
printed as a message, without a traceback; their kind is in the exit code.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import dapo
from dapo.errors import ConfigError, DataError, NumericalError, StarvedError, UserError

if TYPE_CHECKING:
    from dapo.config import Config

EXIT_CODES = (
    "Exit codes: 0 done; 1 another error of the input (model, reward function, run folder); 2 an error in the recipe, "
    "the command line or the data; 3 training stopped early (nothing left to learn from, or numbers that are not "
    "finite); 70 a fault of dapo's; 130 interrupted."
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning for language models with DAPO. Start with: dapo demo",
    epilog=EXIT_CODES,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Change keys of the recipe, such as training.steps=20."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def main() -> None:
    """Entry point of the program."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dapo {dapo.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
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
    with _errors_for_people(debug):
        from dapo.config import load_config

        config = load_config(recipe, overrides or ())
        if dry_run:
            _dry_run(config)
            return
        _require_data(config, recipe)
        _train(config, recipe, quiet)


@app.command(epilog=EXIT_CODES)
def demo(overrides: Overrides = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """See a small model learn to think, on the CPU, in a few minutes. Needs no download.

    Everything goes to runs/cpu-demo; an earlier run is kept under another name.
    """
    with _errors_for_people(debug):
        from dapo.progress import make_listener

        console = Console()
        listener = make_listener(quiet, console)
        try:
            listener.phase("loading")
            from dapo.demo import run_demo

            run_demo(overrides or [], listener, None if quiet else console)
        finally:
            listener.close()


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


# --- errors -------------------------------------------------------------------------------------------------------


def exit_code(error: UserError) -> int:
    """The exit code for an error of the user's."""
    if isinstance(error, ConfigError | DataError):
        return 2
    return 3 if isinstance(error, StarvedError | NumericalError) else 1


@contextmanager
def _errors_for_people(debug: bool) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if debug:
            traceback.print_exc()
        _complain(str(error))
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except ExceptionGroup as group:  # of concurrent tasks: the user's error matters, the cancelled rest does not
        with _errors_for_people(debug):
            raise next((e for e in _leaves(group) if isinstance(e, UserError)), group.exceptions[0]) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        _complain(
            f"{type(error).__name__}: {error}\nThis is a fault of dapo's, not yours. "
            + ("Please report it with the traceback above." if debug else "Use --debug for the traceback.")
        )
        raise typer.Exit(70) from None


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _complain(message: str) -> None:
    sys.stdout.flush()
    console: Any = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True, highlight=False)
