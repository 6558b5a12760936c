"""How long a run trains: steps or minutes, whichever is over first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dapo.commands.replay.stored import read_step
from dapo.config import TrainingConfig
from dapo.errors import RewardError
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.util.spans import Spans
from run_cases import PROMPTS, TOKENIZER, Recorder, config_for, run, steps_of, text_sum, tiny_model


def test_no_step_begins_that_would_end_too_late() -> None:
    budget = Budget(TrainingConfig(steps=100, minutes=1.0))
    ends = []
    while not budget.used_up:
        budget = budget.after(13.0)
        ends.append(budget.seconds)
    assert ends == [13, 26, 39, 52]
    assert budget.reason() == (
        "the minutes are over: 4 steps took 0.9 minutes, and another one like the latest (13 s) would end after "
        "training.minutes=1"
    )


def test_a_step_that_ends_with_the_last_minute_is_in_time() -> None:
    budget = Budget(TrainingConfig(steps=100, minutes=1.0))
    while not budget.used_up:
        budget = budget.after(15.0)
    assert (budget.steps, budget.seconds) == (4, 60.0)
    again = Budget(budget.config)
    again.load_state(3, Budget(budget.config, 3, 45.0, 20.0).state())
    assert (again.steps, again.seconds, again.last) == (3, 45.0, 20.0) and again.used_up


def test_a_first_step_is_always_made_and_steps_end_a_run_as_before() -> None:
    assert Budget(TrainingConfig(steps=9, minutes=0.01)).after(500.0).steps == 1
    assert not Budget(TrainingConfig(steps=9, minutes=0.01)).used_up
    assert Budget(TrainingConfig(steps=0, minutes=5.0)).used_up
    done = Budget(TrainingConfig(steps=1, minutes=5.0)).after(1.0)
    assert done.used_up and done.reason() == "all steps are done"


def test_what_is_spent_is_the_share_of_steps_or_minutes_whichever_is_more() -> None:
    config = TrainingConfig(steps=10, minutes=1.0)
    shares = [Budget(config).spent, Budget(config, 3, 6.0).spent, Budget(config, 3, 30.0).spent]
    assert shares == pytest.approx([0.0, 0.3, 0.5])
    assert Budget(config, 10, 90.0).spent == 1.0 == Budget(TrainingConfig(steps=0)).spent
    assert Budget(TrainingConfig(steps=4), 1, 1e9).spent == 0.25  # no minutes were asked for


def test_the_rate_falls_over_the_steps_of_a_run_and_over_its_minutes(tmp_path: Path, slow_clock: None) -> None:
    falling = {"training.learning_rate": 1e-3, "training.final_learning_rate": 0.0}
    run(tmp_path / "steps", falling | {"training.steps": 4})
    rates = [entry["lr"] for entry in steps_of(tmp_path / "steps")]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    run(tmp_path / "minutes", falling | {"training.steps": 100, "training.minutes": 120.0})
    rates = [entry["lr"] for entry in steps_of(tmp_path / "minutes")]
    assert rates == pytest.approx([1e-3, (1 - 2000 / 7200) * 1e-3, (1 - 4000 / 7200) * 1e-3], rel=1e-2)


def test_a_step_has_one_rate_whatever_length_its_run_is_given_inside_of_it(tmp_path: Path) -> None:
    class Interrupts(Recorder):
        def working(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
            if phase == "update" and done == 1 and len(steps_of(root)) == 1:
                raise KeyboardInterrupt

    root = tmp_path / "run"
    falling = {"training.learning_rate": 1e-3, "training.final_learning_rate": 0.0, "training.steps": 4}
    with pytest.raises(KeyboardInterrupt):
        run(root, falling, Interrupts())
    run(root, falling | {"training.steps": 8}, resume=RunFolder(root))
    rates = [entry["lr"] for entry in steps_of(root)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.75e-3, 0.625e-3, 0.5e-3, 0.375e-3, 0.25e-3, 0.125e-3])
    assert [report["learning_rate"] for report in read_step(RunFolder(root), 2).reports] == [rates[1]] * 2


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that take 2,000 seconds each, by the clock of the loop."""
    plain = Spans.__call__

    @contextmanager
    def slow(self: Spans, role: str) -> Iterator[None]:
        with plain(self, role):
            yield self.add({role: 2000.0} if role == "rollout" else {})

    monkeypatch.setattr(Spans, "__call__", slow)


@pytest.mark.usefixtures("slow_clock")
def test_a_run_ends_with_its_minutes_evaluates_and_goes_on_when_given_more(tmp_path: Path) -> None:
    changes = {"training.steps": 50, "training.minutes": 120, "evaluation.every": 2}
    summary = run(tmp_path, changes, heldout=PROMPTS[:4])
    steps = steps_of(tmp_path)
    assert summary["steps"] == 3 and summary["stopped"].startswith("the minutes are over: 3 steps took 10")
    assert ["eval/accuracy" in step for step in steps] == [False, True, True]
    assert [step["time/training"] for step in steps] == pytest.approx([2000, 4000, 6000], abs=300)

    folder = RunFolder(tmp_path)
    inputs = {"tokenizer": TOKENIZER, "rows": PROMPTS, "heldout": PROMPTS[:4], "reward": text_sum}
    heard = Recorder()
    for minutes, total in ((120, 3), (175, 5)):  # nothing is left to do; more minutes are more steps
        config = config_for(tmp_path, changes | {"training.minutes": minutes})
        run_experiment(config, heard, RunOverrides(**inputs, model=tiny_model(), resume=folder))
        assert json.loads(folder.summary.read_text())["steps"] == total
    assert any(phase.endswith("to go on: training.minutes=240") for phase in heard.phases)
    assert [step["time/training"] for step in steps_of(tmp_path)][-1] == pytest.approx(10_000, abs=400)


@pytest.mark.usefixtures("slow_clock")
def test_a_rollout_that_was_broken_off_has_taken_its_time(tmp_path: Path) -> None:
    changes = {"training.steps": 2, "training.minutes": 300, "runtime.deterministic": False}
    scored = iter(range(1, 1000))

    def breaks_off(prompt: str, response: str) -> Any:
        return "no reward" if next(scored) == 30 else text_sum(prompt, response)

    with pytest.raises(RewardError, match="got str 'no reward'"):
        run(tmp_path, changes, reward=breaks_off)
    run(tmp_path, changes, reward=breaks_off, resume=RunFolder(tmp_path))
    times = [step["time/training"] for step in steps_of(tmp_path)]
    assert times[-1] == pytest.approx(6000, abs=300), "two rollouts, and one that was broken off"


def test_samples_and_tokens_end_a_run_as_minutes_do() -> None:
    budget = Budget(TrainingConfig(steps=100, samples=40, tokens=1000))
    while not budget.used_up:
        budget = budget.after(1.0, 16, 300)
    assert (budget.steps, budget.samples, budget.tokens, budget.spent) == (2, 32, 600, 0.8)
    assert budget.reason() == (
        "the samples are over: 2 steps took 32, and another one like the latest (16) would end after "
        "training.samples=40"
    )
    assert budget.how_to_go_on() == "training.samples=80"
    again = Budget(TrainingConfig(steps=100, tokens=800))
    again.load_state(2, budget.state())
    assert again.used_up and again.how_to_go_on() == "training.tokens=1600"
    again.load_state(2, {"seconds": 2.0, "last": 1.0})  # of a version that did not count them
    assert not again.used_up
