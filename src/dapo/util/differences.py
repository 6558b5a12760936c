"""What is not the same in two mappings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dapo.errors import shortened


class Difference(NamedTuple):
    """A key whose value is not the same in two mappings."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: was {shown(self.was)}, is now {shown(self.now)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = old.get(key), new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield Difference(f"{prefix}{key}", was, now)


def shown(value: Any, most: int = 200) -> str:
    """A value as JSON, cut to ``most`` characters."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), most)
