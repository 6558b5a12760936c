"""From what a recipe names to tables: files by their endings, folders and data sets."""

from __future__ import annotations

from pathlib import Path

from dapo.config.data import DataItem, names_a_data_set
from dapo.data.tables import Table


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


def short_name(item: DataItem) -> str:
    return Path(item.path).name or item.path
