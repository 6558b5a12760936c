"""Math rewards a second: ``MathScorer`` (workers, deadlines, memory limits) beside plain Math-Verify in one process.

usage: python bench/reward_math.py [--gsm8k FILE] [--math FILE] [--pairs 2000] [--workers 2]

The files are JSON Lines (plain or gzip) with "answer" and "solution". Each pair of response and reference is scored
once and all pairs are distinct, so that no cache flatters. Responses are whole solutions; their last box holds

- ``same``: the reference as it is written there: texts are equal, the cheapest case for us,
- ``other``: the reference of another row, which is nearly always wrong: both have to be read,
- ``sum``: the reference plus 0, which is right where it is an expression: both have to be evaluated.

Plain Math-Verify is ``verify(parse(reference), parse(response))`` with its default settings and time limits.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import time
from pathlib import Path

from math_verify import parse, verify

from dapo.config import MathReward
from dapo.records import Prompt
from dapo.reward.math.extract import last_box
from dapo.reward.math.scorer import MathScorer

DATA = Path(__file__).parents[2] / "shared" / "data" / "math" / "train"
IN_FLIGHT = 512
"""Responses that wait for their score at the same time, as in a rollout."""

Pair = tuple[str, str]
"""Reference and response."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=DATA / "gsm8k_train.jsonl.gz")
    parser.add_argument("--math", type=Path, default=DATA / "math_train.jsonl.gz")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    print(f"{args.pairs} distinct pairs each, {args.workers} workers; pairs a second (right answers)")
    for name, path in (("GSM8K", args.gsm8k), ("MATH", args.math)):
        rows = read_rows(path, args.pairs)
        for kind, pairs in (("same", same(rows)), ("other", other(rows)), ("sum", plus_zero(rows))):
            ours, right = asyncio.run(time_scorer(pairs, args.workers))
            plain, plain_right = time_plain(pairs)
            print(
                f"{name:6} {kind:6} MathScorer {ours:6.0f} ({right:4})   Math-Verify {plain:6.0f} ({plain_right:4})"
                f"   ratio {ours / plain:.2f}",
                flush=True,
            )


def read_rows(path: Path, count: int) -> list[Pair]:
    """Reference and solution of a seeded choice of rows; the solution's last box is a "{}" to fill in."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["answer"], row["solution"]) for row in random.Random(0).sample(rows, min(count, len(rows)))]


def same(rows: list[Pair]) -> list[Pair]:
    """Each solution with its own answer."""
    return [(gold, with_answer(solution, gold)) for gold, solution in rows]


def other(rows: list[Pair]) -> list[Pair]:
    """Each solution with the answer of the next row."""
    return [
        (gold, with_answer(solution, answer))
        for (gold, solution), (answer, _) in zip(rows, rows[1:] + rows[:1], strict=True)
    ]


def plus_zero(rows: list[Pair]) -> list[Pair]:
    """Each solution with its own answer, to which 0 is added."""
    return [(gold, with_answer(solution, f"0+{gold}")) for gold, solution in rows]


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
    """The same with Math-Verify alone."""
    started = time.perf_counter()
    verdicts = [bool(verify(parse(f"${gold}$"), parse(response))) for gold, response in pairs]
    return len(pairs) / (time.perf_counter() - started), sum(verdicts)


if __name__ == "__main__":
    main()
