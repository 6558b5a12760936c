"""The Python interface: a model, prompts and a reward function are a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import build_config, nested
from dapo.observe.metrics import read_metrics
from dapo.progress import Listener, make_listener

SIZES: Mapping[str, Any] = {
    "data.template": "plain",
    "data.max_prompt_length": 64,
    "rollout.prompts_per_step": 16,
    "rollout.samples_per_prompt": 8,
    "rollout.max_response_length": 64,
    "rollout.max_concurrent_samples": 128,
    "algorithm.overlong_buffer.len": 16,
    "training.groups_per_update": 4,
    "training.steps": 20,
    "training.learning_rate": 1e-5,
    "training.warmup_steps": 2,
    "training.tokens_per_micro_batch": 8192,
    "run.if_exists": "rename",
}
"""Sizes for a laptop, where the paper's (the defaults of a recipe) are for a cluster. Settings override them."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    ``metrics``: one mapping per rollout step. ``summary``: as in summary.json. ``model_path``: the trained weights, in
    Hugging Face layout. ``run_dir``: everything else.
    """

    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    run_dir: Path
    model_path: Path


def train(
    model: Any,
    prompts: Sequence[Mapping[str, Any]] | str | Sequence[str],
    reward: Callable[..., Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    heldout: Sequence[Mapping[str, Any]] | str | Sequence[str] = (),
    listener: Listener | None = None,
) -> Result:
    """Train ``model`` with DAPO so that its responses to ``prompts`` earn more ``reward``.

    Args:
        model: folder in Hugging Face layout, name on the hub, or a loaded ``PreTrainedModel`` (then give its
            ``tokenizer``; the model is trained in place).
        prompts: rows such as ``{"prompt": "2+2=", "answer": "4"}`` (further keys reach the reward function), or JSONL
            files of them.
        reward: ``def f(prompt, response, answer, **meta)`` returning bool (correct or not), float, dict or
            :class:`~dapo.records.Reward`; None: as ``settings`` say, by default mathematical equality with ``answer``.
            A function that returns only a float has no notion of right and wrong: groups are then kept by the spread of
            the reward (``algorithm.filter_groups.metric``: ``score``).
        settings: dotted keys of the config, such as ``{"training.steps": 50}``; see :data:`SIZES` for what differs from
            a recipe's defaults.
        tokenizer: of a loaded model.
        heldout: rows or files to evaluate on before and after.
        listener: hears what happens; by default progress is printed.

    Raises:
        UserError: a setting, row, model or reward is wrong; the message says which and what would work.
    """
    tree: dict[str, Any] = dict(SIZES) | {"run.dir": "runs/python"} | dict(settings or {})
    by_name = isinstance(model, str | Path)
    tree["model.path"] = str(model) if by_name else type(model).__name__
    train_files, rows = _files_or_rows(prompts)
    heldout_files, heldout_rows = _files_or_rows(heldout)
    if train_files:
        tree["data.train"] = train_files
    if heldout_files:
        tree["evaluation.data"] = heldout_files
    config = build_config(nested(tree), "settings")

    from dapo.experiment import Inputs, run_experiment

    inputs = Inputs(
        model=None if by_name else model, tokenizer=tokenizer, rows=rows, heldout=heldout_rows, reward=reward
    )
    listener = listener or make_listener()
    try:
        summary = run_experiment(config, listener, inputs)
        listener.finished(summary)
    finally:
        listener.close()
    run_dir = Path(summary["run_dir"])
    return Result(summary, list(read_metrics(run_dir / "metrics.jsonl")), run_dir, run_dir / "model-after")


def _files_or_rows(
    data: Sequence[Mapping[str, Any]] | str | Sequence[str],
) -> tuple[list[str], list[Mapping[str, Any]] | None]:
    """``(files, None)`` or ``([], rows)``."""
    if isinstance(data, str):
        return [data], None
    files = [item for item in data if isinstance(item, str)]
    if files:
        return files, None
    return [], [item for item in data if not isinstance(item, str)]
