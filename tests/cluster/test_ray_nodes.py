"""What a run uses on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dapo.observe.resources import means

ray = pytest.importorskip("ray")


def test_processes_of_a_node_count_once_each_by_role() -> None:
    """An engine's child is the engine's, the engine is not its parent's; one that has ended is left out."""
    from dapo.orchestrator.runtime.ray.nodes import NodeLooker

    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(flush=True)\\nwhile True: pass'])"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        looker, roles = NodeLooker(), {os.getpid(): "driver", engine.pid: "engine", 2**22 + 1: "learner"}
        looker.look_at(roles, "10.0.0.1")
        time.sleep(0.3)
        lines = {line["role"]: line for line in looker.look_at(roles, "10.0.0.1")}
        os.killpg(engine.pid, 9)
    assert set(lines) == {"node", "driver", "engine"} and {line["host"] for line in lines.values()} == {"10.0.0.1"}
    assert lines["engine"]["cpu"] > 2 * lines["driver"]["cpu"], "what the child uses is its engine's alone"
    assert 0 < lines["node"]["memory_used"] < 1 and lines["node"]["rss"] is None and lines["node"]["net_sent"] >= 0
    found = means([[*lines.values()]])
    assert found["resources/memory"] == lines["driver"]["rss"] + lines["engine"]["rss"]


@pytest.mark.usefixtures("ray_here")
def test_every_node_is_looked_at_with_the_weights_and_the_load_of_its_engines() -> None:
    from dapo.orchestrator.runtime.ray.nodes import Nodes

    here = ray.util.get_node_ip_address()
    engines = [SimpleNamespace(name=f"engine {n}", process=os.getppid(), node=here) for n in range(2)]
    cluster: Any = SimpleNamespace(actors=engines)
    facts = {"engine 0": {"version": 3, "in_flight": 5}, "engine 1": {"version": 2, "in_flight": 0}}
    nodes = Nodes(cluster, lambda: facts)
    deadline, lines = time.monotonic() + 60, {}
    while "engine" not in lines and time.monotonic() < deadline:  # its process starts meanwhile
        lines = {line["role"]: line for line in nodes.look()}
    assert {"node", "driver", "engine"} == set(lines) and lines["driver"]["host"] == here
    assert [lines["engine"][name] for name in ("version", "in_flight", "idle")] == [2, 5, 0.5]
    assert "idle" not in lines["driver"]
    ray.kill(nodes._lookers[here])
    while nodes.look():  # until its end is known
        assert time.monotonic() < deadline
    while not nodes.look():  # until another one is there
        assert time.monotonic() < deadline
