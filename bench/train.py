"""Training alone on one GPU: tokens a second and the share of the card's measured rate, ours and TRL's; and memory.

usage: python bench/train.py ours  --out FOLDER             with and without shared prompts
       python bench/train.py trl   --out FOLDER --peer-path SITE [--settings SETTING ...]
       python bench/train.py sizes --out FOLDER [--size NAME ...]
       (``--tiny``: the same on a CPU, in seconds, to see that it runs)

``ours`` and ``trl`` make optimizer updates on one mini-batch of ``--groups`` x ``--samples`` sequences with random
weights (``--shape``) and the lengths of real prompts and responses (``response_lengths.json``): forward, backward,
clipping, AdamW; float32 masters, bfloat16 compute. Ours packs ``--micro-tokens`` tokens into a forward pass. TRL's is
its own loop with the rollout replaced (``train_sides.py``), padded as it pads, in settings of ``trl_side.py``. The
median of ``--repeats`` (an odd number) updates counts, after ``--warmup`` ones.

The share is 6 x parameters x tokens / seconds / the rate of an 8192^3 bfloat16 matrix product, measured in the same
process. The parameters of the layers count for every token that is computed (a shared prompt once, padding never),
those of the head for response tokens only, embeddings and attention not at all.

``ours`` also times the hand-over of the weights to an engine, after the updates: all of them are looked at (finite?)
and copied into a bfloat16 model; the median of ``--repeats``.

``sizes`` makes one step of a whole run with responses of the full ``--limit``, forward passes as full as they can be,
and prints the most memory that dapo predicts beside what was taken: ``1.5b`` all parameters, ``7b`` (weights in
bfloat16) with what ``--set 7b:KEY=VALUE`` says of adapters. Each part runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rollout_work import SHAPES  # noqa: E402
from trl_side import setting_name  # noqa: E402

from rollout import Outcome, assignment, odd, positive, require_gpu, run_script  # noqa: E402  (modules beside this one)

LONGEST_PROMPT = 64
"""Tokens of the made-up prompts of ``sizes``, at most."""
console = Console(width=150)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run a command, print its table, and write and return what is behind it (``FOLDER/COMMAND.json``)."""
    options = parse(arguments)
    require_gpu(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"ours": ours, "trl": trl, "sizes": sizes}[options.command](options)
    (options.out / f"{options.command}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["ours", "trl", "sizes"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and few tokens, on the CPU")
    parser.add_argument("--shape", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--groups", type=positive, help="of the mini-batch; 32, or 4 for sizes")
    parser.add_argument("--samples", type=positive, help="of a group; 16, or 8 for sizes")
    parser.add_argument("--limit", type=positive, help="response tokens at most; 768, or 4096 for sizes")
    parser.add_argument("--micro-tokens", type=positive, help="of a forward pass of ours; 32768, or full for sizes")
    parser.add_argument("--warmup", type=positive, default=2)
    parser.add_argument("--repeats", type=odd, default=5)
    parser.add_argument(
        "--set", nargs="+", type=assignment, default=[], metavar="[SIZE:]KEY=VALUE", help="keys of our recipe"
    )
    parser.add_argument("--settings", nargs="+", type=setting_name, help="of TRL; defaults and nockpt+micro32")
    parser.add_argument("--size", nargs="+", default=["1.5b", "7b"], choices=sorted(SHAPES))
    parser.add_argument("--peer-path", type=Path, help="folder that TRL is installed in")
    parser.add_argument("--patience", type=float, default=560, help="seconds that a part may take")
    options = parser.parse_args(arguments)
    options.settings = options.settings or ["defaults", "nockpt+micro4" if options.tiny else "nockpt+micro32"]
    sizes = (4, 8, 4096) if options.command == "sizes" else (32, 16, 768)
    for name, size in zip(("groups", "samples", "limit"), sizes, strict=True):
        setattr(options, name, getattr(options, name) or size)
    if options.micro_tokens is None:  # half a group at a time, which fills it but for the prompt
        full = options.samples // 2 * options.limit + LONGEST_PROMPT
        options.micro_tokens = full if options.command == "sizes" else 32768
    if options.tiny:
        options.shape, options.groups, options.samples = "tiny", 2, 4
        options.size, options.limit, options.micro_tokens = ["tiny"], min(options.limit, 48), 600
        options.warmup, options.repeats = 1, 1
    options.device = "cpu" if options.tiny else "cuda"
    return options


def job_of(options: argparse.Namespace, kind: str, shape: str) -> dict[str, Any]:
    """What a process is to do."""
    names = ("device", "groups", "samples", "limit", "micro_tokens", "warmup", "repeats")
    model = SHAPES[shape].write(options.out / f"shape-{shape}")
    sizes = {name: getattr(options, name) for name in names}
    return sizes | {"job": kind, "model": str(model), "fixed": False, "set": settings(options.set, shape)}


def settings(items: list[str], shape: str) -> dict[str, Any]:
    """Those of ``--set`` that are for a shape."""
    found = {}
    for item in items:
        head, _, rest = item.partition(":")
        if head in SHAPES and head != shape:
            continue
        key, _, value = (rest if head in SHAPES else item).partition("=")
        found[key] = yaml.safe_load(value)
    return found


def run(options: argparse.Namespace, name: str, job: dict[str, Any], peers: bool = False) -> Outcome:
    """A part, in a process of its own."""
    first = [*([options.peer_path] if peers and options.peer_path else []), HERE.parent / "src"]
    return run_script(options, name, HERE / "train_sides.py", job, first)


# --- tokens a second --------------------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Our trainer, prompts shared and not."""
    job = job_of(options, "ours", options.shape)
    job["set"] = {key.removeprefix("training."): value for key, value in job["set"].items()}
    sides = [summary(run(options, name, job | {"shared": name == "shared"})) for name in ("shared", "alone")]
    found = {"shape": options.shape, "micro_tokens": options.micro_tokens, "sides": sides}
    show(found)
    shared, alone = sides
    if shared["seconds"] and alone["seconds"]:
        found["fewer_tokens"] = 1 - shared["computed"] / alone["computed"]
        found["less_time"] = 1 - shared["seconds"] / alone["seconds"]
        console.print(
            f"shared prompts: {found['fewer_tokens']:.1%} fewer tokens, {found['less_time']:.1%} less time",
            highlight=False,
        )
    return found


def trl(options: argparse.Namespace) -> dict[str, Any]:
    """TRL in each setting."""
    job = job_of(options, "trl", options.shape)
    sides = []
    for setting in options.settings:
        side = run(options, f"trl-{setting}", job | {"setting": setting}, peers=True)
        sides.append(summary(side) | {"setting": setting})
    found = {"shape": options.shape, "sides": sides}
    show(found)
    return found


def summary(side: Outcome) -> dict[str, Any]:
    """The median of the updates that count, with its phases."""
    updates = sorted((u for u in side.of("update") if u["counts"]), key=lambda update: update["seconds"])
    work = next(iter(side.of("work")), {})
    chosen = updates[len(updates) // 2] if updates and work else None
    limits = side.limits
    hand_overs = [record["seconds"] for record in side.of("hand_over") if record["counts"]]
    found: dict[str, Any] = {
        "name": side.name,
        "device": limits and limits.device,
        "rate": limits and limits.operations_per_second,
        "seconds": None,
        "memory": next((record["bytes"] for record in side.of("memory")), None),
        "hand_over": median(hand_overs) if hand_overs else None,
        "updates": side.of("update"),
        "error": side.error,
        **{name: value for name, value in work.items() if name not in ("kind", "time")},
    }
    if chosen and limits:
        seconds = chosen["seconds"]
        found |= {
            "seconds": seconds,
            "phases": chosen["phases"],
            "micro_batches": chosen["micro_batches"],
            "tokens_per_second": work["tokens"] / seconds,
            "computed_per_second": work["computed"] / seconds,
            "share": work["operations"] / seconds / limits.operations_per_second,
            "skipped": sum(bool(update["skipped"]) for update in side.of("update")),
        }
    return found


def show(found: dict[str, Any]) -> None:
    """A column for each side."""
    sides = [side for side in found["sides"] if side["seconds"]]
    rate = sides[0]["rate"] / 1e12 if sides else 0
    table = Table(title=f"one update, {found['shape']}: {sides[0]['device'] if sides else '-'}, {rate:.0f} TFLOP/s")
    table.add_column("")
    for side in sides:
        table.add_column(side["name"], justify="right")

    def row(label: str, value: Any) -> None:
        table.add_row(label, *(value(side) for side in sides))

    row("tokens of the sequences", lambda side: f"{side['tokens']:,}")
    row("tokens computed, padding included", lambda side: f"{side['computed']:,}")
    row("tokens through the head", lambda side: f"{side['response_tokens']:,}")
    row("forward passes", lambda side: str(side["micro_batches"]))
    for phase in dict.fromkeys(name for side in sides for name in side["phases"]):
        row(f"seconds, {phase}", lambda side, phase=phase: f"{side['phases'].get(phase, 0):.4f}")
    row("seconds", lambda side: f"{side['seconds']:.4f}")
    row("tokens/s, of the sequences", lambda side: f"{side['tokens_per_second']:,.0f}")
    row("tokens/s, computed, padding included", lambda side: f"{side['computed_per_second']:,.0f}")
    row("share of the measured rate", lambda side: f"{side['share']:.1%}")
    row("hand-over, ms", lambda side: "-" if side["hand_over"] is None else f"{1e3 * side['hand_over']:.2f}")
    row("memory, GB", lambda side: f"{(side['memory'] or 0) / 1e9:.1f}")
    console.print(table)


# --- memory -----------------------------------------------------------------------------------------------------------


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Memory of a step, predicted and taken."""
    rows = []
    table = Table(title=f"most memory of a step with responses of {options.limit} tokens, GB")
    for head in ("shape", "predicted", "taken", "reserved", "predicted / taken", "seconds"):
        table.add_column(head, justify="right")
    for shape in options.size:
        job = job_of(options, "size", shape) | {"steps": 1, "fixed": True}
        job["weights"] = "bfloat16" if shape == "7b" else "float32"
        side = run(options, f"size-{shape}", job)
        rows.append({"shape": shape, "error": side.error, **memory(side)})
        values = (rows[-1][key] for key in ("predicted", "taken", "reserved"))
        ratio, seconds = rows[-1]["ratio"], rows[-1]["seconds"]
        cells = [*("-" if v is None else f"{v / 1e9:.2f}" for v in values), "-" if ratio is None else f"{ratio:.3f}"]
        table.add_row(shape, *cells, "-" if seconds is None else f"{seconds:.1f}")
    console.print(table)
    return {"limit": options.limit, "sizes": rows}


def memory(side: Outcome) -> dict[str, Any]:
    """Bytes predicted and taken, and how they compare; None: not known (a CPU has no count of its own)."""
    predicted, taken = next(iter(side.of("predicted")), {}), next(iter(side.of("memory")), {})
    both = bool(predicted and taken.get("bytes"))
    steps = [record["seconds"] for record in side.of("step")]
    return {
        "predicted": predicted.get("bytes"),
        "parts": predicted.get("parts"),
        "taken": taken.get("bytes"),
        "reserved": taken.get("reserved"),
        "ratio": predicted["bytes"] / taken["bytes"] if both else None,
        "seconds": median(steps) if steps else None,
        "warnings": [record["text"] for record in side.of("warning")],
    }


if __name__ == "__main__":
    main()
