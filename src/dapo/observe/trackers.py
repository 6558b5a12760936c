"""Trackers: where the metrics of a run go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, trackio.

Consumes: what goes into metrics.jsonl, step by step, under the same registered names; the recipe without its secrets;
the summary. A tracker may not be the only place that holds a number. Each works in a thread of its own: training
neither waits for one nor ends with one, and hears once that it failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import numbers
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dapo.config import Config
from dapo.errors import ConfigError, install
from dapo.util.files import read_json, write_json

if TYPE_CHECKING:
    from dapo.observe.run_folder import RunFolder

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Of each tracker: the package that it needs, which is also the name of dapo's extra."""
_PROMETHEUS = ("prometheus_client", "starlette", "uvicorn")
CLOSE_SECONDS = 30.0
"""That the trackers of a run are waited for, all together."""


class Tracker(Protocol):
    """Keeps the metrics of one run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a rollout step (0: the evaluation before training). May raise anything."""

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Keep what the run came to, as in summary.json. May come more than once."""

    def close(self) -> None:
        """No more will come."""


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that there are; one that is not finite stays so."""
    found = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, numbers.Real)}


class Background:
    """A tracker in a thread of its own, from its making (``make``, called there) to its end. Raises nothing; the first
    failure ends it, of which ``tell`` hears once, in the thread of who calls."""

    def __init__(self, name: str, make: Callable[[], Tracker], tell: Callable[[str], object]) -> None:
        self._name, self._make, self._tell = name, make, tell
        self._work: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._fault: str | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"dapo-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._hand_over(lambda tracker: tracker.log(step, metrics))

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self._hand_over(lambda tracker: tracker.summarise(summary))

    def end(self) -> None:
        """No more will come. Does not wait."""
        self._work.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Wait until the tracker has all that it was given, ``seconds`` at most; None: :data:`CLOSE_SECONDS`."""
        self.end()
        self._thread.join(CLOSE_SECONDS if seconds is None else seconds)
        if self._thread.is_alive():
            self._fault = f"it did not end within {CLOSE_SECONDS:g} s"
        self._tell_fault()

    def _hand_over(self, work: Callable[[Tracker], None]) -> None:
        self._tell_fault()
        if self._fault is None:
            self._work.put(work)

    def _tell_fault(self) -> None:
        if self._fault is not None and not self._told:
            self._told = True
            self._tell(f"tracker {self._name} failed, and the run goes on without it: {self._fault}")

    def _run(self) -> None:
        try:
            with contextlib.closing(self._make()) as tracker:
                while (work := self._work.get()) is not None:
                    work(tracker)
        except BaseException as error:  # SystemExit too: some packages end the program where they cannot log in
            self._fault = f"{type(error).__name__}: {error}"


def close_all(trackers: Sequence[Tracker]) -> None:
    """Close them all at once: several that hang are waited for no longer than one."""
    until = time.monotonic() + CLOSE_SECONDS
    for tracker in trackers:
        if isinstance(tracker, Background):
            tracker.end()
    for tracker in trackers:
        if isinstance(tracker, Background):
            tracker.close(max(0.0, until - time.monotonic()))
        else:
            tracker.close()


def check_trackers(config: Config) -> None:
    """Raises ConfigError if a package that the trackers need is missing; costs nothing."""
    if config.run.prometheus_port is not None:
        missing = [name for name in _PROMETHEUS if importlib.util.find_spec(name) is None]
        if missing:
            needs = f"needs {', '.join(missing)}, which is not installed"
            raise ConfigError(f"run.prometheus_port: {needs}: {install('prometheus')}, or leave it out")
    for name in config.run.trackers:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"run.trackers: {name} needs the package {PACKAGES[name]}, which is not installed: "
                f"{install(name)}, or leave it out"
            )


def make_trackers(
    config: Config,
    folder: RunFolder,
    keep_until: int | None = None,
    tell: Callable[[str], object] = lambda text: None,
    looks: Callable[[], Sequence[Mapping[str, Any]]] = list,
) -> list[Tracker]:
    """The trackers that ``config`` asks for.

    Args:
        keep_until: on resume, the last step to keep: what was kept of later steps is no longer shown by those trackers
            that can take something back.
        looks: gives the latest lines of resources.jsonl, for Prometheus.

    Raises:
        ConfigError: a package is missing.
    """
    check_trackers(config)
    found: list[Tracker] = [Background(n, _maker(n, config, folder, keep_until), tell) for n in config.run.trackers]
    port = config.run.prometheus_port
    if port is not None:
        from dapo.observe.prometheus import PrometheusTracker

        found.append(Background("prometheus", lambda: PrometheusTracker(port, looks, folder.root.name), tell))
    return found


def _maker(name: str, config: Config, folder: RunFolder, keep_until: int | None) -> Callable[[], Tracker]:
    from dapo.config.secrets import redact
    from dapo.observe.run_folder import config_yaml

    def tensorboard() -> Tracker:
        from dapo.observe.tensorboard import TensorBoardTracker

        return TensorBoardTracker(folder.tensorboard, config_yaml(config), keep_until)

    if name == "tensorboard":
        return tensorboard
    recipe, key = redact(config.model_dump(mode="json")), _key(folder)

    def service() -> Tracker:
        from dapo.observe import services

        return services.TRACKERS[name](folder.root, key, recipe)

    return service


def _key(folder: RunFolder) -> str:
    """The name by which services know this run, the same each time it goes on."""
    path = folder.root / "tracker.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(path)["key"])
    key = f"{folder.root.resolve().name}-{secrets.token_hex(4)}"
    write_json(path, {"key": key})
    return key
