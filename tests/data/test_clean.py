"""``dapo data clean``: what is mended, what is left out, what is kept, and the report of it."""

import json
import random

import pytest
from data_cases import items, read, write
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config import DataConfig
from dapo.data.clean import KINDS, clean_data
from dapo.data.near import near_repeats
from dapo.reward.math.score import score_math

WORDS = ["red", "blue", "deep", "cold", "round", "wide", "soft", "bright"]
STORY = "A farmer has 12 sheep and 5 cows, and each day every animal eats 3 buckets of hay. How many buckets in a week"


def verifier(gold, answer):
    return bool(score_math(f"\\boxed{{{answer}}}", gold, ["boxed"]).correct)


def cleaned(folder, rows, held=(), same=verifier, **how):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    held = items(write(folder, *map(json.dumps, held), name="held.jsonl")) if held else []
    return clean_data(items(write(folder, *lines)), held, DataConfig(), same, **how)


def said(report):
    return [(one.row.rpartition(":")[2], one.what) for one in report.changes]


def test_each_kind_of_row_is_dealt_with_and_named(tmp_path):
    rows = [
        {"prompt": f"{STORY}?", "answer": "357"},
        {"prompt": f"{STORY}, please?", "answer": 357},  # near
        {"prompt": f"{STORY}?".replace("12", "13"), "answer": "378"},  # other numbers: another problem
        {"prompt": "What is 2+2?", "answer": "4"},
        {"prompt": "what  is 2+2?", "answer": "4.0"},  # the verifier says the same
        {"prompt": "What is 3+3?", "answer": "6"},
        {"prompt": "What is 3+3?", "answer": "7"},  # nobody knows which
        {"prompt": "Compute \frac{1}{2}.", "answer": "0.5"},
        {"prompt": "Count the words of the held out rows", "answer": 8, "level": 3},
        '{"prompt": "over two lines",',
        '"answer": 1}',
        {"prompt": "How much is 2^5?", "answer": "$2^{5}$"},
    ]
    left, report = cleaned(tmp_path, rows, held=[{"prompt": "count the words of the held  out rows", "answer": 8}])
    assert said(report) == [
        *[("8", "control"), ("10", "bad"), ("11", "bad"), ("5", "repeated"), ("6", "conflict"), ("7", "conflict")],
        *[("9", "evaluation"), ("12", "integer"), ("2", "near")],
    ]
    assert [row.answer for row in left] == ["357", "378", "4", "0.5", "32"] and "\\frac{1}{2}" in left[3].prompt
    assert "one JSON object over several lines" in report.changes[1].why
    assert (report.read, report.written) == (12, 5) and list(report.counts) == list(KINDS)


def test_each_row_is_counted_once_by_what_became_of_it(tmp_path):
    rows = [
        {"prompt": "Compute \frac{1}{2}.", "answer": "$4/2$"},  # mended twice, and kept
        {"prompt": "compute  \frac{1}{2}.", "answer": "2"},  # mended, and repeated
        {"prompt": "Is \frac{1}{3} held out?", "answer": "1.0"},  # mended, and held out
        {"prompt": "b", "answer": "6"},
        {"prompt": "b", "answer": "6"},  # to the letter
    ]
    file = write(tmp_path, *map(json.dumps, rows))
    held = items(write(tmp_path, json.dumps({"prompt": "Is \\frac{1}{3} held out?", "answer": "1"}), name="held.jsonl"))
    left, report = clean_data([*items(file), *items(file)], held, DataConfig(), verifier)
    assert (report.read, report.written, len(left)) == (10, 2, 2)
    wanted = {"repeated": 7, "evaluation": 1, "integer": 1, "same": 1}
    assert report.counts == dict.fromkeys(KINDS, 0) | wanted and sum(wanted.values()) == report.read


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        *(("1,234", "1234"), ("42.0", "42"), ("\\boxed{7}", "7"), ("$10^3$", "1000"), ("\\frac{8}{2}", "4")),
        *(("-3.00", "-3"), ("1{,}000", "1000")),
        *((text, text) for text in ("5", "3.5", "1/2", "42 cm", "50%", "1,2", "(1,234)", "x=4", "2^{0.5}", "4/0", "B")),
    ],
)
def test_answers_become_integers_only_where_the_verifier_agrees(tmp_path, answer, written):
    row = {"prompt": "p", "answer": answer}
    assert [row.answer for row in cleaned(tmp_path, [row])[0]] == [written]
    assert [row.answer for row in cleaned(tmp_path, [row], same=lambda gold, other: False)[0]] == [answer]


def test_an_answer_of_more_digits_than_python_reads_stays(tmp_path):
    answer = "9" * 5000 + ".0"
    assert [row.answer for row in cleaned(tmp_path, [{"prompt": "p", "answer": answer}])[0]] == [answer]


def test_fractions_are_asked_for_as_a_sum_if_that_is_wanted(tmp_path):
    rows = [{"prompt": "a", "answer": "\\frac{6}{4}"}, {"prompt": [{"role": "user", "content": "b"}], "answer": "1/3"}]
    left, report = cleaned(tmp_path, rows, fractions=True)
    assert [row.answer for row in left] == ["5", "4"] and report.counts["fraction"] == 2
    assert all("m + n" in row.text for row in left)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_near_repeats_are_found_and_other_numbers_and_answers_are_not(seed):
    rng = random.Random(seed)
    words = [rng.choice(WORDS) + str(k % 7) for k in range(40)]
    changed = [*words]
    changed[rng.randrange(40)] = "other1"
    texts = [" ".join(words), " ".join(changed), " ".join([*words[:-1], "soft99"]), " ".join(words)]
    number = {k for k, word in enumerate(changed) if word != words[k]}.pop() % 7
    found = [(place, first) for place, first, _ in near_repeats(texts, ["1", "1", "1", "2"])]
    assert found == ([(1, 0)] if number == 1 else [])


def test_the_command_writes_rows_that_load_and_a_report(tmp_path):
    file = write(tmp_path, *(json.dumps({"prompt": f"p{k % 3}", "answer": k % 3, "level": k}) for k in range(9)))
    out, report = tmp_path / "out" / "clean.jsonl", tmp_path / "report.json"
    done = CliRunner().invoke(app, ["data", "clean", str(file), str(out), "--json", str(report)])
    assert done.exit_code == 0 and "3 of 9 rows are in" in done.output and KINDS["repeated"] in done.output
    assert [(row.prompt, row.answer, row.meta["level"]) for row in read(out)] == [
        *(("p0", "0", 0), ("p1", "1", 1), ("p2", "2", 2))
    ]
    told = json.loads(report.read_text())
    assert told["counts"]["repeated"] == 6 and told["changes"][0]["row"] == f"{file}:4"
    for target, why in ((out, "exists already"), (tmp_path / "x.csv", "end in .jsonl")):
        done = CliRunner().invoke(app, ["data", "clean", str(file), str(target)])
        assert done.exit_code == 2 and why in done.output
    rows = file.read_text()
    done = CliRunner().invoke(app, ["data", "clean", str(file), str(tmp_path / "y.jsonl"), "--json", str(file)])
    assert done.exit_code == 2 and "is one of the files to be read" in done.output and file.read_text() == rows
