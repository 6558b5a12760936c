"""Rows as data sets are published: ``--benchmark gsm8k`` reads GSM8K's own, and what would be graded against a whole
solution is told before the model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_cases import dapo, save_model, write_rows
from dapo.inference import evaluate as standalone
from dapo.records import Prompt

SOLUTION = "He sold {k}/2 = <<{k}/2={half}>>{half} in May.\nSo {k}+{half} = {k},{half:03} in all.\n#### {k},{half:03}"
ROWS = [
    {"question": f"{k}+{k // 2}={'?' * 60}", "answer": SOLUTION.format(k=k, half=k // 2)} for k in (48, 20, 6, 90, 12)
]
"""In the layout of GSM8K's test.jsonl."""
GSM8K = ["--benchmark", "gsm8k", "reward.workers=1"]
WHOLE = "5 of 5 answers are whole solutions, such as row 1"


pytestmark = pytest.mark.usefixtures("in_shared")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    save_model(folder / "model")
    write_rows(folder / "test.jsonl", ROWS)
    return folder


def evaluate(*arguments: Any, code: int = 0) -> Any:
    result = dapo("evaluate", "model", "--max-tokens", 2, *arguments)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """What is evaluated on."""
    found: list[Prompt] = []

    def spy(prompts: Sequence[Prompt], *others: Any) -> Any:
        found[:] = prompts
        return real(prompts, *others)

    real = standalone.evaluate
    monkeypatch.setattr(standalone, "evaluate", spy)
    return found


@pytest.mark.parametrize("setting", [[], ["data.prompt_key=question"]])
def test_gsm8k_is_read_as_it_is_published(setting: list[str], asked: list[Prompt], tmp_path: Path) -> None:
    """Also by those who name the key themselves."""
    heard = evaluate("--data", "test.jsonl", "--output", tmp_path, *GSM8K, *setting)
    assert [prompt.answer for prompt in asked] == ["48024", "20010", "6003", "90045", "12006"]
    assert [prompt.text for prompt in asked] == [row["question"] for row in ROWS]
    assert "test.jsonl: the answer of a row is what follows '####' in its solution" in heard.stderr
    assert "whose answer is '48024'" in heard.stderr and "whole solutions" not in heard.stderr
    settings = json.loads((tmp_path / "evaluation.json").read_text())["settings"]
    if not setting:
        assert settings["evaluation"]["data"] == [{"path": "test.jsonl", "prompt_key": "question"}]


def test_rows_of_another_layout_are_read_as_ever(asked: list[Prompt], tmp_path: Path) -> None:
    """A prompt beside the question is the prompt, and a bare answer stays what it is."""
    write_rows(tmp_path / "test.jsonl", [{"prompt": "1+1=", "question": "2+2=", "answer": "1,000"}])
    options = [*GSM8K, "--output", tmp_path]
    heard = evaluate(tmp_path / "test.jsonl", *options)
    assert [(prompt.text, prompt.answer) for prompt in asked] == [("1+1=", "1,000")]
    assert "follows '####'" not in heard.stderr
    write_rows(tmp_path / "test.jsonl", [{"q": "1+1=", "question": "2+2=", "answer": "1"}])
    assert "1+1=" in evaluate(tmp_path / "test.jsonl", *options, "data.prompt_key=q").stderr
    assert "no key 'p'" in evaluate(tmp_path / "test.jsonl", *options, "data.prompt_key=p", code=2).stderr


def test_a_reward_of_the_users_own_is_given_the_solution(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(response, answer):\n    return '####' in answer\n")
    own = ["reward.kind=function", f"reward.function={tmp_path}/mine.py:score"]
    heard = evaluate("test.jsonl", *GSM8K, *own)
    assert "100.0%" in heard.stdout and "whole solutions" not in heard.stderr


@pytest.mark.parametrize("answer", ["seven", "He has 7.\n####"])
def test_a_solution_without_its_number_is_named(answer: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "test.jsonl", [*ROWS, {"question": "1+1=", "answer": answer}])
    heard = evaluate(tmp_path / "test.jsonl", *GSM8K, code=2)
    assert "test.jsonl, row 6: the solution has to end with '#### 72' or the like" in heard.stderr
    assert "row 5:" not in heard.stderr and "loading the model" not in heard.stderr


def test_the_first_row_may_be_broken(tmp_path: Path) -> None:
    for line in ("{", "[1]"):
        (tmp_path / "test.jsonl").write_text(f"{line}\n")
        assert "test.jsonl:1: " in evaluate(tmp_path / "test.jsonl", *GSM8K, code=2).stderr


@pytest.mark.parametrize("kind", ["math", "exact"])
def test_whole_solutions_are_told_of_before_the_model_is_loaded(kind: str) -> None:
    heard = evaluate("test.jsonl", "data.prompt_key=question", f"reward.kind={kind}", "--quiet")
    assert f"test.jsonl: {WHOLE}" in heard.stderr and f"reward.kind={kind} compares with the final" in heard.stderr
    assert 'row["answer"] = row["answer"].rpartition("####")[2].strip()' in heard.stderr
    loud = evaluate("test.jsonl", "data.prompt_key=question", f"reward.kind={kind}").stderr
    assert loud.index(WHOLE) < loud.index("loading the model")


def test_the_advice_names_the_keys_of_the_item(tmp_path: Path) -> None:
    write_rows(tmp_path / "other.jsonl", [{"q": row["question"], "gold": row["answer"]} for row in ROWS])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: x}\nreward: {kind: exact}\n"
        "evaluation: {data: {path: other.jsonl, prompt_key: q, answer_key: gold}}\n"
    )
    assert 'row["gold"] = row["gold"].rpartition' in evaluate("--recipe", recipe).stderr


def test_bare_answers_are_not_warned_about(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", [{"prompt": row["question"], "answer": str(k)} for k, row in enumerate(ROWS)])
    told = evaluate(tmp_path / "t.jsonl", "reward.kind=exact").stderr
    assert [line for line in told.splitlines() if "warning" in line and "has no token for '?'" not in line] == []
