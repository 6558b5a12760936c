"""Rollout on one card: tokens a second, ours beside vLLM's, and both beside what the card can do.

usage: python bench/rollout.py COMMAND --out FOLDER [--vllm-path SITE] ...

  limits    what the card can do: bytes a second of a copy, operations a second of a bfloat16 matrix product
  steady    decode steps with all rows at one context: --shapes, --rows, --contexts, --sides
  ours      the rollout with our engine alone
  vllm      the rollout with vLLM in each of the settings of --search; the results are collected in search.json
  compare   ours, vLLM's best setting of search.json (or --best), vLLM's defaults; the ratio comes last
  startup   process start to first token, with an empty compile cache and with the cache that this left

The rollout is ``--samples`` responses to each of ``--prompts`` prompts, up to ``--limit`` tokens, T = 1, log-probs on.
Tokens a second are completion tokens / (first submit to last sample). With ``--model FOLDER --prompts FILE`` it is the
real one, whose responses end when the model ends them. Without, weights are random (``--shape``), prompts too, and
response lengths are those of ``response_lengths.json``, the same in both engines; good for development only.

Every side runs in a process of its own, one after the other, on the whole card. Each starts with a short rollout of
other prompts. Ours is the median of ``--repeats``, vLLM's the best of ``--peer-repeats``. vLLM is imported from
``--vllm-path`` (a folder that pip installed it to with ``--target``) by its own processes only. A side that fails or
outlasts ``--patience`` is reported with the end of its output; the others go on.

The least bytes and operations are counted in ``rollout_work.py``; shares are of the card's limits, measured in the same
run. A comparison is void unless vLLM reaches what is known of it: 18k tokens/s at 128 x 16 with the 0.5B model on an
NVIDIA H100 80GB (vLLM 0.25.1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rollout_vllm import named  # noqa: E402  (modules beside this one)
from rollout_work import (  # noqa: E402
    INSTRUCTION,
    SHAPES,
    Limits,
    Shape,
    Work,
    drawn_lengths,
    random_prompts,
    rollout_cost,
    step_cost,
)

KNOWN_RATE = 18_000
"""Tokens a second of vLLM 0.25.1 at its best on an NVIDIA H100 80GB: 0.5B model, 128 x 16, up to 768 tokens."""

console = Console(width=160)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run a command, print its table, and write and return what is behind it (``FOLDER/COMMAND.json``)."""
    options = parse(arguments)
    require_gpu(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    found = COMMANDS[options.command](options)
    (options.out / f"{options.command}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--vllm-path", type=Path, help="folder that vLLM is installed in")
    parser.add_argument("--patience", type=float, default=300, help="seconds that a side may take")
    work = parser.add_argument_group("the rollout")
    work.add_argument("--model", type=Path, help="folder of the real model; without, random weights")
    work.add_argument("--shape", default="0.5b", choices=sorted(SHAPES), help="of random weights")
    work.add_argument("--prompts", default="128", help="how many, or with --model a JSON Lines file with 'prompt'")
    work.add_argument("--samples", type=positive, default=16, help="for each prompt")
    work.add_argument("--limit", type=positive, default=768, help="response tokens at most")
    work.add_argument("--concurrent", type=positive, default=1024, help="sequences at once in our engine")
    work.add_argument("--repeats", type=positive, default=3, help="of ours; the median counts")
    work.add_argument("--peer-repeats", type=positive, default=1, help="of vLLM's; the best counts")
    work.add_argument("--no-mismatch", action="store_true", help="leave out the comparison with the trainer")
    work.add_argument("--write-lengths", type=Path, metavar="FILE", help="ours, with --model: save response lengths")
    peer = parser.add_argument_group("vLLM's settings")
    peer.add_argument("--search", nargs="+", default=["defaults"], metavar="NAME", help="see rollout_vllm.py: PARTS")
    peer.add_argument("--best", metavar="NAME", help="setting to compare with, in place of search.json's best")
    state = parser.add_argument_group("steady states")
    state.add_argument("--shapes", nargs="+", default=["0.5b"], choices=sorted(SHAPES))
    state.add_argument("--rows", nargs="+", type=positive, default=[256, 1024, 2048])
    state.add_argument("--contexts", nargs="+", type=positive, default=[512, 2048, 16384])
    state.add_argument("--lead", type=positive, default=32, help="tokens before the measured ones")
    state.add_argument("--steps", type=positive, default=256, help="measured decode steps")
    state.add_argument("--sides", nargs="+", default=["ours"], choices=["ours", "vllm"], help="also of startup")
    options = parser.parse_args(arguments)
    for setting in [*options.search, *([options.best] if options.best else [])]:
        try:
            named(setting)
        except ValueError as error:
            parser.error(str(error))
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out}: is a file")
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model {options.model}: no such folder")
    if options.model is None and not (options.prompts.isdigit() and int(options.prompts)):
        parser.error(f"--prompts {options.prompts}: a number above 0, or with --model a file")
    if options.model is not None and options.prompts.isdigit():
        parser.error("--model needs --prompts FILE")
    if options.model is None and options.write_lengths:
        parser.error("--write-lengths needs --model: with random weights lengths are those of the list already")
    return options


