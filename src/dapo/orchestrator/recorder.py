"""What is written and told of a run: the metrics and samples of each step, alarms, and what it came to.

Consumes: finished steps. Produces: lines of ``metrics.jsonl``, ``spans.jsonl`` and of the trackers, ``samples/``,
``summary.json``, and warnings. Waits for: the held-out check, the mismatch of the batch and the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config import Config
from dapo.errors import UserError
from dapo.model.placement import apart, take_turns
from dapo.observe.alarms import Alarms
from dapo.observe.metrics import MetricsLog
from dapo.observe.progress import Listener
from dapo.observe.resources import ResourceRecorder
from dapo.observe.run_folder import RunFolder
from dapo.observe.spans import write_spans
from dapo.orchestrator.batch_builder import batch_mismatch
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.evaluator import when
from dapo.orchestrator.roles import Roles
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.run_state import RunState
from dapo.orchestrator.step_metrics import overlap_metrics
from dapo.orchestrator.step_state import StepState
from dapo.reward.monitor import Monitor
from dapo.util.asynchronous import in_thread
from dapo.util.memory import peak_memory
from dapo.util.spans import Span


@dataclass
class Recorder:
    config: Config
    folder: RunFolder
    metrics: MetricsLog
    resources: ResourceRecorder | None
    listener: Listener
    monitor: Monitor
    alarms: Alarms
    state: RunState
    roles: Roles
    resumed: bool
    """Whether another process began the step that comes first."""
    earlier: Sequence[Span] = ()
    """The loop's, of the step before, if this process made them: between two processes nobody was idle."""

    def begin(self, step: StepState) -> None:
        """Start to look at the samples of a step, beside other work."""
        self.monitor.begin(step.rollout.sampled)

    async def write(self, step: StepState, after: Budget, evaluation: Mapping[str, float]) -> None:
        """Metrics, samples and warnings of a step. ``after``: the budget with it."""
        number, batch, config = after.steps, step.batch, self.roles.builder.config  # the settings of this step
        mismatch = await in_thread(batch_mismatch, batch, step.version) if batch else None
        metrics: dict[str, Any] = {
            **step.metrics(config, mismatch),
            **self.roles.facts(step),
            "time/training": after.seconds,
            "time/elapsed": self.state.seconds.total,
            "memory/rss": peak_memory(),
            **evaluation,
            **(self.resources.step_means() if self.resources is not None else {}),
        }
        if config.rollout.max_staleness:
            sides = take_turns(config), apart(config)
            metrics |= overlap_metrics(step.rollout, step.spans, self.earlier, *sides)
        self.earlier, self.resumed = () if self.resumed else step.spans, False
        audit, found = await self.monitor.finish()
        metrics |= audit
        count, alarms = self.alarms.observe(number, metrics)
        for warning in [*step.warnings(), *found, *alarms]:
            self.listener.warning(f"step {number}: {warning}")
        await self._write_samples(number, step)
        write_spans(self.folder.spans, number, [*step.spans, *step.rollout.spans])
        entry = self.metrics.append(number, metrics | count)
        self.listener.step(number, self.config.training.steps, entry | after.shown())
        if evaluation:
            self.listener.evaluated(when(after), dict(evaluation))

    async def write_starved(self, rollout: RolloutBatch) -> None:
        """The samples of a step that found too few groups. No error of this must stand before that one."""
        with contextlib.suppress(UserError):
            await self._write_samples(rollout.step + 1, StepState(rollout))

    def settle(self) -> None:
        """The step is done: what was seen of it counts from now on."""
        self.monitor.settle()
        self.alarms.settle()

    async def _write_samples(self, number: int, step: StepState) -> None:
        if share := float(self.config.run.save_samples):
            seed, checks = self.config.seed, self.monitor.verdicts
            await in_thread(step.write_samples, self.folder.samples, number, share, seed, checks)
