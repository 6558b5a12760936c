"""Who may ask the page, and the headers under which it answers."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, unquote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Scope

from dapo.util.gate import Gate

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
        super().__init__(app, token, 4 * 2**20)

    def begins(self, scope: Scope, message: Message) -> None:
        MutableHeaders(scope=message).update(_HEADERS)

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        origin = headers.get("origin") if scope["method"] not in ("GET", "HEAD") else None
        if origin and origin.partition("://")[2] != headers.get("host", ""):
            return _error(403, "this page takes changes from itself only")
        if self.announces_more(scope, headers):
            return _error(413, self.too_large(scope["path"]))
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
