"""What a run checks at its start: the reward on trial before the model is loaded, lengths, vocabulary, stop tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo.config import Config
from dapo.config.tree import kl_in_loss_of_another
from dapo.config.user_parts import own_part, own_parts
from dapo.data.source import PromptSource
from dapo.errors import ConfigError, DataError, ModelError, RewardError
from dapo.model.loading import POSITIONS_STATED, context_limit, named_stop_ids
from dapo.observe.progress import Listener
from dapo.records import Prompt
from dapo.reward.contract import Scorer
from dapo.rollout.engine import in_flight_policy
from dapo.training.learner import own_objective
from dapo.training.objective_protocol import unit_of
from dapo.util.user_code import load_named

_SHOWN_DOUBTS = 3
_GENERATION_CONFIG: Mapping[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "typical_p"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    "watermarking_config": None,
}
"""Changes of the logits that a model's generation config may hold, each with the value that does nothing."""


def check_own_parts(config: Config, objective: Any = None, engine: Any = None) -> None:
    """``objective``, ``engine``: from Python, in place of those that the recipe names.
    Raises ConfigError: a part of the user's cannot be loaded, or does not go with the recipe."""
    for key, name in own_parts(config).items():
        load_named(name, key)
    _check_objective(config, own_objective(config, objective, trial=True))
    in_flight_policy(config, own_part(config, "rollout.engine", engine))
    if engine is not None and config.runtime.exact:
        raise ConfigError("runtime.exact: needs the native engine, and one from Python was given; use exact=false")


def _check_objective(config: Config, objective: Any) -> None:
    """Raises ConfigError: an objective of the user's does not go with the recipe."""
    if objective is None:
        return
    if config.algorithm.kl.mode == "loss":
        raise ConfigError(kl_in_loss_of_another("one from Python"))
    staleness, uncorrected = config.rollout.max_staleness, config.algorithm.correction.kind == "none"
    if staleness and uncorrected and not getattr(objective, "off_policy", False):
        raise ConfigError(
            f"rollout.max_staleness: is {staleness}, but the objective does not say that it is made for older samples; "
            "use max_staleness=0; or algorithm.correction.kind=truncate, and multiply each token's loss by "
            "inputs.importance; or, if it clips or weighs the ratio itself, give it the attribute off_policy = True"
        )
    budget, prompt = config.training.tokens_per_micro_batch, config.data.max_prompt_length
    each, response = config.rollout.samples_per_prompt, config.rollout.max_response_length
    longest = prompt + each * response
    if unit_of(objective) == "pair" and budget < longest:
        raise ConfigError(
            f"training.tokens_per_micro_batch: is {budget}, but the objective has to see a group as a whole, which may "
            f"have {prompt} (prompt) + {each} x {response} (responses) = {longest} tokens; use at least that"
        )


async def try_reward(
    config: Config,
    scorer: Scorer,
    source: PromptSource,
    heldout: Sequence[Prompt],
    listener: Listener,
    from_python: bool,
) -> None:
    """Score the first prompt's own reference answer and an empty response, and look at what all rows are scored by,
    before there is a run. Of a recipe's reward `dapo doctor` in brief tries more.
    Raises DataError: rows cannot be scored, whatever the response; RewardError: the reward function breaks its
    contract, or says nothing that dynamic sampling could decide by."""
    prompts = list(source.untokenized())
    await examine_rows("data.train", prompts, scorer, listener)
    await examine_rows("evaluation.data", heldout, scorer, listener)
    prompt, filters = source.prompts[0], config.algorithm.filter_groups
    compared = filters.enable and filters.metric == "score" and from_python
    texts = list(dict.fromkeys([prompt.answer or "", "", *(p.answer or "" for p in prompts)]))[: 3 if compared else 2]
    tried = [await scorer.score(prompt, text, "stop") for text in texts]
    if tried[0].error is not None:
        listener.warning(f"a trial of the reward, with the reference answer as response, failed: {tried[0].error}")
    known = [reward for reward in tried if reward.error is None]
    if not known and (from_python or config.reward.kind == "function"):
        raise RewardError(f"the reward function fails, on the first reference answer, too: {tried[0].error}")
    if filters.enable and filters.metric == "acc" and None in (reward.correct for reward in known):
        which = "n empty" if known[0].correct is not None else ""
        raise RewardError(
            f"the reward does not say whether a{which} response is correct, which algorithm.filter_groups.metric=acc "
            "decides by; return a bool or dapo.records.Reward(correct=..., value=...), or use "
            "algorithm.filter_groups.metric=score"
        )
    if compared and len(known) == len(tried) > 1 and np.ptp([reward.value for reward in known]) <= filters.tolerance:
        listener.warning(
            "a trial of the reward: the reference answer, an empty response and another row's answer all get "
            f"{known[0].value:g}, and a group whose rewards are all the same is dropped "
            "(algorithm.filter_groups.metric=score); mend the reward"
        )


async def try_check(check: Scorer, source: PromptSource, listener: Listener) -> None:
    """Start the monitor's held-out check, and try it in the same way.
    Raises DataError: rows cannot be scored, whatever the response; RewardError: the check breaks its contract."""
    try:
        await check.start()
        await examine_rows("monitor.check: data.train", list(source.untokenized()), check, listener)
        prompt = source.prompts[0]
        reward = await check.score(prompt, prompt.answer or "", "stop")
    except RewardError as error:
        raise RewardError(f"monitor.check: {error}") from None
    if reward.error is not None:
        listener.warning(f"a trial of monitor.check, with the reference answer as response, failed: {reward.error}")


