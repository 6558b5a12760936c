"""Rollout on one card: tokens a second, ours beside vLLM's, and both beside what the card can do.

usage: python bench/rollout.py COMMAND --out FOLDER [--peer-path SITE] ...

  ours      the rollout with our engine alone
  search    the rollout with vLLM in each of the settings of --search
  compare   ours, vLLM's best setting kept (or --best), vLLM's defaults; the ratios come last

The rollout is ``--samples`` responses to each of ``--prompts`` prompts, up to ``--limit`` tokens, T = 1, log-probs on.
Tokens a second are completion tokens / (first submit to last sample). With ``--model FOLDER --prompts FILE`` it is the
real one, whose responses end when the model ends them. Without, weights are random (``--shape``), prompts too, and
response lengths are those of ``response_lengths.json``, the same in both engines; good for development only. With
``--points 256x1k 64x4k`` it is steady decoding of ``--limit`` steps, so many rows at so many tokens of context
(``steady.py``), and ``compare`` leaves vLLM's defaults out.

Every side runs in a process of its own on the whole card (``runner.py``), once for all points, and starts with a short
rollout of other prompts. Ours is the median of ``--repeats``, vLLM's the best of ``--peer-repeats``; at points the
shortest count in both. Settings of vLLM: see ``peers/vllm.py`` (PARTS). Float32 on a CPU, bfloat16 on a GPU.

The least bytes and operations are counted in ``work.py``; shares are of the card's limits, measured before. A
comparison is void unless vLLM reaches what is known of it: 18k tokens/s at 128 x 16 with the 0.5B model on an NVIDIA
H100 80GB (vLLM 0.25.1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import runner
import steady
from peers import settings
from peers.vllm import PARTS
from runner import Outcome, Side, positive, run_side
from work import INSTRUCTION, SHAPES, Limits, Rollout, Shape, drawn_lengths, random_prompts, rollout_cost

KNOWN_RATE = 18_000
"""Tokens a second of vLLM 0.25.1 at its best on an NVIDIA H100 80GB: 0.5B model, 128 x 16, up to 768 tokens."""
CACHES = ("DAPO_CACHE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
CACHES += ("VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE")
"""Variables of the folders of compiled code."""
ROWS = (
    ("seconds_to", "since the start, s: ", ".1f", 1),
    ("tokens", "tokens", ",d", 1),
    ("seconds", "seconds", ".2f", 1),
    ("speed", "tokens/s", ",.0f", 1),
    ("each", "tokens/s, ", ",.0f", 1),
    *steady.SHARES,
    ("memory", "memory, GB: ", ".1f", 1e9),
    ("mismatch", "engine - trainer log-prob: ", ",.5g", 1),
)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    return runner.run_command(parse(arguments), COMMANDS)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    sizes = {"shape": "0.5b", "samples": 16, "limit": 768, "concurrent": 1024}
    parser = runner.make_parser(__doc__, COMMANDS, PARTS, 300, model=None, **sizes)
    add = parser.add_argument
    add("--prompts", default="128", help="how many, or with --model a JSON Lines file with 'prompt'")
    add("--repeats", type=positive, default=3, help="of ours; the median counts")
    add("--peer-repeats", type=positive, default=1, help="of vLLM's; the best counts")
    add("--points", nargs="+", type=steady.point, metavar="ROWSxCONTEXT", help="steady decoding, with random weights")
    add("--caches", type=Path, help="folder for compiled code; a new one: how long it takes to start with nothing")
    options = parser.parse_args(arguments)
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model {options.model}: no such folder")
    if options.model is None and not (options.prompts.isdigit() and int(options.prompts)):
        parser.error(f"--prompts {options.prompts}: a number above 0, or with --model a file")
    if options.model is not None and options.prompts.isdigit():
        parser.error("--model needs --prompts FILE")
    for point in options.points or ():
        if options.model or point.context < steady.LEAD + options.limit:
            parser.error(f"--points {point.name}: a context of {steady.LEAD} + --limit or more, and without --model")
    options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    return options


# --- the work ---------------------------------------------------------------------------------------------------------


def make_works(options: argparse.Namespace) -> list[Rollout]:
    """The rollout that the options ask for; for steady decoding two for each point."""
    how: dict[str, Any] = {"temperature": 1.0, "device": options.device, "dtype": options.dtype}
    if options.model is not None:
        model = options.model
        prompts, stop_ids = read_prompts(model, Path(options.prompts))
        limits = [options.limit] * len(prompts)
    else:
        shape, stop_ids = SHAPES[options.shape], []
        model = shape.write(options.out / f"shape-{options.shape}")
        if options.points:
            make = partial(Rollout, str(model), True, stop_ids=stop_ids, **how)
            return steady.works(options.points, options.limit, shape.vocab_size, make)
        lengths = drawn_lengths(int(options.prompts))
        limits = [min(n, options.limit) for _, n in lengths]
        prompts = random_prompts((n for n, _ in lengths), shape.vocab_size)
    how |= {"stop_ids": stop_ids, "samples": options.samples, "concurrent": options.concurrent}
    return [Rollout(str(model), options.model is None, prompts, limits, **how)]


def read_prompts(model: Path, file: Path) -> tuple[list[list[int]], list[int]]:
    """Prompts as the model's chat template writes them, and every id that ends a response."""
    from transformers import AutoConfig, GenerationConfig

    from dapo.config import DataConfig
    from dapo.data.template import PromptTemplate
    from dapo.model.loading import load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(str(model))
    template = PromptTemplate(DataConfig(template="chat", instruction=INSTRUCTION), tokenizer)
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    settings = SimpleNamespace(config=AutoConfig.from_pretrained(model), generation_config=None)
    with contextlib.suppress(OSError):
        settings.generation_config = GenerationConfig.from_pretrained(model)
    return [template.encode(row["prompt"]) for row in rows], list(stop_token_ids(settings, tokenizer))


