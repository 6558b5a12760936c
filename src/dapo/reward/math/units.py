r"""Units: what stands behind a value, or the currency before it, and how two units relate.

Consumes canonical text (``notation.py``). A unit counts if both sides have one; those of the same dimension are
converted exactly (2 m is 200 cm), all others must be the same word.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple


class Quantity(NamedTuple):
    """A value and its unit as it is written ("": none)."""

    value: str
    unit: str


PERCENT = "percent"
_BASES: dict[str, tuple[str, int, str]] = {
    "m": ("m", 1, "1"), "mm": ("m", 1, "1/1000"), "cm": ("m", 1, "1/100"), "dm": ("m", 1, "1/10"),
    "km": ("m", 1, "1000"), "in": ("m", 1, "127/5000"), "ft": ("m", 1, "381/1250"), "yd": ("m", 1, "1143/1250"),
    "mi": ("m", 1, "201168/125"), "g": ("g", 1, "1"), "mg": ("g", 1, "1/1000"), "kg": ("g", 1, "1000"),
    "oz": ("g", 1, "28.349523125"), "lb": ("g", 1, "453.59237"), "s": ("s", 1, "1"), "min": ("s", 1, "60"),
    "h": ("s", 1, "3600"), "day": ("s", 1, "86400"), "week": ("s", 1, "604800"), "l": ("m", 3, "1/1000"),
    "ml": ("m", 3, "1/1000000"), "dollar": ("dollar", 1, "1"), "cent": ("dollar", 1, "1/100"),
}  # fmt: skip
"""Dimension, its power and the size in it."""
_ALIASES = {
    "meter": "m", "metre": "m", "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm",
    "decimeter": "dm", "kilometer": "km", "kilometre": "km", "kms": "km", "inch": "in", "inche": "in", "foot": "ft",
    "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "gm": "g", "milligram": "mg", "kilogram": "kg", "kgs": "kg",
    "ounce": "oz", "pound": "lb", "lbs": "lb", "second": "s", "sec": "s", "minute": "min", "mins": "min", "hour": "h",
    "hr": "h", "hrs": "h", "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "usd": "dollar",
    "percentage": PERCENT, "pct": PERCENT, "%": PERCENT, "deg": "degree", "unit": "", "penny": "cent",
    "pennie": "cent", "people": "person", "children": "child", "men": "man", "women": "woman", "c": "celsius",
    "celsiu": "celsius", "f": "fahrenheit",
}  # fmt: skip
_SPEEDS = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h"}
_SHORT = "cm|mm|km|kg|mg|ml|dm|ft|in|mi|yd|lb|lbs|oz|hr|hrs"
_RATE = r"(?<=\s)[mglL]/(?:s|min|h|hr|ml|mL|[mlL])(?![A-Za-z])"
_BARE = re.compile(r"(.*[\d}\)])\s*([A-Za-z]+(?:\^\{?\d\}?)?(?: ?[/ ] ?[A-Za-z]+(?:\^\{?\d\}?)?)*)")
_CLOCK = re.compile(
    r"(\d{1,2})(?: ?: ?([0-5]\d))?(?: ?: ?([0-5]\d))?\s*(?:\\text\s*\{\s*)?(?:([ap])\.?\s*m\.?)?\s*\}?", re.IGNORECASE
)
_AT_END = re.compile(
    r"(?P<value>.*(?:[\d})!]|\\pi|(?<![A-Za-z\\])[a-z](?=\s*\\text)))\s*(?:"
    r"\\text\s*\{\s*(?P<text>(?:[^{}]|\{[^{}]*\})*?)\s*\}\s*(?P<power>(?:\^\s*\{?\d\}?)?)"
    rf"|(?P<word>(?<![\\A-Za-z])(?:[A-Za-z]{{3,}}(?:[ /]+[A-Za-z]+)*|(?:{_SHORT})(?:/[A-Za-z]+)?|{_RATE}))"
    r"(?P<wpower>(?:\^\s*\{?\d\}?)?)"
    r"|(?P<percent>\\?%)|(?P<degree>\^\\circ)\s*(?:\\text\s*\{\s*)?(?P<scale>[CF]?)\s*\}?)"
)
_NOT_UNITS = {"i", "e", "t"}
_NUMBER_WORDS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    "|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|(?:dozen|hundred|thousand|million|billion"
    "|trillion|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s?"
    "|score|half|halves"
)
_OPERATIONS = (
    "factorial|plus|minus|divided|over|power|base|mod|modulo|binary|octal|hexadecimal|root|times (?:itself|pi)"
)
_HEDGES = (
    "or|nor|if|unless|not|no|none|never|is|isn't|cannot|was|wrong|incorrect|false|invalid|impossible|rejected"
    "|extraneous|undefined|unknown|negative|below|debt|more|less|fewer|least|most|about|around|roughly|approximately"
    "|nearly|almost|maybe|perhaps|possibly|probably|but|except|without|otherwise|else|infinite|infinitely|opposite"
)
_NO_UNIT = re.compile(
    rf"(?<![^\W\d_])(?:{_NUMBER_WORDS}|{_OPERATIONS}|{_HEDGES})(?![^\W\d_])|^\W*(?:squared|cubed)(?![a-z])"
    r"|(?<![\w^{])\d",
    re.IGNORECASE,
)
"""Words behind a value that change it, or doubt it: they are no unit, and neither is what has a number of its own."""
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_CURRENCY = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "USD": "dollar", "EUR": "euro"}
_AREA = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_RAISED = {"squared": 2, "cubed": 3}


def split_unit(text: str, expected: str = "") -> Quantity:
    """Take the unit off a canonical text: what follows a value, or a currency sign before it.

    Bare letters are taken for a unit only if they measure something that the unit ``expected`` does: "2 m" may be a
    product.
    """
    bare = _BARE.fullmatch(text) if expected else None
    if bare is not None and {name for name, _ in _unit(bare[2]).powers} & {name for name, _ in _unit(expected).powers}:
        return Quantity(bare[1].strip(), bare[2])
    for sign, name in _CURRENCY.items():
        if text.startswith((sign, "-" + sign)):
            inner = split_unit(text.replace(sign, "", 1).strip())
            is_other = inner.unit and unit_ratio(inner.unit, name) not in (None, 1)  # "$5 cents"
            return Quantity(text, "") if is_other else Quantity(inner.value, name)
    if text.endswith(r"\$") and re.search(r"\d\s*\\\$$", text):
        return Quantity(text[:-2].strip(), "dollar")
    match = _AT_END.fullmatch(text)
    if match is None:
        return Quantity(text, "")
    value = match["value"].strip()
    if match["percent"]:
        return Quantity(value, PERCENT)
    if match["degree"]:
        # the argument of a sine is an angle: there the degree sign is part of the value
        return (
            Quantity(text, "") if _TRIGONOMETRY.search(value) else Quantity(value, f"degree {match['scale']}".strip())
        )
    raw = match["text"] if match["text"] is not None else match["word"]
    if not raw or raw in _NOT_UNITS or _NO_UNIT.search(raw):
        return Quantity(text, "")
    raw += (match["power"] if match["text"] is not None else match["wpower"]) or ""
    name = "" if not _unit(raw).powers else raw
    return Quantity(value, PERCENT if _unit(raw) == _unit(PERCENT) else name)


def unit_ratio(left: str, right: str) -> Fraction | None:
    """How many of the unit ``right`` one of the unit ``left`` is; None: they measure different things."""
    first, second = _unit(left), _unit(right)
    if _DEGREE in (first, second) and {first, second} & _SCALES:
        return Fraction(1)  # "30 degrees" leaves the scale to the question
    return first.size / second.size if first.powers == second.powers else None


class Clock(NamedTuple):
    """A time of the day. ``half``: "a" or "p", as in a.m. and p.m.; "" where it is not said."""

    hour: int
    rest: tuple[int, int]
    half: str


def clock(text: str) -> Clock | None:
    """The time of the day that a canonical text is; None: it is none."""
    found = _CLOCK.fullmatch(text)
    if found is None or not (found[2] or found[4]):
        return None
    half, hour = (found[4] or "").lower(), int(found[1])
    return Clock(hour, (int(found[2] or 0), int(found[3] or 0)), half) if hour <= (12 if half else 24) else None


def is_time(text: str) -> bool:
    """Whether a canonical text is a time of the day and no ratio: not in lowest terms, 5:08, 5:12 p.m. (not 5:12)."""
    time = clock(text)
    return time is not None and bool(time.half or math.gcd(time.hour, *time.rest) != 1 or re.search(r"(?<!\d)0", text))


def same_time(left: Clock, right: Clock) -> bool:
    """5:00 p.m. is 17:00; as with units, the half of the day counts if both sides say it."""
    hours = {time.hour % 12 + 12 * (time.half == "p") if time.half else time.hour for time in (left, right)}
    unsaid = bool(left.half) != bool(right.half) and max(left.hour, right.hour) <= 12
    return left.rest == right.rest and (len(hours) == 1 or (unsaid and left.hour % 12 == right.hour % 12))


class _Unit(NamedTuple):
    powers: frozenset[tuple[str, int]]
    size: Fraction


_DEGREE = _Unit(frozenset({("degree", 1)}), Fraction(1))
_SCALES = {_Unit(frozenset({(scale, 1)}), Fraction(1)) for scale in ("celsius", "fahrenheit")}


@lru_cache(maxsize=256)
def _unit(raw: str) -> _Unit:
    text = re.sub(r"[.{}]|\\[ ,;]|~", lambda m: "" if m[0] in ".{}" else " ", raw).lower()
    text = re.sub(r"\bper cent\b", PERCENT, text)
    text = re.sub(r"\bper\b", "/", _SPEEDS.get(text.strip(), text))
    powers: Counter[str] = Counter()
    size = Fraction(1)
    for place, part in enumerate(text.split("/")):
        for name, power in _factors(part):
            power = power if place == 0 else -power
            base, base_power, base_size = _BASES.get(name, (name, 1, "1"))
            powers[base] += base_power * power
            size *= Fraction(base_size) ** power
    if "celsius" in powers or "fahrenheit" in powers:
        del powers["degree"]
    return _Unit(frozenset((name, power) for name, power in powers.items() if name and power), size)


def _factors(part: str) -> list[tuple[str, int]]:
    """``square cm`` as [("cm", 2)]; words that are no known units are one name together."""
    factors: list[tuple[str, int]] = []
    unknown: list[str] = []
    power = 1
    for word, digit in re.findall(r"([^\W\d_]+|%)(?:\s*\^\s*(\d))?", part):
        if word in _AREA:
            power = _AREA[word]
        elif word in _RAISED and factors:
            factors[-1] = (factors[-1][0], _RAISED[word])
        else:
            name = _singular(word)
            if name in _BASES or name in (PERCENT, "degree", ""):
                factors.append((name, int(digit or power)))
            else:
                unknown.append(name + digit)
    return [*factors, ("".join(unknown), power)] if unknown else factors


def _singular(word: str) -> str:
    if word in _ALIASES:
        return _ALIASES[word]
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    return _ALIASES.get(word, word)
