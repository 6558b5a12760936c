"""The Python interface: a model, prompts and a reward function are a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import build_config, nested
from dapo.errors import DataError, ModelError
from dapo.observe.metrics import read_metrics
from dapo.progress import Listener, make_listener
from dapo.resume import check_resumable
from dapo.reward.registry import named
from dapo.run_folder import RunFolder

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
    prompts: Sequence[Mapping[str, Any]] | str | Path | Sequence[str | Path],
    reward: Callable[..., Any] | str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    heldout: Sequence[Mapping[str, Any]] | str | Path | Sequence[str | Path] | None = None,
    listener: Listener | None = None,
    resume: str | Path | None = None,
) -> Result:
    """Train ``model`` with DAPO so that its responses to ``prompts`` earn more ``reward``.

    Args:
        model: folder in Hugging Face layout, name on the hub, or a loaded ``PreTrainedModel`` (then give its
            ``tokenizer``; the model is trained in place).
        prompts: rows such as ``{"prompt": "2+2=", "answer": "4"}`` (further keys reach the reward function), or JSONL
            files of them.
        reward: ``def f(prompt, response, answer, **meta)`` returning bool (correct or not), float, dict or
            :class:`~dapo.records.Reward`, or the name under which one was declared (``dapo.reward_function``), which
            may take batches; None: as ``settings`` say, by default mathematical equality with ``answer``.
            A function that returns only a float has no notion of right and wrong: set
            ``algorithm.filter_groups.metric`` to ``score``, so that groups are kept by the spread of the reward.
        settings: dotted keys of the config, such as ``{"training.steps": 50}``, or nested; see :data:`SIZES` for what
            differs from a recipe's defaults.
        tokenizer: of a loaded model.
        heldout: rows or files to evaluate on before and after; None: as ``settings`` say.
        listener: hears what happens; by default progress is printed.
        resume: folder of a run to go on with, from its latest checkpoint; the other arguments are those of that run.

    Raises:
        UserError: a setting, row, model or reward is wrong; the message says which and what would work.
    """
    tree: dict[str, Any] = dict(SIZES) | {"run.dir": "runs/python"} | dict(_dotted(settings or {}))
    by_name = isinstance(model, str | Path)
    if not by_name and tokenizer is None and "model.tokenizer" not in tree:
        raise ModelError("tokenizer: a loaded model needs its own: train(model, ..., tokenizer=...)")
    tree["model.path"] = str(model) if by_name else type(model).__name__
    train_files, rows = _files_or_rows(prompts, "prompts")
    heldout_files, heldout_rows = _files_or_rows(heldout, "heldout") if heldout is not None else ([], None)
    if train_files:
        tree["data.train"] = train_files
    if heldout_files:
        tree["evaluation.data"] = heldout_files
    if resume is not None:
        tree["run.dir"] = str(resume)
    config = build_config(nested(tree), "settings")
    if resume is not None:
        check_resumable(RunFolder(Path(resume)), config)

    from dapo.inputs import Inputs
    from dapo.launch import run_experiment

    inputs = Inputs(
        model=None if by_name else model,
        tokenizer=tokenizer,
        rows=rows,
        heldout=heldout_rows,
        reward=named(reward) if isinstance(reward, str) else reward,
        resume=RunFolder(Path(resume)) if resume is not None else None,
    )
    listener = listener or make_listener()
    attention = None if by_name else getattr(model.config, "_attn_implementation", None)
    try:
        summary = run_experiment(config, listener, inputs)
        listener.finished(summary)
    finally:
        listener.close()
        if attention is not None:  # so that the caller's model can be used as before
            model.set_attn_implementation(attention)
    run_dir = Path(summary["run_dir"])
    steps = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["step"]]  # 0: before training
    return Result(summary, steps, run_dir, run_dir / "model-after")


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of settings that may be nested: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _files_or_rows(
    data: Sequence[Mapping[str, Any]] | str | Path | Sequence[str | Path], name: str
) -> tuple[list[str], list[Mapping[str, Any]] | None]:
    """``(files, None)`` or ``([], rows)``.

    Raises:
        DataError: files and rows mixed, of which one kind would be lost; or a single row.
    """
    if isinstance(data, str | Path):
        return [str(data)], None
    if isinstance(data, Mapping):
        raise DataError(f"{name}: expected a list of rows or files, got a single row; put it in a list")
    files = [str(item) for item in data if isinstance(item, str | Path)]
    rows = [item for item in data if not isinstance(item, str | Path)]
    if files and rows:
        raise DataError(f"{name}: {len(files)} files and {len(rows)} rows together; give one kind")
    return (files, None) if files else ([], rows)
