"""Our decoder alone on one GPU, with random weights: rollouts one after the other, then steady decoding.

usage: python bench/decode.py [--rollouts 3] [--rows 1024 256 64] [--without joined ends ahead] ...

A rollout is ``--prompts`` x ``--samples`` responses with the lengths of real ones (``response_lengths.json``); the
first also captures steps. Steady decoding is ``--rows`` sequences at ``--context`` tokens in the mean: ``--stretches``
stretches of ``--stretch`` steps, after two that do not count. ``device`` is the time of the steps by CUDA events,
``whole`` that from one stretch to the next; both are medians. ``--without`` leaves out what makes an engine faster, to
see what it is worth.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from ours import load, mark
from work import SHAPES, drawn_lengths, random_prompts, step_cost


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="0.5b", choices=sorted(SHAPES))
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--rollouts", type=int, default=3)
    add("--prompts", type=int, default=128, help="of a rollout")
    add("--samples", type=int, default=16, help="for each prompt of a rollout")
    add("--limit", type=int, default=768, help="response tokens of a rollout at most")
    add("--concurrent", type=int, default=1024, help="sequences at once")
    add("--rows", type=int, nargs="*", default=[1024, 256, 64], help="of steady decoding")
    add("--context", type=int, default=480, help="mean of steady decoding; longer than what is decoded")
    add("--stretches", type=int, default=8, help="measured of steady decoding")
    add("--stretch", type=int, default=32, help="steps between two looks at the device")
    add("--copy", type=float, default=4.22e12, help="bytes a second of a copy, for the share of the byte limit")
    add("--without", nargs="*", default=[], choices=["joined", "ends", "ahead"])
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    leave_out(options.without)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[options.shape].write(Path(folder))
        model = load(folder, True, options.device, "bfloat16" if options.device == "cuda" else "float32")
    decoder = make_decoder(options, model.requires_grad_(False))
    found: dict[str, Any] = {"start": time.perf_counter() - start, "rollouts": [], "steady": {}}
    print(f"without {options.without or 'nothing'}; engine ready after {found['start']:.1f} s", flush=True)
    for number in range(options.rollouts):
        found["rollouts"].append(rollout(options, decoder, number))
    for rows in options.rows:
        found["steady"][rows] = steady(options, decoder, rows)
    if options.device == "cuda":
        print(f"memory: {torch.cuda.max_memory_reserved() / 1e9:.1f} GB reserved at most")
    return found


def leave_out(names: list[str]) -> None:
    from dapo.rollout.native.paged import build, runner

    settings: dict[str, tuple[Any, str, Any]] = {
        "joined": (build, "join_products", lambda model: None),
        "ends": (build, "COMPILE_ENDS", False),
        "ahead": (runner, "LONG_STRETCH", 10**9),
    }
    for module, name, value in map(settings.__getitem__, names):
        setattr(module, name, value)


def make_decoder(options: argparse.Namespace, model: Any) -> Any:
    from dapo.rollout.native.paged import build

    longest = max(p for p, _ in drawn_lengths(options.prompts)) + options.limit
    longest = max(longest, options.context + options.stretch * (options.stretches + 6) // 2)
    rows = max([options.concurrent, *options.rows])
    build.STRETCH = options.stretch
    return build.paged_decoder(model, [], max_sequence_tokens=longest, max_concurrent_samples=rows)


def rollout(options: argparse.Namespace, decoder: Any, number: int) -> float:
    """Tokens a second. All samples of a prompt have one length."""
    lengths = drawn_lengths(options.prompts)
    prompts = random_prompts((n for n, _ in lengths), SHAPES[options.shape].vocab_size)
    start, tokens = mark(wait=True), 0
    submit(decoder, prompts, [min(n, options.limit) for _, n in lengths], options.samples, number)
    while decoder.busy:
        tokens += sum(sample.length for _, sample in decoder.step())
    seconds = mark().since(start)["seconds"]
    print(f"rollout {number + 1}: {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s", flush=True)
    return tokens / seconds


def submit(decoder: Any, prompts: list[list[int]], limits: list[int], samples: int, seed: int) -> None:
    from dapo.rollout.engine import Request, Sampling
    from dapo.rollout.seeds import sample_seed

    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        seeds = tuple(sample_seed(seed, i, 0, k) for k in range(samples))
        decoder.submit(0, Request(i, tuple(prompt), seeds, Sampling(1.0, limit)))


def steady(options: argparse.Namespace, decoder: Any, rows: int) -> dict[str, float]:
    """Medians of a step in milliseconds."""
    shape, runner, run = SHAPES[options.shape], decoder._runner, decoder._runner.run
    steps = options.stretch
    before = 2 * steps + steps * options.stretches // 2
    prompts = random_prompts([options.context - before] * rows, shape.vocab_size)
    submit(decoder, prompts, [2 * before + steps] * rows, samples=1, seed=0)
    spans: list[tuple[Any, Any, int]] = []

    def timed(count: int, steps: int, *more: Any) -> None:
        if options.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        else:
            begin = end = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 0.0)
        begin.record()
        run(count, steps, *more)
        end.record()
        runner._ahead = []  # nothing is captured in the time that is measured
        spans.append((begin, end, steps))

    runner.run = timed
    moments = []
    for _ in range(2 + options.stretches):
        decoder.step()
        moments.append(mark(wait=True).clock)
    runner.run = run
    assert len(decoder._rows) == rows and {count for *_, count in spans} == {steps}, "all rows are decoded all the time"
    decoder.reset()
    whole = median((b - a) * 1000 / steps for a, b in pairwise(moments[1:]))
    device = median(begin.elapsed_time(end) / steps for begin, end, _ in spans[2:])
    share = step_cost(shape, rows, options.context).bytes / options.copy / whole * 1000
    print(
        f"{rows:5d} rows at {options.context}: {device:.3f} ms a step (device), {whole:.3f} ms (whole), "
        f"{rows / whole * 1000:,.0f} tokens/s, {share:.0%} of the byte limit",
        flush=True,
    )
    return {"device": device, "whole": whole}


if __name__ == "__main__":
    main()
