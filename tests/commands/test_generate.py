"""``dapo generate``: the responses alone on standard output, in order, the same ones that evaluation would get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from command_cases import dapo, save_model, write_rows
from dapo.rollout.native.checks import MOST_TOP_LOGPROBS
from run_cases import TOKENIZER

pytestmark = pytest.mark.usefixtures("in_shared")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    save_model(folder / "model")
    save_model(folder / "chat", chat_template="{% for m in messages %}{{ m['content'] }}={% endfor %}")
    write_rows(folder / "rows.jsonl", [{"prompt": f"{k}+1="} for k in range(3)])
    return folder


def generate(*arguments: Any, stdin: str | None = None, code: int = 0) -> Any:
    result = dapo("generate", *arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    return result


def lines(*arguments: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in generate(*arguments, "--json", **kwargs).stdout.splitlines()]


def greedy(prompt: str, tokens: int, model: str = "model") -> tuple[str, float]:
    """By Transformers' own generate."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    ids = TOKENIZER(prompt, return_tensors="pt").input_ids
    out = loaded.generate(ids, do_sample=False, max_new_tokens=tokens, output_scores=True, return_dict_in_generate=True)
    new = out.sequences[0, ids.shape[1] :]
    logprob = sum(torch.log_softmax(s[0], -1)[t].item() for s, t in zip(out.scores, new, strict=True))
    return TOKENIZER.decode(new, skip_special_tokens=True), logprob


def test_a_response_is_printed_as_it_is() -> None:
    result = generate("model", "1+2=", "--max-tokens", 8)
    assert result.stdout == greedy("1+2=", 8)[0] + "\n"
    assert "sampling: 1 per prompt, greedy" in result.stderr and "reward" not in result.stderr
    assert generate("model", "1+2=", "--max-tokens", 8, "--quiet").stderr == ""


