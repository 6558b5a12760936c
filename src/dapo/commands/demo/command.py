"""``dapo demo``."""

from __future__ import annotations

from contextlib import closing

from dapo.commands.shared.options import Overrides, Quiet
from dapo.commands.train import stopped_by_signals
from dapo.util.terminal import Terminal


def demo(overrides: Overrides = None, quiet: Quiet = False) -> None:
    """See a small model, made from nothing, learn to think on the CPU in a few minutes. Needs no download.

    SECTION.KEY=VALUE are keys of its recipe, cpu-demo, such as seed=7. Everything goes to runs/cpu-demo; an earlier run
    is kept under another name.
    """
    from dapo.observe.progress import make_listener

    console = Terminal()
    with closing(make_listener(quiet, console)) as listener:
        listener.phase("loading")
        from dapo.commands.demo.run import run_demo

        with stopped_by_signals() as shutdown:
            run_demo(overrides or [], listener, None if quiet else console, shutdown)
