"""Where the roles that compute are: what the rest of a run knows of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.observe.resources import Look
from dapo.orchestrator.mfu import CardLimits
from dapo.orchestrator.protocols import Learner, WeightSync
from dapo.rollout.engine import Engine

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end in the event loop of the run; a signal cancels it."""


@dataclass(frozen=True)
class Placed:
    """Learner and engines with a model in them, in this process or in others. The run closes them.

    Attributes:
        evaluation_engine: None: evaluations have ``engine``.
        sync: hands the learner's weights to either engine.
        model: the one that is trained, or what is known of it where other processes hold it
            (:func:`dapo.orchestrator.inputs.model_elsewhere`).
        stop_ids: tokens that end a response.
        fingerprint: of the model as it was loaded (:func:`dapo.model.fingerprint.fingerprint_model`).
        limits: what the learner's card can do, if that is known.
        counts: metrics of the placement so far.
        look: what all its machines do (:mod:`dapo.observe.resources`); None: it is this process.
    """

    learner: Learner
    engine: Engine
    evaluation_engine: Engine | None
    sync: WeightSync
    model: Any
    stop_ids: Sequence[int]
    fingerprint: Mapping[str, Any]
    limits: CardLimits | None = None
    counts: Callable[[], Mapping[str, float]] = dict
    look: Callable[[], list[Look]] | None = None
