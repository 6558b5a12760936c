"""The gradient of a stage is that of a plain padded implementation, however its rows are packed and cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.algorithm.preference import PairObjective, ScoreObjective, outcome_objective
from dapo.config import TrainingConfig
from dapo.data.examples import Example
from dapo.model.classifier import as_classifier
from dapo.model.loading import load_model
from dapo.stages.batches import demonstrations, labelled_inputs, labels, ranked_inputs, rankings
from dapo.stages.sft import cross_entropy, inputs_of
from dapo.training.scores import ScorePolicy
from dapo.training.trainer import Trainer
from helpers import VOCAB, random_model

CPU = torch.device("cpu")
CONFIG = TrainingConfig(warmup_steps=0, max_grad_norm=1e9, tokens_per_micro_batch=200)


class Taken(Exception):
    pass


def gradient(trainer, batch, inputs, objective, budget):
    trainer.policy = replace(trainer.policy, tokens_per_micro_batch=budget)
    found = []

    def take(optimizer, args, kwargs):
        found.extend(p.grad.flatten().clone() for p in optimizer.param_groups[0]["params"])
        raise Taken

    hook = trainer._optimizer.register_step_pre_hook(take)
    try:
        trainer.update(batch, inputs, objective)
    except Taken:
        return torch.cat(found)
    finally:
        hook.remove()
    raise AssertionError("the update was skipped")


def plain(parameters, loss):
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in parameters])
    for p in parameters:
        p.grad = None
    return found


def response_logprobs(model, example, response):
    ids = torch.tensor([[*example.prompt, *response]])
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    start = len(example.prompt)
    return logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


def close(got, expected):
    assert float((got - expected).norm() / expected.norm()) < 1e-4


@pytest.fixture(scope="module")
def policy():
    return random_model("qwen2").requires_grad_(), Trainer(load_model(random_model("qwen2")), CONFIG, 1.0)


@pytest.fixture(scope="module")
def classifier():
    """The plain classifier of Transformers with its own attention, and a trainer of the same weights."""
    torch.manual_seed(3)
    head = 0.3 * torch.randn(1, random_model("qwen2").config.hidden_size)
    own = random_model("qwen2")
    own.source_dtype = torch.float32
    models = [as_classifier(own, 0), as_classifier(load_model(random_model("qwen2")), 0)]
    for model in models:
        model.score.weight.data.copy_(head)
    trainer = Trainer(models[1], CONFIG, 1.0)
    trainer.policy = ScorePolicy(trainer.policy.model, 1.0, 200)
    return models[0].requires_grad_(), trainer


TOKENS = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=9).map(tuple)
PAIR = st.tuples(TOKENS, TOKENS)
SETTINGS = settings(max_examples=12, deadline=None)


def budget(data, examples):
    """Enough for the largest group, and not always for two."""
    largest = max(len(e.prompt) + sum(map(len, e.responses)) for e in examples)
    return largest + data.draw(st.integers(0, 40))


@SETTINGS
@given(data=st.data())
def test_demonstrations(policy, data):
    model, trainer = policy
    rows = data.draw(st.lists(PAIR, min_size=1, max_size=5))
    examples = [
        Example(p, (r,), learned=tuple(k % 3 != 1 for k in range(len(r)))) for p, r in rows
    ]  # as in conversations
    batch = demonstrations(examples)
    terms = [response_logprobs(model, e, e.responses[0])[torch.tensor(e.learned)] for e in examples]
    expected = plain(list(model.parameters()), -torch.cat(terms).mean())
    close(gradient(trainer, batch, inputs_of(batch, CPU), cross_entropy, budget(data, examples)), expected)


@SETTINGS
@given(data=st.data(), kind=st.sampled_from(["sigmoid", "ipo", "simpo"]))
def test_preferences(policy, data, kind):
    model, trainer = policy
    rows = data.draw(st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=2, max_size=3)), min_size=1, max_size=3))
    examples = [Example(p, tuple(r), tuple(float(k) for k in range(len(r)))) for p, r in rows]
    reference = np.random.default_rng(0).normal(-8, 2, sum(len(r) for _, r in rows)).tolist()
    batch = rankings(examples, nll=0.1, reference=reference)
    losses, chosen, refs = [], [], iter(reference)
    for e in examples:
        logprobs = [response_logprobs(model, e, r) for r in e.responses]
        chosen.append(logprobs[0])
        mine = [x.sum() - (0 if kind == "simpo" else ref) for x, ref in zip(logprobs, refs, strict=False)]
        mine = [x / (1 if kind == "sigmoid" else len(r)) for x, r in zip(mine, e.responses, strict=True)]
        pairs = [mine[a] - mine[b] for a in range(len(mine)) for b in range(a + 1, len(mine))]
        of = {
            "sigmoid": lambda d: -torch.nn.functional.logsigmoid(0.1 * d),
            "ipo": lambda d: (d - 5) ** 2,
            "simpo": lambda d: -torch.nn.functional.logsigmoid(0.1 * d - 0.5),
        }[kind]
        losses.append(torch.stack([of(d) for d in pairs]).mean())
    expected = plain(list(model.parameters()), torch.stack(losses).mean() - 0.1 * torch.cat(chosen).mean())
    objective = PairObjective(kind, 0.1, gamma=0.5 if kind == "simpo" else 0.0)
    close(gradient(trainer, batch, ranked_inputs(batch, CPU), objective, budget(data, examples)), expected)


def score(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0, 0]


@SETTINGS
@given(data=st.data())
def test_scores_of_pairs(classifier, data):
    model, trainer = classifier
    rows = data.draw(st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=3))
    examples = [Example(p, ((*a, 1), (*b, 1)), (0.0, 1.0), 0.2) for p, a, b in rows]  # 1: the token nobody reads
    batch = rankings(examples, scored=True)
    losses = []
    for prompt, better, worse in rows:
        high, low = score(model, [*prompt, *better]), score(model, [*prompt, *worse])
        losses.append(-torch.nn.functional.logsigmoid(high - low - 0.2) + 0.01 * (high + low) ** 2)
    expected = plain(list(model.parameters()), torch.stack(losses).mean())
    if expected.norm() > 1e-5:
        objective = ScoreObjective(0.01)
        close(gradient(trainer, batch, ranked_inputs(batch, CPU), objective, budget(data, examples)), expected)


@SETTINGS
@given(data=st.data())
def test_scores_of_labelled_texts(classifier, data):
    model, trainer = classifier
    rows = data.draw(st.lists(st.tuples(TOKENS, TOKENS, st.booleans()), min_size=1, max_size=4))
    examples = [Example(p, ((*r, 1),), (float(y),)) for p, r, y in rows]
    batch = labels(examples)
    logits = torch.stack([score(model, [*p, *r]) for p, r, _ in rows])
    truth = torch.tensor([float(y) for *_, y in rows])
    expected = plain(list(model.parameters()), torch.nn.functional.binary_cross_entropy_with_logits(logits, truth))
    close(gradient(trainer, batch, labelled_inputs(batch, CPU), outcome_objective, budget(data, examples)), expected)
