"""Declared and batched reward functions, in this process and in workers (failures.md 71, 72)."""

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest

import dapo
from dapo.config import FunctionReward, MathReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.build import make_scorer
from dapo.reward.function import load_function
from dapo.reward.registry import declaration, named
from scoring import rewards_of_pairs


def prompt(row=0, **meta):
    return Prompt(row, f"text {row}", (), f"answer {row}", meta)


def in_process(function, pairs, timeout_s=10.0):
    return rewards_of_pairs(make_scorer(MathReward(timeout_s=timeout_s), function), pairs, start=True)


@pytest.fixture
def in_workers(tmp_path):
    """Score with the function ``f`` of a file that holds ``code``, in worker processes."""

    def run(code, pairs, workers=1, timeout_s=20.0, **keys):
        path = tmp_path / "rewards.py"
        path.write_text(f"import asyncio, os, time, dapo\n{code}")
        config = FunctionReward(kind="function", function=f"{path}:f", workers=workers, timeout_s=timeout_s, **keys)
        return rewards_of_pairs(make_scorer(config), pairs, start=True)

    return run


# --- declaring ----------------------------------------------------------------------------------------------------


def test_a_declared_function_is_found_by_name_and_stays_a_function():
    @dapo.reward_function
    def plain_of_test(response):
        return float(response)

    @dapo.reward_function(name="by another name", batched=True, responses_per_call=3)
    async def f(responses): ...

    assert plain_of_test("2") == 2.0
    assert named("plain_of_test") is plain_of_test and declaration(plain_of_test).responses_per_call is None
    assert named("by another name") is f and declaration(f).responses_per_call == 3
    assert declaration(dapo.reward_function(batched=True)(lambda responses: responses)).responses_per_call == 64
    assert declaration(len) is None


def test_an_unknown_name_is_answered_with_those_there_are():
    @dapo.reward_function(name="brevity")
    def f(response): ...

    with pytest.raises(RewardError, match=r"reward 'brevty': no function is declared .* there are: .*brevity"):
        named("brevty")


def test_one_name_in_two_modules_is_no_clash_until_it_is_asked_for():
    def declare(module):
        def f(response): ...

        f.__module__ = module
        return dapo.reward_function(name="twin")(f)

    one, other = declare("one"), declare("other")
    assert one is not other
    with pytest.raises(RewardError, match=r"several modules declare it \(one, other\)"):
        named("twin")


def test_two_functions_of_a_file_cannot_share_a_name_but_a_file_may_be_imported_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "twice_of_test.py"
    path.write_text("import dapo\n@dapo.reward_function(name='mine')\ndef f(response): return 1.0\n")
    load_function(f"{path}:mine")
    assert load_function(f"{path}:mine") is named("mine")
    path.write_text(path.read_text() + "@dapo.reward_function(name='mine')\ndef g(response): return 2.0\n")
    with pytest.raises(RewardError, match="declares two functions under the name 'mine', f and g; give one of them"):
        load_function(f"{path}:mine")


WRONG = [
    (lambda: dapo.reward_function(5), "expected a function, got int 5"),
    (lambda: dapo.reward_function(responses_per_call=8), "responses_per_call=8 does nothing without batched=True"),
    (lambda: dapo.reward_function(batched=True, responses_per_call=0), "at least 1, got 0"),
    (lambda: dapo.reward_function(name="a:b"), "without a colon, got 'a:b'"),
    (lambda: dapo.reward_function(len), "cannot be declared"),
]


@pytest.mark.parametrize("wrong, message", WRONG, ids=[message for _, message in WRONG])
def test_wrong_declarations(wrong, message):
    with pytest.raises(RewardError, match=message):
        wrong()


def test_the_decorator_loads_nothing_heavy():
    code = """
import sys, dapo
@dapo.reward_function(batched=True)
def f(responses): return [0.0] * len(responses)
assert not {"numpy", "pydantic", "yaml", "torch", "transformers"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_recipe_names_the_function_or_what_it_is_declared_as(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "declared_of_test.py"
    path.write_text(
        "import dapo\n"
        "def make(k):\n    def f(response): return k\n    return f\n"
        "two = dapo.reward_function(name='second')(make(2))\n"
        "dapo.reward_function(name='hidden in no variable')(make(3))\n"
    )
    assert load_function(f"{path}:two")("") == load_function(f"{path}:second")("") == 2
    assert load_function(f"{path}:hidden in no variable")("") == 3
    assert load_function("declared_of_test:second")("") == 2
    with pytest.raises(RewardError, match=r"has no 'secnd'; did you mean second\?"):
        load_function(f"{path}:secnd")


# --- batches ------------------------------------------------------------------------------------------------------

SEES = """
@dapo.reward_function(batched=True, responses_per_call=4)
def f(prompts, responses, answers, level, scale=1, **meta):
    n = len(responses)
    assert n == len(prompts) == len(answers) == len(level) == len(meta["only"]) <= 4, n
    return [
        {"value": scale * float(r), "correct": p == f"text {r}" and a == f"answer {r}", "level": l, "size": n,
         "none": o is None}
        for p, r, a, l, o in zip(prompts, responses, answers, level, meta["only"])
    ]
