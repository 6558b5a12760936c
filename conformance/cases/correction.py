"""Engine and trainer differ: temperature, and importance weights for it."""

from __future__ import annotations

from math import log

from conformance.case import Case
from conformance.contract import Correction, LossBatch

_HAND = "importance sampling between sampler and trainer, by hand"
_LOG2, _LOG4 = log(2.0), log(4.0)


def _weighted(name: str, what: str, correction: Correction, ratios: list[float], expected: object) -> Case:
    """One response with ``ratios`` = pi_old / pi_sampled and advantage -1: each token's loss is its weight."""
    return Case(
        id=f"correction/{name}",
        what=what,
        operation="loss",
        inputs={
            "batch": LossBatch(
                logprobs=[[-1.0] * len(ratios)],
                sampled_logprobs=[[-1.0 - log(ratio) for ratio in ratios]],
                advantages=[-1.0],
                correction=correction,
            )
        },
        expected=expected,
        source=_HAND,
    )


CASES = (
    _weighted(
        "token-truncate",
        "weights min(q, 2) of each token for q = 4 and 0.5",
        Correction("truncate", "token", cap=2.0),
        [4.0, 0.5],
        {"loss": 1.25, "gradient": [[1.0, 0.25]]},
    ),
    _weighted(
        "sequence-truncate",
        "one weight min(4 x 0.25 x 1.5, 2) = 1.5 for the response",
        Correction("truncate", "sequence", cap=2.0),
        [4.0, 0.25, 1.5],
        {"loss": 1.5, "gradient": [[0.5, 0.5, 0.5]]},
    ),
    _weighted(
        "sequence-cap",
        "one weight min(4 x 4, 2) = 2 for the response",
        Correction("truncate", "sequence", cap=2.0),
        [4.0, 4.0],
        {"loss": 2.0, "gradient": [[1.0, 1.0]]},
    ),
    _weighted(
        "token-mask",
        "a token outside of [0.5, 2] leaves numerator and divisor, the other has weight 1",
        Correction("mask", "token", low=0.5, high=2.0),
        [4.0, 1.5],
        {"loss": 1.0, "gradient": [[0.0, 1.0]]},
    ),
    Case(
        id="correction/no-gradient",
        what="no gradient flows through the weight: with ratio 1 the gradient is weight times advantage",
        operation="loss",
        inputs={
            "batch": LossBatch(
                logprobs=[[-1.0]],
                sampled_logprobs=[[-1.0 - _LOG2]],
                advantages=[-3.0],
                correction=Correction("truncate", cap=4.0),
            )
        },
        expected={"loss": 6.0, "gradient": [[6.0]]},
        source=_HAND,
    ),
    Case(
        id="correction/outside-of-the-clip",
        what="the weight multiplies the clipped loss: ratio 2, advantage +1, weight 2 gives -2.56",
        operation="loss",
        inputs={
            "batch": LossBatch(
                logprobs=[[-1.0 + _LOG2]],
                old_logprobs=[[-1.0]],
                sampled_logprobs=[[-1.0 - _LOG4]],
                advantages=[1.0],
                correction=Correction("truncate", cap=2.0),
            )
        },
        expected={"loss": -2.56, "gradient": [[0.0]]},
        source=_HAND,
    ),
    Case(
        id="temperature/half",
        what="logits 2 and 0 at temperature 0.5: log-probability of the first -0.01815, not -0.12693",
        operation="logprob",
        inputs={"logits": [2.0, 0.0], "token": 0, "temperature": 0.5},
        expected={"logprob": -0.0181499},
        source="temperature applied on one side only: a reported fault",
        tolerance=2e-5,
    ),
    Case(
        id="temperature/two",
        what="logits 2 and 0 at temperature 2: log-probability of the second",
        operation="logprob",
        inputs={"logits": [2.0, 0.0], "token": 1, "temperature": 2.0},
        expected={"logprob": -1.3132617},
        source="by hand: -log(1 + e)",
        tolerance=2e-5,
    ),
)
