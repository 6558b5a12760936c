"""``dapo ui``."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from dapo.commands.shared.options import Host, Quiet
from dapo.errors import ConfigError, install

_NEEDS = ("duckdb", "fastapi", "uvicorn")


def ui(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN|FOLDER", help="Run folders, or folders that hold runs.")
    ],
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one. By default 7860, or the next free one.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="What a browser must show; by default DAPO_UI_TOKEN, which other accounts cannot see, or a new one "
            "where it is needed.",
        ),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address, as with a token.")] = False,
    quiet: Quiet = False,
) -> None:
    """Show runs in the browser: curves, samples, alarms, time, live while they train. Ctrl-C ends it."""
    require_ui("dapo ui")
    from dapo.commands.ui.runs import check_folders
    from dapo.commands.ui.serving import PORTS, address_of, open_browser, serve, token_for
    from dapo.util.serving import listening_socket

    check_folders(folders)
    wanted = token_for(host, token)
    listening = listening_socket(host, PORTS if port is None else [port])
    address = address_of(listening, wanted)
    print(address if quiet else f"the page is at {address} (Ctrl-C ends it)", flush=True)
    if not no_browser and wanted is None:  # other accounts see a browser's command line, and the token in it
        open_browser(address)
    with contextlib.suppress(KeyboardInterrupt):  # no error: it is how the page is ended
        serve(folders, listening, wanted)


def require_ui(what: str) -> None:
    """Raises ConfigError if a package that the page needs is missing."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what}: needs {', '.join(missing)}, which is not installed: {install('ui')}")
