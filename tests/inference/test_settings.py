"""Which model a name stands for, and which of several settings counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo.config import build_config
from dapo.config.reading import apply_overrides, layered_config, merged
from dapo.errors import ConfigError, ModelError
from dapo.evaluation.benchmarks import BENCHMARKS, benchmark_named
from dapo.evaluation.evaluate import evaluation_sampling
from dapo.inference.found_model import FoundModel, find_model
from dapo.inference.model import ONE_EACH, Prompting, doubts, inference_config, settings_lines
from dapo.reward.math.extract import final_answer
from dapo.rollout.engine import Sampling


def a_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    return folder


def test_a_run_folder_is_its_last_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("step-00002", "step-00010", "step-00010-update-00003"):
        a_model(run / "checkpoints" / name / "model")
    (run / "checkpoints/step-00011").mkdir()  # without a model
    for name in ("config.yaml", "environment.json"):
        (run / name).touch()
    last = run / "checkpoints/step-00010-update-00003/model"
    assert find_model(str(run)) == FoundModel(str(last), run / "config.yaml")
    earlier = run / "checkpoints/step-00002"
    assert find_model(str(earlier)) == FoundModel(str(earlier / "model"), run / "config.yaml")
    after = a_model(run / "model-after")
    assert find_model(str(run)) == find_model(str(after)) == FoundModel(str(after), run / "config.yaml")


def test_other_folders_and_names_stand_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_model(tmp_path / "parent/m")
    (tmp_path / "parent/config.yaml").touch()  # of something else: a run has an environment, too
    assert find_model(str(tmp_path / "parent/m")) == FoundModel(str(tmp_path / "parent/m"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/parent/m").path == str(tmp_path / "parent/m")
    assert find_model("owner/name") == FoundModel("owner/name")
    for name in ("", "./x", "/x", "a/b/c", "/" + "x" * 5000):
        with pytest.raises(ModelError, match="no such folder"):
            find_model(name)


def test_a_later_layer_counts_more_and_another_kind_starts_anew() -> None:
    base: dict[str, Any] = {"seed": 1, "reward": {"kind": "math", "extract": ["boxed"], "workers": 3}}
    assert merged(base, {"reward": {"workers": 1}})["reward"] == {**base["reward"], "workers": 1}
    assert merged(base, {"reward": {"kind": "exact"}}) == {"seed": 1, "reward": {"kind": "exact"}}
    assert base["reward"]["workers"] == 3
    config = layered_config([{"model": {"path": "m"}}, base, {"seed": 2}], ["reward.kind=exact", "seed=3"])
    assert (config.seed, config.reward.kind) == (3, "exact")


def test_a_message_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^--rows: evaluation\.rows: .* got 0"):
        layered_config([{"model": {"path": "m"}, "evaluation": {"rows": 0}}], where={"evaluation.rows": "--rows"})


def test_what_concerns_training_alone_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """A prompt length that the recipe's micro-batches could not hold, and a response as long."""
    (tmp_path / "r.yaml").write_text(
        "model: {path: x, compute_dtype: bfloat16}\nrollout: {max_response_length: 100, samples_per_prompt: 4}\n"
        "data: {max_prompt_length: 20, train: gone.jsonl}\nalgorithm: {overlong_buffer: {len: 100}}\n"
        "training: {tokens_per_micro_batch: 200}\nevaluation: {every: 5, patience: 2, temperature: 0.6}\n"
    )
    config = inference_config(
        FoundModel("m", tmp_path / "r.yaml"),
        overrides=["data.max_prompt_length=90000", "rollout.max_response_length=5"],
    )
    assert (config.model.path, config.model.compute_dtype, config.evaluation.temperature) == ("m", "bfloat16", 0.6)
    assert (config.data.max_prompt_length, config.data.train, config.evaluation.patience) == (90000, [], None)


