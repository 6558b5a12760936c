"""How much memory a run will take, from the shape of its model and the sizes in its recipe.

With P parameters of which A are trained (all, or those of a LoRA adapter), bytes b of ``model.compute_dtype``,
layers L, widths h (hidden), q (all query heads) and m (MLP), k = 2 x key heads x head size numbers a token for keys and
values, vocabulary V, t tokens of a micro-batch:

=============  ====================================================================================================
weights        4 A (float32 masters) + b (P - A) (frozen; 1/2 + b / 64 in linear layers with model.lora.base=nf4)
gradients      4 A
Adam           8 A (two moments), or 2.06 A (training.moments=int8); a GPU none with training.offload_optimizer
streamed       8 of 2^24 numbers of A at a time, where moments do not lie on the GPU in float32; of 8 bits 24
engine         b A (its own copy; what is frozen it shares), vLLM: b P, which a shared GPU holds while it wakes, and the
               host's memory while it sleeps; b A more if evaluations beside the sampling have an engine of theirs
reference      4 A, if the KL to the initial policy is asked for, and it is a copy (algorithm.kl.reference)
critic         8 P and moments, if algorithm.kind is ppo and it has a backbone of its own, supposed of the policy's size
casts          in bfloat16 until the backward pass: 2 W, for W trained parameters of the layers; 2 A with runtime.exact
KV cache       s T k L b, for s = min(rollout.max_concurrent_samples, samples of a step and of those sampled ahead)
               sequences of at most T tokens (prompt and response), the former in any case with runtime.deterministic;
               on a GPU no more than rollout.cache_gib
activations    CPU: t L (40 h + b (4 m + k)) kept for the backward pass; in bfloat16, for T of at most 192, attention is
               written out, with t L 6 H T more (H heads).
               GPU, compiled: t L (b (2 h + 2 q + k + 3 m) + 2 r h + 4 H), with r bytes of the residual stream (b if the
               embedding is frozen, else 4)
               With training.activation_checkpointing the inputs of all layers, t L r h, and in place of L one layer
at work        in the backward pass, on a GPU one layer more, on a CPU 2 t b m; with nf4 the largest matrix, wide
logits         in the output head, c rows at a time, at most t and as many as ``model.head.chunk_rows`` says (CPU 1,024,
               GPU 2^30 / V, at most 8,192): 3 x 4 V c, on a GPU in bfloat16 6 V c and, if it is trained, 6 V h
               for its copy and its gradient
decoding       2 x 4 V s in a step of the rollout
scores         in place of logits, where a reward model is trained: 8 h t
=============  ====================================================================================================

A stage has no engine, cache or decoding, and no reference either: that of DPO is computed before the first update and
kept as numbers. T is data.max_length there, and t no more than rows_per_update rows of that length have, or pairs.

Compared with measurements in test_doctor_memory.py and test_stage_memory.py; the libraries' half a GiB is not in it. On
a GPU rollout (cache, decoding) and update (gradients, casts, activations, logits) take turns: while the trainer works
the cache sleeps, and gradients are dropped with every update; the head is done with before the layers go backward. The
larger ones count; a cache that stays (max_staleness >= 1 and cache_gib given) in any case. vLLM takes all of cache_gib,
once the learner has given back what it has freed. What is on another device (``rollout.device``, ``reward.device``)
does not count. Of a reward model see reward_memory.py; it scores while the rollout goes on.

Over N ranks (FSDP2) each GPU has 1/N of weights, gradients, moments and reference, its share of samples and tokens, and
the whole engine. The casts are then what is whole at a time: of two layers (one at work, one on its way) b a number,
and 4 for its gradient; 4 and 4 of what lies outside of the layers. An adapter and its base are whole on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dapo.checks.context import CheckContext, Finding
from dapo.checks.reward_memory import mlp_width, reward_memory, unknown_models
from dapo.config import Config
from dapo.config.on_resume import may_change
from dapo.config.reading import with_values
from dapo.config.stages import SFTConfig, StageConfig
from dapo.errors import UserError, first_line
from dapo.model.adapters import changing_parameters, has_adapter
from dapo.model.attention import WRITTEN_OUT_TOKENS
from dapo.model.compiling import decoder_layers
from dapo.model.head import chunk_rows
from dapo.model.loading import cached_numbers, check_supported, key_value_heads, read_config
from dapo.model.nf4 import numbers
from dapo.training.lora import held_whole, in_main_memory, shape_of
from dapo.training.moments import moment_bytes, streamed_bytes
from dapo.util import memory as system_memory

AnyConfig = Config | StageConfig
GIB = 2**30
_HOLES = 1.25  # times what is in use, held: 1.1 to 1.5 was measured, as the C library keeps what is freed
_TIGHT = 0.85  # share of the free memory from which on it may become tight
_SHORT = 0.8
"""Of what was predicted, what is taken for free where that ran out: the prediction was too low, or others took some."""


@dataclass(frozen=True, slots=True)
class Memory:
    weights: int
    gradients: int
    adam: int
    casts: int
    activations: int
    logits: int
    engine: int = 0
    reference: int = 0
    critic: int = 0
    cache: int = 0
    decoding: int = 0
    reward_model: int = 0
    scoring: int = 0
    at_work: int = 0
    """What the layer that goes backward takes beside what was kept."""
    streamed: int = 0
    """Adam's moments in float32 for the time of their step, after the backward pass, if they rest otherwise."""
    host: int = 0
    """Adam's moments and the weights of a vLLM asleep in the host's memory, where that is another one."""
    loading: int = 0
    """A base before it is put into 4 bits, when there is nothing else yet."""
    cache_that_stays: int = 0
    """The engine's on a GPU that it shares, if updates do not take turns with it."""

    @property
    def lasting(self) -> int:
        models = self.weights + self.engine + self.reference + self.critic + self.reward_model
        return models + self.adam + self.cache_that_stays

    def total(self, on_gpu: bool) -> int:
        """At the worst moment. On a CPU with a share for the holes that freed tensors of other sizes leave."""
        if on_gpu:
            passes = self.casts + self.activations + max(self.logits, self.at_work)
            update = self.gradients + max(passes, self.streamed)
            return max(self.loading, self.lasting + max(update, self.cache + self.decoding + self.scoring))
        parts = self.lasting + self.gradients + self.casts + self.cache + self.activations
        most = max(self.logits, self.at_work, self.decoding + self.scoring, self.streamed)
        return int(_HOLES * max(self.loading, parts + most))

    def parts(self) -> dict[str, int]:
        """Those of the device's memory, by name."""
        return {part.name.replace("_", " "): getattr(self, part.name) for part in fields(self) if part.name != "host"}

    def told(self, on_gpu: bool) -> str:
        parts = self.parts()
        text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size >= GIB / 200)
        text = f"{text} GiB" if text else "each part less than 0.01 GiB"
        text += ", of which rollout and update take turns" if on_gpu else ""
        return text + (f"; in the host's memory {gib(self.host)}" if self.host else "")


