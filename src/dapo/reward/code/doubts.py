"""What is doubtful about tests that can be run: a program could decide them itself, or they demand nothing.

Pure functions: consumes the tests of a row, produces words for people.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from dapo.reward.code.names import Snippet, Tests, root_name

_ALIAS = "candidate"
"""What check functions call the entry point."""


def doubts(tests: Tests, entry_point: str | None) -> Iterator[str]:
    """What to tell about each assert test. A value of the test that becomes an argument of the program's own names is
    known to the program, so these may stand only within the arguments of the entry point:

    - `same_tree(f(1), tree([2]))`: a name beside the entry point takes its result, and may be true whatever it is;
    - `f(1) == Point(1, 2)`: both sides are made by the program, whose objects decide whether they are equal.
    """
    entry = {root_name(entry_point), _ALIAS} if entry_point else set()
    for place, test in enumerate(tests, 1):
        if not isinstance(test, Snippet):
            continue
        tree = ast.parse(test.source)
        if not any(map(_demands, ast.walk(tree))):
            yield f"test {place} has no assert: it passes whatever the program returns"
        own = {*test.free, *entry}
        beside = sorted(set(_outside(tree, own, entry)) - entry) if entry else []
        if beside:
            yield f"test {place} also calls {', '.join(beside)}, which the program defines and so may decide the test"
        elif any(isinstance(node, ast.Compare) and _is_the_programs(node, own) for node in ast.walk(tree)):
            yield f"test {place} compares two values of the program, which may decide the test"


def _demands(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(node, ast.Assert | ast.Raise) or (
        isinstance(called, ast.Attribute) and called.attr.startswith("assert")
    )


def _is_the_programs(node: ast.Compare, own: Set[str]) -> bool:
    return sum(bool(set(_outside(side, own, set()))) for side in (node.left, *node.comparators)) > 1


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
        elif isinstance(node, ast.Attribute):
            node = node.value
        else:
            return None
    return node.id
