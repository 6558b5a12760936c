"""The index of a run that trains, kept up to date by a process of its own (``python -m dapo.observe.indexing RUN``).

In a thread of the training process it would take Python's lock from it, which cost a step of the demo some percent.
Consumes: a line on standard input for each step that was written. Produces: ``samples/index/``; one line on standard
output if that fails. Waits for: the next line. It ends when its standard input does, so it never outlives the training.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dapo.observe.index import SampleIndex, has_duckdb

_PAUSE = 5.0  # seconds between two updates: short steps come in several at once, which costs less
_LONGEST_PAUSE = 600.0  # seconds between two tries where updates fail: each reads again what is missing
_NICE = 10  # it gives way to the training


class BackgroundIndex:
    """Keeps the index of a run's folder up to date: training never waits for it. ``warn`` is told once, from another
    thread, if the index cannot be written. Does nothing if DuckDB is not installed."""

    def __init__(self, run: Path, warn: Callable[[str], None]) -> None:
        self._run, self._warn = run, warn
        self._begun, self._behind = time.monotonic(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None

    def notify(self) -> None:
        """A step has been written. A run of a few seconds has no process: :meth:`close` brings its steps in."""
        if not has_duckdb():
            return
        self._behind = True
        if self._process is None:
            if time.monotonic() - self._begun < _PAUSE:
                return
            self._process = self._start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: close() says so
            self._process.stdin.write(b"\n")

    def close(self, patience: float = 10.0) -> None:
        """Bring in what is still missing, within ``patience`` seconds."""
        if self._process is None:
            if self._behind:
                keep_up(self._run, None, self._warn)
            return
        process, self._process, self._behind = self._process, None, False
        assert process.stdin is not None and self._listener is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it goes on by itself
            if process.wait(patience):
                self._warn(f"the index of samples is behind: its process ended with code {process.returncode}")
            self._listener.join(1.0)

    def _start(self) -> subprocess.Popen[bytes]:
        # a notebook may have changed it, and have put a Path there, which Python's own imports pass over, too
        path = [place for place in sys.path if place and isinstance(place, str)]
        process = subprocess.Popen(
            [sys.executable, "-m", "dapo.observe.indexing", str(self._run.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # Ctrl-C is for the training, which tells it by closing the pipe
        )
        self._listener = threading.Thread(target=self._listen, args=(process,), name="sample-index", daemon=True)
        self._listener.start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._warn(line.decode("utf-8", "replace").rstrip())


def keep_up(run: Path, notices: int | None, tell: Callable[[str], object]) -> None:
    """Update the index when there are notices, but not all the time, and once more when they end.

    ``notices``: file descriptor that something can be read from for each notice; None: they have ended already.
    ``tell`` hears of the first update that failed.
    """
    index, pause, due = SampleIndex(run, threads=1), _PAUSE, 0.0
    told = waiting = False
    ended = notices is None
    while True:
        if notices is not None and not ended:
            patience = max(0.0, due - time.monotonic()) if waiting else None
            if select.select([notices], [], [], patience)[0]:
                waiting, ended = True, not os.read(notices, 4096)
                if not ended:
                    continue
        try:
            index.update()
            pause = _PAUSE
        except Exception as error:  # what is derived must not end what it is derived from
            if not told:
                tell(f"the index of samples is behind, and is tried again after later steps: {error}")
            told, pause = True, min(2 * pause, _LONGEST_PAUSE)
            index = SampleIndex(run, threads=1)  # an error may have left the database unfit for use
        if ended:
            return
        waiting, due = False, time.monotonic() + pause


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    keep_up(Path(sys.argv[1]), sys.stdin.fileno(), lambda text: print(" ".join(text.split()), flush=True))


if __name__ == "__main__":
    main()
