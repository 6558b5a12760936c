"""Best-of-n: of several samples the one that a ranker scores highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo.inference.stream import Part
from dapo.ranking.endpoints import Rankers
from dapo.ranking.rows import Candidates
from dapo.ranking.score import best_first, score
from dapo.reward.contract import Scorer
from dapo.serve.door import Refused
from dapo.serve.model import ServedModel
from dapo.serve.protocol import Reply, SamplingRequest


def ranker_of(body: SamplingRequest, rankers: Rankers) -> tuple[str, Scorer] | None:
    """Who chooses; None: nobody is to. Raises Refused: the request cannot be served as it stands."""
    if body.best_of in (None, 1) and body.ranker is None:
        body.best_of = None
        return None
    if body.best_of is None:
        raise Refused(400, "ranker: chooses among best_of samples; give best_of, such as 8", "best_of")
    if body.best_of < body.n:
        raise Refused(400, f"best_of: {body.best_of} samples, of which n={body.n} are asked for", "best_of")
    if body.stream:
        raise Refused(400, "stream: the best sample is known when all are written; leave stream out", "stream")
    try:
        return rankers.named(body.ranker)
    except KeyError as error:
        raise Refused(400, error.args[0], "ranker") from None


async def choose(
    chooser: tuple[str, Scorer],
    body: SamplingRequest,
    served: ServedModel,
    parts: Sequence[tuple[int, Part]],
    reply: Reply,
) -> dict[str, Any]:
    """The reply with the ``n`` best of each prompt's samples as choices, and ``ranking`` with all of them: text and
    score, the best first, and which choice each is. All count as used tokens.
    Raises Refused: fewer samples than asked for could be scored."""
    name, ranker = chooser
    by_number, chosen, ranking = dict(parts), list[tuple[int, Part]](), list[dict[str, Any]]()
    for place, prompt in enumerate(body.rankable(served)):
        numbers = range(place * body.each, (place + 1) * body.each)
        texts = tuple(by_number[number].text for number in numbers)
        scored = best_first(await score(ranker, Candidates(prompt, texts, model=body.model)))
        failed = [one for one in scored[: body.n] if one.score is None]
        if failed:
            raise Refused(503, f"ranker {name}: could not score enough of {body.each} samples: {failed[0].error}")
        for k, one in enumerate(scored):
            won = k < body.n
            ranking.append({"prompt": place, "choice": place * body.n + k if won else None, "score": one.score})
            ranking[-1] |= {"text": one.text} | ({"error": one.error} if one.error else {})
            part = by_number[numbers[one.index]]
            if won:
                chosen.append((place * body.n + k, part))
            else:
                reply.completion_tokens += len(part.token_ids)
    return reply.whole(chosen) | {"ranker": name, "ranking": ranking}