def trained_of(shape: Any) -> int:
    return sum(parameter.numel() for parameter in changing_parameters(shape).values())


def checkpoint_bytes(config: AnyConfig, shape: Any) -> int:
    """Of one checkpoint: float32 weights and the optimizer's two moments of what is trained."""
    kind, trained = config.training.moments, changing_parameters(shape).values()
    return sum(4 * parameter.numel() + moment_bytes(parameter.numel(), kind) for parameter in trained)


def predict_memory(config: AnyConfig, shape: Any, on_gpu: bool = False, ranks: int = 1) -> Memory:
    """See the module for the formulas. ``shape``: a model of the run's architecture, with its adapter if it trains one,
    on any device; only shapes and the config are looked at. ``ranks``: GPUs that share the training."""
    training = config.training
    trained, width = trained_of(shape), _width(config)
    every = sum(map(numbers, shape.parameters()))  # tied embeddings, in two places, count once
    frozen = sum(p.numel() * (width if p.is_floating_point() else 1) for p in shape.parameters()) - width * trained
    wide = width * max((numbers(p) for p in shape.parameters() if not p.is_floating_point()), default=0)
    held = trained if held_whole(config, shape) else -(-trained // ranks)
    there = on_gpu and in_main_memory(config, shape, ranks)
    tokens = min(training.tokens_per_micro_batch, max(_longest(config), _update_tokens(config) // ranks))
    offloaded = on_gpu and training.offload_optimizer
    adam = (checkpoint_bytes(config, shape) - 4 * trained) * held // trained
    memory = Memory(
        weights=(0 if there else 4 * held) + frozen,
        gradients=0 if there else 4 * held,
        adam=0 if offloaded or there else adam,
        casts=_gathered(config, shape) if held < trained else 0 if width == 4 else _casts(config, shape),
        activations=int(tokens * _kept(config, shape, on_gpu)),
        logits=_head(shape, tokens, on_gpu, width),
        at_work=int(tokens * (_layer(config, shape, True) if on_gpu else 2 * width * mlp_width(shape))) + wide,
        loading=width * every if wide else 0,
        streamed=streamed_bytes(held, training.moments, offloaded),
        host=(8 * held + adam) if there else adam * offloaded,
    )
    return memory if isinstance(config, StageConfig) else _with_engine(memory, config, shape, on_gpu, ranks)


def _head(shape: Any, tokens: int, on_gpu: bool, width: int) -> int:
    """Bytes of logits, or of the states that scores are made of."""
    text, head = shape.config.get_text_config(), shape.get_output_embeddings()
    if head is None:
        return 8 * tokens * int(text.hidden_size)
    chunk: int = min(tokens, chunk_rows(torch.device("cuda" if on_gpu else "cpu"), text.vocab_size)) * text.vocab_size
    return 6 * chunk + 6 * _trained_in(head, shape) if on_gpu and width == 2 else 12 * chunk


def _update_tokens(config: AnyConfig) -> int:
    """Of a mini-batch, at most; what is no demonstration is taken for a pair."""
    if isinstance(config, StageConfig):
        return config.training.rows_per_update * _longest(config) * (1 if isinstance(config, SFTConfig) else 2)
    return config.training.groups_per_update * config.rollout.samples_per_prompt * _longest(config)


def _with_engine(memory: Memory, config: Config, shape: Any, on_gpu: bool, ranks: int) -> Memory:
    text, rollout, width = shape.config.get_text_config(), config.rollout, _width(config)
    trained, rows = trained_of(shape), _rows(config, ranks)
    cache = rows * _longest(config) * cached_numbers(text) * text.num_hidden_layers * width
    if on_gpu and rollout.cache_gib is not None:
        cache = int(rollout.cache_gib * GIB) if rollout.engine == "vllm" else min(cache, int(rollout.cache_gib * GIB))
    stays = on_gpu and config.cache_stays
    apart = rollout.device not in (None, *(("cuda", "cuda:0") if on_gpu else ("cpu",)))
    algorithm, every = config.algorithm, sum(map(numbers, shape.parameters()))
    vllm = 0 if apart or rollout.engine != "vllm" else width * every
    reward_model, scoring = reward_memory(config, on_gpu)
    own_critic = algorithm.kind == "ppo" and not algorithm.critic.share_backbone
    second = bool(config.ahead) and config.evaluation.while_sampling == "copy"
    return replace(
        memory,
        engine=0 if apart else (vllm or width * trained) + second * width * trained,
        reference=0 if algorithm.kl.mode == "off" or algorithm.kl.reference != "copy" else memory.gradients,
        critic=4 * every + checkpoint_bytes(config, shape) * every // trained if own_critic else 0,
        cache=0 if apart or stays else cache,
        decoding=0 if apart else 8 * text.vocab_size * rows,
        reward_model=reward_model,
        scoring=scoring,
        host=memory.host + vllm * (on_gpu and not config.cache_stays),
        cache_that_stays=cache if stays and not apart else 0,
    )


def _width(config: AnyConfig) -> int:
    return 2 if config.model.compute_dtype == "bfloat16" else 4


def _longest(config: AnyConfig) -> int:
    if isinstance(config, StageConfig):
        return int(config.data.max_length)
    return config.data.max_prompt_length + config.rollout.max_response_length


def _rows(config: Config, ranks: int) -> int:
    """Sequences that the cache of a rank has room for: all that may be, where every shape is pinned."""
    rollout = config.rollout
    if config.runtime.deterministic:
        return rollout.max_concurrent_samples
    groups = -(-(1 + config.ahead) * rollout.prompts_per_step // ranks)
    return min(rollout.max_concurrent_samples, groups * rollout.samples_per_prompt)


def _casts(config: AnyConfig, shape: Any) -> int:
    """Bytes of bfloat16 copies of the trained parameters in the layers; recomputed, one layer has them at a time. With
    ``runtime.exact`` of all trained parameters, as long as a pass takes."""
    if config.runtime.exact:
        return 2 * trained_of(shape)
    layers = decoder_layers(shape)
    return 2 * _trained_in(layers, shape) // (max(1, len(layers)) if config.training.activation_checkpointing else 1)


def _gathered(config: AnyConfig, shape: Any) -> int:
    """Bytes of what FSDP2 has whole at a time; the head's gradient is among the logits."""
    layers, outside, head = outside_layers(shape)
    return 8 * outside - 4 * head + (2 * _width(config) + 4) * layers // max(1, len(decoder_layers(shape)))


def outside_layers(shape: Any) -> tuple[int, int, int]:
    """Trained parameters in the layers, outside of them, and of the latter those of the head."""
    inside = _trained_in(decoder_layers(shape), shape)
    return inside, trained_of(shape) - inside, _trained_in(shape.get_output_embeddings(), shape)


def _kept(config: AnyConfig, shape: Any, on_gpu: bool) -> float:
    text, layer = shape.config.get_text_config(), _layer(config, shape, on_gpu)
    if not config.training.activation_checkpointing:
        return float(text.num_hidden_layers * layer)
    return float(text.num_hidden_layers * _residual(config, shape) * text.hidden_size + layer)


def _layer(config: AnyConfig, shape: Any, on_gpu: bool) -> float:
    text, width = shape.config.get_text_config(), _width(config)
    hidden, heads, mlp = text.hidden_size, text.num_attention_heads, mlp_width(shape)
    if on_gpu:
        numbers = 2 * hidden + 2 * heads * key_value_heads(text)[1] + cached_numbers(text) + 3 * mlp
        return float(width * numbers + 2 * _residual(config, shape) * hidden + 4 * heads)
    written_out = 6 * heads * _longest(config) * (width == 2 and _longest(config) <= WRITTEN_OUT_TOKENS)
    return float(40 * hidden + width * (4 * mlp + cached_numbers(text)) + written_out)


def _residual(config: AnyConfig, shape: Any) -> int:
    return _width(config) if has_adapter(shape) else 4


def _trained_in(part: Any, shape: Any) -> int:
    trained = {id(parameter) for parameter in changing_parameters(shape).values()}
    return sum(p.numel() for p in part.parameters() if id(p) in trained)


def predicted_from(config: AnyConfig) -> str:
    try:
        found = read_config(config.model.path, config.model.trust_remote_code)
        check_supported(found)
        shape = shape_of(config, found)
    except UserError as error:
        return f"not predicted: {first_line(error)}"
    asked = config.runtime.device  # of a GPU that is asked for it is told where there is none, too
    on_gpu = asked == "cuda" or (asked == "auto" and torch.cuda.is_available())
    memory = predict_memory(config, shape, on_gpu)
    where = "GPU memory" if on_gpu else "RAM"
    return f"about {gib(memory.total(on_gpu))} of {where}, {_supposed(config, on_gpu)} ({memory.told(on_gpu)})"


def _supposed(config: AnyConfig, on_gpu: bool) -> str:
    """What a prediction is of. It is no upper bound: what was measured lies within a factor of it, on either side."""
    more = "".join(f", without the reward model {path}, which is not here" for path in unknown_models(config, on_gpu))
    return f"with texts of full length, without the libraries' own 0.5 GiB{more}"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def check_memory(context: CheckContext) -> Iterator[Finding]:
    shape, config = context.need(context.shape, "model"), context.config
    if config.runtime.kind == "ray":
        yield Finding("machine", "memory", "skip", "what each worker takes is told by dapo plan")
        return
    elsewhere = context.device is None and config.runtime.device == "cuda"  # a recipe for another machine
    on_gpu = elsewhere or context.need(context.device, "device").type == "cuda"
    if on_gpu and context.at_start:  # the engine has taken what is free by now
        return
    memory = predict_memory(config, shape, on_gpu)
    needed = memory.total(on_gpu)
    text = f"about {gib(needed)} predicted"
    text += f", {_supposed(config, on_gpu)} ({memory.told(on_gpu)})" if needed >= GIB / 10 else ""
    if elsewhere:
        yield Finding("machine", "memory", "skip", f"{text}; there is no GPU here to compare it with")
        return
    free = torch.cuda.mem_get_info()[0] if on_gpu else system_memory.free_memory()
    if free is not None and context.model is not None:
        free += memory.weights + memory.reward_model  # they are loaded already
    where = "GPU memory" if on_gpu else "RAM"
    context.fits = True if free is None or needed <= free else None
    if free is None:
        yield Finding("machine", "memory", "pass", f"{text}; how much {where} is free cannot be told here")
        return
    text += f", {gib(free)} of {where} are free"
    tight: Any = "fail" if needed > free else "warn" if needed > _TIGHT * free else None
    yield Finding("machine", "memory", tight or "pass", text, smaller(config, shape, free, on_gpu) if tight else "")


@contextmanager
def shortage_explained(config: AnyConfig, model: Any) -> Iterator[None]:
    """Inside, memory that runs out is no fault of the program: what was asked for, and settings that take less.
    Raises UserError: it ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch raises plain RuntimeErrors for the host's memory
        ran_out = any(said in str(error) for said in ("out of memory", "can't allocate memory"))
        if not isinstance(error, MemoryError) and not ran_out:
            raise
        on_gpu = next(model.parameters()).is_cuda
        less = smaller(config, model, _SHORT * predict_memory(config, model, on_gpu).total(on_gpu), on_gpu)
        named, deterministic = re.findall(r"([\w.]+)=", less), config.runtime.deterministic
        stage = isinstance(config, StageConfig)  # which may change none of them
        fixed = [key for key in named if stage or not may_change(key, deterministic, inside=True)]
        note = f" ({', '.join(fixed)}: for a new run, this one cannot go on with another)" if fixed else ""
        raise UserError(f"memory ran out: {first_line(error)}\nWhat takes less: {less}{note}") from None


def smaller(config: AnyConfig, shape: Any, free: float, on_gpu: bool) -> str:
    """Keys with values with which it fits with ease; or, if no setting is enough, what is."""
    found, least = easing(config, free, on_gpu, lambda other: predict_memory(other, shape, on_gpu).total(on_gpu))
    told = settings_line(found)
    if least <= _TIGHT * free:
        return told
    adapter = "" if has_adapter(shape) else "model.lora.rank=16, which trains an adapter only, or "
    return f"{adapter}a smaller model, or {gib(least / _TIGHT)} free{f' and {told}' if told else ''}"


def easing(config: Any, free: float, on_gpu: bool, total: Callable[[Any], float]) -> tuple[dict[str, Any], float]:
    """Settings with which it fits with ease, or that take least; and the ``total`` of them."""
    found: dict[str, Any] = {}
    least = total(config)
    for key, value in 2 * list(_cheaper(config, on_gpu)):  # twice, as what is second largest at first counts later
        other = with_values(config, {key: value})
        if (size := total(other)) < least:
            config, least = other, size
            found[key] = value
        if least <= _TIGHT * free:
            break
    return found, least


def settings_line(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def _cheaper(config: AnyConfig, on_gpu: bool) -> Iterator[tuple[str, Any]]:
    """Keys and values that take less memory, what costs least of all first."""
    training = config.training
    narrow = [("model.compute_dtype", "bfloat16")] if config.model.compute_dtype == "float32" else []
    yield from narrow if on_gpu else []
    tokens = training.tokens_per_micro_batch
    while tokens > _longest(config):
        tokens = max(_longest(config), tokens // 2)
        yield "training.tokens_per_micro_batch", tokens
    if isinstance(config, Config):
        for part in (4, 16):
            yield "rollout.max_concurrent_samples", max(1, config.rollout.max_concurrent_samples // part)
    if not training.activation_checkpointing:
        yield "training.activation_checkpointing", True
    if on_gpu and not training.offload_optimizer:
        yield "training.offload_optimizer", True
    if on_gpu and isinstance(config, Config) and config.reward.kind == "model":
        yield "reward.device", "cpu"
    yield from [] if on_gpu else narrow
