"""LoRA adapters in the layout of PEFT: put on the base model's linear layers, never merged into their weights.

The model stays the Transformers model that it is, with ``base_layer``, ``lora_A`` and ``lora_B`` inside its linear
layers. So engine and trainer use its backbone and head as those of any other, and a copy of it carries the adapter.
The base is frozen: what is trained, handed to the engine and written to disk is the adapter. That of a reward model is
on a sequence classifier, whose head belongs to it (PEFT's task SEQ_CLS).
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo.errors import ModelError, first_line, install
from dapo.model.hub import is_name

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Of names in the file: the wrappers that PEFT's own model puts around ours."""
_POLICY, _REWARD = "CAUSAL_LM", "SEQ_CLS"
_HEAD = "score"
"""Of a classifier over a decoder."""

_SERVED = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
}
"""Settings that change what is computed, and are compared with PEFT's own forward pass in tests/model."""
_OF_NO_EFFECT = {
    *("peft_type", "task_type", "base_model_name_or_path", "peft_version", "auto_mapping"),
    *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""About the file, about training, or about settings that are refused themselves."""
_WEIGHTS_OF_THE_BASE_STAY = (True, False, None, "gaussian", "orthogonal", "eva")
"""Other ways to initialize (PiSSA, OLoRA, CorDA, LoftQ, ...) put something else in place of the base's weights."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """``base``: folder or name on the hub of the model it belongs to. ``settings``: the content of its config."""

    folder: Path
    base: str
    settings: Mapping[str, Any]


def find_adapter(path: str | Path) -> Adapter | None:
    """The adapter in the folder ``path``; None: it is no folder, or one without ``adapter_config.json``.

    A base that is a relative path is looked for in the adapter's folder, then from where the process runs.

    Raises:
        ModelError: the config is damaged, names no base or asks for what is not served, or the weights are not there.
    """
    folder = Path(path).expanduser()
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"adapter {folder}: {CONFIG_FILE} cannot be read: {error}") from None
    _check_settings(folder, settings)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"adapter {folder}: there is no {WEIGHTS_FILE}; save it with safe_serialization=True")
    base = settings.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(f"adapter {folder}: {CONFIG_FILE} names no model in base_model_name_or_path")
    beside = folder / base
    found = str(beside.resolve()) if os.path.isdir(beside) else base  # noqa: PTH112  (the method raises for a name that is too long)
    if os.path.isfile(Path(found).expanduser() / CONFIG_FILE):  # noqa: PTH113
        raise ModelError(
            f"adapter {folder}: its base {base} is a folder with an adapter, too; one adapter is served, on a model of "
            "its own folder. Name that in base_model_name_or_path"
        )
    if not is_name(found) and not os.path.isdir(Path(found).expanduser()):  # noqa: PTH112
        raise ModelError(
            f"adapter {folder}: its base {base} is no folder here; put the model there, or name where it is in "
            f"base_model_name_or_path of {CONFIG_FILE}"
        )
    return Adapter(folder, found, settings)


def require_adapter(path: str | Path) -> Adapter:
    """The adapter in the folder ``path``. Raises ModelError: there is none, or as :func:`find_adapter`."""
    adapter = find_adapter(path)
    if adapter is None:
        what = f"the folder holds no {CONFIG_FILE}" if Path(path).expanduser().is_dir() else "no such folder"
        raise ModelError(f"adapter {path}: {what}; name one with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT saves them")
    return adapter


def _no_number(text: str) -> float:
    raise ValueError(f"it holds {text}, which is no number")


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    kind = str(settings.get("peft_type"))
    served = "served are LoRA, rank-stabilized LoRA and DoRA on linear layers"
    if kind != "LORA":
        raise ModelError(f"adapter {folder}: peft_type {kind} is not served; {served}")
    task = settings.get("task_type")
    if task not in (None, _POLICY, _REWARD):
        raise ModelError(f"adapter {folder}: task_type {task} is not served, only {_POLICY}, and {_REWARD} as a reward")
    if task == _REWARD and set(settings.get("modules_to_save") or ()) <= {_HEAD, "classifier"}:
        settings = {**settings, "modules_to_save": None}
    start = settings.get("init_lora_weights")
    if start not in _WEIGHTS_OF_THE_BASE_STAY:
        raise ModelError(
            f"adapter {folder}: init_lora_weights {start!r} changes the weights of the base model; save the adapter as "
            "plain LoRA (path_initial_model_for_weight_conversion) or merge it into its model"
        )
    if settings.get("bias", "none") != "none":
        raise ModelError(f"adapter {folder}: bias {settings['bias']!r} is not served; {served}")
    if settings.get("revision"):
        raise ModelError(
            f"adapter {folder}: it is for revision {settings['revision']} of its base; download that, name its folder "
            "in base_model_name_or_path and take revision out"
        )
    for name, value in settings.items():
        if value and name != "bias" and name not in _SERVED | _OF_NO_EFFECT:
            raise ModelError(f"adapter {folder}: {name} is not served; {served}")


def put_on(model: Any, adapter: Adapter, dtype: torch.dtype | None = None) -> Any:
    """``model``, changed in place: its linear layers now add what the adapter's matrices give.

    Args:
        model: the base, without an adapter. It is frozen. On the meta device the weights are read to be checked.
        dtype: of the adapter's parameters; None: that of the layers that they are on.

    Raises:
        ModelError: PEFT is not installed, or adapter and model do not fit.
    """
    if (adapter.settings.get("task_type") == _REWARD) != hasattr(model, _HEAD):
        what = f"of a policy, which writes text ({_POLICY})"
        if not hasattr(model, _HEAD):
            what = f"of a reward model ({_REWARD}), which scores texts and writes none; {as_a_reward(adapter.folder)}"
        raise ModelError(f"adapter {adapter.folder}: is {what}")
    lora_config = _peft(f"adapter {adapter.folder}").LoraConfig
    known = {name: value for name, value in adapter.settings.items() if name in _SERVED and value is not None}
    try:
        # nothing is initialized: the weights are read right after
        model = _injected(model, lora_config(**{**known, "init_lora_weights": False}), adapter.base, dtype)
    except Exception as error:  # layers that are not there: each raises its own
        raise ModelError(f"adapter {adapter.folder}: does not fit {adapter.base}: {first_line(error)}") from None
    read_weights(model, adapter)
    check_ends(model)
    return model


