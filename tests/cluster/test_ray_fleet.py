"""Engines in processes of Ray: what becomes of samples when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dapo.data.template import PromptTemplate
from dapo.model.loading import embedding_rows
from dapo.rollout.engine import Request, Sampling
from ray_cases import fleet_of
from run_cases import TOKENIZER, config_for

REQUESTS = [Request(n, (3 + n, 4), tuple(range(100 * n, 100 * n + 50)), Sampling(1.0, 12)) for n in range(8)]
LONG = {"rollout.max_response_length": 200, "rollout.max_concurrent_samples": 8, "training.tokens_per_micro_batch": 512}


def as_rows(samples: Iterable[Any]) -> dict[tuple[int, int], list[int]]:
    return {(s.request_id, s.index): s.token_ids.tolist() for s in samples}


@pytest.mark.usefixtures("ray_here")
def test_samples_of_an_engine_that_is_killed_are_asked_for_again_and_it_is_replaced(tiny: Path, tmp_path: Path) -> None:
    """Each sample comes once, with the tokens of its seed. One that is cancelled meanwhile is not begun again."""
    config, told = config_for(tmp_path, {"model.path": str(tiny), **LONG}), list[str]()
    template = PromptTemplate(config.data, TOKENIZER, embedding_rows(str(tiny)))

    async def work() -> None:
        fleet = await fleet_of(config, template, (1,), tell=told.append)
        undisturbed = as_rows([s async for s in fleet.generate(REQUESTS)])
        victim = int(re.search(r"process (\d+)", fleet.about)[1])  # type: ignore[index]
        gone = Request(99, (5, 6), tuple(range(50)), Sampling(1.0, 200))
        found = []
        async for sample in fleet.generate([*REQUESTS, gone]):
            found.append(sample)
            if len(found) == 20:
                os.kill(victim, signal.SIGKILL)
                await fleet.cancel({gone.id})
        mine = [sample for sample in found if sample.request_id != gone.id]
        assert len(mine) == len(undisturbed) == 400 and as_rows(mine) == undisturbed
        assert (fleet.replaced, len(told)) == (1, 1) and 0 < fleet.asked_again < 400
        assert re.match(rf"engine 0 \(process {victim} on .*\) ended: .*; its {fleet.asked_again} unfinished", told[0])
        while str(victim) in fleet.about or not all(seat.ready for seat in fleet._seats):
            await asyncio.sleep(0.05)
        again = as_rows([s async for s in fleet.generate(REQUESTS)])
        assert again == undisturbed and fleet.replaced == 1
        await fleet.close()

    asyncio.run(work())
