"""Parquet files and Hugging Face data sets, memory-mapped as Arrow tables by the ``datasets`` library."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dapo.data.cache import cache_folder, cached, can_be_written_to, file_key
from dapo.data.rows import BadRow, Table
from dapo.errors import DataError, first_line, install
from dapo.util.files import file_hash


class ArrowTable(Table):
    def __init__(self, name: str, rows: Any, content: str) -> None:
        """``rows``: a ``datasets.Dataset``; ``content``: hash of what it holds."""
        super().__init__(name, len(rows), content)
        self._data = rows
        self._short = {name: kind for name, kind in rows.features.items() if re.search("float(16|32)", str(kind))}

    def raw(self, number: int) -> Any:
        try:
            row = dict(self._data[number])
        except Exception as error:  # decoders of images and sound raise their own kinds
            raise BadRow(f"cannot be read: {first_line(error.__cause__ or error)}") from None
        return row | {key: _as_printed(row[key], kind) for key, kind in self._short.items()}

    def all_raw(self) -> Iterator[Any]:
        """Without what decoders make of images and sound, in a tenth of the time."""
        for batch in self._data.with_format("arrow").iter(2000):
            yield from batch.to_pylist()


def _as_printed(value: Any, feature: Any) -> Any:
    """A value of a column, with short floats at any depth as they print: 0.1, and not 0.10000000149011612."""
    feature = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    if isinstance(value, dict) and isinstance(feature, dict):
        return {key: _as_printed(item, feature[key]) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_printed(item, feature) for item in value]
    kind = getattr(feature, "dtype", None)
    return value if value is None or kind not in ("float16", "float32") else float(str(getattr(np, kind)(value)))


def open_parquet(path: Path, name: str) -> ArrowTable:
    """Raises DataError: missing, not Parquet, damaged, or without rows."""
    if not path.is_file():
        raise DataError(f"{name}: no such file")
    datasets = _library(f"{name}: Parquet files")
    try:
        key = file_key(path, "parquet")
        _, facts = cached("hashes", key, lambda folder: {"sha256": file_hash(path)})
        with _quiet(datasets):
            folder = cache_folder("arrow") / str(facts["sha256"])[:32]
            rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(folder))
    except Exception as error:  # of pyarrow, of datasets, of the file system: what matters is which file it was
        raise DataError(f"{name}: cannot be read as Parquet: {first_line(error.__cause__ or error)}") from None
    if not len(rows):
        raise DataError(f"{name}: the file has no rows")
    return ArrowTable(name, rows, str(facts["sha256"]))


def open_dataset(path: str, config: str | None, split: str | None, name: str) -> ArrowTable:
    """A data set of the hub, or a folder: one that ``save_to_disk`` wrote, or one of data files.
    ``config``: which of several data sets under one name. ``split``: by default ``train`` where there is one, or the
    only one.
    Raises DataError: there is no such data set, configuration or split."""
    datasets = _library(f"{name}: Hugging Face data sets")
    folder = Path(path)
    try:
        with _quiet(datasets):
            if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):  # it was saved
                found = datasets.load_from_disk(str(folder))
            else:
                theirs = Path(datasets.config.HF_DATASETS_CACHE)
                if not (theirs.is_absolute() and can_be_written_to(theirs)):  # there may be no home
                    theirs = cache_folder("datasets")
                found = datasets.load_dataset(path, config, cache_dir=str(theirs))
    except Exception as error:  # of the hub, of the network, of the files
        mixed = isinstance(cause := error.__cause__ or error, datasets.table.CastError)
        why = "its files have different columns; name the file with the rows" if mixed else first_line(cause)
        raise DataError(f"{name}: the data set cannot be loaded: {why}") from None
    rows = _split_of(found, split, name)
    if not len(rows):
        raise DataError(f"{name}: the data set has no rows")
    return ArrowTable(name, rows, str(rows._fingerprint))


def _split_of(found: Any, split: str | None, name: str) -> Any:
    if not hasattr(found, "keys"):  # one table
        if split is not None and str(found.split) != split:
            raise DataError(f"{name}: holds no splits, so split: {split} must be left out")
        return found
    names = list(found.keys())
    wanted = split or ("train" if "train" in names else names[0] if len(names) == 1 else None)
    if wanted is None or wanted not in names:
        said = "name one with split:" if wanted is None else f"there is no split {wanted!r};"
        raise DataError(f"{name}: {said} it has {', '.join(names)}")
    return found[wanted]


def _library(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{what} need the package datasets: {install('data')}") from None
    return datasets


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without progress bars and warnings, which would be left as they were found."""
    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
