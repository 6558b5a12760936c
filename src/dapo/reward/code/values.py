"""Plain Python values as trees that cross the border between a test and the program under test.

Both sides use these functions: the trusted evaluator, and (as compiled code) the runner inside the sandbox, so nothing
may be imported here. A tree consists of None, bool, int, float, str, lists and dicts with one key, the tag of anything
else: ``t`` tuple, ``s`` set, ``f`` frozenset, ``d`` dict (keys and values in turn), ``i`` large int, ``c`` complex,
``b`` bytes, ``B`` bytearray, ``r`` range, ``l`` slice. Values of all other types are the caller's affair (``other``).
Only exact types are plain: a subclass may bring its own idea of equality.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SMALL = 2**62
_TAGS: "dict[type, str]" = {tuple: "t", set: "s", frozenset: "f"}
_BUILDERS: "dict[str, Callable[[Any], Any]]" = {
    **{tag: kind for kind, tag in _TAGS.items()},
    **{"b": bytes.fromhex, "B": bytearray.fromhex, "i": lambda body: int(body, 16), "c": lambda body: complex(*body)},
    **{"r": lambda body: range(*body), "l": lambda body: slice(*body)},
    "d": lambda body: dict(zip(body[::2], body[1::2], strict=True)),
}


def pack(value: "Any", other: "Callable[[Any], Any]") -> "Any":
    """The tree of ``value``; ``other`` makes the tree of a value that is not plain."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"i": f"{value:x}"}
    if kind is list:
        return [pack(item, other) for item in value]
    if kind is dict:
        return {"d": [pack(part, other) for item in value.items() for part in item]}
    if kind in _TAGS:
        return {_TAGS[kind]: [pack(item, other) for item in value]}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is bytes or kind is bytearray:
        return {"b" if kind is bytes else "B": value.hex()}
    if kind is range or kind is slice:
        parts = [pack(item, other) for item in (value.start, value.stop, value.step)]
        return {"r" if kind is range else "l": parts}
    return other(value)


def unpack(tree: "Any", other: "Callable[[str, Any], Any]") -> "Any":
    """The inverse of :func:`pack`; ``other`` makes the value of a tag that is not one of the plain ones."""
    if type(tree) is list:
        return [unpack(item, other) for item in tree]
    if type(tree) is dict:
        return build({tag: unpack(body, other) for tag, body in tree.items()}, other)
    return tree


def build(node: "dict[str, Any]", other: "Callable[[str, Any], Any]") -> "Any":
    """The value of a tagged node whose body has been built already.
    Raises ValueError, TypeError: the node is malformed, or holds what cannot be hashed where it must be."""
    [(tag, body)] = node.items()
    return _BUILDERS[tag](body) if tag in _BUILDERS else other(tag, body)


class _Escapes(dict[int, str]):
    """What stands in JSON for each character that needs it, made when first met."""

    def __missing__(self, code: int) -> str:
        if 32 <= code < 127 and code not in (34, 92):
            text = chr(code)
        elif code < 0x10000:
            text = f"\\u{code:04x}"
        else:
            code -= 0x10000
            text = f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
        self[code] = text
        return text


_ESCAPES = _Escapes()


def to_json(tree: "Any") -> str:
    """A tree as JSON text in ASCII. Not ``json.dumps``: its import would take as long as a short program runs."""
    kind = type(tree)
    if kind is str:
        return f'"{tree.translate(_ESCAPES)}"'
    if kind is float:
        if tree != tree:
            return "NaN"
        return {"inf": "Infinity", "-inf": "-Infinity"}.get(repr(tree), repr(tree))
    if tree is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[tree]
    if kind is list:
        return f"[{','.join([to_json(item) for item in tree])}]"
    if kind is dict:
        return f"{{{','.join([f'{to_json(key)}:{to_json(value)}' for key, value in tree.items()])}}}"
    return repr(tree)
