"""``dapo.train``: a model, prompts and a reward function are a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.api.rows import Data, files_or_rows
from dapo.api.run import Run, shown
from dapo.config import Config, build_config, flat, nested
from dapo.config.one_value import require_one_value
from dapo.errors import ModelError
from dapo.inference.found_model import find_model
from dapo.inference.model import loaded_model, with_template
from dapo.observe.metrics import read_metrics
from dapo.observe.progress import Listener, make_listener
from dapo.observe.run_folder import RunFolder
from dapo.reward.registry import named
from dapo.util.files import read_json

if TYPE_CHECKING:
    from dapo.orchestrator.experiment import Experiment
    from dapo.orchestrator.inputs import RunOverrides

SIZES: Mapping[str, Any] = {
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


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """What a run came to.

    ``metrics``: one mapping per rollout step. ``summary``: as in summary.json. ``model_path``: the trained weights, in
    Hugging Face layout; of an interrupted run those of its last checkpoint. ``run_dir``: everything else."""

    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    run_dir: Path
    model_path: Path

    @property
    def run(self) -> Run:
        """The run folder, opened: its metrics, evaluations and samples as tables."""
        return Run(self.run_dir)

    @property
    def stopped(self) -> str:
        """Why training ended: ``all steps are done``, ``interrupted``, or another reason."""
        return str(self.summary.get("stopped"))

    def __repr__(self) -> str:
        return f"Result({shown(self.summary, len(self.metrics), self.run_dir)}; {self.stopped})"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run in order. ``result``: what it came to."""

    def __init__(self, result: Result) -> None:
        super().__init__(repr(result))
        self.result = result


def train(
    model: Any,
    prompts: Data,
    reward: Callable[..., Any] | str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    heldout: Data | None = None,
    objective: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    source: Callable[..., Any] | None = None,
    engine: Any = None,
    trackers: Sequence[Any] = (),
    metrics: Mapping[str, Callable[..., float]] | None = None,
    listener: Listener | None = None,
    resume: str | Path | None = None,
) -> Result:
    """Train ``model`` with DAPO so that its responses to ``prompts`` earn more ``reward``.

    Args:
        model: folder, name on the hub, or a loaded ``PreTrainedModel`` (with its ``tokenizer``; trained in place).
        prompts: rows such as ``{"prompt": "2+2=", "answer": "4"}`` (further keys reach the reward function) in a list,
            ``DataFrame``, ``datasets.Dataset`` or generator (read first: a million rows at most); or files of them.
        reward: ``def f(prompt, response, answer, **meta)`` returning bool (correct or not), float, dict or
            :class:`~dapo.records.Reward`, or the name of a declared one (``dapo.reward_function``); None: as
            ``settings`` say, by default mathematical equality with ``answer``. For one that returns only a float set
            ``algorithm.filter_groups.metric`` to ``score``: groups are kept by the spread of the reward then.
        settings: keys of the config, such as ``{"training.steps": 50}``, or nested; :data:`SIZES` has other defaults.
        tokenizer: of a loaded model.
        heldout: rows or files to evaluate on before and after, as for ``prompts``; None: as ``settings`` say.
        objective: what each update minimises, and ``advantage``: ``def f(rewards, epsilon)`` of one group, in place of
            those that ``algorithm.objective`` and ``algorithm.advantage.kind`` name (extending.md).
        source, engine, trackers, metrics: as ``data.source``, ``rollout.engine``, ``run.trackers`` and
            ``evaluation.metrics`` name them; of engine and trackers objects will do, too.
        listener: hears what happens; by default progress is printed.
        resume: folder of a run to go on with; other arguments are that run's, ``settings`` only what is to change.

    Ctrl-C ends the run with a checkpoint. In a notebook and at Python's prompt the result up to there is returned, and
    its ``stopped`` says so; in a script :class:`Interrupted` is raised with it.
    Raises UserError: a setting, row, model or reward is wrong; the message says which and what would work."""
    tree: dict[str, Any] = dict(flat(settings or {}))
    loaded = loaded_model(model, tokenizer, tree)
    given: dict[str, Any] = {"model.path": ("model", str(model) if loaded is None else type(model).__name__)}
    if engine is not None:  # whose numbers are not quite the trainer's
        tree.setdefault("algorithm.proximal", "recompute")
    with closing(listener or make_listener()) as listener:
        train_files, rows = files_or_rows(prompts, "prompts", listener.phase)
        heldout_files, held = ([], None) if heldout is None else files_or_rows(heldout, "heldout", listener.phase)
        given |= {"data.train": ("prompts", train_files), "evaluation.data": ("heldout", heldout_files)}
        tree |= require_one_value(given, (), tree)
        folder = RunFolder(Path(resume)) if resume is not None else None
        config = _config(tree, folder, tokenizer)
        from dapo.orchestrator.inputs import RunOverrides

        reward = named(reward) if isinstance(reward, str) else reward
        parts = (loaded, tokenizer, rows, held, reward, objective, advantage, source, engine)
        return _run(config, listener, RunOverrides(*parts, trackers=trackers, metrics=metrics, resume=folder))


def _config(tree: Mapping[str, Any], folder: RunFolder | None, tokenizer: Any) -> Config:
    """Of a new run; or of one that goes on, with what ``tree`` changes."""
    if folder is not None:
        from dapo.orchestrator.resume import resume_config

        changes = [f"{key}={json.dumps(value, default=str)}" for key, value in tree.items() if key != "run.dir"]
        return resume_config(folder.root, None, changes)
    config = build_config(nested(dict(SIZES) | {"run.dir": free_folder()} | dict(tree)), "settings")
    if "template" in config.data.model_fields_set:
        return config

    from dapo.model.loading import load_tokenizer

    named = config.model.tokenizer or config.model.path
    return with_template(config, tokenizer or load_tokenizer(named, config.model.trust_remote_code))


def free_folder() -> str:
    return next(name for k in range(1, 10_000) if not Path(name := f"runs/python-{k}".removesuffix("-1")).exists())


def _run(config: Config, listener: Listener, inputs: RunOverrides) -> Result:
    from dapo.orchestrator.experiment import Experiment
    from dapo.orchestrator.launch import run_to_end

    attention = None if inputs.model is None else getattr(inputs.model.config, "_attn_implementation", None)
    experiment = None
    try:
        experiment = Experiment(config, listener, inputs)
        summary = run_to_end(experiment)
        listener.finished(summary)
        return result_of(summary)
    except KeyboardInterrupt:
        result = _interrupted(experiment)
        if result is None:
            raise
        if not hasattr(sys, "ps1"):  # a script: what follows counts on a whole run, and Ctrl-C is meant for all of it
            raise Interrupted(result) from None
        return result
    finally:
        if attention is not None:  # so that the caller's model can be used as before
            inputs.model.set_attn_implementation(attention)


def result_of(summary: Mapping[str, Any]) -> Result:
    """Of a run whose folder holds weights. Raises ModelError: it holds none."""
    run_dir = Path(summary["run_dir"])
    steps = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["step"]]  # 0: before training
    return Result(summary, steps, run_dir, Path(find_model(str(run_dir)).path))


def _interrupted(experiment: Experiment | None) -> Result | None:
    """What an interrupted run came to; None: there is no checkpoint yet."""
    if experiment is None or not hasattr(experiment, "recorder"):  # it has not begun to train
        return None
    try:
        folder = experiment.folder
        summary = read_json(folder.summary) if folder.summary.is_file() else {}
        return result_of(summary | {"run_dir": str(folder.root), "stopped": "interrupted"})
    except (ModelError, OSError, ValueError):
        return None
