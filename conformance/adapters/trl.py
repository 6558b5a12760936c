"""TRL's GRPOTrainer, as the suite sees it: TRL's code on given numbers, in the configuration that suits the case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from conformance.contract import Adapter, Correction, LossBatch, NotOffered, Refused
from conformance.scripted import chain_model, word_tokenizer
from conformance.trl_trainer import GivenNumbers, make_trainer

LOSS_TYPES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "constant": "dr_grpo",
}

_WARM_UP = "The schedule is that of Transformers: counted in optimizer updates, from 0."
_TEMPERATURE = "Refused by Transformers when the first responses are generated, not when the config is read."

STATED = {
    "loss/two-updates": "The divisor is that of the generation batch, scaled to one of its steps: every token of a "
    "rollout weighs the same, whichever step it falls into. The two agree when a step uses the whole generation batch.",
    "loss/masked-sequence-mean": "The mean is over all responses.",
    "loss/masked-nan": "The loss multiplies by the mask. Log-probabilities of padding and of filtered responses are "
    "set to 0 before they get there; those of tokens masked by env_mask are not.",
    "correction/token-mask": "Tokens inside of the band are weighted with q; those outside count in the divisor.",
    "advantage/small-spread": "The epsilon beside the standard deviation is 1e-4, and not a setting.",
    "advantage/interleaved": "Groups are by position; the trainer's sampler keeps the samples of a prompt together.",
    "lr/warm-up": _WARM_UP,
    "lr/per-rollout-step": _WARM_UP,
    "config/temperature-0": _TEMPERATURE,
    "config/temperature--0.1": _TEMPERATURE,
}


class TrlAdapter(Adapter):
    """GRPOTrainer; dynamic sampling, adaptive KL and averages over prompts are not part of it."""

    name = f"TRL {version('trl')} GRPOTrainer"
    stated = STATED

    def loss(self, batch: LossBatch) -> Mapping[str, Any]:
        if batch.aggregation not in LOSS_TYPES:
            raise NotOffered("no loss type averages over prompts")
        lengths = [len(row) for row in batch.logprobs]
        width = batch.pad_to or max(lengths)
        numbers = GivenNumbers(
            len(lengths),
            epsilon=batch.clip_low,
            **_objective_settings(batch),
            delta=batch.clip_c,
            pad_to_multiple_of=batch.pad_to,
            **({} if batch.constant is None else {"max_completion_length": batch.constant}),
        )
        if batch.kl_coef:
            numbers.with_reference(batch.kl_coef)
        if batch.correction is not None:
            numbers.with_sampler(**_sampler_settings(batch.correction))
        prepared = numbers.prepare(
            lengths,
            [0.0] * len(lengths),
            mask=None if batch.mask is None else [[int(x) for x in row] for row in batch.mask],
            sampled=batch.sampled_logprobs,
            old=_padded(batch.logprobs if batch.old_logprobs is None else batch.old_logprobs, width),
            reference=None if batch.reference_logprobs is None else _padded(batch.reference_logprobs, width),
        )
        prepared["advantages"] = torch.tensor(batch.advantages, dtype=torch.float32)
        logprobs = _padded(batch.logprobs, width).requires_grad_()
        loss = numbers.loss(prepared, logprobs, batch.parts)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        rows = [row[:n].tolist() for row, n in zip(gradient, lengths, strict=True)]
        return {"loss": float(loss.detach()), "gradient": rows}

    def advantages(self, *, rewards: Sequence[float | None], groups: Sequence[int], kind: str) -> Mapping[str, Any]:
        scale = {"group-norm": "group", "group-mean": "none"}.get(kind)
        if scale is None:
            raise NotOffered("GRPOTrainer has no leave-one-out baseline (RLOOTrainer has)")
        sizes = {list(groups).count(group) for group in groups}
        if len(sizes) > 1:
            raise NotOffered("groups of unequal size")
        try:
            numbers = GivenNumbers(len(rewards), num_generations=sizes.pop(), scale_rewards=scale)
        except ValueError as error:
            raise Refused(str(error)) from None
        return {"advantages": numbers.prepare([1] * len(rewards), rewards)["advantages"].tolist()}

    def overlong_penalty(self, *, length: int, limit: int, buffer: int) -> Mapping[str, Any]:
        from trl.rewards import get_soft_overlong_punishment

        return {"penalty": get_soft_overlong_punishment(limit, buffer)([[0] * length])[0]}

    def overlong_filter(
        self, *, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool]
    ) -> Mapping[str, Any]:
        numbers = GivenNumbers(len(rewards), mask_truncated_completions=True)
        batch = numbers.prepare(lengths, rewards, truncated=truncated)
        return {
            "advantages": batch["advantages"].tolist(),
            "loss_tokens": batch["completion_mask"].sum(1).tolist(),
            "divisor": float(batch["num_items_in_batch"]),
        }

    def logprob(self, *, logits: Sequence[float], token: int, temperature: float) -> Mapping[str, Any]:
        prompt = len(logits)  # a further token, which the model never predicts
        model = chain_model({}, prompt + 1, [0], prompt)
        width = model.config.hidden_size
        with torch.no_grad():
            head = model.lm_head.weight
            head[:, prompt] = torch.tensor([*logits, -1e4]) / width**0.5  # the last norm makes a one-hot this long
        trainer = make_trainer(
            model, word_tokenizer(prompt + 1, 0, prompt), temperature=temperature, per_device_train_batch_size=2
        )
        ids = torch.tensor([[prompt, token]])
        found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 1)
        return {"logprob": float(found.detach())}

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
        rows = [{"prompt": " ".join(f"t{i}" for i in prompt), "given": 0.0} for prompt in prompts]

        def generation_batch(mask_truncated: bool) -> dict[str, Any]:
            trainer = make_trainer(
                chain_model(chain, vocabulary, eos, pad),
                word_tokenizer(vocabulary, tokenizer_eos, pad),
                per_device_train_batch_size=len(prompts),
                num_generations=len(prompts),
                max_completion_length=limit,
                mask_truncated_completions=mask_truncated,
            )
            trainer.model.train()
            batch: dict[str, Any] = trainer._generate_and_score_completions(rows)
            return batch

        batch, filtered = generation_batch(False), generation_batch(True)
        pairs = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
        return {
            "tokens": [ids[mask].tolist() for ids, mask in pairs],
            "truncated": (filtered["completion_mask"].sum(1) == 0).tolist(),
        }

    def learning_rates(self, *, rate: float, warmup: int, updates_per_step: int, steps: int) -> Mapping[str, Any]:
        trainer = make_trainer(
            per_device_train_batch_size=2,
            learning_rate=rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=warmup * updates_per_step,
        )
        trainer.create_optimizer_and_scheduler(steps * updates_per_step)
        rates = []
        for _ in range(steps * updates_per_step):
            rates.append(trainer.lr_scheduler.get_last_lr()[0])
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
        return {"rates": rates}

    def configure(self, *, setting: str, value: float) -> Mapping[str, Any]:
        try:
            match setting:
                case "temperature":
                    make_trainer(per_device_train_batch_size=2, temperature=value)
                case "samples_per_prompt":
                    make_trainer(per_device_train_batch_size=2, num_generations=int(value))
                case "overlong_buffer":
                    from trl.rewards import get_soft_overlong_punishment

                    get_soft_overlong_punishment(100, int(value))
        except ValueError as error:
            raise Refused(str(error)) from None
        return {"accepted": True}


def _objective_settings(batch: LossBatch) -> dict[str, Any]:
    """What is 1 + clip_high elsewhere is the cap itself in CISPO, which has no lower border."""
    if batch.objective == "cispo":
        if batch.aggregation != "token-mean" or batch.clip_low < 1:
            raise NotOffered("CISPO is a mean over tokens without a lower border")
        return {"loss_type": "cispo", "epsilon_high": 1 + batch.clip_high}
    level = "sequence" if batch.objective == "gspo" else "token"
    found = {"loss_type": LOSS_TYPES[batch.aggregation], "epsilon_high": batch.clip_high}
    return found | {"importance_sampling_level": level}


def _sampler_settings(correction: Correction) -> dict[str, Any]:
    bounds: dict[str, Any] = {"clip_max": correction.cap, "clip_min": None}
    if correction.kind == "mask":
        bounds = {"clip_max": correction.high, "clip_min": correction.low}
    return {
        "importance_sampling_correction": True,
        "importance_sampling_mode": f"{correction.level}_{correction.kind}",
    } | {f"importance_sampling_{name}": value for name, value in bounds.items()}


def _padded(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    padded = [[*row, *[0.0] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32)
