"""Finding the final answer in a response. Pure text, linear time whatever the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from dapo.reward.thinking import outside_thinking

Rule = Literal["boxed", "answer_line"]

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<digit>\d)(?!\w))|\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"\banswer[ \t]*[*_]*[ \t]*[:\uff1a][\s*_]*([^\s*_].*)", re.IGNORECASE)


def final_answer(response: str, rules: Sequence[Rule]) -> str | None:
    """The final answer, by the first of ``rules`` that finds one outside thinking blocks; None: there is none.

    The answer may be empty (an empty box), which is an answer that equals nothing.
    """
    text = outside_thinking(response)
    finders = {"boxed": last_box, "answer_line": last_answer_line}
    for rule in rules:
        found = finders[rule](text)
        if found is not None:
            return found
    return None


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{}`` or ``\fbox{}`` whose braces close; one that is cut off does not count. A single
    digit needs no braces."""
    open_braces: list[tuple[bool, int]] = []  # is it a box, where its content starts
    last: tuple[int, int] | None = None  # where it starts and ends
    for match in _BRACES.finditer(text):
        token = match[0]
        if match["digit"] is not None:
            last = match.span("digit")
        elif token.endswith("{") and token != r"\{":
            open_braces.append((len(token) > 1, match.end()))
        elif token == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[last[0] : last[1]].strip()


def last_answer_line(text: str) -> str | None:
    """What follows the last "Answer:", up to the end of its line; markdown bold and a final full stop are taken off.
    If the line ends there, the answer is the next line that is not empty."""
    found = None
    for match in _ANSWER.finditer(text):
        found = match[1]
    if found is None:
        return None
    found = found.strip().rstrip("*_ ")
    found = found[:-1] if found.endswith(".") else found
    found = found.rstrip("*_ ")
    found = found.strip("` ") if found.startswith("`") else found  # set as code
    box = last_box(found)
    return found if box is None else box
