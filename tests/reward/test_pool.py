"""Rewards in real worker processes: deadlines, dead workers, memory, noise, shutdown."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo.config import ExactReward, FunctionReward, MathReward
from dapo.errors import RewardError
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.reward.pool import ScoringFailed, WorkerPool, _Worker, _WorkerDied
from dapo.reward.worker import encode
from scoring import rewards_of

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def prompt(answer="4", text="2+2=", **meta):
    return Prompt(0, text, (1,), answer, meta)


def score_all(config, responses, item=None, start=False):
    return rewards_of(make_scorer(config), item or prompt(), responses, start)


def function(name, workers=2, timeout_s=20.0, **args):
    return FunctionReward(
        kind="function", function=f"{FUNCTIONS}:{name}", workers=workers, timeout_s=timeout_s, args=args
    )


def alive(folder, wait_s=2.0):
    """The processes noted in ``folder`` that still live after a moment: the kernel takes its time to kill."""
    pids = [int(file.stem) for file in folder.glob("*.pid")]
    assert pids
    until = time.perf_counter() + wait_s
    while pids and time.perf_counter() < until:
        pids = [pid for pid in pids if _state(pid) != "Z"]
        time.sleep(0.02)
    return pids


def _state(pid):
    """Z: killed (in a container nobody may be there to collect an orphan), or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_busy_loop_among_many_delays_only_itself(tmp_path):  # failures.md 55
    responses = ["fine"] * 200
    responses[3] = "loop"
    started = time.perf_counter()
    rewards = score_all(function("by_name", timeout_s=2, state=str(tmp_path)), responses)
    assert time.perf_counter() - started < 30
    assert rewards[3].error == f"reward function {FUNCTIONS}:by_name: timed out after 2 s"
    assert all(r.value == 1.0 and r.error is None for k, r in enumerate(rewards) if k != 3)
    assert alive(tmp_path) == []


def test_the_event_loop_goes_on_while_workers_work(tmp_path):
    async def run():
        scorer = make_scorer(function("by_name", workers=1, timeout_s=1.5, state=str(tmp_path)))
        call = asyncio.create_task(scorer.score(prompt(), "loop"))
        longest, before = 0.0, time.perf_counter()
        while not call.done():
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        await scorer.close()
        return longest

    assert asyncio.run(run()) < 1


def test_a_killed_worker_is_replaced_and_its_item_retried_once(tmp_path):
    config = function("by_name", workers=1, state=str(tmp_path))
    once, twice, after = score_all(config, ["die once", "die", "fine"])
    assert once.error is None and once.value == 1.0
    assert "two workers died on it, the last one killed by SIGKILL" in twice.error
    assert after.value == 1.0


def test_a_worker_that_died_while_idle_costs_an_item_none_of_its_two_attempts(tmp_path):
    async def run():
        pool = make_scorer(function("by_name", workers=1, state=str(tmp_path)))
        try:
            first = await pool.score(prompt(), "fine")
            (pid,) = [int(file.stem) for file in tmp_path.glob("*.pid")]
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.2)  # until the event loop has heard of it
            return first, await pool.score(prompt(), "die once")
        finally:
            await pool.close()

    assert [(reward.value, reward.error) for reward in asyncio.run(run())] == [(1.0, None)] * 2


@pytest.mark.parametrize(("number", "taken"), [(1, True), (2, False), (None, False)])
def test_a_reply_is_to_the_message_it_was_asked_for(number, taken):
    """Another number is another message's: one sample would get the reward of another."""

    async def run():
        output = asyncio.StreamReader()
        output.feed_data(encode({"number": number, "result": {"value": 1.0}}))
        output.feed_eof()
        drained = asyncio.sleep(0)
        pipe = SimpleNamespace(write=lambda message: None, drain=lambda: drained)
        worker = _Worker(SimpleNamespace(stdin=pipe, stdout=output))
        return await worker.exchange(b"")

    if taken:
        assert asyncio.run(run())["result"] == {"value": 1.0}
    else:
        with pytest.raises(_WorkerDied, match="sent what is no reply to it"):
            asyncio.run(run())


