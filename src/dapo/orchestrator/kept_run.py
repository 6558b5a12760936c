"""A run in its folder: begun or resumed, trained, and whatever happens, written down. What runs and stages share.

Produces: a run folder and its summary. Nothing heavy runs on the event loop.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.checks.memory import shortage_explained
from dapo.config.secrets import redact
from dapo.errors import UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.model.placement import determinism
from dapo.observe.alarms import Alarms
from dapo.observe.fingerprint import check_fingerprint
from dapo.observe.metrics import MetricsLog
from dapo.observe.progress import Listener
from dapo.observe.resources import Look, ResourceRecorder, make_recorder
from dapo.observe.run_folder import RunFolder
from dapo.observe.trackers import make_trackers
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.checkpointer import Checkpointer
from dapo.orchestrator.resume import how_to_resume
from dapo.orchestrator.run_state import Plan, RunState
from dapo.orchestrator.runtime.placed import Wait
from dapo.util.asynchronous import in_thread
from dapo.util.differences import Difference
from dapo.util.files import write_json, writing
from dapo.util.shutdown import Shutdown
from dapo.util.terminal import counted


class KeptRun(abc.ABC):
    """To be called in this order: :meth:`check`, :meth:`load`, :meth:`run`, :meth:`close`. What works in the folder
    exists in the run."""

    plan: Plan
    fingerprint: Mapping[str, Any]
    """Of what it starts from; once the model is loaded."""
    model: Any
    look: Callable[[], list[Look]] | None = None
    """At other machines; None: at this one."""
    folder: RunFolder
    alarms: Alarms
    checkpointer: Checkpointer
    metrics: MetricsLog

    def __init__(self, setup: Any, listener: Listener) -> None:
        """``setup``: what it starts from, with ``config``, ``overrides`` and ``device``."""
        self.setup, self.listener = setup, listener
        self.state = RunState(Budget(setup.config.training))
        self._closing = contextlib.AsyncExitStack()
        self._closing.enter_context(self.state.seconds.counting())
        # a reward model may multiply matrices, too
        self._closing.enter_context(determinism(setup.config, setup.device))
        self.early_stopping = EarlyStopping(setup.config.evaluation)
        self.shutdown = Shutdown()  # nobody has told it to

    @property
    def config(self) -> Any:
        return self.setup.config

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        await self._open()
        self.state.seconds.credit("start")
        try:
            with shortage_explained(self.config, self.model), self.state.spans.counting():
                await self._train()
            self.shutdown.doing = "the final weights to be written"
            with self.state.seconds("writing"):
                await self.checkpointer.models.write_after()
        except BaseException as error:
            note = await self._rescue(error)
            if isinstance(error, UserError):
                raise type(error)(f"{error}\n{note}") from None
            self.listener.warning(note)
            raise
        return self._summarise(self.plan.reason(self.state))

    async def close(self) -> None:
        """Stop all that was started, each within a bounded time, the second one even if the first one fails."""
        await self._closing.aclose()

    # -- what each kind has ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def check(self) -> None:
        """Look at what there is before anything heavy is loaded. Raises UserError: something cannot be used."""

    @abc.abstractmethod
    def load(self, wait: Wait, /) -> None:
        """Load the model. Raises UserError: it cannot be loaded or trained."""

    @abc.abstractmethod
    def _place(self) -> Checkpointer:
        """Make who works in the run folder, before it is known where in the run."""

    @abc.abstractmethod
    async def _go_on(self, latest: Path | None, contents: Sequence[Difference]) -> Mapping[str, Any]:
        """Load the checkpoint, if there is one. ``contents``: what has changed in files since the last start.
        Returns what goes into the record of the start beside the settings."""

    @abc.abstractmethod
    async def _begin(self, kept: int | None, resources: ResourceRecorder | None) -> dict[str, Any]:
        """Of a run without a checkpoint keep the weights before the first update, and see how good they are. ``kept``:
        the last step whose metrics stay, -1: none; None: of a new run. Returns what is told of the run."""

    @abc.abstractmethod
    async def _train(self) -> None: ...

    @abc.abstractmethod
    def _facts(self) -> Mapping[str, Any]:
        """For the summary."""

    # -- where it starts -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """A new run folder, or one that a run goes on in: from its latest checkpoint, or from the start if it has none.
        Raises UserError: the folder cannot be used, or the run started from something else."""
        config, given, tell = self.config, self.setup.overrides, self.listener.warning
        folder = self.folder = given.resume or given.folder or RunFolder.create(config, tell=tell)
        if given.lock is not None:
            given.lock.close()
        self.alarms = Alarms(config)
        self.checkpointer = self._place()
        self.checkpointer.keeps_last = given.last_checkpoint
        self._closing.push_async_callback(self.checkpointer.close)
        self.shutdown.run = folder.root
        latest, kept, contents = None, None, list[Difference]()
        if given.resume is not None:
            deterministic = config.runtime.deterministic
            contents = check_fingerprint(folder.fingerprint, self.fingerprint, self.listener, deterministic)
            latest = await in_thread(self.checkpointer.checkpoints.latest_intact, tell)
            self.listener.phase(f"going on from {latest}" if latest else "no checkpoint yet: from the start")
        beside = await self._go_on(latest, contents)
        if given.resume is not None:
            folder.reopen(config)  # once nothing can refuse: what is refused leaves the folder to whoever can go on
            if not self.state.budget.used_up:  # those that a shorter run ended with
                shutil.rmtree(folder.model_after, ignore_errors=True)
            kept = self.state.steps_done if latest is not None else -1
        with writing(folder.fingerprint):
            settings = redact(config.model_dump(mode="json"))  # with the changes that led to them, in one write
            begun = {**self.fingerprint, "settings": settings, "in_memory": given.in_memory, **beside}
            write_json(folder.fingerprint, begun)
        resources = make_recorder(folder.resources, config.run.resources_every_s, self.look)
        if resources is not None:
            self._closing.callback(resources.close)
        looks = resources.latest if resources else list
        trackers = make_trackers(config, folder, kept, tell, looks, given.trackers)
        self.metrics = self._closing.enter_context(MetricsLog(folder.metrics, kept, trackers))
        told = await self._begin(kept, resources)
        if self.state.steps_done and self.state.budget.used_up:
            budget = self.state.budget
            self.listener.phase(f"{budget.reason()}; to go on: {budget.how_to_go_on()}")
        self.listener.started(told)

    # -- its end ---------------------------------------------------------------------------------------------------

    def _out_of_time(self) -> bool:
        """Whether a signal leaves no more time than a checkpoint takes."""
        return self.shutdown.seconds_left < self.checkpointer.seconds_to_save

    async def _save(self) -> None:
        await self.checkpointer.save_checkpoint(wait=True)

    async def _rescue(self, error: BaseException) -> str:
        """Write down what was learned before ``error`` ended the run, and say where. Raises no error of its own."""
        stopped_by_hand = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        reason = "interrupted" if stopped_by_hand else f"{type(error).__name__}: {error}"
        done = f"{counted(self.state.steps_done, 'step')} {'was' if self.state.steps_done == 1 else 'were'} done"
        if self.shutdown.signal is not None:
            reason += f" by {self.shutdown.signal.name}"
        with contextlib.suppress(Exception):  # this state is further than that of the checkpoint that failed
            await self.checkpointer.settle()
        try:
            with self.state.seconds("writing"):
                await self._save()
            with contextlib.suppress(UserError):  # a summary is not what is rescued
                self._summarise(reason)
        except Exception as fault:
            # a learner that is gone says the same again, and a full disk says it of another file
            causes = {tuple(str(one).split(": ")[1:3]) or str(one) for one in (fault, error)}
            why = f": {fault}" if len(causes) == 2 else ""
            told = f"the state could not be saved{why}"
            if not self.shutdown.saved:
                return f"{done}; {told}"
            told += f"; the last checkpoint is {self.shutdown.saved}"
        else:
            told = f"the state is in {self.shutdown.saved}"
        return f"{done}; {told}; to go on: {self._how_to_go_on()}"

    def _how_to_go_on(self) -> str:
        return how_to_resume(self.folder.root, self.setup.overrides.in_memory)

    def _summarise(self, stopped: str) -> dict[str, Any]:
        summary = {
            "run_dir": str(self.folder.root),
            "seed": self.config.seed,
            "steps": self.state.steps_done,
            "stopped": redact(stopped),
            "seconds_total": round(self.state.seconds.total, 2),
            **self._facts(),
        }
        self.folder.write_summary(summary)
        self.metrics.summarise(summary)
        return summary
