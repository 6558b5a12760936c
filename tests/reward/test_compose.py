"""Rewards put together: sums, gates, tiers, failed parts. Every expected value is worked out by hand."""

import asyncio
import re

import pytest
from pydantic import ValidationError

from dapo.config import ComposeReward, load_config
from dapo.errors import ConfigError, RewardError
from dapo.orchestrator.step_metrics import _path_element
from dapo.records import Prompt, Reward
from dapo.reward.build import make_scorer
from dapo.reward.compose import ComposedScorer
from dapo.reward.contract import Doubt

PROMPT = Prompt(0, "2+2=", (), "4")


class Given:
    """A scorer that gives what it was told to, after other tasks have had their turn, and notes what it was asked."""

    def __init__(self, reward, doubts=(), start=None, close=None):
        self.reward, self.doubts, self.faults = reward, doubts, {"start": start, "close": close}
        self.asked, self.closed = 0, False

    async def start(self):
        if self.faults["start"]:
            raise self.faults["start"]

    async def examine(self, prompts):
        return [Doubt(*doubt) for doubt in self.doubts]

    async def score(self, prompt, response, finish_reason=None):
        self.asked += 1
        await asyncio.sleep(0)
        if isinstance(self.reward, BaseException):
            raise self.reward
        return self.reward

    async def close(self):
        self.closed = True
        if self.faults["close"]:
            raise self.faults["close"]


def part(on_error="drop", error_value=-1.0, max_error_rate=0.2, **keys):
    reward = {"kind": "exact", "on_error": on_error, "error_value": error_value, "max_error_rate": max_error_rate}
    return {"reward": reward, **keys}


def compose(parts, **keys):
    return ComposeReward.model_validate({"kind": "compose", "parts": parts, **keys})


def composed(parts, given, **keys):
    scorers = {name: reward if isinstance(reward, Given) else Given(reward) for name, reward in given.items()}
    return ComposedScorer(compose(parts, **keys), scorers)


def score(parts, given, **keys):
    return asyncio.run(composed(parts, given, **keys).score(PROMPT, "4"))


RIGHT, WRONG = Reward(True, 1.0), Reward(False, -1.0)
FAILED = Reward(None, 0.0, error="the judge is down")


def number(value):
    return Reward(None, value)


# --- sums and gates -----------------------------------------------------------------------------------------------


def test_a_weighted_sum_with_every_part_under_its_name():
    parts = {"math": part(), "length": part(weight=0.5), "style": part(weight=-2)}
    reward = score(parts, {"math": RIGHT, "length": number(0.5), "style": number(0.125)}, correct="math")
    assert reward == Reward(True, 1 + 0.25 - 0.25, {"math": 1.0, "length": 0.5, "style": 0.125})


def test_right_and_wrong_are_those_of_the_named_part_or_left_open():
    given = {"math": WRONG, "length": number(5.0)}
    parts = {"math": part(), "length": part()}
    assert score(parts, given, correct="math").correct is False
    assert score(parts, given, correct="length").correct is None
    assert score(parts, given).correct is None
    assert score(parts, given).value == 4.0


def test_answer_and_inner_parts_are_handed_through():
    math = Reward(True, 1.0, {"answer_found": 1.0, "boxed": 0.0}, extracted="4")
    judge = Reward(None, 0.5, {"answer_found": 0.0, "tone": 0.25}, extracted="nice")
    reward = score({"judge": part(), "math": part()}, {"math": math, "judge": judge}, correct="math")
    assert reward.extracted == "4"
    assert reward.parts == {
        "judge": 0.5,
        "judge/answer_found": 0.0,
        "judge/tone": 0.25,
        "math": 1.0,
        "math/boxed": 0.0,
        "answer_found": 1.0,
    }
    assert len({_path_element(name) for name in reward.parts}) == len(reward.parts)
    open_one = score({"judge": part(), "math": part()}, {"math": math, "judge": judge})
    assert open_one.extracted is None and "math/answer_found" in open_one.parts


def test_a_closed_gate_is_zero_whatever_the_range_and_closes_those_behind_it():
    parts = {
        "c": part(only_if="b", from_range=[-1, 1]),
        "b": part(only_if="a", clip=[0.25, 1]),
        "a": part(passes_at=0.5),
    }
    given = {name: Given(number(0.5)) for name in "abc"}  # 0.5 is not above 0.5
    assert score(parts, given) == Reward(None, 0.5, {"c": 0.0, "b": 0.0, "a": 0.5})
    assert (given["a"].asked, given["b"].asked, given["c"].asked) == (1, 0, 0)
    given["a"].reward = number(0.75)
    assert score(parts, given) == Reward(None, 0.75 + 0.5 + 0.75, {"c": 0.75, "b": 0.5, "a": 0.75})


