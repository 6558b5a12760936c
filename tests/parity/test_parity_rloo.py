"""Our RLOO, as its recipe has it, against TRL's RLOOTrainer on given numbers: advantages with the KL in the reward, and
the gradient, to 1e-5.

The recipe makes one update of a rollout, so both ratios are 1: TRL's of the whole response, ours of each token. There
the gradients agree and the values do not, since TRL's loss is -A of a response and ours -A of each of its tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance.trl_trainer import COMPLETION_TOKEN, PROMPT, _given_rewards, _model, _tokenizer

from dapo.algorithm.objective import DapoObjective
from dapo.config import load_config
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.learner import objective_inputs

GROUPS, SIZE = 2, 4
RECIPE = Path(__file__).parents[2] / "recipes/method/rloo.yaml"
Rows = list[torch.Tensor]


def _numbers(seed: int) -> tuple[list[int], list[float], Rows, Rows]:
    """Lengths, rewards, log-probs of the policy and of its reference."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, GROUPS * SIZE).tolist()
    policy = [torch.from_numpy(rng.normal(-2, 1, n).astype(np.float32)) for n in lengths]
    reference = [row + torch.from_numpy(rng.normal(0, 0.5, len(row)).astype(np.float32)) for row in policy]
    return lengths, rng.normal(0, 1, len(lengths)).round(3).tolist(), policy, reference


def _theirs(seed: int, beta: float) -> tuple[list[float], torch.Tensor]:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    lengths, rewards, policy, reference = _numbers(seed)
    padded = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (policy, reference)]
    settings: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    settings |= {"num_generations": SIZE, "per_device_train_batch_size": GROUPS * SIZE, "max_steps": 1, "beta": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = RLOOTrainer(
            model=_model(),
            reward_funcs=_given_rewards,
            args=RLOOConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_list([{"prompt": PROMPT}]),
            processing_class=_tokenizer(),
        )
    trainer.beta, trainer.ref_model = beta, "the reference"
    now = padded[0].clone().requires_grad_()
    completions = [[COMPLETION_TOKEN] * n for n in lengths]

    def given(model: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return (padded[1] if model == "the reference" else now), torch.zeros_like(now), None

    trainer._generate_single_turn = lambda *_: completions
    trainer._get_per_token_logps_and_entropies = given
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": PROMPT, "given": reward} for reward in rewards])
    (gradient,) = torch.autograd.grad(trainer.compute_loss(trainer.model, batch), now)
    return batch["advantages"].tolist(), torch.cat([row[:n] for row, n in zip(gradient, lengths, strict=True)])


def _ours(seed: int, beta: float) -> tuple[list[float], torch.Tensor]:
    lengths, rewards, policy, reference = _numbers(seed)
    config = load_config(RECIPE, ["rollout.prompts_per_step=2", "training.groups_per_update=2"])
    builder = BatchBuilder(config)
    builder.kl.coef = beta
    samples = [
        Sample(
            *(i // SIZE, i % SIZE, np.arange(n, dtype=np.int32), row.numpy(), np.zeros(n, np.int32), "stop"),
            reward=Reward(reward > 0, reward),
        )
        for i, (n, row, reward) in enumerate(zip(lengths, policy, rewards, strict=True))
    ]
    rows = [tuple(samples[g * SIZE : (g + 1) * SIZE]) for g in range(GROUPS)]
    groups = [Group(g, Prompt(g, "", (1,)), row) for g, row in enumerate(rows)]
    batch = builder.build(groups).with_columns(reference=torch.cat(reference).numpy())
    shaped, batch = builder.finish(groups, batch)
    ((_, mini),) = builder.minibatches(batch)
    algorithm = config.algorithm
    inputs = objective_inputs(mini, algorithm, config.rollout.max_response_length, torch.device("cpu"))
    logprobs = torch.cat(policy).requires_grad_()
    objective = DapoObjective(algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c)
    loss, _ = objective(logprobs, torch.zeros_like(logprobs), inputs)
    return [s.advantage for g in shaped for s in g.samples], torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("beta", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_gradient(seed: int, beta: float) -> None:
    (ours, gradient), (theirs, expected) = _ours(seed, beta), _theirs(seed, beta)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert gradient.abs().max() > 1e-2
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0)
