"""Groups: advantages, dynamic sampling, admission, overlong shaping."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.case import REFUSED, Case

_NORM = "DAPO Eq. 9, by hand"
_FLAT_FAULT = "advantages of noise in groups of equal rewards: a reported fault"


def _advantages(
    name: str, what: str, rewards: Sequence[float | None], expected: object, source: str, **others: object
) -> Case:
    settings = {"groups": [0] * len(rewards), "kind": "group-norm"} | others
    tolerance = settings.pop("tolerance", 1e-3)  # room for the epsilon beside the standard deviation
    right = expected if isinstance(expected, list) and REFUSED in expected else {"advantages": expected}
    inputs = {"rewards": rewards} | settings
    return Case(f"advantage/{name}", what, "advantages", inputs, right, source, tolerance)  # type: ignore[arg-type]


def _penalty(length: int, penalty: float, limit: int = 100, buffer: int = 20) -> Case:
    return Case(
        id=f"overlong/{length}-of-{limit}-buffer-{buffer}",
        what=f"{length} tokens, limit {limit}, buffer {buffer}: {penalty:g}",
        operation="overlong_penalty",
        inputs={"length": length, "limit": limit, "buffer": buffer},
        expected={"penalty": penalty},
        source="DAPO Eq. 13, by hand",
        tolerance=1e-9,
    )


def _keep(name: str, what: str, keep: bool, correct: list[bool | None], rewards: list[float], **others: object) -> Case:
    inputs = {"correct": correct, "rewards": rewards, "metric": "acc", "shaped": None} | others
    return Case(f"filter/{name}", what, "keep_group", inputs, {"keep": keep}, "DAPO Eq. 11")


def _admit(name: str, what: str, outcomes: list[bool | None], wanted: int, admitted: list[int], complete: bool) -> Case:
    return Case(
        id=f"admission/{name}",
        what=what,
        operation="admit",
        inputs={"outcomes": outcomes, "wanted": wanted},
        expected={"admitted": admitted, "complete": complete},
        source="first kept groups in the order of their draws, so that short responses are not favoured",
    )


CASES = (
    _advantages(
        "one-of-four",
        "rewards 1, -1, -1, -1: 1.5 and -0.5 (standard deviation with n - 1)",
        [1.0, -1.0, -1.0, -1.0],
        [1.5, -0.5, -0.5, -0.5],
        _NORM,
    ),
    _advantages(
        "two-groups",
        "two groups in one batch do not mix",
        [1.0, -1.0, 5.0, 3.0],
        [0.70711, -0.70711, 0.70711, -0.70711],
        _NORM,
        groups=[0, 0, 1, 1],
    ),
    _advantages(
        "small-spread",
        "rewards 0.001 apart are still normalised to 0.707 (an epsilon of 1e-6 and not more)",
        [0.001, 0.0],
        [0.70711, -0.70711],
        "DAPO's released code: epsilon 1e-6",
        tolerance=2e-3,
    ),
    _advantages(
        "mean-only",
        "not divided by the standard deviation (Dr. GRPO)",
        [1.0, -1.0, -1.0, -1.0],
        [1.5, -0.5, -0.5, -0.5],
        "Dr. GRPO, by hand",
        kind="group-mean",
        tolerance=1e-6,
    ),
    _advantages(
        "leave-one-out",
        "reward minus the mean of the others",
        [1.0, -1.0, -1.0, -1.0],
        [2.0, -2 / 3, -2 / 3, -2 / 3],
        "RLOO, by hand",
        kind="leave-one-out",
        tolerance=1e-6,
    ),
    _advantages(
        "leave-one-out-near-flat",
        "seven rewards of 0.35 and one of 0.95: of order 1",
        [0.35] * 7 + [0.95],
        [-0.6 / 7] * 7 + [0.6],
        "RLOO, by hand",
        kind="leave-one-out",
        tolerance=1e-5,
    ),
    _advantages("flat", "seven equal rewards of 0.35: exactly 0", [0.35] * 7, [0.0] * 7, _FLAT_FAULT, tolerance=0.0),
    _advantages(
        "flat-large",
        "seven equal rewards of 1000.1, whose mean rounds: exactly 0",
        [1000.1] * 7,
        [0.0] * 7,
        _FLAT_FAULT,
        tolerance=0.0,
    ),
    _advantages(
        "group-of-one",
        "a single reward: 0, or refused; never NaN",
        [1.0],
        [REFUSED, {"advantages": [0.0]}],
        "NaN from a standard deviation of one number: a reported fault",
    ),
    _advantages(
        "interleaved",
        "samples of two prompts in turn, equal rewards within each: 0 (groups by prompt, not by position)",
        [1.0, 0.0, 1.0, 0.0],
        [0.0] * 4,
        "groups by position: a reported fault",
        groups=[0, 1, 0, 1],
        tolerance=1e-6,
    ),
    _advantages(
        "uneven-groups",
        "groups of 4, 3 and 4, the middle one all 5: it gets 0",
        [1.0, -1.0, -1.0, -1.0, 5.0, 5.0, 5.0, 1.0, -1.0, -1.0, -1.0],
        [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 1.5, -0.5, -0.5, -0.5],
        "groups by position: a reported fault",
        groups=[0] * 4 + [1] * 3 + [2] * 4,
    ),
    _advantages(
        "failed-score",
        "a score that failed is no reward of 0: statistics over the others, its own advantage 0",
        [1.0, None, -1.0, -1.0, -1.0],
        [1.5, 0.0, -0.5, -0.5, -0.5],
        "by hand; failures scored as wrong: a reported fault",
    ),
    _advantages(
        "one-score-left",
        "all scores but one failed: 0 for all, not NaN",
        [1.0, None, None, None],
        [0.0] * 4,
        "by hand",
    ),
    _keep("mixed", "right and wrong: kept", True, [True, False, False, False], [1.0, -1.0, -1.0, -1.0]),
    _keep("all-right", "all right: dropped", False, [True] * 4, [1.0] * 4),
    _keep("all-wrong", "all wrong: dropped", False, [False] * 4, [-1.0] * 4),
    _keep(
        "shaped",
        "four wrong answers whose length penalties differ: dropped, the verdict is by raw correctness",
        False,
        [False] * 4,
        [-1.0] * 4,
        shaped=[-1.0, -1.0, -1.5, -2.0],
    ),
    _keep(
        "score-flat",
        "no notion of right and wrong, equal rewards of 0.5: dropped",
        False,
        [None] * 4,
        [0.5] * 4,
        metric="score",
    ),
    _keep(
        "score-spread",
        "no notion of right and wrong, rewards 0.5 and 0.6: kept",
        True,
        [None] * 4,
        [0.5, 0.6, 0.5, 0.5],
        metric="score",
    ),
    _keep(
        "score-shaped",
        "equal raw rewards whose length penalties differ: dropped",
        False,
        [None] * 4,
        [0.5] * 4,
        metric="score",
        shaped=[0.5, 0.5, 0.0, -0.5],
    ),
    _admit("order", "of F T T T T two are wanted: draws 1 and 2", [False, True, True, True, True], 2, [1, 2], True),
    _admit("waits", "draw 0 is still running: nothing is admitted before it", [None, True, True], 2, [], False),
    _admit(
        "pending-later",
        "a draw that runs behind the last admitted one does not hold up",
        [True, True, None],
        2,
        [0, 1],
        True,
    ),
    _admit("short", "one kept of two wanted: not complete, more has to be drawn", [True, False, False], 2, [0], False),
    _penalty(80, 0.0),
    _penalty(81, -0.05),
    _penalty(90, -0.5),
    _penalty(100, -1.0),
    _penalty(101, -1.0),
    _penalty(100, 0.0, buffer=0),
    _penalty(101, -1.0, buffer=0),
    Case(
        id="overlong/buffer-above-limit",
        what="a buffer longer than the limit is refused",
        operation="configure",
        inputs={"setting": "overlong_buffer", "value": 120},
        expected=REFUSED,
        source="even an empty response would be punished",
    ),
    Case(
        id="overlong/filter",
        what="overlong filtering: the truncated response leaves loss and divisor and stays in the statistics",
        operation="overlong_filter",
        inputs={
            "rewards": [1.0, -1.0, -1.0, -1.0],
            "lengths": [3, 4, 8, 2],
            "truncated": [False, False, True, False],
        },
        expected={"advantages": [1.5, -0.5, -0.5, -0.5], "loss_tokens": [3, 4, 0, 2], "divisor": 9},
        source="DAPO section 3.4; dropping rows before the statistics: a reported fault",
        tolerance=1e-3,
    ),
)
