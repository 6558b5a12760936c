"""Whatever orders responses to a prompt, behind one door (:class:`Ranker`): a reward model, the implicit reward of a
policy that was trained by DPO, or any reward of a recipe (judge, rules, tests).

A response is scored by itself, so that neither the others, nor their order, nor padding changes its score.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo.config import load_reward
from dapo.config.composed_reward import REWARD_KINDS, RewardConfig
from dapo.config.reading import with_values
from dapo.config.stages import DPOConfig, RewardModelConfig, load_stage, stage_named
from dapo.errors import ConfigError, RewardError
from dapo.inference.found_model import FoundModel, find_model
from dapo.model.hub import require_at_hand
from dapo.ranking.rows import Candidates
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import Batcher
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.reward.function_scorers import CallableScorer
from dapo.util.files import read_json

if TYPE_CHECKING:
    from dapo.data.rows import Messages
    from dapo.training.policy import Policy

_MESSAGES = "messages of the prompt"
"""Key of a prompt's meta: a policy reads a chat as it is, rewards as one text."""
_LONGEST = 2**16


@dataclass(frozen=True, slots=True)
class Scored:
    """A response with its score. ``index``: its place among the candidates. ``score``: None: it failed, and ``error``
    says why; such a response ranks last and passes no filter."""

    index: int
    text: str
    score: float | None
    error: str | None = None


def best_first(scored: Sequence[Scored]) -> list[Scored]:
    """Equal scores stay in the order given."""
    return sorted(scored, key=lambda one: (one.score is None, -(one.score or 0.0)))


class Ranker:
    """Scores of responses by a :class:`Scorer`. ``name``: as the user wrote it, for calibrations. Belongs to one event
    loop."""

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.name, self._scorer = name, scorer

    async def start(self) -> None:
        """Load or reach what scores. Raises RewardError or ModelError: that fails."""
        await self._scorer.start()

    async def close(self) -> None:
        await self._scorer.close()

    async def score(self, row: Candidates) -> list[Scored]:
        """Of each candidate, in their order; equal texts are scored once. None for none."""
        meta = {**row.row, _MESSAGES: row.prompt}
        prompt = Prompt(0, row.prompt_text, (), row.answer, meta)
        each = list(dict.fromkeys(row.texts))
        rewards = await asyncio.gather(*(self._scorer.score(prompt, text) for text in each))
        of = dict(zip(each, rewards, strict=True))
        return [Scored(k, t, None if of[t].error else of[t].value, of[t].error) for k, t in enumerate(row.texts)]

    async def all_scores(self, rows: Sequence[Candidates]) -> list[list[Scored]]:
        """Of many rows, at once. The scorer is started, and stays open."""
        await self.start()
        return list(await asyncio.gather(*map(self.score, rows)))


def load_ranker(model: Any, *, reference: str | None = None, overrides: Sequence[str] = ()) -> Ranker:
    """What ranks, by any of its names. Weights are loaded when it starts, onto a GPU if there is one.

    Args:
        model: folder or name of a reward model, or the run that it comes from; a policy that was trained by DPO (its
            run knows the reference); a recipe with a ``reward``, or a kind of reward; or a Python function.
        reference: the policy that DPO began with, where the run does not know it.
        overrides: ``reward.key=value``, and of an implicit reward ``dpo.beta=value``.

    Raises UserError: there is no such thing, or it is a language model that ranks nothing.
    """
    if callable(model):
        return Ranker(getattr(model, "__name__", "function"), CallableScorer(model, 60.0))
    name = str(model)
    if name in REWARD_KINDS or Path(name).suffix in (".yaml", ".yml"):
        return Ranker(name, make_scorer(load_reward(name, overrides)))
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = find_model(name)
    if is_reward_model(found.path):
        return Ranker(name, make_scorer(_reward_of(found, device, overrides)))
    return Ranker(name, _implicit(found, reference, overrides, device))


def is_reward_model(path: str) -> bool:
    """Whether a model is one that scores texts, by the files beside its weights alone."""
    names = ("value_head.safetensors", "config.json", "adapter_config.json")
    folder = Path(path).expanduser()
    if folder.is_dir():
        held = {name: folder / name for name in names if (folder / name).is_file()}
    else:
        from transformers.utils import cached_file

        from dapo.model.hub import from_where

        held, where = {}, from_where(path)
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # if there is no such model, whoever loads it says so
                held[name] = Path(cached_file(path, name, **where))
    read: dict[str, Any] = {name: {} for name in names[1:]}
    for name in read.keys() & held.keys():
        with contextlib.suppress(OSError, ValueError):
            read[name] = read_json(held[name])
    config, adapter = read.values()
    classifies = any("ForSequenceClassification" in str(one) for one in config.get("architectures") or ())
    return names[0] in held or classifies or adapter.get("task_type") == "SEQ_CLS"


def _reward_of(found: FoundModel, device: str, overrides: Sequence[str]) -> RewardConfig:
    """As the run that trained it wrote texts; else by the chat template, if there is one."""
    from transformers import AutoConfig

    from dapo.model.hub import from_where
    from dapo.model.loading import context_limit, load_tokenizer

    stage = load_stage("reward_model", found.recipe) if _stage_of(found) == "reward_model" and found.recipe else None
    shape = AutoConfig.from_pretrained(found.path, **from_where(found.path)).get_text_config()
    template, longest = "plain", 4096
    if isinstance(stage, RewardModelConfig):
        template, longest = stage.reward_model.template, stage.data.max_length
    elif getattr(load_tokenizer(found.path), "chat_template", None):
        template = "chat"
    longest = min(longest, context_limit(shape) or longest)
    told = {"path": found.path, "device": device, "template": template, "max_length": longest, "timeout_s": 600}
    return load_reward("model", [*(f"reward.{key}={json.dumps(value)}" for key, value in told.items()), *overrides])


