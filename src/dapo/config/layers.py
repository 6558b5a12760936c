"""Settings that come from several places: each layer over the ones before it, and all of them checked as one tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapo.config.reading import _override, build_config
from dapo.config.tree import Config


def layered_config(
    layers: Iterable[Mapping[str, Any]],
    overrides: Sequence[str] = (),
    source: str = "settings",
    where: Mapping[str, str] | None = None,
) -> Config:
    """The tree that ``layers`` (nested mappings, the last one counts most) and then ``overrides`` make.
    ``where``: for dotted keys, the place to name in messages, such as an option of the command line.

    Raises:
        ConfigError: with every problem found.
    """
    places = dict(where or {})
    last: dict[str, Any] = {}
    _override(last, overrides, places)
    tree: dict[str, Any] = {}
    for layer in (*layers, last):
        tree = merged(tree, layer)
    return build_config(tree, source, places)


def merged(tree: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with the keys of ``layer`` in place of its own, section by section.

    A layer that names another ``kind`` replaces the section: the keys of one kind mean nothing to another.
    """
    found = dict(tree)
    for key, value in layer.items():
        present = found.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            other_kind = "kind" in value and "kind" in present and value["kind"] != present["kind"]
            found[key] = dict(value) if other_kind else merged(present, value)
        else:
            found[key] = value
    return found
