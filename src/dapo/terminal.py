"""Standard output as it really is: its reader may go away (``| head``), and it may know no other letters than ASCII."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import IO, Any

from rich.console import Console


class Terminal(Console):
    """A console whose reader, a program or a terminal, may go away: what is printed then is dropped, and no error."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As of any console; text shows what a terminal would obey."""
        super().print(*(visible(it) if isinstance(it, str) else it for it in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        drop_output(self.file)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal that hung up
                raise
            self.on_broken_pipe()


def drop_output(stream: IO[str] | None = None) -> None:
    """Let a stream (by default standard output) lead nowhere, so that neither a later print nor the flush at the end
    fails."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, (stream or sys.stdout).fileno())
        os.close(nowhere)


def escape_what_cannot_be_written() -> None:
    """Write letters that the terminal's encoding lacks as escapes, such as ``\\u03c0``, in place of failing on them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def visible(text: object) -> str:
    """Text, with an escape for what a terminal would obey or hide: control characters, marks of direction."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def counted(count: object, noun: str, form: str = "") -> str:
    """A number and what it counts: 1 step, 2 steps."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")
