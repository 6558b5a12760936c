"""What reads a response takes linear time, whatever the response: no pattern goes over a long run again and again."""

import time

import pytest

from dapo.checks.answers import _ends_in
from dapo.config.secrets import redact
from dapo.data.overlap import words_of
from dapo.evaluation.result import last_number
from dapo.reward.code.blocks import find_program
from dapo.reward.exact import score_exact
from dapo.reward.judge.rubric import Rubric
from dapo.reward.math.extract import final_answer
from dapo.reward.math.notation import canonical
from dapo.reward.math.qualifiers import bare
from dapo.reward.math.score import score_math
from dapo.rollout.native.stopping import StopTexts
from dapo.util.terminal import visible

LENGTH = 20_000
RULES = ["boxed", "answer_line"]
GRADE = Rubric(None, (0, 10)).grade
READERS = {
    "the answer": lambda text: final_answer(text, RULES),
    "an answer line": lambda text: final_answer(text, ["answer_line"]),
    "exact": lambda text: score_exact(text, "1", "#"),
    "a program": lambda text: find_program(text, "f"),
    "a method": lambda text: find_program(text, "S().f"),
    "a grade": GRADE,
    "the last number": last_number,
    "words": words_of,
    "visible": visible,
    "the end of a prompt": lambda text: _ends_in(f"? {text}", "answer"),
    "secrets": redact,
    "secrets behind a word": lambda text: redact(f"Basic {text}"),
    # texts of up to 4,000 characters only are looked into
    "one spelling": lambda text: canonical(text[:2000]),
    "qualifiers": lambda text: bare(text[:2000]),
}
PIECES = [
    " ", "\t", "\n", "1", "{", "}", "\\", "$", "`", "*", "_", "# ", "1,", "a", "é", "answer ", "Answer: ", "**", "for ",
    r"\boxed", r"\boxed{", r"\boxed ", r"\boxed{1}", r"\boxed{1}, ", "<think>", "</think>", "Grade: ", "def f",
    "  def ", "```python\n", "~~~", r"\text{", r"\!", "(mod ", r"\frac{", "\r\n", "x is ", "(",
    "eyJ-", "Basic ", "Bearer ", "://", "a=", "?a=1&", "hf_", "-----BEGIN PRIVATE KEY-----",
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_long_runs_are_read_in_linear_time(reader):
    read = READERS[reader]
    slow = []
    for piece in PIECES:
        text = "answer" + piece * (LENGTH // len(piece)) + "\nx"
        started = time.process_time()
        read(text)
        # linear: some milliseconds; quadratic: about a second
        if (spent := time.process_time() - started) > 0.5:
            slow.append((piece, spent))
    assert slow == []


def test_an_answer_line_of_blanks_is_wrong():
    for text in ("answer" + " " * 50_000, "The answer" + " " * 50_000 + "is 7.", "answer:" + " \t" * 50_000):
        started = time.process_time()
        reward = score_math(text, "5", RULES)
        assert (reward.correct, reward.parts) == (False, {"answer_found": 0.0, "out_of_time": 0.0})
        assert time.process_time() - started < 0.5


@pytest.mark.parametrize("piece", ["a", " ", "a\N{REPLACEMENT CHARACTER}"])
def test_stop_texts_are_looked_for_at_the_end_of_a_response(piece):
    """However long the response is: in tokens decoded, which is what takes time."""
    decoded = 0

    def decode(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return "".join(tokens)

    text = piece * 1000
    stops = StopTexts(decode)
    assert all(stops.ends_at(text[:end], end - 1, ["STOP"]) is None for end in range(1, len(text) + 1))
    assert decoded < 100 * len(text)
