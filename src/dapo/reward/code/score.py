"""The code reward, as a worker process computes it.

Each worker judges one response at a time and remembers what the reference solutions of the rows took. The parts beside
the tests are from 0 to 1: style, and efficiency relative to the reference.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo.config import CodeReward
from dapo.errors import RewardError, install
from dapo.reward.code.blocks import find_program
from dapo.reward.code.grade import Grade, Grader
from dapo.reward.code.names import Snippet, Tests, read_tests
from dapo.reward.code.program import SandboxFailed, Usage
from dapo.reward.convert import reward_to_json
from dapo.util.verdict import Reward

_REMEMBERED = 8192  # references whose use of time and memory is kept; a few hundred bytes each


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


RULES = "E,F,W,B,C4,SIM,UP"  # families of ruff's rules
_LINE_LENGTH = 120
_LINT_S = 20.0

TIME_ALLOWANCE = 1.25
"""A program is as good as the reference up to this multiple of its processor time, plus ``TIME_FLOOR_S``."""
TIME_FLOOR_S = 0.05  # variation of start-up times
MEMORY_ALLOWANCE = 1.1
MEMORY_FLOOR_BYTES = 8 * 2**20


def find_ruff() -> str:
    """The linter. Raises RewardError: it is not installed."""
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise RewardError(f"the part `style` of the code reward needs ruff: {install('code')}")
    return found


def style(program: str) -> float:
    """1 - (findings / statements), at least 0; 0 for what is not Python. Constants that stand alone and ``pass`` are no
    statements here, so that they do not dilute the findings. Comments that silence the linter have no effect.
    Raises OSError, TimeoutError: the linter fails."""
    statements = _statements(program)
    if not statements:
        return 0.0
    options = ["--isolated", "--no-cache", "--ignore-noqa", "--output-format", "json", "--exit-zero"]
    options += ["--select", RULES, "--ignore", "W292"]  # what is cut out of a response ends without a newline
    options += ["--line-length", str(_LINE_LENGTH), "--stdin-filename", "solution.py", "-"]
    try:
        command, text = [find_ruff(), "check", *options], program.encode("utf-8", "replace")
        done = subprocess.run(command, input=text, capture_output=True, timeout=_LINT_S, cwd="/", env={}, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"ruff took longer than {_LINT_S:g} s") from None
    if done.returncode != 0:
        raise OSError(f"ruff failed: {done.stderr.decode('utf-8', 'replace')[:200]}")
    findings = json.loads(done.stdout)
    if any(finding["code"] is None or finding["code"] == "invalid-syntax" for finding in findings):
        return 0.0
    return 1.0 - min(1.0, len(findings) / statements)


def _statements(program: str) -> int:
    try:
        nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.stmt)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    idle = [isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes]
    return idle.count(False)


def efficiency(program: Usage, reference: Usage) -> float:
    """The mean of a time part and a memory part. Each is 1 up to an allowance, the reference's use with room for noise,
    and allowance / use beyond."""
    allowed_s = TIME_ALLOWANCE * reference.cpu_s + TIME_FLOOR_S
    allowed_bytes = MEMORY_ALLOWANCE * reference.memory_bytes + MEMORY_FLOOR_BYTES
    time_part = min(1.0, allowed_s / max(program.cpu_s, 1e-9))
    memory_part = min(1.0, allowed_bytes / max(program.memory_bytes, 1))
    return (time_part + memory_part) / 2
