"""``dapo.open_run``: what lies in a run folder, as tables. Loads no torch, and pandas only for a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.errors import UserError, install
from dapo.observe.progress import before_and_after
from dapo.observe.run_view import RunView
from dapo.observe.sample_query import steps_asked_for
from dapo.observe.samples import read_samples, samples_path
from dapo.util.terminal import counted

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped, unused-ignore]


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run folder. Everything is read when it is asked for, so that a run under way shows how far it is. The tables
    need pandas; docs/metrics.md and docs/samples.md say what is in them."""

    path: Path

    @property
    def metrics(self) -> DataFrame:
        """One line per rollout step: ``step``, and a column for each metric."""
        return _table(entry for entry in self._view.metrics if entry["step"])

    @property
    def evaluations(self) -> DataFrame:
        """One line per evaluation: ``step`` (0: before training), and the metrics ``eval/...``."""
        return _table(self._view.evaluated)

    def samples(self, step: int | tuple[int, int] | None = None) -> DataFrame:
        """One line per sample: prompt, response, reward and all else that was recorded of it.

        Args:
            step: one, or the first and the last one; by default the last one that has samples.

        Raises UserError: there are no samples of these steps, or a file of them is damaged."""
        span = step if step is None or isinstance(step, tuple) else (step, step)
        if span is not None and not (len(span) == 2 and all(isinstance(one, Integral) for one in span)):
            raise UserError(f"step: expected a number, or the first and the last one, got {step!r}")
        steps = steps_asked_for(self._view, span and (int(span[0]), int(span[1])))
        folder = self._view.folder.samples
        return _table({"step": k, **sample} for k in steps for sample in read_samples(samples_path(folder, k)))

    @property
    def config(self) -> Mapping[str, Any]:
        """The recipe, nested; where a function or rows were passed from Python, it says so."""
        return self._view.recipe

    @property
    def summary(self) -> Mapping[str, Any]:
        """As in summary.json; empty while the run is under way."""
        return self._view.summary

    @property
    def _view(self) -> RunView:
        return RunView.read(self.path)

    def __repr__(self) -> str:
        return f"Run({shown(self.summary, self._view.steps_done, self.path)}; {self._view.why})"


def open_run(path: str | Path) -> Run:
    """The run in a folder, finished, under way or killed: ``.metrics``, ``.evaluations`` and ``.samples(step=...)`` are
    data frames, ``.config`` and ``.summary`` mappings.
    Raises UserError: it is no run folder, or a file in it is damaged."""
    return Run(RunView.read(Path(path).expanduser(), brief=True).folder.root)


def shown(summary: Mapping[str, Any], steps: int, path: Path) -> str:
    """What a run came to, in half a line."""
    changes = [f"{label} {before} -> {after}" for label, before, after in before_and_after(summary)[:1]]
    return ", ".join([*changes, counted(steps, "step"), str(path)])


def _table(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """Raises UserError: pandas is not installed."""
    try:
        return import_module("pandas").DataFrame(list(rows))
    except ImportError:
        raise UserError(f"tables of a run need pandas: {install('data')}") from None
