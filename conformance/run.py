"""Run cases on an adapter and compare."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from conformance.case import REFUSED, Case
from conformance.contract import Adapter, LossBatch, NotOffered, Refused


class Status(StrEnum):
    """What became of a case."""

    PASS = "pass"
    FAIL = "fail"
    DIFFERS = "differs"
    """The answer is another one, and the adapter states that this is the trainer's design."""
    NOT_OFFERED = "not offered"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case on one trainer. ``observed``: the first wrong answer, or the last right one."""

    case: Case
    status: Status
    observed: Any = None
    note: str = ""
    inputs: Any = None
    """The variant that was answered wrongly."""

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "id": self.case.id,
            "what": self.case.what,
            "status": str(self.status),
            "expected": self.case.expected,
            "observed": self.observed,
            "note": self.note,
            "source": self.case.source,
            "inputs": _plain(self.inputs),
        }


def run_cases(adapter: Adapter, cases: Iterable[Case]) -> list[Outcome]:
    """Every case on ``adapter``, in order."""
    return [run_case(adapter, case) for case in cases]


def run_case(adapter: Adapter, case: Case) -> Outcome:
    """One case, with all its variants."""
    observed = None
    for change in case.variants:
        inputs = _changed(case.inputs, change)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                observed = getattr(adapter, case.operation)(**inputs)
        except NotOffered as missing:
            return Outcome(case, Status.NOT_OFFERED, note=str(missing))
        except Refused as refusal:
            observed = REFUSED
            note = str(refusal)
        except Exception as error:  # whatever a foreign trainer raises
            observed = f"{type(error).__name__}: {error}"
            note = ""
        else:
            note = ""
            observed = {name: observed[name] for name in _names(case) if name in observed} or dict(observed)
        if not any(matches(observed, right, case.tolerance) for right in case.right_answers):
            stated = adapter.stated.get(case.id)
            status = Status.FAIL if stated is None else Status.DIFFERS
            return Outcome(case, status, observed, stated or note, inputs)
    return Outcome(case, Status.PASS, observed)


def matches(observed: Any, expected: Any, tolerance: float) -> bool:
    """Whether two answers agree: numbers within ``tolerance``, NaN with nothing, lists and mappings by element."""
    if isinstance(expected, Mapping):
        return isinstance(observed, Mapping) and all(
            name in observed and matches(observed[name], value, tolerance) for name, value in expected.items()
        )
    if isinstance(expected, str) or isinstance(observed, str):
        return bool(observed == expected)
    if isinstance(expected, Sequence):
        return (
            isinstance(observed, Sequence)
            and len(observed) == len(expected)
            and all(matches(o, e, tolerance) for o, e in zip(observed, expected, strict=True))
        )
    if isinstance(expected, bool) or isinstance(observed, bool):
        return observed is expected
    return isinstance(observed, int | float) and math.isfinite(observed) and abs(observed - expected) <= tolerance


def _names(case: Case) -> list[str]:
    return [name for right in case.right_answers if isinstance(right, Mapping) for name in right]


def _changed(inputs: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A variant changes the fields of a loss batch, or the inputs themselves."""
    batch = inputs.get("batch")
    return {"batch": replace(batch, **change)} if isinstance(batch, LossBatch) else {**inputs, **change}


def _plain(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {str(k): asdict(v) if isinstance(v, LossBatch) else v for k, v in inputs.items()}
    return inputs
