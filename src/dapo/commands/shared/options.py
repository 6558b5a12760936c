"""Arguments that several commands share, and how they are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo.commands.shared.completion import complete_override, complete_run

Host = Annotated[str, typer.Option(help="Address to listen on. All but this machine's own need a token.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", autocompletion=complete_run)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Change keys of the recipe, such as training.steps=20.",
        autocompletion=complete_override,
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder in Hugging Face layout, name on the hub, or a run or checkpoint folder of dapo.",
    ),
]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Sample from the likeliest tokens of this mass.")]
MinP = Annotated[
    float | None, typer.Option(metavar="P", help="Sample from the tokens this many times as likely as the likeliest.")
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Longest response in tokens.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End a response with this text, which belongs to it; may be given again."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs, as JSON.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write all of it as JSON, too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def is_setting(word: str) -> bool:
    return "=" in word and not Path(word).exists()


SAMPLING = ("samples", "temperature", "top_p", "min_p", "stop", "max_tokens")
"""Options of the commands that sample, by the names of their parameters."""


def given_options(parameters: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """What a command was given for its options of these names, by what messages call them; None: nothing."""
    return {f"--{name.replace('_', '-')}": parameters[name] for name in names}


def files_and_settings(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The arguments of a command that takes both in any order."""
    words = words or []
    return [word for word in words if not is_setting(word)], [word for word in words if is_setting(word)]