def test_what_is_right_passes_whatever_its_value_and_what_is_wrong_never_does():
    parts = {"math": part(weight=0), "bonus": part(only_if="math")}
    assert score(parts, {"math": Reward(True, -3.0), "bonus": number(1.0)}).value == 1.0
    assert score(parts, {"math": Reward(False, 3.0), "bonus": number(1.0)}).value == 0.0


def test_where_correctness_was_not_computed_the_response_is_not_right():
    parts = {"format": part(), "math": part(only_if="format")}
    reward = score(parts, {"format": number(0.0), "math": RIGHT}, correct="math")
    assert reward == Reward(False, 0.0, {"format": 0.0, "math": 0.0})


@pytest.mark.parametrize(
    "given, value",
    [
        (4.0, 0.4),  # (4 - 0) / 10
        (12.0, 1.1),  # 1.2, cut to 1.1
        (-3.0, -0.3),  # goes beyond the range
        (-9.0, -0.5),  # -0.9, cut to -0.5
    ],
)
def test_the_range_is_mapped_first_and_cut_then(given, value):
    parts = {"judge": part(from_range=[0, 10], clip=[-0.5, 1.1], weight=2.0)}
    reward = score(parts, {"judge": number(given)})
    assert reward.parts["judge"] == pytest.approx(value)
    assert reward.value == pytest.approx(2 * value)


# --- tiers --------------------------------------------------------------------------------------------------------

TIERS = {"format": part(), "math": part(only_if="format"), "quality": part(only_if="math", from_range=[0, 10])}


@pytest.mark.parametrize(
    "format, math, quality, value",
    [
        (0.0, RIGHT, 10.0, -1.0),  # 2 (0 + 0) / 3 - 1
        (1.0, WRONG, 10.0, -1 / 3),  # 2 (1 + 0) / 3 - 1
        (1.0, Reward(False, 0.5), 10.0, 0.0),  # 2 (1 + 0.5) / 3 - 1: half of the tests
        (1.0, RIGHT, 0.0, 1 / 3),  # 2 (2 + 0) / 3 - 1
        (1.0, RIGHT, 5.0, 2 / 3),  # 2 (2 + 0.5) / 3 - 1
        (1.0, RIGHT, 10.0, 1.0),
        (1.0, RIGHT, 25.0, 1.0),  # cut to 1
    ],
)
def test_format_then_correctness_then_quality(format, math, quality, value):
    given = {"format": number(format), "math": math, "quality": number(quality)}
    reward = score(TIERS, given, tiers=["format", "math", "quality"], correct="math")
    assert reward.value == pytest.approx(value)
    assert list(reward.parts) == ["format", "math", "quality"]
    assert reward.correct is (bool(format) and math.correct)


def test_the_last_tier_is_whole_where_it_is_right():
    parts = {"format": part(passes_at=0.5), "math": part()}
    assert score(parts, {"format": number(0.6), "math": Reward(True, 0.1)}, tiers=["format", "math"]).value == 1.0
    assert score(parts, {"format": number(0.6), "math": WRONG}, tiers=["format", "math"]).value == 0.0
    # 2 (0 + 0.4) / 2 - 1, and what comes later does not count
    low = score(parts, {"format": number(0.4), "math": RIGHT}, tiers=["format", "math"])
    assert low.value == pytest.approx(-0.6) and low.parts["math"] == 1.0


# --- failed parts -------------------------------------------------------------------------------------------------


def test_a_failed_part_leaves_the_whole_without_a_verdict_and_is_named():
    reward = score({"math": part(), "quality": part(weight=0.1)}, {"math": RIGHT, "quality": FAILED}, correct="math")
    assert (reward.correct, reward.error) == (None, "part quality: the judge is down")


def test_a_stated_value_stands_in_for_a_failed_part_and_is_counted():
    parts = {"math": part(), "quality": part("value", error_value=2.0, from_range=[0, 10], weight=3)}
    reward = score(parts, {"math": RIGHT, "quality": FAILED}, correct="math")
    assert reward.value == pytest.approx(1 + 3 * 0.2) and reward.error is None and reward.correct
    assert reward.parts == {"math": 1.0, "quality": 0.2, "quality/failed": 1.0}
    assert score(parts, {"math": RIGHT, "quality": number(0.0)}).parts["quality/failed"] == 0.0


