"""The verdict on one program: its tests, run in a sandbox. Blocks until the program has ended, within limits."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo.config import CodeReward
from dapo.reward.code.doubts import guarded
from dapo.reward.code.evaluator import Evaluator, Outcome
from dapo.reward.code.names import InOut, Snippet, Tests, uses_solution_class
from dapo.reward.code.program import Clock, OverLimit, Program, SandboxFailed, TimeUp, Usage
from dapo.reward.code.runner import LOADED, MALFORMED, RAISED
from dapo.reward.code.sandbox import Sandbox, SandboxLimits

_CHUNK = 1 << 16
_NUMBER = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?+")


@dataclass
class Grade:
    """``outcomes``: of each test, in order: pass; its assert is false or its output differs (fail); timeout; it, or the
    program, ended in an exception (error). ``detail``: of the first that did not pass. ``usage``: of all runs."""

    outcomes: list[Outcome] = field(default_factory=list)
    compiles: bool = True
    detail: str = ""
    usage: Usage = field(default_factory=lambda: Usage(0, 0.0, 0))

    @property
    def outcome(self) -> Outcome:
        """``pass`` if every test passes, otherwise the outcome of the first that does not."""
        return next((outcome for outcome in self.outcomes if outcome != "pass"), "pass")

    @property
    def share(self) -> float:
        """Of the tests that pass."""
        return self.outcomes.count("pass") / len(self.outcomes)

    def add(self, outcome: Outcome, detail: str = "", times: int = 1) -> None:
        if outcome != "pass" and not self.detail:
            self.detail = f"test {len(self.outcomes) + 1}: {detail}" if detail else ""
        self.outcomes += [outcome] * times

    def used(self, usage: Usage) -> None:
        """Add the usage of another run."""
        most = max(self.usage.memory_bytes, usage.memory_bytes)
        self.usage = Usage(usage.status, self.usage.cpu_s + usage.cpu_s, most)


class Grader:
    """Judges one program after another; each thread needs its own."""

    def __init__(self, config: CodeReward) -> None:
        self._config = config
        self._limits = config.memory_mb * 2**20, config.max_processes
        self._output = config.max_output_kb * 1024
        limits = SandboxLimits(*self._limits, config.scratch_mb * 2**20)
        self.sandbox = Sandbox(limits, config.sandbox, config.packages)
        self._evaluator = Evaluator(limits.memory_bytes, self._output)
        self._end = 0.0

    def grade(self, program: str, tests: Tests, entry_point: str | None = None) -> Grade:
        """Run all tests; with ``score: all`` up to the first whose time is up. After ``timeout_s`` the remaining tests
        have timed out, too. Raises SandboxFailed: there is no verdict, for reasons that are not the program's."""
        verdict = Grade()
        source = program.encode("utf-8", "surrogatepass")
        self._end = time.monotonic() + self._config.timeout_s
        prelude = uses_solution_class(tests, entry_point)
        tests = [guarded(test, entry_point) if isinstance(test, Snippet) else test for test in tests]  # type: ignore[assignment]
        while (done := len(verdict.outcomes)) < len(tests):
            if not verdict.compiles:
                verdict.add("error", "the program does not compile", len(tests) - done)
            elif time.monotonic() >= self._end or (self._config.score == "all" and "timeout" in verdict.outcomes):
                verdict.add("timeout", "no time is left", len(tests) - done)
            elif isinstance(test := tests[done], InOut):
                self._run_script(source, test, verdict)
            else:
                self._run_module(source, tests[done:], prelude, verdict)  # type: ignore[arg-type]
        return verdict

    def _run_module(self, source: bytes, tests: Sequence[Snippet], prelude: bool, verdict: Grade) -> None:
        """Load the program once and run at least one test, until the program ends."""
        with self.sandbox.start(source, script=False, prelude=prelude) as program:
            try:
                status = program.load(self._config.test_timeout_s, self._limits)
            except TimeUp:
                verdict.add("timeout", "the program's top level does not end", len(tests))
            except OverLimit as error:
                verdict.add("error", str(error), len(tests))
            else:
                verdict.compiles = status != MALFORMED
                if status == LOADED:
                    self._run_snippets(program, tests, verdict)
                elif verdict.compiles:
                    words = program.complaint() if status == RAISED else "the program ends before its tests"
                    verdict.add("error", words, len(tests))
            if "efficiency" in self._config.parts:
                verdict.used(program.measure())

    def _run_snippets(self, program: Program, tests: Sequence[Snippet], verdict: Grade) -> None:
        """Read the evaluator's reports, each within its time, while there is time for all tests."""
        clock = Clock(program, self._limits)
        first, text = len(verdict.outcomes), b""
        try:
            reports = self._evaluator.begin(program.channel, tests)
            for _ in clock.ticks(self._config.test_timeout_s, [reports]):
                part = os.read(reports, _CHUNK)
                *lines, text = (text + part).split(b"\n")
                for report in map(json.loads, lines):
                    if report is None:
                        return
                    verdict.add(*report)
                    clock.restart()
                over = time.monotonic() >= self._end and len(verdict.outcomes) > first
                if over or not part:  # nothing: a value was too much for it
                    break
        except TimeUp:
            verdict.add("timeout", "its time is up")
        except OverLimit as error:
            verdict.add("error", str(error))
        except OSError as error:
            raise SandboxFailed(f"no process for the tests can be started: {error}") from None
        self._evaluator.kill()
        if len(verdict.outcomes) == first:
            verdict.add("error", "the values that the program returned could not be compared")

    def _run_script(self, source: bytes, test: InOut, verdict: Grade) -> None:
        """One run with pipes, one test."""
        with self.sandbox.start(source, script=True) as program:
            try:
                output = self._converse(program, test.stdin.encode("utf-8", "surrogatepass"))
            except TimeUp:
                verdict.add("timeout", "its time is up")
            except OverLimit as error:
                verdict.add("error", str(error))
            else:
                verdict.compiles = not program.is_malformed()
                if verdict.compiles:
                    verdict.add(*self._compare(output, test, program))
                    verdict.used(program.end())

    def _converse(self, program: Program, stdin: bytes) -> bytes:
        """Write ``stdin`` and read the output, until the program has ended or its output is longer than the limit."""
        assert program.process.stdin is not None and program.process.stdout is not None
        sink, source = program.process.stdin, program.process.stdout
        os.set_blocking(sink.fileno(), False)
        left, output, ended = memoryview(stdin), bytearray(), False
        reading, writing = [source.fileno(), program.exit_fd], [sink.fileno()]
        for ready in Clock(program, self._limits).ticks(self._config.test_timeout_s, reading, writing):
            if writing and writing[0] in ready:
                try:
                    left = left[os.write(writing[0], left[:_CHUNK]) :] if left else left
                except BlockingIOError:
                    pass
                except OSError:  # the program does not read any more
                    left = left[:0]
                if not left:
                    sink.close()
                    writing.clear()
            if source.fileno() in ready:
                part = os.read(source.fileno(), _CHUNK)
                output += part
                if not part:
                    reading.remove(source.fileno())
            if program.exit_fd in ready and not ended:
                ended = True
                reading.remove(program.exit_fd)
                program.kill()  # without a sandbox, children may hold the pipe
            if len(output) > self._output or not reading:
                break
        return bytes(output)

    def _compare(self, output: bytes, test: InOut, program: Program) -> tuple[Outcome, str]:
        if len(output) > self._output:
            return "fail", f"its output is longer than {self._config.max_output_kb} KiB"
        status = program.wait().status
        if status != 0:
            return "error", f"it ends with exit status {status}"
        if not same_output(output, test.stdout, test.tolerance):
            return "fail", f"its output is {output[:80]!r}"
        return "pass", ""


def same_output(output: bytes, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs are equal line by line, blanks and empty lines at the end aside. Words are equal as text, or,
    with a ``tolerance``, as numbers one of which has a point or an exponent."""
    ours, theirs = _words(output.decode("utf-8", "surrogateescape")), _words(expected)
    if not tolerance or [*map(len, ours)] != [*map(len, theirs)]:
        return ours == theirs
    pairs = (pair for lines in zip(ours, theirs, strict=True) for pair in zip(*lines, strict=True))
    return all(one == other or _are_close(one, other, tolerance) for one, other in pairs)


def _are_close(word: str, expected: str, tolerance: float) -> bool:
    whole = word.lstrip("+-").isdigit() and expected.lstrip("+-").isdigit()
    if whole or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    return abs(float(word) - float(expected)) <= tolerance * max(1.0, abs(float(expected))) < math.inf


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]
