"""A trainer as it is at one moment, so that a checkpoint of it can be written while it goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dapo.model.export import rounded_back
from dapo.training.parallel.ranks import Ranks
from dapo.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    """What a learner was at one moment, to be written while it goes on.

    Attributes:
        bytes: of its tensors, which is what they will take on the disk, but for kilobytes.
        write: fills ``model`` and ``optimizer`` of a folder, in any thread but that of the event loop; a second time
            only if the first one failed. The sequence: tokens that end a response, which go with the weights.
    """

    bytes: int
    write: Callable[[Path, Sequence[int]], None]


def snapshot(trainer: Trainer, ranks: Ranks | None = None) -> Trainer:
    """A trainer that can be saved, and nothing else: weights, optimizer state and counters as they are now.

    Takes main memory for the weights that are trained and the two moments (12 bytes a parameter, 6 with those in 8
    bits; of a sharded model, this rank's), and the time to copy them there. The trainer must not be at an update
    meanwhile.
    ``ranks``: the same as the trainer's, over tensors on CPUs, for what may be done beside an update; None: its own.
    Raises NumericalError or UserError: the weights are of no use (:meth:`~dapo.training.trainer.Trainer.check_finite`).
    """
    trainer.check_finite()
    policy = trainer.policy
    memo: dict[int, Any] = {id(p): p for p in policy.model.parameters() if not p.requires_grad}  # they never change
    for parameter in trainer._parameters.values():
        values = parameter.detach().to("cpu", copy=True)
        memo[id(parameter)] = torch.nn.Parameter(values, requires_grad=True)
    frozen = copy.copy(trainer)
    model, held = policy.held.frozen(policy.model, memo, ranks or policy.held.ranks)
    frozen.policy = replace(policy, model=model, held=held)
    frozen._published = {name: memo.get(id(p), p) for name, p in trainer._published.items()}
    frozen._parameters = {name: memo[id(parameter)] for name, parameter in trainer._parameters.items()}
    state = {
        memo[id(parameter)]: {key: value.detach().to("cpu", copy=True) for key, value in moments.items()}
        for parameter, moments in trainer._optimizer.state.items()
    }
    groups = [{key: value for key, value in g.items() if key != "params"} for g in trainer._optimizer.param_groups]
    optimizer: Any = SimpleNamespace(state=state, param_groups=groups)  # an optimizer's memory, without its work
    frozen._optimizer = optimizer
    return frozen


def write_snapshot(frozen: Trainer, folder: Path, stop_ids: Sequence[int] = ()) -> None:
    """``model``, with the masters from which training goes on, and ``optimizer``. Each is there whole or not at all.
    Raises FileExistsError: one of them is there."""
    frozen.save(folder / "model", stop_ids=stop_ids)
    frozen.save_state(folder / "optimizer")


def load_snapshot(trainer: Trainer, folder: Path) -> None:
    """Go on from :func:`write_snapshot`. Raises UserError: missing or damaged, or of another model."""
    trainer.load(folder / "model")
    trainer.load_state(folder / "optimizer")


def expected_bytes(trainer: Trainer) -> int:
    """What the checkpoint of a trainer that has made updates takes: weights, and two moments of those trained.
    Of a sharded model this rank's, here and in :func:`snapshot_bytes`."""
    return _bytes(trainer._published.values()) + trainer.moment_bytes


def snapshot_bytes(frozen: Trainer) -> int:
    """Size of the tensors of a snapshot, which is what its checkpoint will take on the disk, but for kilobytes."""
    weights = frozen._published.values()  # a shared one comes once, here as in the file
    return _bytes(weights) + sum(_bytes(moments.values()) for moments in frozen._optimizer.state.values())


def share_rounded_back(trainer: Trainer, before: Path, dtype: torch.dtype) -> float:
    """Of the weights that are other ones than in the folder ``before``, the share that are the same again in ``dtype``:
    small steps are lost between its numbers."""
    held = trainer.policy.held
    mine = rounded_back(trainer._published, before, dtype, held.rows)
    lost, moved = (sum(counts) for counts in zip(*held.ranks.gather(mine), strict=True))
    return lost / moved if moved else 0.0


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
