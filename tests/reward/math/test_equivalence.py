"""Mathematical equality of answer and reference, the reference first. Most verdicts are in ``verdicts.txt``; those here
are of kinds reported by users of other systems (failures.md 43-53), with inputs of our own."""

import pytest

from dapo.reward.math.equivalence import equivalent, readable
from dapo.reward.math.score import _in_time, score_math

IN_TIME = {"out_of_time": 0.0}


def test_what_is_empty_equals_nothing():
    assert not equivalent("", "") and not equivalent("1", "")


def test_the_reference_comes_first():  # failures.md 48
    assert equivalent("(1,2)", "1, 2")
    assert not equivalent("1, 2", "(1,2)")


def test_an_interval_meets_its_inequality_both_ways():  # failures.md 48
    assert equivalent(r"0<x<\frac{9}{2}", r"x \in (0, 4.5)")
    assert equivalent("(0, 4.5)", r"0 < x < \frac92")


@pytest.mark.parametrize("gold, is_readable", [
    ("5", True), ("Tuesday", True), (r"\frac{1}{2}", True), ("x<3", True), ("(1,2),(3,4)", True), ("B", True),
    ("x = 3", True), ("3:45", True), (r"35\%", True), (r"2\text{ m}", True), (r"\{1,2\}", True), ("f(x)=x^2", True),
    (r"\frac{1}{", False), ("", False), (r"1 +* 2)", False), ("3 +", False), (r"\begin{pmatrix}1", False),
])  # fmt: skip
def test_readable(gold, is_readable):  # failures.md 43
    assert bool(_in_time(readable, gold)) == is_readable


def test_score_tells_wrong_from_no_answer():  # failures.md 50
    right = score_math(r"so \boxed{0.5}", r"\frac12", ["boxed"])
    assert (right.correct, right.value, right.extracted, right.parts) == (
        True,
        1.0,
        "0.5",
        {"answer_found": 1.0} | IN_TIME,
    )
    wrong = score_math(r"so \boxed{7}", r"\frac12", ["boxed"])
    assert (wrong.correct, wrong.value, wrong.parts) == (False, -1.0, {"answer_found": 1.0} | IN_TIME)
    for response in ("", "I do not know", r"\boxed{}"):  # failures.md 73
        none = score_math(response, "0", ["boxed"])
        assert (none.correct, none.value, none.parts) == (False, -1.0, {"answer_found": 0.0} | IN_TIME)


def test_a_reference_that_has_no_value_is_none():
    for gold in (r"\frac{1}{0}", r"(1, \frac{0}{0})", r"\infty-\infty", r"\ln 0", "9^{9^{9^{9}}}"):
        assert not _in_time(readable, gold)
    for gold in (
        r"x \equiv 2 \pmod{5}",
        r"f(x)=x+c \text{ for any real } c",
        "AD",
        "6:00",
        r"\frac{AB}{CD}=2",
        r"\infty",
    ):
        assert _in_time(readable, gold)
