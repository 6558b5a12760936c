"""The table of hand-written verdicts (``verdicts.txt``), and whole responses by the same rules."""

from pathlib import Path

import pytest

from dapo.reward.math.equivalence import equivalent
from dapo.reward.math.score import _in_time, make_handler, score_math

TABLE = Path(__file__).with_name("verdicts.txt")
THINKING = "<think>Maybe \\boxed{8}? No, one case was lost.</think>\n"


def read_table():
    """The rows by kind, as (reference, answer, same)."""
    kinds = {}
    for line in TABLE.read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            rows = kinds.setdefault(line[3:], [])
        elif kinds and line:
            sign = min((s for s in (" == ", " != ") if s in line), key=line.index)
            gold, _, answer = line.partition(sign)
            rows.append((gold, answer, sign == " == "))
    return kinds


KINDS = read_table()


@pytest.fixture(autouse=True, scope="module")
def _warm():
    make_handler({"extract": ["boxed"]})  # as a worker begins


def test_the_table_is_read_whole():
    rows = [row for kind in KINDS.values() for row in kind]
    assert len(KINDS) > 35 and len(rows) > 1800
    assert min(sum(same for *_, same in rows), sum(not same for *_, same in rows)) > 700


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts(kind):
    wrong = [
        f"{g} {'==' if same else '!='} {a}"
        for g, a, same in KINDS[kind]
        if bool(_in_time(equivalent, g, a)) is not same
    ]
    assert wrong == []


RESPONSES = [
    # the last complete box, outside of thinking
    ("9", r"So maybe \boxed{4}. Wait. The right total is \boxed{9}.", True),
    ("4", r"So maybe \boxed{4}. Wait. The right total is \boxed{9}.", False),
    ("99", r"\boxed{9} \boxed{9}", False),
    ("3, 5", r"\boxed{3} and \boxed{5}", True),
    ("17", r"\boxed{15} \boxed{16} \boxed{17} \boxed{18}", False),
    ("17", r"\boxed{18}\boxed{17}", False),
    ("19", r"\boxed{19}. I put it in \boxed form.", True),
    ("19", r"in \boxed form: 19", False),
    ("2", r"our answer is $\boxed2$", True),
    ("11", r"Hence \fbox{11}", True),
    ("11", r"\fbox{11} is wrong, \boxed{12}", False),
    ("11", r"\boxed{12} is wrong, \fbox{11}", True),
    ("11", r"\boxed {11}", True),
    ("11", "\\boxed\n{11}", True),
    ("11", "$$\\boxed{\n11\n}$$", True),
    (r"\frac{1}{2}", r"$\boxed{\frac{1}{2}}$. Since \frac{1}{2} = 0.5, done {", True),
    ("6", THINKING + r"The answer is \boxed{6}.", True),
    ("8", THINKING + r"The answer is \boxed{6}.", False),
    ("8", THINKING + "The answer is 6.", False),
    ("7", r"I think \boxed{7}</think> nothing", False),
    ("7", r"\boxed{7} <think> or \boxed{8}? </think>", True),
    ("8", r"\boxed{7} <think> or \boxed{8}? </think>", False),
    ("7", r"<think>\boxed{1}</think>\boxed{7}<think>\boxed{2}</think>", True),
    # cut off
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}", False),
    # nothing
    ("0", r"\boxed{ }", False),
    ("0", r"\boxed{\text{}}", False),
    ("3", " ", False),
    ("3", "3", False),
    ("3", "it is 3.", False),
    ("None", "", False),
    ("", "", False),
    ("", r"\boxed{}", False),
    # far from the end, or long
    ("56", r"The total is \boxed{56}." + " We check again." * 100, True),
    ("56", "We check. " * 1000 + r"\boxed{56}", True),
    ("56", r"\boxed{56}" + "\n" * 2000, True),
    ("x+" * 60 + "x", r"\boxed{" + "x+" * 60 + "x}", True),
    ("61x", r"\boxed{" + "x+" * 60 + "x}", True),
    ("60x", r"\boxed{" + "x+" * 60 + "x}", False),
    # the line
    ("73", "The sum of the three groups is 905.\n\nAnswer: 73", True),
    ("905", "The sum of the three groups is 905.\n\nAnswer: 73", False),
    ("73", "**Answer:** 73", True),
    ("73", "**Answer**: 73", True),
    ("73", "### Answer: 73", True),
    ("73", "Answer: $73$", True),
    ("73", r"Answer: \(73\)", True),
    ("73", "Answer: $$73$$", True),
    ("73", "Answer: x = 73", True),
    ("73", "Answer: 73 apples", True),
    ("73", "Answer: 7", False),
    ("73", "Answer: 730", False),
    ("73", "Answer: 73 or 74", False),
    ("73", "Answer: -73", False),
    ("73", "Answer: I do not know", False),
    ("1234", "Answer: $1,234", True),
    ("1234", "Answer: 1,234 dollars.", True),
    (r"\frac{1}{2}", r"Answer: $\frac{1}{2}$", True),
    (r"\frac{1}{2}", r"Answer: \frac{1}{2}", True),
    (r"\frac{1}{2}", "Answer: 0.5", True),
    ("C", "Answer: (C)", True),
    ("C", "Answer: C", True),
    ("C", "Answer: D", False),
    ("73", r"Answer: \boxed{73}", True),
    ("73", "Answer: 12. In a box: \\boxed{73}", True),
    ("12", "Answer: 12. In a box: \\boxed{73}", False),
    ("73", "\\boxed{73}\nAnswer: 12", True),
    ("73", "<think>Answer: 12</think>\nAnswer: 73", True),
    ("12", "<think>Answer: 12</think>\nnothing", False),
    ("5", "Answer：5", True),  # noqa: RUF001 (a full-width colon)
]


