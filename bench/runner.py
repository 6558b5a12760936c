"""The runner of all benchmarks: sides, each in a process of its own, what they report, results and tables.

A benchmark states its options, its commands and the job of each side. A job is ``{"do": "MODULE:FUNCTION", ...}`` with
a module of this folder, and perhaps variables (``environment``); the side's process is ``python bench/runner.py
JOB.json``, which calls the function with the job and a ``Report``. What it reports stays when it fails or is ended
later.

Common to all: sides have the machine for themselves, one after the other, in alternating order where there are several
rounds. A side that fails or outlasts ``--patience`` is reported with the end of its output; the others go on, until all
have taken ``--within``. With ``--keep`` a side of the same job that the folder holds is taken in place of running it
again: so a comparison may be made in several commands, on a machine that allows only short ones. What a side measured
is printed when it ends. Settings of a peer that ``search`` tried are kept in settings.json (``peers/settings.py``). A
comparison that is void has no ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from peers import Parts, named
from work import SHAPES, Limits

HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "settings.json"
PACKAGES = ("torch", "transformers", "trl", "vllm", "math-verify")
Command = Callable[[argparse.Namespace], dict[str, Any]]
Side = dict[str, Any]
Rows = Sequence[tuple[str, str, str, float]]
"""Figures of a side: key, label, format and unit."""
console = Console(width=160)


# --- options ----------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def odd(text: str) -> int:
    """A whole number that has a middle one."""
    number = positive(text)
    if number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be odd, so that one of them is the median")
    return number


def assignment(text: str) -> str:
    """``KEY=VALUE``, the value in YAML."""
    key, equals, value = text.partition("=")
    try:
        yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text}: {value} is no value: {str(error).splitlines()[0]}") from None
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE, such as training.learning_rate=1e-6")
    return text


def assigned(items: Sequence[str]) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in items)}


OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"type": Path, "help": "folder of the real model; without, random weights"},
    "shape": {"choices": sorted(SHAPES), "help": "of random weights"},
    "samples": {"type": positive, "help": "responses to each prompt"},
    "limit": {"type": positive, "help": "response tokens at most"},
    "concurrent": {"type": positive, "help": "sequences at once in our engine"},
    "micro_tokens": {"type": positive, "help": "tokens of a forward pass in our updates"},
    "set": {"type": assignment, "nargs": "+", "metavar": "KEY=VALUE", "help": "keys of our recipe"},
}
"""Those that several benchmarks have."""


def make_parser(
    doc: str | None, commands: Iterable[str], parts: Parts | None = None, patience: float = 560, **defaults: Any
) -> Any:
    """A parser with the options that all benchmarks have, and those of ``OPTIONS`` that have ``defaults``; ``parts``:
    of the settings of a peer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    if commands:
        add("command", choices=sorted(commands))
    add("--out", type=Path, required=True, help="folder for results and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--keep", action="store_true", help="use sides of the same job that the folder holds")
    add("--patience", type=float, default=patience, help="seconds that a side may take")
    add("--within", type=float, default=math.inf, help="seconds for all sides: one that runs then is ended")
    for name, default in defaults.items():
        add(f"--{name.replace('_', '-')}", default=default, **OPTIONS[name])
    parser.set_defaults(peer_path=None)
    if parts:
        setting = {"type": partial(setting_of, parts), "metavar": "SETTING"}
        add("--peer-path", type=Path, help="folder that pip installed the peer to with --target")
        add("--search", nargs="+", default=["defaults"], help="settings of the peer to try", **setting)
        add("--best", help="setting to compare with, in place of the best one kept", **setting)
        add("--settings", type=Path, default=SETTINGS, help="file of the best settings (bench/settings.json)")
    return parser


