"""The paper's Table 1 in small: cells declared in recipes/ablation/cells.yaml, filled one by one into docs/ablation.

usage: python bench/ablation.py status
       python bench/ablation.py run TABLE [--until SECONDS] [--only CELL] [--out FOLDER] [--set KEY=VALUE ...]
       python bench/ablation.py table TABLE [--plots FOLDER]

``run`` fills missing cells in their order, each in a process of its own: what is lost with a machine is the cell under
way. Several may run beside each other (one a GPU, by ``CUDA_VISIBLE_DEVICES``): a cell is claimed by a lock. With
``--until`` (seconds since 1970) none begins that would end later. A cell is over when its last evaluation is in
metrics.jsonl: its weights are not kept, so nobody waits for them. A cell that fails is named and left for another call.

``table`` compares what is filled at equal time and at equal samples, as cells.yaml declares.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import yaml

from dapo.config import load_config
from dapo.files import write_atomic
from dapo.observe.metrics import read_metrics
from dapo.progress import PlainListener

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

DECLARED = HERE.parent / "recipes" / "ablation" / "cells.yaml"
RESULTS = HERE.parent / "docs" / "ablation"
STEP = {
    "accuracy": "accuracy",
    "entropy": "entropy",
    "length": "response_length/mean",
    "truncated": "response_length/truncated",
    "drawn": "groups/drawn",
    "kept": "groups/kept",
    "mixed": "groups/mixed",
    "all_right": "groups/share_all_right",
    "all_wrong": "groups/share_all_wrong",
    "clip_low": "clip/low",
    "clip_high": "clip/high",
    "clip_high_probability": "clip/high_probability",
    "kl_proximal": "kl/proximal",
    "mismatch": "mismatch/mean",
    "grad_norm": "grad_norm",
    "updates": "updates",
}
"""What a cell's file keeps of each rollout step, and the metric it comes from."""
EVALUATION = ("accuracy", "accuracy_low", "accuracy_high", "truncated", "no_answer", "lenient", "response_length")
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95%, by degrees of freedom from 1; for more of them the last one, which is a little wide."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run that was declared. ``settings``: what makes the variant of the recipe."""

    table: str
    variant: str
    seed: int
    recipe: Path
    settings: Mapping[str, Any]
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.table}-{self.variant}-seed{self.seed}"


