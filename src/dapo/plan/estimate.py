"""A step's seconds, a GPU's memory and a run's disk, from a model's shape, a recipe and a cluster. Pure arithmetic.

Every GPU has an engine with a whole copy of the weights, and a share of the training (FSDP2 over all of them; an adapter
is whole on each). Both take turns, but for an engine on another device (``rollout.device``), which works beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import Any

from dapo.checks.context import config_at_hand
from dapo.checks.memory import GIB, Memory, checkpoint_bytes, easing, predict_memory, settings_line, trained_of
from dapo.checks.settings import BYTES_PER_TOKEN, checkpoints_kept
from dapo.config import Config
from dapo.config.plan import evaluated_rows, steps_that_fit
from dapo.config.reading import with_values
from dapo.config.sections import LoraConfig
from dapo.model.adapters import find_adapter, has_adapter
from dapo.model.loading import check_supported, read_config
from dapo.orchestrator.mfu import CardLimits
from dapo.plan.hardware import NETWORK, Cluster, Rates, published_shape, rates_for, read_cluster
from dapo.plan.rollout import Decoding, Sampled, Sampling, sample
from dapo.training.lora import trainable_shape

CONTEXT = int(0.8 * GIB)
"""Of a GPU's memory: CUDA's context and its libraries. Assumed."""
KEPT = 1.05
"""What PyTorch's allocator holds over what is in use: 1.05 (1.5B) and 1.17 (7B with an adapter) were measured."""
PROCESS = int(3.3 * GIB)
"""Main memory of a process with a GPU, as measured (docs/async.md's runs)."""
BESIDE = 1.19
"""How much longer updates take in the process of an engine that samples meanwhile (5.7 s and 4.8 s: docs/async.md)."""
BUS = 25e9
"""Bytes a second between a GPU and main memory, in each direction. Assumed."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Of a run that nobody has seen yet: tokens of responses and prompts, the share of groups that is kept, and seconds
    of a step that wait for rewards."""

    response: float
    prompt: float
    keep: float
    reward_s: float = 0.0


def apart(config: Config) -> bool:
    """Whether the engine has a device of its own."""
    return config.rollout.device not in (None, "cuda", "cuda:0")


def estimate_for(config: Config, cluster: str, assumed: Assumed) -> tuple[Estimate, str]:
    """And the name of the model whose shape was taken. Raises ConfigError: no such cluster; ModelError: no such model."""
    where = read_cluster(cluster)
    adapter = find_adapter(config.model.path)
    name = adapter.base if adapter else config.model.path
    if config_at_hand(name):
        found = read_config(name, config.model.trust_remote_code)
        check_supported(found)
    else:
        name, found = published_shape(name)
    return Estimate(config, trainable_shape(config.model, found), where, rates_for(where.name), assumed), name


