"""``dapo demo``."""

from __future__ import annotations

from rich.console import Console

from dapo.cli.errors import errors_for_people
from dapo.cli.options import Debug, Overrides, Quiet


def demo(overrides: Overrides = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """See a small model learn to think, on the CPU, in a few minutes. Needs no download.

    Everything goes to runs/cpu-demo; an earlier run is kept under another name.
    """
    with errors_for_people(debug):
        from dapo.progress import make_listener

        console = Console()
        listener = make_listener(quiet, console)
        try:
            listener.phase("loading")
            from dapo.demo import run_demo

            run_demo(overrides or [], listener, None if quiet else console)
        finally:
            listener.close()
