"""Placements: which are impossible (keys of ``runtime`` together, and with the rest of a recipe), and what they need of
a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.composed_reward import plain_rewards
from dapo.config.runtime import RoleConfig, RuntimeConfig

_DEFAULTS = RuntimeConfig()


def conflicts_of_placement(config: Any) -> Iterator[str]:
    """As ``tree.conflicts``."""
    runtime = config.runtime
    ray, apart = runtime.kind == "ray", runtime.placement == "disaggregated"
    for key in ("address", "placement", "learner", "engine", "reward"):
        given = getattr(runtime, key) != getattr(_DEFAULTS, key)
        if given and not ray:
            yield f"runtime.{key}: is for runtime.kind=ray, and kind is local; leave it out, or use kind=ray"
        elif given and key == "engine" and not apart:
            yield (
                "runtime.engine: with placement=colocated each of the learner's workers has an engine; leave it out, "
                "or use placement=disaggregated"
            )
    yield from _conflicting_sync(config, ray, apart)
    if ray:
        yield from _conflicts_with_ray(config, apart)


def conflicts_of_exact(config: Any) -> Iterator[str]:
    """With ``runtime.exact``."""
    if not config.runtime.exact:
        return
    rollout, runtime, lora = config.rollout, config.runtime, config.model.lora
    for key, value, fits, works in (
        ("rollout.engine", rollout.engine, rollout.engine == "native", "native"),
        ("rollout.device", rollout.device, rollout.device is None, "null: another device adds in another order"),
        ("rollout.in_flight", rollout.in_flight, rollout.in_flight != "keep", "drain: keys of old weights would stay"),
        ("runtime.kind", runtime.kind, runtime.kind == "local", "local: one process and one device"),
        ("model.lora.base", lora.base, lora.base == "full", "full: 4 bits have products of their own"),
    ):
        if not fits:
            yield f"runtime.exact: does not go with {key}={value}; use exact=false, or {key}={works}"


def _conflicting_sync(config: Any, ray: bool, apart: bool) -> Iterator[str]:
    kind, engine = config.runtime.sync, config.rollout.engine
    allowed: tuple[str, ...] = {"native": ("copy",), "vllm": ("ipc", "nccl", "files")}.get(engine, ())
    if ray:
        allowed = ("group", "objects") if apart else ("copy",)
    if kind not in ("auto", *allowed):
        where = f" with placement={config.runtime.placement}" if ray else ""
        yield (
            f"runtime.sync: is {kind}, but new weights get to rollout.engine={engine}{where} by "
            f"{' or '.join(allowed) or 'its own way'}; use auto"
        )


def _conflicts_with_ray(config: Any, apart: bool) -> Iterator[str]:
    rollout, learner = config.rollout, config.runtime.learner
    if rollout.engine == "openai":
        yield "rollout.engine: openai is for runtime.kind=local: its server is its own placement; use native or vllm"
    if rollout.engine == "vllm" and not apart:
        yield (
            "rollout.engine: vllm has processes of its own, so it needs runtime.placement=disaggregated; use that, or "
            "engine=native"
        )
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

    if config.training.moments != "float32" and shards(config):
        yield (
            "training.moments: int8 is for models that each worker holds whole; use float32, or "
            "runtime.learner.sharded=false"
        )


def shards(config: Any) -> bool:
    """``runtime.learner.sharded`` with null resolved, as far as the recipe says whether there is an adapter."""
    learner = config.runtime.learner
    return learner.sharded if learner.sharded is not None else learner.workers > 1 and not config.model.lora.rank


@dataclass(frozen=True, slots=True)
class Bundle:
    """What an actor gets. ``memory``: bytes."""

    role: str
    number: int
    cpus: float
    gpus: float
    memory: float

    @property
    def resources(self) -> dict[str, float]:
        found = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return {name: amount for name, amount in found.items() if amount}

    @property
    def device(self) -> str:
        """Of its actor, to whom Ray shows its own GPUs only."""
        return "cuda" if self.gpus else "cpu"


def bundles(config: Any, gpus: bool) -> list[Bundle]:
    """Of all actors that a recipe asks for. ``gpus``: whether the cluster has any."""
    runtime = config.runtime
    gpus = gpus and runtime.device != "cpu"
    judged = float(any(getattr(one, "device", "cpu") != "cpu" for one in plain_rewards(config.reward)))

    def of(role: str, asked: RoleConfig, usual: float) -> Iterator[Bundle]:
        each = (usual if gpus else 0.0) if asked.gpus is None else asked.gpus
        for number in range(asked.workers):
            yield Bundle(role, number, asked.cpus, each, int((asked.memory_gib or 0) * 2**30))

    found = [*of("learner", runtime.learner, 1.0)]
    if runtime.placement == "disaggregated":
        found += of("engine", runtime.engine, float(config.rollout.tensor_parallel))
    return [*found, *of("reward", runtime.reward, judged)]


def backend_of(config: Any, found: Sequence[Bundle]) -> str | None:
    """Of the group that weights go by from rank 0 to engines; None: none, they go through the object store, which was
    measured to be faster than gloo on one host."""
    if all(bundle.gpus >= 1 for bundle in found if bundle.role != "reward") and config.runtime.sync != "objects":
        return "nccl"
    return "gloo" if config.runtime.sync == "group" else None


def shortages(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """What the cluster lacks; ``nodes``: the resources of each."""
    units = {"CPU": ("cpus", "CPUs", 1.0), "GPU": ("gpus", "GPUs", 1.0), "memory": ("memory_gib", "GiB", 2.0**30)}
    for name, (key, unit, size) in units.items():
        need = {
            role: sum(b.resources.get(name, 0.0) for b in wanted if b.role == role) for role in {b.role for b in wanted}
        }
        total, have = sum(need.values()) / size, sum(node.get(name, 0.0) for node in nodes) / size
        if total > have + 1e-6:
            by = ", ".join(f"{amount / size:g} for {role}" for role, amount in sorted(need.items()) if amount)
            yield (
                f"{total:g} {unit} are asked for ({by}) and the cluster has {have:g}; lower runtime.*.workers or "
                f"runtime.*.{key}, or add nodes"
            )
    for bundle in {(b.role, *b.resources.items()): b for b in wanted}.values():
        if not any(all(node.get(n, 0.0) >= amount for n, amount in bundle.resources.items()) for node in nodes):
            asked = _told(bundle.resources)
            yield f"no node has what one {bundle.role} worker asks for: {asked}; lower runtime.{bundle.role}"


def _told(resources: Mapping[str, float]) -> str:
    words: dict[str, Callable[[float], str]] = {
        "CPU": lambda n: f"{n:g} CPUs",
        "GPU": lambda n: f"{n:g} GPUs",
        "memory": lambda n: f"{n / 2**30:g} GiB",
    }
    return ", ".join(words[name](amount) for name, amount in resources.items())


def told_of(nodes: Sequence[Mapping[str, float]]) -> str:
    """How many nodes, with what."""
    total: Counter[str] = Counter()
    for node in nodes:
        total.update({name: node.get(name, 0.0) for name in ("CPU", "GPU")})
    return f"{len(nodes)} node{'s' * (len(nodes) > 1)} with {total['CPU']:g} CPUs and {total['GPU']:g} GPUs"
