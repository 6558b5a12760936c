"""Errors of the user's, as a message without a traceback; their kind is in the exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from dapo.errors import ConfigError, DataError, NumericalError, StarvedError, UserError
from dapo.util.terminal import Terminal, drop_output, visible

EXIT_CODES = (
    "Exit codes: 0 done; 1 another error of the input (model, reward function, run folder); 2 an error in the recipe, "
    "the command line or the data; 3 training stopped early (nothing left to learn from, or numbers that are not "
    "finite); 70 a fault of dapo's; 75 told to stop, --resume goes on; 128 + n ended at once by signal n."
)

_NO_FAULTS = {
    **{number: f"cannot be written to: {os.strerror(number)}" for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO)},
    errno.ENAMETOOLONG: "no file can have a name that long",  # ours are all short
}
"""What may be wrong with the machine or a name wherever something is read or written."""


def exit_code(error: UserError) -> int:
    if isinstance(error, ConfigError | DataError):
        return 2
    return 3 if isinstance(error, StarvedError | NumericalError) else 1


@contextmanager
def errors_for_people(debug: bool, output_is_result: bool = True) -> Iterator[None]:
    """Turn what goes wrong inside into a message and an exit code. A reader that went away is nothing wrong; output
    that could not be written is, where it is what the command is for."""
    try:
        yield
        sys.stdout.flush()
        if output_is_result and Terminal.failed:  # a warning has said so
            raise typer.Exit(1)
    except BrokenPipeError:
        drop_output()
        raise typer.Exit from None
    except UserError as error:
        if debug:
            traceback.print_exc()
        complain(str(error))
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(130) from None
    except typer.Exit:
        raise
    except ExceptionGroup as group:  # of concurrent tasks: the user's error matters, the cancelled rest does not
        found: BaseException = group.subgroup(UserError) or group
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        with errors_for_people(debug):
            raise found from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in _NO_FAULTS:
            complain(f"{error.filename or 'standard output or a file'}: {_NO_FAULTS[error.errno]}")
            raise typer.Exit(1) from None
        complain(
            f"{type(error).__name__}: {error}\nThis is a fault of dapo's, not yours. "
            + ("Please report it with the traceback above." if debug else "Use --debug for the traceback.")
        )
        raise typer.Exit(70) from None


def for_people(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option ``--debug``; what goes wrong in it is told. Its output is its result, unless it makes
    runs."""
    signature = inspect.signature(command, eval_str=True)
    told = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=told)

    @functools.wraps(command)
    def telling(debug: bool, **given: Any) -> None:
        with errors_for_people(debug, given.get("dry_run", command.__name__ not in ("demo", "compare"))):
            command(**given)

    telling.__signature__ = signature.replace(parameters=[*signature.parameters.values(), debug])  # type: ignore[attr-defined]
    return telling


def complain(message: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    said = Text.assemble(("error: ", "bold red"), visible(message))
    Terminal(stderr=True).print(said, soft_wrap=True, highlight=False)
