"""Which part of a response is the program. Pure text, linear time whatever the text.

The rule, on the text outside of thinking blocks:

1. Candidates are the fenced blocks (three or more backticks or tildes) marked ``python``, ``py`` or ``ipython``, with
   or without a version (``python3.11``), in pandoc's manner (``{.python}``), or not at all, case aside. A fence ends at
   a line with at least as many of its marks and nothing else, at most three columns deeper. A block that is never
   closed goes to the end of the text, as responses are cut at a limit.
2. If the tests call a name, the program is the last candidate that defines it (``def``, ``class`` or an assignment at
   the outermost level; for ``Solution().method`` a class ``Solution`` with that method), so that usage examples after
   it do not count. If no candidate defines it, the last one marked as Python, or else the last one.
3. If the tests run a whole program, it is the last candidate marked as Python, or else the last one.
4. Without any fence, the whole text is the program if it parses as Python and does something: defines the name, or,
   where none is called, holds more than bare names, numbers and texts.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from dapo.reward.code.names import root_name
from dapo.reward.thinking import outside_thinking

_FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+")  # never takes a step back: linear time
_PYTHON = re.compile(r"\{?\.?(?:i?python|py)[0-9.]*\}?")
_LONGEST_UNFENCED = 100_000


@dataclass(frozen=True, slots=True)
class _Block:
    text: str
    language: str


def find_program(response: str, entry_point: str | None, called: Sequence[str] = ()) -> str | None:
    """``entry_point``: what the tests call, such as ``add`` or ``Solution().add``; ``__main__`` or None: not known, and
    the names that the tests use are ``called``."""
    text = outside_thinking(response).replace("\r\n", "\n")
    names = [entry_point] if entry_point and entry_point != "__main__" else list(called)
    blocks = _fenced(text)
    if not blocks:
        return text if _is_program(text, names) else None
    candidates = [block for block in blocks if not block.language or _PYTHON.fullmatch(block.language)]
    for name in names:
        for block in reversed(candidates):
            if defines(block.text, name):
                return block.text
    marked = [block for block in candidates if block.language]
    return (marked or candidates)[-1].text if candidates else None


def defines(program: str, entry_point: str) -> bool:
    """Whether the program defines what the tests call at its outermost level."""
    name = re.escape(root_name(entry_point))
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*(?::[^=\n]*)?=(?!=)"
    found = re.search(pattern, program, re.MULTILINE)
    method = re.search(r"\)\.(\w+)$", entry_point)
    if found is None or method is None:
        return found is not None
    pattern = rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{method[1]}\b"
    return re.search(pattern, program[found.end() :], re.MULTILINE) is not None


def _fenced(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if opening is None:
            opening, lines = fence, []
        elif fence and fence[2].startswith(opening[2]) and not fence[3] and len(fence[1]) <= len(opening[1]) + 3:
            blocks.append(_Block(_text(lines, opening), opening[3].lower()))
            opening = None
        else:
            lines.append(line)
    if opening is not None:
        blocks.append(_Block(_text(lines, opening), opening[3].lower()))
    return blocks


def _text(lines: list[str], opening: re.Match[str]) -> str:
    text = "\n".join(lines) + "\n"
    return textwrap.dedent(text) if opening[1] else text  # a fence in a list item


def _is_program(text: str, names: Sequence[str]) -> bool:
    if len(text) > _LONGEST_UNFENCED or (names and not any(defines(text, name) for name in names)):
        return False
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in statements)
