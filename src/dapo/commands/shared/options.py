"""Arguments that several commands share, and how they are told apart. Loads nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dapo.errors import ConfigError

Host = Annotated[str, typer.Option(help="Address to listen on. All but this machine's own need a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")]
TokenEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
]
MaxBody = Annotated[float, typer.Option(min=0.001, metavar="MIB", help="Size of one request.")]
DrainSeconds = Annotated[
    float, typer.Option(min=0, metavar="S", help="After a signal: longest time for running requests to finish.")
]
LiveFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Append requests with consent to training, and feedback, for data.live of a run."
    ),
]
Redact = Annotated[
    str | None,
    typer.Option(metavar="FILE.PY:NAME", help="Function that is given each entry, and returns what to keep."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
Recipe = Annotated[Path, typer.Argument(help="YAML file that describes the run.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Change keys of the recipe, such as training.steps=20."),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder in Hugging Face layout, name on the hub, or a run or checkpoint folder of dapo."
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
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key, such as model.compute_dtype=bfloat16."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs, as JSON.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write all of it as JSON, too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]


class OfRecipe(TyperCommand):
    """A command that takes keys of a recipe. Of one given as an option (``--steps 5``) it says how to give it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's, which typer brings under a name of its own
            name, others = getattr(error, "option_name", ""), getattr(error, "possibilities", None)
            if name and not set(others or ()) - {"--help"}:
                from dapo.config.messages import nearest_key

                answer = nearest_key(name.lstrip("-").replace("-", "_"))
                if answer.startswith("did you mean "):
                    said = f"{name}; keys of the recipe are given as SECTION.KEY=VALUE, without dashes: {answer}"
                    vars(error).update(possibilities=None, message=f"No such option: {said}")
            raise


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
