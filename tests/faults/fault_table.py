"""``make test-faults ARGS=WORD``: try all faults, or those with WORD in their name, and say what came."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fault_cases import FAULTS, SEED
from fault_harness import Fault, Scene, Verdict, make_scene, try_fault
from rich.console import Console
from rich.table import Table


def try_all(faults: Sequence[Fault], scene: Scene, console: Console, workers: int = 2) -> bool:
    """Try faults, print what came and, as the last line, ``N of N survived``. Returns whether all did."""
    verdicts = []
    with ThreadPoolExecutor(workers) as pool:
        for verdict in pool.map(lambda fault: try_fault(fault, scene), faults):
            verdicts.append(verdict)
            if verdict.lost:
                words = verdict.ended.output.strip()[-600:]
                said = f"LOST: {verdict.fault.name}: {'; '.join(verdict.lost)}\n  its last words: {words}"
            else:
                said = f"survived: {verdict.fault.name}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print(table_of(verdicts))
    console.print(f"DAPO_FAULT_SEED={SEED} draws the same random moments again", highlight=False)
    survived = sum(not verdict.lost for verdict in verdicts)
    console.print(f"{survived} of {len(verdicts)} survived", highlight=False)
    return survived == len(verdicts)


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """One row for each fault: what was declared, what came."""
    table = Table("fault", "exit", "declared", "seconds", "at most", "must be kept", "chance", "")
    for verdict in verdicts:
        fault, ended = verdict.fault, verdict.ended
        code = "none" if ended.code is None else str(ended.code)
        declared, seconds = " or ".join(map(str, fault.exit)), f"{ended.seconds:.1f}"
        end = "LOST" if verdict.lost else "survived"
        table.add_row(fault.name, code, declared, seconds, f"{fault.seconds:g}", fault.kept.value, ended.note, end)
    return table


def main() -> int:
    """Exit code 0 if all survived."""
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    console = Console(width=None if sys.stdout.isatty() else 220)
    with tempfile.TemporaryDirectory(prefix="dapo-faults-") as folder:
        return 0 if try_all(faults, make_scene(Path(folder), fast=True), console) else 1


if __name__ == "__main__":
    sys.exit(main())
