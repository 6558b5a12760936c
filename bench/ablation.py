"""The paper's Table 1 in small: cells declared in recipes/ablation/cells.yaml, run by ``dapo.compare``, filled one by
one into docs/ablation, and compared as that file declares.

usage: python bench/ablation.py run TABLE [--only CELL ...] [--out FOLDER] [--set KEY=VALUE ...]
       python bench/ablation.py table TABLE [--plots FOLDER]

``run`` fills missing cells in their order. Several may run beside each other (one a GPU, by ``CUDA_VISIBLE_DEVICES``).
A cell that fails is named and left for another call. ``dapo report FOLDER`` has what else is known of the runs.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

import dapo
from dapo.config import load_config
from dapo.evaluation import statistics
from dapo.evaluation.statistics import half
from dapo.observe.metrics import read_metrics
from dapo.util.files import read_json, write_atomic

HERE = Path(__file__).parent
DECLARED = HERE.parent / "recipes" / "ablation" / "cells.yaml"
RESULTS = HERE.parent / "docs" / "ablation"
_KEPT = """accuracy=accuracy entropy=entropy length=response_length/mean truncated=response_length/truncated
    drawn=groups/drawn kept=groups/kept mixed=groups/mixed all_right=groups/share_all_right
    all_wrong=groups/share_all_wrong clip_low=clip/low clip_high=clip/high kl_proximal=kl/proximal
    clip_high_probability=clip/high_probability mismatch=mismatch/mean grad_norm=grad_norm updates=updates"""
STEP = dict(pair.split("=") for pair in _KEPT.split())
"""What a cell's file keeps of each rollout step, and the metric it comes from."""
EVALUATION = ("accuracy", "accuracy_low", "accuracy_high", "truncated", "no_answer", "lenient", "response_length")


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

    def file(self, folder: Path) -> Path:
        """Where the result lies, or will."""
        return folder / f"{self.name}.json"


def main(arguments: Sequence[str] | None = None) -> Any:
    options = parse(arguments)
    return {"run": run, "table": compare}[options.command](options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["run", "table"])
    add("table", help="of cells.yaml, such as gsm8k")
    add("--only", nargs="+", metavar="CELL", help="such as gsm8k-naive-seed1")
    add("--commit", help="to record, where the code does not lie in its git repository")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="where things lie, such as model.path=FOLDER")
    add("--plots", type=Path, help="folder for the plots (needs dapo-rl[report])")
    add("--declared", type=Path, default=DECLARED, help="file of the cells")
    add("--results", type=Path, default=RESULTS, help="folder of the results (docs/ablation)")
    add("--out", type=Path, default=Path("runs/ablation"), help="folder of the comparisons")
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


def run(options: argparse.Namespace) -> list[str]:
    """Fill missing cells one after the other; the names of those filled."""
    cells, filled = declared(options.declared, options.table), []
    recipes = {cell.variant: (cell.recipe, dict(cell.settings)) for cell in cells}
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    minutes = load_config(cells[0].recipe, options.set).training.minutes
    options.results.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        file, name = cell.file(options.results), f"{cell.variant}-seed-{cell.seed}"
        if file.exists() or (options.only and cell.name not in options.only):
            continue
        out = options.out / options.table
        found = dapo.compare(recipes, options.set, minutes=minutes, seeds=seeds, out=out, only=[name])
        if any(one.cell.name == name for one in found.done[cell.variant]):
            write_atomic(file, [written(result(cell, out / name, options.commit)) + "\n"])
            filled.append(cell.name)
    return filled


def result(cell: Cell, folder: Path, commit: str | None) -> dict[str, Any]:
    """What is kept of the run in ``folder``."""
    environment = read_json(folder / "environment.json")
    return {
        **{"cell": cell.name, "variant": cell.variant, "seed": cell.seed, "settings": dict(cell.settings)},
        **{"date": time.strftime("%Y-%m-%d"), "commit": commit or (environment["git"] or {}).get("commit")},
        "versions": {"python": environment["python"], **environment["packages"]},
        **curves(folder),
    }


