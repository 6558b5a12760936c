"""Where a model computes: its device, its threads, and bits that repeat."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.util.memory import keep_freed_memory

SMALL_MODEL = 10_000_000  # parameters below which an operation is too short to be worth sharing between threads


def device_of(config: Config) -> torch.device:
    """The device of the trainer; where Ray has it in processes of their own, that of this one, which computes nothing.
    Raises ConfigError: a GPU was asked for and there is none."""
    if config.runtime.kind == "ray":
        return torch.device("cpu")
    found = torch.cuda.is_available()
    if config.runtime.device == "cuda" and not found:
        built = "no GPU was found" if torch.version.cuda else "this PyTorch was built for CPUs only"
        raise ConfigError(f"runtime.device: cuda, but {built} (torch {torch.__version__}); auto or cpu will run here")
    return torch.device("cuda" if found and config.runtime.device != "cpu" else "cpu")


def engine_device(config: Config) -> torch.device:
    """The device of the engine: equal to :func:`device_of` exactly where trainer and engine share one.
    Raises ConfigError: ``rollout.device`` names none, or one that is not here."""
    name, learner = config.rollout.device, device_of(config)
    if name is None:
        return learner
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (kind == "cpu" and number) or (":" in name and not number.isdecimal()):
        raise ConfigError(f"rollout.device: {name!r} is no device; use cpu, cuda, cuda:N for GPU N (from 0), or null")
    if kind == "cpu":
        return torch.device("cpu")
    place, count = int(number or 0), torch.cuda.device_count()
    if place >= count:
        several = f"{count} were found, cuda:0 to cuda:{count - 1}"
        have = ("there is no GPU here", "there is only cuda:0", several)[min(count, 2)]
        raise ConfigError(f"rollout.device: {name}, but {have}; null puts the engine on the learner's device")
    shared = learner.type == "cuda" and place == (learner.index or 0)
    return learner if shared else torch.device("cuda", place)


def apart(config: Config) -> bool:
    """Whether engine and learner have devices of their own."""
    if config.runtime.kind == "ray":
        return config.runtime.placement == "disaggregated"
    return engine_device(config) != device_of(config)


def take_turns(config: Config) -> bool:
    """Whether engine and learner take turns, each with the memory of the other: on one GPU, or on-policy on one CPU."""
    ours = config.rollout.engine in ("native", "vllm")
    on_gpu = device_of(config).type == "cuda" or (config.runtime.kind == "ray" and config.runtime.device != "cpu")
    return not apart(config) and (config.rollout.max_staleness == 0 or (ours and on_gpu))


def cache_bytes(config: Config) -> int | None:
    """What the engine may take for keys and values; None: what is free."""
    return None if config.rollout.cache_gib is None else int(config.rollout.cache_gib * 2**30)


@contextmanager
def determinism(config: Config, device: torch.device) -> Iterator[None]:
    """Inside, with ``runtime.deterministic``, a GPU uses only operations whose result has the same bits each time.

    To be entered before the first product on it: its libraries read their setting once, which stays in the environment.
    """
    if not config.runtime.deterministic or device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic  # its stub lacks the setting
    before, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # nothing here reads any
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filled


def set_threads(config: Config, model: Any) -> None:
    """Threads for tensor work, and memory that is kept for it.

    Operations of a small model take microseconds. Shared between threads, each of them waits for the slowest, and when
    another program holds a core that wait is a whole time slice: measured, a demo model decodes 20k tokens/s on one
    thread whatever else runs, and between 12k and 1.5k on two. See docs/decisions/0004-threads.md.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    torch.set_num_threads(config.runtime.threads or (1 if small else cores))
    keep_freed_memory()


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``. From pageable memory the copy would wait for all that the GPU has still to do."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
