"""Accuracy that does not look at the format: the last number of a response."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from dapo.evaluation.result import Evaluation, last_number, reference_number
from dapo.records import Group, Prompt, Reward, Sample


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 48 + 24 = 72 clips.", "72"),
        ("so $1,234.50, that is all", "1234.5"),
        ("it fell to -3 degrees", "-3"),
        ("5-3", "3"),
        ("pages 10-12", "12"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        (r"\boxed{72}", "72"),
        ("72.0.", "72"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("answer", "number"),
    [("72", "72"), ("1,000", "1000"), ("$5", "5"), ("-7.50", "-7.5"), ("1/2", None), ("x", None), (None, None)],
)
def test_a_reference_is_a_number_or_nothing(answer: str | None, number: str | None) -> None:
    assert reference_number(answer) == (None if number is None else Decimal(number))


def evaluation(*rows: tuple[str, str, bool], **parts: float) -> Evaluation:
    """``rows``: reference, response, verdict. ``parts``: of each verdict."""
    empty = np.zeros(0, dtype=np.int32)
    return Evaluation(
        tuple(
            Group(
                i,
                Prompt(i, "", (1,), answer),
                (Sample(i, 0, empty, empty.astype(np.float32), empty, "stop", text, reward),),
            )
            for i, (answer, text, correct) in enumerate(rows)
            for reward in [Reward(correct, float(correct), parts)]
        )
    )


def test_what_the_reward_missed_for_its_format_counts_and_what_it_found_still_does() -> None:
    found = evaluation(
        ("72", "The answer is 72.", False),
        ("72", r"\boxed{72}, as 48 is twice 24", True),
        ("72", "71", False),
        ("0.5", r"\boxed{\frac{1}{2}}", True),
        answer_found=1.0,
    )
    assert found.metrics()["eval/lenient"] == 0.75
    assert found.accuracy == 0.5


def test_it_is_left_out_where_a_reference_is_no_number() -> None:
    rows = ("72", "72", True), ("x+1", "x+1", True)
    assert "eval/lenient" not in evaluation(*rows, answer_found=1.0).metrics()


def test_it_is_left_out_of_a_reward_that_reads_no_answer() -> None:
    """Of a judge of style a response that ends with the right number is not nearly right."""
    found = evaluation(("72", "72", True), ("71", "a joke of 71", False))
    assert "lenient" not in found.shares() and found.accuracy == 0.5
