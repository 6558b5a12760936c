"""What was skipped, said at the end of a session; in CI a skip that nobody expects there fails it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

EXPECTED = (
    "needs a CUDA device",
    "needs a machine without a GPU",
    "this system gives fresh memory in large pages",
    "SmolLM2-135M-Instruct is not in .*",
)
"""Reasons for which a test may be skipped in CI, as patterns. Everything else that a test needs is installed there."""


class SkipReport:
    """A plugin of one session."""

    def __init__(self, fails: bool) -> None:
        """
        Args:
            fails: an unexpected skip fails the session, as in CI.
        """
        self._fails = fails
        self._skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    def _failing(self) -> list[str]:
        odd = [reason for reason in self._skipped if not any(re.fullmatch(known, reason) for known in EXPECTED)]
        return odd if self._fails else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist, whose controller hears of all
        if self._failing() and not is_worker and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for reason, count in sorted(self._skipped.items()):
            fails = "; CI does not expect this, so it fails" if reason in self._failing() else ""
            terminalreporter.write_line(f"not tested here: {count} skipped: {reason}{fails}")
