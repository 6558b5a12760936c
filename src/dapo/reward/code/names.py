"""The tests of a row as they stand in the data, and which names in an assert test are the program's.

Pure functions on trusted text: consumes what stands under the row's tests key, produces :class:`Snippet` and
:class:`InOut` records, or says what is wrong with it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODULES = frozenset(
    (
        *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"),
        *("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "sys", "time", "types"),
        "typing",
    )
)
"""Modules that a test may mention without importing them."""

_NAMES = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque namedtuple",
        "copy": "deepcopy",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "functools": "reduce partial",
        "itertools": "accumulate chain combinations islice permutations product zip_longest",
        "math": "ceil floor gcd inf isclose isnan nan pi sqrt",
        "string": "ascii_lowercase ascii_uppercase digits",
    }.items()
    for name in names.split()
}
_KNOWN = frozenset(dir(builtins)) | MODULES | _NAMES.keys()
_FUNCTIONS = "copysign cos degrees exp fabs fsum hypot isfinite isinf isqrt log log10 log2 radians sin tan trunc"
_MATH = dict.fromkeys(_FUNCTIONS.split(), "math")
"""Names that a test takes from the standard library if it is known that another one is tested."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.comprehension)


@dataclass(frozen=True, slots=True)
class Snippet:
    """An assert test: its source, the names in it that are the program's, and those of the standard library that it
    takes for given (name, and where it comes from).

    ``has_variables``: it binds names, so that a change that the program makes to an argument may be looked at.
    """

    source: str
    free: tuple[str, ...] = ()
    known: tuple[tuple[str, str], ...] = ()
    has_variables: bool = False


@dataclass(frozen=True, slots=True)
class InOut:
    """A test of a whole program: what it reads, and what it must write. ``tolerance``: how far printed
    numbers may be from the expected ones, see :func:`~dapo.reward.code.grade.same_output`."""

    stdin: str
    stdout: str
    tolerance: float = 0.0


Tests = Sequence[Snippet] | Sequence[InOut]


TOLERANCE_KEY = "float_tolerance"  # key of a row, or of one of its tests


@contextlib.contextmanager
def long_integers() -> Iterator[None]:
    """Numbers of any length in what is trusted, such as a test that expects 5,000 digits."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def read_tests(value: Any, entry_point: str | None, tolerance: Any = None) -> Tests:
    """The tests of a row, of one kind.

    Args:
        value: a list of assert snippets, of ``{"assert": snippet}`` or of ``{"stdin": text, "stdout": text}``; or such
            a list as JSON text.
        entry_point: the name that the tests call, such as ``add`` or ``Solution().add``; None: not known.
        tolerance: the row's own, for printed numbers; None: it has none.

    Raises ValueError: what is wrong with them, in words.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("the tests are text that is not JSON; write a list") from None
    if value is None:
        raise ValueError("there are no tests")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"the tests must be a list, but are {type(value).__name__}")
    if not value:
        raise ValueError("the list of tests is empty: every program would pass")
    if all(isinstance(test, Mapping) and {"stdin", "stdout"} <= test.keys() for test in value):
        return [_in_out(test, place, tolerance) for place, test in enumerate(value, 1)]
    sources = [_source(test, place) for place, test in enumerate(value, 1)]
    return _snippets(sources, entry_point)


def uses_solution_class(tests: Tests, entry_point: str | None) -> bool:
    """Whether the program is a class in the LeetCode manner, which is written without its imports."""
    if entry_point is not None:
        return root_name(entry_point) == "Solution"
    return any(isinstance(test, Snippet) and "Solution" in test.free for test in tests)


def root_name(entry_point: str) -> str:
    """The name in front: ``Solution`` of ``Solution().add``."""
    return entry_point.replace("(", ".").split(".")[0].strip()


