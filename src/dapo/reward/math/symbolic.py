"""Equality of two expressions: exact for literals, by high-precision evaluation for everything else.

Parsing is Math-Verify's (LaTeX to sympy, nothing evaluated, no ``eval``), with capital letters kept apart from small
ones. Its comparison is not used: it has absolute tolerances, which make tiny numbers equal. Imports sympy: for worker
processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, _Latex2Sympy, normalize_latex

from dapo.reward.math.units import is_time

_DIGITS = 40  # decimal digits that two values are compared to, relative to their size
_LARGE = 10.0**6  # values above it are compared to as many digits after the point, too
_MAX_BITS = 2.0**17
"""Numbers that may need more bits than this are not evaluated: no reference answer is one, power towers are."""
_MAX_LENGTH = 2000  # longest expression in characters that is parsed
_MAX_BRACKETS = 100  # most brackets in it: deep nesting is slow to parse

_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?!\.?\d)")
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_MIXED = re.compile(r"(?<![\w.}^_])(\d+)\s*(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}| (\d+)/(\d+))")
_BASED = re.compile(r"([0-9A-Za-z]+)_\s*\{?\s*(\d+)\s*\}?")
_BASED_WITHIN = re.compile(rf"(?<![\w.\\}}])(?=\d){_BASED.pattern}")
_LITERAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])|(?<=[a-z])i(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+|\([^()]*\))\s*\^\\circ")
_REMAINDER = re.compile(r"(\d+)\s*\\bmod(?![A-Za-z])\s*(\d+)")
_DOUBLE_FACTORIAL = re.compile(r"(?<![\w.])(\d{1,3})\s*!!(?!!)")
_PRIMED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('+)")
_SLOW = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)  # what takes long to evaluate to hundreds of digits
_UNREADABLE = re.compile(r"\\approx|(?<![_^\d])\d+ +\d|\d\s*_|'")
"""What the reader would misread: two numbers side by side as a product, "12_1" and "5'" as 12 and 5."""
_COLON = re.compile(r"(?<![\d:])\d{1,2}(?: ?: ?\d\d(?!\d)){1,2}")


def same_expression(gold: str, answer: str) -> bool:
    """Whether two canonical texts without top-level commas are mathematically equal. Never by rounding."""
    gold_number, answer_number = literal(gold), literal(answer)
    if gold_number is not None and answer_number is not None:
        return gold_number == answer_number
    left, right = parsed(gold), parsed(answer)
    if left is None or right is None:
        return False
    return _same(left, right)


def constant_ratio(gold: str, answer: str) -> float | None:
    """c where the expression ``gold`` is c times the expression ``answer`` everywhere; None: there is no such c."""
    left, right = parsed(gold), parsed(answer)
    if not _is_small_expression(left) or not _is_small_expression(right):
        return None
    ratios = []
    for point in _points(_names(left, right)):
        first, second = _value_at(left, point), _value_at(right, point)
        if first is None or second is None or not second.is_finite or second == 0:
            return None
        ratios.append(first / second)
    if not all(ratio.is_real and close(ratio, ratios[0]) for ratio in ratios):
        return None
    return float(ratios[0])


def literal(text: str) -> Fraction | None:
    """The exact value of a number written out: 12, -0.5, 1e-3, 3/8, 132_5; None for anything else."""
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # between digits a blank means something: 2 1/2
    sign = -1 if text.startswith("-") else 1
    fraction = re.fullmatch(r"[+-]?(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(\d+))", text)
    if fraction is not None:
        top, bottom = (int(part) for part in fraction.groups() if part is not None)
        return sign * Fraction(top, bottom) if bottom else None
    based = _BASED.fullmatch(text)
    if based is not None and _is_in_base(based[1], int(based[2])):
        try:
            return Fraction(int(based[1], int(based[2])))
        except ValueError:
            return None
    remainder = _REMAINDER.fullmatch(text)
    if remainder is not None and int(remainder[2]):
        return Fraction(int(remainder[1]) % int(remainder[2]))
    if len(text) <= _MAX_LENGTH and _LITERAL.fullmatch(text):
        return Fraction(text)
    return None


def _is_in_base(digits: str, base: int) -> bool:
    """Whether ``digits`` of a base are meant: A_{16} is a member of a sequence, FF_{16} is 255."""
    return 2 <= base <= 36 if digits[0].isdigit() else base in (11, 12, 16) and len(digits) > 1


class _Reader(_Latex2Sympy):  # type: ignore[misc]  # it has no types
    """Math-Verify's reader, where factors side by side are a product: it takes 2(3) for 2 + 3, a mixed number."""

    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        factors = [self.convert_postfix(part) for part in arr[i:]]
        if any(isinstance(factor, list) for factor in factors):  # a derivative
            return super().convert_postfix_list(arr, i)
        product = factors[-1]
        for factor in reversed(factors[:-1]):
            is_matrix = getattr(factor, "is_Matrix", False) or getattr(product, "is_Matrix", False)
            product = self.mat_mul_flat(factor, product) if is_matrix else self.mul_flat(factor, product)
        return product


