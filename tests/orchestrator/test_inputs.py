"""What a run starts from, as far as data is concerned: lengths, skipped rows, files that are not there."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo.checks.start import notice_generation_config
from dapo.config import build_config, load_config, nested
from dapo.config.plan import missing_files, plan_of
from dapo.errors import ConfigError, DataError, ModelError
from dapo.model.placement import determinism
from dapo.orchestrator import inputs
from dapo.orchestrator.build import Rewards
from run_cases import PROMPTS, TOKENIZER, Recorder, config_for, run, text_sum, tiny_model

LONG = {"prompt": "1+2" * 20 + "=", "answer": "3"}  # 61 tokens, far above data.max_prompt_length=8


def test_an_evaluation_leaves_no_prompt_out_however_long(tmp_path: Path) -> None:  # failures.md 67
    heldout = [PROMPTS[0], LONG, PROMPTS[1]]
    summary = run(tmp_path / "run", {"evaluation.max_response_length": 4}, heldout=heldout)
    assert summary["heldout_rows"] == 3


def test_an_evaluation_prompt_beyond_the_model_is_refused_by_row(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=64)
    with pytest.raises(DataError, match=r"row 2: 61 prompt tokens \+ 12 .*64 positions.*max_response_length=3 "):
        run(tmp_path / "run", heldout=[PROMPTS[0], LONG], model=model)
    run(tmp_path / "fits", {"evaluation.max_response_length": 3}, heldout=[PROMPTS[0], LONG], model=model)
    assert not (tmp_path / "run").exists()


def test_bad_rows_that_are_skipped_are_said(tmp_path: Path) -> None:
    heard = Recorder()
    rows: list[Any] = [*PROMPTS, {"prompt": ""}]
    run(tmp_path / "run", {"data.on_bad_row": "skip", "data.max_bad_rows": 0.1}, heard, rows=rows)
    assert any("prompts[40]: 'prompt' is empty" in w for w in heard.warnings)
    assert any("1 of 41 rows are bad and skipped" in w for w in heard.warnings)
    with pytest.raises(DataError, match="'prompt' is empty"):
        run(tmp_path / "other", {"data.on_bad_row": "skip", "data.max_bad_rows": 1}, heldout=rows)


def test_a_mixture_of_files_trains(tmp_path: Path) -> None:
    import json

    for name, part in (("a.jsonl", PROMPTS[:20]), ("b.jsonl", PROMPTS[20:])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    files = [{"path": str(tmp_path / "a.jsonl"), "weight": 1}, {"path": str(tmp_path / "b.jsonl"), "weight": 2}]
    assert run(tmp_path / "run", {"data.train": files}, rows=None, reward=text_sum)["steps"] == 1


def test_missing_files_and_names_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "here.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    train = [str(tmp_path / "here.jsonl"), "gone.jsonl", "gone", "some/set", {"path": "gsm8k", "name": "main"}]
    config = config_for(tmp_path, {"data.train": train, "data.chat_template": "no.jinja"})
    first, second, third = missing_files(config)
    assert "gone.jsonl" in first and "hub" in second and third == "data.chat_template: 'no.jinja' does not exist"
    for files, rows in (([train[0]], "2 rows"), (["some/set"], "all rows"), (["x.parquet"], "all rows")):
        assert str(plan_of(config_for(tmp_path, {"evaluation.data": files}))["evaluation"]).startswith(rows)


def test_items_are_looked_up_beside_the_recipe(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "chat.jinja"):
        (tmp_path / name).write_text("")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: m}\ndata:\n  chat_template: chat.jinja\n"
        "  train:\n  - {path: rows.jsonl, answer_key: gold}\n  - a/b\n"
    )
    data = load_config(recipe).data
    assert [item.path for item in data.train] == [str(tmp_path / "rows.jsonl"), "a/b"]
    assert data.train[0].answer_key == "gold" and data.chat_template == str(tmp_path / "chat.jinja")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.train": [{"path": "a", "wieght": 2}]}, r"data.train.0: unknown key wieght; an item may have path"),
        ({"data.train": [{"path": "a", "weight": 0}]}, r"data.train.0.weight: .*greater than 0"),
        ({"data.train": ["a", {"path": "b", "weight": 1}]}, "some items have a weight, but a has none"),
        ({"data.train": [3]}, r"data.train.0: must be a file's name, or a mapping"),
        ({"data.train": [{"split": "a"}]}, r"data.train.0.path: required"),
        ({"evaluation.data": {"path": "a", "weight": 1}}, r"evaluation.data: has a weight"),
        ({"data.max_bad_rows": 2}, "max_bad_rows"),
    ],
)
def test_items_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    from dapo.errors import ConfigError

    with pytest.raises(ConfigError, match=said):
        build_config(nested({"model.path": "m", **changes}))


def test_an_item_is_written_as_it_was_read() -> None:
    train = ["a.jsonl", {"path": "b", "split": "train", "weight": 2.0}]
    written = {"data.train": [{"path": "a.jsonl", "weight": 1.0}, train[1]], "evaluation.data": "x.jsonl"}
    config = build_config(nested({"model.path": "m", **written}))
    dumped = config.model_dump(mode="json")
    assert dumped["data"]["train"] == written["data.train"] and dumped["evaluation"]["data"] == ["x.jsonl"]
    assert build_config(dumped) == config


def test_what_a_generation_config_asks_for_in_vain_is_said_once_and_only_then() -> None:
    model, heard = tiny_model(), Recorder()
    model.generation_config.update(repetition_penalty=1.0, no_repeat_ngram_size=0, temperature=0.7, top_p=0.8, top_k=20)
    notice_generation_config(model, heard)
    notice_generation_config(object(), heard)
    assert heard.warnings == []
    model.generation_config.update(repetition_penalty=1.1, no_repeat_ngram_size=3, bad_words_ids=[[5]])
    notice_generation_config(model, heard)
    (said,) = heard.warnings
    assert "repetition_penalty 1.1, no_repeat_ngram_size 3, bad_words_ids [[5]]; not applied" in said


def test_what_a_deterministic_run_asks_of_torch_is_put_back_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config, gpu = config_for(tmp_path), torch.device("cuda")
    with pytest.raises(DataError), determinism(config, gpu):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        raise DataError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with determinism(config, gpu):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_engine_that_does_not_fit_into_the_gpu_says_which_key_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(inputs, "NativeEngine", full)
    with pytest.raises(ModelError, match=r"allocate 9 GiB.*lower rollout\.max_concurrent_samples \(now 32\)"):
        run(tmp_path / "run")


# --- tokens that the model's embedding has no row for -------------------------------------------------------------


def with_a_token_more() -> Any:
    """A tokenizer that was given a special token, with a model that was not made larger; its id is their number."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<more>"]})
    return tokenizer


