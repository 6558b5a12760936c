"""The trainer's folders on disk: weights in Hugging Face layout, and the optimizer as safetensors beside JSON.

No pickle, so a checkpoint from a stranger cannot run code. A folder is written under a temporary name, flushed to the
disk and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dapo.errors import UserError
from dapo.files import new_folder, write_json
from dapo.model.adapters import has_adapter, save_adapter

TENSORS, METADATA = "trainer.safetensors", "trainer.json"


def save_model(model: Any, folder: Path) -> None:
    """Write ``model`` in Hugging Face layout (config and safetensors), to be loaded by ``from_pretrained``; of one with
    an adapter the adapter, in the layout of PEFT.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    with new_folder(folder) as staging:
        if has_adapter(model):
            save_adapter(model, staging)
        else:
            model.save_pretrained(staging)


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Write named tensors and JSON metadata.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    with new_folder(folder) as staging:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, staging / TENSORS)
        write_json(staging / METADATA, {**metadata, "tensors": sorted(tensors)})


def load_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What :func:`save_tensors` wrote: ``(tensors, metadata)``.

    Raises:
        UserError: missing, damaged, or the tensors are not those that the metadata lists.
    """
    try:
        tensors = load_file(folder / TENSORS)
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        listed = metadata.pop("tensors")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: the trainer's state cannot be read: {type(error).__name__}: {error}") from None
    if sorted(tensors) != listed:
        odd = sorted(set(tensors) ^ set(listed))
        raise UserError(f"{folder}: {TENSORS} does not hold what {METADATA} lists; first difference: {odd[0]}")
    return tensors, metadata
