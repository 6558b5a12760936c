"""The code reward as the rest of the program sees it: a scorer whose work is done in worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from dapo.config import CodeReward
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.code.doubts import doubts
from dapo.reward.code.names import TOLERANCE_KEY, read_tests
from dapo.reward.contract import Doubt
from dapo.reward.pool import PooledScorer, ScoringFailed, WorkerPool
from dapo.reward.thinking import behind

_UNSAFE = (
    "reward `code` has `sandbox: none`: programs that the model writes run with your rights. They can read your files, "
    "use your network and outlive their tests; remove the line unless you would run each of them yourself"
)
_BUSY = 4  # the worker ends programs whose time is up; it is killed only if it does not, on a machine this busy
_START_S = 120.0
_MOST_ROWS = 200  # rows that one thread call examines


class CodeScorer(PooledScorer):
    """Runs the program in a response against the row's tests, in a sandbox."""

    def __init__(self, config: CodeReward) -> None:
        self._config = config
        runs = 3 if "efficiency" in config.parts else 1  # the program, and twice the reference
        self._pool = WorkerPool(
            "dapo.reward.code.score:make_handler",
            config.model_dump(mode="json"),
            workers=config.workers,
            timeout_s=runs * _BUSY * (config.timeout_s + config.test_timeout_s) + _START_S,
        )

    async def start(self) -> None:
        if self._config.sandbox == "none":
            logging.getLogger(__name__).warning(_UNSAFE)
        await super().start()

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        solution = _text(prompt.meta, self._config.solution_key)
        item = {"response": behind(prompt.end, response), "solution": solution, **self._tests(prompt.meta)}
        return await self._score(item)

    async def grade(self, program: str, meta: Mapping[str, Any]) -> tuple[str | None, str]:
        """The outcome of a program without a response around it (None: there is no verdict), and the reason."""
        try:
            found = await self._pool.run({"program": program, **self._tests(meta)})
        except ScoringFailed as error:
            return None, str(error)
        return found["outcome"], found["detail"]

    def _tests(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        entry_point = _text(meta, self._config.entry_point_key)
        return {
            "tests": meta.get(self._config.tests_key),
            "entry_point": entry_point,
            "tolerance": meta.get(TOLERANCE_KEY),
        }

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        """Rows whose tests are absent or cannot be run, and those without the reference that a part needs: no response
        to them can be scored. And rows whose tests a program could decide itself, which can be used."""
        found: list[Doubt] = []
        for start in range(0, len(prompts), _MOST_ROWS):
            found += await asyncio.to_thread(self._examine, prompts[start : start + _MOST_ROWS], start)
        return found

    def _examine(self, prompts: Sequence[Prompt], start: int) -> list[Doubt]:
        return [
            Doubt(position, text, unusable)
            for position, prompt in enumerate(prompts, start)
            for text, unusable in self._faults(prompt.meta)
        ]

    def _faults(self, meta: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        config = self._config
        entry_point = meta.get(config.entry_point_key)
        if entry_point is not None and not isinstance(entry_point, str):
            yield f"{config.entry_point_key}: must be text, but is {type(entry_point).__name__}", True
            entry_point = None
        try:
            tests = read_tests(meta.get(config.tests_key), entry_point, meta.get(TOLERANCE_KEY))
        except ValueError as error:
            yield f"{config.tests_key}: {error}", True
        else:
            for text in islice(doubts(tests, entry_point), 1):  # one of a row says enough
                yield f"{config.tests_key}: {text}", False
        if "efficiency" in config.parts and _text(meta, config.solution_key) is None:
            yield f"{config.solution_key}: the part `efficiency` needs the row's reference solution, as text", True


def _text(meta: Mapping[str, Any], key: str) -> str | None:
    value = meta.get(key)
    return value if isinstance(value, str) else None
