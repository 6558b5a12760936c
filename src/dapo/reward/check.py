"""A reward against labelled cases (``dapo reward check``).

A case is a response with the verdict that it should get, or a program that is graded without a response around it::

    {"gold": "1/2", "response": "It is \\\\boxed{0.5}.", "expected": true}
    {"solution": "print(7)", "tests": [{"stdin": "", "stdout": "7\\n"}], "expected": "pass", "also_ok": ["error"]}

``expected`` is true (right), false (wrong), the number that the reward should be, or "error" (no verdict); of a
program it is pass, fail, timeout or error. ``also_ok`` lists further accepted verdicts. ``finish_reason`` (stop,
length) and ``prompt_end`` (such as "<think>", if the template opens it) are optional. ``prompt`` and all other keys
reach the reward as those of a row of data do; ``name``, ``note``, ``source`` and ``after`` are for people.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar, get_args

from dapo.config import CodeReward, RewardConfig
from dapo.config.data import DataItem
from dapo.data.parts import open_table
from dapo.data.rows import BadRow, Keys, Table, check_row, listed, plain_value
from dapo.errors import DataError, RewardError, shortened
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.build import make_scorer, needs_answer
from dapo.reward.contract import Scorer
from dapo.reward.convert import reward_to_json

OUTCOMES = ("pass", "fail", "timeout", "error")
Expected = bool | float | str
S = TypeVar("S", bound=Scorer)

_AT_ONCE = 256  # Scores awaited at the same time. Scorers have limits of their own; those that make batches need many.
_SHOWN = ("name", "note", "source", "after")  # keys for people
_TAKEN = ("gold", "response", "expected", "also_ok", "prompt", "finish_reason", "prompt_end")
"""Keys that the reward does not get to see as further keys of a row."""


@dataclass(frozen=True, slots=True)
class Case:
    """One labelled case. ``prompt.meta`` holds its further keys; ``accepted`` begins with what is expected."""

    place: str
    prompt: Prompt
    response: str
    accepted: tuple[Expected, ...]
    is_program: bool
    about: Mapping[str, str]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What the reward says of a case.

    ``reward``: None for a program. ``outcome``: of a program, one of :data:`OUTCOMES`; None: there is no verdict.
    ``detail``: why a program did not pass. ``doubt``: what the scorer finds wrong with the case itself, examined only
    where they disagree.
    """

    case: Case
    reward: Reward | None
    agrees: bool
    outcome: str | None = None
    detail: str = ""
    doubt: str | None = None

    def as_json(self) -> dict[str, Any]:
        case = self.case
        expected, *also_ok = case.accepted
        program = {"outcome": self.outcome, "detail": self.detail}
        got = program if self.reward is None else reward_to_json(self.reward)
        return {
            "place": case.place,
            **case.about,
            "prompt": case.prompt.text,
            "gold": case.prompt.answer,
            "solution" if case.is_program else "response": case.response,
            "expected": expected,
            "also_ok": also_ok,
            "agrees": self.agrees,
            **got,
            "doubt": self.doubt,
        }


def read_cases(files: Sequence[str], config: RewardConfig) -> list[Case]:
    """The cases in ``files``, of any format of data. Raises DataError: all faults, each with file and line."""
    cases: list[Case] = []
    faults: list[str] = []
    for file in files:
        try:
            table = _open(file)
        except DataError as fault:
            faults.append(str(fault))
            continue
        for number in range(len(table)):
            try:
                cases.append(_case(table.raw(number), table.place(number), len(cases), config))
            except BadRow as fault:
                faults.append(f"{table.place(number)}: {fault}")
    if faults:
        raise DataError(listed(faults))
    return cases


def _open(file: str) -> Table:
    if not os.path.exists(file):  # noqa: PTH110  (Path.exists raises for a name that is too long)
        raise DataError(f"{file}: no such file; expected one of labelled cases, a JSON object in each line")
    return open_table(DataItem(path=file))


def _case(raw: Any, place: str, number: int, config: RewardConfig) -> Case:
    if not isinstance(raw, Mapping):
        raise BadRow(f"expected an object such as {_EXAMPLE}, got {_shown(raw)}")
    is_program = "solution" in raw and "response" not in raw
    if is_program and not isinstance(config, CodeReward):
        raise BadRow(f"'solution' without 'response' is a case for reward.kind=code, not for reward.kind={config.kind}")
    text_key = "solution" if is_program else "response"
    for key in (text_key, config.tests_key) if is_program and isinstance(config, CodeReward) else (text_key,):
        if key not in raw:
            raise BadRow(f"no key {key!r}; the keys are {', '.join(map(repr, raw))}. A case is like {_EXAMPLE}")
    text = raw[text_key]
    if type(text) is not str:
        raise BadRow(f"{text_key!r} must be text, got {_shown(text)}")
    accepted = _accepted(raw, is_program)
    prompt = _prompt(raw, place, number, needs_answer(config) and not is_program)
    about = {key: str(plain_value(raw[key])) for key in _SHOWN if raw.get(key) is not None}
    reason, end = raw.get("finish_reason"), raw.get("prompt_end") or ""
    if reason not in (None, *get_args(FinishReason)) or type(end) is not str:
        raise BadRow(f"'finish_reason' must be stop or length, 'prompt_end' text, got {_shown(reason)}, {_shown(end)}")
    return Case(place, replace(prompt, end=end), text, accepted, is_program, about, reason)


