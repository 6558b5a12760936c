"""Many versions in a row: memory stays flat on both sides, and nothing that older weights made is used again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.records import Sample
from dapo.rollout.engine import Request, Sampling
from helpers import random_model
from vllm_subject import SHAPE, Vllm, started

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
LONG = tuple(2 + i % 190 for i in range(290))  # more than two blocks of vLLM's cache on a CPU


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    """Weights of 4 MB, so that what is kept of each version is seen."""
    model = random_model(
        "qwen2", **(SHAPE | {"vocab_size": 8003, "max_position_embeddings": 1024}), tie_word_embeddings=True
    )
    yield from started(model, longest=512)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_200_syncs_leave_memory_flat(vllm: Vllm) -> None:
    seen = []
    for number in range(200):
        vllm.change(1e-3)
        vllm.push()
        if number % 20 == 0:
            assert vllm.mismatch() < 1e-4
        seen.append((resident(), vllm.call("dapo_memory")))
    grown = np.median(seen[-30:], 0) - np.median(seen[30:60], 0)
    assert (grown < 16 * 2**20).all(), f"bytes more in 140 versions, of the learner and of vLLM: {grown}"


def test_a_prefix_that_older_weights_made_is_not_used(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(n, LONG, (n,), Sampling(1.0, 4)) for n in range(2)]
    vllm.push()
    for _ in range(3):
        assert vllm.mismatch(requests) < 1e-4  # the second has its prefix from the first
        vllm.change(0.1)
        vllm.push()
    assert vllm.mismatch(requests) < 1e-4
    vllm.change(0.1)
    ask = vllm.engine._ask

    async def without_reset(method: str, *args: Any) -> Any:
        return None if method == "reset_prefix_cache_async" else await ask(method, *args)

    monkeypatch.setattr(vllm.engine, "_ask", without_reset)
    vllm.push()
    monkeypatch.undo()
    assert vllm.mismatch(requests) > 1e-2, "this test would not have seen it"
    vllm.push()


def test_samples_in_flight_go_on_by_the_new_weights_alone(vllm: Vllm) -> None:
    """Their keys and values are computed anew, as are those of a prefix that they share."""

    async def over_a_sync() -> Any:
        requests = [Request(n, LONG, (n,), Sampling(1.0, 200)) for n in range(2)]
        found, begun = [], set()
        async for event in vllm.engine.stream(requests):
            if isinstance(event, Sample):
                found.append((requests[event.request_id], event))
            begun.add(event.request_id)
            if len(begun) == 2 and vllm.engine.version == before:
                vllm.change(0.1)
                await vllm.give()
        return found

    before = vllm.engine.version
    for request, sample in vllm.runner.run(over_a_sync()):
        new = np.asarray(sample.versions) == before + 1
        assert 0 < new.sum() < len(new) and not new[0]
        ids = torch.tensor([[*request.prompt_ids, *sample.token_ids.tolist()]])
        assert float(np.abs(vllm.logprobs(ids, len(LONG)) - sample.logprobs)[new].max()) < 1e-4
