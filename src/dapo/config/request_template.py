"""The template of a request for a response, to a server that does not speak OpenAI's API."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator

from dapo.config.section import JsonMapping
from dapo.util.http.mapping import filled

_ASKED = ("prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
ASKED = re.compile(rf"\$(?:{'|'.join(_ASKED)})\b")
"""A field in the template of a request for a response."""


def _can_be_filled(value: dict[str, Any]) -> dict[str, Any]:
    found: list[re.Match[str]] = []
    if other := re.search(r"\$[A-Za-z_]\w*", json.dumps(filled(value, ASKED, [found.append]))):
        what = "fills in values, and this is a key" if ASKED.match(other[0]) else "is no field of a request"
        raise ValueError(f"{other[0]} {what}; known are ${', $'.join(_ASKED)}")
    if "$prompt" not in {one[0] for one in found}:
        raise ValueError(f"it must send $prompt; known are ${', $'.join(_ASKED)}")
    return value


RequestTemplate = Annotated[JsonMapping, AfterValidator(_can_be_filled)]
