"""The orchestrator: places the roles and runs the loop. ``Experiment.train`` is the paper's Algorithm 1.

Consumes: a :class:`~dapo.config.Config` (and, from Python, a model, rows and a reward function in place of names).
Produces: a run folder and its summary. Waits for: the collector (which waits for engine and scorer), the trainer (in a
thread), evaluation. Nothing heavy runs on the event loop. Holds no mathematics of the algorithm.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo.checks.examination import brief
from dapo.checks.memory import shortage_explained
from dapo.checks.start import check_lengths, check_vocabulary, notice_generation_config, try_check, try_reward
from dapo.config import Config, warnings_for
from dapo.config.plan import plan_of
from dapo.config.secrets import redact
from dapo.data.template import PromptTemplate
from dapo.errors import StarvedError, UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.result import Evaluation
from dapo.model.export import export_dtype
from dapo.model.loading import embedding_rows, load_tokenizer, stop_token_ids
from dapo.model.placement import determinism, device_of, set_threads
from dapo.observe.alarms import Alarms
from dapo.observe.changes import Change, config_of_step
from dapo.observe.checkpoints import CheckpointId
from dapo.observe.fingerprint import check_fingerprint, fingerprint
from dapo.observe.index import forget_steps
from dapo.observe.indexing import BackgroundIndex
from dapo.observe.metrics import MetricsLog
from dapo.observe.progress import Listener
from dapo.observe.resources import make_recorder
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import discard_samples
from dapo.observe.trackers import check_trackers, make_trackers
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.checkpointer import CLOSE_SECONDS, Checkpointer, RunState, Stateful
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.inputs import (
    RunOverrides,
    described_model,
    heldout_prompts,
    native_engine,
    policy_model,
    training_prompts,
)
from dapo.orchestrator.mfu import CardLimits
from dapo.orchestrator.resume import changes_at, how_to_resume, on_day, on_its_day
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.step_metrics import step_seconds
from dapo.orchestrator.step_state import StepState, unless
from dapo.orchestrator.summary import scores_of, summarise
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.reward.monitor import Monitor
from dapo.training.faults import FaultFolder
from dapo.training.lora import begin_adapter
from dapo.training.trainer import Trainer
from dapo.util.files import write_json, writing
from dapo.util.process import Clock, Shutdown, closed_in_time, give_back_memory, in_thread, peak_memory
from dapo.util.terminal import counted, visible


class Experiment:
    """One run: its roles, wired together. To be called in this order: :meth:`check`, :meth:`load`, :meth:`run`.
    ``trainer``, ``engine`` and ``collector`` exist once the model is loaded, ``folder`` and ``metrics`` in the run."""

    folder: RunFolder
    metrics: MetricsLog

    def __init__(self, config: Config, listener: Listener, inputs: RunOverrides) -> None:
        """Look at everything that is named but the weights and the reward. Nothing is written yet.
        Raises UserError: what is wrong, where, and what would work."""
        self.at = RunState(Budget(config.training))
        config = on_its_day(config, inputs.resume) if inputs.resume else config
        self.listener = listener
        check_trackers(config)
        for warning in warnings_for(config, inputs.heldout):
            listener.warning(warning)
        self.device = device_of(config)
        listener.phase("loading tokenizer and data")
        self.tokenizer = inputs.tokenizer or load_tokenizer(
            config.model.tokenizer or config.model.path, config.model.trust_remote_code
        )
        described = described_model(config, inputs)
        rows = embedding_rows(inputs.model or config.model.path, config.model.trust_remote_code)
        self.template = PromptTemplate(config.data, self.tokenizer, rows)
        if config.data.today and not self.template.today:
            listener.warning("data.today: the chat template does not ask for the date, so nothing comes of it")
        self.config = self.in_force = config = on_day(config, self.template.today)
        self.source = training_prompts(config, inputs, self.template, listener)
        self.heldout = heldout_prompts(config, inputs, self.template, listener)
        listener.phase(f"a prompt as the model sees it: {self.template.show(self.source.prompts[0])}")
        check_lengths(config, described.config, self.heldout)
        check_vocabulary(described, self.tokenizer, config, listener, rows)
        if inputs.folder is None and inputs.resume is None:
            RunFolder.require_free(config)
        self._inputs = inputs
        self._closing = contextlib.AsyncExitStack()
        self._closing.enter_context(determinism(config, self.device))  # a reward model may multiply matrices, too
        self.scorer: Scorer = make_scorer(config.reward, inputs.reward)
        self.check_scorer: Scorer | None = make_scorer(config.monitor.check) if config.monitor.check else None
        self.monitor = Monitor(config.monitor, self.check_scorer, config.seed)
        self.alarms = Alarms(config)
        self.changes: Sequence[Change] = ()
        closers = {"the reward": self.scorer, "the held-out check": self.check_scorer, "the monitor": self.monitor}
        for what, role in closers.items():
            if role is not None:
                self._closing.push_async_callback(self._stop, what, role.close)
        self.stopping = Shutdown()  # nobody has told it to
        self.best = EarlyStopping(config.evaluation)
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def check(self) -> None:
        """Start the reward and try it, before time is spent on loading the model.
        Raises UserError: rows cannot be scored, or the reward or the held-out check breaks its contract."""
        await self.scorer.start()
        await try_reward(
            self.config, self.scorer, self.source, self.heldout, self.listener, self._inputs.reward is not None
        )
        if self.check_scorer is not None:
            await try_check(self.check_scorer, self.source, self.listener)

    def load(self) -> None:
        """Load the model, and make trainer and engine.
        Raises UserError: it cannot be loaded or trained, or does not fit into the memory."""
        config, inputs, listener = self.config, self._inputs, self.listener
        listener.phase("loading the model")
        # one thread for all updates: cuBLAS keeps 32 MiB for each thread that ever multiplied matrices
        training = ThreadPoolExecutor(1, "dapo-training")
        self._closing.callback(training.shutdown, wait=False)
        self._compute = partial(in_thread, pool=training)
        model = policy_model(config, inputs, self.device)
        self.fingerprint = fingerprint(
            config, model, self.tokenizer, self.source.fingerprint, self.source.prompts[0], self.heldout, inputs.reward
        )
        model = begin_adapter(model, config.model, config.seed)
        set_threads(config, model)
        dtype = getattr(torch, config.model.compute_dtype)
        self.trainer = Trainer(model, config.training, config.rollout.temperature, dtype)
        self._limits = CardLimits.of(model, self.device, dtype)
        self.preparer = BatchBuilder(config, self.trainer.policy)  # before the engine, which takes what memory is left
        self._stop_ids = stop_ids = stop_token_ids(model, self.tokenizer, config.rollout.stop_token_ids)
        self.template.ends_with(stop_ids)
        notice_generation_config(model, listener)
        spare = self.trainer.bytes_to_come
        self.engine = inputs.engine or native_engine(config, model, stop_ids, self.template, self.heldout, spare)
        progress = partial(listener.working, "rollout")
        self.collector = Collector(self.source, self.engine, self.scorer, self.template.decode, config, progress)
        self._closing.push_async_callback(self._stop, "the engine", self.engine.close)

    # -- Algorithm 1 -----------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Every rollout step: sample, score and admit; update; hand the new weights to the engine."""
        clock = Clock(self.at.step.seconds if self.at.step else self.at.laps)
        while self.at.step is not None or not (self.at.budget.used_up or self.best.converged):
            step = self.at.steps_done
            self.trainer.begin_step(step, self.at.budget.spent)
            if self.at.step and self.at.step.reports:  # resumed inside of it: a step has one rate
                self.trainer.set_learning_rate(self.at.step.reports[0].learning_rate)
            if self.at.step is None:  # otherwise it was resumed inside of this step
                self._waits_for("the rollout", step, "rollout")
                clock.lap("rest")
                decoded = self._decode_steps
                self.at.laps = clock.laps
                try:
                    fill = await self.collector.take(step, self.config.rollout.prompts_per_step, self.trainer.version)
                except StarvedError as error:
                    assert isinstance(error.rollout_batch, RolloutBatch)
                    with contextlib.suppress(UserError):  # which must not stand before what went wrong first
                        await self._write_samples(step + 1, StepState(error.rollout_batch, {}))
                    raise
                finally:  # one that is broken off has taken its time too
                    clock.lap("rollout")
                self.at.step = StepState(fill, clock.laps, decode_steps=self._decode_steps - decoded)
            work = self.at.step
            self.monitor.begin(work.fill.sampled)
            await self.engine.sleep()  # until the next rollout its cache's memory is the trainer's
            if work.batch is None:
                self._waits_for("the batch to be prepared", step, "prepare")
                work.batch = await self._compute(self.preparer.batch, work.fill.groups, self.trainer.version)
                clock.lap("prepare")
            updates = self.preparer.updates(work.batch.packed, done=len(work.reports))
            count = self.preparer.count(work.batch.packed)
            objective = unless(self._out_of_time, self.preparer.objective)
            while update := await self._compute(next, updates, None):
                done = len(work.reports)
                self._waits_for(f"update {done + 1} of {count}", step, "update", done, count)
                await self._compute(work.apply, self.trainer, update, objective)
                give_back_memory()
                clock.lap("update")
            self._waits_for("the weights to be handed to the engine", step, "sync")
            await self.engine.load_weights(*self.trainer.publish())
            await self.engine.wake()
            clock.lap("sync")
            budget = self.at.budget.after(step_seconds(clock.laps))
            evaluation = await self._maybe_evaluate(budget, clock)
            self._waits_for("metrics and samples to be written", step, "writing")
            clock.lap("rest")
            clock = Clock()  # what follows is of the next step
            await self._record(budget, work, evaluation)
            self.preparer.observe(work.reports, work.batch)
            self.monitor.settle()
            self.alarms.settle()
            self._use(self.config)
            self.collector.release(work.fill)
            self.at.budget, self.at.step, self.at.laps = budget, None, {}
            await self.keeper.maybe_save(last=budget.used_up or self.best.converged)

    @property
    def _decode_steps(self) -> int:
        """Of the engine so far; 0 of one that does not count them."""
        return int(getattr(self.engine, "decode_steps", 0))

    def _waits_for(self, what: str, step: int, phase: str, done: int = 0, total: int = 0) -> None:
        self.stopping.doing = f"{what}, in step {step + 1}"
        self.listener.working(phase, done, total)

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        if self._inputs.resume is None:
            await self._examine()
        await self._open_folder()
        self.at.seconds.lap("start")
        try:
            with shortage_explained(self.config, self.trainer.policy.model):
                async with self.collector.running():
                    await self.train()
        except BaseException as error:
            note = await self._rescue(error)
            if isinstance(error, UserError):
                raise type(error)(f"{error}\n{note}") from None
            self.listener.warning(note)
            raise
        self.at.seconds.lap("rl")
        self.stopping.doing = "the final weights to be written"
        await in_thread(self.keeper.save_model_after)
        return self._summarise(self.best.reason() if self.best.converged else self.at.budget.reason())

    async def close(self) -> None:
        """Stop engine and scorer, each within a bounded time, the second one even if the first one fails."""
        await self._closing.aclose()

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
        Raises UserError: the folder cannot be used, or the run started from something else."""
        resumed, tell = self._inputs.resume, self.listener.warning
        folder = self.folder = resumed or self._inputs.folder or RunFolder.create(self.config, tell=tell)
        if self._inputs.lock is not None:
            self._inputs.lock.close()
        self.keeper = self._keeper(folder)
        self._closing.push_async_callback(self.keeper.close)
        self.trainer.faults = FaultFolder(folder.faults, self.template.decode)
        self.stopping.run = folder.root
        self.index = BackgroundIndex(folder.root, tell)
        self._closing.push_async_callback(partial(in_thread, self.index.close))
        latest, kept = None, None
        if resumed is not None:
            deterministic = self.config.runtime.deterministic
            contents = check_fingerprint(folder.fingerprint, self.fingerprint, self.listener, deterministic)
            latest = await in_thread(self.keeper.checkpoints.latest_intact, tell)
            self.changes = self.alarms.changes = changes_at(folder, self.config, latest, contents)
            folder.reopen(self.config)
            self.listener.phase(f"going on from {latest}" if latest else "no checkpoint yet: from the start")
            if latest is not None:
                await self._load(latest)
            if not self.at.budget.used_up:  # those that a shorter run ended with
                shutil.rmtree(folder.model_after, ignore_errors=True)
            kept = self.at.steps_done if latest is not None else -1
            discard_samples(folder.samples, after=kept)
            forget_steps(folder.samples, after=kept)
        with writing(folder.fingerprint):
            settings = redact(self.config.model_dump(mode="json"))  # with the changes that led to them, in one write
            beside = {"in_memory": self._inputs.in_memory, "changes": [*map(asdict, self.changes)]}
            write_json(folder.fingerprint, {**self.fingerprint, "settings": settings, **beside})
        self.resources = make_recorder(folder.resources, self.config.run.resources_every_s)
        if self.resources is not None:
            self._closing.callback(self.resources.close)
        looks = self.resources.latest if self.resources else list
        trackers = make_trackers(self.config, folder, kept, tell, looks)
        self.metrics = self._closing.enter_context(MetricsLog(folder.metrics, kept, trackers))
        if latest is None:
            await self._begin()
        if self.at.steps_done and self.at.budget.used_up:
            self.listener.phase(f"{self.at.budget.reason()}; to go on: {self.at.budget.how_to_go_on()}")
        self.listener.started(plan_of(self.config))

    async def _load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. Up to the next step it has the settings that it was taken under."""
        place = CheckpointId.parse(checkpoint.name) or CheckpointId(0)
        self._use(config_of_step(self.config, self.changes, place.begun))
        await self.keeper.load(checkpoint)
        for change in self.changes:
            if change.step > place.steps:
                self.listener.phase(f"changed from {change}")
        if place.between_steps:
            self._use(self.config)
        if self._evaluated_otherwise and (self.at.step or not self.at.budget.used_up):
            self.listener.warning(
                "evaluations so far cannot be compared with those from now on: what is evaluated, or how, has changed; "
                "the best one is looked for anew"
            )
            self.best.evaluations_since = 0
        if dropped := self.collector.drop_longer():
            self.listener.warning(f"rollout.max_response_length: dropped {counted(dropped, 'longer carried group')}")
        if self.at.step is None:  # otherwise they are published once its updates are done
            await self.engine.load_weights(*self.trainer.publish())

    def _use(self, config: Config) -> None:
        """Train with the settings of ``config`` from now on."""
        self.in_force = config
        self.trainer.use(config.training)
        self.preparer.use(config)

    def _keeper(self, folder: RunFolder) -> Checkpointer:
        roles: dict[str, Stateful] = {"buffer": self.collector, "prepare": self.preparer}
        roles |= {"monitor": self.monitor, "alarms": self.alarms}
        return Checkpointer(
            folder,
            self.config.run,
            self.at,
            self.best,
            roles,
            self.trainer,
            self.tokenizer,
            self.stopping,
            self.listener.warning,
            self._stop_ids,
            export_dtype(self.trainer.policy.model, self.config.model.export_dtype),
        )

    async def _begin(self) -> None:
        """Keep the weights before the first update, and see how good they are."""
        if not self.folder.model_before.exists():  # as it does where a run was killed in its first step
            await in_thread(self.keeper.save_model_before)
        self.before = self.after = found = await self.evaluate("before training")
        if found is not None:
            self.listener.evaluated("before training", found.metrics())
            self.metrics.append(0, found.metrics())
            self.at.scores = {"before": scores_of(found), "after": scores_of(found)}
            self.best.observe(0, found.metrics())
            self.keeper.note_best()

    # -- around the loop -------------------------------------------------------------------------------------------

    async def evaluate(self, name: str) -> Evaluation | None:
        """Evaluate the engine's present weights on the held-out rows, if there are any."""
        if not self.heldout:
            return None
        self.stopping.doing = f"the evaluation {name}"
        self.listener.phase(f"evaluating {name}")
        return await evaluate(
            self.heldout, self.engine, self.scorer, self.template.decode, self.config, self.listener.advance
        )

    async def _rescue(self, error: BaseException) -> str:
        """Write down what was learned before ``error`` ended the run, and say where. Raises no error of its own."""
        self.at.seconds.lap("rl")
        stopped_by_hand = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        reason = "interrupted" if stopped_by_hand else f"{type(error).__name__}: {error}"
        done = "1 step was done" if self.at.steps_done == 1 else f"{self.at.steps_done} steps were done"
        if self.stopping.signal is not None:
            reason += f" by {self.stopping.signal.name}"
        with contextlib.suppress(Exception):  # this state is further than that of the checkpoint that failed
            await self.keeper.settle()
        try:
            await self.keeper.save_checkpoint(self.collector.unsettled, wait=True)
            with contextlib.suppress(UserError):  # a summary is not what is rescued
                self._summarise(reason)
        except Exception as fault:
            before = f"; the last checkpoint is {self.stopping.saved}" if self.stopping.saved else ""
            return f"{done}; the state could not be saved: {fault}{before}"
        how = how_to_resume(self.folder.root, self._inputs.in_memory)
        return f"{done}; the state is in {self.stopping.saved}; to go on: {how}"

    def _out_of_time(self) -> bool:
        """Whether a signal leaves no more time than a checkpoint takes."""
        return self.stopping.seconds_left < self.keeper.seconds_to_save

    @property
    def _evaluated_otherwise(self) -> bool:
        """Whether evaluations so far cannot be compared with the next one."""
        return 0 <= self.best.observed < max((c.step for c in self.changes if c.of_evaluation), default=0)

    async def _maybe_evaluate(self, budget: Budget, clock: Clock) -> dict[str, float]:
        """Evaluation metrics after every so many steps and after the last one; ``budget``: with the present one."""
        every, step, last = self.config.evaluation.every, budget.steps, budget.used_up
        if not last and not (every and step % every == 0):
            return {}
        found = await self.evaluate(_when(budget))
        clock.lap("evaluation")
        if found is None:
            return {}
        if self._evaluated_otherwise:  # not before: until now a run can go on with the evaluation that it had
            self.best.forget()
            self.at.scores = {}
        self.after = found
        self.at.scores["after"] = scores_of(found)
        self.best.observe(step, found.metrics())
        return found.metrics()

    async def _record(self, budget: Budget, work: StepState, evaluation: Mapping[str, float]) -> None:
        step = budget.steps
        self.at.seconds.lap("rl")
        metrics = work.metrics(self.in_force) | {
            "lr": self.trainer.learning_rate,
            "version": self.trainer.version,
            "updates/total": self.trainer.updates,
            "epoch": self.source.epoch,
            "time/training": budget.seconds,
            "time/elapsed": self.at.seconds.total,
            "memory/rss": peak_memory(),
            **evaluation,
        }
        if self.resources is not None:
            metrics |= self.resources.step_means()
        if self._limits is not None:
            metrics |= self._limits.shares(work.fill, work.reports, work.seconds, work.decode_steps)
        if self.in_force.algorithm.kl.mode in ("loss", "reward"):
            metrics["kl/coef"] = self.preparer.kl_coef
        audit, found = await self.monitor.finish()
        metrics |= audit
        count, alarms = self.alarms.observe(step, metrics)
        for warning in [*work.warnings(), *found, *alarms]:
            self.listener.warning(f"step {step}: {warning}")
        await self._write_samples(step, work)
        self.listener.step(step, self.config.training.steps, self.metrics.append(step, metrics | count))
        if evaluation:
            self.listener.evaluated(_when(budget), dict(evaluation))

    async def _write_samples(self, step: int, work: StepState) -> None:
        if share := float(self.config.run.save_samples):
            seed, checks = self.config.seed, self.monitor.verdicts
            await in_thread(work.write_samples, self.folder.samples, step, share, seed, checks)
            self.index.notify()

    def _summarise(self, stopped: str) -> dict[str, Any]:
        facts = {
            "run_dir": str(self.folder.root),
            "seed": self.config.seed,
            "steps": self.at.steps_done,
            "updates": self.trainer.updates,
            "stopped": redact(stopped),
            "seconds_rl": round(self.at.seconds.laps.get("rl", 0.0), 2),
            "seconds_total": round(self.at.seconds.total, 2),
        }
        trained = bool(self.at.steps_done or not self.config.training.steps)
        summary = summarise(facts, self.at.scores if trained else {}, self.best, len(self.heldout))
        self.folder.write_summary(summary)
        self.metrics.summarise(summary)
        return summary


def _when(budget: Budget) -> str:
    """The time of an evaluation, for people."""
    return "after training" if budget.used_up else f"after step {budget.steps}"
