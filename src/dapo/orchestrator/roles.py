"""The roles that share the work of a run, once its model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapo.checks.start import notice_generation_config
from dapo.config import Config
from dapo.data.source import PromptSource
from dapo.environments.player import player_for
from dapo.model.loading import embedding_rows
from dapo.model.nf4 import in_4_bits
from dapo.observe.fingerprint import fingerprint
from dapo.observe.progress import Listener
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.build import Setup
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.inputs import own_source
from dapo.orchestrator.protocols import Learner
from dapo.orchestrator.runtime import place
from dapo.orchestrator.runtime.placed import Placed, Wait
from dapo.orchestrator.step_state import StepState
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine, in_flight_policy


@dataclass(frozen=True)
class Roles:
    placed: Placed
    builder: BatchBuilder
    collector: Collector
    source: PromptSource
    fingerprint: dict[str, Any]

    @property
    def learner(self) -> Learner:
        return self.placed.learner

    @property
    def engine(self) -> Engine:
        return self.placed.engine

    async def push(self, engine: Engine) -> None:
        await self.placed.sync.push(self.learner, engine)

    def use(self, config: Config) -> None:
        self.learner.use(config)
        self.builder.use(config)

    def facts(self, step: StepState) -> dict[str, float]:
        """Metrics of the learner and the data after a step."""
        learner = self.learner.facts
        found = {
            "lr": step.reports[0].learning_rate if step.reports else learner.learning_rate,
            "version": learner.version,
            "updates/total": learner.updates,
            "epoch": self.source.epoch,
        }
        found |= self.placed.counts()
        found |= self.source.metrics()
        if self.placed.limits is not None:
            found |= self.placed.limits.shares(step.rollout, step.reports, step.seconds)
        if self.builder.config.algorithm.kl.mode in ("loss", "reward"):
            found["kl/coef"] = self.builder.kl.coef
        return found


def load_roles(setup: Setup, scorer: Scorer, listener: Listener, out_of_time: Callable[[], bool], wait: Wait) -> Roles:
    """Load the model, and make learner and engine.

    Args:
        out_of_time: whether an update that is under way is to end unmade.
        wait: runs a coroutine to its end, in the event loop of the run.

    Raises UserError: it cannot be loaded or trained, or does not fit into the memory.
    """
    config, overrides, source, template = setup.config, setup.overrides, setup.source, setup.template
    drawn = own_source(config, overrides, source)
    builder = BatchBuilder(config, overrides.advantage)
    listener.phase("loading the model")
    placed = place(setup, builder.kl, out_of_time, wait, listener.warning)
    if config.model.lora.base == "nf4":
        listener.phase(in_4_bits(placed.model))
    given = overrides.functions | {"evaluation.metrics": overrides.metrics or {}}
    given["run.trackers"] = {f"python {number}": one for number, one in enumerate(overrides.trackers)}
    begun_with = source.fingerprint, source.prompts[0], setup.heldout
    found = fingerprint(config, placed.fingerprint, setup.tokenizer, *begun_with, given)
    template.ends_with(placed.stop_ids)
    notice_generation_config(placed.model, listener)
    in_flight_policy(config, placed.engine)  # refused before the first evaluation
    progress = partial(listener.working, "rollout")
    rows = embedding_rows(placed.model)
    player = player_for(config, template)
    collector = Collector(drawn, placed.engine, scorer, template.decode, config, progress, rows, player)
    return Roles(placed, builder, collector, source, found)
