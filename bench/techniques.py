"""What each of DAPO's techniques does to one training run: the demo's warmed-up model, trained once for each variant.

usage: python bench/techniques.py [--seed 1] [--steps 40] [--out runs/techniques]

Prints a table of outcomes and of mechanisms side by side. One seed of one small task says how the machinery works, not
which technique is better: differences of a few points between variants are noise (run more seeds to see how much).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo.config import load_config
from dapo.demo.run import make_world
from dapo.launch import run_experiment
from dapo.observe.metrics import read_metrics
from dapo.progress import QuietListener
from dapo.recipes import recipe_path

VARIANTS = {
    "DAPO, all four": [],
    "clip-higher off (0.2 / 0.2)": ["algorithm.clip_ratio_high=0.2"],
    "dynamic sampling off": ["algorithm.filter_groups.enable=false"],
    "token-level loss off (GRPO's mean)": ["algorithm.loss_agg_mode=seq-mean-token-mean"],
    "overlong punishment off": ["algorithm.overlong_buffer.enable=false"],
    "GRPO: all four off": [
        "algorithm.clip_ratio_high=0.2",
        "algorithm.filter_groups.enable=false",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        "algorithm.overlong_buffer.enable=false",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/techniques"))
    parser.add_argument("overrides", nargs="*", help="section.key=value for all variants")
    args = parser.parse_args()

    world = args.out / f"world-{args.seed}"
    common = [
        f"seed={args.seed}",
        f"training.steps={args.steps}",
        "evaluation.every=0",
        f"model.path={world / 'model'}",
        f"data.train={world / 'train.jsonl'}",
        f"evaluation.data={world / 'heldout.jsonl'}",
        *args.overrides,
    ]
    listener = QuietListener()
    if not world.exists():
        make_world(load_config(recipe_path("cpu-demo"), common), world, listener)
    rows = []
    for number, (name, changes) in enumerate(VARIANTS.items()):
        folder = args.out / f"seed-{args.seed}-{number}"
        config = load_config(recipe_path("cpu-demo"), [*common, *changes, f"run.dir={folder}"])
        summary = run_experiment(config, listener)
        steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["step"]]  # 0: before training
        rows.append(row(name, summary, steps))
        print(f"{name}: {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}", flush=True)
    show(rows, args)


def row(name: str, summary: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    def mean(metric: str) -> float:
        values = [s[metric] for s in steps if s.get(metric) is not None]
        return fmean(values) if values else float("nan")

    return [
        name,
        f"{summary['accuracy_after']:.1%}",
        f"{summary['response_length_after']:.1f}",
        f"{fmean(min(s['groups/kept'], s['groups/mixed']) for s in steps):.1f}",
        f"{mean('groups/drawn'):.1f}",
        f"{mean('entropy'):.3f}",
        f"{mean('clip/high'):.4f} / {mean('clip/low'):.4f}",
        f"{mean('clip/high_probability'):.3f}",
        f"{summary['seconds_rl']:.0f}",
    ]


def show(rows: list[list[str]], args: argparse.Namespace) -> None:
    table = Table(title=f"seed {args.seed}, {args.steps} steps of 16 x 8 samples, greedy on 1,000 held-out expressions")
    heads = (
        "variant",
        "accuracy",
        "length",
        "mixed groups trained on",
        "drawn",
        "entropy",
        "clip high / low",
        "p(clipped up)",
        "s",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "variant" else "right")
    for cells in rows:
        table.add_row(*cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
