"""How far a command is, while it works."""

from __future__ import annotations

from rich.text import Text

from dapo.terminal import Terminal


class StatusLine:
    """One line on the terminal that says how far it is; nothing where there is no terminal.

    Args:
        quiet: nothing at all.
        text: what it says at first.
    """

    def __init__(self, quiet: bool, text: str) -> None:
        console = Terminal(stderr=True)
        self._status = None if quiet or not console.is_terminal else console.status(text)
        if self._status is not None:
            self._status.start()

    def __call__(self, text: str) -> None:
        """Say ``text`` from now on; it is shown as it is."""
        if self._status is not None:
            self._status.update(Text(text))

    def close(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()
