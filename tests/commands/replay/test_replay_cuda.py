"""On a GPU: a deterministic run is the same twice, and its steps come out to the bit when they are made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from replay_cases import make_run

from dapo.commands.replay.replay import replay
from run_cases import ON_GPU, steps_of, wide_model, without_times

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products, before there is a handle
pytestmark = pytest.mark.gpu


def test_a_deterministic_run_is_the_same_twice_and_its_steps_can_be_made_again(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / name, ON_GPU, model=wide_model()) for name in ("first", "second")]
    one, other = ([without_times(entry) for entry in steps_of(root)] for root in roots)
    assert one == other and any(entry["loss"] for entry in one)

    found = replay(roots[0], 2)
    assert (found.differences, found.missing) == ([], [])
    assert all(update["recomputed"] == update["recorded"] for update in found.updates)
