"""From token losses to one number: divisors, masks, padding, micro-batches.

Unless said otherwise ratios are 1, so that a token's loss is minus its advantage, and its gradient that times its
weight.
"""

from __future__ import annotations

from math import log, nan

from conformance.case import Case
from conformance.contract import LossBatch

_FOUR = [[-1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]]
_FOUR_ADVANTAGES = [4.0, 1.0, -2.0, 0.5]
# token losses: -4 | -1 -1 -1 | +2 +2 | -0.5 x 4
_CUTS: tuple[dict[str, object], ...] = (
    {},
    {"micro_batches": [[0, 1], [2, 3]]},
    {"micro_batches": [[3, 0], [1, 2]]},
    {"micro_batches": [[0], [1], [2], [3]]},
    {"micro_batches": [[2], [0], [3], [1]]},
)


def _four(name: str, what: str, loss: float, weights: list[float], source: str, **settings: object) -> Case:
    return Case(
        id=f"loss/{name}",
        what=f"{what}; the same for every cut into micro-batches",
        operation="loss",
        inputs={"batch": LossBatch(logprobs=_FOUR, advantages=_FOUR_ADVANTAGES, **settings)},  # type: ignore[arg-type]
        variants=_CUTS,
        expected={
            "loss": loss,
            "gradient": [
                [-advantage * weight] * len(row)
                for row, advantage, weight in zip(_FOUR, _FOUR_ADVANTAGES, weights, strict=True)
            ],
        },
        source=source,
    )


def _loss(name: str, what: str, batch: LossBatch, expected: object, source: str, **others: object) -> Case:
    return Case(f"loss/{name}", what, "loss", {"batch": batch}, expected, source, **others)  # type: ignore[arg-type]


