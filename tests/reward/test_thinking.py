"""Thinking that the prompt opened, and why a response ended: what rewards make of it."""

import asyncio
import json

import pytest

from dapo.config import CodeReward, ComposeReward, ExactReward, FunctionReward, MathReward
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.reward.check import check_cases, read_cases
from dapo.reward.function_scorers import CallableScorer
from dapo.reward.judge.rubric import Rubric
from dapo.reward.protocol import Item
from dapo.reward.registry import reward_function
from dapo.reward.thinking import behind, outside_thinking

CUT = "Try \\boxed{8}. Hmm, one case is lost, so it may be 9"
WHOLE = CUT + " or 7.</think>\nIt is \\boxed{9}"


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<thought>", "</thought>"),
        ("<reasoning>", "</reasoning>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("◁think▷", "◁/think▷"),
        ("<longcat_think>", "</longcat_think>"),
        ("<|channel>thought", "<channel|>"),
        ("<unused94>thought", "<unused95>"),
        ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
        ("<|channel|>commentary to=f <|constrain|>json<|message|>", "<|channel|>final<|message|>"),
        ('<think effort="a/b">', "</think>"),
        ("< think >", "< / think >"),
    ],
)
def test_thinking_tags_of_every_kind(opening, closing):
    assert outside_thinking(f"a{opening}b{closing}c") == "ac"
    assert outside_thinking(f"a{opening}b") == "a"
    assert outside_thinking(f"b{closing}c") == "c"
    assert outside_thinking(behind(f"assistant\n{opening}\n", "b")) == ""
    assert outside_thinking(behind(f"assistant\n{opening}\n", f"b{closing}c")) == "c"
    assert outside_thinking(behind(f"{opening}\n\n{closing}\n\n", "c")) == "c"


def test_of_a_response_in_channels_the_final_one_is_said():
    said = "<|channel|>final<|message|>9"
    assert outside_thinking(f"<|channel|>analysis<|message|>8assistant{said}") == "9"
    assert outside_thinking(said) == "9"
    assert outside_thinking("<|channel|>analysis") == ""
    assert outside_thinking(f"<|channel|>analysis<|message|>8assistant<|channel|>commentary<|message|>7{said}") == "9"
    assert outside_thinking("a <thinker> b <think about it> c") == "a <thinker> b <think about it> c"


def test_a_block_ends_with_its_own_tag():
    assert outside_thinking("<think>a</thought>b</think>c") == "c"
    assert outside_thinking("a[think]b") == "a[think]b"


