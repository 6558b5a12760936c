"""The critic of PPO: a second trainer whose log-probability of a response token is the value of the state that predicts
it. It has a backbone of its own, or a head on the policy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dapo.algorithm.gae import ValueObjective, ValueTokens
from dapo.config import Config, TrainingConfig
from dapo.errors import ModelError
from dapo.model.adapters import has_adapter
from dapo.model.classifier import as_classifier
from dapo.model.loading import context_limit, copy_model, load_tokenizer
from dapo.model.placement import upload
from dapo.records import FloatArray, TokenBatch, starts_of
from dapo.training.base_learner import Watched
from dapo.training.checkpoint import read_into
from dapo.training.micro_batch import MicroBatch
from dapo.training.parallel.holding import MODEL, Parameters, Replica
from dapo.training.parallel.ranks import Ranks
from dapo.training.scores import ScorePolicy, load_classifier, score_trainer
from dapo.training.trainer import NO_LOSS_TOKENS, Trainer
from dapo.util.files import new_folder, read_json, write_json

_AHEAD = "ahead.json"


def make_critic(config: Config, model: Any) -> Critic | None:
    """The critic of a run of PPO, with a head of zeros; None: it is no PPO.
    ``model``: the policy, before its trainer has it. Raises ModelError: the critic cannot be made of its model."""
    section = config.algorithm.critic
    if config.algorithm.kind != "ppo":
        return None
    dtype, pad = getattr(torch, config.model.compute_dtype), model.config.eos_token_id
    pad = pad[0] if isinstance(pad, list) else pad or 0  # of no effect here: texts are not padded
    if section.share_backbone:
        own = as_classifier(model, pad)
        settings = critic_training(config).model_copy(update={"activation_checkpointing": False})  # the policy's
        trainer = score_trainer(own, settings, dtype, _HeadOnly())
        trainer.policy = _OnTheBackbone(own, 1.0, trainer.policy.tokens_per_micro_batch, dtype, trainer.policy.held)
        return Critic(trainer, config)
    if section.model is not None:
        device = next(model.parameters()).device
        own = load_classifier(section.model, pad, config.model.trust_remote_code, device)
        same = _same_tokens(config)
        rows, needed = (int(one.get_input_embeddings().weight.shape[0]) for one in (own, model))
        if same and rows < needed:  # rows without a token, which sizes of one family have more or fewer of
            own.resize_token_embeddings(needed, mean_resizing=False).weight.data[rows:] = 0
            rows = needed
        longest = config.data.max_prompt_length + config.rollout.max_response_length + 1
        limit, where = context_limit(own.config) or longest, f"algorithm.critic.model: {section.model} has"
        if rows < needed:  # on a GPU such a token would break every computation of the process
            raise ModelError(f"{where} {rows} embedding rows, the policy {needed}; name a model with as many")
        if limit < longest:
            what = f"data.max_prompt_length, rollout.max_response_length and one token more are {longest}"
            raise ModelError(f"{where} {limit} positions, but {what}; use smaller ones, or another model")
    elif has_adapter(model):
        raise ModelError("algorithm.critic.model: model.path holds an adapter; name a whole model for the critic")
    else:
        own = as_classifier(copy_model(model, torch.float32).requires_grad_(True), pad)
    return Critic(score_trainer(own, critic_training(config), dtype), config)


def _same_tokens(config: Config) -> bool:
    """Whether it is known that the critic's model reads token ids as the policy does.
    Raises ModelError: it is known that it does not."""
    policy, critic = config.model, str(config.algorithm.critic.model)
    try:
        paths = (policy.tokenizer or policy.path, critic)
        ours, theirs = (load_tokenizer(path, policy.trust_remote_code).get_vocab() for path in paths)
    except ModelError:
        return False
    if other := [token for token, number in ours.items() if theirs.get(token) != number]:
        raise ModelError(
            f"algorithm.critic.model: {critic} has other ids than the policy for {len(other)} of {len(ours)} tokens, "
            f"such as {other[0]!r}; name a model with the policy's tokenizer"
        )
    return True


def critic_training(config: Config) -> TrainingConfig:
    """The settings of the critic's optimizer."""
    rate = config.algorithm.critic.learning_rate
    return config.training.model_copy(update={"learning_rate": rate, "final_learning_rate": None})


