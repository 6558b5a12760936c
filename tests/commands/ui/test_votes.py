"""Blind comparison: who voted did not know whose answers they were, and what is kept says it all."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from dapo.commands import app
from dapo.errors import UserError
from dapo.evaluation.votes import Choice, Shown, Vote, add_vote, preference_pairs, read_votes, tallies, votes_path
from dapo.reward.build import make_scorer
from ui_run import HELD_OUT, run_with_models, serving, stream

BEFORE, AFTER = "model-before", "model-after"


def a_vote(choice: Choice, left: str = BEFORE, right: str = AFTER, who: str = "ann", prompt: str = "1+1=") -> Vote:
    return Vote(prompt, Shown(left, f"of {left}"), Shown(right, f"of {right}"), choice, who, 12.5, row=3)


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, httpx.Client]]:
    root = run_with_models(tmp_path / "r", {BEFORE: 0, AFTER: 1})
    with serving(root) as client:
        yield root, client


def next_pair(client: httpx.Client, **others: Any) -> Any:
    return client.post("votes/pair", json={"run": "r", "models": [BEFORE, AFTER], **others})


def test_a_vote_becomes_a_pair_and_nothing_told_whose_answer_it_was(served: tuple[Path, httpx.Client]) -> None:
    root, client = served
    shown = next_pair(client, who="ann").json()
    assert "model" not in json.dumps(shown)
    assert HELD_OUT[shown["row"]]["prompt"] == shown["prompt"] and shown["held_out"]
    answer = client.post("votes", json={"pair": shown["pair"], "vote": "right", "who": "ann"})
    assert answer.status_code == 200
    (line,) = map(json.loads, votes_path(root).read_text(encoding="utf-8").splitlines())
    assert (line["prompt"], line["chosen"], line["rejected"]) == (shown["prompt"], shown["right"], shown["left"])
    assert {line["left"]["model"], line["right"]["model"]} == {BEFORE, AFTER}
    assert (line["who"], line["vote"], line["row"], line["temperature"]) == ("ann", "right", shown["row"], 1.0)
    assert line["time"] > 1.7e9


def test_sides_are_drawn_anew_and_no_prompt_comes_twice_to_the_same_person(
    served: tuple[Path, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, client = served
    drawn = random.Random(0)  # so both orders come
    monkeypatch.setattr("dapo.commands.ui.playground.secrets.SystemRandom", lambda: drawn)
    rows = []
    for _ in range(6):
        shown = next_pair(client, who="ann").json()
        client.post("votes", json={"pair": shown["pair"], "vote": "tie", "who": "ann"})
        rows.append(shown["row"])
    assert len(set(rows)) == 6
    assert {vote.left.model for vote in read_votes(root)} == {BEFORE, AFTER}
    others = [row for row in range(len(HELD_OUT)) if row not in rows]
    assert next_pair(client, who="bob", skip=others).json()["row"] in rows  # another person begins anew
    end = next_pair(client, who="ann", skip=others)
    assert end.status_code == 422 and "there are no more prompts" in end.json()["error"]


def test_a_pair_takes_one_vote(served: tuple[Path, httpx.Client]) -> None:
    root, client = served
    body = {"pair": next_pair(client).json()["pair"], "vote": "left"}
    assert client.post("votes", json=body).status_code == 200
    again = client.post("votes", json=body)
    assert again.status_code == 422 and "voted on before" in again.json()["error"]
    assert client.post("votes", json={"pair": "x", "vote": "best"}).status_code == 422
    assert len(read_votes(root)) == 1


def test_the_result_counts_for_the_model_and_not_for_the_side(served: tuple[Path, httpx.Client]) -> None:
    root, client = served
    for vote in (a_vote("right"), a_vote("left", AFTER, BEFORE), a_vote("left"), a_vote("both_bad")):
        add_vote(root, vote)
    told = client.get("votes", params={"run": "r"}).json()
    (tally,) = told["tallies"]
    assert (told["votes"], tally["models"], tally["first"], tally["second"], tally["both_bad"]) == (
        4,
        [BEFORE, AFTER],
        1,
        2,
        1,
    )
    assert tally["share"]["value"] == pytest.approx(2 / 3) and tally["verdict"] == "too few votes to tell them apart"


def test_a_model_is_not_compared_with_itself(served: tuple[Path, httpx.Client]) -> None:
    answer = next_pair(served[1], models=[AFTER, AFTER])
    assert answer.status_code == 422 and "two different models are needed" in answer.json()["error"]


def test_two_models_that_say_the_same_are_nothing_to_compare(tmp_path: Path) -> None:
    with serving(run_with_models(tmp_path / "r", {BEFORE: 0, AFTER: 0})) as client:
        answer = next_pair(client)
    assert answer.status_code == 422 and "same answer to 9 prompts in a row" in answer.json()["error"]


def test_a_vote_that_cannot_be_kept_is_told_and_can_be_sent_again(served: tuple[Path, httpx.Client]) -> None:
    root, client = served
    body = {"pair": next_pair(client).json()["pair"], "vote": "left"}
    votes_path(root).mkdir()
    answer = client.post("votes", json=body)
    assert answer.status_code == 507 and "cannot keep the vote" in answer.json()["error"]
    votes_path(root).rmdir()
    assert client.post("votes", json=body).status_code == 200 and len(read_votes(root)) == 1


def test_answers_that_nobody_judges_do_not_run_the_reward(
    served: tuple[Path, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        "dapo.commands.ui.answering.make_scorer", lambda config: made.append(config) or make_scorer(config)
    )
    assert next_pair(served[1]).status_code == 200 and not made
    stream(served[1], row=0, samples=1)
    assert len(made) == 1


# --- the file -----------------------------------------------------------------------------------------------------


def test_votes_come_back_as_they_were_given_whatever_a_killed_process_left(tmp_path: Path) -> None:
    votes = [a_vote("left"), a_vote("tie", who="b\u00fcb"), a_vote("right", prompt="</script>\n\ud800")]
    add_vote(tmp_path, votes[0])
    with votes_path(tmp_path).open("a", encoding="utf-8") as file:
        file.write('{"prompt": "1+')
    assert read_votes(tmp_path) == votes[:1]
    add_vote(tmp_path, votes[1])
    add_vote(tmp_path, votes[2])
    assert read_votes(tmp_path)[:2] == votes[:2]
    assert [vote.choice for vote in read_votes(tmp_path)] == ["left", "tie", "right"]


def test_a_full_disk_loses_the_vote_and_nothing_else(tmp_path: Path) -> None:
    for _ in range(2):
        add_vote(tmp_path, a_vote("left"))
    before = votes_path(tmp_path).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))  # room for a part of the line
    try:
        with pytest.raises(UserError, match="cannot keep the vote: No space left"):
            add_vote(tmp_path, a_vote("right"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert votes_path(tmp_path).read_bytes() == before
    add_vote(tmp_path, a_vote("right"))
    assert len(read_votes(tmp_path)) == 3


def test_a_line_that_is_no_vote_is_named(tmp_path: Path) -> None:
    add_vote(tmp_path, a_vote("left"))
    with votes_path(tmp_path).open("a", encoding="utf-8") as file:
        file.write('{"vote": "left"}\n')
    with pytest.raises(UserError, match=r"votes\.jsonl:2: not a vote"):
        read_votes(tmp_path)
    votes_path(tmp_path).unlink()
    votes_path(tmp_path).mkdir()
    with pytest.raises(UserError, match=r"votes\.jsonl: cannot be read: "):
        read_votes(tmp_path)


def test_only_votes_that_found_one_better_are_pairs() -> None:
    (pair,) = preference_pairs([a_vote("tie"), a_vote("right"), a_vote("both_bad")])
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("1+1=", f"of {AFTER}", f"of {BEFORE}")
    assert (pair["chosen_model"], pair["rejected_model"], pair["who"], pair["time"]) == (AFTER, BEFORE, "ann", 12.5)


def test_each_pair_of_models_has_its_own_count_and_enough_votes_decide() -> None:
    votes = [a_vote("right")] * 9 + [a_vote("left")] + [a_vote("left", "step-00002", BEFORE, who="bob")]
    first, second = tallies(votes)
    assert (first.models, first.first, first.second, first.verdict) == ((BEFORE, AFTER), 1, 9, f"{AFTER} is preferred")
    assert (second.models, second.first, second.second) == ((BEFORE, "step-00002"), 0, 1)
    (other,) = tallies([a_vote("left")] * 10)
    assert other.verdict == f"{BEFORE} is preferred"
    (none,) = tallies([a_vote("tie")])
    assert none.share is None and none.verdict == "no vote found one of them better"


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_says_who_is_preferred_and_writes_the_pairs(tmp_path: Path) -> None:
    root, output = run_with_models(tmp_path / "r", {}), tmp_path / "new/pairs.jsonl"
    nothing = CliRunner().invoke(app, ["votes", str(root)])
    assert nothing.exit_code == 1 and "there are no votes" in nothing.output
    for vote in [a_vote("right")] * 9 + [a_vote("tie")]:
        add_vote(root, vote)
    done = CliRunner().invoke(app, ["votes", str(root), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert f"{AFTER} against {BEFORE}: {AFTER} is preferred" in done.output and "9 pairs of 10 votes" in done.output
    assert "70% to 100%" in done.output  # Wilson: 9 / (9 + 1.96 ** 2)
    assert len(output.read_text(encoding="utf-8").splitlines()) == 9
