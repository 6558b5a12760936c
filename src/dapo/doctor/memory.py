"""How much memory a run will take, from the shape of its model and the sizes in its recipe.

With P parameters, bytes b of ``model.compute_dtype``, layers L, widths h (hidden) and m (MLP), k = 2 x key heads x head
size numbers a token for keys and values, vocabulary V:

=============  ====================================================================================================
weights        4 P (float32 masters)
gradients      4 P
Adam           8 P (two moments)
engine         b P (its own copy)
reference      4 P, if the KL to the initial policy is asked for
KV cache       s T k L b, for s = min(rollout.max_concurrent_samples, samples of a step) sequences of at most T tokens
               (prompt and response); on a GPU no more than rollout.cache_gib
activations    t L (a + w) with t tokens of a micro-batch; a = b (10 h + 5 m + 3 k) is what the layers keep for the
               backward pass, w = 12 H min(T, 192) what attention keeps where it is written out (H heads, CPU,
               sequences of at most 192 tokens)
logits         3 x 4 V c in the output head, c = min(t, 1024) rows at a time, or 2 x 4 V s in a step of the rollout,
               whichever is more
=============  ====================================================================================================

Prediction and measurement are compared in tests/doctor/test_doctor_memory.py; the libraries themselves (about half a
GiB) are not in it. On a GPU the cache sleeps while the trainer works: of cache and activations the larger one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.doctor.finding import Finding
from dapo.doctor.patient import Patient
from dapo.model.attention import WRITTEN_OUT_TOKENS
from dapo.model.head import CHUNK_TOKENS

GIB = 2**30
_HOLES = 1.25
"""Measured: what is held beside what is in use, as the C library keeps freed memory (``process.keep_freed_memory``)."""
_TIGHT = 0.85
"""Share of the free memory from which on it may become tight."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted bytes by use."""

    weights: int
    gradients: int
    adam: int
    engine: int
    reference: int
    cache: int
    activations: int
    logits: int

    def total(self, on_gpu: bool) -> int:
        """At the worst moment. On a CPU with a share for the holes that freed tensors of other sizes leave."""
        parts: list[int] = [getattr(self, part.name) for part in fields(self)]
        return sum(parts) - min(self.cache, self.activations) if on_gpu else int(_HOLES * sum(parts))

    def told(self) -> str:
        """The parts, those below a hundredth of a GiB left out."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size >= GIB / 200)


def parameters_of(shape: Any) -> int:
    """Of a model, one that stands in two places (tied embeddings) counted once."""
    return sum(parameter.numel() for parameter in shape.parameters())


def checkpoint_bytes(parameters: int) -> int:
    """Of one checkpoint: float32 weights and the optimizer's two moments."""
    return 12 * parameters


def predict_memory(config: Config, shape: Any, on_gpu: bool = False) -> Memory:
    """See the module for the formulas.

    Args:
        config: of the run.
        shape: a model of its architecture, on any device; only shapes and the config are looked at.
        on_gpu: whether training runs on one.
    """
    text = shape.config.get_text_config()
    rollout = config.rollout
    parameters = parameters_of(shape)
    width = 2 if config.model.compute_dtype == "bfloat16" else 4
    layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    mlp = getattr(text, "intermediate_size", None) or 4 * hidden
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    pairs = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    longest = config.data.max_prompt_length + rollout.max_response_length
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    rows = min(rollout.max_concurrent_samples, samples)
    cache = rows * longest * pairs * layers * width
    if on_gpu and rollout.cache_gib is not None:
        cache = min(cache, int(rollout.cache_gib * GIB))
    update = config.training.groups_per_update * rollout.samples_per_prompt * longest
    tokens = min(config.training.tokens_per_micro_batch, update)
    written_out = 12 * heads * longest if not on_gpu and longest <= WRITTEN_OUT_TOKENS else 0
    kept = width * (10 * hidden + 5 * mlp + 3 * pairs) + written_out
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        adam=8 * parameters,
        engine=width * parameters,
        reference=0 if config.algorithm.kl.mode == "off" else 4 * parameters,
        cache=cache,
        activations=tokens * layers * kept,
        logits=text.vocab_size * 4 * max(3 * min(tokens, CHUNK_TOKENS["cuda" if on_gpu else "cpu"]), 2 * rows),
    )


def gib(size: float) -> str:
    """In GiB, or MiB where that says more."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def free_memory() -> int | None:
    """Bytes of RAM that this process may still take: of the machine, and of the container it is in. None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free = found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return min([free, *_left_in_containers()])


def _left_in_containers() -> Iterator[int]:
    """What control groups of both versions still allow."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            yield max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # there is no such file, or "max"
            continue


def check_memory(patient: Patient) -> Iterator[Finding]:
    """What the run will take of the device it runs on, and whether that is free."""
    import torch

    shape, config = patient.need(patient.shape, "model"), patient.config
    on_gpu = patient.need(patient.device, "device").type == "cuda"
    memory = predict_memory(config, shape, on_gpu)
    needed = memory.total(on_gpu)
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_memory()
    if free is not None and patient.model is not None:
        free += memory.weights  # they are loaded already
    where = "GPU memory" if on_gpu else "RAM"
    text = f"{gib(needed)} predicted ({memory.told()} GiB)" if needed >= GIB / 10 else f"{gib(needed)} predicted"
    patient.fits = True if free is None or needed <= free else None
    if free is None:
        yield Finding("machine", "memory", "pass", f"{text}; how much {where} is free cannot be told here")
        return
    text += f", {gib(free)} of {where} are free"
    if needed <= _TIGHT * free:
        yield Finding("machine", "memory", "pass", text)
        return
    yield Finding(
        "machine", "memory", "fail" if needed > free else "warn", text, _smaller(config, memory, needed - free)
    )


def _smaller(config: Config, memory: Memory, excess: int) -> str:
    """Keys with values that take less."""
    rollout, training = config.rollout, config.training
    longest = config.data.max_prompt_length + rollout.max_response_length
    fixed = memory.weights + memory.gradients + memory.adam + memory.engine + memory.reference
    found = []
    if memory.activations > memory.cache and training.tokens_per_micro_batch > longest:
        share = 1 - max(excess, 0) / memory.activations
        found.append(
            f"training.tokens_per_micro_batch={max(longest, int(training.tokens_per_micro_batch * share / 2))}"
        )
    if memory.cache > fixed / 4 and rollout.max_concurrent_samples > 1:
        found.append(f"rollout.max_concurrent_samples={max(1, rollout.max_concurrent_samples // 4)}")
    if config.model.compute_dtype == "float32":
        found.append("model.compute_dtype=bfloat16")
    return " ".join(found) or "a smaller model, or a machine with " + gib(1.2 * fixed) + " free"