CASES = (
    _loss(
        "uneven-micro-batches",
        "1 token of loss 4 and 3 tokens of loss 0 in two micro-batches: 1, not the mean of means 2",
        LossBatch(logprobs=[[-1.0], [-1.0, -1.0, -1.0]], advantages=[-4.0, 0.0], micro_batches=[[0], [1]]),
        {"loss": 1.0, "gradient": [[1.0], [0.0, 0.0, 0.0]]},
        "each micro-batch divided by its own tokens: reported of many trainers",
    ),
    _four("token-mean", "token-mean of responses of 1, 3, 2 and 4 tokens", -0.5, [0.1] * 4, "DAPO Eq. 12, by hand"),
    _four(
        "seq-mean-token-mean",
        "mean over tokens, then over responses (GRPO)",
        -0.875,
        [1 / 4, 1 / 12, 1 / 8, 1 / 16],
        "DAPO Eq. 5, by hand",
        aggregation="seq-mean-token-mean",
    ),
    _four(
        "seq-mean-token-sum",
        "sum over tokens, mean over responses",
        -1.25,
        [1 / 4] * 4,
        "by hand",
        aggregation="seq-mean-token-sum",
    ),
    _four(
        "constant",
        "sum over tokens divided by 10 times the responses (Dr. GRPO)",
        -0.125,
        [1 / 40] * 4,
        "Dr. GRPO, by hand",
        aggregation="constant",
        constant=10,
    ),
    _four(
        "prompt-mean",
        "mean over the tokens of each group, then over groups",
        (-7 / 4 + 2 / 6) / 2,
        [1 / 8, 1 / 8, 1 / 12, 1 / 12],
        "DAPO Eq. 8 as printed, by hand",
        aggregation="prompt-mean",
        groups=[0, 0, 1, 1],
    ),
    _loss(
        "two-updates",
        "a rollout of 1 + 3 tokens cut into two optimizer steps: each divides by its own tokens",
        LossBatch(logprobs=[[-1.0], [-1.0, -1.0, -1.0]], advantages=[-4.0, 0.0]),
        {"loss": 4.0, "gradient": [[4.0], [0.0, 0.0, 0.0]]},
        "divisor over the optimizer mini-batch, as in DAPO's released code with one micro-batch",
        variants=({"update": [0]},),
    ),
    _loss(
        "masked-divisor",
        "4 tokens in the loss and 6 masked, each of loss 1: 1, not 0.4",
        LossBatch(logprobs=[[-1.0] * 4, [-1.0] * 6], advantages=[-1.0, -1.0], mask=[[1] * 4, [0] * 6]),
        {"loss": 1.0, "gradient": [[0.25] * 4, [0.0] * 6]},
        "a divisor that counted masked tokens: a reported fault",
    ),
    _loss(
        "masked-micro-batch",
        "one of two micro-batches wholly masked: it adds nothing and spoils nothing",
        LossBatch(
            logprobs=[[-1.0] * 2, [-1.0] * 2],
            advantages=[-1.0, -1.0],
            mask=[[1, 1], [0, 0]],
            micro_batches=[[0], [1]],
        ),
        {"loss": 1.0, "gradient": [[0.5, 0.5], [0.0, 0.0]]},
        "NaN from a wholly masked part: a reported fault",
    ),
    _loss(
        "masked-all",
        "everything masked: loss 0 with a gradient of zeros, not NaN and not an error",
        LossBatch(logprobs=[[-1.0] * 2, [-1.0] * 2], advantages=[-1.0, 1.0], mask=[[0, 0], [0, 0]]),
        {"loss": 0.0, "gradient": [[0.0, 0.0], [0.0, 0.0]]},
        "NaN or a hang when all responses are masked: a reported fault",
        variants=(
            {},
            {"aggregation": "seq-mean-token-mean"},
            {"aggregation": "constant", "constant": 10},
        ),
    ),
    _loss(
        "masked-sequence-mean",
        "mean over responses with one wholly masked: it is not counted",
        LossBatch(
            logprobs=[[-1.0] * 2, [-1.0] * 2],
            advantages=[-1.0, -1.0],
            mask=[[1, 1], [0, 0]],
            aggregation="seq-mean-token-mean",
        ),
        {"loss": 1.0, "gradient": [[0.5, 0.5], [0.0, 0.0]]},
        "convention of this project: means count units that have a loss token",
    ),
    _loss(
        "constant-counts-masked",
        "constant divisor with one response wholly masked: it is counted",
        LossBatch(
            logprobs=[[-1.0] * 2, [-1.0] * 2],
            advantages=[-1.0, -1.0],
            mask=[[1, 1], [0, 0]],
            aggregation="constant",
            constant=10,
        ),
        {"loss": 0.1, "gradient": [[0.05, 0.05], [0.0, 0.0]]},
        "Dr. GRPO: the divisor is the same for every batch of this size",
    ),
    _loss(
        "masked-nan",
        "NaN as log-probability of a masked token: loss and gradient stay finite",
        LossBatch(logprobs=[[-1.0, nan]], old_logprobs=[[-1.0, nan]], advantages=[1.0], mask=[[1, 0]]),
        {"loss": -1.0, "gradient": [[-1.0, 0.0]]},
        "NaN times a mask of 0 is NaN: a reported fault",
    ),
    _loss(
        "masked-values",
        "huge log-ratio at a masked token: nothing changes",
        LossBatch(logprobs=[[-1.0, 10.0]], old_logprobs=[[-1.0, -1.0]], advantages=[1.0], mask=[[1, 0]]),
        {"loss": -1.0, "gradient": [[-1.0, 0.0]]},
        "values at padding entered a mean: a reported fault",
        variants=({}, {"aggregation": "seq-mean-token-mean"}),
    ),
    _loss(
        "padding-width",
        "the same two responses padded to width 8 and to 16: the same loss in every mode",
        LossBatch(logprobs=[[-1.0] * 2, [-1.0] * 2], advantages=[-1.0, -2.0]),
        {"loss": 1.5, "gradient": [[0.25, 0.25], [0.5, 0.5]]},
        "a divisor that was the padded width: a reported fault of Dr. GRPO losses",
        variants=tuple(
            {"pad_to": width} | mode
            for width in (8, 16)
            for mode in (
                {},
                {"aggregation": "seq-mean-token-mean"},
                {"aggregation": "constant", "constant": 2},
            )
        ),
    ),
    _loss(
        "clip-in-token-mean",
        "two tokens of ratio 2 and advantage +1: clipped under every aggregation",
        LossBatch(logprobs=[[log(2.0)] * 2], old_logprobs=[[0.0] * 2], advantages=[1.0]),
        {"loss": -1.28, "gradient": [[0.0, 0.0]]},
        "a clipped term that was computed and not used: a reported fault",
        variants=(
            {},
            {"aggregation": "seq-mean-token-mean"},
            {"aggregation": "constant", "constant": 2},
        ),
    ),
)
