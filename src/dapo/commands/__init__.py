"""The command line: one module or folder for each command.

Help, version and every error in a recipe come before torch is imported, so they come at once. Errors of the user's are
printed as a message, without a traceback; their kind is in the exit code.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dapo.commands import (
    compare,
    config,
    data,
    distil,
    doctor,
    evaluate,
    generate,
    plan,
    quantise,
    rank,
    reward_server,
    serve,
    stage,
    train,
    votes,
)
from dapo.commands.demo.command import demo as demo_command
from dapo.commands.inspect.command import inspect as inspect_command
from dapo.commands.replay.command import replay as replay_command
from dapo.commands.report.command import report as report_command
from dapo.commands.reward.command import app as reward_app
from dapo.commands.shared.errors import EXIT_CODES, errors_for_people, for_people
from dapo.commands.shared.options import OfRecipe
from dapo.commands.ui.command import ui as ui_command
from dapo.util.terminal import escape_what_cannot_be_written, open_closed_streams
from dapo.util.version import VERSION

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
        print(f"dapo {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


_COMMANDS = {  # in the order of --help
    "Train": (train.train, stage.sft, stage.dpo, stage.reward_model, stage.phases, compare.compare, demo_command),
    "Before a training": (doctor.doctor, plan.plan, config.config),
    "Look into runs": (ui_command, inspect_command, report_command, replay_command, votes.votes),
    "Use a model": (evaluate.evaluate, generate.generate, serve.serve, quantise.quantise),
    "Rank": (rank.rank, rank.filter_responses, distil.distil),
    "Data and rewards": (reward_server.reward_server,),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        _name = "filter" if _command is rank.filter_responses else None
        _kind = OfRecipe if _command in (train.train, demo_command, doctor.doctor, plan.plan, config.config) else None
        app.command(_name, cls=_kind, epilog=EXIT_CODES, rich_help_panel=_panel)(for_people(_command))
app.add_typer(data.app, name="data", rich_help_panel="Data and rewards")
app.add_typer(reward_app, name="reward", rich_help_panel="Data and rewards")
