"""Finding the final answer."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.reward.exact import score_exact
from dapo.reward.math.extract import final_answer

CASES = [
    (r"So \boxed{4}. No: \boxed{9}.", "9"),  # failures.md 51: the last one
    (r"\boxed{61} and again \boxed{61}", "61"),
    (r"in \boxed form: \boxed{19}", "19"),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\fbox {7}", "7"),
    (r"\boxed{\fbox{7}}", "7"),
    (r"\boxed{5} then \boxed{7", "5"),  # the last complete one
    (r"\boxed{7", None),
    (r"\boxed 7.", "7"),  # TeX takes one token; more than one digit needs braces
    (r"\boxed 75", None),
    (r"\boxed{}", ""),
    (r"<think>\boxed{8}</think> \boxed{6}", "6"),
    (r"<think>\boxed{8}</think> nothing", None),
    (r"\boxed{6} <think>\boxed{8}", "6"),  # an open block goes to the end
    (r"\boxed{8} </think> it is \boxed{6}", "6"),  # a block that the prompt opened
    (r"<think>\boxed{8}", None),
    (r"\boxed{9} " + "and so on " * 200, "9"),  # failures.md 49
    (r"\boxed{" + "x+" * 100 + "1}", "x+" * 100 + "1"),
    ("Answer: 73", "73"),
    ("Answer: 1\nAnswer: 2.", "2"),
    ("**Final Answer:** $86$", "$86$"),
    ("Final answer: **86**.", "86"),
    ("ANSWER : 3.5\nbye", "3.5"),
    ("Answer:\n\n42\nbye", "42"),
    ("Answer: `9`", "9"),
    ("Answer: **`9`**.", "9"),
    (r"Answer: \boxed{4", r"\boxed{4"),
    ("the answers are many", None),
    ("Answer:", None),
    ("", None),
]


@pytest.mark.parametrize("response, answer", CASES, ids=[str(k) for k in range(len(CASES))])
def test_final_answer(response, answer):
    assert final_answer(response, ["boxed", "answer_line"]) == answer


def test_rules_and_their_order_come_from_the_config():
    both = "\\boxed{1}\nAnswer: 2"
    assert final_answer(both, ["boxed", "answer_line"]) == "1"
    assert final_answer(both, ["answer_line", "boxed"]) == "2"
    assert final_answer(both, ["answer_line"]) == "2"
    assert final_answer("Answer: 2", ["boxed"]) is None
    assert final_answer("Answer: \\boxed{2}", ["answer_line"]) == "2"


@given(
    st.text(alphabet="{}\\ab \n", max_size=30),
    st.text(alphabet="ab1{}", max_size=8).filter(lambda t: t.count("{") == 0),
)
def test_a_complete_box_at_the_end_is_found_whatever_stands_before(before, inner):
    inner = inner.replace("}", "")
    assert final_answer(f"{before} \\boxed{{{inner}}}", ["boxed"]) == inner


BALANCED = st.recursive(
    st.text(alphabet="ab1+ ", max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}x"),
    max_leaves=12,
)
PLAIN = st.text(alphabet="ab1 .$\n", max_size=40)


@given(PLAIN, BALANCED, PLAIN)
def test_a_box_is_taken_whole_and_the_text_around_it_does_not_matter(before, inner, after):
    assert final_answer(f"{before}\\boxed{{{inner}}}{after}", ["boxed"]) == inner.strip()


@given(st.lists(BALANCED, min_size=1, max_size=5), st.sampled_from(["boxed", "fbox"]))
def test_the_last_of_several_boxes_counts(contents, command):
    text = ", so ".join(f"\\{command}{{{content}}}" for content in contents)
    assert final_answer(text, ["boxed"]) == contents[-1].strip()
    assert final_answer(text + r" \boxed{7", ["boxed"]) == contents[-1].strip()  # one that is cut off is none


@given(st.text(max_size=60), BALANCED)
def test_what_is_thought_is_not_answered(text, inner):
    thought = f"{text}\\boxed{{{inner}}}\nAnswer: 5\n{text}".replace("<think>", "").replace("</think>", "")
    assert final_answer(f"<think>{thought}</think>", ["boxed", "answer_line"]) is None
    assert final_answer(f"<think>{thought}", ["boxed", "answer_line"]) is None
    assert final_answer(f"{thought}</think>", ["boxed", "answer_line"]) is None
    assert final_answer(f"<think>{thought}</think>\\boxed{{9}}", ["boxed", "answer_line"]) == "9"


@given(st.text(alphabet=r"\boxedf{}<>/thinkAnswer: 1" + "\n", max_size=200))
def test_of_any_text_the_answer_is_a_part_or_there_is_none(text):
    found = final_answer(text, ["boxed", "answer_line"])
    assert found is None or found in text


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "<think>", "</think>", "{", "}", "Answer: ", "answer ", "answer **", "\n"]
)
def test_time_is_linear(piece):
    started = time.perf_counter()
    final_answer(piece * 30_000, ["boxed", "answer_line"])
    assert time.perf_counter() - started < 2


EXACT = [
    ("abc #### 12 ", "12", "####", True, "12"),
    ("#### 11 #### 12", "12", "####", True, "12"),
    ("#### 12 #### 11", "12", "####", False, "11"),
    ("12", "12", "####", False, None),
    (" 0\n", "0", None, True, "0"),
    ("0.0", "0", None, False, "0.0"),
    ("", "0", None, False, ""),
    ("x=", "0", "=", False, ""),
]


@pytest.mark.parametrize("response, answer, after, correct, extracted", EXACT)
def test_exact(response, answer, after, correct, extracted):
    reward = score_exact(response, answer, after)
    assert (reward.correct, reward.value, reward.extracted) == (correct, 1.0 if correct else -1.0, extracted)
    assert reward.parts == {"answer_found": float(bool(extracted))}
