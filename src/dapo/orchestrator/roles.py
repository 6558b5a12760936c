"""The roles that the loop knows, as protocols: what they do is elsewhere, in this process or in others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dapo.records import Group, Prompt


class PromptSource(Protocol):
    """Where prompts come from, with a position that can be saved."""

    def next(self) -> Prompt | None:
        """The next prompt; None: there are no more."""
        ...

    def feedback(self, groups: Sequence[Group]) -> None:
        """Hear what became of prompts, in the order they were drawn, once the step that they were drawn for is done."""
        ...

    def state(self) -> dict[str, Any]:
        """The position, in JSON types."""
        ...

    def load_state(self, state: dict[str, Any], /) -> None:
        """Go on from a position."""
        ...
