"""One whole DAPO cycle on one GPU, ours beside TRL with colocated vLLM: seconds, and where they go.

usage: python bench/cycle.py ours    --out FOLDER [--model FOLDER --rows FILE]
       python bench/cycle.py search  --out FOLDER --model FOLDER --rows FILE --peer-path SITE --search SETTING ...
       python bench/cycle.py compare --out FOLDER --model FOLDER --rows FILE --peer-path SITE [--best SETTING]

A cycle: ``--prompts`` x ``--samples`` responses of up to ``--limit`` tokens at T = 1 with log-probs, their rewards (our
math reward, in four processes, on both sides), ``--updates`` optimizer steps on all of them (DAPO's loss, Clip-Higher,
overlong punishment, AdamW, float32 masters, bfloat16 compute), and the new weights in the engine. Dynamic sampling is
off, so that both sides train on every sample. TRL has one pass more than ours: it computes the log-probabilities of the
policy before the updates (``prepare``), where ours takes the engine's. ``compare`` has a second side of ours that
computes them too, ``algorithm.proximal=recompute``, and a ratio for each. A cycle lasts from the end of the one before
to its own end; its phases add up to that. Each side runs in a process of its own on the whole card, one after the
other; ``--warmup`` cycles are left out, the median of ``--cycles`` (an odd number) counts.

Without ``--model`` ours has random weights (``--shape``) and response lengths of real responses: for development only.
TRL and vLLM are imported from ``--peer-path`` (a folder that pip installed them to with ``--target``) by TRL's
processes only. Settings of TRL: see ``trl_side.py`` (PARTS). ``search`` remembers its times in settings.json, and
``compare`` runs ours and the fastest of those (or ``--best``). With ``--keep`` it takes a side that the folder holds of
the same work, in place of running it again: so a comparison may be made in several commands, on a machine that allows
only short ones.

A comparison is void unless TRL is at least as fast as is known of it: 97 s a cycle at 128 x 16 and 4 updates with the
0.5B model on an NVIDIA H100 80GB (TRL 1.16, vLLM 0.25.1); or if the sides' tokens a cycle differ by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from dapo.util.files import write_json

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rollout_work import SHAPES, Shape  # noqa: E402
from trl_side import Task, setting_name  # noqa: E402

from rollout import (  # noqa: E402  (modules beside this one)
    Outcome,
    assignment,
    odd,
    positive,
    read_records,
    require_gpu,
    run_script,
    run_side,
)

KNOWN_SECONDS = 97.0
"""A cycle of TRL 1.16 with vLLM 0.25.1 on an NVIDIA H100 80GB: 0.5B model, 128 x 16, 4 updates, up to 768 tokens."""
SEARCHED = "settings.json"
console = Console(width=160)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run a command, print its table, and write and return what is behind it (``FOLDER/COMMAND.json``)."""
    options = parse(arguments)
    require_gpu(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    limits = run_side(options, "limits", {"job": "limits", "device": options.device}).limits
    sides = {"ours": ours, "search": search, "compare": compare}[options.command](options)
    found = {"task": asdict(task_of(options)), "limits": limits and asdict(limits), "sides": sides}
    found["void"] = void_reasons(options, sides) if options.command == "compare" else []
    show(found)
    (options.out / f"{options.command}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["ours", "search", "compare"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", type=Path, help="folder of the real model; without, random weights")
    parser.add_argument("--rows", type=Path, help="JSON Lines file with prompt and answer")
    parser.add_argument("--shape", default="0.5b", choices=sorted(SHAPES), help="of random weights")
    parser.add_argument("--prompts", type=positive, default=128)
    parser.add_argument("--samples", type=positive, default=16, help="for each prompt")
    parser.add_argument("--updates", type=positive, default=4)
    parser.add_argument("--limit", type=positive, default=768, help="response tokens at most")
    parser.add_argument("--concurrent", type=positive, default=1024, help="sequences at once in our engine")
    parser.add_argument("--micro-tokens", type=positive, default=32768, help="of ours: tokens of a forward pass")
    parser.add_argument("--warmup", type=positive, default=1, help="cycles that do not count")
    parser.add_argument("--cycles", type=odd, default=5, help="of ours that count")
    parser.add_argument("--peer-cycles", type=odd, default=1, help="of TRL's that count")
    parser.add_argument("--set", nargs="+", type=assignment, default=[], metavar="KEY=VALUE", help="keys of our recipe")
    parser.add_argument("--peer-path", type=Path, help="folder that TRL and vLLM are installed in")
    parser.add_argument("--search", nargs="+", default=["defaults"], type=setting_name, metavar="SETTING")
    parser.add_argument(
        "--best", type=setting_name, metavar="SETTING", help="to compare with, in place of the fastest one searched"
    )
    parser.add_argument("--keep", action="store_true", help="use sides of the same work that FOLDER holds")
    parser.add_argument("--patience", type=float, default=560, help="seconds that a side may take")
    options = parser.parse_args(arguments)
    if options.prompts % options.updates:
        parser.error(f"--prompts {options.prompts} cannot be cut into {options.updates} updates of whole groups")
    if (options.model is None) != (options.rows is None):
        parser.error("--model and --rows belong together")
    if options.model is None and options.command != "ours":
        parser.error(f"{options.command} needs --model and --rows: TRL cannot be told the length of each response")
    for place in filter(None, (options.model, options.rows)):
        if not place.exists():
            parser.error(f"{place}: does not exist")
    return options


def task_of(options: argparse.Namespace) -> Task:
    """The cycle that the options ask for."""
    model = options.model or SHAPES[options.shape].write(options.out / f"shape-{options.shape}")
    return Task(
        str(model),
        options.prompts,
        options.samples,
        options.updates,
        options.limit,
        overlong=max(1, options.limit // 6),
        longest_prompt=512,
        shuffle=False,
    )


# --- the commands -----------------------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Our side alone."""
    return [our_side(options, "ours")]


def our_side(options: argparse.Namespace, name: str, **keys: Any) -> dict[str, Any]:
    """Ours, with keys of the recipe beside those of ``--set``."""
    values = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in options.set)}
    job = common(options, options.cycles) | {
        "side": "ours",
        "device": options.device,
        "concurrent": options.concurrent,
        "micro_tokens": options.micro_tokens,
        "set": values | keys,
    }
    return summary(run(options, name, job, [HERE.parent / "src"]), options.warmup)


