"""That runs over episodes learn, on a CPU, within minutes: nightly."""

import importlib.util
import random
from pathlib import Path

import pytest

from dapo.commands.demo.task import make_model
from dapo.config import DataConfig, TrainingConfig
from dapo.data.template import PromptTemplate
from dapo.model.loading import load_model
from dapo.stages.sft import imitate
from dapo.training.trainer import Trainer
from episodes import END, chat_tokenizer
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


def guesses(numbers, tokenizer, rng):
    """Episodes of somebody who does not listen: prompt and what follows, environment and all."""
    text = PromptTemplate(DataConfig(template="plain"), tokenizer)
    for number in numbers:
        said = ""
        for _ in range(4):
            guess = rng.randint(1, 9)
            said += f"{guess}{END}"
            if guess == number:
                break
            said += "\nhigher\n" if guess < number else "\nlower\n"
        yield text.encode_text("Guess my number, 1 to 9.\n"), text.continuing_ids(said)


@pytest.mark.nightly
def test_guess_the_number_learns_to_listen(tmp_path):
    tokenizer, rng = chat_tokenizer(), random.Random(0)
    model = load_model(make_model(0, len(tokenizer)))
    model.config.eos_token_id = tokenizer.eos_token_id
    warm = TrainingConfig(weight_decay=0.01, betas=(0.9, 0.98), tokens_per_micro_batch=1 << 16)
    trainer = Trainer(model, warm, 1.0)
    for step in range(300):
        numbers = [rng.randint(1, 9) for _ in range(16)]
        imitate(trainer, list(guesses(numbers, tokenizer, rng)), 2e-3 * min(1.0, step / 30))
    spec = importlib.util.spec_from_file_location("guess_number", ROOT / "examples" / "guess_number.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    game = {"environment.name": f"{ROOT}/examples/guess_number.py:GuessNumber", "training.steps": 60}
    run(tmp_path, SETTINGS | game, model=model, tokenizer=tokenizer, rows=list(example.rows(200)), reward=None)
    accuracy = [metrics["accuracy"] for metrics in steps_of(tmp_path)]
    first, last = sum(accuracy[:5]) / 5, sum(accuracy[-5:]) / 5
    print(f"found within 4 guesses: {first:.0%} at first, {last:.0%} in the end")
    assert first < 0.55 and last > first + 0.15  # without listening 38%, with halving 100%


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