def test_json_lines_in_the_order_of_the_prompts() -> None:
    found = lines("model", "3*3=", "1+2=", "--max-tokens", 6)
    assert [f["prompt"] for f in found] == ["3*3=", "1+2="]
    for f in found:
        text, logprob = greedy(f["prompt"], 6)
        assert f["response"] == text and f["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert f["finish_reason"] == ("length" if f["tokens"] == 6 else "stop") and f["prompt_tokens"] == 4


def test_samples_differ_and_the_seed_brings_them_back() -> None:
    options = ["model", "1+2=", "4+4=", "--samples", 4, "--temperature", 1, "--max-tokens", 8]
    found = lines(*options, "--seed", 3)
    assert [(f["prompt_number"], f["sample_number"]) for f in found] == [(p, s) for p in (1, 2) for s in (1, 2, 3, 4)]
    assert len({f["response"] for f in found}) > 2
    assert lines(*options, "--seed", 3) == found != lines(*options, "--seed", 4)
    text = generate(*options, "--seed", 3).stdout
    assert text.count("--- prompt") == 8 and found[5]["response"] in text


def test_all_samples_alike_is_said() -> None:
    assert "at temperature 0 all samples" in generate("model", "1+1=", "--samples", 2, "--max-tokens", 2).stderr


def test_prompts_come_from_files_and_standard_input() -> None:
    assert [f["prompt"] for f in lines("model", "--data", "rows.jsonl", "--max-tokens", 2)] == ["0+1=", "1+1=", "2+1="]
    assert [f["prompt"] for f in lines("model", "-", "5=", "--max-tokens", 2, stdin="1+\n1=")] == ["1+\n1=", "5="]
    set_rows = ["--set", "evaluation.rows=1", "--set", "data.template=plain"]
    assert len(lines("model", "--data", "rows.jsonl", "--max-tokens", 2, *set_rows)) == 1


def test_min_p_leaves_the_likeliest_tokens_only() -> None:
    """Almost 1 leaves one of them: the samples are the greedy one."""
    options = ["model", "1+2=", "--max-tokens", 6]
    sampled = lines(*options, "--samples", 3, "--temperature", 1, "--min-p", 0.999)
    assert {f["response"] for f in sampled} == {lines(*options)[0]["response"]}


def test_a_stop_text_ends_a_response() -> None:
    whole = lines("model", "1+2=", "--max-tokens", 8, "--stop", "none such")[0]
    cut = lines("model", "1+2=", "--max-tokens", 8, "--stop", "none such", "--stop", whole["response"][2:4])[0]
    text = whole["response"]
    assert cut["response"] == text[: text.index(text[2:4]) + 2] != text and cut["finish_reason"] == "stop"


def test_the_likeliest_tokens_in_json() -> None:
    (found,) = lines("model", "1+2=", "--max-tokens", 5, "--top-logprobs", MOST_TOP_LOGPROBS)
    told = found["token_logprobs"]
    assert len(told) == found["tokens"] and "".join(t["token"] for t in told) == found["response"]
    assert sum(t["logprob"] for t in told) == pytest.approx(found["logprob"], abs=1e-5)
    for token in told:
        assert len(token["top"]) == min(MOST_TOP_LOGPROBS, len(TOKENIZER))
        assert token["top"][0] == {key: token[key] for key in ("id", "token", "logprob")}  # greedy
        assert [t["logprob"] for t in token["top"]] == sorted((t["logprob"] for t in token["top"]), reverse=True)
    assert "token_logprobs" not in lines("model", "1+2=", "--max-tokens", 1)[0]
    heard = generate("model", "1=", "--json", "--top-logprobs", MOST_TOP_LOGPROBS + 1, code=2).stderr
    assert f"less than or equal to {MOST_TOP_LOGPROBS}" in heard


def test_a_penalty_that_the_model_asks_for_is_not_applied_and_that_is_said(tmp_path: Path) -> None:
    save_model(tmp_path / "asks")
    file = tmp_path / "asks/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.1, "min_length": 0}))
    heard = generate(tmp_path / "asks", "1+2=", "--max-tokens", 8)
    assert "generation_config.json asks for repetition_penalty 1.1; not applied" in heard.stderr
    assert heard.stdout == greedy("1+2=", 8)[0] + "\n"
    assert "generation_config" not in generate("model", "1+2=", "--max-tokens", 1).stderr


def test_auto_is_chat_where_the_tokenizer_has_a_template() -> None:
    assert "template plain" in generate("model", "1=", "--max-tokens", 1).stderr
    assert "template chat" in generate("chat", "1=", "--max-tokens", 1).stderr
    assert "template plain" in generate("chat", "1=", "--max-tokens", 1, "--template", "plain").stderr
    with_system = lines("chat", "1", "--max-tokens", 1, "--system", "23")
    assert with_system[0]["prompt_tokens"] == len("23=1=")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["model"], 2, "nothing to generate from"),
        (["model", "-", "-"], 2, "can be read only once"),
        (["model", "-"], 2, "nothing came from standard input"),
        (["model", "--data", "gone.jsonl"], 2, "'gone.jsonl' does not exist"),
        (["model", ""], 2, "a prompt is empty"),
        (["./gone", "1="], 1, "no such folder"),
        (["model", "1=", "--template", "chat"], 2, "no chat template"),
        (["model", "1=", "--set", "sed=1"], 2, "did you mean seed?"),
        (["model", "1=", "--min-p", "1"], 2, "--min-p: evaluation.min_p"),
        (["model", "1=", "--stop", ""], 2, "--stop: evaluation.stop: a stop text is empty"),
        (["model", "1=", "--top-logprobs", "3"], 2, "add --json"),
        (["model", "1=", "--temperature", "-1"], 2, "--temperature: evaluation.temperature"),
        (
            ["model", "1=", "--set", "rollout.engine=openai", "--set", "rollout.url=http://127.0.0.1:1"],
            2,
            "use dapo evaluate --server URL",
        ),
        (["model", "1=", "--max-tokens", "500"], 2, "use --max-tokens 254 or less"),
    ],
)
def test_a_mistake_is_told_with_a_way_out(arguments: list[str], code: int, expected: str) -> None:
    result = generate(*arguments, stdin="", code=code)
    assert expected in result.stderr and result.stdout == ""


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", vocab_size=len(TOKENIZER) - 1)
    last = TOKENIZER.convert_ids_to_tokens(len(TOKENIZER) - 1)
    result = dapo("generate", model, f"1{last}2=")
    assert result.exit_code == 2
    assert f"{last!r}, which is token {len(TOKENIZER) - 1}, but the model's embedding has" in result.stderr


def test_an_episode_that_died_is_an_error_and_an_unknown_environment_is_refused_first() -> None:
    Path("env.py").write_text("class Bad:\n    def reset(self, **row):\n        raise RuntimeError('no database')\n")
    small = ("--max-tokens", 8, "--set", "data.max_prompt_length=64", "--set", "rollout.max_response_length=9")
    result = generate("model", "1+2=", "--environment", "env.py:Bad", *small, "--json", "--samples", 2, code=1)
    assert [json.loads(line)["reward"] for line in result.stdout.splitlines()] == [None, None]
    assert "temperature 0 all samples" in result.stderr.replace("\n", " "), "doubts are those of dapo evaluate"
    assert "2 episodes died: environment: reset: RuntimeError: no database" in result.stderr.replace("\n", " ")
    for name in ("no-such", "env.py:Gone"):
        result = generate("model", "1+2=", "--environment", name, code=2)
        assert "environment.name" in result.stderr and "loading" not in result.stderr