def test_what_user_code_prints_and_reads_does_not_disturb(tmp_path):
    rewards = score_all(function("by_name", workers=1, state=str(tmp_path)), ["print"] * 3)
    assert [r.value for r in rewards] == [1.0] * 3


def test_exceptions_are_failed_scores_with_their_place(tmp_path):
    raised, left = score_all(function("by_name", workers=1, state=str(tmp_path)), ["raise", "exit"])
    assert f"reward function {FUNCTIONS}:by_name raised ValueError: no good ({FUNCTIONS}:" in raised.error
    assert "in by_name)" in raised.error and "SystemExit: bye" in left.error
    assert raised.correct is None


def test_a_worker_has_one_thread_unless_the_user_says_otherwise(monkeypatch):
    """256 workers with a thread for each of 32 cores: the system refused the last ones, in the middle of a run."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [reward.value for reward in score_all(function("threads"), ["OPENBLAS", "OMP"])] == [1.0, 3.0]


def test_a_broken_contract_stops_the_run(tmp_path):
    with pytest.raises(RewardError, match=r"by_name: expected .* got NoneType None"):
        score_all(function("by_name", workers=1, state=str(tmp_path)), ["none"])
    with pytest.raises(RewardError, match="requires the parameter 'temperature'"):
        score_all(function("needs_more", workers=1), ["x"])


def test_functions_get_what_they_ask_for():
    assert [r.value for r in score_all(function("length"), ["abc", ""])] == [3.0, 0.0]
    (reward,) = score_all(function("everything", scale=2), ["r"], prompt(level=3), start=True)
    assert (reward.correct, reward.value, dict(reward.parts)) == (True, 4.0, {"level": 3.0, "scale": 2.0})
    yes, no = score_all(function("slow_but_async", workers=1), ["yes", "no"])
    assert (yes.correct, yes.value, no.correct, no.value) == (True, 1.0, False, -1.0)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("lenght", {}, "did you mean length"),
        ("not_a_function", {}, "not a function"),
        ("length", {"colour": 1}, "colour"),
    ],
)
def test_loading_errors_show_at_start(name, kwargs, said):
    with pytest.raises(RewardError, match=said):
        score_all(function(name, **kwargs), [], start=True)


def test_close_in_the_middle_is_fast_and_leaves_no_process_behind(tmp_path):
    async def run():
        scorer = make_scorer(function("by_name", workers=3, timeout_s=60, state=str(tmp_path)))
        calls = [asyncio.create_task(scorer.score(prompt(), r)) for r in ("loop", "child", "child", "fine")]
        while len(list(tmp_path.glob("*.pid"))) < 5:  # three workers and two children of theirs
            await asyncio.sleep(0.05)
        started = time.perf_counter()
        await scorer.close()
        seconds = time.perf_counter() - started
        rewards = await asyncio.gather(*calls)
        after = await scorer.score(prompt(), "fine")
        return seconds, rewards, after

    seconds, rewards, after = asyncio.run(run())
    assert seconds < 5
    assert all("closed" in r.error for r in [*rewards, after])
    assert alive(tmp_path) == []


def test_a_deadline_kills_the_children_of_the_worker_too(tmp_path):
    (reward,) = score_all(function("by_name", workers=1, timeout_s=1, state=str(tmp_path)), ["child"])
    assert "timed out" in reward.error
    assert len(list(tmp_path.glob("*.pid"))) == 2 and alive(tmp_path) == []


def test_a_deadline_kills_what_left_the_worker_for_a_session_of_its_own(tmp_path):
    (reward,) = score_all(function("by_name", workers=1, timeout_s=2, state=str(tmp_path)), ["daemon"])
    assert "timed out" in reward.error and len(list(tmp_path.glob("*.pid"))) == 2
    assert alive(tmp_path) == []


def test_workers_end_with_their_parent(tmp_path):
    code = f"""
