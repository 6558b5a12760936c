"""All of it in one command: limits of the card, rollout beside vLLM, an update, a whole cycle beside TRL, decoding.

usage: python bench/all.py --out FOLDER --model FOLDER --rows FILE --prompts FILE --peer-path SITE [--within SECONDS]
       python bench/all.py --out FOLDER --device cpu [--model FOLDER] [--prompts FILE --peer-path SITE]

Parts, one after the other; ``--parts`` names those to run, and others that FOLDER holds stay in the report:

  rollout   ``rollout.py compare``: the real model with ours, vLLM's best setting kept (settings.json), its defaults
  update    ``train.py ours``, on a GPU
  cycle     ``cycle.py compare``: ours and TRL's best setting kept
  demo      the demo model's cycle, on a CPU
  1.5b, 7b  steady decoding at 256x1k, 64x4k and 16x16k with ours and vLLM's best setting; only if named

A side that fails, or for which ``--within`` leaves no time, is named, and the others go on. The same command again
takes the sides that FOLDER holds and runs what is missing; with ``--within 0`` it only reports. The table at the end is
in FOLDER/report.md and report.json, too. Where a comparison is void by its benchmark's own rules, the reasons stand in
place of the ratio, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import runner
import steady
from runner import Side, console, number
from work import Limits

POINTS = ["--points", "256x1k", "64x4k", "16x16k", "--limit", "256", "--repeats", "2"]
SMALL = ["--samples", "2", "--limit", "32", "--concurrent", "64", "--repeats", "1"]
PARTS: dict[str, dict[str, tuple[str, str, list[str], list[str]]]] = {
    "cuda": {
        "rollout": ("rollout", "compare", ["--model", "--prompts", "--peer-path"], []),
        "update": ("train", "ours", [], []),
        "cycle": ("cycle", "compare", ["--model", "--rows", "--peer-path"], []),
        "1.5b": ("rollout", "compare", ["--peer-path"], ["--shape", "1.5b", *POINTS]),
        "7b": ("rollout", "compare", ["--peer-path"], ["--shape", "7b", *POINTS]),
    },
    "cpu": {  # where vLLM's packages need not fit TRL, which is that of this environment
        "demo": ("cycle", "compare", [], []),
        "cycle": ("cycle", "compare", ["--model"], ["--rounds", "1"]),
        "rollout": ("rollout", "compare", ["--model", "--prompts", "--peer-path"], SMALL),
    },
}
"""By device: module and command of each part, the options of this one that it needs and is given, and its own."""
FIGURES = {
    "rollout": (("tokens/s", "speed", ",.0f", 1, ""),),
    "train": (("tokens/s", "speed", ",.0f", 1, ""), ("hand-over, ms", "hand_over", ".2f", 1e-3, "")),
    "cycle": (("s", "seconds", ".2f", 1, ""), ("processor time, s", "cpu_seconds", ".2f", 1, ", processor time")),
}
"""What the last table has, by module: unit, key of a side, format, scale, and what the name of the ratio ends with."""
HEADS = ("", "ours", "peer", "peer's", "ratio", "of the measured limit", "of the maker's peak")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    return runner.run_command(parse(arguments), {"report": run})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with those of each part (``parts``) as its benchmark takes them."""
    parser = runner.make_parser(__doc__, (), model=None)
    add = parser.add_argument
    add("--rows", type=Path, help="JSON Lines file with prompt and answer, of the cycle on a GPU")
    add("--prompts", type=Path, help="JSON Lines file with prompt, of the rollout")
    add("--peer-path", type=Path, help="folder that pip installed the peers to with --target")
    add("--settings", type=Path, default=runner.SETTINGS, help="file of the peers' best settings")
    add("--parts", nargs="+", choices=list(PARTS["cuda"] | PARTS["cpu"]), help="without: all but 1.5b and 7b")
    parser.set_defaults(command="report", keep=True)
    options = parser.parse_args(arguments)
    there, given = PARTS[options.device], {}
    for name in options.parts or [name for name in there if name not in ("1.5b", "7b")]:
        if name not in there:
            parser.error(f"--parts {name}: not on {options.device}; there are {', '.join(there)}")
        bench, command, needed, words = there[name]
        passed = {option: getattr(options, option[2:].replace("-", "_")) for option in needed}
        lack = [option for option, value in passed.items() if not value]
        if lack and options.parts:
            parser.error(f"--parts {name}: needs {' and '.join(lack)}")
        if lack:
            console.print(f"{name} is left out: needs {' and '.join(lack)}", markup=False)
            continue
        words = [command, "--keep", *words, *(str(word) for pair in passed.items() for word in pair)]
        words += ["--out", str(options.out / name), "--device", options.device, "--patience", str(options.patience)]
        words += ["--settings", str(options.settings)] if command == "compare" else []
        given[name] = bench, import_module(bench).parse(words)
    options.parts = given
    return options


