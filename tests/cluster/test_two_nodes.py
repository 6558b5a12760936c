"""A Ray cluster of two nodes on this machine: the demo's curve there, and a node that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_ray_run import assert_same, train

import ray_cases
import run_cases as cases

TWO = {"runtime.kind": "ray", "runtime.placement": "disaggregated", "runtime.engine.workers": 2}


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A head with room for the learner, and a cluster to add nodes to."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def test_a_node_that_goes_away_takes_no_sample_with_it(nodes: Any, tiny: Path, tmp_path: Path) -> None:
    """One of the engines is on it; another node takes its place."""
    first = nodes.add_node(num_cpus=1)
    heard: list[str] = []

    def leave(step: int) -> None:
        if step == 2:
            nodes.add_node(num_cpus=1, wait=False)
            nodes.remove_node(first, allow_graceful=False)

    class Heard(cases.Recorder):
        def warning(self, text: str) -> None:
            heard.append(text)

    changes = TWO | {"model.path": str(tiny), "training.steps": 4, "runtime.address": nodes.address}
    cases.run(tmp_path / "run", changes, Heard(leave), model=None)
    train(tmp_path / "alone", tiny, {})
    assert any("node" in text and "it is replaced" in text for text in heard), heard
    assert_same(cases.steps_of(tmp_path / "run"), cases.steps_of(tmp_path / "alone"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_curve_on_two_nodes_is_that_of_one_process(nodes: Any, tiny: Path, tmp_path: Path, seed: int) -> None:
    """Two ranks of the learner and two engines, some on each node."""
    nodes.add_node(num_cpus=2)
    changes = {"seed": seed, "training.steps": 60}
    ranks = {"runtime.learner.workers": 2, "runtime.address": nodes.address}
    for folder in ("one", "again"):
        train(tmp_path / folder, tiny, changes | TWO | ranks)
    train(tmp_path / "alone", tiny, changes)
    one, again, alone = (cases.steps_of(tmp_path / name) for name in ("one", "again", "alone"))
    assert [*map(cases.without_times, one)] == [*map(cases.without_times, again)]
    assert_same(one[:10], alone[:10])  # later, what is rounded otherwise has grown
    rewards = [sum(step["reward/mean"] for step in steps[-20:]) / 20 for steps in (one, alone)]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.15)
    assert ray_cases.workers() == []
