"""dapo, as the suite sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch

import dapo
from conformance.contract import Adapter, LossBatch, Refused
from conformance.scripted import chain_model, word_tokenizer
from dapo.algorithm.admission import GroupVerdict, admit, judge
from dapo.algorithm.advantage import with_advantages
from dapo.algorithm.kin import OBJECTIVES
from dapo.algorithm.kl import AdaptiveKL
from dapo.algorithm.objective import TokenInputs, importance_weights, token_weights
from dapo.algorithm.shaping import overlong_penalty, shape_rewards
from dapo.config import TrainingConfig, build_config, nested
from dapo.errors import ConfigError
from dapo.model.forward import Head
from dapo.model.head import token_logprobs
from dapo.model.loading import copy_model, load_model, stop_token_ids
from dapo.records import Group, Prompt, Reward, Sample
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.slots import slot_decoder
from dapo.training.micro_batch import select_tokens
from dapo.training.packing import pack
from dapo.training.trainer import Trainer


class DapoAdapter(Adapter):
    """The algorithm's functions, wired as ``orchestrator.batch_builder`` and ``training.trainer`` wire them."""

    name = f"dapo {dapo.__version__}"

    def loss(self, batch: LossBatch) -> Mapping[str, Any]:
        lengths = torch.tensor([len(row) for row in batch.logprobs])
        sample_ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        wanted = torch.isin(sample_ids, torch.tensor(list(batch.rows)))
        logprobs = _flat(batch.logprobs).requires_grad_()
        inputs = _inputs(batch, wanted, sample_ids, lengths)
        loss = torch.zeros((), dtype=torch.float64)
        objective = OBJECTIVES[batch.objective](
            clip_ratio_low=batch.clip_low,
            clip_ratio_high=batch.clip_high,
            clip_ratio_c=batch.clip_c,
            kl_coef=batch.kl_coef,
            kl_in_loss=batch.kl_coef > 0,
        )
        for part in batch.parts:
            index = torch.cat([(sample_ids == row).nonzero()[:, 0] for row in part])
            value, _ = objective(logprobs[index], torch.zeros(len(index)), select_tokens(inputs, index))
            value.backward()  # type: ignore[no-untyped-call]
            loss += value.detach()
        assert logprobs.grad is not None
        return {"loss": float(loss), "gradient": [part.tolist() for part in logprobs.grad.split(lengths.tolist())]}

    def advantages(self, *, rewards: Sequence[float | None], groups: Sequence[int], kind: str) -> Mapping[str, Any]:
        found = [0.0] * len(rewards)
        for group in dict.fromkeys(groups):
            places = [i for i, name in enumerate(groups) if name == group]
            samples = [replace(_sample(reward=rewards[i]), index=i) for i in places]
            for sample in with_advantages(_group(samples, group), kind=kind).samples:
                found[sample.index] = sample.advantage
        return {"advantages": found}

    def overlong_penalty(self, *, length: int, limit: int, buffer: int) -> Mapping[str, Any]:
        try:
            penalty = overlong_penalty(length, max_response_length=limit, buffer_len=buffer, penalty_factor=1.0)
        except ValueError as error:
            raise Refused(str(error)) from None
        return {"penalty": penalty}

    def overlong_filter(
        self, *, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool]
    ) -> Mapping[str, Any]:
        rows = zip(rewards, lengths, truncated, strict=True)
        group = _group([_sample(reward=r, length=n, truncated=cut) for r, n, cut in rows])
        shaped = shape_rewards(
            group,
            max_response_length=max(lengths),
            soft=False,
            buffer_len=0,
            penalty_factor=0.0,
            hard=False,
            filter_truncated=True,
        )
        finished = with_advantages(shaped, kind="group-norm")
        batch = pack([finished])
        mask, sample_ids, group_ids = map(torch.from_numpy, (batch.mask, batch.sample_ids, batch.group_ids))
        weights = token_weights(
            "token-mean", mask=mask, sample_ids=sample_ids, group_ids=group_ids, num_samples=batch.num_samples
        )
        counted = torch.zeros(batch.num_samples, dtype=torch.int64).index_add(0, sample_ids, mask.long())
        return {
            "advantages": [s.advantage for s in finished.samples],
            "loss_tokens": counted.tolist(),
            "divisor": round(1 / float(weights.max()), 4),
        }

    def keep_group(
        self, *, correct: Sequence[bool | None], rewards: Sequence[float], metric: str, shaped: Sequence[float] | None
    ) -> Mapping[str, Any]:
        later = rewards if shaped is None else shaped
        samples = [
            replace(_sample(reward=reward, correct=verdict), shaped_reward=value)
            for verdict, reward, value in zip(correct, rewards, later, strict=True)
        ]
        return {"keep": judge(_group(samples), metric=cast(Literal["acc", "score"], metric)) is GroupVerdict.MIXED}

    def admit(self, *, outcomes: Sequence[bool | None], wanted: int) -> Mapping[str, Any]:
        admission = admit(outcomes, wanted)
        return {"admitted": list(admission.admitted), "complete": admission.complete}

    def logprob(self, *, logits: Sequence[float], token: int, temperature: float) -> Mapping[str, Any]:
        hidden = torch.tensor([logits])
        found, _ = token_logprobs(hidden, Head(torch.eye(len(logits))), torch.tensor([token]), temperature)
        return {"logprob": float(found)}

    def rollout(
        self,
        *,
        chain: Mapping[int, int],
        prompts: Sequence[Sequence[int]],
        eos: Sequence[int],
        tokenizer_eos: int,
        pad: int,
        limit: int,
        vocabulary: int,
    ) -> Mapping[str, Any]:
        model = load_model(chain_model(chain, vocabulary, eos, pad))
        stop = stop_token_ids(model, word_tokenizer(vocabulary, tokenizer_eos, pad))
        decoder = slot_decoder(
            copy_model(model, torch.float32),
            stop,
            max_sequence_tokens=limit + max(map(len, prompts)),
            max_concurrent_samples=len(prompts),
        )
        for number, prompt in enumerate(prompts):
            decoder.submit(0, Request(number, tuple(prompt), (number,), Sampling(1.0, limit)))
        samples: dict[int, Sample] = {}
        while decoder.busy:
            samples |= {sample.request_id: sample for _, sample in decoder.step()}
        scored = [
            replace(samples[i], reward=Reward(None, 0.0), advantage=0.0, index=i, request_id=i)
            for i in range(len(prompts))
        ]
        batch = pack([Group(0, Prompt(0, "", tuple(prompts[0])), tuple(scored))])
        targets = [ids[len(prompts[0]) :] for ids in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])]
        masks = np.split(batch.mask, np.cumsum(batch.response_lengths)[:-1])
        return {
            "tokens": [ids[mask].tolist() for ids, mask in zip(targets, masks, strict=True)],
            "truncated": [sample.truncated for sample in scored],
        }

    def learning_rates(self, *, rate: float, warmup: int, updates_per_step: int, steps: int) -> Mapping[str, Any]:
        trainer = Trainer(torch.nn.Linear(1, 1), TrainingConfig(learning_rate=rate, warmup_steps=warmup), 1.0)
        rates = []
        for step in range(steps):
            trainer.begin_step(step)
            rates += [trainer.learning_rate] * updates_per_step
        return {"rates": rates}

    def adapted_kl_coef(
        self, *, coef: float, target: float, horizon: int, kl: float, samples: int
    ) -> Mapping[str, Any]:
        return {"coef": AdaptiveKL(coef, target, horizon).update(kl, samples)}

    def configure(self, *, setting: str, value: float) -> Mapping[str, Any]:
        key = {
            "temperature": "rollout.temperature",
            "samples_per_prompt": "rollout.samples_per_prompt",
            "overlong_buffer": "algorithm.overlong_buffer.len",
        }[setting]
        others = {"model.path": "m", "rollout.max_response_length": 100, "algorithm.overlong_buffer.len": 20}
        try:
            build_config(nested(others | {key: value}), "conformance")
        except ConfigError as error:
            raise Refused(str(error)) from None
        return {"accepted": True}


