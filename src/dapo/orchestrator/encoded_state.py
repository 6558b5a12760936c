"""The state of a run on disk: records, arrays and numbers, written as JSON beside safetensors and read back the same.

No pickle, so a checkpoint from a stranger cannot run code: only the record types listed here are made. What comes back
equals what was written: floats to the bit, not-a-number included, tuples as tuples, arrays with their type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dapo.errors import UserError
from dapo.orchestrator.rollout_batch import RolloutBatch, RolloutStats
from dapo.records import Group, Prompt, Reward, Sample, TokenBatch, Turn
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.files import plain, read_json, write_atomic

STATE, ARRAYS = "state.json", "state.safetensors"

_RECORDS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (Prompt, Reward, Turn, Sample, Group, RolloutBatch, RolloutStats, TokenBatch, Mismatch, UpdateReport)
} | {"FillStats": RolloutStats}  # its name in older checkpoints
_MARKS = ("$record", "$tuple", "$float", "$array", "$items")


class EncodedState:
    """A state as it was at one moment, ready to be written: what becomes of the objects in it later does not matter."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """``state``: mappings with text keys, lists, tuples, numbers, text, None, arrays and the records of a run.
        Other objects (in the rows of a caller, say) become text."""
        arrays = _Arrays()
        self._text = json.dumps(_encode(state, arrays), allow_nan=False, separators=(",", ":"))
        self._arrays = arrays.joined()

    @property
    def bytes(self) -> int:
        """What it will take on the disk, but for kilobytes."""
        return len(self._text) + sum(int(array.nbytes) for array in self._arrays.values())

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, which exists."""
        save_file(self._arrays, folder / ARRAYS)
        write_atomic(folder / STATE, self._text)


def require_lasting(what: str, state: Mapping[str, Any]) -> None:
    """Raises UserError: ``state``, of ``what``, would come back from :func:`read_state` as another one."""
    if found := lost(state):
        raise UserError(
            f"{what}: {found}, which a checkpoint cannot give back as it was; what works: dicts with text keys, lists, "
            "tuples, numbers, text, True, False, None and NumPy arrays of numbers"
        )


def lost(value: Any, place: str = "state()") -> str | None:
    """What :func:`read_state` would give back as something else, and where it is; None: nothing."""
    items: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            return f"{place} has the key {odd[0]!r}"
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        kept = value is None or isinstance(value, str | int | float) or type(value).__name__ in _RECORDS
        kept = kept or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf")
        return None if kept else f"{place} is a {type(value).__name__}"
    return next(filter(None, (lost(item, f"{place}[{key!r}]") for key, item in items)), None)


def read_state(folder: Path, expected: Sequence[str] = ()) -> dict[str, Any]:
    """What :class:`EncodedState` wrote, with all the ``expected`` names.
    Raises UserError: missing or damaged, or written by another version of the program."""
    try:
        arrays = load_file(folder / ARRAYS)
        tree = read_json(folder / STATE, most=2**30)
        state: dict[str, Any] = _decode(tree, arrays)
        missing = [name for name in expected if name not in state]
        if missing:
            raise ValueError(f"there is no {missing[0]}")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: the state of the run cannot be read: {type(error).__name__}: {error}") from None
    return state


class _Arrays:
    """Many small arrays as few long ones, one per type: a checkpoint may hold the tokens of thousands of samples."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {}
        self._lengths: dict[str, int] = {}

    def add(self, values: Any) -> list[Any]:
        """Where ``values`` will be found: type, place of the first element, shape."""
        kind = str(values.dtype)
        start = self._lengths.get(kind, 0)
        self._parts.setdefault(kind, []).append(values.reshape(-1))
        self._lengths[kind] = start + values.size
        return [kind, start, list(values.shape)]

    def joined(self) -> dict[str, Any]:
        return {kind: np.concatenate(parts) for kind, parts in self._parts.items()}


def _encode(value: Any, arrays: _Arrays) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_encode(item, arrays) for item in value]
    if isinstance(value, Mapping):
        encoded = {str(key): _encode(item, arrays) for key, item in value.items()}
        return {"$items": list(encoded.items())} if any(mark in encoded for mark in _MARKS) else encoded
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": arrays.add(value)}
    if is_dataclass(value) and type(value).__name__ in _RECORDS:
        return {
            "$record": type(value).__name__,
            **{f.name: _encode(getattr(value, f.name), arrays) for f in fields(value)},
        }
    return plain(value)


def _decode(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "$record" in value:
        if value["$record"] not in _RECORDS:
            raise ValueError(
                f"holds a {value['$record']}, as another version of dapo wrote it inside of a step; go on with that "
                "version (environment.json), or from the checkpoint before"
            )
        given = {key: _decode(item, arrays) for key, item in value.items() if key != "$record"}
        return _RECORDS[value["$record"]](**given)
    if "$tuple" in value:
        return tuple(_decode(item, arrays) for item in value["$tuple"])
    if "$float" in value:
        return float(value["$float"])
    if "$items" in value:
        return {key: _decode(item, arrays) for key, item in value["$items"]}
    if "$array" in value:
        return _cut(value["$array"], arrays)
    return {key: _decode(item, arrays) for key, item in value.items()}


def _cut(place: list[Any], arrays: Mapping[str, Any]) -> Any:
    kind, start, shape = place
    length = math.prod(shape)
    if kind not in arrays or start + length > len(arrays[kind]):
        raise ValueError(f"{ARRAYS} does not hold {length} values of type {kind} at {start}")
    return arrays[kind][start : start + length].reshape(shape).copy()
