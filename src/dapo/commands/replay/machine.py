"""The machine of a run and the one here: why numbers may not come out to the bit.

Consumes: what a run recorded of its environment. Produces: a device, and reasons in words.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.model.placement import device_of
from dapo.observe.run_view import RunView


def device_here(view: RunView, config: Config) -> tuple[torch.device, list[str]]:
    """Where to compute, and why that cannot be exact: to the bit it is only on what the run was made on."""
    reasons = []
    try:
        device = device_of(config)
    except ConfigError:
        device = torch.device("cpu")
        reasons.append("the run was on a GPU, of which there is none here")
    if not config.runtime.deterministic:
        reasons.append("runtime.deterministic is false")
    now = {"torch": torch.__version__, "machine": platform.machine()}
    for one in _environments(view):
        then = {"torch": (one.get("packages") or {}).get("torch"), "machine": one.get("machine")}
        reasons += [f"{name} was {then[name]}, is {now[name]}" for name in now if then[name] not in (None, now[name])]
    return device, list(dict.fromkeys(reasons))


def other_threads(view: RunView, config: Config) -> list[str]:
    """Why the order of additions may be another one: as many threads as cores, and there are others."""
    if config.runtime.threads is not None or torch.get_num_threads() == 1:
        return []
    known = [one.get("cores") for one in _environments(view)]
    cores = {count for count in known if isinstance(count, int)} - {os.cpu_count()}
    return [f"the run had {', '.join(map(str, sorted(cores)))} cores, here are {os.cpu_count()}"] if cores else []


def _environments(view: RunView) -> list[Mapping[str, Any]]:
    """What the run was made on, once for each time that it was started."""
    resumed = view.environment.get("resumed")
    found = [view.environment, *(resumed if isinstance(resumed, list) else [])]
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("packages") or {}, dict)]