def describe(options: argparse.Namespace, works: list[Rollout]) -> dict[str, Any]:
    """The work without its token ids."""
    work = works[-1]
    found = {name: getattr(work, name) for name in ("model", "random", "temperature", "device", "dtype")}
    found["title"] = title(options, works)
    if options.points:
        return found | {"points": [point.name for point in options.points], "steps": options.limit}
    sizes = {"prompts": len(work.prompts), "prompt_tokens": sum(map(len, work.prompts)), "limit": max(work.limits)}
    return found | sizes | {"samples": work.samples, "concurrent": work.concurrent}


def title(options: argparse.Namespace, works: list[Rollout]) -> str:
    """The work in short, by which settings are kept."""
    work, shape = works[-1], Shape.read(works[-1].model).name
    if options.points:
        return f"{shape}, {' '.join(point.name for point in options.points)}, {options.limit} steps"
    return f"{shape}{', random' * work.random}, {len(work.prompts)} x {work.samples}, up to {max(work.limits)} tokens"


# --- the rollout ------------------------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> dict[str, Any]:
    works, card = make_works(options), runner.measure_card(options)
    return shown({"work": describe(options, works), "sides": [run_rollouts(options, works, card)]}, card)


def run_rollouts(
    options: argparse.Namespace, works: list[Rollout], card: Limits | None, setting: str | None = None
) -> Side:
    """A process that makes the rollouts again and again with our engine, or with vLLM in a setting."""
    told = [{field.name: getattr(work, field.name) for field in fields(work)} for work in works]  # asdict takes seconds
    caches = {name: str(options.caches.resolve() / name.lower()) for name in CACHES} if options.caches else {}
    job = {"do": "ours:rollout", "works": told, "repeats": options.repeats, "environment": caches}
    if setting:
        job |= {"do": "peers.vllm:rollout", "repeats": options.peer_repeats, "setting": setting}
        job["engine"] = steady.engine_arguments(works) if options.points else {}
    outcome = run_side(options, f"vllm-{setting}" if setting else "ours", job)
    if options.points:
        side = steady.figures(options.points, outcome, works, card)
    else:
        side = summary(outcome, works, card, max if setting else median)
        side["mismatch"] = outcome.first("mismatch") or None
    return runner.told(side | ({"setting": setting} if setting else {}), steady.ROWS if options.points else ROWS)


