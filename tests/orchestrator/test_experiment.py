"""Whole runs on a tiny random model: every technique, every option's effect, the same seed twice, and bad input.

The number of an entry is that of shared/cases/failures.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config import Config, all_keys, build_config
from dapo.errors import ConfigError, DataError, ModelError, NumericalError, RewardError, StarvedError, UserError
from dapo.model.loading import load_model, load_tokenizer
from dapo.observe.metrics import describe
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.observe.samples import read_samples, updates_path
from dapo.orchestrator.experiment import Experiment
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment, run_to_end
from dapo.orchestrator.resume import check_resumable
from dapo.orchestrator.step_metrics import WATCHED
from dapo.rollout.engine import EngineError
from dapo.rollout.native.decoder import Decoder
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.in_flight import SampleInFlight
from dapo.training.checkpoint import load_tensors
from dapo.training.trainer import Trainer
from dapo.util.asynchronous import in_thread
from dapo.util.files import json_line
from run_cases import (
    PROMPTS,
    TOKENIZER,
    Recorder,
    config_for,
    last_checkpoint,
    loads_whole,
    run,
    steps_of,
    text_sum,
    tiny_model,
    weights_hash,
    without_times,
)


def check_metrics(folder: Path) -> None:
    """Each number is registered and finite, and each share lies in [0, 1] (entry 41). Null only where it may be."""
    for entry in steps_of(folder):
        assert "non_finite" not in entry
        for name, value in entry.items():
            metric = None if name == "step" else describe(name)
            assert name == "step" or metric is not None, name
            if value is None:
                assert name in WATCHED, name
                continue
            assert math.isfinite(value), (name, value)
            if metric is not None and metric.unit in ("share", "probability"):
                assert 0 <= value <= 1, (name, value)


# --- techniques ---------------------------------------------------------------------------------------------------

BFLOAT16 = {"model.compute_dtype": "bfloat16"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "recompute, truncate tokens": BFLOAT16
    | {"algorithm.proximal": "recompute", "algorithm.correction.kind": "truncate"},
    "recompute, mask sequences": BFLOAT16
    | {
        "algorithm.proximal": "recompute",
        "algorithm.correction.kind": "mask",
        "algorithm.correction.level": "sequence",
        "algorithm.correction.low": 0.98,
        "algorithm.correction.high": 1.02,
    },
    "kl in the loss, adaptive": {"algorithm.kl.mode": "loss", "algorithm.kl.target": 0.01, "algorithm.kl.horizon": 50},
    "kl in the reward, adaptive": {
        "algorithm.kl.mode": "reward",
        "algorithm.kl.estimator": "k1",
        "algorithm.kl.coef": 0.1,
        "algorithm.kl.target": 0.01,
        "algorithm.kl.horizon": 50,
    },
    "kl measured": {"algorithm.kl.mode": "measure"},
    "hard punishment and filtering": {
        "algorithm.overlong_buffer.enable": False,
        "algorithm.overlong_hard_punishment": True,
        "algorithm.overlong_filtering": True,
    },
    "no length shaping at all": {"algorithm.overlong_buffer.enable": False},
    "everything off": {
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_buffer.enable": False,
        "algorithm.clip_ratio_high": 0.2,
        "algorithm.clip_ratio_c": None,
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
    },
    "two epochs": {"training.epochs_per_rollout": 2},
    "streaming": {"runtime.deterministic": False},
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_run_with_each_technique_completes_and_leaves_a_whole_folder(tmp_path: Path, name: str) -> None:
    changes = {"training.steps": 2} | TECHNIQUES[name]
    root = tmp_path / "run"
    listener = Recorder()
    summary = run(root, changes, listener)
    folder = RunFolder(root)
    check_metrics(root)
    entries = steps_of(root)
    assert [e["step"] for e in entries] == [1, 2]
    assert summary["steps"] == 2 and summary["stopped"] == "all steps are done"
    updates = 2 * (4 if name == "two epochs" else 2)
    assert summary["updates"] == entries[-1]["updates/total"] == listener.plan["updates in all"] == updates
    assert [e["version"] for e in entries] == [1, 2]
    assert yaml.safe_load(folder.config.read_text()) == config_for(root, changes).model_dump(mode="json")
    assert {p.name for p in folder.samples.glob("*.jsonl")} == {"step-00001.jsonl", "step-00002.jsonl"}
    assert weights_hash(folder.model_before) != weights_hash(folder.model_after)
    assert not [w for w in listener.warnings if "skipped" in w or "differ" in w]
    if name == "defaults":
        assert not torch.equal(loads_whole(folder.model_before), loads_whole(folder.model_after))
    assert ("kl/reference" in entries[0]) == ("kl" in name)
    if "adaptive" in name:  # the KL is far from its target of 0.01 in the first step, and the coefficient moves
        assert entries[0]["kl/coef"] == config_for(root, changes).algorithm.kl.coef != entries[1]["kl/coef"]
    if name == "kl measured":
        assert "kl/coef" not in entries[0]


def test_a_reward_without_right_and_wrong_is_filtered_by_its_spread(tmp_path: Path) -> None:
    run(
        tmp_path / "run", {"algorithm.filter_groups.metric": "score"}, reward=lambda response: min(len(response), 5) / 5
    )
    check_metrics(tmp_path / "run")
    (entry,) = steps_of(tmp_path / "run")
    assert entry["accuracy"] is None and entry["groups/kept"] == 4


ASYNCHRONOUS = {
    "rollout.max_staleness": 1,
    "rollout.prompts_per_step": 2,
    "training.steps": 8,
    "training.groups_per_update": 1,
    "runtime.deterministic": False,
}


@pytest.mark.parametrize("policy", ["keep", "drain", "restart"])
@pytest.mark.parametrize("evaluated", ["pause", "copy"])
def test_sampling_ahead_with_a_real_engine(tmp_path: Path, policy: str, evaluated: str) -> None:
    """Every draw is in the samples and the metrics of one step, with tokens of the versions that this allows."""
    more = {"rollout.in_flight": policy, "evaluation.while_sampling": evaluated, "evaluation.every": 3}
    summary = run(tmp_path / "run", ASYNCHRONOUS | more, heldout=PROMPTS[:4])
    entries = steps_of(tmp_path / "run")
    assert summary["steps"] == len(entries) == 8 and "accuracy_after" in summary
    assert max(e["staleness/max"] for e in entries) == 1
    folder, seen = RunFolder(tmp_path / "run").samples, Counter[int]()
    for entry in entries:
        samples = list(read_samples(folder / f"step-{entry['step']:05d}.jsonl"))
        seen.update({s["draw"] for s in samples})
        assert len(samples) == 4 * entry["groups/drawn"] and entry["groups/kept"] == 2
        assert entry["accuracy"] == pytest.approx(sum(s["correct"] for s in samples) / len(samples))
        assert entry["response_length/mean"] == pytest.approx(sum(s["length"] for s in samples) / len(samples))
        for sample in samples:
            versions = sample["versions"]
            assert versions == sorted(versions) and (policy == "keep" or len({*versions}) <= 1)
            if sample["status"] == "kept":
                assert entry["step"] - 2 <= min(versions) and max(versions) <= entry["step"] - 1
    assert set(seen.values()) == {1}


def test_evaluations_have_an_engine_of_their_own_only_beside_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staleness without sampling ahead takes turns: a second engine would only take memory."""
    monkeypatch.delattr("dapo.orchestrator.runtime.local.evaluation_engine")  # calling it is an error
    changes = ASYNCHRONOUS | {"rollout.ahead": 0, "evaluation.while_sampling": "copy", "training.steps": 1}
    run(tmp_path / "run", changes, listener := Recorder(), heldout=PROMPTS[:2])
    assert any(text.startswith("evaluation.while_sampling=copy: has no effect") for text in listener.warnings)


