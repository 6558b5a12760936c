"""``dapo.evaluate`` and ``dapo.generate``: the numbers and texts of the commands, from what Python has at hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from typer.testing import CliRunner

import dapo
from dapo.api.inference import EvaluationResult
from dapo.commands import app
from dapo.errors import ConfigError, DataError, ModelError, UserError
from dapo.util.files import json_line
from run_cases import PROMPTS, SETTINGS, TOKENIZER, Recorder, text_sum, tiny_model

EXACT = {"reward.kind": "exact", "evaluation.max_response_length": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def told(result: EvaluationResult) -> Mapping[str, Any]:
    """What the files of its report say, without times and names."""
    return {k: v for k, v in result.report["files"][0].items() if k in ("metrics", "rows", "shares", "prompts")}


def measure(model: Any, data: Any, reward: Any = text_sum, settings: Any = EXACT, **given: Any) -> EvaluationResult:
    return dapo.evaluate(model, data, reward, settings, **({"listener": Recorder()} | given))


def test_an_evaluation_is_that_of_the_command(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(json_line, PROMPTS)))
    found = measure(model, file, None, samples=2, temperature=1.0)
    command = ["evaluate", model, "--data", file, "--samples", 2, "--temperature", 1, "--output", tmp_path / "out"]
    done = CliRunner().invoke(app, [*map(str, command), "reward.kind=exact", "evaluation.max_response_length=6"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert told(found) == {name: written["files"][0][name] for name in told(found)}
    assert set(found.metrics) == {"avg@2", "pass@1", "pass@2", "maj@1", "maj@2", "reward"}
    assert len(found.samples) == 2 * len(PROMPTS) and found.samples[0]["response"]


def test_models_and_rows_of_all_kinds_give_the_same(model: Path) -> None:
    loaded = tiny_model()
    attention, types = loaded.config._attn_implementation, {p.dtype for p in loaded.parameters()}
    before = {name: p.detach().clone() for name, p in loaded.named_parameters()}
    half = EXACT | {"model.compute_dtype": "bfloat16"}
    first = measure(model, PROMPTS, settings=half)
    assert 0 < first.metrics["avg@1"].value < 1
    assert told(measure(loaded, pandas.DataFrame(PROMPTS), settings=half, tokenizer=TOKENIZER)) == told(first)
    assert told(measure(str(model), (row for row in PROMPTS), settings=half)) == told(first)
    # the caller's model is left as it was
    assert loaded.config._attn_implementation == attention and {p.dtype for p in loaded.parameters()} == types
    assert all(p.requires_grad and torch.equal(p, before[name]) for name, p in loaded.named_parameters())


def test_the_result_is_one_line(model: Path) -> None:
    found = measure(model, PROMPTS[:8], samples=2, temperature=1.0)
    average, values = found.metrics["avg@2"], {name: f"{one.value:.3f}" for name, one in found.metrics.items()}
    told = ", ".join(f"{name} {values[name]}" for name in ("avg@2", "pass@2", "reward"))
    assert repr(found) == f"EvaluationResult({told}, 8 prompts)"
    assert average.low is not None and average.high is not None and average.low <= average.value <= average.high


def test_inside_of_a_notebooks_event_loop(model: Path) -> None:
    async def notebook() -> tuple[EvaluationResult, str]:
        return measure(model, PROMPTS[:4]), dapo.generate(model, "1+2=", max_tokens=4)[0].text

    found, text = asyncio.run(notebook())
    assert (
        told(found) == told(measure(model, PROMPTS[:4])) and text == dapo.generate(model, "1+2=", max_tokens=4)[0].text
    )


def test_a_run_brings_its_settings_but_not_a_reward_that_python_had(model: Path, tmp_path: Path) -> None:
    settings = {k: v for k, v in SETTINGS.items() if k != "model.path"} | {"run.dir": str(tmp_path / "run")}
    trained = dapo.train(model, PROMPTS, text_sum, settings, listener=Recorder())
    found = measure(trained.run_dir, PROMPTS[:4], settings=None)
    assert max(sample["length"] for sample in found.samples) == SETTINGS["rollout.max_response_length"]
    with pytest.raises(ConfigError, match="trained on the Python function text_sum, which its folder does not hold"):
        measure(trained.run_dir, PROMPTS[:4], None, None)
    assert measure(trained.run_dir, PROMPTS[:4], None, {"reward.kind": "exact"}).report["files"][0]["prompts"] == 4
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(json_line, PROMPTS[:4])))
    done = CliRunner().invoke(app, ["evaluate", str(trained.run_dir), "--data", str(file), "reward.kind=exact"])
    assert done.exit_code == 0 and "Python function text_sum" in done.stderr and "reward.kind=exact" in done.stderr


def test_one_prompt_or_many_each_as_text_chat_or_row(model: Path) -> None:
    chat = [{"role": "user", "content": "1+2="}]
    (one,) = dapo.generate(model, "1+2=", max_tokens=5)
    assert (one.text, one.tokens, one.finish_reason) == (TOKENIZER.decode(greedy("1+2=", 5)), 5, "length")
    same = [one.text, one.text]
    assert [r.text for r in dapo.generate(model, ["1+2=", chat], max_tokens=5)] == same
    assert [r.text for r in dapo.generate(model, [{"prompt": "1+2="}, {"prompt": chat}], max_tokens=5)] == same
    assert [r.text for r in dapo.generate(model, chat, max_tokens=5)] == same[:1]
    assert dapo.generate(tiny_model(), "1+2=", tokenizer=TOKENIZER, max_tokens=5)[0].text == one.text
    two = dapo.generate(model, ["1+2=", "3="], {"seed": 3}, samples=2, temperature=1.0, max_tokens=5)
    assert [(r.prompt_number, r.sample_number) for r in two] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def greedy(prompt: str, tokens: int) -> Any:
    """By Transformers' own generate."""
    ids = TOKENIZER(prompt, return_tensors="pt").input_ids
    return tiny_model().generate(ids, do_sample=False, max_new_tokens=tokens)[0, ids.shape[1] :]


