"""Standard output as it really is: its reader may go away (``| head``), its disk be full; it may know ASCII alone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text


class Terminal(Console):
    """A console that may end, with its reader or the room on its disk: what is printed then is dropped, no error."""

    failed = False
    """Whether output of any console on standard output was dropped, for another reason than that its reader ended."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As of any console; text shows what a terminal would obey."""
        super().print(*(visible(it) if isinstance(it, str) else it for it in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        drop_output(self.file)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a full disk, a terminal that hung up
            self.on_broken_pipe()
            if not self.stderr:
                Terminal.failed = True
                warn(f"standard output cannot be written to ({error.strerror}): what is printed is dropped")


def drop_output(stream: IO[str] | None = None) -> None:
    """Let a stream (by default standard output) lead nowhere, so that neither a later print nor the flush at the end
    fails."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, (stream or sys.stdout).fileno())
        os.close(nowhere)


def warn(text: str) -> None:
    """Print a warning, on standard error."""
    said = Text.assemble(("warning: ", "bold yellow"), visible(text))
    Terminal(stderr=True).print(said, soft_wrap=True, highlight=False)


def open_closed_streams() -> None:
    """Let standard streams that were closed when the program began (``>&-``, a daemon) lead nowhere. Otherwise the next
    files to be opened would take their places, and what is printed would be written into those."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8"))
    if "stdout" in closed:
        warn("standard output is closed: what is printed is dropped")


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
