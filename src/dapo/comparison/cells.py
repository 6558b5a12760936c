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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dapo.comparison.folder import Cell, Comparison
from dapo.comparison.recipes import Variant, kind_of, limited
from dapo.config import Config
from dapo.config.reading import with_values
from dapo.errors import ConfigError, shortened
from dapo.observe.progress import duration
from dapo.util.files import lock_file, write_json, writing
from dapo.util.shutdown import RESUMABLE

_SOURCE = Path(__file__).parents[2]

Tell = Callable[[str], object]


def run_cells(
    root: Path, variants: Mapping[str, Variant], seeds: Sequence[int], judged: Config, only: Sequence[str], tell: Tell
) -> None:
    """Every cell, seed by seed, so that what is cut off early has all recipes. ``judged``: of :func:`declare`.
    ``only``: names of cells, or of recipes; none: all.
    Raises ConfigError: ``only`` names none; KeyboardInterrupt: the cell under way has written a checkpoint."""
    cells = [Cell(root, name, seed) for seed in seeds for name in variants]
    if unknown := [name for name in only if not any(name in (cell.name, cell.recipe) for cell in cells)]:
        known = ", ".join(cell.name for cell in cells)
        raise ConfigError(f"--only {unknown[0]}: there is no such cell; there are: {known}")
    for number, cell in enumerate(cells, start=1):
        if only and not {cell.name, cell.recipe} & set(only):
            continue
        name = f"{cell.name} ({number} of {len(cells)})"
        with (root / f".{cell.name}.lock").open("w") as lock:
            try:
                lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"{name}: another process is at it")
                continue
            if "rows" in cell.result:
                tell(f"{name}: done before")
                continue
            tell(f"{name}: {'goes on' if cell.folder.exists() else 'begins'}; {cell.file('log')} says how far it is")
            began = time.monotonic()
            failure = _attempt(cell, _job(cell, variants[cell.recipe], judged), lock)
            if failure is not None:
                with writing(root):
                    write_json(cell.file("json"), {"failed": failure})
            said = _value(cell) if failure is None else f"failed: {failure}"
            tell(f"{name}: {said} ({duration(time.monotonic() - began)})")


def _job(cell: Cell, variant: Variant, judged: Config) -> dict[str, Any]:
    """What the process of a cell is told; secrets are in it."""
    phases = variant.phases(cell.folder, cell.seed)
    key, amount = budget = Comparison.read(cell.root).budget
    last = list(phases)[-1]
    phases[last] = limited(phases[last], key, amount)
    if judged.rollout.engine not in ("native", "vllm"):  # a server has a model of its own
        judged = with_values(judged, {"rollout.engine": "native"})
    trees = {name: [kind_of(config), config.model_dump(mode="json")] for name, config in phases.items()}
    place = [str(cell.root), cell.recipe, cell.seed]
    return {"cell": place, "phases": trees, "budget": budget, "judged": judged.model_dump(mode="json")}


def _value(cell: Cell) -> str:
    rows = list(cell.result["rows"].values())
    return f"{cell.result['metric']} {sum(rows) / len(rows):.3f}"


def _attempt(cell: Cell, job: Mapping[str, Any], lock: IO[str]) -> str | None:
    """Why the cell failed; None: it is done."""
    log = cell.file("log")
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
            pipe.write(json.dumps(job).encode())
        process.wait()
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
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return shortened((errors or lines or [f"exit code {code}"])[-1], 200)