def summary(side: Outcome, works: list[Rollout], card: Limits | None, choose: Callable[[list[float]], float]) -> Side:
    """Figures of a side: of the run that is chosen by its speed, which is None if it never came to an end."""
    (work,), runs = works, []
    shape = Shape.read(work.model)
    for run in side.of("rollout"):
        lengths, seconds = [(p, n) for p, n in run["lengths"]], run["seconds"]
        tokens = sum(n for _, n in lengths)
        cost = rollout_cost(shape, lengths, [len(p) for p in work.prompts], work.concurrent)
        found = {"seconds": seconds, "tokens": tokens, "samples": len(lengths), "speed": tokens / seconds}
        runs.append(found | cost.shares(card, seconds))
    chosen: dict[str, Any] = {}
    if runs:
        speed = choose([run["speed"] for run in runs])
        chosen = min(runs, key=lambda run: abs(run["speed"] - speed)) | {"speed": speed}
    each = {f"run {i}": run["speed"] for i, run in enumerate(runs, 1)}
    seconds_to = {mark: side.seconds_to(mark) for mark in steady.MARKS}
    return side.facts() | chosen | {"runs": runs, "each": each, "seconds_to": seconds_to}


def search(options: argparse.Namespace) -> dict[str, Any]:
    works, card = make_works(options), runner.measure_card(options)
    found = settings.search(options, settings.VLLM, title(options, works), partial(run_rollouts, options, works, card))
    return shown({"work": describe(options, works)} | found, card)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    works, card = make_works(options), runner.measure_card(options)
    best = settings.best(options, settings.VLLM, title(options, works))
    named: dict[str, str | None] = {"ours": None, **({"vLLM best": best} if best else {})}
    named |= {} if options.points or best == "defaults" else {"vLLM defaults": "defaults"}
    sides = {name: lambda _, of=of: run_rollouts(options, works, card, of) for name, of in named.items()}
    rounds = runner.alternate(sides)
    if options.points:
        compared = steady.conclude(options.points, [side for (side,) in rounds.values()])
        return shown({"work": describe(options, works)} | compared, card)
    void = void_reasons(works[-1], [of[0] for of in rounds.values()])
    found = runner.conclude(describe(options, works), rounds, void)
    return shown(found | {"known_rate": known_rate(works[-1])}, card)


def known_rate(work: Rollout) -> int | None:
    """What vLLM is known to reach on this work; None: nothing is known."""
    same = Shape.read(work.model) == SHAPES["0.5b"] and len(work.prompts) * work.samples == 2048
    return KNOWN_RATE if same and max(work.limits) >= 512 else None


def void_reasons(work: Rollout, sides: list[Side]) -> list[str]:
    """Why a comparison says nothing; empty if it does."""
    mine, peers = sides[0], sides[1:]
    reasons = runner.failed({side["name"]: [side] for side in sides})
    if "vLLM best" not in {p["name"] for p in peers} or "defaults" not in {p["setting"] for p in peers}:
        reasons.append("vLLM's best setting or its defaults are missing")
    bar, reached = known_rate(work), max((p["speed"] for p in peers if p["speed"]), default=0)
    if bar is not None and reached < bar:
        reasons.append(f"vLLM reached {reached:,.0f} tokens/s, and {bar:,} are known of it on an NVIDIA H100 80GB")
    counts = {run["samples"] for side in sides for run in side["runs"]}
    if work.random:
        counts |= {run["tokens"] for side in peers for run in side["runs"]} - {r["tokens"] for r in mine["runs"]}
    if len(counts) > 1:
        reasons.append(f"the sides did not do the same work: {sorted(counts)}")
    return reasons


def shown(found: dict[str, Any], card: Limits | None) -> dict[str, Any]:
    found["limits"] = asdict(card) if card else None
    runner.show(
        f"{found['work']['title']}, T = 1, log-probs on", found, steady.ROWS if "points" in found["work"] else ROWS
    )
    if found.get("known_rate", 0) is None:
        runner.console.print("nothing is known of vLLM's rate on this work, so it was not held against vLLM")
    return found


COMMANDS = {"ours": ours, "search": search, "compare": compare}

if __name__ == "__main__":
    runner.script(main)
