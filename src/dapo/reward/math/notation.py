r"""One spelling for what is written in many ways: LaTeX, Unicode, markdown, separators, units, money and percent.

Pure text in, text out; nothing is evaluated here.
"""
# ruff: noqa: RUF001 (look-alike characters are what this module is about)

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "θ": r"\theta ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SPELLINGS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<!\\)\\[()\[\]]", " "),  # math delimiters \( \) \[ \]
        (r"(?<=\d)\{,\}(?=\d)", ","),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad\b|\\displaystyle\b|\\limits\b", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\\pi|[A-Za-z\d])\s*(\\pi|[A-Za-z\d])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\\pi|[A-Za-z\d])\s*\{", r"\\frac{\1}{"),
        (r"\(-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)", r"\\mathbb{R}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?:√|(?<![A-Za-z\\])sqrt|\\sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\*\*", "^"),
        (r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}"),
        (r"\*", r" \\cdot "),
        (r"\\(le|ge|ne)q?(?:slant)?(?![A-Za-z])", r"\\\1 "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:simeq|sim)(?![A-Za-z])", r"\\approx "),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
        (r"\\(?:var)?nothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:mathrm|textrm|textbf|textit|mbox|mathbf|textsf|rm)\s*\{", r"\\text{"),
    ]
]
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CONJUNCTION = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}])")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")


def canonical(text: str) -> str:
    """``text`` in the one spelling that the rest of the reward code reads."""
    text = _plain_characters(text.strip().strip("*").strip())
    text = _without_dollars(text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _CONJUNCTION.sub(" , ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r",(?: ?,)+", ",", text)  # "35, and 71"
    if not re.search(r"[(\[]|\\\{", text):  # within brackets a comma separates
        text = _GROUPED.sub(lambda m: re.sub(r"[ ,]", "", m[0]), text)
    return text[:-1].rstrip() if text.endswith((".", ",")) and not text.endswith("\\,") else text


def _plain_characters(text: str) -> str:
    pieces = []
    for char in text:
        if char in _UNICODE:
            pieces.append(_UNICODE[char])
        elif "VULGAR FRACTION" in unicodedata.name(char, ""):
            top, _, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
            pieces.append(rf"\frac{{{top}}}{{{bottom}}}")
        else:
            pieces.append(char)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", "".join(pieces))
    return unicodedata.normalize("NFKC", text)


def _without_dollars(text: str) -> str:
    """Math delimiters go, money stays (as an escaped dollar)."""
    unescaped = re.findall(r"(?<!\\)\$", text)
    if len(unescaped) % 2 == 0:
        return re.sub(r"(?<!\\)\$", " ", text)
    return re.sub(r"(?<!\\)\$", r"\\$", text)


# --- units --------------------------------------------------------------------------------------------------------


class Quantity(NamedTuple):
    """A value and its unit ("": none)."""

    value: str
    unit: str


_UNIT_NAMES = {
    "percentage": "percent", "pct": "percent", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "inch": "in", "inche": "in", "feet": "ft",
    "foot": "ft", "mile": "mi", "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s", "gram": "g",
    "kilogram": "kg", "liter": "l", "litre": "l", "deg": "degree", "usd": "dollar", "unit": "", "squareunit": "",
}  # fmt: skip
_SHORT_UNITS = "cm|mm|km|kg|mg|ml|ft|in|mi|lb|oz|hr|am|pm"
_UNIT_AT_END = re.compile(
    r"(?P<value>.*[\d})!])\s*(?:"
    r"\\text\s*\{\s*(?P<text>[^{}]*?)\s*\}\s*(?P<power>(?:\^\s*\{?\d\}?)?)"
    rf"|(?P<word>(?<![\\A-Za-z])(?:[A-Za-z]{{3,}}(?: [A-Za-z]+)*|{_SHORT_UNITS})(?P<wpower>(?:\^\s*\{{?\d\}}?)?))"
    r"|(?P<percent>\\?%)|(?P<degree>\^\\circ)(?: ?[CF])?)"
)
_NOT_UNITS = {"i", "e", "t"}
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_CURRENCY = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}


def split_unit(text: str, expected: str = "") -> Quantity:
    """Take the unit off a canonical text: what follows a value, or a currency sign before it.

    A bare letter is taken for a unit only if it is the one ``expected``: otherwise "2 m" is a product.
    """
    if expected and re.search(rf"[\d}})]\s*{re.escape(expected)}$", text):
        return Quantity(text[: -len(expected)].strip(), expected)
    for sign, name in _CURRENCY.items():
        if text.startswith((sign, "-" + sign)):
            value = text.replace(sign, "", 1).strip()
            return Quantity(split_unit(value).value, name)
    match = _UNIT_AT_END.fullmatch(text)
    if match is None:
        return Quantity(text, "")
    value = match["value"].strip()
    if match["percent"]:
        return Quantity(value, "percent")
    if match["degree"]:
        # the argument of a sine is an angle: there the degree sign is part of the value
        return Quantity(text, "") if _TRIGONOMETRY.search(value) else Quantity(value, "degree")
    raw = (match["text"] if match["text"] is not None else match["word"]) or ""
    if raw in _NOT_UNITS:
        return Quantity(text, "")
    return Quantity(value, _unit_name(raw + (match["power"] or "")))


def _unit_name(raw: str) -> str:
    name = re.sub(r"[\s.{}]", "", raw)
    name = name.lower() if len(name) > 2 else name
    name = name[:-1] if len(name) > 3 and name.endswith("s") and not name.endswith("ss") else name
    return _UNIT_NAMES.get(name, name)


# --- text answers -------------------------------------------------------------------------------------------------

_MATH_WORDS = re.compile(
    r"\\(?:begin|end)\s*\{[A-Za-z]+\}|\\[A-Za-z]+|(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc|log|ln|exp|max|min|gcd|lcm|mod)"
)
_WORD = re.compile(r"[^\W\d_]{3,}|(?<![A-Za-z])(?:no|No|NO)(?![A-Za-z])")


def is_text(text: str) -> bool:
    """Whether a canonical text is words, not mathematics: it has a run of three letters that is no known function."""
    return bool(_WORD.search(_MATH_WORDS.sub(" ", text)))


def is_marked_choice(text: str) -> bool:
    r"""A letter that is set as a choice: ``\text{C}``, ``(C)``, ``C.``, ``C)``."""
    return bool(re.fullmatch(r"\\text\s*\{\s*\(?[A-Za-z][).]?\s*\}|\([A-Za-z]\)|[A-Za-z]\)", text))


def plain_text(text: str) -> str:
    r"""Words for comparison: without ``\text{}``, brackets around a letter, case and white space."""
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"^\(?([A-Za-z])[).]?$", r"\1", text.strip())
    return re.sub(r"[\s{}\\]+", "", text).casefold().rstrip(".")
