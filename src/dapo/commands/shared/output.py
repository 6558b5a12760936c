"""What commands say: how far they are, and in the end lines, tables and JSON, also as a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.cells import cell_len

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


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Lines of a table, the first column to the left and the others to the right, its header first.

    ``width``: cells in a line; what does not fit goes into a further table below, with the first column again. None:
    there is no limit.
    """
    widths = [max(cell_len(row[place]) for row in [header, *rows]) for place in range(len(header))]
    start = 1
    while True:
        end = start + 1
        while end < len(header) and (width is None or widths[0] + sum(w + 2 for w in widths[start : end + 1]) <= width):
            end += 1
        shown = [0, *range(start, min(end, len(header)))]
        for row in [header, *rows]:
            gaps = [" " * (widths[place] - cell_len(row[place])) for place in shown]
            cells = [row[p] + gap if p == 0 else gap + row[p] for p, gap in zip(shown, gaps, strict=True)]
            yield "  ".join(cells).rstrip()
        if end >= len(header):
            return
        start = end
        yield ""


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


def require_writable(option: str, output: Path | None, inputs: Iterable[str | Path] = ()) -> None:
    """Make the folder of the output of an option, and try to write there; better said before an hour of work.
    Raises UserError: that cannot be done; ConfigError: it is one of the ``inputs``, which are read."""
    if output is None:
        return
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


def write_results(output: Path | None, found: Mapping[str, Any]) -> None:
    """Write what was found, and by which command, to the file of ``--json``, if any. Raises UserError if that fails."""
    from dapo.config.secrets import redact_command
    from dapo.util.files import write_json, writing

    if output is not None:
        with writing(output):
            write_json(output, {"command": redact_command(sys.argv), **found})
