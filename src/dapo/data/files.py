"""From what a recipe names to tables: files by their endings, folders and data sets."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dapo.config.sections import DataItem
from dapo.data.tables import Table

_COMPRESSED = (".gz", ".zst")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = (".jsonl", ".json", ".ndjson", ".parquet", ".txt", *_COMPRESSED)


def open_table(item: DataItem) -> Table:
    """The rows of one item. What reads Parquet and data sets is loaded only for those.
    Raises DataError: it cannot be read, or has no rows."""
    path, name = Path(item.path), item.path
    if names_a_data_set(item):
        from dapo.data.arrow import open_dataset

        said = [f"{key}={value}" for key, value in (("name", item.name), ("split", item.split)) if value]
        return open_dataset(item.path, item.name, item.split, f"{name} ({', '.join(said)})" if said else name)
    if path.suffix == ".parquet":
        from dapo.data.arrow import open_parquet

        return open_parquet(path, name)
    from dapo.data.text import open_text

    return open_text(path, name)


def names_a_data_set(item: DataItem) -> bool:
    """Whether ``item`` is a folder or a name on the hub, and not a file."""
    if os.path.isdir(item.path):  # noqa: PTH112  (Path.is_dir raises for a name that is too long)
        return True
    if os.path.exists(item.path):  # noqa: PTH110
        return False
    looks_like_a_file = item.path.endswith(_FILE)
    named = item.name is not None or item.split is not None
    return not looks_like_a_file and (named or _HUB_NAME.fullmatch(item.path) is not None)


def short_name(item: DataItem) -> str:
    return Path(item.path).name or item.path
