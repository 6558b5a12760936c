"""Recipes: what is accepted, what is refused, and whether the message says where and what would work."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from dapo.config import (
    Config,
    ExactReward,
    FunctionReward,
    MathReward,
    all_keys,
    build_config,
    load_config,
    warnings_for,
)
from dapo.config.messages import _ANSWERS, ELSEWHERE, nearest_key
from dapo.errors import ConfigError

RECIPE = """\
# a recipe
seed: 3
model:
  path: some/model
data:
  train: [train.jsonl]
  max_prompt_length: 64
rollout:
  prompts_per_step: 16
  samples_per_prompt: 8
  max_response_length: 48
reward:
  kind: math
algorithm:
  overlong_buffer: {enable: true, len: 8}
  kl:
    mode: loss
training:
  groups_per_update: 4
  learning_rate: 5e-5
  tokens_per_micro_batch: 4096
evaluation:
  data: held.jsonl
"""

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str | bytes = RECIPE, *overrides: str) -> Config:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(path, overrides)

    return load


@pytest.fixture
def message(load: Load) -> Callable[..., str]:
    def message(text: str | bytes = RECIPE, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return message


Message = Callable[..., str]


# --- accepted -----------------------------------------------------------------------------------------------------


def test_a_recipe_is_read(load: Load) -> None:
    config = load()
    assert config.seed == 3
    assert config.training.learning_rate == 5e-5  # YAML reads a number without a dot as text
    assert [item.path for item in config.evaluation.data] == ["held.jsonl"]
    assert config.updates_per_step == 4
    assert config.run.dir == "runs/recipe"


def test_defaults_are_the_papers() -> None:
    config = build_config({"model": {"path": "m"}})
    algorithm, rollout, training = config.algorithm, config.rollout, config.training
    assert (rollout.prompts_per_step, rollout.samples_per_prompt) == (512, 16)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, 0)
    assert rollout.max_response_length == 16_384 + 4_096
    assert algorithm.overlong_buffer.len == 4_096 and algorithm.overlong_buffer.penalty_factor == 1.0
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert algorithm.loss_agg_mode == "token-mean"
    assert algorithm.filter_groups.enable and algorithm.filter_groups.metric == "acc"
    assert algorithm.overlong_buffer.enable and not algorithm.overlong_filtering
    assert algorithm.advantage.kind == "group-norm" and algorithm.advantage.epsilon == 1e-6
    assert algorithm.kl.mode == "off"
    assert config.updates_per_step == 16
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (1e-6, 0.1, 1.0)
    assert training.betas == (0.9, 0.999) and training.warmup_steps == 20
    assert config.proximal == "engine" and rollout.max_staleness == 0
    assert warnings_for(config) == []


def test_overrides_win_and_are_yaml(load: Load) -> None:
    config = load(RECIPE, "training.learning_rate=1e-6", "algorithm.kl={mode: measure}", "reward.workers=5", "seed=9")
    assert config.training.learning_rate == 1e-6
    assert config.algorithm.kl.mode == "measure"
    assert isinstance(config.reward, MathReward) and config.reward.workers == 5
    assert config.seed == 9


def test_overrides_make_sections_that_the_recipe_lacks(load: Load) -> None:
    config = load("model: {path: m}\nreward:\n", "reward.kind=exact", "reward.after='Answer:'", "run.dir=there")
    assert isinstance(config.reward, ExactReward) and config.reward.after == "Answer:"
    assert config.run.dir == "there"


def test_an_override_changes_one_of_two_aliased_sections(load: Load) -> None:
    text = "model: {path: m}\nrollout: &r {temperature: 0.5}\nevaluation: *r\n"
    config = load(text, "evaluation.temperature=0.25")
    assert (config.rollout.temperature, config.evaluation.temperature) == (0.5, 0.25)


def test_a_byte_order_mark_does_not_matter(load: Load) -> None:
    assert load(b"\xef\xbb\xbf" + RECIPE.encode()) == load()


def test_empty_sections_keep_their_defaults(load: Load) -> None:
    config = load("model: {path: m}\nalgorithm:\n  # kl: {mode: loss}\n  advantage:\nreward:\nrun:\n")
    assert config.algorithm.kl.mode == "off"
    assert config.reward.kind == "math"
    assert config.run.dir == "runs/recipe"


@pytest.mark.parametrize("word", ["off", "'off'", "Off"])
def test_off_is_a_mode_and_not_false(load: Load, word: str) -> None:
    assert load(f"model: {{path: m}}\nalgorithm: {{kl: {{mode: {word}}}}}").algorithm.kl.mode == "off"


def test_disabled_parts_need_no_other_key(load: Load) -> None:  # failure 32
    config = load(
        "model: {path: m}\nalgorithm: {overlong_buffer: {enable: false}, filter_groups: {enable: false}}\n"
        "rollout: {max_response_length: 10}\ntraining: {tokens_per_micro_batch: 4096}"
    )
    assert not config.algorithm.overlong_buffer.enable


def test_files_are_looked_up_beside_the_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, work = tmp_path / "recipes", tmp_path / "work"
    recipes.mkdir()
    work.mkdir()
    (recipes / "r.yaml").write_text(
        "model: {path: m}\ndata: {train: [a.jsonl, b.jsonl]}\nreward: {kind: function, function: 'f.py:score'}"
    )
    (recipes / "a.jsonl").touch()
    (recipes / "f.py").touch()
    (work / "b.jsonl").touch()
    monkeypatch.chdir(work)
    config = load_config(Path("../recipes/r.yaml"))
    assert [item.path for item in config.data.train] == ["../recipes/a.jsonl", "b.jsonl"]
    assert isinstance(config.reward, FunctionReward) and config.reward.function == "../recipes/f.py:score"


def test_proximal_auto_follows_staleness_and_correction(load: Load) -> None:
    assert load().proximal == "engine"
    assert load(RECIPE, "rollout.max_staleness=1").proximal == "recompute"
    assert load(RECIPE, "algorithm.correction.kind=truncate").proximal == "recompute"
    assert load(RECIPE, "algorithm.proximal=recompute").proximal == "recompute"


# --- unknown keys (failure 63) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("training.learning_rte=1e-6", "training.learning_rate"),
        ("learning_rate=1e-6", "training.learning_rate"),
        ("rollout.learning_rate=1e-6", "training.learning_rate"),
        ("training.max_response_length=9", "rollout.max_response_length"),
        ("clip_ratio_high=0.3", "algorithm.clip_ratio_high"),
        ("algorithm.filter_group.enable=true", "algorithm.filter_groups.enable"),
        ("algorithm.kl.coeff=1", "algorithm.kl.coef"),
        ("algoritm.clip_ratio_low=0.1", "algorithm.clip_ratio_low"),
        ("trainin.steps=5", "training.steps"),
        ("algorithm.klx.coef=1", "algorithm.kl.coef"),
        ("trainin.foo=5", "training"),
        ("algorithm.epsilon=0.2", "algorithm.clip_ratio_low"),  # names of TRL
        ("rollout.num_generations=8", "rollout.samples_per_prompt"),
        ("filter_groups=true", "algorithm.filter_groups.enable"),
        ("algorithm.clip_ratio=0.2", "algorithm.clip_ratio_low and algorithm.clip_ratio_high"),
        ("actor_rollout_ref.rollout.n=8", "rollout.samples_per_prompt"),  # of verl
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(message: Message, override: str, nearest: str) -> None:
    text = message(RECIPE, override)
    assert text.startswith(f"override {override}: {override.partition('=')[0]}: unknown key; did you mean {nearest}?")
    assert len(text.splitlines()) == 1


def test_a_run_names_keys_that_are_gone_since(tmp_path: Path) -> None:
    """Its file has every key of the version that wrote it. What held something, or is said now, is refused."""
    file = tmp_path / "config.yaml"
    file.write_text(RECIPE.replace("reward:\n", "reward:\n  hedge: null\n") + "bygone: null\n")
    with pytest.raises(ConfigError, match="hedge: unknown key"):
        load_config(file)
    (tmp_path / "fingerprint.json").write_text("{}")
    assert load_config(file).seed == 3
    with pytest.raises(ConfigError, match="bygone: unknown key"):
        load_config(file, ["bygone=null"])
    file.write_text(RECIPE + "bygone: 1\n")
    with pytest.raises(ConfigError, match="bygone: unknown key"):
        load_config(file)


def test_a_run_whose_file_names_no_other_keys_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    check = Config.model_validate
    monkeypatch.setattr(Config, "model_validate", lambda tree: checked.append(tree) or check(tree))
    (tmp_path / "config.yaml").write_text(RECIPE)
    (tmp_path / "fingerprint.json").write_text("{}")
    load_config(tmp_path / "config.yaml")
    assert len(checked) == 1
    (tmp_path / "config.yaml").write_text(RECIPE + "bygone: null\n")
    load_config(tmp_path / "config.yaml")
    assert len(checked) == 3, "once more without what is gone"


def test_a_key_like_no_other_gets_the_valid_ones_listed(message: Message) -> None:
    text = message(RECIPE, "algorithm.kl.zzzzzzzzqqqq=1")
    assert "unknown key" in text and "mode" in text


def test_a_key_of_another_kind_of_reward_is_told_from_a_mistyped_one(message: Message) -> None:
    assert "reward.after: not a key of reward.kind=math; it belongs to exact" in message(RECIPE, "reward.after=x")
    assert "did you mean reward.timeout_s?" in message(RECIPE, "reward.timeout=3")
    assert "did you mean reward.give_up_after_s (" in message(RECIPE, "reward.kind=http", "reward.retries=3")


def test_missing_keys_are_named_in_full(message: Message) -> None:
    assert "model.path: required" in message("model: {}")
    assert "model.path: required" in message("model:")
    assert "model: required" in message("seed: 1")
    assert "reward.function: required" in message(RECIPE, "reward={kind: function}")


@pytest.mark.parametrize("section", ["rollout", "evaluation"])
@pytest.mark.parametrize(
    "key",
    [
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias"),
        *("logits_processor", "logits_processors", "bad_words_ids", "typical_p", "mirostat", "min_new_tokens"),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name_and_says_why(message: Message, section: str, key: str) -> None:
    text = message(RECIPE, f"{section}.{key}=1.1")
    assert text.startswith(f"override {section}.{key}=1.1: {section}.{key}: unknown key; not there: ")
    assert "the log-probabilities recorded would not be those of the policy" in text


def test_refused_names_are_keys_nowhere_and_belong_to_sampling_only(message: Message) -> None:
    """Elsewhere such a name is an unknown key like another."""
    assert "log-probabilities" in message(RECIPE + "repetition_penalty: 1.1\n")
    assert "log-probabilities" not in message(RECIPE, "data.min_length=3")
    assert "did you mean evaluation.min_p?" in message(RECIPE, "rollout.min_p=0.1")
    assert "did you mean rollout.samples_per_prompt?" in message(RECIPE, "rollout.samples=4")


def test_one_stop_text_needs_no_brackets(load: Load) -> None:
    config = load(RECIPE, "rollout.stop='</answer>'", "evaluation.stop=[a, b]")
    assert (config.rollout.stop, config.evaluation.stop) == (["</answer>"], ["a", "b"])
    assert load().evaluation.stop is None


# --- places -------------------------------------------------------------------------------------------------------


def test_messages_carry_file_and_line(message: Message) -> None:
    text = message(RECIPE.replace("learning_rate", "learning_rte").replace("seed: 3", "seed: -1"))
    assert re.search(r"recipe\.yaml:20: training\.learning_rte: unknown key", text)
    assert re.search(r"recipe\.yaml:2: seed: .*got -1", text)  # all problems at once


def test_messages_of_cross_checks_carry_file_and_line(message: Message) -> None:
    assert "recipe.yaml:19: training.groups_per_update:" in message(RECIPE.replace("_update: 4", "_update: 5"))


def test_messages_about_overrides_name_the_override(message: Message) -> None:
    assert message(RECIPE, "rollout.top_p=0.7").startswith("override rollout.top_p=0.7: rollout.top_p: ")
    below = "training.warmup_steps.x=1"  # of a key that the recipe lacks
    assert message(RECIPE, below).startswith(f"override {below}: training.warmup_steps: Input should be")


def test_a_key_given_twice_is_refused(message: Message) -> None:
    text = message(RECIPE + "  every: 3\n  every: 5\n")
    assert "recipe.yaml:25: evaluation.every: given twice (first in line 24)" in text


@pytest.mark.parametrize("override", ["training.steps", "=3", "training steps=3", "1x=2", ""])
def test_an_override_of_the_wrong_form_is_refused(message: Message, override: str) -> None:
    assert "expected section.key=value" in message(RECIPE, override)


@pytest.mark.parametrize("value", ["[1", "{a", "!!int ''", "!!python/object:os.system x", "[" * 1500])
def test_an_override_that_is_not_yaml_is_refused(message: Message, value: str) -> None:
    assert "not valid YAML" in message(RECIPE, f"run.dir={value}")


def test_an_override_below_a_value_is_refused(message: Message) -> None:
    assert "seed is not a section" in message(RECIPE, "seed.x=3")


# --- files that are no recipes ------------------------------------------------------------------------------------


def aliases(line: str) -> str:
    """Ten lines, each with nine of the line before it: 9 to the power of 10."""
    return "".join(line.format(name=b, nine=",".join([f"*{a}"] * 9)) for a, b in pairwise("abcdefghijk"))


LAUGHS = "model:\n  path: x\na: &a [lol]\n" + aliases("{name}: &{name} [{nine}]\n")
MERGES = "a: &a {k: 1}\n" + aliases("{name}: &{name} {{<<: [{nine}]}}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "mapping of sections, found list"),
        ("just text", "mapping of sections, found str"),
        ("a: [1\nb: 2\n", "not valid YAML"),
        ("a: 1\n\tb: 2\n", ":2: not valid YAML"),
        ("a: &x {b: *x}", "nested too deeply"),
        ("a: " + "[" * 1500, "not valid YAML"),
        (LAUGHS, ":7: not valid YAML: too large"),
        (MERGES, "not valid YAML: too large"),
        ("a: &a [" + "x" * 1000 + "]\nb: [" + "*a," * 300 + "]", ":2: not valid YAML: too large"),
        ("a: " + "x" * 300_000, "not valid YAML: too large"),
        ("# " + "x" * 300_000, "not valid YAML: too large"),
        ("a: [" + "1," * 20_000 + "]", "not valid YAML: too large"),
        ("a: !!binary aGk=", "not valid YAML"),
        ("a: !!set {x, y}", "not valid YAML"),
        ("a: !!python/object/apply:os.getpid []", "not valid YAML"),
        ("model: {path: x}\ndata: {train: [{path: a, path: b}]}", ":2: data.train.0.path: given twice"),
        ("x" * 17 * 2**20, "cannot read the recipe: larger than 16.0 MiB"),
        ("a: !!int ''", "not valid YAML"),
        ("seed: 2024-13-45", "seed: Input should be a valid integer"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: \0", "not valid YAML"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
    ],
)
def test_what_is_not_a_recipe_is_refused(message: Message, text: str | bytes, expected: str) -> None:
    found = message(text)
    assert expected in found and "recipe.yaml" in found


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b", "x" * 5000])
def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        load_config(tmp_path / name)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "rollout.temperature=0",  # failure 14
        "rollout.temperature=-0.1",
        "rollout.temperature=.nan",
        "rollout.temperature=.inf",
        "rollout.top_p=0.7",
        "rollout.top_k=50",
        "rollout.min_p=0.1",
        "rollout.stop=['']",
        "rollout.stop=[a, ' \ufffd']",
        "rollout.stop=5",
        "evaluation.min_p=1",
        "evaluation.min_p=-0.1",
        "evaluation.stop=''",
        "rollout.samples_per_prompt=1",  # failure 18
        "rollout.samples_per_prompt=0",
        "rollout.prompts_per_step=0",
        "algorithm.filter_groups.max_num_gen_batches=0",
        "algorithm.clip_ratio_low=1.01",
        "algorithm.clip_ratio_c=1",
        "algorithm.overlong_buffer.len=-1",
        "algorithm.kl.mode=on",
        "training.betas=[0.9, 1]",
        "training.betas=[0.9]",
        "training.steps=true",
        "training.steps=2.5",
        "training.steps=many",
        "training=5",
        "seed=4294967296",
        "seed=0x" + "f" * 5000,
        "model.path=5",
        "reward=exact",
        "reward.kind=codes",
        "reward.extract=[]",
        "reward.error_value=.nan",
    ],
)
def test_an_impossible_value_is_refused_by_key(message: Message, override: str) -> None:
    key = override.partition("=")[0]
    text = message(RECIPE, override)
    assert f": {key}" in text and "\n" not in text
    assert len(text) < 6000


def test_section_errors_do_not_speak_of_classes(message: Message) -> None:
    assert "training: is a section with keys of its own, got 5" in message(RECIPE, "training=5")


# --- cross-field checks: the numbers are shown, and what is proposed works ----------------------------------------

INTERPOLATE = ("algorithm.proximal=interpolate", "rollout.max_staleness=1")
UNBOUND = ["rollout.max_staleness=1", "training.groups_per_update=16"]


@pytest.mark.parametrize(
    ("overrides", "key", "numbers"),
    [
        (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt", ["1", "2"]),
        (["training.groups_per_update=5"], "training.groups_per_update", ["16", "5"]),
        (["training.groups_per_update=32"], "training.groups_per_update", ["16", "32"]),
        (["algorithm.overlong_buffer.len=49"], "algorithm.overlong_buffer.len", ["49", "48"]),
        (["algorithm.overlong_hard_punishment=true"], "algorithm.overlong_hard_punishment", []),
        (["training.tokens_per_micro_batch=111"], "training.tokens_per_micro_batch", ["111", "64", "48", "112"]),
        (
            ["algorithm.correction.kind=mask", "algorithm.proximal=engine"],
            "algorithm.correction.kind",
            ["proximal=engine"],
        ),
        (["algorithm.correction.low=3"], "algorithm.correction.low", ["3", "2.0"]),
        (["algorithm.kl.target=0.1", "algorithm.kl.mode=measure"], "algorithm.kl.target", ["measure"]),
        (["algorithm.loss_constant=48"], "algorithm.loss_constant", ["token-mean"]),
        (["rollout.ahead=3", "rollout.max_staleness=2"], "rollout.ahead", ["3", "2"]),
        (["rollout.ahead=1"], "rollout.ahead", ["1", "0"]),
        (["runtime.deterministic=true", "rollout.max_staleness=2"], "runtime.deterministic", ["2", "the clock"]),
        (["algorithm.clip_ratio_high=11", "rollout.max_staleness=2"], "algorithm.clip_ratio_high", ["11", "2", "0.28"]),
        (["algorithm.proximal=interpolate"], "algorithm.proximal", ["max_staleness=0"]),
        ([*INTERPOLATE, "algorithm.correction.kind=mask"], "algorithm.correction", ["mask", "whole responses"]),
        (
            [*INTERPOLATE, "algorithm.correction.kind=truncate", "algorithm.correction.level=sequence"],
            "algorithm.correction",
            ["sequence", "whole responses"],
        ),
        (UNBOUND, "algorithm.proximal", ["recompute", "one update", "1"]),
        ([*INTERPOLATE, *UNBOUND], "algorithm.proximal", ["interpolate", "one update", "1"]),
    ],
)
def test_an_impossible_combination_shows_its_numbers(
    message: Message, overrides: list[str], key: str, numbers: list[str]
) -> None:
    text = message(RECIPE, *overrides)
    assert f": {key}: " in text and "\n" not in text
    assert all(number in text for number in numbers)


@pytest.mark.parametrize(
    ("overrides", "proposed"),
    [
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt=2"]),
        (["algorithm.overlong_buffer.len=49"], ["algorithm.overlong_buffer.len=9"]),
        (["algorithm.overlong_buffer.len=49"], ["algorithm.overlong_buffer.enable=false"]),
        (["training.tokens_per_micro_batch=111"], ["training.tokens_per_micro_batch=112"]),
        (["algorithm.correction.kind=mask", "algorithm.proximal=engine"], ["algorithm.proximal=recompute"]),
        (["algorithm.correction.low=3"], ["algorithm.correction.low=0.5", "algorithm.correction.high=2.0"]),
        (["algorithm.kl.target=0.1", "algorithm.kl.mode=measure"], ["algorithm.kl.mode=loss"]),
        (["algorithm.kl.target=0.1", "algorithm.kl.mode=measure"], ["algorithm.kl.target=null"]),
        (["algorithm.loss_constant=48"], ["algorithm.loss_agg_mode=constant"]),
        (["algorithm.loss_constant=48"], ["algorithm.loss_constant=null"]),
        (["rollout.ahead=3", "rollout.max_staleness=2"], ["rollout.ahead=2"]),
        (["rollout.ahead=3", "rollout.max_staleness=2"], ["rollout.max_staleness=3"]),
        (["runtime.deterministic=true", "rollout.max_staleness=2"], ["rollout.max_staleness=0"]),
        (["runtime.deterministic=true", "rollout.max_staleness=2"], ["runtime.deterministic=false"]),
        (["algorithm.clip_ratio_high=11", "rollout.max_staleness=2"], ["algorithm.clip_ratio_high=0.28"]),
        (["algorithm.clip_ratio_high=11", "rollout.max_staleness=2"], ["algorithm.correction.kind=truncate"]),
        (["algorithm.clip_ratio_high=11", "rollout.max_staleness=2"], ["rollout.max_staleness=0"]),
        (["algorithm.proximal=interpolate"], ["rollout.max_staleness=1"]),
        (["algorithm.proximal=interpolate"], ["algorithm.proximal=auto"]),
        ([*INTERPOLATE, "algorithm.correction.kind=mask"], ["algorithm.correction.kind=truncate"]),
        ([*INTERPOLATE, "algorithm.correction.kind=mask"], ["algorithm.proximal=recompute"]),
        (
            [*INTERPOLATE, "algorithm.correction.kind=truncate", "algorithm.correction.level=sequence"],
            ["algorithm.correction.level=token"],
        ),
        (UNBOUND, ["algorithm.correction.kind=truncate"]),
        (UNBOUND, ["algorithm.proximal=engine"]),
        (UNBOUND, ["training.epochs_per_rollout=2"]),
        (UNBOUND, ["rollout.max_staleness=0"]),
    ],
)
def test_what_is_proposed_works(load: Load, message: Message, overrides: list[str], proposed: list[str]) -> None:
    text = message(RECIPE, *overrides)
    for setting in proposed:
        assert setting.partition("=")[2] in text
    load(RECIPE, *overrides, *proposed)


@pytest.mark.parametrize(("prompts", "per_update"), [(16, 5), (16, 32), (7, 2), (1, 4), (512, 100), (97, 96), (10, 3)])
def test_every_proposed_mini_batch_size_divides(load: Load, message: Message, prompts: int, per_update: int) -> None:
    given = [f"rollout.prompts_per_step={prompts}", f"training.groups_per_update={per_update}"]
    text = message(RECIPE, *given)
    sizes, batch = re.search(r"use (.+), or prompts_per_step=(\d+)", text).groups()  # type: ignore[union-attr]
    for size in sizes.split(" or "):
        load(RECIPE, *given, f"training.groups_per_update={size}")
    load(RECIPE, *given, f"rollout.prompts_per_step={batch}")


def test_huge_numbers_are_refused_at_once(message: Message) -> None:
    text = message(RECIPE, f"rollout.prompts_per_step={10**30}", "training.groups_per_update=7")
    assert "cannot be cut" in text


def test_buffer_as_long_as_the_limit_and_buffer_of_zero_are_fine(load: Load) -> None:
    assert load(RECIPE, "algorithm.overlong_buffer.len=48").algorithm.overlong_buffer.len == 48
    assert load(RECIPE, "algorithm.overlong_buffer.len=0").algorithm.overlong_buffer.len == 0


@pytest.mark.parametrize(
    ("overrides", "refused", "works"),
    [
        (["algorithm.correction.high=1.5"], "algorithm.correction.low=1.5", "algorithm.correction.low=1.499"),
        (
            ["rollout.samples_per_prompt=10", "algorithm.kl.mode=loss", "algorithm.kl.target=0.1"],
            "algorithm.kl.horizon=32",  # 16 x 10 samples are 5 x 32: the coefficient may fall to zero
            "algorithm.kl.horizon=33",
        ),
        (["rollout.max_staleness=1"], "algorithm.clip_ratio_high=10.1", "algorithm.clip_ratio_high=10"),
        ([], "rollout.max_staleness=65", "rollout.max_staleness=64"),
        (UNBOUND, "algorithm.proximal=recompute", "algorithm.proximal=engine"),
    ],
)
def test_what_is_on_the_border_is_refused_and_the_next_value_works(
    load: Load, message: Message, overrides: list[str], refused: str, works: str
) -> None:
    key, _, _ = refused.partition("=")
    assert f": {key}: " in message(RECIPE, *overrides, refused)
    load(RECIPE, *overrides, works)


def test_equal_clip_ratios_are_no_warning_and_a_lower_upper_one_is() -> None:
    def warned(high: float) -> list[str]:
        ratios = {"clip_ratio_low": 0.2, "clip_ratio_high": high}
        return warnings_for(build_config({"model": {"path": "m"}, "algorithm": ratios}))

    assert warned(0.2) == []
    (lower,) = warned(0.19)
    assert "clip_ratio_high=0.19 is below clip_ratio_low=0.2" in lower


def test_an_engine_of_its_own_for_evaluation_is_for_what_is_sampled_ahead(load: Load) -> None:
    copy, stale = "evaluation.while_sampling=copy", "rollout.max_staleness=1"
    assert [text for text in warnings_for(load(RECIPE, copy)) if text.startswith(f"{copy}: has no effect")]
    assert not [text for text in warnings_for(load(RECIPE, copy, stale)) if "while_sampling" in text]


def test_what_older_samples_need_is_warned_of_where_there_are_none(load: Load) -> None:
    for override, key in (("rollout.in_flight=drain", "in_flight"), ("rollout.max_staleness=9", "max_staleness=9")):
        short = ("training.steps=8", "rollout.max_staleness=8")
        assert [text for text in warnings_for(load(RECIPE, "training.steps=8", override)) if key in text]
        assert not [text for text in warnings_for(load(RECIPE, override, *short)) if key in text]


def test_warnings() -> None:
    config = build_config(
        {
            "model": {"path": "m"},
            "training": {"groups_per_update": 512, "minutes": 10, "final_learning_rate": 0.0},
            "algorithm": {"kl": {"mode": "loss", "estimator": "k1"}},
            "evaluation": {"every": 5},
            "runtime": {"deterministic": True},
        }
    )
    one, two, three, four = warnings_for(config)
    assert two not in warnings_for(config, [{"prompt": "1+1=", "answer": "2"}]) and two in warnings_for(config, [])
    assert "one update per rollout step" in one
    assert "evaluation.every" in two
    assert "follows the clock" in three
    assert "k1" in four


def test_a_rate_that_rises_or_follows_the_clock_is_warned_of() -> None:
    training = {"learning_rate": 1e-6, "final_learning_rate": 2e-6, "minutes": 5}
    rising, clock = warnings_for(
        build_config({"model": {"path": "m"}, "training": training, "runtime": {"deterministic": True}})
    )
    assert "final_learning_rate=2e-06 is above training.learning_rate=1e-06: the rate rises" in rising
    assert "follows the clock" in clock
    same = training | {"final_learning_rate": 1e-6, "minutes": None}
    assert (
        warnings_for(build_config({"model": {"path": "m"}, "training": same, "runtime": {"deterministic": True}})) == []
    )


@pytest.mark.parametrize(
    ("training", "highest", "works"),
    [
        # rates of step k are lr (k + 1) / W: after 5 of 20 steps a quarter
        ({"steps": 5, "warmup_steps": 20, "learning_rate": 1e-6}, "2.5e-07", 0),
        ({"steps": 20, "warmup_steps": 20, "learning_rate": 1e-6}, "1e-06", 2),
        ({"steps": 4, "warmup_steps": 8, "learning_rate": 1e-4, "final_learning_rate": 0.0}, "5e-05", 0),  # a bound
    ],
)
def test_a_warm_up_that_takes_the_whole_run_is_warned_of_with_the_highest_rate(
    training: dict[str, Any], highest: str, works: int
) -> None:
    def warned(**changes: Any) -> list[str]:
        return warnings_for(build_config({"model": {"path": "m"}, "training": training | changes}))

    (text,) = warned()
    assert (
        f"training.warmup_steps={training['warmup_steps']} is not below training.steps={training['steps']}: the "
        in text
    )
    assert f"rises during the whole run, to at most {highest}; use training.warmup_steps={works}" in text
    assert warned(warmup_steps=works) == warned(steps=0) == warned(warmup_steps=training["steps"] - 1) == []


def test_of_a_run_of_minutes_alone_the_warm_up_is_not_spoken_of() -> None:
    assert warnings_for(build_config({"model": {"path": "m"}, "training": {"minutes": 1}})) == []


# --- sections that can be switched on and off -----------------------------------------------------------------


@pytest.mark.parametrize("section", ["filter_groups", "overlong_buffer"])
def test_a_section_with_enable_may_be_given_as_true_or_false(load: Load, section: str) -> None:
    for word, enabled in (("true", True), ("false", False), ("on", True), ("off", False)):
        recipe = RECIPE.replace("  overlong_buffer: {enable: true, len: 8}\n", f"  {section}: {word}\n")
        more = () if section == "overlong_buffer" and not enabled else ("algorithm.overlong_buffer.len=8",)
        assert getattr(load(recipe, *more).algorithm, section).enable is enabled


def test_an_override_switches_a_section_and_keeps_its_other_keys(load: Load) -> None:
    buffer = load(RECIPE, "algorithm.overlong_buffer=false").algorithm.overlong_buffer
    assert (buffer.enable, buffer.len) == (False, 8)
    switched = load(RECIPE.replace("{enable: true, len: 8}", "false"), "algorithm.overlong_buffer.len=7")
    assert (switched.algorithm.overlong_buffer.enable, switched.algorithm.overlong_buffer.len) == (False, 7)
    groups = load(
        RECIPE, "algorithm.filter_groups=true", "algorithm.filter_groups.metric=score"
    ).algorithm.filter_groups
    assert (groups.enable, groups.metric) == (True, "score")


@pytest.mark.parametrize(
    ("override", "works"),
    [
        ("model.lora=true", "model.lora.rank=16"),
        ("model.lora=false", "model.lora.rank=0"),
        ("algorithm.kl=true", "algorithm.kl.mode=loss"),
        ("algorithm.kl=off", "algorithm.kl.mode=off"),
        ("algorithm.correction=true", "algorithm.correction.kind=truncate"),
    ],
)
def test_a_section_without_enable_is_refused_with_the_key_that_works(
    load: Load, message: Message, override: str, works: str
) -> None:
    assert message(RECIPE, override).endswith(f"; use {works}")
    load(RECIPE, works, "algorithm.proximal=recompute")


# --- the tree itself ----------------------------------------------------------------------------------------------


def _sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    from dapo.config.section import section_types

    inner = [kind for info in section.model_fields.values() for kind in section_types(info.annotation)]
    return [section, *(s for kind in inner for s in _sections(kind))]


def test_every_key_is_documented() -> None:
    from dapo.config.section import section_types

    undocumented = [
        f"{section.__name__}.{name}"
        for section in _sections(Config)
        for name, info in section.model_fields.items()
        if not info.description
        and not section_types(info.annotation)
        and not (section is MathReward and name == "kind")
    ]
    undocumented = [key for key in undocumented if key.rpartition(".")[2] not in ("kind", "path")]
    assert undocumented == []


def test_there_are_fewer_than_260_keys() -> None:
    assert 60 < len(all_keys()) < 260


def test_a_name_that_no_file_can_have_is_refused_by_its_key(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: is too long for a name: 256 bytes"):
        load("model: {path: %s/b}\n" % ("ä" * 128))


def test_a_dumped_config_reads_back_equal(load: Load, tmp_path: Path) -> None:
    config = load(RECIPE, "reward={kind: exact, after: 'A:'}", "algorithm.clip_ratio_c=null")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(again) == config


def test_a_config_cannot_be_changed(load: Load) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().training.steps = 5  # type: ignore[misc]


def test_text_that_yaml_reads_as_something_else_is_explained(message: Message) -> None:
    text = message(RECIPE, "reward={kind: exact}", "reward.after=Answer:")
    assert "got {'Answer': None}; put text that YAML reads as something else in quotes" in text


# --- fuzz; whole recipes are in test_config_fuzz.py ---------------------------------------------------------------


@pytest.mark.parametrize("key", all_keys())
def test_odd_values_for_any_key_are_taken_or_refused_by_name(load: Load, key: str) -> None:
    refused = 0
    for value in [
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        ".nan",
        "''",
        "[]",
        "{}",
        "[[1]]",
        "{1: 2}",
        "x" * 300,
        "2024-01-01",
    ]:
        try:
            load("model: {path: m}", f"{key}={value}")
        except ConfigError as error:
            assert key.split(".")[0] in str(error), (key, value)
            refused += 1
    assert refused > 1, key


def test_names_of_other_systems_lead_to_keys_that_exist_and_values_that_they_take(load: Load) -> None:
    assert not set(ELSEWHERE) & set(all_keys())
    assert len(ELSEWHERE) == sum(len(words.split()) for words in _ANSWERS.values())  # no word has two answers
    for answer in ELSEWHERE.values():
        for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", answer):
            assert key in all_keys(), answer
        for setting in re.findall(r"[a-z_.]+\.[a-z_]+=[\w-]+", answer):
            load(RECIPE, setting)


def test_what_is_known_of_the_keys_in_an_unknown_section_is_told_with_their_lines(message: Message) -> None:
    text = message(RECIPE + "async_training:\n  staleness_threshold: 0.5\n  new: {partial_rollout: true, steps: 3}\n")
    section, bound, flight = text.splitlines()
    line = RECIPE.count("\n") + 1
    assert f"recipe.yaml:{line}: async_training: unknown key; did you mean rollout.max_staleness=1?" in section
    assert f"recipe.yaml:{line + 1}: async_training.staleness_threshold: " in bound and "versions" in bound
    assert f"recipe.yaml:{line + 2}: async_training.new.partial_rollout: " in flight and "in_flight=keep?" in flight


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("rollout.in_flight=abort", "restart"),
        ("rollout.in_flight=Partial", "keep"),
        ("algorithm.correction.kind=TIS", "truncate"),
        ("algorithm.correction.kind=icepop", "mask"),
    ],
)
def test_a_value_of_another_system_is_answered_with_ours(message: Message, setting: str, meant: str) -> None:
    assert f"did you mean {setting.partition('=')[0]}={meant}?" in message(RECIPE, setting)


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_a_key_of_another_system_may_be_another_key_by_its_value(message: Message, name: str) -> None:
    assert f"loss_type: unknown key; did you mean algorithm.objective={name}?" in message(RECIPE, f"loss_type={name}")
    assert "did you mean algorithm.loss_agg_mode?" in message(RECIPE, "loss_type=grpo")


WORDS = {  # as recipes of other systems and articles have them, with the key that is meant
    "policy": "model",
    "importance_sampling_level": "algorithm.objective=gspo",
    "reward_model": "reward",
    "trainer": "training",
    "orchestrator": "rollout",
    "trainer.total_training_steps": "training.steps",
    "clip_ratio": "algorithm.clip_ratio_low",
    "kl_penalty": "algorithm.kl.mode",
    "batch_size": "rollout.prompts_per_step, or training.groups_per_update",
    "train_batch_size": "rollout.prompts_per_step, or training.groups_per_update",
    "global_batch_size": "rollout.prompts_per_step, or training.groups_per_update",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "rollout.tensor_parallel_size": "rollout.tensor_parallel",
    "vllm": "rollout.engine=vllm",
    "rollout.vllm": "rollout.engine=vllm",
    "training.epsilon": "training.adam_epsilon",
    "training.eps": "training.adam_epsilon",
    "evaluation.batch_size": "rollout.max_concurrent_samples",
    "workers": "reward.workers",
    "orchestrator.group_size": "rollout.samples_per_prompt",
    "filter_groups": "algorithm.filter_groups.enable",
    "algorithm.dynamic_sampling": "algorithm.filter_groups.enable",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "algorithm.name": "algorithm.objective",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_ratio_high",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "training.groups_per_update",
    "actor_rollout_ref.actor.optim.lr": "training.learning_rate",
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer.len",
    "reward_model.path": "reward.path",
    "trainer.seed": "seed",
    "trainer.save_freq": "run.save_every",
    "trainer.logger": "run.trackers",
    "data.train_batch_size": "rollout.prompts_per_step",
    "max_new_tokens": "rollout.max_response_length",
    "rollout.max_tokens": "rollout.max_response_length",
    "rollout.gpu_memory_utilization": "rollout.cache_gib",
    "model.name": "model.path",
    "bf16": "model.compute_dtype",
    "gradient_checkpointing": "training.activation_checkpointing",
    "training.epochs": "training.steps",
    "evaluation.steps": "evaluation.every",
    "run.save_steps": "run.save_every",
    **dict.fromkeys(
        ("hardware", "gpus", "distributed", "n_gpus_per_node", "runtime.num_gpus", "ray"), "runtime (kind=ray"
    ),
    "hardware.workers": "runtime (kind=ray",
    "training.workers": "runtime.learner.workers",
    "trainer.workers": "runtime.learner.workers",
    "rollout.workers": "runtime.engine.workers",
    "fsdp": "runtime.learner.sharded",
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_another_system_is_answered_with_the_key_that_is_meant(message: Message, word: str) -> None:
    said = message(RECIPE, f"{word}=8")
    assert re.search(rf"{re.escape(word)}: unknown key; did you mean {re.escape(WORDS[word])}(?![\w.])", said), said


def test_a_section_that_is_only_switched_on_is_understood(load: Load) -> None:
    on = load(RECIPE, "algorithm.filter_groups=true").algorithm
    assert on.filter_groups.enable and not load(RECIPE, "algorithm.filter_groups=false").algorithm.filter_groups.enable


@pytest.mark.parametrize("key", ["rollout.shard", "deepspeed_config", "no.such", "model.depth"])
def test_no_key_of_an_unrelated_section_is_suggested(key: str) -> None:
    assert "did you mean" not in nearest_key(key)


@pytest.mark.parametrize(
    ("key", "ours"),
    [("critic", "critic"), ("critic.lr", "critic.learning_rate"), ("algorithm.gae_lambda", "critic.lam")],
)
def test_the_critic_of_other_systems_is_found(key: str, ours: str) -> None:
    assert f"algorithm.{ours}" in nearest_key(key) and "not needed" not in nearest_key(key)


@pytest.mark.parametrize("key", ["rollout.shard", "shards", "no.such.section"])
def test_no_key_of_an_unrelated_section_is_suggested_for_being_a_little_like_it(key: str) -> None:
    assert nearest_key(key).startswith("valid here: ")


def test_a_system_message_that_the_template_does_not_use_is_told() -> None:
    def told(template: str) -> bool:
        config = build_config({"model": {"path": "m"}, "data": {"template": template, "system": "Be brief."}})
        return any(text.startswith("data.system: has no effect") for text in warnings_for(config))

    assert told("plain") and not told("chat")
