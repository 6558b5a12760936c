"""The counts of a step's draws."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dapo.config import build_config, nested
from dapo.orchestrator.dynamic_sampling import DynamicSampling
from dapo.orchestrator.pending_group import AcceptanceRate, PendingGroup
from dapo.records import Prompt, Reward, Sample
from loop_fakes import SETTINGS


@pytest.mark.parametrize("seed", range(6))
def test_counts_that_change_with_the_draws_are_those_of_all_draws(seed: int) -> None:
    """Draws are added and finish in any order, some with tokens that are too old; the version moves on."""
    rng = random.Random(seed)
    settings = SETTINGS | {"rollout.max_staleness": 1, "runtime.deterministic": False, "training.steps": 9}
    config = build_config(nested(settings | {"algorithm.filter_groups.max_num_gen_batches": rng.choice([1, 3])}))
    ledger, open_ = DynamicSampling(config, 0, 4, 3, AcceptanceRate()), []
    for number in range(60):
        if rng.random() < 0.5 or not open_:
            open_.append(ledger.add(PendingGroup(number, Prompt(number, "p", (1,)))))
        elif rng.random() < 0.9:
            draw = open_.pop(rng.randrange(len(open_)))
            versions = np.full(2, rng.randrange(5), np.int32)
            for index in range(2):
                right = Reward(verdict := rng.random() < 0.5, float(verdict))
                arrays = (np.zeros(2, np.int32), np.zeros(2, np.float32), versions)
                draw.scored[index] = Sample(draw.number, index, *arrays, "stop", reward=right)
            ledger.finish(draw)
        else:
            ledger.begin(0, 4, ledger.version + rng.randrange(2))
        outcomes, draws = ledger._outcomes(), ledger._draws
        assert ledger.pending == outcomes.count(None) and ledger.drawn == len(draws)
        assert ledger.kept == min(outcomes.count(True), 4) and ledger.complete == ledger.admission().complete
        assert ledger.decided == all(d.verdict is not None for d in ledger.usable)
        assert ledger._counts["charged"] == sum(not ledger._too_old(d) for d in draws)
        assert ledger._counts["finished"] == sum(d.verdict is not None for d in draws)
