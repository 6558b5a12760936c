"""What is learned in equal time: DAPO with dynamic sampling against TRL's GRPOTrainer on the demo's task.

usage: python bench/cpu_learning.py [--seeds 1 2 3] [--steps 40] [--out runs/cpu-learning]

For each seed the demo makes a world and warms a model up. dapo then trains it for ``--steps`` rollout steps as
``recipes/cpu-demo.yaml`` says; TRL trains the same model for the wall time that this took (evaluation left out), with
loss type ``dapo``, Clip-Higher, the overlong punishment, and the recipe's learning rate and warm-up, prompts, samples
and updates per rollout. Both models are evaluated greedily on the same held-out rows by the same code. The last line is
the mean difference of the accuracies, ours minus theirs, in points.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo.commands.demo.run import make_world
from dapo.config import Config, load_config
from dapo.config.plan import recipe_path
from dapo.observe.progress import QuietListener
from dapo.orchestrator.launch import run_experiment

sys.path.insert(0, str(Path(__file__).parent))
from sides import make_trl


class Watch(QuietListener):
    """Keeps the evaluations, and how long training took without them."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []
        self.length: list[float] = []
        self.seconds = 0.0
        self._started = 0.0

    def started(self, plan: dict[str, Any]) -> None:
        self._started = time.perf_counter()

    def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        self.seconds = time.perf_counter() - self._started - metrics.get("time/evaluation", 0.0)

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        self.accuracy.append(metrics["eval/accuracy"])
        self.length.append(metrics["eval/response_length"])

    def warning(self, text: str) -> None:
        """Not here: the same run without the comparison shows them."""


def main(arguments: list[str] | None = None) -> float:
    """Run all seeds, print, and return the mean difference in points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40, help="rollout steps of dapo, whose time TRL gets too")
    parser.add_argument("--out", type=Path, default=Path("runs/cpu-learning"))
    options = parser.parse_args(arguments)
    table = Table(title="greedy accuracy on held-out expressions after equal time")
    for head in ("seed", "seconds", "before", "dapo", "TRL", "dapo: rollouts", "TRL: rollouts", "length, dapo / TRL"):
        table.add_column(head, justify="right")
    differences = []
    for seed in options.seeds:
        row = compare(seed, options.steps, options.out)
        differences.append(100 * (row["ours"] - row["theirs"]))
        print(json.dumps(row), flush=True)
        table.add_row(
            str(seed),
            f"{row['seconds']:.0f}",
            f"{row['before']:.1%}",
            f"{row['ours']:.1%}",
            f"{row['theirs']:.1%}",
            f"{options.steps}",
            f"{row['their_rollouts']:.1f}",
            f"{row['our_length']:.1f} / {row['their_length']:.1f}",
        )
    Console(width=120).print(table)
    print(f"{fmean(differences):+.1f} points")
    return fmean(differences)


def compare(seed: int, steps: int, out: Path) -> dict[str, Any]:
    """One world, trained by both."""
    world = out / f"world-{seed}"
    config = recipe(seed, steps, world, world / "model", out / f"ours-{seed}")
    if not (world / "model").exists():
        make_world(config, world, QuietListener())
    ours = Watch()
    run_experiment(config, ours)
    trained = out / f"theirs-{seed}" / "model"
    rollouts = train_theirs(config, world, ours.seconds, trained)
    theirs = Watch()  # no training: an evaluation by the same code
    run_experiment(recipe(seed, 0, world, trained, out / f"theirs-{seed}" / "evaluation"), theirs)
    return {
        "seed": seed,
        "seconds": ours.seconds,
        "before": ours.accuracy[0],
        "ours": ours.accuracy[-1],
        "theirs": theirs.accuracy[-1],
        "their_rollouts": rollouts,
        "our_length": ours.length[-1],
        "their_length": theirs.length[-1],
    }


def recipe(seed: int, steps: int, world: Path, model: Path, folder: Path) -> Config:
    """The demo's recipe, for a model in a world."""
    places = {"model.path": model, "data.train": world / "train.jsonl", "evaluation.data": world / "heldout.jsonl"}
    settings = {"seed": seed, "training.steps": steps, "evaluation.every": 0, "run.save_every": 0, "run.dir": folder}
    changes = [f"{key}={value}" for key, value in (places | settings | {"run.save_samples": "false"}).items()]
    return load_config(recipe_path("cpu-demo"), changes)


def train_theirs(config: Config, world: Path, seconds: float, folder: Path) -> float:
    """Train the world's model with TRL for ``seconds``; save it; return the number of rollouts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.rewards import get_soft_overlong_punishment

    rollout, training = config.rollout, config.training
    updates = rollout.prompts_per_step // training.groups_per_update
    tokenizer = AutoTokenizer.from_pretrained(world / "model")

    class Deadline(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = time.perf_counter() - self.started >= seconds

    def exact(prompts: Any, completions: Any, answer: Any, **others: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [1.0 if text.rpartition("#")[2].strip() == gold else -1.0 for text, gold in pairs]

    limit = rollout.max_response_length
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    torch.set_num_threads(1)
    trainer = make_trl(
        AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32),
        tokenizer,
        rows,
        [exact, get_soft_overlong_punishment(limit, config.algorithm.overlong_buffer.len)],
        [Deadline()],
        output_dir=str(folder.parent),
        seed=config.seed,
        bf16=False,
        max_steps=1_000_000,
        num_generations=rollout.samples_per_prompt,
        per_device_train_batch_size=training.groups_per_update * rollout.samples_per_prompt,
        steps_per_generation=updates,
        gradient_accumulation_steps=1,
        max_completion_length=limit,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=training.warmup_steps * updates,
    )
    trainer.train()
    trainer.save_model(str(folder))
    return float(trainer.state.global_step / updates)


if __name__ == "__main__":
    main()
