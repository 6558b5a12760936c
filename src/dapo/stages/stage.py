"""What one stage has that the others have not: how it reads a row, its model, its loss and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from dapo.algorithm.preference import Responses, share_right
from dapo.data.examples import Example, PolicyText
from dapo.data.template import PromptTemplate
from dapo.evaluation.statistics import calibration_error, estimate_means
from dapo.model.loading import embedding_rows, stop_token_ids
from dapo.records import TokenBatch
from dapo.stages.batches import ranked_inputs
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.objective_protocol import Objective
from dapo.training.trainer import Trainer

T = TypeVar("T")
Parts = Iterator[Sequence[Example]]
EVALUATED_AT_ONCE = 64
"""Rows of an evaluation whose numbers are on the device together."""


class Stage(Protocol):
    """Reads a raw row (``encode``), loads a model and makes its trainer, and turns examples into a mini-batch and what
    its objective gets to know of it. ``stop_ids`` go with the weights as the end of a response; ``today`` is what the
    chat template takes for it, if it asks.

    ``prepare`` comes before the first update, and before a checkpoint is read. ``parts``: held-out rows, as they are
    evaluated, and all that are going to be drawn; ``tell(done)`` hears how many are done."""

    @property
    def objective(self) -> Objective: ...
    @property
    def stop_ids(self) -> Sequence[int]: ...
    @property
    def today(self) -> date | None: ...
    def encode(self, row: Any, /) -> Sequence[Example]: ...
    def load(self, source: Any, device: torch.device, /) -> Any: ...
    def trainer(self, model: Any, /) -> Trainer: ...
    def prepare(self, trainer: Trainer, folder: Path, parts: Parts, tell: Any, /) -> None: ...
    def batch(self, examples: Sequence[Example], /) -> TokenBatch: ...
    def inputs(self, batch: TokenBatch, device: torch.device, /) -> Any: ...
    def evaluate(self, trainer: Trainer, examples: Sequence[Example], /) -> dict[str, float]: ...


class PolicyStage:
    """What stages that train a policy share: the model of a run, and texts as it reads and writes them."""

    def __init__(self, config: Any, tokenizer: Any, source: Any) -> None:
        """``source``: of the model. Raises ConfigError: the tokenizer cannot write rows as the recipe says."""
        self.config, self._tokenizer = config, tokenizer
        rows = embedding_rows(source, config.model.trust_remote_code)
        template = PromptTemplate(config.data, tokenizer, rows)
        self.today = template.today
        self.text = PolicyText(template, tokenizer, config.data.template != "plain")
        self.stop_ids: Sequence[int] = (self.text.end,)

    def load(self, source: Any, device: torch.device) -> Any:
        model = load_trainable(source, self.config.model, device)
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *stop_token_ids(model, self._tokenizer))))
        return model

    def trainer(self, model: Any) -> Trainer:
        model = begin_adapter(model, self.config.model, self.config.seed)
        return Trainer(model, self.config.training, 1.0, getattr(torch, self.config.model.compute_dtype))

    def prepare(self, trainer: Trainer, folder: Path, parts: Parts, tell: Any) -> None:
        """Nothing."""


def in_parts(examples: Sequence[T]) -> Iterator[Sequence[T]]:
    return (examples[k : k + EVALUATED_AT_ONCE] for k in range(0, len(examples), EVALUATED_AT_ONCE))


@torch.no_grad()
def evaluate_pairs(
    trainer: Trainer, examples: Sequence[Example], batch_of: Callable[..., TokenBatch], objective: Any, seed: int
) -> dict[str, float]:
    """How often the better response has the higher reward (mean over rows), whether sigmoid(margin) is calibrated, the
    mean loss, and what the objective itself tells."""
    margins: list[torch.Tensor] = []
    found: dict[str, list[float]] = {}
    loss = 0.0
    for part in in_parts(examples):
        batch = batch_of(part)
        values, inputs = trainer.logprobs(batch), ranked_inputs(batch, trainer.device)
        total, statistics = objective(values, torch.zeros_like(values), inputs)
        loss += float(total) * len(part)
        for name, (amount, count) in statistics.items():
            sums = found.setdefault(name.replace("preference/", "eval/"), [0.0, 0.0])
            sums[0], sums[1] = sums[0] + float(amount), sums[1] + float(count)
        responses = Responses.of(inputs)
        rewards = objective.rewards(values, inputs, responses).double()
        difference = (rewards[responses.better] - rewards[responses.worse]).cpu()
        groups = inputs.group_ids[responses.ends[responses.better]].cpu()
        margins += [difference[groups == number] for number in range(len(part))]
    right = [float(share_right(one).mean()) for one in margins]
    return {
        **{name: amount / count for name, (amount, count) in found.items()},
        **accuracy_metrics(right, seed),
        "eval/loss": loss / len(examples),
        "eval/calibration_error": calibration_error(torch.cat(margins).numpy()),
    }


def accuracy_metrics(right: Sequence[float], seed: int) -> dict[str, float]:
    """Of rows, each with the share that is right."""
    found = estimate_means(np.asarray(right, np.float64)[:, None], [True], seed)[0]
    bounds = {"eval/accuracy_low": found.low, "eval/accuracy_high": found.high}
    return {
        "eval/accuracy": found.value,
        **{name: bound for name, bound in bounds.items() if bound is not None},
        "eval/rows": float(len(right)),
    }