NO_ROW = rf"'<more>', which is token {len(TOKENIZER)}, but the model's embedding has {len(TOKENIZER)} rows"


def test_a_row_with_a_token_that_the_model_lacks_is_named_before_training_or_skipped(tmp_path: Path) -> None:
    rows = [*PROMPTS[:17], {"prompt": "1<more>2=", "answer": "3"}, *PROMPTS[17:]]
    with pytest.raises(DataError, match=rf"prompts\[17\]: .*{NO_ROW}"):
        run(tmp_path / "run", rows=rows, tokenizer=with_a_token_more())
    assert not (tmp_path / "run").exists()
    heard = Recorder()
    skip = {"data.on_bad_row": "skip", "data.max_bad_rows": 0.1}
    assert run(tmp_path / "skip", skip, heard, rows=rows, tokenizer=with_a_token_more())["steps"] == 1
    assert any("1 of 41 rows are bad and skipped" in w for w in heard.warnings)
    with pytest.raises(DataError, match=rf"prompts\[1\]: .*{NO_ROW}"):
        run(tmp_path / "held", skip, heldout=[PROMPTS[0], rows[17]], tokenizer=with_a_token_more())


def test_a_row_that_is_first_seen_when_it_is_drawn_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo.data.parts.CHECKED_ROWS", 8)
    rows = [*PROMPTS[:8], *({"prompt": f"{n}<more>=", "answer": "3"} for n in "0123"), *PROMPTS[8:12]]
    skip = {"data.on_bad_row": "skip", "data.max_bad_rows": 0.3, "data.shuffle": False, "training.steps": 3}
    heard = Recorder()
    assert run(tmp_path / "run", skip, heard, rows=rows, tokenizer=with_a_token_more())["steps"] == 3
    named = [w for w in heard.warnings if re.search(NO_ROW, w)]
    assert [re.search(r"prompts\[(\d+)\]", w).group(1) for w in named] == ["8", "9", "10", "11"]


def test_a_template_or_instruction_with_such_a_token_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=NO_ROW):
        run(tmp_path / "run", {"data.instruction": "<more>"}, tokenizer=with_a_token_more())
    tokenizer = with_a_token_more()
    tokenizer.chat_template = "<more>{{ messages[0].content }}"
    with pytest.raises(DataError, match=NO_ROW):
        run(tmp_path / "run", {"data.template": "chat"}, tokenizer=tokenizer)


def test_a_stop_token_that_the_model_lacks_is_refused_where_it_is_stated(tmp_path: Path) -> None:
    model, size = tiny_model(), len(TOKENIZER)
    with pytest.raises(ConfigError, match=rf"^rollout\.stop_token_ids: {size} is no token .* 0\.\.{size - 1}$"):
        run(tmp_path / "run", {"rollout.stop_token_ids": [size]}, model=model)
    model.generation_config.eos_token_id = [1, size]
    with pytest.raises(ConfigError, match=rf"^eos_token_id of generation_config\.json: {size} is no token"):
        run(tmp_path / "run", model=model)
    tokenizer = with_a_token_more()
    tokenizer.eos_token = "<more>"
    with pytest.raises(ConfigError, match=rf"^the tokenizer's eos_token: {size} is no token"):
        run(tmp_path / "run", tokenizer=tokenizer)


def test_a_longer_model_by_yarn_takes_longer_prompts(tmp_path: Path) -> None:
    """Of 64 positions, four times as many by YaRN."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
    changes = {"data.max_prompt_length": 240, "training.tokens_per_micro_batch": 512}
    model = tiny_model(max_position_embeddings=64, rope_parameters=rope)
    assert run(tmp_path / "run", changes, model=model)["steps"] == 1
    with pytest.raises(ConfigError, match=r"256 positions \(max_position_embeddings and rope_scaling in its config"):
        run(tmp_path / "long", changes | {"data.max_prompt_length": 245}, model=model)


@pytest.mark.parametrize(("kind", "device"), [("local", "auto"), ("ray", "cpu")])
def test_the_process_of_a_run_on_ray_leaves_the_gpus_to_its_workers(
    monkeypatch: pytest.MonkeyPatch, kind: str, device: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("dapo.orchestrator.build.make_scorer", lambda reward, given=None: made.append(reward))
    reward = {"kind": "model", "path": "r", "correct_above": 0}
    tree = {"model": {"path": "m"}, "reward": reward, "monitor": {"check": reward}, "runtime": {"kind": kind}}
    setup: Any = SimpleNamespace(config=build_config(tree), overrides=inputs.RunOverrides())
    Rewards(setup, print)
    assert [one.device for one in made] == [device, device]
