"""``dapo plan``: what a recipe would take on given GPUs, before any of them is paid for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared.options import AsJson, Overrides, Recipe
from dapo.commands.shared.output import print_json, print_lines
from dapo.util.terminal import counted

if TYPE_CHECKING:
    from dapo.plan.estimate import Assumed


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="[[HOSTSx]GPUSx]CARD",
            help="Such as 8x8xH100: 8 hosts of 8 GPUs each. By default as many H200 as the recipe's runtime asks for.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="US dollars for an hour of a GPU.")] = None,
    response: Annotated[
        float | None, typer.Option(min=1, help="Tokens of a response, on average; by default half of the limit.")
    ] = None,
    prompt: Annotated[
        float | None, typer.Option(min=1, help="Tokens of a prompt, on average; by default half of the limit.")
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of groups that dynamic sampling keeps; 0.6 is low for GSM8K.")
    ] = 0.6,
    reward_s: Annotated[float, typer.Option(min=0, help="Seconds of a step in which only rewards are worked on.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Predict memory, time, disk and cost of RECIPE on GPUs that need not be here. Starts and downloads nothing.

    model.path may also name a published model (Qwen/Qwen2.5-7B) or a size (7B): only the shape is wanted.

    With runtime.kind=ray the recipe says how many GPUs it has. Otherwise training is divided over all GPUs of the
    cluster, as runtime.kind=ray would do it.

    Exit code 1 if it does not fit into the GPUs' memory; then the plan says what would.
    """
    from dapo.config import load_config
    from dapo.config.plan import existing_recipe
    from dapo.config.stages import load_stage, stage_named
    from dapo.errors import ConfigError
    from dapo.plan.estimate import Assumed
    from dapo.plan.hardware import cluster_of

    if (stage := stage_named(existing_recipe(recipe))) is not None:
        config: Any = load_stage(stage, recipe, overrides or ())
        limits, filters = (config.data.max_length / 2,) * 2, False
    else:
        config = load_config(recipe, overrides or ())
        limits = config.rollout.max_response_length, config.data.max_prompt_length
        filters = config.algorithm.filter_groups.enable
    for option, tokens, most in (("--response", response, limits[0]), ("--prompt", prompt, limits[1])):
        if tokens and tokens > most:
            raise ConfigError(f"{option}: is {tokens:g}, but the recipe allows {most:g} tokens at most")
    assumed = Assumed(
        response=response or limits[0] / 2,
        prompt=prompt or limits[1] / 2,
        keep=keep if filters else 1.0,
        reward_s=reward_s,
    )
    found = planned(config, cluster or cluster_of(config), assumed, price)
    print_json(found) if as_json else print_lines(_lines(found))
    if not found["fits"]:
        raise typer.Exit(1)


def planned(config: Any, cluster: str, assumed: Assumed, price: float | None = None) -> dict[str, Any]:
    """All numbers, sizes in GiB. Raises ConfigError: no such cluster; ModelError: no such model."""
    from dapo.config.stages import StageConfig
    from dapo.model.nf4 import numbers
    from dapo.plan.estimate import Estimate, estimate_for
    from dapo.plan.stage import StageEstimate

    kind = StageEstimate if isinstance(config, StageConfig) else Estimate
    estimate, name = estimate_for(config, cluster, assumed, kind)
    where, seconds, (_, tokens) = estimate.cluster, estimate.seconds(), estimate.rollout()
    parts = {part: size for part, size in estimate.memory().parts().items() if size}
    steps = estimate.steps(seconds["step"])
    evaluations = estimate.evaluations_s(steps)
    hours = (steps * seconds["step"] + (evaluations or 0.0)) / 3600 * where.total
    would_fit = {} if estimate.fits else {change: (size, rows) for change, size, rows in estimate.would_fit()}
    more = config.runtime.kind == "local" and estimate.ranks > 1
    unknown = ["evaluations are not in it, as it is not known how many rows they have"] if evaluations is None else []
    return {
        "model": name,
        "parameters": sum(map(numbers, estimate.shape.parameters())),
        "cluster": {"hosts": where.hosts, "gpus_of_each": where.gpus, "card": where.name},
        "fits": estimate.fits,
        "gpu_gib": _gib(parts | {"needed at once": estimate.needed(), "usable": estimate.usable}),
        "not_yet": "this recipe trains on one GPU; for more it needs runtime.kind=ray and runtime.learner.workers"
        if more
        else "",
        "would_fit": _gib({change: size for change, (size, _) in would_fit.items()}),
        "would_fit_rows": {change: rows for change, (_, rows) in would_fit.items()},
        "engine": estimate.engine_note(),
        "rows_at_once": estimate.rows,
        "host_gib": _gib({"main memory": estimate.main_memory()}) | _gib(estimate.disk(steps, tokens)),
        "step_seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        f"tokens_{estimate.counts}_per_step": int(tokens),
        "steps": steps,
        "evaluation_seconds": evaluations,
        "gpu_hours": round(hours, 4),
        "usd": None if price is None else round(hours * price, 2),
        "rates": estimate.measured,
        "assumed": [*estimate.assumptions(), *unknown],
    }


def _gib(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size / 2**30, 2) for name, size in sizes.items()}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    where, memory, seconds = found["cluster"], dict(found["gpu_gib"]), dict(found["step_seconds"])
    needed, usable, step = memory.pop("needed at once"), memory.pop("usable"), seconds.pop("step")
    count = found["parameters"]
    yield f"model        {found['model']}, {f'{count / 1e9:.2f} B' if count > 1e8 else f'{count:,}'} parameters"
    hosts = f"{where['hosts']} hosts x " if where["hosts"] > 1 else ""
    yield f"GPUs         {hosts}{where['gpus_of_each']} x {where['card']}"
    yield from ([f"not yet      {found['not_yet']}"] if found["not_yet"] else [])
    verdict = f"fits; {found['rows_at_once']} sequences at once" if found["fits"] else "DOES NOT FIT"
    yield f"GPU memory   {needed:.1f} of {usable:.1f} GiB at once: {verdict}"
    yield from (f"  {part:<22} {size:8.2f} GiB" for part, size in memory.items())
    yield from ([f"engine       {found['engine']}"] if found["engine"] else [])
    if found["would_fit"]:
        yield "what takes less: GiB of a GPU, and where it fits, sequences at once"
        for (change, size), rows in zip(found["would_fit"].items(), found["would_fit_rows"].values(), strict=True):
            yield f"  {size:8.2f} {f'fits {rows:5}' if size <= usable else '':10}  {change}"
    host = found["host_gib"]
    yield f"main memory  {host['main memory']:.1f} GiB a host, at most"
    yield f"disk         {host['checkpoint']:.1f} GiB a checkpoint, {host['run']:.1f} GiB the run"
    tokens, counts = next((n, k.split("_")[1]) for k, n in found.items() if k.startswith("tokens_"))
    yield f"step         {step:.1f} s, {tokens:,} tokens {counts}"
    yield from (f"  {phase:<22} {value:8.2f} s" for phase, value in seconds.items())
    money = "" if found["usd"] is None else f", {found['usd']:,.2f} USD"
    yield f"run          {counted(found['steps'], 'step')}, {found['gpu_hours']:,.2f} GPU hours{money}"
    yield "assumed"
    yield from (f"  - {text}" for text in found["assumed"])
