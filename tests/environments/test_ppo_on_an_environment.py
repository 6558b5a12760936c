"""PPO learns to listen to an environment, paid at the end or by turn: nightly, some minutes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_examples_learn import EXAMPLES, example, guesses_of, improved, learns

pytestmark = pytest.mark.nightly

BY_TURN = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from guess_number import GuessNumber, Reply

class ByTurn(GuessNumber):
    def reply(self, text):
        said = super().reply(text)
        text, done = (said, False) if isinstance(said, str) else (said.text, said.done)
        return Reply(text, reward=self.found - 0.1, done=done)

    def reward(self):  # beside what the turns have earned
        return {{"value": 0.0 if self.found else -0.6, "correct": self.found}}
"""


@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_ppo_learns_to_guess_the_number(tmp_path: Path, credit: str) -> None:
    """As many episodes as the groups of test_guess_the_number, each of a prompt of its own, and the same rewards."""
    (tmp_path / "by_turn.py").write_text(BY_TURN)
    names = {"outcome": f"{EXAMPLES}/guess_number.py:GuessNumber", "turn": f"{tmp_path}/by_turn.py:ByTurn"}
    keys = {
        "environment.name": names[credit],
        "environment.credit": credit,
        "rollout.prompts_per_step": 128,
        "rollout.samples_per_prompt": 1,
        "algorithm.kind": "ppo",
        "algorithm.loss_agg_mode": "token-mean",
        "algorithm.critic.learning_rate": 5e-4,
        "training.groups_per_update": 64,
        "training.steps": 60,
        "training.learning_rate": 1.5e-4,
    }
    steps = learns(tmp_path / "run", keys, list(example("guess_number").rows(200)), guesses_of)
    improved(steps, mean_of=15, by=0.08)
    explained = [step["critic/explained_variance"] for step in steps]
    assert sum(explained[-10:]) / 10 > 0.02
