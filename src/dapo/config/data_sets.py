"""Names of data sets on the hub, told from files."""

from __future__ import annotations

import os
import re

from dapo.config.sections import DataItem

_COMPRESSED = (".gz", ".zst")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = (".jsonl", ".json", ".ndjson", ".parquet", ".txt", *_COMPRESSED)


def names_a_data_set(item: DataItem) -> bool:
    """Whether ``item`` is a folder or a name on the hub, and not a file."""
    if os.path.isdir(item.path):  # noqa: PTH112  (Path.is_dir raises for a name that is too long)
        return True
    if os.path.exists(item.path):  # noqa: PTH110
        return False
    looks_like_a_file = item.path.endswith(_FILE)
    named = item.name is not None or item.split is not None
    return not looks_like_a_file and (named or _HUB_NAME.fullmatch(item.path) is not None)
