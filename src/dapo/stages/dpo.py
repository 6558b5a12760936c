"""Direct preference optimisation: DPO, IPO and SimPO on pairs and rankings."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo.algorithm.preference import PairObjective
from dapo.data.examples import Example, ranked
from dapo.model.fingerprint import fingerprint_model
from dapo.records import TokenBatch
from dapo.stages.batches import pack_examples, ranked_inputs, rankings
from dapo.stages.stage import Parts, PolicyStage, evaluate_pairs
from dapo.training.policy import Policy
from dapo.training.trainer import Trainer
from dapo.util.files import read_json, write_json

CACHE = "reference.json"
"""In the run folder: the log-probability of each response under the model that the run began with."""


class ReferenceLogprobs:
    """log pi_ref of responses, each computed once, by a hash of the model and of its own tokens and its prompt's.

    No second model is held: they are computed before the first update, when the policy is the reference. It is in eval
    mode then as it always is."""

    def __init__(self, file: Path, model: str) -> None:
        self._file, self._model = file, model
        self._known: dict[str, float] = read_json(file, most=2**32) if file.is_file() else {}

    def _key(self, prompt: Sequence[int], response: Sequence[int]) -> str:
        parts = (np.asarray(ids, np.int64).tobytes() for ids in (prompt, response))
        return blake2b(
            self._model.encode() + b"|".join((str(len(prompt)).encode(), *parts)), digest_size=16
        ).hexdigest()

    def of(self, examples: Sequence[Example]) -> list[float]:
        """Of each response. Raises KeyError: it was not computed."""
        return [self._known[self._key(one.prompt, r)] for one in examples for r in one.responses]

    def compute(self, policy: Policy, parts: Parts, tell: Any) -> None:
        """Of all that are not known yet, a part at a time. ``policy``: as the run began with it."""
        before, done = len(self._known), 0
        for part in parts:
            done += len(part)
            keys = [self._key(one.prompt, response) for one in part for response in one.responses]
            if not self._known.keys() >= set(keys):
                self._known = dict(zip(keys, response_logprobs(policy, part), strict=True)) | self._known
                tell(done)
        if len(self._known) > before:
            write_json(self._file, self._known)


def response_logprobs(policy: Policy, examples: Sequence[Example]) -> list[float]:
    """The sum over the tokens of each response, as the objective adds them up."""
    batch = pack_examples(examples)
    logprobs = policy.logprobs(batch)
    place = torch.from_numpy(batch.sample_ids).to(logprobs.device)
    sums: list[float] = logprobs.new_zeros(batch.num_samples).index_add(0, place, logprobs).tolist()
    return sums


class DPO(PolicyStage):
    inputs = staticmethod(ranked_inputs)
    _reference: ReferenceLogprobs | None = None

    def __init__(self, config: Any, tokenizer: Any, source: Any) -> None:
        super().__init__(config, tokenizer, source)
        dpo = config.dpo
        self.objective = PairObjective(dpo.loss, dpo.beta, dpo.label_smoothing, dpo.gamma)

    def encode(self, row: Any) -> Sequence[Example]:
        return [self.text.responses(ranked(row, self.config.data))]

    def prepare(self, trainer: Trainer, folder: Path, parts: Parts, tell: Any) -> None:
        if self.objective.loss == "simpo":
            return
        model = fingerprint_model(trainer.policy.model, torch.device("cpu"))["model"]["weights"]
        dtype = str(trainer.policy.compute_dtype)
        self._reference = ReferenceLogprobs(folder / CACHE, f"{model} {dtype}")
        self._reference.compute(trainer.policy, parts, tell)

    def batch(self, examples: Sequence[Example]) -> TokenBatch:
        reference = None if self._reference is None else self._reference.of(examples)
        return rankings(examples, nll=self.config.dpo.nll, reference=reference)

    def evaluate(self, trainer: Trainer, examples: Sequence[Example]) -> dict[str, float]:
        return evaluate_pairs(trainer, examples, self.batch, self.objective, self.config.seed)
