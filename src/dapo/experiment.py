"""The orchestrator: places the roles and runs the loop. ``Experiment.train`` is the paper's Algorithm 1.

Consumes: a :class:`~dapo.config.Config` (and, from Python, a model, rows and a reward function in place of names).
Produces: a run folder and its summary. Waits for: the buffer (which waits for engine and scorer), the trainer (in a
thread), evaluation. Nothing heavy runs on the event loop. Holds no mathematics of the algorithm.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dapo.algorithm.objective import TokenInputs
from dapo.budget import Budget
from dapo.buffer import ExperienceBuffer, Fill
from dapo.checkpoints import FORMAT, Checkpoints, CheckpointWriter, Place, Snapshot
from dapo.config import Config, warnings_for
from dapo.data.template import PromptTemplate
from dapo.doctor.examination import brief
from dapo.errors import UserError
from dapo.evaluation.best import Best
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.result import Evaluation
from dapo.files import new_folder, write_json, writing
from dapo.fingerprint import (
    check_fingerprint,
    fingerprint_model,
    fingerprint_prompts,
    fingerprint_reward,
    fingerprint_tokenizer,
)
from dapo.inputs import (
    Inputs,
    cache_bytes,
    check_lengths,
    check_vocabulary,
    device_of,
    heldout_prompts,
    longest_sequence,
    notice_generation_config,
    set_threads,
    training_prompts,
    try_check,
    try_reward,
)
from dapo.model.loading import copy_model, load_tokenizer, stop_token_ids
from dapo.observe.alarms import Alarms
from dapo.observe.metrics import MetricsLog
from dapo.observe.samples import discard_samples, write_samples
from dapo.observe.step import step_metrics, step_warnings
from dapo.observe.trackers import check_trackers, make_trackers
from dapo.plan import plan_of
from dapo.prepare import Batch, Preparer, Update
from dapo.process import Clock, Stopped, Stopping, closed_in_time, give_back_memory, in_thread, peak_memory
from dapo.progress import Listener
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.reward.monitor import Monitor
from dapo.rollout.engine import Engine
from dapo.rollout.native.engine import NativeEngine
from dapo.run_folder import RunFolder
from dapo.state import EncodedState, read_state
from dapo.terminal import visible
from dapo.training.faults import FaultFolder
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.mismatch import Mismatch
from dapo.training.snapshot import snapshot, snapshot_bytes
from dapo.training.trainer import Objective, Trainer, UpdateReport

CLOSE_SECONDS = 30.0


class Experiment:
    """One run: its roles, wired together. ``folder`` and ``metrics`` exist once :meth:`run` has begun."""

    folder: RunFolder
    metrics: MetricsLog

    def __init__(self, config: Config, listener: Listener, inputs: Inputs) -> None:
        """Load everything that is named, smallest first, so that mistakes show early. Nothing is written yet.

        Raises:
            UserError: what is wrong, where, and what would work.
        """
        self.seconds = Clock()
        self.config = config
        self.listener = listener
        check_trackers(config)
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
        self.device = device_of(config, training=True)
        model = load_trainable(inputs.model or config.model.path, config.model, self.device)
        self.fingerprint = {
            "model": fingerprint_model(model),
            "tokenizer": fingerprint_tokenizer(self.tokenizer),
            "data.train": self.source.fingerprint,
            "evaluation.data": fingerprint_prompts(self.heldout),
            "reward": fingerprint_reward(config, inputs.reward),
        }
        model = begin_adapter(model, config.model, config.seed)
        check_lengths(config, model, self.heldout)
        set_threads(config, model)
        dtype = getattr(torch, config.model.compute_dtype)
        self.trainer = Trainer(model, config.training, config.rollout.temperature, dtype)
        self.preparer = Preparer(config, self.trainer.policy)  # before the engine, which takes what memory is left
        stop_ids = stop_token_ids(model, self.tokenizer, config.rollout.stop_token_ids)
        check_vocabulary(model, self.tokenizer, stop_ids, listener)
        notice_generation_config(model, listener)
        self.engine: Engine = inputs.engine or NativeEngine(
            copy_model(model, dtype),
            stop_ids,
            max_sequence_tokens=longest_sequence(config, self.heldout),
            max_concurrent_samples=config.rollout.max_concurrent_samples,
            cache_bytes=cache_bytes(config),
            spare_bytes=self.trainer.bytes_to_come,
            deterministic=config.runtime.deterministic,
            threads=torch.get_num_threads(),
            decode=self.template.decode,
        )
        self.scorer: Scorer = make_scorer(config.reward, inputs.reward)
        self.check: Scorer | None = make_scorer(config.monitor.check) if config.monitor.check else None
        self.monitor = Monitor(config.monitor, self.check, config.seed)
        self.alarms = Alarms(config)
        self.buffer = ExperienceBuffer(self.source, self.engine, self.scorer, self.template.decode, config)
        self._inputs = inputs
        self._resources = contextlib.AsyncExitStack()
        self._resources.push_async_callback(self._stop, "the reward", self.scorer.close)
        if self.check is not None:
            self._resources.push_async_callback(self._stop, "the held-out check", self.check.close)
        self._resources.push_async_callback(self._stop, "the monitor", self.monitor.close)
        self._resources.push_async_callback(self._stop, "the engine", self.engine.close)
        self.stopping = Stopping()  # nobody has told it to
        self.best = Best(config.evaluation)
        self.budget = Budget(config.training)
        self._step: StepUnderWay | None = None
        self._scores: dict[str, dict[str, Any]] = {}  # of the evaluations before and after training
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    @property
    def steps_done(self) -> int:
        """Rollout steps that are complete."""
        return self.budget.steps

    # -- Algorithm 1 -----------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Every rollout step: sample, score and admit; update; hand the new weights to the engine."""
        while not self.budget.used_up and not self.best.converged:
            step, clock = self.steps_done, Clock(self._step.seconds if self._step else None)
            self.trainer.begin_step(step)
            if self._step is None:  # otherwise it was resumed inside of this step
                fill = await self.buffer.fill(step)
                clock.lap("rollout")
                self._step = StepUnderWay(fill, clock.laps)
            self.monitor.begin(self._step.fill.sampled)
            await self.engine.sleep()  # until the next rollout its cache's memory is the trainer's
            if self._step.batch is None:
                groups, version = self._step.fill.groups, self.trainer.version
                self._step.batch = await in_thread(self.preparer.batch, groups, version)
                clock.lap("prepare")
            updates = self.preparer.updates(self._step.batch.packed, done=len(self._step.reports))
            objective = self._unless_out_of_time(self.preparer.objective)
            while update := await in_thread(next, updates, None):
                await in_thread(self._step.apply, self.trainer, update, objective)
                give_back_memory()
                clock.lap("update")
            await self.engine.load_weights(*self.trainer.publish())
            await self.engine.wake()
            clock.lap("sync")
            budget = self.budget.after(sum(seconds for phase, seconds in clock.laps.items() if phase != "evaluation"))
            evaluation = await self._maybe_evaluate(budget, clock)
            await self._record(budget, self._step, self._step.batch, evaluation)
            self.preparer.observe(self._step.reports, self._step.batch)
            self.monitor.settle()
            self.alarms.settle()
            self.budget, self._step = budget, None
            await self._maybe_save()

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        await self.scorer.start()
        await try_reward(self.config, self.scorer, self.source, self.heldout, self.listener)
        if self.check is not None:
            await try_check(self.check, self.source, self.listener)
        if self._inputs.resume is None:
            await self._examine()
        await self._open_folder()
        self.seconds.lap("start")
        try:
            await self.train()
        except BaseException as error:
            note = await self._rescue(error)
            if isinstance(error, UserError):
                raise type(error)(f"{error}\n{note}") from None
            self.listener.warning(note)
            raise
        self.seconds.lap("rl")
        self.stopping.doing = "the final weights to be written"
        await in_thread(self._save_model_after)
        return self._summarise(self.best.reason() if self.best.converged else self.budget.reason())

    async def close(self) -> None:
        """Stop engine and scorer, each within a bounded time, the second one even if the first one fails."""
        await self._resources.aclose()

    async def _stop(self, what: str, close: Callable[[], Awaitable[None]]) -> None:
        self.stopping.doing = f"{what} to stop"
        if not await closed_in_time(close, CLOSE_SECONDS):
            self.listener.warning(f"{what} did not stop within {CLOSE_SECONDS:g} s and is not waited for any longer")

    async def _examine(self) -> None:
        """What `dapo doctor` can tell in brief, as warnings."""
        findings = await brief(
            self.config,
            model=self.trainer.policy.model,
            tokenizer=self.tokenizer,
            template=self.template,
            source=self.source,
            heldout=self.heldout,
            device=self.device,
            scorer=None if self._inputs.reward else self.scorer,
        )
        for finding in findings:
            if finding.status in ("warn", "fail"):
                self.listener.warning(visible(f"doctor: {finding.name}: {finding.found}; {finding.fix}"))

    # -- where it starts -------------------------------------------------------------------------------------------

    async def _open_folder(self) -> None:
        """A new run folder, or one that a run goes on in: from its latest checkpoint, or from the start if it has none.

        Raises:
            UserError: the folder cannot be used, or the run started from something else.
        """
        resumed = self._inputs.resume
        folder = self.folder = resumed or self._inputs.folder or RunFolder.create(self.config)
        self._resources.enter_context(folder.lock())
        self.trainer.faults = FaultFolder(folder.root / "faults", self.template.decode)
        self.checkpoints = Checkpoints(folder.checkpoints, self.config.run.keep_last, self.config.run.keep_every)
        self._writer = CheckpointWriter(self.checkpoints, self.listener.warning)
        self.stopping.run = folder.root
        latest, kept = None, None
        if resumed is not None:
            check_fingerprint(folder.fingerprint, self.fingerprint, self.listener)
            folder.reopen(self.config)
            latest = await in_thread(self.checkpoints.latest_intact, self.listener.warning)
            self.listener.phase(f"going on from {latest}" if latest else "no checkpoint yet: from the start")
            if latest is not None:
                await self._load_checkpoint(latest)
                self.stopping.saved = latest
                self.checkpoints.prune()  # it may be fewer that are to be kept now
            if not self.budget.used_up:  # those that a shorter run ended with
                shutil.rmtree(folder.model_after, ignore_errors=True)
            kept = self.steps_done if latest is not None else -1
            discard_samples(folder.samples, after=kept)
        with writing(folder.fingerprint):
            write_json(folder.fingerprint, self.fingerprint)
        trackers = make_trackers(self.config, folder, keep_until=kept)
        self.metrics = self._resources.enter_context(MetricsLog(folder.metrics, kept, trackers))
        if latest is None:
            await self._begin()
        if self.steps_done and self.budget.used_up:
            self.listener.phase(f"{self.budget.reason()}; to go on: {self.budget.how_to_go_on()}")
        self.listener.started(plan_of(self.config))

    async def _begin(self) -> None:
        """Keep the weights before the first update, and see how good they are."""
        if not self.folder.model_before.exists():  # as it does where a run was killed in its first step
            await in_thread(self.save_model, self.folder.model_before)
        self.before = self.after = found = await self.evaluate("before training")
        if found is not None:
            self.metrics.append(0, found.metrics())
            self._scores = {"before": _scores(found), "after": _scores(found)}
            self.best.observe(0, found.metrics())
            if self._is_best():
                self.checkpoints.set_best(self._best_at(Place(0)))

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

    def save_model(self, folder: Path) -> None:
        """Weights and tokenizer in Hugging Face layout."""
        with writing(folder), new_folder(folder) as staging:
            self.trainer.save(staging)
            self.tokenizer.save_pretrained(staging)

    def _save_model_after(self) -> None:
        shutil.rmtree(self.folder.model_after, ignore_errors=True)  # of a run that was done, and was resumed
        self.save_model(self.folder.model_after)

    async def save_checkpoint(self, wait: bool = False) -> None:
        """Weights, optimizer and the position of everything, between two optimizer updates or inside of a rollout.

        What is written is the state as it is now; it is copied, which is waited for, as is a checkpoint that is still
        being written. The files are written while the run goes on, unless it is to ``wait`` for them.

        Raises:
            UserError: this checkpoint (if waited for) or the one before cannot be written.
        """
        await self._settle()
        updates = len(self._step.reports) if self._step else 0
        sampling = not updates and (self._step is not None or self.buffer.unsettled)
        self._writer.begin(await in_thread(self._snapshot, Place(self.steps_done, updates, sampling)))
        if wait:
            await self._settle()

    async def _settle(self) -> None:
        """Wait for the checkpoint that is being written."""
        saved = await self._writer.settle()
        self.stopping.saved = saved or self.stopping.saved

    def _snapshot(self, place: Place) -> Snapshot:
        self.trainer.check_finite()
        best = self._best_at(place) if self._is_best() and place.between_steps else None
        if self.checkpoints.holds(place):  # the only state that there can be: nothing to write
            return Snapshot(place, lambda folder: None, 0, best)
        trainer = snapshot(self.trainer)
        state = EncodedState(
            {
                "format": FORMAT,
                "steps_done": self.steps_done,
                "budget": self.budget.state(),
                "step": vars(self._step) if self._step else None,
                "buffer": self.buffer.state(),
                "prepare": self.preparer.state(),
                "monitor": self.monitor.state(),
                "alarms": self.alarms.state(),
                "best": self.best.state(),
                "scores": self._scores,
                "seconds": self.seconds.laps,
            }
        )

        def write(folder: Path) -> None:
            with new_folder(folder / "model") as staging:
                trainer.save(staging)
                self.tokenizer.save_pretrained(staging)
            trainer.save_state(folder / "optimizer")
            state.write(folder)

        return Snapshot(place, write, snapshot_bytes(trainer) + state.bytes, best)

    async def _load_checkpoint(self, folder: Path) -> None:
        state = await in_thread(read_state, folder, _STATE)
        await in_thread(self.trainer.load, folder / "model")
        await in_thread(self.trainer.load_state, folder / "optimizer")
        self.budget.load_state(state["steps_done"], state.get("budget", {}))  # an older run has counted no seconds
        self._step = StepUnderWay(**state["step"]) if state["step"] else None
        if self._step and self._step.batch:
            self._step.batch = replace(self._step.batch, packed=self._step.batch.packed.to(self.device))
        self.buffer.load_state(state["buffer"])
        self.preparer.load_state(state["prepare"])
        self.monitor.load_state(state["monitor"])
        if "alarms" in state:  # of an older run it is not
            self.alarms.load_state(state["alarms"])
        self.best.load_state(state["best"])
        self._scores = state["scores"]
        for phase, seconds in state["seconds"].items():
            self.seconds.add(phase, seconds)
        if self._step is None:  # otherwise they are published once its updates are done
            await self.engine.load_weights(*self.trainer.publish())
        recorded = (self.checkpoints.best or {}).get("step")
        ahead = isinstance(recorded, int) and recorded > self.steps_done  # its checkpoint was damaged
        lost = recorded is None or ahead or (self._step is None and self._is_best())
        if self.config.run.keep_best and self.best.step >= 0 and lost:
            # or it was killed before it came to that: without the record the best one would be pruned
            self.checkpoints.set_best(self._best_at(Place(self.best.step)))

    async def _rescue(self, error: BaseException) -> str:
        """Write down what was learned before ``error`` ended the run, and say where. Raises no error of its own."""
        self.seconds.lap("rl")
        self.stopping.doing = "the checkpoint to be written"
        stopped_by_hand = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        reason = "interrupted" if stopped_by_hand else f"{type(error).__name__}: {error}"
        if self.stopping.signal is not None:
            reason += f" by {self.stopping.signal.name}"
        with contextlib.suppress(Exception):  # this state is further than that of the checkpoint that failed
            await self._settle()
        try:
            await self.save_checkpoint(wait=True)
            with contextlib.suppress(OSError):  # a summary is not what is rescued
                self._summarise(reason)
        except Exception as fault:
            before = f"; the last checkpoint is {self.stopping.saved}" if self.stopping.saved else ""
            return f"{self.steps_done} steps were done; their state could not be saved: {fault}{before}"
        return (
            f"{self.steps_done} steps were done; their state is in {self.stopping.saved}; to go on: dapo train "
            f"--resume {self.folder.root}"
        )

    def _unless_out_of_time(self, objective: Objective[TokenInputs]) -> Objective[TokenInputs]:
        """``objective``, but an update that a signal leaves no time for ends with it, between two micro-batches.

        Weights and optimizer are those before that update then, which is made again when the run goes on.
        """

        def within_time(
            logprobs: torch.Tensor, entropy: torch.Tensor, inputs: TokenInputs
        ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
            if self.stopping.seconds_left < self._seconds_to_save:
                raise Stopped("there is no time left for this update")
            return objective(logprobs, entropy, inputs)

        return within_time

    @property
    def _seconds_to_save(self) -> float:
        """What to set aside of the time that a signal leaves: half of it, or three times what the longest took."""
        return min(self.config.run.stop_within_s / 2, 3 * self._writer.longest_s + 10)

    async def _maybe_save(self) -> None:
        """After every so many steps, after the best one so far, and after the last one."""
        run, done = self.config.run, self.steps_done
        last = self.budget.used_up or self.best.converged
        due = any(every and done % every == 0 for every in (run.save_every, run.keep_every))
        if last or due or self._is_best():
            await self.save_checkpoint(wait=last)
        self._writer.check()

    def _is_best(self) -> bool:
        """Whether the present weights are to be kept as the best ones so far."""
        return self.config.run.keep_best and self.best.step == self.steps_done

    def _best_at(self, place: Place) -> dict[str, Any]:
        """For ``best.json``: the best step, which is that of ``place``."""
        saved = self.folder.checkpoints / place.name if place.steps else self.folder.model_before
        best = {"step": self.best.step, "metric": self.best.metric, "value": self.best.value}
        return {**best, "path": str(saved.relative_to(self.folder.root))}

    async def _maybe_evaluate(self, budget: Budget, clock: Clock) -> dict[str, float]:
        """Evaluation metrics after every so many steps and after the last one; ``budget``: with the present one."""
        every, step, last = self.config.evaluation.every, budget.steps, budget.used_up
        if not last and not (every and step % every == 0):
            return {}
        found = await self.evaluate("after training" if last else f"after step {step}")
        clock.lap("evaluation")
        if found is None:
            return {}
        self.after = found
        self._scores["after"] = _scores(found)
        self.best.observe(step, found.metrics())
        return found.metrics()

    async def _record(self, budget: Budget, work: StepUnderWay, batch: Batch, evaluation: Mapping[str, float]) -> None:
        step = budget.steps
        mismatch = batch.mismatch or sum((r.mismatch for r in work.reports), Mismatch())
        self.seconds.lap("rl")
        metrics = step_metrics(work.fill, batch.groups, work.reports, mismatch, work.seconds, self.config) | {
            "lr": self.trainer.learning_rate,
            "version": self.trainer.version,
            "updates/total": self.trainer.updates,
            "epoch": self.source.epoch,
            "time/training": budget.seconds,
            "time/elapsed": self.seconds.total,
            "memory/rss": peak_memory(),
            **evaluation,
        }
        if self.config.algorithm.kl.mode in ("loss", "reward"):
            metrics["kl/coef"] = self.preparer.kl_coef
        audit, found = await self.monitor.finish()
        metrics |= audit
        count, alarms = self.alarms.observe(step, metrics)
        metrics |= count
        for warning in [*step_warnings(work.fill, work.reports), *found, *alarms]:
            self.listener.warning(f"step {step}: {warning}")
        if self.config.run.save_samples:
            kept = [(group, "kept") for group in batch.groups]
            with writing(self.folder.samples):
                await in_thread(write_samples, self.folder.samples, step, [*kept, *work.fill.rejected], work.reports)
        self.listener.step(step, self.config.training.steps, self.metrics.append(step, metrics))

    def _summarise(self, stopped: str) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "run_dir": str(self.folder.root),
            "seed": self.config.seed,
            "steps": self.steps_done,
            "updates": self.trainer.updates,
            "stopped": stopped,
            "seconds_rl": round(self.seconds.laps.get("rl", 0.0), 2),
            "seconds_total": round(self.seconds.total, 2),
        }
        before, after = self._scores.get("before"), self._scores.get("after")
        if before is not None and after is not None and (self.steps_done or not self.config.training.steps):
            summary["heldout_rows"] = len(self.heldout)
            for name in before:
                summary |= {f"{name}_before": before[name], f"{name}_after": after[name]}
            summary["best"] = {"step": self.best.step, self.best.metric: self.best.value}
        self.folder.write_summary(summary)
        return summary


_STATE = ("steps_done", "step", "buffer", "prepare", "monitor", "best", "scores", "seconds")


@dataclass(slots=False)
class StepUnderWay:
    """A rollout step between its rollout and its end: what has been done of it."""

    fill: Fill
    seconds: dict[str, float]
    """By phase, so far."""
    batch: Batch | None = None
    """None: it is still to be prepared."""
    reports: list[UpdateReport] = field(default_factory=list)
    """Of the optimizer updates so far."""

    def apply(self, trainer: Trainer, update: Update, objective: Objective[TokenInputs]) -> None:
        """Make an update and take note of it, both or neither: the program may be stopped at any time."""
        self.reports.append(trainer.update(update.batch, update.inputs, objective))


def _scores(found: Evaluation) -> dict[str, Any]:
    """What the summary compares before and after training."""
    return {"accuracy": found.accuracy, "response_length": found.response_length}
