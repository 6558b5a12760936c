"""The loss of one token: clipping on both sides, Clip-Higher, dual clip, KL."""

from __future__ import annotations

from math import exp, log

from conformance.case import Case
from conformance.contract import LossBatch

_EQ = "DAPO Eq. 8 and 10, by hand"


def _token(
    name: str, ratio: float, advantage: float, loss: float, gradient: float, what: str, c: float | None = None
) -> Case:
    return Case(
        id=f"clip/{name}",
        what=f"ratio {ratio:g}, advantage {advantage:+g}{'' if c is None else f', dual clip {c:g}'}: {what}",
        operation="loss",
        inputs={"batch": LossBatch(logprobs=[[log(ratio)]], old_logprobs=[[0.0]], advantages=[advantage], clip_c=c)},
        expected={"loss": loss, "gradient": [[gradient]]},
        source=_EQ if c is None else "dual clip as in DAPO's released code, by hand",
    )


def _kl(name: str, d: float, coef: float, advantage: float, what: str) -> Case:
    # k3 = exp(-d) - 1 + d, derivative 1 - exp(-d)
    return Case(
        id=f"kl/{name}",
        what=what,
        operation="loss",
        inputs={
            "batch": LossBatch(logprobs=[[-1.0]], reference_logprobs=[[-1.0 - d]], advantages=[advantage], kl_coef=coef)
        },
        expected={
            "loss": -advantage + coef * (exp(-d) - 1 + d),
            "gradient": [[-advantage + coef * (1 - exp(-d))]],
        },
        source="k3 = exp(-d) - 1 + d, by hand; a KL term computed without gradient was a reported fault",
    )


CASES = (
    _token("down-negative", 0.5, -1, 0.8, 0.0, "clipped at 1 - 0.2, no gradient"),
    _token("up-negative", 2, -1, 2.0, 2.0, "not clipped: the advantage is negative"),
    _token("down-positive", 0.5, 1, -0.5, -0.5, "not clipped: the advantage is positive"),
    _token("up-positive", 2, 1, -1.28, 0.0, "clipped at 1 + 0.28, no gradient"),
    _token("inside-upper", 1.27, 1, -1.27, -1.27, "between 1.2 and 1.28: Clip-Higher lets it grow"),
    _token("inside-lower", 0.81, -1, 0.81, 0.81, "just inside of 1 - 0.2"),
    _token("outside-lower", 0.79, -1, 0.8, 0.0, "just outside of 1 - 0.2"),
    _token("dual", 20, -1, 10.0, 0.0, "at most c |A|, no gradient", c=10),
    _token("dual-below", 5, -1, 5.0, 5.0, "below c: as without", c=10),
    _token("dual-positive", 20, 1, -1.28, 0.0, "c is for negative advantages only", c=10),
    _token("dual-scaled", 20, -2, 20.0, 0.0, "c |A| and not c", c=10),
    Case(
        id="clip/huge-ratio",
        what="log-ratio 200, advantage -1: loss and gradient stay finite (held at c = 10)",
        operation="loss",
        inputs={"batch": LossBatch(logprobs=[[0.0]], old_logprobs=[[-200.0]], advantages=[-1.0], clip_c=10.0)},
        expected={"loss": 10.0, "gradient": [[0.0]]},
        source="overflow of the ratio; DAPO's released code bounds the exponent",
    ),
    _kl("positive", 0.5, 0.1, 0.0, "KL to a reference in the loss, d = +0.5: value and gradient"),
    _kl("negative", -0.5, 0.1, 0.0, "KL to a reference in the loss, d = -0.5: value and gradient"),
    _kl("with-policy", 1.0, 1.0, 1.0, "KL with coefficient 1 beside an advantage of 1"),
    Case(
        id="kl/adaptive-up",
        what="KL far above the target: the coefficient grows by 20% x samples / horizon",
        operation="adapted_kl_coef",
        inputs={"coef": 0.1, "target": 0.05, "horizon": 1000, "kl": 1.0, "samples": 100},
        expected={"coef": 0.102},
        source="adaptive KL controller with the error clipped at 0.2, by hand",
        tolerance=1e-9,
    ),
    Case(
        id="kl/adaptive-inside",
        what="KL 10% below the target: the coefficient shrinks by 10% x samples / horizon",
        operation="adapted_kl_coef",
        inputs={"coef": 0.1, "target": 0.05, "horizon": 1000, "kl": 0.045, "samples": 100},
        expected={"coef": 0.099},
        source="adaptive KL controller, by hand",
        tolerance=1e-9,
    ),
)
