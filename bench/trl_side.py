"""TRL's GRPOTrainer with colocated vLLM on one GPU: what ``cycle.py``, ``train.py`` and ``trl_learning.py`` measure.

A setting is named by what differs from the defaults, joined by ``+``, such as ``nockpt+micro32+async``. All of them
have loss type ``dapo``, Clip-Higher, no KL, float32 master weights under bfloat16 autocast (TRL's default), AdamW
(fused), the same samples per update, and no logging, evaluation or checkpoints. TRL 1.16 computes log-probabilities in
chunks in any setting (it calls its Liger loss deprecated), so there is no switch for that. Its attention in training is
Transformers' default, ``sdpa``, in all of them: no other one was tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rollout_work import INSTRUCTION

REWARD_WORKERS = 4
"""Processes of the math reward, on both sides."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs from the defaults: arguments of ``GRPOConfig`` and of ``vllm.LLM``."""

    trainer: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


PARTS: dict[str, Setting] = {
    "defaults": Setting(),
    **{f"micro{n}": Setting({"per_device_train_batch_size": n}) for n in (4, 8, 16, 32, 64)},
    "nockpt": Setting({"gradient_checkpointing": False}),
    "noratio": Setting({"vllm_importance_sampling_correction": False}),
    "compile": Setting({"torch_compile": True}),
    "liger": Setting({"use_liger_kernel": True}),  # its layers; needs liger-kernel
    **{f"mem{n}": Setting({"vllm_gpu_memory_utilization": n / 100}) for n in (20, 30, 40, 50)},
    "sleep": Setting({"vllm_enable_sleep_mode": True}),
    "async": Setting(engine={"async_scheduling": True}),
    "sync": Setting(engine={"async_scheduling": False}),
    "batched16k": Setting(engine={"max_num_batched_tokens": 16384}),
    **{f"seqs{n}": Setting(engine={"max_num_seqs": n}) for n in (256, 512, 1024)},
    "graphs1024": Setting(engine={"compilation_config": {"max_cudagraph_capture_size": 1024}}),
}


def named(name: str) -> Setting:
    """The setting of a name.

    Raises:
        ValueError: a part of it is unknown.
    """
    whole = Setting()
    for part in name.split("+"):
        if part not in PARTS:
            raise ValueError(f"unknown TRL setting {part!r}; there are {', '.join(PARTS)}, joined by +")
        whole = Setting(whole.trainer | PARTS[part].trainer, whole.engine | PARTS[part].engine)
    return whole


def setting_name(text: str) -> str:
    """An argument of a command line that names a setting."""
    try:
        named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained on: sizes of a rollout, the limit of a response and of its punished end, and the optimizer."""

    model: str
    prompts: int = 128
    samples: int = 16
    updates: int = 4
    limit: int = 768
    overlong: int = 128
    longest_prompt: int = 512
    learning_rate: float = 1e-6
    warmup_rollouts: int = 0
    weight_decay: float = 0.1
    temperature: float = 1.0
    seed: int = 1
    shuffle: bool = True
    """Whether the rows are permuted; if not, they are taken in their order, as in ours with ``data.shuffle`` off."""

    @property
    def batch(self) -> int:
        """Samples of one rollout."""
        return self.prompts * self.samples


def conversation(row: dict[str, str]) -> dict[str, Any]:
    """A row as TRL wants it."""
    return {"prompt": [{"role": "user", "content": row["prompt"] + INSTRUCTION}], "answer": row["answer"]}


def grpo_settings(task: Task, setting: Setting, steps: int, folder: Path) -> dict[str, Any]:
    """Arguments of ``GRPOConfig``. Four updates on a quarter of the rollout each, as many forward passes as needed.

    Raises:
        ValueError: an update is no whole number of micro-batches.
    """
    chosen: dict[str, Any] = {"per_device_train_batch_size": 8} | setting.trainer
    micro = chosen["per_device_train_batch_size"]
    per_update, rest = divmod(task.batch, task.updates * micro)
    if rest or not per_update:
        raise ValueError(f"{task.batch} samples in {task.updates} updates cannot be cut into micro-batches of {micro}")
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "seed": task.seed,
        "shuffle_dataset": task.shuffle,
        "max_steps": steps,
        "num_generations": task.samples,
        "steps_per_generation": task.updates * per_update,
        "gradient_accumulation_steps": per_update,
        "max_completion_length": task.limit,
        "temperature": task.temperature,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": task.longest_prompt + task.limit,
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": 10.0,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": task.warmup_rollouts * task.updates,
        "weight_decay": task.weight_decay,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return common | chosen


def make_trainer(
    task: Task, setting: Setting, rows: Sequence[dict[str, Any]], rewards: Any, callbacks: Any, steps: int, folder: Path
) -> Any:
    """A GRPOTrainer on the GPU; vLLM gets the arguments that TRL does not pass on, too."""
    import logging

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    assert torch.cuda.is_available(), "TRL with colocated vLLM needs a GPU"
    logging.getLogger("trl").setLevel(logging.ERROR)
    engine = vllm_generation.LLM
    vllm_generation.LLM = lambda **arguments: engine(**(arguments | setting.engine))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        reward_funcs=rewards,
        args=GRPOConfig(**grpo_settings(task, setting, steps, folder)),
        train_dataset=Dataset.from_list(list(rows)),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


# --- the reward -------------------------------------------------------------------------------------------------------


class MathReward:
    """dapo's own math reward as a function for TRL, in worker processes, as it is in dapo."""

    __name__ = "math"

    def __init__(self, workers: int = REWARD_WORKERS) -> None:
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def __call__(self, prompts: Any, completions: Any, answer: Sequence[str], **others: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [value for value, *_ in self.verdicts(texts, answer)]

    def verdicts(self, texts: Sequence[str], answers: Sequence[str]) -> list[tuple[float, bool, str | None, float]]:
        """Value, right or wrong, the answer that was found and whether there was one, of each text."""
        return list(self._pool.map(verdict, texts, answers, chunksize=16))

    def close(self) -> None:
        """End the workers."""
        self._pool.shutdown()


def verdict(text: str, answer: str) -> tuple[float, bool, str | None, float]:
    """Of one response, in a worker."""
    from dapo.reward.math.score import score_math

    found = score_math(text, answer, ["boxed", "answer_line"])
    return found.value, bool(found.correct), found.extracted, found.parts["answer_found"]


def punishment(task: Task) -> Callable[..., list[float]]:
    """The soft overlong punishment (Eq. 13), TRL's own."""
    from trl.rewards import get_soft_overlong_punishment

    found: Callable[..., list[float]] = get_soft_overlong_punishment(task.limit, task.overlong)
    return found
