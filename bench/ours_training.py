"""dapo's sides of training: updates by its trainer, and cycles of its ordinary loop."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ours import load, mark, say_limits, say_memory
from runner import Report
from work import INSTRUCTION, KEYS, REWARD_WORKERS, Shape, Task, make_groups, sizes_of, training_operations, verdict

PHASES = ("rollout", "prepare", "update", "sync")
"""Of a cycle of ours; with the rest they add up to it."""


# --- updates ----------------------------------------------------------------------------------------------------------


def update(job: dict[str, Any], report: Report) -> None:
    """Updates on the same mini-batch, again and again; the first ones, which compile, are reported but do not count."""
    from dapo.algorithm.objective import DapoObjective
    from dapo.config import AlgorithmConfig, TrainingConfig
    from dapo.training.learner import objective_inputs
    from dapo.training.trainer import Trainer

    say_limits(job, report)
    groups = make_groups(job["groups"], job["samples"], Shape.read(job["model"]).vocab_size, job["limit"])
    settings = {"tokens_per_micro_batch": job["micro_tokens"], "learning_rate": 1e-6, "warmup_steps": 0} | job["set"]
    model = load(job["model"], True, job["device"], "float32").requires_grad_(True)
    dtype = torch.bfloat16 if job["device"] == "cuda" else torch.float32
    trainer = Trainer(model, TrainingConfig(**settings), 1.0, dtype)
    batch = packed(groups, job["shared"])
    batch = replace(batch, behaviour_logprobs=trainer.logprobs(batch).cpu().numpy())  # ratios near 1, as in training
    # as the loop makes them: token-level loss, the proximal policy is the engine's
    inputs, objective = objective_inputs(batch, AlgorithmConfig(), 1, torch.device(job["device"])), DapoObjective()
    for number in range(job["warmup"] + job["repeats"]):
        start = mark(wait=True)
        done = trainer.update(batch, inputs, objective)
        seconds = mark(wait=True).since(start)["seconds"]
        phases = {f.name.removeprefix("seconds_"): getattr(done, f.name) for f in fields(done) if "seconds_" in f.name}
        counts, rest = number >= job["warmup"], seconds - sum(phases.values())
        did = {"micro_batches": done.micro_batches, "skipped": done.skipped}
        report.say("update", counts=counts, seconds=seconds, phases=phases | {"rest": rest}, **did)
    say_memory(report)
    hand_overs(trainer, job["repeats"], report)
    computed = computed_tokens(model, lambda: trainer.update(batch, inputs, objective))
    sizes = sizes_of(groups)
    operations = training_operations(Shape.read(job["model"]), computed, sizes["response_tokens"])
    report.say("work", **sizes, computed=computed, operations=operations)


def hand_overs(trainer: Any, repeats: int, report: Report) -> None:
    """What happens when the engine gets new weights: they are found finite, then cast and copied into its own model,
    as ``NativeEngine.put`` does it. The first one does not count."""
    from dapo.model.loading import copy_model

    theirs = dict(copy_model(trainer.policy.model, torch.bfloat16).named_parameters())
    for number in range(1 + repeats):
        start = mark(wait=True)
        names, tensors = zip(*trainer.publish()[1], strict=True)
        with torch.no_grad():
            torch._foreach_copy_([theirs[name] for name in names], list(tensors))
        report.say("hand_over", counts=number > 0, seconds=mark(wait=True).since(start)["seconds"])


def packed(made: Any, shared: bool) -> Any:
    """Groups of ``make_groups`` as a batch; not ``shared``: every sample is a group with a prompt of its own."""
    import numpy as np

    from dapo.records import Group, Prompt, Reward, Sample
    from dapo.training.packing import advantage_column, pack

    groups = []
    for draw, (prompt, responses) in enumerate(made):
        samples = []
        for i, response in enumerate(responses):
            ids, zeros = np.asarray(response, dtype=np.int32), np.zeros(len(response), dtype=np.float32)
            right = (i + draw) % 2 == 0
            scored = {"reward": Reward(right, 1.0 if right else -1.0), "advantage": 1.0 if right else -1.0}
            samples.append(Sample(draw, i, ids, zeros, zeros.astype(np.int32), "stop", **scored))
        groups.append(Group(draw, Prompt(draw, "", tuple(prompt)), tuple(samples)))
    batch = pack(groups).with_columns(advantages=advantage_column(groups))
    return batch if shared else replace(batch, draws=np.arange(batch.num_samples))


def computed_tokens(model: Any, action: Callable[[], Any]) -> int:
    """How many tokens, padding included, go through the embedding, and so the layers, while something is done."""
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, ids, out: seen.append(ids[0].numel()))
    try:
        action()
    finally:
        hook.remove()
    return sum(seen)


# --- cycles -----------------------------------------------------------------------------------------------------------


def rows_of(task: Task) -> list[dict[str, str]]:
    """Rows for all cycles, each used once as far as there are enough, the same for both sides."""
    import numpy as np

    from dapo.commands.demo.task import draw_expressions
    from gsm8k import read_rows

    count = task.prompts * task.rollouts
    if task.rows is None:
        drawn = draw_expressions(np.random.default_rng(task.seed), count, set(), range(3, 6))
        text = "Work it out modulo 10, from left to right: {}" if Path(task.model, "tokenizer.json").exists() else "{}"
        return [{"prompt": text.format(e.prompt), "answer": e.answer} for e in drawn]
    rows = read_rows(Path(task.rows))
    random.Random(0).shuffle(rows)
    return (rows * -(-count // len(rows)))[:count]


def settings_of(task: Task) -> dict[str, Any]:
    """The recipe of our side, as dotted keys."""
    return {key: getattr(task, name) for name, key in KEYS.items()} | {
        "data.template": "chat" if task.rows else "plain",
        "data.instruction": INSTRUCTION if task.rows else "",
        "reward.workers": REWARD_WORKERS,
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_buffer.enable": task.overlong > 0,
        "algorithm.overlong_buffer.len": task.overlong or 1,
        "training.steps": task.rollouts,
        "training.groups_per_update": task.prompts // task.updates,
        "runtime.threads": task.threads or None,
        "run.save_samples": False,
        "run.save_every": 0,
    }


def cycles(job: dict[str, Any], report: Report) -> None:
    """A run of the ordinary loop, by its own metrics and the clock between two steps; with ``predict`` also the memory
    that it is said to need, the model read from files, which leave nothing behind in memory."""
    from dapo.config import build_config, nested
    from dapo.observe.progress import QuietListener
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.orchestrator.launch import run_experiment

    task = Task(**job["task"])
    last = mark()

    class Watch(QuietListener):
        def started(self, plan: dict[str, Any]) -> None:
            nonlocal last
            last = mark()

        def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
            nonlocal last
            before, last = last, mark()
            report.say("cycle", counts=step > task.warmup, **our_cycle(last.since(before), metrics))

        def warning(self, text: str) -> None:
            report.say("warning", text=text)

    model = tokenizer = None
    rows = rows_of(task)
    if task.rows is None:
        model, tokenizer = loaded(task, job.get("weights", "float32"))
        if not task.longest_prompt:
            longest = max(len(tokenizer(row["prompt"]).input_ids) for row in rows)
            task = replace(task, longest_prompt=longest, micro_tokens=task.batch * (longest + task.limit))
    with tempfile.TemporaryDirectory() as folder:
        places = {"run.dir": f"{folder}/run"}
        if job.get("predict"):
            model.save_pretrained(f"{folder}/model")
            places["model.path"], model = f"{folder}/model", None
        config = build_config(nested(settings_of(task) | job["set"] | places), "benchmark")
        if job.get("predict"):
            report.say("predicted", **predicted(config))
        reward = None if task.rows else lambda prompt, response, answer: verdict(response)
        inputs = RunOverrides(model=model, tokenizer=tokenizer, rows=rows, reward=reward)
        run_experiment(config, Watch(), inputs)
    say_memory(report)


def our_cycle(taken: dict[str, float], metrics: dict[str, Any]) -> dict[str, Any]:
    """A cycle from the metrics of its step; ``inside``: phases that are part of others, as far as there are any."""
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    phases = {name: times.get(name, 0.0) for name in PHASES}
    phases["rollout"] += times.get("reward_wait", 0.0)
    outer = (*PHASES, "step", "evaluation", "elapsed", "training", "wall", "rest")
    return taken | {
        "phases": phases | {"rest": taken["seconds"] - sum(phases.values())},
        "inside": {name: value for name, value in times.items() if name not in outer},
        "generated": round(metrics["tokens/generated"]),
        "trained": round(metrics["tokens/loss"]),
        "updates": round(metrics["updates"]),
    }


def loaded(task: Task, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer: the demo's, one of random weights with the demo's signs, or those of a folder. Without stop
    token, unless responses end by themselves."""
    from dapo.commands.demo.task import make_model, make_tokenizer
    from dapo.model.loading import load_tokenizer

    if task.model == "demo":
        tokenizer = make_tokenizer()
        model = make_model(task.seed, len(tokenizer)).to(getattr(torch, dtype))
    else:
        random_weights = {file.name for file in Path(task.model).iterdir()} == {"config.json"}
        tokenizer = make_tokenizer() if random_weights else load_tokenizer(task.model)
        model = load(task.model, random_weights, task.device, dtype).requires_grad_(True)
    if not task.natural:
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


def predicted(config: Any) -> dict[str, Any]:
    """Bytes that a run will need at most, and their parts; counts from here on what it takes."""
    from transformers import AutoConfig

    from dapo.checks.memory import predict_memory
    from dapo.training.lora import trainable_shape

    cuda = config.runtime.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    memory = predict_memory(config, trainable_shape(config.model, AutoConfig.from_pretrained(config.model.path)), cuda)
    return {"bytes": memory.total(cuda), "parts": {part.name: getattr(memory, part.name) for part in fields(memory)}}
