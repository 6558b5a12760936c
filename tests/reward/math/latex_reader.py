"""The value of a LaTeX expression at a few points, in floats: small, and independent of the code under test."""

import re

TOKEN = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|[-+^/(){}\[\]|*]|\S")
POINTS = [
    {
        letter: complex(low + 0.37 * k % 1.9, 0)
        for k, letter in enumerate("abcdefghjklmnopqrstuvwxyzABCDEFGHJKLMNOPQRSTUVWXYZ")
    }
    for low in (1.137, 2.411, 0.583)
]


class Unreadable(Exception):
    pass


class Reader:
    """A recursive-descent reader of sums, products, fractions, roots and powers, in complex floats."""

    def __init__(self, latex, point):
        for spelling in (r"\left", r"\right", r"\displaystyle", r"\,", r"\ ", "$", r"\!"):
            latex = latex.replace(spelling, " " if spelling != r"\!" else "")
        self.tokens = TOKEN.findall(re.sub(r"\\[dt]frac", r"\\frac", latex))
        self.point, self.place = point, 0

    def peek(self):
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self, expected=None):
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise Unreadable
        self.place += 1
        return token

    def all(self):
        result = self.sum()
        if self.peek() is not None:
            raise Unreadable
        return result

    def sum(self):
        total = 0
        sign = -1 if self.peek() == "-" else 1
        if self.peek() in ("-", "+"):
            self.take()
        total = sign * self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            total += sign * self.product()
        return total

    def product(self):
        total = self.power()
        while self.peek() not in (None, "+", "-", ")", "}", "]", ","):
            if self.peek() == "/":
                self.take()
                total /= self.power()
            else:
                if self.peek() in (r"\cdot", r"\times", "*"):
                    self.take()
                total *= self.power()
        return total

    def power(self):
        base = self.atom()
        if self.peek() == "^":
            self.take()
            exponent = self.argument()
            if abs(exponent) > 60:
                raise Unreadable
            base = base**exponent
        return base

    def argument(self):
        if self.peek() == "{":
            self.take()
            inner = self.sum()
            self.take("}")
            return inner
        token = self.take()
        if token.isdigit():  # TeX takes one digit
            if len(token) > 1:
                self.tokens.insert(self.place, token[1:])
            return int(token[0])
        self.place -= 1
        return self.atom()

    def atom(self):
        token = self.take()
        if token in "([{":
            inner = self.sum()
            self.take({"(": ")", "[": "]", "{": "}"}[token])
            return inner
        if token == "-":
            return -self.power()
        if token[0].isdigit() or token[0] == ".":
            return float(token) if "." in token else int(token)
        if token == r"\frac":
            return self.argument() / self.argument()
        if token == r"\sqrt":
            degree = 2
            if self.peek() == "[":
                self.take()
                degree = self.sum()
                self.take("]")
            return complex(self.argument()) ** (1 / degree)
        if token == r"\pi":
            return 3.141592653589793
        if token == "i":
            return 1j
        if token == "e":
            return 2.718281828459045
        if token in self.point:
            return self.point[token]
        raise Unreadable


def value(latex):
    """The values of an expression at a few points; None where this reader cannot read it."""
    try:
        return [complex(Reader(latex, point).all()) for point in POINTS]
    except (Unreadable, ZeroDivisionError, OverflowError):
        return None


def equal(first, second):
    return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-9) for a, b in zip(first, second, strict=True))


def same_value(first, second):
    if value(first) is None or value(second) is None:
        return first == second
    return equal(value(first), value(second))
