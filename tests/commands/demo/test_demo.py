"""The demo: its task by hand, a shortened run in CI, whole runs over five seeds and the control nightly."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dapo.commands.demo import run as demo_run
from dapo.commands.demo import warmup
from dapo.commands.demo.run import run_demo
from dapo.commands.demo.task import Expression, draw_expressions, make_model, make_tokenizer
from dapo.observe.progress import QuietListener
from dapo.observe.run_view import RunView
from dapo.reward.exact import score_exact

SEEDS = (31, 32, 33, 34, 35)  # never used in tuning


def test_arithmetic_by_hand() -> None:
    """7 * 3 = 21, so 1; 1 + 4 = 5; 5 - 9 = -4, so 6."""
    expression = Expression((7, 3, 4, 9), ("*", "+", "-"))
    assert expression.prompt == "7*3+4-9="
    assert expression.response(think=True) == "7*3=1;1+4=5;5-9=6;#6"
    assert expression.response(think=False) == "#6"
    assert expression.answer == "6"


def test_both_kinds_of_response_earn_the_reward_and_others_do_not() -> None:
    expression = Expression((7, 3, 4, 9), ("*", "+", "-"))
    for think in (True, False):
        assert score_exact(expression.response(think), expression.answer, "#").correct
    assert not score_exact("7*3=1;1+4=5;5-9=6;", "6", "#").correct
    assert not score_exact("7*3=1;1+4=5;5-9=6;#5", "6", "#").correct


def test_drawn_expressions_differ_from_each_other_and_from_what_was_taken() -> None:
    taken = {e.prompt for e in draw_expressions(np.random.default_rng(0), 50, set(), range(1, 2))}
    before = set(taken)
    found = draw_expressions(np.random.default_rng(0), 100, taken, range(1, 2))
    prompts = [e.prompt for e in found]
    assert len(set(prompts)) == 100
    assert not set(prompts) & before
    assert taken == before | set(prompts)


def test_the_tokenizer_has_one_token_per_character_and_loses_nothing() -> None:
    tokenizer = make_tokenizer()
    text = "7*3+4-9=7*3=1;#6"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_model_follows_from_its_seed() -> None:
    size = len(make_tokenizer())
    same, other = make_model(3, size), make_model(4, size)
    assert 300_000 < same.num_parameters() < 500_000
    assert all((a == b).all() for a, b in zip(same.parameters(), make_model(3, size).parameters(), strict=True))
    assert any((a != b).any() for a, b in zip(same.parameters(), other.parameters(), strict=True))


def test_a_shortened_demo_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes and shows; that a second run keeps the first; not how well it learns in so few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_run, "SIZES", {"heldout": 40, "exam": 20, "train": 60, "warmup": 100})
    for name, value in {"SKILL_STEPS": 5, "HABIT_STEPS": 5, "MAX_STEPS": 10}.items():
        monkeypatch.setattr(warmup, name, value)
    console = Console(record=True, width=100, file=(tmp_path / "shown").open("w"))
    states, advance = set(), QuietListener.advance

    def look(self: QuietListener, *args: Any, **rest: Any) -> None:
        """Who looks while it warms up sees a run that is going on."""
        states.add(RunView.read(tmp_path / "runs/cpu-demo").state)
        advance(self, *args, **rest)

    monkeypatch.setattr(QuietListener, "advance", look)
    few = ["training.steps=1", "seed=3"]
    summary = run_demo(few, QuietListener(), console)

    root = tmp_path / "runs/cpu-demo"
    written = json.loads((root / "summary.json").read_text())
    assert written == json.loads(json.dumps(summary))
    assert written["seed"] == 3
    assert written["heldout_rows"] == 40
    for key in ("accuracy_before", "accuracy_after"):
        assert 0 <= written[key] <= 1
    for key in ("seconds_sft", "seconds_rl", "response_length_before", "response_length_after"):
        assert written[key] > 0
    place = tmp_path / "runs/cpu-demo-world/seed-3"
    world = {
        name: [json.loads(line)["prompt"] for line in (place / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    assert len(world["heldout"]) == 40
    assert not set(world["train"]) & set(world["heldout"])
    shown = console.export_text()
    for expected in ("before", "after", "right answers", "runs/cpu-demo-world", "the control,", *world["heldout"][:3]):
        assert expected in shown
    assert shown.rstrip().endswith("dapo ui runs/cpu-demo")
    assert states == {"running"}

    run_demo([*few, "training.steps=0"], QuietListener())
    kept = [path for path in (tmp_path / "runs").iterdir() if path.name not in ("cpu-demo", "cpu-demo-world")]
    assert len(kept) == 1
    assert json.loads((kept[0] / "summary.json").read_text()) == written


@pytest.mark.nightly
def test_the_demo_learns_on_every_seed(tmp_path: Path) -> None:
    found = {}
    for seed in SEEDS:
        found[seed] = run_demo([f"seed={seed}", f"run.dir={tmp_path / str(seed)}"], QuietListener())
        print(seed, {k: found[seed][k] for k in ("accuracy_before", "accuracy_after", "seconds_sft", "seconds_rl")})
    assert all(s["heldout_rows"] == 1000 for s in found.values())
    assert all(s["accuracy_before"] <= 0.5 for s in found.values())
    assert all(s["accuracy_after"] >= 0.90 for s in found.values())
    assert median(s["accuracy_after"] for s in found.values()) >= 0.95


@pytest.mark.nightly
def test_with_shuffled_answers_nothing_is_learned(tmp_path: Path) -> None:
    """The control: what is learned comes from the reward."""
    summary = run_demo(["seed=31", f"run.dir={tmp_path / 'run'}", "data.shuffle_answers=true"], QuietListener())
    assert summary["accuracy_after"] < 0.5
