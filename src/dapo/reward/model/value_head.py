"""The file ``value_head.safetensors``: what makes a causal language model a reward model of this project.

It lies beside the model's own files and holds ``weight`` ``[1, hidden]`` and ``bias`` ``[1]`` in float32. The score of
a text is the head applied to the last hidden state (after the final normalisation) of the text's last token.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dapo.errors import RewardError
from dapo.util.files import write_atomic

FILE = "value_head.safetensors"


def save_value_head(folder: str | Path, weight: torch.Tensor, bias: torch.Tensor) -> Path:
    """Write a value head into the folder of its model, whole or not at all.

    Args:
        folder: where the model's ``config.json`` and weights lie.
        weight: ``[1, hidden]``, finite.
        bias: ``[1]``, finite.

    Returns:
        The file.

    Raises:
        ValueError: other shapes, or values that are not finite.
    """
    from safetensors.torch import save

    tensors = {"weight": weight.detach(), "bias": bias.detach()}
    _check(tensors)
    data = save({name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()})
    target = Path(folder) / FILE
    write_atomic(target, data)
    return target


def load_value_head(file: str | Path, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(weight [1, hidden], bias [1])``, float32.
    Raises RewardError: the file cannot be read, or holds another head than this model needs."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(file))
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise RewardError(f"value head {file}: cannot be read: {error}") from None
    try:
        _check(tensors, hidden)
    except ValueError as error:
        raise RewardError(f"value head {file}: {error}") from None
    return tensors["weight"].float(), tensors["bias"].float()


def _check(tensors: dict[str, torch.Tensor], hidden: int | None = None) -> None:
    if set(tensors) != {"weight", "bias"}:
        raise ValueError(f"must hold weight and bias, and holds {', '.join(sorted(tensors)) or 'nothing'}")
    weight, bias = tensors["weight"], tensors["bias"]
    if weight.dim() != 2 or weight.shape[0] != 1 or hidden not in (None, weight.shape[1]) or bias.shape != (1,):
        shape = f"[1, {hidden or 'hidden'}]"
        raise ValueError(f"weight must be {shape} and bias [1], got {list(weight.shape)} and {list(bias.shape)}")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinity")
