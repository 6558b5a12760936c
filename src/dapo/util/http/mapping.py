"""Bodies of requests from templates with fields, and values out of replies: for services of a user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from dapo.util.http.faults import BadReply, one_line


def filled(template: Any, field: re.Pattern[str], values: Sequence[Callable[[re.Match[str]], Any]]) -> Any:
    """``values``: of the fields, for each item. An element of a list that holds a field is repeated for each of them. A
    text that is nothing but a field becomes its value, of any type."""
    if isinstance(template, dict):
        return {key: filled(value, field, values) for key, value in template.items()}
    if isinstance(template, list):
        repeated = (
            [filled(one, field, [value]) for value in values] if field.search(json.dumps(one)) else [one]
            for one in template
        )
        return [element for elements in repeated for element in elements]
    if not isinstance(template, str):
        return template
    if whole := field.fullmatch(template):
        return values[0](whole)
    return field.sub(lambda found: as_text(values[0](found)), template)


def as_text(value: Any) -> str:
    """A value inside of text: empty for None, otherwise JSON if it is no text."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def pick(reply: Any, path: str, key: str) -> Any:
    """The value at ``path`` (the config's ``key``). Raises BadReply: there is none."""
    for name in path.split(".") if path else ():
        if not isinstance(reply, dict):
            raise BadReply(f"a mapping with {name!r} was expected ({key}={path}), got {shown(reply)}")
        if name not in reply:
            keys = ", ".join(map(repr, reply)) or "none"
            raise BadReply(f"the reply has no {name!r} ({key}={path}); its keys are {keys}")
        reply = reply[name]
    return reply


def shown(value: Any) -> str:
    return f"{type(value).__name__} {one_line(repr(value))[:80]}"
