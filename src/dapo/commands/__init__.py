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
from dapo.commands.shared.errors import EXIT_CODES, errors_for_people
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


_COMMANDS = (  # in the order of --help
    *(train.train, doctor.doctor, plan.plan, evaluate.evaluate, generate.generate, serve.serve, inspect_command),
    *(ui_command, config.config, demo_command, replay_command, report_command, votes.votes, stage.sft, stage.dpo),
    *(stage.phases, compare.compare, rank.rank, distil.distil, quantise.quantise),
)
for _command in _COMMANDS:
    app.command(epilog=EXIT_CODES)(_command)
app.add_typer(data.app, name="data")
app.add_typer(reward_app, name="reward")
app.command("filter", epilog=EXIT_CODES)(rank.filter_responses)
app.command("reward-model", epilog=EXIT_CODES)(stage.reward_model)
app.command("reward-server", epilog=EXIT_CODES)(reward_server.reward_server)
