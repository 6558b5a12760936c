"""Whatever orders responses to a prompt is a :class:`Scorer`: a reward model, the implicit reward of a policy that was
trained by DPO, or any reward of a recipe (judge, rules, tests).

A response is scored by itself, so that neither the others, nor their order, nor padding changes its score.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import load_reward
from dapo.config.composed_reward import REWARD_KINDS, RewardConfig
from dapo.config.reading import apply_overrides, with_values
from dapo.config.stages import RewardModelConfig, build_stage, load_stage, stage_named
from dapo.data.template import letters, letters_lost_in
from dapo.errors import ConfigError, RewardError
from dapo.inference.found_model import FoundModel, find_model
from dapo.model.hub import LOADING, require_at_hand
from dapo.ranking.rows import Candidates
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import Batcher
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.reward.function_scorers import CallableScorer
from dapo.util.asynchronous import run_async
from dapo.util.files import read_json
from dapo.util.terminal import visible

if TYPE_CHECKING:
    from dapo.data.rows import Messages
    from dapo.training.policy import Policy

_MESSAGES = "messages of the prompt"
"""Key of a prompt's meta: a policy reads a chat as it is, rewards as one text."""
_LONGEST = 2**16
_UNUSED = (
    *("evaluation", "rollout", "environment", "seed", "model.compute_dtype", "model.lora", "data.prompt_key"),
    *("data.answer_key", "data.max_prompt_length", "runtime.threads", "runtime.deterministic"),
)
"""What a policy that ranks has no use for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scored:
    """A response with its score. ``index``: its place among the candidates. ``score``: None: it failed, and ``error``
    says why; such a response ranks last and passes no filter."""

    index: int
    text: str
    score: float | None
    error: str | None = None

    @property
    def told(self) -> dict[str, Any]:
        """For JSON; without an error where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "error" or value is not None}


def best_first(scored: Sequence[Scored]) -> list[Scored]:
    """Equal scores stay in the order given."""
    return sorted(scored, key=lambda one: (one.score is None, -(one.score or 0.0)))


async def score(ranker: Scorer, row: Candidates) -> list[Scored]:
    """Of each candidate, in their order; equal texts are scored once."""
    prompt = Prompt(0, row.prompt_text, (), row.answer, {**row.row, _MESSAGES: row.prompt})
    each = list(dict.fromkeys(row.texts))
    of = dict(zip(each, await ranker.score_all(prompt, each), strict=True))
    return [Scored(k, t, None if of[t].error else of[t].value, of[t].error) for k, t in enumerate(row.texts)]


def score_rows(ranker: Scorer, rows: Sequence[Candidates], most_failed: float = 0.2) -> list[list[Scored]]:
    """Of each row, in the order of its candidates. The ranker is closed then.
    Raises RewardError: more than ``most_failed`` of the scores failed: what is said of the rest would mislead."""

    async def work() -> list[list[Scored]]:
        try:
            await ranker.start()
            await _warn_of_lost_letters(ranker, rows)
            return list(await asyncio.gather(*(score(ranker, row) for row in rows)))
        finally:
            await ranker.close()

    found = run_async(work)
    every = [(row, one) for row, several in zip(rows, found, strict=True) for one in several]
    failed = [(row, one) for row, one in every if one.score is None]
    if len(failed) > most_failed * len(every):
        row, one = failed[0]
        raise RewardError(f"{len(failed)} of {len(every)} scores failed, such as {row.place}: {one.error}")
    return found


async def _warn_of_lost_letters(ranker: Scorer, rows: Sequence[Candidates]) -> None:
    every = [(row, (row.prompt_text, text)) for row in rows for text in row.texts]
    lacks = await ranker.lost_letters([both for _, both in every])
    lost = [(row, sorted(some)) for row, both in every if (some := lacks & letters("\n".join(both)))]
    if lost:
        row, first = lost[0]
        such = f"such as {''.join(first)!r}{row.place and f' in {row.place}'}"
        told = f"{len(lost)} of {len(every)} responses, with their prompts, hold letters that the ranker's tokenizer"
        _log.warning("%s", visible(f"{told} has no token for, {such}: the ranker does not see them"))