@pytest.mark.parametrize("number", range(len(RESPONSES)))
def test_responses(number):
    gold, response, correct = RESPONSES[number]
    reward = score_math(response, gold, ["boxed", "answer_line"])
    assert (reward.correct, reward.value, reward.error) == (correct, 1.0 if correct else -1.0, None)


def test_no_answer_is_told_from_a_wrong_one():  # failures.md 50
    responses = [r"\boxed{3}", r"\boxed{4}", "4", r"\boxed{}", r"\boxed{4", "Answer: 3", THINKING]
    rewards = [score_math(response, "4", ["boxed", "answer_line"]) for response in responses]
    assert [r.parts["answer_found"] for r in rewards] == [1, 1, 0, 0, 0, 1, 0]
    assert [r.correct for r in rewards] == [False, True, False, False, False, False, False]
    assert [r.extracted for r in rewards] == ["3", "4", None, "", None, "3", None]


SIDE_BY_SIDE = [
    ("(1,4), (5,4)", r"Hence $\boxed{(1,4)}$ and $\boxed{(5,4)}$.", True),
    ("(1,4)", r"Hence $\boxed{(1,4)}$ and $\boxed{(5,4)}$.", False),
    ("(5,4)", r"Hence $\boxed{(1,4)}$ and $\boxed{(5,4)}$.", False),
    ("m = 12, n = 5", r"We get $\boxed{m = 12}$ and $\boxed{n = 5}$.", True),
    ("m = 12, n = 5", r"We get $\boxed{m = 5}$ and $\boxed{n = 12}$.", False),
    ("2, 3, 5", r"\boxed{2}, \boxed{3}, and \boxed{5}", True),
    ("2, 3, 5", r"\boxed{2}, \boxed{3}", False),
    ("AD", r"\boxed{A} \boxed{D}", True),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{x<1} or \boxed{x>2}", True),
    ("9", r"\boxed{9}, \boxed{9}", True),
    ("8:34 p.m.", r"in $\boxed{20\!:\!34}$ or $\boxed{8\!:\!34 \text{ p.m.}}$.", True),
    ("8:34 p.m.", r"\boxed{8:34 p.m.} or \boxed{20:35}", False),
    ("6:00", r"\boxed{6:00 a.m.} or \boxed{6:00 p.m.}", False),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}} or \boxed{50\%}", True),
    (r"500\text{ cm}", r"\boxed{5\text{ m}} = \boxed{500\text{ cm}}", True),
    (r"500\text{ cm}", r"\boxed{5\text{ m}}, \boxed{5\text{ cm}}", False),
    ("5", r"\boxed{x=5}, \boxed{y=5}", False),
    ("4", "\\boxed{3}\n\n\\boxed{4}", True),  # another paragraph
    ("4", r"First \boxed{3}, no: \boxed{4}", True),
    ("73", r"Answer: \boxed{72}, \boxed{73}", False),
]


@pytest.mark.parametrize("number", range(len(SIDE_BY_SIDE)))
def test_boxes_side_by_side_are_one_answer(number):
    gold, response, correct = SIDE_BY_SIDE[number]
    assert score_math(response, gold, ["boxed", "answer_line"]).correct is correct
