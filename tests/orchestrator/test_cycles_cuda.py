"""Whole runs on a GPU: a hundred cycles hold no more memory and compile nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from run_cases import ON_GPU, Recorder, run, steps_of, wide_model

pytestmark = pytest.mark.gpu

CYCLES, WARM_UP = 100, 30


def test_a_hundred_cycles_hold_no_more_memory_and_compile_nothing(tmp_path: Path) -> None:
    held: list[tuple[int, int]] = []
    compiled: list[int] = []

    def note(step: int) -> None:
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        compiled.append(counters["stats"]["unique_graphs"])

    changes = ON_GPU | {"training.steps": CYCLES, "training.learning_rate": 1e-6, "runtime.deterministic": False}
    run(tmp_path, changes | {"run.save_every": 0}, Recorder(note), model=wide_model())
    assert len(held) == CYCLES and sum(entry["updates"] for entry in steps_of(tmp_path)) >= CYCLES
    print(f"allocated, reserved: {held[WARM_UP]} then {held[-1]}; graphs {compiled[WARM_UP]} then {compiled[-1]}")
    assert compiled[-1] == compiled[WARM_UP] > 0
    for early, late in zip(held[WARM_UP], map(max, zip(*held[WARM_UP:], strict=True)), strict=True):
        assert late <= 1.02 * early