@dataclass(frozen=True, slots=True)
class Estimate:
    """A recipe on a cluster. ``shape``: a model without numbers, with its adapter if it trains one."""

    config: Config
    shape: Any
    cluster: Cluster
    rates: Rates
    assumed: Assumed

    @property
    def ranks(self) -> int:
        return 1 if apart(self.config) else self.cluster.total

    @property
    def limits(self) -> CardLimits:
        return CardLimits.on(self.cluster.card, self.shape, 2)

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> float:
        """Bytes of a GPU that tensors may take."""
        return (self.cluster.card.memory * GIB - CONTEXT) / KEPT

    def memory(self, config: Config | None = None, ranks: int | None = None) -> Memory:
        """Of a GPU, with as much of a cache as there is room for; no less than a sample of full length needs."""
        config, ranks = config or self.config, ranks or self.ranks
        memory = predict_memory(config, self.shape, True, ranks)
        longest = config.data.max_prompt_length + config.rollout.max_response_length
        least = int(longest * self.limits.cache_bytes)
        free = int(self.usable) - memory.lasting - memory.decoding
        return replace(memory, cache=min(memory.cache, max(least, free)))

    @property
    def needed(self) -> int:
        return self.memory().total(True)

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def rows(self) -> int:
        """Sequences at once on a GPU, by the engine's limit and the room for keys and values."""
        config, memory = self.config, self.memory()
        cache = memory.cache + memory.cache_that_stays or self.usable - self.limits.weight_bytes
        room = cache / self.limits.cache_bytes / (self.assumed.prompt + self.assumed.response)
        return max(1, min(config.rollout.max_concurrent_samples, int(room)))

    def would_fit(self) -> Iterator[tuple[str, float]]:
        """What to change so that it fits, each with bytes of a GPU then; what is no use is left out."""

        def total(config: Config) -> int:
            return self.memory(config).total(True)

        config, longest = self.config, self.config.data.max_prompt_length + self.config.rollout.max_response_length
        single = {
            "training.tokens_per_micro_batch": longest,
            "training.activation_checkpointing": True,
            "training.offload_optimizer": True,
        }
        together, least = easing(config, self.usable, True, total)
        for settings in ({key: value} for key, value in single.items()):
            if (size := total(with_values(config, settings))) < 0.98 * self.needed:
                yield settings_line(settings), size
        if len(together) > 1:
            yield settings_line(together), least
        if has_adapter(self.shape) or apart(config):
            return
        small = with_values(config, {"model.lora": LoraConfig(rank=16)})
        adapted = replace(self, config=small, shape=trainable_shape(small.model, self.shape.config))
        for settings in ({}, together):
            if (size := adapted.memory(with_values(small, settings)).total(True)) < self.needed:
                yield f"model.lora.rank=16 {settings_line(settings)}".strip(), size
        for settings in ({}, together):
            counts = (self.ranks * 2**k for k in range(1, 11))
            sizes = ((n, self.memory(with_values(config, settings), n).total(True)) for n in counts)
            if enough := next((found for found in sizes if found[1] <= self.usable), None):
                yield f"{enough[0]} GPUs {settings_line(settings)}".strip(), enough[1]

    # -- seconds of a step ---------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> Decoding:
        card, rates, limits = self.cluster.card, self.rates, self.limits
        text, bytes_s = self.shape.config.get_text_config(), self.rates.bandwidth * self.cluster.card.bytes
        return Decoding(
            step=text.num_hidden_layers * rates.layer + limits.weight_bytes / bytes_s,
            row=limits.weight_bytes / (rates.matmul * card.operations) + 8 * text.vocab_size / bytes_s,
            token=limits.cache_bytes / bytes_s,
            prompt_token=limits.weight_bytes / (rates.update * card.operations),
        )

    def sampled(self, seeds: int = 4) -> Sampled:
        """What the engine of one GPU samples for a step: means over some worlds."""
        rollout, assumed = self.config.rollout, self.assumed
        work = Sampling(
            groups=ceil(rollout.prompts_per_step / self.ranks),
            samples=rollout.samples_per_prompt,
            keep=assumed.keep,
            prompt=int(assumed.prompt),
            length=assumed.response,
            limit=rollout.max_response_length,
            rows=self.rows,
        )
        found = [sample(work, self.decoding, bool(self.config.ahead), seed) for seed in range(seeds)]
        seconds = fmean(one.seconds for one in found)
        drawn = fmean(one.drawn for one in found)
        host = self.rates.sample * drawn * rollout.samples_per_prompt
        return Sampled(seconds + host, int(fmean(one.tokens for one in found)), round(drawn))

    def operations(self, forward_only: bool = False) -> float:
        """Of one pass over a step's batch, on all GPUs together: products with weights, and attention."""
        config, assumed = self.config, self.assumed
        text, groups = self.shape.config.get_text_config(), config.rollout.prompts_per_step
        predicted = groups * config.rollout.samples_per_prompt * assumed.response
        computed = groups * assumed.prompt + predicted  # a prompt is computed once for its group
        heads = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        pairs = predicted * (assumed.prompt + assumed.response / 2)
        attention = 4 * pairs * text.num_attention_heads * heads * text.num_hidden_layers
        if forward_only:
            used = self.limits.weight_bytes  # two operations a weight, of two bytes
            return used * predicted + attention
        layers, again = self.limits.operations_per_token * computed, config.training.activation_checkpointing
        return (
            (4 / 3 if again else 1) * layers
            + self.limits.operations_per_prediction * predicted
            + (4.5 if again else 3.5) * attention
        )

    def seconds(self) -> dict[str, float]:
        """Of a step, by phase; ``step``: of all."""
        config, cluster, rates, card = self.config, self.cluster, self.rates, self.cluster.card
        trained, speed = trained_of(self.shape), self.ranks * rates.update * card.operations
        passes = (config.proximal == "recompute") + (config.algorithm.kl.mode != "off")
        epochs, updates = config.training.epochs_per_rollout, config.updates_per_step
        beside = apart(config) and config.ahead > 0
        speed /= BESIDE if beside else 1.0
        update = epochs * self.operations() / speed
        network = 0.0
        if self.ranks > 1 and not has_adapter(self.shape):
            samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt / updates / self.ranks
            tokens = samples * (self.assumed.response + self.assumed.prompt / config.rollout.samples_per_prompt)
            rounds = updates * ceil(tokens * epochs / config.training.tokens_per_micro_batch)
            network = rounds * cluster.exchange(8 * trained)  # weights twice in 2 bytes, gradients in 4
        offloaded = 8 * trained / self.ranks * updates / BUS if config.training.offload_optimizer else 0.0
        found = {
            "rollout": self.sampled().seconds,
            "reward": self.assumed.reward_s,
            "annotate": passes * self.operations(forward_only=True) / speed,
            "update": max(update, network) + offloaded,
            "sync": 6 * trained / (rates.sync * card.bytes)
            + (cluster.exchange(2 * trained) if self.ranks > 1 else 0.0),
            "rest": rates.rest * config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
        }
        others = sum(found.values()) - found["rollout"]
        return found | {"step": max(found["rollout"], others) if beside else found["rollout"] + others}

    # -- the run -------------------------------------------------------------------------------------------------------

    def evaluations_s(self, step: float) -> float | None:
        """Of all evaluations, given the seconds of a step; None: it is not known how many rows they have."""
        evaluation = self.config.evaluation
        if not evaluation.data:
            return 0.0
        rows = evaluated_rows(evaluation.data, evaluation.rows) or evaluation.rows
        if rows is None:
            return None
        steps = self.steps(step)
        times = 1 + (bool(steps) and max(1, ceil(steps / evaluation.every) if evaluation.every else 1))
        work = Sampling(
            *(ceil(rows / self.ranks), evaluation.samples_per_prompt, 1.0, int(self.assumed.prompt)),
            *(self.assumed.response, self.config.evaluated_length, self.rows),
        )
        host = self.rates.sample * work.groups * work.samples
        return times * (sample(work, self.decoding).seconds + host)

    def engine_note(self) -> str:
        """Where the engine's copy of the weights takes much of a GPU, what would take less."""
        copy = self.limits.weight_bytes
        if copy < 0.4 * self.usable:
            return ""
        parts = next(n for n in (2, 4, 8, 16) if copy / n < 0.25 * self.usable)
        return (
            f"the native engine has the whole weights on each GPU, {copy / GIB:.1f} GiB; one that divides them "
            f"(vLLM, tensor parallelism of {parts}, on GPUs of its own) has {copy / parts / GIB:.1f}"
        )

    def assumptions(self) -> Iterator[str]:
        cluster, rates = self.cluster, self.rates
        scaled = "" if rates.card == cluster.name else f", scaled to the {cluster.name} by the makers' figures"
        yield f"rates measured on the {rates.card} with {rates.model}{scaled} (rates.json; bench/rates.py writes it)"
        if self.ranks > 1:
            kind = "the adapter whole on each" if has_adapter(self.shape) else "FSDP2 over all"
            yield f"an engine on each GPU, training on all: {kind}; {NETWORK * 8e-9:.0f} Gbit/s a GPU between hosts"
            yield "networks, and GPUs that wait for each other, were not measured"

    def steps(self, seconds: float) -> int:
        training = self.config.training
        within = training.steps if training.minutes is None else steps_that_fit(training.minutes, 0.0, seconds)
        return min(training.steps, within)

    def disk(self, steps: int, tokens: float) -> dict[str, float]:
        """Bytes: of a checkpoint, and of the whole run in the end."""
        trained, saved = trained_of(self.shape), float(self.config.run.save_samples)
        one = checkpoint_bytes(trained)
        return {
            "checkpoint": one,
            "run": checkpoints_kept(self.config) * one + 8 * trained + saved * steps * tokens * BYTES_PER_TOKEN,
        }

    def main_memory(self) -> float:
        """Bytes of a host: processes, a checkpoint on its way to disk, moments and reward workers."""
        here = min(self.ranks, self.cluster.gpus)
        snapshot = checkpoint_bytes(trained_of(self.shape)) / max(1, self.ranks // self.cluster.gpus)
        workers = getattr(self.config.reward, "workers", 0) * getattr(self.config.reward, "memory_mb", 0) * 2**20
        return here * (PROCESS + self.memory().host) + snapshot + workers
