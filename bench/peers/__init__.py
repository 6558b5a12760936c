"""The peers: each module is the only place that imports and configures its peer, and knows its settings by name.

A setting is named by what differs from the peer's defaults, joined by ``+``, such as ``nockpt+micro32+async``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Parts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""For each part of a name the arguments it sets, by what they are arguments of."""


def named(parts: Parts, name: str) -> Mapping[str, dict[str, Any]]:
    """The arguments that a name stands for, by what they are arguments of.

    Raises:
        ValueError: a part of it is unknown.
    """
    whole: dict[str, dict[str, Any]] = defaultdict(dict)
    for part in name.split("+"):
        if part not in parts:
            raise ValueError(f"unknown setting {part!r}; there are {', '.join(parts)}, joined by +")
        for kind, values in parts[part].items():
            whole[kind] |= values
    return whole
