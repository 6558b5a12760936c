"""From responses to the body of a request (the template ``reward.request``), and from its reply to verdicts. Replies
are not trusted: number, type and range of their values are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dapo.config.reward import FIELD, fields_of
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.client.scorer import Call
from dapo.reward.contract import Doubt, fields
from dapo.reward.convert import to_reward
from dapo.util.http.faults import BadReply, one_line
from dapo.util.http.mapping import as_text, filled, pick, shown

_NOTHING = object()


def fill(template: Any, calls: Sequence[Call]) -> Any:
    """A body for ``calls``. Raises RewardError: a row lacks a key of the template."""
    return filled(template, FIELD, [partial(_value, call=call) for call in calls])


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


def to_json(body: Any) -> bytes:
    """Raises RewardError: a row holds what is not JSON."""
    try:  # lone surrogates, which UTF-8 cannot hold, become question marks
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    except (TypeError, ValueError) as error:
        raise RewardError(f"a reward server can only be sent what JSON can hold: {error}") from None


def to_verdicts(results: Any, count: int, value: str, name: str) -> list[Reward | BadReply]:
    """For each of ``count`` responses. ``value``: path of the reward in a result.
    Raises BadReply: ``results`` is not a list of that many."""
    if not isinstance(results, list):
        raise BadReply(f"a list of {count} results was expected, got {shown(results)}")
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
