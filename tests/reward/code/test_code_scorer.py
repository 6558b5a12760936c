import asyncio
import shutil
from pathlib import Path

import pytest

from dapo.config import CodeReward
from dapo.errors import RewardError
from dapo.records import Prompt
from dapo.reward.code import score as quality
from dapo.reward.code.program import Usage
from dapo.reward.code.score import efficiency, style
from dapo.reward.code.scorer import CodeScorer
from scoring import rewards_of

ROW = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 0", "assert add(5, 0) == 5"]}
ROW |= {"entry_point": "add", "solution": "def add(a, b):\n    return a + b\n"}
GOOD = "```python\ndef add(a, b):\n    return a + b\n```"
HALF = "```python\ndef add(a, b):\n    return a * b\n```"  # right for 2, 2 and 0, 0


def prompt(row=0, **meta):
    return Prompt(row, "", (), None, {**ROW, **meta})


def score(responses, row=None, **config):
    """The rewards of responses to one row."""
    return rewards_of(CodeScorer(CodeReward(kind="code", **config)), row or prompt(), responses, start=True)


def examine(*metas, **config):
    async def run():
        scorer = CodeScorer(CodeReward(kind="code", **config))
        try:
            return await scorer.examine([Prompt(k, "", (), None, meta) for k, meta in enumerate(metas)])
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_all_or_nothing_and_the_share_of_tests():
    good, half, none, broken = score([GOOD, HALF, "I do not know.", "```python\ndef add(:\n```"], parts=["compiles"])
    assert (good.correct, good.value) == (True, 1.0)
    assert good.parts == {"answer_found": 1.0, "tests_passed": 1.0, "compiles": 1.0}
    assert good.extracted == "def add(a, b):\n    return a + b\n"
    assert (half.correct, half.value, half.parts["tests_passed"]) == (False, -1.0, 0.5)
    assert (none.correct, none.value, none.extracted) == (False, -1.0, None)
    assert none.parts == {"answer_found": 0.0, "tests_passed": 0.0, "compiles": 0.0}
    assert (broken.correct, broken.parts["compiles"], broken.parts["answer_found"]) == (False, 0.0, 1.0)


def test_the_share_of_tests_as_the_value():
    good, half, none = score([GOOD, HALF, ""], score="fraction")
    assert (good.value, half.value, none.value) == (1.0, 0.0, -1.0)
    assert (good.correct, half.correct, none.correct) == (True, False, False)


def test_an_endless_program_is_wrong_and_delays_only_itself():
    loop = "```python\ndef add(a, b):\n    while True:\n        pass\n```"
    rewards = score([GOOD, loop, GOOD, HALF, GOOD], test_timeout_s=1.0)
    assert [reward.correct for reward in rewards] == [True, False, True, False, True]
    assert all(reward.error is None for reward in rewards)


def test_broken_tests_are_no_verdict():
    [reward] = score([GOOD], prompt(tests=[]))
    assert reward.correct is None
    assert "empty" in reward.error


def test_rows_with_tests_that_cannot_be_run_are_found():
    bad = [{}, {"tests": []}, {"tests": "[]"}, {"tests": "no list"}, {"tests": 3}, {"tests": [{"input": "1"}]}]
    bad += [
        {"tests": ["assert add(1) =="]},
        {"tests": [""]},
        {"tests": ["assert 1 == 1"]},
        {"tests": [{"stdin": 1, "stdout": ""}]},
    ]
    bad += [{"tests": ["assert f() == 1", {"stdin": "", "stdout": ""}]}, {"tests": ROW["tests"], "entry_point": 3}]
    good = [
        ROW,
        {"tests": '["assert f(1) == 1"]'},
        {"tests": ({"assert": "assert f(1)"},)},
        {"tests": [{"stdin": "", "stdout": ""}]},
    ]
    doubts = examine(*bad, *good)
    assert [doubt.position for doubt in doubts] == list(range(len(bad)))
    assert all(doubt.unusable for doubt in doubts)
    assert "test" in doubts[0].text
    assert [d.position for d in examine(ROW, {"tests": ROW["tests"]}, parts=["efficiency"])] == [1]


def test_rows_that_a_program_could_decide_itself_are_in_doubt():
    doubtful = [
        "add(1, 2)",
        "assert same(add(1, 2), 3)",
        "assert np.isclose(add(1, 2), 3)",
        "assert add(1, 2) == Number(3)",
        "def check(candidate):\n    assert near(candidate(1, 2), 3)",
        "assert add(1, 2).equals(3)",
        "assert add(1, 2).__eq__(3)",
    ]
    fine = [
        "assert add(Number(1), Number(2)) == 3",
        "assert math.isclose(add(1, 2), 3)",
        "assert fabs(add(1, 2) - 3) < 1e-6",
        "try:\n    add(1)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError",
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        "assert add('a', 'b').startswith('a')",
    ]
    doubts = examine(*({"tests": [test], "entry_point": "add"} for test in doubtful + fine))
    assert [doubt.position for doubt in doubts] == list(range(len(doubtful)))
    assert not any(doubt.unusable for doubt in doubts)
    assert "no assert" in doubts[0].text
    assert "same" in doubts[1].text


def test_without_an_entry_point_rows_are_in_doubt_where_a_helper_judges_a_result():
    doubtful = [*("assert np.allclose(f(2), 4)", "r = f(2)\nassert same(r, 4)", "assert norm(f(2), 4) == 3")]
    fine = [
        *("import math\nassert math.isclose(f(2), 4)", "assert f(2) == 4", "assert f(Point(1, 2), 3) == 3"),
        *("def check(candidate):\n    assert candidate(2) == 4\ncheck(f)", "assert f(lambda x: x + 1, 3) == 4"),
        *("assert list(map(f, [2])) == [4]", "assert isinstance(f(2), Point)", "assert f(2) == 4 and g(3) == 5"),
    ]
    doubts = examine(*({"tests": [test]} for test in doubtful + fine))
    assert [(doubt.position, doubt.unusable) for doubt in doubts] == [(k, False) for k in range(len(doubtful))]
    assert "np" in doubts[0].text and "entry point" in doubts[0].text


