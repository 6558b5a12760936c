"""TensorBoard: the metrics of a run as event files, each under its registered name (``tensorboard --logdir RUN``)."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes every number of a step as a scalar and puts it on the disk before the next step begins.

    What is not finite is written as it is, which TensorBoard marks. Steps without a number are left out.
    """

    def __init__(self, folder: Path, config: str, keep_until: int | None = None) -> None:
        """Start an event file in ``folder``.

        Args:
            folder: made if missing. Event files of earlier parts of the run stay beside the new one.
            config: the recipe as YAML, shown as text; written by the first part of a run.
            keep_until: on resume, the last step that stays: TensorBoard drops what earlier files say of later steps.
                Below 0: all steps.
        """
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if keep_until is None else keep_until + 1)
        if keep_until is None:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()), 0)  # as code
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See :class:`~dapo.observe.trackers.Tracker`."""
        for name, value in metrics.items():
            number = value.item() if hasattr(value, "item") else value
            if isinstance(number, numbers.Real):
                self._writer.add_scalar(name, float(number), step)
        self._writer.flush()

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """See :class:`~dapo.observe.trackers.Tracker`."""
        lines = "\n".join(f"    {name}: {value}" for name, value in summary.items())
        self._writer.add_text("summary", lines, int(summary.get("steps", 0)))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file. Everything was flushed when logged."""
        self._writer.close()
