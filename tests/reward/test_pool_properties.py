"""The pool with any mixture of good and bad items: one outcome for each, in its place, and nothing left over."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_pool import alive

from dapo.reward.pool import ScoringFailed, WorkerPool

GOOD = ["answer", "fork", "child"]
BAD = {"sleep": "timed out after 1 s", "spin": "timed out after 1 s", "die": "killed by SIGKILL", "exit": "status 3"}
MIXTURES = st.tuples(
    st.lists(st.sampled_from(GOOD), min_size=1, max_size=12), st.lists(st.sampled_from(sorted(BAD)), max_size=3)
).flatmap(lambda both: st.permutations(both[0] + both[1]))


def run_all(does, workers, state):
    """What became of each item: its result, or why there is none."""

    async def run():
        pool = WorkerPool("misbehaving_handler:make_handler", {"state": str(state)}, workers=workers, timeout_s=1.0)
        try:
            items = [{"does": what, "number": number} for number, what in enumerate(does)]
            return await asyncio.gather(*map(pool.run, items), return_exceptions=True)
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def handlers_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(does=MIXTURES, workers=st.integers(1, 4))
def test_every_item_has_one_outcome_and_it_is_its_own(does, workers):
    with tempfile.TemporaryDirectory() as state:
        outcomes = run_all(does, workers, Path(state))
        left = alive(Path(state), wait_s=5.0)
    assert left == []
    assert len(outcomes) == len(does)
    for number, (what, outcome) in enumerate(zip(does, outcomes, strict=True)):
        if what in BAD:
            assert isinstance(outcome, ScoringFailed) and BAD[what] in str(outcome)
        else:
            assert outcome == {"number": number}
