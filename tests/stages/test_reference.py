"""The reference of DPO: log-probabilities that are computed once, without dropout, and found by the very tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dapo.config import TrainingConfig
from dapo.data.examples import Example
from dapo.model.loading import load_model
from dapo.orchestrator.inputs import RunOverrides
from dapo.stages.dpo import CACHE, ReferenceLogprobs
from dapo.stages.run import run_stage
from dapo.training.trainer import Trainer
from helpers import random_model
from run_cases import TOKENIZER, Recorder, tiny_model
from stage_cases import ROWS, stage_config

RANKS = (0.0, 1.0)
EXAMPLES = [Example((5, 6, 7), ((8, 9, 10), (11,)), RANKS), Example((5,), ((6, 7, 8), (9, 9)), RANKS)]
NOBODY: Any = None


def silent(done: int) -> None:
    pass


@pytest.fixture
def cache(tmp_path):
    model = random_model("qwen2", attention_dropout=0.5).train()
    trainer = Trainer(load_model(model), TrainingConfig(tokens_per_micro_batch=64), 1.0)
    found = ReferenceLogprobs(tmp_path / CACHE, "model")
    found.compute(trainer.policy, iter([EXAMPLES]), silent)
    return found


def test_they_are_those_of_the_model_in_eval_mode(cache):
    model, expected = random_model("qwen2").eval(), []
    for one in EXAMPLES:
        for response in one.responses:
            ids = torch.tensor([[*one.prompt, *response]])
            logprobs = model(ids).logits[0, len(one.prompt) - 1 : -1].log_softmax(-1)
            expected.append(float(logprobs.gather(1, torch.tensor(response)[:, None]).sum().detach()))
    assert cache.of(EXAMPLES) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "other",
    [
        Example((5, 6, 7), ((8, 9),)),  # cut
        Example((6, 7), ((8, 9, 10),)),  # another prompt
        Example((5, 6), ((7, 8, 9, 10),)),  # the same tokens, of which more are the response
    ],
)
def test_other_tokens_are_not_found(cache, other):
    with pytest.raises(KeyError):
        cache.of([other])


def test_they_are_computed_of_all_rows_that_a_mixture_draws(tmp_path):
    """Of its rare rows too, which the first draws leave out, however many they are."""
    several = []
    for number, weight in enumerate((0.9, 0.1)):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, ROWS["dpo"][number::2])))
        several.append({"path": str(tmp_path / f"{number}.jsonl"), "weight": weight})
    config = stage_config("dpo", tmp_path / "run", {"data.train": several, "training.steps": 30})
    summary = run_stage(config, Recorder(), RunOverrides(tiny_model(), TOKENIZER))
    assert summary["updates"] == 30


def test_they_are_read_back_and_of_another_model_not_found(cache, tmp_path):
    again = ReferenceLogprobs(tmp_path / CACHE, "model")
    again.compute(NOBODY, iter([EXAMPLES, EXAMPLES[:1]]), silent)  # nothing is left to compute
    assert again.of(EXAMPLES) == cache.of(EXAMPLES)
    with pytest.raises(KeyError):
        ReferenceLogprobs(tmp_path / CACHE, "another model").of(EXAMPLES)