def _inputs(batch: LossBatch, wanted: torch.Tensor, sample_ids: torch.Tensor, lengths: torch.Tensor) -> TokenInputs:
    """What the objective needs, computed over the optimizer step before it is cut."""
    proximal = _flat(batch.logprobs if batch.old_logprobs is None else batch.old_logprobs)
    behaviour = proximal if batch.sampled_logprobs is None else _flat(batch.sampled_logprobs)
    mask = wanted if batch.mask is None else wanted & _flat(batch.mask).bool()
    correction = batch.correction
    importance, mask = importance_weights(
        proximal,
        behaviour,
        kind="none" if correction is None else correction.kind,
        level="token" if correction is None else correction.level,
        cap=2.0 if correction is None else correction.cap,
        low=0.5 if correction is None else correction.low,
        high=2.0 if correction is None else correction.high,
        sample_ids=sample_ids,
        mask=mask,
    )
    groups = torch.tensor([0] * len(lengths) if batch.groups is None else list(batch.groups))
    group_ids = groups.repeat_interleave(lengths)
    weights = token_weights(
        batch.aggregation,
        mask=mask,
        sample_ids=sample_ids,
        group_ids=group_ids,
        num_samples=len(batch.rows),
        constant=batch.constant,
    )
    return TokenInputs(
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        advantages=torch.tensor(batch.advantages, dtype=torch.float32).repeat_interleave(lengths),
        importance=importance,
        mask=mask,
        weights=weights,
        sample_ids=sample_ids,
        group_ids=group_ids,
        reference_logprobs=None if batch.reference_logprobs is None else _flat(batch.reference_logprobs),
    )


def _flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32)


def _sample(*, reward: float | None, correct: bool | None = None, length: int = 1, truncated: bool = False) -> Sample:
    verdict = Reward(correct, 0.0, error="failed") if reward is None else Reward(correct, reward)
    return Sample(
        request_id=0,
        index=0,
        token_ids=np.zeros(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        finish_reason="length" if truncated else "stop",
        reward=verdict,
        shaped_reward=float("nan") if reward is None else reward,
    )


def _group(samples: Sequence[Sample], draw: int = 0) -> Group:
    return Group(draw, Prompt(draw, "", (0,)), tuple(samples))
