"""When each role was at work, as a run writes it down and the page shows it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dapo.commands.ui.curves import lanes
from dapo.observe.run_folder import RunFolder
from dapo.observe.spans import read_spans, write_spans
from dapo.util.spans import covered
from run_cases import run, steps_of


def test_a_run_writes_spans_that_add_up_to_its_times_and_cuts_them_when_it_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "r", {"training.steps": 2, "run.save_every": 1})
    path = RunFolder(tmp_path / "r").spans
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(before.splitlines(keepends=True)[1].replace(b'"step": 2', b'"step": 3') + b'{"step": 4, "spa')
    run(tmp_path / "r", {"training.steps": 3}, resume=RunFolder(tmp_path / "r"))
    assert path.read_bytes().startswith(before) and [step for step, _ in read_spans(path)] == [1, 2, 3]
    for entry, (_, spans) in zip(steps_of(tmp_path / "r"), read_spans(path), strict=True):
        took = Counter[str]()
        for role, begin, end in spans:
            took[role] += end - begin
        inside = took.pop("sampling"), took.pop("scoring")
        assert max(inside) <= took["rollout"] + 1e-3
        assert took["rollout"] == pytest.approx(entry["time/rollout"] + entry["time/reward_wait"], abs=1e-3)
        assert {role: took[role] for role in ("prepare", "update", "sync")} == pytest.approx(
            {role: entry[f"time/{role}"] for role in ("prepare", "update", "sync")}, abs=2e-3
        )
        between = entry["time/update"] - sum(entry[f"time/{part}"] for part in ("forward", "backward", "optimizer"))
        rest = entry["time/rest"] - between - took["writing"]
        assert sum(took.values()) + rest == pytest.approx(entry["time/wall"], abs=2e-3)
        assert sum(took.values()) - took["evaluation"] - took["writing"] <= entry["time/step"] + 2e-3


def test_a_run_that_samples_ahead_accounts_for_its_draws_and_its_time(tmp_path: Path) -> None:
    """From its files alone: every draw that was made is something, every group trained on has an age."""
    run(tmp_path / "r", {"training.steps": 4, "rollout.max_staleness": 1, "runtime.deterministic": False})
    entries, spans = steps_of(tmp_path / "r"), dict(read_spans(RunFolder(tmp_path / "r").spans, 3))
    for entry in entries:
        draws = {name: count for name, count in entry.items() if name.startswith("draws/")}
        assert draws.pop("draws/produced") == sum(draws.values())
        ages = {age: entry.get(f"staleness/groups/{age}", 0) for age in (0, 1)}
        assert sum(ages.values()) == entry["groups/kept"] > 0
        assert entry["staleness/mean"] == pytest.approx(ages[1] / entry["groups/kept"])
        assert 0 <= entry["overlap/seconds"] <= entry["overlap/wall"] and "overlap/won" not in entry
    assert sum(entry["groups/kept"] for entry in entries) == entries[-1]["draws/trained"]
    waits = {step: [end for role, _, end in several if role == "rollout"][-1] for step, several in spans.items()}
    for step in (3, 4):
        inside = [s for s in (*spans[step - 1], *spans[step]) if s[0] == "evaluation"]
        evaluating = covered(inside, waits[step - 1], waits[step])
        wall = waits[step] - waits[step - 1] - evaluating
        assert entries[step - 1]["overlap/wall"] == pytest.approx(wall, abs=1e-3)


def test_lanes_are_of_a_step_and_its_neighbours_without_the_time_in_which_nothing_ran(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    assert lanes(read_spans(path)) == {}  # of an older run
    for step, start in ((1, 100.0), (2, 103.0), (3, 9000.0), (4, 9001.5)):  # stopped after 2; 4 begins beside 3
        write_spans(path, step, [("rollout", start, start + 2), ("update", start + 2, start + 3)])
    assert lanes(read_spans(path, 2)) == {
        "rollout": [[1, 0, 2], [2, 3, 5], [3, 6, 8]],
        "update": [[1, 2, 3], [2, 5, 6], [3, 8, 9]],
    }
    assert lanes(read_spans(path))["rollout"] == [[2, 0, 2], [3, 3, 5], [4, 4.5, 6.5]]
    assert lanes(read_spans(path, 40)) == {}
    path.write_text(path.read_text() + '{"step": 5, "spans": [["rollout", null, 3]]}\n')
    assert lanes(read_spans(path)) == {}
