"""The index beside a training: at its end if it is short, else in a process of its own, and never in its way."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dapo.observe import indexing
from dapo.observe.index import SampleIndex
from dapo.observe.indexing import BackgroundIndex
from dapo.observe.samples import write_samples
from dapo.records import Group, Prompt

pytest.importorskip("duckdb")


def write_step(run: Path, step: int) -> None:
    (run / "samples").mkdir(parents=True, exist_ok=True)
    write_samples(run / "samples", step, [(Group(step, Prompt(0, "1+1=", (1, 2), "2"), ()), "kept")])


def until(true: object) -> None:
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.05)
    assert true()  # type: ignore[operator]


def test_a_short_run_brings_its_steps_in_at_its_end_and_has_no_process(tmp_path: Path) -> None:
    said: list[str] = []
    index = BackgroundIndex(tmp_path, said.append)
    index.close()  # nothing was written: nothing to do
    assert not (tmp_path / "samples").exists()
    index = BackgroundIndex(tmp_path, said.append)
    for step in (1, 2):
        write_step(tmp_path, step)
        index.notify()
    assert index._process is None and SampleIndex(tmp_path).steps == []
    index.close()
    assert SampleIndex(tmp_path).steps == [1, 2] and not said


def test_a_longer_run_has_a_process_and_what_that_did_not_see_comes_in_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_PAUSE", 0.0)
    said: list[str] = []
    index = BackgroundIndex(tmp_path, said.append)
    write_step(tmp_path, 1)
    index.notify()
    process = index._process
    assert process is not None
    until(lambda: SampleIndex(tmp_path).steps == [1])
    monkeypatch.setattr(indexing, "_PAUSE", 60.0)
    for step in (2, 3):
        write_step(tmp_path, step)
        index.notify()
    assert index._process in (process, None), "not one for each step"
    index.close()
    assert process.poll() == 0 and SampleIndex(tmp_path).steps == [1, 2, 3] and not said


def test_the_process_finds_what_only_this_program_has_put_on_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_PAUSE", 0.0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/duckdb.py").write_text("raise RuntimeError('the one of this program')")
    said: list[str] = []
    index = BackgroundIndex(tmp_path, said.append)
    write_step(tmp_path, 1)
    monkeypatch.setattr(indexing, "has_duckdb", lambda: True)
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [tmp_path / "no-text", *sys.path])  # it is a mistake, and imports take no notice
    index.notify()
    assert index._process is not None
    index._process.wait()
    index.notify()
    assert len(said) == 1 and "the one of this program" in said[0]


def test_a_failure_is_told_once_and_later_steps_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "_PAUSE", 0.0)
    said: list[str] = []
    index = BackgroundIndex(tmp_path, said.append)
    write_step(tmp_path, 1)
    (tmp_path / "samples/index").mkdir()
    (tmp_path / "samples/index/manifest.json").mkdir()  # so that it cannot be replaced
    for _ in range(2):
        index.notify()
        assert index._process is not None
        index._process.wait()
    index.notify()
    assert len(said) == 1 and "manifest.json" in said[0]
    (tmp_path / "samples/index/manifest.json").rmdir()
    index.close()
    assert SampleIndex(tmp_path).steps == [1] and len(said) == 1


def test_a_process_that_is_killed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "_PAUSE", 0.0)
    said: list[str] = []
    write_step(tmp_path, 1)
    index = BackgroundIndex(tmp_path, said.append)
    index.notify()
    assert index._process is not None
    index._process.kill()
    index._process.wait()
    index.close()
    assert SampleIndex(tmp_path).steps == [1]
    assert len(said) == 1 and "ended with code -9" in said[0]
