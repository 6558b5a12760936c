"""TensorBoard: the metrics of a run as event files, each under its registered name (``tensorboard --logdir RUN``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard import summary as summaries

from dapo.observe.trackers import numbers_of
from dapo.util.terminal import visible


class TensorBoardTracker:
    """Writes every number of a step as a scalar and puts it on the disk before the next step begins.

    What is not finite is written as it is, which TensorBoard marks. Steps without a number are left out.

    Args:
        folder: made if missing. Event files of earlier parts of the run stay beside the new one.
        config: the recipe as YAML, shown as text; written by the first part of a run.
        keep_until: on resume, the last step that stays: TensorBoard drops what earlier files say of later steps.
            Below 0: all steps.
    """

    def __init__(self, folder: Path, config: str, keep_until: int | None = None) -> None:
        self._writer: Any = FileWriter(str(folder))
        if keep_until is None:
            self._add_text("config", config.splitlines(), 0)
        else:
            self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), keep_until + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers_of(metrics).items()]
        if values:  # in one event: each in its own takes several times as long
            self._writer.add_summary(Summary(value=values), step)
        self._writer.flush()

    def summarise(self, summary: Mapping[str, Any]) -> None:
        self._add_text("summary", [f"{name}: {value}" for name, value in summary.items()], int(summary.get("steps", 0)))

    def _add_text(self, name: str, lines: Sequence[str], step: int) -> None:
        """Lines as a block of code."""
        make_text: Any = summaries.text
        self._writer.add_summary(make_text(name, "\n".join(f"    {visible(line)}" for line in lines)), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file. Everything was flushed when logged."""
        self._writer.close()
