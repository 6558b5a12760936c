"""The index of a run that trains, brought up to date by a process now and then (``python -m dapo.observe.indexing``).

In a thread of the training process it would take Python's lock from it, which cost a step of the demo some percent.
Consumes: the files of the steps. Produces: ``samples/index/``; why that failed, on standard error.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dapo.observe.index import SampleIndex, has_duckdb

_PAUSE = 60.0  # seconds between two updates: short steps come in many at once, which costs less
_NICE = 10  # the process gives way to the training


class BackgroundIndex:
    """Keeps the index of a run's folder up to date: training never waits for it. ``warn`` is told once if the index
    cannot be written. Does nothing if DuckDB is not installed."""

    def __init__(self, run: Path, warn: Callable[[str], None]) -> None:
        self._run, self._warn = run, warn
        self._begun, self._behind, self._told = time.monotonic(), False, False
        self._process: subprocess.Popen[str] | None = None

    def notify(self) -> None:
        """A step has been written."""
        if not has_duckdb():
            return
        self._behind = True
        if self._process is not None and self._process.poll() is not None:
            self._finish(self._process)
        if self._process is None and time.monotonic() - self._begun >= _PAUSE:
            self._begun, self._process = time.monotonic(), self._start()

    def close(self, patience: float = 10.0) -> None:
        """Bring in what is still missing. A process that is at it is waited for so many seconds."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it goes on by itself
                self._process.wait(patience)
                self._finish(self._process)
        if self._behind:
            try:
                SampleIndex(self._run, threads=1).update()
            except Exception as error:  # what is derived must not end what it is derived from
                self._tell(str(error))

    def _start(self) -> subprocess.Popen[str]:
        # a notebook may have changed it, and have put a Path there, which Python's own imports pass over, too
        path = [place for place in sys.path if place and isinstance(place, str)]
        return subprocess.Popen(
            [sys.executable, "-m", "dapo.observe.indexing", str(self._run.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # Ctrl-C is for the training
        )

    def _finish(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        said = process.communicate()[1].strip()
        if process.returncode:
            self._tell(said.rpartition("\n")[2] or f"its process ended with code {process.returncode}")

    def _tell(self, why: str) -> None:
        if not self._told:
            self._warn(f"the index of samples is behind: {why}")
        self._told = True


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    SampleIndex(Path(sys.argv[1]), threads=1).update()
