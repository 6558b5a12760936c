"""What is doubtful about tests that can be run: a program could decide them itself, or they demand nothing.

Pure functions: consumes the tests of a row; produces words for people, and tests that do not take the program's word.

A program may say what it likes about a value that it is shown. So its word does not count where it decides a test (is
true, is zero, is below a tolerance): a method of a result, as in ``f(2).equals(4)``, is called on the plain value that
the result stands for; and a name that may be anyone's, such as the ``np`` of ``np.allclose(f(2), 4)`` in a row without
an entry point, may not judge a result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import lru_cache

from dapo.reward.code.names import Snippet, Tests, long_integers, root_name
from dapo.reward.code.remote import PLAIN

_SEEN_THROUGH = frozenset(("abs", "all", "any", "bool", "float", "int", "len", "list", "max", "min", "round", "sum"))
"""Functions whose result says no more than what they are given."""
_JOINING = (ast.UnaryOp, ast.BoolOp, ast.BinOp, ast.IfExp, ast.NamedExpr, ast.List, ast.Tuple)
_TOLERANCE = 0.1
_PLAIN_METHODS = {name for kind in (str, bytes, int, float, list, dict, set, range) for name in dir(kind)}


def doubts(tests: Tests, entry_point: str | None) -> Iterator[str]:
    """What to tell about each assert test. A value of the test that becomes an argument of the program's own names is
    known to the program, so these may stand only within the arguments of the entry point:

    - `same_tree(f(1), tree([2]))`: a name beside the entry point takes its result, and may be true whatever it is;
    - `f(1) == Point(1, 2)`: both sides are made by the program, whose objects decide whether they are equal;
    - `f(1).equals(2)`: a method that no plain value has.
    """
    for place, test in enumerate(tests, 1):
        if not isinstance(test, Snippet):
            continue
        seen = _Seen(test, entry_point)
        if not any(map(_demands, ast.walk(seen.tree))):
            yield f"test {place} has no assert that can fail: it passes whatever the program returns"
        judges = {name for node in ast.walk(seen.tree) if (name := seen.judge(node))}
        beside = sorted(set(_outside(seen.tree, seen.own, seen.entry)) - seen.entry if seen.entry else judges)
        methods = {str(func.attr) for func in seen.methods()}
        methods = {name for name in methods if name not in _PLAIN_METHODS or name.startswith("__")}
        if methods:
            yield (
                f"test {place} lets a method of what the program returns decide ({', '.join(sorted(methods))}); of an "
                "object that is no plain value it fails: compare with =="
            )
        elif beside and not seen.entry:
            yield (
                f"test {place} also calls {', '.join(beside)}, which may be the program's and so may decide the test; "
                "define or import them in the test, or give the row an entry point"
            )
        elif beside:
            yield f"test {place} also calls {', '.join(beside)}, which the program defines and so may decide the test"


@lru_cache(4096)
def guarded(test: Snippet, entry_point: str | None) -> Snippet:
    """The same test, but that it does not take the program's word for its own result."""
    seen = _Seen(test, entry_point)
    methods = list(seen.methods())
    judges = [] if seen.entry else [call for call in seen.deciding() if seen.judge(call)]
    for func in methods:
        func.value = _plain_of(func.value)
    for call in judges:
        wanted = _plain_of(
            ast.Constant(None), ast.Constant(f"to let the program's {seen.judge(call)} judge its result")
        )
        call.func, call.args, call.keywords = wanted.func, wanted.args, []
    if not methods and not judges:
        return test
    with long_integers():
        return replace(test, source=ast.unparse(ast.fix_missing_locations(seen.tree)))


def _plain_of(*arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(PLAIN, ast.Load()), [*arguments], [])


class _Seen:
    """A test's tree and the names in it: ``own`` are the program's, those of ``results`` hold what it returned."""

    def __init__(self, test: Snippet, entry_point: str | None) -> None:
        with long_integers():
            self.tree = ast.parse(test.source)
        nodes = [*ast.walk(self.tree)]
        called = {_root(node.func) for node in nodes if isinstance(node, ast.Call)}
        given = {node.arg for node in nodes if isinstance(node, ast.arg) and node.arg in called}  # check(candidate)
        self.entry = {root_name(entry_point), *given} if entry_point else set()
        self.own = {*test.free, *self.entry, *given}
        self.results = set[str]()
        self._bound: dict[str, ast.expr] = {}
        for node in nodes * 2:  # one may be made of another that stands deeper
            value = getattr(node, "iter", None) or getattr(node, "value", None)
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            names = {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}
            if isinstance(value, ast.expr) and names:
                self._bound |= dict.fromkeys(names, value)
                self.results |= names if any(map(self._is_result, ast.walk(value))) else set()

    def _is_result(self, node: ast.AST) -> bool:
        """Whether this is what a function of the program, or a method of its ``Solution``, returned, or a part of it.
        An instance of its class is none: what its methods say is what is tested."""
        match node:
            case ast.Name(id=name):
                return name in self.results
            case ast.Call(func=ast.Name(id=name)):
                return name in self.own and ("_" in name or not name[:1].isupper())
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="Solution")))):
                return True
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                return self._is_result(inner)
        return False

    def judge(self, node: ast.AST) -> str | None:
        """The name of the program's that is called with a result of another one."""
        if not isinstance(node, ast.Call) or (name := _root(node.func)) not in self.own - self.entry:
            return None
        given = [part for argument in (*node.args, *node.keywords) for part in ast.walk(argument)]
        return name if any(self._is_result(part) and _root(part) != name for part in given) else None

    def methods(self) -> Iterator[ast.Attribute]:
        """Methods of results, as they are called where it decides."""
        funcs = [call.func for call in self.deciding()]
        return (func for func in funcs if isinstance(func, ast.Attribute) and self._is_result(func.value))

    def deciding(self) -> Iterator[ast.Call]:
        """Calls whose word decides: what they return is asserted as it is, or is compared with nothing else than true,
        false, zero or a tolerance."""
        tests = [getattr(node, "test", None) for node in ast.walk(self.tree)]
        left = [*filter(None, tests), *(node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr))]
        done: set[int] = set()
        while left:
            node = left.pop()
            if id(node) in done:
                continue
            done.add(id(node))
            match node:
                case ast.Compare(left=first, comparators=others):
                    telling = [side for side in (first, *others) if not _says_little(side)]
                    left += telling if len(telling) <= len(others) else ()
                case ast.Call(func=ast.Name(id=name)) if name in _SEEN_THROUGH - self.own:
                    left += node.args
                case ast.Call(args=args):
                    left += args if _demands(node) else ()
                    yield node
                case ast.Name(id=name) if name in self._bound:
                    left.append(self._bound[name])
                case _ if isinstance(node, _JOINING):
                    left += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
                case ast.GeneratorExp(elt=elt) | ast.ListComp(elt=elt):
                    left.append(elt)


def _says_little(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, bool | int | float) and (value is True or 0 <= value <= _TOLERANCE)


def _demands(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and node.test.value:
        return False
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(node, ast.Assert | ast.Raise) or (
        isinstance(called, ast.Attribute) and called.attr.startswith("assert")
    )


def _outside(top: ast.AST, own: Set[str], entry: Set[str]) -> Iterator[str]:
    """Names of the program's that are used outside of the arguments of a call of ``entry``."""
    left = [top]
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and node.id in own:
            yield node.id
        if isinstance(node, ast.Call) and _root(node.func) in entry:
            left.append(node.func)
        else:
            left += ast.iter_child_nodes(node)


def _root(node: ast.AST) -> str | None:
    """``Solution`` of ``Solution().add``."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return None
    return node.id
