"""How a rank holds a model: the whole of it, or by FSDP2 some rows of each of its tensors (sharded.py).

The trainer works on plain tensors either way: of a sharded model they are this rank's rows. All ranks see the whole
mini-batch and weigh its tokens alike; each computes its own micro-batches, and gradients are added up, never averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dapo.model.adapters import changing_parameters
from dapo.training.checkpoint import load_tensors, load_weights, save_model, save_tensors
from dapo.training.parallel.ranks import Ranks

MODEL = "model.safetensors"
Parameters = Mapping[str, torch.nn.Parameter]


class Replica:
    """Each rank holds the whole model: one process, LoRA over several ranks, or a model that is small."""

    lockstep = False
    """Whether a forward or backward pass is one of all ranks together."""
    rows: Callable[[str, int], slice] | None = None
    """Which of so many rows of a tensor, given by its key, are this rank's; None: all."""

    def __init__(self, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        """``device``: where it computes; None: where the model is."""
        self.ranks = ranks or Ranks()
        self._device = device

    def device(self, model: Any) -> torch.device:
        """Where micro-batches are to be."""
        return self._device or torch.device(next(model.parameters()).device)

    def take(self, model: Any, compute_dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """Hold ``model`` from now on: what training may change by name, as this rank has it. Tied ones come once."""
        return changing_parameters(model)

    def begin_update(self, parameters: Parameters) -> None:
        """Before the first pass of an update: no gradient is left of one that failed midway."""
        for parameter in parameters.values():
            parameter.grad = None

    def begin_pass(self, last: bool) -> None:
        """Before each forward pass; ``last``: the gradients are wanted after its backward pass."""

    def end_passes(self) -> None:
        """After the last forward pass of some without gradient."""

    def collect(self, parameters: Parameters) -> None:
        """Add up the gradients of all ranks, and put them in the ``grad`` of this rank's parameters."""
        if self.ranks.size == 1:
            return
        used = set().union(*self.ranks.gather({name for name, p in parameters.items() if p.grad is not None}))
        for name in (name for name in parameters if name in used):
            parameter = parameters[name]
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.ranks.add_up(parameter.grad)

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Of the gradient of the whole model."""
        return torch.nn.utils.get_total_norm(gradients)

    def whole(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """All rows of something that this rank has its rows of, such as the parameter ``name`` itself."""
        return values

    def frozen(self, model: Any, copies: dict[int, Any], ranks: Ranks) -> tuple[Any, Replica]:
        """A model and how ``ranks`` have it, from which files can be written while an update changes this one.
        ``copies``: by the id of a parameter, what stands for it."""
        return copy.deepcopy(model, copies), Replica(ranks, torch.device("cpu"))

    # --- files, as in training/checkpoint.py, by all ranks together -------------------------------------------------

    def save_model(self, model: Any, folder: Path, parameters: Parameters, **how: Any) -> None:
        self.ranks.together(lambda: save_model(model, folder, **how), alone=(0,))

    def load_weights(self, model: Any, folder: Path, parameters: Parameters) -> None:
        self.ranks.together(lambda: load_weights(model, folder))

    def save_tensors(self, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
        self.ranks.together(lambda: save_tensors(folder, tensors, metadata), alone=(0,))

    def load_tensors(self, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's rows of each."""
        return self.ranks.together(lambda: load_tensors(folder, self.rows))
