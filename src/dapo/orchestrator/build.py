"""Building a run: what it starts from, looked at before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dapo.algorithm.advantage import advantages
from dapo.checks.checklist import brief
from dapo.checks.start import check_lengths, check_own_parts, check_vocabulary, longest_sequence, try_check, try_reward
from dapo.config import Config, warnings_for
from dapo.config.composed_reward import off_gpu
from dapo.data.source import PromptSource
from dapo.data.template import PromptTemplate
from dapo.environments.player import check_environment, scores_itself
from dapo.errors import extra
from dapo.model.loading import embedding_rows, load_tokenizer
from dapo.model.placement import device_of, engine_device
from dapo.observe.progress import Listener
from dapo.observe.run_folder import RunFolder
from dapo.observe.trackers import check_trackers
from dapo.orchestrator.batch_builder import own_advantage
from dapo.orchestrator.inputs import RunOverrides, described_model, heldout_prompts, openai_engine, training_prompts
from dapo.orchestrator.resume import on_day, on_its_day
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.reward.monitor import Monitor
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
        if overrides.folder is None and overrides.resume is None:
            RunFolder.require_free(config)
        config = on_its_day(config, overrides.resume) if overrides.resume else config
        check_trackers(config)
        if config.runtime.kind == "ray":
            with extra("ray", "runtime.kind=ray"):
                import ray  # noqa: F401
        check_own_parts(config, overrides.objective, overrides.engine)
        check_environment(config)
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
        seen = "a row's prompt" if config.environment.on else "a prompt as the model sees it"
        listener.phase(f"{seen}: {template.show(source.prompts[0])}")
        check_lengths(config, described.config, heldout)
        check_vocabulary(described, tokenizer, config, listener, rows)
        if (own := own_advantage(config, overrides.advantage)) is not None:  # tried before the weights load
            advantages([1.0, -1.0, -1.0, 0.5], kind=own)
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

    def __init__(self, setup: Setup, tell: Callable[[str], object]) -> None:
        """Make them. Nothing is started yet. ``tell``: hears of processes that died and were replaced."""
        config, reward, check = setup.config, setup.config.reward, setup.config.monitor.check
        if config.runtime.kind == "ray":  # this process sees GPUs that are the workers'
            reward, check = off_gpu(reward), check and off_gpu(check)
        self.scorer: Scorer
        if config.runtime.kind == "ray" and config.runtime.reward.workers:
            from dapo.orchestrator.runtime.ray.rewards import RayScorer  # needs an extra

            self.scorer = RayScorer(config, setup.overrides.reward, tell)
        else:
            self.scorer = make_scorer(reward, setup.overrides.reward)
        self.check_scorer: Scorer | None = make_scorer(check) if check else None
        self.monitor = Monitor(config.monitor, self.check_scorer, config.seed)

    async def check(self, setup: Setup, listener: Listener) -> None:
        """Start them and try them, before time is spent on loading the model.
        Raises UserError: rows cannot be scored, or the reward or the held-out check breaks its contract."""
        await self.scorer.start()
        by_python = setup.overrides.reward is not None
        if by_python or not scores_itself(setup.config):
            await try_reward(setup.config, self.scorer, setup.source, setup.heldout, listener, by_python)
        if self.check_scorer is not None:
            await try_check(self.check_scorer, setup.source, listener)

    def close_with(self, closing: AsyncExitStack, stop: Callable[..., Any]) -> None:
        """Have ``closing`` stop them, each by ``stop(name, close)``."""
        named = {"the reward": self.scorer, "the held-out check": self.check_scorer, "the monitor": self.monitor}
        for what, role in named.items():
            if role is not None:
                closing.push_async_callback(stop, what, role.close)


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
        scorer=None if setup.overrides.reward or scores_itself(setup.config) else scorer,
    )
    elsewhere = ("memory", "snapshot") if next(model.parameters()).is_meta else ()  # that of other machines
    for finding in findings:
        if finding.status in ("warn", "fail") and finding.name not in elsewhere:
            listener.warning(visible(f"doctor: {finding.name}: {finding.found}; {finding.fix}"))
