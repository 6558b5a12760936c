"""What the trainer wants of an objective: a loss that is a sum over response tokens, sequences or pairs."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

import torch

Unit = Literal["token", "sequence", "pair"]


class Objective(Protocol):
    """What a mini-batch is trained on.

    Its attribute ``unit`` says what it needs to see together: a ``token`` (where it has none), a ``sequence``, or a
    ``pair``: all samples of a draw. Parts of a mini-batch that it is called with never split one. Its attribute
    ``off_policy`` says that it is made for samples of older weights without a correction; without it, it is not.
    """

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any, /
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """``(loss, statistics)`` of some tokens: a scalar that adds up over parts, and name -> (sum, count).

        ``inputs``: a dataclass of ``[R]`` tensors. The trainer reads ``weights``, the weight of each token in the loss
        of the whole mini-batch (0: not in the loss), and cuts the rest by token.
        """


def unit_of(objective: Any) -> Unit:
    """What an objective needs to see together. Raises ValueError: none of the units there are."""
    unit: Unit = getattr(objective, "unit", "token")
    if unit not in get_args(Unit):
        raise ValueError(f"the unit of an objective is one of {', '.join(get_args(Unit))}, not {unit!r}")
    return unit
