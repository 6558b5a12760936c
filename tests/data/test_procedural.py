"""Rows that a program makes: the same ones for a seed, resumable by index, in mixtures with files."""

import json

import pytest
from data_cases import draws, read, source, write

from dapo.data.procedural import open_procedural, score
from dapo.errors import DataError

SUMS = """
import random

def sums(index, seed, largest=9):
    random_ = random.Random(f"{seed} {index}")
    a, b = random_.randint(0, largest), random_.randint(0, largest)
    if index == 7:
        raise RuntimeError("no seven")
    return {"prompt": f"{a}+{b}=", "answer": a + b, "level": largest}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(SUMS)
    return path


def test_rows_follow_from_seed_and_number_and_a_resumed_run_draws_the_same(file):
    path = f"{file}:sums?size=6&seed=3&largest=99"
    rows = read(path)
    assert [row.prompt for row in rows] == [row.prompt for row in read(path)]
    assert [row.prompt for row in rows] != [row.prompt for row in read(path.replace("seed=3", "seed=4"))]
    assert rows[0].meta == {"level": 99} and rows[2].answer == str(eval(rows[2].prompt[:-1]))
    first, again = source(path), source(path)
    draws(first, 4)
    again.load_state(json.loads(json.dumps(first.state())))
    assert draws(again, 20) == draws(first, 20)
    file.write_text(SUMS + "\n# another program\n")
    assert source(path).fingerprint != first.fingerprint


def test_they_mix_with_files_and_what_cannot_be_made_is_named(file, tmp_path):
    rows = write(tmp_path, '{"prompt": "p", "answer": 1}')
    mixed = source({"path": f"{file}:sums?size=5", "weight": 3}, {"path": str(rows), "weight": 1})
    assert 10 < sum(mixed.next().text == "p" for _ in range(100)) < 45
    with pytest.raises(DataError, match="row 8: it cannot be made: RuntimeError: no seven"):
        source(f"{file}:sums?size=9")
    with pytest.raises(DataError, match="size must be a whole number"):
        source(f"{file}:sums?size=-1")
    with pytest.raises(DataError, match="nothing"):
        source(f"{file}:nothing?size=3")
    assert open_procedural("rows.jsonl") is None and open_procedural("owner/name") is None


@pytest.mark.nightly
def test_tasks_of_reasoning_gym_and_their_own_check():
    pytest.importorskip("reasoning_gym")
    path = "reasoning_gym:leg_counting?size=50&seed=1&max_animals=4"
    found = source(path, max_prompt_length=2000)
    prompt = found.next()
    assert "legs" in prompt.text and prompt.meta["metadata"]["num_animals"] <= 4
    assert score(prompt.text, f"So.\nAnswer: {prompt.answer}", prompt.answer, **prompt.meta)
    assert not score(prompt.text, "Answer: -1", prompt.answer, **prompt.meta)
    with pytest.raises(DataError, match="reasoning_gym:no_such_task"):
        source("reasoning_gym:no_such_task?size=3")
