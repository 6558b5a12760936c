"""A rollout step between its rollout and its end, and what is reported of it.

Consumes: what the buffer filled, the prepared batch, the reports of the optimizer updates. Produces: metrics, warnings
and the step's files of samples. Waits for nothing; a checkpoint keeps it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from dapo.algorithm.objective import TokenInputs
from dapo.config import Config
from dapo.observe.samples import Key, write_samples
from dapo.orchestrator.batch_builder import Batch, Update
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.step_metrics import step_metrics, step_warnings
from dapo.records import Reward
from dapo.training.mismatch import Mismatch
from dapo.training.trainer import Objective, Trainer, UpdateReport
from dapo.util.files import writing
from dapo.util.process import Stopped


@dataclass(slots=False)
class StepState:
    """What has been done of a rollout step."""

    fill: RolloutBatch
    seconds: dict[str, float]
    """By phase, so far."""
    batch: Batch | None = None
    """None: it is still to be prepared."""
    reports: list[UpdateReport] = field(default_factory=list)
    """Of the optimizer updates so far."""
    decode_steps: int = 0
    """Of the engine in its rollout, where that counts them."""

    def apply(self, trainer: Trainer, update: Update, objective: Objective[TokenInputs]) -> None:
        """Make an update and take note of it, both or neither: the program may be stopped at any time."""
        self.reports.append(trainer.update(update.batch, update.inputs, objective))

    def to(self, device: torch.device) -> StepState:
        """The same with its tensors there."""
        return replace(self, batch=self.batch and replace(self.batch, packed=self.batch.packed.to(device)))

    def metrics(self, config: Config) -> dict[str, float | None]:
        """By the names of ``observe/metrics.py``, once its batch is prepared and its updates are made."""
        batch = self._prepared()
        mismatch = batch.mismatch or sum((r.mismatch for r in self.reports), Mismatch())
        return step_metrics(self.fill, batch.groups, self.reports, mismatch, self.seconds, config)

    def warnings(self) -> Iterator[str]:
        """What a person should know of it."""
        return step_warnings(self.fill, self.reports)

    def write_samples(
        self, folder: Path, step: int, share: float, seed: int, checks: Mapping[Key, Reward] | None = None
    ) -> None:
        """The samples that were drawn, those that were filtered out too, and of a step that starved before its batch.
        ``share``: of the groups; ``seed`` decides which, the same ones if the step is made again. ``checks``: verdicts
        of the held-out check. Raises UserError: they cannot be written."""
        kept = self.fill.groups if self.batch is None else self.batch.groups
        groups = [*((group, "kept" if self.batch else "carried") for group in kept), *self.fill.rejected]
        if share < 1:
            groups = [pair for pair in groups if Random(f"{seed}/samples/{pair[0].draw}").random() < share]
        with writing(folder):
            write_samples(folder, step, groups, self.reports, self._seen(), checks)

    def _seen(self) -> dict[Key, tuple[Any, Any]]:
        """The trainer's log-probs and entropies of each sample's tokens, as far as they were computed.

        Mini-batches are cut in the order of the batch, so the first pass over it is the first reports end to end.
        """
        if self.batch is None:
            return {}
        packed = self.batch.packed
        found = np.full((2, packed.num_response_tokens), np.nan, np.float32)
        start = 0
        for report in self.reports:
            if start + report.response_tokens > found.shape[1]:
                break
            for place, values in enumerate((report.logprobs, report.entropy)):
                if values is not None:
                    found[place, start : start + report.response_tokens] = values.numpy()
            start += report.response_tokens
        if packed.proximal_logprobs is not None:
            found[0] = packed.proximal_logprobs.cpu().numpy()
        keys = zip(packed.draws.tolist(), packed.indices.tolist(), strict=True)
        parts = np.split(found, np.cumsum(packed.response_lengths)[:-1], axis=1)
        return {key: (logprobs, entropy) for key, (logprobs, entropy) in zip(keys, parts, strict=False)}

    def _prepared(self) -> Batch:
        assert self.batch is not None
        return self.batch


def unless(out_of_time: Callable[[], bool], objective: Objective[TokenInputs]) -> Objective[TokenInputs]:
    """``objective``, but an update that there is no time left for ends with it, between two
    chunks of tokens.

    Weights and optimizer are those before that update then, which is made again when the run goes on.
    """

    def within_time(
        logprobs: torch.Tensor, entropy: torch.Tensor, inputs: TokenInputs
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        if out_of_time():
            raise Stopped("there is no time left for this update")
        return objective(logprobs, entropy, inputs)

    return within_time
