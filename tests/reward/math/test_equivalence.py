"""Mathematical equality of answer and reference, the reference first. The cases are kinds reported by users of other
systems (failures.md 43-53), with inputs of our own."""
# ruff: noqa: RUF001 (look-alike characters are what some cases are about)

import pytest

from dapo.reward.math.equivalence import equivalent, readable
from dapo.reward.math.score import _bounded, score_math

IN_TIME = {"out_of_time": 0.0}
SAME = [
    # numbers
    ("12", "12.0"), ("12", "012"), ("0.5", r"\frac12"), (r"\frac{1}{2}", "1/2"), ("1/2", r"\dfrac{2}{4}"),
    ("-3", "−3"), ("0", "-0"), ("1e5", "100000"), (r"3\times 10^{5}", "300000"), ("100", "10^2"),
    (r"0.\overline{3}", "1/3"), (r"0.1\overline{6}", r"\frac16"), ("1", r"0.\overline{9}"), ("10", "１０"),
    (r"2\frac{1}{2}", "2.5"), ("2 1/2", r"\frac{5}{2}"), ("2.5", "2½"), ("0.1 + 0.2", "0.3"),
    # separators, money, percent, units (52)
    ("1234567", "1,234,567"), ("1,234", "1234"), ("10000", "10{,}000"), ("10000", r"10\,000"), ("10000", "10 000"),
    ("18", "$18"), ("18", r"\$18.00"), ("18", "18 dollars"), (r"\$18", "18 dollars"), ("70000", "$70,000"),
    (r"7.41\%", r"7.41\%"), (r"35\%", "0.35"), ("35%", "35 percent"), ("0.35", r"35\%"), ("35", "35%"),
    (r"2\text{ m}", "2 m"), (r"2 \text{ meters}", r"2\mathrm{m}"), (r"12\text{ cm}^2", "12 cm^2"), ("5 apples", "5"),
    (r"90^\circ", "90"), (r"90^{\circ}", r"90 \text{ degrees}"),
    # expressions
    (r"(x+1)^2", "x^2+2x+1"), (r"\frac{x^2-1}{x-1}", "x+1"), ("a/b", r"\frac{a}{b}"), (r"\sqrt{12}", r"2\sqrt{3}"),
    ("2√3", r"\sqrt{12}"), ("x²", "x^2"), (r"\frac{\pi}{2}", "π/2"), ("0", r"\sin(\pi)"), (r"\sin 30^\circ", "1/2"),
    (r"|x|", r"\sqrt{x^2}"), ("1+2i", "2i+1"), ("-1", r"e^{i\pi}"), ("6!", "720"), ("n!", r"n \cdot (n-1)!"),
    (r"\sum_{k=1}^{10} k", "55"), (r"\int_0^1 x dx", r"\frac12"), ("2^{100}", "1267650600228229401496703205376"),
    ("11_2", "3"), (r"\infty", "∞"),
    # names, chains
    ("x=5", "5"), ("5", "x = 5"), ("f(x)=x^2", "x^2"), (r"\frac38", r"\frac{3}{8} = 0.375"), ("49", "7^2 = 49"),
    (r"\frac23", r"\frac{2}{3} \approx 0.667"), ("x=3", "x = 1+2 = 3"),
    # lists, pairs, intervals, relations
    ("1, 2", "2 and 1"), (r"\{1,2,3\}", "3, 2, 1"), (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"), ("x=1,y=2", "y=2, x=1"),
    ("(1,2)", "1, 2"), ("(2,3),(3,2)", "(3, 2) and (2, 3)"), (r"\left( \frac12, 0\right)", "(0.5, 0)"),
    (r"x \in [1,3]", r"1 \le x \le 3"), ("(-\\infty, 3)", "x < 3"), ("3 > x", "(-\\infty, 3)"), ("-3<x", "x>-3"),
    (r"(-\infty,1)\cup(2,\infty)", "x<1 or x>2"), ("2x+3y=6", "4x + 6y - 12 = 0"), ("x>2", "-x < -2"),
    (r"\mathbb{R}", r"(-\infty,\infty)"), ("3:45", "3:45"), (r"x \ne 2", "2 ≠ x"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    # words
    ("Tuesday", r"\text{tuesday}."), (r"\text{yes}", "Yes"), ("B", r"\text{(B)}"), ("(B)", "B"),
    ("no solution", "No Solution"),
]  # fmt: skip

DIFFERENT = [
    ("0.333333", "1/3"), ("1/3", "0.3333333333333333"), (r"\sqrt2", "1.41421356"), (r"\pi", "3.14159"),
    ("1", "0.9999999999999999"), ("0", "10^{-50}"), (r"\frac{1}{50!}", r"\frac{1}{51!}"),  # 53
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), ("2^{100}", "1267650600228229401496703205377"),
    ("1000000007", "1000000008"), ("8", "8,000"), ("8000", "8"), ("12", "1,2"), (r"35\%", "3.5"), (r"35\%", "0.36"),
    (r"2\text{ m}", r"2\text{ cm}"), (r"2\text{ kg}", "2 km"), (r"\$5", "5 euros"),
    ("7", "x"), ("7", r"7 \cdot k"), ("x", "y"), ("x=1", "y=1"), (r"\sqrt{x^2}", "x"), (r"\ln 2", r"\log 2"),
    ("i", "-i"), ("5", r"\frac{1}{0}"), (r"\infty", r"-\infty"), ("132_5", "132_6"), (r"2\frac34", r"\frac{3}{2}"),
    ("7", "7 or 8"), ("7", "6, 7, 8"), ("1, 2", "1"), ("1, 2", "1, 2, 3"), ("1, 1", "1, 2"), ("48", "7^2 = 48"),
    ("17", "17 = 18"), ("x=5, 6", "x=4, 6"), ("D=(0,2)", "D=(0,3)"), ("3:45", "4:45"), ("(1,4)", "(4,1)"),
    ("[1,2]", "(1,2)"), ("[2, 7)", "(2, 7]"), ("1, 2", "(1, 2)"), ("x<3", "x>3"), ("x<3", r"x \le 3"),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 or x \ge 2"), ("2x-y+5=0", "2x-y+7=0"), ("x>2", "-x > -2"),
    ("x=2", r"x \ne 2"),
    ("4", r"\mathbb{R}"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    ("1", "True"), ("0", "False"), ("3", "three"), ("yes", "no"), ("Tuesday", "Friday"), ("Tuesday", "2"),  # 43
    (r"\frac{1}{", "1"), (r"\frac{1}{", r"\frac{1}{2"), ("", ""), ("1", ""), ("5", "$"), ("B", "C"),
    (r"\text{B}", "(C)"),
]  # fmt: skip


@pytest.mark.parametrize("gold, answer", SAME)
def test_same(gold, answer):
    assert equivalent(gold, answer)


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_different(gold, answer):
    assert not _bounded(equivalent, gold, answer)


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
    assert _bounded(readable, gold) == is_readable


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
        assert not _bounded(readable, gold)
    for gold in (
        r"x \equiv 2 \pmod{5}",
        r"f(x)=x+c \text{ for any real } c",
        "AD",
        "6:00",
        r"\frac{AB}{CD}=2",
        r"\infty",
    ):
        assert _bounded(readable, gold)
