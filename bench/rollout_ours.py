"""Our side of ``bench/rollout.py``: a process that does one job and reports JSON lines.

Jobs: ``limits`` (what the card can do), ``rollout``, ``steady`` (decoding at one context) and ``startup``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rollout_work import Limits, Report, Shape, Work, steady_result, steady_works, step_cost
from sides import mark

MEMORY_SHARE = 0.85
"""Of the card's memory that weights, cache and logits of a steady state may need."""


def main(path: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    JOBS[job["job"]](job, Report(job["report"]))


# --- the card ---------------------------------------------------------------------------------------------------------


def measure_limits(device: str) -> Limits:
    """Medians of a copy of 1 GiB and of a product of 8192 x 8192 bfloat16 matrices (small ones on a CPU)."""
    cuda = torch.device(device).type == "cuda"
    size, side = (2**30, 8192) if cuda else (2**24, 256)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source), device)
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = _median_seconds(lambda: left @ right, device)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    return Limits(name, 2 * size / copy, 2 * side**3 / product)


def _median_seconds(action: Callable[[], Any], device: str, repeats: int = 20) -> float:
    for _ in range(3):
        action()
    if torch.device(device).type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)) / 1000


def _say_limits(job: dict[str, Any], report: Report) -> Limits:
    limits = measure_limits(job["device"])
    _free()
    report.say("limits", **asdict(limits))
    return limits


# --- engine and model -------------------------------------------------------------------------------------------------


def load(folder: str, random_weights: bool, device: str, dtype: str) -> Any:
    """The model in a folder, or one of its shape."""
    from dapo.model.loading import load_model

    kind = getattr(torch, dtype)
    if not random_weights:
        return load_model(folder, kind, device=device).requires_grad_(False)
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=kind)
    return load_model(model, kind, device=device).requires_grad_(False)


def _engine(model: Any, stop_ids: list[int], longest: int, concurrent: int) -> Any:
    from dapo.rollout.native.engine import NativeEngine

    return NativeEngine(model, stop_ids, max_sequence_tokens=longest, max_concurrent_samples=concurrent)


async def _sample(engine: Any, work: Work, seed: int) -> list[Any]:
    from dapo.rollout.engine import Request, Sampling
    from dapo.rollout.seeds import sample_seed

    requests = [
        Request(
            i,
            tuple(prompt),
            tuple(sample_seed(seed, i, 0, k) for k in range(work.samples)),
            Sampling(work.temperature, limit),
        )
        for i, (prompt, limit) in enumerate(zip(work.prompts, work.limits, strict=True))
    ]
    return [sample async for sample in engine.generate(requests)]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _memory() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


# --- jobs -------------------------------------------------------------------------------------------------------------


def rollout(job: dict[str, Any], report: Report) -> None:
    """The work, ``repeats`` times with other seeds, after a short rollout that compiles and captures."""
    work = Work(**job["work"])
    _say_limits(job, report)
    samples = asyncio.run(_rollouts(work, job["repeats"], report))
    report.say("memory", bytes=_memory())
    if job["mismatch"]:
        _free()
        report.say("mismatch", **mismatch(work, samples))


async def _rollouts(work: Work, repeats: int, report: Report) -> list[Any]:
    model = load(work.model, work.random, work.device, work.dtype)
    engine = _engine(model, work.stop_ids, work.longest, work.concurrent)
    samples = await _sample(engine, work.warmup(), seed=0)
    report.say("ready")
    for seed in range(1, repeats + 1):
        start = mark()
        samples = await _sample(engine, work, seed)
        seconds, cpu_seconds = mark().since(start)
        lengths = [(len(work.prompts[s.request_id]), s.length) for s in samples]
        report.say("rollout", seconds=seconds, cpu_seconds=cpu_seconds, lengths=lengths)
    await engine.close()
    return samples


def mismatch(work: Work, samples: list[Any]) -> dict[str, float]:
    """|engine's - trainer's| log-probability of the sampled tokens, in nats; the trainer's as in training: float32
    master weights, products in bfloat16, sequences packed."""
    from dapo.model.loading import load_model
    from dapo.records import Group, Prompt, Reward
    from dapo.training.packing import pack
    from dapo.training.policy import Policy

    by_prompt: dict[int, list[Any]] = {}
    for sample in samples:
        scored = replace(sample, reward=Reward(None, 0.0), advantage=0.0)
        by_prompt.setdefault(sample.request_id, []).append(scored)
    groups = [Group(i, Prompt(i, "", tuple(work.prompts[i]), ""), tuple(found)) for i, found in by_prompt.items()]
    model = load_model(work.model, torch.float32, device=work.device).requires_grad_(False)
    policy = Policy(model, work.temperature, max(32768, work.longest), torch.bfloat16)
    batch = pack(groups)
    difference = (policy.logprobs(batch).cpu() - torch.from_numpy(batch.behaviour_logprobs)).abs().double()
    return {
        "mean": float(difference.mean()),
        "largest": float(difference.max()),
        "share_above_0.1": float((difference > 0.1).double().mean()),
        "tokens": len(difference),
    }


def steady(job: dict[str, Any], report: Report) -> None:
    """Decode steps with all rows at one context, for every pair of ``cells``."""
    _say_limits(job, report)
    shape = Shape.read(job["model"])
    model = load(job["model"], True, job["device"], job["dtype"])
    for rows, context in job["cells"]:
        needed = step_cost(shape, rows, context + job["steps"]).bytes
        room = _room(job["device"])
        if needed > MEMORY_SHARE * room:
            report.say("cell", rows=rows, context=context, skipped=f"{needed / 1e9:.0f} of {room / 1e9:.0f} GB needed")
            continue
        try:
            cell = asyncio.run(_steady_cell(model, shape, rows, context, job))
        except Exception as error:
            cell = {"error": f"{type(error).__name__}: {error}"[:300]}
        report.say("cell", rows=rows, context=context, **cell)
        _free()


def _room(device: str) -> float:
    return torch.cuda.get_device_properties(device).total_memory if torch.device(device).type == "cuda" else 2**30


async def _steady_cell(model: Any, shape: Shape, rows: int, context: int, job: dict[str, Any]) -> dict[str, Any]:
    short, long = steady_works(job, shape.vocabulary, rows, context)
    engine = _engine(model, [], long.longest, rows)
    try:
        await _sample(engine, short, seed=0)
        seconds: dict[str, list[float]] = {"short": [], "long": []}
        for repeat in range(job["repeats"]):
            for name, work in (("short", short), ("long", long)):
                start = time.perf_counter()
                await _sample(engine, work, seed=repeat)
                seconds[name].append(time.perf_counter() - start)
    finally:
        await engine.close()
    return steady_result(seconds, rows, job["steps"])


def startup(job: dict[str, Any], report: Report) -> None:
    """From nothing to the first token, and to a first full batch."""
    asyncio.run(_startup(Work(**job["work"]), report))


async def _startup(work: Work, report: Report) -> None:
    report.say("imported")
    model = load(work.model, work.random, work.device, work.dtype)
    report.say("loaded")
    engine = _engine(model, work.stop_ids, work.longest, work.concurrent)
    report.say("ready")
    await _sample(engine, replace(work, prompts=work.prompts[:1], limits=[1], samples=1), seed=0)
    report.say("first token")
    await _sample(engine, work.warmup(), seed=0)
    report.say("first batch")
    await engine.close()


JOBS: dict[str, Callable[[dict[str, Any], Report], Any]] = {
    "limits": _say_limits,
    "rollout": rollout,
    "steady": steady,
    "startup": startup,
}

if __name__ == "__main__":
    main(sys.argv[1])
