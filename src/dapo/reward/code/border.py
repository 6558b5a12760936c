"""The connection of a test to the program: requests and replies, and calls back into the test.

Consumes frames of the runner, which may hold anything, and produces plain values, exceptions and
:class:`~dapo.reward.code.remote.Remote` objects; waits for each reply. A frame of the program's is a JSON list:
``["v", value, changed arguments]``, ``["e", exception]`` or ``["k", callback]``.
"""

from __future__ import annotations

import builtins
import json
import marshal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from dapo.reward.code.names import load_known
from dapo.reward.code.remote import Remote
from dapo.reward.code.runner import STANDARD
from dapo.reward.code.values import build, pack

_ENDING = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that end a loop silently: out of a call they would make `all(map(f, xs))` true."""


class ProgramGone(BaseException):
    """The program has ended, or sends what is no reply. Not an Exception, so that no test takes it for its own."""

    def __init__(self, text: str, too_long: bool = False) -> None:
        super().__init__(text)
        self.too_long = too_long


class Border:
    """The connection to one program. ``reply_bytes``: the longest reply that is read."""

    def __init__(self, channel: socket.socket, reply_bytes: int) -> None:
        self.gone = False
        self.track_changes = False
        self._channel = channel
        self._reply_bytes = reply_bytes
        self._callbacks: list[Callable[..., Any]] = []
        self._errors: dict[int, type[BaseException]] = {}

    def names(self, wanted: Sequence[str]) -> dict[str, Any]:
        """The values of those names that the program defines."""
        found = self.request("names", list(wanted))
        try:
            return {name: value for name, value in found if name in wanted}
        except (TypeError, ValueError):
            self._lose("the program sent what is no reply")

    def take(self, number: int, count: int) -> tuple[list[Any], BaseException | bool | None]:
        """Up to ``count`` items of an iterator; then True (there may be more), None (the end) or what was raised."""
        try:
            items, more = self.request("take", number, count)
            return list(items), self._error(more) if isinstance(more, list) else (True if more else None)
        except (TypeError, ValueError):
            self._lose("the program sent what is no reply")

    def call(self, target: int | str, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> Any:
        """Call an object of the program by number, or an operator or builtin inside the sandbox by name."""
        keywords = keywords or {}
        flat = [part for name, value in keywords.items() for part in (name, self._packed(value))]
        track = self.track_changes and isinstance(target, int)
        places: dict[Any, Any] = {**dict(enumerate(arguments)), **keywords}
        try:
            return self.request("call", target, self._packed(list(arguments)), flat, track, places)
        except _ENDING as error:
            if target == "next":
                raise
            raise RuntimeError(f"the program raised {type(error).__name__}") from None

    def request(
        self,
        kind: str,
        target: Any,
        arguments: Any = None,
        keywords: Any = None,
        track: bool = False,
        places: Mapping[Any, Any] | None = None,
    ) -> Any:
        """Send a request, see to calls back into the test, return the value or raise the exception that comes.

        ``places``: the arguments by position or name, which change if the program has changed them.
        """
        self._send((kind, target, arguments, keywords, track))
        while True:
            match self._receive():
                case ["v", value, list(changes)]:
                    for key, now in changes:
                        _update((places or {}).get(key), now)
                    return value
                case ["e", error]:
                    raise self._error(error)
                case ["k", int(number), list(positional), list(named)]:
                    self._call_back(number, positional, dict(named))
                case _:
                    self._lose("the program sent what is no reply")

    def _call_back(self, number: int, arguments: list[Any], keywords: dict[str, Any]) -> None:
        try:
            result = self._packed(self._callbacks[number](*arguments, **keywords))
        except ProgramGone:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            self._send(("raised", names[0], self._packed([str(error)])))
        else:
            self._send(("returned", result))

    def _send(self, message: tuple[Any, ...]) -> None:
        body = marshal.dumps(message)
        try:
            self._channel.sendall(len(body).to_bytes(4, "big") + body)
        except OSError:
            self._lose("the program ended")

    def _receive(self) -> Any:
        size = int.from_bytes(self._read(4), "big")
        if size > self._reply_bytes:
            self._lose(f"the program returned {size} bytes, more than max_output_kb allows", too_long=True)
        body = self._read(size)
        try:
            return json.loads(body, object_hook=lambda node: build(node, self._received))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            self._lose(f"the program returned what cannot be read: {type(error).__name__}")

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self._channel.recv(min(size, 1 << 20))
            except OSError:
                part = b""
            if not part:
                self._lose("the program ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _lose(self, text: str, too_long: bool = False) -> NoReturn:
        self.gone = True
        raise ProgramGone(text, too_long)

    def _received(self, tag: str, body: Any) -> Any:
        """What the program has sent that is not plain: a type of the standard library, an object, an exception."""
        match tag, body:
            case "x", [str(name), list(arguments)] if name in STANDARD:
                return load_known(name)(*arguments)
            case "o", [int(number)]:
                return Remote(self, number)
            case "o", [int(number), [str(name), *bases]]:
                return self._error_class(number, name, bases)
        raise ValueError(tag)

    def _error_class(self, number: int, name: str, bases: list[Any]) -> type[BaseException]:
        """The class of exceptions that stands for one of the program's: a builtin one, or made after its name."""
        if number not in self._errors:
            known = [getattr(builtins, str(base), None) for base in bases]
            base = next((k for k in known if isinstance(k, type) and issubclass(k, BaseException)), Exception)
            made = base if base.__name__ == name else type(name, (base,), {})
            self._errors[number] = made
        return self._errors[number]

    def _error(self, described: Any) -> BaseException:
        try:
            number, name, bases, arguments = described
            kind = self._error_class(number, name, bases)
            error = kind.__new__(kind, *arguments)
            error.args = tuple(arguments)
            return error
        except Exception:
            return RuntimeError("the program raised an exception that cannot be rebuilt")

    def _packed(self, value: Any) -> Any:
        return pack(value, self._other)

    def _other(self, value: Any) -> Any:
        """What the test sends that is not plain."""
        if isinstance(value, Remote):
            return {"o": object.__getattribute__(value, "_number")}
        for number, made in self._errors.items():
            if made is value:
                return {"o": number}
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"g": name}
        full = f"{type(value).__module__}.{type(value).__qualname__}"
        if full in STANDARD:
            return {"x": [full, self._packed(STANDARD[full](value))]}
        if isinstance(value, Iterator):
            return {"y": self._kept(lambda: next(value))}
        if callable(value):
            return {"k": self._kept(value)}
        if type(value).__module__ == "tests":
            return {"u": self._kept(_door(value))}
        raise TypeError(f"a test cannot pass a {type(value).__name__} to the program")

    def _kept(self, function: Callable[..., Any]) -> int:
        self._callbacks.append(function)
        return len(self._callbacks) - 1


def _door(value: Any) -> Callable[..., Any]:
    """How the program reaches an object of a class that the test defines: public attributes, and nothing behind them
    (from `__init__.__globals__` it could read the test)."""

    def door(kind: str, name: str, *new: Any) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(value, name) if kind == "get" else setattr(value, name, *new)

    return door


def _update(old: Any, new: Any) -> None:
    """Let a mutable value become equal to ``new`` in place, as deep as its parts are the same kind."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        old[:] = [_merged(was, now) for was, now in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict):
        merged = {key: _merged(old.get(key), now) for key, now in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new


def _merged(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, list | dict | set | bytearray):
        _update(old, new)
        return old
    return new
