"""The two sides of the benchmarks against TRL: the same work, once with dapo and once with TRL's GRPOTrainer.

Each runs in a process of its own, which prints one JSON line. Both have dynamic sampling, KL, logging, checkpoints and
gradient checkpointing off; the same prompts in the same order, the same reward function, AdamW (fused), the same number
of updates per rollout, each on the same number of samples in one forward pass. TRL computes the log-probabilities of
the old policy before the first of several updates, since its generation returns none; that is part of its cycle.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Work:
    """What one repetition does. Sizes are per rollout; ``dtype`` is that of the side, see ``cpu_cycle.py``."""

    model: str
    dtype: str
    threads: int
    prompts: int = 16
    samples: int = 8
    updates: int = 4
    tokens: int = 28
    natural: bool = False
    paged: bool = False
    warmup: int = 1
    cycles: int = 5
    seed: int = 1
    learning_rate: float = 1e-6

    @property
    def batch(self) -> int:
        """Samples of one rollout."""
        return self.prompts * self.samples

    @property
    def rows(self) -> list[dict[str, str]]:
        """Prompts for all cycles, each used once."""
        import numpy as np

        from dapo.commands.demo.task import draw_expressions

        count = self.prompts * (self.warmup + self.cycles)
        expressions = draw_expressions(np.random.default_rng(self.seed), count, set(), range(3, 6))
        if self.model == "demo":
            return [{"prompt": e.prompt, "answer": e.answer} for e in expressions]
        text = "Work it out modulo 10, from left to right: {}"
        return [{"prompt": text.format(e.prompt), "answer": e.answer} for e in expressions]


@dataclass(slots=True)
class Timing:
    """What a repetition took, the warm-up left out. Seconds by phase; tokens of all measured cycles.

    ``cpu_seconds``: processor time of all threads, which other programs on the machine hardly change.
    """

    seconds: float
    cpu_seconds: float
    phases: dict[str, float]
    samples: int
    generated: int
    trained: int
    updates: int


class Mark(NamedTuple):
    """A moment, by the clock and in processor time of this process."""

    clock: float
    cpu: float

    def since(self, earlier: Mark) -> tuple[float, float]:
        """Seconds of both kinds."""
        return self.clock - earlier.clock, self.cpu - earlier.cpu


def mark() -> Mark:
    """Now."""
    return Mark(time.perf_counter(), time.process_time())


def verdict(text: str) -> bool:
    """Right or wrong by a hash of the response: every group is mixed, whatever the model."""
    return zlib.crc32(text.encode()) % 2 == 0


def load(work: Work) -> tuple[Any, Any]:
    """Model with float32 weights (bfloat16 if the dtype is ``pure-bfloat16``) and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dapo.commands.demo.task import make_model, make_tokenizer

    dtype = torch.bfloat16 if work.dtype == "pure-bfloat16" else torch.float32
    if work.model == "demo":
        tokenizer = make_tokenizer()
        return make_model(work.seed, len(tokenizer)).to(dtype), tokenizer
    return AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype), AutoTokenizer.from_pretrained(work.model)


# --- ours -------------------------------------------------------------------------------------------------------------


def run_ours(work: Work) -> Timing:
    """A run of the ordinary loop; times are those of its own metrics and of the clock between two steps."""
    from dapo.config import build_config, nested
    from dapo.observe.progress import QuietListener
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.orchestrator.launch import run_experiment

    model, tokenizer = load(work)
    if not work.natural:  # nothing stops a response but the limit
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    longest = max(len(tokenizer(row["prompt"]).input_ids) for row in work.rows)
    settings: dict[str, Any] = {
        "seed": work.seed,
        "model.path": work.model,
        "model.compute_dtype": "float32" if work.dtype == "float32" else "bfloat16",
        "data.template": "plain",
        "data.shuffle": False,
        "data.max_prompt_length": longest,
        "rollout.prompts_per_step": work.prompts,
        "rollout.samples_per_prompt": work.samples,
        "rollout.max_response_length": work.tokens,
        "rollout.max_concurrent_samples": work.batch,
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_buffer.enable": False,
        "training.steps": work.warmup + work.cycles,
        "training.groups_per_update": work.prompts // work.updates,
        "training.learning_rate": work.learning_rate,
        "training.warmup_steps": 0,
        "training.weight_decay": 0.0,
        "training.tokens_per_micro_batch": work.batch * (longest + work.tokens),
        "runtime.threads": work.threads,
        "run.save_samples": False,
        "run.save_every": 0,
    }
    marks: list[Mark] = []
    metrics_of: list[dict[str, Any]] = []

    class Watch(QuietListener):
        def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
            marks.append(mark())
            metrics_of.append(metrics)

        def warning(self, text: str) -> None:
            """Of settings that are meant."""

    def reward(prompt: str, response: str, answer: str) -> bool:
        return verdict(response)

    with tempfile.TemporaryDirectory() as folder:
        config = build_config(nested(settings | {"run.dir": f"{folder}/run"}), "benchmark")
        run_experiment(config, Watch(), RunOverrides(model=model, tokenizer=tokenizer, rows=work.rows, reward=reward))
    seconds, cpu_seconds = marks[-1].since(marks[work.warmup - 1])
    steps = metrics_of[work.warmup :]
    phases = {name: sum(m[f"time/{name}"] for m in steps) for name in ("rollout", "prepare", "update", "sync")}
    phases["rollout"] += sum(m["time/reward_wait"] for m in steps)
    return Timing(
        seconds,
        cpu_seconds,
        _with_rest(phases, seconds),
        work.batch * work.cycles,
        round(sum(m["tokens/generated"] for m in steps)),
        round(sum(m["tokens/loss"] for m in steps)),
        round(steps[-1]["updates/total"] - metrics_of[work.warmup - 1]["updates/total"]),
    )


