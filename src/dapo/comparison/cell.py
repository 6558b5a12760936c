"""The process of one cell: trains by its recipe until the budget is over, and evaluates the model that is left.

Consumes: its job, as JSON, on standard input. Produces: a run folder, and beside it the result and the answers. Killed
anywhere, it goes on from its last checkpoint when it is started again. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.comparison.curves import spent
from dapo.comparison.folder import Cell
from dapo.comparison.recipes import limited
from dapo.config import build_config
from dapo.config.reading import with_values
from dapo.config.stages import build_stage
from dapo.errors import UserError
from dapo.inference.evaluate import FileResult, evaluate_files
from dapo.inference.found_model import find_model
from dapo.observe.progress import PlainListener
from dapo.observe.run_view import RunView, is_run
from dapo.stages.phases import run_phases
from dapo.util.files import json_line, write_atomic, write_json, writing
from dapo.util.shutdown import RESUMABLE, Shutdown, Stopped

_PR_SET_PDEATHSIG = 1


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        run(json.load(sys.stdin), PlainListener())
    except (Stopped, KeyboardInterrupt):
        sys.exit(RESUMABLE)
    except UserError as error:
        sys.exit(f"error: {error}")


def run(job: Mapping[str, Any], listener: PlainListener) -> None:
    """Raises UserError: the cell failed; Stopped or KeyboardInterrupt: told to stop."""
    cell = Cell(Path(job["cell"][0]), *job["cell"][1:])
    configs = {
        name: build_config(tree) if kind == "dapo" else build_stage(kind, tree)
        for name, (kind, tree) in job["phases"].items()
    }
    with Shutdown() as shutdown:
        _train(cell, configs, job["budget"], listener, shutdown)
    model = find_model(str(cell.folder / list(configs)[-1])).path
    judged = with_values(build_config(job["judged"]), {"model.path": model})
    with Shutdown():
        results, _ = evaluate_files(judged, listener, lambda config, found: None)
    with writing(cell.root):
        write_atomic(cell.file("answers.jsonl"), map(json_line, _answers(results)))
        write_json(cell.file("json"), _result(results))
    for name in configs:
        shutil.rmtree(cell.folder / name / "checkpoints", ignore_errors=True)  # many times the size of the weights


def _train(
    cell: Cell, configs: dict[str, Any], budget: tuple[str, float], listener: PlainListener, shutdown: Shutdown
) -> None:
    """Phases before the last one run as they say, and count; the last one has what is left of the budget."""
    for folder in (cell.folder / name for name in configs):
        if folder.is_dir() and not is_run(folder):
            shutil.rmtree(folder)  # killed before it was one
    *before, last = configs
    if before:
        run_phases(cell.folder, {name: configs[name] for name in before}, listener, True, shutdown)
        key, amount = budget
        used = sum(spent(RunView.read(cell.folder / name))[key] for name in before)
        if used >= amount:
            raise UserError(f"the phases before {last} used {used:g} {key} of {amount:g}: nothing is left for {last}")
        configs[last] = limited(configs[last], key, amount - used)
    run_phases(cell.folder, configs, listener, True, shutdown)


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
