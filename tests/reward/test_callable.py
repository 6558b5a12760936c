"""Functions passed from Python, and loading by name."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from dapo.config import MathReward
from dapo.errors import RewardError
from dapo.records import Prompt
from dapo.reward.build import make_scorer, needs_answer
from dapo.reward.function import describe, load_function
from dapo.reward.function_scorers import CallableScorer
from scoring import rewards_of

PROMPT = Prompt(3, "2+2=", (1,), "4", {"level": 2})


def score(function, *responses, timeout_s=10.0):
    return rewards_of(make_scorer(MathReward(timeout_s=timeout_s), function), PROMPT, responses)


def test_sync_and_async_functions_get_what_they_ask_for():
    async def later(prompt, response, answer, level):
        await asyncio.sleep(0)
        return {"value": level, "correct": response == answer, "n": len(prompt)}

    (reward,) = score(lambda response: len(response) / 2, "abc")
    assert (reward.correct, reward.value) == (None, 1.5)
    (reward,) = score(later, "4")
    assert (reward.correct, reward.value, reward.parts) == (True, 2.0, {"n": 4.0})
    (reward,) = score(lambda **all: sorted(all) == ["answer", "level", "prompt", "response"], "")
    assert reward.correct


def test_a_sync_function_is_called_again_and_again_by_one_thread_at_once():
    running, thread = [], threading.local()

    def careful(response):
        running.append(1)
        time.sleep(0.001)
        thread.calls = getattr(thread, "calls", 0) + 1
        return {"correct": running.pop() == 1 and not running, "value": thread.calls}

    found = score(careful, *["x"] * 50)
    assert [r.correct for r in found] == [True] * 50 and max(r.value for r in found) >= 10


def test_exceptions_and_time_outs_are_failed_scores():
    def f(response):
        if response == "hang":
            time.sleep(3)
        if response == "exit":
            sys.exit(1)
        if response == "timeout":
            raise TimeoutError("mine")
        raise KeyError("oops")

    hang, exited, own, raised = score(f, "hang", "exit", "timeout", "x", timeout_s=0.3)
    assert "timed out after 0.3 s" in hang.error
    assert "SystemExit" in exited.error
    assert "TimeoutError: mine" in own.error
    assert "raised KeyError: 'oops' (" in raised.error and "test_callable.py:" in raised.error

    async def g(response):
        await asyncio.sleep(3)

    assert "timed out after 0.2 s" in score(g, "x", timeout_s=0.2)[0].error


def test_too_many_hanging_calls_stop_the_run():
    with pytest.raises(RewardError, match=r"16 calls hang .*reward\.kind=function"):
        score(lambda response: time.sleep(60), *["x"] * 17, timeout_s=0.05)


def test_a_thread_that_is_at_a_call_ends_after_it_when_its_scorer_is_closed():
    begun, may_end, threads = threading.Event(), threading.Event(), []

    def slow(response):
        threads.append(threading.current_thread())
        begun.set()
        may_end.wait(60)

    async def leave():
        scorer = CallableScorer(slow)
        task = asyncio.create_task(scorer.score(PROMPT, "x"))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await scorer.close()
        may_end.set()
        await asyncio.to_thread(threads[0].join, 5)

    asyncio.run(leave())
    assert not threads[0].is_alive()


def test_a_hanging_function_does_not_keep_the_program_alive():
    code = """
