"""What is learned in equal time: DAPO with dynamic sampling against TRL's GRPOTrainer on the demo's task.

usage: python bench/cpu_learning.py [--seeds 1 2 3] [--steps 40] [--out runs/cpu-learning]

For each seed the demo makes a world and warms a model up. dapo then trains it for ``--steps`` rollout steps as
``recipes/cpu-demo.yaml`` says; TRL trains the same model for the wall time that this took (evaluation left out) and to
the end of the rollout under way, with loss type ``dapo`` and what the recipe says. Both are evaluated greedily on the
same held-out rows by the same code. The last line is the mean difference of the accuracies, ours minus theirs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import runner
from dapo.commands.demo.run import make_world
from dapo.config import Config, load_config
from dapo.config.plan import recipe_path
from dapo.observe.progress import QuietListener
from dapo.orchestrator.launch import run_experiment
from gsm8k import read_curve
from runner import number
from work import task_of


def main(arguments: list[str] | None = None) -> float:
    """Run all seeds, print, and return the mean difference in points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40, help="rollout steps of dapo, whose time TRL gets too")
    parser.add_argument("--out", type=Path, default=Path("runs/cpu-learning"))
    parser.set_defaults(peer_path=None, keep=False, patience=None)
    options = parser.parse_args(arguments)
    rows = [compare(seed, options) for seed in options.seeds]
    heads = ("seed", "seconds", "before", "ours", "theirs", "rollouts of TRL", "length, dapo", "length, TRL")
    forms = ("d", ".0f", ".1%", ".1%", ".1%", "d", ".1f", ".1f")
    lines = [[number(value, form) for value, form in zip(row.values(), forms, strict=True)] for row in rows]
    runner.table(f"greedy accuracy on held-out expressions after {options.steps} rollouts' time", heads, lines)
    difference = fmean(100 * (row["ours"] - row["theirs"]) for row in rows)
    print(f"{difference:+.1f} points")
    return difference


def compare(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    out = options.out
    world, trained = out / f"world-{seed}", out / f"theirs-{seed}"
    config = recipe(seed, options.steps, world, world / "model", out / f"ours-{seed}")
    if not (world / "model").exists():
        make_world(config, world, QuietListener())
    before, *_, after = trained_curve(config)
    seconds = 60 * after["minutes"]
    task = replace(task_of(config, world / "train.jsonl"), weight_decay=0.0, threads=1)
    job: dict[str, Any] = {"do": "peers.trl_jobs:learn", "task": asdict(task), "setting": "float32"}
    job |= {"reward": "exact", "heldout": None, "seconds": seconds, "out": str(trained)}
    job["environment"] = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    side = runner.run_side(options, f"trl-{seed}", job)
    if side.error:
        raise SystemExit(1)
    # no training: an evaluation by the same code
    (told,) = trained_curve(recipe(seed, 0, world, trained / "model-after", trained / "evaluation"))
    row = {"seed": seed, "seconds": seconds, "before": before["accuracy"], "ours": after["accuracy"]}
    row |= {"theirs": told["accuracy"], "their_rollouts": side.first("trained")["rollouts"]}
    row |= {"our_length": after["response_length"], "their_length": told["response_length"]}
    print(json.dumps(row), flush=True)
    return row


def trained_curve(config: Config) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    run_experiment(config, QuietListener())
    return list(read_curve(Path(str(config.run.dir)))["points"])


def recipe(seed: int, steps: int, world: Path, model: Path, folder: Path) -> Config:
    places = {"model.path": model, "data.train": world / "train.jsonl", "evaluation.data": world / "heldout.jsonl"}
    settings = {"seed": seed, "training.steps": steps, "evaluation.every": 0, "run.save_every": 0, "run.dir": folder}
    changes = [f"{key}={value}" for key, value in (places | settings | {"run.save_samples": "false"}).items()]
    return load_config(recipe_path("cpu-demo"), changes)


if __name__ == "__main__":
    main()