def test_a_row_may_have_a_tolerance_of_its_own():
    row = {"tests": [{"stdin": "", "stdout": "0.333333333333"}], "entry_point": None}
    response = "```python\nprint(round(1/3, 6))\n```"
    assert [score([response], prompt(**row, **own))[0].correct for own in ({}, {"float_tolerance": 1e-6})] == [
        False,
        True,
    ]
    [doubt] = examine({**row, "float_tolerance": "1e-6"})
    assert doubt.unusable and "float_tolerance" in doubt.text


def test_other_keys_may_hold_the_tests():
    row = Prompt(0, "", (), None, {"checks": ROW["tests"], "name": "add"})
    assert score([GOOD], row, tests_key="checks", entry_point_key="name")[0].correct is True


def test_style_counts_findings_for_each_statement():
    assert style("def f(x):\n    return x\n") == style("def f(x):\n    return x") == 1.0
    one_in_four = "import os\n\n\ndef f(x):\n    y = x\n    return y\n"  # os is not used
    assert style(one_in_four) == 0.75
    assert style("import os  # noqa\n\n\ndef f(x):\n    y = x\n    return y\n") == 0.75
    assert style("# ruff: noqa\n" + one_in_four) == 0.75
    padding = "# more\n" * 100 + '"a text"\n' * 100 + "def g():\n" + "    pass\n" * 100  # def g: the fifth statement
    assert style(one_in_four + "\n\n" + padding) <= 0.8
    assert style("def f(:\n") == 0.0
    assert style("") == 0.0
    assert style("import os, sys\n") == 0.0


def test_style_needs_ruff(monkeypatch):
    monkeypatch.setattr(quality.Path, "exists", lambda path: False)
    monkeypatch.setattr(quality.shutil, "which", lambda name: None)
    with pytest.raises(RewardError, match=r"dapo-rl\[code\]"):
        quality.find_ruff()


def test_efficiency_has_an_allowance_and_then_falls_with_use():
    mib = 2**20
    reference = Usage(0, 0.12, 100 * mib)  # allowed: 1.25 * 0.12 + 0.05 = 0.2 s, 1.1 * 100 + 8 = 118 MiB
    assert efficiency(reference, reference) == 1.0
    assert efficiency(Usage(0, 0.2, 118 * mib), reference) == 1.0
    assert efficiency(Usage(0, 0.4, 118 * mib), reference) == 0.75
    assert efficiency(Usage(0, 0.4, 236 * mib), reference) == 0.5
    assert efficiency(Usage(0, 0.0, 1), reference) == 1.0


def test_a_slow_and_large_program_is_less_efficient_than_the_reference():
    slow = "def add(a, b):\n    x = [0] * 10 ** 7\n    for _ in range(10 ** 7):\n        pass\n    return a + b\n"
    same, worse, wrong = score([GOOD, f"```python\n{slow}```", HALF], parts=["efficiency"], workers=1)
    assert same.parts["efficiency"] > 0.9
    assert worse.correct and worse.parts["efficiency"] < 0.6
    assert wrong.parts["efficiency"] == 0.0
    program = "import sys\nn = int(input())\nx = 0\nfor k in range({}):\n    x += 1\nprint(n)\n"
    row = prompt(tests=[{"stdin": "3", "stdout": "3"}], entry_point="__main__", solution=program.format(10))
    quick, slow = score(
        [f"```python\n{program.format(n)}```" for n in (20, 4 * 10**6)], row, parts=["efficiency"], workers=1
    )
    assert quick.parts["efficiency"] > 0.9 > 0.8 > slow.parts["efficiency"]


def test_a_program_cannot_hide_what_it_takes():
    named = "import ctypes\nctypes.CDLL(None).prctl(15, b'VmHWM: 1', 0, 0, 0)\n"
    large = "def add(a, b):\n    x = b'1' * (300 * 2 ** 20)\n    return a + b\n"
    child = "import os, signal\n{}\ndef add(a, b):\n    r, w = os.pipe()\n    if os.fork() == 0:\n"
    child += (
        "        os.setsid()\n        if os.fork() == 0:\n            for _ in range(10 ** 7):\n                pass\n"
    )
    child += "            os.write(w, b'1')\n        os._exit(0)\n    {}\n    os.read(r, 1)\n    return a + b\n"
    orphan, unseen = child.format("", "os.wait()"), child.format("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "")
    responses = [f"```python\n{program}```" for program in (named + large, orphan, unseen)]
    for reward in score(responses, parts=["efficiency"], workers=1):
        assert reward.correct
        assert reward.parts["efficiency"] < 0.75


def test_a_reference_that_fails_its_tests_is_no_verdict():
    [reward] = score([GOOD], prompt(solution="def add(a, b):\n    return 0\n"), parts=["efficiency"])
    assert "reference solution" in reward.error


def test_without_a_sandbox_the_user_is_warned(caplog):
    score([GOOD], workers=1)
    assert caplog.text == ""
    [reward] = score([GOOD], sandbox="none", workers=1)
    assert reward.correct is True
    assert "sandbox: none" in caplog.text and "your rights" in caplog.text


def test_a_missing_sandbox_is_the_users_affair(monkeypatch, tmp_path):
    python = Path(shutil.which("python") or "/usr/bin/python3")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert python.exists()
    with pytest.raises(RewardError, match="apt-get install bubblewrap"):
        score([GOOD])
