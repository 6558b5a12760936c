"""The index of samples: whatever happens to a run and to the index, it says what the files say, in a few files."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from dapo.commands.replay.replay import replay
from dapo.errors import UserError
from dapo.observe.index import SampleIndex, forget_steps, read_segments
from dapo.observe.sample_rows import COLUMNS, read_line, rows_of
from dapo.observe.samples import discard_samples, samples_path, tokens_path, write_samples
from dapo.records import Group, Prompt, Reward, Sample
from run_cases import run


def write_step(run: Path, step: int, text: str = "naïve 漢字", correct: bool = True, groups: int = 2) -> None:
    """Two samples in each group; the second one's score failed."""
    (run / "samples").mkdir(parents=True, exist_ok=True)
    ids, logprobs = np.arange(3, dtype=np.int32), np.array([-1.0, -2.0, -3.0], np.float32)
    one = Sample(0, 0, ids, logprobs, ids, "stop", text=text, reward=Reward(correct, 1.0, {"m": 0.5}, None, "2"))
    two = replace(one, index=1, text="\ud800 \x00 'odd\"", reward=Reward(None, 0.0, error="timed out"))
    made = [Group(10 * step + g, Prompt(g, "1+1=", (1, 2), "2"), (one, two)) for g in range(groups)]
    write_samples(run / "samples", step, [(group, "kept") for group in made])


def ask(index: SampleIndex, sql: str) -> list[Any]:
    return index.connection().execute(sql).fetchall()


def everything(index: SampleIndex) -> list[dict[str, Any]]:
    found = index.connection().execute("SELECT * FROM samples ORDER BY step, text_offset")
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def test_the_index_holds_what_the_files_hold(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, step)
    index = SampleIndex(tmp_path)
    assert everything(index) == []
    assert (index.update(), index.update()) == (2, 0)
    rows = everything(index)
    assert rows == [row for step in (1, 2) for row in rows_of(tmp_path / "samples", step)]
    assert list(rows[0]) == list(COLUMNS)
    first = {"step": 1, "draw": 10, "row": 0, "sample": 0, "status": "kept", "correct": True, "reward": 1.0}
    first |= {"length": 3, "prompt_length": 2, "version_first": 0, "version_last": 2, "parts": {"m": 0.5}}
    first |= {"extracted": "2", "gold": "2", "error": None, "logprob_engine": -2.0, "logprob_trainer": None}
    assert first.items() <= rows[0].items()
    assert (rows[1]["reward"], rows[1]["error"], rows[1]["correct"]) == (None, "timed out", None)
    assert read_line(index.samples, rows[0])["response"] == "naïve 漢字"
    assert read_line(index.samples, rows[3])["response"] == "\ud800 \x00 'odd\""


def test_there_are_few_segments_whatever_the_number_of_steps(tmp_path: Path) -> None:
    index, most = SampleIndex(tmp_path), 0
    for step in range(1, 75):
        write_step(tmp_path, step, groups=1)
        assert index.update() == 1
        most = max(most, len(read_segments(index.folder)))
    assert most <= 16
    assert ask(index, "SELECT count(*), count(DISTINCT step), max(step) FROM samples") == [(148, 74, 74)]
    assert index.steps == list(range(1, 75))


def test_a_step_that_is_made_again_replaces_its_rows(tmp_path: Path) -> None:
    for step in range(1, 6):
        write_step(tmp_path, step)
    index = SampleIndex(tmp_path)
    index.update()
    discard_samples(tmp_path / "samples", after=3)
    forget_steps(tmp_path / "samples", after=3)
    assert ask(index, "SELECT DISTINCT step FROM samples ORDER BY 1") == [(1,), (2,), (3,)]
    write_step(tmp_path, 4, text="another", correct=False)
    assert index.update() == 1
    assert ask(index, "SELECT step, bool_or(correct) FROM samples GROUP BY 1 ORDER BY 1")[2:] == [(3, True), (4, False)]
    for step in range(5, 20):  # until what is hidden has gone into a larger segment
        write_step(tmp_path, step)
        index.update()
    assert not any(segment.hidden for segment in read_segments(index.folder))
    assert ask(index, "SELECT count(*), count(DISTINCT step) FROM samples") == [(76, 19)]


