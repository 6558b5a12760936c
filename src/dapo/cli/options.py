"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dapo.cli.completion import complete_override

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Change keys of the recipe, such as training.steps=20.",
        autocompletion=complete_override,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def options_layer(given: Mapping[str, tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of the command line as settings, and for messages which option each key comes from.

    ``given``: by the option's name its key of the config and its value; None: not given.
    """
    from dapo.config import nested

    chosen = {option: (key, value) for option, (key, value) in given.items() if value is not None}
    return nested(dict(chosen.values())), {key: option for option, (key, _) in chosen.items()}