@pytest.mark.parametrize(
    ("prompt_end", "opened"),
    [
        ("assistant\n<think>\n", True),
        ("<think>", True),
        ("assistant\n<think>\nOkay, the user wants", True),
        ("Let me think. <think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("Put your thoughts into <think> tags.\nAssistant:", False),
        ("Think in <think> </think> tags.\nAssistant: <think>", True),
        ("Reason inside\n<think>, then answer.\nQ: 2+2\nA:", False),
        ("", False),
    ],
)
def test_a_prompt_opens_thinking_with_a_tag_that_it_does_not_merely_speak_of(prompt_end, opened):
    assert behind(prompt_end, "x") == ("<think>x" if opened else "x")


def scored(config, response, end="", finish_reason="stop", answer="8", **meta):
    async def score():
        scorer = make_scorer(config)
        try:
            await scorer.start()
            return await scorer.score(Prompt(0, "4+4=", (), answer, meta, end), response, finish_reason)
        finally:
            await scorer.close()

    return asyncio.run(score())


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_a_guess_in_thinking_that_never_ends_is_no_answer(finish_reason):  # TRL#6966
    config = MathReward(workers=1)
    reward = scored(config, CUT, "assistant\n<think>\n", finish_reason)
    assert (reward.correct, reward.value, reward.parts["answer_found"], reward.extracted) == (False, -1.0, 0.0, None)
    assert scored(config, WHOLE, "<think>\n", answer="9").correct is True
    assert scored(config, CUT, "<think>\n\n</think>\n\n", finish_reason).correct is True


def test_a_marker_in_unfinished_thinking_is_no_answer():
    config = ExactReward(kind="exact", after="####")
    assert scored(config, "try #### 8", "<think>\n", "length").parts == {"answer_found": 0.0}
    assert scored(config, "<think>try #### 8", "", "length").correct is False
    assert scored(config, "try #### 7</think>so #### 8", "<think>\n").correct is True
    assert scored(config, "#### 8").correct is True
    assert scored(ExactReward(kind="exact"), "hm</think>\n8", "<think>\n").correct is True


def test_a_program_in_unfinished_thinking_is_none():
    config = CodeReward(kind="code", workers=1)
    program = "```python\ndef f():\n    return 1\n```"
    tests = {"tests": ["assert f() == 1"]}
    assert scored(config, program, "<think>\n", "length", None, **tests).parts["answer_found"] == 0.0
    assert scored(config, program, "", "length", None, **tests).correct is True


def told(prompt, response, answer, finish_reason, prompt_end, **meta):
    return {"value": 1.0, "correct": (finish_reason, prompt_end, meta) == ("length", "<think>\n", {"level": 3})}


def not_told(response, **meta):
    return {"value": 1.0, "correct": meta == {"prompt": "4+4=", "answer": "8", "level": 3}}


@reward_function(batched=True)
def told_in_batches(responses, finish_reasons, prompt_ends, **meta):
    meets = (finish_reasons, prompt_ends) == (["length"], ["<think>\n"]) and sorted(meta) == [
        "answers",
        "level",
        "prompts",
    ]
    return [{"value": 1.0, "correct": meets} for _ in responses]


@pytest.mark.parametrize("function", [told, not_told, told_in_batches])
def test_a_function_is_told_what_it_names(function):
    async def score():
        scorer = CallableScorer(function)
        return await scorer.score(Prompt(0, "4+4=", (), "8", {"level": 3}, "<think>\n"), "x", "length")

    assert asyncio.run(score()).correct is True


def test_a_function_in_a_file_and_one_inside_of_a_composed_reward_are_told_too(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def score(response, finish_reason, prompt_end):\n    return finish_reason + prompt_end == 'length<t>'\n"
    )
    config = FunctionReward(kind="function", function=f"{file}:score", workers=1)
    assert scored(config, "x", "<t>", "length").correct is True
    parts = {"a": {"weight": 1.0, "reward": config.model_dump()}}
    composed = ComposeReward(kind="compose", parts=parts, correct="a")
    assert scored(composed, "x", "<t>", "length").correct is True


def test_a_rubric_may_name_both(tmp_path):
    file = tmp_path / "rubric.jinja"
    file.write_text("{{ prompt_end }}|{{ response }}|{{ finish_reason }}")
    rubric = Rubric(str(file), (0.0, 10.0))
    assert rubric.message(Prompt(0, "p", (), end="<think>"), "r", "length") == "<think>|r|length"
    assert rubric.message(Prompt(0, "p", ()), "r") == "|r|"


def test_labelled_cases_may_carry_both(tmp_path):
    file = tmp_path / "cases.jsonl"
    case = {"gold": "8", "response": CUT, "expected": False, "prompt_end": "<think>\n", "finish_reason": "length"}
    file.write_text(json.dumps(case) + "\n" + json.dumps({**case, "prompt_end": "", "expected": True}) + "\n")
    config = MathReward(workers=1)
    checked = asyncio.run(check_cases(read_cases([str(file)], config), config))
    assert [one.agrees for one in checked] == [True, True]
    file.write_text(json.dumps({**case, "finish_reason": "cut"}))
    with pytest.raises(Exception, match=r"cases\.jsonl:1: .*finish_reason.*stop or length.*'cut'"):
        read_cases([str(file)], config)


def test_the_protocol_takes_both_and_does_without():
    item = Item.model_validate({"prompt": "p", "response": "r", "prompt_end": "<think>", "finish_reason": "length"})
    assert (item.as_prompt(0).end, item.finish_reason) == ("<think>", "length")
    old = Item.model_validate({"prompt": "p", "response": "r"})
    assert (old.as_prompt(0).end, old.finish_reason) == ("", None)
