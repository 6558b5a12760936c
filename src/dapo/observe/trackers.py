"""The trackers that a recipe can ask for: TensorBoard, Weights & Biases, MLflow, trackio, and Prometheus.

Consumes: what goes into metrics.jsonl, step by step, under the same registered names; the recipe without its secrets;
the summary. No number is kept by a tracker alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dapo.config import Config
from dapo.config.secrets import redact
from dapo.errors import ConfigError, install
from dapo.observe.run_folder import RunFolder, config_yaml
from dapo.observe.tracker import Background, Tracker
from dapo.observe.tracker_services import TRACKERS, TensorBoardTracker
from dapo.util.files import read_json, write_json
from dapo.util.user_code import load_named, made

_PROMETHEUS = ("prometheus_client", "starlette", "uvicorn")


def check_trackers(config: Config) -> None:
    """Raises ConfigError if a package that the trackers need is missing; costs nothing."""
    if config.run.prometheus_port is not None:
        missing = [name for name in _PROMETHEUS if importlib.util.find_spec(name) is None]
        if missing:
            needs = f"needs {', '.join(missing)}, which is not installed"
            raise ConfigError(f"run.prometheus_port: {needs}: {install('prometheus')}, or leave it out")
    for name in config.run.trackers:  # its package and the extra of dapo have this name, too
        if ":" not in name and importlib.util.find_spec(name) is None:
            needs = f"{name} needs the package {name}, which is not installed"
            raise ConfigError(f"run.trackers: {needs}: {install(name)}, or leave it out")


def make_trackers(
    config: Config,
    folder: RunFolder,
    keep_until: int | None = None,
    tell: Callable[[str], object] = lambda text: None,
    looks: Callable[[], Sequence[Mapping[str, Any]]] = list,
    given: Sequence[Any] = (),
) -> list[Tracker]:
    """The trackers that ``config`` asks for, and those that were ``given`` from Python.

    Args:
        keep_until: on resume, the last step to keep: what was kept of later steps is no longer shown by those trackers
            that can take something back.
        looks: gives the latest lines of resources.jsonl, for Prometheus.

    Raises ConfigError: a package is missing, or a tracker of the user's cannot be loaded.
    """
    check_trackers(config)
    makers: list[tuple[str, Callable[[], Tracker]]] = []
    recipe = redact(config.model_dump(mode="json"))
    for name in [*config.run.trackers, *given]:
        if name == "tensorboard":
            makers.append((name, partial(TensorBoardTracker, folder.tensorboard, config_yaml(config), keep_until)))
        elif isinstance(name, str) and name in TRACKERS:
            makers.append((name, partial(TRACKERS[name], folder.root, _key(folder), recipe)))
        else:
            own = load_named(name, "run.trackers") if isinstance(name, str) else name
            label = name if own is not name else getattr(own, "__qualname__", type(own).__name__)
            makers.append((label, partial(made, label, own, Tracker, folder.root, _key(folder), recipe)))
    port = config.run.prometheus_port
    if port is not None:
        from dapo.observe.prometheus import PrometheusTracker

        makers.append(("prometheus", lambda: PrometheusTracker(port, looks, folder.root.name)))
    return [Background(name, make, tell) for name, make in makers]


def _key(folder: RunFolder) -> str:
    """The name by which services know this run, the same each time it goes on."""
    path = folder.root / "tracker.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(path)["key"])
    key = f"{folder.root.resolve().name}-{secrets.token_hex(4)}"
    write_json(path, {"key": key})
    return key