def trl(options: argparse.Namespace, setting: str) -> dict[str, Any]:
    """TRL in a setting. Its process imports dapo for the reward, after everything of the peers."""
    job = common(options, options.peer_cycles) | {"side": "trl", "setting": setting}
    paths = [*filter(None, [options.peer_path]), HERE.parent / "src"]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # TRL reaches into the engine, which is in its own process
    side = run(options, f"trl-{setting}", job, paths, environment)
    return summary(side, options.warmup) | {"setting": setting}


def run(options: argparse.Namespace, name: str, job: dict[str, Any], *places: Any) -> Outcome:
    """A side in a process of its own, or as an earlier one left it."""
    report, stored = options.out / f"{name}.jsonl", options.out / f"{name}.job.json"
    if options.keep and stored.is_file():
        records = read_records(report)
        earlier = json.loads(stored.read_text(encoding="utf-8"))
        done = any(record["kind"] == "memory" for record in records)  # the last thing that a side says
        if done and {**earlier, "report": None} == {**json.loads(json.dumps(job)), "report": None}:
            console.print(f"{name}: as measured before")
            return Outcome(name, records[0]["time"], records, None)
    return run_script(options, name, HERE / "cycle_sides.py", job, *places)


def search(options: argparse.Namespace) -> list[dict[str, Any]]:
    """TRL in each setting of ``--search``; times go into settings.json, to those of earlier searches."""
    known, sides = searched(options.out), []
    for setting in options.search:
        sides.append(trl(options, setting))
        if sides[-1]["seconds"]:
            known[setting] = sides[-1]["seconds"]
            write_json(options.out / SEARCHED, known)
    return sides


def searched(folder: Path) -> dict[str, float]:
    """Seconds of TRL's settings that were searched in a folder."""
    file = folder / SEARCHED
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours, with the engine's log-probs and with its own, and TRL at its best."""
    known = searched(options.out)
    best = options.best or (min(known, key=lambda name: known[name]) if known else None)
    sides = ours(options)
    recomputed = our_side(options, "ours-recompute", **{"algorithm.proximal": "recompute"})
    sides.append(recomputed | {"name": "ours, old log-probs recomputed"})
    if best is None:
        console.print("no setting was searched for in this folder: run search first, or name --best")
        return sides
    theirs = trl(options, best) | {"name": "TRL"}
    for side in sides:
        if side["seconds"] and theirs["seconds"]:
            side["ratio"] = theirs["seconds"] / side["seconds"]
    return [*sides, theirs]