def test_what_stands_in_for_a_failed_part_opens_no_gate_and_is_not_right():
    parts = {"gate": part("value", error_value=1.0), "bonus": part(only_if="gate")}
    bonus = Given(number(5.0))
    reward = score(parts, {"gate": FAILED, "bonus": bonus}, correct="gate")
    assert (reward.correct, reward.value, bonus.asked) == (False, 1.0, 0)
    parts["gate"] = part()
    assert score(parts, {"gate": FAILED, "bonus": bonus}).error == "part gate: the judge is down"
    assert bonus.asked == 0


def test_the_share_of_failed_scores_is_judged_from_the_twentieth_on_and_of_the_latest_256():
    given = Given(number(0.0))

    async def failed_at_the_end(made, failures):
        """So many scores of which the last ones fail: why the run ends with the last of them."""
        scorer = composed({"quality": part("value")}, {"quality": given})
        for place in range(made):
            given.reward = number(0.0) if place < made - failures else FAILED
            try:
                await scorer.score(PROMPT, "")
            except RewardError as error:
                assert place == made - 1  # and not before
                return str(error)
        return None

    async def run():
        assert await failed_at_the_end(20, 4) is None and await failed_at_the_end(400, 51) is None
        assert await failed_at_the_end(400, 52) is not None  # 51.2 of 256 are a fifth
        assert await failed_at_the_end(21, 5) == (
            "part quality: 5 of its latest 21 scores failed (parts.quality.reward.max_error_rate allows 20%): "
            "the judge is down (5 x)"
        )

    asyncio.run(run())


def test_a_broken_contract_stops_the_run_with_the_name_of_the_part_and_no_other():
    broken = RewardError("reward function f: expected a float")
    parts = {"last": part(only_if="mine"), "mine": part(), "other": part()}
    with pytest.raises(RewardError) as caught:
        score(parts, {"mine": broken, "last": RIGHT, "other": RIGHT})
    assert str(caught.value) == "part mine: reward function f: expected a float"
    with pytest.raises(ZeroDivisionError):
        score({"mine": part()}, {"mine": ZeroDivisionError()})


def test_numbers_beyond_all_bounds_are_refused():
    with pytest.raises(RewardError, match=r"part a: from_range .* makes 1e\+50"):
        score({"a": part(from_range=[0, 1e-30])}, {"a": number(1e20)})
    with pytest.raises(RewardError, match=r"add up to 2e\+30"):
        score({"a": part(weight=1e30), "b": part(weight=1e30)}, {"a": number(1.0), "b": number(1.0)})


def test_a_part_that_never_ends_ends_with_the_time_of_the_whole():
    class Endless(Given):
        async def score(self, prompt, response, finish_reason=None):
            await asyncio.Event().wait()

    reward = score({"a": part(), "b": part()}, {"a": RIGHT, "b": Endless(None)}, timeout_s=0.05)
    assert reward.error == "the parts together timed out after 0.05 s"
    with pytest.raises(TimeoutError):  # of a part's own: a fault, not the deadline
        score({"a": part()}, {"a": TimeoutError()})


def test_parts_are_scored_at_the_same_time():
    async def run():
        meet = asyncio.Barrier(3)

        class Meeting(Given):
            async def score(self, prompt, response, finish_reason=None):
                async with asyncio.timeout(5):
                    await meet.wait()
                return self.reward

        names = ("a", "b", "c")
        return await composed({n: part() for n in names}, {n: Meeting(number(1.0)) for n in names}).score(PROMPT, "")

    assert asyncio.run(run()).value == 3.0


# --- start, examine, close ----------------------------------------------------------------------------------------


def test_every_part_that_cannot_start_is_told():
    given = {"a": Given(RIGHT), "b": Given(RIGHT, start=RewardError("no model"))}
    given["c"] = Given(RIGHT, start=RewardError("no server"))
    with pytest.raises(RewardError) as caught:
        asyncio.run(composed({name: part() for name in given}, given).start())
    assert str(caught.value) == "part b: no model\npart c: no server"


def test_all_parts_are_closed_also_if_one_cannot_be():
    given = {"a": Given(RIGHT, close=OSError("stuck")), "b": Given(RIGHT)}
    with pytest.raises(OSError, match="stuck"):
        asyncio.run(composed({name: part() for name in given}, given).close())
    assert given["a"].closed and given["b"].closed


