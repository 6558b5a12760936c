"""The math reward: +1 if the final answer is mathematically equal to the reference, -1 otherwise (Eq. 7).

Runs in worker processes, which bound its time and memory; inside the worker a limit on processor time makes answers
that are too expensive to compare wrong instead of failed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from dapo.reward.convert import out_of_time, reward_to_json, verdict
from dapo.reward.math import CPU_LIMIT_S
from dapo.reward.math.equivalence import equivalent, readable
from dapo.reward.math.extract import Rule, final_answer
from dapo.util.verdict import Reward


class _TooExpensive(BaseException):
    """Not an ``Exception``: sympy catches those."""


def score_math(response: str, gold: str, extract: Sequence[Rule]) -> Reward:
    """The verdict on a response; part ``answer_found`` tells a wrong answer (1) from none (0).

    An answer that takes too long to find or to compare is wrong, with 1 as its part ``out_of_time``: a policy could
    escape verdicts otherwise. Where reading the reference alone takes too long the score has failed.

    Args:
        response: the response, thinking included.
        gold: the reference, as bare LaTeX or text.
        extract: the rules that find the final answer, in order.
    """
    found: list[str | None] = []

    def is_right() -> bool:
        found.append(final_answer(response, extract))
        return bool(found[0]) and equivalent(gold, found[0] or "")

    correct = _in_time(is_right)  # all that looks at a response, the search for its answer included
    answer = found[0] if found else None
    if correct is not None:
        return verdict(correct, answer, answer_found=float(bool(answer)), out_of_time=0.0)
    if _in_time(partial(readable, gold)) is None:
        return Reward(None, 0.0, error=f"the row's answer {gold!r} takes too long to read", extracted=answer)
    return out_of_time(answer)


def _in_time(decide: Callable[..., bool], *texts: str) -> bool | None:
    """``decide(*texts)``; False where it fails, None where it costs too much. Main thread only, as signals are."""
    signal.signal(signal.SIGVTALRM, _interrupt)
    try:
        # again every quarter of a second: raised within a destructor, the first one is lost
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S, 0.25)
        try:
            return bool(decide(*texts))  # sympy has truth values of its own, which JSON does not know
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TooExpensive:
        return None
    except Exception:  # sympy raises all kinds, memory and recursion errors among them
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # in case that the inner one was interrupted


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise _TooExpensive


def make_handler(options: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The worker's side. An item with a "response" is scored; one without asks whether "answer" can be read.
    ``options``: "extract", the rules that find the final answer."""
    extract = options["extract"]
    # sympy's first comparison takes long, for which no response is to blame
    _in_time(equivalent, "(x-1)^2=4", "x^2-2x-3=0")

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        if "response" not in item:
            return {"readable": _in_time(readable, item["answer"])}
        return reward_to_json(score_math(item["response"], item["answer"], extract))

    return handle
