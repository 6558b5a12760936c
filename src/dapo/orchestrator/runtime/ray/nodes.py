"""What a run uses on every node of a Ray cluster: a small actor on each looks at the run's processes there.

Consumes: which processes the run has. Produces: lines as of ``observe/resources.py``, each with its node as ``host``:
one of the node itself (GPUs, network, share of its memory in use) and one for each role there. Waits two seconds at
most; a node that has not answered then, or is gone, is left out of that look.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo.observe.resources import Look, Looker, nvidia_cards
from dapo.orchestrator.runtime.ray.cluster import Cluster

ANSWER_SECONDS = 2.0
_RAY = ("raylet", "gcs_server")
Facts = Mapping[str, Mapping[str, float]]
"""Of an actor by its name, such as ``engine 0``: ``version`` of its weights, samples ``in_flight``."""


class NodeLooker(Looker):
    """In an actor on one node. Has no GPU of its own, and sees all that the driver of the cards tells of."""

    def __init__(self) -> None:
        super().__init__(nvidia_cards())

    def look_at(self, roles: Mapping[int, str], host: str) -> list[Look]:
        """``roles``: by process. Children count with their parents, but for those that have a role and for Ray's."""
        self._host, now = host, time.time()
        found: dict[str, list[Any]] = {}
        for pid, role in roles.items():
            with contextlib.suppress(self._psutil.Error):  # it may have ended
                processes = [*self._tree(self._psutil.Process(pid), roles)]
                found.setdefault(role, []).extend(processes)
        node = self._line(now, "node", self._network(), self._cards)
        node["memory_used"] = self._psutil.virtual_memory().percent / 100
        return [node, *(self._line(now, role, self._counters(processes), []) for role, processes in found.items())]

    def _tree(self, process: Any, roles: Collection[int]) -> Iterator[Any]:
        yield process
        for child in process.children():
            if child.pid not in roles and child.name() not in _RAY:
                yield from self._tree(child, roles)


class Nodes:
    """Looks at all nodes, for a :class:`~dapo.observe.resources.ResourceRecorder`; in a thread that may wait."""

    def __init__(self, cluster: Cluster, facts: Callable[[], Facts] = dict) -> None:
        self._cluster, self._facts = cluster, facts
        self._lookers: dict[str, Any] = {}
        self._here = ray.util.get_node_ip_address()

    def look(self) -> list[Look]:
        roles: dict[str, dict[int, str]] = {self._here: {os.getpid(): "driver"}}
        for remote in self._cluster.actors:
            roles.setdefault(remote.node, {})[remote.process] = remote.name.split()[0]
        hosts = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self._lookers = {host: self._lookers.get(host) or self._looker(node) for host, node in hosts.items()}
        asked = {looker.look_at.remote(roles.get(host, {}), host): host for host, looker in self._lookers.items()}
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS)
        lines: list[Look] = []
        for answer in ready:
            try:
                lines += ray.get(answer)
            except ray.exceptions.RayError:  # another one is made at the next look
                del self._lookers[asked[answer]]
        return [line | self._known(line) for line in lines]

    def _looker(self, node: str) -> Any:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(NodeLooker).options(num_cpus=0, scheduling_strategy=place).remote()

    def _known(self, line: Look) -> dict[str, float]:
        """Of the actors of a role on a node: the oldest weights, samples in flight, and the share that has nothing to
        do."""
        facts = self._facts()
        here = [r.name for r in self._cluster.actors if (r.node, r.name.split()[0]) == (line["host"], line["role"])]
        known = [facts[name] for name in here if name in facts]
        found: dict[str, float] = {}
        if versions := [one["version"] for one in known if "version" in one]:
            found["version"] = min(versions)
        if loads := [one["in_flight"] for one in known if "in_flight" in one]:
            found |= {"in_flight": sum(loads), "idle": sum(not load for load in loads) / len(loads)}
        return found
