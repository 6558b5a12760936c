"""The orchestrator: places the roles and runs the loop. ``Experiment.train`` is the paper's Algorithm 1.

Consumes: a :class:`~dapo.config.Config` (and, from Python, a model, rows and a reward function in place of names).
Produces: a run folder and its summary. Waits for: the buffer (which waits for engine and scorer), the trainer (in a
thread), evaluation. Nothing heavy runs on the event loop. Holds no mathematics of the algorithm.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from dapo.buffer import ExperienceBuffer, Fill
from dapo.config import Config, warnings_for
from dapo.data.template import PromptTemplate
from dapo.errors import UserError
from dapo.evaluate import Evaluation, evaluate
from dapo.files import write_json
from dapo.inputs import (
    Inputs,
    check_lengths,
    check_vocabulary,
    heldout_prompts,
    longest_response,
    set_threads,
    training_prompts,
    try_reward,
)
from dapo.model.loading import copy_model, load_model, load_tokenizer, stop_token_ids
from dapo.observe.metrics import MetricsLog
from dapo.observe.samples import write_samples
from dapo.observe.step import step_metrics
from dapo.plan import plan_of
from dapo.prepare import Batch, Preparer
from dapo.process import Clock, in_thread, peak_memory
from dapo.progress import Listener
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine
from dapo.rollout.native.engine import NativeEngine
from dapo.run_folder import RunFolder
from dapo.training.mismatch import Mismatch
from dapo.training.trainer import Trainer, UpdateReport


def run_experiment(config: Config, listener: Listener, inputs: Inputs | None = None) -> dict[str, Any]:
    """Train as ``config`` says and return the summary, which is also written to the run folder.

    Raises:
        UserError: something in recipe, data, model or reward is wrong, or training had to stop; what had been learned
            is in the run folder.
    """
    return run_to_end(Experiment(config, listener, inputs or Inputs()))


def run_to_end(experiment: Experiment) -> dict[str, Any]:
    """Run an experiment from code that is not asynchronous, inside of a notebook's event loop too."""

    stop: list[Callable[[], object]] = []

    async def run() -> dict[str, Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            summary = await experiment.run()
        except BaseException as error:
            try:
                await experiment.close()
            except Exception as fault:  # must not stand before what went wrong first
                error.add_note(f"and closing failed: {fault}")
            raise
        await experiment.close()
        return summary

    if not _in_event_loop():
        return asyncio.run(run())
    outer = asyncio.current_task()
    with ThreadPoolExecutor(1) as thread:  # a loop cannot run inside another one
        running = thread.submit(asyncio.run, run())
        try:
            while not wait([running], timeout=0.5).done:
                if outer is not None and outer.cancelling():  # Ctrl-C under asyncio.run cancels the waiting task
                    raise KeyboardInterrupt
            return running.result()
        except KeyboardInterrupt:  # of this thread: the other one does not hear of it
            for cancel in stop:
                cancel()
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Experiment:
    """One run: its roles, wired together. ``folder`` and ``metrics`` exist once :meth:`run` has begun."""

    folder: RunFolder
    metrics: MetricsLog

    def __init__(self, config: Config, listener: Listener, inputs: Inputs) -> None:
        """Load everything that is named, smallest first, so that mistakes show early. Nothing is written yet.

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
        self.source = training_prompts(config, inputs, self.template, listener)
        self.heldout = heldout_prompts(config, inputs, self.template, listener)
        listener.phase(f"a prompt as the model sees it: {self.template.show(self.source.prompts[0])}")
        listener.phase("loading the model")
        model = load_model(inputs.model or config.model.path, trust_remote_code=config.model.trust_remote_code)
        check_lengths(config, model)
        set_threads(config, model)
        dtype = getattr(torch, config.model.compute_dtype)
        self.trainer = Trainer(model, config.training, config.rollout.temperature, dtype)
        stop_ids = stop_token_ids(model, self.tokenizer, config.rollout.stop_token_ids)
        check_vocabulary(model, self.tokenizer, stop_ids, listener)
        self.engine: Engine = NativeEngine(
            copy_model(model, dtype),
            stop_ids,
            max_sequence_tokens=config.data.max_prompt_length + longest_response(config),
            max_concurrent_samples=config.rollout.max_concurrent_samples,
            deterministic=config.runtime.deterministic,
            threads=torch.get_num_threads(),
        )
        self.scorer: Scorer = make_scorer(config.reward, inputs.reward)
        self.preparer = Preparer(config, self.trainer.policy)
        self.buffer = ExperienceBuffer(self.source, self.engine, self.scorer, self.template.decode, config)
        self._folder = inputs.folder
        self._resources = contextlib.AsyncExitStack()
        self._resources.push_async_callback(self.scorer.close)
        self._resources.push_async_callback(self.engine.close)
        self.steps_done = 0
        self._reports: list[UpdateReport] = []  # of the step under way
        self._before_step: dict[str, Any] | None = None  # the buffer, while a step is under way
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    # -- Algorithm 1 -----------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Every rollout step: sample, score and admit; update; hand the new weights to the engine."""
        total = self.config.training.steps
        for step in range(self.steps_done, total):
            clock = Clock()
            self.trainer.begin_step(step)
            self._before_step = self.buffer.state()
            fill = await self.buffer.fill(step)
            clock.lap("rollout")
            batch = await in_thread(self.preparer.batch, fill.groups, self.trainer.version)
            clock.lap("prepare")
            self._reports = []
            updates, objective = self.preparer.updates(batch.packed), self.preparer.objective
            while update := await in_thread(next, updates, None):
                self._reports.append(await in_thread(self.trainer.update, update.batch, update.inputs, objective))
            clock.lap("update")
            await self.engine.load_weights(*self.trainer.publish())
            clock.lap("sync")
            self.steps_done, self._before_step = step + 1, None
            evaluation = await self._maybe_evaluate(clock)
            await self._record(fill, batch, clock, evaluation)
            self.preparer.observe(self._reports, batch)
            await self._maybe_save()

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        await self.scorer.start()
        await try_reward(self.config, self.scorer, self.source, self.heldout, self.listener)
        self.folder = self._folder or RunFolder.create(self.config)
        self.metrics = self._resources.enter_context(MetricsLog(self.folder.metrics))
        await in_thread(self.save_model, self.folder.model_before)
        self.before = self.after = await self.evaluate("before training")
        if self.before is not None:
            self.metrics.append(0, self.before.metrics())
        self.listener.started(plan_of(self.config))
        clock = Clock()
        try:
            await self.train()
        except BaseException as error:
            note = await self._rescue(error, clock)
            if isinstance(error, UserError):
                raise type(error)(f"{error}\n{note}") from None
            self.listener.warning(note)
            raise
        clock.lap("rl")
        await in_thread(self.save_model, self.folder.model_after)
        return self._summarise(clock.laps["rl"], "all steps are done")

    async def close(self) -> None:
        """Stop engine and scorer, each within a bounded time, the second one even if the first one fails."""
        await self._resources.aclose()

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
        """Weights, optimizer state and the position of everything, under ``checkpoints/name``.

        Inside of a step, the buffer's position is that before the step; ``updates_in_step`` says how many updates of it
        are in the weights already.
        """
        folder = self.folder.checkpoints / name
        self.save_model(folder / "model")
        self.trainer.save_state(folder / "optimizer")
        inside = self._before_step is not None
        state = {
            "steps_done": self.steps_done,
            "updates_done": self.trainer.updates,
            "updates_in_step": sum(r.skipped is None for r in self._reports) if inside else 0,
            "buffer": self._before_step if inside else self.buffer.state(),
            "prepare": self.preparer.state(),
        }
        write_json(folder / "state.json", state)
        return folder

    async def _rescue(self, error: BaseException, clock: Clock) -> str:
        """Write down what was learned before ``error`` ended the run, and say where. Raises no error of its own."""
        clock.lap("rl")
        stopped_by_hand = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        reason = "interrupted" if stopped_by_hand else f"{type(error).__name__}: {error}"
        try:
            saved = await in_thread(self.save_checkpoint, "stopped")
            self._summarise(clock.laps["rl"], reason)
        except Exception as fault:
            return f"{self.steps_done} steps were done; their state could not be saved: {fault}"
        return f"{self.steps_done} steps were done; their state is in {saved}"

    async def _maybe_save(self) -> None:
        every = self.config.run.save_every
        if every and self.steps_done % every == 0:
            await in_thread(self.save_checkpoint, self.folder.checkpoint(self.steps_done).name)

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

    async def _record(self, fill: Fill, batch: Batch, clock: Clock, evaluation: Mapping[str, float]) -> None:
        mismatch = batch.mismatch or sum((r.mismatch for r in self._reports), Mismatch())
        metrics = step_metrics(fill, batch.groups, self._reports, mismatch, clock.laps, self.config) | {
            "lr": self.trainer.learning_rate,
            "version": self.trainer.version,
            "updates/total": self.trainer.updates,
            "epoch": self.source.epoch,
            "time/elapsed": time.perf_counter() - self._started,
            "memory/rss": peak_memory(),
            **evaluation,
        }
        if self.config.algorithm.kl.mode in ("loss", "reward"):
            metrics["kl/coef"] = self.preparer.kl_coef
        self._warn(fill, mismatch)
        if self.config.run.save_samples:
            kept = [(group, "kept") for group in batch.groups]
            await in_thread(write_samples, self.folder.samples, self.steps_done, [*kept, *fill.rejected])
        self.listener.step(self.steps_done, self.config.training.steps, self.metrics.append(self.steps_done, metrics))

    def _warn(self, fill: Fill, mismatch: Mismatch) -> None:
        if not fill.groups:
            stats = fill.stats
            self.listener.warning(
                f"step {self.steps_done}: nothing to train on: of {stats.drawn} prompts {stats.all_wrong} were all "
                f"wrong, {stats.all_right} all right, {stats.flat} without spread in the reward; the weights stay"
            )
        for report in self._reports:
            if report.skipped:
                self.listener.warning(f"step {self.steps_done}: an update was skipped: {report.skipped}")
        if mismatch.exceeds(self.config.training.mismatch_alarm):
            self.listener.warning(
                f"step {self.steps_done}: log-probabilities of engine and trainer differ by {mismatch.mean:.3g} on "
                f"average (training.mismatch_alarm={self.config.training.mismatch_alarm:g}): do both have the same "
                "weights, temperature and type?"
            )

    def _summarise(self, seconds_rl: float, stopped: str) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "run_dir": str(self.folder.root),
            "seed": self.config.seed,
            "steps": self.steps_done,
            "updates": self.trainer.updates,
            "stopped": stopped,
            "seconds_rl": round(seconds_rl, 2),
            "seconds_total": round(time.perf_counter() - self._started, 2),
        }
        ended = self.after is not self.before or not self.config.training.steps
        if self.before is not None and self.after is not None and ended:
            summary |= {
                "heldout_rows": len(self.heldout),
                "accuracy_before": self.before.accuracy,
                "accuracy_after": self.after.accuracy,
                "response_length_before": self.before.response_length,
                "response_length_after": self.after.response_length,
            }
        self.folder.write_summary(summary)
        return summary
