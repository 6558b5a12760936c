"""What commands say: how far they are while they work, lines and JSON in the end, and the JSON file they may write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo.errors import ConfigError, UserError


@contextmanager
def status_line(quiet: bool, text: str) -> Iterator[Callable[[str], None]]:
    """One line on the terminal, as long as the block lasts, that says how far a command is: ``text``, and then what the
    call that it gives is called with. Nothing at all if ``quiet``, or where there is no terminal."""
    from rich.text import Text

    from dapo.util.terminal import Terminal

    console = Terminal(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield lambda text: status.update(Text(text))


def terminal_width() -> int | None:
    """Cells in a line of standard output; None where it is no terminal, and lines may be of any length."""
    from dapo.util.terminal import Terminal

    console = Terminal()
    return console.width if console.is_terminal else None


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def say(lines: Iterable[str], stderr: bool = False) -> None:
    """Print lines of any length, with an escape for what a terminal would obey."""
    from dapo.util.terminal import Terminal

    console = Terminal(stderr=stderr)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def require_writable(option: str, output: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Make the folder of the output of an option, and try to write there; better said before an hour of work.
    Raises UserError: that cannot be done; ConfigError: it is one of the ``inputs``, which are read."""
    if any(output.resolve() == Path(one).resolve() for one in inputs):
        raise ConfigError(f"{option}: {str(output)!r} is one of the files to be read; name another file")
    try:
        if output.is_dir():
            raise UserError(f"{option}: cannot write to {str(output)!r}: it is a folder")
        output.parent.mkdir(parents=True, exist_ok=True)
        probe = output.with_name(f".{output.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{option}: cannot write to {str(output)!r}: {error.strerror or error}") from None


def write_results(output: Path, found: Mapping[str, Any]) -> None:
    """Write what was found, and by which command, to the file of ``--json``. Raises UserError if that fails."""
    from dapo.config.secrets import redact_command
    from dapo.util.files import write_json, writing

    with writing(output):
        write_json(output, {"command": redact_command(sys.argv), **found})
