"""A trainer as it is at one moment, so that a checkpoint of it can be written while it goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from dapo.model.adapters import changing_parameters
from dapo.training.trainer import Trainer


def snapshot(trainer: Trainer) -> Trainer:
    """A trainer that can be saved, and nothing else: weights, optimizer state and counters as they are now.

    Takes main memory for the weights that are trained and the two moments (12 bytes a parameter), and the time to copy
    them there. The trainer must not be at an update meanwhile.
    Raises NumericalError or UserError: the weights are of no use (:meth:`~dapo.training.trainer.Trainer.check_finite`).
    """
    trainer.check_finite()
    memo: dict[int, Any] = {}
    for parameter in trainer.policy.model.parameters():
        if not parameter.requires_grad:  # it never changes
            memo[id(parameter)] = parameter
            continue
        values = parameter.detach().to("cpu", copy=True)
        memo[id(parameter)] = torch.nn.Parameter(values, requires_grad=True)
    frozen = copy.copy(trainer)
    frozen.policy = replace(trainer.policy, model=copy.deepcopy(trainer.policy.model, memo))
    frozen._parameters = {name: memo[id(parameter)] for name, parameter in trainer._parameters.items()}
    state = {
        memo[id(parameter)]: {key: value.detach().to("cpu", copy=True) for key, value in moments.items()}
        for parameter, moments in trainer._optimizer.state.items()
    }
    groups = [{key: value for key, value in g.items() if key != "params"} for g in trainer._optimizer.param_groups]
    optimizer: Any = SimpleNamespace(state=state, param_groups=groups)  # an optimizer's memory, without its work
    frozen._optimizer = optimizer
    return frozen


def expected_bytes(trainer: Trainer) -> int:
    """What the checkpoint of a trainer that has made updates takes: weights, and two moments of those trained."""
    moments = 2 * _bytes(trainer._parameters.values())
    return _bytes(changing_parameters(trainer.policy.model).values()) + moments


def snapshot_bytes(frozen: Trainer) -> int:
    """Size of the tensors of a snapshot, which is what its checkpoint will take on the disk, but for kilobytes."""
    weights = changing_parameters(frozen.policy.model).values()  # a shared one comes once, here as in the file
    return _bytes(weights) + sum(_bytes(moments.values()) for moments in frozen._optimizer.state.values())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
