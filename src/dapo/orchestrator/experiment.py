"""One run from its recipe to its summary: built, begun or resumed, trained, and whatever happens, written down.

Consumes: a :class:`~dapo.config.Config` (and, from Python, a model, rows and a reward function in place of names).
Produces: a run folder and its summary. Training itself is ``loop.py``. Nothing heavy runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dapo.config import Config
from dapo.config.plan import plan_of
from dapo.config.reading import with_values
from dapo.config.user_parts import own_metrics
from dapo.environments.player import player_for
from dapo.errors import StarvedError
from dapo.model.export import export_dtype
from dapo.model.placement import take_turns
from dapo.observe.changes import Change, config_of_step
from dapo.observe.checkpoints import CheckpointId
from dapo.observe.index import forget_steps
from dapo.observe.progress import Listener
from dapo.observe.resources import ResourceRecorder
from dapo.observe.samples import discard_samples
from dapo.observe.spans import discard_spans
from dapo.orchestrator.build import Rewards, Setup, examine
from dapo.orchestrator.checkpointer import CLOSE_SECONDS, Checkpointer, Stateful
from dapo.orchestrator.evaluator import Evaluator
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.kept_run import KeptRun
from dapo.orchestrator.loop import train
from dapo.orchestrator.model_writer import ModelWriter
from dapo.orchestrator.recorder import Recorder
from dapo.orchestrator.resume import changes_at
from dapo.orchestrator.roles import Roles, load_roles
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.run_state import Plan
from dapo.orchestrator.runtime.placed import Wait
from dapo.orchestrator.step_state import StepState
from dapo.rollout.engine import Engine
from dapo.util.asynchronous import closed_in_time
from dapo.util.differences import Difference
from dapo.util.terminal import counted


class Experiment(KeptRun):
    """One run of reinforcement learning. ``roles`` exist once the model is loaded."""

    roles: Roles
    evaluator: Evaluator
    recorder: Recorder

    def __init__(self, config: Config, listener: Listener, overrides: RunOverrides) -> None:
        """Look at everything that is named but the weights and the reward. Nothing is written yet.
        Raises UserError: what is wrong, where, and what would work."""
        super().__init__(Setup.of(config, listener, overrides), listener)
        self.state.tell, self.state.on_commit = self._tell, self._commit
        self.rewards = Rewards(self.setup, listener.warning)
        self.rewards.close_with(self._closing, self._stop)

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
        placed = self.roles.placed
        self.plan = Plan(self.config.rollout.prompts_per_step, self.early_stopping, take_turns(self.config))
        self.model, self.fingerprint, self.look = placed.model, self.roles.fingerprint, placed.look

    async def run(self) -> dict[str, Any]:
        """As of every kind of run, after a look at what has been loaded."""
        if self.setup.overrides.resume is None:
            await examine(self.setup, self.model, self.rewards.scorer, self.listener)
        return await super().run()

    async def _train(self) -> None:
        await train(
            self.state,
            self.plan,
            self.roles.collector,
            self.roles.builder,
            self.roles.learner,
            self.roles.placed.sync,
            self.evaluator,
            self.recorder,
            self.checkpointer,
        )

    async def _stop(self, what: str, close: Callable[[], Awaitable[None]]) -> None:
        self.shutdown.doing = f"{what} to stop"
        if not await closed_in_time(close, CLOSE_SECONDS):
            self.listener.warning(f"{what} did not stop within {CLOSE_SECONDS:g} s and is not waited for any longer")

    # -- where it starts -------------------------------------------------------------------------------------------

    def _place(self) -> Checkpointer:
        setup, roles, folder = self.setup, self.roles, self.folder
        model, tell = self.config.model, self.listener.warning
        types = export_dtype(roles.placed.model, model.export_dtype), getattr(torch, model.compute_dtype)
        models = ModelWriter(folder, roles.learner, setup.tokenizer, tell, roles.placed.stop_ids, *types)
        remember: dict[str, Stateful] = {"buffer": roles.collector, "prepare": roles.builder.kl}
        remember |= {"monitor": self.rewards.monitor, "alarms": self.alarms}
        found = Checkpointer(folder, self.config.run, self.state, self.early_stopping, remember, models, self.shutdown)
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
        return found

    async def _go_on(self, latest: Path | None, contents: Sequence[Difference]) -> Mapping[str, Any]:
        if self.setup.overrides.resume is None:
            return {"changes": []}
        changes = changes_at(self.folder, self.config, latest, contents)
        self.alarms.changes = self.evaluator.changes = changes
        if latest is not None:
            await self._load(latest, changes)
        return {"changes": [*map(asdict, changes)]}

    async def _load(self, checkpoint: Path, changes: list[Change]) -> None:
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

    async def _begin(self, kept: int | None, resources: ResourceRecorder | None) -> dict[str, Any]:
        if kept is not None:
            discard_samples(self.folder.samples, after=kept)
            forget_steps(self.folder.samples, after=kept)
            discard_spans(self.folder.spans, after=kept)
        heard, seen, resumed = self.listener, self.rewards.monitor, self.state.step is not None
        where = self.config, self.folder, self.metrics, resources
        self.recorder = Recorder(*where, heard, seen, self.alarms, self.state, self.roles, resumed)
        if kept is None or kept < 0:
            if self.roles.engine.version < self.roles.learner.version:  # of an engine elsewhere, which has others
                await self.roles.push(self.roles.engine)
            await self.checkpointer.models.write_before()
            if found := await self.evaluator.first():
                self.metrics.append(0, found)
                self.checkpointer.note_best()
        if about := getattr(self.roles.engine, "about", self.config.rollout.url):
            self.listener.phase(f"sampling: {about}")
        return plan_of(self.config)

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

    async def _save(self) -> None:
        await self.checkpointer.save_checkpoint(self.roles.collector.unsettled, wait=True)

    async def _rescue(self, error: BaseException) -> str:
        if isinstance(error, StarvedError) and isinstance(error.rollout_batch, RolloutBatch):
            with contextlib.suppress(asyncio.CancelledError):  # the state is still to be saved
                await self.recorder.write_starved(error.rollout_batch)
        return await super()._rescue(error)

    def _facts(self) -> Mapping[str, Any]:
        facts = {"updates": self.roles.learner.facts.updates}
        seconds = {"seconds_rl": round(self.state.seconds.seconds["rest"], 2)}
        return facts | seconds | self.evaluator.summary(self.state.steps_done)
