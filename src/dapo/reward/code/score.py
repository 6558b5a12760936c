"""The code reward, as a worker process computes it.

Each worker judges one response at a time and remembers what the reference solutions of the rows took.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dapo.config import CodeReward
from dapo.records import Reward
from dapo.reward.code.blocks import find_program
from dapo.reward.code.grade import Grade, Grader
from dapo.reward.code.names import Snippet, Tests, read_tests
from dapo.reward.code.program import SandboxFailed, Usage
from dapo.reward.code.quality import efficiency, find_ruff, style
from dapo.reward.convert import reward_to_json

_REMEMBERED = 8192
"""References whose use of time and memory is kept; a few hundred bytes each."""


class CodeJudge:
    """Raises RewardError: the sandbox or the linter is missing; how to install it."""

    def __init__(self, config: CodeReward) -> None:
        self._config = config
        self._grader = Grader(config)
        self._grader.sandbox.check()
        if "style" in config.parts:
            find_ruff()
        self._references: OrderedDict[bytes, Usage] = OrderedDict()

    def score(
        self, response: str, tests: Any, entry_point: str | None, solution: str | None, tolerance: Any = None
    ) -> Reward:
        """The verdict on a response. Parts: ``answer_found``, ``tests_passed`` and those of the config."""
        try:
            read = read_tests(tests, entry_point, tolerance)
            called = [name for test in read if isinstance(test, Snippet) for name in test.free]
            program = find_program(response, entry_point, list(dict.fromkeys(called)))
            if program is None:
                parts = dict.fromkeys(("answer_found", "tests_passed", *self._config.parts), 0.0)
                return Reward(False, -1.0, parts=parts)
            verdict = self._grader.grade(program, read, entry_point)
            parts = {"answer_found": 1.0, "tests_passed": verdict.share}
            parts |= {
                part: self._part(part, program, verdict, read, entry_point, solution) for part in self._config.parts
            }
        except (SandboxFailed, ValueError, OSError) as error:
            return Reward(None, 0.0, error=str(error))
        correct = verdict.outcome == "pass"
        value = 2 * verdict.share - 1 if self._config.score == "fraction" else 1.0 if correct else -1.0
        return Reward(correct, value, parts=parts, extracted=program)

    def grade(self, program: str, tests: Any, entry_point: str | None, tolerance: Any) -> dict[str, str | None]:
        """The outcome of a program without a response around it; None: there is no verdict."""
        try:
            read = read_tests(tests, entry_point, tolerance)
        except ValueError as error:
            return {"outcome": "error", "detail": f"its tests cannot be used: {error}"}
        try:
            verdict = self._grader.grade(program, read, entry_point)
        except (SandboxFailed, OSError) as error:
            return {"outcome": None, "detail": str(error)}
        return {"outcome": verdict.outcome, "detail": verdict.detail}

    def _part(
        self, name: str, program: str, verdict: Grade, tests: Tests, entry_point: str | None, solution: str | None
    ) -> float:
        if name == "compiles":
            return float(verdict.compiles)
        if name == "style":
            return style(program) if verdict.compiles else 0.0
        if verdict.outcome != "pass":  # how fast it is wrong tells nothing
            return 0.0
        return efficiency(verdict.usage, self._reference(tests, entry_point, solution))

    def _reference(self, tests: Tests, entry_point: str | None, solution: str | None) -> Usage:
        """What the row's reference solution takes: the lesser of two runs, as the second one finds files cached."""
        if solution is None:
            raise ValueError("the row has no reference solution, which `efficiency` compares with")
        key = hashlib.sha256(repr((solution, tests)).encode("utf-8", "surrogatepass")).digest()
        if key not in self._references:
            runs = [self._grader.grade(solution, tests, entry_point) for _ in range(2)]
            if any(run.outcome != "pass" for run in runs):
                raise ValueError(f"the row's reference solution does not pass its tests: {runs[0].detail}")
            cpu_s = min(run.usage.cpu_s for run in runs)
            self._references[key] = Usage(0, cpu_s, min(run.usage.memory_bytes for run in runs))
            if len(self._references) > _REMEMBERED:
                self._references.popitem(last=False)
        return self._references[key]


def make_handler(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """For the worker pool. ``options`` are the config's keys; items are the arguments of :meth:`CodeJudge.score`, with
    a reward as the result, or of :meth:`CodeJudge.grade`."""
    judge = CodeJudge(CodeReward(**options))

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        return judge.grade(**item) if "program" in item else reward_to_json(judge.score(**item))

    return handle
