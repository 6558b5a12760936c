"""``dapo demo``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any

import typer

from dapo.commands.shared.errors import errors_for_people
from dapo.commands.shared.options import Debug, Quiet, complete_override
from dapo.commands.train import stopped_by_signals
from dapo.errors import ConfigError
from dapo.util.terminal import Terminal

DEMOS = ("arithmetic", "word-problems")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME] [SECTION.KEY=VALUE]...",
        help="Which demo, arithmetic (the default) or word-problems; then keys of its recipe, such as seed=7.",
        autocompletion=complete_override,
    ),
]


def demo(arguments: Arguments = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """See a model learn on the CPU.

    arithmetic: a small model made from nothing learns to think, in a few minutes. Needs no download.
    word-problems: a pretrained model of 135 M parameters (from the hub) learns to solve word problems, in about ten.

    Everything goes to runs/cpu-demo or runs/cpu-smollm2; an earlier run is kept under another name.
    """
    with errors_for_people(debug, output_is_result=False):
        from dapo.observe.progress import make_listener

        console = Terminal()
        with closing(make_listener(quiet, console)) as listener:
            listener.phase("loading")
            run, overrides = _chosen(arguments or [])
            with stopped_by_signals() as shutdown:
                run(overrides, listener, None if quiet else console, shutdown)


def _chosen(arguments: list[str]) -> tuple[Callable[..., Any], list[str]]:
    named = arguments[:1] if arguments and "=" not in arguments[0] else []
    name = named[0] if named else DEMOS[0]
    if name not in DEMOS:
        raise ConfigError(f"dapo demo {name}: there is no such demo; there are: {', '.join(DEMOS)}")
    from dapo.commands.demo.run import run_demo, run_word_problems

    return run_demo if name == DEMOS[0] else run_word_problems, arguments[len(named) :]