def positive(text: str) -> int:
    """An option's whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def require_gpu(device: str) -> None:
    """
    Raises:
        SystemExit: ``device`` is one that this PyTorch does not see.
    """
    if device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"no GPU is seen by PyTorch {torch.__version__}; --help says what runs on a CPU")


def odd(text: str) -> int:
    """An option's whole number that has a middle one."""
    number = positive(text)
    if number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be odd, so that one of them is the median")
    return number


def assignment(text: str) -> str:
    """An option that is ``KEY=VALUE``, the value in YAML."""
    key, equals, value = text.partition("=")
    try:
        yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text}: {value} is no value: {str(error).splitlines()[0]}") from None
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE, such as training.learning_rate=1e-6")
    return text


def read_records(file: Path) -> list[dict[str, Any]]:
    """What a side has said so far, line by line; of one that was ended in the middle of a line, those before it."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


# --- the work ---------------------------------------------------------------------------------------------------------


def make_work(options: argparse.Namespace) -> Work:
    """The rollout that the options ask for."""
    if options.model is None:
        shape = SHAPES[options.shape]
        lengths = drawn_lengths(int(options.prompts))
        prompts, limits = random_prompts((p for p, _ in lengths), shape.vocabulary), [r for _, r in lengths]
        model, stop_ids = shape.write(options.out / f"shape-{options.shape}"), []
    else:
        model = options.model
        prompts, stop_ids = read_prompts(model, Path(options.prompts))
        limits = [options.limit] * len(prompts)
    return Work(
        model=str(model),
        random=options.model is None,
        prompts=prompts,
        limits=[min(limit, options.limit) for limit in limits],
        samples=options.samples,
        stop_ids=stop_ids,
        temperature=1.0,
        concurrent=options.concurrent,
        device=options.device,
        dtype=options.dtype,
    )


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


# --- a side -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a side's process said. ``error``: how it ended, if not well, with the last lines of its output."""

    name: str
    spawned: float
    records: list[dict[str, Any]]
    error: str | None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Its records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def seconds_to(self, kind: str) -> float | None:
        """From the start of the process to the first such record."""
        return next((record["time"] - self.spawned for record in self.of(kind)), None)

    @property
    def limits(self) -> Limits | None:
        """Of the card, if it measured them."""
        found = self.of("limits")
        return Limits(**{k: v for k, v in found[0].items() if k not in ("kind", "time")}) if found else None


def run_side(
    options: argparse.Namespace, name: str, job: dict[str, Any], environment: dict[str, str] | None = None
) -> Outcome:
    """A job in a process of its own (``rollout_vllm.py`` if it names a setting, else ``rollout_ours.py``)."""
    theirs = "setting" in job
    paths = [options.vllm_path] if theirs and options.vllm_path else [HERE.parent / "src"]
    script = HERE / ("rollout_vllm.py" if theirs else "rollout_ours.py")
    return run_script(options, name, script, job, paths, environment)


