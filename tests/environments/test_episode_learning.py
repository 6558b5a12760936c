"""That runs over episodes learn, on a CPU, within minutes: nightly."""

from pathlib import Path

import pytest

from episodes import chat_tokenizer
from run_cases import run, steps_of, tiny_model

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "data.template": "plain",
    "data.max_prompt_length": 40,
    "rollout.max_response_length": 80,
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 8,
    "rollout.max_concurrent_samples": 64,
    "training.groups_per_update": 4,
    "training.learning_rate": 1e-3,
    "training.tokens_per_micro_batch": 8192,
    "algorithm.overlong_buffer.enable": False,
    "algorithm.filter_groups.enable": False,
    "environment.max_turns": 4,
    "environment.workers": 4,
    "runtime.deterministic": False,
}


@pytest.mark.nightly
def test_an_agent_with_openais_client_learns_through_its_address(tmp_path):
    """It is paid for ending soon, which a random model does not."""
    tokenizer = chat_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    agent = {
        "environment.agent": f"{ROOT}/tests/support/openai_agents.py:short",
        "environment.max_turn_tokens": 16,
        "rollout.stop": ["!", "?"],
        "algorithm.filter_groups.metric": "score",
        "training.steps": 40,
        "training.learning_rate": 3e-3,
    }
    rows = [{"prompt": f"{i}", "answer": str(i)} for i in range(20)]
    run(tmp_path, SETTINGS | agent, model=model, tokenizer=tokenizer, rows=rows, reward=None)
    reward = [metrics["reward/mean"] for metrics in steps_of(tmp_path)]
    print(f"reward {sum(reward[:5]) / 5:.2f} at first, {sum(reward[-5:]) / 5:.2f} in the end")
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.2