def setting_of(parts: Parts, text: str) -> str:
    """A setting of a peer that there is."""
    try:
        named(parts, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def require_gpu(device: str) -> None:
    """
    Raises:
        SystemExit: ``device`` is cuda, and this PyTorch sees none.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"no GPU is seen by PyTorch {torch.__version__}; --help says what runs on a CPU")


def run_command(options: argparse.Namespace, commands: Mapping[str, Command]) -> dict[str, Any]:
    """Do what ``options.command`` says; write and return what is behind its table (``FOLDER/COMMAND.json``)."""
    options.ends = time.monotonic() + options.within
    require_gpu(options.device)
    if options.out.exists() and not options.out.is_dir():
        raise SystemExit(f"--out {options.out}: is a file")
    options.out.mkdir(parents=True, exist_ok=True)
    found = commands[options.command](options)
    (options.out / f"{options.command}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def script(main: Callable[[], dict[str, Any]]) -> None:
    """Run a benchmark as a program: exit code 1 if a side failed or the comparison is void."""
    # a side is a session of its own; ended by an exception, and not by the signal, this process stops it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from dapo.errors import UserError

    try:
        found = main()
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.exit(bool(found.get("void")) or any(side.get("error") for side in found.get("sides", [])))


# --- sides ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a side's process said. ``error``: how it ended, if not well, with the last lines of its output."""

    name: str
    spawned: float
    records: list[dict[str, Any]]
    error: str | None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def first(self, kind: str) -> dict[str, Any]:
        """The values of its first record of a kind; none: empty."""
        found = next(iter(self.of(kind)), {})
        return {key: value for key, value in found.items() if key not in ("kind", "time")}

    def seconds_to(self, kind: str) -> float | None:
        """From the start of the process to the first such record."""
        return next((record["time"] - self.spawned for record in self.of(kind)), None)

    @property
    def limits(self) -> Limits | None:
        """Of the card, if it measured them."""
        found = self.first("limits")
        return Limits(**found) if found else None

    def facts(self) -> Side:
        """What a result says of every side."""
        parts = {kind: self.first(kind) or None for kind in ("machine", "limits", "memory")}
        warnings = [record["text"] for record in self.of("warning")]
        return {"name": self.name, "error": self.error, "speed": None, **parts, "warnings": warnings}


class Report:
    """JSON lines in a file: a side that fails later has still said what it found."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def say(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **values}) + "\n")
        self._file.flush()
        if "seconds" in values:  # for the side's log, which may be all that is kept
            print(f"{kind} {values.get('work', '')}: {values['seconds']:.3f} s", flush=True)


def measure_card(options: argparse.Namespace) -> Limits | None:
    """The card's limits, measured once for these options."""
    if "card" not in options:
        options.card = run_side(options, "limits", {"do": "ours:say_limits", "device": options.device}).limits
    return options.card  # type: ignore[no-any-return]


def read_records(file: Path) -> list[dict[str, Any]]:
    """What a side has said so far, line by line; of one that was ended in the middle of a line, those before it."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def run_side(options: argparse.Namespace, name: str, job: dict[str, Any]) -> Outcome:
    """A job in a process of its own, or as an earlier one left it (``--keep``).

    Of the options it needs ``out`` (where its files go), ``patience``, ``keep`` and ``peer_path``.
    """
    files = {kind: options.out / f"{name}.{kind}" for kind in ("job.json", "jsonl", "log")}
    text, before = json.dumps(job), Outcome(name, time.time(), [], None)
    if options.keep and files["job.json"].is_file() and files["job.json"].read_text(encoding="utf-8") == text:
        before = Outcome(name, files["job.json"].stat().st_mtime, read_records(files["jsonl"]), None)
        if before.of("done"):
            console.print(f"{name}: as measured before")
            return before
    if _left(options) <= 0:
        error = f"{name} not started: --within is over" + ("; begun once" if before.records else "")
        console.print(error, style="red", markup=False)
        return replace(before, error=error)
    files["jsonl"].unlink(missing_ok=True)
    files["job.json"].write_text(text, encoding="utf-8")
    console.print(f"{name} ...")
    spawned, error = time.time(), None
    code = _spawn(options, job, files)
    if code != 0:
        lines = files["log"].read_text(encoding="utf-8", errors="replace").splitlines()
        how = f"not done after {time.time() - spawned:.0f} s" if code is None else f"ended with code {code}"
        causes = [line for line in lines[:-15] if re.search(r"\w(Error|Exception): ", line)]  # of its own processes
        error = "\n".join([f"{name} {how}", *causes[-3:], *lines[-15:]])
        console.print(error, style="red", markup=False)
    return Outcome(name, spawned, read_records(files["jsonl"]), error)


def _left(options: argparse.Namespace) -> float:
    """Seconds until ``--within`` is over."""
    return float(getattr(options, "ends", math.inf)) - time.monotonic()


def _spawn(options: argparse.Namespace, job: dict[str, Any], files: Mapping[str, Path]) -> int | None:
    """Run the process of a side; its exit code, or None: it took too long. Nothing of its group is left on the card.

    A peer's process looks for everything in ``--peer-path`` first, and finds dapo after it."""
    peer = [options.peer_path] if job["do"].startswith("peers.") and options.peer_path else []
    paths = [*map(str, [*peer, HERE.parent / "src"]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), **job.get("environment", {})}
    command = [sys.executable, str(HERE / "runner.py"), str(files["job.json"])]
    with files["log"].open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(min(options.patience or math.inf, _left(options)))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def do_job(path: str) -> None:
    """What the process of a side does."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    module, _, function = job["do"].partition(":")
    report = Report(Path(path.removesuffix(".job.json") + ".jsonl"))
    report.say("machine", **machine())
    getattr(importlib.import_module(module), function)(job, report)
    report.say("done")


def machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


# --- comparing --------------------------------------------------------------------------------------------------------


def alternate(sides: Mapping[str, Callable[[int], Side]], rounds: int = 1) -> dict[str, list[Side]]:
    """What each side gives in each round; every other round they take turns the other way around."""
    found: dict[str, list[Side]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name](number) | {"name": name})
    return found


def conclude(work: Mapping[str, Any], rounds: Mapping[str, Sequence[Side]], void: Sequence[str]) -> dict[str, Any]:
    """A comparison: of each side the round of median speed, and of each side of ours the ratio to each of the peer's
    (those have a ``setting``) by speed and, where it is known, by processor time: the median over rounds."""
    sides = [sorted(of, key=lambda side: side["speed"] or 0)[len(of) // 2] for of in rounds.values()]
    ratios: dict[str, float] = {}
    for mine, theirs in ((a, b) for a in sides for b in sides if "setting" not in a and "setting" in b and not void):
        pairs = list(zip(rounds[mine["name"]], rounds[theirs["name"]], strict=True))
        name = f"{mine['name']} / {theirs['name']}"
        ratios[name] = median(a["speed"] / b["speed"] for a, b in pairs)
        if mine.get("cpu_seconds"):
            ratios[f"{name}, processor time"] = median(b["cpu_seconds"] / a["cpu_seconds"] for a, b in pairs)
    return {"work": work, "sides": sides, "rounds": dict(rounds), "ratios": ratios, "void": list(void)}


def failed(rounds: Mapping[str, Sequence[Side]]) -> list[str]:
    """Sides that were not measured, as reasons why a comparison is void."""
    return [f"{name} was not measured" for name, of in rounds.items() if not all(side["speed"] for side in of)]


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is the one of names."""
    drawn = Table(title=title)
    for number, head in enumerate(heads):
        drawn.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def number(value: float | str | None, form: str, scale: float = 1) -> str:
    """A figure as text; what is not known is a dash."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value if scale == 1 else value / scale:{form}}"


def figures(side: Side, rows: Rows) -> dict[str, str]:
    """What is known of a side, as text by label; of a value that is a mapping each entry has a label."""
    found = {}
    for key, label, form, unit in rows:
        value = side.get(key)
        parts = {f"{label}{part}": one for part, one in value.items()} if isinstance(value, dict) else {label: value}
        found |= {name: number(one, form, unit) for name, one in parts.items() if one is not None}
    return found


def told(side: Side, rows: Rows) -> Side:
    """The side, whose figures are printed now: a later one may be ended, and this process with it."""
    if text := "; ".join(f"{label} {value}" for label, value in figures(side, rows).items()):
        console.print(f"{side['name']}: {text}", highlight=False, markup=False, soft_wrap=True)
    return side


def side_by_side(sides: Sequence[Side], rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of all that is known of sides."""
    labels = dict.fromkeys(label for row in rows for side in sides for label in figures(side, [row]))
    names = (side["name"] + (f" ({side['setting']})" if "setting" in side else "") for side in sides)
    return ["", *names], [[label, *(figures(side, rows).get(label, "-") for side in sides)] for label in labels]


def show(title: str, found: Mapping[str, Any], rows: Rows) -> None:
    """The sides as columns, then ratios, or why there are none."""
    table(title, *side_by_side(found["sides"], rows))
    for limits in [of["limits"] for of in (found, *found["sides"]) if of.get("limits")][:1]:
        show_limits(limits)
    for name, ratio in found.get("ratios", {}).items():
        console.print(f"{name}: {ratio:.2f}x", highlight=False)
    for reason in found.get("void", []):
        console.print(f"VOID: {reason}", style="red", markup=False)


def show_limits(limits: Mapping[str, Any]) -> None:
    console.print(
        f"{limits['device']}: copy {limits['bytes_per_second'] / 1e12:.3g} TB/s (read + write), "
        f"matrix product {limits['operations_per_second'] / 1e12:.4g} TFLOP/s"
    )
    if peak := Limits(**limits).peak:
        rates = f"{peak.bytes_per_second / 1e12:.3g} TB/s, {peak.operations_per_second / 1e12:.4g} TFLOP/s"
        console.print(f"its maker states {rates}")


if __name__ == "__main__":
    if sys.platform == "linux":  # this process ends with the one that started it: its files will be another's
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    do_job(sys.argv[1])
