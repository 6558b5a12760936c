"""A setting that has a name besides its key, such as an option or an argument, has one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo.config.reading import apply_overrides, flat
from dapo.errors import ConfigError


def require_one_value(
    named: Mapping[str, tuple[str, Any]], overrides: Sequence[str], settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``named``: by dotted key what else names it, such as an option, and the value given there; None and [] are none.
    ``overrides``, ``settings`` (a tree): values by their keys. Returns those of ``named``.
    Raises ConfigError: a key has two that differ."""
    said: dict[str, Any] = {}
    apply_overrides(said, overrides, {})
    for key, value in (*flat(settings or {}), *flat(said)):
        name, other = named.get(key, ("", None))
        if other not in (None, []) and _several(value) != _several(other):
            raise ConfigError(
                f"{name}: is {_shown(other)}, and {key} is {_shown(value)}, which is the same setting; give one of them"
            )
    return {key: value for key, (_, value) in named.items() if value not in (None, [])}


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _shown(value: Any) -> str:
    return ", ".join(map(str, _several(value)))
