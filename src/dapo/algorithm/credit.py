"""Credit within an episode: what each turn is worth when rewards come by turn (``environment.credit: turn``)."""

from __future__ import annotations

from dataclasses import replace

from dapo.algorithm.advantage import Estimator, advantages
from dapo.records import Group, Sample, Turn


def with_turn_advantages(group: Group, *, kind: str | Estimator, epsilon: float = 1e-6) -> Group:
    """A copy of ``group`` whose turns carry their own ``advantage``.

    The return of turn t is the shaped reward of the episode less what earlier turns were given: what has been paid
    already is no credit of t's. It is compared with the returns of turn t in the other episodes of the group. An
    episode that has ended before counts with the return of its last turn, so that each baseline is over all episodes,
    one number of each. Without rewards by turn this is the advantage of the outcome.
    Raises ValueError: as :func:`~dapo.algorithm.advantage.advantages`."""
    scored = [_returns(sample) for sample in group.scored]
    most = max(map(len, scored), default=0)
    by_turn = [
        advantages([some[min(t, len(some) - 1)] for some in scored], kind=kind, epsilon=epsilon).tolist()
        for t in range(most)
    ]
    place = iter(range(len(scored)))

    def credit(sample: Sample) -> Sample:
        own = next(place)
        found = iter(each[own] for each in by_turn)

        def turns(part: Sample) -> tuple[Turn, ...]:
            return tuple(replace(turn, advantage=next(found)) for turn in part.turns)

        head = replace(sample, turns=turns(sample))
        return replace(head, more=tuple(replace(part, turns=turns(part)) for part in sample.more))

    return replace(group, samples=tuple(credit(s) if s.scored else s for s in group.samples))


def _returns(sample: Sample) -> list[float]:
    found, left = [], sample.shaped_reward
    for turn in (turn for part in sample.parts for turn in part.turns):
        found.append(left)
        left -= turn.reward
    return found or [left]
