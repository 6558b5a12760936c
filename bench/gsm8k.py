"""GSM8K on one GPU: the data, the runs, TRL's run, and their curves.

usage: python bench/gsm8k.py data --train FILE --test FILE [--out runs/gsm8k-data] [--judge-rows 512]
       python bench/gsm8k.py run --split judge|test [--minutes N] [--model FOLDER] [KEY=VALUE ...]
       python bench/gsm8k.py trl [--setting NAME] [--peer-path SITE] [--minutes N] [--model FOLDER] [KEY=VALUE ...]
       python bench/gsm8k.py report RUN ... [--minute 10] [--out FOLDER]

``data`` writes train.jsonl and test.jsonl for ``recipes/gsm8k-1gpu.yaml``, and cuts 512 rows out of the training set
(for the same number always the same ones): judge.jsonl, by which the sweep is judged, and rest.jsonl, on which it
trains. Rows may have ``prompt`` and ``answer``, or ``question`` and a solution with "#### 72" at its end, as published;
plain or .gz.

``run`` is one run of the recipe, with the keys named. ``--split judge``: trained on rest.jsonl, evaluated on
judge.jsonl. ``--split test``: trained on train.jsonl, evaluated on test.jsonl. Each is a run folder with metrics.jsonl;
the rate of an 8192^3 bfloat16 matrix product of the card, measured just before, goes into card.json beside it.

``trl`` trains with TRL's GRPOTrainer and colocated vLLM for so many minutes on the rows, prompts, reward, warm-up,
batch, clipping and overlong punishment of the recipe, at a constant rate; dynamic sampling it does not have.
Once a minute (``--every``) the weights go into vLLM, which answers all rows of test.jsonl greedily; our own code scores
the answers and makes the numbers. What comes out is a folder with metrics.jsonl and card.json. Settings: see
``peers/trl.py`` (PARTS).

``report`` makes one table of the curves of some runs: accuracy against minutes of training, which are all since the
first step began but those of evaluations (ours: ``time/wall``, which has the writing of samples in it, as
``training.minutes`` has not: with ``--minutes 9.8`` a run ends before its minute 10); the value at a minute is that of
the last evaluation up to it. With ``--out`` also curves.csv, curves.json and curves.svg (needs dapo-rl[report]).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import runner
from dapo.config import load_config
from dapo.config.plan import recipe_path
from dapo.data.rows import BadRow, Keys, check_row, listed
from dapo.data.text import open_text
from dapo.errors import DataError, UserError
from dapo.evaluation.benchmarks import GSM8K
from dapo.observe.metrics import read_metrics
from peers.trl import PARTS
from runner import console, number
from work import measure_limits, task_of

JUDGED_ROWS, SPLIT_SEED = 512, 0
DATA = Path("runs/gsm8k-data")


def main(arguments: list[str] | None = None) -> Any:
    options = parse(arguments)
    try:
        return {"data": data, "run": run, "trl": trl, "report": report}[options.command](options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("data", help="make the recipe's files of rows").add_argument
    add("--train", type=Path, required=True, help="GSM8K's train.jsonl, plain or .gz")
    add("--test", type=Path, required=True, help="its test.jsonl")
    add("--out", type=Path, default=DATA, help=f"folder for them ({DATA})")
    add("--judge-rows", type=int, default=JUDGED_ROWS, help=f"rows of judge.jsonl ({JUDGED_ROWS})")
    for name, text in (("run", "as the recipe says"), ("trl", "with TRL and vLLM")):
        one = commands.add_parser(name, help=f"train, {text}")
        add = one.add_argument
        add("--minutes", type=float, help="of rollout steps; by default as the recipe says")
        add("--seed", type=int, default=1)
        add("--model", help="folder, in place of the recipe's")
        add("--data", type=Path, default=DATA, help=f"what data wrote ({DATA})")
        add("--out", type=Path, default=Path("runs"), help="folder that the run folder will lie in (runs)")
        add("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe, such as evaluation.every=3")
        if name == "run":
            add("--split", choices=["judge", "test"], required=True, help="what it is evaluated on")
        else:
            add("--setting", default="defaults", type=partial(runner.setting_of, PARTS), help="of TRL")
            add("--peer-path", type=Path, help="folder that pip installed TRL and vLLM to with --target")
            add("--every", type=float, default=1.0, help="minutes between evaluations")
            one.set_defaults(split="test", device="cuda", keep=False, patience=None)
    add = commands.add_parser("report", help="a table of the curves of runs").add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    add("--minute", type=float, default=10.0, help="of training, at which they are compared (10)")
    add("--out", type=Path, help="folder for curves.csv, curves.json and curves.svg")
    options = parser.parse_args(arguments)
    if options.command == "trl":
        check_trl(options, parser)
    return options


def check_trl(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what cannot be run to its end."""
    for name in ("minutes", "every"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value}: must be a number above 0")
    for name in ("train", "test"):
        if not (options.data / f"{name}.jsonl").is_file():
            parser.error(f"--data {options.data}: has no {name}.jsonl; python bench/gsm8k.py data makes it")