def _in_out(test: Mapping[str, Any], place: int, tolerance: Any) -> InOut:
    tolerance = test.get(TOLERANCE_KEY, tolerance)
    if tolerance is not None and not (type(tolerance) in (int, float) and 0 <= tolerance < 1):
        raise ValueError(f"test {place}: float_tolerance must be a number from 0 to 1, such as 1e-6, not {tolerance!r}")
    stdin, stdout = test["stdin"], test["stdout"]
    for key, text in (("stdin", stdin), ("stdout", stdout)):
        if not isinstance(text, str):
            raise ValueError(f"test {place}: {key} must be text, but is {type(text).__name__}")
    return InOut(stdin, stdout, tolerance or 0.0)


def _source(test: Any, place: int) -> str:
    source = test.get("assert") if isinstance(test, Mapping) else test
    if not isinstance(source, str):
        keys = f" with the keys {', '.join(map(str, test)) or 'none'}" if isinstance(test, Mapping) else ""
        raise ValueError(
            f"test {place} is a {type(test).__name__}{keys}; it must be an assert statement as text, "
            '{"assert": ...} or {"stdin": ..., "stdout": ...}, and all tests of a row of one kind'
        )
    if not source.strip():
        raise ValueError(f"test {place} is empty")
    return source


def _snippets(sources: list[str], entry_point: str | None) -> list[Snippet]:
    entry = root_name(entry_point) if entry_point else None
    given_names = _KNOWN | (_MATH.keys() if entry else set())
    parsed = [_parse(source, place, entry_point) for place, source in enumerate(sources, 1)]
    if entry is None and all(names <= _KNOWN for _, _, names, _ in parsed):
        # `assert sum(10, 15) == 6`: a known name, but nothing else can be what is tested
        own = {name for _, tree, _, _ in parsed for name in _called(tree)}
    else:
        own = {entry} if entry else set()
    snippets = []
    defined: set[str] = set()
    for place, (source, tree, names, bound) in enumerate(parsed, 1):
        names = names - defined
        called = _called(tree)
        known = {name: _known_path(name, name in called) for name in names & given_names - own}
        free = {name for name in names if name not in known or (name in MODULES and known[name] is None)}
        if not free:
            raise ValueError(f"test {place} calls nothing of the program: {source.strip()[:80]!r}")
        has_variables = bool(bound or defined) or any(isinstance(node, _SCOPES) for node in ast.walk(tree))
        given = tuple((name, path) for name, path in sorted(known.items()) if path is not None)
        snippets.append(Snippet(source, tuple(sorted(free)), given, has_variables))
        defined |= bound
    return snippets


def _parse(source: str, place: int, entry_point: str | None) -> tuple[str, ast.Module, set[str], set[str]]:
    """Source, tree, names that it takes from outside, and names that it binds at its top.

    A check function that is defined and not called is called with the entry point: HumanEval's own files are so.
    """
    try:
        with long_integers():
            tree = ast.parse(source)
            table = symtable.symtable(source, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"test {place} is not Python ({error}): {source.strip()[:80]!r}") from None
    names = set(_outside(table))
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    if "check" in bound and "check" not in names and entry_point:
        return _parse(f"{source}\n\ncheck({entry_point})\n", place, entry_point)
    return source, tree, names - bound, bound


def _outside(table: symtable.SymbolTable, top: bool = True) -> Iterator[str]:
    """Names of the module's scope that are read, in any scope."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _outside(child, False)


def _called(tree: ast.Module) -> set[str]:
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def load_known(path: str) -> Any:
    """A module of the standard library, or a name in one."""
    module, _, name = path.partition(".")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def _known_path(name: str, called: bool) -> str | None:
    """Where a name comes from that a test takes for given: ``math`` is the module, ``datetime()`` the class in it."""
    if name in MODULES:
        if not called:
            return name
        return f"{name}.{name}" if hasattr(importlib.import_module(name), name) else None
    module = (_NAMES | _MATH).get(name)
    return f"{module}.{name}" if module else None
