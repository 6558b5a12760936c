"""The orchestrator: places the roles and runs the loop. ``Experiment.train`` is the paper's Algorithm 1.

Consumes: a :class:`~dapo.config.Config` (and, from Python, a model, rows and a reward function in place of names).
Produces: a run folder and its summary. Waits for: the buffer (which waits for engine and scorer), the trainer (in a
thread), evaluation. Nothing heavy runs on the event loop. Holds no mathematics of the algorithm.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dapo.buffer import ExperienceBuffer, Fill
from dapo.config import Config, warnings_for
from dapo.data.source import PromptSource, load_prompts
from dapo.data.template import PromptTemplate
from dapo.errors import ConfigError, DataError, UserError
from dapo.evaluate import Evaluation, evaluate
from dapo.files import write_json
from dapo.model.loading import context_limit, copy_model, load_model, load_tokenizer, stop_token_ids
from dapo.observe.metrics import MetricsLog
from dapo.observe.samples import write_samples
from dapo.observe.step import statistic, step_metrics
from dapo.plan import plan_of
from dapo.prepare import Preparer
from dapo.progress import Listener
from dapo.records import Group, Prompt
from dapo.reward.build import make_scorer, needs_answer
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine
from dapo.rollout.native.engine import NativeEngine
from dapo.run_folder import RunFolder
from dapo.training.trainer import Trainer, UpdateReport

SMALL_MODEL = 10_000_000  # parameters below which an operation is too short to be worth sharing between threads


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a Python caller passes in place of the names in a recipe; None: as the recipe says.

    ``folder``: a run folder that has been made already.
    """

    model: Any = None
    tokenizer: Any = None
    rows: Sequence[Mapping[str, Any]] | None = None
    heldout: Sequence[Mapping[str, Any]] | None = None
    reward: Callable[..., Any] | None = None
    folder: RunFolder | None = None


def run_experiment(config: Config, listener: Listener, inputs: Inputs | None = None) -> dict[str, Any]:
    """Train as ``config`` says and return the summary, which is also written to the run folder.

    Raises:
        UserError: something in recipe, data, model or reward is wrong, or training had to stop; what had been learned
            is in the run folder.
    """
    return run_to_end(Experiment(config, listener, inputs or Inputs()))


def run_to_end(experiment: Experiment) -> dict[str, Any]:
    """Run an experiment from code that is not asynchronous, inside of a notebook's event loop too."""

    async def run() -> dict[str, Any]:
        try:
            return await experiment.run()
        finally:
            await experiment.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1) as thread:  # a loop cannot run inside another one
        return thread.submit(asyncio.run, run()).result()


