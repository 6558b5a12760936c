"""Whole runs on a real Ray: the same steps as in one process, also when workers are killed, and on other numbers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ray_cases
import run_cases as cases
from dapo.errors import ConfigError
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples, samples_path
from dapo.training.parallel.front import RankError

APART = {"runtime.kind": "ray", "runtime.placement": "disaggregated", "runtime.learner.workers": 2,
         "runtime.engine.workers": 2, "runtime.reward.workers": 2, "runtime.sync": "group"}  # fmt: skip
FLOATS = ("loss", "grad_norm", "reward/mean", "response_length/mean", "entropy")
pytestmark = pytest.mark.usefixtures("ray_here")


def train(
    folder: Path,
    tiny: Path,
    changes: dict[str, Any],
    kill: tuple[str, ...] = (),
    then: Callable[[int], object] = id,
    **given: Any,
) -> cases.Recorder:
    """Steps; after each ``then`` is called, and after the second one the workers ``kill`` are killed."""

    def on_step(step: int) -> None:
        then(step)
        if step == 2:
            for name in kill:
                ray_cases.kill(name)

    heard = cases.Recorder(on_step)
    cases.run(folder, {"model.path": str(tiny), "training.steps": 4} | changes, heard, **({"model": None} | given))
    return heard


def assert_same(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """But for the order of additions over ranks."""
    assert len(steps) == len(others)
    for one, other in zip(steps, others, strict=True):
        names = [name for name in FLOATS if name in one]
        assert len(names) > 2
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4, abs=1e-5)


def test_a_run_is_that_of_one_process_though_engines_and_rewards_die(tiny: Path, tmp_path: Path) -> None:
    folder, alone = tmp_path / "run", tmp_path / "alone"
    train(alone, tiny, {})
    looked_at: list[dict[str, Any]] = []

    def look(step: int) -> None:
        """Until the process that looks at this node is there."""
        deadline = time.monotonic() + 60
        while step == 1 and "engine" not in {line["role"] for line in looked_at} and time.monotonic() < deadline:
            time.sleep(0.1)
            file = RunFolder(folder).resources
            looked_at[:] = map(json.loads, file.read_text().splitlines() if file.exists() else ())

    heard = train(folder, tiny, APART | {"run.resources_every_s": 0.2}, ("engine 1", "reward 0"), then=look)
    latest = {line["role"]: line for line in looked_at}
    assert {"node", "driver", "learner", "engine", "reward"} == set(latest)
    assert latest["engine"]["rss"] > 0 and {"version", "in_flight", "idle"} <= set(latest["engine"])
    told = "\n".join(heard.warnings)
    assert re.search(r"engine 1 \(process \d+ on .*\) ended: .*and it is replaced", told)
    assert re.search(r"reward 0 \(process \d+ on .*\) ended: .*and it is replaced", told)
    assert_same(cases.steps_of(folder), cases.steps_of(alone))
    assert ray_cases.workers() == []


def test_episodes_are_played_beside_the_loop_over_engines_that_ray_has(tiny: Path, tmp_path: Path) -> None:
    game = {
        "environment.name": f"{Path(ray_cases.__file__).parent}/environments_for_tests.py:Chatter",
        "environment.max_turn_tokens": 4,
        "environment.workers": 2,
        "data.max_prompt_length": 30,
        "rollout.max_response_length": 40,
        "training.tokens_per_micro_batch": 140,
        "algorithm.overlong_buffer.enable": False,
        "algorithm.filter_groups.enable": False,
        "evaluation.every": 1,
        "training.steps": 2,
    }
    heldout = [{"prompt": "1+2=", "answer": "3"}]
    train(tmp_path / "alone", tiny, game, heldout=heldout)
    apart = {"runtime.kind": "ray", "runtime.placement": "disaggregated", "runtime.engine.workers": 2}
    train(tmp_path / "run", tiny, apart | game, heldout=heldout)
    assert_same(cases.steps_of(tmp_path / "run"), cases.steps_of(tmp_path / "alone"))
    lines = read_samples(samples_path(RunFolder(tmp_path / "run").samples, 2))
    assert all(line["ended"] and line["turns"] for line in lines)


def test_a_rank_that_is_killed_ends_the_run_which_goes_on_elsewhere(tiny: Path, tmp_path: Path) -> None:
    """Beside its engine on two workers; then on three, and in one process."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    same = {"runtime.deterministic": False, "algorithm.filter_groups.enable": False, "run.save_every": 1}
    together = same | {"runtime.kind": "ray", "runtime.learner.workers": 2}
    with pytest.raises(RankError, match=r"rank 1 of 2 failed.*learner 1 \(process \d+ on .*\) ended: .*killed"):
        train(folder, tiny, together, ("learner 1",))
    assert ray_cases.workers() == [] and len(cases.steps_of(folder)) == 2
    more = together | {"runtime.learner.workers": 3, "training.steps": 3}
    train(folder, tiny, more, resume=RunFolder(folder))
    train(folder, tiny, same, resume=RunFolder(folder))
    train(alone, tiny, same)
    assert_same(cases.steps_of(folder), cases.steps_of(alone))


def test_what_the_cluster_lacks_is_said_before_anything_is_loaded(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"64 CPUs are asked for \(64 for learner\) and the cluster has 16; lower"):
        train(tmp_path / "run", tiny, {"runtime.kind": "ray", "runtime.learner.workers": 64})
    with pytest.raises(ConfigError, match=r"with runtime\.kind=ray its workers load it from a folder"):
        train(tmp_path / "run", tiny, {"runtime.kind": "ray"}, model=cases.tiny_model())
