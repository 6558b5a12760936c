"""The sides of ``bench/train.py``: a process that trains on made-up groups and reports JSON lines.

Jobs: ``ours`` (our trainer), ``trl`` (the training part of TRL's step, on the same tokens), ``size`` (one step of a
whole run, for its memory).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from cycle_sides import peak_bytes, random_model, rows_of, settings_of
from rollout_ours import load, measure_limits
from rollout_work import Report, Shape
from train_work import Sequences, make_sequences, training_operations
from trl_side import Task, grpo_settings, named


def main(path: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    JOBS[job["job"]](job, Report(job["report"]))


def _sequences(job: dict[str, Any]) -> Sequences:
    vocabulary = Shape.read(job["model"]).vocabulary
    return make_sequences(job["groups"], job["samples"], vocabulary, job["limit"], job["fixed"])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(job: dict[str, Any], report: Report) -> None:
    """Updates on the same mini-batch, again and again; the first ones, which compile, are reported but do not count."""
    from dapo.algorithm.objective import DapoObjective
    from dapo.config import TrainingConfig
    from dapo.training.trainer import Trainer

    limits = measure_limits(job["device"])
    report.say("limits", **asdict(limits))
    shape, sequences = Shape.read(job["model"]), _sequences(job)
    settings = {"tokens_per_micro_batch": job["micro_tokens"], "learning_rate": 1e-6, "warmup_steps": 0} | job["set"]
    model = load(job["model"], True, job["device"], "float32").requires_grad_(True)
    dtype = torch.bfloat16 if job["device"] == "cuda" else torch.float32
    trainer = Trainer(model, TrainingConfig(**settings), 1.0, dtype)
    batch = packed(sequences, job["shared"])
    batch = replace(batch, behaviour_logprobs=trainer.logprobs(batch).cpu().numpy())  # ratios near 1, as in training
    inputs, objective = token_inputs(batch, job["device"]), DapoObjective()
    for number in range(job["warmup"] + job["repeats"]):
        _wait()
        start = time.perf_counter()
        done = trainer.update(batch, inputs, objective)
        _wait()
        seconds = time.perf_counter() - start
        phases = {f.name.removeprefix("seconds_"): getattr(done, f.name) for f in fields(done) if "seconds_" in f.name}
        rest = seconds - sum(phases.values())
        report.say(
            "update",
            counts=number >= job["warmup"],
            seconds=seconds,
            phases=phases | {"rest": rest},
            micro_batches=done.micro_batches,
            skipped=done.skipped,
        )
    report.say("memory", bytes=peak_bytes())
    hand_overs(trainer, job["repeats"], report)
    computed = computed_tokens(model, lambda: trainer.update(batch, inputs, objective))
    operations = training_operations(shape, computed, sequences.response_tokens)
    report.say("work", **described(sequences), computed=computed, operations=operations)


def hand_overs(trainer: Any, repeats: int, report: Report) -> None:
    """What happens when the engine gets new weights: they are found finite, then cast and copied into its own model,
    as ``NativeEngine.put`` does it. The first one does not count."""
    from dapo.model.loading import copy_model

    theirs = dict(copy_model(trainer.policy.model, torch.bfloat16).named_parameters())
    for number in range(1 + repeats):
        _wait()
        start = time.perf_counter()
        names, tensors = zip(*trainer.publish()[1], strict=True)
        with torch.no_grad():
            torch._foreach_copy_([theirs[name] for name in names], list(tensors))
        _wait()
        report.say("hand_over", counts=number > 0, seconds=time.perf_counter() - start)


def described(sequences: Sequences) -> dict[str, int]:
    """Sizes of the work."""
    return {
        "sequences": sequences.samples,
        "tokens": sequences.tokens,
        "shared_tokens": sequences.shared_tokens,
        "response_tokens": sequences.response_tokens,
    }


def packed(sequences: Sequences, shared: bool) -> Any:
    """The groups as a batch; not ``shared``: every sample is a group of its own, with a prompt of its own."""
    import numpy as np

    from dapo.records import Group, Prompt, Reward, Sample
    from dapo.training.packing import advantage_column, pack

    groups = []
    for draw, (prompt, responses) in enumerate(sequences.groups):
        samples = []
        for i, response in enumerate(responses):
            ids, zeros = np.asarray(response, dtype=np.int32), np.zeros(len(response), dtype=np.float32)
            right = (i + draw) % 2 == 0
            verdict = Reward(right, 1.0 if right else -1.0)
            advantage = 1.0 if right else -1.0
            versions = zeros.astype(np.int32)
            samples.append(Sample(draw, i, ids, zeros, versions, "stop", reward=verdict, advantage=advantage))
        groups.append(Group(draw, Prompt(draw, "", tuple(prompt)), tuple(samples)))
    batch = pack(groups).with_columns(advantages=advantage_column(groups))
    return batch if shared else replace(batch, draws=np.arange(batch.num_samples))


def token_inputs(batch: Any, device: str) -> Any:
    """What the objective needs, as the loop makes it: token-level loss, the proximal policy is the engine's."""
    from dapo.config import AlgorithmConfig
    from dapo.training.learner import objective_inputs

    return objective_inputs(batch, AlgorithmConfig(), 1, torch.device(device))


def computed_tokens(model: Any, action: Callable[[], Any]) -> int:
    """How many tokens, padding included, go through the embedding, and so the layers, while something is done."""
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, ids, out: seen.append(ids[0].numel()))
    try:
        action()
    finally:
        hook.remove()
    return sum(seen)


# --- theirs -----------------------------------------------------------------------------------------------------------