def test_letters_that_the_tokenizer_does_not_know_are_told(model: Path, tmp_path: Path) -> None:
    listener = Recorder()
    dapo.generate(model, ["1+2=", "1+2\u00e9="], max_tokens=2, listener=listener)
    assert [said.partition(":")[0] for said in listener.warnings] == ["PROMPT, row 2, 1 of 2 looked at"]
    assert "has no token for '\u00e9'" in listener.warnings[0]
    done = CliRunner().invoke(app, ["generate", str(model), "1+2\u00e9=", "--max-tokens", "2", "--quiet"])
    assert done.exit_code == 0 and "the tokenizer has no token for '\u00e9'" in done.stderr
    listener = Recorder()
    measure(model, [PROMPTS[0], {"prompt": "\u00e9=", "answer": "1"}], listener=listener)
    assert ["has no token for '\u00e9'" in said for said in listener.warnings] == [True]
    listener = Recorder()
    measure(model, PROMPTS[:2], listener=listener)
    assert listener.warnings == []


@pytest.mark.parametrize(
    ("call", "change", "kind", "expected"),
    [
        ("generate", {"prompts": []}, DataError, "prompts: there are none"),
        ("generate", {"prompts": ["1=", 3]}, DataError, r"prompts\[1\]: 'prompt' must be text or a list of chat"),
        ("generate", {"prompts": pandas.DataFrame(PROMPTS)}, DataError, "got DataFrame; a data frame's rows"),
        ("generate", {"prompts": 5}, DataError, "a text, a chat, a row or a list of these, got int"),
        ("generate", {"prompts": ""}, DataError, r"prompts\[0\]: 'prompt' is empty"),
        ("generate", {"model": "./gone"}, ModelError, "no such folder"),
        ("generate", {"temperature": -1}, ConfigError, "temperature: evaluation.temperature"),
        ("generate", {"settings": {"sed": 1}}, ConfigError, "did you mean seed"),
        (
            "generate",
            {"max_tokens": 3, "settings": {"evaluation.max_response_length": 4}},
            ConfigError,
            "max_tokens: is 3",
        ),
        (
            "evaluate",
            {"settings": {"evaluation.data": "b"}},
            ConfigError,
            "data: is the rows given, and evaluation.data",
        ),
        ("evaluate", {"data": ["a.jsonl", "b.jsonl"]}, DataError, "2 files; evaluate one at a time"),
        ("evaluate", {"data": "gone.jsonl"}, UserError, "gone.jsonl"),
        ("evaluate", {"data": [{"prompt": "1="}]}, DataError, r"data\[0\]: no key 'answer'"),
        ("evaluate", {"data": []}, DataError, "data: there are no rows in the list"),
        ("evaluate", {"model": tiny_model()}, ModelError, "a loaded model needs its own: give tokenizer="),
    ],
)
def test_a_mistake_is_told(model: Path, call: str, change: Any, kind: type[Exception], expected: str) -> None:
    given = {"generate": {"prompts": "1="}, "evaluate": {"data": PROMPTS[:1], "listener": Recorder()}}[call]
    with pytest.raises(kind, match=expected):
        getattr(dapo, call)(**{"model": model, **given, **change})
