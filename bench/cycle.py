"""Whole DAPO cycles, ours beside TRL's GRPOTrainer: seconds, and where they go. On a GPU, or on a CPU.

usage: python bench/cycle.py ours    --out FOLDER --model FOLDER --rows FILE
       python bench/cycle.py search  --out FOLDER --model FOLDER --rows FILE --peer-path SITE --search SETTING ...
       python bench/cycle.py compare --out FOLDER --model FOLDER --rows FILE --peer-path SITE [--best SETTING]
       python bench/cycle.py compare --out FOLDER --device cpu [--model FOLDER] [--best SETTING]

A cycle: ``--prompts`` x ``--samples`` responses of up to ``--limit`` tokens at T = 1 with log-probs, their rewards,
``--updates`` optimizer steps on all of them (DAPO's loss, Clip-Higher, AdamW, float32 masters), and the new weights in
the engine. Dynamic sampling is off, so that both sides train on every sample. TRL computes the log-probabilities of the
policy before the updates (``prepare``), where ours takes the engine's; on a GPU ``compare`` has a second side of ours
that computes them too, ``algorithm.proximal=recompute``. A cycle lasts from the end of the one before to its own end;
its phases add up to that. Each side runs in a process of its own; ``--warmup`` cycles are left out, the median of
``--cycles`` (an odd number) counts. Settings of TRL: see ``peers/trl.py`` (PARTS).

**On a GPU** TRL has colocated vLLM, and both sides our math reward, in four processes, the overlong punishment and
bfloat16 compute. A comparison is void unless TRL is at least as fast as is known of it: 97 s a cycle at 128 x 16 and 4
updates with the 0.5B model on an NVIDIA H100 80GB (TRL 1.16, vLLM 0.25.1).

**On a CPU** TRL has its ordinary generation, the model is the demo's (0.4 M parameters, random weights, float32, one
thread) or that of a folder (bfloat16, which is TRL's autocast, all cores), and the verdict is a hash of the response.
Every response has ``--limit`` tokens on both sides, so the ratio is of the machinery alone. Sides take turns
``--rounds`` times, each round with other prompts; the ratio is the median over rounds, also in processor time, which
other programs on the machine disturb less.

A comparison is void, too, if a side failed, or if samples, updates or tokens differ (of responses that end by
themselves: by more than a tenth).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import runner
from peers import settings
from peers.trl import PARTS
from runner import Outcome, Side, assigned, odd, positive, run_side
from work import SHAPES, Shape, Task

KNOWN_SECONDS = 97.0
"""A cycle of TRL 1.16 with vLLM 0.25.1 on an NVIDIA H100 80GB: 0.5B model, 128 x 16, 4 updates, up to 768 tokens."""
DEFAULTS = {
    "cuda": {"prompts": 128, "samples": 16, "limit": 768, "cycles": 5, "peer_cycles": 1, "rounds": 1, "threads": 0},
    "cpu": {"prompts": 8, "samples": 8, "limit": 28, "cycles": 3, "rounds": 3, "threads": os.cpu_count() or 1},
    "demo": {"prompts": 16, "samples": 8, "limit": 28, "cycles": 11, "rounds": 3, "threads": 1},
}
"""By device, and on a CPU without ``--model``."""
ROWS = (
    ("phases", "seconds, ", ",.3f", 1),
    ("inside", "  of these: ", ",.3f", 1),
    ("seconds", "seconds of the cycle", ",.3f", 1),
    ("each", "  of ", ",.3f", 1),
    ("cpu_seconds", "processor time", ",.3f", 1),
    ("generated", "tokens sampled", ",.0f", 1),
    ("trained", "tokens in the loss", ",.0f", 1),
    ("updates", "updates", "d", 1),
    ("memory", "memory, GB: ", ",.1f", 1e9),
)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    return runner.run_command(parse(arguments), COMMANDS)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with those filled in that depend on device and model."""
    sizes = {"samples": None, "limit": None, "concurrent": 1024, "micro_tokens": 32768, "set": []}
    parser = runner.make_parser(__doc__, COMMANDS, PARTS, model=None, **sizes)
    add = parser.add_argument
    add("--rows", type=Path, help="JSON Lines file with prompt and answer")
    add("--prompts", type=positive, help="128; on a CPU 16 for the demo model, else 8")
    add("--updates", type=positive, default=4)
    add("--threads", type=positive, help="on a CPU: 1 for the demo model, else all cores")
    add("--warmup", type=positive, default=1, help="cycles that do not count")
    add("--cycles", type=odd, help="that count: 5 of ours; on a CPU 11 for the demo model, else 3")
    add("--peer-cycles", type=odd, help="of TRL's that count: 1, on a CPU as many as of ours")
    add("--rounds", type=odd, help="times that the sides take turns: 1, on a CPU 3")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    kind = "demo" if not cuda and options.model is None else options.device
    for name, value in DEFAULTS[kind].items():
        setattr(options, name, getattr(options, name) or value)
    options.peer_cycles = options.peer_cycles or options.cycles
    if options.prompts % options.updates:
        parser.error(f"--prompts {options.prompts} cannot be cut into {options.updates} updates of whole groups")
    if cuda and None in (options.model, options.rows):
        parser.error("on a GPU it needs --model and --rows")
    if not cuda and options.rows is not None:
        parser.error("--rows: for a GPU only; on a CPU the verdict on a made-up row is a hash of the response")
    for place in filter(None, (options.model, options.rows)):
        if not place.exists():
            parser.error(f"{place}: does not exist")
    return options