# --- data -------------------------------------------------------------------------------------------------------------


def data(options: argparse.Namespace) -> dict[str, int]:
    """Write the four files; returns their numbers of rows."""
    test = read_rows(options.test)
    seen = {_same(row["prompt"]) for row in test}
    train = [row for row in read_rows(options.train) if _same(row["prompt"]) not in seen]
    rest, judge = split(train, options.judge_rows)
    if not judge:
        raise DataError(
            f"{options.train}: holds {len(train)} problems that are not in {options.test}; at least 2 are needed"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    files = {"train": train, "test": test, "rest": rest, "judge": judge}
    for name, rows in files.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (options.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        console.print(f"{options.out / name}.jsonl: {len(rows)} rows", highlight=False)
    return {name: len(rows) for name, rows in files.items()}


def split(
    rows: Sequence[dict[str, str]], judged_rows: int = JUDGED_ROWS
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """``(rest, judge)``, both in the order of ``rows``; a problem that is there twice is on one side only."""
    judged = set(random.Random(SPLIT_SEED).sample(range(len(rows)), min(judged_rows, len(rows) // 2)))
    judge = [row for i, row in enumerate(rows) if i in judged]
    seen = {_same(row["prompt"]) for row in judge}
    return [row for row in rows if _same(row["prompt"]) not in seen], judge


def read_rows(file: Path) -> list[dict[str, str]]:
    """``prompt`` and ``answer`` of each row.

    Raises:
        DataError: the file cannot be read, or rows have neither layout; names them.
    """
    table, rows, faults = open_text(file, str(file)), [], []
    for i in range(len(table)):
        try:
            rows.append(_problem(table.raw(i)))
        except BadRow as fault:
            faults.append(f"{table.place(i)}: {fault}")
    if faults:
        raise DataError(listed(faults))
    return rows


def _problem(raw: Any) -> dict[str, str]:
    published = isinstance(raw, Mapping) and GSM8K.prompt_key in raw
    row = check_row(raw, Keys(GSM8K.prompt_key if published else "prompt"), "")
    answer = GSM8K.answer(row.answer or "") if published else row.answer
    if answer is None:
        raise BadRow("the solution of a question has to end with '#### 72' or the like")
    return {"prompt": row.text, "answer": answer}


def _same(prompt: str) -> str:
    return " ".join(prompt.lower().split())


# --- a run ------------------------------------------------------------------------------------------------------------


def overrides(options: argparse.Namespace) -> list[str]:
    """What makes of the recipe the run that the options ask for."""
    ours = options.command == "run"
    name = "recipe" if ours else "trl"
    train = "rest" if options.split == "judge" else "train"
    values: dict[str, Any] = {
        "data.train": options.data / f"{train}.jsonl",
        "evaluation.data": options.data / f"{options.split}.jsonl",
        "seed": options.seed,
        "run.dir": options.out / f"gsm8k-{options.split}-{name}-seed{options.seed}",
    }
    values |= {"model.path": options.model} if options.model else {}
    values |= {} if options.minutes is None else {"training.minutes": options.minutes}
    return [*(f"{key}={value}" for key, value in values.items()), *options.overrides]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train; the run folder's summary."""
    from dapo.model.placement import device_of
    from dapo.observe.progress import make_listener
    from dapo.orchestrator.launch import run_experiment

    config = load_config(recipe_path("gsm8k-1gpu"), overrides(options))
    limits = measure_limits(device_of(config).type)
    listener = make_listener()
    try:
        summary = run_experiment(config, listener)
        listener.finished(summary)
    finally:
        listener.close()
    (Path(summary["run_dir"]) / "card.json").write_text(json.dumps(asdict(limits)), encoding="utf-8")
    tell(Path(summary["run_dir"]))
    return summary


def trl(options: argparse.Namespace) -> None:
    """Train with TRL until the minutes are over, evaluating in between."""
    runner.require_gpu(options.device)
    config = load_config(recipe_path("gsm8k-1gpu"), overrides(options))
    options.out = Path(str(config.run.dir))
    options.out.mkdir(parents=True, exist_ok=True)
    card = runner.measure_card(options)
    (options.out / "card.json").write_text(json.dumps(asdict(card) if card else {}), encoding="utf-8")
    task = task_of(config, options.data / "train.jsonl")
    job = {"do": "peers.trl_jobs:learn", "task": asdict(task), "setting": options.setting, "reward": "math"}
    job |= {"out": str(options.out), "heldout": str(options.data / "test.jsonl")}
    job |= {"seconds": 60 * (config.training.minutes or 0), "every": 60 * options.every}
    if runner.run_side(options, "trl", job).error is not None:
        raise SystemExit(1)
    tell(options.out)


def tell(folder: Path) -> None:
    last = read_curve(folder)["points"][-1]
    console.print(f"after {last['minutes']:.2f} minutes: {last['accuracy']:.1%}", highlight=False)


# --- curves -----------------------------------------------------------------------------------------------------------


FIGURES = {name: name for name in ("accuracy", "no_answer", "lenient", "truncated", "response_length")}
FIGURES |= {"low": "accuracy_low", "high": "accuracy_high"}
"""What is known of an evaluation, beside its step and minute of training, and the metrics (``eval/``) they are."""
Point = dict[str, Any]
Curve = dict[str, Any]


def read_curve(folder: Path) -> Curve:
    """The curve in a run folder's metrics.jsonl, and what card.json says.

    Raises:
        UserError: there is none, or a line or the card cannot be read.
    """
    points, steps, elapsed, spent = [], 0, None, 0.0
    for entry in read_metrics(folder / "metrics.jsonl"):
        steps, elapsed = entry["step"], entry.get("time/elapsed", elapsed)
        # TRL's side counts in time/training what passes between evaluations; ours leaves files out there
        spent += (entry.get("time/wall") or 0.0) - (entry.get("time/evaluation") or 0.0)
        if entry.get("eval/accuracy") is not None:
            seconds = spent if "time/wall" in entry else entry.get("time/training") or 0.0
            figures = {name: entry.get(f"eval/{key}") for name, key in FIGURES.items()}
            points.append({"step": steps, "minutes": seconds / 60, **figures})
    if not points:
        raise DataError(f"{folder}: no evaluation in metrics.jsonl")
    found = {"run": folder.resolve().name, "points": points, "steps": steps, "elapsed_seconds": elapsed}
    return found | {"card": _card(folder / "card.json")}


def point_at(curve: Curve, minute: float) -> Point:
    """The last evaluation up to a minute of training.

    Raises:
        DataError: there is none.
    """
    found = [point for point in curve["points"] if point["minutes"] <= minute + 1e-9]
    if not found:
        first = f"{curve['points'][0]['minutes']:g}"
        raise DataError(f"{curve['run']}: the first evaluation is at minute {first}; use --minute {first} or later")
    return dict(found[-1])


def _card(file: Path) -> dict[str, Any]:
    """What was measured of the card; nothing if that was not."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file}: cannot be read: {error}; take it away to do without") from None


def report(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table of all runs, and one of each curve; write them if asked to."""
    curves = [read_curve(folder) for folder in options.runs]
    found = [summary(curve, options.minute) for curve in curves]
    heads = ("run", "before", "after", "95%", "at minute", "steps", "no answer", "any format", "cut", "TFLOP/s")
    lines = []
    for one in found:
        before, after = one["before"], one["after"]
        pairs = [(before[key], after[key]) for key in ("no_answer", "lenient", "truncated")]
        line = [one["run"], *(_share(end["accuracy"]) for end in (before, after))]
        line += [f"{_share(after['low'])} to {_share(after['high'])}", f"{after['minutes']:.2f}", str(after["step"])]
        line += [f"{_share(first)} → {_share(last)}" for first, last in pairs]
        lines.append([*line, number(one["card"].get("operations_per_second"), ".0f", 1e12)])
    runner.table(f"greedy accuracy before and at minute {options.minute:g} of training", heads, lines)
    for curve in curves:
        points = "  ".join(f"{p['minutes']:.1f}: {p['accuracy']:.1%}" for p in curve["points"])
        console.print(f"{curve['run']}: {points}", highlight=False)
    if options.out:
        write_curves(curves, found, options.out)
    return found


def summary(curve: Curve, minute: float) -> dict[str, Any]:
    ends = {"before": curve["points"][0], "after": point_at(curve, minute)}
    return ends | {name: curve[name] for name in ("run", "steps", "elapsed_seconds", "card")}


def write_curves(curves: Sequence[Curve], found: Sequence[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["run", "step", "minutes", *FIGURES])
        writer.writeheader()
        writer.writerows({"run": curve["run"]} | point for curve in curves for point in curve["points"])
    (folder / "curves.json").write_text(json.dumps(list(found), indent=1), encoding="utf-8")
    draw(curves, folder / "curves.svg")


def draw(curves: Sequence[Curve], file: Path) -> None:
    """The curves as a picture: accuracy against minutes of training, both from 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        minutes, accuracies = zip(*((p["minutes"], 100 * p["accuracy"]) for p in curve["points"]), strict=True)
        axes.plot(minutes, accuracies, label=curve["run"])
    axes.set(xlabel="minutes of training", ylabel="accuracy, %", xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def _share(value: float | None) -> str:
    return number(value, ".1%")


if __name__ == "__main__":
    main()
