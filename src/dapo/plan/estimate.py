"""A step's seconds, a GPU's memory and a run's disk, from a model's shape, a recipe and a cluster. Pure arithmetic.

Every GPU has an engine with all weights and a share of the training (FSDP2; an adapter is whole on each), which take
turns; engines on GPUs of their own (``rollout.device``, or ``runtime.placement`` disaggregated) work beside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from dapo.checks.context import config_at_hand
from dapo.checks.memory import (
    GIB,
    Memory,
    checkpoint_bytes,
    easing,
    outside_layers,
    predict_memory,
    settings_line,
    trained_of,
)
from dapo.checks.reward_memory import unknown_models
from dapo.checks.settings import BYTES_PER_TOKEN, checkpoints_kept
from dapo.config import Config
from dapo.config.plan import evaluated_rows
from dapo.config.reading import with_values
from dapo.errors import ConfigError
from dapo.model.adapters import find_adapter, has_adapter
from dapo.model.loading import check_supported, read_config
from dapo.orchestrator.mfu import CardLimits
from dapo.plan.hardware import NETWORK, Cluster, apart, cluster_of, gpus_asked, published_shape, rates_for, read_cluster
from dapo.plan.rollout import Decoding, Sampling, sample
from dapo.training.lora import held_whole, in_main_memory, shape_of

CONTEXT = int(0.8 * GIB)
"""Of a GPU's memory: CUDA's context and its libraries. Assumed."""
KEPT, KEPT_WITH_ADAPTER = 1.05, 1.17
"""Times what is in use, held by PyTorch's allocator: measured with 1.5B, and with 7B and an adapter."""
PROCESS = int(3.3 * GIB)
"""Main memory of a process with a GPU, as measured in the runs of docs/async.md."""
BESIDE = 1.19
"""How much longer updates take in the process of an engine that samples meanwhile (5.7 s and 4.8 s: docs/async.md)."""
HAND_OVER = 0.22
"""Share of the memory's rate at which weights get to the engine, 6 bytes each: 2.75 ms (docs/performance.md)."""
STORE, GROUP = 0.85e9, 9e9
"""Bytes a second from a learner to engines, by Ray's object store and by NCCL: 1.05 to 1.3 s and 0.11 s for 1 GB."""
BUS = 25e9
"""Bytes a second between a GPU and main memory, in each direction. Assumed."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Of a run to come: tokens of responses and prompts, share of groups kept, seconds a step waits for rewards."""

    response: float
    prompt: float
    keep: float
    reward_s: float = 0.0


def estimate_for(
    config: Config, cluster: str, assumed: Assumed, kind: type[Estimate] | None = None
) -> tuple[Estimate, str]:
    """And the name of the model. Raises ConfigError: not a cluster for the recipe; ModelError: no such model."""
    where = read_cluster(cluster)
    asked = gpus_asked(config)
    need = cluster_of(config, where.name.replace(" ", "-"))
    if asked and where.total != ceil(sum(asked.values())) and where != read_cluster(need):
        roles = ", ".join(f"{count:g} for {role}" for role, count in asked.items() if count)
        raise ConfigError(
            f"--cluster {cluster}: the recipe asks for {sum(asked.values()):g} GPUs ({roles}); give {need}"
        )
    adapter = find_adapter(config.model.path)
    name = adapter.base if adapter else config.model.path
    if config_at_hand(name):
        found = read_config(name, config.model.trust_remote_code)
        check_supported(found)
    else:
        name, found = published_shape(name)
    return (kind or Estimate)(config, shape_of(config, found), where, rates_for(where.name), assumed), name


