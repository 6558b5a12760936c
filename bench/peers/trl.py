"""TRL's GRPOTrainer, wired once: on a GPU with colocated vLLM, on a CPU with its ordinary generation.

All settings have loss type ``dapo``, Clip-Higher, no KL, float32 master weights (under bfloat16 autocast, TRL's
default, if the task computes in bfloat16), AdamW (fused), the same samples per update as ours, and no logging,
evaluation or checkpoints. TRL 1.16 computes log-probabilities in chunks in any setting. Its attention in training is
Transformers' default, ``sdpa``: no other one was tried. Not among the settings: continuous batching on a CPU (23.6 s
against 0.87 s for the demo's rollouts), and weights wholly in bfloat16, which round small updates away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from peers import named
from work import INSTRUCTION, REWARD_WORKERS, Task, verdict

PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "defaults": {},
    **{f"micro{n}": {"trainer": {"per_device_train_batch_size": n}} for n in (4, 8, 16, 32, 64)},
    "nockpt": {"trainer": {"gradient_checkpointing": False}},
    "compile": {"trainer": {"torch_compile": True}},
    "float32": {"trainer": {"bf16": False}},
    **{f"mem{n}": {"trainer": {"vllm_gpu_memory_utilization": n / 100}} for n in (20, 30, 40, 50)},
    "async": {"engine": {"async_scheduling": True}},
    "batched16k": {"engine": {"max_num_batched_tokens": 16384}},
    **{f"seqs{n}": {"engine": {"max_num_seqs": n}} for n in (256, 512, 1024)},
    "graphs1024": {"engine": {"compilation_config": {"max_cudagraph_capture_size": 1024}}},
}
"""Arguments of ``GRPOConfig`` (trainer) and of ``vllm.LLM`` (engine)."""


# --- the trainer ------------------------------------------------------------------------------------------------------


def grpo_settings(task: Task, setting: str, steps: int, folder: Path) -> dict[str, Any]:
    """Arguments of ``GRPOConfig``: updates on equal parts of the rollout, as many forward passes as needed.

    Raises:
        ValueError: an update is no whole number of micro-batches.
    """
    cuda = task.device == "cuda"
    chosen = {"per_device_train_batch_size": 8 if cuda else task.batch // task.updates}
    chosen |= named(PARTS, setting)["trainer"]
    micro = chosen["per_device_train_batch_size"]
    per_update, rest = divmod(task.batch, task.updates * micro)
    if rest or not per_update:
        raise ValueError(f"{task.batch} samples in {task.updates} updates cannot be cut into micro-batches of {micro}")
    longest = task.longest_prompt + task.limit
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": longest}
    cpu = {"use_cpu": True, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    cpu |= {"generation_kwargs": {"min_new_tokens": task.limit} if not task.natural else None}
    common: dict[str, Any] = {"output_dir": str(folder), "seed": task.seed, "shuffle_dataset": task.shuffle}
    common |= {"max_steps": steps, "num_generations": task.samples, "steps_per_generation": task.updates * per_update}
    common |= {"max_completion_length": task.limit, "temperature": task.temperature}
    common |= {"beta": 0.0, "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0}
    common |= {"learning_rate": task.learning_rate, "lr_scheduler_type": "constant_with_warmup"}
    common |= {"warmup_steps": task.warmup_rollouts * task.updates, "weight_decay": task.weight_decay}
    common |= {"max_grad_norm": 1.0, "optim": "adamw_torch_fused", "bf16": task.dtype == "bfloat16"}
    common |= {"gradient_accumulation_steps": per_update, "report_to": "none", "logging_strategy": "no"}
    common |= {"save_strategy": "no", "disable_tqdm": True}
    return common | (vllm if cuda else cpu) | chosen


def make_trainer(
    task: Task, setting: str, rows: Any, rewards: Any, callback: Any, steps: int, folder: Path, loaded: Any = None
) -> Any:
    """A GRPOTrainer; its vLLM gets the arguments that TRL does not pass on, too. ``loaded``: model and tokenizer, in
    place of those of the task's folder."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    logging.getLogger("trl").setLevel(logging.ERROR)
    chosen = named(PARTS, setting)
    settings = grpo_settings(task, setting, steps, folder)
    if task.threads:
        torch.set_num_threads(task.threads)
    if settings.get("use_vllm"):
        from trl.generation import vllm_generation

        assert torch.cuda.is_available(), "TRL with colocated vLLM needs a GPU"
        engine = vllm_generation.LLM
        vllm_generation.LLM = lambda **arguments: engine(**(arguments | chosen["engine"]))
    if loaded is None:
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
        loaded = model, AutoTokenizer.from_pretrained(task.model)
    (model, tokenizer), data, args = loaded, Dataset.from_list(list(rows)), GRPOConfig(**settings)
    trainer = GRPOTrainer(model, rewards, args, data, processing_class=tokenizer, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    return trainer


def conversation(row: dict[str, str]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": row["prompt"] + INSTRUCTION}], "answer": row["answer"]}


# --- rewards ----------------------------------------------------------------------------------------------------------


class MathReward:
    """dapo's own math reward as a function for TRL, in worker processes, as it is in dapo."""

    __name__ = "math"

    def __init__(self, workers: int = REWARD_WORKERS) -> None:
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def __call__(self, prompts: Any, completions: Any, answer: Sequence[str], **others: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [found.value for found in self.verdicts(texts, answer)]

    def verdicts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Any]:
        """The ``Reward`` of each text."""
        from dapo.reward.math.score import score_math

        return list(self._pool.map(score_math, texts, answers, repeat(["boxed", "answer_line"]), chunksize=16))

    def close(self) -> None:
        self._pool.shutdown()


def exact(prompts: Any, completions: Any, answer: Sequence[str], **others: Any) -> list[float]:
    """The demo's reward: what follows the last # is the answer."""
    return [
        1.0 if text.rpartition("#")[2].strip() == gold else -1.0 for text, gold in zip(completions, answer, strict=True)
    ]


def by_hash(prompts: Any, completions: Any, **others: Any) -> list[float]:
    """The verdict on both sides where nothing is to be learned."""
    return [1.0 if verdict(text) else -1.0 for text in completions]


def punishment(task: Task) -> list[Callable[..., list[float]]]:
    """The soft overlong punishment (Eq. 13), TRL's own; none, where none is asked for."""
    from trl.rewards import get_soft_overlong_punishment

    return [get_soft_overlong_punishment(task.limit, task.overlong)] if task.overlong else []
