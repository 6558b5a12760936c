"""Samples trained per second, dapo against TRL's GRPOTrainer, on the same CPU in one run.

usage: python bench/cpu_cycle.py [--model demo|FOLDER] [--dtype float32|bfloat16] [--threads 1] [--repetitions 3]

A cycle is a rollout of ``prompts x samples`` responses and ``updates`` optimizer steps on them. Both sides run the same
prompts, numbers of samples, updates and sampled tokens; dynamic sampling is off in both. Each repetition runs both
sides, each in a process of its own, in alternating order; the first cycle of a process is not counted. The last line is
the median ratio of samples per second, ours over theirs; the line before is that of processor time, which other
programs on the machine disturb less. See ``bench/sides.py`` for the settings.

Response length is fixed (``--tokens``): TRL is told ``min_new_tokens``, our model has no stop token. So both sample and
train on exactly the same number of tokens, and the ratio is of the machinery alone. With ``--natural`` the models stop
when they like; counts of tokens are then equal on average only, and shown.

bfloat16 on our side is bfloat16 rollout and matrix products over float32 master weights. ``--peer-dtype`` is TRL's:
``autocast-bfloat16`` (float32 weights under autocast, the like of ours), ``pure-bfloat16`` (weights, gradients and Adam
in bfloat16, cheaper, though small updates are rounded away) or ``float32``; by default the like of ours. Continuous
batching in TRL (``--paged``) is off: on a CPU it was many times slower than its ordinary generation (demo model: 23.6 s
against 0.87 s for the same rollouts).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sides import Timing, Work  # noqa: E402  (a module beside this one)

PHASES = ("rollout", "prepare", "update", "sync", "rest")


def main(arguments: list[str] | None = None) -> float:
    """Run, print and return the ratio."""
    options = parse(arguments)
    timings: dict[str, list[Timing]] = {"ours": [], "theirs": []}
    for repetition in range(options.repetitions):
        order = ["ours", "theirs"] if repetition % 2 == 0 else ["theirs", "ours"]
        for side in order:
            timing = run_side(side, work_of(options, side, seed=repetition + 1))
            timings[side].append(timing)
            rate = timing.samples / timing.seconds
            print(f"repetition {repetition + 1}, {side}: {rate:.1f} samples/s", flush=True)
    show(timings, options)
    same_work(timings, options.natural)
    wall, cpu = (_median_ratio(timings, name) for name in ("seconds", "cpu_seconds"))
    print(f"in processor time: {cpu:.2f}x")
    print(f"{wall:.1f}x")
    return wall


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with sizes that depend on the model filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo (0.4 M parameters, random weights) or a folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="ours; float32 for the demo, else bfloat16")
    parser.add_argument("--peer-dtype", choices=["float32", "autocast-bfloat16", "pure-bfloat16"], help="TRL's")
    parser.add_argument("--threads", type=int, help="of each side; 1 for the demo model, else all cores")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cycles", type=int, help="measured cycles of a repetition; 10 for the demo model, else 2")
    parser.add_argument("--prompts", type=int, help="of a rollout; 16 for the demo model, else 8")
    parser.add_argument("--samples", type=int, default=8, help="for each prompt")
    parser.add_argument("--updates", type=int, default=4, help="of a rollout")
    parser.add_argument("--tokens", type=int, default=28, help="response length")
    parser.add_argument("--natural", action="store_true", help="responses end at their stop token")
    parser.add_argument("--paged", action="store_true", help="TRL: continuous batching")
    options = parser.parse_args(arguments)
    demo = options.model == "demo"
    options.dtype = options.dtype or ("float32" if demo else "bfloat16")
    options.peer_dtype = options.peer_dtype or ("float32" if options.dtype == "float32" else "autocast-bfloat16")
    options.threads = options.threads or (1 if demo else os.cpu_count() or 1)
    options.cycles = options.cycles or (10 if demo else 2)
    options.prompts = options.prompts or (16 if demo else 8)
    if options.prompts % options.updates:
        parser.error(f"--prompts {options.prompts} cannot be cut into {options.updates} updates of whole groups")
    return options


def work_of(options: argparse.Namespace, side: str, seed: int) -> Work:
    """One repetition of one side."""
    return Work(
        model=options.model,
        dtype=options.dtype if side == "ours" else options.peer_dtype,
        threads=options.threads,
        prompts=options.prompts,
        samples=options.samples,
        updates=options.updates,
        tokens=options.tokens,
        natural=options.natural,
        paged=options.paged,
        cycles=options.cycles,
        seed=seed,
    )


def run_side(side: str, work: Work) -> Timing:
    """A repetition, in a process of its own.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    threads = str(work.threads)
    env = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "timing.json"
        command = [sys.executable, str(HERE / "sides.py"), side, json.dumps(asdict(work)), str(out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"cpu_cycle: {side} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return Timing(**json.loads(out.read_text(encoding="utf-8")))


def same_work(timings: dict[str, list[Timing]], natural: bool) -> None:
    """
    Raises:
        SystemExit: the sides did not do the same, so a ratio would say nothing.
    """
    names = ("samples", "updates") if natural else ("samples", "updates", "generated", "trained")
    for ours, theirs in zip(timings["ours"], timings["theirs"], strict=True):
        for name in names:
            if getattr(ours, name) != getattr(theirs, name):
                raise SystemExit(f"cpu_cycle: {name} differ: {getattr(ours, name)} and {getattr(theirs, name)}")


def _median_ratio(timings: dict[str, list[Timing]], name: str) -> float:
    pairs = zip(timings["ours"], timings["theirs"], strict=True)
    return median(getattr(theirs, name) / getattr(ours, name) for ours, theirs in pairs)


def show(timings: dict[str, list[Timing]], options: argparse.Namespace) -> None:
    """Seconds of a cycle by phase, median over repetitions."""
    table = Table(
        title=f"{options.model}: {options.prompts} x {options.samples} samples of {options.tokens} tokens, "
        f"{options.updates} updates, {options.threads} thread(s); ours {options.dtype}, TRL {options.peer_dtype}"
    )
    table.add_column("seconds per cycle")
    for side in timings:
        table.add_column(side, justify="right")

    def row(name: str, value: Any) -> None:
        table.add_row(name, *(value(found) for found in timings.values()))

    for phase in PHASES:
        row(phase, lambda found, phase=phase: f"{median(t.phases[phase] for t in found) / options.cycles:.3f}")
    row("all", lambda found: f"{median(t.seconds for t in found) / options.cycles:.3f}")
    row("processor time", lambda found: f"{median(t.cpu_seconds for t in found) / options.cycles:.3f}")
    row("samples per second", lambda found: f"{median(t.samples / t.seconds for t in found):.1f}")
    row("tokens sampled / trained", lambda found: f"{found[0].generated} / {found[0].trained}")
    row("updates", lambda found: str(found[0].updates))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
