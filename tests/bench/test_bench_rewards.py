"""The benchmark of rewards runs."""

from __future__ import annotations

import re

import pytest

import rewards


def test_programs_are_scored_and_bare_starts_are_measured_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    rewards.main(["code", "--seconds", "0.2", "--workers", "1"])  # ends with an error if a score is wrong
    assert re.match(r"scores \d+/s, bare starts \d+/s and \d+/s, load", capsys.readouterr().out)