def run_script(
    options: argparse.Namespace,
    name: str,
    script: Path,
    job: dict[str, Any],
    first: list[Path],
    environment: dict[str, str] | None = None,
) -> Outcome:
    """A script of this folder in a process of its own, with a job to do; ``first``: folders to import from first.

    Of the options it needs ``out`` (where its files go) and ``patience`` (seconds that it may take).
    """
    paths = [*map(str, first), *(p for p in (os.environ.get("PYTHONPATH"),) if p)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(paths)} | (environment or {})
    files = {kind: options.out / f"{name}.{kind}" for kind in ("job.json", "jsonl", "log")}
    files["jsonl"].unlink(missing_ok=True)
    files["job.json"].write_text(json.dumps(job | {"report": str(files["jsonl"])}), encoding="utf-8")
    console.print(f"{name} ...")
    spawned = time.time()
    with files["log"].open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(files["job.json"])],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = _wait(process, options.patience)
    records = read_records(files["jsonl"])
    error = None
    if code != 0:
        how = f"not done after {options.patience:g} s" if code is None else f"ended with code {code}"
        tail = files["log"].read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        error = "\n".join([f"{name} {how}", *tail])
        console.print(error, style="red", markup=False)
    return Outcome(name, spawned, records, error)


def _wait(process: subprocess.Popen[bytes], patience: float) -> int | None:
    """Exit code; None: it took too long. Either way nothing of the process's group is left on the card."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- rollout: ours, vllm, compare -------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Our engine alone."""
    work = make_work(options)
    side = run_ours(options, work)
    found = {"work": describe(work), "sides": [summary(side, work, side.limits)], **_extras(side)}
    show_rollout(found)
    if options.write_lengths and side.of("rollout"):
        write_lengths(options, work, side.of("rollout")[0]["lengths"])
    return found


def write_lengths(options: argparse.Namespace, work: Work, lengths: list[list[int]]) -> None:
    """Lengths of real responses with where they come from, as ``response_lengths.json`` holds them."""
    where = {"model": Path(work.model).name, "prompts": Path(options.prompts).name, "instruction": INSTRUCTION}
    how = {"samples": work.samples, "temperature": work.temperature, "limit": max(work.limits)}
    found = where | how | {"date": time.strftime("%Y-%m-%d", time.gmtime()), "device": work.device}
    rows = ",\n".join(json.dumps(pair) for pair in lengths)
    head = json.dumps(found, indent=1).removesuffix("\n}")
    text = f'{head},\n "about": "[prompt tokens, response tokens] of each sample",\n "lengths": [\n{rows}\n ]\n}}\n'
    options.write_lengths.write_text(text, encoding="utf-8")


