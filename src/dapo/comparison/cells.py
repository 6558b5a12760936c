"""The cells of a comparison, one after the other, each in a process of its own: one that dies costs that cell.

Several callers may be at the same comparison, each on a GPU of its own: a cell is claimed by a lock, which its process
holds, too. A cell that is done is left as it is; one that failed, or was under way, goes on from its last checkpoint.

The process (``python -m dapo.comparison.cells``) has its job on standard input. It trains by the recipe until the
budget is over, and leaves a run folder, and beside it the result and the answers of the model that is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from dapo.comparison.folder import Cell, Comparison
from dapo.comparison.recipes import Phases, Variant, limited
from dapo.comparison.table import spent
from dapo.config import Config
from dapo.config.reading import with_values
from dapo.errors import ConfigError, UserError, shortened
from dapo.inference.evaluate import FileResult, evaluate_files
from dapo.inference.found_model import find_model
from dapo.observe.progress import PlainListener, duration
from dapo.observe.run_view import RunView, is_run
from dapo.reward.worker import signal_at_parents_end
from dapo.stages.phases import run_phases
from dapo.util.files import json_line, lock_file, write_atomic, write_json, writing
from dapo.util.shutdown import RESUMABLE, Shutdown, Stopped

_SOURCE = Path(__file__).parents[2]

Job = tuple[Cell, Phases, Config]
"""What the process of a cell is told; secrets are in it. The config is that which measures the model."""


def run_cells(
    root: Path,
    variants: Mapping[str, Variant],
    seeds: Sequence[int],
    judged: Config,
    only: Sequence[str],
    tell: Callable[[str], object],
) -> None:
    """Every cell, seed by seed, so that what is cut off early has all recipes. ``judged``: of :func:`declare`.
    ``only``: names of cells, or of recipes; none: all.
    Raises ConfigError: ``only`` names none; KeyboardInterrupt: the cell under way has written a checkpoint."""
    cells = [Cell(root, name, seed) for seed in seeds for name in variants]
    if unknown := [name for name in only if not any(name in (cell.name, cell.recipe) for cell in cells)]:
        known = ", ".join(cell.name for cell in cells)
        raise ConfigError(f"--only {unknown[0]}: there is no such cell; there are: {known}")
    if judged.rollout.engine not in ("native", "vllm"):  # a server has a model of its own
        judged = with_values(judged, {"rollout.engine": "native"})
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
            failure = _attempt((cell, variants[cell.recipe].phases(cell.folder, cell.seed), judged), lock)
            if failure is not None:
                with writing(root):
                    write_json(cell.file("json"), {"failed": failure})
            rows = list(cell.result.get("rows", {}).values())
            said = f"{cell.result['metric']} {sum(rows) / len(rows):.3f}" if rows else f"failed: {failure}"
            tell(f"{name}: {said} ({duration(time.monotonic() - began)})")


def _attempt(job: Job, lock: IO[str]) -> str | None:
    """Why the cell failed; None: it is done."""
    log = job[0].file("log")
    path = os.pathsep.join(filter(None, [str(_SOURCE), os.environ.get("PYTHONPATH")]))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dapo.comparison.cells"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is told to it once, below
            pass_fds=(lock.fileno(),),
        )
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(pickle.dumps(job))
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
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return shortened((errors or lines or [f"exit code {code}"])[-1], 200)


# --- the process of a cell --------------------------------------------------------------------------------------------


def main() -> None:
    signal_at_parents_end(signal.SIGTERM)
    try:
        run(pickle.load(sys.stdin.buffer), PlainListener())  # from nobody but the process that started this one
    except (Stopped, KeyboardInterrupt):
        sys.exit(RESUMABLE)
    except UserError as error:
        sys.exit(f"error: {error}")


def run(job: Job, listener: PlainListener) -> None:
    """Raises UserError: the cell failed; Stopped or KeyboardInterrupt: told to stop."""
    cell, phases, judged = job
    with Shutdown() as shutdown:
        _train(cell, phases, listener, shutdown)
    folders = [Path(config.run.dir) for config in phases.values()]
    model = find_model(str(folders[-1])).path
    with Shutdown():
        results, _ = evaluate_files(with_values(judged, {"model.path": model}), listener, lambda config, found: None)
    with writing(cell.root):
        write_atomic(cell.file("answers.jsonl"), map(json_line, _answers(results)))
        write_json(cell.file("json"), _result(results))
    for folder in folders:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # many times the size of the weights


def _train(cell: Cell, phases: Phases, listener: PlainListener, shutdown: Shutdown) -> None:
    """Phases before the last one run as they say, and count; the last one has what is left of the budget."""
    *before, last = phases
    folders = {name: Path(config.run.dir) for name, config in phases.items()}
    for folder in folders.values():
        if folder.is_dir() and not is_run(folder):
            shutil.rmtree(folder)  # killed before it was one
    key, amount = Comparison.read(cell.root).budget
    # the last checkpoint of a phase would be dropped at once: with its model written, nobody goes on from it
    train = partial(run_phases, cell.folder, listener=listener, resume=True, shutdown=shutdown, last_checkpoint=False)
    if before:
        train({name: phases[name] for name in before})
    used = spent([RunView.read(folders[name]) for name in before])[key]
    if used >= amount:
        raise UserError(f"the phases before {last} used {used:g} {key} of {amount:g}: nothing is left for {last}")
    train(phases | {last: limited(phases[last], key, amount - used)})


def _answers(results: list[FileResult]) -> list[dict[str, Any]]:
    kept = ("row", "prompt", "response", "gold", "reward", "correct")
    lines = [(one.name, line) for one in results for line in one.evaluation.sample_lines() if line["index"] == 0]
    return [{"file": name, **{key: line[key] for key in kept}} for name, line in lines]


def _result(results: list[FileResult]) -> dict[str, Any]:
    """``rows``: of each row the share that is right, or where the reward does not say what is right, the reward.
    Raises UserError: no row was scored."""
    right = all(one.evaluation.accuracy is not None for one in results)
    rows = [(one.name, row) for one in results for row in one.evaluation.as_json()["rows"] if row["verdicts"]]
    if not rows:
        raise UserError("the model was trained, but none of its held-out answers was scored")
    return {
        "metric": "accuracy" if right else "reward",
        "rows": {f"{n}:{row['row']}": row["correct"] / row["verdicts"] if right else row["reward"] for n, row in rows},
        "unscored": sum(len(one.evaluation.groups) for one in results) - len(rows),
    }


if __name__ == "__main__":
    main()