def load_ranker(model: Any, *, reference: str | None = None, overrides: Sequence[str] = ()) -> Scorer:
    """What ranks, by any of its names. Weights are loaded when it starts, onto a GPU if there is one.

    Args:
        model: folder or name of a reward model, or the run that it comes from; a policy that was trained by DPO (its
            run knows the reference); a recipe with a ``reward``, or a kind of reward; or a Python function.
        reference: the policy that DPO began with, where the run does not know it.
        overrides: ``reward.key=value``, and of an implicit reward ``dpo.beta=value``.

    Raises UserError: there is no such thing, or it is a language model that ranks nothing.
    """
    if callable(model):
        return CallableScorer(model, 60.0)
    name = str(model)
    if name in REWARD_KINDS or Path(name).suffix in (".yaml", ".yml"):
        return make_scorer(load_reward(name, overrides))
    with LOADING:
        found = find_model(name)
        stage = stage_named(found.recipe) if found.recipe else None
        if is_reward_model(found.path):
            trained = load_stage(stage, found.recipe) if stage == "reward_model" and found.recipe else None
            return make_scorer(_reward_of(found.path, trained, overrides))
        return _implicit(found, stage == "dpo", reference, overrides)


def is_reward_model(path: str) -> bool:
    """Whether a model is one that scores texts, by the files beside its weights alone. If there is no such model,
    whoever loads it says so."""
    from transformers.utils import cached_file

    from dapo.model.hub import from_where

    def read(name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            if file := cached_file(path, name, **from_where(path)):  # None: a folder without config.json
                return dict(read_json(Path(file)))
        return {}

    classifies = "ForSequenceClassification" in str(read("config.json").get("architectures"))
    return classifies or read("adapter_config.json").get("task_type") == "SEQ_CLS"


def _reward_of(path: str, trained: Any, overrides: Sequence[str]) -> RewardConfig:
    """As the run that trained it wrote texts; else by the chat template, if there is one."""
    import torch

    from dapo.model.loading import context_limit, load_tokenizer, read_config

    if isinstance(trained, RewardModelConfig):
        template, longest = trained.reward_model.template, trained.data.max_length
    else:
        template = "chat" if getattr(load_tokenizer(path), "chat_template", None) else "plain"
        longest = 4096
    limit = context_limit(read_config(path).get_text_config())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = {"path": path, "device": device, "template": template, "timeout_s": 600}
    told["max_length"] = min(longest, limit or longest)
    return load_reward("model", [*(f"reward.{key}={json.dumps(value)}" for key, value in told.items()), *overrides])


def _implicit(found: FoundModel, by_dpo: bool, reference: str | None, overrides: Sequence[str]) -> ImplicitScorer:
    from dapo.inference.model import ONE_EACH, settings_for
    from dapo.model.loading import read_config
    from dapo.model.placement import device_of

    given = [one for one in overrides if one.startswith("dpo.")]
    tree: dict[str, Any] = {"model": {"path": found.path}}
    apply_overrides(tree, given, {})
    trained: Any = load_stage("dpo", found.recipe, given) if by_dpo and found.recipe else build_stage("dpo", tree)
    reference = reference or (trained.model.path if by_dpo else None)
    if reference is None:
        require_at_hand("ranker", found.path)
        read_config(found.path)  # it may be damaged
        raise ConfigError(
            f"{found.path}: is a language model, and its probabilities alone rank nothing (a likely text is no better "
            "one); give a reward model, or with --reference the policy that DPO began with"
        )
    others = [one for one in overrides if one not in given]
    _, settings = settings_for(found.path, {}, ONE_EACH, recipe=found.recipe, overrides=others, unused=_UNUSED)
    settings = with_values(settings, {"runtime.device": device_of(settings).type})
    return ImplicitScorer(settings, find_model(reference).path, trained.dpo.beta)


class ImplicitScorer(Scorer):
    """DPO's implicit reward, beta (log pi - log ref) in sums over the tokens of a response with its end: the log-ratio
    by which the policy was moved (arXiv 2305.18290, eq. 5, but for a term of the prompt alone)."""

    def __init__(self, config: Any, reference: str, beta: float) -> None:
        self._config, self._reference, self._beta = config, reference, beta
        self._policies: list[Policy] = []
        self._text: Any = None
        self._longest = _LONGEST
        self._thread = ThreadPoolExecutor(1, "implicit reward")
        self._batches: Batcher[tuple[Any, str], Reward] = Batcher(self._batch, size=64)

    async def start(self) -> None:
        """Raises ModelError: one of the models cannot be loaded."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        return await self._batches.submit((prompt.meta.get(_MESSAGES, prompt.text), response))

    async def lost_letters(self, texts: Sequence[tuple[str, str]]) -> set[str]:
        loop, read_back = asyncio.get_running_loop(), self._text.read_back
        return await loop.run_in_executor(self._thread, letters_lost_in, texts, read_back)

    async def close(self) -> None:
        await self._batches.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _batch(self, items: Sequence[tuple[Any, str]]) -> Sequence[Reward]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, items)

    def _load(self) -> None:
        with LOADING:
            import torch

            from dapo.data.examples import PolicyText
            from dapo.inference.model import load_prompting
            from dapo.model.loading import context_limit, load_model
            from dapo.training.policy import Policy

            if len(self._policies) == 2:
                return
            prompting = load_prompting(self._config)
            config, dtype = prompting.config, torch.float32  # differences of sums: bfloat16 would decide the order
            self._text = PolicyText(prompting.template, prompting.tokenizer, config.data.template != "plain")
            for path in (config.model.path, self._reference)[len(self._policies) :]:  # where a load failed, it goes on
                model = load_model(path, dtype, config.model.trust_remote_code, config.runtime.device)
                self._longest = min(self._longest, context_limit(model.config.get_text_config()) or _LONGEST)
                self._policies.append(Policy(model.requires_grad_(False), 1.0, _LONGEST))

    def _scores(self, items: Sequence[tuple[str | Messages, str]]) -> list[Reward]:
        from dapo.data.examples import Example, Texts
        from dapo.data.rows import BadRow
        from dapo.stages.dpo import response_logprobs

        self._load()
        found, examples, order = dict[int, Reward](), list[Example](), list[int]()
        alike: dict[str, list[int]] = {}  # items by prompt: each is computed once
        for place, (prompt, _) in enumerate(items):
            alike.setdefault(repr(prompt), []).append(place)
        for places in alike.values():
            responses = tuple(items[place][1] for place in places)
            try:
                every = self._text.responses(Texts(items[places[0]][0], responses, (0.0,) * len(places)))
            except BadRow as error:
                found |= {place: Reward(None, 0.0, error=f"implicit reward: {error}") for place in places}
                continue
            kept = [k for k, ids in enumerate(every.responses) if len(every.prompt) + len(ids) <= self._longest]
            if kept:
                examples.append(Example(every.prompt, tuple(every.responses[k] for k in kept), (0.0,) * len(kept)))
            order += [places[k] for k in kept]
            too_long = Reward(None, 0.0, error=f"implicit reward: more than {self._longest} tokens with the prompt")
            found |= dict.fromkeys(set(places) - set(order), too_long)
        policy, reference = (response_logprobs(one, examples) if examples else [] for one in self._policies)
        for place, ours, theirs in zip(order, policy, reference, strict=True):
            if math.isfinite(value := self._beta * (ours - theirs)):
                found[place] = Reward(None, value, {"logprob": ours, "reference": theirs})
            else:
                found[place] = Reward(None, 0.0, error=f"implicit reward: the score is {value}")
        return [found[place] for place in range(len(items))]
