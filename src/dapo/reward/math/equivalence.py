"""Whether an answer means the same as the reference: words, units, second forms, lists, pairs and relations here; sets
of real numbers in ``sets.py``, single expressions in ``symbolic.py``.

The reference always comes first. Imports sympy: for worker processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import sympy  # type: ignore[import-untyped]

from dapo.reward.math.notation import (
    canonical,
    is_marked_choice,
    is_text,
    same_choice,
    same_choices,
    same_text,
    squeezed,
)
from dapo.reward.math.qualifiers import bare, without_qualifiers
from dapo.reward.math.sets import read_set, same_set
from dapo.reward.math.structure import (
    FLIPPED,
    RELATIONS,
    SEPARATORS,
    Congruence,
    assigned,
    both_signs,
    congruence,
    cut,
    in_order,
    is_name,
    strip_name,
    unbracket,
)
from dapo.reward.math.symbolic import constant_ratio, has_value, literal, parsed, real_number, same_expression
from dapo.reward.math.units import PERCENT, Quantity, clock, is_time, same_time, split_unit, unit_ratio

_Same = Callable[[str, str], bool]
_MAX_ITEMS = 64  # longest list that is compared, each item with each
_MAX_LENGTH = 4000  # longest text in characters that is looked into; beyond, only equal texts are equal
_INEQUALITIES = r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]"
_MAY_BE_UNDEFINED = re.compile(r"/|\\(?:frac|tan|cot|sec|csc|ln|log|infty|Gamma)(?![A-Za-z])|\^ ?\{ ?-")
_SUM_OF_LETTERS = re.compile(r"[A-Za-z](?: ?\+ ?[A-Za-z])+")
_QUANTITY = re.compile(r"(?:[A-Z]{2}(?:\^\{\d\})?(?:[ +-]|\\cdot)*)+(?<=[A-Z}])|[a-z](?:[ a-z]|\\cdot)*[a-z]")
"""What a reference may give the value of: ``AB+BC``, ``AB^2``, ``xy``. ``x+y=7`` is a line."""
_LOOKS_LIKE_A_SET = re.compile(
    rf"{_INEQUALITIES}|\\(?:cup|cap|setminus|in|notin|emptyset|mathbb)(?![A-Za-z])|\\\{{|^[\[(]"
)


def equivalent(gold: str, answer: str) -> bool:
    """Whether ``answer`` is right, given the reference ``gold``: exactly, never by rounding.

    Words are compared without case and white space. A unit counts if both sides have one. A reference that cannot be
    read is met by its own text only.
    """
    if max(len(gold), len(answer)) > _MAX_LENGTH:
        return bool(squeezed(gold)) and squeezed(gold) == squeezed(answer)
    reference = canonical(gold)
    return _equivalent(reference, canonical(answer, reference))


def _equivalent(left: str, right: str) -> bool:
    if not left or not right:
        return False
    if squeezed(left) == squeezed(right):
        return not _is_undefined(right)
    if same_choice(left, right):
        return True
    choices = same_choices(left, right)
    if choices is not None:
        return choices
    ways = cut(right, SEPARATORS).pieces
    if 1 < len(ways) <= _MAX_ITEMS and all(_equivalent(left, w) and _equivalent(ways[0], w) for w in ways):
        return True  # the one value in other words: "20:34 or 8:34 p.m."
    stripped = without_qualifiers(left, right)
    if stripped is None:
        return False
    left, right = stripped
    if _is_words(left) or _is_words(right):
        return same_text(strip_name(left).value, strip_name(right).value)
    return _same_quantity(left, right)


def readable(gold: str) -> bool:
    """Whether a reference can be compared with anything but its own text."""
    text = bare(canonical(gold))
    if not text or _is_words(text):
        return bool(text)
    return _is_readable(split_unit(text).value)


def _is_words(text: str) -> bool:
    if literal(text) is not None:  # ABC_{16}
        return False
    return is_marked_choice(text) or is_text(split_unit(strip_name(text).value).value)


def _is_readable(text: str) -> bool:
    value = strip_name(_exact_form(text)).value
    if _LOOKS_LIKE_A_SET.search(value) and read_set(value) is not None:
        return True
    brackets, items = _shape(value)
    if brackets or len(items) > 1:
        return all(_is_readable(split_unit(item).value) for item in items)
    modular = congruence(value)
    if modular is not None:
        return all(map(_is_readable, filter(None, modular)))
    return all(map(has_value, cut(items[0], rf"{RELATIONS}|:").pieces))


def _is_undefined(text: str) -> bool:
    if not _MAY_BE_UNDEFINED.search(text):
        return False
    brackets, items = _shape(text)
    if brackets or len(items) > 1:
        return any(map(_is_undefined, items))
    return any(parsed(piece) is sympy.nan for piece in cut(items[0], rf"{RELATIONS}|:").pieces)


# --- one value ----------------------------------------------------------------------------------------------------


def _same_quantity(gold: str, answer: str) -> bool:
    time, other_time = clock(gold), clock(answer)
    if time is not None and other_time is not None:
        return same_time(time, other_time)
    gold, answer = _exact_form(gold), _exact_form(answer, is_answer=True)
    left, right = split_unit(gold), split_unit(answer)
    if left.unit and not right.unit:
        right = split_unit(answer, expected=left.unit)
    elif right.unit and not left.unit:
        left = split_unit(gold, expected=right.unit)
    if (left.unit == PERCENT) != (right.unit == PERCENT):
        return _same_percentage(left, right)
    if left.unit and right.unit:
        ratio = unit_ratio(left.unit, right.unit)
        if ratio is None:
            return False
        if ratio != 1:
            return _same_value(rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({left.value})", right.value)
    return _same_value(left.value, right.value)


def _same_percentage(left: Quantity, right: Quantity) -> bool:
    """35% is 0.35. Where the question asks for a percentage, 35 is the same answer with its unit left out; but what is
    smaller than 1 is taken for the share itself, and a reference above 1 for percents: 500% is not 5."""
    percent, other = (left, right) if left.unit == PERCENT else (right, left)
    if other.unit:
        return False
    share = real_number(other.value)
    is_percents = right.unit == PERCENT and share is not None and abs(share) > 1
    if not is_percents and _same_value(rf"\frac{{{percent.value}}}{{100}}", other.value):
        return True
    return share is not None and bool(abs(share) >= 1) and _same_value(percent.value, other.value)


def _same_value(gold: str, answer: str) -> bool:
    modular, other = congruence(gold), congruence(answer)
    if modular is not None or other is not None:
        return modular is not None and other is not None and _same_congruence(modular, other)
    left, right = strip_name(gold), strip_name(answer)
    pairs = assigned(gold), assigned(answer)
    if all(pairs) or (any(pairs) and "=" not in (left.value if pairs[1] else right.value)):
        return _same_assignment(left.value, right.value, *pairs)
    if _LOOKS_LIKE_A_SET.search(left.value) and _LOOKS_LIKE_A_SET.search(right.value):
        first, second = read_set(left.value), read_set(right.value)
        if first is not None and second is not None:
            # a set may be named by its own name (D = ...) or by that of its elements (x \in ...)
            same_kind = (r"\in" in gold) == (r"\in" in answer)
            return (not same_kind or _same_names(left.name, right.name)) and same_set(first, second)
    if _same_names(left.name, right.name) and _same_structure(left.value, right.value):
        return True
    for equation, value, label in ((answer, gold, _SUM_OF_LETTERS), (gold, answer, _QUANTITY)):
        sides, relations = cut(equation, RELATIONS)
        if relations == ["="] and label.fullmatch(sides[0]) and real_number(value) is not None:
            return same_expression(value, sides[1])  # m + n = 5
    return _same_relation(gold, answer)


def _same_assignment(gold: str, answer: str, left: dict[str, str] | None, right: dict[str, str] | None) -> bool:
    """``x = 1, y = 2`` beside the same by name, or beside a pair or a list: there ``left`` or ``right`` is None."""
    if left is not None and right is not None:
        return left.keys() == right.keys() and all(_same_quantity(left[name], right[name]) for name in left)
    other = gold if left is None else answer
    brackets, items = _shape(other)
    if left is not None:
        return _is_pair(other) and _same_ordered(in_order(left), items)
    values = in_order(right or {})
    if brackets == "()" and _is_pair(other):
        return _same_ordered(items, values)
    return brackets == "" and len(items) == len(values) and _same_unordered(items, values)


def _same_congruence(gold: Congruence, answer: Congruence) -> bool:
    """Of the same number to the same modulus, where residues differ by multiples of it."""
    modulus = real_number(gold.modulus)
    if (gold.left and answer.left and not _same_leaf(gold.left, answer.left)) or not _same_leaf(
        gold.modulus, answer.modulus
    ):
        return False

    def same_residue(left: str, right: str) -> bool:
        difference = real_number(f"({left})-({right})")
        if not modulus or difference is None:
            return _same_leaf(left, right)
        return bool((difference / modulus).is_integer)

    left, right = (_shape(side.right)[1] for side in (gold, answer))
    return _same_unordered(left, right, same_residue)


def _same_names(left: str, right: str) -> bool:
    return not left or not right or squeezed(left) == squeezed(right)


def _same_structure(gold: str, answer: str) -> bool:
    gold_brackets, left = _shape(gold)
    answer_brackets, right = _shape(answer)
    gold_is_set, answer_is_set = gold_brackets in ("", r"\{\}"), answer_brackets in ("", r"\{\}")
    if gold_is_set and answer_is_set:
        if gold_brackets != answer_brackets and r"\emptyset" in (left[0], right[0]):
            return False  # a set that has the empty set in it
        return _same_leaf(left[0], right[0]) if len(left) == len(right) == 1 else _same_unordered(left, right)
    # a pair may lose its brackets, but an interval or a set does not become another one
    loses = (gold_brackets, answer_brackets) == ("()", "") and _is_pair(gold) and _is_pair(answer)
    return (gold_brackets == answer_brackets or loses) and _same_ordered(left, right)


def _is_pair(text: str) -> bool:
    """Whether a text can be a pair or a longer tuple, its brackets left out or not: no inequality, no alternatives."""
    brackets, inner = unbracket(text)
    return brackets in ("", "()") and not cut(inner, rf"{_INEQUALITIES}|\\(?:lor|cup)(?![A-Za-z])").cuts


def _same_leaf(gold: str, answer: str) -> bool:
    if ":" in gold and ":" in answer:  # clock times and ratios
        left, right = gold.split(":"), answer.split(":")
        if clock(gold) is None and not _same_ordered(left, right):
            left, right = ([rf"\frac{{{a}}}{{{b}}}" for a, b in pairwise(parts)] for parts in (left, right))
        return _same_ordered(left, right) and (not is_time(gold) or clock(answer) is not None)
    if cut(gold, RELATIONS).cuts or cut(answer, RELATIONS).cuts:
        return False  # compared as a whole, by _same_relation
    return same_expression(gold, answer)


def _same_ordered(left: Sequence[str], right: Sequence[str]) -> bool:
    return len(left) == len(right) and all(map(_same_quantity, left, right))


def _same_unordered(left: Sequence[str], right: Sequence[str], same: _Same = _same_quantity) -> bool:
    """Whether each item of the reference has its own in the answer; what is left over there repeats what is matched."""
    if max(len(left), len(right)) > _MAX_ITEMS:
        return False
    rest, matched = list(right), []
    for item in left:
        match = next((k for k, other in enumerate(rest) if same(item, other)), None)
        if match is None:
            return False
        matched.append(rest.pop(match))
    if not rest:
        return True
    # a solution may be given twice, but where the reference does so, repetitions count (prime factors)
    repeats = any(same(item, other) for k, item in enumerate(left) for other in left[:k])
    return not repeats and all(any(same(item, other) for item in matched) for other in rest)


# --- second forms, lists ------------------------------------------------------------------------------------------


def _exact_form(text: str, is_answer: bool = False) -> str:
    r"""``\frac{2}{3} \approx 0.67`` and ``x = \frac{3}{8} = 0.375`` without their last form.

    Forms that do not agree are not cut: the text says two things. In an answer "=" must be exact, and what follows
    "\approx" a rounding; in a reference, which is trusted, forms may differ by 1%.
    """
    if "=" not in text and r"\approx" not in text:
        return text
    text = text.removeprefix(r"\approx").strip()
    exact, *rounded = (piece.strip() for piece in text.split(r"\approx"))
    if len(rounded) == 1 and is_name(exact):  # "x \approx 11" says no more of x
        return f"{exact} = {rounded[0]}"
    members = cut(exact, "=").pieces
    named = len(members) > 1 and is_name(members[0])
    forms = members[1:] if named else members
    if is_answer and not all(_is_rounding(forms[-1], form) for form in rounded):
        return text
    if len(forms) < 2:
        return exact
    agree = all(_same_quantity(forms[0], form) for form in forms[1:]) if is_answer else _agree(forms)
    if not agree:
        return text
    return f"{members[0]} = {forms[0]}" if named else forms[0]


def _is_rounding(exact: str, rounded: str) -> bool:
    """Whether ``rounded`` is ``exact`` to the digits that it shows; what is no number may be anything."""
    left, right = split_unit(exact), split_unit(re.sub(r"\\[lc]?dots|\.{2,}", "", rounded).strip())
    value, shown = real_number(left.value), real_number(right.value)
    if value is None or shown is None:
        return value is None and shown is None
    if left.unit != right.unit and PERCENT not in (left.unit, right.unit):
        return not left.unit or not right.unit or unit_ratio(left.unit, right.unit) is not None
    value *= 100 if right.unit == PERCENT != left.unit else 1
    shown *= 100 if left.unit == PERCENT != right.unit else 1
    digits = re.fullmatch(r"[+-]?\d*?(0*)(?:\.(\d+))?", right.value)
    if digits is None or PERCENT in (left.unit, right.unit):
        return bool(abs(value - shown) <= 0.01 * abs(value))
    if digits[2]:
        return bool(abs(value - shown) * 10 ** len(digits[2]) < 1)
    return bool(2 * abs(value - shown) <= 10 ** len(digits[1]))


def _agree(forms: Sequence[str]) -> bool:
    values = [_approximately(form) for form in forms]
    first = values[0]
    if first is None:
        return all(same_expression(forms[0], form) for form in forms[1:])
    return all(v is not None and abs(v - first) <= 0.01 * max(abs(v), abs(first)) for v in values)


def _approximately(form: str) -> float | None:
    quantity = split_unit(form)
    value = real_number(quantity.value)
    if value is None:
        return None
    return float(value) / (100 if quantity.unit == PERCENT else 1)


def _shape(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a text, such as "()" or "[)" ("" for none), and its items.

    Brackets around a single item are part of it; ``\pm`` is written out as two items.
    """
    text = _as_interval(text) or text
    brackets, inner = unbracket(text)
    items = cut(inner, SEPARATORS).pieces
    if len(items) == 1 and brackets != r"\{\}":
        brackets, items = "", [text]
    return brackets, [version for item in items for version in both_signs(item)]


