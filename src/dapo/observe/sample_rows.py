"""The samples of a step as rows of scalars: what can be filtered, sorted and counted without reading texts.

Consumes: the files of a step (``observe/samples.py``). Produces: one row per sample, with the names and types of
:data:`COLUMNS`. A value that somebody spoilt is NULL: rows are for looking at, ``dapo replay`` checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dapo.errors import UserError
from dapo.observe.samples import TokenArrays, sample_lines, samples_path, tokens_path
from dapo.records import NOBODY
from dapo.util.files import parse_json

COLUMNS: Mapping[str, str] = {
    **{"step": "INTEGER", "draw": "BIGINT", "row": "BIGINT", "sample": "SMALLINT", "status": "VARCHAR"},
    **{"correct": "BOOLEAN", "reward": "DOUBLE", "shaped_reward": "DOUBLE", "advantage": "DOUBLE"},
    **{"in_loss": "BOOLEAN", "length": "INTEGER", "prompt_length": "INTEGER", "finish_reason": "VARCHAR"},
    **{"extracted": "VARCHAR", "gold": "VARCHAR", "error": "VARCHAR"},
    **{"version_first": "INTEGER", "version_last": "INTEGER", "parts": "MAP(VARCHAR, DOUBLE)"},
    **{"check_correct": "BOOLEAN", "check_reward": "DOUBLE"},
    **{"logprob_engine": "DOUBLE", "logprob_trainer": "DOUBLE", "entropy": "DOUBLE", "gap_max": "DOUBLE"},
    **{"text_offset": "BIGINT", "text_length": "INTEGER"},
}
"""Name and DuckDB type of each column. ``step``, ``draw`` and ``sample`` together name a sample, ``row`` its prompt.
``check_*``: verdict of the held-out check, where it was asked. ``logprob_*`` and ``entropy``: means over the tokens, in
nats, NULL where they were not computed; ``gap_max``: the largest |engine - trainer|. ``text_offset`` and
``text_length``: where its line is in ``step-NNNNN.jsonl``, in bytes, without the line end."""

Row = dict[str, Any]


def rows_of(folder: Path, step: int) -> list[Row]:
    """The rows of one step (from 1), in the order of its file in the run's folder ``samples``. A last line that was cut
    off while being written is left out.
    Raises UserError: the file is gone, or a line of it is not a sample."""
    path = samples_path(folder, step)
    try:
        rows = [_row(line, step, offset, size) for offset, size, line in sample_lines(path, errors="strict")]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    for row, measures in zip(rows, _measures(tokens_path(folder, step), rows), strict=True):
        row.update(measures)
    return rows


def read_line(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """The sample of a row with its texts, as it is in its step's file: one seek.
    Raises UserError: the file is gone, or is not the one that the row was made from."""
    path = samples_path(folder, row["step"])
    try:
        with path.open("rb") as file:
            file.seek(row["text_offset"])
            return dict(parse_json(file.read(row["text_length"])))
    except OSError as error:
        raise UserError(f"{path}: the texts of this step cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        raise UserError(f"{path}: is not the file that was indexed; look again") from None


def _row(line: Mapping[str, Any], step: int, offset: int, size: int) -> Row:
    versions = line.get("versions")
    first, last = versions if isinstance(versions, list) and len(versions) == 2 else (None, None)
    derived = {"step": step, "sample": line.get("index"), "version_first": first, "version_last": last}
    found = {**line, **derived, "text_offset": offset, "text_length": size}
    return {name: read(found.get(name)) for name, read in _READERS}


def _whole(bits: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) else None


def _number(value: Any) -> float | None:
    if type(value) not in (int, float) or not abs(value) < 1e300:
        return None
    return float(value)


def _text(value: Any) -> str | None:
    """Lone surrogates, which a database refuses, become question marks."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else None


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    **{"SMALLINT": _whole(16), "INTEGER": _whole(32), "BIGINT": _whole(64)},
    **{"DOUBLE": _number, "VARCHAR": _text},
    "BOOLEAN": lambda value: value if isinstance(value, bool) else None,
    "MAP(VARCHAR, DOUBLE)": lambda value: (
        {str(_text(name)): _number(part) for name, part in value.items()} if isinstance(value, dict) else {}
    ),
}

_READERS = tuple((name, _KINDS[kind]) for name, kind in COLUMNS.items())


def _measures(path: Path, rows: list[Row]) -> list[Row]:
    """What the tokens say of each row; nothing where there are none, or those of other samples."""
    nothing: list[Row] = [{} for _ in rows]
    try:
        arrays = TokenArrays.read(path)
    except UserError:  # gone, or damaged
        return nothing
    if arrays.lengths.tolist() != [row["length"] for row in rows]:
        return nothing
    changes = [a["draw"] != b["draw"] for a, b in pairwise(rows)]
    groups = np.cumsum([0, *changes], dtype=np.int64)[: len(rows)].tolist()
    prompts = arrays.prompt_lengths.tolist()
    sampled = arrays.versions != NOBODY
    every = {"logprob_engine": arrays.logprobs, "logprob_trainer": arrays.trainer_logprobs, "entropy": arrays.entropy}
    means = {name: np.where(sampled, values, 0) for name, values in every.items()}
    count = np.maximum(np.array(_each(np.add, sampled.astype(np.float64), arrays.lengths, 1), np.float64), 1)
    gaps = np.abs(means["logprob_engine"] - means["logprob_trainer"])
    columns = {
        "prompt_length": [prompts[group] if group < len(prompts) else None for group in groups],
        **{name: _each(np.add, of.astype(np.float64), arrays.lengths, count) for name, of in means.items()},
        "gap_max": _each(np.maximum, gaps, arrays.lengths, 1),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _each(operation: np.ufunc, values: Any, lengths: Any, divisor: Any) -> list[float | None]:
    """``operation`` over the tokens of each sample, divided; None for one without tokens, or if it is not finite."""
    there = lengths > 0  # two samples that begin at one place would be taken for one token each
    found = np.full(len(lengths), np.nan)
    if there.any():
        begins = (np.cumsum(lengths, dtype=np.int64) - lengths)[there]
        found[there] = operation.reduceat(values, begins)
    return [value if math.isfinite(value) else None for value in (found / divisor).tolist()]
