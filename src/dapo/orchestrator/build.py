"""Building a run: what it starts from, looked at before anything is loaded, and the roles that share its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dapo.algorithm.advantage import advantages
from dapo.checks.checklist import brief
from dapo.checks.start import (
    check_lengths,
    check_own_parts,
    check_vocabulary,
    longest_sequence,
    notice_generation_config,
    try_check,
    try_reward,
)
from dapo.config import Config, warnings_for
from dapo.data.source import PromptSource
from dapo.data.template import PromptTemplate
from dapo.model.loading import embedding_rows, load_tokenizer, stop_token_ids
from dapo.model.placement import device_of, engine_device, set_threads
from dapo.observe.fingerprint import fingerprint
from dapo.observe.progress import Listener
from dapo.observe.run_folder import RunFolder
from dapo.observe.trackers import check_trackers
from dapo.orchestrator.batch_builder import BatchBuilder, own_advantage
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.inputs import (
    RunOverrides,
    described_model,
    evaluation_engine,
    heldout_prompts,
    make_engine,
    openai_engine,
    own_source,
    training_prompts,
)
from dapo.orchestrator.mfu import CardLimits
from dapo.orchestrator.resume import on_day, on_its_day
from dapo.orchestrator.step_state import StepState
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.reward.monitor import Monitor
from dapo.rollout.engine import Engine, in_flight_policy
from dapo.training.learner import LocalLearner
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.trainer import Trainer
from dapo.util.terminal import visible


@dataclass(frozen=True)
class Setup:
    """What a run starts from."""

    config: Config
    overrides: RunOverrides
    device: torch.device
    tokenizer: Any
    template: PromptTemplate
    source: PromptSource
    heldout: tuple[Prompt, ...]

    @classmethod
    def of(cls, config: Config, listener: Listener, overrides: RunOverrides) -> Setup:
        """Look at everything that is named but the weights and the reward. Nothing is written.
        Raises UserError: what is wrong, where, and what would work."""
        config = on_its_day(config, overrides.resume) if overrides.resume else config
        check_trackers(config)
        check_own_parts(config, overrides.objective, overrides.engine)
        for warning in warnings_for(config, overrides.heldout):
            listener.warning(warning)
        device = device_of(config)
        engine_device(config)  # refused here, if it is not there
        listener.phase("loading tokenizer and data")
        named = config.model
        tokenizer = overrides.tokenizer or load_tokenizer(named.tokenizer or named.path, named.trust_remote_code)
        described = described_model(config, overrides)
        rows = embedding_rows(overrides.model or named.path, named.trust_remote_code)
        template = PromptTemplate(config.data, tokenizer, rows)
        if config.data.today and not template.today:
            listener.warning("data.today: the chat template does not ask for the date, so nothing comes of it")
        config = on_day(config, template.today)
        source = training_prompts(config, overrides, template, listener)
        heldout = heldout_prompts(config, overrides, template, listener)
        listener.phase(f"a prompt as the model sees it: {template.show(source.prompts[0])}")
        check_lengths(config, described.config, heldout)
        check_vocabulary(described, tokenizer, config, listener, rows)
        if (own := own_advantage(config, overrides.advantage)) is not None:  # tried before the weights load
            advantages([1.0, -1.0, -1.0, 0.5], kind=own)
        if overrides.folder is None and overrides.resume is None:
            RunFolder.require_free(config)
        return cls(config, overrides, device, tokenizer, template, source, heldout)

    async def try_servers(self) -> None:
        """Raises UserError: a server that is to sample cannot be reached, or lacks what training needs."""
        if self.config.rollout.engine != "openai" or self.overrides.engine is not None:
            return
        engine = openai_engine(self.config, self.overrides.model or self.config.model.path)
        try:
            await engine.start(self.source.prompts[0].token_ids, longest_sequence(self.config, self.heldout))
        finally:
            await engine.close()


class Rewards:
    """The reward that is trained on, the held-out check that is not, and the monitor that compares them."""

    def __init__(self, setup: Setup) -> None:
        """Make them. Nothing is started yet."""
        config = setup.config
        self.scorer: Scorer = make_scorer(config.reward, setup.overrides.reward)
        self.check_scorer: Scorer | None = make_scorer(config.monitor.check) if config.monitor.check else None
        self.monitor = Monitor(config.monitor, self.check_scorer, config.seed)

    async def check(self, setup: Setup, listener: Listener) -> None:
        """Start them and try them, before time is spent on loading the model.
        Raises UserError: rows cannot be scored, or the reward or the held-out check breaks its contract."""
        await self.scorer.start()
        by_python = setup.overrides.reward is not None
        await try_reward(setup.config, self.scorer, setup.source, setup.heldout, listener, by_python)
        if self.check_scorer is not None:
            await try_check(self.check_scorer, setup.source, listener)

    def close_with(self, closing: AsyncExitStack, stop: Callable[..., Any]) -> None:
        """Have ``closing`` stop them, each by ``stop(name, close)``."""
        named = {"the reward": self.scorer, "the held-out check": self.check_scorer, "the monitor": self.monitor}
        for what, role in named.items():
            if role is not None:
                closing.push_async_callback(stop, what, role.close)


@dataclass(frozen=True)
class Roles:
    """Who does the work of a run, once its model is loaded."""

    learner: LocalLearner
    builder: BatchBuilder
    engine: Engine
    evaluation_engine: Engine | None
    """None: evaluations have that of the rollout."""
    collector: Collector
    source: PromptSource
    stop_ids: Sequence[int]
    fingerprint: dict[str, Any]
    limits: CardLimits | None

    @property
    def model(self) -> Any:
        """The policy that is trained."""
        return self.learner.trainer.policy.model

    def use(self, config: Config) -> None:
        """Train with the settings of ``config`` from now on."""
        self.learner.use(config)
        self.builder.use(config)

    def facts(self, step: StepState) -> dict[str, float]:
        """Metrics of the learner and the data after a step."""
        trainer = self.learner.trainer
        found = {
            "lr": step.reports[0].learning_rate if step.reports else trainer.learning_rate,
            "version": trainer.version,
            "updates/total": trainer.updates,
            "epoch": self.source.epoch,
        }
        if self.limits is not None:
            found |= self.limits.shares(step.rollout, step.reports, step.seconds)
        if self.builder.config.algorithm.kl.mode in ("loss", "reward"):
            found["kl/coef"] = self.builder.kl.coef
        return found


def load_roles(setup: Setup, scorer: Scorer, listener: Listener, out_of_time: Callable[[], bool]) -> Roles:
    """Load the model, and make learner and engine.

    Args:
        out_of_time: whether an update that is under way is to end unmade.

    Raises:
        UserError: it cannot be loaded or trained, or does not fit into the memory.
    """
    config, overrides, source, template = setup.config, setup.overrides, setup.source, setup.template
    drawn = own_source(config, overrides, source)
    listener.phase("loading the model")
    model = load_trainable(overrides.model or config.model.path, config.model, setup.device)
    given = overrides.functions | {"evaluation.metrics": overrides.metrics or {}}
    given["run.trackers"] = {f"python {place}": one for place, one in enumerate(overrides.trackers)}
    found = fingerprint(config, model, setup.tokenizer, source.fingerprint, source.prompts[0], setup.heldout, given)
    model = begin_adapter(model, config.model, config.seed)
    set_threads(config, model)
    dtype = getattr(torch, config.model.compute_dtype)
    trainer = Trainer(model, config.training, config.rollout.temperature, dtype)
    limits = CardLimits.of(model, setup.device, dtype)
    builder = BatchBuilder(config, overrides.advantage)
    # before the engine, which takes what memory is left
    learner = LocalLearner(trainer, config, builder.kl, overrides.objective, out_of_time)
    stop_ids = stop_token_ids(model, setup.tokenizer, config.rollout.stop_token_ids)
    template.ends_with(stop_ids)
    notice_generation_config(model, listener)
    spare = trainer.bytes_to_come
    copy = config.evaluation.while_sampling == "copy" and config.ahead > 0 and bool(setup.heldout)
    second = evaluation_engine(config, model, stop_ids, template, setup.heldout) if copy else None
    engine = make_engine(config, overrides, model, stop_ids, template, setup.heldout, spare)
    in_flight_policy(config, engine)  # refused before the first evaluation
    progress = partial(listener.working, "rollout")
    collector = Collector(drawn, engine, scorer, template.decode, config, progress, embedding_rows(model))
    return Roles(learner, builder, engine, second, collector, source, stop_ids, found, limits)


async def examine(setup: Setup, model: Any, scorer: Scorer, listener: Listener) -> None:
    """What `dapo doctor` can tell in brief, as warnings."""
    findings = await brief(
        setup.config,
        model=model,
        tokenizer=setup.tokenizer,
        template=setup.template,
        source=setup.source,
        heldout=setup.heldout,
        device=setup.device,
        scorer=None if setup.overrides.reward else scorer,
    )
    for finding in findings:
        if finding.status in ("warn", "fail"):
            listener.warning(visible(f"doctor: {finding.name}: {finding.found}; {finding.fix}"))