@dataclass(slots=True)
class Critic:
    """Values of response tokens, and how they are learned.
    ``ahead``: what the update told that was made of the mini-batch at hand, while that of the policy is still to come.
    """

    trainer: Trainer
    config: Config
    ahead: Mapping[str, tuple[float, float]] | None = field(default=None)

    def use(self, config: Config) -> None:
        self.config = config
        self.trainer.use(critic_training(config))

    def columns(self, batch: TokenBatch) -> dict[str, FloatArray]:
        """``values``: of the state that each response token was sampled in; ``after``: of the state behind it."""
        longer = one_token_longer(batch)
        found = self.trainer.logprobs(longer).cpu().numpy()
        starts, lengths = starts_of(longer.response_lengths), longer.response_lengths
        return {"values": np.delete(found, starts + lengths - 1), "after": np.delete(found, starts)}

    def inputs(self, mini: TokenBatch) -> ValueTokens:
        """Of a mini-batch with ``values`` and ``returns``: each loss token weighs the same."""
        weights = (mini.mask / max(mini.mask.sum(), 1)).astype(np.float32)
        given = (weights, mini.columns["values"], mini.columns["returns"])
        return ValueTokens(*(upload(column, self.trainer.device) for column in given))

    def learn(self, mini: TokenBatch, out_of_time: Callable[[], bool]) -> Mapping[str, tuple[float, float]]:
        """Make the update of a mini-batch, unless it was made (:attr:`ahead`), and return its statistics."""
        if self.ahead is None:
            objective = Watched(ValueObjective(self.config.algorithm.critic.clip), out_of_time)
            report = self.trainer.update(mini, self.inputs(mini), objective)
            told = report.statistics | {"critic/grad_norm": (report.grad_norm, 1.0)} if report.skipped is None else {}
            self.ahead = told | {"critic/skipped": (float(report.skipped not in (None, NO_LOSS_TOKENS)), 1.0)}
        return self.ahead

    def save(self, folder: Path) -> None:
        """What a checkpoint has to keep beside the trainer."""
        write_json(folder / _AHEAD, self.ahead)

    def load(self, folder: Path) -> None:
        found = read_json(folder / _AHEAD)
        self.ahead = None if found is None else {name: (pair[0], pair[1]) for name, pair in found.items()}


def one_token_longer(batch: TokenBatch) -> TokenBatch:
    """The batch with one more token behind each response, which nobody reads: the state that would predict it is that
    behind the last one. There are no columns."""
    ends, responses = np.cumsum(batch.lengths), np.cumsum(batch.response_lengths)
    return replace(
        batch,
        lengths=batch.lengths + 1,
        token_ids=np.insert(batch.token_ids, ends, batch.token_ids[ends - 1]),
        mask=np.insert(batch.mask, responses, False),
        behaviour_logprobs=np.insert(batch.behaviour_logprobs, responses, 0),
        versions=np.insert(batch.versions, responses, 0),
        columns={},
    )


class _HeadOnly(Replica):
    """Of a classifier whose backbone is the policy's, the head alone: it is what is trained and what is saved."""

    def take(self, model: Any, compute_dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
        return {"score.weight": model.score.weight}

    def frozen(self, model: Any, copies: dict[int, Any], ranks: Ranks) -> tuple[Any, Replica]:
        return model, self  # files are of the parameters that they are given

    def save_model(self, model: Any, folder: Path, parameters: Parameters, **how: Any) -> None:
        with new_folder(folder) as staging:
            save_file({name: p.detach().cpu() for name, p in parameters.items()}, staging / MODEL)

    def load_weights(self, model: Any, folder: Path, parameters: Parameters) -> None:
        read_into(parameters, folder)


@dataclass(frozen=True, slots=True, eq=False)
class _OnTheBackbone(ScorePolicy):
    """Values of the policy's own states, into which no gradient flows."""

    def predicting_states(self, part: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            states = ScorePolicy.predicting_states(self, part)
        return states.requires_grad_()
