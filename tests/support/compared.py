"""What the tests of comparisons share: recipes over a tiny model, and a comparison as it would lie there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dapo.comparison.folder import Cell, declare
from dapo.comparison.recipes import Variant
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_folder import RunFolder
from dapo.util.files import json_line, write_json
from run_cases import TOKENIZER, tiny_model
from stage_cases import ROWS

TINY = {"rows_per_update": 4, "warmup_steps": 0, "tokens_per_micro_batch": 256, "learning_rate": 1e-3}
QUIET = {"resources_every_s": 0, "save_every": 1}
RECIPE: dict[str, Any] = {
    "model": {"path": "tiny"},
    "data": {"train": "rows.jsonl", "template": "plain", "max_prompt_length": 8},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_length": 8},
    "reward": {"kind": "exact"},
    "algorithm": {"filter_groups": {"enable": False}, "overlong_buffer": {"len": 4}},
    "training": {"groups_per_update": 2, "warmup_steps": 0, "tokens_per_micro_batch": 256},
    "evaluation": {"data": "held.jsonl", "every": 1},
    "runtime": {"device": "cpu"},
    "run": QUIET,
}
DPO: dict[str, Any] = {
    "stage": "dpo",
    "model": {"path": "tiny"},
    "data": {"train": "dpo.jsonl", "template": "plain", "max_length": 32},
    "training": TINY,
    "run": QUIET,
}
SFT = {"stage": "sft", **{key: DPO[key] for key in ("model", "data", "run")}, "training": TINY | {"steps": 2}}
PHASES = {
    "phases": {
        "sft": SFT | {"data": DPO["data"] | {"train": "sft.jsonl"}},
        "rl": {"stage": "dapo", **RECIPE, "model": {"path": "$sft"}},
    }
}


def write_recipes(folder: Path, model: bool = False) -> None:
    """a.yaml, dpo.yaml and phases.yaml with their rows; ``model``: and the model."""
    for name in ("tiny", "large"):
        (folder / name).mkdir()
    if model:
        tiny_model().save_pretrained(folder / "tiny")
        TOKENIZER.save_pretrained(folder / "tiny")
    sums = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(6) for b in range(4)]
    for name, rows in {"rows": sums, "held": sums[::3], "other": sums[::2], **ROWS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, recipe in {"a": RECIPE, "dpo": DPO, "phases": PHASES}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def stored_comparison(
    root: Path, curves: Mapping[str, Mapping[int, Sequence[float]]], answers: Mapping[str, Sequence[str]] | None = None
) -> None:
    """A comparison in ``root``, beside a.yaml: of each recipe and seed the accuracies before training and after each
    step, of which one takes a minute and half a minute the further ones of ``fast``; the last one is that of eight
    rows. ``answers``: what a recipe's models answered."""
    variants = {name: Variant("a.yaml", ("algorithm.clip_ratio_high=0.2",) * (name != "first")) for name in curves}
    declare(root, variants, sorted({seed for seeds in curves.values() for seed in seeds}), {"minutes": 9})
    for name, seeds in curves.items():
        for seed, accuracies in seeds.items():
            cell = Cell(root, name, seed)
            config = variants[name].phases(cell.folder, seed)["dapo"]
            folder = RunFolder.create(config, ["dapo", "compare"])
            write_json(folder.fingerprint, {"model": {"parameters": 1000}})
            with MetricsLog(folder.metrics) as log:
                for step, accuracy in enumerate(accuracies):
                    evaluated = {"eval/accuracy": accuracy, "eval/rows": 8}
                    log.append(step, evaluated | (_step(30.0 if name == "fast" else 60.0) if step else {}))
            right = round(8 * accuracies[-1])
            write_json(
                cell.file("json"), {"metric": "accuracy", "rows": {f"held:{k}": float(k < right) for k in range(8)}}
            )
            texts = (answers or {}).get(name, [f"{name} {row}" for row in range(8)])
            lines = [{"file": "held", "row": k, "prompt": f"{k}?", "response": text} for k, text in enumerate(texts)]
            cell.file("answers.jsonl").write_text("".join(json_line(one | {"gold": None}) for one in lines))


def _step(seconds: float) -> dict[str, Any]:
    return {
        **{"time/step": seconds, "groups/drawn": 6, "tokens/generated": 100, "tokens/trained": 150},
        **{"tokens/computed": 120, "updates/skipped": 1, "alarms/count": 2, "memory/rss": 2**30},
    }
