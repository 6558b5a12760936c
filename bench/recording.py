"""What recording costs: the demo's steps with everything recorded and with nothing, in turn.

usage: python bench/recording.py [--steps 20] [--rounds 3] [--seed 1] [--out runs/recording]

Everything: samples of every group with their tokens, resources every second (five times as often as by default),
TensorBoard and the Prometheus endpoint. Nothing: metrics.jsonl alone. Both are the same deterministic run from the
demo's warmed-up model, so step k has the same work on both sides; they take turns. Compared is the wall time of a step
without evaluations: of each step the median over the rounds, of these the mean (the first two steps left out).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dapo.commands.demo.run import make_world
from dapo.config import load_config
from dapo.config.plan import recipe_path
from dapo.observe.metrics import read_metrics
from dapo.observe.progress import QuietListener
from dapo.orchestrator.launch import run_experiment
from runner import alternate

SIDES = {
    "on": ["run.save_samples=true", "run.resources_every_s=1", "run.trackers=[tensorboard]"],
    "off": ["run.save_samples=false", "run.resources_every_s=0"],
}
FIRST = 2
"""Steps left out: what is imported and warmed up on the way."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print, and write and return what was found (``recording.json``)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=9464, help="of the Prometheus endpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/recording"))
    options = parser.parse_args(arguments)
    if options.steps <= FIRST:
        parser.error(f"--steps {options.steps}: the first {FIRST} are left out")
    world = options.out / f"world-{options.seed}"
    if not world.exists():
        make_world(load_config(recipe_path("cpu-demo"), settings(options)), world, QuietListener())
    rounds = alternate({name: partial(step_times, options, name) for name in SIDES}, options.rounds)
    times = {name: [side["times"] for side in of] for name, of in rounds.items()}
    found = compared(times)
    print(f"a step takes {found['off']:.4f} s without and {found['on']:.4f} s with recording: {found['cost']:+.2%}")
    (options.out / "recording.json").write_text(json.dumps(found | {"times": times}, indent=1), encoding="utf-8")
    return found


def settings(options: argparse.Namespace) -> list[str]:
    world = options.out / f"world-{options.seed}"
    places = {"model.path": "model", "data.train": "train.jsonl", "evaluation.data": "heldout.jsonl"}
    keys = ["evaluation.every=0", "runtime.deterministic=true", "run.if_exists=rename", "run.save_every=0"]
    sizes = [f"seed={options.seed}", f"training.steps={options.steps}"]
    return [*sizes, *keys, *(f"{key}={world / name}" for key, name in places.items())]


def step_times(options: argparse.Namespace, side: str, number: int) -> dict[str, Any]:
    """Seconds of each step that counts."""
    port = [f"run.prometheus_port={options.port}"] if side == "on" else []
    own = [*SIDES[side], *port, f"run.dir={options.out / f'{side}-{number}'}"]
    config = load_config(recipe_path("cpu-demo"), [*settings(options), *own])
    run_experiment(config, QuietListener())
    steps = [entry for entry in read_metrics(Path(str(config.run.dir)) / "metrics.jsonl") if entry["step"] > FIRST]
    times = [entry["time/wall"] - entry.get("time/evaluation", 0.0) for entry in steps]
    print(f"round {number + 1}, recording {side}: {sum(times):.2f} s", flush=True)
    return {"times": times}


def compared(times: dict[str, list[list[float]]]) -> dict[str, float]:
    """Seconds of a step on both sides, and the share by which recording makes it longer."""
    usual = {side: [median(steps) for steps in zip(*rounds, strict=True)] for side, rounds in times.items()}
    found = {side: fmean(steps) for side, steps in usual.items()}
    return found | {"cost": found["on"] / found["off"] - 1}


if __name__ == "__main__":
    main()