def test_a_step_is_told_before_its_evaluation(tmp_path: Path) -> None:
    told: list[Any] = []

    class Told(Recorder):
        def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
            told.append(name)

    changes = {"training.steps": 2, "evaluation.every": 1}
    run(tmp_path / "run", changes, heldout=PROMPTS[:2], listener=Told(on_step=told.append))
    assert told == ["before training", 1, "after step 1", 2, "after training"]


def test_evaluation_and_checkpoints_come_when_asked_for(tmp_path: Path) -> None:
    root = tmp_path / "run"
    changes = {"training.steps": 3, "evaluation.every": 2, "run.save_every": 2, "evaluation.samples_per_prompt": 2}
    summary = run(root, changes, heldout=PROMPTS[:3])
    folder = RunFolder(root)
    evaluated = [e["step"] for e in map(dict, steps_of(root)) if "eval/accuracy" in e]
    assert evaluated == [2, 3]
    assert summary["heldout_rows"] == 3
    assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    names = sorted(p.name for p in folder.checkpoints.iterdir())
    assert [name for name in names if name != "best.json"] == ["step-00002", "step-00003"]
    loads_whole(folder.checkpoints / "step-00002" / "model")
    tensors, metadata = load_tensors(folder.checkpoints / "step-00002" / "optimizer")
    assert metadata["version"] == 2 and any(t.any() for name, t in tensors.items() if name.endswith("exp_avg"))


