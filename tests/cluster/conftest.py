"""One Ray for the tests of a process, which runs join; and a model in a folder, as its workers load it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import run_cases


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    import ray

    from dapo.orchestrator.runtime.ray.cluster import quiet

    quiet()
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    run_cases.tiny_model().save_pretrained(folder)
    run_cases.TOKENIZER.save_pretrained(folder)
    return folder