import asyncio, os, sys
sys.path[:0] = {sys.path!r}
from test_pool import function, make_scorer, prompt
async def run():
    scorer = make_scorer(function("by_name", workers=2, timeout_s=60, state={str(tmp_path)!r}))
    calls = [asyncio.create_task(scorer.score(prompt(), r)) for r in ("loop", "fine")]
    await calls[1]
    while len(list(__import__("pathlib").Path({str(tmp_path)!r}).glob("*.pid"))) < 2:
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), 9)
asyncio.run(run())
"""

    async def run():
        process = await asyncio.create_subprocess_exec(os.sys.executable, "-c", code)
        return await process.wait()

    assert asyncio.run(run()) == -9
    assert alive(tmp_path, wait_s=10) == []


def test_a_cancelled_score_does_not_leave_its_reply_to_the_next_one(tmp_path):
    async def run():
        scorer = make_scorer(function("by_name", workers=1, timeout_s=3, state=str(tmp_path)))
        await scorer.score(prompt(), "fine")
        call = asyncio.create_task(scorer.score(prompt(), "loop"))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        try:
            return await scorer.score(prompt(), "fine")
        finally:
            await scorer.close()

    assert asyncio.run(run()).value == 1.0


def test_memory_is_bounded():
    async def run():
        pool = WorkerPool("memory_handler:make_handler", {}, workers=1, timeout_s=20, memory_mb=256)
        try:
            return [await pool.run({"mb": mb}) for mb in (50, 1000, 50)]
        finally:
            await pool.close()

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    try:
        assert asyncio.run(run()) == [{"ok": True}, {"ok": False}, {"ok": True}]
    finally:
        del os.environ["PYTHONPATH"]


def test_a_worker_that_cannot_start_is_an_error_of_its_own():
    async def run():
        pool = WorkerPool("no_such_module:f", {}, workers=1, timeout_s=5)
        try:
            with pytest.raises(ScoringFailed, match="exit status 1"):
                await pool.run({})
            with pytest.raises(ScoringFailed, match="could not be started"):
                await pool.start()
        finally:
            await pool.close()

    asyncio.run(run())


def test_items_must_be_json():
    with pytest.raises(RewardError, match="what JSON can hold"):
        score_all(function("length"), ["x"], prompt(thing=object()))


def test_math_in_workers():  # failures.md 46, 47, 51, 73
    cases = {r"\boxed{7.41\%}": True, r"\boxed{7} \boxed{8}": False, "": False, r"\boxed{9^{9^{9^{9}}}}": False}
    started = time.perf_counter()
    rewards = score_all(MathReward(), list(cases), prompt(r"7.41\%"))
    assert [r.correct for r in rewards] == list(cases.values())
    assert all(r.error is None for r in rewards)
    assert time.perf_counter() - started < 20


def test_references_that_cannot_be_read_are_reported():  # failures.md 43
    async def run():
        scorer = make_scorer(MathReward(workers=1))
        try:
            rows = [prompt(gold) for gold in ("4", r"\frac{1}{", "Tuesday", r"\frac{1}{", "(1, 2)")]
            found = [doubt.position for doubt in await scorer.examine(rows)]
            wrong = await scorer.score(prompt("Tuesday"), r"\boxed{Friday}")
            same = await scorer.score(prompt(r"\frac{1}{"), r"\boxed{1}")
            return found, wrong, same
        finally:
            await scorer.close()

    found, wrong, same = asyncio.run(run())
    assert found == [1, 3]
    assert wrong.correct is False and same.correct is False


def test_exact_needs_no_workers():
    right, wrong = score_all(ExactReward(kind="exact", after="="), ["7*3=4", "7*3"])
    assert (right.correct, wrong.correct, wrong.parts) == (True, False, {"answer_found": 0.0})
    with pytest.raises(RewardError, match="row 1 has no reference answer"):
        score_all(ExactReward(kind="exact"), ["4"], Prompt(0, "p", (1,)))


def test_a_function_that_forks_does_not_shift_rewards_to_other_samples():
    rewards = score_all(function("forks"), [str(i) for i in range(30)])
    assert [r.value for r in rewards if r.error is None] == [float(i) for i, r in enumerate(rewards) if r.error is None]
    assert sum(r.error is None for r in rewards) >= 25


def test_an_exception_that_is_no_ordinary_one_is_a_failed_score():
    (reward,) = score_all(function("rude", workers=1), ["x"])
    assert "no ordinary exception" in reward.error
