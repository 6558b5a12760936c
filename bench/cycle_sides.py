"""The sides of ``bench/cycle.py``: a process that runs some DAPO cycles and reports JSON lines.

Each cycle is a rollout of ``prompts x samples`` responses, their rewards, ``updates`` optimizer steps on them and the
hand-over of the weights. Dynamic sampling is off on both sides, so both train on every sample. Cycles are timed from
the end of one to the end of the next; the first ``warmup`` ones are reported but do not count.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gsm8k import read_rows
from rollout_work import INSTRUCTION, Report, drawn_lengths
from sides import mark, timed, verdict
from trl_side import REWARD_WORKERS, MathReward, Task, conversation, make_trainer, named, punishment

PHASES = ("rollout", "prepare", "update", "sync")
"""Of our cycle; with the rest they add up to it."""


def main(path: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    job["task"] = Task(**job["task"])
    {"ours": ours, "trl": trl}[job["side"]](job, Report(job["report"]))


def rows_of(job: dict[str, Any]) -> list[dict[str, str]]:
    """Rows for all cycles, each used once as far as there are enough, the same for both sides.

    Without a file they are made up: as many as are needed, for a model with random weights.
    """
    count = job["task"].prompts * (job["warmup"] + job["cycles"])
    if job["rows"] is None:
        return [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(count)]
    rows = read_rows(Path(job["rows"]))
    random.Random(0).shuffle(rows)
    return (rows * -(-count // len(rows)))[:count]


# --- ours -------------------------------------------------------------------------------------------------------------


def settings_of(job: dict[str, Any]) -> dict[str, Any]:
    """The recipe of our side, as dotted keys."""
    task: Task = job["task"]
    return {
        "seed": task.seed,
        "model.path": task.model,
        "model.compute_dtype": "bfloat16" if job["device"] == "cuda" else "float32",
        "data.template": "chat" if job["rows"] else "plain",
        "data.instruction": INSTRUCTION if job["rows"] else "",
        "data.shuffle": False,
        "data.max_prompt_length": task.longest_prompt,
        "rollout.prompts_per_step": task.prompts,
        "rollout.samples_per_prompt": task.samples,
        "rollout.max_response_length": task.limit,
        "rollout.max_concurrent_samples": job["concurrent"],
        "rollout.temperature": task.temperature,
        "reward.workers": REWARD_WORKERS,
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_buffer.len": task.overlong,
        "training.steps": job["warmup"] + job["cycles"],
        "training.groups_per_update": task.prompts // task.updates,
        "training.learning_rate": task.learning_rate,
        "training.weight_decay": task.weight_decay,
        "training.warmup_steps": task.warmup_rollouts,
        "training.tokens_per_micro_batch": job["micro_tokens"],
        "runtime.device": job["device"],
        "run.save_samples": False,
        "run.save_every": 0,
    }


def ours(job: dict[str, Any], report: Report) -> None:
    """A run of the ordinary loop, by its own metrics and the clock between two steps."""
    from dapo.config import build_config, nested
    from dapo.observe.progress import QuietListener
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.orchestrator.launch import run_experiment

    random_weights = job["rows"] is None
    last = [mark()]

    class Watch(QuietListener):
        def started(self, plan: dict[str, Any]) -> None:
            last.append(mark())

        def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
            last.append(mark())
            report.say("cycle", **our_cycle(last[-1].clock - last[-2].clock, metrics))

        def warning(self, text: str) -> None:
            report.say("warning", text=text)

    def reward(prompt: str, response: str, answer: str) -> bool:
        return verdict(response)

    model = tokenizer = None
    if random_weights:
        model, tokenizer = random_model(job)
        give_lengths(job["task"])
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(nested(settings_of(job) | job["set"] | {"run.dir": f"{folder}/run"}), "benchmark")
        inputs = RunOverrides(
            model=model, tokenizer=tokenizer, rows=rows_of(job), reward=reward if random_weights else None
        )
        run_experiment(config, Watch(), inputs)
    report.say("memory", bytes=peak_bytes())


def our_cycle(seconds: float, metrics: dict[str, Any]) -> dict[str, Any]:
    """A cycle from the metrics of its step; ``inside``: phases that are part of others, as far as there are any."""
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    phases = {name: times.get(name, 0.0) for name in PHASES}
    phases["rollout"] += times.get("reward_wait", 0.0)
    outer = (*PHASES, "step", "evaluation", "elapsed", "training", "wall", "rest")
    return {
        "seconds": seconds,
        "phases": phases | {"rest": seconds - sum(phases.values())},
        "inside": {name: value for name, value in times.items() if name not in outer},
        "generated": round(metrics["tokens/generated"]),
        "trained": round(metrics["tokens/loss"]),
        "updates": round(metrics["updates"]),
    }


def random_model(job: dict[str, Any]) -> tuple[Any, Any]:
    """A model of the shape in the task's folder that nothing stops, and a tokenizer of a few signs."""
    from rollout_ours import load

    from dapo.commands.demo.task import make_tokenizer

    weights = job.get("weights", "float32")
    model, tokenizer = load(job["task"].model, True, job["device"], weights), make_tokenizer()
    model.requires_grad_(True)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


