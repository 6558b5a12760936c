"""The examples, each played by a script that knows how."""

import asyncio
import importlib.util
import re
from itertools import islice, permutations
from pathlib import Path

from dapo.config import load_config
from dapo.data.template import PromptTemplate
from dapo.environments.calls import tools_of
from dapo.environments.player import player_for
from dapo.records import Prompt
from episodes import Script, call, chat_tokenizer, settings

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def played(name, row, answer, **changes):
    config = settings(environment__name=f"{EXAMPLES}/{name}", rollout__max_response_length=4000, **changes)
    template = PromptTemplate(config.data, chat_tokenizer())

    async def work():
        script = Script(template, answer)
        prompt = Prompt(0, row["prompt"], (1,), row.get("answer"), row)
        async with player_for(config, template)() as player, player.seat() as session:
            found = await player.play(session, prompt, script)
            return await found.scored(found.sample(0, 0, prompt), prompt, None), found.sample(0, 0, prompt)

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_countdown():
    example = module("countdown")
    row = next(row for row in example.rows(50) if len(row["numbers"]) == 3)
    asked = [call("calculate", expression="2 * (3 + 4)"), call("calculate", expression="__import__('os')"), "no"]
    reward, sample = played("countdown.py:Countdown", row, lambda context, turn: asked[turn])
    assert "\n14\n" in sample.text and "only numbers" in sample.text and reward.correct is False
    orders = list(permutations(row["numbers"]))
    ways = [form.format(*order) for order in orders for form in ("({} P {}) Q {}", "{} Q ({} P {})")]
    expressions = [way.replace("P", p).replace("Q", q) for way in ways for p in "+-*" for q in "+-*"]
    right = next(e for e in expressions if example.evaluate(e) == row["target"])
    reward, _ = played("countdown.py:Countdown", row, lambda context, turn: f"<answer>{right}</answer>")
    assert reward.correct and reward.value == 1.0
    reward, _ = played("countdown.py:Countdown", row, lambda context, turn: f"<answer>{row['target']}</answer>")
    assert not reward.correct  # the numbers were not used
    assert [tool["function"]["name"] for tool in tools_of(example.Countdown, "")] == ["calculate"]
    assert not tools_of(example.Alone, "")


def test_guess_the_number_by_halving():
    def answer(context, turn):
        low, high = 0, 10
        for guess, hint in re.findall(r"(\d+)<\|im_end\|>\s*<\|im_start\|>user\s+(higher|lower)", context):
            low, high = (int(guess), high) if hint == "higher" else (low, int(guess))
        return str((low + high) // 2)

    for number in (1, 5, 9):
        row = {"prompt": "Guess", "number": number}
        reward, sample = played("guess_number.py:GuessNumber", row, answer)
        assert reward.correct and reward.value == 1.0 - 0.1 * len(sample.turns) and len(sample.turns) <= 4


def test_retrieval_finds_what_is_asked_for():
    rows = list(module("retrieval").rows())
    assert len(rows) > 50
    for row in rows[::40]:

        def answer(context, turn, row=row):
            if not turn:
                return call("search", query=row["prompt"].partition("\n")[2])
            if turn == 1:
                return call("read", number=int(re.findall(r"^(\d+): ", context, re.MULTILINE)[0]))
            return row["answer"] if f"`{row['answer']}`" in context else "I do not know"

        reward, _ = played("retrieval.py:Library", row, answer)
        assert reward.correct, row["prompt"]


def test_code_repair_replies_with_what_the_tests_print():
    row = next(iter(module("code_repair").rows()))
    right = "def mean(xs):\n    return sum(xs) / len(xs)"
    broken = row["prompt"].partition("\n\n")[2]
    turns = [call("run_tests", program=broken), call("run_tests", program=right), f"```python\n{right}\n```"]
    reward, sample = played("code_repair.py:Repair", row, lambda context, turn: turns[turn])
    assert "AssertionError: not mean([1, 2, 3]) == 2" in sample.text and "\npassed\n" in sample.text and reward.correct
    cheat = "def mean(xs):\n    return 2"
    reward, _ = played("code_repair.py:Repair", row, lambda context, turn: f"```python\n{cheat}\n```")
    assert reward.correct is False


def test_examples_are_short_and_their_recipe_is_one():
    others = {"word_problems.py"}  # no environment, but a data file and a reward
    played = [path for path in EXAMPLES.glob("*.py") if path.name not in others]
    assert all(len(path.read_text().splitlines()) < 100 for path in played)
    config = load_config(EXAMPLES / "countdown.yaml")
    assert config.environment.on and list(islice(module("countdown").rows(3), 3))
