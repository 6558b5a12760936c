"""How a canonical text is put together: brackets, items, relations, the name before a value. Pure text."""

from __future__ import annotations

import re
from typing import NamedTuple

_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")
SEPARATORS = r"[,;]|\\(?:cup|land|lor)(?![A-Za-z])"
RELATIONS = r"\\(?:le|ge|ne)(?![A-Za-z])|[<>=]"
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_FACTOR = r"(?:[a-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|omega|pi)(?![A-Za-z]))"
_NAME = re.compile(
    r"(?:\\angle ?|m ?\\angle ?|\|?)\\?[A-Za-z](?:[A-Za-z{} ]|\\[A-Za-z]+)*(?:_\s*(?:\w|\{[^{}]*\}))?'*(?:\^\{-1\})?"
    r"(?:\([\w, ]*\))?\|?"
    r"|(?![xyzn]\()[A-Za-z](?:_\w)?\([^()]*\)"  # P(A \cap B), f(x+1)
    r"|\\#[A-Za-z]+|\[[A-Z]+\]"  # a number of elements, an area
    r"|\([A-Za-z]\w?(?:_\{?\w\}?)?(?:, ?[A-Za-z](?:_\{?\w\}?)?)+\)"  # (x, y)
)
_NO_NAME = re.compile(
    r"[^(]*\\(?:sqrt|frac|ln|log|exp|in|notin|cdot|times|infty)(?![A-Za-z]).*|\\pi|\|[a-z]\w*\|"
    rf"|(?!(?:sum|max|min|ans|avg|age|gcd|lcm)$){_FACTOR}(?: ?{_FACTOR}){{1,2}}"
)
r"""What is computed from names: ``\sqrt{x}``, ``|x|``, ``ab``. Who knows it does not know x."""
_POINTS = r"(?:\\(?:overline|angle|triangle)\s*\{?|[|\[])?[A-Z](?:[A-Z']|_\{?\w+\}?)*[|\]}]?"
_RATIO_NAME = re.compile(
    rf"{_POINTS}(?:\s*[:/]\s*{_POINTS})+|\\frac\s*\{{{_POINTS}\}}\s*\{{{_POINTS}\}}|[a-z](?:\s*:\s*[a-z])+"
)
r"""``P:Q``, ``\frac{AB}{CD}``. A quotient of small letters is an equation, as their product is."""
_CONGRUENCE = re.compile(r"(.*?)\s*\\pmod\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SIGN = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_MEMBERSHIP = re.compile(r"(.+?)\s*\\in(?![A-Za-z])\s*(.+)")


class Cut(NamedTuple):
    """The pieces of a text and what stood between them."""

    pieces: list[str]
    cuts: list[str]


def cut(text: str, separators: str) -> Cut:
    """Cut at what matches the pattern ``separators``, but not within brackets."""
    depth, start, result = 0, 0, Cut([], [])
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


def unbracket(text: str) -> tuple[str, str]:
    """The two brackets that enclose the whole text ("" where none do) and what they enclose."""
    match = re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text.strip(), re.DOTALL)
    if match is None or not is_balanced(match[2]):
        return "", text
    return match[1] + match[3], match[2].strip()


def is_balanced(inner: str) -> bool:
    """Whether no bracket is closed before it is opened, nor left open."""
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


def is_name(text: str) -> bool:
    r"""Whether a value can have this name: ``x``, ``f(2)``, ``\overline{AB}``, ``P(A \cap B)``, ``(x, y)``."""
    if _RATIO_NAME.fullmatch(text):
        return True
    return bool(_NAME.fullmatch(text)) and not _NO_NAME.fullmatch(text)


class Named(NamedTuple):
    """A value and the name that is given to it ("": none)."""

    name: str
    value: str


def strip_name(text: str) -> Named:
    r"""``x = 3``, ``f(2) = 3`` and ``x \in (0, 1)`` as name and value."""
    if "=" not in text and r"\in" not in text:
        return Named("", text)
    member = _MEMBERSHIP.fullmatch(text)
    if member is not None and is_name(member[1]):
        return Named(member[1], member[2])
    sides, relations = cut(text, RELATIONS)
    if relations == ["="] and is_name(sides[0]):
        value = re.sub(r"^(\d+) ?:", r"(\1):", sides[1]) if _RATIO_NAME.fullmatch(sides[0]) else sides[1]
        return Named(sides[0], value)  # a ratio is no time
    return Named("", text)


class Congruence(NamedTuple):
    r"""``x \equiv 2 \pmod{5}``; ``left`` is "" where there is only ``2 \pmod{5}``."""

    left: str
    right: str
    modulus: str


def congruence(text: str) -> Congruence | None:
    """The one congruence that a text is; None: it is none, or a list of them."""
    match = _CONGRUENCE.fullmatch(text)
    if match is None or r"\pmod" in match[1] or match[1].count(r"\equiv") > 1:
        return None
    left, _, right = match[1].rpartition(r"\equiv" if r"\equiv" in text else "=")
    return Congruence(left.strip(), right.strip(), match[2])


def assignments(text: str) -> str:
    """``(x, y) = (1, 2)`` as ``x = 1, y = 2``; any other text as it is."""
    name, value = strip_name(text)
    names, values = (cut(unbracket(side)[1], ",").pieces for side in (name, value))
    if unbracket(name)[0] != "()" or unbracket(value)[0] != "()" or len(names) != len(values):
        return text
    return ", ".join(f"{one} = {other}" for one, other in zip(names, values, strict=True))


def assigned(text: str) -> dict[str, str] | None:
    r"""``x = 1, y = 2`` and ``(x, y) = (1, 2)`` as names and their values; None for any other text: roots of one
    variable (``x_1 = 1, x_2 = 2``) are a list."""
    items = [strip_name(item) for item in cut(assignments(text), SEPARATORS).pieces]
    values = {re.sub(r"[\s{}]", "", item.name): item.value for item in items}
    different = len({name.partition("_")[0] for name in values}) == len(items) > 1
    return values if different and all(values) and r"\in" not in text else None


def in_order(values: dict[str, str]) -> list[str]:
    """The values as the pair that they make: by name for neighbours in the alphabet (x, y, z), else as written."""
    names = sorted(values)
    is_run = all(len(name) == 1 and ord(name) == ord(names[0]) + k for k, name in enumerate(names))
    return [values[name] for name in (names if is_run else values)]


def both_signs(text: str) -> list[str]:
    r"""``1 \pm 2`` as its two values; ``\mp`` has the other sign."""
    if not _SIGN.search(text):
        return [text]
    return [_with_sign(text, "+-"), _with_sign(text, "-+")]


def _with_sign(text: str, signs: str) -> str:
    text = _SIGN.sub(lambda m: signs[m[0] == r"\mp"], text).strip()
    return text.removeprefix("+").strip()
