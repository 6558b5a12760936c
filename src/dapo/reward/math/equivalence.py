"""Whether an answer means the same as the reference: structure here (lists, pairs, intervals, relations, units, words),
single expressions in ``symbolic.py``.

The reference always comes first. Imports sympy: for worker processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dapo.reward.math.notation import canonical, is_marked_choice, is_text, plain_text, split_unit
from dapo.reward.math.symbolic import approximately, constant_ratio, parsed, same_expression

_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")
_SEPARATORS = r"[,;]|\\cup(?![A-Za-z])"
_RELATIONS = r"\\(?:le|ge|ne)(?![A-Za-z])|[<>=]"
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_NAME = re.compile(r"\|?\\?[A-Za-z](?:[A-Za-z{} ]|\\[A-Za-z]+)*(?:_\s*\{?\w+\}?)?'*(?:\([\w, ]*\))?\|?")
_MEMBERSHIP = re.compile(r"(.+?)\s*\\in(?![A-Za-z])\s*(.+)")
_MAX_ITEMS = 64
"""Longest list that is compared, each item with each."""
_MAX_LENGTH = 4000
"""Longest text in characters that is looked into; beyond, only equal texts are equal."""


def equivalent(gold: str, answer: str) -> bool:
    """Whether ``answer`` is right, given the reference ``gold``: exactly, never by rounding.

    Words are compared without case and white space. A unit counts if both sides have one. A reference that cannot be
    read is met by its own text only.
    """
    if max(len(gold), len(answer)) > _MAX_LENGTH:
        return bool(_squeezed(gold)) and _squeezed(gold) == _squeezed(answer)
    left, right = canonical(gold), canonical(answer)
    if not left or not right:
        return False
    if _squeezed(left) == _squeezed(right):
        return True
    if any(is_marked_choice(side) or is_text(split_unit(side).value) for side in (left, right)):
        return plain_text(left) == plain_text(right)
    return _same_quantity(left, right)


def readable(gold: str) -> bool:
    """Whether a reference can be compared with anything but its own text."""
    text = canonical(gold)
    value = split_unit(text).value
    if not text or is_marked_choice(text) or is_text(value):
        return bool(text)
    return _is_readable(value)


def _is_readable(text: str) -> bool:
    brackets, items = _shape(_strip_name(_exact_form(text)).value)
    if brackets or len(items) > 1:
        return all(_is_readable(split_unit(item).value) for item in items)
    return all(parsed(piece) is not None for piece in _cut(items[0], rf"{_RELATIONS}|:").pieces)


# --- one value ----------------------------------------------------------------------------------------------------


def _same_quantity(gold: str, answer: str) -> bool:
    left, right = split_unit(gold), split_unit(answer)
    if left.unit and not right.unit:
        right = split_unit(answer, expected=left.unit)
    elif right.unit and not left.unit:
        left = split_unit(gold, expected=right.unit)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if (left.unit == "percent") != (right.unit == "percent"):
        # 35% is 0.35; where the question asks for a percentage, 35 is the same answer with its unit left out
        percent, other = (left, right) if left.unit == "percent" else (right, left)
        if _same_value(rf"\frac{{{percent.value}}}{{100}}", other.value):
            return True
    return _same_value(left.value, right.value)


def _same_value(gold: str, answer: str) -> bool:
    gold, answer = _exact_form(gold), _exact_form(answer)
    left, right = _strip_name(gold), _strip_name(answer)
    other_name = left.name and right.name and _squeezed(left.name) != _squeezed(right.name)
    if not other_name and _same_structure(left.value, right.value):
        return True
    return _same_relation(gold, answer)


def _same_structure(gold: str, answer: str) -> bool:
    gold_brackets, left = _shape(gold)
    answer_brackets, right = _shape(answer)
    if len(left) != len(right) or len(left) > _MAX_ITEMS:
        return False
    if gold_brackets == answer_brackets == "":
        return _same_leaf(left[0], right[0]) if len(left) == 1 else _same_unordered(left, right)
    # a pair may lose its brackets, but an interval or a set does not become another one
    return (gold_brackets == answer_brackets or (gold_brackets, answer_brackets) == ("()", "")) and _same_ordered(
        left, right
    )


def _same_leaf(gold: str, answer: str) -> bool:
    if ":" in gold and ":" in answer:  # clock times and ratios
        return _same_ordered(gold.split(":"), answer.split(":"))
    if _cut(gold, _RELATIONS).cuts or _cut(answer, _RELATIONS).cuts:
        return False  # compared as a whole, by _same_relation
    return same_expression(gold, answer)


def _same_ordered(left: Sequence[str], right: Sequence[str]) -> bool:
    return len(left) == len(right) and all(map(_same_quantity, left, right))


def _same_unordered(left: Sequence[str], right: Sequence[str]) -> bool:
    rest = list(right)
    for item in left:
        match = next((k for k, other in enumerate(rest) if _same_quantity(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


# --- names and second forms ---------------------------------------------------------------------------------------


class _Named(NamedTuple):
    name: str
    value: str


def _strip_name(text: str) -> _Named:
    r"""``x = 3``, ``f(2) = 3`` and ``x \in (0, 1)`` as name and value."""
    member = _MEMBERSHIP.fullmatch(text)
    if member is not None and _NAME.fullmatch(member[1]):
        return _Named(member[1], member[2])
    sides, relations = _cut(text, _RELATIONS)
    if relations == ["="] and _NAME.fullmatch(sides[0]):
        return _Named(sides[0], sides[1])
    return _Named("", text)


def _exact_form(text: str) -> str:
    r"""``\frac{2}{3} \approx 0.67`` and ``x = \frac{3}{8} = 0.375`` without their last form.

    Forms joined by "=" are cut only if they agree to 1%: otherwise the text says two things.
    """
    text = text.removeprefix(r"\approx").strip()
    text = text.partition(r"\approx")[0].strip()
    members = _cut(text, "=").pieces
    named = len(members) > 1 and _NAME.fullmatch(members[0]) is not None
    forms = members[1:] if named else members
    if len(forms) < 2:
        return text
    values = [approximately(form) for form in forms]
    first = values[0]
    if first is None or any(v is None or abs(v - first) > 0.01 * max(abs(v), abs(first)) for v in values):
        return text
    return f"{members[0]} = {forms[0]}" if named else forms[0]


# --- lists, pairs, intervals --------------------------------------------------------------------------------------


def _shape(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a text, such as "()" or "[)" ("" for none and for a set's braces), and its items.

    Brackets around a single item are part of it; ``\pm`` is written out as two items.
    """
    text = _as_interval(text) or text
    brackets, inner = _unbracket(text)
    items = _cut(inner, _SEPARATORS).pieces
    if brackets == r"\{\}":
        brackets = ""
    elif len(items) == 1:
        brackets, items = "", [text]
    return brackets, [version for item in items for version in _both_signs(item)]


