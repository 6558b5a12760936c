"""The pool with any mixture of good and bad items: one outcome for each, in its place, and nothing left over."""

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.reward.pool import ScoringFailed, WorkerPool

TIMEOUT_S = 1.0
GOOD = ["answer", "fork", "child"]
BAD = {"sleep": "timed out after 1 s", "spin": "timed out after 1 s", "die": "killed by SIGKILL", "exit": "status 3"}
MIXTURES = st.tuples(
    st.lists(st.sampled_from(GOOD), min_size=1, max_size=12), st.lists(st.sampled_from(sorted(BAD)), max_size=3)
).flatmap(lambda both: st.permutations(both[0] + both[1]))


def run_all(does, workers, state, timeout_s=TIMEOUT_S):
    """What became of each item: its result, or why there is none."""

    async def run():
        pool = WorkerPool(
            "misbehaving_handler:make_handler", {"state": str(state)}, workers=workers, timeout_s=timeout_s
        )
        try:
            items = [{"does": what, "number": number} for number, what in enumerate(does)]
            return await asyncio.gather(*map(pool.run, items), return_exceptions=True)
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def handlers_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def alive(state, wait_s=5.0):
    """The processes noted in ``state`` that live on. One that waits to be collected is dead."""
    pids = {int(file.stem) for file in state.glob("*.pid")}
    until = time.monotonic() + wait_s
    while pids and time.monotonic() < until:
        pids = {pid for pid in pids if is_running(pid)}
        time.sleep(0.02)
    return pids


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(does=MIXTURES, workers=st.integers(1, 4))
def test_every_item_has_one_outcome_and_it_is_its_own(does, workers):
    with tempfile.TemporaryDirectory() as state:
        outcomes = run_all(does, workers, Path(state))
        left = alive(Path(state))
    assert left == set()
    assert len(outcomes) == len(does)
    for number, (what, outcome) in enumerate(zip(does, outcomes, strict=True)):
        if what in BAD:
            assert isinstance(outcome, ScoringFailed) and BAD[what] in str(outcome)
        else:
            assert outcome == {"number": number}


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 300), workers=st.integers(1, 3))
def test_many_quick_items_keep_their_order(count, workers):
    with tempfile.TemporaryDirectory() as state:
        outcomes = run_all(["answer"] * count, workers, Path(state), timeout_s=20)
    assert outcomes == [{"number": number} for number in range(count)]


def test_a_dead_worker_costs_its_own_item_only(tmp_path):
    outcomes = run_all(["answer"] * 20 + ["die"] + ["answer"] * 20, 2, tmp_path, timeout_s=20)
    failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
    assert failed == [20] and "two workers died on it" in str(outcomes[20])
    # the item was tried twice, so two workers died and were replaced
    assert len(list(tmp_path.glob("*.pid"))) >= 3


def test_a_hang_among_512_delays_only_itself(tmp_path):  # failures.md 55
    started = time.monotonic()
    outcomes = run_all(["spin"] + ["answer"] * 511, 2, tmp_path)
    assert time.monotonic() - started < 30
    assert [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Exception)] == [0]
    assert alive(tmp_path) == set() and os.getpid() not in {int(file.stem) for file in tmp_path.glob("*.pid")}