# --- relations ----------------------------------------------------------------------------------------------------


def _as_interval(text: str) -> str | None:
    r"""``a < x \le b`` as ``(a,b]``, ``x \ge a`` as ``[a,\infty)``; None where it is not that simple."""
    members, relations = cut(text, RELATIONS)
    if not all(members) or cut(text, SEPARATORS).cuts or len(members) not in (2, 3):
        return None
    if len(members) == 2:
        members, relations = _with_infinity(members, relations)
    if all(relation in (">", r"\ge") for relation in relations):
        members, relations = members[::-1], [FLIPPED[relation] for relation in relations[::-1]]
    if not is_name(members[1]) or not all(relation in ("<", r"\le") for relation in relations):
        return None
    opening = "[" if relations[0] == r"\le" else "("
    closing = "]" if relations[1] == r"\le" else ")"
    return f"{opening}{members[0]},{members[2]}{closing}"


def _with_infinity(members: list[str], relations: list[str]) -> tuple[list[str], list[str]]:
    r"""``x < 4`` as ``-\infty < x < 4``, with the variable in the middle."""
    (first, second), (relation,) = members, relations
    if not is_name(first):
        first, second, relation = second, first, FLIPPED[relation]
    if relation in ("<", r"\le"):
        return [r"-\infty", first, second], ["<", relation]
    return [r"\infty", first, second], [">", relation]


def _same_relation(gold: str, answer: str) -> bool:
    """Equations and inequalities with one sign, equal up to a constant factor."""
    left, right = cut(gold, RELATIONS), cut(answer, RELATIONS)
    if len(left.cuts) != 1 or len(right.cuts) != 1:
        return False
    (gold_sign,), (answer_sign,) = left.cuts, right.cuts
    if answer_sign not in (gold_sign, FLIPPED[gold_sign]):
        return False
    ratio = constant_ratio(*(f"({lhs})-({rhs})" for lhs, rhs in (left.pieces, right.pieces)))
    if ratio is None or ratio == 0:
        return False
    if gold_sign in ("=", r"\ne"):
        return True
    return bool((ratio > 0) == (answer_sign == gold_sign))  # a negative factor turns an inequality around