"""


def numbered(count):
    return [(prompt(k, level=k, **({} if k % 2 else {"only": "x"})), str(k)) for k in range(count)]


def check_batches(rewards):
    for k, reward in enumerate(rewards):
        assert (reward.correct, reward.value, reward.error) == (True, 3.0 * k, None)
        assert reward.parts["level"] == k and reward.parts["none"] == k % 2
    assert [r.parts["size"] for r in rewards] == [4.0] * 8 + [2.0] * 2


def test_a_batched_function_gets_lists_of_one_length_in_workers(in_workers):
    check_batches(in_workers(SEES, numbered(10), args={"scale": 3}))


def test_a_batched_function_gets_lists_of_one_length_in_process():
    space = {"dapo": dapo}
    exec(SEES.replace("scale=1", "scale=3"), space)
    check_batches(in_process(space["f"], numbered(10)))


def test_async_batched_functions_work_in_both_places(in_workers):
    code = """
@dapo.reward_function(batched=True)
async def f(responses):
    await asyncio.sleep(0.01)
    return tuple(r == "yes" for r in responses)
"""
    pairs = [(prompt(), "yes"), (prompt(), "no")]
    space = {"dapo": dapo, "asyncio": asyncio}
    exec(code, space)
    assert [r.correct for r in in_workers(code, pairs)] == [r.correct for r in in_process(space["f"], pairs)]
    assert [r.value for r in in_process(space["f"], pairs)] == [1.0, -1.0]


def test_a_recipe_can_say_that_a_function_is_batched(in_workers):
    code = "def f(responses): return [len(responses)] * len(responses)"
    assert [r.value for r in in_workers(code, numbered(5), responses_per_call=3)] == [3.0, 3.0, 3.0, 2.0, 2.0]
    declared = "@dapo.reward_function\ndef f(response): return 0.0"
    with pytest.raises(
        RewardError, match=r"reward\.responses_per_call is 3, but it is declared as taking one response"
    ):
        in_workers(declared, numbered(1), responses_per_call=3)


def test_arrays_of_the_right_length_are_lists():
    for made in (np.arange(3.0), np.array([0.0, 1.0, 2.0], dtype=object), (0, np.float32(1), 2.0)):
        function = dapo.reward_function(batched=True)(lambda responses, made=made: made)
        assert [r.value for r in in_process(function, numbered(3))] == [0.0, 1.0, 2.0]


COUNTS = [
    ("[1.0]", r"expected a list of 8 values, one for each response, got list \[1.0\] of length 1"),
    ("[1.0] * 7", "of length 7"),
    ("[1.0] * 9", "of length 9"),
    ("1.0", "expected a list of 8 values, one for each response, got float 1.0"),
    ("None", "got NoneType None; is a `return` missing?"),
    ("'12345678'", "got str '12345678'"),
    ("dict.fromkeys(range(8), 1.0)", "got dict"),
    ("set(range(8))", "got set"),
    ("[1.0] * 7 + [None]", "value 8 of 8: expected a float, a bool, .* got NoneType None"),
    ("[float('nan')] + [0.0] * 7", "value 1 of 8: expected a finite number, got float nan"),
    ("[0.0, float('inf')] + [0.0] * 6", "value 2 of 8: .* got float inf"),
    ("['1'] * 8", "value 1 of 8: .* got str '1'"),
    ("[{'score': 1}] * 8", "value 1 of 8: the dict it returned needs the key"),
    ("[[1.0]] * 8", r"value 1 of 8: .* got list \[1.0\]"),
]


@pytest.mark.parametrize("made, message", COUNTS, ids=[made for made, _ in COUNTS])
def test_a_broken_contract_names_function_expected_and_got(made, message):
    @dapo.reward_function(name="counts", batched=True)
    def f(responses):
        return eval(made)

    with pytest.raises(RewardError, match=message) as caught:
        in_process(f, numbered(8))
    assert str(caught.value).startswith("reward function counts")


def test_a_broken_contract_in_a_worker_stops_the_run(in_workers):
    code = "@dapo.reward_function(batched=True)\ndef f(responses): return [1.0]"
    with pytest.raises(RewardError, match=r"rewards\.py:f: expected a list of 8 values.* of length 1"):
        in_workers(code, numbered(8))


def test_a_function_that_takes_other_parameters_is_told_what_there_is():
    with pytest.raises(
        RewardError, match=r"requires the parameter 'response', but is called with level, only, prompts, resp"
    ):
        in_process(dapo.reward_function(name="x1", batched=True)(lambda response: [0.0]), numbered(1))
    with pytest.raises(RewardError, match=r"'responses'.* declare it with @dapo\.reward_function\(batched=True\)"):
        in_process(lambda responses: 0.0, numbered(1))
    with pytest.raises(RewardError, match=r"got list \[0\.0\]; it is called for one response .* declared as batched"):
        in_process(lambda response: [0.0], numbered(1))


# --- one bad item -------------------------------------------------------------------------------------------------

BAD_ITEM = """
@dapo.reward_function(batched=True, responses_per_call=8)
def f(responses):
    for response in responses:
        if response == "hang":
            time.sleep(60)
        if response == "die":
            os._exit(3)
        if response == "raise":
            raise ValueError("this one")
    return [1.0] * len(responses)