def curves(folder: Path) -> dict[str, Any]:
    """The rollout steps and the evaluations of a run, one list a quantity; minutes and samples are sums so far."""
    entries = list(read_metrics(folder / "metrics.jsonl"))
    group = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["rollout"]["samples_per_prompt"]
    steps = [entry for entry in entries if entry["step"]]
    seconds = [entry["time/step"] for entry in steps]
    seconds[:1] = [min(seconds[:2])]  # in the first one graphs are captured
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


def written(value: Any) -> str:
    """JSON with numbers of five digits and one line for each list."""
    value = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.5g}"))
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(value, indent=1))


AXES = {"minutes": "minute {:.2f}", "samples_trained": "{:,} samples trained on", "samples_drawn": "{:,} drawn"}
LAST = 3  # steps that the mechanisms are the mean of
Results = dict[str, list[dict[str, Any]]]


def read_results(options: argparse.Namespace) -> Results:
    """What is filled of a table: results by variant, in the order of cells.yaml."""
    cells = declared(options.declared, options.table)
    variants = yaml.safe_load(options.declared.read_text(encoding="utf-8"))[options.table]["variants"]
    files = {v: [cell.file(options.results) for cell in cells if cell.variant == v] for v in variants}
    found = {v: [json.loads(f.read_text(encoding="utf-8")) for f in group if f.exists()] for v, group in files.items()}
    if not any(found.values()):
        raise SystemExit(f"error: no cell of {options.table} is filled; python bench/ablation.py run {options.table}")
    return {variant: group for variant, group in found.items() if group}


def noise(groups: Iterable[Sequence[float]]) -> statistics.Noise:
    found = statistics.noise(groups)
    if found is None:
        raise SystemExit("error: no variant has two seeds yet, so there is nothing to say about noise")
    return found


def compare(options: argparse.Namespace) -> list[str]:
    """Print what is filled as tables, in Markdown, and draw it if asked to; the lines."""
    results = read_results(options)
    entry = yaml.safe_load(options.declared.read_text(encoding="utf-8"))[options.table]
    lines = [*accuracies(results, entry.get("cumulative", False)), "", *mechanisms(results)]
    if "cut_below" in entry:
        lines += ["", *first_uncut(results, entry["cut_below"])]
    print("\n".join(lines))
    if options.plots:
        plot(results, options.plots / f"ablation-{options.table}.svg")
    return lines


def accuracies(results: Results, cumulative: bool = True) -> list[str]:
    """Held-out accuracy at equal time and equal samples, and at equal time the differences between variants.

    Only in a cumulative table does a variant differ from the one above it by one technique.
    """
    ends = {axis: min(r["evaluations"][axis][-1] for group in results.values() for r in group) for axis in AXES}
    values = {
        axis: {
            v: [100 * float(np.interp(end, r["evaluations"][axis], r["evaluations"]["accuracy"])) for r in group]
            for v, group in results.items()
        }
        for axis, end in ends.items()
    }
    spread = {axis: noise(values[axis].values()) for axis in AXES}
    heads = " | ".join(text.format(ends[axis]) for axis, text in AXES.items())
    differences = ["minus the one above", "minus the first"] if cumulative else ["minus the first"]
    lines = [f"| variant | seeds | {heads} | {' | '.join(differences)} |", "|---" * (5 + len(differences)) + "|"]
    names = list(results)
    for number, name in enumerate(names):
        count = len(results[name])
        cells = [f"{fmean(values[axis][name]):.1f} ± {half(spread[axis], count):.1f}" for axis in AXES]
        for other in (names[number - 1], names[0])[-len(differences) :] if number else ():
            difference = fmean(values["minutes"][name]) - fmean(values["minutes"][other])
            cells.append(f"{difference:+.1f} ± {half(spread['minutes'], count, len(results[other])):.1f}")
        lines.append(f"| {name} | {count} | {' | '.join(cells + [''] * len(differences) * (not number))} |")
    return lines


def uncut(result: Mapping[str, Any], below: float) -> int | None:
    """The first evaluation with less than that share of responses cut, after one with no less; None: there is none."""
    shares = result["evaluations"]["truncated"]
    rose = next((i for i, share in enumerate(shares) if share >= below), len(shares))
    return next((i for i, share in enumerate(shares) if i > rose and share < below), None)