# --- running ----------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for; the report is written anew after each."""
    card = runner.measure_card(options)
    found = report(options, card)
    for name, (bench, given) in options.parts.items():
        console.rule(name)
        given.card, given.within = card, options.ends - time.monotonic()
        try:
            part = runner.run_command(given, import_module(bench).COMMANDS)
        except Exception as error:  # the other parts go on
            console.print_exception()
            part = {"sides": [], "void": [f"{type(error).__name__}: {error}"]}
        part |= {"bench": bench, "date": date.today().isoformat(), "command": shlex.join(sys.argv)}
        (options.out / f"{name}.json").write_text(json.dumps(part, indent=1), encoding="utf-8")
        found = report(options, card)
    console.rule("all")
    if card:
        runner.show_limits(asdict(card))
    runner.table("", HEADS, found["rows"])
    for reason in found["void"]:
        console.print(f"VOID: {reason}", style="red", markup=False)
    return found


def report(options: argparse.Namespace, card: Limits | None) -> dict[str, Any]:
    """Write report.md, and return what is in it, of all parts that FOLDER holds."""
    files = {name: options.out / f"{name}.json" for name in PARTS[options.device]}
    parts = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
    rows = [*card_rows(card), *(row for name, part in parts.items() for row in part_rows(name, part))]
    sides = [side for part in parts.values() for side in part["sides"]]
    machines = [side["machine"]["versions"] for side in sides if side["machine"]]
    versions = sorted({f"{package} {version}" for of in machines for package, version in of.items()})
    void = [f"{name}: {reason}" for name, part in parts.items() for reason in part.get("void", [])]
    device = card.device if card else "card not measured"
    lines = [f"{device}, {date.today().isoformat()}; {', '.join(versions)}", "", *markdown(HEADS, rows)]
    for name, part in parts.items():
        figures = steady.ROWS if "points" in part.get("work", {}) else import_module(part["bench"]).ROWS
        heads, cells = runner.side_by_side(part["sides"], figures)
        lines += ["", f"## {name}", "", f"`{part['command']}`, {part['date']}", "", *markdown(heads, cells)]
        errors = [side["error"] for side in part["sides"] if side["error"]]
        lines += ["", *(f"    {line}" for error in errors for line in error.splitlines())] if errors else []
    (options.out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"card": card and asdict(card), "rows": rows, "void": void, "parts": parts, "sides": sides}


# --- the table --------------------------------------------------------------------------------------------------------


def markdown(heads: Any, rows: Any) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def card_rows(card: Limits | None) -> Iterator[list[str]]:
    for name, key in (("copy, TB/s", "bytes_per_second"), ("matrix product, TFLOP/s", "operations_per_second")):
        rate, peak = getattr(card, key, None), getattr(card and card.peak, key, None)
        share = rate / peak if rate and peak else None
        yield [name, number(rate, ",.4g", 1e12), "", "", "", "", number(share, ".1%")]


def part_rows(name: str, part: dict[str, Any]) -> Iterator[list[str]]:
    """For each figure of a part and each side of ours a row beside each of the peer's."""
    points = part.get("work", {}).get("points", [""])
    ours, peers = ([side for side in part["sides"] if ("setting" in side) == of] for of in (False, True))
    for unit, key, form, scale, end in FIGURES[part["bench"]]:
        for point, mine, theirs in ((p, a, b) for p in points for a in ours for b in peers or [{}]):
            lead, known = (f"{point}, ", "rate") if point else ("", key)
            both = [at(side, known, point) for side in (mine, theirs)]
            if key == "cpu_seconds" and both == [None, None]:  # on a GPU it is not counted
                continue
            ratio = part.get("ratios", {}).get(f"{lead}{mine['name']} / {theirs.get('name')}{end}")
            void = "; ".join(reason for reason in part.get("void", []) if reason.endswith(point))
            yield [
                f"{name}, {lead}{unit}" + (f" ({mine['name']})" if len(ours) > 1 else ""),
                number(both[0], form, scale),
                f"{theirs['name']} ({theirs['setting']})" if theirs else "",
                number(both[1], form, scale) if theirs else "",
                f"{ratio:.2f}x" if ratio else f"void: {void}" if void else "",
                *(share(mine, point, peak) if key == "speed" else "" for peak in ("", "peak_")),
            ]


def at(side: Side, key: str, point: str) -> Any:
    value = side.get(key)
    return value.get(point) if isinstance(value, dict) else value


def share(side: Side, point: str, peak: str) -> str:
    """Of the limit that is nearer: memory or matrix products."""
    found = {kind: at(side, f"share_of_{peak}{kind}", point) for kind in ("bytes", "operations")}
    kind = max(found, key=lambda kind: found[kind] or 0)
    return f"{found[kind]:.1%} of {kind}" if found[kind] else ""


if __name__ == "__main__":
    runner.script(main)