import asyncio, time
from dapo.records import Prompt
from dapo.reward.function_scorers import CallableScorer
scorer = CallableScorer(lambda response: time.sleep(60), 0.1)
print(asyncio.run(scorer.score(Prompt(0, "", ()), "")).error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "timed out" in done.stdout and done.returncode == 0


def test_broken_contracts():
    for result in (None, "1", float("nan"), [1.0] * 8):
        with pytest.raises(RewardError, match=r"reward function .*<lambda>: expected"):
            score(lambda response, r=result: r, "x")
    with pytest.raises(RewardError, match="requires the parameter 'completion'"):
        score(lambda completion: 1.0, "x")
    with pytest.raises(RewardError, match=r"'completions', but is called with .* docs/coming-from.md"):  # of TRL
        score(lambda completions, **rest: [1.0], "x")
    with pytest.raises(RewardError, match="expected a function, got int 5"):
        CallableScorer(5)


def write(tmp_path, text, name="mine.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_load_from_a_file_with_helpers_beside_it(tmp_path, monkeypatch):
    write(tmp_path, "BONUS = 3", "reward_helper_of_test.py")
    path = write(tmp_path, "from reward_helper_of_test import BONUS\ndef f(response): return BONUS")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_function(f"{path}:f")(response="") == 3
    assert load_function("os.path:basename")("a/b") == "b"


LOADING = [
    ("mine.py", "expected package.module:name or path/file.py:name"),
    ("{}/none.py:f", "no such file: .*none.py"),
    ("{}/mine.py:rewrad", r"has no 'rewrad'; did you mean reward\?"),
    ("{}/mine.py:zzz", "it has reward"),
    ("{}/mine.py:LIMIT", "'LIMIT' is a int, not a function"),
    ("{}/broken.py:f", r"importing .*broken.py failed: ZeroDivisionError: .*broken.py:2 in <module>"),
    ("{}/syntax.py:f", r"SyntaxError: .*syntax.py:1"),
    ("{}/needs.py:f", r"importing .*needs.py failed: ModuleNotFoundError: No module named 'not_installed_at_all'"),
    ("no_such_package.x:f", "no module named 'no_such_package'"),
    ("os.path:basenam", r"did you mean basename\?"),
]


@pytest.mark.parametrize("spec, message", LOADING, ids=[spec for spec, _ in LOADING])
def test_loading_errors(tmp_path, spec, message, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "LIMIT = 5\ndef reward(response): return 0.0")
    write(tmp_path, "x = 1\n1 / 0\n", "broken.py")
    write(tmp_path, "def f(:", "syntax.py")
    write(tmp_path, "import not_installed_at_all", "needs.py")
    with pytest.raises(RewardError, match=message):
        load_function(spec.format(tmp_path))


def test_who_needs_an_answer():
    from dapo.config import ExactReward, FunctionReward

    assert needs_answer(MathReward()) and needs_answer(ExactReward(kind="exact"))
    assert not needs_answer(FunctionReward(kind="function", function="a:b"))


def test_reward_modules_load_no_tensor_library():
    code = """
import sys
import dapo.reward.build, dapo.reward.worker, dapo.reward.math.score, dapo.reward.function
assert not {"torch", "transformers"} & set(sys.modules)
import dapo.data.source
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cancellation_that_comes_out_of_the_function_is_a_failed_score():
    """An inner task that was cancelled must neither hang the run nor end it."""

    async def sometimes(response):
        if response == "cancel":
            raise asyncio.CancelledError
        return True

    good, bad, again = score(sometimes, "a", "cancel", "b")
    assert good.correct and again.correct
    assert "CancelledError" in bad.error


def test_an_async_function_that_ignores_its_cancellation_is_left_behind_in_time():
    ignored = []

    async def stubborn(response):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ignored.append(response)
            await asyncio.sleep(10)
        return True

    (hang,) = score(stubborn, "x", timeout_s=0.2)
    assert "timed out after 0.2 s" in hang.error and ignored == ["x"]


def test_who_is_cancelled_cancels_an_async_function():
    ended = []

    async def long(response):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(response)

    async def run():
        scorer = CallableScorer(long)
        call = asyncio.create_task(scorer.score(PROMPT, "x"))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait({call})
        await asyncio.sleep(0.01)
        assert call.cancelled() and ended == ["x"]

    asyncio.run(run())


def test_an_error_of_megabytes_is_told_in_a_line():
    """It goes into every sample's line and onto the terminal."""
    assert len(describe(ValueError("k" * 5_000_000))) <= 500
