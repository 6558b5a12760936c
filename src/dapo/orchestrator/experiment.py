"""One run from its recipe to its summary: built, begun or resumed, trained, and whatever happens, written down.

Consumes: a :class:`~dapo.config.Config` (and, from Python, a model, rows and a reward function in place of names).
Produces: a run folder and its summary. Training itself is ``loop.py``. Nothing heavy runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo.checks.memory import shortage_explained
from dapo.config import Config
from dapo.config.plan import plan_of
from dapo.config.reading import with_values
from dapo.config.secrets import redact
from dapo.config.user_parts import own_metrics
from dapo.environments.player import player_for
from dapo.errors import StarvedError, UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.model.export import export_dtype
from dapo.model.placement import determinism, take_turns
from dapo.observe.alarms import Alarms
from dapo.observe.changes import Change, config_of_step
from dapo.observe.checkpoints import CheckpointId
from dapo.observe.fingerprint import check_fingerprint
from dapo.observe.index import forget_steps
from dapo.observe.indexing import BackgroundIndex
from dapo.observe.metrics import MetricsLog
from dapo.observe.progress import Listener
from dapo.observe.resources import make_recorder
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import discard_samples
from dapo.observe.spans import discard_spans
from dapo.observe.trackers import make_trackers
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.build import Rewards, Setup, examine
from dapo.orchestrator.checkpointer import CLOSE_SECONDS, Checkpointer, Stateful
from dapo.orchestrator.evaluator import Evaluator
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.loop import train
from dapo.orchestrator.model_writer import ModelWriter
from dapo.orchestrator.recorder import Recorder
from dapo.orchestrator.resume import changes_at, how_to_resume
from dapo.orchestrator.roles import Roles, load_roles
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.run_state import Plan, RunState
from dapo.orchestrator.runtime.placed import Wait
from dapo.orchestrator.step_state import StepState
from dapo.rollout.engine import Engine
from dapo.util.asynchronous import closed_in_time, in_thread
from dapo.util.files import write_json, writing
from dapo.util.shutdown import Shutdown
from dapo.util.terminal import counted


class Experiment:
    """One run. To be called in this order: :meth:`check`, :meth:`load`, :meth:`run`, :meth:`close`.
    ``roles`` exist once the model is loaded, ``folder`` and what works in it in the run."""

    roles: Roles
    folder: RunFolder
    checkpointer: Checkpointer
    evaluator: Evaluator
    recorder: Recorder

    def __init__(self, config: Config, listener: Listener, overrides: RunOverrides) -> None:
        """Look at everything that is named but the weights and the reward. Nothing is written yet.
        Raises UserError: what is wrong, where, and what would work."""
        self.state = RunState(Budget(config.training), tell=self._tell, on_commit=self._commit)
        self.listener = listener
        self.setup = Setup.of(config, listener, overrides)
        self._closing = contextlib.AsyncExitStack()
        self._closing.enter_context(self.state.seconds.counting())
        # a reward model may multiply matrices, too
        self._closing.enter_context(determinism(self.config, self.setup.device))
        self.rewards = Rewards(self.setup, listener.warning)
        self.rewards.close_with(self._closing, self._stop)
        self.early_stopping = EarlyStopping(self.config.evaluation)
        self.shutdown = Shutdown()  # nobody has told it to

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.setup.config

    async def check(self) -> None:
        """Start the reward and try it, and the servers that sample, before time is spent on loading the model.
        Raises UserError: rows cannot be scored, the reward or the held-out check breaks its contract, or a server lacks
        what training needs."""
        await self.rewards.check(self.setup, self.listener)
        await self.setup.try_servers()

    def load(self, wait: Wait) -> None:
        """Load the model, and make learner and engine. ``wait``: for what starts in other processes.
        Raises UserError: it cannot be loaded or trained, or does not fit into the memory."""
        self.roles = load_roles(self.setup, self.rewards.scorer, self.listener, self._out_of_time, wait)
        self._closing.push_async_callback(self._stop, "the learner", self.roles.learner.close)
        for engine in filter(None, (self.roles.engine, self.roles.placed.evaluation_engine)):
            self._closing.push_async_callback(self._stop, "the engine", engine.close)

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        if self.setup.overrides.resume is None:
            await examine(self.setup, self.roles.placed.model, self.rewards.scorer, self.listener)
        await self._open()
        self.state.seconds.credit("start")
        plan = Plan(self.config.rollout.prompts_per_step, self.early_stopping, take_turns(self.config))
        try:
            with shortage_explained(self.config, self.roles.placed.model), self.state.spans.counting():
                await train(
                    self.state,
                    plan,
                    self.roles.collector,
                    self.roles.builder,
                    self.roles.learner,
                    self.roles.placed.sync,
                    self.evaluator,
                    self.recorder,
                    self.checkpointer,
                )
        except BaseException as error:
            note = await self._rescue(error)
            if isinstance(error, UserError):
                raise type(error)(f"{error}\n{note}") from None
            self.listener.warning(note)
            raise
        self.shutdown.doing = "the final weights to be written"
        with self.state.seconds("writing"):
            await self.checkpointer.models.write_after()
        return self._summarise(plan.reason(self.state))

    async def close(self) -> None:
        """Stop engine and scorer, each within a bounded time, the second one even if the first one fails."""
        await self._closing.aclose()

    async def _stop(self, what: str, close: Callable[[], Awaitable[None]]) -> None:
        self.shutdown.doing = f"{what} to stop"
        if not await closed_in_time(close, CLOSE_SECONDS):
            self.listener.warning(f"{what} did not stop within {CLOSE_SECONDS:g} s and is not waited for any longer")

    # -- where it starts -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """A new run folder, or one that a run goes on in: from its latest checkpoint, or from the start if it has none.
        Raises UserError: the folder cannot be used, or the run started from something else."""
        setup, config, tell = self.setup, self.config, self.listener.warning
        folder = self.folder = setup.overrides.resume or setup.overrides.folder or RunFolder.create(config, tell=tell)
        if setup.overrides.lock is not None:
            setup.overrides.lock.close()
        alarms = Alarms(config)
        self._place(alarms)
        self.shutdown.run = folder.root
        index = BackgroundIndex(folder.root, tell)
        self._closing.push_async_callback(partial(in_thread, index.close))
        latest, kept, changes = None, None, list[Change]()
        if setup.overrides.resume is not None:
            contents = check_fingerprint(
                folder.fingerprint, self.roles.fingerprint, self.listener, config.runtime.deterministic
            )
            latest = await in_thread(self.checkpointer.checkpoints.latest_intact, tell)
            changes = changes_at(folder, config, latest, contents)
            alarms.changes = self.evaluator.changes = changes
            self.listener.phase(f"going on from {latest}" if latest else "no checkpoint yet: from the start")
            if latest is not None:
                await self._go_on(latest, changes)
            folder.reopen(config)  # once nothing can refuse: what is refused leaves the folder to whoever can go on
            if not self.state.budget.used_up:  # those that a shorter run ended with
                shutil.rmtree(folder.model_after, ignore_errors=True)
            kept = self.state.steps_done if latest is not None else -1
            discard_samples(folder.samples, after=kept)
            forget_steps(folder.samples, after=kept)
            discard_spans(folder.spans, after=kept)
        with writing(folder.fingerprint):
            settings = redact(config.model_dump(mode="json"))  # with the changes that led to them, in one write
            beside = {"in_memory": setup.overrides.in_memory, "changes": [*map(asdict, changes)]}
            write_json(folder.fingerprint, {**self.roles.fingerprint, "settings": settings, **beside})
        self.recorder = self._recorder(alarms, index, kept)
        if latest is None:
            await self._begin()
        if self.state.steps_done and self.state.budget.used_up:
            budget = self.state.budget
            self.listener.phase(f"{budget.reason()}; to go on: {budget.how_to_go_on()}")
        if about := getattr(self.roles.engine, "about", config.rollout.url):
            self.listener.phase(f"sampling: {about}")
        self.listener.started(plan_of(config))

    def _place(self, alarms: Alarms) -> None:
        """Who works in the run folder, before it is known where in the run."""
        setup, roles, folder = self.setup, self.roles, self.folder
        model, tell = self.config.model, self.listener.warning
        types = export_dtype(roles.placed.model, model.export_dtype), getattr(torch, model.compute_dtype)
        models = ModelWriter(folder, roles.learner, setup.tokenizer, tell, roles.placed.stop_ids, *types)
        remember: dict[str, Stateful] = {"buffer": roles.collector, "prepare": roles.builder}
        remember |= {"monitor": self.rewards.monitor, "alarms": alarms}
        self.checkpointer = Checkpointer(
            folder, self.config.run, self.state, self.early_stopping, remember, models, self.shutdown
        )
        self._closing.push_async_callback(self.checkpointer.close)
        roles.learner.keep_faults(folder.faults, setup.template.decode)
        self.evaluator = Evaluator(
            self.config,
            setup.heldout,
            self._evaluated,
            self.rewards.scorer,
            setup.template.decode,
            self.state,
            self.early_stopping,
            self.listener,
            own_metrics(self.config, self.setup.overrides.metrics),
            player_for(self.config, setup.template, evaluation=True),
        )

    def _recorder(self, alarms: Alarms, index: BackgroundIndex, kept: int | None) -> Recorder:
        """``kept``: the last step whose metrics stay; None: of a new run."""
        config, folder = self.config, self.folder
        resources = make_recorder(folder.resources, config.run.resources_every_s, self.roles.placed.look)
        if resources is not None:
            self._closing.callback(resources.close)
        looks = resources.latest if resources else list
        own = self.setup.overrides.trackers
        trackers = make_trackers(config, folder, kept, self.listener.warning, looks, own)
        metrics = self._closing.enter_context(MetricsLog(folder.metrics, kept, trackers))
        heard, seen, resumed = self.listener, self.rewards.monitor, self.state.step is not None
        return Recorder(config, folder, metrics, index, resources, heard, seen, alarms, self.state, self.roles, resumed)

    async def _go_on(self, checkpoint: Path, changes: list[Change]) -> None:
        """Go on from a checkpoint. Up to the next step it has the settings that it was taken under."""
        place = CheckpointId.parse(checkpoint.name) or CheckpointId(0)
        then, now = config_of_step(self.config, changes, place.begun), self.config.algorithm
        if place.between_steps:  # where files of the user's lay that no step needs any more does not matter
            then = with_values(then, {"algorithm.objective": now.objective, "algorithm.advantage": now.advantage})
        self.roles.use(then)
        await self.checkpointer.load(checkpoint)
        for change in changes:
            if change.step > place.steps:
                self.listener.phase(f"changed from {change}")
        if place.between_steps:
            self.roles.use(self.config)
        if self.evaluator.evaluated_otherwise and (self.state.step or not self.state.budget.used_up):
            self.listener.warning(
                "evaluations so far cannot be compared with those from now on: what is evaluated, or how, has changed; "
                "the best one is looked for anew"
            )
            self.early_stopping.evaluations_since = 0
        if dropped := self.roles.collector.drop_unfit():
            what = f"{counted(dropped, 'group')} of longer responses, or of more samples than are wanted now"
            self.listener.warning(f"rollout.max_response_length or samples_per_prompt: dropped {what}")
        if self.state.step is None:  # otherwise they are published once its updates are done
            await self.roles.push(self.roles.engine)

    async def _begin(self) -> None:
        """Keep the weights before the first update, and see how good they are."""
        if self.roles.engine.version < self.roles.learner.version:  # of an engine elsewhere, which has others
            await self.roles.push(self.roles.engine)
        await self.checkpointer.models.write_before()
        if found := await self.evaluator.first():
            self.recorder.metrics.append(0, found)
            self.checkpointer.note_best()

    @contextlib.asynccontextmanager
    async def _evaluated(self) -> AsyncIterator[Engine]:
        """The engine to evaluate with: one of its own, beside sampling, or the only one, while sampling is paused."""
        roles, engine = self.roles, self.roles.placed.evaluation_engine
        if engine is None:
            async with roles.collector.paused():
                yield roles.engine
            return
        await engine.wake()
        await roles.push(engine)
        yield engine
        await engine.sleep()

    # -- around the loop -------------------------------------------------------------------------------------------

    def _tell(self, role: str, what: str, done: int, total: int) -> None:
        """What is waited for now. ``role``: of a step; empty: none."""
        self.shutdown.doing = what
        if role:
            self.listener.working(role, done, total)

    def _commit(self, step: StepState) -> None:
        """What the roles saw of a step counts from now on, and the next one has the settings of the run."""
        assert step.batch is not None
        self.roles.builder.observe(step.reports, step.batch)
        self.recorder.settle()
        self.roles.use(self.config)

    def _out_of_time(self) -> bool:
        """Whether a signal leaves no more time than a checkpoint takes."""
        return self.shutdown.seconds_left < self.checkpointer.seconds_to_save

    async def _rescue(self, error: BaseException) -> str:
        """Write down what was learned before ``error`` ended the run, and say where. Raises no error of its own."""
        if isinstance(error, StarvedError) and isinstance(error.rollout_batch, RolloutBatch):
            with contextlib.suppress(asyncio.CancelledError):  # the state is still to be saved
                await self.recorder.write_starved(error.rollout_batch)
        stopped_by_hand = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        reason = "interrupted" if stopped_by_hand else f"{type(error).__name__}: {error}"
        done = "1 step was done" if self.state.steps_done == 1 else f"{self.state.steps_done} steps were done"
        if self.shutdown.signal is not None:
            reason += f" by {self.shutdown.signal.name}"
        with contextlib.suppress(Exception):  # this state is further than that of the checkpoint that failed
            await self.checkpointer.settle()
        try:
            with self.state.seconds("writing"):
                await self.checkpointer.save_checkpoint(self.roles.collector.unsettled, wait=True)
            with contextlib.suppress(UserError):  # a summary is not what is rescued
                self._summarise(reason)
        except Exception as fault:
            why = "" if str(fault) == str(error) else f": {fault}"  # a learner that is gone says the same again
            told = f"the state could not be saved{why}"
            if not self.shutdown.saved:
                return f"{done}; {told}"
            told += f"; the last checkpoint is {self.shutdown.saved}"
        else:
            told = f"the state is in {self.shutdown.saved}"
        return f"{done}; {told}; to go on: {how_to_resume(self.folder.root, self.setup.overrides.in_memory)}"

    def _summarise(self, stopped: str) -> dict[str, Any]:
        facts = {
            "run_dir": str(self.folder.root),
            "seed": self.config.seed,
            "steps": self.state.steps_done,
            "updates": self.roles.learner.facts.updates,
            "stopped": redact(stopped),
            "seconds_rl": round(self.state.seconds.seconds["rest"], 2),
            "seconds_total": round(self.state.seconds.total, 2),
        }
        summary = facts | self.evaluator.summary(self.state.steps_done)
        self.recorder.summarise(summary)
        return summary
