"""Ray itself: started or joined, room reserved for all actors of a run, and left within a bounded time.

What a recipe asks for is held against what the cluster has before anything is started on it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo.checks.cluster import IF_NO_ANSWER, require_answer
from dapo.config import Config
from dapo.config.placement import Bundle, bundles, shortages
from dapo.errors import ConfigError, first_line
from dapo.orchestrator.runtime.ray.handles import GoneError, Remote
from dapo.util.asynchronous import closed_in_time, in_thread

START_SECONDS = 120.0
"""For Ray to start, or for room on a cluster that has it but is not free."""
ACTOR_SECONDS = 600.0  # its node may have been lost meanwhile
CLOSE_SECONDS = 20.0


def in_worker(config: Config, bundle: Bundle) -> Config:
    """The recipe as it is inside of an actor: one process, with what the actor has."""
    threads = config.runtime.threads or max(1, int(bundle.cpus))
    inside: dict[str, Any] = {"kind": "local", "sync": "auto", "device": bundle.device, "threads": threads}
    return config.model_copy(update={"runtime": config.runtime.model_copy(update=inside)})


def quiet() -> None:
    """Keep Ray's own words out of the console; its logs have them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # who has no GPU sees none
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # what no setting turns off


class Cluster:
    """Where the actors of a run live."""

    joined: ClassVar[Cluster | None] = None

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started, self._users = False, 0
        self._group: Any = None
        self.actors: list[Any] = []
        self.bundles: list[Bundle] = []

    @classmethod
    def join(cls, config: Config) -> Cluster:
        """That of the run in this process. Everyone who joins it is to :meth:`leave` it."""
        cls.joined = cls.joined or cls(config)
        cls.joined._users += 1
        return cls.joined

    async def leave(self) -> None:
        """The last one to leave ends it, within a bounded time."""
        self._users -= 1
        if not self._users:
            Cluster.joined = None
            await self.close()

    async def start(self) -> None:
        """Once only; later calls do nothing.
        Raises ConfigError: there is no such cluster, or it has not what the recipe asks for."""
        if self._group is None:
            await in_thread(self._start)
            if threading.current_thread() is threading.main_thread():  # Ray puts a handler of its own beneath
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def _start(self) -> None:
        if not ray.is_initialized():
            self._init()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.bundles = bundles(self._config, any(node.get("GPU") for node in nodes))
        if self._config.runtime.device == "cuda" and not any(node.get("GPU") for node in nodes):
            raise ConfigError("runtime.device: cuda, but no node of the Ray cluster has a GPU; use auto or cpu")
        if short := "\n".join(f"runtime: {line}" for line in shortages(self.bundles, nodes)):
            raise ConfigError(short)
        self._group = placement_group([bundle.resources for bundle in self.bundles], strategy="PACK")
        if not self._group.wait(START_SECONDS):
            raise ConfigError(
                f"runtime: the cluster has what is asked for, but it was not free for {START_SECONDS:g} s; others are "
                "using it (ray status)"
            )

    def _init(self) -> None:
        address = self._config.runtime.address
        quiet()
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            asked = sum(bundle.cpus for bundle in bundles(self._config, False))
            # they share what there is
            options |= {"num_cpus": max(os.cpu_count() or 1, math.ceil(asked)), "include_dashboard": False}
        try:
            if address:
                require_answer(address)
            ray.init(address=address or "local", **options)
        except Exception as error:
            what = f"the Ray cluster at {address} does not answer" if address else "Ray could not be started"
            fix = f"; {IF_NO_ANSWER}" if address else ""
            raise ConfigError(f"runtime.address: {what}: {first_line(error)}{fix}") from None
        self._started = True

    def of(self, role: str) -> list[Bundle]:
        return [bundle for bundle in self.bundles if bundle.role == role]

    async def actor(self, kind: type[Any], bundle: Bundle) -> Remote:
        """A process in the room of ``bundle``, for the one before. Raises GoneError: it cannot be started."""
        place = PlacementGroupSchedulingStrategy(self._group, self.bundles.index(bundle))
        options = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "memory": bundle.memory or None}
        made = ray.remote(kind).options(scheduling_strategy=place, max_concurrency=10_000, **options)
        remote = Remote(made.remote(str(Path.cwd()), sys.path), f"{bundle.role} {bundle.number}")
        self.actors = [other for other in self.actors if other.name != remote.name] + [remote]
        try:
            async with asyncio.timeout(ACTOR_SECONDS):
                remote.process, remote.node = await remote.get("where")
        except TimeoutError:
            raise GoneError(f"{remote} did not start within {ACTOR_SECONDS:g} s (ray status)") from None
        return remote

    async def close(self) -> None:
        """End all actors, and Ray if it was started here. What takes longer ends with this process."""
        await closed_in_time(lambda: in_thread(self._close), CLOSE_SECONDS)

    def _close(self) -> None:
        for remote in self.actors:
            remote.kill()
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        if self._started:
            ray.shutdown()