def first_uncut(results: Results, below: float) -> list[str]:
    """When the cells that get there have that first evaluation: step and minute, and how many do not get there."""
    places = {v: [(r["evaluations"], uncut(r, below)) for r in group] for v, group in results.items()}
    values = {
        axis: {v: [curves[axis][i] for curves, i in found if i is not None] for v, found in places.items()}
        for axis in ("step", "minutes")
    }
    spread = {axis: noise(groups.values()) for axis, groups in values.items()}
    lines = [
        f"| variant, first evaluation with under {below:.0%} cut | cells | step | minus the first | minute "
        "| minus the first |",
        "|---" * 6 + "|",
    ]
    first = next(iter(results))
    for name, group in results.items():
        cells = []
        for (axis, groups), digits in zip(values.items(), (0, 2), strict=True):
            own, other = groups[name], groups[first]
            cells.append(f"{fmean(own):.{digits}f} ± {half(spread[axis], len(own)):.{digits}f}" if own else "")
            cells.append(
                f"{fmean(own) - fmean(other):+.{digits}f} ± {half(spread[axis], len(own), len(other)):.{digits}f}"
                if name != first and own and other
                else ""
            )
        lines.append(f"| {name} | {len(values['step'][name])} of {len(group)} | {' | '.join(cells)} |")
    return lines


def ends(values: Sequence[float | None]) -> list[float]:
    """The last steps' values; a step in which nothing was learned has no entropy and no share clipped."""
    return [value for value in values if value is not None][-LAST:]


def mechanisms(results: Results) -> list[str]:
    """What the last steps were like, as means over the seeds."""
    lines = [
        f"| variant, last {LAST} steps | steps | s a step | entropy | length | cut | groups mixed / drawn | all wrong "
        "| clipped below | above | held-out cut |",
        "|---" * 11 + "|",
    ]
    for name, group in results.items():
        names = ("entropy", "length", "truncated", "mixed", "drawn", "all_wrong", "clip_low", "clip_high")
        last = {key: fmean(fmean(ends(r["steps"][key])) for r in group) for key in names}
        seconds = fmean(60 * r["steps"]["minutes"][-1] / len(r["steps"]["step"]) for r in group)
        steps = fmean(len(r["steps"]["step"]) for r in group)
        cut = fmean(r["evaluations"]["truncated"][-1] for r in group)
        lines.append(
            f"| {name} | {steps:.1f} | {seconds:.1f} | {last['entropy']:.3f} | {last['length']:.0f} "
            f"| {last['truncated']:.1%} | {last['mixed']:.0f} / {last['drawn']:.0f} | {last['all_wrong']:.0%} "
            f"| {last['clip_low']:.2%} | {last['clip_high']:.2%} | {cut:.1%} |"
        )
    return lines


def plot(results: Results, file: Path) -> None:
    """The curves as means over the seeds of a variant, as far as all of them go; a colour for each variant."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 11), layout="constrained")
    panels = [("evaluations", axis, "accuracy") for axis in ("minutes", "samples_trained")]
    names = ("entropy", "length", "truncated", "mixed", "all_right", "clip_low", "clip_high")
    panels += [("steps", "minutes", name) for name in names]
    for panel, (part, axis, name) in zip(figure.subplots(3, 3).flat, panels, strict=True):
        for variant, group in results.items():
            pairs = [zip(r[part][axis], r[part][name], strict=True) for r in group]
            curves = [tuple(zip(*((x, y) for x, y in pair if y is not None), strict=True)) for pair in pairs]
            shared = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 60)
            panel.plot(shared, np.mean([np.interp(shared, *curve) for curve in curves], 0), linewidth=1, label=variant)
        panel.set_title(f"{'held-out ' if part == 'evaluations' else ''}{name.replace('_', ' ')}", fontsize=10)
        panel.set_xlabel(axis.replace("_", " "), fontsize=8)
    figure.axes[0].legend(fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dapo", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(drawn := io.StringIO(), format="svg", metadata={"Date": None})
    lines = re.sub(r' d="[^"]*"', lambda path: " " + " ".join(path[0].split()), drawn.getvalue())  # one for a path
    file.write_text(re.sub(r"([ML] -?\d+\.\d)\d+ (-?\d+\.\d)\d+", r"\1 \2", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
