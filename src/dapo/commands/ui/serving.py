"""The page as a process: alone (``dapo ui``), or beside a training and no longer than it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from dapo.util.serving import LOCAL, Server, is_loopback, listening_socket, url

PORTS = range(7860, 7880)


def token_for(host: str, token: str | None) -> str | None:
    """The token that the page asks for: the one given or DAPO_UI_TOKEN, else a new one where other machines can reach
    it, and none on loopback."""
    given = token or os.environ.get("DAPO_UI_TOKEN", "").strip()
    return given or (None if is_loopback(host) else secrets.token_urlsafe(24))


def address_of(listening: socket.socket, token: str | None) -> str:
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return url(shown, port) + "/" + (f"?token={quote(token, safe='')}" if token else "")


def serve(folders: Sequence[Path], listening: socket.socket, token: str | None) -> None:
    """Serve until a signal to stop (:func:`~dapo.util.shutdown.stop_signals`)."""
    make_server(folders, token).run(sockets=[listening])


def open_browser(address: str) -> None:
    """In a thread: some programs that show pages do not return at once."""
    threading.Thread(target=lambda: webbrowser.open(address), daemon=True).start()


@contextlib.contextmanager
def beside(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The page over ``folder``, in a process of its own, as long as the block lasts; says its address.

    A process of its own, so that no query takes time from the training; it ends with the pipe that it reads, so it
    outlives a training that is killed by nothing.
    """
    listening = listening_socket(LOCAL, PORTS)
    number = listening.fileno()
    command = [sys.executable, "-m", "dapo.commands.ui.serving", str(number), str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True)
    say(f"the page is at {address_of(listening, token_for(LOCAL, None))}")
    listening.close()  # the child's copy goes on
    try:
        yield
    finally:
        assert child.stdin is not None
        child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
        if child.poll() is None:
            child.kill()


def make_server(folders: Sequence[Path], token: str | None) -> Server:
    """A server of the page that is not yet running."""
    from dapo.commands.ui.server import create_app  # not at the top: a training that starts a page needs none of it

    return Server(create_app(folders, token), timeout_graceful_shutdown=3, lifespan="on")


def _child(number: int, folder: Path) -> None:
    server = make_server([folder], token_for(LOCAL, None))

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=number)])


if __name__ == "__main__":
    _child(int(sys.argv[1]), Path(sys.argv[2]))