def test_a_step_whose_texts_are_gone_stays_until_it_is_taken_back(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, step)
    index = SampleIndex(tmp_path)
    index.update()
    samples_path(index.samples, 2).unlink()
    index.update()
    assert index.steps == [1, 2]
    forget_steps(index.samples, after=1)
    assert index.steps == [1]


def test_the_name_of_a_run_folder_is_no_column(tmp_path: Path) -> None:
    """DuckDB takes folders such as ``length=20`` for columns, unless it is told not to."""
    run = tmp_path / "reward=math" / "length=20"
    for step in (1, 2):
        write_step(run, step)
    index = SampleIndex(run)
    index.update()
    forget_steps(index.samples, after=1)
    assert everything(index) == rows_of(run / "samples", 1)


@pytest.mark.parametrize("damage", ["manifest", "cut", "gone", "format"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        write_step(tmp_path, step)
        SampleIndex(tmp_path).update()
    folder = tmp_path / "samples" / "index"
    manifest, segment = folder / "manifest.json", next(folder.glob("*.parquet"))
    if damage == "manifest":
        manifest.write_text('{"format": 1, "segm')
    elif damage == "format":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    elif damage == "cut":
        segment.write_bytes(segment.read_bytes()[:100])
    else:
        segment.unlink()
    index = SampleIndex(tmp_path)
    assert index.update() == (1 if damage in ("cut", "gone") else 2)
    assert ask(index, "SELECT count(*), count(DISTINCT step) FROM samples") == [(8, 2)]


def test_a_damaged_step_is_left_out_and_named(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, step)
    path = samples_path(tmp_path / "samples", 1)
    good = path.read_text()
    path.write_text("spoilt\n" + good)
    index = SampleIndex(tmp_path)
    assert index.update() == 1 and index.steps == [2]
    assert "step-00001.jsonl:1: not a line of samples" in index.damaged[1]
    path.write_text(good)
    assert index.update() == 1 and index.steps == [1, 2] and not index.damaged


def test_odd_values_and_damaged_tokens_become_null(tmp_path: Path) -> None:
    write_step(tmp_path, 1, groups=1)
    path = samples_path(tmp_path / "samples", 1)
    line = (
        path.read_text().splitlines()[0].replace('"reward": 1.0', '"reward": "much"').replace('"row": 0', '"row": 1e99')
    )
    path.write_text(f'{line}\n{{"draw": {2**80}, "parts": [1]}}\n{{"cut off')
    tokens_path(tmp_path / "samples", 1).write_bytes(b"x")
    index = SampleIndex(tmp_path)
    index.update()
    one, two = everything(index)
    assert (one["reward"], one["row"], one["correct"], one["logprob_engine"]) == (None, None, True, None)
    assert (two["draw"], two["parts"], two["status"]) == (None, {}, None)


def test_a_run_that_cannot_be_written_to_is_indexed_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, 1)
    SampleIndex(tmp_path).update()
    write_step(tmp_path, 2)
    home = tmp_path / "samples" / "index"
    before = sorted(path.name for path in home.iterdir())
    opened = Path.open

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == home / ".lock":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    index = SampleIndex(tmp_path)
    assert index.update() == 1
    assert ask(index, "SELECT count(DISTINCT step) FROM samples") == [(2,)]
    assert sorted(path.name for path in home.iterdir()) == before


def test_who_looks_while_the_disk_is_full_has_an_index_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 1)
    SampleIndex(tmp_path).update()
    write_step(tmp_path, 2)
    copied, full = SampleIndex._copied, [tmp_path]

    def without_room(index: SampleIndex, *given: Any) -> Any:
        if any(index.folder.is_relative_to(place) for place in full):
            raise OSError(28, "No space left on device")
        return copied(index, *given)

    monkeypatch.setattr(SampleIndex, "_copied", without_room)
    index = SampleIndex(tmp_path)
    index.refresh()
    assert index.steps == [1, 2] and not index.folder.is_relative_to(tmp_path)
    assert ask(index, "SELECT DISTINCT step FROM samples ORDER BY step") == [(1,), (2,)]
    full.append(index.folder)
    write_step(tmp_path, 3)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        index.refresh()


