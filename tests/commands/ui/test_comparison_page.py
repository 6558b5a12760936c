"""The page over a comparison: its table and curves, and blind votes on what two recipes' models answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from compared import stored_comparison, write_recipes
from dapo.commands.ui.runs import Runs
from dapo.evaluation.votes import read_votes
from dapo.observe.run_folder import RunFolder
from page_run import served


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.chdir(tmp_path)
    write_recipes(tmp_path)
    answers = {"first": ["same", *(f"first {row}" for row in range(1, 8))], "fast": ["same"] + 7 * ["fast"]}
    stored_comparison(tmp_path / "out", {"first": {1: [0.0, 0.5]}, "fast": {1: [0.0, 0.5, 1.0]}}, answers)
    with served(tmp_path / "out") as address, httpx.Client(base_url=f"{address}/api/", trust_env=False) as found:
        yield found


def test_a_comparison_is_shown_from_any_of_its_runs(client: httpx.Client, tmp_path: Path) -> None:
    assert {run["name"] for run in client.get("runs").json()} == {"first-seed-1", "fast-seed-1"}
    found = client.get("comparison", params={"run": "fast-seed-1"}).json()
    assert (found["name"], found["recipes"], found["wins"][1:]) == ("out", ["first", "fast"], [])
    assert ["held-out accuracy, after training", "50.0%", "100.0%"] in found["lines"]
    curve = found["curves"]["minutes"]["fast"]
    assert curve[0] == [0.0, 0.0, 0.0, 0.0] and curve[-1] == [1.0, 1.0, 1.0, 1.0]
    (tmp_path / "out/comparison.json").unlink()
    assert client.get("comparison", params={"run": "fast-seed-1"}).json() is None
    answer = client.get("comparison/votes", params={"run": "fast-seed-1"})
    assert answer.status_code == 404 and "belongs to no comparison" in answer.json()["error"]


def test_votes_between_two_recipes_are_blind_and_kept_in_the_comparison(client: httpx.Client, tmp_path: Path) -> None:
    rows, wanted = [], {"run": "first-seed-1", "models": ["first", "fast"], "who": "ann"}
    for _ in range(7):
        shown = client.post("comparison/votes/pair", json=wanted).json()
        side = "left" if shown["left"] == "fast" else "right"
        assert {shown["left"], shown["right"]} == {"fast", f"first {shown['row']}"} and shown[
            "prompt"
        ] == f"{shown['row']}?"
        client.post("votes", json={"pair": shown["pair"], "vote": side, "who": "ann"})
        rows.append(shown["row"])
    assert sorted(rows) == [1, 2, 3, 4, 5, 6, 7]  # to the first one both said the same
    assert "there are no more answers" in client.post("comparison/votes/pair", json=wanted).json()["error"]
    assert len(read_votes(tmp_path / "out")) == 7
    (tally,) = client.get("comparison/votes", params={"run": "first-seed-1"}).json()["tallies"]
    assert tally["models"] == ["fast", "first"] and (tally["first"], tally["second"]) == (7, 0)
    assert client.post("comparison/votes/pair", json=wanted | {"models": ["fast", "fast"]}).status_code == 422


def test_runs_of_phases_are_found_in_the_folder_of_their_comparison(client: httpx.Client, tmp_path: Path) -> None:
    source = RunFolder(tmp_path / "out/fast-seed-1")
    (tmp_path / "out/phases-seed-1").mkdir()
    source.root.rename(tmp_path / "out/phases-seed-1/rl")
    assert {run.name for run in Runs([tmp_path / "out"]).all()} == {"first-seed-1", "rl"}
