"""Which placements are impossible: keys of ``runtime`` together, and with the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dapo.config.sections import RuntimeConfig

if TYPE_CHECKING:
    from dapo.config.tree import Config

_DEFAULTS = RuntimeConfig()


def conflicts_of_placement(config: Config) -> Iterator[str]:
    """As ``tree.conflicts``."""
    runtime = config.runtime
    ray, apart = runtime.kind == "ray", runtime.placement == "disaggregated"
    for key in ("address", "placement", "learner", "engine", "reward"):
        given = getattr(runtime, key) != getattr(_DEFAULTS, key)
        if given and not ray:
            yield f"runtime.{key}: is for runtime.kind=ray, and kind is local; leave it out, or use kind=ray"
        elif given and key == "engine" and not apart:
            yield (
                "runtime.engine: with placement=colocated there is an engine in each of the learner's workers; leave it "
                "out, or use placement=disaggregated"
            )
    yield from _conflicting_sync(config, ray, apart)
    if ray:
        yield from _conflicts_with_ray(config, apart)


def _conflicting_sync(config: Config, ray: bool, apart: bool) -> Iterator[str]:
    kind, engine = config.runtime.sync, config.rollout.engine
    allowed: tuple[str, ...] = {"native": ("copy",), "vllm": ("ipc", "nccl", "files")}.get(engine, ())
    if ray:
        allowed = ("objects",) if apart else ("copy",)
    if kind not in ("auto", *allowed):
        where = f" with placement={config.runtime.placement}" if ray else ""
        yield (
            f"runtime.sync: is {kind}, but new weights get to rollout.engine={engine}{where} by "
            f"{' or '.join(allowed) or 'its own way'}; use auto"
        )


def _conflicts_with_ray(config: Config, apart: bool) -> Iterator[str]:
    rollout, learner = config.rollout, config.runtime.learner
    if rollout.engine == "openai":
        yield "rollout.engine: openai is for runtime.kind=local: its server is its own placement; use native or vllm"
    if rollout.engine == "vllm" and not apart:
        yield "rollout.engine: vllm needs runtime.placement=disaggregated; use that, or engine=native"
    if rollout.device is not None:
        yield "rollout.device: is for runtime.kind=local; Ray gives each worker its GPUs (runtime.engine.gpus)"
    if config.evaluation.while_sampling == "copy":
        yield "evaluation.while_sampling: copy is for runtime.kind=local; leave it out"
    if learner.sharded and config.model.lora.rank:
        yield (
            "runtime.learner.sharded: an adapter is trained with its base whole on every worker; use sharded=null, or "
            "model.lora.rank=0"
        )
    if learner.cpu_offload and not shards(config):
        yield "runtime.learner.cpu_offload: is for a sharded model; use sharded=true (without LoRA), or leave it out"


def shards(config: Config) -> bool:
    """``runtime.learner.sharded`` with null resolved, as far as the recipe says whether there is an adapter."""
    learner = config.runtime.learner
    return learner.sharded if learner.sharded is not None else learner.workers > 1 and not config.model.lora.rank