@lru_cache(maxsize=256)
def parsed(text: str) -> Any:
    """``text`` as a sympy object, unevaluated; None: it cannot be read; nan: a part of it is undefined."""
    if not text.strip() or len(text) > _MAX_LENGTH or len(re.findall(r"[(\[{]", text)) > _MAX_BRACKETS:
        return None
    number = literal(text)
    if number is not None:
        return sympy.Rational(number.numerator, number.denominator)
    text = _PRIMED.sub(lambda m: f"{m[1]}_{{{'987' * len(m[2])}}}", _exact_numbers(text))  # y' is another name than y
    if _UNREADABLE.search(text) or any(map(is_time, _COLON.findall(text))):
        return None
    latex = normalize_latex(text, _NORMALIZATION)
    try:
        expr = _Reader(is_real=_IMAGINARY.search(latex) is None, config=_CONVERSION).parse(latex)
    except Exception:  # its grammar reports by the plain class
        return None
    return sympy.nan if _evaluated(expr) is sympy.nan else expr


def has_value(text: str) -> bool:
    """Whether a reference can be compared with more than its own text: it is read, defined and not too large."""
    expr = parsed(text)
    too_large = isinstance(expr, sympy.Expr) and not isinstance(expr, sympy.MatrixBase) and bits(expr) > _MAX_BITS
    return expr is not None and not too_large and expr is not sympy.nan


def real_number(text: str) -> Any | None:
    """A number without variables to 50 digits (exactly where it is written out); None for anything else."""
    number = literal(text)
    if number is not None:
        return sympy.Rational(number.numerator, number.denominator)
    expr = parsed(text)
    if not _is_small_expression(expr) or expr.free_symbols:
        return None
    value = _value_at(expr, {})
    return value if value is not None and value.is_real and value.is_finite else None


def linear(left: str, right: str) -> tuple[str, float, Any] | None:
    """Variable, slope and root of left - right, where that is linear in one variable; else None."""
    sides = parsed(left), parsed(right)
    if not all(map(_is_small_expression, sides)):
        return None
    names = _names(*sides)
    if len(names) != 1:
        return None
    values = []
    for x in map(sympy.sympify, ("0", "1", "-7/3", "29/11")):
        first, second = (_value_at(side, {names[0]: x}) for side in sides)
        if first is None or second is None or not (first - second).is_real or not (first - second).is_finite:
            return None
        values.append((x, first - second))
    offset, slope = values[0][1], values[1][1] - values[0][1]
    if not slope or not all(close(value, offset + slope * x) for x, value in values[2:]):
        return None
    return names[0], float(slope), -offset / slope


def _exact_numbers(text: str) -> str:
    """Decimals and mixed numbers as fractions: floats would bring rounding, and 2 3/4 is not a product."""
    text = _REPEATING.sub(_repeating_as_fraction, text)
    text = _MIXED.sub(lambda m: rf"({m[1]}+\frac{{{m[2] or m[4]}}}{{{m[3] or m[5]}}})", text)
    text = _BASED_WITHIN.sub(lambda m: m[0] if literal(m[0]) is None else str(literal(m[0])), text)
    text = _DOUBLE_FACTORIAL.sub(lambda m: str(math.prod(range(int(m[1]), 0, -2))), text)
    text = _DECIMAL.sub(lambda m: rf"(\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})", text)
    return _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)


