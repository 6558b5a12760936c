"""Methods as a user writes them into a file of their own; docs/extending.md shows the first one."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from dapo.algorithm.objective import average, per_unit
from dapo.records import Sample


class Gspo:
    """Group sequence policy optimization (arXiv 2507.18071): the ratio is that of the whole response, by its length."""

    unit = "sequence"

    def __init__(self, low=3e-4, high=4e-4):
        self.low, self.high = low, high

    def __call__(self, logprobs, entropy, inputs):
        known = inputs.selected()  # masked tokens hold neutral numbers
        log_ratio = torch.where(known.mask, logprobs, 0) - known.proximal_logprobs
        sample, total = per_unit(log_ratio, known.sample_ids)
        _, tokens = per_unit(known.mask.float(), known.sample_ids)
        s = (total / tokens.clamp(min=1)).exp()[sample]  # of each token's response
        a = known.advantages
        loss = torch.maximum(-s * a, -s.clamp(1 - self.low, 1 + self.high) * a)
        clipped = torch.where(a > 0, s > 1 + self.high, s < 1 - self.low)
        return (known.weights * loss).sum(), {"clipped": average(clipped, known.mask), "s": average(s, known.mask)}


def preference(logprobs, entropy, inputs, beta=0.1):
    """Direct preference optimization: of each pair the sample with the positive advantage is the better one."""
    known = inputs.selected()
    gain = torch.where(known.mask, logprobs, 0) - known.reference_logprobs
    pair, margin = per_unit(beta * known.advantages.sign() * gain, known.group_ids)
    _, weight = per_unit(known.weights, known.group_ids)  # 1 / pairs, with loss_agg_mode=seq-mean-token-mean
    loss = torch.nn.functional.softplus(-margin)  # -log sigmoid
    return (weight * loss).sum(), {"right": average((margin > 0)[pair], known.mask)}


preference.unit = "pair"


def centred(rewards, epsilon):
    """A user's advantage: the distance to the median."""
    return rewards - rewards.median()


class Curriculum:
    """A source around the recipe's prompts: what was right lately is left out for twenty draws."""

    def __init__(self, prompts):
        self.prompts, self.draws, self.solved = prompts, 0, {}

    def next(self):
        while True:
            self.draws += 1
            prompt = self.prompts.next()
            if self.solved.get(str(prompt.row), 0) <= self.draws:
                return prompt

    def feedback(self, groups):
        for group in groups:
            if any(sample.verdict.correct for sample in group.scored):
                self.solved[str(group.prompt.row)] = self.draws + 20

    def state(self):
        return {"prompts": self.prompts.state(), "draws": self.draws, "solved": dict(self.solved)}

    def load_state(self, state):
        self.prompts.load_state(state["prompts"])
        self.draws, self.solved = state["draws"], dict(state["solved"])


class PlainEngine:
    """Samples with the model's own forward pass, without a cache, one prompt after the other."""

    def __init__(self, config, model, stop_ids, decode):
        self.model, self.version = model, 0
        self.stop_ids = torch.tensor(stop_ids)

    async def generate(self, requests):
        for request in requests:
            for index, seed in enumerate(request.seeds):
                await asyncio.sleep(0)  # a consumer may cancel
                yield self._sample(request, index, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _sample(self, request, index, generator):
        ids, logprobs, temperature = list(request.prompt_ids), [], request.sampling.temperature
        ended = False
        while not ended and len(logprobs) < request.sampling.max_tokens:
            logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            known = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            token = torch.multinomial(known.exp(), 1, generator=generator) if temperature else known.argmax()[None]
            ids.append(int(token))
            logprobs.append(float(known[token]))
            ended = bool(torch.isin(token, self.stop_ids))
        tokens = np.array(ids[len(request.prompt_ids) :], np.int32)
        versions = np.full(len(tokens), self.version, np.int32)
        reason = "stop" if ended else "length"
        return Sample(request.id, index, tokens, np.array(logprobs, np.float32), versions, reason)

    async def begin(self, version):
        self.coming = version

    async def put(self, bucket):
        self.model.load_state_dict(dict(bucket), strict=False)

    async def commit(self, fingerprint):
        self.version = self.coming

    async def sleep(self): ...
    async def wake(self): ...
    async def close(self): ...


class Notes:
    """An observer that writes what it hears into the run folder."""

    def __init__(self, folder, key, recipe):
        self.file = (folder / "notes.txt").open("a")
        self.say(f"seed {recipe['seed']}")

    def say(self, line):
        self.file.write(f"{line}\n")
        self.file.flush()

    def log(self, step, metrics):
        self.say(f"step {step} {'eval/rows' in metrics}")

    def summarise(self, summary):
        self.say(f"steps {summary['steps']}")

    def close(self):
        self.say("closed")


class Falls(Notes):
    """One that fails at its first step."""

    def log(self, step, metrics):
        raise RuntimeError("no room")


def distinct(groups):
    """A metric: distinct responses of all."""
    texts = [sample.text for group in groups for sample in group.samples]
    return len(set(texts)) / len(texts)


def broken(groups):
    return 1 / 0


def last_digit():
    """A benchmark of one's own."""
    return {"data": {"template": "plain"}, "reward.kind": "exact", "evaluation.samples_per_prompt": 2,
            "evaluation.temperature": 1.0}  # fmt: skip


constant = 3


def engineless(config, model, stop_ids, decode):
    return {}
