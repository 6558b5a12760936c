"""Benchmarks are programs of a folder of their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side's process costs ten seconds of imports."""
    import runner

    monkeypatch.setattr(runner, "_spawn", lambda options, job, files: runner.do_job(str(files["job.json"])) or 0)
