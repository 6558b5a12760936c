"""New weights from a learner's GPU to that of an engine on Ray, by NCCL and through the object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_ray_run import assert_same, train

import run_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("ray_here"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
APART: dict[str, Any] = {"runtime.kind": "ray", "runtime.placement": "disaggregated", **cases.ON_GPU}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "model"
    cases.wide_model().save_pretrained(folder)
    cases.TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.timeout(900)
def test_weights_go_from_gpu_to_gpu_and_are_those_that_go_through_the_store(wide: Path, tmp_path: Path) -> None:
    steps: dict[str, list[dict[str, Any]]] = {}
    for sync in ("group", "objects"):
        heard = train(tmp_path / sync, wide, APART | {"runtime.sync": sync})
        assert not [text for text in heard.warnings if text.startswith("weights:")]
        steps[sync] = cases.steps_of(tmp_path / sync)
        print(f"{sync}: {[round(step['time/sync'], 3) for step in steps[sync]]} s")
    assert_same(steps["group"], steps["objects"])


@pytest.mark.timeout(900)
def test_an_engine_that_is_killed_between_weights_by_nccl_is_replaced(wide: Path, tmp_path: Path) -> None:
    heard = train(tmp_path / "run", wide, APART | {"runtime.sync": "group"}, ("engine 0",))
    assert any("it is replaced" in text for text in heard.warnings)
    assert len(cases.steps_of(tmp_path / "run")) == 4
