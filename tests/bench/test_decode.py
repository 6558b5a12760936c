"""The benchmark of our decoder alone, on a CPU and tiny."""

from __future__ import annotations

import pytest

import decode
from dapo.rollout.native.paged import build, runner
from dapo.rollout.native.paged.joined import join_products

TINY = ["--shape", "tiny", "--device", "cpu", "--concurrent", "8", "--context", "60", "--stretches", "2"]


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (build, "join_products"),
        (build, "COMPILE_ENDS"),
        (build, "STRETCH"),
        (runner, "LONG_STRETCH"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


def test_rollouts_and_steady_decoding_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--rollouts",
        "2",
        "--prompts",
        "3",
        "--samples",
        "2",
        "--limit",
        "40",
        "--rows",
        "8",
        "4",
        "--stretch",
        "9",
    ]
    found = decode.main([*TINY, *sizes, "--without", "joined", "ahead"])
    assert len(found["rollouts"]) == 2 and min(found["rollouts"]) > 0
    assert list(found["steady"]) == [8, 4] and min(of["whole"] for of in found["steady"].values()) > 0
    said = capsys.readouterr().out
    assert "rollout 2: 240 tokens" in said and "    4 rows at 60: " in said
    assert build.join_products is not join_products and runner.LONG_STRETCH > 1000 and build.COMPILE_ENDS
