"""The ways to place learner and engines. Nothing above knows which one it is."""

from __future__ import annotations

from collections.abc import Callable

from dapo.algorithm.kl import AdaptiveKL
from dapo.orchestrator.build import Setup
from dapo.orchestrator.runtime.local import place_here
from dapo.orchestrator.runtime.placed import Placed, Wait


def place(setup: Setup, kl: AdaptiveKL, out_of_time: Callable[[], bool], wait: Wait) -> Placed:
    """Load the model, and make learner and engine.

    Args:
        kl: the coefficient of a KL in the loss, which others change.
        out_of_time: whether an update that is under way is to end unmade.
        wait: for what starts in other processes.

    Raises:
        UserError: it cannot be loaded or trained, or does not fit into the memory. Nothing is left of it then.
    """
    return place_here(setup, kl, out_of_time)