# --- theirs -----------------------------------------------------------------------------------------------------------


def make_trl(model: Any, tokenizer: Any, rows: Any, reward: Callable[..., Any], callbacks: Any, **settings: Any) -> Any:
    """A GRPOTrainer on the CPU with everything off that costs time and is not asked for."""
    import logging

    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    logging.getLogger("trl").setLevel(logging.ERROR)
    common: dict[str, Any] = {
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": 10.0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "dataloader_pin_memory": False,
    }
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(**(common | settings)),
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_theirs(work: Work) -> Timing:
    """``GRPOTrainer.train``; generation and preparation are timed inside, updates are what is left."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(work.threads)
    model, tokenizer = load(work)
    marks: list[Mark] = []
    trained: list[int] = []
    generated: list[int] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            marks.append(mark())

    def reward(prompts: Any, completions: Any, **others: Any) -> list[float]:
        return [1.0 if verdict(text) else -1.0 for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trl(
            model,
            tokenizer,
            work.rows,
            reward,
            [Watch()],
            output_dir=folder,
            seed=work.seed,
            bf16=work.dtype == "autocast-bfloat16",
            shuffle_dataset=False,
            max_steps=work.updates * (work.warmup + work.cycles),
            num_generations=work.samples,
            per_device_train_batch_size=work.batch // work.updates,
            steps_per_generation=work.updates,
            gradient_accumulation_steps=1,
            max_completion_length=work.tokens,
            learning_rate=work.learning_rate,
            use_transformers_continuous_batching=work.paged,
            generation_kwargs=None if work.natural else {"min_new_tokens": work.tokens},
        )
        generate = timed(trainer, "_generate_single_turn", lambda out: generated.append(sum(map(len, out[0]))))
        prepare = timed(
            trainer, "_generate_and_score_completions", lambda out: trained.append(int(out["completion_mask"].sum()))
        )
        trainer.train()
    skipped = work.updates * work.warmup - 1
    seconds, cpu_seconds = marks[-1].since(marks[skipped])
    rollout, prepared = sum(generate[work.warmup :]), sum(prepare[work.warmup :])
    phases = {"rollout": rollout, "prepare": prepared - rollout, "update": seconds - prepared, "sync": 0.0}
    counts = [sum(values[work.warmup :]) for values in (generated, trained)]
    return Timing(
        seconds,
        cpu_seconds,
        _with_rest(phases, seconds),
        work.batch * work.cycles,
        counts[0],
        counts[1],
        len(marks) - skipped - 1,
    )


def timed(owner: Any, name: str, look: Callable[[Any], None]) -> list[float]:
    """Have the seconds of each call of a method collected, and its result looked at."""
    seconds: list[float] = []
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _clock(seconds):
            result = method(*args, **kwargs)
        look(result)
        return result

    setattr(owner, name, call)
    return seconds


@contextlib.contextmanager
def _clock(seconds: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)


def _with_rest(phases: dict[str, float], seconds: float) -> dict[str, float]:
    return phases | {"rest": seconds - sum(phases.values())}


SIDES: dict[str, Callable[[Work], Timing]] = {"ours": run_ours, "theirs": run_theirs}


def main(side: str, work: str, out: str) -> None:
    """The child process: run a side and write its timing to the file ``out``."""
    Path(out).write_text(json.dumps(asdict(SIDES[side](Work(**json.loads(work))))), encoding="utf-8")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
