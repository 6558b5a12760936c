"""The ways to place learner and engines. Nothing above knows which one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Ray's processes come by here, and need little of it
    from dapo.algorithm.kl import AdaptiveKL
    from dapo.orchestrator.build import Setup
    from dapo.orchestrator.runtime.placed import Placed, Wait


def place(
    setup: Setup, kl: AdaptiveKL, out_of_time: Callable[[], bool], wait: Wait, tell: Callable[[str], object]
) -> Placed:
    """Load the model, and make learner and engine.

    Args:
        kl: the coefficient of a KL in the loss, which others change.
        out_of_time: whether an update that is under way is to end unmade.
        wait: for what starts in other processes.
        tell: hears of processes that died and were replaced.

    Raises UserError: it cannot be loaded or trained, or does not fit into the memory. Nothing is left of it then.
    """
    if setup.config.runtime.kind == "ray":
        from dapo.orchestrator.runtime.ray.place import place_on_ray  # needs an extra

        placed: Placed = wait(place_on_ray(setup, kl, tell))
        return placed
    from dapo.orchestrator.runtime.local import place_here

    return place_here(setup, kl, out_of_time)
