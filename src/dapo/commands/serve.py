"""``dapo serve``."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo.commands.shared.options import DrainSeconds, Host, LiveFile, MaxBody, Port, Quiet, Redact, Settings, TokenEnv
from dapo.errors import ConfigError, extra
from dapo.util.terminal import Terminal

Rankers = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=MODEL", help="Rank with it (best_of, /v1/rank, /v1/filter); may be given again."),
]
Calibrations = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FILE", help="Thresholds of a ranker, of dapo filter --calibration.")
]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Recipe, folder in Hugging Face layout, name on the hub, or a run or checkpoint folder of dapo.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=FOLDER", help="Serve a LoRA adapter on the model, too; may be given again."),
]


def serve(
    model: Model,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="Of the model, for requests. Default: the end of its path.")] = None,
    adapter: Adapters = None,
    ranker: Rankers = None,
    calibration: Calibrations = None,
    engines: Annotated[int, typer.Option(min=1, metavar="N", help="Engines of each; on several GPUs one on each.")] = 1,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: TokenEnv = None,
    weights_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Take checkpoints below it (POST /weights); needs a token.")
    ] = None,
    live: LiveFile = None,
    redact: Redact = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Samples that may wait or run; what is more is answered with 429.")
    ] = 1024,
    max_body_mb: MaxBody = 16.0,
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="S", help="Longest time of one request.")] = 3600.0,
    drain_s: DrainSeconds = 30.0,
    quiet: Quiet = False,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API has it (completions and chat completions).

    SIGTERM, Ctrl-C, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU finishes what runs and ends with 0; a second one ends at once.
    """
    from dapo.observe.progress import make_listener

    with extra("server", "dapo serve"):
        from dapo.ranking.endpoints import load_rankers
        from dapo.serve.app import serve as serve_app
        from dapo.serve.live import Journal
        from dapo.serve.model import Limits, prepare_served
        from dapo.util.serving import Address
    address = Address(host, port, Address.token_in(token_env))
    limits = Limits(max_waiting, int(max_body_mb * 2**20), timeout_s)
    more: dict[str, Any] = {"overrides": settings or [], "name": name, "copies": engines, "limits": limits}
    adapters = _named("--adapter", adapter, "poet=folder")
    calibrations = _named("--calibration", calibration, "taste=thresholds.json")
    rankers = _named("--ranker", ranker, "taste=runs/reward-model")
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    with closing(make_listener(quiet, Terminal(stderr=True))) as listener:
        load = prepare_served(model, listener, adapters=adapters, **more)
        found = load_rankers(rankers, calibrations)
        how: dict[str, Any] = {"drain_s": drain_s, "say": say, "weights_dir": weights_dir, "rankers": found}
        how["journal"] = Journal(live, redact) if live else None
        asyncio.run(serve_app(load, address, limits, **how))


def _named(option: str, given: list[str] | None, example: str) -> dict[str, str]:
    """What an option that may be given again has by name."""
    found = {}
    for one in given or ():
        name, _, value = one.partition("=")
        if not (name and value):
            raise ConfigError(f"{option} {one}: expected NAME={example.partition('=')[2]}, such as {option} {example}")
        if name in found:
            raise ConfigError(f"{option}: two have the same name")
        found[name] = value
    return found