def trl(job: dict[str, Any], report: Report) -> None:
    """TRL's own loop over one mini-batch, with the rollout replaced by what it would have returned.

    What is timed is what TRL does with samples: forward, backward, clipping and AdamW, padded as it pads them. The pass
    for log-probabilities of the old policy, which its cycle has as well, is left out. The operations are those that the
    tokens need without their padding.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from dapo.commands.demo.task import make_tokenizer

    limits = measure_limits(job["device"])
    report.say("limits", **asdict(limits))
    shape, sequences = Shape.read(job["model"]), _sequences(job)
    task = Task(job["model"], job["groups"], job["samples"], updates=1, limit=job["limit"])
    steps = job["warmup"] + job["repeats"]
    clock: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            _wait()
            clock.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            _wait()
            seconds = time.perf_counter() - clock[-1]
            counts = state.global_step > job["warmup"]
            report.say("update", counts=counts, seconds=seconds, phases={}, micro_batches=micro, skipped=None)

    with tempfile.TemporaryDirectory() as folder:
        settings = grpo_settings(task, named(job["setting"]), steps, Path(folder))
        settings |= {"use_vllm": False, "max_steps": steps}
        if job["device"] == "cpu":
            settings |= {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
        micro = settings["gradient_accumulation_steps"]
        model = load(job["model"], True, job["device"], "float32").requires_grad_(True)
        model.set_attn_implementation("sdpa")
        files = Path(job["model"]) / "tokenizer_config.json"
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(job["model"]) if files.is_file() else make_tokenizer(),
            reward_funcs=lambda completions, **others: [0.0] * len(completions),
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * (task.prompts * steps)),
            callbacks=[Watch()],
        )
        rollout = padded(sequences, job["device"])  # made once: to make it takes 80 ms, which are not TRL's
        trainer._generate_and_score_completions = lambda inputs: dict(rollout)
        computed = computed_tokens(model, trainer.train) // steps
    report.say("memory", bytes=peak_bytes())
    operations = training_operations(shape, sequences.tokens, sequences.response_tokens)
    report.say("work", **described(sequences), computed=computed, operations=operations)


def padded(sequences: Sequences, device: str) -> dict[str, torch.Tensor]:
    """A rollout as TRL holds it: prompts padded on the left, responses on the right, to the longest of all."""
    rows = [(prompt, response) for prompt, responses in sequences.groups for response in responses]
    prompt_width, width = (max(len(row[k]) for row in rows) for k in (0, 1))
    prompts, responses = (torch.zeros(len(rows), n, dtype=torch.long) for n in (prompt_width, width))
    prompt_mask, mask = torch.zeros_like(prompts), torch.zeros_like(responses)
    for i, (prompt, response) in enumerate(rows):
        prompts[i, prompt_width - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[i, prompt_width - len(prompt) :] = 1
        responses[i, : len(response)] = torch.tensor(response)
        mask[i, : len(response)] = 1
    signs = torch.tensor([1.0 if i % 2 == 0 else -1.0 for i in range(len(rows))])
    found = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": responses,
        "completion_mask": mask,
        "advantages": signs,
        "num_items_in_batch": mask.sum(),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


# --- sizes ------------------------------------------------------------------------------------------------------------


def size(job: dict[str, Any], report: Report) -> None:
    """One step of a whole run with responses of the full length: the most memory, predicted and taken."""
    from transformers import AutoConfig

    from dapo.checks.memory import predict_memory
    from dapo.config import build_config, nested
    from dapo.observe.progress import QuietListener
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.orchestrator.launch import run_experiment
    from dapo.training.lora import trainable_shape

    class Watch(QuietListener):
        def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
            report.say("step", seconds=metrics["time/step"], updates=metrics["updates"])

        def warning(self, text: str) -> None:
            report.say("warning", text=text)

    sizes = {"limit": job["limit"], "overlong": job["limit"] // 6, "longest_prompt": 64}
    task = Task(job["model"], job["groups"], job["samples"], updates=1, **sizes)
    work = {"task": task, "rows": None, "warmup": 0, "cycles": job["steps"], "device": job["device"]}
    work |= {"concurrent": task.batch, "micro_tokens": job["micro_tokens"], "weights": job["weights"]}
    cuda = job["device"] == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_random_model(work, f"{folder}/model")
        more = {"training.groups_per_update": max(1, task.prompts // 2)} | job["set"]
        places = {"model.path": f"{folder}/model", "run.dir": f"{folder}/run"}
        config = build_config(nested(settings_of(work) | more | places), "benchmark")
        shape = trainable_shape(config.model, AutoConfig.from_pretrained(config.model.path))
        memory = predict_memory(config, shape, cuda)
        parts = {part.name: getattr(memory, part.name) for part in fields(memory)}
        report.say("predicted", bytes=memory.total(cuda), parts=parts)
        run_experiment(config, Watch(), RunOverrides(tokenizer=tokenizer, rows=rows_of(work), reward=alternating()))
    report.say("memory", bytes=peak_bytes(), reserved=torch.cuda.max_memory_reserved() if cuda else 0)


def write_random_model(work: dict[str, Any], folder: str) -> Any:
    """A folder of random weights, which leave nothing behind in memory; returns the tokenizer."""
    model, tokenizer = random_model(work)
    model.save_pretrained(folder)
    del model
    if work["device"] == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return tokenizer


def alternating() -> Callable[..., bool]:
    """A reward that is right every other time, whatever was written: every group has something to learn from."""
    calls: list[None] = []

    def reward(prompt: str, response: str, answer: str) -> bool:
        calls.append(None)
        return len(calls) % 2 == 0

    return reward


JOBS: dict[str, Callable[[dict[str, Any], Report], None]] = {"ours": ours, "trl": trl, "size": size}

if __name__ == "__main__":
    main(sys.argv[1])
