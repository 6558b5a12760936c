"""Steady decoding at points, ``ROWSxCONTEXT``, all in one process for each side (``rollout.py --points``).

A point is measured by two rollouts of the same prompts, of which one is ``--limit`` decode steps longer: the difference
holds these steps. Every row has a prompt of its own, of random tokens; contexts are those of the point on average.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from runner import Outcome, Side
from work import Limits, Rollout, Shape, random_prompts, step_cost

LEAD = 32
"""Tokens before the measured ones: the last prompt has been read when the first row ends."""
MARKS = ("imported", "loaded", "ready", "first token", "first batch")
"""What a side says while it starts; ready: the engine exists, first batch: all rows have decoded."""
SHARES = (
    ("share_of_bytes", "of the measured copy rate", ".0%", 1),
    ("share_of_peak_bytes", "of the maker's memory rate", ".0%", 1),
    ("share_of_operations", "of the measured matrix rate", ".0%", 1),
    ("share_of_peak_operations", "of the maker's matrix rate", ".0%", 1),
)
ROWS = (
    ("seconds_to", "since the start, s: ", ".1f", 1),
    ("reading", f"prompts and {LEAD} tokens, s: ", ".2f", 1),
    ("milliseconds", "ms/step: ", ".2f", 1),
    ("rate", "tokens/s: ", ",.0f", 1),
    *((key, f"{label}: ", form, unit) for key, label, form, unit in SHARES),
    ("memory", "memory, GB: ", ".1f", 1e9),
)


class Point(NamedTuple):
    name: str
    rows: int
    context: int


def point(text: str) -> Point:
    """``ROWSxCONTEXT``; k: 1024."""
    rows, _, context = text.partition("x")
    tokens = context.removesuffix("k")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text}: expected ROWSxCONTEXT, such as 256x1k or 64x480")
    return Point(text, int(rows), int(tokens) * (1024 if context.endswith("k") else 1))


def works(points: Sequence[Point], steps: int, vocabulary: int, make: Callable[..., Rollout]) -> list[Rollout]:
    """For each point the short rollout and the long one."""
    found = []
    for _, rows, context in points:
        prompts = random_prompts([context - LEAD - steps // 2] * rows, vocabulary)
        found += [make(prompts, [tokens] * rows, samples=1, concurrent=rows) for tokens in (LEAD, LEAD + steps)]
    return found


def engine_arguments(works: Sequence[Rollout]) -> dict[str, Any]:
    """vLLM's engine for all points; prompts are read each time, and only graphs that are used are captured."""
    rows = sorted({len(work.prompts) for work in works})
    sizes = {"max_num_seqs": rows[-1], "max_model_len": max(work.longest for work in works)}
    return sizes | {"enable_prefix_caching": False, "compilation_config": {"cudagraph_capture_sizes": rows}}


def figures(points: Sequence[Point], side: Outcome, works: Sequence[Rollout], card: Limits | None) -> Side:
    """Each figure of a side by the names of the points that were measured. ``speed``, of all points together, is None
    where one is missing. Of repeats the shortest count: whatever came in between made the others longer."""
    found: dict[str, Any] = {key: {} for key in ("rate", "milliseconds", "reading")}
    marks = {mark: side.seconds_to(mark) for mark in MARKS}
    shape, steps = Shape.read(works[0].model), works[1].longest - works[0].longest
    for number, (name, rows, context) in enumerate(points):
        short, long = ([one for one in side.of("rollout") if one["work"] == 2 * number + i] for i in range(2))
        reading, whole = (min((one["seconds"] for one in of), default=0.0) for of in (short, long))
        if not short or whole <= reading or {n for one in long for _, n in one["lengths"]} != {LEAD + steps}:
            continue
        marks[name] = long[0]["time"] - side.spawned
        rate = rows * steps / (whole - reading)
        one = {"rate": rate, "milliseconds": 1000 * rows / rate, "reading": reading}
        for key, value in (one | step_cost(shape, rows, context).shares(card, rows / rate)).items():
            found.setdefault(key, {})[name] = value
    speed = None
    if len(found["rate"]) == len(points):
        speed = 1000 * sum(point.rows for point in points) / sum(found["milliseconds"].values())
    return side.facts() | found | {"speed": speed, "seconds_to": marks | {"end": side.seconds_to("done")}}


def conclude(points: Sequence[Point], sides: Sequence[Side]) -> dict[str, Any]:
    """The ratio to vLLM at each point that both have measured, and what was not measured."""
    names, (ours, *peers) = [point.name for point in points], sides
    void = [f"{side['name']} has no figure at {name}" for name in names for side in sides if name not in side["rate"]]
    void += [f"no setting of vLLM was run at {name}" for name in names if not peers]
    both = [(name, peer) for name in names for peer in peers if name in ours["rate"] and name in peer["rate"]]
    ratios = {f"{name}, ours / {peer['name']}": ours["rate"][name] / peer["rate"][name] for name, peer in both}
    return {"sides": list(sides), "ratios": ratios, "void": void}
