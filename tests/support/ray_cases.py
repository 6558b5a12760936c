"""Engines and ranks in processes of a real Ray on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from dapo.config import Config
from dapo.data.template import PromptTemplate
from dapo.orchestrator.runtime.ray.actors import Worker
from dapo.orchestrator.runtime.ray.cluster import Cluster, in_worker
from dapo.orchestrator.runtime.ray.fleet import Fleet
from dapo.orchestrator.runtime.ray.handles import Remote


def on_ray(config: Config, **keys: Any) -> Config:
    """With other keys of ``runtime``."""
    return Config.model_validate(
        config.model_dump() | {"runtime": config.runtime.model_dump() | {"kind": "ray"} | keys}
    )


async def fleet_of(
    config: Config,
    template: PromptTemplate,
    stops: Sequence[int],
    count: int = 2,
    tell: Callable[[str], object] = print,
) -> Fleet:
    """``count`` engines with a cluster of their own, which ends with them."""
    config = on_ray(config, placement="disaggregated", engine={"workers": count})
    cluster = Cluster.join(config)
    await cluster.start()

    async def make(number: int) -> Remote:
        bundle = cluster.of("engine")[number]
        remote = await cluster.actor(Worker, bundle)
        await remote.call("make_engine", in_worker(config, bundle), template, (), None, stops)
        return remote

    return Fleet([await make(number) for number in range(count)], make, tell, closed=cluster.leave)


def workers() -> list[tuple[str, int]]:
    """``(name, process)`` of the actors that are there."""
    joined = Cluster.joined
    return [] if joined is None else [(remote.name, remote.process) for remote in joined.actors]


def kill(name: str) -> None:
    """Its process, as a machine without memory would."""
    [process] = [process for other, process in workers() if other == name]
    os.kill(process, signal.SIGKILL)
