"""Who may use the page: this machine alone, or whoever has the token. Sets the headers that keep a text a text."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, unquote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dapo.util.bounded_server import announces_more, limited
from dapo.util.network import wrong_name

_MOST_BYTES = 4 * 2**20
_TOO_LARGE = "a request to this page has 4 MiB at most"
_COOKIE = "dapo_token"
_HEADERS: Mapping[str, str] = {
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


class Guard:
    """Turns away who has not the token, or, where there is none, who does not ask for this machine by its name.

    The token comes as ``Authorization: Bearer``, as a cookie, or once in the address (``?token=``), which sets the
    cookie. What changes something is taken from this page only.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refused = self._refusal(scope)
        receive = limited(receive, _MOST_BYTES, _TOO_LARGE)
        await (self._app if refused is None else refused)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        origin = headers.get("origin") if scope["method"] not in ("GET", "HEAD") else None
        if origin and origin.partition("://")[2] != host:
            return _error(403, "this page takes changes from itself only")
        if announces_more(headers, _MOST_BYTES):
            return _error(413, _TOO_LARGE)
        if self._token is None:
            wrong = wrong_name(host, "--token")
            return _error(403, wrong) if wrong else None
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if "token" in query:
            return self._welcome(scope, query) if self._is_token(query["token"][0]) else _error(401, "a wrong token")
        if self._is_token(_given(headers)):
            return None
        return _error(
            401, "a token is needed: open the address that dapo ui has printed, or send Authorization: Bearer"
        )

    def _welcome(self, scope: Scope, query: dict[str, list[str]]) -> Response:
        """Keep the token in a cookie and out of the address, which people copy and servers log."""
        rest = urlencode({name: values for name, values in query.items() if name != "token"}, doseq=True)
        path = "/" + scope["path"].lstrip("/")  # two slashes in front would be another machine
        answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(_COOKIE, quote(query["token"][0], safe=""), httponly=True, samesite="strict")
        return answer

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


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
