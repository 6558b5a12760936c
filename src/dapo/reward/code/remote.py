"""The test's side of the border: stand-ins for the program's objects.

Consumes operations that a test performs on a :class:`Remote`, produces requests to the program and plain values. What
decides a test is computed here. A stand-in never sends the value that it is compared with to the program, so an object
that "equals everything" equals nothing:

- compared with a plain value it stands for the builtin value that it derives from (a namedtuple for its tuple, a
  member of an IntEnum for its int); an object that derives from none is equal to no plain value and has no order.
- arithmetic with a plain value likewise; where there is no builtin value, it is refused and the test fails:
  `abs(f(x) - 2.5) < 1e-6` would tell f's object the answer.
- operations among the program's own objects, calls, attributes, items and conversions are the program's affair.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

PLAIN = "_plain"
"""The name under which tests have :func:`plain_of`."""
_MOST_AT_ONCE = 256
_NOTHING = object()


class Refused(AssertionError):
    """A test would have to show its own value to an object of the program. It fails, as a false assert does."""


class Remote:
    """An object of the program, by its number."""

    __slots__ = ("_border", "_number")

    _border: Any  # the Border that made it: border.py imports this module
    _number: int

    def __init__(self, border: Any, number: int) -> None:
        object.__setattr__(self, "_border", border)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._border.call(self._number, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # numpy would take the address of its data from there
            raise AttributeError(name)
        return self._border.call("getattr", [self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._border.call("setattr", [self, name, value])

    def __getitem__(self, key: Any) -> Any:
        return self._border.call("getitem", [self, key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._border.call("setitem", [self, key, value])

    def __delitem__(self, key: Any) -> None:
        self._border.call("delitem", [self, key])

    def __iter__(self) -> Iterator[Any]:
        iterator = self._border.call("iter", [self])
        if not isinstance(iterator, Remote):
            raise TypeError("the program's iterator is none")
        count = 1
        more: BaseException | bool | None = True
        while more is True:  # a few at first: an endless generator may be slow
            items, more = self._border.take(iterator._number, count)
            yield from items
            count = min(2 * count, _MOST_AT_ONCE)
        if isinstance(more, BaseException):
            raise more

    def __next__(self) -> Any:
        return self._border.call("next", [self])

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._border.call("isinstance", [value, self]) is True

    def __hash__(self) -> int:
        plain = _plain(self)
        try:
            return hash(self._number if plain is _NOTHING else plain)
        except TypeError:
            return hash(self._number)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self._border.call("eq", [self, other]) is True
        return bool(_plain(self) == other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the program cannot be copied")


def plain_of(value: Any, refused: str = "") -> Any:
    """The plain value of what the program returned, so that a method called on it is no method of the program's.
    Raises Refused: it has none; or because of ``refused``."""
    if refused:
        raise Refused(refused)
    if not isinstance(value, Remote):
        return value
    if (found := _plain(value)) is _NOTHING:
        raise Refused("to let a method of the program's own object decide")
    return found


def _plain(remote: Remote) -> Any:
    """The builtin value that an object of the program derives from; ``_NOTHING`` if it does not."""
    found = remote._border.request("base", remote._number)
    return found[0] if isinstance(found, list) and len(found) == 1 else _NOTHING


def _order(name: str) -> Callable[[Remote, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._border.call(name, [self, other]) is True
        plain = _plain(self)
        return NotImplemented if plain is _NOTHING else compare(plain, other)

    return method


def _conversion(name: str, expected: type | None) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        result = self._border.call(name, [self, *arguments])
        if expected is not None and type(result) is not expected:
            raise TypeError(f"{name}() of the program's object gave no {expected.__name__}")
        return result

    return method


def _arithmetic(name: str, reflected: bool) -> Callable[[Remote, Any], Any]:
    operation = getattr(operator, name)

    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._border.call(name, [other, self] if reflected else [self, other])
        plain = _plain(self)
        if plain is _NOTHING:
            raise Refused(f"to show the test's value to an object of the program ({name})")
        return operation(other, plain) if reflected else operation(plain, other)

    return method


for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _order(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor"):
    setattr(Remote, f"__{_name}__", _arithmetic(_name, False))
    setattr(Remote, f"__r{_name}__", _arithmetic(_name, True))
for _name in ("and", "or"):
    setattr(Remote, f"__{_name}__", _arithmetic(f"{_name}_", False))
    setattr(Remote, f"__r{_name}__", _arithmetic(f"{_name}_", True))
for _name, _type in {"bool": bool, "int": int, "float": float, "complex": complex, "len": int, "index": int}.items():
    setattr(Remote, f"__{_name}__", _conversion(_name, _type))
for _name in ("abs", "neg", "pos", "invert", "round"):
    setattr(Remote, f"__{_name}__", _conversion(_name, None))
for _name in ("str", "repr", "format"):
    setattr(Remote, f"__{_name}__", _conversion(_name, str))
