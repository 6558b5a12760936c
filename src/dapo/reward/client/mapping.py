"""From responses to the body of a request (the template ``reward.request``), and from its reply to verdicts. Replies
are not trusted: number, type and range of their values are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo.config.reward import FIELD, fields_of
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.client.scorer import Call
from dapo.reward.contract import Doubt, fields
from dapo.reward.convert import to_reward
from dapo.util.http.faults import BadReply, one_line

_NOTHING = object()


def fill(template: Any, calls: Sequence[Call]) -> Any:
    """An element of a list that holds a field is repeated for each of ``calls``. A text that is nothing but a field
    becomes its value, of any type. Raises RewardError: a row lacks a key of the template."""
    if isinstance(template, dict):
        return {key: fill(value, calls) for key, value in template.items()}
    if isinstance(template, list):
        repeated = ([fill(one, [call]) for call in calls] if any(fields_of(one)) else [one] for one in template)
        return [element for elements in repeated for element in elements]
    if not isinstance(template, str):
        return template
    if whole := FIELD.fullmatch(template):
        return _value(whole, calls[0])
    return FIELD.sub(lambda found: as_text(_value(found, calls[0])), template)


def unfillable(template: Any, prompts: Sequence[Prompt]) -> list[Doubt]:
    """Rows without a key of ``template``."""
    names = sorted({name for name, _ in fields_of(template) if name.startswith("$meta.")})
    doubts = []
    for position, prompt in enumerate(prompts):
        lacking = [name for name in names if _in_meta(prompt, name) is _NOTHING]
        if lacking:
            doubts.append(Doubt(position, f"has no {lacking[0]}, which the reward server is sent", unusable=True))
    return doubts


def _value(found: re.Match[str], call: Call) -> Any:
    name, known = found[0], fields(call.prompt, call.response, call.finish_reason)
    if name == "$item":
        return {key: known[key] for key in ("prompt", "response", "answer", "meta")}
    if not name.startswith("$meta."):
        return known[name[1:]]
    value = _in_meta(call.prompt, name)
    if value is _NOTHING:
        raise RewardError(f"row {call.prompt.row + 1} has no {name}, which the reward server is sent")
    return value


def _in_meta(prompt: Prompt, name: str) -> Any:
    """The value of ``$meta.KEY``, or ``_NOTHING``."""
    value: Any = prompt.meta
    for key in name.split(".")[1:]:
        if not isinstance(value, Mapping) or key not in value:
            return _NOTHING
        value = value[key]
    return value


def as_text(value: Any) -> str:
    """A value inside of text: empty for None, otherwise JSON if it is no text."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_json(body: Any) -> bytes:
    """Raises RewardError: a row holds what is not JSON."""
    try:  # lone surrogates, which UTF-8 cannot hold, become question marks
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    except (TypeError, ValueError) as error:
        raise RewardError(f"a reward server can only be sent what JSON can hold: {error}") from None


def pick(reply: Any, path: str, key: str) -> Any:
    """The value at ``path`` (the config's ``key``). Raises BadReply: there is none."""
    for name in path.split(".") if path else ():
        if not isinstance(reply, dict):
            raise BadReply(f"a mapping with {name!r} was expected ({key}={path}), got {_shown(reply)}")
        if name not in reply:
            keys = ", ".join(map(repr, reply)) or "none"
            raise BadReply(f"the reply has no {name!r} ({key}={path}); its keys are {keys}")
        reply = reply[name]
    return reply


def to_verdicts(results: Any, count: int, value: str, name: str) -> list[Reward | BadReply]:
    """For each of ``count`` responses. ``value``: path of the reward in a result.
    Raises BadReply: ``results`` is not a list of that many."""
    if not isinstance(results, list):
        raise BadReply(f"a list of {count} results was expected, got {_shown(results)}")
    if len(results) != count:
        raise BadReply(f"{len(results)} results came for {count} responses")
    return [to_verdict(result, place, value, name) for place, result in enumerate(results)]


def to_verdict(result: Any, place: int, value: str, name: str) -> Reward | BadReply:
    """The verdict, or what is wrong with ``result``."""
    try:
        if isinstance(result, dict) and result.get("error"):  # the server's own word that it has no verdict
            return Reward(None, 0.0, error=f"{name}: {one_line(as_text(result['error']))}")
        picked = pick(result, value, "reward.value")
        if isinstance(picked, dict):
            picked = {key: part for key, part in picked.items() if key != "error"}
        if picked is None:
            raise BadReply("null where a reward was expected")
        return to_reward(picked, name)
    except (RewardError, BadReply) as error:
        return BadReply(f"result {place + 1}: {str(error).removeprefix(f'reward function {name}: ')}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {one_line(repr(value))[:80]}"
