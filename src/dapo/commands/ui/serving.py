"""The page as a process: alone (``dapo ui``), or beside a training and no longer than it; and who may ask it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Scope

from dapo.util.serving import LOCAL, Gate, Server, is_loopback, listening_socket, url

PORTS = range(7860, 7880)
_COOKIE = "dapo_token"
_HEADERS: Mapping[str, str] = {  # so that samples never run as script
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard(Gate):
    """Turns away who has not the token, or, where there is none, who does not ask for this machine by its name.

    The token comes as ``Authorization: Bearer``, as a cookie, or once in the address (``?token=``), which sets the
    cookie. What changes something is taken from this page only.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        super().__init__(app, token, 4 * 2**20, "a request to this page has 4 MiB at most")

    def begins(self, scope: Scope, message: Message) -> None:
        MutableHeaders(scope=message).update(_HEADERS)

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        origin = headers.get("origin") if scope["method"] not in ("GET", "HEAD") else None
        if origin and origin.partition("://")[2] != headers.get("host", ""):
            return _error(403, "this page takes changes from itself only")
        if self.announces_more(headers):
            return _error(413, self._too_large)
        if wrong := self.wrong_name(headers, "--token"):
            return _error(403, wrong)
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._token is not None and "token" in query:
            right = self.is_token(query["token"][0].encode())
            return self._welcome(scope, query) if right else _error(401, "a wrong token")
        if self._token is None or self.is_token(_given(headers).encode()):
            return None
        how = "open the address that dapo ui has printed, or send Authorization: Bearer"
        return _error(401, f"a token is needed: {how}")

    def _welcome(self, scope: Scope, query: dict[str, list[str]]) -> Response:
        """Keep the token in a cookie and out of the address, which people copy and servers log."""
        rest = urlencode({name: values for name, values in query.items() if name != "token"}, doseq=True)
        path = "/" + scope["path"].lstrip("/")  # two slashes in front would be another machine
        answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(_COOKIE, quote(query["token"][0], safe=""), httponly=True, samesite="strict")
        return answer


def _given(headers: Headers) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
    except CookieError:
        return ""
    return unquote(found.value) if found else ""


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


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
    """Serve until a signal to stop (:func:`~dapo.util.process.stop_signals`)."""
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


def make_server(folders: Sequence[Path], token: str | None, period: float = 0.5) -> Server:
    """A server of the page that is not yet running; ``period``: seconds between two looks for what is new."""
    from dapo.commands.ui.server import create_app

    class PageServer(Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.closing.set()
            await super().shutdown(sockets)

    app = create_app(folders, token, period)
    return PageServer(app, timeout_graceful_shutdown=3, lifespan="on")


def _child(number: int, folder: Path) -> None:
    server = make_server([folder], token_for(LOCAL, None))

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=number)])


if __name__ == "__main__":
    _child(int(sys.argv[1]), Path(sys.argv[2]))