def main(arguments: Sequence[str] | None = None) -> Any:
    """Do what the command line says."""
    options = parse(arguments)
    commands = {"status": status, "run": run, "cell": train, "table": compare}
    return commands[options.command](options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    status_ = commands.add_parser("status", help="which cells are filled")
    run_ = commands.add_parser("run", help="fill missing cells")
    cell_ = commands.add_parser("cell", help="train one cell in this process; what run starts")
    table_ = commands.add_parser("table", help="compare what is filled")
    for one in (run_, cell_, table_):
        one.add_argument("table", help="of cells.yaml, such as gsm8k")
    cell_.add_argument("name")
    run_.add_argument("--until", type=float, default=math.inf, help="no cell begins that would end after this time")
    run_.add_argument("--only", action="append", help="this cell, such as gsm8k-naive-seed1; may be given again")
    run_.add_argument("--commit", help="to record, where the code does not lie in its git repository")
    table_.add_argument("--plots", type=Path, help="folder for the plots (needs dapo[report])")
    for one in (status_, run_, cell_, table_):
        one.add_argument("--declared", type=Path, default=DECLARED, help="file of the cells")
        one.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (docs/ablation)")
    for one in (run_, cell_):
        one.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder for the runs")
        one.add_argument(
            "--set", nargs="+", default=[], metavar="KEY=VALUE", help="where things lie: model.path=FOLDER"
        )
    return parser.parse_args(arguments)


def declared(file: Path, table: str) -> list[Cell]:
    """The cells of a table, in the order in which they are to be run."""
    tables = yaml.safe_load(file.read_text(encoding="utf-8"))
    if table not in tables:
        raise SystemExit(f"error: {file} declares no table {table!r}; there are: {', '.join(tables)}")
    entry, settings, above = tables[table], {}, {}
    for variant, own in entry["variants"].items():
        settings[variant] = {**(above if entry.get("cumulative") else {}), **own}
        above = settings[variant]
    pairs = [line.split() for line in entry["cells"]]
    recipe, limit = file.parent / entry["recipe"], float(entry["limit_s"])
    return [Cell(table, variant, int(seed), recipe, settings[variant], limit) for variant, seed in pairs]


# --- running ----------------------------------------------------------------------------------------------------------


def status(options: argparse.Namespace) -> dict[str, int]:
    """Print which cells are filled; their number for each table."""
    counts = {}
    for table in yaml.safe_load(options.declared.read_text(encoding="utf-8")):
        cells = declared(options.declared, table)
        filled = [cell for cell in cells if result_file(options.results, cell).exists()]
        counts[table] = len(filled)
        print(f"{table}: {len(filled)} of {len(cells)} cells are filled")
        for cell in cells:
            print(f"  {'filled ' if cell in filled else 'missing'} {cell.name}")
    return counts


def result_file(folder: Path, cell: Cell) -> Path:
    """Where a cell's result lies, or will."""
    return folder / f"{cell.name}.json"


def run(options: argparse.Namespace) -> list[str]:
    """Fill missing cells one after the other; the names of those filled."""
    longest, filled = 0.0, []
    options.out.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    for cell in declared(options.declared, options.table):
        if (options.only and cell.name not in options.only) or result_file(options.results, cell).exists():
            continue
        with claimed(options.out / f"{cell.name}.lock") as mine:
            if not mine or result_file(options.results, cell).exists():
                continue
            if time.time() + (longest or cell.limit_s) > options.until:
                say(f"{cell.name}: not begun, there is no time left for it")
                break
            seconds = attempt(cell, options)
            if seconds is not None:
                longest = max(longest, seconds)
                filled.append(cell.name)
    return filled


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether the lock is ours now; it is given back at the end, also by a process that is killed."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def attempt(cell: Cell, options: argparse.Namespace) -> float | None:
    """Run a cell and write its result; the seconds it took, or None if it did not come to its end."""
    folder, began = options.out / cell.name, time.time()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    say(f"{cell.name}: begins")
    places = ["--declared", options.declared, "--out", options.out]
    command = [sys.executable, __file__, "cell", cell.table, cell.name, *places]
    command += ["--set", *options.set] if options.set else []
    with (options.out / f"{cell.name}.log").open("w") as log:
        child = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, start_new_session=True)
        try:
            while child.poll() is None and not done(folder).exists() and time.time() < began + cell.limit_s:
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    seconds = time.time() - began
    if not done(folder).exists():
        say(f"{cell.name}: did not come to its end in {seconds:.0f} s; see {log.name}")
        return None
    for name in ("model-before", "model-after", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    result = {**describe(cell, folder, options), "seconds": round(seconds, 1), **curves(folder)}
    write_atomic(result_file(options.results, cell), [written(rounded(result)) + "\n"])
    last = result["evaluations"]
    say(f"{cell.name}: {last['accuracy'][-1]:.1%} after {last['minutes'][-1]:.2f} minutes, {seconds:.0f} s in all")
    return seconds


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def done(folder: Path) -> Path:
    """The file that says that the last evaluation is in metrics.jsonl."""
    return folder / "done"


def train(options: argparse.Namespace) -> None:
    """Train one cell in this process, which ends when the one that started it does."""
    from rollout_ours import measure_limits

    from dapo.inputs import device_of
    from dapo.launch import run_experiment

    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    cell = next(c for c in declared(options.declared, options.table) if c.name == options.name)
    folder = options.out / cell.name
    own = {**cell.settings, "seed": cell.seed, "run.dir": folder}
    config = load_config(cell.recipe, [*(f"{k}={json.dumps(v, default=str)}" for k, v in own.items()), *options.set])
    limits = measure_limits(device_of(config).type)

    class Ending(PlainListener):
        """Marks the end of the last evaluation."""

        def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
            super().evaluated(name, metrics)
            if name == "after training":
                (folder / "card.json").write_text(json.dumps(asdict(limits)), encoding="utf-8")
                done(folder).touch()

    run_experiment(config, Ending())


def end_with(parent: int) -> None:
    """End this process and those it started once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


# --- results ----------------------------------------------------------------------------------------------------------


def describe(cell: Cell, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a result says of how it came about."""
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    git = environment.get("git") or {}
    return {
        "cell": cell.name,
        "variant": cell.variant,
        "seed": cell.seed,
        "settings": dict(cell.settings),
        "date": time.strftime("%Y-%m-%d"),
        "commit": options.commit or git.get("commit"),
        "card": json.loads((folder / "card.json").read_text(encoding="utf-8")),
        "versions": {"python": environment["python"], **environment["packages"]},
    }


def curves(folder: Path) -> dict[str, Any]:
    """The rollout steps and the evaluations of a run, each as one list a quantity.

    ``minutes`` of rollout steps so far (the first, in which graphs are captured, counts no more than the second);
    ``samples_drawn`` and ``samples_trained`` so far.
    """
    entries = list(read_metrics(folder / "metrics.jsonl"))
    group = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["rollout"]["samples_per_prompt"]
    steps = [entry for entry in entries if entry["step"]]
    seconds = [entry["time/step"] for entry in steps]
    seconds[:1] = [min(seconds[:2])]
    axes = {
        "step": [entry["step"] for entry in steps],
        "minutes": [found / 60 for found in accumulate(seconds)],
        "samples_drawn": [group * found for found in accumulate(entry["groups/drawn"] for entry in steps)],
        "samples_trained": [group * found for found in accumulate(entry["groups/kept"] for entry in steps)],
    }
    evaluated = [entry for entry in entries if entry.get("eval/accuracy") is not None]
    places = [axes["step"].index(entry["step"]) if entry["step"] else None for entry in evaluated]
    at = {axis: [0 if i is None else values[i] for i in places] for axis, values in axes.items()}
    return {
        "steps": axes | {name: [entry.get(key) for entry in steps] for name, key in STEP.items()},
        "evaluations": at | {name: [entry.get(f"eval/{name}") for entry in evaluated] for name in EVALUATION},
    }


def written(value: Any, depth: int = 1) -> str:
    """JSON with one line for each key of the first two levels."""
    if not isinstance(value, Mapping) or depth > 2:
        return json.dumps(value)
    lines = (f"{' ' * depth}{json.dumps(key)}: {written(one, depth + 1)}" for key, one in value.items())
    return "{\n" + ",\n".join(lines) + "\n" + " " * (depth - 1) + "}"


def rounded(value: Any) -> Any:
    """Numbers of five digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


# --- comparing --------------------------------------------------------------------------------------------------------


def read_results(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What is filled of a table, by variant, in the order of cells.yaml."""
    found: dict[str, list[dict[str, Any]]] = {}
    for variant in yaml.safe_load(options.declared.read_text(encoding="utf-8"))[options.table]["variants"]:
        found[variant] = []
    for cell in declared(options.declared, options.table):
        file = result_file(options.results, cell)
        if file.exists():
            found[cell.variant].append(json.loads(file.read_text(encoding="utf-8")))
    return found


AXES = ("minutes", "samples_trained", "samples_drawn")


def reached(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Of each axis the largest value that every filled cell reaches."""
    every = [result for group in results.values() for result in group]
    return {axis: min(result["evaluations"][axis][-1] for result in every) for axis in AXES}


def at(curve: Mapping[str, Sequence[float]], axis: str, value: float, what: str = "accuracy") -> float:
    """What a curve says at a value of an axis, by a straight line between its neighbours; its ends go on level."""
    before, after = 0, len(curve[axis]) - 1
    for i, place in enumerate(curve[axis]):
        if place <= value:
            before = i
        elif i < after:
            after = i
    after = max(before, after)
    width = curve[axis][after] - curve[axis][before]
    share = (value - curve[axis][before]) / width if width > 0 else 0.0
    return curve[what][before] + min(max(share, 0.0), 1.0) * (curve[what][after] - curve[what][before])


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation between seeds, pooled over the variants, and its degrees of freedom."""

    deviation: float
    freedom: int

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> Spread:
        """Of groups of one value for each seed; those of a single seed say nothing.

        Raises:
            SystemExit: there is no group of two or more.
        """
        known = [group for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in known)
        if not freedom:
            raise SystemExit("error: no variant has two seeds yet, so there is nothing to say about noise")
        return cls(math.sqrt(sum((len(group) - 1) * variance(group) for group in known) / freedom), freedom)

    def half(self, *counts: int) -> float:
        """Half of the 95% interval of the mean of so many seeds, or of the difference of two such means."""
        return T_95[min(self.freedom, len(T_95)) - 1] * self.deviation * math.sqrt(sum(1 / count for count in counts))


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table of what is filled, in Markdown; its rows."""
    results = {variant: group for variant, group in read_results(options).items() if group}
    if not results:
        raise SystemExit(f"error: no cell of {options.table} is filled; python bench/ablation.py run {options.table}")
    limits = reached(results)
    values = {
        axis: {v: [at(r["evaluations"], axis, limits[axis]) for r in group] for v, group in results.items()}
        for axis in AXES
    }
    spreads = {axis: Spread.of(values[axis].values()) for axis in AXES}
    print("at", ", ".join(f"{axis} {limit:g}" for axis, limit in limits.items()))
    print(f"| variant | seeds | {' | '.join(AXES)} | entropy | length | cut | kept | clip low | clip high |")
    print("|---" * 11 + "|")
    rows = []
    for variant, group in results.items():
        row: dict[str, Any] = {"variant": variant, "seeds": len(group)}
        for axis in AXES:
            row[axis] = fmean(values[axis][variant]), spreads[axis].half(len(group))
        for name in ("entropy", "length", "truncated", "clip_low", "clip_high"):
            row[name] = fmean(at(r["steps"], "minutes", limits["minutes"], name) for r in group)
        row["mixed"] = fmean(
            sum(r["steps"]["mixed"]) / sum(r["steps"]["drawn"])
            for r in group  # all steps: one alone is noisy
        )
        rows.append(row)
        shares = (f"{100 * row[axis][0]:.1f} ± {100 * row[axis][1]:.1f}%" for axis in AXES)
        print(
            f"| {variant} | {len(group)} | {' | '.join(shares)} | {row['entropy']:.3f} | {row['length']:.0f} "
            f"| {row['truncated']:.1%} | {row['mixed']:.0%} | {row['clip_low']:.2%} | {row['clip_high']:.2%} |"
        )
    for axis in AXES:
        print(
            f"{axis}: deviation between seeds {100 * spreads[axis].deviation:.2f} points ({spreads[axis].freedom} d.f.)"
        )
    if options.plots:
        plot(results, options.plots / f"{options.table}.svg")
    return rows


PANELS = {
    "accuracy, held out, by minutes": ("evaluations", "minutes", "accuracy"),
    "accuracy, held out, by samples trained on": ("evaluations", "samples_trained", "accuracy"),
    "entropy": ("steps", "minutes", "entropy"),
    "response length": ("steps", "minutes", "length"),
    "responses cut": ("steps", "minutes", "truncated"),
    "groups trained on": ("steps", "minutes", "kept"),
    "clipped below": ("steps", "minutes", "clip_low"),
    "clipped above": ("steps", "minutes", "clip_high"),
}


def plot(results: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """The curves of all cells, a colour for each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained")
    panels = figure.subplots(2, 4).flat
    for panel, (title, (part, axis, name)) in zip(panels, PANELS.items(), strict=True):
        for number, (variant, group) in enumerate(results.items()):
            for first, result in zip((True, *[False] * len(group)), group, strict=False):
                label = {"label": variant} if first else {}
                panel.plot(result[part][axis], result[part][name], color=f"C{number}", linewidth=1, **label)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(axis.replace("_", " "), fontsize=8)
    figure.axes[0].legend(fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


if __name__ == "__main__":
    main()
