"""A case: an input, the right answer and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REFUSED = "refused"
"""The expected answer where the trainer is to reject the input."""


@dataclass(frozen=True, slots=True)
class Case:
    """``operation`` of the adapter, called with ``inputs``, must return what ``expected`` says.

    ``expected`` maps names to numbers, truth values or nested lists of them, or is :data:`REFUSED`; a list of several
    such answers means that each of them is right. With ``variants``, the operation is called once for each of these
    changes to the inputs, and every answer must be right. Numbers are compared with an absolute ``tolerance``.
    """

    id: str
    what: str
    operation: str
    inputs: Mapping[str, Any]
    expected: Any
    source: str
    tolerance: float = 1e-5
    variants: Sequence[Mapping[str, Any]] = field(default_factory=lambda: ({},))

    @property
    def right_answers(self) -> Sequence[Any]:
        """All answers that are right."""
        return self.expected if isinstance(self.expected, list) else [self.expected]
