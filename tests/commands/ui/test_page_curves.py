"""Series and tables of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dapo.commands.ui import curves
from dapo.observe.changes import Change
from page_run import step_metrics


def test_a_thinned_curve_keeps_its_extremes_and_its_last_step() -> None:
    entries = [{"step": step, "loss": 100.0 if step == 37 else float(step % 2)} for step in range(1, 101)]
    found = curves.curve(entries, "loss", points=10)
    assert len(found) == 10 and found[-1] == [100, 0.5, 0, 1]
    assert max(high for *_, high in found) == 100
    assert curves.curve(entries, "loss", points=1000)[36] == [37, 100, 100, 100]


def test_a_number_that_is_missing_is_left_out() -> None:
    entries = [{"step": 1, "kl/reference": None}, {"step": 2, "kl/reference": 0.5}, {"step": 3}]
    assert curves.curve(entries, "kl/reference", 10) == [[2, 0.5, 0.5, 0.5]]
    assert curves.names_in(entries) == ["kl/reference"]


def test_what_was_before_training_stands_at_0_on_every_axis() -> None:
    entries = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "eval/accuracy": 0.3, "time/elapsed": 9.0}]
    assert [point[:2] for point in curves.curve(entries, "eval/accuracy", 9, "time/elapsed")] == [[0, 0.1], [9, 0.3]]


def test_seeds_become_one_curve_over_the_steps_that_all_of_them_have() -> None:
    runs = [[{"step": s, "time/elapsed": 10.0 * s + k, "loss": s + k} for s in range(1, 4 - k % 2)] for k in (0, 1, 2)]
    assert curves.curve(runs[0], "loss", 10, "time/elapsed", runs[1:]) == [[11, 2, 1, 3], [21, 3, 2, 4]]
    assert curves.curve(runs[0], "loss", 1, others=runs[1:]) == [[2, 2.5, 1, 4]]
    assert curves.curve(runs[0], "loss", 10, others=[[{"step": 1}]]) == []


def test_runs_of_one_experiment_differ_in_seed_and_folder_alone() -> None:
    one = {"seed": 1, "run": {"dir": "a"}, "training": {"steps": 5, "lr": 1e-3}}
    same = {"seed": 2, "run": {"dir": "b"}, "training": {"lr": 1e-3, "steps": 5, "new": None}}
    assert curves.experiment(one) == curves.experiment(same) != ""
    assert curves.experiment(one) != curves.experiment({**same, "training": {"steps": 5, "lr": 2e-3}})
    assert curves.experiment({"seed": 1}) == ""
    assert curves.experiment(one, ["rows"]) == curves.experiment(same, ["rows"]) != curves.experiment(one, ["others"])
    halved, longer = Change(3, "training.lr", 2e-3, 1e-3, "2026-01-02"), Change(3, "training.steps", 2, 5, "2026-01-02")
    falling = one | {"training": one["training"] | {"final_learning_rate": 0.0}}
    assert (
        curves.experiment(one, changes=[halved]) != curves.experiment(one) == curves.experiment(one, changes=[longer])
    )
    assert curves.experiment(one, changes=[halved]) == curves.experiment(
        same, changes=[replace(halved, date="2026-02-03"), longer]
    )
    assert curves.experiment(falling, changes=[longer]) != curves.experiment(falling)


def test_time_left_is_of_the_steps_or_of_the_minutes_if_they_end_first() -> None:
    """Ten steps of 20 s after five of 100 s; a step counts 15 s of the minutes."""
    entries = [{"step": 0, "eval/accuracy": 0.1}] + [
        {"step": step, "time/wall": 100.0 if step <= 5 else 20.0, "time/step": 15.0, "time/training": 15.0 * step}
        for step in range(1, 16)
    ]
    left = {"pace": 20.0, "of": 10}
    assert curves.time_left(entries, 40, None) == left | {"steps": 25, "by": "steps", "seconds": 500.0}
    assert curves.time_left(entries, 40, 60) == left | {"steps": 25, "by": "steps", "seconds": 500.0}
    assert curves.time_left(entries, 40, 5) == left | {"steps": 5, "by": "minutes", "seconds": 100.0}
    assert curves.time_left(entries, 15, 5) == left | {"steps": 0, "by": "steps", "seconds": 0.0}
    assert curves.time_left(entries[:1], 40, 5) is None


def test_phases_add_up_to_the_step() -> None:
    found = curves.phases([{"step": step} | step_metrics(step) for step in (1, 2, 3)], points=10)
    row = dict(zip(found["names"], found["rows"][0][1:], strict=True))
    assert row == {
        "rollout": 1.5,
        "reward_wait": 0.5,
        "prepare": 0,
        "update": 0.75,
        "sync": 0,
        "evaluation": 0,
        "other": 0.25,
    }
    assert sum(found["totals"].values()) == pytest.approx(9)


def test_ages_are_stacked_by_number_and_not_by_name() -> None:
    entries = [{"step": n, "staleness/groups/10": 1, "staleness/groups/2": 4, "staleness/groups/0": n} for n in (1, 2)]
    found = curves.ages([*entries, {"step": 3}], points=10)
    assert found == {
        "names": ["0", "2", "10"],
        "rows": [[1, 1, 4, 1], [2, 2, 4, 1]],
        "totals": {"0": 3, "2": 8, "10": 2},
    }
    assert curves.ages([{"step": 1}], points=10)["rows"] == []


def test_what_is_told_of_sampling_beside_the_updates() -> None:
    ahead = {"overlap/wall": 10.0, "overlap/seconds": 2.5, "overlap/won": 0.2, "idle/learner": 7.0, "idle/engine": 0.5}
    told = curves.overlap_told([{"step": 1} | ahead, {"step": 2} | ahead])
    assert "saved 20% " in told and "for samples 70%;" in told and told.endswith("idled 5%.")
    assert "little to win" in curves.overlap_told([{"step": 1} | ahead | {"overlap/seconds": 0.5}])
    turns = {"step": 1, "time/step": 10.0, "time/rollout": 8.0, "time/reward_wait": 1.0}
    assert "Sampling is 90% of a step" in (told := curves.overlap_told([turns]))
    assert "save 10% at most" in told
    shared = curves.overlap_told([{"step": 1} | ahead | {"overlap/won": None}])  # the cores, or by turns a GPU
    assert (
        "Over all steps, evaluation left out, sampling ran" in shared
        and "for 25% of the time" in shared
        and "saved" not in shared
    )
    assert curves.overlap_told([{"step": 0}]) == ""


def test_recipes_differ_in_the_keys_that_have_other_values() -> None:
    one = {"seed": 1, "run.dir": "a", "training.steps": 5, "training.lr": 1e-3}
    two = {"seed": 1, "run.dir": "b", "training.steps": 6, "training.lr": 1e-3, "training.new": None}
    assert curves.differing([one, two]) == ["run.dir", "training.steps"]
    assert curves.differing([one]) == []


def test_the_end_of_a_curve_is_a_mean_of_steps_but_the_last_evaluation() -> None:
    entries = [
        {"step": step, "accuracy": step / 100, "eval/accuracy": step / 100, "time/elapsed": 3.0 * step}
        for step in range(1, 21)
    ]
    assert curves.final(entries, "accuracy") == pytest.approx(0.155)
    assert curves.final(entries, "eval/accuracy") == 0.2
    assert curves.final(entries, "time/elapsed") == 60.0
    assert curves.final(entries, "reward/mean") is None