def test_a_path_with_signs_of_sql_and_of_patterns(tmp_path: Path) -> None:
    run = tmp_path / "it's [a] *run*"
    write_step(run, 1)
    index = SampleIndex(run)
    assert index.update() == 1 and ask(index, "SELECT count(*) FROM samples") == [(4,)]


def test_readers_see_whole_steps_while_steps_come(tmp_path: Path) -> None:
    writer, reader, seen, wrong = SampleIndex(tmp_path), SampleIndex(tmp_path), [0], []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            rows, steps = ask(reader, "SELECT count(*), count(DISTINCT step) FROM samples")[0]
            if rows != 4 * steps or steps < seen[-1]:
                wrong.append((rows, steps, seen[-1]))
            seen.append(steps)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 20):
        write_step(tmp_path, step)
        writer.update()
    done.set()
    thread.join()
    assert not wrong and len(seen) > 2


def test_of_a_training_all_or_a_share_of_the_groups_is_in_the_index(tmp_path: Path) -> None:
    drawn: dict[str, list[Any]] = {}
    check = tmp_path / "check.py"
    check.write_text("def check(response, answer):\n    return len(response) % 2 == 0\n")
    settings = {"training.steps": 2, "run.save_every": 0, "monitor.share": 1.0}
    settings |= {"monitor.check": {"kind": "function", "function": f"{check}:check", "workers": 1}}
    for name, share in (("all", True), ("some", 0.5), ("again", 0.5), ("none", False)):
        changes = settings if name == "all" else {"training.steps": 2, "run.save_every": 0}
        run(tmp_path / name, changes | {"run.save_samples": share})
        index = SampleIndex(tmp_path / name)
        assert index.update() == (0 if name == "none" else 2)
        drawn[name] = ask(index, "SELECT DISTINCT draw, count(*) FROM samples GROUP BY draw ORDER BY 1")
        assert index.steps == ([] if name == "none" else [1, 2])
    assert drawn["some"] == drawn["again"] and 0 < len(drawn["some"]) < len(drawn["all"]) and not drawn["none"]
    assert set(drawn["some"]) < set(drawn["all"])  # whole groups
    both = ask(SampleIndex(tmp_path / "all"), "SELECT check_correct, text_length, entropy, in_loss FROM samples")
    assert {row[0] for row in both} == {True, False}
    assert all((entropy is not None) == in_loss for _, _, entropy, in_loss in both)
    with pytest.raises(UserError, match=r"run\.save_samples=0\.5: a step is replayed from all of its groups"):
        replay(tmp_path / "some", 1)


def test_of_two_writers_one_leaves_it_to_the_other(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    one, two = SampleIndex(tmp_path), SampleIndex(tmp_path)
    with one._writing() as free:
        assert free and two.update() == 0
    assert two.update() == 1


def test_what_duckdb_takes_is_bounded_and_nothing_is_written_where_the_program_runs(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    index = SampleIndex(tmp_path, threads=1)
    index.update()
    names = ("threads", "memory_limit", "temp_directory", "max_temp_directory_size")
    found = ask(index, "SELECT " + ", ".join(f"current_setting('{name}')" for name in names))[0]
    assert (found[0], found[1], found[3]) == (1, "953.6 MiB", "7.4 GiB")
    assert Path(found[2]).parent == index.folder


def test_files_of_a_killed_process_go_in_time(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    index = SampleIndex(tmp_path)
    index.update()
    for name in ("00009-00009-deadbeef.parquet", ".x.parquet.tmp"):
        (index.folder / name).write_bytes(b"")
        os.utime(index.folder / name, (0, 0))
    write_step(tmp_path, 2)
    index.update()
    assert len(list(index.folder.glob("*.parquet"))) == 2 and not list(index.folder.glob(".*.tmp"))
