"""``dapo evaluate``: each number in its report follows from the samples it writes; mistakes are told with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_cases import REWARD, dapo, read_lines, save_model, sums, write_rows
from dapo.inference.evaluate import short_names
from run_cases import PROMPTS, run

BY_RULE = ["reward.kind=function", "reward.function=rule.py:score", "reward.workers=1"]
EXACT = ["reward.kind=exact"]


pytestmark = pytest.mark.usefixtures("in_shared")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    save_model(folder / "model")
    write_rows(folder / "a.jsonl", sums(6))
    write_rows(folder / "b.jsonl", sums(3, start=20))
    (folder / "rule.py").write_text(REWARD)
    return folder


def evaluate(*arguments: Any, code: int = 0) -> Any:
    result = dapo("evaluate", *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


# --- what it measures ---------------------------------------------------------------------------------------------


def test_the_report_follows_from_the_samples(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--samples", 4, "--temperature", 1, "--max-tokens", 6, "--output", out, "--save-samples"]
    result = evaluate("model", "--data", "a.jsonl", *options, "--quiet", *BY_RULE)
    report = json.loads((out / "evaluation.json").read_text())
    (found,) = report["files"]
    samples = read_lines(out / "samples-a.jsonl")
    assert [(s["row"], s["index"]) for s in samples] == [(r, i) for r in range(6) for i in range(4)]
    assert [s["prompt"] for s in samples[::4]] == [row["prompt"] for row in sums(6)]
    for s in samples:
        assert s["correct"] == (sum(map(ord, s["response"])) % 4 == 0)
    correct = [sum(s["correct"] for s in samples if s["row"] == row) for row in range(6)]
    assert 0 < sum(correct) < 24  # otherwise this shows little
    assert [row["correct"] for row in found["rows"]] == correct
    metrics = {name: m["value"] for name, m in found["metrics"].items()}
    assert metrics["avg@4"] == pytest.approx(sum(correct) / 24)
    assert metrics["pass@1"] == pytest.approx(sum(correct) / 24)
    assert metrics["pass@2"] == pytest.approx(sum(1 - (4 - c) * (3 - c) / 12 for c in correct) / 6)
    assert metrics["pass@4"] == pytest.approx(sum(c > 0 for c in correct) / 6)
    assert not any(name.startswith("maj") for name in metrics)  # this reward tells no answers
    assert found["response_length"]["mean"] == pytest.approx(sum(s["length"] for s in samples) / 24)
    assert found["shares"]["truncated"] == sum(s["finish_reason"] == "length" for s in samples) / 24
    assert f"{metrics['avg@4']:.1%}" in result.stdout and "pass@2" in result.stdout
    assert report["settings"]["evaluation"]["samples_per_prompt"] == 4
    assert report["environment"]["packages"]["torch"]
    # the same seed, the same samples, in a file of another name
    evaluate("model", "a.jsonl", *options[:6], "--output", out / "again.json", "--save-samples", "-q", *BY_RULE)
    again = json.loads((out / "again.json").read_text())["files"][0]
    assert again["rows"] == found["rows"] and again["metrics"] == found["metrics"]


def test_each_file_is_a_benchmark_of_its_own(tmp_path: Path) -> None:
    result = evaluate(
        *("model", "--data", "a.jsonl", "b.jsonl", *EXACT, "--rows", 2, "--max-tokens", 3, "--output", tmp_path),
        "--average",
    )
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(f["name"], f["prompts"]) for f in report["files"]] == [("a", 2), ("b", 2)]
    assert len({f["sha256"] for f in report["files"]}) == 2
    assert report["average"] == sum(f["metrics"]["avg@1"]["value"] for f in report["files"]) / 2
    assert "mean over 2 files" in result.stdout
    assert "maj@1" in report["files"][0]["metrics"]  # an exact answer can be voted on
    without = evaluate("model", "a.jsonl", "b.jsonl", *EXACT, "--rows", 1, "--max-tokens", 1, "-q")
    assert "mean over" not in without.stdout


def test_the_settings_are_printed(tmp_path: Path) -> None:
    """Entry 76: evaluation has its own sampling settings, and says so."""
    heard = evaluate("model", "a.jsonl", "--rows", 1, "--max-tokens", 2, "--top-p", 0.5, "--temperature", 0.7, *EXACT)
    assert "sampling: 1 per prompt, temperature 0.7, top_p 0.5, at most 2 tokens, seed 0" in heard.stderr
    assert "prompts: template plain" in heard.stderr and "reward: exact" in heard.stderr
    assert "a prompt as the model sees it: '0+0='" in heard.stderr
    assert "sampling:" not in heard.stdout
    options = ["--min-p", 0.2, "--temperature", 1, "--stop", "1", "--stop", "23", "--max-tokens", 3]
    heard = evaluate("model", "a.jsonl", "--rows", 1, *options, *EXACT)
    assert "sampling: 1 per prompt, temperature 1, min_p 0.2, until '1' or '23', at most 3 tokens" in heard.stderr


def test_rows_may_have_other_keys() -> None:
    write_rows(Path("other.jsonl"), [{"question": "1+1=", "result": 2}])
    keys = ["data.prompt_key=question", "data.answer_key=result"]
    evaluate("model", "other.jsonl", "--max-tokens", 2, *keys, *EXACT)
    assert "other.jsonl:1" in evaluate("model", "other.jsonl", *EXACT, code=2).stderr


def test_bfloat16_is_what_the_model_is_loaded_in() -> None:
    heard = evaluate("model", "a.jsonl", "--rows", 1, "--max-tokens", 2, "model.compute_dtype=bfloat16", *EXACT)
    assert "model model in bfloat16" in heard.stderr


def test_a_benchmark_is_a_preset_that_options_override(tmp_path: Path) -> None:
    chat = save_model(tmp_path / "chat", chat_template="{% for m in messages %}{{ m['content'][:3] }}={% endfor %}")
    options = ["a.jsonl", "--benchmark", "AIME", "--rows", 1, "--samples", 2, "--max-tokens", 3, "--output", tmp_path]
    heard = evaluate(chat, *options, "reward.workers=1")
    assert "2 per prompt, temperature 1, top_p 0.7, at most 3 tokens" in heard.stderr
    assert "template dapo" in heard.stderr and "extract answer_line, boxed" in heard.stderr
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["benchmark"] == "aime" and set(report["files"][0]["metrics"]) >= {"avg@2", "pass@2", "reward"}
    assert "there are: gsm8k, math500, aime, amc" in evaluate("model", "a.jsonl", "--benchmark", "x", code=2).stderr


def test_a_run_brings_its_model_template_and_reward(tmp_path: Path) -> None:
    """The run folder, its model folder and a checkpoint all lead to the recipe; --benchmark goes over it."""
    (tmp_path / "rule.py").write_text(REWARD)
    changes = {
        "reward": {"kind": "function", "function": str(tmp_path / "rule.py:score"), "workers": 1},
        "data.instruction": "+1=",
        "evaluation.max_response_length": 5,
        "evaluation.data": [str(Path("b.jsonl").resolve())],
        "run.save_every": 1,
        "data.max_prompt_length": 9,
        "training.tokens_per_micro_batch": 64,
    }
    run(tmp_path / "run", changes, rows=PROMPTS, reward=None)
    checkpoint = next((tmp_path / "run/checkpoints").glob("step-*"))
    for model, loaded in (("run", "run/model-after"), ("run/model-before", None), (checkpoint, checkpoint / "model")):
        heard = evaluate(tmp_path / model)
        assert f"settings of the recipe {tmp_path / 'run/config.yaml'}" in heard.stderr
        if loaded is not None:
            assert f"its model is {tmp_path / loaded}" in heard.stderr
        assert "instruction '+1='" in heard.stderr and "at most 5 tokens" in heard.stderr
        assert "reward: function" in heard.stderr and "b: 3 prompts" in heard.stdout
    heard = evaluate(
        tmp_path / "run", "--benchmark", "gsm8k", "--max-tokens", 2, "reward.kind=exact", "data.max_prompt_length=100"
    )
    assert "Reason step by step" in heard.stderr and "reward: exact" in heard.stderr
    assert "template plain" in heard.stderr  # the benchmark leaves that to the recipe


def test_a_recipe_can_be_named(tmp_path: Path) -> None:
    recipe = {"model": {"path": "x"}, "reward": {"kind": "exact"}, "evaluation": {"max_response_length": 4}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe | {"training": {"steps": 5}}))
    heard = evaluate("model", "a.jsonl", "--recipe", tmp_path / "r.yaml", "--rows", 1)
    assert "reward: exact" in heard.stderr and "at most 4 tokens" in heard.stderr
    (tmp_path / "r.yaml").write_text("model: {path: x}\nevaluations: {}\n")
    assert "r.yaml:2" in evaluate("model", "a.jsonl", "--recipe", tmp_path / "r.yaml", code=2).stderr


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dapo", "evaluate", "model", "a.jsonl", "--rows", "2", "--max-tokens", "3"]
    done = subprocess.run([*command, *EXACT, "--output", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "a: 2 prompts" in done.stdout and "loading the model" in done.stderr
    assert json.loads((tmp_path / "evaluation.json").read_text())["files"][0]["prompts"] == 2


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["model"], 2, "--data: required"),
        (["model", "gone.jsonl"], 2, "'gone.jsonl' does not exist"),
        (["model", "a.jsonl", "--data", "a.jsonl"], 2, "a.jsonl is named twice"),
        (["./gone", "a.jsonl"], 1, "model './gone': no such folder"),
        (["empty", "a.jsonl"], 1, "the folder holds no model"),
        (["a.jsonl", "b.jsonl"], 1, "is a file"),
        (["model", "a.jsonl", "--samples", "0"], 2, "--samples: evaluation.samples_per_prompt"),
        (["model", "a.jsonl", "evaluation.top_q=1"], 2, "did you mean evaluation.top_p?"),
        (["model", "a.jsonl", "--save-samples"], 2, "--save-samples: needs a place"),
        (["model", "a.jsonl", "--output", "a.jsonl/x"], 1, "--output: cannot write to"),
        (["model", "a.jsonl", "data.template=chat"], 2, "no chat template"),
        (
            ["model", "a.jsonl", "reward.kind=exact", "--max-tokens", "300"],
            2,
            "a.jsonl, row 1: 4 prompt tokens and up to 300",
        ),
        (["model", "a.jsonl", "reward.kind=exact", "data.max_prompt_length=3"], 2, "use data.max_prompt_length=4"),
    ],
)
def test_a_mistake_is_told_with_a_way_out(arguments: list[str], code: int, expected: str) -> None:
    Path("empty").mkdir(exist_ok=True)
    assert expected in evaluate(*arguments, code=code).stderr


def test_a_prompt_longer_than_the_model_is_named() -> None:
    write_rows(Path("long.jsonl"), [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 200, "answer": "2"}])
    heard = evaluate("model", "long.jsonl", "--max-tokens", 2, *EXACT, code=2)
    assert "long.jsonl, row 2: the prompt has 400 tokens, but the model was made for 256 positions" in heard.stderr


def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text()) | {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
    }
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    assert "'opt' is not supported" in evaluate(tmp_path / "m", "a.jsonl", *EXACT, code=1).stderr


def test_names_of_files_are_told_apart() -> None:
    assert short_names(["x/test.jsonl", "y/test.jsonl.gz", "other.json"]) == ["test-1", "test-2", "other"]
