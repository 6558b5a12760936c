"""The presets of recipes/method: each loads, says where its values come from, and holds those of its paper."""

from pathlib import Path

import pytest

from dapo.config import load_config, warnings_for

FOLDER = Path(__file__).parents[2] / "recipes/method"
SAME = ("reward", "rollout", "data", "model", "evaluation", "seed")
# objective, advantage, aggregation, clip low and high, dual clip, KL, dynamic sampling, updates a step
PRESETS = {
    "grpo": ("dapo", "group-norm", "seq-mean-token-mean", 0.2, 0.2, None, ("loss", "k3", 0.04), False, 1),
    "dr-grpo": ("dapo", "group-mean", "constant", 0.2, 0.2, None, None, False, 4),
    "rloo": ("dapo", "leave-one-out", "seq-mean-token-sum", 0.2, 0.28, None, ("reward", "k1", 0.03), False, 1),
    "reinforce-pp": ("dapo", "batch-norm", "token-mean", 0.2, 0.2, None, ("loss", "k2", 0.001), False, 4),
    "gspo": ("gspo", "group-norm", "seq-mean-token-mean", 3e-4, 4e-4, None, None, False, 4),
    "cispo": ("cispo", "group-norm", "token-mean", 1.0, 4.0, 10.0, None, True, 4),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_task_of_the_demo_with_the_values_of_its_paper(name):
    path = FOLDER / f"{name}.yaml"
    config, demo = load_config(path), load_config("cpu-demo")
    a, kl = config.algorithm, config.algorithm.kl
    found = (a.objective, a.advantage.kind, a.loss_agg_mode, a.clip_ratio_low, a.clip_ratio_high, a.clip_ratio_c)
    term = None if kl.mode == "off" else (kl.mode, kl.estimator, kl.coef)
    assert (*found, term, a.filter_groups.enable, config.updates_per_step) == PRESETS[name]
    assert all(getattr(config, section) == getattr(demo, section) for section in SAME)
    assert f"recipes/method/{name}.yaml" in path.read_text() and "(arXiv 2" in path.read_text()
    assert [text for text in warnings_for(config) if not text.startswith("one update per rollout")] == []


def test_gspo_with_the_clip_or_the_mean_of_tokens_is_told():
    config = load_config(FOLDER / "gspo.yaml", ["algorithm.clip_ratio_high=0.28", "algorithm.loss_agg_mode=token-mean"])
    assert any("is wide for gspo" in text for text in warnings_for(config))
    assert any("gspo is a mean over responses" in text for text in warnings_for(config))