class Experiment:
    """One run: its roles, wired together."""

    def __init__(self, config: Config, listener: Listener, inputs: Inputs) -> None:
        """Load everything that is named, smallest first, so that mistakes show early; the run folder is made last.

        Raises:
            UserError: what is wrong, where, and what would work.
        """
        self._started = time.perf_counter()
        self.config = config
        self.listener = listener
        for warning in warnings_for(config):
            listener.warning(warning)
        listener.phase("loading tokenizer and data")
        self.tokenizer = inputs.tokenizer or load_tokenizer(
            config.model.tokenizer or config.model.path, config.model.trust_remote_code
        )
        self.template = PromptTemplate(config.data, self.tokenizer)
        self.source = self._load_training_rows(inputs)
        self.heldout = self._load_heldout_rows(inputs)
        listener.phase("loading the model")
        model = load_model(inputs.model or config.model.path, trust_remote_code=config.model.trust_remote_code)
        _check_lengths(config, model)
        set_threads(config, model)
        dtype = getattr(torch, config.model.compute_dtype)
        self.trainer = Trainer(model, config.training, config.rollout.temperature, dtype)
        self.engine: Engine = NativeEngine(
            copy_model(model, dtype),
            stop_token_ids(model, self.tokenizer, config.rollout.stop_token_ids),
            max_sequence_tokens=config.data.max_prompt_length + _longest_response(config),
            max_concurrent_samples=config.rollout.max_concurrent_samples,
            deterministic=config.runtime.deterministic,
            threads=torch.get_num_threads(),
        )
        self.scorer: Scorer = make_scorer(config.reward, inputs.reward)
        self.preparer = Preparer(config, self.trainer.policy)
        self.buffer = ExperienceBuffer(self.source, self.engine, self.scorer, self.template.decode, config)
        self.folder = inputs.folder or RunFolder.create(config)
        self.metrics = MetricsLog(self.folder.metrics)
        self.steps_done = 0
        self.updates_done = 0
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    # -- Algorithm 1 -----------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Every rollout step: sample, score and admit; update; hand the new weights to the engine."""
        total = self.config.training.steps
        for step in range(self.steps_done, total):
            clock = Clock()
            self.trainer.begin_step(step)
            fill = await self.buffer.fill(step)
            clock.lap("rollout")
            groups, packed = await asyncio.to_thread(self.preparer.batch, fill.groups)
            clock.lap("prepare")
            reports: list[UpdateReport] = []
            objective = self.preparer.objective
            for update in self.preparer.updates(packed):
                reports.append(await asyncio.to_thread(self.trainer.update, update.batch, update.inputs, objective))
            clock.lap("update")
            await self.engine.load_weights(*self.trainer.publish())
            clock.lap("sync")
            self.steps_done = step + 1
            evaluation = await self._maybe_evaluate(clock)
            await self._record(fill, groups, reports, clock, evaluation)
            await self._maybe_save()

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        await self.scorer.start()
        await asyncio.to_thread(self.save_model, self.folder.model_before)
        self.before = self.after = await self.evaluate("before training")
        if self.before is not None:
            self.metrics.append(0, self.before.metrics())
        self.listener.started(plan_of(self.config))
        clock = Clock()
        try:
            await self.train()
        except UserError as error:
            saved = await asyncio.to_thread(self.save_checkpoint, "stopped")
            raise type(error)(f"{error}\n{self.steps_done} steps were done; their state is in {saved}") from None
        clock.lap("rl")
        await asyncio.to_thread(self.save_model, self.folder.model_after)
        return self._summarise(clock.laps["rl"])

    async def close(self) -> None:
        """Stop engine and scorer, each within a bounded time."""
        await self.engine.close()
        await self.scorer.close()
        self.metrics.close()

    # -- around the loop -------------------------------------------------------------------------------------------

    async def evaluate(self, name: str) -> Evaluation | None:
        """Evaluate the engine's present weights on the held-out rows, if there are any."""
        if not self.heldout:
            return None
        self.listener.phase(f"evaluating {name}")
        found = await evaluate(
            self.heldout, self.engine, self.scorer, self.template.decode, self.config, self.listener.advance
        )
        self.listener.evaluated(name, found.metrics())
        return found

    def save_model(self, folder: Any) -> None:
        """Weights and tokenizer in Hugging Face layout."""
        self.trainer.save(folder)
        self.tokenizer.save_pretrained(folder)

    def save_checkpoint(self, name: str) -> Any:
        """Weights, optimizer state and the position of everything, under ``checkpoints/name``."""
        folder = self.folder.checkpoints / name
        self.save_model(folder / "model")
        self.trainer.save_state(folder / "optimizer")
        state = {"steps_done": self.steps_done, "buffer": self.buffer.state(), "prepare": self.preparer.state()}
        write_json(folder / "state.json", state)
        return folder

    async def _maybe_save(self) -> None:
        every = self.config.run.save_every
        if every and self.steps_done % every == 0:
            await asyncio.to_thread(self.save_checkpoint, f"step-{self.steps_done:05d}")

    async def _maybe_evaluate(self, clock: Clock) -> dict[str, float]:
        """Evaluation metrics after every so many steps and after the last one."""
        every, last = self.config.evaluation.every, self.steps_done == self.config.training.steps
        if not last and not (every and self.steps_done % every == 0):
            return {}
        found = await self.evaluate("after training" if last else f"after step {self.steps_done}")
        clock.lap("evaluation")
        if last:
            self.after = found
        return found.metrics() if found is not None else {}

    async def _record(
        self,
        fill: Fill,
        groups: Sequence[Group],
        reports: Sequence[UpdateReport],
        clock: Clock,
        evaluation: Mapping[str, float],
    ) -> None:
        self.updates_done += sum(r.skipped is None for r in reports)
        metrics = step_metrics(fill, groups, reports, clock.laps) | {
            "lr": self.trainer.learning_rate,
            "version": self.trainer.version,
            "updates/total": self.updates_done,
            "epoch": self.source.epoch,
            "time/elapsed": time.perf_counter() - self._started,
            "memory/rss": peak_memory(),
            **evaluation,
        }
        if "kl/reference" in metrics:
            metrics["kl/coef"] = self.preparer.kl_coef
            self.preparer.observe_kl(statistic(reports, "reference_kl"), sum(len(g.samples) for g in groups))
        for report in reports:
            if report.skipped:
                self.listener.warning(f"step {self.steps_done}: an update was skipped: {report.skipped}")
        mismatch = metrics.get("mismatch/mean", 0.0)
        if not mismatch <= self.config.training.mismatch_alarm:
            self.listener.warning(
                f"step {self.steps_done}: log-probabilities of engine and trainer differ by {mismatch:.3g} on average "
                f"(training.mismatch_alarm={self.config.training.mismatch_alarm:g}): do both have the same weights, "
                "temperature and type?"
            )
        if self.config.run.save_samples:
            kept = [(group, "kept") for group in groups]
            await asyncio.to_thread(write_samples, self.folder.samples, self.steps_done, [*kept, *fill.rejected])
        self.listener.step(self.steps_done, self.config.training.steps, self.metrics.append(self.steps_done, metrics))

    def _summarise(self, seconds_rl: float) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "run_dir": str(self.folder.root),
            "seed": self.config.seed,
            "steps": self.steps_done,
            "updates": self.updates_done,
            "seconds_rl": round(seconds_rl, 2),
            "seconds_total": round(time.perf_counter() - self._started, 2),
        }
        if self.before is not None and self.after is not None:
            summary |= {
                "heldout_rows": len(self.heldout),
                "accuracy_before": self.before.accuracy,
                "accuracy_after": self.after.accuracy,
                "response_length_before": self.before.response_length,
                "response_length_after": self.after.response_length,
            }
        self.folder.write_summary(summary)
        return summary

    # -- loading ---------------------------------------------------------------------------------------------------

    def _load_training_rows(self, inputs: Inputs) -> PromptSource:
        """The prompts to train on, with a word on what was left out.

        Raises:
            DataError: none are named, a row is bad, or there are fewer than one step needs.
        """
        data = self.config.data
        rows = data.train if inputs.rows is None else inputs.rows
        if not rows:
            raise DataError("data.train: no files are named; give JSONL files of prompts to train on")
        source = load_prompts(
            data, rows, self.template, seed=self.config.seed, answer_required=self._needs_answer(inputs)
        )
        report, wanted = source.report, self.config.rollout.prompts_per_step
        if report.usable < wanted:
            raise DataError(
                f"data.train: {report.usable} usable prompts are fewer than one step needs "
                f"(rollout.prompts_per_step={wanted}); use prompts_per_step={report.usable} or less, or more data"
            )
        for count, what in (
            (report.too_long, f"prompts are longer than data.max_prompt_length={data.max_prompt_length} and left out"),
            (report.duplicates, "rows repeat the prompt of an earlier row"),
            (report.conflicts, "rows repeat the prompt of an earlier row with another answer"),
        ):
            if count:
                self.listener.warning(f"data.train: {count} of {report.rows} {what}")
        return source

    def _load_heldout_rows(self, inputs: Inputs) -> tuple[Prompt, ...]:
        evaluation = self.config.evaluation
        rows = evaluation.data if inputs.heldout is None else inputs.heldout
        if not rows:
            return ()
        source = load_prompts(
            self.config.data,
            rows,
            self.template,
            evaluation=True,
            answer_required=self._needs_answer(inputs),
            limit=evaluation.rows,
        )
        if source.report.too_long:
            self.listener.warning(
                f"evaluation.data: {source.report.too_long} of {source.report.rows} prompts are longer than "
                f"data.max_prompt_length={self.config.data.max_prompt_length} and left out"
            )
        return source.prompts

    def _needs_answer(self, inputs: Inputs) -> bool:
        return inputs.reward is None and needs_answer(self.config.reward)