def _stage_of(found: FoundModel) -> str | None:
    return stage_named(found.recipe) if found.recipe else None


def _implicit(found: FoundModel, reference: str | None, overrides: Sequence[str], device: str) -> Scorer:
    from dapo.inference.model import settings_for

    beta = 0.1
    if _stage_of(found) == "dpo" and found.recipe:
        config = load_stage("dpo", found.recipe)
        assert isinstance(config, DPOConfig)
        reference, beta = reference or config.model.path, config.dpo.beta
    if reference is None:
        require_at_hand("ranker", found.path)
        raise ConfigError(
            f"{found.path}: is a language model, and its probabilities alone rank nothing (a likely text is no better "
            "one); give a reward model, or with --reference the policy that DPO began with"
        )
    changes = [one for one in overrides if not one.startswith("dpo.beta=")]
    if len(changes) < len(overrides):
        beta = float(overrides[-1].partition("=")[2])
    _, settings = settings_for(found.path, {}, recipe=found.recipe, overrides=changes)
    return ImplicitScorer(with_values(settings, {"runtime.device": device}), find_model(reference).path, beta)


class ImplicitScorer(Scorer):
    """DPO's implicit reward, beta (log pi - log ref) in sums over the tokens of a response with its end: the log-ratio
    by which the policy was moved (arXiv 2305.18290, eq. 5, but for a term of the prompt alone)."""

    def __init__(self, config: Any, reference: str, beta: float) -> None:
        self._config, self._reference, self._beta = config, reference, beta
        self._policies: list[Policy] = []
        self._text: Any = None
        self._thread = ThreadPoolExecutor(1, "implicit reward")
        self._batches: Batcher[tuple[Any, str], Reward] = Batcher(self._batch, size=64)

    async def start(self) -> None:
        """Raises ModelError: one of the models cannot be loaded."""
        if not self._policies:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        await self.start()
        return await self._batches.submit((prompt.meta.get(_MESSAGES, prompt.text), response))

    async def close(self) -> None:
        await self._batches.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _batch(self, items: Sequence[tuple[Any, str]]) -> Sequence[Reward]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, items)

    def _load(self) -> None:
        import torch

        from dapo.data.examples import PolicyText
        from dapo.inference.model import load_prompting
        from dapo.model.loading import load_model
        from dapo.training.policy import Policy

        if self._policies:
            return
        prompting = load_prompting(self._config)
        config, dtype = prompting.config, torch.float32  # differences of sums: bfloat16 would decide the order
        self._text = PolicyText(prompting.template, prompting.tokenizer, config.data.template != "plain")
        for path in (config.model.path, self._reference):
            model = load_model(path, dtype, config.model.trust_remote_code, config.runtime.device)
            self._policies.append(Policy(model.requires_grad_(False), 1.0, _LONGEST))

    def _scores(self, items: Sequence[tuple[str | Messages, str]]) -> list[Reward]:
        from dapo.data.examples import Texts
        from dapo.data.rows import BadRow
        from dapo.training.packing import pack_demonstrations

        found, encoded = dict[int, Reward](), dict[int, tuple[tuple[int, ...], tuple[int, ...]]]()
        for place, (prompt, response) in enumerate(items):
            try:
                one = self._text.responses(Texts(prompt, (response,), (0.0,)))
                encoded[place] = (one.prompt, one.responses[0])
            except BadRow as error:
                found[place] = Reward(None, 0.0, error=f"implicit reward: {error}")
        if encoded:
            prompts = list(dict.fromkeys(prompt for prompt, _ in encoded.values()))  # each is computed once
            order = sorted(encoded, key=lambda place: prompts.index(encoded[place][0]))
            batch = pack_demonstrations([encoded[place] for place in order])
            draws = np.asarray([prompts.index(encoded[place][0]) for place in order])
            batch = replace(batch, draws=draws, indices=np.arange(len(order)))
            policy, reference = (self._sums(one, batch) for one in self._policies)
            for place, ours, theirs in zip(order, policy, reference, strict=True):
                found[place] = Reward(None, self._beta * (ours - theirs), {"logprob": ours, "reference": theirs})
        return [found[place] for place in range(len(items))]

    def _sums(self, policy: Policy, batch: Any) -> list[float]:
        logprobs = policy.logprobs(batch).double().cpu().numpy()
        return [float(v) for v in np.bincount(batch.sample_ids, logprobs, batch.num_samples)]


def require_scores(rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]], most: float = 0.2) -> None:
    """Raises RewardError: more than ``most`` of the scores failed, so that what is said of the rest would mislead."""
    every = [(row, one) for row, several in zip(rows, scored, strict=True) for one in several]
    failed = [(row, one) for row, one in every if one.score is None]
    if len(failed) > most * len(every):
        row, one = failed[0]
        raise RewardError(f"{len(failed)} of {len(every)} scores failed, such as {row.place}: {one.error}")
