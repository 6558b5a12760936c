"""Folders with a model that other programs can use: with all that is known of how it is to be used.

Transformers 5 writes what it reads itself. Older versions, and engines that read config.json on their own, look for
some of it under other names, and take a default without a word where they do not find it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dapo.model.adapters import adapter_parameters, has_adapter, save_adapter
from dapo.model.loading import is_finite
from dapo.model.tokenizer import source_folder
from dapo.util.files import write_json

_CODE = ("*.py", "LICENSE*", "NOTICE*")


def export_dtype(model: Any, choice: str) -> torch.dtype | None:
    """What ``choice`` (``model.export_dtype``) means for ``model``; None: weights stay as they are in memory."""
    if choice == "source":
        return None if has_adapter(model) else model.source_dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[choice]


def export_model(
    model: Any, folder: Path, dtype: torch.dtype | None = None, exact: bool = False, stop_ids: Sequence[int] = ()
) -> None:
    """Write ``model``: config, settings for generation and safetensors; of one with an adapter the adapter, in the
    layout of PEFT.

    Args:
        model: its config's ``name_or_path`` says where it came from, which has what a loaded config lacks.
        dtype: of the weights; None, or where one would become infinite: as they are in memory.
        exact: leave them as they are in memory if ``dtype`` cannot hold every number of them.
        stop_ids: what ended a response; () leaves that as it was.
    """
    weights = _in_type(model, dtype, exact)
    if has_adapter(model):
        save_adapter(model, folder, weights)
    else:
        settings, model.generation_config = model.generation_config, type(model.generation_config)()
        try:  # Transformers refuses to write what it reads, such as a temperature without do_sample
            model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
        finally:
            model.generation_config = settings
    write_description(model, folder, model.dtype if dtype is None or weights is None else dtype, stop_ids)


def is_tied(model: Any) -> bool:
    """Whether embedding and head are one: a head of its own may be there against what the config says. Of a classifier,
    which has none, what the config says."""
    head = model.get_output_embeddings()
    return model.config.tie_word_embeddings if head is None else head.weight is model.get_input_embeddings().weight


def write_description(
    model: Any, folder: Path, dtype: torch.dtype, stop_ids: Sequence[int] = (), tied: bool | None = None
) -> None:
    """All but the weights, which are in ``dtype``. ``folder``: with the config.json that Transformers makes of
    ``model``, or with that of its adapter. ``tied``: :func:`is_tied`, if it cannot be told now."""
    source = source_folder(model.config.name_or_path)
    if not has_adapter(model):
        tied = is_tied(model) if tied is None else tied
        _complete_config(folder / "config.json", source, {"dtype": str(dtype)[6:], "tie_word_embeddings": tied})
        if source and "auto_map" in _read(folder / "config.json"):
            for path in (path for pattern in _CODE for path in source.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
    generation = _read(source / "generation_config.json") if source else {}
    generation |= model.generation_config.to_diff_dict()
    generation.pop("_from_model_config", None)  # with it Transformers would take the ids of config.json
    if stop_ids:
        generation["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    write_json(folder / "generation_config.json", generation)


def rounded_back(
    weights: Mapping[str, torch.Tensor],
    before: Path,
    dtype: torch.dtype,
    rows: Callable[[str, int], slice] | None = None,
) -> tuple[int, int]:
    """Numbers of weights that are the same again in ``dtype`` as in the folder ``before``, and that are other ones than
    there. ``rows``: of name and number of rows, those that ``weights`` are; None: all."""
    moved = lost = 0
    for file in sorted(before.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in weights.keys() & stored.keys():
                part = stored.get_slice(name)
                then = part[rows(name, part.get_shape()[0])] if rows else stored.get_tensor(name)
                now = weights[name].detach().cpu()
                changed = now != then.to(now.dtype)
                moved += int(changed.sum())
                lost += int((changed & (now.to(dtype) == then.to(dtype))).sum())
    return lost, moved


def _in_type(model: Any, dtype: torch.dtype | None, exact: bool) -> dict[str, torch.Tensor] | None:
    """The weights in ``dtype`` on the CPU, tied ones once; None: they are to be written as they are."""
    if dtype is None:
        return None
    made: dict[tuple[int, torch.Size], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in (adapter_parameters(model) or model.state_dict()).items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in made:
            if not keeps([tensor], dtype, exact):
                return None
            made[key] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu()
        found[name] = made[key]
    return found


def keeps(tensors: Iterable[torch.Tensor], dtype: torch.dtype, exact: bool) -> bool:
    """Whether ``dtype`` can hold them: no number becomes infinite, or, if ``exact``, another one."""
    for tensor in tensors:
        narrow = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        if (exact and not torch.equal(narrow.to(tensor.dtype), tensor)) or not is_finite(narrow):
            return False
    return True


def _complete_config(file: Path, source: Path | None, known: Mapping[str, Any]) -> None:
    """Add what the source's config has and Transformers did not keep, what is ``known`` of the weights, and what older
    readers look for."""
    config, original = _read(file), _read(source / "config.json") if source else {}
    if original.get("model_type") == config["model_type"]:
        config = {key: value for key, value in original.items() if not key.startswith("_")} | config
    config |= known
    write_json(file, config | older_keys(config))


def older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Transformers before version 5 called the type and the rotary settings of ``config``.

    Gemma 3 has rotary settings by type of layer: those of full attention are the older main ones.
    """
    found: dict[str, Any] = {"torch_dtype": config["dtype"]}
    rotary = config.get("rope_parameters")
    if not rotary:
        return found
    if "full_attention" in rotary:
        found["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
        found["sliding_window_pattern"] = config.get("_sliding_window_pattern", 6)
        rotary = rotary["full_attention"]
    scaling = {key: value for key, value in rotary.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", "default")
    found["rope_theta"] = rotary["rope_theta"]
    # before version 4.43 the kind stood under "type"
    found["rope_scaling"] = None if kind == "default" else scaling | {"type": kind}
    return found


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
