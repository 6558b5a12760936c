"""Rewards a second through their worker processes, with all limits on, beside the least that the work takes.

usage: python bench/rewards.py math --gsm8k FILE --math FILE [--pairs 2000] [--workers 2]
       python bench/rewards.py code [--seconds 10] [--workers 2] [--file FILE]

``math``: ``MathScorer`` beside plain Math-Verify in one process, which is ``verify(parse(reference), parse(response))``
with its default settings and time limits. The files are JSON Lines (plain or gzip) with "answer" and "solution". Each
pair of response and reference is scored once and all pairs are distinct, so that no cache flatters. Responses are whole
solutions; their last box holds

- ``same``: the reference as it is written there: texts are equal, the cheapest case for us,
- ``other``: the reference of another row, which is nearly always wrong: both have to be read,
- ``sum``: the reference plus 0, which is right where it is an expression: both have to be evaluated.

``code``: programs with three asserts each, the MBPP manner: one bubblewrap and one Python start for each. Bare starts
(`bwrap ... python -ISE -c pass`, nothing else) are measured before and after, as many at a time: the difference is the
price of the tests. With ``--file``, reference solutions of a file with tests, entry_point and solution.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from dapo.config import CodeReward, MathReward
from dapo.records import Prompt
from dapo.reward.code import sandbox
from dapo.reward.code.scorer import CodeScorer
from dapo.reward.math.extract import last_box
from dapo.reward.math.scorer import MathScorer

IN_FLIGHT = 512
"""Responses that wait for their math score at the same time, as in a rollout."""
Pair = tuple[str, str]
"""Reference and response."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("math").add_argument
    add("--gsm8k", type=Path, required=True)
    add("--math", type=Path, required=True)
    add("--pairs", type=int, default=2000)
    add("--workers", type=int, default=2)
    add = commands.add_parser("code").add_argument
    add("--seconds", type=float, default=10.0, help="length of each measurement")
    add("--workers", type=int, default=2)
    add("--file", type=Path, help="JSON Lines with tests, entry_point and solution")
    options = parser.parse_args(arguments)
    asyncio.run({"math": math, "code": code}[options.command](options))


# --- math -------------------------------------------------------------------------------------------------------------


async def math(options: argparse.Namespace) -> None:
    print(f"{options.pairs} distinct pairs each, {options.workers} workers; pairs a second (right answers)")
    for name, path in (("GSM8K", options.gsm8k), ("MATH", options.math)):
        for kind, pairs in pairs_of(path, options.pairs).items():
            ours, right = await time_scorer(pairs, options.workers)
            plain, plain_right = time_plain(pairs)
            both = f"MathScorer {ours:6.0f} ({right:4})   Math-Verify {plain:6.0f} ({plain_right:4})"
            print(f"{name:6} {kind:6} {both}   ratio {ours / plain:.2f}", flush=True)


def pairs_of(path: Path, count: int) -> dict[str, list[Pair]]:
    """Pairs of each kind, of a seeded choice of rows."""
    content = path.read_bytes()
    rows = [json.loads(line) for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()]
    rows = random.Random(0).sample(rows, min(count, len(rows)))
    golds = [row["answer"] for row in rows]
    answers = {"same": golds, "other": golds[1:] + golds[:1], "sum": [f"0+{gold}" for gold in golds]}
    return {
        kind: [(row["answer"], with_answer(row["solution"], text)) for row, text in zip(rows, texts, strict=True)]
        for kind, texts in answers.items()
    }


def with_answer(solution: str, answer: str) -> str:
    """The solution with ``answer`` in its last box; GSM8K's solutions have none and get one."""
    present = last_box(solution)
    if present is None:
        return f"{solution}\nThe answer is \\boxed{{{answer}}}."
    before, _, after = solution.rpartition(present)
    return before + answer + after


async def time_scorer(pairs: list[Pair], workers: int) -> tuple[float, int]:
    """Pairs a second through the event loop, the workers' start not counted, and how many are right."""
    scorer = MathScorer(MathReward(workers=workers))
    free = asyncio.Semaphore(IN_FLIGHT)

    async def score(gold: str, response: str) -> bool:
        async with free:
            reward = await scorer.score(Prompt(0, "", (), gold), response)
        if reward.error is not None:
            print(f"a score failed: {reward.error}: {gold!r}, {response[-80:]!r}")
        return bool(reward.correct)

    await scorer.start()
    try:
        started = time.perf_counter()
        verdicts = await asyncio.gather(*(score(*pair) for pair in pairs))
        return len(pairs) / (time.perf_counter() - started), sum(verdicts)
    finally:
        await scorer.close()


def time_plain(pairs: list[Pair]) -> tuple[float, int]:
    started = time.perf_counter()
    verdicts = [bool(verify(parse(f"${gold}$"), parse(response))) for gold, response in pairs]
    return len(pairs) / (time.perf_counter() - started), sum(verdicts)


# --- code -------------------------------------------------------------------------------------------------------------


async def code(options: argparse.Namespace) -> None:
    """Measure, print; every score must be right."""
    python = str(Path(sys.executable).resolve())
    command = [*sandbox._arguments(python, 2**26, False, ()), python, "-I", "-S", "-E", "-c", "pass"]
    scorer, items = CodeScorer(CodeReward(kind="code", workers=options.workers)), responses(options.file)

    async def bare_start() -> None:
        await asyncio.to_thread(subprocess.run, command, env={}, check=True)

    async def score() -> None:
        reward = await scorer.score(*next(items))
        assert reward.correct, reward

    before = await rate(bare_start, options.workers, options.seconds / 2)
    await scorer.start()
    scores = await rate(score, 2 * options.workers, options.seconds)
    await scorer.close()
    after = await rate(bare_start, options.workers, options.seconds / 2)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"scores {scores:.0f}/s, bare starts {before:.0f}/s and {after:.0f}/s, load {load}, {os.cpu_count()} cores")


def responses(file: Path | None) -> Iterator[tuple[Prompt, str]]:
    """Rows and right responses to them, without end."""
    rows: list[dict[str, Any]] = []
    if file is None:
        for k in range(1, 101):
            tests = [f"assert add_{k}({x}, {x + 1}) == {2 * x + 1 + k}" for x in range(3)]
            solution = f"def add_{k}(a, b):\n    return a + b + {k}"
            rows.append({"tests": tests, "entry_point": f"add_{k}", "solution": solution})
    else:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for k, row in cycle(enumerate(rows)):
        yield Prompt(k, "", (), None, row), f"It is this.\n```python\n{row['solution']}\n```\n"


async def rate(action: Callable[[], Awaitable[None]], at_once: int, seconds: float) -> float:
    """How often a second something is done, so many at a time."""
    start, done = time.perf_counter(), 0

    async def keep_busy() -> None:
        nonlocal done
        while time.perf_counter() < start + seconds:
            await action()
            done += 1

    await asyncio.gather(*(keep_busy() for _ in range(at_once)))
    return done / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
