"""The conformance suite itself: ours passes all of it, and what the documents say of TRL is what is measured."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import pytest
from conformance.__main__ import load_adapter, main, with_table
from conformance.adapters.dapo import DapoAdapter
from conformance.adapters.trl import STATED, TrlAdapter
from conformance.case import REFUSED, Case
from conformance.cases import CASES
from conformance.contract import Adapter, NotOffered, Refused
from conformance.run import Outcome, Status, matches, run_case, run_cases

DOCUMENT = Path(__file__).parents[2] / "docs/conformance.md"


@functools.cache
def trl() -> list[Outcome]:
    return run_cases(TrlAdapter(), CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_dapo_passes(case: Case) -> None:
    outcome = run_case(DapoAdapter(), case)
    assert outcome.status is Status.PASS, f"observed {outcome.observed}, expected {case.expected}; {outcome.note}"


def test_what_trl_fails() -> None:
    """Pinned: if one of these passes with a new version, the document has to change."""
    assert {o.case.id for o in trl() if o.status is Status.FAIL} == {
        "clip/huge-ratio",
        "advantage/flat",
        "advantage/flat-large",
        "overlong/buffer-above-limit",
    }


def test_every_stated_difference_is_observed() -> None:
    assert {o.case.id for o in trl() if o.status is Status.DIFFERS} == set(STATED)


def test_trl_errors_are_answers_and_no_accidents() -> None:
    """No case is failed because the adapter broke down."""
    wrong = [o for o in trl() if o.status in (Status.FAIL, Status.DIFFERS)]
    assert all(isinstance(o.observed, dict) for o in wrong), [o for o in wrong if not isinstance(o.observed, dict)]


def test_the_document_is_in_step() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m conformance --write docs/conformance.md"


def test_ids_are_unique_and_operations_exist() -> None:
    assert max(Counter(case.id for case in CASES).values()) == 1
    assert all(hasattr(Adapter, case.operation) for case in CASES)


class _Odd(Adapter):
    """Wrong, refusing, broken and silent."""

    name = "odd"

    def overlong_penalty(self, *, length: int, limit: int, buffer: int) -> dict[str, float]:
        if buffer == 0:
            raise ZeroDivisionError("division by zero")
        return {"penalty": float("nan")}

    def configure(self, *, setting: str, value: float) -> dict[str, bool]:
        raise Refused("no")

    def admit(self, **inputs: object) -> dict[str, object]:
        raise NotOffered("draws are not ordered")


def test_wrong_broken_refusing_and_missing_functions_are_told_apart() -> None:
    found = {o.case.id: o for o in run_cases(_Odd(), CASES)}
    assert found["overlong/80-of-100-buffer-20"].status is Status.FAIL  # NaN equals nothing
    broken = found["overlong/101-of-100-buffer-0"]
    assert broken.status is Status.FAIL
    assert "ZeroDivisionError" in broken.observed
    assert found["config/temperature-0"].status is Status.PASS
    assert found["admission/order"].status is Status.NOT_OFFERED
    assert found["admission/order"].note == "draws are not ordered"
    assert found["clip/dual"].status is Status.NOT_OFFERED


@pytest.mark.parametrize(
    ("observed", "expected", "same"),
    [
        ({"a": 1.00001}, {"a": 1.0}, True),
        ({"a": 1.1}, {"a": 1.0}, False),
        ({"b": 1.0}, {"a": 1.0}, False),
        ({"a": [[1.0], [2.0]]}, {"a": [[1.0], [2.0]]}, True),
        ({"a": [[1.0]]}, {"a": [[1.0], [2.0]]}, False),
        ({"a": float("inf")}, {"a": float("inf")}, False),
        ({"a": True}, {"a": 1}, False),
        (REFUSED, REFUSED, True),
        ({"a": 1.0}, REFUSED, False),
        ("ValueError: x", {"a": 1.0}, False),
        (None, {"a": 1.0}, False),
    ],
)
def test_comparison(observed: object, expected: object, same: bool) -> None:
    assert matches(observed, expected, 1e-3) is same


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "clip/"]) == 0
    assert "0 fail" in capsys.readouterr().out
    own = tmp_path / "own.py"
    own.write_text(
        "from conformance.contract import Adapter\n"
        "class Own(Adapter):\n"
        "    name = 'own'\n"
        "    def overlong_penalty(self, *, length, limit, buffer):\n"
        "        return {'penalty': 0.0}\n",
        encoding="utf-8",
    )
    assert main(["--adapter", f"{own}:Own", "--only", "overlong/", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["trainer"] == "own"
    assert {c["status"] for c in found["cases"]} == {"pass", "fail", "not offered"}


@pytest.mark.parametrize("name", ["nothing", "no/such/file.py:Class", "conformance.contract:LossBatch"])
def test_an_adapter_that_cannot_be_loaded_is_exit_code_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--adapter", name]) == 2
    assert name in capsys.readouterr().err
    with pytest.raises((ValueError, OSError)):
        load_adapter(name)