def test_sampling_of_the_recipe_is_that_of_the_evaluation(tmp_path: Path) -> None:
    """Stop texts are those of the rollout unless the evaluation has its own, be they none."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: x}\nrollout: {stop: ['###', x]}\nevaluation: {min_p: 0.1, temperature: 1}\n")
    config = inference_config(FoundModel("m", recipe))
    assert evaluation_sampling(config) == Sampling(1.0, 1024, min_p=0.1, stop=("###", "x"))
    assert "temperature 1, min_p 0.1, until '###' or 'x', at most" in settings_lines(config)[-1]
    own = inference_config(FoundModel("m", recipe), overrides=["evaluation.stop=y"])
    assert evaluation_sampling(own).stop == ("y",)
    assert evaluation_sampling(inference_config(FoundModel("m", recipe), overrides=["evaluation.stop=[]"])).stop == ()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_preset_says_what_decides_a_result(name: str) -> None:
    settings = BENCHMARKS[name].settings
    decides = {"samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "max_response_length"}
    assert decides == set(settings["evaluation"])
    assert "instruction" in settings["data"] and settings["reward"]["extract"]
    config = inference_config(FoundModel("m"), settings)
    assert config.evaluation.samples_per_prompt == settings["evaluation"]["samples_per_prompt"]
    assert not config.data.train and not config.evaluation.data
    build_config(config.model_dump())


def test_a_preset_finds_the_answer_it_asks_for() -> None:
    """The box comes first where a box is asked for, the line where a line is."""
    response = "So \\boxed{3}.\nAnswer: 4"
    found = {name: final_answer(response, b.settings["reward"]["extract"]) for name, b in BENCHMARKS.items()}
    assert found == {"gsm8k": "3", "math500": "3", "aime": "4", "amc": "4"}
    assert benchmark_named("MATH-500").name == "math500"


def test_a_text_that_was_blanked_in_a_run_folder_is_asked_for(tmp_path: Path) -> None:
    """Otherwise the model would be asked with the blank in its prompt."""
    recipe = tmp_path / "config.yaml"
    recipe.write_text("model: {path: m}\ndata: {instruction: 'say password=(not recorded)'}\nreward: {kind: exact}\n")
    with pytest.raises(ConfigError, match=r"data\.instruction"):
        inference_config(FoundModel("m", recipe))
    assert inference_config(FoundModel("m", recipe), overrides=["data.instruction=again"]).data.instruction == "again"


@pytest.mark.parametrize(
    ("asked", "engine", "arguments"),
    [((), "vllm", {"a": 1}), (("rollout.engine=native",), "native", {}), (("seed=3",), "vllm", {"a": 1})],
)
def test_a_recipe_says_what_samples_unless_another_engine_is_asked_for(
    tmp_path: Path, asked: tuple[str, ...], engine: str, arguments: dict[str, Any]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: m}\nrollout: {engine: vllm, engine_args: {a: 1}, cache_gib: 3}\n")
    found = inference_config(FoundModel("m"), recipe=recipe, overrides=asked).rollout
    assert (found.engine, found.engine_args, found.cache_gib) == (engine, arguments, 3)
    served = inference_config(FoundModel("m"), {"rollout": {"engine": "openai", "url": "http://a"}}, recipe=recipe)
    assert served.rollout.engine_args == {}


@pytest.mark.parametrize("key", ["rollout", "evaluation"])
def test_temperatures_that_vllm_changes_or_refuses_are_conflicts(key: str) -> None:
    for value in (0.001, 2.5):
        with pytest.raises(ConfigError, match=rf"{key}\.temperature: is {value}, but vLLM samples at 0"):
            inference_config(FoundModel("m"), {key: {"temperature": value}}, overrides=["rollout.engine=vllm"])


def test_it_is_told_which_settings_a_service_does_not_hear_of() -> None:
    request = {"rollout": {"engine": "openai", "url": "http://a", "request": {"p": "$prompt", "t": "$temperature"}}}
    sampling = {"evaluation": {"temperature": 0.7, "top_p": 0.9, "samples_per_prompt": 2}}
    said = list(doubts(Prompting(inference_config(FoundModel("m"), request, sampling), None, None), {}))  # type: ignore[arg-type]
    assert [text.partition(":")[0] for text in said] == [f"rollout.request sends no ${n}" for n in ("top_p", "seed")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("training.steps=3", "training.steps: is for training, and has no effect here; leave it out"),
        ("algorithm={kl: {mode: loss}}", "algorithm.kl.mode: is for training"),
        ("model.lora.rank=8", "model.lora.rank: is for training"),
        ("data.train=x.jsonl", "data.train: is for training"),
        ("rollout.temperature=0.5", "rollout.temperature: is for training, .*evaluation.temperature is what counts"),
        ("evaluation.every=3", "evaluation.every: is for training"),
        ("model.path=other", "model.path: .*; the model is the command.s .*first argument"),
    ],
)
def test_what_is_asked_for_and_has_no_effect_is_refused(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        inference_config(FoundModel("m"), overrides=[given])
    tree: dict[str, Any] = {}
    apply_overrides(tree, [given], {})
    with pytest.raises(ConfigError, match=f"^{told}"):
        inference_config(FoundModel("m"), tree)


@pytest.mark.parametrize("given", ["reward.kind=exact", "evaluation.rows=3", "evaluation.metrics.m=x.py:f"])
def test_what_scores_is_refused_where_nothing_is_scored(given: str) -> None:
    with pytest.raises(ConfigError, match=f"^{given.partition('=')[0]}: is for training and evaluation, and has no"):
        inference_config(FoundModel("m"), ONE_EACH, overrides=[given])
    found = inference_config(FoundModel("m"), ONE_EACH, overrides=["evaluation={data: x.jsonl, rows: 3}"])
    assert found.evaluation.rows == 3


def test_what_is_asked_for_and_counts_is_taken(tmp_path: Path) -> None:
    given = ["model.lora.base=nf4", "runtime.device=cpu", "rollout.stop=[x]", "environment.max_turns=2", "seed=3"]
    config = inference_config(
        FoundModel("m"), overrides=[*given, "data.chat_template_kwargs={a: 1}", "reward.kind=exact"]
    )
    assert (config.model.lora.base, config.rollout.stop, config.seed) == ("nf4", ["x"], 3)
    assert settings_lines(config)[0] == "model m in float32, the base of an adapter in 4 bits"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: x, lora: {rank: 4, base: nf4}}\nreward: {kind: model, path: y}\n"
        "algorithm: {filter_groups: {metric: score}}\n"
    )
    found = inference_config(FoundModel("m", recipe))
    assert (found.model.lora.base, found.model.lora.rank) == ("nf4", 0)
    with pytest.raises(ConfigError, match="base=full"):
        inference_config(FoundModel("m", recipe), overrides=["rollout.engine=vllm"])
