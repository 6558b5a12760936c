"""From what a reward function returned to a :class:`~dapo.records.Reward`; rewards as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from dapo.errors import RewardError, shortened
from dapo.util.verdict import Reward

LARGEST = 1e30  # beyond this a sum or a square of rewards would no longer be a finite float32

EXPECTED = 'a float, a bool, a dict with "value", or a Reward'


def verdict(correct: bool, extracted: str | None, **parts: float) -> Reward:
    """+1 for a right answer, -1 for a wrong one (Eq. 7)."""
    return Reward(correct, 1.0 if correct else -1.0, parts=parts, extracted=extracted)


def out_of_time(extracted: str | None = None) -> Reward:
    """The verdict on a response that is itself the reason why it cannot be scored in time."""
    return verdict(False, extracted, answer_found=float(bool(extracted)), out_of_time=1.0)


def to_reward(result: Any, name: str) -> Reward:
    """The reward that the function ``name`` returned for one response. A bool is right or wrong (+1 or -1), a number is
    a reward that leaves right and wrong open, a dict needs "value" and may have "correct", "extracted" and "parts"
    (its other keys are parts, too). Raises RewardError: ``result`` is something else, or a number is not finite."""
    hint = ""
    if hasattr(result, "__len__") and not isinstance(result, str | bytes):
        hint = "; it is called for one response at a time and returns one value (unless it is declared as batched)"
    elif result is None:
        hint = "; is a `return` missing?"
    return _reward(result, name, hint)


def to_rewards(results: Any, name: str, count: int) -> list[Reward]:
    """The rewards that the batched function ``name`` returned for ``count`` responses: a sequence, array or tensor of
    values as in :func:`to_reward`. Raises RewardError: it is none, has another length, or a value is not accepted."""
    expected = f"a list of {count} values, one for each response"
    values = results.tolist() if getattr(results, "ndim", None) == 1 and hasattr(results, "tolist") else results
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        _broken(name, expected, results, "; is a `return` missing?" if results is None else "")
    if len(values) != count:
        _broken(name, expected, results, f" of length {len(values)}")
    return [_reward(value, f"{name}, value {place} of {count}", "") for place, value in enumerate(values, start=1)]


def _reward(result: Any, name: str, hint: str) -> Reward:
    result = _plain(result)
    if isinstance(result, Reward):
        return _checked(result, name)
    if isinstance(result, bool):
        return verdict(result, None)
    if isinstance(result, int | float):
        return Reward(None, _number(result, name, "a finite number"))
    if isinstance(result, Mapping):
        return _from_mapping(result, name)
    _broken(name, EXPECTED, result, hint)


def _from_mapping(result: Mapping[Any, Any], name: str) -> Reward:
    if "value" not in result:
        keys = ", ".join(map(repr, result)) or "none"
        raise RewardError(f'reward function {name}: the dict it returned needs the key "value"; its keys are {keys}')
    named = {key: _plain(result.get(key)) for key in ("value", "correct", "extracted", "parts")}
    value = _number(named["value"], name, 'a finite number under "value"')
    correct, extracted, parts = named["correct"], named["extracted"], named["parts"]
    _check(correct, bool | None, name, 'a bool or None under "correct"')
    _check(extracted, str | None, name, 'text or None under "extracted"')
    _check(parts, Mapping | None, name, 'a dict of numbers under "parts"')
    others = {key: part for key, part in result.items() if key not in named}
    return Reward(correct, value, _parts({**(parts or {}), **others}, name), extracted=extracted)


def _checked(reward: Reward, name: str) -> Reward:
    correct, value, parts = _plain(reward.correct), _plain(reward.value), reward.parts
    _check(correct, bool | None, name, "a Reward whose correct is a bool or None")
    if reward.error is None:
        value = _number(value, name, "a Reward with a finite value")
    _check(parts, Mapping, name, "a Reward whose parts are a dict of numbers")
    if reward.error == "":
        _broken(name, "a Reward whose error is text or None", reward.error)
    _check(reward.error, str | None, name, "a Reward whose error is text or None")
    _check(reward.extracted, str | None, name, "a Reward whose extracted is text or None")
    return replace(reward, correct=correct, value=value, parts=_parts(parts, name))


def _parts(parts: Mapping[Any, Any], name: str) -> dict[str, float]:
    return {str(key): _number(_plain(part), name, f"a finite number under {key!r}") for key, part in parts.items()}


def _number(value: Any, name: str, expected: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not abs(number) <= LARGEST:
        _broken(name, f"{expected} of at most {LARGEST:g}" if math.isfinite(number) else expected, value)
    return number


def _plain(value: Any) -> Any:
    """NumPy scalars and zero-dimensional arrays and tensors as Python numbers; all else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _check(got: Any, kind: Any, name: str, expected: str) -> None:
    if not isinstance(got, kind):
        _broken(name, expected, got)


def _broken(name: str, expected: str, got: Any, hint: str = "") -> NoReturn:
    try:
        shown = repr(got)
    except Exception:
        shown = "(not printable)"
    got = f"{type(got).__name__} {shortened(shown, 80)}"
    raise RewardError(f"reward function {name}: expected {expected}, got {got}{hint}")


def reward_to_json(reward: Reward) -> dict[str, Any]:
    return {
        "correct": reward.correct,
        "value": reward.value if reward.error is None else 0.0,  # NaN, which is allowed here, is not JSON
        "parts": dict(reward.parts),
        "error": reward.error,
        "extracted": reward.extracted,
    }