def _accepted(raw: Mapping[str, Any], is_program: bool) -> tuple[Expected, ...]:
    if "expected" not in raw:
        raise BadRow(f"no key 'expected'; the keys are {', '.join(map(repr, raw))}")
    also_ok = plain_value(raw.get("also_ok") or [])
    if not isinstance(also_ok, list):
        raise BadRow(f"'also_ok' must be a list, got {_shown(also_ok)}")
    accepted = [plain_value(raw["expected"]), *also_ok]
    for key, value in zip(["expected", *["also_ok"] * len(also_ok)], accepted, strict=True):
        if is_program and value not in OUTCOMES:
            raise BadRow(f"{key!r} of a solution must be one of {', '.join(OUTCOMES)}, got {_shown(value)}")
        if not is_program and not isinstance(value, bool | int | float) and value != "error":
            raise BadRow(
                f'{key!r} must be true (right), false (wrong), a number (the reward) or "error", got {_shown(value)}'
            )
    return tuple(accepted)


def _prompt(raw: Mapping[str, Any], place: str, number: int, answer_required: bool) -> Prompt:
    if answer_required and "gold" not in raw:
        said = "; it is not called 'answer' here" if "answer" in raw else ""
        raise BadRow(f"no key 'gold', the reference that this reward compares with{said}")
    has_prompt = raw.get("prompt") is not None
    kept = {key: raw[key] for key in ("prompt", "gold") if raw.get(key) is not None or key == "gold" in raw}
    row = check_row(kept if has_prompt else {**kept, "prompt": "-"}, Keys("prompt", "gold", answer_required), place)
    meta = {str(key): plain_value(value) for key, value in raw.items() if key not in _TAKEN}
    return Prompt(number, row.text if has_prompt else "", (), row.answer, meta)


def _shown(value: Any) -> str:
    return shortened(repr(plain_value(value)), 60)


_EXAMPLE = '{"gold": "4", "response": "\\\\boxed{4}", "expected": true}'


async def check_cases(
    cases: Sequence[Case],
    config: RewardConfig,
    tolerance: float = 1e-9,
    advance: Callable[[int], None] = lambda done: None,
) -> list[Checked]:
    """Score every case. ``tolerance``: how far, absolutely or relative to it, a reward may be from an expected number.
    Raises RewardError: the reward cannot be loaded or reached, or breaks its contract; names the case."""
    if not cases:
        return []
    numbers = count(1)

    def one_more() -> None:
        advance(next(numbers))

    others = [case for case in cases if not case.is_program]
    async with running(make_scorer(config)) as scorer:
        graded = [_graded(case, scorer, one_more) for case in cases if case.is_program]
        checked = await asyncio.gather(*graded)
        items = [(case.place, case.prompt, case.response, case.finish_reason) for case in others]
        rewards = await score_each(scorer, items, one_more)
        compared = [_compared(case, reward, tolerance) for case, reward in zip(others, rewards, strict=True)]
        places = [k for k, one in enumerate(compared) if not one.agrees]
        doubts = await scorer.examine([compared[k].case.prompt for k in places]) if places else ()
        found = {places[doubt.position]: doubt.text for doubt in doubts}
        checked += [replace(one, doubt=found.get(k)) for k, one in enumerate(compared)]
    return sorted(checked, key=lambda one: one.case.prompt.row)


def _compared(case: Case, reward: Reward, tolerance: float) -> Checked:
    def admits(expected: Expected) -> bool:
        if reward.error is not None or isinstance(expected, str):
            return reward.error is not None and expected == "error"
        if isinstance(expected, bool):
            return reward.correct is expected
        return math.isclose(reward.value, expected, rel_tol=tolerance, abs_tol=tolerance)

    return Checked(case, reward, any(map(admits, case.accepted)))


@asynccontextmanager
async def running(scorer: S) -> AsyncIterator[S]:
    """The scorer, started; closed at the end."""
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.close()


async def score_each(
    scorer: Scorer, items: Sequence[tuple[str, Prompt, str, FinishReason | None]], advance: Callable[[], None]
) -> list[Reward]:
    """Score (place, prompt, response, why it ended) items, many at once; the rewards are in the order of the items.
    Raises RewardError: the reward breaks its contract; names the place. The others are given up."""
    rewards: dict[int, Reward] = {}
    waiting = iter(enumerate(items))

    async def score() -> None:
        for number, (place, prompt, response, finish_reason) in waiting:
            try:
                rewards[number] = await scorer.score(prompt, response, finish_reason)
            except RewardError as error:
                raise RewardError(f"{place}: {error}") from None
            advance()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_AT_ONCE, len(items))):
            group.create_task(score())
    return [rewards[number] for number in range(len(items))]


async def _graded(case: Case, scorer: Any, advance: Callable[[], None]) -> Checked:
    """A program as it is against its tests. ``scorer``: of kind ``code``, as :func:`read_cases` sees to."""
    outcome, detail = await scorer.grade(case.response, case.prompt.meta)
    advance()
    return Checked(case, None, outcome in case.accepted, outcome, detail)