def _both_signs(text: str) -> list[str]:
    if r"\pm" not in text:
        return [text]
    return [text.replace(r"\pm", sign).strip().removeprefix("+").strip() for sign in "+-"]


class _Cut(NamedTuple):
    pieces: list[str]
    cuts: list[str]


def _cut(text: str, separators: str) -> _Cut:
    """Cut at what matches the pattern ``separators``, but not within brackets."""
    depth, start, result = 0, 0, _Cut([], [])
    for match in re.finditer(f"{_BRACKET.pattern}|{separators}", text):
        if match[0][-1] in "([{":
            depth += 1
        elif match[0][-1] in ")]}":
            depth -= 1
        elif depth == 0:
            result.pieces.append(text[start : match.start()].strip())
            result.cuts.append(match[0])
            start = match.end()
    result.pieces.append(text[start:].strip())
    return result


def _unbracket(text: str) -> tuple[str, str]:
    """The two brackets that enclose the whole text ("" where none do) and what they enclose."""
    match = re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text.strip(), re.DOTALL)
    if match is None or not _is_balanced(match[2]):
        return "", text
    return match[1] + match[3], match[2].strip()


def _is_balanced(inner: str) -> bool:
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


# --- relations ----------------------------------------------------------------------------------------------------


def _as_interval(text: str) -> str | None:
    r"""``0 < x \le 3`` as ``(0,3]``, ``x \ge 5`` as ``[5,\infty)``; None where it is not that simple."""
    members, relations = _cut(text, _RELATIONS)
    if not all(members) or _cut(text, _SEPARATORS).cuts or len(members) not in (2, 3):
        return None
    if len(members) == 2:
        members, relations = _with_infinity(members, relations)
    if all(relation in (">", r"\ge") for relation in relations):
        members, relations = members[::-1], [_FLIPPED[relation] for relation in relations[::-1]]
    if not _NAME.fullmatch(members[1]) or not all(relation in ("<", r"\le") for relation in relations):
        return None
    opening = "[" if relations[0] == r"\le" else "("
    closing = "]" if relations[1] == r"\le" else ")"
    return f"{opening}{members[0]},{members[2]}{closing}"


def _with_infinity(members: list[str], relations: list[str]) -> tuple[list[str], list[str]]:
    r"""``x < 4`` as ``-\infty < x < 4``, with the variable in the middle."""
    (first, second), (relation,) = members, relations
    if not _NAME.fullmatch(first):
        first, second, relation = second, first, _FLIPPED[relation]
    if relation in ("<", r"\le"):
        return [r"-\infty", first, second], ["<", relation]
    return [r"\infty", first, second], [">", relation]


def _same_relation(gold: str, answer: str) -> bool:
    """Equations and inequalities with one sign, equal up to a constant factor."""
    left, right = _cut(gold, _RELATIONS), _cut(answer, _RELATIONS)
    if len(left.cuts) != 1 or len(right.cuts) != 1:
        return False
    (gold_sign,), (answer_sign,) = left.cuts, right.cuts
    if answer_sign not in (gold_sign, _FLIPPED[gold_sign]):
        return False
    ratio = constant_ratio(*(f"({lhs})-({rhs})" for lhs, rhs in (left.pieces, right.pieces)))
    if ratio is None or ratio == 0:
        return False
    if gold_sign in ("=", r"\ne"):
        return True
    return bool((ratio > 0) == (answer_sign == gold_sign))  # a negative factor turns an inequality around


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
