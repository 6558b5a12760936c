"""Checks with the model itself: do engine and trainer agree, will dynamic sampling find enough."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dapo.algorithm.admission import GroupVerdict, judge
from dapo.checks.answers import spread
from dapo.checks.context import CheckContext, Finding, NotAtHand
from dapo.checks.rewards import impatient
from dapo.config import Config, EvaluationConfig
from dapo.environments.player import player_for
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.statistics import estimate_share
from dapo.model.loading import copy_model, stop_token_ids
from dapo.model.placement import cache_bytes, engine_device, set_threads
from dapo.records import Group, Prompt, Reward, Sample
from dapo.reward.build import make_scorer
from dapo.reward.check import running
from dapo.reward.contract import NoScorer, Scorer, in_place_of_failed
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.exact import exact_attention, exact_temperature
from dapo.training.mismatch import measure_mismatch
from dapo.training.packing import pack
from dapo.training.policy import Policy

AGREE_WITHIN = {"float32": 0.02, "bfloat16": 0.1}
"""Mean |log pi_engine - log pi_trainer| over the tokens, in nats, by ``model.compute_dtype``."""
_PROMPTS, _SAMPLES, _TOKENS = 2, 2, 16
PROBE_SECONDS = 600.0


def check_agreement(context: CheckContext) -> Iterator[Finding]:
    model, source = context.need(context.model, "model"), context.need(context.source, "tokenized data")
    context.need(context.words_known, "vocabulary")
    config = context.config
    set_threads(config, model)  # of the thread that works here
    prompts = spread(source.prompts, _PROMPTS)
    tokens = min(_TOKENS, config.rollout.max_response_length)
    groups = asyncio.run(_sample(context, prompts, NoScorer(), _SAMPLES, tokens))
    told = [replace(s, reward=Reward(None, 0.0), advantage=0.0) for g in groups for s in g.samples]
    batch = pack([Group(k, g.prompt, (told[2 * k], told[2 * k + 1])) for k, g in enumerate(groups)])
    dtype = getattr(torch, config.model.compute_dtype)
    budget, attention = config.training.tokens_per_micro_batch, exact_attention(config)
    policy = Policy(model, config.rollout.temperature, budget, dtype, attention=attention)
    found = measure_mismatch(batch, policy.logprobs(batch), version=0)
    limit = AGREE_WITHIN[config.model.compute_dtype]
    text = f"log-probs of {found.tokens} tokens by the native engine and the trainer differ by {found.mean:.2g} on "
    text += f"average, {found.maximum:.2g} at most"
    if config.runtime.exact and found.maximum:
        yield Finding("model", "agreement", "fail", f"{text}, with runtime.exact=true", "runtime.exact=false")
    elif found.exceeds(limit):
        fix = "model.compute_dtype=float32 or algorithm.correction.kind=truncate algorithm.proximal=recompute"
        yield Finding("model", "agreement", "warn", f"{text}; {limit:g} would be noise", fix)
    else:
        yield Finding("model", "agreement", "pass", text)


async def _sample(
    context: CheckContext, prompts: Sequence[Prompt], scorer: Scorer, samples: int, tokens: int, play: bool = False
) -> Sequence[Group]:
    """Groups in the order of ``prompts``, sampled as in training. ``play``: where the recipe has episodes, they are."""
    config, model, template = context.config, context.model, context.need(context.template, "template")
    stop_ids = stop_token_ids(model, context.tokenizer, config.rollout.stop_token_ids)
    template.ends_with(stop_ids)
    how = EvaluationConfig(
        samples_per_prompt=samples, max_response_length=tokens, temperature=config.rollout.temperature
    )
    reward = config.reward.model_copy(update={"max_error_rate": 1.0})  # what fails is counted
    asked = config.model_copy(update={"evaluation": how, "reward": reward})
    player = player_for(asked, template, evaluation=True) if play else None
    engine = NativeEngine(
        copy_model(model, getattr(torch, config.model.compute_dtype), engine_device(config)),
        stop_ids,
        max_sequence_tokens=max(config.data.max_prompt_length, *(len(p.token_ids) for p in prompts)) + tokens,
        max_concurrent_samples=min(config.rollout.max_concurrent_samples, len(prompts) * samples),
        cache_bytes=cache_bytes(config),
        threads=torch.get_num_threads(),
        exact_temperature=exact_temperature(config),
        decode=template.decode,
    )
    try:
        return (await evaluate(prompts, engine, scorer, template.decode, asked, player=player)).groups
    finally:
        await engine.close()


def check_probe(context: CheckContext) -> Iterator[Finding]:
    if not context.probe:
        return
    model, source = context.need(context.model, "model"), context.need(context.source, "tokenized data")
    context.need(context.reward_works or context.own_reward or None, "reward")
    config = context.config
    set_threads(config, model)
    prompts = [source.next() for _ in range(context.probe)]
    try:
        groups = asyncio.run(asyncio.wait_for(_scored(context, prompts), PROBE_SECONDS))
    except TimeoutError:
        text = f"{len(prompts)} prompts were not sampled and scored within {PROBE_SECONDS:g} s"
        yield Finding("data", "probe", "warn", text, f"--probe {max(1, context.probe // 4)}")
        return
    filters = config.algorithm.filter_groups
    if filters.enable and filters.metric == "acc" and _is_open(groups):
        raise NotAtHand("verdict of right or wrong")
    yield from judged(config, groups)


def _is_open(groups: Sequence[Group]) -> bool:
    return any(s.verdict.correct is None for g in groups for s in g.scored)


async def _scored(context: CheckContext, prompts: Sequence[Prompt]) -> list[Group]:
    config, rollout = context.config, context.config.rollout
    size = rollout.samples_per_prompt, rollout.max_response_length
    async with running(make_scorer(impatient(config.reward))) as scorer:
        groups = await _sample(context, prompts, scorer, *size, play=True)
    metric = config.algorithm.filter_groups.metric

    def judged_sample(sample: Sample) -> Sample:
        return replace(sample, reward=in_place_of_failed(sample.verdict, config.reward, metric))

    return [replace(g, samples=tuple(map(judged_sample, g.samples))) for g in groups]


def judged(config: Config, groups: Sequence[Group]) -> Iterator[Finding]:
    """What sampled and scored groups say of a run.

    With a share p of mixed groups, 1 / p generation rounds fill a batch on average. A step is expected to starve when
    that is more than the recipe allows (``Config.max_draw_rounds``); it may, when the lower end of p's interval
    (Wilson, 95%) says so."""
    filters, samples = config.algorithm.filter_groups, config.rollout.samples_per_prompt
    metric = filters.metric if filters.enable or not _is_open(groups) else "score"  # as training judges
    counts = Counter(judge(g, metric=metric, tolerance=filters.tolerance) for g in groups)
    mixed, total = counts[GroupVerdict.MIXED], len(groups)
    parts = ", ".join(f"{counts[one]} {one.value.replace('_', ' ')}" for one in GroupVerdict if counts[one])
    text = f"of {total} prompts at G={samples}: {parts}"
    yield from _cut(config, groups)
    yield from _answers(config, groups)
    if not filters.enable:
        status: Any = "pass" if mixed else "warn"
        yield Finding("data", "probe", status, f"{text}; dynamic sampling is off", "" if mixed else _advice(counts))
        return
    limit = config.max_draw_rounds
    low = estimate_share(mixed, total).low or 0.0
    rounds = f"{total / mixed:.1f} generation rounds" if mixed else "no number of rounds"
    text += f"; {rounds} fill a batch of {config.rollout.prompts_per_step}, {limit} are allowed"
    if mixed and 1 / low <= limit:
        yield Finding("data", "probe", "pass", text)
    elif mixed and total / mixed <= limit:
        more = f"algorithm.filter_groups.max_num_gen_batches={2 * filters.max_num_gen_batches}"
        advice = f"--probe {4 * total} to be surer, or {more}"
        yield Finding("data", "probe", "warn", f"{text}; with bad luck steps starve", advice)
    else:
        starved: Any = "fail" if filters.on_starved == "stop" else "warn"
        yield Finding("data", "probe", starved, f"{text}: steps will starve", _advice(counts))


def _cut(config: Config, groups: Sequence[Group]) -> Iterator[Finding]:
    cut = [s.truncated for g in groups for s in g.samples]
    limit = config.rollout.max_response_length
    if sum(cut) > len(cut) / 2:
        text = f"{sum(cut)} of {len(cut)} responses were cut at rollout.max_response_length={limit}"
        fix = f"rollout.max_response_length={2 * limit}, or look whether the model ever stops (dapo generate)"
        yield Finding("data", "probe-lengths", "warn", text, fix)


def _answers(config: Config, groups: Sequence[Group]) -> Iterator[Finding]:
    samples = [s for g in groups for s in g.scored]
    if not samples:
        return
    verdicts = [s.verdict for s in samples]
    told = any("answer_found" in v.parts or v.extracted is not None for v in verdicts)
    found = sum(bool(v.parts.get("answer_found", v.extracted is not None)) for v in verdicts)
    right, cut = sum(v.correct is True for v in verdicts), sum(s.truncated for s in samples)
    text = f"of {len(samples)} responses " + (f"{found} hold an answer that the reward can read, " if told else "")
    text += f"{right} are right, {cut} were cut"
    if told and not found:
        yield Finding("data", "probe-format", "warn", text, _ask_for_format(config, cut / len(samples)))
    else:
        yield Finding("data", "probe-format", "pass", text)


def _ask_for_format(config: Config, cut: float) -> str:
    if cut > 0.5:
        return f"rollout.max_response_length={2 * config.rollout.max_response_length}: most are cut before they answer"
    reward = config.reward
    if reward.kind == "math" and "boxed" not in reward.extract:
        return "data.template=dapo, which asks for a line with the answer"
    if reward.kind == "math":
        return r"data.instruction=' Put the final answer in \boxed{}.'"
    if reward.kind == "exact" and reward.after:
        return f"data.instruction=' Write {reward.after} and the final answer at the end.'"
    return "ask for the form that the reward reads (data.instruction), or read the form that the model writes"


def _advice(counts: Counter[GroupVerdict]) -> str:
    if counts[GroupVerdict.ALL_RIGHT] > counts[GroupVerdict.ALL_WRONG]:
        return "harder prompts: the model knows these"
    if counts[GroupVerdict.TOO_FEW_SCORED] > counts[GroupVerdict.ALL_WRONG]:
        return "mend the reward: its scores fail"
    return "easier prompts, a stronger model, or a larger rollout.samples_per_prompt"
