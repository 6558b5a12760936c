"""Placements that are impossible, and what a cluster lacks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from dapo.config import Config, RewardConfig, build_config, nested
from dapo.config.composed_reward import off_gpu, plain_rewards
from dapo.config.placement import bundles, shards, shortages
from dapo.errors import ConfigError

RAY = {"model.path": "m", "runtime.kind": "ray"}
APART = RAY | {"runtime.placement": "disaggregated"}


def config_of(keys: dict[str, Any]) -> Config:
    return build_config(nested(keys))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model.path": "m", "runtime.address": "auto"}, "runtime.address: is for runtime.kind=ray"),
        ({"model.path": "m", "runtime.learner.workers": 2}, "runtime.learner: is for runtime.kind=ray"),
        (RAY | {"runtime.engine.workers": 2}, "runtime.engine: with placement=colocated"),
        (RAY | {"rollout.engine": "vllm"}, "rollout.engine: vllm .* needs runtime.placement=disaggregated"),
        (RAY | {"rollout.engine": "openai", "rollout.url": "http://h:1"}, "rollout.engine: openai is for"),
        (RAY | {"rollout.device": "cuda:1"}, "rollout.device: is for runtime.kind=local"),
        (RAY | {"evaluation.while_sampling": "copy"}, "evaluation.while_sampling: copy is for"),
        (RAY | {"runtime.sync": "objects"}, "runtime.sync: is objects, .* with placement=colocated by copy"),
        (
            APART | {"runtime.sync": "copy"},
            "runtime.sync: is copy, .* with placement=disaggregated by group or objects",
        ),
        (RAY | {"runtime.learner.sharded": True, "model.lora.rank": 4}, "runtime.learner.sharded: an adapter"),
        (RAY | {"runtime.learner.workers": 2, "training.moments": "int8"}, "sharded=false"),
        (RAY | {"runtime.learner.cpu_offload": True}, "runtime.learner.cpu_offload: is for a sharded model"),
        (
            {"model.path": "m", "rollout.engine": "vllm", "model.lora.base": "nf4"},
            "model.lora.base: vllm would sample .*engine=native",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(keys)


def test_several_workers_share_the_model_out_unless_it_is_an_adapter() -> None:
    two = RAY | {"runtime.learner.workers": 2}
    assert [shards(config_of(keys)) for keys in (RAY, two, two | {"model.lora.rank": 4})] == [False, True, False]


def test_what_a_cluster_lacks_is_told_by_role() -> None:
    config = config_of(APART | {"runtime.learner.workers": 4, "runtime.engine.workers": 6, "runtime.engine.cpus": 2})
    nodes = [{"CPU": 16.0, "GPU": 4.0, "memory": 2.0**36}] * 2
    assert list(shortages(bundles(config, False), nodes)) == []
    [line] = shortages(bundles(config, True), nodes)
    assert line.startswith("10 GPUs are asked for (6 for engine, 4 for learner) and the cluster has 8; lower runtime.*")
    vllm = config_of(APART | {"rollout.engine": "vllm", "rollout.tensor_parallel": 6})
    [line] = shortages(bundles(vllm, True), nodes)
    assert line == "no node has what one engine worker asks for: 1 CPUs, 6 GPUs; lower runtime.engine"


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1.0), ("cuda", 1.0), ("cpu", 0.0)])
def test_a_worker_with_a_reward_model_has_a_gpu_unless_it_is_to_score_on_the_processor(
    device: str, gpus: float
) -> None:
    reward = {"kind": "model", "path": "r", "correct_above": 0, "device": device}
    config = config_of(RAY | {"runtime.reward.workers": 1, "reward": reward})
    assert [one.gpus for one in bundles(config, True) if one.role == "reward"] == [gpus]


def test_reward_models_are_kept_off_gpus_that_are_others_unless_they_were_sent_there() -> None:
    sent = {"kind": "model", "path": "m"}
    parts = {name: {"reward": sent | more} for name, more in (("a", {}), ("b", {"device": "cuda"}))}
    parts |= {"c": {"reward": {"kind": "exact"}}, "d": {"of": "a/score"}}
    reward: Any = TypeAdapter(RewardConfig).validate_python({"kind": "compose", "parts": parts})
    assert [getattr(one, "device", None) for one in plain_rewards(off_gpu(reward))] == ["cpu", "cuda", None]
    assert off_gpu(config_of({"model.path": "m"}).reward).kind == "math"
