"""Trackers: places beside metrics.jsonl that the metrics of a run go to, such as TensorBoard.

Consumes: what goes into metrics.jsonl, step by step, under the same registered names. A tracker may not be the only
place that holds a number.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dapo.config import Config
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.run_folder import RunFolder


class Tracker(Protocol):
    """Keeps the metrics of one run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a rollout step (0: the evaluation before training). On return they survive a kill.

        Raises:
            UserError: they cannot be kept.
        """
        ...

    def close(self) -> None:
        """No more will come."""
        ...


def check_trackers(config: Config) -> None:
    """See that what the trackers need is installed; costs nothing.

    Raises:
        ConfigError: a package is missing.
    """
    if config.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "run.tensorboard: needs the package tensorboard, which is not installed: pip install 'dapo[tensorboard]', "
            "or run.tensorboard=false"
        )


def make_trackers(config: Config, folder: RunFolder, keep_until: int | None = None) -> list[Tracker]:
    """The trackers that ``config`` asks for.

    Args:
        config: the recipe of the run.
        folder: where its files lie.
        keep_until: on resume, the last step to keep: what was kept of later steps is no longer shown.

    Raises:
        ConfigError: a package is missing.
    """
    check_trackers(config)
    if not config.run.tensorboard:
        return []
    from dapo.observe.tensorboard import TensorBoardTracker
    from dapo.run_folder import config_yaml

    return [TensorBoardTracker(folder.tensorboard, config_yaml(config), keep_until)]
