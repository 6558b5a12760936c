"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Change keys of the recipe, such as training.steps=20."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