def task_of(options: argparse.Namespace) -> Task:
    names = ("prompts", "samples", "updates", "limit", "device", "threads", "concurrent", "micro_tokens", "warmup")
    sizes: dict[str, Any] = {name: getattr(options, name) for name in (*names, "cycles")} | {"shuffle": False}
    model = str(options.model or "demo")
    if options.device == "cuda":
        return Task(model, str(options.rows), **sizes, overlong=max(1, options.limit // 6))
    sizes |= {"longest_prompt": 0, "overlong": 0, "weight_decay": 0.0, "concurrent": options.prompts * options.samples}
    dtype = "bfloat16" if options.model else "float32"
    return Task(model, natural=False, dtype=dtype, **sizes)


# --- the commands -----------------------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> dict[str, Any]:
    return shown(options, {"work": asdict(task_of(options)), "sides": [run_cycles(options, "ours")]})


def search(options: argparse.Namespace) -> dict[str, Any]:
    task = task_of(options)
    found = settings.search(options, settings.TRL, title(task), lambda of: run_cycles(options, f"trl-{of}", setting=of))
    return shown(options, {"work": asdict(task)} | found)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Ours, on a GPU also with the old log-probs recomputed, and TRL at its best."""
    task = task_of(options)
    best = settings.best(options, settings.TRL, title(task))
    sides: dict[str, Any] = {"ours": partial(run_cycles, options, "ours")}
    if options.device == "cuda":
        keys = {"algorithm.proximal": "recompute"}
        sides["ours, old log-probs recomputed"] = partial(run_cycles, options, "ours-recompute", keys=keys)
    if best:
        sides["TRL"] = partial(run_cycles, options, f"trl-{best}", setting=best)
    rounds = runner.alternate(sides, options.rounds)
    return shown(options, runner.conclude(asdict(task), rounds, void_reasons(task, rounds)))


def run_cycles(
    options: argparse.Namespace, name: str, number: int = 0, setting: str | None = None, keys: Any = None
) -> Side:
    """A process that makes the cycles: ours, with ``keys`` beside those of ``--set``, or TRL's in a setting."""
    cycles = options.peer_cycles if setting else options.cycles
    task = replace(task_of(options), seed=number + 1, cycles=cycles)
    job: dict[str, Any] = {"do": "ours_training:cycles", "set": assigned(options.set) | (keys or {})}
    if setting:
        job = {"do": "peers.trl_jobs:cycles", "setting": setting}
    threads = {name: str(task.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if task.threads}
    outcome = run_side(options, f"{name}-{number + 1}", job | {"task": asdict(task), "environment": threads})
    return runner.told(summary(outcome, task) | ({"setting": setting} if setting else {}), ROWS)


# --- what came of it --------------------------------------------------------------------------------------------------


def summary(side: Outcome, task: Task) -> Side:
    """The median of the cycles that count, with its phases, so that they add up to it."""
    cycles = side.of("cycle")
    counted = sorted((cycle for cycle in cycles if cycle["counts"]), key=lambda cycle: cycle["seconds"])
    found = side.facts() | {"cycles": cycles, "seconds": None}
    if task.device == "cuda":  # few, and all that there is of a side that is ended
        found["each"] = {f"cycle {number}": cycle["seconds"] for number, cycle in enumerate(cycles, 1)}
    if len(counted) == task.cycles:
        chosen = counted[len(counted) // 2]
        found |= {name: chosen[name] for name in ("seconds", "phases", "inside", "updates")}
        found |= {name: median(cycle[name] for cycle in counted) for name in ("generated", "trained")}
        found["speed"] = 1 / chosen["seconds"]
        if task.device == "cpu":
            found["cpu_seconds"] = chosen["cpu_seconds"]
    return found


def void_reasons(task: Task, rounds: dict[str, list[Side]]) -> list[str]:
    """Why a comparison says nothing; none: it holds."""
    reasons = runner.failed(rounds) + ([] if "TRL" in rounds else ["TRL was not measured"])
    measured = [side for of in rounds.values() for side in of if side["speed"]]
    theirs = [side["seconds"] for side in rounds.get("TRL", []) if side["speed"]]
    if theirs and _is_known(task) and min(theirs) > KNOWN_SECONDS:
        reasons.append(f"TRL took {min(theirs):.0f} s, and {KNOWN_SECONDS:.0f} s are known of it on an H100 80GB")
    for name in ("updates", "generated", "trained"):
        found = [side[name] for side in measured]
        room = 1.1 if task.natural and name != "updates" else 1.0
        if found and max(found) > room * min(found):
            what = {"updates": "updated", "generated": "sampled", "trained": "trained on"}[name]
            unit = "times" if name == "updates" else "tokens"
            reasons.append(f"the sides {what} {min(found):,.0f} to {max(found):,.0f} {unit} a cycle")
    return reasons


def _is_known(task: Task) -> bool:
    """Whether it is the work of which TRL's time is known."""
    sizes = (task.device, task.prompts, task.samples, task.updates, task.limit)
    return sizes == ("cuda", 128, 16, 4, 768) and Shape.read(task.model) == SHAPES["0.5b"]


def title(task: Task) -> str:
    """The work in short, by which settings are kept."""
    model = task.model if task.model == "demo" else Shape.read(task.model).name
    return f"{model}, {task.prompts} x {task.samples}, up to {task.limit} tokens, {task.updates} updates"


def shown(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Measure the card, and print the table."""
    limits = runner.measure_card(options)
    found["limits"] = asdict(limits) if limits else None
    task = task_of(options)
    runner.show(f"one cycle of {title(task)}; {task.dtype}, {task.device}", found, ROWS)
    return found


COMMANDS = {"ours": ours, "search": search, "compare": compare}

if __name__ == "__main__":
    runner.script(main)
