"""Main memory for the snapshot of a checkpoint, which is written while the training goes on: on a GPU run, too.

12 bytes a parameter that is trained (float32 weights and Adam's two moments), beside all else that a run on a CPU
takes, and on a GPU beside the moments that training.offload_optimizer keeps there.
"""

from __future__ import annotations

from collections.abc import Iterator

from dapo.checks.context import CheckContext
from dapo.checks.finding import Finding
from dapo.checks.memory import checkpoint_bytes, free_memory, gib, predict_memory, trained_of


def check_snapshot(context: CheckContext) -> Iterator[Finding]:
    """Whether there is room for it. Nothing is said where the run itself does not fit, which has been told."""
    shape, config = context.need(context.shape, "model"), context.config
    on_gpu = context.need(context.device, "device").type == "cuda"
    snapshot = checkpoint_bytes(trained_of(shape))
    memory, free = predict_memory(config, shape, on_gpu), free_memory()
    needed = snapshot + memory.host
    if not on_gpu:
        context.need(context.fits, "memory")
        needed += memory.total(on_gpu=False)
        if free is not None and context.model is not None:
            free += memory.weights  # they are loaded already
    text = f"a checkpoint takes {gib(snapshot)} of RAM while it is written"
    text += "" if needed == snapshot else f", {gib(needed)} with what the run itself holds there"
    if free is None:
        yield Finding("machine", "snapshot", "pass", f"{text}; how much RAM is free cannot be told here")
        return
    fits = needed <= free
    fix = "" if fits else f"a machine with {gib(1.2 * (needed - free))} more of RAM, or a smaller model"
    yield Finding("machine", "snapshot", "pass" if fits else "fail", f"{text}; {gib(free)} are free", fix)