def give_lengths(task: Task) -> None:
    """Have each group of a rollout sampled up to the length of a real response, a different one for each."""
    import dapo.orchestrator.inputs
    from dapo.rollout.native.engine import NativeEngine

    lengths = [min(length, task.limit) for _, length in drawn_lengths(task.prompts)]

    class Measured(NativeEngine):
        def generate(self, requests: Any) -> Any:
            return super().generate(
                [replace(r, sampling=replace(r.sampling, max_tokens=lengths[r.id % len(lengths)])) for r in requests]
            )

    dapo.orchestrator.inputs.NativeEngine = Measured  # type: ignore[misc]


def peak_bytes() -> int:
    """Most device memory that tensors took in this process; 0 without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


# --- theirs -----------------------------------------------------------------------------------------------------------


def trl(job: dict[str, Any], report: Report) -> None:
    """``GRPOTrainer.train``; generation, weights, rewards, preparation are timed inside, updates are what is left."""
    import torch
    from transformers import TrainerCallback

    task: Task = job["task"]
    seconds: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {"generated": [], "trained": []}
    reward = MathReward()

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.last = mark().clock

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % task.updates:
                return
            torch.cuda.synchronize()
            now = mark().clock
            cycle = their_cycle(now - self.last, {k: sum(v) for k, v in seconds.items()})
            report.say("cycle", **cycle, **{name: sum(v) for name, v in counts.items()}, updates=task.updates)
            self.last = now
            for values in (*seconds.values(), *counts.values()):
                values.clear()

    steps = task.updates * (job["warmup"] + job["cycles"])
    rows = [conversation(row) for row in rows_of(job)]
    with tempfile.TemporaryDirectory() as folder:
        rewards = [reward, punishment(task)]
        setting = named(job["setting"])
        trainer = make_trainer(task, setting, rows, rewards, [Watch()], steps, Path(folder))
        nothing = lambda out: None  # noqa: E731
        generated, trained = counts["generated"].append, counts["trained"].append
        # what generates also fetches the weights, first of all
        seconds["generate"] = timed(trainer, "_generate_single_turn", lambda out: generated(sum(map(len, out[0]))))
        seconds["sync"] = timed(trainer.vllm_generation, "sync_weights", nothing)
        seconds["reward"] = timed(trainer, "_calculate_rewards", nothing)
        seconds["whole"] = timed(
            trainer, "_generate_and_score_completions", lambda out: trained(int(out["completion_mask"].sum()))
        )
        report.say("setting", engine=setting.engine, trainer=setting.trainer, task=asdict(task))
        trainer.train()
    reward.close()
    report.say("memory", bytes=peak_bytes())


def their_cycle(seconds: float, found: dict[str, float]) -> dict[str, Any]:
    """A cycle from what was timed inside of it: phases that add up to its seconds.

    What ``prepare`` (log-probabilities of the old policy) left for the card to finish is in ``update``.
    """
    phases = {
        "rollout": found["generate"] - found["sync"],
        "sync": found["sync"],
        "reward": found["reward"],
        "prepare": found["whole"] - found["generate"] - found["reward"],
        "update": seconds - found["whole"],
    }
    return {"seconds": seconds, "phases": phases | {"rest": 0.0}, "inside": {}}


if __name__ == "__main__":
    main(sys.argv[1])