def common(options: argparse.Namespace, cycles: int) -> dict[str, Any]:
    """What a job of either side holds."""
    rows = str(options.rows) if options.rows else None
    return {"task": asdict(task_of(options)), "rows": rows, "warmup": options.warmup, "cycles": cycles}


# --- what came of it --------------------------------------------------------------------------------------------------


def summary(side: Outcome, warmup: int) -> dict[str, Any]:
    """Medians over the cycles that count; phases are those of the median cycle, so that they add up to it."""
    cycles = side.of("cycle")
    counted = sorted(cycles[warmup:], key=lambda cycle: cycle["seconds"])
    chosen = counted[len(counted) // 2] if counted else {}
    return {
        "name": side.name,
        "seconds": chosen.get("seconds"),
        "phases": chosen.get("phases", {}),
        "inside": chosen.get("inside", {}),
        "tokens": median(cycle["generated"] for cycle in counted) if counted else None,
        "trained": median(cycle["trained"] for cycle in counted) if counted else None,
        "memory": next((record["bytes"] for record in side.of("memory")), None),
        "cycles": cycles,
        "warnings": [record["text"] for record in side.of("warning")],
        "error": side.error,
    }


def void_reasons(options: argparse.Namespace, sides: list[dict[str, Any]]) -> list[str]:
    """Why a comparison says nothing; none: it holds."""
    reasons = []
    measured = [side for side in sides if side["seconds"]]
    theirs = [side["seconds"] for side in measured if side["name"] == "TRL"]
    if not theirs or len(measured) < len(sides):
        reasons.append("not all sides were measured")
    if theirs and _is_known(options) and min(theirs) > KNOWN_SECONDS:
        reasons.append(f"TRL took {min(theirs):.0f} s, and {KNOWN_SECONDS:.0f} s are known of it on an H100 80GB")
    tokens = [side["tokens"] for side in measured]
    if tokens and max(tokens) > 1.1 * min(tokens):
        reasons.append(f"the sides sampled {min(tokens):,.0f} to {max(tokens):,.0f} tokens a cycle")
    return reasons


def _is_known(options: argparse.Namespace) -> bool:
    """Whether it is the work of which TRL's time is known."""
    sizes = (options.prompts, options.samples, options.updates, options.limit)
    return sizes == (128, 16, 4, 768) and Shape.read(options.model) == SHAPES["0.5b"]


def show(found: dict[str, Any]) -> None:
    """Seconds by phase, a column for each side."""
    task, sides = found["task"], found["sides"]
    device = found["limits"]["device"] if found["limits"] else "device unknown"
    sizes = f"{task['prompts']} x {task['samples']} samples, {task['updates']} updates, up to {task['limit']} tokens"
    table = Table(title=f"one cycle of {sizes}: {device}")
    table.add_column("seconds")
    for side in sides:
        table.add_column(side["name"] + (f" ({side['setting']})" if "setting" in side else ""), justify="right")

    def row(label: str, value: Any) -> None:
        table.add_row(label, *(value(side) for side in sides))

    for kind in ("phases", "inside"):
        for phase in dict.fromkeys(name for side in sides for name in side[kind]):
            text = f"{'  of these: ' if kind == 'inside' else ''}{phase}"
            row(text, lambda side, kind=kind, phase=phase: _number(side[kind].get(phase), 3))
    row("cycle", lambda side: _number(side["seconds"], 2))
    row("tokens sampled", lambda side: _number(side["tokens"], 0))
    row("tokens in the loss", lambda side: _number(side["trained"], 0))
    row("memory, GB", lambda side: _number(side["memory"] and side["memory"] / 1e9, 1))
    console.print(table)
    for side in sides:
        if "ratio" in side:
            console.print(f"TRL / {side['name']}: {side['ratio']:.1f}x", highlight=False)
    for reason in found["void"]:
        console.print(f"VOID: {reason}", style="red", markup=False)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    main()