def test_a_run_of_no_steps_evaluates_and_saves(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", {"training.steps": 0}, heldout=PROMPTS[:2])
    assert summary["accuracy_before"] == summary["accuracy_after"]
    folder = RunFolder(tmp_path / "run")
    assert weights_hash(folder.model_before) == weights_hash(folder.model_after)


def test_a_step_without_a_good_group_counts_and_changes_nothing(tmp_path: Path) -> None:
    """Nothing kept and told to train on what there is: the step counts, the version does not change."""
    changes = {
        "algorithm.filter_groups.on_starved": "train",
        "algorithm.filter_groups.max_num_gen_batches": 1,
        "training.steps": 2,
    }
    summary = run(tmp_path / "run", changes, reward=lambda response: False)
    check_metrics(tmp_path / "run")
    assert (summary["steps"], summary["updates"]) == (2, 0)
    assert [e["version"] for e in steps_of(tmp_path / "run")] == [0, 0]
    folder = RunFolder(tmp_path / "run")
    assert weights_hash(folder.model_before) == weights_hash(folder.model_after)


# --- every option has an effect (entry 17) ------------------------------------------------------------------------

RECOMPUTE = BFLOAT16 | {"algorithm.proximal": "recompute"}
TRUNCATE = RECOMPUTE | {"algorithm.correction.kind": "truncate"}
MASK = RECOMPUTE | {"algorithm.correction.kind": "mask"}
TRAIN = {"algorithm.filter_groups.on_starved": "train"}
FEW_DRAWS = {"algorithm.filter_groups.max_num_gen_batches": 1}
KL_LOSS = {"algorithm.kl.mode": "loss", "algorithm.kl.coef": 10.0}

PPO = {"algorithm.kind": "ppo", "algorithm.critic.learning_rate": 1e-2, "training.steps": 2}

LONG_PENALTY = {"algorithm.overlong_buffer.penalty_factor": 100.0}  # so that rewards spread by more than 1

# key, extreme value, what else is set, a metric of the last step (or the weights after the run), what becomes of it:
# its value, or whether it rises, falls, comes, goes, or moves where nothing says which way
EFFECTS: list[tuple[str, Any, dict[str, Any], str, float | str]] = [
    ("algorithm.clip_ratio_low", 0.99, {}, "clip/low", 0.0),
    ("algorithm.clip_ratio_high", 100.0, {}, "clip/high", 0.0),
    ("algorithm.clip_ratio_c", 1.001, {}, "clip/dual", "rises"),
    ("algorithm.clip_ratio_c", None, {"algorithm.clip_ratio_c": 1.001}, "clip/dual", "goes"),
    ("algorithm.filter_groups.enable", False, {}, "groups/drawn", 4),
    ("algorithm.filter_groups.metric", "score", {}, "groups/all_wrong", 0),
    ("algorithm.filter_groups.tolerance", 1e9, TRAIN | {"algorithm.filter_groups.metric": "score"}, "groups/kept", 0),
    ("algorithm.filter_groups.max_num_gen_batches", 1, TRAIN, "groups/drawn", 4),
    (
        "algorithm.filter_groups.on_starved",
        "train",
        {"algorithm.filter_groups.max_num_gen_batches": 1},
        "error",
        "goes",
    ),
    ("algorithm.overlong_buffer.enable", False, {}, "reward/overlong", 0.0),
    ("algorithm.overlong_buffer.len", 12, {}, "reward/overlong", 1.0),  # the limit: every token costs something
    ("algorithm.overlong_buffer.penalty_factor", 100.0, {}, "reward/shaped_mean", "falls"),
    ("algorithm.overlong_filtering", True, {}, "tokens/loss", "falls"),
    (
        "algorithm.overlong_hard_punishment",
        True,
        {"algorithm.overlong_buffer.enable": False},
        "reward/shaped_mean",
        "falls",
    ),
    ("algorithm.advantage.kind", "group-mean", LONG_PENALTY, "advantage/mean_abs", "rises"),
    ("algorithm.advantage.kind", "leave-one-out", LONG_PENALTY, "advantage/mean_abs", "rises"),
    ("algorithm.advantage.epsilon", 100.0, {}, "advantage/mean_abs", "falls"),
    ("algorithm.proximal", "recompute", BFLOAT16 | {"training.groups_per_update": 4}, "kl/proximal", "falls"),
    ("algorithm.correction.kind", "truncate", RECOMPUTE | {"algorithm.correction.cap": 0.5}, "correction/mean", 0.5),
    ("algorithm.correction.kind", "mask", RECOMPUTE | {"algorithm.correction.low": 1.0}, "tokens/loss", "falls"),
    (
        "algorithm.correction.level",
        "sequence",  # the ratio of a sequence is a product, which is off by more
        MASK | {"algorithm.correction.low": 0.99, "algorithm.correction.high": 1.01},
        "tokens/loss",
        "falls",
    ),
    ("algorithm.correction.cap", 0.01, TRUNCATE, "correction/mean", 0.01),
    ("algorithm.correction.low", 1.9, MASK, "tokens/loss", 0),
    ("algorithm.correction.high", 0.6, MASK, "tokens/loss", 0),
    ("algorithm.kl.mode", "measure", {}, "kl/reference", "comes"),
    ("algorithm.kl.mode", "loss", {"algorithm.kl.coef": 10.0}, "kl/coef", "comes"),
    ("algorithm.kl.mode", "reward", {"algorithm.kl.coef": 10.0, "training.steps": 2}, "reward/shaped_mean", "falls"),
    ("algorithm.kl.estimator", "k1", KL_LOSS, "kl/reference", "moves"),
    ("algorithm.kl.estimator", "k2", KL_LOSS, "kl/reference", "moves"),
    ("algorithm.kl.estimator", "k1", {"algorithm.kl.mode": "measure"}, "kl/reference", "moves"),
    ("algorithm.kl.coef", 1000.0, KL_LOSS, "grad_norm", "rises"),
    # times 1 + 0.2 x 16 samples / horizon
    ("algorithm.kl.target", 1e-6, KL_LOSS | {"training.steps": 2, "algorithm.kl.horizon": 50}, "kl/coef", 10.64),
    ("algorithm.kl.horizon", 20, KL_LOSS | {"training.steps": 2, "algorithm.kl.target": 1e-6}, "kl/coef", 11.6),
    ("algorithm.kind", "ppo", {}, "critic/explained_variance", "comes"),
    ("algorithm.critic.learning_rate", 1e-6, PPO, "critic/explained_variance", "moves"),
    ("algorithm.critic.warmup_steps", 1, PPO, "version", 1),
    ("algorithm.critic.clip", 1e-6, PPO | {"algorithm.critic.learning_rate": 1e-4}, "critic/clipped", "rises"),
    ("algorithm.critic.gamma", 0.5, PPO, "critic/returns", "moves"),
    ("algorithm.critic.lam", 0.1, PPO, "critic/returns", "moves"),
    ("algorithm.critic.bootstrap", True, PPO | {"algorithm.overlong_buffer.enable": False}, "critic/returns", "moves"),
    ("algorithm.critic.whiten", False, PPO, "advantage/std", "falls"),
    ("training.steps", 2, {}, "version", 2),
    ("training.groups_per_update", 4, {}, "updates", 1),
    ("training.epochs_per_rollout", 2, {}, "updates", 4),
    ("training.learning_rate", 1e-2, {}, "lr", 1e-2),
    ("training.final_learning_rate", 0.0, {"training.steps": 2}, "lr", 1.5e-3),
    ("training.warmup_steps", 10, {}, "lr", 3e-4),
    ("training.weight_decay", 100.0, {}, "size of the weights", "falls"),
    ("training.betas", [0.0, 0.0], {}, "weights", "moves"),
    ("training.adam_epsilon", 1.0, {}, "kl/proximal", "falls"),
    ("training.max_grad_norm", 1e-6, {"training.adam_epsilon": 1e-3}, "kl/proximal", "falls"),
    ("rollout.temperature", 0.5, {}, "entropy", "falls"),
    ("seed", 4, {}, "weights", "moves"),
]
TESTED_ELSEWHERE = {
    "algorithm.objective": "tests/orchestrator/test_own_methods.py",
    "algorithm.loss_agg_mode": "test_the_first_loss_of_a_run_is_that_of_its_aggregation",
    "algorithm.loss_constant": "test_the_first_loss_of_a_run_is_that_of_its_aggregation",
    "algorithm.critic.model": "test_ppo_runs.py",
    "algorithm.critic.share_backbone": "test_ppo_runs.py, tests/training/test_critic.py",
    "algorithm.kl.reference": "must change nothing: tests/training/test_critic.py",
    "training.samples": "tests/orchestrator/test_budget.py",
    "training.tokens": "tests/orchestrator/test_budget.py",
    "training.tokens_per_micro_batch": "must change nothing: tests/training/test_packing_properties.py",
    "training.activation_checkpointing": "must change nothing: tests/training/test_trainer.py",
    "training.offload_optimizer": "must change nothing: tests/training/test_offload.py",
    "training.moments": "tests/training/test_moments.py",
    "training.minutes": "tests/orchestrator/test_budget.py",
    "training.max_skipped_updates": "test_updates_that_are_not_finite_end_the_run_with_a_checkpoint",
    "training.mismatch_alarm": "test_an_engine_with_other_weights_sets_off_the_alarm",
}


def leaves(*sections: str) -> set[str]:
    """Keys of some sections that are no sections themselves."""
    keys = all_keys()
    return {k for k in keys if k.startswith(sections) and not any(other.startswith(k + ".") for other in keys)}


def test_the_list_of_effects_is_complete() -> None:
    tested = {key for key, *_ in EFFECTS} | set(TESTED_ELSEWHERE)
    assert leaves("algorithm.", "training.") <= tested
    assert tested <= set(all_keys())


class Outcomes:
    """Runs each set of settings once. An outcome is the metrics of the last step, the weights, and the error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, changes: dict[str, Any]) -> dict[str, Any]:
        name = repr(sorted(changes.items(), key=lambda item: item[0]))
        if name not in self._known:
            self._known[name] = self._run(self._folder / f"run-{len(self._known)}", changes)
        return self._known[name]

    def _run(self, root: Path, changes: dict[str, Any]) -> dict[str, Any]:
        try:
            run(root, {"run.save_samples": False} | changes)
        except StarvedError as error:
            return {"error": type(error).__name__}
        check_metrics(root)
        after = RunFolder(root).model_after
        size = sum(float(t.double().square().sum()) for t in load_file(after / "model.safetensors").values())
        return without_times(steps_of(root)[-1]) | {"weights": weights_hash(after), "size of the weights": size}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("effects"))


@pytest.mark.parametrize(
    ("key", "value", "context", "name", "expected"), EFFECTS, ids=[f"{k}={v}" for k, v, *_ in EFFECTS]
)
def test_an_extreme_value_of_each_option_changes_what_it_should_failures_17(
    outcomes: Outcomes, key: str, value: Any, context: dict[str, Any], name: str, expected: float | str
) -> None:
    before, after = outcomes(context), outcomes(context | {key: value})
    was, now = before.get(name), after.get(name)
    match expected:
        case "comes":
            assert was is None and now is not None
        case "goes":
            assert was is not None and now is None
        case "moves":
            assert None not in (was, now) and was != now
        case "rises":
            assert now > was + 1e-3 * abs(was)
        case "falls":
            assert now < was - 1e-3 * abs(was)
        case _:
            assert now == pytest.approx(expected, rel=1e-3) and was != pytest.approx(expected, rel=1e-3)
    only_measured = "measure" in (value, context.get("algorithm.kl.mode"))
    assert (before.get("weights") == after.get("weights")) == only_measured


@pytest.mark.parametrize(
    ("mode", "constant"),
    [
        ("token-mean", None),
        ("prompt-mean", None),
        ("seq-mean-token-mean", None),
        ("seq-mean-token-sum", None),
        ("constant", None),
        ("constant", 1000),
    ],
)
def test_the_first_loss_of_a_run_is_that_of_its_aggregation(tmp_path: Path, mode: str, constant: int | None) -> None:
    """Before any update every ratio is 1, so a token's loss is minus its advantage: two groups of four responses."""
    run(tmp_path, {"algorithm.loss_agg_mode": mode, "algorithm.loss_constant": constant})
    samples = RunFolder(tmp_path).samples
    kept = [line for line in read_samples(samples / "step-00001.jsonl") if line["status"] == "kept"]
    groups = [[line for line in kept if line["draw"] == draw] for draw in sorted({line["draw"] for line in kept})[:2]]
    sums = [[line["advantage"] * line["length"] for line in group] for group in groups]
    lengths = [[line["length"] for line in group] for group in groups]
    assert [len(group) for group in groups] == [4, 4] and len({sum(group) for group in lengths}) == 2
    total = sum(map(sum, sums))
    wanted = {
        "token-mean": total / sum(map(sum, lengths)),
        "prompt-mean": sum(sum(a) / sum(n) for a, n in zip(sums, lengths, strict=True)) / 2,
        "seq-mean-token-mean": sum(line["advantage"] for group in groups for line in group) / 8,
        "seq-mean-token-sum": total / 8,
        "constant": total / (8 * (constant or 12)),
    }[mode]
    first, _ = json.loads(updates_path(samples, 1).read_text())
    assert first["loss"] == pytest.approx(-wanted, rel=1e-4, abs=1e-6)


# --- the same seed twice ------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(tmp_path: Path) -> None:
    changes = {"training.steps": 3, "algorithm.kl.mode": "loss", "algorithm.proximal": "recompute"}
    folders = [RunFolder(tmp_path / name) for name in ("first", "second", "other")]
    for folder, seed in zip(folders, (5, 5, 6), strict=True):
        run(folder.root, changes | {"seed": seed}, heldout=PROMPTS[:3])
    first, second, other = ([without_times(e) for e in steps_of(f.root)] for f in folders)
    assert first == second and first != other
    hashes = [weights_hash(f.model_after) for f in folders]
    assert hashes[0] == hashes[1] != hashes[2]
    samples = [[(p.name, p.read_bytes()) for p in sorted(f.samples.glob("step-*"))] for f in folders]
    assert samples[0] == samples[1] != samples[2]


# --- data and settings that do not fit ----------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(map(json_line, rows)))
    return str(path)


def proposal(message: str) -> dict[str, Any]:
    """The settings that a message proposes, as dotted keys."""
    words = message.replace(",", " ").replace(";", " ").split("use ", 1)[1].split()
    return {key: int(value) for key, equals, value in (w.partition("=") for w in words) if equals}


@pytest.mark.parametrize(("prompts", "per_update"), [(3, 2), (1, 2), (2, 4)])
def test_fewer_prompts_than_a_step_needs_are_refused_with_sizes_that_work(
    tmp_path: Path, prompts: int, per_update: int
) -> None:
    rows, changes = PROMPTS[:prompts], {"training.groups_per_update": per_update}
    with pytest.raises(DataError, match=f"{prompts} usable prompts are fewer .*prompts_per_step=4") as error:
        run(tmp_path / "run", changes, rows=rows)
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", changes | proposal(str(error.value)), rows=rows)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"rows": []}, "prompts: there are none"),
        ({"rows": None}, "data.train: no files are named"),
        ({"rows": [{"prompt": "1" * 9}, {"prompt": "1" * 20}]}, r"2 rows were read, all of them longer than .*=8 .* 9"),
        ({"rows": [*PROMPTS, {"question": "1+1="}]}, r"prompts\[40\]: no key 'prompt'"),
        ({"heldout": [{"prompt": ""}]}, "'prompt' is empty"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_before_anything_is_written(
    tmp_path: Path, inputs: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        run(tmp_path / "run", **inputs)
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    listener = Recorder()
    with pytest.raises(ConfigError, match=r"runtime\.device: cuda, but"):
        run(tmp_path / "run", {"runtime.device": "cuda"}, listener)
    assert listener.phases == []


def test_an_empty_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    files = [str(tmp_path / "empty.jsonl"), str(tmp_path / "gone.jsonl")]
    with pytest.raises(DataError, match=r"empty.jsonl: the file has no rows\n.*gone.jsonl: no such file"):
        run(tmp_path / "run", {"data.train": files}, rows=None)


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    listener = Recorder()
    run(tmp_path / "run", None, listener, rows=[*PROMPTS, {"prompt": "1" * 9}, PROMPTS[0]])
    assert [w for w in listener.warnings if "1 of 42 prompts are longer than data.max_prompt_length=8" in w]
    assert [w for w in listener.warnings if "1 of 42 rows repeat the prompt" in w]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.max_response_length": 300, "training.tokens_per_micro_batch": 400},
        {"data.max_prompt_length": 300, "training.tokens_per_micro_batch": 400},
        {"evaluation.max_response_length": 300},
        {
            "rollout.max_response_length": 300,
            "evaluation.max_response_length": 400,
            "algorithm.overlong_buffer.len": 290,
            "training.tokens_per_micro_batch": 400,
        },
    ],
)
def test_a_length_beyond_the_models_positions_is_refused_with_lengths_that_work(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = changes | {"training.steps": 0}
    with pytest.raises(ConfigError, match="made for 256 positions") as error:
        run(tmp_path / "run", changes)
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", changes | proposal(str(error.value)))


def test_an_adaptive_kl_that_would_turn_negative_is_refused_with_a_horizon_that_works(tmp_path: Path) -> None:
    changes = {"algorithm.kl.mode": "loss", "algorithm.kl.target": 0.1, "algorithm.kl.horizon": 3}
    with pytest.raises(ConfigError, match="use at least 16"):
        config_for(tmp_path, changes)
    config_for(tmp_path, changes | {"algorithm.kl.horizon": 16})


# --- models and tokenizers ----------------------------------------------------------------------------------------


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=18, **sizes))
    with pytest.raises(ModelError, match=r"'gpt_neox' is not supported .*Qwen2"):
        run(tmp_path / "run", model=model)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="'gpt_neox' is not supported"):
        run(tmp_path / "run", {"model.path": str(tmp_path / "model")}, model=None)
    assert not (tmp_path / "run").exists()


