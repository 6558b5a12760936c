"""Learner and engine in this process, on one device or two."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dapo.algorithm.kl import AdaptiveKL
from dapo.model.fingerprint import fingerprint_model
from dapo.model.loading import stop_token_ids
from dapo.model.placement import set_threads
from dapo.orchestrator.build import Setup
from dapo.orchestrator.inputs import evaluation_engine, make_engine
from dapo.orchestrator.mfu import CardLimits
from dapo.orchestrator.runtime.placed import Placed
from dapo.rollout.engine import Engine, hand_over
from dapo.rollout.native.exact import exact_attention
from dapo.training.critic import make_critic
from dapo.training.learner import LocalLearner
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.trainer import Trainer


class CopySync:
    """In one process: the engine copies the learner's tensors into its own."""

    async def push(self, learner: LocalLearner, engine: Engine) -> None:
        """Hand over the weights. After a cancellation the same version is handed over again."""
        await hand_over(engine, *learner.publish())


def place_here(setup: Setup, kl: AdaptiveKL, out_of_time: Callable[[], bool]) -> Placed:
    """As :func:`dapo.orchestrator.runtime.place`."""
    config, overrides, template = setup.config, setup.overrides, setup.template
    model = load_trainable(overrides.model or config.model.path, config.model, setup.device)
    found = fingerprint_model(model, setup.device)
    critic = make_critic(config, model)  # of the model as it is, without a new adapter
    model = begin_adapter(model, config.model, config.seed)
    set_threads(config, model)
    dtype = getattr(torch, config.model.compute_dtype)
    trainer = Trainer(model, config.training, config.rollout.temperature, dtype, attention=exact_attention(config))
    limits = CardLimits.of(model, setup.device, dtype)
    # before the engine, which takes what memory is left
    learner = LocalLearner(trainer, config, kl, overrides.objective, out_of_time, critic=critic)
    stop_ids = stop_token_ids(model, setup.tokenizer, config.rollout.stop_token_ids)
    spare = trainer.bytes_to_come + (critic.trainer.bytes_to_come if critic else 0)
    copy = config.evaluation.while_sampling == "copy" and config.ahead > 0 and bool(setup.heldout)
    second = evaluation_engine(config, model, stop_ids, template, setup.heldout) if copy else None
    engine = make_engine(config, overrides, model, stop_ids, template, setup.heldout, spare)
    return Placed(learner, engine, second, CopySync(), model, stop_ids, found, limits)
