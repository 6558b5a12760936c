"""The doors between the loop and those that work for it, in this process or in others: numpy, paths and numbers pass,
no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dapo.orchestrator.step_state import StepState
from dapo.records import Group, Prompt, TokenBatch
from dapo.rollout.engine import Engine


class PromptSource(Protocol):
    """Where prompts come from, with a position that can be saved."""

    def next(self) -> Prompt | None:
        """The next prompt; None: there are no more."""
        ...

    def feedback(self, groups: Sequence[Group]) -> None:
        """Hear what became of prompts, once each and in the order they were drawn: when the step that they were drawn
        for is done, or has found too few groups (``StarvedError``)."""
        ...

    def state(self) -> dict[str, Any]:
        """The position, in JSON types; ``state.lost`` names what a checkpoint cannot keep."""
        ...

    def load_state(self, state: dict[str, Any], /) -> None:
        """Go on from a position."""
        ...


class Learner(Protocol):
    """Trains the policy: in this process, or N ranks behind one door."""

    @property
    def version(self) -> int:
        """Of the weights last handed out."""
        ...

    def begin_step(self, step: int, spent: float) -> None:
        """Set the learning rate of rollout step ``step`` (from 0); ``spent``: the share of the run that is over."""
        ...

    async def annotate(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the columns that advantages may need: ``proximal``, ``reference``, ``values``."""
        ...

    async def update(self, step: int, index: int, mini: TokenBatch, into: StepState) -> None:
        """Make update ``index`` of a step and append its report to ``into.reports``, unless it is there already.

        An update whose caller is cancelled is made to its end, and its report is recorded with it.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer as they are now into ``folder``."""
        ...

    async def load(self, folder: Path) -> None:
        """Go on from :meth:`save`."""
        ...


class WeightSync(Protocol):
    """Hands new weights over."""

    async def push(self, learner: Any, engine: Engine) -> None:
        """The engine has the learner's weights; their version is one up if an update was applied."""
        ...