def _repeating_as_fraction(match: re.Match[str]) -> str:
    whole, fixed, cycle = match.groups()
    top = int(whole + fixed + cycle) - int(whole + fixed or "0")
    bottom = (10 ** len(cycle) - 1) * 10 ** len(fixed)
    return rf"(\frac{{{top}}}{{{bottom}}})"


# --- equality of sympy objects ------------------------------------------------------------------------------------


def _same(left: Any, right: Any) -> bool:
    left, right = _multiplied_out(left), _multiplied_out(right)
    if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
        both = isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase)
        return both and left.shape == right.shape and all(map(_same, left.flat(), right.flat()))
    if _is_small_expression(left) and _is_small_expression(right):
        return _same_value(left, right)
    if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
        return all(any(_same(a, b) for b in right) for a in left) and all(any(_same(a, b) for a in left) for b in right)
    return isinstance(left, sympy.Set) and bool(left == right)


def _multiplied_out(expr: Any) -> Any:
    """A number times a matrix as a matrix."""
    if isinstance(expr, sympy.MatMul | sympy.MatAdd) and all(
        isinstance(arg, sympy.MatrixBase) or _is_small_expression(arg) for arg in expr.args
    ):
        return expr.doit()
    return expr


def _same_value(left: Any, right: Any) -> bool:
    """Equal wherever both are defined: identity is undecidable, but 40 digits at several points are proof enough."""
    names = _names(left, right)
    if names and (left.has(sympy.Sum, sympy.Product) or right.has(sympy.Sum, sympy.Product)):
        left, right = left.doit(), right.doit()  # a sum up to n has no value at our points, which are no integers
    points = list(_points(names))
    if names and not (_is_complex(left) or _is_complex(right)):
        # sqrt(x^3) is x sqrt(x) and ln(ab) is ln a + ln b where they are real; beyond, they take different branches
        points = [p for p in points if _is_real_at(left, p) and _is_real_at(right, p)] or points
    compared = 0
    for point in points:
        first, second = _value_at(left, point), _value_at(right, point)
        if first is None or second is None:
            if (first is None) != (second is None):
                return False  # one is undefined where the other is not
            continue
        if not close(first, second) and not (_tiny(first, second) and sympy.simplify(left - right) == 0):
            return False
        if not names and not _same_digits(left, right, first):
            return False
        if not _same_beyond(left, right, point, first):
            return False
        compared += 1
    return compared > 0 or bool(left == right and left is not sympy.nan)


def _evaluated(expr: Any) -> Any:
    """``expr``, from its leaves on; nan if a part of it is undefined, which sympy may drop: to it ``(1/0)^0`` is 1."""
    arguments = expr.flat() if isinstance(expr, sympy.MatrixBase) else getattr(expr, "args", ())
    parts = list(map(_evaluated, arguments))
    is_infinite = any(part.is_infinite for part in parts if isinstance(part, sympy.Expr))
    is_lost = is_infinite and isinstance(expr, sympy.Pow) and parts[1] == 0
    if expr in (sympy.nan, sympy.zoo) or sympy.nan in parts or is_lost:
        return sympy.nan
    if not parts or not isinstance(expr, sympy.Expr) or isinstance(expr, (*_SLOW, sympy.MatrixBase, sympy.MatrixExpr)):
        return expr
    value = expr.func(*parts) if is_infinite or bits(expr) <= _MAX_BITS else expr
    return sympy.nan if value.has(sympy.nan, sympy.zoo) else value


def _same_digits(left: Any, right: Any, value: Any) -> bool:
    r"""Whether two numbers that may agree by chance are equal to 200 digits, too: ``\pi + 10^{-45}`` is not pi."""
    if not value.is_finite or _tiny(value, value) or (left.is_Rational and right.is_Rational):
        return True
    if left.has(*_SLOW) or right.has(*_SLOW):
        return True
    first: Any = _value_at(left, {}, 220)
    second: Any = _value_at(right, {}, 220)
    return bool(abs(first - second) <= abs(first) * sympy.Float(10) ** -200)