def test_doubts_are_told_in_the_order_of_the_rows_with_the_part():
    given = {"a": Given(RIGHT, [(2, "no tests", True)]), "b": Given(RIGHT, [(0, "not a number"), (2, "odd")])}
    found = asyncio.run(composed({name: part() for name in given}, given).examine([PROMPT] * 3))
    assert found == [
        Doubt(0, "part b: not a number"),
        Doubt(2, "part a: no tests", unusable=True),
        Doubt(2, "part b: odd"),
    ]


# --- real parts, from a recipe ------------------------------------------------------------------------------------

RECIPE = """model: {path: some/model}
reward:
  kind: compose
  correct: answer
  parts:
    answer:
      reward:
        kind: exact
        after: "Answer:"
    brevity:
      reward:
        kind: function
        function: rewards.py:short
        workers: 1
        timeout_s: 2
        on_error: value
        error_value: 0
      weight: 0.5
      only_if: answer
      clip: [0, 1]
"""


def test_a_recipe_with_real_parts(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "import dapo\n"
        "@dapo.reward_function(name='short', batched=True)\n"
        "def f(responses):\n"
        "    if any('crash' in r for r in responses): raise ValueError('crash')\n"
        "    return [10 / len(r) for r in responses]\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)

    async def run():
        scorer = make_scorer(load_config(recipe).reward)
        try:
            await scorer.start()
            responses = ["Answer: 4", "I think so. Answer: 4", "Answer: 5", "no", "crash Answer: 4"]
            return await asyncio.gather(*(scorer.score(PROMPT, r) for r in responses))
        finally:
            await scorer.close()

    short, long, wrong, none, crash = asyncio.run(run())
    assert short == Reward(
        True, 1.5, {"answer": 1.0, "answer_found": 1.0, "brevity": 1.0, "brevity/failed": 0.0}, extracted="4"
    )
    assert long.value == pytest.approx(1 + 0.5 * 10 / 21)
    assert (wrong.correct, wrong.value, wrong.extracted) == (False, -1.0, "5")
    assert (none.correct, none.value, none.parts["answer_found"]) == (False, -1.0, 0.0)
    assert (crash.correct, crash.value, crash.parts["brevity/failed"]) == (True, 1.0, 1.0)


# --- mistakes -----------------------------------------------------------------------------------------------------

TWO = {"format": part(), "math": part()}
MISTAKES = [
    (TWO, {"correct": "maths"}, "correct: there is no part 'maths'; the parts are format, math"),
    (TWO, {"tiers": ["format", "maht"]}, "tiers: there is no part 'maht'"),
    (TWO, {"tiers": ["format", "math", "math"]}, "tiers: math is named 2 times"),
    (TWO, {"tiers": []}, "at least 1 item"),
    ({"a": part(only_if="b")}, {}, "parts.a.only_if: there is no part 'b'; the parts are a"),
    ({"a": part(only_if="a")}, {}, "parts.a: a waits for a can never begin"),
    ({"a": part(only_if="b"), "b": part(only_if="a")}, {}, "parts.b: b waits for a waits for b can never begin"),
    ({"a": part(weight=2)}, {"tiers": ["a"]}, "parts.a.weight: is 2, but weights are for a sum"),
    ({**TWO, "c": part()}, {"tiers": ["format", "math"]}, "parts.c: is none of the tiers, no other part waits for it"),
    ({"a": part(weight=0)}, {}, "parts: every weight is 0"),
    ({"a": part(clip=[1, 0])}, {}, "the first must be below the second"),
    ({"a": part(from_range=[1, 1])}, {}, "the first must be below the second"),
    ({"a/b": part()}, {}, "parts.a/b: a part's name is made of letters, digits and _"),
    ({"answer_found": part()}, {}, "parts.answer_found: this name is taken"),
    ({}, {}, "at least 1 item"),
    ({"a": part(), "b": {"of": "c/x"}}, {}, "parts.b.of: 'c/x' is no PART/KEY of a part with a reward; such are a/..."),
    ({"a": part(), "b": {"of": "a"}}, {}, "parts.b.of: 'a' is no PART/KEY"),
    ({"a": part(), "b": {"of": "a/x", "reward": {"kind": "math"}}}, {}, "parts.b: needs either a reward or `of`"),
    ({"a": part(only_if="b"), "b": {"of": "a/x"}}, {}, "parts.a: a waits for b waits for a can never begin"),
    ({"token": part()}, {}, "parts.token: what stands under a name like this is kept out of all files"),
]


@pytest.mark.parametrize("parts, keys, message", MISTAKES, ids=[message for *_, message in MISTAKES])
def test_what_cannot_be_meant_is_refused(parts, keys, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        compose(parts, **keys)


def test_a_part_outside_of_the_tiers_may_be_a_gate_say_what_is_correct_or_be_measured_only():
    parts = {"gate": part(), "math": part(only_if="gate"), "right": part(), "length": part(weight=0)}
    reward = score(
        parts,
        {"gate": number(1.0), "math": number(0.25), "right": WRONG, "length": number(7.0)},
        tiers=["math"],
        correct="right",
    )
    assert reward == Reward(False, -0.5, {"gate": 1.0, "math": 0.25, "right": -1.0, "length": 7.0})


def replaced(old, new):
    assert old in RECIPE
    return RECIPE.replace(old, new)


IN_A_RECIPE = [
    (replaced("kind: exact", "kind: exakt"), "recipe.yaml:8: reward.parts.answer.reward.kind: 'exakt' is not one of "),
    (replaced("after:", "aftre:"), "recipe.yaml:9: reward.parts.answer.reward.aftre: unknown key; did you mean "),
    (replaced("after:", "url:"), "recipe.yaml:9: reward.parts.answer.reward.url: not a key of "),
    (replaced("weight:", "wieght:"), "recipe.yaml:18: reward.parts.brevity.wieght: unknown key"),
    (replaced("timeout_s: 2", "timeout_s: -2"), "recipe.yaml:15: reward.parts.brevity.reward.timeout_s: "),
    (replaced("[0, 1]", "[1, 0]"), "recipe.yaml:20: reward.parts.brevity.clip: the first must be below the second"),
    (RECIPE + "    third:\n      weight: 1\n", "recipe.yaml:21: reward.parts.third: needs either a reward or `of`"),
]


@pytest.mark.parametrize("text, message", IN_A_RECIPE, ids=[message[12:] for _, message in IN_A_RECIPE])
def test_mistakes_in_a_recipe_are_told_with_their_line(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "recipe.yaml")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_what_a_part_measures_beside_its_value_can_be_weighted_and_gated():
    # passes, is clean at 0.5 and fast at 0.25: 1 + 0.2 * 0.5 + 0.1 * 0.25; nothing of it where it does not pass
    parts = {
        "passes": part(),
        "clean": {"of": "passes/style", "only_if": "passes", "weight": 0.2},
        "fast": {"of": "passes/efficiency", "only_if": "passes", "weight": 0.1},
    }
    right = Reward(True, 1.0, {"style": 0.5, "efficiency": 0.25})
    wrong = Reward(False, -1.0, {"style": 1.0, "efficiency": 1.0})
    inner = {"passes/style": 0.5, "passes/efficiency": 0.25}
    found = score(parts, {"passes": right}, correct="passes")
    assert found.correct and found.value == pytest.approx(1.125)
    assert found.parts == {"passes": 1.0, **inner, "clean": 0.5, "fast": 0.25}
    found = score(parts, {"passes": wrong}, correct="passes")
    assert (found.correct, found.value, found.parts["clean"]) == (False, -1.0, 0.0)


def test_compiles_then_passes_then_clean():
    tiers = {"compiles": {"of": "runs/compiles"}, "runs": part(from_range=(-1, 1)), "clean": {"of": "runs/style"}}

    def value(compiles, passed, style):
        given = {"runs": Reward(passed, 1.0 if passed else -1.0, {"compiles": compiles, "style": style})}
        return score(tiers, given, tiers=["compiles", "runs", "clean"], correct="runs").value

    # 2 (t + s) / 3 - 1: nothing; compiles; passes too and is clean by half
    assert value(0.0, False, 1.0) == pytest.approx(-1.0)
    assert value(1.0, False, 1.0) == pytest.approx(2 / 3 - 1)
    assert value(1.0, True, 0.5) == pytest.approx(2 * 2.5 / 3 - 1)


def test_a_part_of_what_failed_or_was_not_computed_is_zero():
    parts = {"a": part(on_error="value", error_value=0.5), "b": {"of": "a/x"}}
    failed = score(parts, {"a": Reward(None, 0.0, error="down")})
    assert (failed.value, failed.parts) == (0.5, {"a": 0.5, "a/failed": 1.0, "b": 0.0})


def test_a_part_that_the_other_reward_does_not_give_is_named():
    with pytest.raises(RewardError, match="part b: a gave no part 'z'; its parts are: x, y"):
        score({"a": part(), "b": {"of": "a/z"}}, {"a": Reward(None, 0.0, {"x": 1.0, "y": 2.0})})