async def examine_rows(name: str, prompts: Sequence[Prompt], scorer: Scorer, listener: Listener) -> None:
    """Say which rows a reward is in doubt about, such as a reference that cannot be parsed.
    Raises DataError: rows cannot be scored, whatever the response."""
    doubts = await scorer.examine(prompts)
    for unusable in (True, False):
        found = [doubt for doubt in doubts if doubt.unusable is unusable]
        if not found:
            continue
        said = [f"row {prompts[doubt.position].row + 1}: {doubt.text}" for doubt in found[:_SHOWN_DOUBTS]]
        kind = "cannot be scored" if unusable else "are in doubt"
        text = f"{name}: {len(found)} of {len(prompts)} rows {kind}, such as " + "; ".join(said)
        if unusable:
            raise DataError(text)
        listener.warning(text)


def check_vocabulary(model: Any, tokenizer: Any, config: Config, listener: Listener, size: int | None = None) -> None:
    """``size``: rows of the model's embedding, where it has none yet. Raises ModelError: the tokenizer's ordinary
    tokens go beyond the model's vocabulary; ConfigError: a stop token is none of the model's."""
    size = size or int(model.get_input_embeddings().weight.shape[0])
    special = set(tokenizer.all_special_ids)
    highest = max((i for i in tokenizer.get_vocab().values() if i not in special), default=0)
    if highest >= size:
        raise ModelError(f"tokenizer: has token ids up to {highest}, but the model's vocabulary has {size} rows")
    named = {**named_stop_ids(model, tokenizer), "rollout.stop_token_ids": config.rollout.stop_token_ids}
    for where, ids in named.items():
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise ConfigError(f"{where}: {wrong[0]} is no token of the model, whose ids are 0..{size - 1}")
    if not any(named.values()):
        listener.warning("neither model nor tokenizer names a stop token: every response will run to its limit")


def notice_generation_config(model: Any, listener: Listener) -> None:
    """Say what a model's generation config asks for and does not get: a change of the logits before sampling."""
    wanted = getattr(model, "generation_config", None)
    values = {name: getattr(wanted, name, None) for name in _GENERATION_CONFIG}
    asked = [f"{name} {value}" for name, value in values.items() if value and value != _GENERATION_CONFIG[name]]
    if asked:
        listener.warning(
            f"the model's generation_config.json asks for {', '.join(asked)}; not applied, because the "
            "log-probabilities recorded would not be those of the policy"
        )


def longest_response(config: Config) -> int:
    return max(config.rollout.max_response_length, config.evaluation.max_response_length or 0)


def smaller_step(config: Config, prompts: int) -> str:
    """Settings of a step with at most ``prompts`` prompts, which can still be cut into mini-batches."""
    per_update = config.training.groups_per_update
    whole = prompts // per_update * per_update
    if whole:
        return f"rollout.prompts_per_step={whole}"
    return f"rollout.prompts_per_step={prompts} with training.groups_per_update=1"


def longest_sequence(config: Config, heldout: Sequence[Prompt]) -> int:
    """Tokens of prompt and response together, over training and evaluation, whose prompts may be longer."""
    training = config.data.max_prompt_length + longest_response(config)
    return max(training, max((len(p.token_ids) for p in heldout), default=0) + config.evaluated_length)


def check_lengths(config: Config, model_config: Any, heldout: Sequence[Prompt] = ()) -> None:
    """Refuse lengths that the model has no positions for. Raises ConfigError: prompts and responses may be longer than
    the model has positions for; DataError: a held-out prompt and its response are."""
    limit = context_limit(model_config)
    prompt, response = config.data.max_prompt_length, longest_response(config)
    longest = max(heldout, key=lambda p: len(p.token_ids), default=None)
    if limit is not None and longest is not None and len(longest.token_ids) + config.evaluated_length > limit:
        size, room = len(longest.token_ids), limit - len(longest.token_ids)
        advice = f"use evaluation.max_response_length={room} or leave it out" if room > 0 else "leave it out"
        raise DataError(
            f"evaluation.data: row {longest.row + 1}: {size} prompt tokens + {config.evaluated_length} response "
            f"tokens, but the model was made for {limit} positions ({POSITIONS_STATED}), and an evaluation skips no "
            f"row; {advice}"
        )
    response += config.algorithm.kind == "ppo"  # its critic reads one token more
    if limit is None or prompt + response <= limit:
        return
    prompt_works = max(1, min(prompt, limit // 4))
    works = max(1, limit - prompt_works)
    proposed = {"data.max_prompt_length": prompt_works} if prompt_works < prompt else {}
    given = {"rollout": config.rollout.max_response_length, "evaluation": config.evaluation.max_response_length or 0}
    proposed |= {f"{section}.max_response_length": works for section, length in given.items() if length > works}
    buffer = config.algorithm.overlong_buffer
    if buffer.enable and buffer.len > works:
        proposed["algorithm.overlong_buffer.len"] = works // 5
    raise ConfigError(
        f"data.max_prompt_length: {prompt} prompt tokens + {response} response tokens = {prompt + response}, but "
        f"the model was made for {limit} positions ({POSITIONS_STATED}); use "
        f"{', '.join(f'{k}={v}' for k, v in proposed.items())}"
    )