class Clock:
    """Seconds by phase. A phase may have several laps; they add up."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The time since the last lap went into ``phase``."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now


def peak_memory() -> int:
    """The most memory this process has held, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes everywhere else


def _longest_response(config: Config) -> int:
    return max(config.rollout.max_response_length, config.evaluation.max_response_length or 0)


def _check_lengths(config: Config, model: Any) -> None:
    limit = context_limit(model)
    prompt, response = config.data.max_prompt_length, _longest_response(config)
    if limit is not None and prompt + response > limit:
        shorter = max(1, min(prompt, limit // 4))
        raise ConfigError(
            f"data.max_prompt_length: {prompt} prompt tokens + {response} response tokens = {prompt + response}, but "
            f"the model was made for {limit} positions; use data.max_prompt_length={shorter} and "
            f"rollout.max_response_length={limit - shorter}"
        )


def set_threads(config: Config, model: Any) -> None:
    """Threads for tensor work.

    Operations of a small model take microseconds. Shared between threads, each of them waits for the slowest, and when
    another program holds a core that wait is a whole time slice: measured, a demo model decodes 20k tokens/s on one
    thread whatever else runs, and between 12k and 1.5k on two. See docs/decisions/0004-threads.md.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    torch.set_num_threads(config.runtime.threads or (1 if small else cores))
