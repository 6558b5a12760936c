"""The trainer: packed token batches in, new weights out. It knows no algorithm, and sees neither prompts nor rewards.

Consumes: a :class:`~dapo.records.TokenBatch` for one optimizer step, a record of per-token inputs and an
objective that turns log-probabilities into a sum over tokens. Produces: an
:class:`~dapo.training.update_report.UpdateReport` per step and, when
asked, the weights under a new version number. Waits for nothing but its own device.

Loss and gradient are plain sums over tokens: the divisor is part of the token weights, computed over the whole
mini-batch before it is cut. Nothing here divides again, so the cut into micro-batches cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo.config import TrainingConfig
from dapo.config.sections import MOST_STALE
from dapo.errors import NumericalError, UserError
from dapo.model.activation_checkpointing import checkpoint_layers
from dapo.model.adapters import adapter_parameters, has_adapter
from dapo.model.compiling import compile_layers
from dapo.model.loading import is_finite
from dapo.model.packed import PackedAttention
from dapo.records import NOBODY, FloatArray, IntArray, TokenBatch
from dapo.training.checkpoint import load_optimizer, optimizer_tensors
from dapo.training.faults import Fault, FaultFolder, diagnose, norms
from dapo.training.head_passes import through_head
from dapo.training.mismatch import measure_mismatch
from dapo.training.moments import make_optimizer, moment_bytes, streamed_bytes
from dapo.training.objective_protocol import Objective, unit_of
from dapo.training.parallel.holding import Replica
from dapo.training.policy import Policy
from dapo.training.update_report import UpdateReport
from dapo.training.update_totals import PhaseClock, Totals
from dapo.util.shutdown import Stopped

NO_LOSS_TOKENS = "no token of this mini-batch is in the loss"
_LARGE = 2**20
"""Numbers of a tensor that are worth a kernel of their own when all weights are looked at."""


def rate_of_step(config: TrainingConfig, step: int, spent: float) -> float:
    """``lr + spent (final - lr)``, and of it (step + 1) / W during the warm-up, in rollout step ``step`` (from 0). It
    depends on nothing else, so a resumed run cannot get it wrong.
    ``spent``: the share of the run that is over (:attr:`dapo.orchestrator.budget.Budget.spent`)."""
    final = config.learning_rate if config.final_learning_rate is None else config.final_learning_rate
    rate = config.learning_rate + spent * (final - config.learning_rate)
    return rate * (min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0)


class Trainer:
    """Holds the float32 master weights, their optimizer and their version. The model stays in eval mode: with dropout
    on, the policy that is trained would not be the one that was sampled from, and no ratio would be 1 at the start.

    Weight decay acts on all parameters, biases and norms included: plain AdamW, as in the released code.

    Attributes:
        policy: the model, with float32 weights, and how its log-probs are computed.
        version: number of times that changed weights were published.
        updates: optimizer updates made so far.
        skipped_updates: updates skipped so far because a number was not finite.
        faults: where those are kept to be looked at; None: nowhere.
    """

    def __init__(
        self,
        model: Any,
        config: TrainingConfig,
        temperature: float,
        compute_dtype: torch.dtype = torch.float32,
        held: Replica | None = None,
        attention: type[PackedAttention] | None = None,
    ) -> None:
        """
        Args:
            model: from :func:`dapo.model.loading.load_model`; its parameters become float32 in place, of
                one with an adapter only those of the adapter, which alone are trained.
            config: optimizer, warm-up, token budget.
            temperature: of the distribution trained on, which is that sampled from.
            compute_dtype: float32, or bfloat16 (the backbone then runs under autocast).
            held, attention: as in :class:`~dapo.training.policy.Policy`; several ranks call everything together.
        """
        if has_adapter(model):
            for parameter in adapter_parameters(model).values():
                parameter.data = parameter.data.float()
        else:
            model.to(torch.float32)
        model.eval()
        held = held or Replica()
        self._published = held.take(model, compute_dtype)
        if held.device(model).type == "cuda" and attention is None:
            compile_layers(model)
        if config.activation_checkpointing:
            checkpoint_layers(model)
        self.policy = Policy(model, temperature, config.tokens_per_micro_batch, compute_dtype, held, attention)
        self.version = 0
        self.updates = 0
        self.skipped_updates, self._skipped_in_row = 0, 0
        self.faults: FaultFolder | None = None
        self._config = config
        self._parameters = {name: p for name, p in self._published.items() if p.requires_grad}
        self._optimizer = make_optimizer(self._parameters.values(), config)
        self._unpublished = False
        self._updates_at = {0: 0}  # version -> optimizer updates made when it was published, ascending
        self._step, self._tried = 0, 0
        self.begin_step(0)

    def use(self, config: TrainingConfig) -> None:
        """Go on with other settings. Moments and step counts of the optimizer stay; so do what was given to it at its
        start alone, the betas, and the rate until :meth:`begin_step`."""
        self._config = config
        for group in self._optimizer.param_groups:
            group.update(weight_decay=config.weight_decay, eps=config.adam_epsilon)

    @property
    def bytes_to_come(self) -> int:
        """Memory that gradients and the optimizer's two moments will take and do not take yet, in bytes."""
        numbers: int = sum(p.numel() for p in self._parameters.values())
        if self._optimizer.state:
            return 0
        kind, offload = self._config.moments, self._config.offload_optimizer
        return 4 * numbers + streamed_bytes(numbers, kind, offload) + (0 if offload else self.moment_bytes)

    @property
    def moment_bytes(self) -> int:
        """Of the optimizer's two moments, once it has made a step."""
        return sum(moment_bytes(p.numel(), self._config.moments) for p in self._parameters.values())

    @property
    def device(self) -> torch.device:
        """Where the inputs of an objective have to be."""
        return self.policy.device

    @property
    def learning_rate(self) -> float:
        """Of the current rollout step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def begin_step(self, step: int, spent: float = 0.0) -> None:
        """Set the learning rate of rollout step ``step``, see :func:`rate_of_step`."""
        if step != self._step:  # otherwise it was resumed inside of this step
            self._step, self._tried = step, 0
        self.set_learning_rate(rate_of_step(self._config, step, spent))

    def set_learning_rate(self, rate: float) -> None:
        """Use ``rate`` until the next call: for stages that follow a schedule of their own."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probabilities ``[R]`` of the response tokens under the current weights, without gradient."""
        return self.policy.logprobs(batch)

    def update(self, batch: TokenBatch, inputs: Any, objective: Objective) -> UpdateReport:
        """One optimizer step on one mini-batch.

        It is skipped, with weights and optimizer state untouched, if no token is in the loss, or if loss, gradient or
        the log-probability of a loss token are not finite; then it is looked for where that came up first.

        Args:
            batch: the mini-batch, R response tokens.
            inputs: what the objective needs of these R tokens, on :attr:`device`.

        Raises:
            ConfigError: a sequence is longer than the token budget.
            NumericalError: it was skipped so ``max_skipped_updates`` times in a row; says why and what to try.
        """
        loss_tokens = int(torch.count_nonzero(inputs.weights))
        totals = Totals(torch.zeros((), dtype=torch.float64, device=self.device))
        clock = PhaseClock(self.device)
        norm: float = 0.0
        skipped: str | None = NO_LOSS_TOKENS
        fresh = not self._unpublished
        if loss_tokens:
            self.policy.held.begin_update(self._parameters)
            self._accumulate(batch, inputs, objective, totals, clock)
            with clock("optimizer"):
                norm, applied = self._apply(totals)
            skipped = None if applied else self._skip(batch, inputs, objective, float(totals.loss), norm)
            self._optimizer.zero_grad()  # frees the gradients for the rollout
        self._tried += 1
        seconds = clock.seconds()
        logprobs, entropy = totals.tokens(batch.num_response_tokens, self.policy.held.ranks) or (None, None)
        return UpdateReport(
            loss=float(totals.loss),
            grad_norm=norm,
            learning_rate=self.learning_rate,
            skipped=skipped,
            tokens=batch.num_tokens,
            computed_tokens=totals.computed_tokens,
            response_tokens=batch.num_response_tokens,
            loss_tokens=loss_tokens,
            micro_batches=totals.micro_batches,
            statistics={name: (float(total), float(count)) for name, (total, count) in totals.statistics.items()},
            mismatch=totals.mismatch,
            seconds_forward=seconds["forward"],
            seconds_backward=seconds["backward"],
            seconds_optimizer=seconds["optimizer"],
            logprobs=logprobs if fresh else None,
            entropy=entropy,
        )

    def publish(self) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
        """The weights for the rollout engine: ``(version, (name, tensor) pairs)``.

        The version goes up by one if an update was applied since the last call, and not otherwise. Names are those of
        the model's ``state_dict``; a tensor shared under two names (tied embeddings) comes once. Of a
        model with an adapter they are those of the adapter. The tensors are the masters themselves, not copies: copy
        them before the next update. Those of a sharded model are gathered one by one, so every rank takes all of them.

        Raises:
            NumericalError: weights are not finite.
            UserError: an update failed halfway through them.
        """
        self.check_finite()
        if self._unpublished:
            self.version += 1
            self._unpublished = False
            known = [*self._updates_at.items(), (self.version, self.updates)]
            self._updates_at = dict(known[-MOST_STALE - 1 :])  # never changed in place: a snapshot has the same one
        whole = self.policy.held.whole
        return self.version, ((name, whole(name, p.detach())) for name, p in self._published.items())

    def updates_behind(self, versions: IntArray) -> FloatArray:
        """Optimizer updates from the weights of each of these versions, ``MOST_STALE`` old at most, to those of now."""
        named, place = np.unique(versions, return_inverse=True)
        at = self._updates_at | {NOBODY: self.updates}
        behind = [self.updates - at[version] for version in named.tolist()]
        return np.asarray(behind, np.float32)[place]

    @torch.no_grad()
    def check_finite(self) -> None:
        """To be called before the weights go anywhere: into an engine or a checkpoint, neither of which could use them.
        Raises NumericalError: weights are not finite numbers; UserError: an update failed halfway through them."""
        if getattr(self._optimizer, "torn", False):
            raise UserError(
                "an update failed when it had changed some of the weights and not the others (with "
                "training.offload_optimizer or training.moments=int8 they change part by part), so they are of no use. "
                "What to try: go on from the last checkpoint with more free memory, on the device and in the host"
            )
        weights: list[torch.Tensor] = list(self._parameters.values())
        # At the memory's speed: a large tensor by itself, all small ones in one pass, and one look at the device. A
        # sum is not finite if a number in it is not; should finite ones add up to more than a float, all are looked at.
        sums = [p.sum() for p in weights if p.numel() >= _LARGE]
        if small := [p for p in weights if p.numel() < _LARGE]:
            sums += torch._foreach_norm(small)
        ranks = self.policy.held.ranks
        if all(ranks.gather(bool(torch.stack(sums).isfinite().all()))):
            return
        found = ranks.gather(next((name for name, p in self._parameters.items() if not is_finite(p)), None))
        if bad := next(filter(None, found), None):
            raise NumericalError(
                f"the weights of {bad} are not finite after {self.updates} updates, the learning rate is "
                f"{self.learning_rate:g}. What to try: start again from the weights of an earlier checkpoint with a "
                "lower training.learning_rate"
            )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: Path, **how: Any) -> None:
        """Write the weights in Hugging Face layout, or those of the adapter in PEFT's, in float32 unless ``how`` says
        otherwise (:func:`dapo.model.export.export_model`). Whole or not at all.

        Raises:
            FileExistsError: the folder exists and is not empty.
        """
        self.policy.held.save_model(self.policy.model, folder, self._published, **how)

    def load(self, folder: Path) -> None:
        """Continue from the weights that :meth:`save` wrote.
        Raises ModelError: missing or damaged, or of another model."""
        self.policy.held.load_weights(self.policy.model, folder, self._published)

    def save_state(self, folder: Path) -> None:
        """Write everything but the weights: Adam's moments and step counts, version, counters. Whole or not at all.
        Raises FileExistsError: the folder exists and is not empty."""
        counters = {
            "version": self.version,
            "unpublished": self._unpublished,
            "updates": self.updates,
            "updates_at": list(self._updates_at.items()),
            "skipped_updates": self.skipped_updates,
            "skipped_in_row": self._skipped_in_row,
            "step": self._step,
            "tried": self._tried,
        }
        self.policy.held.save_tensors(folder, optimizer_tensors(self._optimizer, self._parameters), counters)

    def load_state(self, folder: Path) -> None:
        """Continue from :meth:`save_state`. Learning rate and other settings stay those of the config.
        Raises UserError: missing or damaged, or of another model."""
        found = self.policy.held.load_tensors(folder)
        counters = load_optimizer(self._optimizer, self._parameters, folder, *found)
        self.version = int(counters["version"])
        self.updates = int(counters["updates"])
        self.skipped_updates = int(counters["skipped_updates"])
        self._unpublished = bool(counters["unpublished"])
        published = self.updates - self._unpublished
        # an older version of the program did not keep them: one update for each version is the least that it can be
        known = counters.get("updates_at", [(self.version - n, published - n) for n in range(MOST_STALE, -1, -1)])
        self._updates_at = {int(version): int(updates) for version, updates in known}
        self._skipped_in_row = int(counters["skipped_in_row"])
        self._step, self._tried = int(counters.get("step", 0)), int(counters.get("tried", 0))

    # --- one update -----------------------------------------------------------------------------------------------

    def _accumulate(
        self, batch: TokenBatch, inputs: Any, objective: Objective, totals: Totals, clock: PhaseClock
    ) -> None:
        """Add up gradient, loss and statistics over micro-batches."""
        held = self.policy.held
        for part in self.policy.parts(batch, unit_of(objective) == "pair"):
            if part.empty:
                if held.lockstep:
                    torch.autograd.backward(self.policy.evaluate(part)[0].sum() * 0)
                continue
            totals.micro_batches += 1
            totals.computed_tokens += part.num_computed_tokens
            with clock("forward"):
                states = self.policy.predicting_states(part)
            logprobs, entropy, slopes = through_head(
                self.policy, part, states.detach(), inputs, objective, totals, clock
            )
            with clock("backward"):
                torch.autograd.backward(states, slopes)
            totals.seen.append((part, logprobs, entropy))
        with clock("backward"):
            held.collect(self._parameters)
        # later a difference is what was learned, and no mismatch; at the end, for each waits for the GPU
        for part, logprobs, _ in () if self._unpublished else totals.seen:
            totals.mismatch += measure_mismatch(part.batch, logprobs, self.version)
        totals.join(held.ranks)

    def _apply(self, totals: Totals) -> tuple[float, bool]:
        """Clip and step, unless something is not finite: ``(norm before clipping, whether the step was made)``."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        total_norm = self.policy.held.norm(gradients)
        norm = float(total_norm)
        if totals.bad_logprobs or not math.isfinite(float(totals.loss)) or not math.isfinite(norm):
            return norm, False
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, total_norm)
        self._optimizer.step()
        self.updates += 1
        self._unpublished = True
        self._skipped_in_row = 0
        return norm, True

    def _diagnosis(self, batch: TokenBatch, inputs: Any, objective: Objective) -> Fault:
        """What went wrong. Not to find out (for want of memory, say) must end nothing but ranks in lockstep."""
        try:
            fault = diagnose(self.policy, batch, inputs, objective, self._parameters)
        except Exception as error:
            if isinstance(error, Stopped) or self.policy.held.lockstep:
                raise
            fault = Fault(None, None, None, 0, batch.num_samples, (), len(self._parameters), None, {})
        weights, gradients = zip(*self.policy.held.ranks.gather((fault.weight, fault.gradients)), strict=True)
        names = list(dict.fromkeys(chain.from_iterable(gradients)))
        return replace(fault, weight=next(filter(None, weights), None), gradients=names)

    def _skip(self, batch: TokenBatch, inputs: Any, objective: Objective, loss: float, norm: float) -> str:
        """Count an update that is not finite, find out why and keep it: what there is to say.
        Raises NumericalError: too many in a row."""
        fault = self._diagnosis(batch, inputs, objective)
        sizes = norms(self._parameters, self.policy.held.whole)  # by all ranks
        in_row = self._skipped_in_row + 1
        reason = f"loss {loss:g}, gradient norm {norm:g}: {fault.cause}"
        if self.faults is not None:
            facts = {
                "step": self._step + 1,
                "update": self._tried + 1,
                "loss": loss,
                "grad_norm": norm,
                "skipped_in_row": in_row,
                "learning_rate": self.learning_rate,
                "policy_version": self.version,
                "updates_before": self.updates,
                "temperature": self.policy.temperature,
                "compute_dtype": str(self.policy.compute_dtype),
                "device": str(self.device),
                "norms": sizes,
            }
            name = f"step-{self._step + 1:05d}-update-{self._tried + 1}"
            reason += f"; {self.faults.write(name, fault, batch, inputs, facts)}"
        if in_row >= self._config.max_skipped_updates:  # not counted: it is made again when the run goes on
            raise NumericalError(
                f"{in_row} updates in a row (training.max_skipped_updates) were not finite, the last "
                f"with {reason}. The weights are those before them, the learning rate was {self.learning_rate:g}. What "
                f"to try: {fault.advice}"
            )
        self.skipped_updates += 1
        self._skipped_in_row = in_row
        return f"not finite: {reason}"
