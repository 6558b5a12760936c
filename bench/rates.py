"""The rates that ``dapo plan`` reckons with (src/dapo/plan/rates.json), from measurements.

usage: python bench/rates.py decode POINTS.json    steps of decoding (bench/decode_points.json has the published ones)
       python bench/rates.py run RUN [RUN ...]     runs in which engine and learner take turns on a card

Either replaces its own rows of the card and leaves the others. ``decode``: seconds of a layer, and shares of the
maker's memory rate and matrix rate, by least squares of the relative error. ``run``: means over the steps from the
third one on and over the runs: the share of the matrix rate in updates, seconds of a sample in the rollout beside its
decoding, seconds of a trained sample in preparing and writing, seconds of handing weights over beside copying them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dapo.config import build_config, load_config
from dapo.observe.metrics import read_metrics
from dapo.orchestrator.mfu import CARDS, CardLimits
from dapo.plan import hardware
from dapo.plan.estimate import Assumed, Estimate, estimate_for
from dapo.training.lora import trainable_shape

TABLE = Path(hardware.__file__).with_name("rates.json")
UNITS = {
    "update": "of the maker's dense 16-bit rate, in forward and backward passes",
    "matmul": "of the maker's dense 16-bit rate, in the products of a decoding step",
    "bandwidth": "of the maker's memory rate, in a decoding step",
    "layer": "seconds of a layer in a decoding step, however few rows",
    "sample": "seconds of a sample in the rollout beside decoding: starting, text, scoring, counting",
    "rest": "seconds of a trained sample in preparing batches and writing files",
    "sync": "seconds of a step in handing weights over beside copying them: waking the engine",
}
FIRST = 3
"""Step from which on a run counts: everything is compiled and captured by then."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["decode", "run"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--card", default="H200", choices=sorted(CARDS))
    parser.add_argument("--source", help="what to say of where it was measured")
    parser.add_argument("--date", default=date.today().isoformat(), help="of the measurement")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args(arguments)
    if options.command == "decode":
        points = json.loads(options.paths[0].read_text(encoding="utf-8"))
        found, model, source = decode(points["steps"], options.card), points["model"], points["source"]
    else:
        model, runs = "", [Measured(path, options.card) for path in options.paths]
        found, model, source = rates(runs), runs[0].name, ", ".join(map(str, options.paths))
    about = {"model": model, "source": options.source or source, "date": options.date}
    about["written_by"] = f"python bench/rates.py {options.command}"
    old = json.loads(options.table.read_text(encoding="utf-8")) if options.table.exists() else []
    kept = [row for row in old if row["card"] != options.card or row["rate"] not in found]
    new = []
    for rate, value in found.items():
        row = {"card": options.card, "rate": rate, "value": float(f"{value:.3g}"), "unit": UNITS[rate]}
        new.append(row | about)
    lines = ",\n".join(f" {json.dumps(row)}" for row in [*kept, *new])
    options.table.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for row in new:
        print(f"{row['rate']}: {row['value']} {row['unit']}")


def decode(steps: Sequence[dict[str, Any]], card: str) -> dict[str, float]:
    """Of steps with ``model``, ``rows``, ``context`` (tokens, on average) and ``seconds``."""
    terms = []
    for step in steps:
        shape = hardware.published_shape(step["model"])[1]
        config = build_config({"model": {"path": step["model"], "compute_dtype": "bfloat16"}})
        limits = CardLimits.on(CARDS[card], trainable_shape(config.model, shape), 2)
        read = limits.weight_bytes + step["rows"] * (8 * shape.vocab_size + step["context"] * limits.cache_bytes)
        made = step["rows"] * limits.weight_bytes
        row = (shape.num_hidden_layers, read / CARDS[card].bytes, made / CARDS[card].operations)
        terms.append([value / step["seconds"] for value in row])
    layer, memory, matmul = np.linalg.lstsq(np.array(terms), np.ones(len(terms)), rcond=None)[0]
    return {"layer": float(layer), "bandwidth": float(1 / memory), "matmul": float(1 / matmul)}


class Measured:
    """A run, and the plan of it with the lengths and the share of kept groups that it had."""

    def __init__(self, path: Path, card: str) -> None:
        self.steps = [e for e in read_metrics(path / "metrics.jsonl") if e["step"] >= FIRST]
        config = load_config(path / "config.yaml")
        self.samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        trained = self.mean("response_length/kept_mean")
        prompt = self.mean("tokens/trained") / self.samples - trained
        keep = self.mean("groups/keep_rate") if config.algorithm.filter_groups.enable else 1.0
        assumed = Assumed(self.mean("response_length/mean"), prompt, keep)
        self.plan, self.name = estimate_for(config, card, assumed)
        self.updates: Estimate = replace(self.plan, assumed=replace(assumed, response=trained))

    def mean(self, *names: str) -> float:
        return sum(fmean(e[name] for e in self.steps) for name in names)


def rates(runs: Sequence[Measured]) -> dict[str, float]:
    def each() -> Iterator[dict[str, float]]:
        for run in runs:
            plan, seconds = run.plan, run.updates.seconds()
            host = run.mean("time/rollout") - plan.rollout()[0]
            found = {
                "update": plan.rates["update"] * seconds["update"] / run.mean("time/update"),
                "sample": plan.rates["sample"]
                + host / (run.mean("groups/drawn") * plan.config.rollout.samples_per_prompt),
                "sync": max(0.0, plan.rates["sync"] + run.mean("time/sync") - seconds["sync"]),
            }
            if not seconds["annotate"]:
                found["rest"] = run.mean("time/prepare", "time/rest") / run.samples
            yield found

    found = list(each())
    return {name: fmean(one[name] for one in found if name in one) for name in {n: 0 for one in found for n in one}}


if __name__ == "__main__":
    main()