def test_a_missing_model_or_tokenizer_is_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"tokenizer .*gone"):
        run(tmp_path / "run", {"model.path": gone}, model=None, tokenizer=None)
    with pytest.raises(ModelError, match=r"model .*gone"):
        run(tmp_path / "run", {"model.path": gone}, model=None)
    tiny_model().save_pretrained(tmp_path / "no-tokenizer")
    with pytest.raises(ModelError, match=r"tokenizer .*no-tokenizer: there are no tokenizer files"):
        run(tmp_path / "run", {"model.path": str(tmp_path / "no-tokenizer")}, model=None, tokenizer=None)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_in_place_of_a_model_is_told_where_its_model_is(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "first/model-after")
    with pytest.raises(ModelError, match=r"its model is .*first/model-after$"):
        run(tmp_path / "run", {"model.path": str(tmp_path / "first")}, model=None, tokenizer=None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError("Unable to allocate 9.00 GiB for an array"),
    ],
)
@pytest.mark.parametrize(
    "where", ["dapo.training.trainer.Trainer.update", "dapo.training.learner.LocalLearner.annotated"]
)
def test_memory_that_runs_out_is_explained_and_the_run_goes_on_with_less(
    where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    changes = {"training.tokens_per_micro_batch": 64, "runtime.deterministic": False}
    with monkeypatch.context() as patch, pytest.raises(UserError) as found:
        patch.setattr(where, fails)
        run(tmp_path, changes)
    said = str(found.value)
    key = "training.tokens_per_micro_batch"
    less = re.match(rf"memory ran out: {re.escape(str(error))}\nWhat takes less: .*{key}=(\d+)\b", said)
    assert less is not None and int(less[1]) < changes[key]
    assert f'to go on: dapo.train("{tmp_path}/model-before", ..., resume="{tmp_path}")' in said
    changes[key] = int(less[1])
    assert run(tmp_path, changes, resume=RunFolder(tmp_path))["updates"] == 2


def test_what_takes_less_and_a_run_cannot_go_on_with_is_said_to_be_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    changes = {"training.tokens_per_micro_batch": 64, "runtime.deterministic": True}
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"What takes less: ") as found:
        patch.setattr("dapo.training.trainer.Trainer.update", fails)
        run(tmp_path, changes)
    less = re.search(r"(training\.tokens_per_micro_batch)=(\d+).*\(.*\1.*: for a new run", str(found.value))
    assert less is not None
    with pytest.raises(ConfigError, match=less[1]):
        check_resumable(RunFolder(tmp_path), config_for(tmp_path, changes | {less[1]: int(less[2])}))


