"""The doors between the loop and those that work for it, in this process or in others: numpy, paths and numbers pass,
no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dapo.config import Config
from dapo.orchestrator.step_state import StepState
from dapo.records import Group, Prompt, TokenBatch
from dapo.rollout.engine import Engine

if TYPE_CHECKING:  # the loop needs no tensors
    import torch

    from dapo.training.base_learner import Facts
    from dapo.training.snapshot import LearnerSnapshot


class PromptSource(Protocol):
    """Where prompts come from, with a position that can be saved."""

    def next(self) -> Prompt | None:
        """The next prompt; None: there are no more."""

    def feedback(self, groups: Sequence[Group]) -> None:
        """Hear what became of prompts, once each and in the order they were drawn: when the step that they were drawn
        for is done, or has found too few groups (``StarvedError``)."""

    def state(self) -> dict[str, Any]:
        """The position, in JSON types; ``state.lost`` names what a checkpoint cannot keep."""

    def load_state(self, state: dict[str, Any], /) -> None:
        """Go on from a position."""


class Trained(Protocol):
    """Holds weights that are trained: what checkpoints and a run folder need of a learner of any kind."""

    @property
    def version(self) -> int:
        """Of the weights last handed out."""

    @property
    def facts(self) -> Facts:
        """Version, updates so far and learning rate."""

    @property
    def expected_bytes(self) -> int:
        """What a checkpoint will take, before there is one."""

    def keep_faults(self, folder: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """Keep updates that are not finite in ``folder``, with texts that ``decode`` makes of token ids."""

    async def snapshot(self) -> LearnerSnapshot:
        """Weights, optimizer and counters as they are now. Raises NumericalError or UserError: they are of no use."""

    async def load(self, folder: Path) -> None:
        """Go on from a snapshot. Raises UserError: missing or damaged, or of another model."""

    async def export(self, folder: Path, **how: Any) -> None:
        """Write the weights for other programs: ``dtype``, ``exact`` and ``stop_ids`` of
        :func:`dapo.model.export.export_model`. Raises FileExistsError: the folder exists and is not empty."""

    async def share_rounded_back(self, before: Path, dtype: torch.dtype) -> float:
        """Of the weights that are other ones than in the folder ``before``, the share that ``dtype`` puts back."""

    async def close(self) -> None:
        """Stop, within a bounded time."""


class Learner(Trained, Protocol):
    """Trains the policy: in this process, or N ranks behind one door."""

    def begin_step(self, step: int, spent: float) -> None:
        """Set the learning rate of rollout step ``step`` (from 0); ``spent``: the share of the run that is over."""

    async def annotate(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the columns that advantages may need: ``proximal``, ``reference``, ``values``."""

    async def update(self, step: int, index: int, mini: TokenBatch, into: StepState) -> None:
        """Make update ``index`` of a step and append its report to ``into.reports``, unless it is there already.

        An update whose caller is cancelled is made to its end, and its report is recorded with it.
        Raises NumericalError: too many updates in a row were skipped; says why and what to try."""

    def use(self, config: Config) -> None:
        """Go on with other settings."""


class WeightSync(Protocol):
    """Hands new weights over."""

    async def push(self, learner: Any, engine: Engine) -> None:
        """The engine has the learner's weights; their version is one up if an update was applied."""
