"""``dapo reward-server``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo.commands.shared.options import DrainSeconds, Host, MaxBody, Overrides, Port, Quiet, TokenEnv
from dapo.errors import RewardError, extra


def reward_server(
    recipe: Annotated[
        str,
        typer.Argument(
            help="YAML file with a reward section (it may hold nothing else), or a kind of reward such as math."
        ),
    ],
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: TokenEnv = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Items that may wait; what is more is answered with 429.")
    ] = 4096,
    max_items: Annotated[int, typer.Option(min=1, metavar="N", help="Items of one request.")] = 1024,
    max_body_mb: MaxBody = 16.0,
    max_text: Annotated[
        int, typer.Option(min=1, metavar="N", help="Characters of one prompt, response or answer.")
    ] = 1_000_000,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Thresholds for /v1/filter, of dapo filter --calibration.")
    ] = None,
    drain_s: DrainSeconds = 30.0,
    quiet: Quiet = False,
) -> None:
    """Serve a reward over HTTP, for runs with reward.kind=server and for other programs.

    SIGTERM, Ctrl-C, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU finishes what runs and ends with 0; a second one ends at once.
    """
    from dapo.config import load_reward

    with extra("server", "dapo reward-server", RewardError):
        from dapo.ranking.calibrate import read_thresholds
        from dapo.ranking.endpoints import Rankers, router
        from dapo.reward.server import ServerLimits, Service, serve
        from dapo.util.serving import Address
    config = load_reward(recipe, overrides or [])
    address = Address(host, port, Address.token_in(token_env))
    limits = ServerLimits(max_waiting, min(max_items, max_waiting), int(max_body_mb * 2**20), max_text)
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    thresholds = {recipe: read_thresholds(calibration, recipe)} if calibration else {}

    def ranking(service: Service) -> Any:
        rankers = Rankers({recipe: service.scorer}, thresholds)
        return router(lambda: rankers, limits.max_items, service.room)

    asyncio.run(serve(config, address, limits, drain_s=drain_s, say=say, more=ranking))