def test_a_folder_without_a_model_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for load in (load_tokenizer, load_model):
        with pytest.raises(ModelError, match=r"(model|tokenizer) .*runs: is not a model's folder: it holds no config"):
            load(str(tmp_path / "runs"))


def test_what_a_run_saved_is_what_the_next_one_starts_from(tmp_path: Path) -> None:
    run(tmp_path / "first")
    after = RunFolder(tmp_path / "first").model_after
    run(tmp_path / "second", {"model.path": str(after), "training.steps": 0}, model=None, tokenizer=None)
    assert weights_hash(RunFolder(tmp_path / "second").model_before) == weights_hash(after)


# --- rewards ------------------------------------------------------------------------------------------------------


def test_a_reward_that_raises_too_often_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    def broken(response: str, answer: str) -> bool:
        if response not in ("", answer):
            raise KeyError("no such table")
        return True

    with pytest.raises(RewardError, match=r"scores failed.*no such table"):
        run(tmp_path / "run", reward=broken)


def test_a_reward_that_always_raises_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    def broken(response: str) -> bool:
        raise KeyError("no such table")

    with pytest.raises(RewardError, match=r"the reward function fails, on the first reference .*no such table"):
        run(tmp_path / "run", reward=broken)
    assert not (tmp_path / "run").exists()


