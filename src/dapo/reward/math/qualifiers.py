r"""What is said of letters beside an answer ("for all x", ``k \in \mathbb{Z}``), and letters that are bound and may
have another name: parameters of such a qualifier, and the arguments of a function that is defined, as in f(t) = t + 1.

Consumes canonical text (``notation.py``), produces the bare answers with the same names for the same roles. Pure text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dapo.reward.math.structure import RELATIONS, cut, unbracket

_LONGEST = 200  # longest qualifier in characters that is looked for
_START = re.compile(
    r"(?<![A-Za-z\\])(?:[Ff]or|where|with)(?![A-Za-z])|\\forall(?![A-Za-z])"
    r"|(?<![A-Za-z\\])[A-Za-z](?: ?, ?[A-Za-z])* ?(?:\\in(?![A-Za-z])|(?:\\text ?\{)? ?(?:is|are|any|an)(?![A-Za-z]))"
)
_LEADING = re.compile(
    r"(?:\\text\s*\{\s*)?(?:[Ff]or (?:all|any|every|each)(?![A-Za-z])|\\forall(?![A-Za-z]))[^,:;]*[,:;]"
)
_TOKEN = re.compile(r"\\mathbb\{[A-Z]\}(?:\s*\^?\s*\{?\s*([+*])\s*\}?)?|\\[A-Za-z]+|\\.|[A-Za-z]+|\S")
_FILLERS = re.compile(
    r"for|where|with|is|are|be|being|an|and|any|all|every|each|some|arbitrary|constants?|numbers?|values?|of"
    r"|\\(?:text|in|forall|land)|[,.:;(){}]",
    re.IGNORECASE,
)
_DOMAINS = {
    r"\mathbb{Z}": "Z", "integer": "Z", "integers": "Z", r"\mathbb{R}": "R", "real": "R", "reals": "R",
    r"\mathbb{C}": "C", "complex": "C", r"\mathbb{Q}": "Q", "rational": "Q", "rationals": "Q", r"\mathbb{N}": "N",
    "natural": "N", "positive": "+", "nonnegative": "0+", "nonzero": "*",
}  # fmt: skip
_FUNCTION = re.compile(
    r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\^\{-1\})?'*\(([a-z](?: ?, ?[a-z])*)\)\s*=|[A-Za-z]_\{?([ijkmn])\}?\s*="
)
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


class _Qualified(NamedTuple):
    """An answer without its qualifier, the letters that this binds, and what they run over (empty: not said)."""

    body: str
    bound: list[str]
    domain: frozenset[str]


def without_qualifiers(gold: str, answer: str) -> tuple[str, str] | None:
    """Both texts without what only says what a letter stands for, their bound letters named alike; None: they say
    different things of them. As with units, a qualifier on one side only is let pass."""
    left, right = _split(gold), _split(answer)
    if left.domain and right.domain and left.domain != right.domain:
        return None
    bound = _arguments(left.body) + left.bound, _arguments(right.body) + right.bound
    if bound[0] == bound[1] or not len(bound[0]) == len(bound[1]) == len(set(bound[1])) == len(set(bound[0])):
        return left.body, right.body
    used = set(_LETTERS.findall(left.body + right.body))
    fresh = [letter for letter in "uvwpqrsabcdhlmnkjxyz" if letter not in used][: len(bound[0])]
    if len(fresh) < len(bound[0]):
        return left.body, right.body
    return _renamed(left.body, bound[0], fresh), _renamed(right.body, bound[1], fresh)


def bare(text: str) -> str:
    """A canonical text without its qualifier."""
    return _split(text).body


def _split(text: str) -> _Qualified:
    leading = _LEADING.match(text)
    if leading is not None:
        text = f"{text[leading.end() :].lstrip(' }')} {leading[0].rstrip(',:; ')}"
    brackets, inner = unbracket(text)
    whole = inner if brackets == r"\{\}" else text
    for start in _START.finditer(whole):
        body = whole[: start.start()]
        for before in ("\\text", "\\land", "\\text"):
            body = body.rstrip(" ,;:(|{").removesuffix(before)
        is_short = len(whole) - start.start() <= _LONGEST
        letters = _read(whole[start.start() :], body.rstrip()) if body and is_short else None
        if letters is not None:
            return _Qualified(body.rstrip(), *letters)
    return _Qualified(text, [], frozenset())


def _read(tail: str, body: str) -> tuple[list[str], frozenset[str]] | None:
    """The letters that a qualifier is about, in the order of ``body``, and their domain. None: it says more, or it
    restricts the very unknown that the answer is about (``x > 2, x \\in \\mathbb{Z}``)."""
    letters: set[str] = set()
    domain: set[str] = set()
    for token in _TOKEN.finditer(tail.replace("-", "")):
        word = re.sub(r"\s*\^?\s*\{?\s*[+*]\s*\}?$", "", token[0]) if token[1] else token[0]
        if word in _DOMAINS:
            domain |= {_DOMAINS[word], *(token[1] or "")}
        elif _FILLERS.fullmatch(word) or (word == "a" and "a" not in _LETTERS.findall(body)):
            continue
        elif re.fullmatch("[A-Za-z]", word):
            letters.add(word)
        else:
            return None
    used, arguments = _LETTERS.findall(body), _arguments(body)
    members, relations = cut(body, RELATIONS)
    unknowns = set(members if set(relations) - {"="} else members[:1])
    if not letters & set(used) or letters & unknowns or not (set(relations) <= {"="} or any(map(str.isalpha, members))):
        return None
    if arguments and letters & set(arguments) and re.search(r"\bsome\b", tail):
        return None
    bound = sorted((letter for letter in letters if letter in used and letter not in arguments), key=used.index)
    return bound, frozenset({"N"} if domain == {"Z", "+"} else domain)


def _arguments(body: str) -> list[str]:
    """The letters that an answer such as ``f(x) = x + 1`` or ``a_n = 2n`` is a function of."""
    function = _FUNCTION.match(body)
    return re.findall("[a-z]", function[1] or function[2]) if function else []


def _renamed(text: str, old: list[str], new: list[str]) -> str:
    names = dict(zip(old, new, strict=True))
    return _LETTERS.sub(lambda m: names.get(m[0], m[0]), text)
