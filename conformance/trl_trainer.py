"""TRL's own GRPOTrainer, fed with given numbers in place of a rollout and a forward pass.

Everything between is TRL's code: ``_generate_and_score_completions`` (masks, token counts, advantages, importance
weights) and ``_compute_loss``. Two seams are used: ``rollout_func``, which TRL offers for custom rollouts and which
here returns completions of the wanted lengths, and the method that computes log-probabilities, which here returns given
ones.

TRL divides its ``dapo`` loss by the tokens of the generation batch, scaled to one step of it. Where one optimizer step
uses the whole generation batch, that is the number of tokens of the step.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch

PROMPT = "t2"
"""Any text: prompts are not looked at."""
COMPLETION_TOKEN = 3
EOS, PAD, VOCABULARY = 1, 0, 8


def make_trainer(model: Any = None, tokenizer: Any = None, rollout: Any = None, **settings: Any) -> Any:
    """A GRPOTrainer on the CPU in float32, with nothing logged; ``settings`` are of GRPOConfig."""
    from datasets import Dataset
    from transformers.utils import logging as silence
    from trl import GRPOConfig, GRPOTrainer

    silence.set_verbosity_error()
    silence.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)  # it warns of rewards that are None, which cases are about
    common: dict[str, Any] = {
        "output_dir": _scratch().name,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "num_generations": 2,
        "max_steps": 1,
        # the second iteration on a batch is where pi_old is not pi_theta: TRL then computes and uses it
        "num_iterations": 2,
        "use_bias_correction_kl": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOTrainer(
            model=_model() if model is None else model,
            reward_funcs=_given_rewards,
            args=GRPOConfig(**(common | settings)),
            train_dataset=Dataset.from_list([{"prompt": PROMPT}]),
            processing_class=_tokenizer() if tokenizer is None else tokenizer,
            rollout_func=rollout,
        )


class GivenNumbers:
    """A GRPOTrainer whose rollouts and log-probabilities are given."""

    def __init__(self, responses: int, **settings: Any) -> None:
        """
        Args:
            responses: in one generation batch, all of one group unless ``settings`` say otherwise.
            settings: of GRPOConfig.
        """
        # a config of one response is refused, but a loss of one is well defined
        groups = {} if "num_generations" in settings else {"num_generations": max(responses, 2)}
        batch = {"per_device_train_batch_size": max(responses, 2)}
        self.trainer = make_trainer(rollout=self._rollout, **(batch | groups | settings))
        if groups:
            self.trainer.num_generations = responses
        self.trainer._get_per_token_logps_and_entropies = self._log_probabilities
        self.trainer.model.train()
        self._completions: dict[str, Any] = {}
        self._now: torch.Tensor | None = None
        self._old: torch.Tensor | None = None
        self._reference: torch.Tensor | None = None

    def with_reference(self, coefficient: float) -> None:
        """Add a KL term to a reference whose log-probabilities are given, with this ``beta``."""
        self.trainer.beta = coefficient
        self.trainer.ref_model = "the reference"

    def with_sampler(self, **settings: Any) -> None:
        """Correct for a sampler of other log-probabilities, as with a vLLM server; ``settings``: ``vllm_*``."""
        self.trainer.use_vllm = True
        self.trainer._last_loaded_step = self.trainer.state.global_step  # no weights to send anywhere
        for name, value in settings.items():
            setattr(self.trainer, f"vllm_{name}", value)

    def prepare(
        self,
        lengths: Sequence[int],
        rewards: Sequence[float | None],
        *,
        mask: Sequence[Sequence[int]] | None = None,
        truncated: Sequence[bool] | None = None,
        sampled: Sequence[Sequence[float]] | None = None,
        old: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """TRL's generation batch: masks, token count, advantages and, where they are used, old and reference log-probs.

        Args:
            lengths: of the responses, in tokens.
            rewards: None: the reward function said nothing.
            mask: TRL's ``env_mask``: 0 for tokens that are to stay out of the loss.
            truncated: which responses end without a stop token.
            sampled: log-probs of the sampler.
            old, reference: ``[B, T]`` log-probs.
        """
        ends = [COMPLETION_TOKEN if truncated is not None and truncated[i] else EOS for i in range(len(lengths))]
        self._completions = {
            "prompt_ids": [[2]] * len(lengths),
            "completion_ids": [[COMPLETION_TOKEN] * (n - 1) + [end] for n, end in zip(lengths, ends, strict=True)],
            "logprobs": None if sampled is None else [list(row) for row in sampled],
        } | ({} if mask is None else {"env_mask": [[int(x) for x in row] for row in mask]})
        self._old, self._reference = old, reference
        rows = [{"prompt": PROMPT, "given": reward} for reward in rewards]
        batch: dict[str, Any] = self.trainer._generate_and_score_completions(rows)
        return batch

    def loss(self, batch: dict[str, Any], logprobs: torch.Tensor, parts: Sequence[Sequence[int]]) -> torch.Tensor:
        """TRL's loss of one optimizer step, the sum over its micro-batches ``parts``.

        Args:
            batch: from :meth:`prepare`.
            logprobs: ``[B, T]``, with gradient.
            parts: rows of each micro-batch.
        """
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = len(parts)
        sizes = {len(part) for part in parts}
        trainer.args.steps_per_generation = len(logprobs) // sizes.pop()
        total = torch.zeros(())
        for part in parts:
            rows = torch.tensor(list(part))
            self._now = logprobs[rows]
            cut = {k: v[rows] if torch.is_tensor(v) and v.dim() else v for k, v in batch.items()}
            total = total + trainer.compute_loss(trainer.model, cut)
        return total

    def _rollout(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        return dict(self._completions)

    def _log_probabilities(self, model: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        policy = self._now if torch.is_grad_enabled() else self._old
        found = self._reference if model == "the reference" else policy
        if found is None:  # not used by the case
            found = torch.zeros(args[0].shape[0], args[2])
        return found, torch.zeros_like(found), None


def _given_rewards(prompts: Any, given: Any, **others: Any) -> list[float | None]:
    return list(given)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="trl-")  # goes with the process


@functools.cache
def _tokenizer() -> Any:
    from conformance.scripted import word_tokenizer

    return word_tokenizer(VOCABULARY, EOS, PAD)


def _model() -> Any:
    from conformance.scripted import chain_model

    return chain_model({}, VOCABULARY, [EOS], PAD)
