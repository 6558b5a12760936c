"""Do the ids of model and tokenizer mean the same? Told from how well the model reads the recipe's own text.

A model that is given the right ids finds them likelier than a guess would, and one that was never trained about as
likely. One that has learned something, and is given ids that mean something else to it, is surprised by more than ln V
a token, V the vocabulary. So is one that was only ever trained on responses, by its prompts: the demo's takes 6.9 nats
a token, where a guess is 2.9. So the answers behind the prompts are read, too, and the better one of the two counts.
Once it has learned to think first, a bare answer surprises it as well (4.8). So where all of them do, the ids of each
text are shuffled: whoever knows these ids reads them far better than he reads any others in their place, and to whom
they mean something else, they are as good as shuffled.
What is left may still be a text of which the model knows nothing: this warns, and refuses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from dapo.checks.answers import spread
from dapo.checks.finding import Finding
from dapo.checks.patient import CheckContext
from dapo.checks.rewards import forms_of
from dapo.model.placement import set_threads
from dapo.records import Prompt
from dapo.training.packing import pack_demonstrations
from dapo.training.policy import Policy

_PROMPTS, _TOKENS, _ENOUGH = 16, 64, 60
_MARGIN = 1.0
"""Nats above ln V. Random models of the tests are within 0.4."""
_SHUFFLES, _KNOWN = 8, 1.0
"""So many nats below the best of so many shuffles says that the ids are known."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids that are given, and those that are read behind them."""


def check_reading(patient: CheckContext) -> Iterator[Finding]:
    """Compare the log-loss of prompts, and of answers behind them, with that of a guess."""
    model, source = patient.need(patient.model, "model"), patient.need(patient.source, "tokenized data")
    patient.need(patient.words_known, "vocabulary")
    config = patient.config
    set_threads(config, model)  # of the thread that works here
    prompts = spread(source.prompts, _PROMPTS)
    room = max(config.training.tokens_per_micro_batch, config.data.max_prompt_length + _TOKENS)
    policy = Policy(model, 1.0, room, torch.float32)
    guess = math.log(model.get_input_embeddings().weight.shape[0])
    texts = list(_texts(patient, prompts))
    losses = [log_loss(policy, pairs) for pairs in texts]
    if not losses:
        yield Finding("model", "reading", "pass", "the prompts are too short to tell whether the model can read them")
        return
    best = min(losses)
    text = f"the model reads prompts or answers at {best:.1f} nats a token, a blind guess at {guess:.1f}"
    if best <= guess + _MARGIN:
        yield Finding("model", "reading", "pass", text)
        return
    special = set(patient.tokenizer.all_special_ids)
    shuffled = [min(log_loss(policy, pairs) for pairs in _shuffles(pairs, special)) for pairs in texts]
    gain, loss, other = max((other - loss, loss, other) for loss, other in zip(losses, shuffled, strict=True))
    if gain >= _KNOWN:
        text = (
            f"the model reads text of this kind at {loss:.1f} nats a token, and at {other:.1f} or more with other ids"
        )
        yield Finding("model", "reading", "pass", text)
        return
    yield Finding(
        "model",
        "reading",
        "warn",
        f"{text}, and no better than with its ids shuffled: either its tokenizer is another model's, with other ids "
        "for the same words, or it knows nothing of such text",
        "model.tokenizer=FOLDER of the tokenizer that the model was trained with; dapo generate shows what it writes",
    )


def _texts(patient: CheckContext, prompts: Sequence[Prompt]) -> Iterator[Sequence[Pair]]:
    """The rows' prompts as text, then what may stand behind them: worked solutions, and answers in each form."""

    def ids_of(text: str) -> list[int]:
        return list(patient.tokenizer(text, add_special_tokens=False)["input_ids"])[:_TOKENS]

    rows = [ids for p in prompts if len(ids := ids_of(p.text)) > 1]
    if sum(map(len, rows)) >= _ENOUGH:
        yield [(ids[:1], ids[1:]) for ids in rows]
    for write in (_solution, *(write for _, write in forms_of(patient.config.reward))):
        pairs = [(p.token_ids, ids) for p in prompts if (text := write(p)) is not None and (ids := ids_of(text))]
        if pairs:
            yield pairs


def _shuffles(pairs: Sequence[Pair], special: set[int]) -> Iterator[Sequence[Pair]]:
    """The same texts with ids that changed places, each time others, but the same ones throughout. Only those that
    occur: a tokenizer of another model has short words among the first ids, too, where any model knows common ones."""
    ids = sorted({token for given, read in pairs for token in (*given, *read)} - special)
    for seed in range(_SHUFFLES):
        other = dict(zip(ids, np.random.default_rng(seed).permutation(ids).tolist(), strict=True))
        yield [(_renamed(given, other), _renamed(read, other)) for given, read in pairs]


def _renamed(ids: Iterable[int], other: Mapping[int, int]) -> list[int]:
    return [other.get(token, token) for token in ids]


def _solution(prompt: Prompt) -> str | None:
    text = prompt.meta.get("solution")
    return text if isinstance(text, str) else None


def log_loss(policy: Policy, pairs: Sequence[Pair]) -> float:
    """Mean of -log p over all tokens that are read, in nats."""
    return -float(policy.logprobs(pack_demonstrations(pairs)).mean())
