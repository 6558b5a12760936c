"""What the page asks of the index of samples."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dapo.commands.ui import queries
from dapo.commands.ui.queries import GroupFilter, thinned
from dapo.commands.ui.runs import NotHere, Runs, check_folders
from dapo.commands.ui.texts import pieces, tokens_of
from dapo.errors import UserError
from page_run import add_step, page_run
from run_cases import TOKENIZER

pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    page_run(root / "first")
    return Runs([root])


def draws(runs: Runs, wanted: GroupFilter) -> list[int]:
    return [row["draw"] for row in queries.groups(runs.get("first").samples(), wanted)]


def test_groups_come_newest_first_in_the_order_of_their_step(runs: Runs) -> None:
    assert draws(runs, GroupFilter()) == [20, 21, 22, 10, 11, 12]
    first = queries.groups(runs.get("first").samples(), GroupFilter(limit=1))[0]
    assert (first["size"], first["scored"], first["right"], first["total"]) == (2, 2, 1, 6)
    assert first["verdicts"] == [True, False] and first["status"] == "kept"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (GroupFilter(status="kept"), [20, 10]),
        (GroupFilter(first_step=1, last_step=1), [10, 11, 12]),
        (GroupFilter(correct=True), [20, 21, 10, 11]),
        (GroupFilter(correct=False), [20, 22, 10, 12]),
        (GroupFilter(longer_than=5), [22, 12]),
        (GroupFilter(longer_than=7), []),
        (GroupFilter(truncated=True), []),
        (GroupFilter(failed=True), []),
        (GroupFilter(disagree=True), []),
        (GroupFilter(row=12), [12]),
        (GroupFilter(order="longest", last_step=1), [12, 10, 11]),
        (GroupFilter(order="hardest", last_step=1), [12, 10, 11]),
        (GroupFilter(order="easiest", last_step=1), [11, 10, 12]),
        (GroupFilter(order="spread", last_step=1), [10, 11, 12]),
        (GroupFilter(limit=2, offset=3), [10, 11]),
        (GroupFilter(status="'; DROP VIEW samples; --"), []),
    ],
)
def test_a_filter_admits_what_it_says(runs: Runs, wanted: GroupFilter, found: list[int]) -> None:
    assert draws(runs, wanted) == found


def test_every_order_can_be_asked_for_with_every_filter(runs: Runs) -> None:
    for order in queries._ORDER:
        full = GroupFilter(last_step=9, status="kept", correct=True, longer_than=1, row=10, order=order)
        assert draws(runs, full) == [10]
        assert draws(runs, full.model_copy(update={"truncated": True, "failed": True, "disagree": True})) == []


def test_a_group_knows_where_its_samples_are_in_their_step(runs: Runs) -> None:
    rows = queries.group(runs.get("first").samples(), 2, 22)
    assert [(row["sample"], row["position"]) for row in rows] == [(0, 4), (1, 5), (2, 6)]


def test_outcomes_count_groups_by_status_and_difficulty(runs: Runs) -> None:
    found = queries.outcomes(runs.get("first").samples(), early=1, late=1)
    none, half, every = 0, 5, queries.DIFFICULTY_BINS - 1
    assert {place: count for place, count in enumerate(found["difficulty"]["first"]) if count} == {
        none: 1,
        half: 1,
        every: 1,
    }
    assert sum(found["difficulty"]["all"]) == 6
    wrong = next(row for row in found["statuses"] if row["status"] == "all_wrong")
    assert wrong == {"status": "all_wrong", "groups": 2, "samples": 6, "tokens": 42}


def test_reward_against_length_counts_every_sample_once(runs: Runs) -> None:
    found = queries.reward_by_length(runs.get("first").samples(), columns=3, rows=2)
    assert (found["shortest"], found["longest"], found["lowest"], found["highest"]) == (5, 7, -1.0, 1.0)
    assert sorted(found["cells"]) == [[0, 0, 2], [0, 1, 6], [2, 0, 6]]


def test_the_last_steps_are_those_after_the_one_named(runs: Runs) -> None:
    """Two steps of three groups each: one between the first and the last, one among the last."""
    found = queries.outcomes(runs.get("first").samples(), early=0, late=1)["difficulty"]
    assert (sum(found["first"]), sum(found["last"]), sum(found["all"])) == (0, 3, 6)


def test_a_column_of_lengths_holds_as_many_as_any_other() -> None:
    """Lengths 0, 1 and 2 in two columns are 1.5 wide: 0 and 1, and 2. Rewards from -1 to 1 in two rows: 1 is above."""
    import duckdb

    connection = duckdb.connect()
    rows = "(VALUES (1, 0, -1.0), (1, 1, -0.5), (1, 2, 1.0)) AS t(step, length, reward)"
    connection.execute(f"CREATE TABLE samples AS SELECT * FROM {rows}")
    assert sorted(queries.reward_by_length(connection, columns=2, rows=2)["cells"]) == [[0, 0, 2], [1, 1, 1]]


def test_resources_are_told_by_role(tmp_path: Path) -> None:
    import duckdb

    gpus = [{"util": 0.5, "memory": 3, "power": 70}] * 2
    lines = [
        {"time": 100.0 + i, "host": "h", "role": role, "cpu": i / 2, "rss": 10 * i, "gpu": gpus}
        for i in range(3)
        for role in ("rollout", "trainer")
    ]
    path = tmp_path / "resources.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 1')  # the last one is half written
    found = queries.resources(duckdb.connect(), path, points=3)
    trainer = [row for row in found if row["role"] == "trainer"]
    assert [(row["seconds"], row["cpu"], row["rss"]) for row in trainer] == [(0, 0, 0), (1, 0.5, 10), (2, 1, 20)]
    assert (trainer[0]["gpu_util"], trainer[0]["gpu_memory"], trainer[0]["gpu_power"]) == (0.5, 6, 140)


def test_of_looks_in_one_interval_memory_is_the_most_and_the_rest_a_mean(tmp_path: Path) -> None:
    """Two intervals of 5 s: three looks at 0, 1 and 2 s, and one at 10 s."""
    import duckdb

    looks = ((0.0, 1.0, 10, 4, 30.0), (1.0, 2.0, 50, 9, 60.0), (2.0, 6.0, 30, 2, 90.0), (10.0, 8.0, 20, 7, 10.0))
    lines = [
        {"time": 100 + t, "host": "h", "role": "r", "cpu": cpu, "rss": rss, "disk_read": 2 * cpu}
        | {"gpu": [{"util": 0.5, "memory": memory, "power": power}]}
        for t, cpu, rss, memory, power in looks
    ]
    path = tmp_path / "resources.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ("seconds", "cpu", "rss", "gpu_memory", "gpu_power", "disk_read")
    found = queries.resources(duckdb.connect(), path, points=2)
    assert [tuple(row[name] for name in names) for row in found] == [(1, 3, 50, 9, 60, 6), (10, 8, 20, 7, 10, 16)]


def test_a_long_file_of_resources_is_thinned_out_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    path.write_text("".join(json.dumps({"time": i, "role": "r"}) + "\n" for i in range(20_000)))
    with thinned(path, most=20_000, pieces=20) as shorter:
        times = [json.loads(line)["time"] for line in shorter.read_text().splitlines()]
        assert shorter.stat().st_size <= 20_000
    assert not shorter.exists() and (times[0], times[-1]) == (0, 19_999) and times == sorted(times)
    assert max(b - a for a, b in pairwise(times)) < 20_000 / 18
    with thinned(path, most=10**6) as whole:
        assert whole == path


def test_a_new_step_is_found(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=1)
    run = Runs([tmp_path]).get("r")
    assert queries.bounds(run.samples())["last"] == 1 and run.view.steps_done == 1
    add_step(folder, 2)
    assert queries.bounds(run.samples())["last"] == 2 and run.view.steps_done == 2


def test_runs_are_those_below_the_folders_and_no_others(tmp_path: Path) -> None:
    page_run(tmp_path / "a" / "same", steps=0)
    page_run(tmp_path / "b" / "same", steps=0)
    page_run(tmp_path / "elsewhere", steps=0)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    found = {run.name: run.folder.root for run in Runs([tmp_path / "a", tmp_path / "b"]).all()}
    assert found == {"same": tmp_path / "a" / "same", "b/same": tmp_path / "b" / "same"}
    with pytest.raises(NotHere):
        Runs([tmp_path / "a"]).get("../elsewhere")


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither is a run folder nor holds any"):
        check_folders([tmp_path])
    with pytest.raises(UserError, match="no such folder"):
        check_folders([tmp_path / "missing"])


def test_pieces_of_text_add_up_to_the_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = TOKENIZER.encode("1+2=3;#3")
    assert pieces(tokenizer, ids) == list("1+2=3;#3")


def test_a_character_of_several_tokens_is_whole_in_the_last_one() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("aé€b").ids
    assert pieces(tokenizer, ids) == ["a", "", "é", "", "", "€", "b"]


def test_numbers_per_token_are_those_of_the_sample(runs: Runs) -> None:
    second = tokens_of(runs.get("first").folder, 1, [1])[0]
    assert second["pieces"] == list("1+2=3") and second["logprob_engine"] == [-0.2] * 5
    assert tokens_of(runs.get("first").folder, 1, [1], 2)[0] == {"pieces": ["1", "+"], "logprob_engine": [-0.2] * 2} | {
        name: [None] * 2 for name in ("logprob_trainer", "entropy")
    }
    assert tokens_of(runs.get("first").folder, 7, [0, 1]) == [{}, {}]