def vllm(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM in each setting of ``--search``."""
    work = make_work(options)
    limits = run_side(options, "limits", {"job": "limits", "device": options.device}).limits
    sides = []
    for setting in options.search:
        sides.append(summary(run_theirs(options, work, setting), work, limits) | {"setting": setting})
        _remember(options, work, sides[-1])
    found = {"work": describe(work), "limits": limits and asdict(limits), "sides": sides}
    show_rollout(found)
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Ours, vLLM's best, vLLM's defaults."""
    work = make_work(options)
    best = options.best or best_of(options, work)
    mine = run_ours(options, work)
    limits = mine.limits
    settings = {"vLLM best": best, "vLLM defaults": "defaults"}
    sides = [summary(mine, work, limits)]
    for name, setting in settings.items():
        if setting is None:
            console.print("there is no search.json for this rollout: run the command vllm first, or name --best")
            continue
        side = run_theirs(options, work, setting)
        sides.append(summary(side, work, limits) | {"name": name, "setting": setting})
    for side in sides[1:]:
        side["ratio"] = sides[0]["rate"] / side["rate"] if sides[0]["rate"] and side["rate"] else None
    found = {"work": describe(work), "sides": sides, **_extras(mine)}
    found["void"] = void_reasons(work, sides)
    found["known_rate"] = known_rate(work)
    show_rollout(found)
    return found


def run_ours(options: argparse.Namespace, work: Work) -> Outcome:
    """The rollout with our engine; the mismatch needs weights that mean something."""
    job = {"job": "rollout", "work": asdict(work), "repeats": options.repeats, "device": work.device}
    return run_side(options, "ours", job | {"mismatch": not (work.random or options.no_mismatch)})


def run_theirs(options: argparse.Namespace, work: Work, setting: str) -> Outcome:
    """The rollout with vLLM in a setting."""
    job = {"job": "rollout", "work": asdict(work), "repeats": options.peer_repeats, "setting": setting}
    return run_side(options, f"vllm-{setting}", job)


def summary(side: Outcome, work: Work, limits: Limits | None) -> dict[str, Any]:
    """Figures of a side; ``rate`` is None if it never came to an end."""
    runs = side.of("rollout")
    found: dict[str, Any] = {"name": side.name, "error": side.error, "rate": None, "runs": []}
    found["start_seconds"] = side.seconds_to("ready")
    for run in runs:
        lengths = [(p, n) for p, n in run["lengths"]]
        tokens = sum(n for _, n in lengths)
        found["runs"].append(
            {"seconds": run["seconds"], "tokens": tokens, "samples": len(lengths), "rate": tokens / run["seconds"]}
        )
        if "cpu_seconds" in run:
            found["runs"][-1]["cpu_seconds"] = run["cpu_seconds"]
        if limits is not None:
            cost = rollout_cost(Shape.read(work.model), lengths, [len(p) for p in work.prompts], work.concurrent)
            found["runs"][-1] |= _shares(cost, limits, run["seconds"])
    if runs:
        rates = [run["rate"] for run in found["runs"]]
        found["rate"] = max(rates) if side.name.startswith("vllm") else median(rates)
    return found


def _shares(cost: Any, limits: Limits, seconds: float) -> dict[str, float]:
    by_bytes, by_operations = cost.seconds(limits)
    return {
        "bytes": cost.bytes,
        "operations": cost.operations,
        "share_of_bytes": by_bytes / seconds,
        "share_of_operations": by_operations / seconds,
    }


def _extras(side: Outcome) -> dict[str, Any]:
    """What our side alone reports."""
    found: dict[str, Any] = {"limits": side.limits and asdict(side.limits)}
    for kind in ("mismatch", "memory"):
        found[kind] = next(({k: v for k, v in r.items() if k not in ("kind", "time")} for r in side.of(kind)), None)
    return found


def describe(work: Work) -> dict[str, Any]:
    """The work without its token ids."""
    return {
        "model": work.model,
        "random": work.random,
        "prompts": len(work.prompts),
        "prompt_tokens": sum(map(len, work.prompts)),
        "samples": work.samples,
        "limit": max(work.limits),
        "temperature": work.temperature,
        "concurrent": work.concurrent,
        "device": work.device,
        "dtype": work.dtype,
    }


def _remember(options: argparse.Namespace, work: Work, side: dict[str, Any]) -> None:
    """Add a result to search.json, which several calls may fill."""
    file = options.out / "search.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    work_of = describe(work)
    kept = [entry for entry in known if (entry["setting"], entry["work"]) != (side["setting"], work_of)]
    file.write_text(json.dumps([*kept, side | {"work": work_of}], indent=1), encoding="utf-8")


def best_of(options: argparse.Namespace, work: Work) -> str | None:
    """The fastest setting found for this very rollout, or None."""
    file = options.out / "search.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rates = {e["setting"]: e["rate"] for e in known if e["rate"] is not None and e["work"] == describe(work)}
    return max(rates, key=lambda name: rates[name]) if rates else None


def known_rate(work: Work) -> int | None:
    """What vLLM is known to reach on this work; None: nothing is known."""
    same = Shape.read(work.model) == SHAPES["0.5b"] and len(work.prompts) * work.samples == 2048
    return KNOWN_RATE if same and max(work.limits) >= 512 else None


def void_reasons(work: Work, sides: list[dict[str, Any]]) -> list[str]:
    """Why a comparison says nothing; empty if it does."""
    mine, peers = sides[0], sides[1:]
    reasons = [f"{side['name']} failed" for side in sides if side["rate"] is None]
    if len(peers) < 2:
        reasons.append("vLLM's best setting or its defaults are missing")
    bar, reached = known_rate(work), max((p["rate"] for p in peers if p["rate"]), default=0)
    if bar is not None and reached < bar:
        reasons.append(f"vLLM reached {reached:,.0f} tokens/s, and {bar:,} are known of it on an NVIDIA H100 80GB")
    counts = {run["samples"] for side in sides for run in side["runs"]}
    if work.random:
        counts |= {run["tokens"] for side in peers for run in side["runs"]} - {r["tokens"] for r in mine["runs"]}
    if len(counts) > 1:
        reasons.append(f"the sides did not do the same work: {sorted(counts)}")
    return reasons


def show_rollout(found: dict[str, Any]) -> None:
    """The table; the ratio is its last column."""
    work, card = found["work"], (found.get("limits") or {}).get("device", work_device(found))
    what = "random weights, listed lengths" if work["random"] else "real model"
    table = Table(
        title=f"{card}: {work['model']} ({what}), {work['prompts']} x {work['samples']}, up to {work['limit']} tokens, "
        f"T = {work['temperature']:g}, log-probs on"
    )
    columns = ("start s", "runs", "tokens", "seconds", "tokens/s", "of bytes", "of operations", "ours / this")
    table.add_column("side")
    for column in columns:
        table.add_column(column, justify="right")
    for side in found["sides"]:
        run = min(side["runs"], key=lambda r: abs(r["rate"] - side["rate"]), default={})
        label = side["name"] if side.get("setting") in (None, "defaults") else f"{side['name']} ({side['setting']})"
        table.add_row(
            label,
            _number(side["start_seconds"], ".1f"),
            str(len(side["runs"])),
            _number(run.get("tokens"), ",d"),
            _number(run.get("seconds"), ".2f"),
            _number(side["rate"], ",.0f") if side["rate"] else "failed",
            _number(run.get("share_of_bytes"), ".0%"),
            _number(run.get("share_of_operations"), ".0%"),
            _number(side.get("ratio"), ".2f", "x"),
        )
    console.print(table)
    _show_notes(found)


def work_device(found: dict[str, Any]) -> str:
    """Where it ran, for want of the card's name."""
    return str(found["work"]["device"])


def _show_notes(found: dict[str, Any]) -> None:
    if found.get("limits"):
        show_limits(found["limits"])
    if found.get("mismatch"):
        m = found["mismatch"]
        console.print(
            f"engine - trainer log-prob: mean |difference| {m['mean']:.5f}, largest {m['largest']:.3f}, "
            f"{m['share_above_0.1']:.3%} above 0.1, over {m['tokens']:,} tokens"
        )
    if found.get("memory"):
        console.print(f"our largest device memory: {found['memory']['bytes'] / 1e9:.1f} GB")
    if "void" in found:
        if found["known_rate"] is None:
            console.print("nothing is known of vLLM's rate on this work, so it was not held against vLLM")
        for reason in found["void"]:
            console.print(f"VOID: {reason}", style="red", markup=False)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


# --- limits, steady, startup ------------------------------------------------------------------------------------------


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """What the card can do."""
    side = run_side(options, "limits", {"job": "limits", "device": options.device})
    found = {"limits": side.limits and asdict(side.limits), "error": side.error}
    if found["limits"]:
        show_limits(found["limits"])
    return found


def show_limits(found: dict[str, Any]) -> None:
    """One line."""
    console.print(
        f"{found['device']}: copy {found['bytes_per_second'] / 1e12:.3g} TB/s (read + write), "
        f"bfloat16 matrix product {found['operations_per_second'] / 1e12:.4g} TFLOP/s"
    )


def steady(options: argparse.Namespace) -> dict[str, Any]:
    """Decode steps of each shape at each number of rows and each context."""
    cells: list[dict[str, Any]] = []
    for name in options.shapes:
        folder = SHAPES[name].write(options.out / f"shape-{name}")
        job = {
            "job": "steady",
            "model": str(folder),
            "cells": [[rows, context] for context in options.contexts for rows in options.rows],
            "lead": options.lead,
            "steps": options.steps,
            "repeats": options.repeats,
            "device": options.device,
            "dtype": options.dtype,
        }
        known: Limits | None = None
        for side in options.sides:
            more = {"setting": options.best or "defaults"} if side == "vllm" else {}
            outcome = run_side(options, f"steady-{name}-{side}", job | more)
            known = outcome.limits or known
            rates = {(c["rows"], c["context"]): c.get("tokens_per_second") for c in cells if c["shape"] == name}
            for cell in outcome.of("cell"):
                ratio = _ratio(rates.get((cell["rows"], cell["context"])), cell.get("tokens_per_second"))
                cells.append({"shape": name, "side": side, "ratio": ratio, **_with_cost(cell, SHAPES[name], known)})
            if outcome.error:
                cells.append({"shape": name, "side": side, "rows": 0, "context": 0, "error": outcome.error})
    found = {"cells": cells, "limits": known and asdict(known)}
    show_steady(found)
    return found


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine and theirs else None


def _with_cost(cell: dict[str, Any], shape: Shape, known: Limits | None) -> dict[str, Any]:
    if known is None or "step_seconds" not in cell:
        return cell
    return cell | _shares(step_cost(shape, cell["rows"], cell["context"]), known, cell["step_seconds"])


def show_steady(found: dict[str, Any]) -> None:
    """The table; the ratio is its last column."""
    if found["limits"]:
        show_limits(found["limits"])
    table = Table(title="steady decoding: every row at the same context, each with a prompt of its own")
    for column in ("shape", "side"):
        table.add_column(column)
    for column in ("rows", "context", "ms/step", "tokens/s", "GB/step", "of bytes", "TFLOP/step", "of operations"):
        table.add_column(column, justify="right")
    table.add_column("ours / this", justify="right")
    for cell in found["cells"]:
        step = cell.get("step_seconds")
        missing = cell.get("skipped") or cell.get("error", "").split("\n")[0]
        table.add_row(
            cell["shape"],
            cell["side"],
            f"{cell['rows']:,}",
            f"{cell['context']:,}",
            f"{step * 1000:.2f}" if step else "",
            _number(cell.get("tokens_per_second"), ",.0f") or missing,
            _number(cell["bytes"] / 1e9 if "bytes" in cell else None, ".2f"),
            _number(cell.get("share_of_bytes"), ".0%"),
            _number(cell["operations"] / 1e12 if "operations" in cell else None, ".2f"),
            _number(cell.get("share_of_operations"), ".0%"),
            _number(cell.get("ratio"), ".2f", "x"),
        )
    console.print(table)


def startup(options: argparse.Namespace) -> dict[str, Any]:
    """Each side twice: with empty caches, and with what the first start left in them."""
    work = make_work(options)
    found: dict[str, Any] = {"work": describe(work), "starts": []}
    for side in options.sides:
        cache = options.out / f"cache-{side}-{int(time.time())}"
        for state in ("cold", "warm"):
            job: dict[str, Any] = {"job": "startup", "work": asdict(work)}
            job |= {"setting": options.best or "defaults"} if side == "vllm" else {}
            outcome = run_side(options, f"startup-{side}-{state}", job, _caches(cache))
            seconds = {kind: outcome.seconds_to(kind) for kind in STARTUP_MARKS}
            found["starts"].append({"side": side, "state": state, "error": outcome.error, "seconds": seconds})
    show_startup(found)
    return found


STARTUP_MARKS = ("imported", "loaded", "ready", "first token", "first batch")


def _caches(folder: Path) -> dict[str, str]:
    """Variables that put every cache of compiled code into a folder."""
    names = {
        "DAPO_CACHE": "dapo",
        "XDG_CACHE_HOME": "xdg",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "VLLM_CACHE_ROOT": "vllm",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    }
    return {variable: str(folder / name) for variable, name in names.items()}


def show_startup(found: dict[str, Any]) -> None:
    """Seconds from the start of the process."""
    table = Table(title="seconds from process start; ready: the engine exists; first batch: all rows, 16 tokens each")
    table.add_column("side")
    table.add_column("compile cache")
    for name in STARTUP_MARKS:
        table.add_column(name, justify="right")
    for start in found["starts"]:
        cells = [_number(start["seconds"][name], ".1f") for name in STARTUP_MARKS]
        table.add_row(start["side"], start["state"], *cells)
    console.print(table)


COMMANDS = {
    "limits": limits,
    "steady": steady,
    "ours": ours,
    "vllm": vllm,
    "compare": compare,
    "startup": startup,
}


def _failed(found: dict[str, Any]) -> bool:
    """Whether a side did not work, or a comparison is void."""
    return bool(found.get("void")) or any(side.get("error") for side in found.get("sides", []))


if __name__ == "__main__":
    # a side is a session of its own; ended by an exception, and not by the signal, this process stops it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from dapo.errors import UserError

    try:
        sys.exit(_failed(main()))
    except UserError as error:
        sys.exit(f"error: {error}")
