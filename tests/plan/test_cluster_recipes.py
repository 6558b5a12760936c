"""Recipes for several GPUs load and fit into those that they say they are for; plans go by what a recipe asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dapo.config import Config, load_config
from dapo.config.plan import recipe_path
from dapo.errors import ConfigError
from dapo.plan.estimate import Assumed, Estimate, estimate_for
from dapo.plan.hardware import cluster_of, gpus_asked

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "cluster").glob("*.yaml"))
RAY = ("runtime.kind=ray", "runtime.learner.workers=2")
APART = (*RAY, "runtime.placement=disaggregated", "runtime.engine.workers=4", "rollout.engine=vllm", "reward.workers=1")


def of_recipe(*settings: str) -> Config:
    return load_config(recipe_path("gsm8k-1gpu"), ["model.path=7B", *settings])


def estimated(cluster: str, *settings: str) -> Estimate:
    return estimate_for(of_recipe(*settings), cluster, Assumed(300, 100, 0.6))[0]


@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_a_recipe_for_several_gpus_fits_into_those_that_it_names(file: Path) -> None:
    pytest.importorskip("peft")
    config = load_config(file)
    [(name, cluster)] = re.findall(r"dapo plan recipes/cluster/(\S+) --cluster (\S+)", file.read_text("utf-8"))
    assert name == file.name and cluster_of(config, "H100") == cluster and f"-{cluster[0]}gpu" in name
    rollout = config.rollout
    found, _ = estimate_for(config, cluster, Assumed(rollout.max_response_length / 2, 512, 0.6))
    assert found.fits and found.rows >= 16
    assert config.run.dir == f"runs/{file.stem}"


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 4


def test_gpus_that_a_recipe_asks_for() -> None:
    assert gpus_asked(of_recipe()) == {} and cluster_of(of_recipe()) == "1xH200"
    assert gpus_asked(of_recipe(*RAY)) == {"learner": 2.0}
    asked = of_recipe(*APART, "rollout.tensor_parallel=2", "runtime.reward.workers=1", "runtime.reward.gpus=0.5")
    assert gpus_asked(asked) == {"learner": 2.0, "engine": 8.0, "reward": 0.5} and cluster_of(asked) == "2x8xH200"
    with pytest.raises(ConfigError, match=r"8xH200: the recipe asks for 2 GPUs \(2 for learner\); give 2xH200"):
        estimated("8xH200", *RAY)
    with pytest.raises(ConfigError, match=r"asks for 12 GPUs .* give 2x8xH200"):
        estimated("8xH200", RAY[0], "runtime.learner.workers=12")
    assert estimated("2x8xH200", RAY[0], "runtime.learner.workers=12").ranks == 12  # as it is told to


def test_engines_apart_are_not_in_a_learners_memory_and_share_the_prompts() -> None:
    together, apart = estimated("2xH200", *RAY), estimated("6xH200", *APART)
    assert (apart.ranks, apart.engines, together.ranks, together.engines) == (2, 4, 2, 2)
    assert apart.memory().engine == apart.memory().cache == 0 < together.memory().engine
    assert apart.memory().adam == together.memory().adam
    assert apart.rollout()[0] < together.rollout()[0] and apart.seconds()["update"] == together.seconds()["update"]


def test_an_engine_that_does_not_fit_into_its_gpus_is_told_by_the_plan() -> None:
    sizes = ("model.path=70B", "training.tokens_per_micro_batch=1280", "runtime.learner.workers=64")
    one = estimated("68xH100", *APART, *sizes)
    four = estimated("80xH100", *APART, *sizes, "rollout.tensor_parallel=4")
    assert one.needed() <= one.usable and not one.fits and one.engine_needed > one.usable
    assert four.fits and four.engines == 4 and one.engine_needed == pytest.approx(4 * four.engine_needed, rel=1e-6)
    assert any("one that samples takes" in text for text in four.assumptions())