"""


@pytest.mark.parametrize(
    "response, error",
    [("hang", "timed out after 1 s"), ("die", "two workers died on it"), ("raise", "raised ValueError: this one")],
)
def test_an_item_that_breaks_its_batch_costs_only_itself_in_workers(in_workers, response, error):
    pairs = [(prompt(k), response if k == 5 else "fine") for k in range(12)]
    rewards = in_workers(BAD_ITEM, pairs, workers=2, timeout_s=1)
    assert error in rewards[5].error and rewards[5].error.startswith("reward function ")
    assert [(r.value, r.error) for k, r in enumerate(rewards) if k != 5] == [(1.0, None)] * 11


def test_an_item_that_breaks_its_batch_costs_only_itself_in_process():
    running, at_once = [], []

    @dapo.reward_function(name="fragile", batched=True, responses_per_call=8)
    def f(responses):
        running.append(1)
        at_once.append(len(running))
        try:
            time.sleep(1.5 if "hang" in responses else 0.005)
            if "raise" in responses:
                raise ValueError("this one")
            return [1.0] * len(responses)
        finally:
            running.pop()

    responses = ["fine"] * 12
    responses[2], responses[9] = "hang", "raise"
    rewards = in_process(f, [(prompt(k), r) for k, r in enumerate(responses)], timeout_s=0.3)
    assert rewards[2].error == "reward function fragile: timed out after 0.3 s"
    assert "fragile raised ValueError: this one" in rewards[9].error
    assert [(r.value, r.error) for k, r in enumerate(rewards) if k not in (2, 9)] == [(1.0, None)] * 10
    assert max(at_once) <= 3  # itself and the two calls that hang: it need not be thread-safe


def test_a_failed_score_that_the_function_reports_itself_is_no_reason_to_call_it_again():
    calls = []

    @dapo.reward_function(name="honest", batched=True)
    def f(responses):
        calls.append(len(responses))
        return [Reward(None, 0.0, error="no judge") if r == "1" else 2.0 for r in responses]

    rewards = in_process(f, numbered(3))
    assert calls == [3]
    assert [(r.value, r.error) for r in rewards] == [(2.0, None), (0.0, "no judge"), (2.0, None)]


def test_closing_ends_those_that_wait():
    async def run():
        @dapo.reward_function(name="slow", batched=True, responses_per_call=1)
        def f(responses):
            time.sleep(0.2)
            return [1.0]

        scorer = make_scorer(MathReward(), f)
        waiting = [asyncio.create_task(scorer.score(prompt(k), "")) for k in range(3)]
        await asyncio.sleep(0.05)
        await scorer.close()
        async with asyncio.timeout(5):
            return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in asyncio.run(run()))


ASYNC = """
import asyncio

running, most = 0, 0


async def slow(response):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.2)
    running -= 1
    if response == "7":
        raise ValueError("seven")
    return {"value": float(response), "most": most}
"""


def test_an_async_function_in_a_worker_is_awaited_many_calls_at_once(tmp_path):
    (tmp_path / "slow.py").write_text(ASYNC)
    config = FunctionReward(kind="function", function=f"{tmp_path / 'slow.py'}:slow", workers=1)

    async def run():
        scorer = make_scorer(config)
        try:
            await scorer.start()
            return await asyncio.gather(*(scorer.score(Prompt(0, "p", (1,)), str(k)) for k in range(30)))
        finally:
            await scorer.close()

    found = asyncio.run(run())
    assert [r.value for r in found] == [0.0 if k == 7 else float(k) for k in range(30)]
    assert "seven" in found[7].error and all(r.error is None for k, r in enumerate(found) if k != 7)
    assert max(r.parts["most"] for r in found if r.error is None) > 10
