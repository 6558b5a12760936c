"""TRL's sides: cycles, and learning for some time."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ours import mark, say_memory
from ours_training import loaded, rows_of
from peers import named
from peers.trl import PARTS, MathReward, by_hash, conversation, exact, make_trainer, punishment
from runner import Report
from work import Task

# --- cycles -----------------------------------------------------------------------------------------------------------


def cycles(job: dict[str, Any], report: Report) -> None:
    """``GRPOTrainer.train``; generation, weights, rewards, preparation are timed inside, updates are what is left."""
    from transformers import TrainerCallback

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL reaches into the engine, which is in its own process
    task = Task(**job["task"])
    seconds: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {"generated": [], "trained": []}

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.last = mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            rollouts, inside = divmod(state.global_step, task.updates)
            if inside:
                return
            before, self.last = self.last, mark(wait=True)
            cycle = their_cycle(self.last.since(before), {name: sum(of) for name, of in seconds.items()})
            sizes = {name: sum(of) for name, of in counts.items()}
            report.say("cycle", counts=rollouts > task.warmup, **cycle, **sizes, updates=task.updates)
            for values in (*seconds.values(), *counts.values()):
                values.clear()

    rows, reward = rows_of(task), MathReward() if task.rows else by_hash
    # TRL is told how many tokens to sample, so the stop token stays
    demo = loaded(replace(task, natural=True), "float32") if task.model == "demo" else None
    given = [conversation(row) for row in rows] if task.rows else rows
    with tempfile.TemporaryDirectory() as folder:
        steps, rewards = task.updates * task.rollouts, [reward, *punishment(task)]
        trainer = make_trainer(task, job["setting"], given, rewards, Watch(), steps, Path(folder), demo)
        seconds |= timed_parts(trainer, counts)
        report.say("setting", task=job["task"], **named(PARTS, job["setting"]))
        trainer.train()
    if isinstance(reward, MathReward):
        reward.close()
    say_memory(report)


def timed_parts(trainer: Any, counts: dict[str, list[int]]) -> dict[str, list[float]]:
    """Have the seconds of each part of a cycle collected, and ``counts`` of tokens."""
    generated, trained = counts["generated"].append, counts["trained"].append
    nothing: Callable[[Any], None] = lambda out: None  # noqa: E731
    # what generates also fetches the weights, first of all
    found = {
        "generate": timed(trainer, "_generate_single_turn", lambda out: generated(sum(map(len, out[0])))),
        "reward": timed(trainer, "_calculate_rewards", nothing),
        "whole": timed(
            trainer, "_generate_and_score_completions", lambda out: trained(int(out["completion_mask"].sum()))
        ),
        "sync": [],
    }
    return found | ({"sync": timed(trainer.vllm_generation, "sync_weights", nothing)} if trainer.use_vllm else {})


def timed(owner: Any, name: str, look: Callable[[Any], None]) -> list[float]:
    """Have the seconds of each call of a method collected, and its result looked at."""
    seconds: list[float] = []
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        look(result)
        return result

    setattr(owner, name, call)
    return seconds


def their_cycle(taken: dict[str, float], found: dict[str, float]) -> dict[str, Any]:
    """A cycle from what was timed inside of it: phases that add up to its seconds.

    What ``prepare`` (log-probabilities of the old policy) left for the card to finish is in ``update``.
    """
    phases = {
        "rollout": found["generate"] - found["sync"],
        "sync": found["sync"],
        "reward": found["reward"],
        "prepare": found["whole"] - found["generate"] - found["reward"],
        "update": taken["seconds"] - found["whole"],
    }
    return taken | {"phases": phases | {"rest": 0.0}, "inside": {}}


# --- learning ---------------------------------------------------------------------------------------------------------


def learn(job: dict[str, Any], report: Report) -> None:
    """Train for so many seconds, at whole rollouts, and save the model in ``job["out"]``; with ``heldout`` rows the
    weights answer them greedily every so many seconds, and metrics.jsonl has the curve. Evaluations take none of the
    time. ``reward``: math, of conversations, or the demo's."""
    from transformers import TrainerCallback

    from dapo.observe.metrics import MetricsLog
    from gsm8k import read_rows

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    task, out, started = Task(**job["task"]), Path(job["out"]), time.perf_counter()
    math = job["reward"] == "math"
    reward = MathReward() if math else exact
    heldout = read_rows(Path(job["heldout"])) if job["heldout"] else []
    rows = [conversation(row) if math else row for row in read_rows(Path(task.rows))]

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Counts the time of training, and stops it for evaluations."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.spent = self.evaluated = 0.0
            self.say(0, evaluate(trainer, heldout, task, reward) if heldout else {})
            self.since = mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            rollouts, inside = divmod(state.global_step, task.updates)
            if inside:
                return
            self.spent += mark(wait=True).since(self.since)["seconds"]
            over, found = self.spent >= job["seconds"], {}
            if heldout and (over or self.spent - self.evaluated >= job["every"]):
                found, self.evaluated = evaluate(trainer, heldout, task, reward), self.spent
            self.say(rollouts, found)
            control.should_training_stop = over
            self.since = mark()

        def say(self, rollouts: int, found: dict[str, float]) -> None:
            times = {"time/training": self.spent, "time/elapsed": time.perf_counter() - started}
            log.append(rollouts, times | found)

    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    with MetricsLog(out / "metrics.jsonl") as log:
        rewards = [reward, *punishment(task)]
        trainer = make_trainer(task, job["setting"], rows, rewards, Clock(), 1_000_000, out)
        trainer.train()
    trainer.save_model(str(out / "model-after"))
    report.say("trained", rollouts=trainer.state.global_step // task.updates)
    if math:
        reward.close()


def evaluate(trainer: Any, heldout: Sequence[dict[str, str]], task: Task, reward: MathReward) -> dict[str, float]:
    """Greedy answers of the present weights, through the trainer's vLLM; the numbers that our evaluation makes."""
    from vllm import SamplingParams

    engine, tokenizer = trainer.vllm_generation, trainer.processing_class
    engine.sync_weights()
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    prompts = [tokenizer.apply_chat_template(conversation(row)["prompt"], **how)["input_ids"] for row in heldout]
    params = SamplingParams(temperature=0.0, max_tokens=task.limit)
    outputs = engine.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return measured(heldout, [(a.text, list(a.token_ids), a.finish_reason) for a in answers], reward)


def measured(
    heldout: Sequence[dict[str, str]], answers: Sequence[tuple[str, list[int], str]], reward: MathReward
) -> dict[str, float]:
    """Metrics of an evaluation from text, tokens and reason of the end of each answer."""
    import numpy as np

    from dapo.evaluation.result import Evaluation
    from dapo.records import Group, Prompt, Sample

    verdicts = reward.verdicts([text for text, _, _ in answers], [row["answer"] for row in heldout])
    groups = []
    for i, (row, (text, ids, reason), found) in enumerate(zip(heldout, answers, verdicts, strict=True)):
        zeros = np.zeros(len(ids), dtype=np.float32)
        end: Any = "length" if reason == "length" else "stop"
        tokens, versions = np.asarray(ids, dtype=np.int32), zeros.astype(np.int32)
        sample = Sample(i, 0, tokens, zeros, versions, end, text=text, reward=found)
        groups.append(Group(i, Prompt(i, row["prompt"], (0,), row["answer"]), (sample,)))
    return Evaluation(tuple(groups)).metrics()
