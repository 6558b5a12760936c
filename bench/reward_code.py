"""Throughput of the code reward: responses a second, through the worker processes, sandbox and limits on.

    python bench/reward_code.py [--seconds 10] [--workers 2] [--file shared/data/code/train/mbpp_train.jsonl]

The responses are programs with three asserts each, the MBPP manner: one bubblewrap and one Python start for each. The
same machine's bare starts (`bwrap ... python -ISE -c pass`, nothing else) are measured before and after, as many at a
time: what is left between the two numbers is the price of the tests. With ``--file``, reference solutions of a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from dapo.config import CodeReward
from dapo.records import Prompt
from dapo.reward.code.sandbox import Sandbox, SandboxLimits
from dapo.reward.code.scorer import CodeScorer


def responses(file: str | None) -> Iterator[tuple[Prompt, str]]:
    """Rows and right responses to them, without end."""
    if file is None:
        for k in cycle(range(1, 101)):
            name, tests = f"add_{k}", [f"assert add_{k}({x}, {x + 1}) == {2 * x + 1 + k}" for x in range(3)]
            prompt = Prompt(k, "", (), None, {"tests": tests, "entry_point": name})
            yield prompt, f"It is a sum.\n```python\ndef {name}(a, b):\n    return a + b + {k}\n```\n"
    with Path(str(file)).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for k, row in cycle(enumerate(rows)):
        yield Prompt(k, "", (), None, row), f"```python\n{row['solution']}\n```\n"


async def rate(workers: int, seconds: float, file: str | None) -> float:
    """Scores a second; every one of them must be right."""
    scorer = CodeScorer(CodeReward(kind="code", workers=workers))
    await scorer.start()
    items = responses(file)
    end, done = time.perf_counter() + seconds, 0

    async def keep_busy() -> None:
        nonlocal done
        while time.perf_counter() < end:
            reward = await scorer.score(*next(items))
            assert reward.correct, reward
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(keep_busy() for _ in range(2 * workers)))
    result = done / (time.perf_counter() - start)
    await scorer.close()
    return result


async def bare_starts(workers: int, seconds: float) -> float:
    """Starts a second of an empty sandbox with an interpreter in it."""
    python = str(Path(sys.executable).resolve())
    command = [*Sandbox(SandboxLimits(2**30, 32, 2**26)).command(), python, "-I", "-S", "-E", "-c", "pass"]
    end, done = time.perf_counter() + seconds, 0

    async def keep_busy() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await asyncio.to_thread(subprocess.run, command, env={}, check=True)
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(keep_busy() for _ in range(workers)))
    return done / (time.perf_counter() - start)


async def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--file", help="JSON Lines with tests, entry_point and solution")
    options = parser.parse_args()
    before = await bare_starts(options.workers, options.seconds / 2)
    scores = await rate(options.workers, options.seconds, options.file)
    after = await bare_starts(options.workers, options.seconds / 2)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"scores {scores:.0f}/s, bare starts {before:.0f}/s and {after:.0f}/s, load {load}, {os.cpu_count()} cores")


if __name__ == "__main__":
    asyncio.run(main())
