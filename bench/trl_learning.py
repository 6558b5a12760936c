"""The learning curve of TRL with colocated vLLM on GSM8K, for the plot beside ours (``gsm8k.py report``).

usage: python bench/trl_learning.py --minutes 10 --setting SETTING --data FOLDER --model FOLDER --out RUN
           [--peer-path SITE] [--lr 1e-5] [--prompts 128] [--seed 1] [--every 1]

TRL's GRPOTrainer trains for so many minutes on the rows, prompts, reward, warm-up, batch, clipping and overlong
punishment of ``recipes/gsm8k-1gpu.yaml``, at a constant rate (``--lr``); dynamic sampling it does not have. Once a
minute (``--every``) the weights go into vLLM, which answers all rows of the evaluation greedily; our own code scores
the answers and makes the numbers. Minutes are those of training: evaluations, and the start, are left out, as they are
in ours. What comes out is a folder with metrics.jsonl and card.json, as ``gsm8k.py report`` reads them.

Settings: see ``trl_side.py``. TRL and vLLM have to be importable, or in ``--peer-path``. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from gsm8k import read_rows  # noqa: E402
from trl_side import MathReward, Task, conversation, named, setting_name  # noqa: E402  (modules beside this one)


def main(arguments: list[str] | None = None) -> None:
    """Train, and write the curve."""
    options = parse(arguments)
    if options.peer_path:
        sys.path.insert(0, str(options.peer_path))
        places = [str(options.peer_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(places)  # vLLM looks at models in processes of its own
    # TRL reaches into the engine, which has to be in its own process
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"})
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"TRL with colocated vLLM needs a GPU, and PyTorch {torch.__version__} sees none")
    train(options)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="of training")
    parser.add_argument("--setting", default="defaults", type=setting_name)
    parser.add_argument("--data", type=Path, default=Path("runs/gsm8k-data"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-path", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k-trl"))
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--warmup", type=int, default=3, help="rollouts")
    parser.add_argument("--prompts", type=int, default=128, help="of a rollout, each sampled 16 times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=1.0, help="minutes between evaluations")
    options = parser.parse_args(arguments)
    if named(options.setting).trainer.get("vllm_enable_sleep_mode"):  # only TRL's own generate() wakes its cache
        parser.error(f"--setting {options.setting}: the evaluations need vLLM awake; leave sleep out")
    for name in ("minutes", "every", "lr", "prompts"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name} {getattr(options, name)}: must be a number above 0")
    for name in ("train", "test"):
        if not (options.data / f"{name}.jsonl").is_file():
            parser.error(f"--data {options.data}: has no {name}.jsonl; python bench/gsm8k.py data makes it")
    return options


def task_of(options: argparse.Namespace) -> Task:
    """The work of the recipe."""
    return Task(
        options.model,
        prompts=options.prompts,
        learning_rate=options.lr,
        warmup_rollouts=options.warmup,
        seed=options.seed,
    )


def train(options: argparse.Namespace) -> None:
    """Train until the minutes are over, evaluating in between."""
    from rollout_ours import measure_limits
    from transformers import TrainerCallback
    from trl_side import make_trainer, punishment

    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "card.json").write_text(json.dumps(asdict(measure_limits("cuda"))), encoding="utf-8")
    task, reward, started = task_of(options), MathReward(), time.perf_counter()
    curve = Log(options.out / "metrics.jsonl", started)
    heldout = read_rows(options.data / "test.jsonl")

    class Minutes(TrainerCallback):  # type: ignore[misc]
        """Counts the time of training, and stops it for evaluations."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            curve.say(0, 0.0, evaluate(trainer, heldout, task, reward))
            self.spent, self.evaluated, self.since = 0.0, 0.0, time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            import torch

            rollouts, inside = divmod(state.global_step, task.updates)
            if inside:
                return
            torch.cuda.synchronize()
            self.spent += time.perf_counter() - self.since
            over = self.spent >= 60 * options.minutes
            found: dict[str, float] = {}
            if over or self.spent - self.evaluated >= 60 * options.every:
                found, self.evaluated = evaluate(trainer, heldout, task, reward), self.spent
            curve.say(rollouts, self.spent, found)
            control.should_training_stop = over
            self.since = time.perf_counter()

    rows = [conversation(row) for row in read_rows(options.data / "train.jsonl")]
    trainer = make_trainer(
        task, named(options.setting), rows, [reward, punishment(task)], [Minutes()], 1_000_000, options.out
    )
    trainer.train()
    trainer.save_model(str(options.out / "model-after"))
    reward.close()


class Log:
    """metrics.jsonl of a run, as far as a curve needs it."""

    def __init__(self, file: Path, started: float) -> None:
        self._file, self._started = file, started
        file.write_text("", encoding="utf-8")

    def say(self, step: int, spent: float, found: dict[str, float]) -> None:
        """A line."""
        entry = {"step": step, "time/training": spent, "time/elapsed": time.perf_counter() - self._started, **found}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def evaluate(trainer: Any, heldout: Sequence[dict[str, str]], task: Task, reward: MathReward) -> dict[str, float]:
    """Greedy answers of the present weights, through the trainer's vLLM; the numbers that our evaluation makes."""
    from vllm import SamplingParams

    engine = trainer.vllm_generation
    engine.sync_weights()
    messages = [conversation(row)["prompt"] for row in heldout]
    prompts = [token_ids(trainer.processing_class, one) for one in messages]
    params = SamplingParams(temperature=0.0, max_tokens=task.limit)
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return measured(heldout, [(a.text, list(a.token_ids), a.finish_reason) for a in answers], reward)


def token_ids(tokenizer: Any, messages: Any) -> list[int]:
    """A prompt as the model sees it."""
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(found["input_ids"])


def measured(
    heldout: Sequence[dict[str, str]], answers: Sequence[tuple[str, list[int], str]], reward: MathReward
) -> dict[str, float]:
    """Metrics of an evaluation from text, tokens and reason of the end of each answer."""
    import numpy as np

    from dapo.evaluation.result import Evaluation
    from dapo.records import Group, Prompt, Reward, Sample

    verdicts = reward.verdicts([text for text, _, _ in answers], [row["answer"] for row in heldout])
    groups = []
    for i, (row, (text, ids, reason), (value, correct, extracted, there)) in enumerate(
        zip(heldout, answers, verdicts, strict=True)
    ):
        tokens = np.asarray(ids, dtype=np.int32)
        zeros = np.zeros(len(ids), dtype=np.float32)
        found = Reward(correct, value, {"answer_found": there}, extracted=extracted)
        end: Any = "length" if reason == "length" else "stop"
        sample = Sample(i, 0, tokens, zeros, zeros.astype(np.int32), end, text=text, reward=found)
        groups.append(Group(i, Prompt(i, row["prompt"], (0,), row["answer"]), (sample,)))
    return Evaluation(tuple(groups)).metrics()


if __name__ == "__main__":
    main()
