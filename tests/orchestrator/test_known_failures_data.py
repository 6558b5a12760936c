"""Public failures of other trainers: section (c), data, config and friendliness, of shared/cases/failures.md.

Most are tested where their mechanism is; these need several parts. The number of an entry stands in a test's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.algorithm.advantage import with_advantages
from dapo.config import Config, all_keys, build_config, load_config
from dapo.config.plan import plan_line, plan_of
from dapo.config.reference import keys_of
from dapo.errors import UserError
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.micro_batch import micro_batch
from dapo.training.packing import advantage_column, pack
from data.tokenizers_for_tests import char_tokenizer
from run_cases import PROMPTS, Recorder, config_for, run, steps_of


def test_every_key_may_be_given_whether_the_recipe_has_it_or_not_failures_63(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\n")
    default = load_config(recipe)
    for key in keys_of(Config):
        if not key.required and not key.name.startswith("reward.") and key.name != "run.dir":
            value = "null" if key.default is None else str(key.default).replace("(", "[").replace(")", "]") or "''"
            assert load_config(recipe, [f"{key.name}={value}"]) == default, key.name


def test_sizes_say_what_they_count_and_a_run_says_them_at_its_start_failures_65(tmp_path: Path) -> None:
    assert [key for key in all_keys() if "batch_size" in key] == []
    counted = ("prompt", "sample", "response", "group", "token", "row", "step", "length", "version")
    sizes = [key.name for key in keys_of(Config) if "batch" in key.name or "_per_" in key.name]
    assert (
        sizes
        and [name for name in sizes if not any(word in name for word in (*counted, "epochs", "gen_batches"))] == []
    )
    changes = {"rollout.prompts_per_step": 4, "training.groups_per_update": 2}
    listener = Recorder()
    run(tmp_path / "run", changes, listener)
    assert listener.plan == plan_of(config_for(tmp_path, changes))
    assert plan_line(listener.plan) == (
        "1 step, each 4 prompts x 4 samples = 16 samples, 2 updates of 2 groups"  # on one machine, all at once
    )


def test_a_run_of_a_base_model_is_refused_before_its_folder_is_made_failures_66(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    assert tokenizer.chat_template is None
    with pytest.raises(UserError, match=r"template=plain.*|chat_template") as caught:
        run(tmp_path / "run", {"data.template": "chat"}, tokenizer=tokenizer)
    assert "plain" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_prompts_at_the_limit_are_trained_on_and_longer_ones_counted_failures_67(tmp_path: Path) -> None:
    exact, longer = "1+2+3+4=", "1+2+3+45="  # one token a letter; data.max_prompt_length is 8
    rows = [*PROMPTS[:7], {"prompt": exact, "answer": "0"}, {"prompt": longer, "answer": "5"}]
    listener = Recorder()
    changes = {"rollout.prompts_per_step": 8, "algorithm.filter_groups.enable": False, "training.steps": 2}
    run(tmp_path / "run", changes, listener, rows=rows)
    prompts = {s["prompt"] for path in RunFolder(tmp_path / "run").samples.glob("*.jsonl") for s in read_samples(path)}
    assert exact in prompts and longer not in prompts and len(prompts) == 8
    assert any(re.search(r"\b1\b.*max_prompt_length", text) for text in [*listener.warnings, *listener.phases])


@pytest.mark.parametrize("values", [[1.0], [1.0] * 7, [1.0] * 9], ids=["1", "7", "9"])
def test_a_reward_of_the_wrong_number_of_values_stops_the_run_failures_71(tmp_path: Path, values: list[float]) -> None:
    def scores(response: str) -> Any:
        return values

    with pytest.raises(UserError, match=r"scores.*got list .*one response at a time"):
        run(tmp_path / "run", {"rollout.samples_per_prompt": 8}, reward=scores)


def test_a_reward_of_zero_is_a_reward_failures_72(tmp_path: Path) -> None:
    def zero_or_one(response: str) -> float:
        return float(sum(map(ord, response)) % 2)

    run(tmp_path / "run", {"algorithm.filter_groups.metric": "score"}, reward=zero_or_one)
    (entry,) = steps_of(tmp_path / "run")
    samples = [s for path in RunFolder(tmp_path / "run").samples.glob("*.jsonl") for s in read_samples(path)]
    assert {s["reward"] for s in samples} == {0.0, 1.0} and {s["error"] for s in samples} == {None}
    assert entry["reward/errors"] == 0 and entry["reward/mean"] == pytest.approx(
        np.mean([s["reward"] for s in samples])
    )


def made(index: int, token_ids: list[int], value: float) -> Sample:
    ids = np.asarray(token_ids, dtype=np.int32)
    return Sample(
        0, index, ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), "stop",
        text="", reward=Reward(value > 0, value), shaped_reward=value,
    )  # fmt: skip


def test_an_empty_response_keeps_its_reward_and_counts_in_the_mean_failures_73() -> None:
    """[EOS], nothing at all and two longer ones: the mean is 0, so each advantage is its reward."""
    eos = 1
    samples = (made(0, [eos], 1.0), made(1, [], -1.0), made(2, [7, 8, eos], 1.0), made(3, [9, 9], -1.0))
    group = with_advantages(Group(0, Prompt(0, "p", (5,)), samples), kind="group-mean")
    assert [s.advantage for s in group.samples] == [1.0, -1.0, 1.0, -1.0]
    batch = pack([group])
    whole = micro_batch(batch, np.arange(batch.num_samples), torch.device("cpu"))
    assert batch.num_samples == 4
    assert whole.targets.tolist() == [eos, 7, 8, eos, 9, 9]
    assert advantage_column([group]).tolist() == [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]


def test_a_run_whose_responses_are_empty_scores_them_failures_73(tmp_path: Path) -> None:
    """Sampled all but evenly, some responses are the stop token alone: no text, and one token that is trained on."""
    changes = {"rollout.temperature": 5.0, "training.steps": 3, "algorithm.filter_groups.enable": False}
    scored: list[str] = []

    def shorter_is_better(response: str) -> float:
        scored.append(response)
        return -float(len(response))

    run(tmp_path / "run", changes | {"algorithm.overlong_buffer.enable": False}, reward=shorter_is_better)
    samples = [s for path in RunFolder(tmp_path / "run").samples.glob("*.jsonl") for s in read_samples(path)]
    empty = [s for s in samples if s["response"] == "" and s["length"] == 1]
    assert empty and "" in scored
    assert all(s["reward"] == 0.0 and s["finish_reason"] == "stop" and s["in_loss"] for s in empty)
    for one in empty:  # the best of its group, whose mean it is part of
        group = [s["reward"] for s in samples if s["draw"] == one["draw"]]
        expected = (0.0 - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        assert one["advantage"] == pytest.approx(expected, rel=1e-4) and one["advantage"] > 0


def test_the_settings_of_the_evaluation_are_its_own_and_part_of_the_plan_failures_76() -> None:
    tree = {"model": {"path": "m"}, "rollout": {"temperature": 1.0}, "evaluation": {"data": "e.jsonl", "rows": 3}}
    config = build_config(tree)
    assert (config.evaluation.temperature, config.evaluation.samples_per_prompt) == (0.0, 1)
    tree["evaluation"] |= {"samples_per_prompt": 32, "temperature": 0.5, "top_p": 0.7}
    config = build_config(tree)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.samples_per_prompt) == (1.0, 1.0, 16)
    assert "32 samples" in str(plan_of(config)["evaluation"]) and "0.5" in str(plan_of(config)["evaluation"])


def test_rows_come_in_the_order_of_the_file_if_asked_for_failures_77(tmp_path: Path) -> None:
    changes = {"data.shuffle": False, "algorithm.filter_groups.enable": False, "training.steps": 3}
    run(tmp_path / "run", changes)
    rows = []
    for path in sorted(RunFolder(tmp_path / "run").samples.glob("*.jsonl")):
        rows += [sample["row"] for sample in read_samples(path) if sample["index"] == 0]
    assert rows == list(range(12))


def test_a_secret_is_in_no_file_of_a_run_failures_79(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(response, headers):\n    return len(headers['X-API-Key']) > 3 and len(response) % 2 == 0\n"
    )
    changes = {
        "reward.kind": "function",
        "reward.function": f"{file}:score",
        "reward.args": {"headers": {"X-API-Key": "sk-secret-1", "Authorization": "Bearer sk-secret-2"}},
        "run.trackers": ["tensorboard"],
        "training.steps": 2,
        "run.save_every": 1,
    }
    run(tmp_path / "run", changes, reward=None)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "state.json", "metrics.jsonl"} <= {path.name for path in files}
    assert [path for path in files if b"sk-secret" in path.read_bytes()] == []
    assert "X-API-Key" in RunFolder(tmp_path / "run").config.read_text()
