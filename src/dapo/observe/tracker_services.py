"""TensorBoard, Weights & Biases, MLflow and trackio, each as a :class:`~dapo.observe.tracker.Tracker`.

Consumes: the recipe without its secrets, metrics, the summary. Produces: event files; or a run of the service, under
``key``, which goes on if there is one. Nothing leaves the machine unless the service's environment variables say so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.config import flat
from dapo.observe.tracker import Tracker, numbers_of
from dapo.util.terminal import visible

PROJECT = "dapo"


class TensorBoardTracker:
    """TensorBoard (``tensorboard --logdir RUN``): event files, every number of a step as a scalar, on the disk before
    the next step begins.

    What is not finite is written as it is, which TensorBoard marks. Steps without a number are left out.

    Args:
        folder: made if missing. Event files of earlier parts of the run stay beside the new one.
        config: the recipe as YAML, shown as text; written by the first part of a run.
        keep_until: on resume, the last step that stays: TensorBoard drops what earlier files say of later steps.
            Below 0: all steps.
    """

    def __init__(self, folder: Path, config: str, keep_until: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=None if keep_until is None else keep_until + 1)
        if keep_until is None:
            self._add_text("config", config.splitlines(), 0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers_of(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self._add_text("summary", [f"{name}: {value}" for name, value in summary.items()], int(summary.get("steps", 0)))

    def _add_text(self, name: str, lines: Sequence[str], step: int) -> None:
        code = "\n".join(f"    {visible(line)}" for line in lines)
        self._writer.add_text(name, code, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _TrackerOfARun:
    _run: Any

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(numbers_of(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_TrackerOfARun):
    """Weights & Biases: into the run's folder ``wandb``, offline unless WANDB_MODE says otherwise; `wandb sync
    RUN/wandb/offline-*` sends it."""

    def __init__(self, folder: Path, key: str, recipe: Mapping[str, Any]) -> None:
        import wandb

        # neither the terminal's text nor the machine is recorded: the one is not metrics, the other is resources.jsonl
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb refuses what it does not know
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=key,
            name=os.environ.get("WANDB_NAME", key),
            dir=str(folder),
            mode=mode,
            resume="allow",
            config=dict(recipe),
            settings=quiet,
            allow_val_change=True,
        )

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in flat(summary)})


class MlflowTracker:
    """MLflow: into ``mlflow.db`` in the run folder, or where MLFLOW_TRACKING_URI says. Each key of the recipe becomes a
    parameter when the run begins."""

    def __init__(self, folder: Path, key: str, recipe: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it tells of each table that it makes
        self._metric = Metric
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client: Any = MlflowClient(store)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        there = self._client.get_experiment_by_name(name)
        experiment = str(there.experiment_id if there else self._client.create_experiment(name))
        known = self._client.search_runs([experiment], f"tags.`dapo.run` = '{key}'", max_results=1)
        if known:
            self._id: str = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, tags={"dapo.run": key}, run_name=key).info.run_id
        params = [Param(_name(name), str(value)[:500]) for name, value in flat(recipe)]
        for first in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self._id, params=params[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = int(1000 * time.time())
        batch = [self._metric(_name(name), value, now, step) for name, value in numbers_of(metrics).items()]
        self._client.log_batch(self._id, metrics=batch)

    def summarise(self, summary: Mapping[str, Any]) -> None:
        for name, value in flat(summary):
            self._client.set_tag(self._id, _name(f"summary.{name}"), str(value))

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioTracker(_TrackerOfARun):
    """trackio: into its local store, see TRACKIO_DIR, and nothing into the run folder; `trackio show` shows it."""

    def __init__(self, folder: Path, key: str, recipe: Mapping[str, Any]) -> None:
        import trackio
        import trackio.run
        import trackio.utils

        for module in (trackio, trackio.run, trackio.utils):  # there is no setting for it, and --quiet means quiet
            module.print = lambda *text, **options: None
        self._markdown = trackio.Markdown
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=key,
            resume="allow",
            config=dict(recipe),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def summarise(self, summary: Mapping[str, Any]) -> None:
        lines = "\n".join(f"- {name}: {value}" for name, value in flat(summary))
        self._run.log({"summary": self._markdown(lines)}, step=int(summary.get("steps", 0)))


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""By the names that ``run.trackers`` knows; each takes the run folder, the key of the run and the recipe without its
secrets."""


def _name(name: str) -> str:
    """As MLflow takes it: letters, digits and ``_-. /:``."""
    kept = name.replace("@", "_at_")
    return "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in kept)