def new_adapter(model: Any, rank: int, alpha: float, target_modules: list[str] | str, seed: int) -> Any:
    """``model``, changed in place: with a new adapter in float32 on it, which adds nothing yet.

    Args:
        model: the base, from a folder or the hub. It is frozen.
        rank, alpha, target_modules: see ``dapo.config.sections.LoraConfig``.

    Raises:
        ModelError: PEFT is not installed, or the model has no such modules.
    """
    settings = {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": target_modules}
    config = _peft("model.lora").LoraConfig(**settings, fan_in_fan_out=model.config.model_type == "gpt2")
    base = model.config.name_or_path
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = _injected(model, config, str(Path(base).resolve()) if Path(base).is_dir() else base, torch.float32)
        except ValueError as error:
            raise ModelError(f"model.lora.target_modules: {first_line(error)}") from None
    check_ends(model)
    return model


def _peft(what: str) -> Any:
    try:
        import peft
    except ImportError:
        raise ModelError(f"{what}: LoRA adapters need the package peft: {install('lora')}") from None
    return peft


def _injected(model: Any, config: Any, base: str, dtype: torch.dtype | None) -> Any:
    config.base_model_name_or_path, config.task_type = base, _REWARD if hasattr(model, _HEAD) else _POLICY
    model = _peft("adapter").inject_adapter_in_model(config, model)
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)  # the head of a classifier, too
        if dtype is not None:  # PEFT makes an adapter in the type of its layer
            parameter.data = parameter.data.to(dtype)
    return model


def as_a_reward(path: str | Path) -> str:
    """What a reward model is for."""
    return f"use it in a recipe of dapo train: reward: {{kind: model, path: {path}}}"


def adapter_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Those of the adapter by name, with the head of a classifier; none if there is no adapter."""
    named = model.named_parameters() if has_adapter(model) else ()
    return {name: p for name, p in named if ".lora_" in name or name.startswith(f"{_HEAD}.")}


def changing_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """What training may change, the engine is given and a checkpoint holds: the adapter, or else all parameters."""
    return adapter_parameters(model) or dict(model.named_parameters())


def file_key(name: str) -> str:
    """What the names of a parameter in a file and in a model have in common."""
    return name.removeprefix(_PREFIX).replace(".default", "").removesuffix(".weight")


def read_weights(model: Any, adapter: Adapter) -> None:
    """Put the weights in the adapter's folder into the adapter that is on ``model``.
    Raises ModelError: damaged, or of another adapter or model."""
    from safetensors.torch import load_file

    try:
        weights = load_file(adapter.folder / WEIGHTS_FILE)
    except Exception as error:  # of safetensors, or of the system
        raise ModelError(f"adapter {adapter.folder}: {WEIGHTS_FILE} cannot be read: {first_line(error)}") from None
    try:
        weights = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # to an outline, to be checked
            report = _peft(f"adapter {adapter.folder}").set_peft_model_state_dict(model, weights)
    except ModelError:
        raise
    except Exception as error:  # shapes that differ: each raises its own
        raise ModelError(f"adapter {adapter.folder}: does not fit {adapter.base}: {first_line(error)}") from None
    missing = [name for name in report.missing_keys if name in adapter_parameters(model)]
    for what, names in (("missing", missing), ("unexpected", list(report.unexpected_keys))):
        if names:
            raise ModelError(f"adapter {adapter.folder}: {len(names)} {what} weights, such as {sorted(names)[0]}")


def save_adapter(model: Any, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter that is on ``model`` in the layout of PEFT, its base named, into ``folder``, which exists.

    ``state``: to take the weights from, by the names of all parameters; None: those in memory.
    """
    from safetensors.torch import save_file

    peft = _peft("adapter")
    chosen = {name: (state or {}).get(name, parameter) for name, parameter in adapter_parameters(model).items()}
    weights = peft.get_peft_model_state_dict(model, state_dict=chosen, save_embedding_layers=False)
    weights |= {name: tensor for name, tensor in chosen.items() if name.startswith(f"{_HEAD}.")}
    tensors = {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = copy.copy(model.peft_config["default"])
    config.inference_mode, config.modules_to_save = True, [_HEAD] if hasattr(model, _HEAD) else None
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))


def has_adapter(model: Any) -> bool:
    """Whether an adapter of any kind is on ``model``."""
    return bool(getattr(model, "peft_config", None))


def can_be_compiled(model: Any) -> bool:
    """Whether ``torch.compile`` can trace the layers of ``model``: those of DoRA it cannot."""
    adapters = getattr(model, "peft_config", None) or {}
    return not any(config.use_dora for config in adapters.values())


def check_ends(model: Any) -> None:
    """Raises ModelError: the embedding or the output head carries an adapter, of which the head's computation knows
    nothing."""
    for name, module in (("embedding", model.get_input_embeddings()), ("output head", model.get_output_embeddings())):
        if any(hasattr(module, wrapped) for wrapped in ("base_layer", "modules_to_save", "original_module")):
            raise ModelError(
                f"the adapter changes the {name}; served are adapters on the linear layers between embedding and "
                "output head. Merge it into its model instead"
            )