@dataclass(frozen=True, slots=True)
class Estimate:
    """A recipe on a cluster. ``shape``: a model without numbers, with its adapter if any; ``measured``: rates."""

    counts = "sampled"
    """What happens to the tokens of a step."""
    config: Config
    shape: Any
    cluster: Cluster
    measured: list[dict[str, Any]]
    assumed: Assumed

    @property
    def rates(self) -> dict[str, float]:
        return {row["rate"]: row["value"] for row in self.measured}

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return ceil(gpus_asked(self.config).get("learner", self.cluster.total))

    @property
    def engines(self) -> int:
        """That share a step's prompts, each of ``divided`` GPUs."""
        asked = gpus_asked(self.config).get("engine") if apart(self.config) else None
        return self.ranks if asked is None else max(1, int(asked) // self.divided)

    @property
    def divided(self) -> int:
        return self.config.rollout.tensor_parallel if self.config.rollout.engine == "vllm" else 1

    @property
    def limits(self) -> CardLimits:
        return CardLimits.on(self.cluster.card, self.shape, 2)

    @property
    def longest(self) -> int:
        return self.config.data.max_prompt_length + self.config.rollout.max_response_length

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> float:
        """Bytes of a GPU that PyTorch may take."""
        return self.cluster.card.memory * GIB - CONTEXT

    @property
    def kept(self) -> float:
        return KEPT_WITH_ADAPTER if has_adapter(self.shape) else KEPT

    def memory(self, config: Config | None = None, ranks: int | None = None) -> Memory:
        """Of a GPU, with as much of a cache as there is room for; no less than a sample of full length needs."""
        config = config or self.config
        if apart(config):
            config = with_values(config, {"rollout.device": "cuda:1"})  # of a GPU that trains
        memory = predict_memory(config, self.shape, True, ranks or self.ranks)
        free = int(self.usable / self.kept) - memory.lasting - memory.decoding - memory.scoring
        return replace(memory, cache=min(memory.cache, max(int(self.longest * self.limits.cache_bytes), free)))

    def needed(self, config: Config | None = None, ranks: int | None = None) -> int:
        """Bytes of a GPU at the worst moment."""
        return int(self.memory(config, ranks).total(True) * self.kept)

    @property
    def fits(self) -> bool:
        return self.needed() <= self.usable and (not apart(self.config) or self.engine_needed <= self.usable)

    @property
    def engine_needed(self) -> int:
        """Bytes of a GPU of its own: its part of the weights, and of the cache of one sample of full length."""
        own = self.limits.weight_bytes + self.longest * self.limits.cache_bytes
        return int(own / self.divided * self.kept)

    @property
    def rows(self) -> int:
        return self.rows_with()

    def rows_with(self, config: Config | None = None, ranks: int | None = None) -> int:
        """Sequences at once on a GPU, by the engine's limit and the room for keys and values."""
        config, memory = config or self.config, self.memory(config, ranks)
        own = self.divided * self.usable / self.kept - self.limits.weight_bytes
        cache = memory.cache + memory.cache_that_stays or own
        room = int(cache / self.limits.cache_bytes / (self.assumed.prompt + self.assumed.response))
        return max(1, min(config.rollout.max_concurrent_samples, room))

    def would_fit(self) -> Iterator[tuple[str, float, int]]:
        """What takes less, each with bytes of a GPU then, and sequences at once; what is of no use is left out."""
        config, now = self.config, self.needed()
        together, _ = easing(config, self.usable, True, self.needed)
        for settings in (
            {"training.tokens_per_micro_batch": self.longest},
            {"training.activation_checkpointing": True},
            {"training.moments": "int8"} if self.ranks == 1 else {},
            {"training.offload_optimizer": True},
            together,
        ):
            if (size := self.needed(other := with_values(config, settings))) < 0.98 * now:
                yield settings_line(settings), size, self.rows_with(other)
        if apart(config):
            return
        trains_one = has_adapter(self.shape)
        native = not hasattr(config, "rollout") or config.rollout.engine == "native"
        lora = config.model.lora if trains_one else config.model.lora.model_copy(update={"rank": 16})
        for base in ["full"] * (not trains_one) + ["nf4"] * (native and lora.base == "full"):
            small = with_values(config, {"model.lora": lora.model_copy(update={"base": base})})
            adapted = replace(self, config=small, shape=shape_of(small, self.shape.config))
            keys = "model.lora.rank=16 " * (not trains_one) + "model.lora.base=nf4 " * (base == "nf4")
            for settings in ({}, together):
                if (size := adapted.needed(other := with_values(small, settings))) < 0.98 * now:
                    yield f"{keys}{settings_line(settings)}".strip(), size, adapted.rows_with(other)
        for settings in ({}, together) if not trains_one else ():
            ranks, other = self.ranks, with_values(config, settings)
            while self.needed(other, ranks) > self.usable and ranks <= 2**13:  # more are not to be had
                ranks *= 2
            if ranks > self.ranks and (size := self.needed(other, ranks)) <= self.usable:
                yield f"{ranks} GPUs {settings_line(settings)}".strip(), size, self.rows_with(other, ranks)

    # -- seconds of a step ---------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> Decoding:
        text, limits, rates = self.shape.config.get_text_config(), self.limits, self.rates
        bytes_s, operations_s = rates["bandwidth"] * limits.card.bytes, limits.card.operations
        # codes of 4 bits are read, and written out as two numbers of 2 bytes each, in every step
        wide = 5 * sum(p.numel() for p in self.shape.parameters() if not p.is_floating_point())
        return Decoding(
            step=text.num_hidden_layers * rates["layer"] + (limits.weight_bytes + wide) / bytes_s,
            row=limits.weight_bytes / (rates["matmul"] * operations_s) + 8 * text.vocab_size / bytes_s,
            token=limits.cache_bytes / bytes_s,
            # 2 operations for each 2 bytes
            prompt_token=(limits.weight_bytes - self.head_bytes) / (rates["update"] * operations_s),
        )

    def sampled(self, groups: int, samples: int, keep: float, limit: int, ahead: bool = False) -> tuple[float, float]:
        """Seconds of one engine with its share of ``groups``, and tokens of all engines."""
        length = min(self.assumed.response, limit)
        work = Sampling(ceil(groups / self.engines), samples, keep, int(self.assumed.prompt), length, limit, self.rows)
        seconds, tokens, drawn = sample(work, self.decoding, ahead)
        return seconds + self.rates["sample"] * drawn * samples, tokens * groups / work.groups

    def rollout(self) -> tuple[float, float]:
        """Seconds and tokens of a step's."""
        rollout = self.config.rollout
        sizes = (rollout.prompts_per_step, rollout.samples_per_prompt, self.assumed.keep, rollout.max_response_length)
        return self.sampled(*sizes, bool(self.config.ahead))

    def operations(self) -> tuple[float, float]:
        """Of a pass over a step's batch, on all GPUs together: forward alone, and forward and backward."""
        rollout, assumed = self.config.rollout, self.assumed
        predicted = rollout.prompts_per_step * rollout.samples_per_prompt * assumed.response
        # a prompt is computed once for its group
        return self.passes(rollout.prompts_per_step * assumed.prompt + predicted, predicted)

    def passes(self, computed: float, predicted: float) -> tuple[float, float]:
        """:meth:`operations` of so many tokens, of which some are predicted."""
        assumed, text = self.assumed, self.shape.config.get_text_config()
        heads = text.num_attention_heads
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
        pairs = predicted * (assumed.prompt + assumed.response / 2) + (computed - predicted) * assumed.prompt / 2
        attention = 4 * pairs * width * text.num_hidden_layers
        again = 1 if self.config.training.activation_checkpointing else 0
        layers = (1 + again / 3) * self.limits.operations_per_token * computed
        both = layers + self.limits.operations_per_prediction * predicted + (3.5 + again) * attention
        return self.limits.weight_bytes * computed - self.head_bytes * (computed - predicted) + attention, both

    @property
    def head_bytes(self) -> int:
        """Of the output head in 2 bytes, and its operations for a token; only tokens that are predicted need it."""
        head = self.shape.get_output_embeddings()
        return 0 if head is None else 2 * head.weight.numel()

    def network(self) -> float:
        """Seconds of a step in which ranks gather weights and add up gradients: of the layers in each pass (in 2 bytes,
        twice, and in 4), of the rest in each update (in 4 and 4); of whole copies all gradients in each update."""
        config, assumed, cluster = self.config, self.assumed, self.cluster
        among = replace(cluster, hosts=ceil(self.ranks / cluster.gpus), gpus=min(self.ranks, cluster.gpus))
        if held_whole(config, self.shape):
            return config.updates_per_step * among.exchange(8 * trained_of(self.shape))
        samples = config.training.groups_per_update * config.rollout.samples_per_prompt / self.ranks
        passes = ceil(samples * (assumed.response + assumed.prompt) / config.training.tokens_per_micro_batch)
        layers, outside, _ = outside_layers(self.shape)
        return config.updates_per_step * among.exchange(8 * (passes * layers + outside))

    def seconds(self) -> dict[str, float]:
        """Of a step, by phase; ``step``: of all."""
        config, rates, card, trained = self.config, self.rates, self.cluster.card, trained_of(self.shape)
        beside = apart(config) and config.ahead > 0
        by_ray = apart(config) and config.runtime.kind == "ray"
        speed = self.ranks * rates["update"] * card.operations / (BESIDE if beside and not by_ray else 1.0)
        ppo = config.algorithm.kind == "ppo"
        passes = (config.proximal == "recompute") + (config.algorithm.kl.mode != "off") + ppo
        forward, both = self.operations()
        both += (both if self.critics else forward) * ppo
        moments = (checkpoint_bytes(config, self.shape) - 4 * trained) / self.ranks * config.updates_per_step
        moments = moments if config.training.offload_optimizer else 0.0
        moved = self.cluster.exchange(2 * trained)
        if by_ray:
            moved = max(moved, 2 * trained / (STORE if config.runtime.sync == "objects" else GROUP))
        found = {
            "rollout": self.rollout()[0],
            "reward": self.assumed.reward_s,
            "annotate": passes * forward / speed,
            "update": max(config.training.epochs_per_rollout * both / speed, self.network()) + moments / BUS,
            "sync": rates["sync"] + 6 * trained / (HAND_OVER * card.bytes) + moved,
            "rest": rates["rest"] * config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
        }
        others = sum(found.values()) - found["rollout"]
        return found | {"step": max(found["rollout"], others) if beside else found["rollout"] + others}

    @property
    def critics(self) -> int:
        """Models beside the policy that are trained with it and kept in checkpoints: PPO's critic, supposed of its
        size, if it has a backbone of its own."""
        algorithm = self.config.algorithm
        return int(algorithm.kind == "ppo" and not algorithm.critic.share_backbone)

    # -- the run -------------------------------------------------------------------------------------------------------

    def steps(self, seconds: float) -> int:
        return self.within_budgets(self.config.training.steps, seconds, self.rollout()[1] / self.assumed.response)

    def within_budgets(self, steps: int, seconds: float, samples: float) -> int:
        """Of so many steps those that are made; a step takes so many seconds and samples. A first one always is."""
        each = {"minutes": seconds / 60, "samples": samples, "tokens": self.rollout()[1]}
        limits = ((getattr(self.config.training, budget), used) for budget, used in each.items())
        return min([steps, *(max(1, int(most // used)) for most, used in limits if most is not None)])

    def evaluations_s(self, steps: int) -> float | None:
        """Seconds of all evaluations; None: it is not known how many rows they have."""
        evaluation = self.config.evaluation
        if not evaluation.data:
            return 0.0
        rows = evaluated_rows(evaluation.data, evaluation.rows) or evaluation.rows
        if rows is None:
            return None
        times = 1 + min(steps, ceil(steps / (evaluation.every or steps or 1)))
        return times * self.evaluated_s(rows)

    def evaluated_s(self, rows: int) -> float:
        return self.sampled(rows, self.config.evaluation.samples_per_prompt, 1.0, self.config.evaluated_length)[0]

    def disk(self, steps: int, tokens: float) -> dict[str, float]:
        """Bytes of a checkpoint, and of the whole run, in each of whose steps so many tokens are sampled."""
        trained, saved = trained_of(self.shape), float(self.config.run.save_samples)
        checkpoint = checkpoint_bytes(self.config, self.shape) * (1 + self.critics)
        samples = saved * steps * tokens * BYTES_PER_TOKEN
        return {"checkpoint": checkpoint, "run": checkpoints_kept(self.config) * checkpoint + 8 * trained + samples}

    def main_memory(self) -> float:
        """Bytes of a host: processes, a checkpoint on its way to disk, moments and reward workers."""
        here, reward = min(self.ranks, self.cluster.gpus), self.config.reward
        snapshot = checkpoint_bytes(self.config, self.shape) * (1 + self.critics) * here / self.ranks
        workers = getattr(reward, "workers", 0) * getattr(reward, "memory_mb", 0) * 2**20
        return here * (PROCESS + self.memory().host) + snapshot + workers

    # -- words ---------------------------------------------------------------------------------------------------------

    def engine_note(self) -> str:
        """Where the engine's copy of the weights takes much of a GPU, what would take less."""
        copy, heads = self.limits.weight_bytes, self.shape.config.get_text_config().num_attention_heads
        if copy < 0.4 * self.usable or self.config.rollout.engine != "native" or self.config.model.lora.base == "nf4":
            return ""
        parts = math.gcd(heads, 2 ** ceil(math.log2(copy / (0.25 * self.usable))))  # vLLM divides the heads
        return (
            f"the native engine has the whole weights on each GPU, {copy / GIB:.1f} GiB; one that divides them "
            f"(vLLM, tensor parallelism of {parts}, on GPUs of its own) has {copy / parts / GIB:.1f}"
        )

    def assumptions(self) -> Iterator[str]:
        assumed, card, name = self.assumed, self.measured[0]["card"], self.cluster.name
        tokens = f"responses of {assumed.response:g} tokens and prompts of {assumed.prompt:g} on average"
        yield f"{tokens}, {assumed.keep:.0%} of the groups are kept (--response, --prompt, --keep)"
        yield f"rewards are scored beside the sampling, but for {assumed.reward_s:g} s of a step (--reward-s)"
        yield f"memory: full-length responses, {CONTEXT / GIB:.1f} GiB for CUDA, {self.kept:.2f} times what is in use"
        scaled = "" if card == name else f", scaled to the {name} by the makers' figures"
        names = {row["model"] for row in self.measured}
        models = " or ".join(sorted(m for m in names if not any(m != one and m in one for one in names)))
        yield f"rates measured on the {card} with {models}{scaled} (bench/rates.py writes them)"
        if self.ranks > 1:
            adapter = "an adapter, " if has_adapter(self.shape) else ""
            kind = f"{adapter}whole on each" if held_whole(self.config, self.shape) else "FSDP2 over all"
            where = f"{self.engines} engines on GPUs of their own" if apart(self.config) else "an engine on each GPU"
            yield f"{where}, training on {self.ranks} GPUs ({kind}): only 0.5B on two was measured"
            yield f"{NETWORK * 8e-9:.0f} Gbit/s a GPU between hosts, and GPUs that never wait for each other"
        if self.config.model.compute_dtype == "float32":
            yield "times are those of bfloat16; model.compute_dtype=float32 takes several times as long"
        if self.config.runtime.exact:
            yield "times and activations are those without runtime.exact, which takes more of both"
        if in_main_memory(self.config, self.shape, self.ranks):
            yield "times are those without runtime.learner.cpu_offload, which copies weights and gradients to and fro"
        if self.config.rollout.engine != "native":
            yield "other engines are not in it: the native engine is planned for"
        for path in unknown_models(self.config, True):
            yield f"memory of the reward model {path}, which is not here, is not in it"
        if self.config.runtime.kind == "ray" and self.config.reward.kind == "model":
            yield "memory of reward models, to which Ray gives GPUs of their own, is not in it"
        if self.config.algorithm.kind == "ppo":
            yield "the critic: of the policy's size, and as long at each pass; no run of PPO was measured for this"
        if apart(self.config):
            own = f"{self.engine_needed / GIB:.1f} GiB for weights and one sample, and all the rest for keys and values"
            yield f"memory is that of a GPU that trains; one that samples takes {own}"
