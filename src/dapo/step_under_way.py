"""A rollout step between its rollout and its end, and what is reported of it.

Consumes: what the buffer filled, the prepared batch, the reports of the optimizer updates. Produces: metrics, warnings
and the step's files of samples. Waits for nothing; a checkpoint keeps it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dapo.algorithm.objective import TokenInputs
from dapo.buffer import Fill
from dapo.config import Config
from dapo.files import writing
from dapo.observe.samples import write_samples
from dapo.observe.step import step_metrics, step_warnings
from dapo.prepare import Batch, Update
from dapo.process import Stopped
from dapo.training.mismatch import Mismatch
from dapo.training.trainer import Objective, Trainer, UpdateReport


@dataclass(slots=False)
class StepUnderWay:
    """What has been done of a rollout step."""

    fill: Fill
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

    def to(self, device: torch.device) -> StepUnderWay:
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

    def write_samples(self, folder: Path, step: int) -> None:
        """All samples that were drawn, those that were filtered out too.

        Raises:
            UserError: they cannot be written.
        """
        kept = [(group, "kept") for group in self._prepared().groups]
        with writing(folder):
            write_samples(folder, step, [*kept, *self.fill.rejected], self.reports)

    def _prepared(self) -> Batch:
        assert self.batch is not None
        return self.batch


def unless(out_of_time: Callable[[], bool], objective: Objective[TokenInputs]) -> Objective[TokenInputs]:
    """``objective``, but an update that there is no time left for ends with it, between two micro-batches.

    Weights and optimizer are those before that update then, which is made again when the run goes on.
    """

    def within_time(
        logprobs: torch.Tensor, entropy: torch.Tensor, inputs: TokenInputs
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        if out_of_time():
            raise Stopped("there is no time left for this update")
        return objective(logprobs, entropy, inputs)

    return within_time
