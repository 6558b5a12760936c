"""What the status of a reply says."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from dapo.errors import UserError
from dapo.util.http.backoff import requested_pause
from dapo.util.http.connections import beginning
from dapo.util.http.faults import Fault, Refusal, error_text

_LARGEST_ERROR = 2**16
_LATER = (408, 425, 429)
_NOT_READY = (502, 503, 504)
_REFUSED = (413, 422)
"""Statuses that concern this request only, such as one that is too large."""


async def checked(
    reply: aiohttp.ClientResponse, name: str, section: str, error: type[UserError]
) -> aiohttp.ClientResponse:
    """``reply``, if all is well. ``section``: of the recipe, whose keys say how the server is reached.
    Raises, by the status, Fault: ask again later; Refusal: ask for less; ``error``: asking again is no use."""
    if 200 <= reply.status < 300:
        return reply
    text, retry = error_text(await beginning(reply, _LARGEST_ERROR))
    code = reply.status
    cause = f"{code} {reply.reason}" + (f": {text}" if text else "")
    if retry is not False and (code in _LATER or code >= 500):
        pause_s = requested_pause(reply.headers.get("Retry-After"))
        raise Fault(cause, pause_s=pause_s, smaller=code == 500, alive=code in _NOT_READY)
    if code in _REFUSED:
        raise Refusal(cause)
    raise error(f"{name}: {cause}{_advice(code, reply.headers, section)}")


def _advice(code: int, headers: Mapping[str, str], section: str) -> str:
    if code in (401, 403):
        return f"; {section}.token_env names the environment variable with the token of the server"
    if code in (301, 302, 303, 307, 308):
        return f"; it points to {headers.get('Location', 'another address')}: put that into {section}.url"
    if code in (404, 405):
        return f"; is {section}.url right?"
    return "; the server does not take what it was sent" if code == 400 else ""
