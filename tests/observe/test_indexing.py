"""The index beside a training: at its end if it is short, else in a process of its own, and never in its way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dapo.observe import indexing
from dapo.observe.index import SampleIndex
from dapo.observe.indexing import BackgroundIndex, keep_up
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


def test_a_longer_run_has_a_process_that_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "_PAUSE", 0.0)
    said: list[str] = []
    index = BackgroundIndex(tmp_path, said.append)
    write_step(tmp_path, 1)
    index.notify()
    process = index._process
    assert process is not None
    until(lambda: SampleIndex(tmp_path).steps == [1])
    for step in (2, 3):  # within the pause of that process: brought in when the run ends
        write_step(tmp_path, step)
        index.notify()
    begun = time.monotonic()
    index.close()
    assert time.monotonic() - begun < 4.0  # the pause is not waited for
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
    index.close()
    assert len(said) == 1 and "the one of this program" in said[0]


def test_the_process_does_not_outlive_a_run_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from dapo.observe import indexing; indexing._PAUSE = 0.0\n"
        "index = indexing.BackgroundIndex(__import__('pathlib').Path(sys.argv[1]), print); index.notify()\n"
        "print(index._process.pid, flush=True); time.sleep(60)"
    )
    write_step(tmp_path, 1)
    run = subprocess.Popen([indexing.sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    process = int(run.stdout.readline())
    until(lambda: SampleIndex(tmp_path).steps == [1])
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()

    def gone() -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(gone)


def test_the_first_failure_is_told_and_later_steps_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = threading.Semaphore(0)
    said: list[str] = []

    def fails(self: SampleIndex) -> int:
        tries.release()
        raise OSError("no space")

    monkeypatch.setattr(indexing, "_PAUSE", 0.001)
    reads, writes = os.pipe()
    keeper = threading.Thread(target=keep_up, args=(tmp_path, reads, said.append))
    keeper.start()
    with monkeypatch.context() as patch:
        patch.setattr(SampleIndex, "update", fails)
        for _ in range(3):
            os.write(writes, b"\n")
            assert tries.acquire(timeout=30)
    write_step(tmp_path, 2)  # the disk has room again
    os.close(writes)
    keeper.join(30)
    os.close(reads)
    assert not keeper.is_alive() and SampleIndex(tmp_path).steps == [2]
    assert len(said) == 1 and "no space" in said[0]


def test_a_process_that_is_killed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "_PAUSE", 0.0)
    said: list[str] = []
    write_step(tmp_path, 1)
    index = BackgroundIndex(tmp_path, said.append)
    index.notify()
    assert index._process is not None
    index._process.kill()
    index._process.wait()
    index.notify()  # into a pipe that nobody reads
    index.close()
    assert len(said) == 1 and "ended with code -9" in said[0]
