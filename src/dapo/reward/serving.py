"""The reward server as a process: it listens, starts the scorer, serves, and ends without losing what it has begun.

Consumes a reward section and where to listen, produces an exit code; waits for a signal to stop. The first one
drains: new requests are answered with 503, running ones are finished within a bounded time. A second one ends the
process at once; its workers die with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dapo.config import RewardConfig
from dapo.errors import ConfigError
from dapo.reward.build import make_scorer
from dapo.reward.server import ServerLimits, Service, create_app
from dapo.util.bounded_server import Server
from dapo.util.network import is_loopback, listening_socket, url
from dapo.util.process import stop_signals

_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none is closed in the moment it is used."""
_LAST_BYTES_S = 1


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. ``token``: what clients must bring; needed wherever others than this machine can reach."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: others can reach this address, so the server wants a token: put one into an "
                "environment variable and name it with --token-env; or listen on 127.0.0.1"
            )


class _Server(Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled below; uvicorn's way would end the process with the signal's exit code."""
        yield


async def serve(
    config: RewardConfig, address: Address, limits: ServerLimits, *, drain_s: float, say: Callable[[str], None]
) -> None:
    """Serve until a signal comes. ``drain_s``: longest time for running requests to finish.
    Raises ConfigError: the address cannot be listened on; RewardError: the reward cannot be started."""
    scorer = make_scorer(config)
    service = Service(scorer, config, limits, address.token)
    listening = listening_socket(address.host, [address.port])
    where = url(*listening.getsockname()[:2])
    signalled = _on_signals()
    server = _Server(
        create_app(service),
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_BYTES_S,
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        say(f"listening on {where}, starting the reward ({config.kind})")
        if await _before(signalled.wait(), scorer.start(), serving):
            service.state = "ready"
            say(f"ready: POST {where}/score (also /ready, /metrics, /info, /schema)")
            await _before(signalled.wait(), asyncio.Event().wait(), serving)
        service.state = "draining"
        say(f"stopping; {service.answering} requests to finish, within {drain_s:g} s")
        await _drained(service, drain_s)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await scorer.close()


async def _before(end: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any], serving: asyncio.Task[None]) -> bool:
    """Whether ``work`` is done before ``end`` comes; what it raises is raised, and so is what ends ``serving``."""
    tasks = asyncio.create_task(end), asyncio.create_task(work)
    try:
        await asyncio.wait({*tasks, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        if tasks[1].done():
            tasks[1].result()
        return tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drained(service: Service, seconds: float) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while service.answering and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)


def _on_signals() -> asyncio.Event:
    """Set by the first signal; the second one ends the process."""
    signalled = asyncio.Event()

    def handle(number: int) -> None:
        if signalled.is_set():
            os._exit(128 + number)
        signalled.set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
    return signalled
