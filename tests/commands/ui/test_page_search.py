"""Searching the texts of a run: what is found, and how far one answer goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo.commands.ui import texts as searching
from dapo.commands.ui.texts import search, summary_of
from dapo.errors import UserError
from dapo.observe.samples import write_samples
from page_run import RIGHT, WRONG, made_group


def places(answer: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    return [(one["step"], one["draw"], one["sample"], one["where"]) for one in answer["finds"]]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Prompts "what is 10?", "what is 20?" and so on; responses in which "QUOTED" is in quotes, answers 3 and 4."""
    for step in (1, 2, 11):
        group = made_group(10 * step, [RIGHT, WRONG], [f'"Quoted" {step} İx\nline', "nothing"])
        write_samples(tmp_path, step, [(group, "kept")])
    return tmp_path


def test_a_text_is_found_in_responses_whatever_its_case_the_newest_step_first(samples: Path) -> None:
    found = search(samples, '"qUOTED" ', None)
    assert places(found) == [(11, 110, 0, "response"), (2, 20, 0, "response"), (1, 10, 0, "response")]
    first = found["finds"][0]
    assert (first["before"], first["found"], first["after"], first["correct"]) == ("", '"Quoted" ', "11 İx\nline", True)
    assert (found["searched"], found["first"], found["last"], found["next"], found["left"]) == (3, 1, 11, None, 0)


def test_a_prompt_is_found_once_for_its_group_and_an_answer_for_its_sample(samples: Path) -> None:
    assert places(search(samples, "WHAT IS 2", None)) == [(2, 20, 0, "prompt")]
    assert places(search(samples, "4", None)) == [(step, 10 * step, 1, "extracted") for step in (11, 2, 1)]
    assert places(search(samples, "x\nLINE", None)) == [(step, 10 * step, 0, "response") for step in (11, 2, 1)]
    assert search(samples, "is 10?", None)["finds"][0]["found"] == "is 10?"  # a text, not a pattern


def test_a_search_that_stops_says_where_and_goes_on_from_there(samples: Path) -> None:
    whole, parts, start, lefts = places(search(samples, "o", None)), [], None, []
    for _ in range(20):
        answer = search(samples, "o", start, seconds=-1.0)  # out of time after each line
        parts += places(answer)
        lefts.append(answer["left"])
        start = answer["next"]
        if start is None:
            break
    assert parts == whole and len(whole) == 6 and lefts == [3, 3, 2, 2, 1, 1, 0]


def test_so_many_finds_are_one_answer(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MOST_FINDS", 2)
    answer = search(samples, "quoted", None)
    assert len(answer["finds"]) == 2 and (answer["next"], answer["left"], answer["first"]) == ((2, 1), 2, 2)


def test_only_the_surroundings_of_a_find_are_told(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [(made_group(1, [RIGHT], ["a" * 500 + "here \ud800" + "b" * 500]), "kept")])
    (one,) = search(tmp_path, "HERE", None)["finds"]
    assert (one["before"], one["found"], one["after"]) == ("a" * 80, "here", " ?" + "b" * 78)


def test_a_file_that_cannot_be_read_is_an_error_and_no_samples_are_none(samples: Path, tmp_path: Path) -> None:
    (samples / "step-00002.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"step-00002.jsonl: cannot be searched"):
        search(samples, "x", None)
    nothing = search(tmp_path / "none", "x", None)
    assert (nothing["finds"], nothing["searched"], nothing["first"]) == ([], 0, None)


def test_a_long_prompt_is_told_by_its_beginning_and_its_end() -> None:
    text = summary_of({"prompt": "Begin. " + "x" * 1000 + " What is 3 times 7?"})
    assert text.startswith("Begin. x") and text.endswith("x What is 3 times 7?") and " … " in text and len(text) < 120
    assert summary_of({"prompt": "short"}) == "short" and summary_of({}) == ""
