"""A rollout step between its rollout and its end, and what is reported of it.

Consumes: what the collector sampled, the batch, the reports of the optimizer updates. Produces: metrics, warnings
and the step's files of samples. Waits for nothing; a checkpoint keeps it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dapo.config import Config
from dapo.observe.samples import Key, write_samples
from dapo.orchestrator.rollout_batch import RolloutBatch
from dapo.orchestrator.step_metrics import step_metrics, step_warnings
from dapo.records import Group, Reward, TokenBatch
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.files import writing
from dapo.util.spans import Span


@dataclass(slots=False)
class StepState:
    rollout: RolloutBatch
    groups: Sequence[Group] = ()
    """Those of ``rollout`` with shaped rewards and advantages, once there is a batch."""
    batch: TokenBatch | None = None
    """None: it is still to be built."""
    version: int = 0
    """Of the weights that its batch was annotated with."""
    reports: list[UpdateReport] = field(default_factory=list)
    """Of the optimizer updates so far."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By role, once it is evaluated."""
    spans: list[Span] = field(default_factory=list)
    """What these are made of, but for the rest."""

    def metrics(self, config: Config, mismatch: Mismatch | None = None) -> dict[str, float | None]:
        """By the names of ``observe/metrics.py``, once its batch is finished and its updates are made.
        ``mismatch``: over the whole batch; None: what the updates measured."""
        mismatch = mismatch or sum((r.mismatch for r in self.reports), Mismatch())
        found = step_metrics(self.rollout, self.groups, self.reports, mismatch, self.seconds, config)
        if self.batch is None or "returns" not in self.batch.columns:
            return found
        from dapo.orchestrator.ppo import critic_metrics  # needs torch, which the loop is without

        return found | critic_metrics(self.batch)

    def warnings(self) -> Iterator[str]:
        return step_warnings(self.rollout, self.reports)

    def write_samples(
        self, folder: Path, step: int, share: float, seed: int, checks: Mapping[Key, Reward] | None = None
    ) -> None:
        """The samples that were drawn, those that were filtered out too, and of a step that starved before its batch.
        ``share``: of the groups; ``seed`` decides which, the same ones if the step is made again. ``checks``: verdicts
        of the held-out check. Raises UserError: they cannot be written."""
        kept = self.rollout.groups if self.batch is None else self.groups
        groups = [*((group, "kept" if self.batch else "carried") for group in kept), *self.rollout.rejected]
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
        batch = self.batch
        found = np.full((2, batch.num_response_tokens), np.nan, np.float32)
        start = 0
        for report in self.reports:
            if start + report.response_tokens > found.shape[1]:
                break
            for place, values in enumerate((report.logprobs, report.entropy)):
                if values is not None:
                    found[place, start : start + report.response_tokens] = values
            start += report.response_tokens
        found[0] = batch.columns.get("proximal", found[0])
        keys = zip(batch.draws.tolist(), batch.indices.tolist(), strict=True)
        parts = np.split(found, np.cumsum(batch.response_lengths)[:-1], axis=1)
        seen: dict[Key, tuple[Any, Any]] = {}
        for key, (logprobs, entropy) in zip(keys, parts, strict=False):
            seen.setdefault(key, (logprobs, entropy))  # of an episode in several sequences those of the first
        return seen
