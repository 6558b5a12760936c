"""Checks that sample: do engine and trainer agree, and will dynamic sampling find what it needs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from dapo.algorithm.admission import GroupVerdict, judge
from dapo.checks.answers import spread
from dapo.checks.finding import Finding
from dapo.checks.patient import CheckContext, NotAtHand
from dapo.checks.rewards import impatient, scores
from dapo.config import Config
from dapo.evaluation.statistics import estimate_share
from dapo.model.loading import copy_model, stop_token_ids
from dapo.model.placement import cache_bytes, set_threads
from dapo.records import Group, Prompt, Reward, Sample
from dapo.reward.build import make_scorer
from dapo.reward.check import running
from dapo.reward.contract import in_place_of_failed
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.seeds import sample_seed
from dapo.training.mismatch import measure_mismatch
from dapo.training.packing import pack
from dapo.training.policy import Policy

AGREE_WITHIN = {"float32": 0.02, "bfloat16": 0.1}
"""Mean |log pi_engine - log pi_trainer| over the tokens, in nats, by ``model.compute_dtype``."""
_PROMPTS, _SAMPLES, _TOKENS = 2, 2, 16
_DRAW = -2
"""Numbered apart from the draws of training and evaluation."""
PROBE_SECONDS = 600.0
_SHIFTED_PROMPTS = 5
"""So many prompts have to be answered as a neighbouring row wants it, and so many times more than as their own does."""


def check_agreement(patient: CheckContext) -> Iterator[Finding]:
    """Sample some tokens with the engine, and compute their log-probabilities again as the trainer does."""
    model, source = patient.need(patient.model, "model"), patient.need(patient.source, "tokenized data")
    patient.need(patient.words_known, "vocabulary")
    config = patient.config
    set_threads(config, model)  # of the thread that works here
    prompts = spread(source.prompts, _PROMPTS)
    tokens = min(_TOKENS, config.rollout.max_response_length)
    groups = asyncio.run(_sample(patient, prompts, _SAMPLES, tokens))
    told = [replace(s, reward=Reward(None, 0.0), advantage=0.0) for g in groups for s in g.samples]
    batch = pack([Group(k, g.prompt, (told[2 * k], told[2 * k + 1])) for k, g in enumerate(groups)])
    dtype = getattr(torch, config.model.compute_dtype)
    policy = Policy(model, config.rollout.temperature, config.training.tokens_per_micro_batch, dtype)
    found = measure_mismatch(batch, policy.logprobs(batch), version=0)
    limit = AGREE_WITHIN[config.model.compute_dtype]
    text = (
        f"log-probs of {found.tokens} tokens by engine and trainer differ by {found.mean:.2g} on average, "
        f"{found.maximum:.2g} at most"
    )
    if found.exceeds(limit):
        fix = "model.compute_dtype=float32 or algorithm.correction.kind=truncate algorithm.proximal=recompute"
        yield Finding("model", "agreement", "warn", f"{text}; {limit:g} would be noise", fix)
    else:
        yield Finding("model", "agreement", "pass", text)


async def _sample(patient: CheckContext, prompts: Sequence[Prompt], samples: int, tokens: int) -> list[Group]:
    """Groups in the order of ``prompts``, their samples without text or reward."""
    async with _engine(patient, prompts, samples, tokens) as engine:
        config = patient.config
        sampling = Sampling(config.rollout.temperature, tokens, stop=tuple(config.rollout.stop))
        requests = [
            Request(
                place, p.token_ids, tuple(sample_seed(config.seed, p.row, _DRAW, i) for i in range(samples)), sampling
            )
            for place, p in enumerate(prompts)
        ]
        found: dict[tuple[int, int], Sample] = {}
        async for sample in engine.generate(requests):
            found[sample.request_id, sample.index] = sample
    return [Group(k, p, tuple(found[k, i] for i in range(samples))) for k, p in enumerate(prompts)]


@asynccontextmanager
async def _engine(
    patient: CheckContext, prompts: Sequence[Prompt], samples: int, tokens: int
) -> AsyncIterator[NativeEngine]:
    config, model, template = patient.config, patient.model, patient.need(patient.template, "template")
    stop_ids = stop_token_ids(model, patient.tokenizer, config.rollout.stop_token_ids)
    template.ends_with(stop_ids)
    engine = NativeEngine(
        copy_model(model, getattr(torch, config.model.compute_dtype)),
        stop_ids,
        max_sequence_tokens=max(len(p.token_ids) for p in prompts) + tokens,
        max_concurrent_samples=min(config.rollout.max_concurrent_samples, len(prompts) * samples),
        cache_bytes=cache_bytes(config),
        threads=torch.get_num_threads(),
        decode=template.decode,
    )
    try:
        yield engine
    finally:
        await engine.close()


def check_probe(patient: CheckContext) -> Iterator[Finding]:
    """Sample and score whole groups: how many hold something to learn from."""
    if not patient.probe:
        return
    model, source = patient.need(patient.model, "model"), patient.need(patient.source, "tokenized data")
    patient.need(patient.reward_works or None, "reward")
    config = patient.config
    set_threads(config, model)
    prompts = [source.next() for _ in range(patient.probe)]
    try:
        groups = asyncio.run(asyncio.wait_for(_scored(patient, prompts), PROBE_SECONDS))
    except TimeoutError:
        text = f"{len(prompts)} prompts were not sampled and scored within {PROBE_SECONDS:g} s"
        yield Finding("data", "probe", "warn", text, f"--probe {max(1, patient.probe // 4)}")
        return
    filters = config.algorithm.filter_groups
    if filters.enable and filters.metric == "acc" and _is_open(groups):
        raise NotAtHand("verdict of right or wrong")
    yield from judged(config, groups)
    if config.reward.kind in ("math", "exact"):  # elsewhere a score may cost, or look at more than the answer
        answers = {prompt.row: prompt.answer for prompt in source.untokenized()}
        yield from asyncio.run(shifted(config, groups, answers))


async def shifted(config: Config, groups: Sequence[Group], answers: Mapping[int, str | None]) -> list[Finding]:
    """Whether most responses are right by the answer of the row before or after, and not by their own row's.

    Only a model that solves prompts can show it; of one that does not, nothing is said. ``groups``: sampled and scored,
    with texts. ``answers``: of all rows, by their number.
    """
    own = sum(_most([s.verdict for s in g.scored]) for g in groups)
    async with running(make_scorer(config.reward)) as scorer:
        for shift, which in ((1, "next"), (-1, "previous")):
            moved = [(g, answers.get(g.prompt.row + shift)) for g in groups]
            asked = [(g, replace(g.prompt, answer=a)) for g, a in moved if a not in (None, g.prompt.answer)]
            texts = [(prompt, s.text) for g, prompt in asked for s in g.samples]
            found = iter(await scores(scorer, texts, [s.finish_reason for g, _ in asked for s in g.samples]))
            right = sum(_most([next(found) for _ in g.samples]) for g, _ in asked)
            if right >= _SHIFTED_PROMPTS and own <= right / _SHIFTED_PROMPTS:
                text = (
                    f"of {len(groups)} prompts {right} are mostly answered as the {which} row wants it, and {own} as "
                    "their own row does: the answers have been shifted against the prompts"
                )
                fix = f"pair each prompt with the answer of the {which} row, and look for where they were joined"
                return [Finding("data", "probe-shifted", "warn", text, fix)]
    return []


def _most(verdicts: Sequence[Reward]) -> bool:
    return sum(verdict.correct is True for verdict in verdicts) > len(verdicts) / 2


def _is_open(groups: Sequence[Group]) -> bool:
    """Whether the reward leaves right and wrong open."""
    return any(s.verdict.correct is None for g in groups for s in g.scored)


async def _scored(patient: CheckContext, prompts: Sequence[Prompt]) -> list[Group]:
    config, template = patient.config, patient.need(patient.template, "template")
    groups = await _sample(patient, prompts, config.rollout.samples_per_prompt, config.rollout.max_response_length)
    samples = [(g.prompt, s) for g in groups for s in g.samples]
    texts = [(prompt, template.decode(s.token_ids.tolist())) for prompt, s in samples]
    async with running(make_scorer(impatient(config.reward))) as scorer:
        rewards = iter(await scores(scorer, texts, [s.finish_reason for _, s in samples]))
    metric, said = config.algorithm.filter_groups.metric, iter([text for _, text in texts])

    def judged_sample(sample: Sample) -> Sample:
        return replace(sample, text=next(said), reward=in_place_of_failed(next(rewards), config.reward, metric))

    return [replace(g, samples=tuple(map(judged_sample, g.samples))) for g in groups]


def judged(config: Config, groups: Sequence[Group]) -> Iterator[Finding]:
    """What sampled and scored groups say of a run.

    With a share p of mixed groups, 1 / p generation rounds fill a batch on average. A step is expected to starve when
    that is more than ``algorithm.filter_groups.max_num_gen_batches``; it may, when the lower end of p's interval
    (Wilson, 95%) says so.
    """
    filters, samples = config.algorithm.filter_groups, config.rollout.samples_per_prompt
    metric = filters.metric if filters.enable or not _is_open(groups) else "score"  # as training judges
    counts = Counter(judge(g, metric=metric, tolerance=filters.tolerance) for g in groups)
    mixed, total = counts[GroupVerdict.MIXED], len(groups)
    parts = ", ".join(
        f"{counts[verdict]} {verdict.value.replace('_', ' ')}" for verdict in GroupVerdict if counts[verdict]
    )
    text = f"of {total} prompts at G={samples}: {parts}"
    yield from _cut(config, groups)
    yield from _answers(config, groups)
    if not filters.enable:
        status: Any = "pass" if mixed else "warn"
        yield Finding("data", "probe", status, f"{text}; dynamic sampling is off", "" if mixed else _advice(counts))
        return
    limit = filters.max_num_gen_batches
    low = estimate_share(mixed, total).low or 0.0
    rounds = f"{total / mixed:.1f} generation rounds" if mixed else "no number of rounds"
    text += f"; {rounds} fill a batch of {config.rollout.prompts_per_step}, {limit} are allowed"
    if mixed and 1 / low <= limit:
        yield Finding("data", "probe", "pass", text)
    elif mixed and total / mixed <= limit:
        advice = f"--probe {4 * total} to be surer, or algorithm.filter_groups.max_num_gen_batches={2 * limit}"
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
    """How many responses hold an answer that the reward can read (where it tells that), are right, were cut."""
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
    """What makes a model write its answer where the reward looks for it."""
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
