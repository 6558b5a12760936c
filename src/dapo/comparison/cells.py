"""The cells of a comparison, one after the other, each in a process of its own: one that dies costs that cell.

Several callers may be at the same comparison, each on a GPU of its own: a cell is claimed by a lock, which its process
holds, too. A cell that is done is left as it is; one that failed, or was under way, goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dapo.comparison.folder import Cell, Comparison
from dapo.errors import ConfigError, shortened
from dapo.observe.progress import duration
from dapo.util.files import lock_file, write_json, writing
from dapo.util.shutdown import RESUMABLE

_LOOK_S = 0.2
_SOURCE = Path(__file__).parents[2]

Tell = Callable[[str], object]


def run_cells(comparison: Comparison, only: Sequence[str], tell: Tell, working: Tell = lambda text: None) -> list[str]:
    """The names of those that were done now. ``only``: names of cells, or of recipes; none: all. ``working`` hears how
    far the one under way is.
    Raises ConfigError: ``only`` names none; KeyboardInterrupt: the cell under way has written a checkpoint."""
    cells = [cell for cell in comparison.cells if not only or cell.name in only or cell.variant in only]
    if unknown := [name for name in only if name not in {n for cell in cells for n in (cell.name, cell.variant)}]:
        known = ", ".join(cell.name for cell in comparison.cells)
        raise ConfigError(f"--only {unknown[0]}: there is no such cell; there are: {known}")
    done = []
    for number, cell in enumerate(cells, start=1):
        name = f"{cell.name} ({number} of {len(cells)})"
        with (comparison.root / f".{cell.name}.lock").open("w") as lock:
            try:
                lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"{name}: another process is at it")
                continue
            if "rows" in cell.result:
                tell(f"{name}: done before")
                continue
            tell(f"{name}: goes on" if cell.folder.exists() else name)
            began = time.monotonic()
            failure = _attempt(comparison, cell, lock, lambda text, name=name: working(f"{name}: {text}"))  # type: ignore[misc]
            took = duration(time.monotonic() - began)
            if failure is None:
                tell(f"{name}: done in {took}, {_value(cell)}")
                done.append(cell.name)
                continue
            with writing(comparison.root):
                write_json(cell.file("json"), {"variant": cell.variant, "seed": cell.seed, "failed": failure})
            tell(f"{name}: failed after {took}: {failure} (all it said: {cell.file('log')})")
    return done


def _value(cell: Cell) -> str:
    rows = list(cell.result["rows"].values())
    return f"{cell.result['metric']} {sum(rows) / len(rows):.3f}" if rows else "no row was scored"


def _attempt(comparison: Comparison, cell: Cell, lock: IO[str], working: Tell) -> str | None:
    """Why the cell failed; None: it is done."""
    job, log = json.dumps(comparison.job(cell)), cell.file("log")
    path = os.pathsep.join(filter(None, [str(_SOURCE), os.environ.get("PYTHONPATH")]))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dapo.comparison.cell"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is told to it once, below
            pass_fds=(lock.fileno(),),
        )
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(job.encode())
        while process.poll() is None:
            time.sleep(_LOOK_S)
            working(_last_line(log))
    finally:  # it writes a checkpoint, within run.stop_within_s
        if process.poll() is None:
            process.terminate()
            process.wait()
    code = process.returncode
    if code == 0:
        return None
    if code == RESUMABLE:
        return "it was told to stop, and can go on"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return _last_line(log).removeprefix("error: ") or f"exit code {code}"


def _last_line(log: Path) -> str:
    """The last error in it, or its last line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors: list[Any] = [line for line in lines if line.startswith("error: ")]
    return shortened((errors or lines or [""])[-1], 200)
