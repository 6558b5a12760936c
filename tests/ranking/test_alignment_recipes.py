"""The recipes of alignment models are valid, and the rows that they name are made."""

from __future__ import annotations

import json
import random
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from dapo.config import load_config, load_reward
from dapo.config.plan import existing_recipe
from dapo.config.stages import load_stage, stage_named
from dapo.ranking.rows import read_candidates
from dapo.stages.phases import load_phases

RECIPES = Path(__file__).parents[2] / "recipes" / "alignment"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_recipe_is_valid(recipe: Path) -> None:
    stage, sections = stage_named(existing_recipe(recipe)), yaml.safe_load(recipe.read_text())
    load = load_phases if "phases" in sections else load_config if "model" in sections else load_reward
    assert load_stage(stage, recipe) if stage else load(recipe)


def test_the_measures_tell_right_from_wrong() -> None:
    """What the recipes name as gold and as reward; a wrong fact is worse than none."""
    examples = runpy.run_path(str(RECIPES / "examples.py"))
    note = next(examples["notes"](random.Random(0), ()))
    facts = partial(examples["facts"], note["prompt"])
    assert (facts(note["chosen"]), facts("nothing"), facts(note["prompt"])) == (1.0, 0.0, 0.0)
    assert facts(note["chosen"] + " Monday Tuesday") == 0.0 and 0 < facts(note["chosen"].split(" in ")[0]) < 1
    values = [examples["says"](said, "Oslo")["value"] for said in ("From oslo.", "not said", "Lima", "Oslo or Lima")]
    assert values == [1.0, -0.5, -1.0, -1.0] and examples["says"]("Not said.", "not said")["correct"]


@pytest.mark.parametrize(
    "kind", ["sums", "work", "safety", "dialogue", "recommend", "notes", "creative", "code", "quality"]
)
def test_examples_can_be_ranked_and_share_no_prompt(kind: str, tmp_path: Path) -> None:
    mbpp = tmp_path / "mbpp.jsonl"
    tasks = [
        {"prompt": f"add {k}", "solution": f"def f(x):\n    return x + {k}", "tests": ["assert f(0) == 9"]}
        for k in range(9)
    ]
    mbpp.write_text("".join(json.dumps(row) + "\n" for row in tasks))
    words = [
        sys.executable,
        str(RECIPES / "examples.py"),
        kind,
        str(tmp_path),
        *([str(mbpp)] if kind in ("code", "quality") else []),
    ]
    subprocess.run(words, check=True, timeout=60, capture_output=True)
    parts = [read_candidates([str(tmp_path / f"{kind}-{name}.jsonl")]) for name in ("train", "labelled", "check")]
    assert all(row.binary or kind == "quality" for rows in parts for row in rows) and all(parts)
    prompts = [{row.prompt_text or row.texts[0] for row in rows} for rows in parts]
    assert not (prompts[0] & prompts[1] or prompts[1] & prompts[2] or prompts[0] & prompts[2])
