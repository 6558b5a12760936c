"""Sections that the tree of a run shares with those of other stages: the optimizer, and rows that are held out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dapo.config.data import DataItem, Files
from dapo.config.section import Section


class OptimizerConfig(Section):
    minutes: float | None = Field(None, gt=0)
    """Longest training: no step begins that, as long as the one before it, would end after so many minutes of rollout
    steps. Evaluations, files and the start are not counted. null: no limit."""
    samples: int | None = Field(None, gt=0)
    """Longest training in samples drawn, filtered ones included (in stages: rows trained on), in the same way."""
    tokens: int | None = Field(None, gt=0)
    """Longest training in response tokens sampled (in stages: tokens trained on), in the same way."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW, after the warm-up."""
    final_learning_rate: float | None = Field(None, ge=0)
    """What the rate falls to, in a straight line over the steps, minutes, samples or tokens of the run, whichever are
    over first. null: it is constant."""
    warmup_steps: int = Field(20, ge=0)
    """W: steps of linear warm-up. In step k (from 0) the rate is lr (k + 1) / W."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping by global norm."""
    tokens_per_micro_batch: int = Field(32768, ge=1)
    """Strict token budget of one forward and backward pass: responses, and each group's prompt once. A group is divided
    only if it is above the budget by itself."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the layer once more there: far less memory
    for about a third more time."""
    offload_optimizer: bool = False
    """Keep Adam's two moments in the host's memory, and on a GPU only those of a part of a tensor at a time. The
    numbers are the same."""
    moments: Literal["float32", "int8"] = "float32"
    """Type of AdamW's two moments between updates. int8: 2 bytes a parameter in place of 8, in blocks with a scale, and
    rounded at random, so that small steps are not lost; not for a model that workers share (FSDP2)."""
    max_skipped_updates: int = Field(3, ge=1)
    """Updates in a row with a loss or gradient that is not finite before the run stops. Each one is skipped."""

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in value):
            raise ValueError("each must be at least 0 and below 1, such as [0.9, 0.999]")
        return value


class HeldOutConfig(Section):
    data: Files = Field(default_factory=list)
    """Held-out files or data sets, written as in data.train but without weights; none: no evaluation. Exactly these
    rows are evaluated, in their order."""
    every: int = Field(0, ge=0)
    """Evaluate after every so many steps, beside before the first and after the last. 0: only those two."""
    rows: int | None = Field(None, ge=1)
    """Use the first so many rows; by default all."""
    patience: int | None = Field(None, ge=1)
    """Stop training when so many evaluations in a row brought no improvement. null: never."""
    min_improvement: float = Field(0.0, ge=0)
    """What the held-out metric has to rise by to count as an improvement."""

    @field_validator("data")
    @classmethod
    def _no_weights(cls, value: list[DataItem]) -> list[DataItem]:
        if any(item.weight is not None for item in value):
            raise ValueError("has a weight, but every row is evaluated; leave it out")
        return value
