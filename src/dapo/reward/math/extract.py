"""Finding the final answer in a response. Pure text, linear time whatever the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from dapo.reward.thinking import outside_thinking

Rule = Literal["boxed", "answer_line"]

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<digit>\d)(?!\w))|\\.|[{}]", re.DOTALL)
_SIDE_BY_SIDE = re.compile(
    r"(?:[ \t$,;&]|\n(?!\s*\n)|\\(?:[,;! ()\[\]]|q?quad\b|text\s*\{\s*(?:and|or)\s*\})|\b(?:and|or)\b)*+"
)
"""What stands between boxes that are one answer together; not a blank line."""
_MOST_BETWEEN = 60
_ANSWER = re.compile(r"\banswer[ \t]*+(?:[*_]++[ \t]*+)?[:\uff1a][\s*_]*+([^\s*_].*)", re.IGNORECASE)


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
    digit needs no braces. Boxes side by side (``\boxed{1}`` and ``\boxed{2}``) are one answer, a list: whoever boxes
    several values has not chosen the last of them."""
    open_braces: list[tuple[bool, int, int]] = []  # is it a box, where it and where its content starts
    boxes: list[tuple[int, int, int, int]] = []  # where each starts, its content starts and ends, it ends
    for match in _BRACES.finditer(text):
        token = match[0]
        if match["digit"] is not None:
            boxes.append((match.start(), *match.span("digit"), match.end()))
        elif token.endswith("{") and token != r"\{":
            open_braces.append((len(token) > 1, match.start(), match.end()))
        elif token == "}" and open_braces:
            is_box, outer, start = open_braces.pop()
            if is_box and (not boxes or start > boxes[-1][1]):
                boxes.append((outer, start, match.start(), match.end()))
    return _joined(text, boxes) if boxes else None


def _joined(text: str, boxes: Sequence[tuple[int, int, int, int]]) -> str:
    """The content of the last box, behind that of those before it which stand beside it."""
    pieces: list[str] = []
    for (_, _, _, end), (outer, start, stop, _) in zip([(0, 0, 0, 0), *boxes[:-1]], boxes, strict=True):
        between, content = text[end:outer], text[start:stop].strip()
        if not content or len(between) > _MOST_BETWEEN or not _SIDE_BY_SIDE.fullmatch(between):
            pieces.clear()
        elif pieces and pieces[-1]:
            pieces.append(between.replace("$", " ") if re.search(r"[,;&]|and|or", between) else ", ")
        pieces.append(content)
    return "".join(pieces)


def last_answer_line(text: str) -> str | None:
    """What follows the last "Answer:", up to the end of its line; markdown bold and a final full stop are taken off.
    If the line ends there, the answer is the next line that is not empty."""
    found = None
    for match in _ANSWER.finditer(text):
        found = match[1]
    if found is None:
        return None
    found = found.strip().rstrip("*_ ").removesuffix(".").rstrip("*_ ")
    found = found.strip("` ") if found.startswith("`") else found  # set as code
    box = last_box(found)
    return found if box is None else box
