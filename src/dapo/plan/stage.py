"""Memory, seconds and disk of a stage: one GPU that reads rows and samples nothing."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from dapo.checks.memory import checkpoint_bytes, trained_of
from dapo.config.plan import evaluated_rows
from dapo.config.stages import DPOConfig, SFTConfig
from dapo.plan.estimate import PROCESS, Estimate


class StageEstimate(Estimate):
    """``assumed``: tokens of one response of a row, and of its prompt."""

    counts = "trained"
    config: Any

    @property
    def ranks(self) -> int:
        return 1

    @property
    def longest(self) -> int:
        return int(self.config.data.max_length)

    def rows_with(self, config: Any = None, ranks: int | None = None) -> int:
        """Of a micro-batch."""
        return max(1, int((config or self.config).training.tokens_per_micro_batch // self._row_tokens()[0]))

    def _row_tokens(self) -> tuple[float, float]:
        """Tokens that are computed of a row, and those of them that are predicted; a prompt is computed once."""
        responses = (1 if isinstance(self.config, SFTConfig) else 2) * self.assumed.response
        return self.assumed.prompt + responses, responses

    def would_fit(self) -> Iterator[tuple[str, float, int]]:
        return (one for one in super().would_fit() if "GPUs" not in one[0])  # a stage has one

    def operations(self) -> tuple[float, float]:
        computed, predicted = (self.config.training.rows_per_update * tokens for tokens in self._row_tokens())
        return self.passes(computed, predicted)

    def rollout(self) -> tuple[float, float]:
        """Nothing is sampled; tokens of an update."""
        return 0.0, self.config.training.rows_per_update * self._row_tokens()[0]

    def seconds(self) -> dict[str, float]:
        speed = self.rates["update"] * self.cluster.card.operations
        forward, both = self.operations()
        with_reference = isinstance(self.config, DPOConfig) and self.config.dpo.loss != "simpo"
        found = {"reference": forward / speed} if with_reference else {}  # once a row, before the first update
        found["update"] = both / speed
        return found | {"step": sum(found.values())}

    def steps(self, seconds: float) -> int:
        """Of epochs as many as the rows of plain files make, and 0 where they cannot be counted."""
        training = self.config.training
        rows = evaluated_rows(self.config.data.train, self.config.data.rows) or 0
        passes = ceil((training.epochs or 1) * rows / training.rows_per_update)
        steps = passes if training.steps is None else training.steps
        return self.within_budgets(steps, seconds, training.rows_per_update)

    def evaluated_s(self, rows: int) -> float:
        updates: float = rows / self.config.training.rows_per_update
        return updates * self.operations()[0] / (self.rates["update"] * self.cluster.card.operations)

    def disk(self, steps: int, tokens: float) -> dict[str, float]:
        trained, run = trained_of(self.shape), self.config.run
        kept = 2 + (run.keep_last or 1) + run.keep_best
        checkpoint = checkpoint_bytes(self.config, self.shape)
        return {"checkpoint": checkpoint, "run": kept * checkpoint + 8 * trained}

    def main_memory(self) -> float:
        return PROCESS + self.memory().host + checkpoint_bytes(self.config, self.shape)

    def engine_note(self) -> str:
        return ""

    def assumptions(self) -> Iterator[str]:
        assumed = self.assumed
        tokens = f"responses of {assumed.response:g} tokens and prompts of {assumed.prompt:g} on average"
        yield f"{tokens} (--response, --prompt); pairs in place of rankings"
        yield f"memory: rows of data.max_length={self.longest}, {self.kept:.2f} times what is in use"
        yield f"rates of runs on the {self.measured[0]['card']} (bench/rates.py), as no stage was measured for this"
        if self.config.model.compute_dtype == "float32":
            yield "times are those of bfloat16; model.compute_dtype=float32 takes several times as long"