def saved_model(folder: Path) -> str:
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "reward", "says"),
    [
        ({}, lambda response: "right", "expected a float, a bool, a dict"),
        ({"reward.kind": "function", "reward.function": "gone.py:f"}, None, "no such file"),
        ({}, lambda response: 0.5, "whether a response is correct.* use algorithm.filter_groups.metric=score"),
        ({}, lambda response, answer: response == answer or -0.5, "whether an empty response is correct"),
        ({}, lambda response, solution: True, "it requires the parameter 'solution'"),
        ({"monitor.check.kind": "function", "monitor.check.function": "none.py:f"}, text_sum, "monitor.check.*no such"),
        ({"rollout.stop_token_ids": [18]}, text_sum, "rollout.stop_token_ids: 18 is no token .* ids are 0..17"),
        (
            {"data.max_prompt_length": 10**6, "training.tokens_per_micro_batch": 10**7},
            text_sum,
            "made for .* positions",
        ),
        ({"model.lora.rank": 2, "model.lora.target_modules": ["no_such"]}, text_sum, "no_such"),
        ({"run.dir": "."}, text_sum, "run.dir: the folder . exists"),
        ({"run.dir": "model/config.json/x"}, text_sum, "run.dir: .*config.json is a file"),
        ({"run.dir": "gone/x"}, text_sum, "run.dir: .*gone is a link to nothing"),
    ],
)
def test_what_needs_no_weights_is_refused_before_they_are_loaded(
    changes: dict[str, Any], reward: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("dapo.orchestrator.runtime.local.load_trainable", lambda *_: loaded.append("the model"))
    monkeypatch.setattr("dapo.training.lora.load_model", lambda *_, **__: loaded.append("the weights"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").symlink_to("nowhere")
    settings = {"model.path": saved_model(tmp_path / "model"), "model.compute_dtype": "float32"} | changes
    with pytest.raises(UserError, match=says):
        run(tmp_path / "run", settings, model=None, tokenizer=None, reward=reward)
    assert loaded == [] and not (tmp_path / "run").exists()


def test_a_reward_is_closed_where_the_model_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def note(self: Any, what: str) -> None:
        events.append(what)

    monkeypatch.setattr("dapo.reward.function_scorers.CallableScorer.start", lambda self: note(self, "started"))
    monkeypatch.setattr("dapo.reward.function_scorers.CallableScorer.close", lambda self: note(self, "closed"))
    path = saved_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot be loaded"):
        run(tmp_path / "run", {"model.path": path}, model=None, tokenizer=None)
    assert events == ["started", "closed"] and not (tmp_path / "run").exists()


def test_a_reward_that_is_the_same_for_all_is_told_before_it_drops_every_group(tmp_path: Path) -> None:
    def told(reward: Any) -> list[str]:
        listener = Recorder()
        changes = {"algorithm.filter_groups.metric": "score", "algorithm.filter_groups.on_starved": "train"}
        run(tmp_path / "run", changes | {"training.steps": 0, "run.if_exists": "rename"}, listener, reward=reward)
        return [w for w in listener.warnings if w.startswith("a trial of the reward")]

    (same,) = told(lambda response: 0.25)
    assert "an empty response and another row's answer all get 0.25" in same
    assert "algorithm.filter_groups.metric=score" in same
    assert told(lambda response: float(len(response))) == []
    assert told(lambda response, answer: float(response == answer)) == []
    assert told(lambda response, answer: 0.25 if response in ("", answer) else -1.0) == [], (
        "the other row's answer differs"
    )


# --- nothing to learn from ----------------------------------------------------------------------------------------


def test_only_flat_groups_stop_the_run_with_the_histogram_and_a_checkpoint_failures_23(tmp_path: Path) -> None:
    root = tmp_path / "run"
    done: list[int] = []

    def right_in_the_first_step_only(prompt: str, response: str) -> bool:
        return not done and text_sum(prompt, response).correct is True

    with pytest.raises(StarvedError) as error:
        run(
            root,
            {"algorithm.filter_groups.max_num_gen_batches": 4, "training.steps": 3},
            Recorder(on_step=done.append),
            reward=right_in_the_first_step_only,
        )
    message = str(error.value)
    assert "step 2: dynamic sampling kept 0 of the 4 groups wanted; in 16 draws" in message
    assert "16 all wrong, 0 mixed, 0 all right" in message
    assert "What may help: easier prompts" in message and "rollout.samples_per_prompt (now 4)" in message
    saved = last_checkpoint(root)
    assert f"the state is in {saved}" in message
    loads_whole(saved / "model")
    load_tensors(saved / "optimizer")
    summary = yaml.safe_load(RunFolder(root).summary.read_text())
    assert summary["stopped"].startswith("StarvedError: step 2") and summary["steps"] == 1


def test_what_a_step_drew_that_starved_can_be_read(tmp_path: Path) -> None:
    """2 x 4 draws of 4 samples, and not one is right."""
    root = tmp_path / "run"
    with pytest.raises(StarvedError, match=f"What was drawn: dapo inspect {root} --samples\n0 steps were done"):
        run(root, {"algorithm.filter_groups.max_num_gen_batches": 2}, reward=lambda response: False)
    samples = list(read_samples(RunFolder(root).samples / "step-00001.jsonl"))
    assert len(samples) == 32 and {(s["status"], s["correct"], s["in_loss"]) for s in samples} == {
        ("all_wrong", False, False)
    }
    assert len({(s["draw"], s["index"]) for s in samples}) == 32 and all(s["advantage"] is None for s in samples)
    shown = CliRunner().invoke(app, ["inspect", str(root), "--samples"])
    assert shown.exit_code == 0 and "all_wrong" in shown.output


def recipe_in(folder: Path, changes: dict[str, Any] | None = None) -> str:
    """Model, data and recipe of a run on disk, for the command line."""
    tiny_model().save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", [{**row, "answer": "no response is this"} for row in PROMPTS])
    config = config_for(
        folder / "run",
        {"model.path": str(folder / "model"), "data.train": str(folder / "train.jsonl"), "reward.kind": "exact"}
        | (changes or {}),
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(folder / "recipe.yaml")


def test_starvation_is_exit_code_3_on_the_command_line_failures_23(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, {"algorithm.filter_groups.max_num_gen_batches": 2})
    result = CliRunner().invoke(app, ["train", recipe])
    assert result.exit_code == 3, result.output
    assert "8 all wrong, 0 mixed, 0 all right" in result.stderr and "Traceback" not in result.output
    loads_whole(last_checkpoint(tmp_path / "run") / "model")


def test_an_existing_run_is_kept_and_the_command_line_says_two_ways_out(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, {"training.steps": 0})
    invoke = CliRunner().invoke
    assert invoke(app, ["train", recipe, "--quiet"]).exit_code == 0
    first = RunFolder(tmp_path / "run").summary.read_text()
    result = invoke(app, ["train", recipe, "--quiet"])
    assert result.exit_code == 1 and "set run.dir to another folder, or run.if_exists=rename" in result.stderr
    assert RunFolder(tmp_path / "run").summary.read_text() == first
    result = invoke(app, ["train", recipe, "--quiet", "run.if_exists=rename"])
    (old,) = tmp_path.glob("run-2*")
    assert result.exit_code == 0 and f"warning: the earlier run is now in {old}\n" in result.stderr
    assert RunFolder(old).summary.read_text() == first
    assert RunFolder(tmp_path / "run").summary.is_file()


# --- numbers that are not finite ----------------------------------------------------------------------------------


def spoil_updates(monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    """Make the loss of update number ``n`` (from 0) infinite where ``wanted(n)``."""
    plain, count = Trainer.update, iter(range(10**6))

    def update(self: Trainer, batch: Any, inputs: Any, objective: Any) -> Any:
        bad = wanted(next(count))

        def spoilt(logprobs: Any, entropy: Any, inputs: Any) -> Any:
            loss, statistics = objective(logprobs, entropy, inputs)
            return (loss * math.inf if bad else loss), statistics

        return plain(self, batch, inputs, spoilt)

    monkeypatch.setattr(Trainer, "update", update)


def test_an_update_that_is_not_finite_is_skipped_and_counted_failures_96(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_updates(monkeypatch, lambda n: n == 1)
    listener = Recorder()
    summary = run(tmp_path / "run", {"training.steps": 2}, listener)
    first, second = steps_of(tmp_path / "run")
    assert (first["updates"], first["updates/skipped"], second["updates/skipped"]) == (1, 1, 0)
    assert summary["updates"] == 3
    assert [w for w in listener.warnings if "step 1: an update was skipped: not finite" in w]
    assert loads_whole(RunFolder(tmp_path / "run").model_after).isfinite().all()


def test_updates_that_are_not_finite_end_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry 96: after k in a row. The weights saved are the last good ones."""
    spoil_updates(monkeypatch, lambda n: n >= 2)
    with pytest.raises(NumericalError, match=r"2 updates in a row (.|\n)*1 step was done") as error:
        run(tmp_path / "run", {"training.steps": 5, "training.max_skipped_updates": 2})
    saved = last_checkpoint(tmp_path / "run")
    assert str(saved) in str(error.value)
    assert loads_whole(saved / "model").isfinite().all()
    assert len(steps_of(tmp_path / "run")) == 1
    state = json.loads((saved / "optimizer" / "trainer.json").read_text())
    # that which ended it is made again when the run goes on, and counted then
    assert (state["skipped_updates"], state["skipped_in_row"]) == (1, 1)


def test_a_model_with_nan_in_it_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight hold NaN"):
        run(tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()


def test_nan_that_comes_up_in_a_run_ends_it_with_a_message(tmp_path: Path) -> None:
    """NaN in a parameter after the first step, with an adaptive KL, which sees a KL of NaN before the end."""
    model = tiny_model()

    def poison(step: int) -> None:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan

    changes = {
        "algorithm.kl.mode": "loss",
        "algorithm.kl.target": 0.1,
        "algorithm.filter_groups.enable": False,
        "training.steps": 4,
    }
    listener = Recorder(on_step=poison)
    with pytest.raises(NumericalError, match=r"the weights of .*down_proj\.weight are not finite"):
        run(tmp_path / "run", changes, listener, model=model)
    (first,) = steps_of(tmp_path / "run")
    assert (first["updates"], first["updates/skipped"]) == (2, 0)


def test_an_engine_with_other_weights_sets_off_the_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry 36: weights that never arrive are refused, and where a fingerprint misses it, noticed in the next step."""

    def keep_old(self: Any, bucket: Any) -> None:
        self._missing.clear()

    commit = NativeEngine._commit
    changes = {"training.steps": 2, "training.learning_rate": 1e-2, "training.mismatch_alarm": 0.01}
    good, bad = Recorder(), Recorder()
    run(tmp_path / "good", changes, good)
    monkeypatch.setattr(NativeEngine, "_put", keep_old)
    with pytest.raises(EngineError, match=r"parameters, such as .* are not what was sent"):
        run(tmp_path / "refused", changes)
    monkeypatch.setattr(NativeEngine, "_commit", lambda self, fingerprint: commit(self, {}))
    run(tmp_path / "bad", changes, bad)
    assert not [w for w in good.warnings if "differ" in w]
    assert [w for w in bad.warnings if w.startswith("step 2: mismatch: log-probabilities of engine and trainer differ")]


def test_a_step_whose_engine_has_other_weights_ends_the_run_and_is_sampled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"training.steps": 2, "algorithm.proximal": "recompute"}
    plain, off = SampleInFlight.sample, {0: 0.9, 1: 1.5}

    def wrong(*given: Any) -> Any:
        sample = plain(*given)
        return replace(sample, logprobs=sample.logprobs - off[int(sample.versions[0])])

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"other weights .* by 1\.\d+ nats .*\n1 step was"),
    ):
        patch.setattr(SampleInFlight, "sample", wrong)
        run(tmp_path / "run", changes)
    run(tmp_path / "run", changes, resume=RunFolder(tmp_path / "run"))
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 and 0.8 < steps[0]["mismatch/mean"] < 1 and steps[1]["mismatch/mean"] < 1e-4


# --- ends that nobody planned -------------------------------------------------------------------------------------


def check_rescued(root: Path, reason: str, listener: Recorder) -> None:
    saved = last_checkpoint(root)
    loads_whole(saved / "model")
    load_model(str(saved / "model"))
    load_tokenizer(str(saved / "model"))
    load_tensors(saved / "optimizer")
    summary = yaml.safe_load(RunFolder(root).summary.read_text())
    assert summary["steps"] == len(steps_of(root)) == 1 and reason in summary["stopped"]
    assert any(f"1 step was done; the state is in {saved}" in w for w in listener.warnings)
    assert not [t for t in threading.enumerate() if t.name == "dapo-engine" and t.is_alive()]


def test_an_engine_that_fails_half_way_ends_the_run_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry 94: the cause is named, nobody waits for ever."""
    plain, done = Decoder.stretch, []

    def stretch(self: Decoder, told: Any) -> Any:
        if done:
            raise MemoryError("no memory for the cache")
        return plain(self, told)

    monkeypatch.setattr(Decoder, "stretch", stretch)
    listener = Recorder(on_step=done.append)
    started = time.monotonic()
    with pytest.raises(EngineError, match="MemoryError: no memory for the cache"):
        run(tmp_path / "run", {"training.steps": 3}, listener)
    assert time.monotonic() - started < 20
    check_rescued(tmp_path / "run", "EngineError", listener)


def test_an_engine_that_fails_in_an_evaluation_is_not_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stretch(self: Decoder, told: Any) -> Any:
        raise MemoryError("no memory for the cache")

    monkeypatch.setattr(Decoder, "stretch", stretch)
    with pytest.raises(EngineError, match="no memory"):
        run(tmp_path / "run", heldout=PROMPTS[:2])


def test_an_interrupt_leaves_what_was_learned(tmp_path: Path) -> None:
    listener = Recorder(on_step=lambda step: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", {"training.steps": 3}, listener)
    check_rescued(tmp_path / "run", "interrupted", listener)


@pytest.mark.parametrize("every", [0, 1])
def test_an_interrupted_run_has_an_accuracy_after_training_only_if_it_was_evaluated_then(
    tmp_path: Path, every: int
) -> None:
    listener = Recorder(on_step=lambda step: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", {"training.steps": 3, "evaluation.every": every}, listener, heldout=PROMPTS[:2])
    summary = json.loads(RunFolder(tmp_path / "run").summary.read_text())
    assert (summary["steps"], "accuracy_before" in summary) == (1, True)
    assert {name: name in summary for name in ("accuracy_after", "response_length_after", "best")} == dict.fromkeys(
        ("accuracy_after", "response_length_after", "best"), bool(every)
    )


def test_an_interrupt_in_a_notebook_stops_the_run_in_the_other_thread(tmp_path: Path) -> None:
    """Inside of a running event loop the run has a thread of its own, which the signal does not reach."""

    def interrupt_main_thread(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    listener = Recorder(on_step=interrupt_main_thread)
    experiment = Experiment(
        config_for(tmp_path / "run", {"training.steps": 1000}),
        listener,
        RunOverrides(model=tiny_model(), tokenizer=TOKENIZER, rows=PROMPTS, reward=text_sum),
    )

    async def notebook() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_to_end(experiment)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(notebook())
    finally:
        signal.signal(signal.SIGINT, before)
    assert experiment.state.steps_done < 1000
    assert (last_checkpoint(tmp_path / "run") / "model").is_dir()


@pytest.mark.parametrize("in_notebook", [False, True])
def test_settings_of_the_compiler_hold_in_the_threads_that_compile(
    in_notebook: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch keeps them in context variables (those of 2.13 at least), which a plain thread begins without."""
    limits: dict[str, set[int]] = {"update": set(), "stretch": set()}

    def noted(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any) -> Any:
            limits[name].add(dynamo.recompile_limit)
            return method(*args)

        monkeypatch.setattr(owner, name, call)

    noted(Trainer, "update")
    noted(Decoder, "stretch")
    load = Experiment.load

    def raises_the_limit(self: Experiment, wait: Any) -> None:  # as compiling layers does, once the model is loaded
        dynamo.recompile_limit = 77
        load(self, wait)

    monkeypatch.setattr(Experiment, "load", raises_the_limit)

    async def notebook() -> None:
        run(tmp_path / "run")

    with dynamo.patch(recompile_limit=dynamo.recompile_limit):  # set back at the end
        if in_notebook:
            asyncio.run(notebook())
        else:
            run(tmp_path / "run")
    assert limits == {"update": {77}, "stretch": {77}}


def test_a_checkpoint_that_cannot_be_written_does_not_hide_why_the_run_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Trainer, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "save_state", full)
    with pytest.raises(StarvedError, match=r"kept 0 of the 4(.|\n)*could not be saved: .*No space left"):
        run(tmp_path / "run", {"algorithm.filter_groups.max_num_gen_batches": 1}, reward=lambda response: False)


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancellation_waits_for_the_thread_that_it_cannot_stop(times: int) -> None:
    events: list[str] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.1)
        events.append("work is done")

    async def main() -> None:
        task = asyncio.create_task(in_thread(work))
        await asyncio.to_thread(begun.wait)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        events.append("cancelled")

    asyncio.run(main())
    assert events == ["work is done", "cancelled"]


def test_all_updates_of_a_run_are_made_by_one_thread_which_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is at work: a GPU's matrix products keep memory for each thread that they were called from."""
    threads: list[threading.Thread] = []
    plain = Trainer.update

    def update(self: Trainer, *args: Any) -> Any:
        threads.append(threading.current_thread())
        return plain(self, *args)

    monkeypatch.setattr(Trainer, "update", update)
    run(tmp_path, {"training.steps": 3, "run.save_every": 1, "evaluation.every": 1})
    assert len(threads) >= 3 and len(set(threads)) == 1 and threads[0] is not threading.main_thread()
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_the_engine_sleeps_from_the_rollout_to_the_new_weights_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache's memory is the trainer's meanwhile. The evaluation after the second step finds it awake."""
    happened: list[str] = []

    def noted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            happened.append(name)
            return plain(self, *args)

        monkeypatch.setattr(owner, name, call)

    for name in ("generate", "sleep", "commit", "wake"):
        noted(NativeEngine, name)
    noted(Trainer, "update")
    run(tmp_path, {"training.steps": 2, "evaluation.every": 2}, heldout=PROMPTS[:2])
    first = [what for what, _ in groupby(happened)]  # one rollout may ask the engine more than once
    step = ["generate", "sleep", "update", "commit", "wake"]
    assert first == [*step, *step, "generate"]


def test_a_scorer_is_closed_even_if_the_engine_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def engine_hangs() -> None:
        raise EngineError("did not stop")

    async def scorer_closes() -> None:
        closed.append("scorer")

    from dapo.reward.function_scorers import CallableScorer

    plain = NativeEngine.close

    async def close(self: NativeEngine) -> None:
        await plain(self)
        await engine_hangs()

    monkeypatch.setattr(NativeEngine, "close", close)
    monkeypatch.setattr(CallableScorer, "close", lambda self: scorer_closes())
    with pytest.raises(EngineError, match="did not stop"):
        run(tmp_path / "run")
    assert closed == ["scorer"]


# --- all kinds of models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_other_architectures_train_and_save(tmp_path: Path, name: str) -> None:
    run(tmp_path / "run", model=tiny_model(name=name))
    check_metrics(tmp_path / "run")
    (entry,) = steps_of(tmp_path / "run")
    assert entry["mismatch/max"] < 1e-4
    loads_whole(RunFolder(tmp_path / "run").model_after)


def test_the_recipe_in_the_run_folder_runs_again(tmp_path: Path) -> None:
    """Entry 63 seen from the other side: what is recorded is a whole recipe."""
    run(tmp_path / "run")
    tree = yaml.safe_load(RunFolder(tmp_path / "run").config.read_text())
    tree["run"]["dir"] = str(tmp_path / "again")
    config: Config = build_config(tree)
    inputs = RunOverrides(model=tiny_model(), tokenizer=TOKENIZER, rows=PROMPTS, reward=text_sum)
    run_experiment(config, Recorder(), inputs)
    first, again = (weights_hash(RunFolder(tmp_path / name).model_after) for name in ("run", "again"))
    assert first == again


def test_a_folder_that_the_caller_holds_is_in_use_from_then_to_the_end(tmp_path: Path) -> None:
    config, states = config_for(tmp_path / "r"), []
    folder = RunFolder.create(config)

    class Looks(Recorder):
        def phase(self, text: str) -> None:
            states.append(RunView.read(folder.root).state)

    with contextlib.ExitStack() as lock:
        lock.enter_context(folder.lock())
        inputs = RunOverrides(tiny_model(), TOKENIZER, PROMPTS, reward=text_sum, folder=folder, lock=lock)
        run_experiment(config, Looks(), inputs)
    assert len(states) > 2 and set(states) == {"running"} and RunView.read(folder.root).state == "finished"
