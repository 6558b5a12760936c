r"""Sets of real numbers, however they are written: intervals, unions, inequalities, ``\mathbb{R} \setminus \{1\}``.

Consumes canonical text (``notation.py``), decides equality exactly: two sets are equal if they agree at every end point
of either and between each two neighbours. Only sets whose end points are numbers are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cmp_to_key
from itertools import pairwise
from typing import Any, NamedTuple

from dapo.reward.math.structure import FLIPPED, RELATIONS, cut, is_name, unbracket
from dapo.reward.math.symbolic import close, linear, real_number

_CONNECTIVES = [r"\\lor(?![A-Za-z])", r"\\land(?![A-Za-z])", r"\\(?:cup|cap|setminus)(?![A-Za-z])"]
_BUILDER = re.compile(r"([^|:]+?)\s*[|:]\s*(.+)")
_ABSOLUTE = re.compile(r"\|([^|]+)\|")
_MAX_PARTS = 32  # most parts of a set that is read


class RealSet(NamedTuple):
    """A subset of the real line: where it may begin or end, what is in it, the variable it is about ("": none)."""

    marks: tuple[Any, ...]
    holds: Callable[[Any], bool]
    variable: str = ""


REALS = RealSet((), lambda x: True)
EMPTY = RealSet((), lambda x: False)


def read_set(text: str) -> RealSet | None:
    """The set that a text describes; None: it is none, or not one of real numbers with known ends."""
    text = text.strip()
    if text in (r"\mathbb{R}", r"\emptyset"):
        return REALS if text == r"\mathbb{R}" else EMPTY
    for connective in _CONNECTIVES:
        pieces, cuts = cut(text, connective)
        if cuts:
            return _combined(pieces, cuts)
    brackets, inner = unbracket(text)
    if brackets == r"\{\}":
        return _braced(inner)
    items = cut(inner, "[,;]").pieces
    if brackets and len(items) == 2:
        return _interval(brackets, *items)
    if brackets == "()" and len(items) == 1 and cut(inner, RELATIONS).cuts:
        return read_set(inner)
    member = re.fullmatch(r"(.+?)\s*\\(in|notin)(?![A-Za-z])\s*(.+)", text)
    if member is not None:
        return _membership(*member.groups())
    return _relations(text)


def same_set(left: RealSet, right: RealSet) -> bool:
    """Whether both have the same elements (and are about the same variable, where both name one)."""
    if left.variable and right.variable and left.variable != right.variable:
        return False
    return all(left.holds(x) == right.holds(x) for x in _samples(left.marks + right.marks))


def _samples(marks: tuple[Any, ...]) -> list[Any]:
    """All marks, one point between each two neighbours, and one beyond each end."""
    ordered: list[Any] = []
    for mark in sorted(marks, key=cmp_to_key(_compare)):
        if not ordered or _compare(ordered[-1], mark) != 0:
            ordered.append(mark)
    if not ordered:
        return [0]
    between = [(a + b) / 2 for a, b in pairwise(ordered)]
    return [*ordered, *between, ordered[0] - 1, ordered[-1] + 1]


def _compare(a: Any, b: Any) -> int:
    if close(a, b):
        return 0
    return -1 if a < b else 1


def _membership(name: str, sign: str, text: str) -> RealSet | None:
    named = read_set(text) if is_name(name) else None
    if named is None:
        return None
    holds = named.holds if sign == "in" else (lambda x: not named.holds(x))
    return RealSet(named.marks, holds, re.sub(r"[\s{}]", "", name))


def _combined(pieces: list[str], cuts: list[str]) -> RealSet | None:
    if len(pieces) > _MAX_PARTS or len(set(cuts)) > 1:
        return None
    parts = [read_set(piece) or _equation(piece) for piece in pieces]
    if not all(parts):
        return None
    sets = [part for part in parts if part is not None]
    variables = {part.variable for part in sets if part.variable}
    if len(variables) > 1:
        return None
    holds: Callable[[Any], bool]
    # "(1, 2) and (3, 4)" lists intervals, "x > 1 and x < 2" narrows
    if cuts[0] in (r"\lor", r"\cup") or (cuts[0] == r"\land" and not variables):
        holds = lambda x: any(part.holds(x) for part in sets)  # noqa: E731
    elif cuts[0] in (r"\land", r"\cap"):
        holds = lambda x: all(part.holds(x) for part in sets)  # noqa: E731
    else:
        holds = lambda x: sets[0].holds(x) and not any(part.holds(x) for part in sets[1:])  # noqa: E731
    return RealSet(tuple(mark for part in sets for mark in part.marks), holds, "".join(variables))


def _braced(inner: str) -> RealSet | None:
    r"""``\{1, 2\}`` or ``\{x \mid x > 1\}``."""
    if not inner:
        return EMPTY
    builder = _BUILDER.fullmatch(inner)
    if builder is not None and is_name(re.sub(r"\\in\s*\\mathbb\{R\}$", "", builder[1]).strip()):
        described = read_set(builder[2]) or _equation(builder[2])
        # the letter is bound: {t | t > 1} is {x | x > 1}, but {t | x > 1} is none
        letter = re.sub(r"\\in(?![A-Za-z]).*|[\s{}\\]", "", builder[1])
        is_about_it = described is not None and described.variable.lstrip("\\") in ("", letter)
        return described._replace(variable="") if described is not None and is_about_it else None
    values = [real_number(item) for item in cut(inner, "[,;]").pieces]
    if any(value is None for value in values):
        return None
    return RealSet(tuple(values), lambda x: any(close(x, value) for value in values), "")


def _interval(brackets: str, first: str, last: str) -> RealSet | None:
    low = _end(first, r"-\infty")
    high = _end(last, r"\infty")
    if low is None or high is None:
        return None
    sets = [
        _half_line(low, r"\ge" if brackets[0] == "[" else ">"),
        _half_line(high, r"\le" if brackets[1] == "]" else "<"),
    ]
    if low != "infinite" and high != "infinite" and _compare(low, high) >= 0:
        return None  # a pair of numbers
    return RealSet(sets[0].marks + sets[1].marks, lambda x: sets[0].holds(x) and sets[1].holds(x))


def _end(text: str, infinity: str) -> Any | None:
    if re.sub(r"\s+|^\+", "", text) == infinity:
        return "infinite"
    return real_number(text)


def _half_line(end: Any, relation: str, variable: str = "") -> RealSet:
    if end == "infinite":
        return REALS
    at_end = relation in (r"\le", r"\ge", "=")
    side = {"<": -1, r"\le": -1, ">": 1, r"\ge": 1}.get(relation, 0)

    def holds(x: Any) -> bool:
        order = _compare(x, end)
        if relation == r"\ne":
            return order != 0
        return at_end if order == 0 else order == side

    return RealSet((end,), holds, variable)


def _relations(text: str) -> RealSet | None:
    r"""``0 < x \le 3``, ``x \ne 2``, ``2x > 8``, ``|x - 1| < 2``; None for equations and for all else."""
    members, relations = cut(text, RELATIONS)
    if not relations or not all(members) or len(members) > 3 or "=" in relations:
        return None
    conditions = [_condition(*pair) for pair in zip(members, relations, members[1:], strict=False)]
    if not all(conditions):
        return None
    sets = [condition for condition in conditions if condition is not None]
    variables = {part.variable for part in sets}
    if len(variables) != 1:
        return None
    marks = tuple(mark for part in sets for mark in part.marks)
    return RealSet(marks, lambda x: all(part.holds(x) for part in sets), variables.pop())


def _equation(text: str) -> RealSet | None:
    """``x = 3`` as a part of a larger condition."""
    sides, relations = cut(text, RELATIONS)
    return _condition(sides[0], "=", sides[1]) if relations == ["="] else None


def _condition(left: str, relation: str, right: str) -> RealSet | None:
    if _ABSOLUTE.fullmatch(right):
        left, relation, right = right, FLIPPED[relation], left
    absolute = _ABSOLUTE.fullmatch(left)
    if absolute is not None:
        return _absolute(absolute[1], relation, right)
    line = linear(left, right)
    if line is None:
        return None
    variable, slope, root = line
    return _half_line(root, relation if slope > 0 else FLIPPED[relation], variable)


def _absolute(inner: str, relation: str, bound: str) -> RealSet | None:
    upper = _condition(inner, relation, bound)
    lower = _condition(inner, FLIPPED[relation], f"-({bound})")
    size = real_number(bound)
    if upper is None or lower is None or size is None or size < 0:
        return None
    marks = upper.marks + lower.marks
    if relation in ("<", r"\le", r"\ne"):
        return RealSet(marks, lambda x: upper.holds(x) and lower.holds(x), upper.variable)
    return RealSet(marks, lambda x: upper.holds(x) or lower.holds(x), upper.variable)
