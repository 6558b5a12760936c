"""How long the page waits for an answer over a long run."""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path

import pytest

from page_run import served

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
pytest.importorskip("duckdb")

LIMIT = 0.3
"""Seconds, on two cores."""
REQUESTS = (
    "runs?",
    "metrics?run=big",
    "curves?run=big&metric=accuracy&metric=entropy&metric=reward/mean&metric=grad_norm&metric=response_length/mean",
    "ablation?run=big",
    "config?run=big",
    "groups?run=big",
    "groups?run=big&status=kept&correct=true&order=hardest",
    "groups?run=big&order=gap",
    "groups?run=big&order=longest&longer_than=100&offset=5000",
    "group?run=big&step=1000&draw=64000",
    "sampling?run=big",
    "hacking?run=big",
    "time?run=big",
    "alarms?run=big",
    "evaluation?run=big",
)


@pytest.mark.nightly
def test_every_view_is_fast_over_a_million_samples(tmp_path: Path) -> None:
    from synthetic_run import make_run

    make_run(tmp_path / "big")
    seconds: dict[str, float] = {}
    with served(tmp_path) as address:
        for request in REQUESTS:
            took = []
            for _ in range(5):
                begun = time.perf_counter()
                with urllib.request.urlopen(f"{address}/api/{request}", timeout=60) as answer:
                    answer.read()
                took.append(time.perf_counter() - begun)
            seconds[request] = sorted(took)[2]
    print(*(f"{1000 * value:6.0f} ms  {request}" for request, value in seconds.items()), sep="\n")
    assert {request: value for request, value in seconds.items() if value > LIMIT} == {}
