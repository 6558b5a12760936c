"""Reward models: a score head on a language model, trained on pairs, rankings or labels.

A text is followed by one token that nobody reads, so that the state which predicts it is that of the last real token:
what a loss sees as the log-probabilities of response tokens are scores here. What is saved is a sequence classifier of
Transformers with one output, or its adapter with the head, which ``reward: {kind: model}`` loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dapo.algorithm.preference import ScoreObjective, outcome_loss, outcome_objective, share_right
from dapo.data.examples import Example, labelled, ranked
from dapo.data.rows import BadRow, Row
from dapo.errors import ConfigError, RewardError
from dapo.evaluation.statistics import calibration_error
from dapo.model.classifier import as_classifier
from dapo.records import TokenBatch
from dapo.reward.model.text import PairText
from dapo.stages.batches import labelled_inputs, labels, ranked_inputs, rankings
from dapo.stages.stage import Parts, accuracy_metrics, evaluate_pairs, in_parts
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.objective_protocol import Objective
from dapo.training.scores import score_trainer
from dapo.training.trainer import Trainer


class RewardModel:
    today = None

    def __init__(self, config: Any, tokenizer: Any, source: Any) -> None:
        self.config, self._tokenizer = config, tokenizer
        section = config.reward_model
        name = config.model.tokenizer or config.model.path
        try:
            self._text = PairText(tokenizer, section.template, name)
        except RewardError as error:  # in the words of a run's recipe
            said = str(error).replace("reward.tokenizer", "model.tokenizer").replace(" (or pair)", "")
            raise ConfigError(said.replace("reward.", "reward_model.")) from None
        self._outcome = section.loss == "outcome"
        self.objective: Objective = outcome_objective if self._outcome else ScoreObjective(section.centring)
        self.stop_ids: Sequence[int] = ()
        self._ends: set[int] = set()

    def encode(self, row: Any) -> Sequence[Example]:
        """As the reward model will read prompt and response. What all responses begin with is computed once."""
        read = labelled(row, self.config.data) if self._outcome else ranked(row, self.config.data, needs_prompt=False)
        prompt = Row(read.prompt, None).text if read.prompt else ""
        texts = [self._text.encode(prompt, response).token_ids for response in read.responses]
        if not all(texts):
            raise BadRow("the tokenizer makes no tokens of a text")
        self._ends.update(ids[-1] for ids in texts)
        shortest = min(map(len, texts))
        same = next((k for k in range(shortest) if len({ids[k] for ids in texts}) > 1), shortest)
        start = max(1, min(same, shortest - (len(texts) == 1)))
        responses = tuple((*ids[start:], ids[-1]) for ids in texts)  # and the token that nobody reads
        return [Example(tuple(texts[0][:start]), responses, read.values, read.margin)]

    def load(self, source: Any, device: torch.device) -> Any:
        """The backbone of a language model under a score head of zeros."""
        return as_classifier(load_trainable(source, self.config.model, device), self._pad_token())

    def _pad_token(self) -> int:
        """A token that no text ends with: classifiers of Transformers read the score before trailing padding tokens."""
        tokenizer = self._tokenizer
        named = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids)
        for token_id in named:
            if token_id is not None and token_id not in self._ends:
                return int(token_id)
        raise ConfigError(
            "model.tokenizer: texts end with each of its special tokens, so none of them can be the padding of a "
            "classifier; add a pad token of its own to the tokenizer"
        )

    def trainer(self, model: Any) -> Trainer:
        model = begin_adapter(model, self.config.model, self.config.seed)
        return score_trainer(model, self.config.training, getattr(torch, self.config.model.compute_dtype))

    def prepare(self, trainer: Trainer, folder: Path, parts: Parts, tell: Any) -> None:
        """Nothing."""

    def batch(self, examples: Sequence[Example]) -> TokenBatch:
        return labels(examples) if self._outcome else rankings(examples, scored=True)

    def inputs(self, batch: TokenBatch, device: torch.device) -> Any:
        return labelled_inputs(batch, device) if self._outcome else ranked_inputs(batch, device)

    def evaluate(self, trainer: Trainer, examples: Sequence[Example]) -> dict[str, float]:
        if not self._outcome:
            return evaluate_pairs(trainer, examples, self.batch, self.objective, self.config.seed)
        scores = torch.cat(
            [trainer.logprobs(b)[b.columns["weights"] != 0].cpu() for b in map(labels, in_parts(examples))]
        )
        truth = torch.tensor([one.values[0] for one in examples])
        towards = torch.where(truth > 0.5, scores, -scores).double()  # above 0: right
        loss = float(outcome_loss(scores, truth).mean())
        found = accuracy_metrics(share_right(towards).tolist(), self.config.seed)
        return {**found, "eval/loss": loss, "eval/calibration_error": calibration_error(towards.numpy())}
