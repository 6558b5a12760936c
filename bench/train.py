"""Training alone on one GPU: tokens a second and the share of the card's measured rate; and memory.

usage: python bench/train.py ours  --out FOLDER             with and without shared prompts
       python bench/train.py sizes --out FOLDER [--size NAME ...]
       (``--device cpu``: the same with a tiny shape and few tokens, in seconds, to see that it runs)

``ours`` makes optimizer updates on one mini-batch of ``--groups`` x ``--samples`` sequences with random weights
(``--shape``) and the lengths of real prompts and responses (``response_lengths.json``): forward, backward, clipping,
AdamW; float32 masters, bfloat16 compute, ``--micro-tokens`` tokens a forward pass. The median of ``--repeats`` (an odd
number) updates counts, after ``--warmup`` ones. Shares are 6 x parameters x tokens / seconds / the rate of an 8192^3
bfloat16 matrix product, as measured in the same process and as the card's maker states it: parameters of the layers
count for every token that is computed (a shared prompt once), those of the head for response tokens, embeddings and
attention not at all. Then the hand-over of the weights to an engine is timed: all of them are looked at (finite?) and
copied into a bfloat16 model; the median of ``--repeats``. What TRL's updates take is measured in ``cycle.py``.

``sizes`` makes one step of a whole run with responses of the full ``--limit``, forward passes as full as they can be,
and prints the most memory that dapo predicts beside what was taken: ``1.5b`` all parameters, ``7b`` (weights in
bfloat16) with what ``--set 7b:KEY=VALUE`` says of adapters.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import median
from typing import Any

import runner
from runner import Outcome, Side, assigned, odd, positive, run_side
from work import SHAPES, Cost, Task

LONGEST_PROMPT = 64
"""Tokens of the made-up prompts of ``sizes``, at most."""
ROWS = (
    ("tokens", "tokens of the sequences", ",d", 1),
    ("computed", "tokens computed", ",d", 1),
    ("response_tokens", "tokens through the head", ",d", 1),
    ("micro_batches", "forward passes", "d", 1),
    ("phases", "seconds, ", ".4f", 1),
    ("seconds", "seconds", ".4f", 1),
    ("speed", "tokens/s, of the sequences", ",.0f", 1),
    ("computed_per_second", "tokens/s, computed", ",.0f", 1),
    ("share_of_operations", "of the measured matrix rate", ".1%", 1),
    ("share_of_peak_operations", "of the maker's matrix rate", ".1%", 1),
    ("hand_over", "hand-over, ms", ".2f", 1e-3),
    ("memory", "memory, GB: ", ".1f", 1e9),
)
MEMORY = (
    ("predicted", "predicted, GB", ".2f", 1e9),
    ("taken", "taken, GB", ".2f", 1e9),
    ("reserved", "reserved, GB", ".2f", 1e9),
    ("ratio", "predicted / taken", ".3f", 1),
    ("seconds", "seconds", ".1f", 1),
)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    return runner.run_command(parse(arguments), COMMANDS)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser(__doc__, COMMANDS, shape="0.5b", samples=None, limit=None, micro_tokens=None, set=[])
    add = parser.add_argument
    add("--groups", type=positive, help="of the mini-batch; 32, or 4 for sizes")
    add("--warmup", type=positive, default=2)
    add("--repeats", type=odd, default=5)
    add("--size", nargs="+", default=["1.5b", "7b"], choices=sorted(SHAPES))
    options = parser.parse_args(arguments)
    whole = options.command == "sizes"
    for name, size in zip(("groups", "samples", "limit"), (4, 8, 4096) if whole else (32, 16, 768), strict=True):
        setattr(options, name, getattr(options, name) or size)
    if options.micro_tokens is None:  # half a group at a time, which fills it but for the prompt
        options.micro_tokens = options.samples // 2 * options.limit + LONGEST_PROMPT if whole else 32768
    if options.device == "cpu":
        options.shape, options.groups, options.samples = "tiny", 2, 4
        options.size, options.limit, options.micro_tokens = ["tiny"], min(options.limit, 48), 600
        options.warmup, options.repeats = 1, 1
    return options


def settings(items: list[str], shape: str) -> dict[str, Any]:
    """Those of ``--set`` that are for a shape."""
    split = [(item.partition(":"), item) for item in items]
    return assigned(
        [rest if head in SHAPES else item for (head, _, rest), item in split if head not in {*SHAPES} - {shape}]
    )


# --- tokens a second --------------------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> dict[str, Any]:
    names = ("device", "groups", "samples", "limit", "micro_tokens", "warmup", "repeats")
    model = SHAPES[options.shape].write(options.out / f"shape-{options.shape}")
    keys = {key.removeprefix("training."): value for key, value in settings(options.set, options.shape).items()}
    job = {"do": "ours_training:update", "model": str(model), "set": keys}
    job |= {name: getattr(options, name) for name in names}
    shared, alone = (
        runner.told(summary(run_side(options, name, job | {"shared": name == "shared"})), ROWS)
        for name in ("shared", "alone")
    )
    found = {"shape": options.shape, "micro_tokens": options.micro_tokens, "sides": [shared, alone]}
    runner.show(f"one update, {options.shape}", found, ROWS)
    if shared["speed"] and alone["speed"]:
        found["fewer_tokens"] = 1 - shared["computed"] / alone["computed"]
        found["less_time"] = 1 - shared["seconds"] / alone["seconds"]
        text = f"{found['fewer_tokens']:.1%} fewer tokens, {found['less_time']:.1%} less time"
        runner.console.print(f"shared prompts: {text}", highlight=False)
    return found


def summary(side: Outcome) -> Side:
    """The median of the updates that count, with its phases."""
    updates = sorted((u for u in side.of("update") if u["counts"]), key=lambda update: update["seconds"])
    work, limits = side.first("work"), side.limits
    hand_overs = [record["seconds"] for record in side.of("hand_over") if record["counts"]]
    found = side.facts() | work | {"updates": side.of("update")}
    found["hand_over"] = median(hand_overs) if hand_overs else None
    if updates and work and limits:
        chosen = updates[len(updates) // 2]
        seconds = chosen["seconds"]
        found |= {name: chosen[name] for name in ("seconds", "phases", "micro_batches")}
        found |= {"speed": work["tokens"] / seconds, "computed_per_second": work["computed"] / seconds}
        found["skipped"] = sum(bool(update["skipped"]) for update in side.of("update"))
        found |= Cost(0, work["operations"]).shares(limits, seconds)
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    found = []
    for shape in options.size:
        model = SHAPES[shape].write(options.out / f"shape-{shape}")
        sizes = {"prompts": options.groups, "samples": options.samples, "limit": options.limit}
        sizes |= {"concurrent": options.groups * options.samples, "micro_tokens": options.micro_tokens}
        sizes |= {"updates": min(2, options.groups), "overlong": options.limit // 6, "longest_prompt": LONGEST_PROMPT}
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        task = Task(str(model), natural=False, device=options.device, dtype=dtype, warmup=0, cycles=1, **sizes)
        job = {"do": "ours_training:cycles", "task": asdict(task), "set": settings(options.set, shape)}
        job |= {"predict": True, "weights": "bfloat16" if shape == "7b" else "float32"}
        found.append(runner.told(memory(run_side(options, f"size-{shape}", job)), MEMORY))
    runner.show(f"most memory of a step with responses of {options.limit} tokens", {"sides": found}, MEMORY)
    return {"limit": options.limit, "sides": found}


def memory(side: Outcome) -> Side:
    """Bytes predicted and taken, and how they compare; None: not known (a CPU has no count of its own)."""
    predicted, taken = side.first("predicted"), side.first("memory")
    both = bool(predicted and taken.get("bytes"))
    return side.facts() | {
        "predicted": predicted.get("bytes"),
        "parts": predicted.get("parts"),
        "taken": taken.get("bytes"),
        "reserved": taken.get("reserved"),
        "ratio": predicted["bytes"] / taken["bytes"] if both else None,
        "seconds": side.first("cycle").get("seconds"),
    }


COMMANDS = {"ours": ours, "sizes": sizes}

if __name__ == "__main__":
    runner.script(main)
