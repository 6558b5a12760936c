"""How near a step came to what the card can do at most: matrix products in the update, memory reads in the rollout.

Consumes: what was computed and how long it took. Produces: two metrics, on cards that are in the table. The shares are
of the makers' figures for dense bfloat16, which no program reaches; ``bench/`` measures what a card does reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dapo.model.loading import cached_numbers
from dapo.model.nf4 import numbers
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.training.update_report import UpdateReport


@dataclass(frozen=True, slots=True)
class Card:
    """``operations``: a second, of dense 16-bit matrix products. ``bytes``: of its memory, a second. ``memory``: GiB
    that CUDA reports. ``link``: bytes a second in each direction to other GPUs of its host."""

    operations: float
    bytes: float
    memory: float = 0.0
    link: float = 32e9


CARDS = {
    "B200": Card(2250e12, 8.0e12, 178.4, 900e9),
    "GH200": Card(989e12, 4.0e12, 94.5, 450e9),
    "H200": Card(989e12, 4.8e12, 139.8, 450e9),
    "H100 PCIe": Card(756e12, 2.0e12, 79.1, 64e9),
    "H100": Card(989e12, 3.35e12, 79.1, 450e9),
    "A100-SXM4-80GB": Card(312e12, 2.04e12, 79.2, 300e9),
    "A100 80GB": Card(312e12, 1.94e12, 79.2, 32e9),
    "A100": Card(312e12, 1.56e12, 39.4, 300e9),
    "L40S": Card(362e12, 0.864e12, 44.4),
    "L4": Card(121e12, 0.3e12, 22.0),
    "RTX 4090": Card(165e12, 1.008e12, 23.6),
    "RTX 3090": Card(71e12, 0.936e12, 23.7),
}
"""By a part of the name that CUDA gives; the first one that fits holds."""


def card_named(name: str) -> Card | None:
    """The card of this name as CUDA gives it, such as "NVIDIA H200"; None: it is not in the table."""
    return next((card for part, card in CARDS.items() if re.search(rf"\b{part}\b", name)), None)


@dataclass(frozen=True, slots=True)
class CardLimits:
    """A model on a card.

    Attributes:
        card: that it runs on.
        operations_per_token: of an update, for each token that is computed: 6 for a weight that is trained, 4 for one
            that is not; without the embedding, which is looked up, and the head.
        operations_per_prediction: the same of the head, which sees the positions of response tokens only.
        weight_bytes: that a decode step reads.
        cache_bytes: of the keys and values of one token.
    """

    card: Card
    operations_per_token: float
    operations_per_prediction: float
    weight_bytes: float
    cache_bytes: float

    @classmethod
    def of(cls, model: Any, device: torch.device, dtype: torch.dtype) -> CardLimits | None:
        """Those of a model on its device; None where they are not known: on a CPU, in float32, on another card."""
        card = card_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return None if card is None or dtype.itemsize != 2 else cls.on(card, model, dtype.itemsize)

    @classmethod
    def on(cls, card: Card, model: Any, itemsize: int) -> CardLimits:
        """Those of a model whose weights take ``itemsize`` bytes each in the engine."""
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        values = kinds.count("full_attention") * cached_numbers(config)
        inputs, output = model.get_input_embeddings().weight, model.get_output_embeddings()
        head = [] if output is None else [output.weight]  # that of a classifier is next to nothing
        layers = [p for p in model.parameters() if not any(p is other for other in (inputs, *head))]

        def operations(parameters: Iterable[torch.Tensor]) -> int:
            return sum((6 if p.requires_grad else 4) * numbers(p) for p in parameters)

        read = itemsize * sum(map(numbers, (*layers, *head)))
        return cls(card, operations(layers), operations(head), read, itemsize * values)

    def shares(
        self, rollout: RolloutBatch, reports: Sequence[UpdateReport], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """``share/matmul`` and ``share/bandwidth`` of a step, as far as there is something to tell.
        ``seconds``: by role: rollout (with the wait for rewards), update."""
        found: dict[str, float] = {}
        if reports and seconds.get("update"):
            done = self.operations_per_token * sum(r.computed_tokens for r in reports)
            done += self.operations_per_prediction * sum(r.response_tokens for r in reports)
            found["share/matmul"] = done / seconds["update"] / self.card.operations
        generating = max(seconds.get("rollout", 0.0) - rollout.stats.reward_wait_s, rollout.seconds_sampling)
        if rollout.stats.decode_steps and generating > 0:
            groups = rollout.sampled
            context = sum(s.length * (len(g.prompt.token_ids) + s.length / 2) for g in groups for s in g.samples)
            read = rollout.stats.decode_steps * self.weight_bytes + context * self.cache_bytes
            found["share/bandwidth"] = read / generating / self.card.bytes
        return found
