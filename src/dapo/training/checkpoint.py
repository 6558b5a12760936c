"""The trainer's folders on disk: weights in Hugging Face layout, and the optimizer as safetensors beside JSON.

No pickle, so a checkpoint from a stranger cannot run code. A folder is written under a temporary name, flushed to the
disk and renamed: it is there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dapo.errors import ModelError, UserError
from dapo.model.adapters import has_adapter, read_weights, require_adapter
from dapo.model.export import export_model
from dapo.model.loading import is_finite
from dapo.training.moments import scales_of
from dapo.util.files import new_folder, read_json, write_json

WEIGHTS = "model.safetensors"
TENSORS, METADATA = "trainer.safetensors", "trainer.json"
INDEX = f"{TENSORS}.index.json"
SHARD_BYTES = 5 * 10**9
"""Of one file at most, unless a single tensor is larger."""


def save_model(model: Any, folder: Path, **how: Any) -> None:
    """Write ``model`` in Hugging Face layout, to be loaded by ``from_pretrained``; of one with an adapter the adapter,
    in the layout of PEFT. ``how``: see :func:`dapo.model.export.export_model`; by default weights are as in memory.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    with new_folder(folder) as staging:
        export_model(model, staging, **how)


def load_weights(model: Any, folder: Path) -> None:
    """Give ``model`` the weights that :func:`save_model` wrote.
    Raises ModelError: missing or damaged, or of another model."""
    if has_adapter(model):
        read_weights(model, require_adapter(folder))
        return
    read_into(dict(model.named_parameters()), folder)


def read_into(parameters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """:func:`load_weights`, of the ``parameters`` by name."""
    try:
        saved = read_tensors(folder, WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"{folder}: the weights cannot be read: {type(error).__name__}: {error}") from None
    if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in parameters.items()}:
        raise ModelError(f"{folder}: holds the weights of another model")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def optimizer_tensors(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of named parameters (Adam: moments, step counts), as :func:`save_tensors` takes it."""
    states = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    return {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.items()}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    counters: dict[str, Any],
) -> dict[str, Any]:
    """Continue with what :func:`load_tensors` found in ``folder``; settings of the optimizer stay. Returns the rest.
    ``optimizer``: of ``parameters``, in their order. Raises UserError: it is of another model."""
    numbers = {name: i for i, name in enumerate(parameters)}
    states: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        shape = parameters[name].shape if name in numbers else None
        if shape and kind.endswith("_scale"):
            shape = torch.Size([scales_of(shape.numel())])
        if shape is None or (tensor.dim() and tensor.shape != shape):
            raise UserError(f"{folder}: holds the optimizer of another model: no parameter fits {key}")
        states.setdefault(numbers[name], {})[kind] = tensor
    if int(counters["updates"]) > int(counters["skipped_updates"]) and not states:
        raise UserError(f"{folder}: holds no moments of the optimizer, though there were updates")
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return counters


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Write named tensors and JSON metadata. What is too large for one file goes into several, with an index beside
    them that says which tensor is where, as Transformers does it with weights.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    pattern = TENSORS.replace(".", "{suffix}.")
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=SHARD_BYTES)
    with new_folder(folder) as staging:
        for file, names in (split.filename_to_tensors or {TENSORS: []}).items():
            save_file({name: tensors[name].detach().cpu().contiguous() for name in names}, staging / file)
        if split.is_sharded:
            write_json(staging / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        write_json(staging / METADATA, {**metadata, "tensors": sorted(tensors)})


def load_tensors(
    folder: Path, rows: Callable[[str, int], slice] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What :func:`save_tensors` wrote: ``(tensors, metadata)``. ``rows``: see :func:`read_tensors`.

    Raises:
        UserError: missing, damaged, or the tensors are not those that the metadata lists, or not finite: one update
            later the weights would not be either, and be blamed.
    """
    try:
        tensors = read_tensors(folder, TENSORS, rows)
        metadata = read_json(folder / METADATA)
        listed = metadata.pop("tensors")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: the trainer's state cannot be read: {type(error).__name__}: {error}") from None
    if sorted(tensors) != listed:
        odd = sorted(set(tensors) ^ set(listed))
        raise UserError(f"{folder}: {TENSORS} does not hold what {METADATA} lists; first difference: {odd[0]}")
    bad = next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)
    if bad is not None:
        name, _, kind = bad.rpartition("/")
        raise UserError(
            f"{folder}: the optimizer's {kind} of {name} (Adam's moments) are not finite numbers; go on from an "
            "earlier checkpoint, or start a new run with model.path=.../model of this one"
        )
    return tensors, metadata


def read_tensors(folder: Path, name: str, rows: Callable[[str, int], slice] | None = None) -> dict[str, torch.Tensor]:
    """Those in the file ``name`` of ``folder``, or in the files that an index beside it names.
    ``rows``: of key and number of rows, those wanted; None: all. Raises what the readers of files raise."""
    index = folder / f"{name}.index.json"
    files = {Path(file).name for file in read_json(index)["weight_map"].values()} if index.exists() else {name}
    found: dict[str, torch.Tensor] = {}
    for file in sorted(files):
        with safe_open(folder / file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118
                part = stored.get_slice(key)
                shape = part.get_shape()
                found[key] = part[rows(key, shape[0])] if rows and shape else stored.get_tensor(key)
    return found
