"""What the trainer wants of an objective: a loss that is a sum over response tokens."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch


class TokenRecord(Protocol):
    """A dataclass of ``[R]`` tensors. The trainer reads ``weights`` and cuts the rest by token."""

    @property
    def weights(self) -> torch.Tensor:
        """Weight of each token in the loss of the whole mini-batch; 0: not in the loss."""
        ...


Inputs = TypeVar("Inputs", bound=TokenRecord)
InputsIn = TypeVar("InputsIn", bound=TokenRecord, contravariant=True)


class Objective(Protocol[InputsIn]):
    """What a mini-batch is trained on."""

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, inputs: InputsIn, /
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """``(loss, statistics)`` of some tokens: a scalar that adds up over parts, and name -> (sum, count)."""
        ...