def _same_beyond(left: Any, right: Any, point: dict[str, Any], value: Any) -> bool:
    """For equal ``value``s that are large: whether they are equal behind the point, too. All digits that were compared
    may be those of the same large term."""
    if value.is_Rational or not value.is_finite or abs(value) < _LARGE:
        return True
    digits = _DIGITS + 10 + int(sympy.log(abs(value), 10).evalf(6))
    first: Any = _value_at(left, point, digits)
    return bool(abs(first - _value_at(right, point, digits)) <= sympy.Float(10) ** -_DIGITS)


def _is_small_expression(expr: Any) -> bool:
    return isinstance(expr, sympy.Expr) and bits(expr) <= _MAX_BITS


def _names(left: Any, right: Any) -> list[str]:
    """The variables of both. By name: how a symbol was read (real or not) depends on what stood beside it."""
    return sorted({s.name for s in left.free_symbols | right.free_symbols} - {"i"})


def _is_complex(expr: Any) -> bool:
    return bool(expr.has(sympy.I)) or any(s.name == "i" for s in expr.free_symbols)


def _is_real_at(expr: Any, point: dict[str, Any]) -> bool:
    """Whether no root and no logarithm in ``expr`` is taken of a negative number at ``point``."""
    for part in expr.atoms(sympy.Pow, sympy.log):
        inner = part.args[0]
        if inner.free_symbols and (isinstance(part, sympy.log) or not part.args[1].is_integer):
            value = _value_at(inner, point)
            if value is not None and value.is_negative:
                return False
    return True


def _points(names: list[str]) -> Iterator[dict[str, Any]]:
    """Where to evaluate: unremarkable rationals of both signs, another one for each symbol."""
    if not names:
        yield {}
        return
    # not equally spaced: (x - y)/(x - z) must not be the same number at each
    for a, b, c in (
        (1.3717, 0.6131, 0.2237),
        (-0.8283, 0.4547, -0.1319),
        (0.2719, -1.6177, 0.3571),
        (3.1931, 2.2133, 0.1733),
    ):
        yield {name: sympy.Rational(round((a + b * k + c * k * k) * 10000), 9973) for k, name in enumerate(names)}


def _value_at(expr: Any, point: dict[str, Any], digits: int = _DIGITS + 10) -> Any | None:
    values: dict[Any, Any] = {s: point[s.name] for s in expr.free_symbols if s.name in point}
    values |= {s: sympy.I for s in expr.free_symbols if s.name == "i"}
    value = expr.xreplace(values).doit()
    if value.is_Rational:
        return value  # exactly
    value = value.evalf(digits, maxn=2 * digits)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return value if value in (sympy.oo, -sympy.oo) else None
    return value


def close(first: Any, second: Any) -> bool:
    if first == second:
        return True
    if (first.is_Rational and second.is_Rational) or not (first.is_finite and second.is_finite):
        return False
    return bool(abs(first - second) <= max(abs(first), abs(second)) * sympy.Float(10) ** -_DIGITS)


def _tiny(first: Any, second: Any) -> bool:
    """Both may be an exact zero that shows as rounding noise, which no relative bound can tell."""
    return bool(
        first.is_finite and second.is_finite and max(abs(first), abs(second)) < sympy.Float(10) ** -(_DIGITS // 2)
    )


def bits(expr: Any) -> float:
    """Upper bound of the bits that evaluating ``expr`` may take, estimated without evaluating it."""
    if isinstance(expr, sympy.Rational):
        return float(max(abs(expr.p).bit_length(), expr.q.bit_length(), 1))
    if not expr.args:
        return 30.0 if expr.is_Symbol else 8.0  # our points are fractions of that size
    args = [bits(arg) for arg in expr.args]
    if max(args) > _MAX_BITS:
        return math.inf
    if isinstance(expr, sympy.Pow):
        return args[0] * max(1.0, _magnitude(expr.args[1]))
    if isinstance(expr, sympy.exp):
        return 2 * max(8.0, _magnitude(expr.args[0]))
    if isinstance(expr, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.binomial):
        return _magnitude(expr.args[0]) * 16
    return sum(args)


def _magnitude(expr: Any) -> float:
    """About the largest absolute value of an expression that is small enough to be evaluated."""
    value = abs(expr.xreplace({symbol: sympy.Integer(6) for symbol in expr.free_symbols}).evalf(6))
    return float(value) if value.is_number and value.is_finite else math.inf
