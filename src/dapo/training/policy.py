"""A model and the one way in which the trainer computes its log-probabilities: policy and reference policy alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dapo.model.compiling import compile_layers
from dapo.model.exact import rounded_parameters, row_invariant
from dapo.model.forward import Head, hidden_states, output_head
from dapo.model.head import chunk_rows, for_chunks, token_logprobs
from dapo.model.loading import copy_model
from dapo.model.packed import PackedAttention
from dapo.records import TokenBatch
from dapo.training.micro_batch import MicroBatch, micro_batches
from dapo.training.parallel.holding import Replica


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A causal language model from :func:`dapo.model.loading.load_model`, and the distribution it stands for.

    ``temperature`` is that of the rollout. With ``compute_dtype`` bfloat16 the backbone runs under autocast and the
    head's product takes bfloat16 inputs; logits and what follows are float32 always. ``tokens_per_micro_batch`` bounds
    the tokens of one forward pass.
    """

    model: Any
    temperature: float
    tokens_per_micro_batch: int
    compute_dtype: torch.dtype = torch.float32
    held: Replica = field(default_factory=Replica)
    """How this rank, one of one or several, has the model."""
    attention: type[PackedAttention] | None = None
    """Attention with the bits of the engine's; then all of a forward pass has them. None: the ordinary one."""

    @property
    def device(self) -> torch.device:
        """Where the model is, and where micro-batches are."""
        return self.held.device(self.model)

    def parts(self, batch: TokenBatch, whole_groups: bool = False) -> Iterator[MicroBatch]:
        """What this rank is to compute of a batch, each to be computed before the next one is taken."""
        share = (self.held.ranks.rank, self.held.ranks.size)
        budget, lockstep = self.tokens_per_micro_batch, self.held.lockstep
        for part in micro_batches(batch, budget, self.device, whole_groups, share, lockstep):
            self.held.begin_pass(part.last)
            yield part

    def evaluate(self, part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass, with gradient if enabled: ``(logprobs [R], entropy [R])`` of the response tokens."""
        return self.read(self.predicting_states(part), part.targets)

    def predicting_states(self, part: MicroBatch) -> torch.Tensor:
        """The first half of :meth:`evaluate`: hidden states ``[R, d]`` where a response token is predicted.

        The backbone runs once over a prompt that several sequences share.
        """
        exact = self.attention is not None
        # Weights change between uses, and one pass uses each once: a cache of cast weights would only hold memory.
        narrow = self.compute_dtype != torch.float32 and not exact
        with (
            torch.autocast(self.device.type, self.compute_dtype, enabled=narrow, cache_enabled=False),
            rounded_parameters(self.model, self.compute_dtype, on=exact),
            row_invariant(exact),
        ):
            attention = self.attention or PackedAttention
            context = attention(part.lengths, part.row_ids.device, part.place, part.shared)
            hidden = hidden_states(self.model, part.row_ids, part.row_positions, context)
        # index_select and not hidden[...]: it copies whole rows, in half the time on CPU
        return hidden.index_select(0, part.predictors)

    def read(
        self, states: torch.Tensor, targets: torch.Tensor, head: Head | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The second half, token by token: log-probs and entropies ``[r]`` of any ``[r, d]`` of the states."""
        head = output_head(self.model) if head is None else head
        with row_invariant(self.attention is not None):
            return token_logprobs(states, head, targets, self.temperature, product_dtype=self.compute_dtype)

    def in_chunks(self, states: torch.Tensor) -> tuple[int, Head | None]:
        """How many of ``states`` :meth:`read` is to have at a time, and ``head``, if each gets its backward pass."""
        head = output_head(self.model)
        return chunk_rows(self.device, head.weight.shape[0]), for_chunks(head, states, self.compute_dtype)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probabilities ``[R]`` (float32, nats, no gradient, on the device) of a batch of any size.
        Raises ConfigError: a sequence is longer than the budget."""
        out = torch.zeros(batch.num_response_tokens, device=self.device)
        for part in self.parts(batch):
            logprobs = self.evaluate(part)[0]
            if not part.empty:
                out[part.index] = logprobs
        self.held.end_passes()
        self.held.ranks.add_up(out)
        return out

    def frozen_copy(self) -> Policy:
        """The policy as it is now, for good: the reference of KL terms.

        Same types as the original, and compiled where that is, so that the KL of an untrained policy to its reference
        is exactly 0: compiled code rounds less often. Costs the memory of the weights a second time, or with an adapter
        that of the adapter.
        """
        model = copy_model(self.model)
        if self.device.type == "cuda" and self.attention is None:
            compile_layers(model)
        return replace(self, model=model)
