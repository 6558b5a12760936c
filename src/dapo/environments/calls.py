"""Tools as the model sees them, and its calls as they stand in what it says.

A class's public methods are its tools; their type hints and docstrings become the JSON schema. How calls are written is
told from the chat template; a template that does not know tools gets them in the system's message, in Hermes' format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.errors import ConfigError
from dapo.util.files import json_or_text, parse_json

RESERVED = ("reset", "reply", "reward", "last_turn", "close")
"""Public names of an environment that are no tools."""

Schema = Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, Any]


class Malformed(ValueError):
    """What stands where a call should cannot be read; the message says why."""


def tools_of(kind: type, what: str) -> list[Schema]:
    """The schemas of a class's tools. Raises ConfigError: a method lacks what a schema is made of."""
    from transformers.utils import get_json_schema

    found: list[Schema] = []
    for name in dir(kind):
        if name.startswith("_") or name in RESERVED or not callable(getattr(kind, name)):
            continue
        try:
            found.append(dict(get_json_schema(getattr(object.__new__(kind), name))))
        except Exception as error:  # Transformers has kinds of its own
            raise ConfigError(
                f"{what}: the tool {name} needs type hints, a docstring and in it a section `Args:` with a line "
                f"`argument: what it is` for each: {error}"
            ) from None
    return found


# --- as the template has them ----------------------------------------------------------------------------------------

_ASKED = """You may call these functions:
{tools}
To call one, write <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>. The results come in \
<tool_response></tool_response>."""


def knows_tools(template: str) -> bool:
    return "tools" in template


def told_otherwise(messages: Sequence[Message], tools: Sequence[Schema]) -> list[Message]:
    """For a template that does not know tools: they stand in the system's message, and replies, those of one turn as
    one block, are the user's."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            found.append(dict(message))
            continue
        said = f"<tool_response>\n{message['content']}\n</tool_response>"
        if found and found[-1]["role"] == "tool":
            found[-1]["content"] += f"\n{said}"
        else:
            found.append({"role": "tool", "content": said})
    if tools:
        asked = _ASKED.format(tools="\n".join(json.dumps(tool.get("function", tool)) for tool in tools))
        if found and found[0]["role"] == "system":
            found[0]["content"] += f"\n\n{asked}"
        else:
            found.insert(0, {"role": "system", "content": asked})
    return [message | {"role": "user"} if message["role"] == "tool" else message for message in found]


# --- as the model writes them ----------------------------------------------------------------------------------------


def _object(text: str) -> Call:
    found = parse_json(text)
    arguments = found.get("arguments", found.get("parameters", {}))
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError('a call is {"name": ..., "arguments": {...}}')
    return Call(found["name"], arguments)


def _listed(text: str) -> list[Call]:
    found = parse_json(text)
    return [_object(json.dumps(one)) for one in (found if isinstance(found, list) else [found])]


def _xml(text: str) -> Call:
    named = re.search(r"<function=([^<>\s]+)>(.*?)(?:</function>|$)", text, re.DOTALL)
    if named is None:
        raise ValueError("there is no <function=NAME>")
    whole = "".join(named[2].rpartition("</parameter>")[:2])  # each search of it finds an end: no quadratic time
    given = re.findall(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", whole, re.DOTALL)
    return Call(named[1], {name: json_or_text(value) for name, value in given})


_FORMATS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("<function=", r"<tool_call>(.*?)(</tool_call>|$)", _xml),
    ("<tool_call>", r"<tool_call>(.*?)(</tool_call>|$)", _object),
    ("[TOOL_CALLS]", r"\[TOOL_CALLS\](.*?)($)", _listed),
    ('"parameters"', r"^(?:<\|python_tag\|>)?\s*(\{.*)($)", _object),
    ("", r"<tool_call>(.*?)(</tool_call>|$)", _object),
)
"""By what stands in the chat template: where calls stand in what a model says, and what reads one."""


def calls_in(text: str, template: str) -> tuple[str, list[Call]]:
    """What is said before the first call, and the calls. Raises Malformed: one of them cannot be read."""
    pattern, read = next((pattern, read) for mark, pattern, read in _FORMATS if mark in template)
    found = list(re.finditer(pattern, text, re.DOTALL))
    calls: list[Call] = []
    for place in found:
        try:
            made = read(place[1])
        except (ValueError, AttributeError, TypeError) as error:
            raise Malformed(f"the call cannot be read: {error}") from None
        calls += made if isinstance(made, list) else [made]
    return (text[: found[0].start()] if found else text), calls
