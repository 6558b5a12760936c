"""The recipe of RLHF by PPO, as it is, on a tiny model and rows of sums: three phases in one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.config import Config
from dapo.model.tokenizer import save_tokenizer
from dapo.observe.run_folder import RunFolder
from dapo.stages.phases import load_phases, run_phases
from dapo.util.files import json_line, write_atomic
from dapo.util.shutdown import Shutdown
from run_cases import TOKENIZER, Recorder, steps_of, tiny_model
from stage_cases import ROWS

RECIPE = Path(__file__).parents[2] / "recipes/method/rlhf-ppo.yaml"


def test_demonstrations_reward_model_and_ppo(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "tiny")
    save_tokenizer(TOKENIZER, tmp_path / "tiny")
    rows = {"demonstrations": ROWS["sft"], "pairs": ROWS["dpo"], "heldout-pairs": ROWS["dpo"][:8]}
    rows["prompts"] = [{"prompt": row["prompt"]} for row in ROWS["sft"]]
    for name, several in rows.items():
        write_atomic(tmp_path / f"{name}.jsonl", map(json_line, several))
    (tmp_path / "rlhf.yaml").write_text(RECIPE.read_text())
    small = [f"phases.{phase}.model.compute_dtype=float32" for phase in ("sft", "reward", "ppo")]
    small += [f"phases.{phase}.training.epochs=null" for phase in ("sft", "reward")]
    small += ["phases.sft.training.steps=2", "phases.reward.training.steps=2", "phases.ppo.training.steps=2"]
    small += ["phases.ppo.rollout.max_response_length=8", "phases.ppo.rollout.prompts_per_step=32"]
    small += ["phases.ppo.algorithm.critic.warmup_steps=1", "phases.ppo.data.max_prompt_length=8"]
    small += [f"phases.sft.model.path={tmp_path / 'tiny'}", f"dir={tmp_path / 'runs'}"]
    small += [f"phases.{phase}.data.max_length=32" for phase in ("sft", "reward")]
    small += ["phases.ppo.reward.max_length=32"]
    root, phases = load_phases(tmp_path / "rlhf.yaml", small)
    ppo = phases["ppo"]
    assert isinstance(ppo, Config) and not ppo.algorithm.filter_groups.enable and ppo.algorithm.kl.estimator == "k1"
    with Shutdown() as shutdown:  # outside of one the clock that starts at the end would end this process
        found = run_phases(root, phases, Recorder(), False, shutdown)
    assert [summary["steps"] for summary in found.values()] == [2, 2, 2]
    first, second = steps_of(RunFolder(root / "ppo").root)
    assert first["updates"] == 0 and second["updates"] == 1 and second["kl/coef"] > 0
    assert second["reward/mean"] != 0 and second["kl/reference"] == pytest.approx(0, abs=0.01)
