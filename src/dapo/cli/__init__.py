"""The command line: one module per command.

Help, version and every error in a recipe come before torch is imported, so they come at once. Errors of the user's are
printed as a message, without a traceback; their kind is in the exit code.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import dapo
from dapo.cli import (
    config,
    data,
    demo,
    doctor,
    evaluate,
    generate,
    inspect,
    replay,
    report,
    reward,
    reward_server,
    train,
    ui,
    votes,
)
from dapo.cli.errors import EXIT_CODES, errors_for_people
from dapo.terminal import escape_what_cannot_be_written, open_closed_streams

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning for language models with DAPO. Start with: dapo demo",
    epilog=EXIT_CODES,
)


def main() -> None:
    open_closed_streams()
    escape_what_cannot_be_written()
    try:
        with errors_for_people(debug=False):  # for what is printed outside of commands, such as help
            try:
                app()
            finally:
                sys.stdout.flush()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


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


for _module in (train, doctor, evaluate, generate, inspect, ui, config, demo, replay, report, votes):
    app.command(epilog=EXIT_CODES)(getattr(_module, _module.__name__.rpartition(".")[2]))
app.add_typer(data.app, name="data")
app.add_typer(reward.app, name="reward")
app.command("reward-server", epilog=EXIT_CODES)(reward_server.reward_server)
