"""Held-out evaluation: sample from every prompt with settings of its own, score, and average.

Consumes: prompts. Produces: an :class:`Evaluation`. Waits for the engine and the scorer; both waits end with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dapo.config import Config
from dapo.environments.player import Player
from dapo.errors import ConfigError, RewardError
from dapo.evaluation.result import Evaluation
from dapo.records import Group, Prompt, Reward, Sample
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine, Request, Sampling
from dapo.rollout.seeds import sample_seed, turn_seed
from dapo.util.asynchronous import in_thread, task_group
from dapo.util.user_code import describe

Metric = Callable[[Sequence[Group]], float]
"""A number over all evaluated groups: prompts, with samples that have text and reward."""

_DRAW = -1  # of an evaluation: none of training's, so that the two never share a random stream


async def evaluate(
    prompts: Sequence[Prompt],
    engine: Engine,
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
    config: Config,
    progress: Callable[[int, int], None] = lambda done, total: None,
    metrics: Mapping[str, Metric] | None = None,
    player: Callable[[], Player] | None = None,
) -> Evaluation:
    """Sample ``evaluation.samples_per_prompt`` responses to each prompt and score them.

    The same run seed gives the same samples for the same weights, whatever was trained in between.
    ``progress``: called with samples done and samples in all. ``metrics``: the user's own, by name.
    ``player``: makes one that plays episodes, in place of single responses.
    Raises RewardError: the reward function broke its contract, or too many scores failed; EngineError: the engine
    failed; ConfigError: one of ``metrics`` failed, or gave no finite number."""
    sampling = evaluation_sampling(config)
    wanted = range(config.evaluation.samples_per_prompt)
    requests = [
        Request(  # ids below 0: those of training's requests, which are cancelled by id, are draws, from 0
            ~place, prompt.token_ids, tuple(sample_seed(config.seed, prompt.row, _DRAW, i) for i in wanted), sampling
        )
        for place, prompt in enumerate(prompts)
    ]
    total = len(prompts) * len(wanted)
    found: dict[tuple[int, int], Sample] = {}

    def keep(place: int, sample: Sample, reward: Reward) -> None:
        found[place, sample.index] = replace(sample, reward=reward)
        progress(len(found), total)

    async def score(sample: Sample) -> None:
        text = decode(sample.token_ids.tolist())
        place = ~sample.request_id
        reward = await scorer.score(prompts[place], text, sample.finish_reason)
        keep(place, replace(sample, text=text), reward)

    if player is not None:
        await play_episodes(player, prompts, engine, scorer, config, keep)
    else:
        async with task_group() as tasks:
            async for sample in engine.generate(requests):
                tasks.create_task(score(sample))
    _check_errors([s.reward.error for s in found.values() if s.reward and s.reward.error], total, config)
    groups = tuple(Group(place, one, tuple(found[place, i] for i in wanted)) for place, one in enumerate(prompts))
    own = {name: await in_thread(_measure, name, metric, groups) for name, metric in (metrics or {}).items()}
    return Evaluation(groups, own)


async def play_episodes(
    player: Callable[[], Player],
    prompts: Sequence[Prompt],
    engine: Engine,
    scorer: Scorer,
    config: Config,
    keep: Callable[[int, Sample, Reward], None],
) -> None:
    """An episode for each sample, each turn a request of its own."""
    sampling, numbers = evaluation_sampling(config), itertools.count(-1, -1)

    async def one(play: Player, place: int, prompt: Prompt, index: int) -> None:
        async def ask(context: tuple[int, ...], turn: int, most: int) -> Sample:
            seed = turn_seed(config.seed, prompt.row, _DRAW, index, turn)
            request = Request(next(numbers), context, (seed,), replace(sampling, max_tokens=most))
            return await anext(aiter(engine.generate([request])))

        async with play.seat() as session:
            played = await play.play(session, prompt, ask)
        sample = played.sample(place, index, prompt)
        keep(place, sample, await played.scored(sample, prompt, scorer))

    async with player() as play, task_group() as tasks:
        for place, prompt in enumerate(prompts):
            for index in range(config.evaluation.samples_per_prompt):
                tasks.create_task(one(play, place, prompt, index))


def _measure(name: str, metric: Metric, groups: Sequence[Group]) -> float:
    """Raises ConfigError: it failed, or gave no finite number."""
    try:
        value = float(metric(groups))
    except Exception as error:
        raise ConfigError(f"evaluation.metrics.{name}: {describe(error)}") from error
    if not math.isfinite(value):
        raise ConfigError(f"evaluation.metrics.{name}: gave {value}, but a finite number is needed")
    return value


def _check_errors(errors: Sequence[str], total: int, config: Config) -> None:
    """Raises RewardError: the share of failed scores is above ``reward.max_error_rate``: an average over the rest would
    lie."""
    limit = config.reward.max_error_rate
    if len(errors) > limit * total:
        raise RewardError(
            f"evaluation: {len(errors)} of {total} scores failed ({len(errors) / total:.0%}; reward.max_error_rate "
            f"allows {limit:.0%}), such as: {errors[0]}"
        )


def evaluation_sampling(config: Config) -> Sampling:
    """How an evaluation samples: by its own settings, and where it has none by those of the rollout."""
    settings = config.evaluation
    return Sampling(
        temperature=settings.temperature,
        max_tokens=config.evaluated_length,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=tuple(stop_texts(config)),
    )


def stop_texts(config: Config) -> list[str]:
    return config.rollout.stop if config.evaluation.stop is None else config.evaluation.stop
