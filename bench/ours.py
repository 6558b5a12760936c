"""dapo's side of rollouts, and what its sides share."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from runner import Report
from work import Rollout, measure_limits, warmups


class Mark(NamedTuple):
    """A moment: by the clock, and in processor time of all threads, which other programs hardly change."""

    clock: float
    cpu: float

    def since(self, earlier: Mark) -> dict[str, float]:
        return {"seconds": self.clock - earlier.clock, "cpu_seconds": self.cpu - earlier.cpu}


def mark(wait: bool = False) -> Mark:
    """Now. ``wait``: after the card has done what it was given."""
    if wait and torch.cuda.is_available():
        torch.cuda.synchronize()
    return Mark(time.perf_counter(), time.process_time())


def say_memory(report: Report) -> None:
    """Report the most device memory that tensors took in this process, and that was reserved; 0 without a GPU."""
    cuda = torch.cuda.is_available()
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    report.say("memory", bytes=torch.cuda.max_memory_allocated() if cuda else 0, reserved=reserved)


def say_limits(job: dict[str, Any], report: Report) -> None:
    report.say("limits", **asdict(measure_limits(job["device"])))
    _free()


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


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- rollouts ---------------------------------------------------------------------------------------------------------


def rollout(job: dict[str, Any], report: Report) -> None:
    """Rollouts with one engine, ``repeats`` times with other seeds; what compiles and captures is done before."""
    report.say("imported")
    works = [Rollout(**work) for work in job["works"]]
    samples = asyncio.run(_rollouts(works, job["repeats"], report))
    say_memory(report)
    if not works[-1].random and samples:  # weights that mean something
        _free()
        report.say("mismatch", **mismatch(works[-1], samples))


async def _rollouts(works: list[Rollout], repeats: int, report: Report) -> list[Any]:
    from dapo.rollout.native.engine import NativeEngine

    first, samples = works[0], []
    model = load(first.model, first.random, first.device, first.dtype)
    report.say("loaded")
    longest, rows = max(work.longest for work in works), max(work.concurrent for work in works)
    engine = NativeEngine(model, first.stop_ids, max_sequence_tokens=longest, max_concurrent_samples=rows)
    report.say("ready")
    await _sample(engine, first.first_token(), seed=0)
    report.say("first token")
    for work in warmups(works):
        await _sample(engine, work, seed=0)
    report.say("first batch")
    for seed in range(1, repeats + 1):
        for number, work in enumerate(works):
            start = mark()
            samples = await _sample(engine, work, seed)
            taken = mark().since(start)
            lengths = [(len(work.prompts[s.request_id]), s.length) for s in samples]
            report.say("rollout", work=number, **taken, lengths=lengths)
    await engine.close()
    return samples


async def _sample(engine: Any, work: Rollout, seed: int) -> list[Any]:
    from dapo.rollout.engine import Request, Sampling
    from dapo.rollout.seeds import sample_seed

    requests = []
    for i, (prompt, limit) in enumerate(zip(work.prompts, work.limits, strict=True)):
        seeds = tuple(sample_seed(seed, i, 0, k) for k in range(work.samples))
        requests.append(Request(i, tuple(prompt), seeds, Sampling(work.temperature, limit)))
    return [sample async for sample in engine.generate(requests)]


def mismatch(work: Rollout, samples: list[Any]) -> dict[str, float]:
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
