"""The recipes of alignment models are valid, and the rows that they name are made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.config import load_reward
from dapo.config.plan import existing_recipe
from dapo.config.stages import load_stage, stage_named
from dapo.ranking.rows import read_candidates

RECIPES = Path(__file__).parents[2] / "recipes" / "alignment"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_recipe_is_valid(recipe: Path) -> None:
    stage = stage_named(existing_recipe(recipe))
    assert load_stage(stage, recipe) if stage else load_reward(recipe)


@pytest.mark.parametrize("kind", ["sums", "work", "safety", "recommend", "notes", "code"])
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
        *([str(mbpp)] if kind == "code" else []),
    ]
    subprocess.run(words, check=True, timeout=60, capture_output=True)
    parts = [read_candidates([str(tmp_path / f"{kind}-{name}.jsonl")]) for name in ("train", "labelled", "check")]
    assert all(row.binary for rows in parts for row in rows) and all(parts)
    if kind in ("sums", "work", "code"):
        prompts = [{row.prompt_text for row in rows} for rows in parts]
        assert not prompts[0] & prompts[1] and not prompts[1] & prompts[2]
