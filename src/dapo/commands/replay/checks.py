"""What the stored files of a step must hold, key by key: somebody may have edited them since, or a disk spoilt them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapo.errors import UserError, shortened
from dapo.observe.samples import STATUSES


@dataclass(frozen=True, slots=True)
class Kind:
    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """Of a size that float32 holds; NaN is smaller than nothing."""
    return type(value) in (int, float) and abs(value) <= 1e38


def _one_of(names: Iterable[str]) -> Kind:
    known = tuple(names)
    return Kind(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


_NUMBER = Kind("a finite number", _is_number)
_COUNT = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < 2**53)
_LENGTH = Kind("a number of tokens", lambda value: type(value) is int and 0 <= value < 2**31)
_TEXT = Kind("text", lambda value: isinstance(value, str))
_TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
_PARTS = Kind(
    "an object of finite numbers or null",
    lambda value: isinstance(value, dict) and all(one is None or _is_number(one) for one in value.values()),
)
_PAIR = Kind(
    "a sum and a count, or null",
    lambda value: isinstance(value, list) and len(value) == 2 and all(one is None or _is_number(one) for one in value),
)
NUMBER_OR_NULL = _or_null(_NUMBER)

SAMPLE: Mapping[str, Kind] = {
    **dict.fromkeys(("draw", "row", "index"), _COUNT),
    "length": _LENGTH,
    **dict.fromkeys(("prompt", "response"), _TEXT),
    "status": _one_of(STATUSES),
    "finish_reason": _one_of(("stop", "length")),
    **dict.fromkeys(("gold", "error", "extracted"), _or_null(_TEXT)),
    "correct": _or_null(_TRUTH),
    **dict.fromkeys(("reward", "shaped_reward", "advantage"), NUMBER_OR_NULL),
    "in_loss": _TRUTH,
    "parts": _PARTS,
}
"""A line of ``samples/step-NNNNN.jsonl``."""

_REPORT: Mapping[str, Kind] = {
    **dict.fromkeys(("loss", "grad_norm", "learning_rate"), NUMBER_OR_NULL),
    **dict.fromkeys(("tokens", "response_tokens", "loss_tokens"), _LENGTH),
    "skipped": _or_null(_TEXT),
}
"""The report of an update, but for what is nested in it; older runs have not all of it."""

_MISMATCH: Mapping[str, Kind] = {"tokens": _LENGTH, "absolute_sum": NUMBER_OR_NULL}


_WHY = {"reward": "scored", "advantage": "in the loss"}


def check_sample(line: Mapping[str, Any], place: str) -> None:
    """``line``: of a file of samples.
    Raises UserError: it is not that of a sample: names place, keys, what they should be and what they are."""
    wrong = [f"{key}: missing" for key in SAMPLE if key not in line]
    wrong += _wrong(line, SAMPLE)
    for key, needed in (("reward", line.get("error") is None), ("advantage", line.get("in_loss"))):
        if not wrong and needed and line[key] is None:
            wrong = [f"{key}: expected a finite number, as the sample was {_WHY[key]}, found null"]
    _refuse(wrong, place)


def check_report(report: Mapping[str, Any], place: str) -> None:
    """``report``: of an update, as JSON. Raises UserError: as :func:`check_sample`."""
    wrong = [f"{key}: missing" for key in ("loss", "grad_norm") if key not in report]  # what is compared above all
    wrong += _wrong(report, _REPORT)
    for name in ("statistics", "mismatch"):
        nested = report.get(name, {})
        if not isinstance(nested, dict):
            wrong.append(f"{name}: expected an object, found {_shown(nested)}")
            continue
        kinds = _MISMATCH if name == "mismatch" else dict.fromkeys(nested, _PAIR)
        wrong += [f"{name}.{text}" for text in _wrong(nested, kinds)]
    _refuse(wrong, place)


def _wrong(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Iterator[str]:
    for key, kind in kinds.items():
        if key in values and not kind.holds(values[key]):
            yield f"{key}: expected {kind.words}, found {_shown(values[key])}"


def _refuse(wrong: list[str], place: str) -> None:
    if wrong:
        raise UserError(f"{place}: {'; '.join(wrong)}; the file was changed after the run wrote it")


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), 40)
