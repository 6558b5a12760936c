"""Checkpoints of a sharded model: whole tensors in the layouts of one process, each written by one of the ranks.

A tensor is gathered, kept by the rank that has written least so far, and let go of by the others. So no device and no
process ever holds a whole model, any number of ranks and a single process read what any other wrote, and a folder is
there whole or not at all, once every rank has written its files. All ranks see the same file system.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dapo.errors import ModelError, UserError
from dapo.model.export import write_description
from dapo.training.checkpoint import INDEX, METADATA, SHARD_BYTES, TENSORS
from dapo.training.parallel.ranks import Ranks
from dapo.util.files import flush_to_disk, new_folder, read_json, write_json

MODEL = "model.safetensors"
T = TypeVar("T")


class Rows(Protocol):
    """A model of which each rank has some rows."""

    ranks: Ranks

    def whole(self, name: str, values: torch.Tensor) -> torch.Tensor: ...

    def rows(self, name: str) -> slice: ...


def rows_of(count: int, ranks: Ranks) -> slice:
    """Which of ``count`` rows are this rank's, as FSDP2 deals them out."""
    each = -(-count // ranks.size)
    return slice(min(ranks.rank * each, count), min((ranks.rank + 1) * each, count))


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What ``work`` gives, which exchanges nothing. Where it fails on one rank, it fails on all; the others say whose
    error it was."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = ranks.gather(None if failure is None else f"rank {ranks.rank}: {failure}")
    if failure is not None:
        raise failure
    for line in filter(None, told):
        raise UserError(line)
    return result


def first_alone(ranks: Ranks, work: Callable[[], None]) -> None:
    """Rank 0 does it. Where it fails, it fails on all."""
    together(ranks, work if ranks.rank == 0 else lambda: None)


def write_model(
    held: Rows,
    model: Any,
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    exact: bool = False,
    stop_ids: Sequence[int] = (),
) -> None:
    """As :func:`dapo.training.checkpoint.save_model`."""
    here = dtype is None or all(_keeps(values, dtype, exact) for values in parameters.values())
    kept = dtype if dtype is not None and all(held.ranks.gather(here)) else torch.float32
    with _staged(held.ranks, folder) as staging:
        places = _write(held, staging, MODEL, {name: (name, p.detach()) for name, p in parameters.items()}, kept)
        sizes = [p.numel() for p in model.parameters()]

        def describe() -> None:
            index = {"metadata": {"total_size": sum(sizes) * kept.itemsize}, "weight_map": places}
            write_json(staging / f"{MODEL}.index.json", index)
            config = copy.copy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(staging)
            write_description(model, staging, kept, stop_ids)

        first_alone(held.ranks, describe)


def write_tensors(held: Rows, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """As :func:`dapo.training.checkpoint.save_tensors`: ``parameter/what`` of this rank's rows."""
    with _staged(held.ranks, folder) as staging:
        places = _write(held, staging, TENSORS, {key: (key.rpartition("/")[0], t) for key, t in tensors.items()})

        def describe() -> None:
            write_json(staging / INDEX, {"metadata": {}, "weight_map": places})
            write_json(staging / METADATA, {**metadata, "tensors": sorted(tensors)})

        first_alone(held.ranks, describe)


def read_rows(held: Rows, folder: Path, parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Any]) -> None:
    """Give this rank's parameters their rows of the weights in ``folder``, which any number of ranks wrote.
    ``shapes``: of all rows. Raises ModelError: missing or damaged, or of another model."""
    together(held.ranks, lambda: _read(held, folder, parameters, shapes))


@torch.no_grad()
def _read(held: Rows, folder: Path, parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Any]) -> None:
    try:
        index = folder / f"{MODEL}.index.json"
        files = set(read_json(index)["weight_map"].values()) if index.exists() else {MODEL}
        found = set()
        for file in sorted(folder / Path(name).name for name in files):
            with safe_open(file, "pt") as stored:
                for name in parameters.keys() & stored.keys():
                    part = stored.get_slice(name)
                    if list(part.get_shape()) != list(shapes[name]):
                        raise ModelError(f"{folder}: holds the weights of another model: {name} has another shape")
                    parameters[name].copy_(part[held.rows(name)])
                    found.add(name)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"{folder}: the weights cannot be read: {type(error).__name__}: {error}") from None
    if missing := parameters.keys() - found:
        raise ModelError(f"{folder}: holds the weights of another model: there is no {min(missing)}")


def _keeps(values: torch.Tensor, dtype: torch.dtype, exact: bool) -> bool:
    narrow = values.detach().to(dtype)
    return bool(narrow.isfinite().all()) and not (exact and not torch.equal(narrow.to(values.dtype), values))


@contextmanager
def _staged(ranks: Ranks, folder: Path) -> Iterator[Path]:
    """A temporary folder of all ranks that becomes ``folder`` once the block ends without an error on every one."""
    with ExitStack() as stack:
        mine = together(ranks, lambda: stack.enter_context(new_folder(folder)) if ranks.rank == 0 else None)
        yield ranks.gather(mine)[0] or folder
        together(ranks, stack.close)


def _write(
    held: Rows,
    folder: Path,
    file: str,
    named: Mapping[str, tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Key -> file of all tensors. ``named``: key -> (parameter, this rank's rows)."""
    ranks, written = held.ranks, [0] * held.ranks.size
    kept: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    failure: Exception | None = None

    def put_down() -> None:
        name = file.replace(".", f"-{ranks.rank + 1:05d}-{len(set(places.values())) + 1:05d}.", 1)
        places.update(dict.fromkeys(kept, name))
        save_file(dict(kept), folder / name, metadata={"format": "pt"})
        flush_to_disk(folder / name)
        kept.clear()

    for key, (parameter, values) in named.items():
        whole = held.whole(parameter, values)
        owner = written.index(min(written))
        written[owner] += whole.numel()
        if owner != ranks.rank or failure is not None:
            continue
        try:  # the others go on to the next tensor, so this one does too
            kept[key] = whole.to("cpu", dtype or whole.dtype, copy=True).contiguous()
            if sum(t.numel() * t.element_size() for t in kept.values()) > SHARD_BYTES:
                put_down()
        except Exception as error:
            failure = error

    def finish() -> None:
        if failure is not None:
            raise failure
        if kept:
            put_down()

    together(ranks, finish)
    return {key: name for part in ranks.gather(places) for key, name in part.items()}
