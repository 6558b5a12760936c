"""Arguments that several commands share, and how they are told apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dapo.commands.shared.completion import complete_override, complete_run
from dapo.errors import ConfigError

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
    """Whether an argument is ``section.key=value`` and not the name of a file."""
    return "=" in word and not Path(word).exists()


def files_and_settings(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The arguments of a command that takes both in any order."""
    words = words or []
    return [word for word in words if not is_setting(word)], [word for word in words if is_setting(word)]


def step_range(text: str | None) -> tuple[int, int] | None:
    """First and last step of ``7``, ``3:9``, ``3:`` or ``:9``, as given to ``--steps``."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{0,9})(:?)(\d{0,9})", text)
    if found is None or not (found[1] or found[3]):
        raise ConfigError(f"--steps {text}: expected a step, such as 7, or a range, such as 3:9, 3: or :9")
    first, colon, last = found.groups()
    if not colon:
        return int(first), int(first)
    return int(first or 0), int(last or 10**9)
