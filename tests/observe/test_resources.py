"""What a run uses of its machine: rates by hand, and the machine itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo.observe.resources import Look, Looker, ResourceRecorder, make_recorder, means
from run_cases import run, steps_of


def look(role: str = "engine+trainer", gpu: Any = (), **numbers: float) -> Look:
    return {"time": 1.0, "host": "h", "role": role, "cpu": None, "rss": 0, "gpu": list(gpu)} | numbers


def test_roles_add_up_and_looks_are_averaged() -> None:
    """CPU: 1.5 + 0.5, then 1: 1.5. Two cards: use is averaged, power and memory add up."""
    cards = [{"util": 0.5, "memory": 10, "power": 100.0}, {"util": 1.0, "memory": 30, "power": None}]
    found = means([[look(cpu=1.5, gpu=cards), look("reward", cpu=0.5)], [look(cpu=1.0, net_sent=7.0)]])
    assert found == {
        "resources/cpu": 1.5, "resources/memory": 0, "resources/net_sent": 7.0,
        "resources/gpu": 0.75, "resources/gpu_memory": 40, "resources/gpu_power": 100.0,
    }  # fmt: skip
    assert means([]) == {}


def test_a_step_has_the_looks_since_the_one_before_or_the_latest(tmp_path: Path) -> None:
    looks = iter([[look(cpu=1.0)], [look(cpu=3.0)], [look(cpu=5.0)]])
    recorder = ResourceRecorder(tmp_path / "resources.jsonl", 1.0, lambda: next(looks), start=False)
    assert recorder.step_means() == {}
    recorder.look()
    recorder.look()
    assert recorder.step_means()["resources/cpu"] == 2.0
    assert recorder.step_means()["resources/cpu"] == 3.0
    recorder.look()
    assert recorder.step_means()["resources/cpu"] == 5.0
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "resources.jsonl").read_text().splitlines()]
    assert [line["cpu"] for line in lines] == [1.0, 3.0, 5.0]


def test_the_machine_is_seen() -> None:
    """A child of a worker computes; another child and this process wait: three roles, with rates in bounds."""
    looker = Looker()
    busy = "print(flush=True)\nwhile True: pass"
    worker = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])"
    page = [sys.executable, "-c", "print(flush=True); input()"]
    with (
        subprocess.Popen(
            [sys.executable, "-c", worker, "dapo.reward.worker"], stdout=subprocess.PIPE, start_new_session=True
        ) as child,
        subprocess.Popen(page, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting,
    ):
        for started in (child, waiting):  # what a start takes is not theirs
            assert started.stdout is not None
            started.stdout.readline()
        first = {line["role"]: line for line in looker.look()}
        time.sleep(0.3)
        second = {line["role"]: line for line in looker.look()}
        os.killpg(child.pid, signal.SIGKILL)
    assert set(first) == set(second) == {"engine+trainer", "reward", "other"}
    assert second["other"]["cpu"] < second["reward"]["cpu"] / 2
    assert first["reward"]["cpu"] is None and 0.05 < second["reward"]["cpu"] < 1.3
    assert second["engine+trainer"]["cpu"] < second["reward"]["cpu"]
    assert second["engine+trainer"]["rss"] > 50e6 and 1e6 < second["reward"]["rss"] < 500e6
    keys = {"time", "host", "role", "cpu", "rss", "gpu", "disk_read", "disk_write", "net_sent", "net_received"}
    assert all(set(line) == keys for line in [*first.values(), *second.values()])
    assert second["engine+trainer"]["net_sent"] >= 0 and second["reward"]["net_sent"] is None


def test_traffic_with_itself_is_none_and_a_child_that_has_ended_uses_nothing() -> None:
    looker = Looker()
    cards = {
        name: SimpleNamespace(bytes_sent=n, bytes_recv=2 * n) for name, n in (("lo", 1000), ("eth0", 5), ("w0", 2))
    }
    looker._psutil = SimpleNamespace(net_io_counters=lambda pernic: cards)
    assert looker._network() == {"net_sent": 7, "net_received": 14}
    looker._line(0.0, "reward", {"cpu_s": 5.0, "rss": 1.0, "disk_read": 10.0}, [])
    time.sleep(0.01)
    line = looker._line(0.0, "reward", {"cpu_s": 2.0, "rss": 1.0, "disk_read": 30.0}, [])
    assert line["cpu"] == 0.0 < line["disk_read"] and line["disk_write"] is None


def test_a_run_records_and_its_steps_have_the_means(tmp_path: Path) -> None:
    run(tmp_path / "run", {"run.resources_every_s": 0.01, "training.steps": 2})
    lines = [json.loads(line) for line in (tmp_path / "run" / "resources.jsonl").read_text().splitlines()]
    roles = {line["role"] for line in lines}  # "other": what earlier tests of this process have left running
    assert len(lines) > 2 and "engine+trainer" in roles <= {"engine+trainer", "reward", "other"}
    assert all(step["resources/cpu"] > 0 and step["resources/memory"] > 50e6 for step in steps_of(tmp_path / "run"))


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_recorder(tmp_path / "x", 0) is None
    monkeypatch.setitem(sys.modules, "psutil", None)  # as if it were not installed
    assert make_recorder(tmp_path / "x", 5.0) is None
    run(tmp_path / "run")
    assert not (tmp_path / "run" / "resources.jsonl").exists()
    assert not any(name.startswith("resources/") for name in steps_of(tmp_path / "run")[0])


def test_a_look_that_fails_and_a_full_disk_end_nothing(tmp_path: Path) -> None:
    calls: list[int] = []

    def fails() -> list[Look]:
        calls.append(1)
        raise RuntimeError("no counters")

    recorder = ResourceRecorder(tmp_path / "no" / "resources.jsonl", 0.001, fails)
    while len(calls) < 3:
        time.sleep(0.001)
    recorder.close()
    assert recorder.step_means() == {}
    there = ResourceRecorder(tmp_path / "no" / "resources.jsonl", 1.0, lambda: [look(cpu=1.0)], start=False)
    there.look()  # the folder does not exist
    assert there.step_means()["resources/cpu"] == 1.0


@pytest.mark.nightly
def test_looking_costs_less_than_half_a_percent() -> None:
    """Of one core at the default of 5 s, with four children: 25 ms a look."""
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(4)]
    looker = Looker()
    looker.look()
    start = time.process_time()
    for _ in range(20):
        looker.look()
    seconds = (time.process_time() - start) / 20
    for child in children:
        child.kill()
        child.wait()
    print(f"{1000 * seconds:.2f} ms a look, {seconds / 5:.4%} of a core")
    assert seconds / 5 < 0.005
