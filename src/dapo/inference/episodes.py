"""``dapo generate --environment`` without its printing: prompts in, episodes out as they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dapo.config import Config
from dapo.data.rows import Messages
from dapo.environments.player import check_environment, player_for
from dapo.errors import RewardError
from dapo.evaluation.evaluate import play_episodes
from dapo.inference.generate import prompts_for
from dapo.inference.model import doubts, load_engine, load_prompting
from dapo.observe.progress import Listener
from dapo.observe.samples import lines_of_group
from dapo.records import Group, Reward, Sample
from dapo.reward.contract import NoScorer
from dapo.util.asynchronous import run_async
from dapo.util.terminal import counted


def generate_episodes(
    config: Config, texts: Sequence[str | Messages], listener: Listener, show: Callable[[dict[str, Any]], object]
) -> None:
    """Play ``evaluation.samples_per_prompt`` episodes with each text and each row of ``evaluation.data``. ``show``: is
    called with each as a line of samples has it. Raises UserError: something in environment, model or data is wrong,
    or, once all are over, an episode died."""
    check_environment(config)  # before anything is loaded
    listener.phase("loading the tokenizer")
    prompting = load_prompting(config)
    player = player_for(prompting.config, prompting.template, evaluation=True)
    assert player is not None  # an environment is named
    prompts = prompts_for(prompting, texts)
    everything = [prompt for several in prompts.values() for prompt in several]
    for said in doubts(prompting, prompts):
        listener.warning(said)
    listener.phase("loading the model")
    engine = load_engine(prompting, prompts, len(everything) * config.evaluation.samples_per_prompt, listener)
    died = list[str]()

    def keep(place: int, sample: Sample, reward: Reward) -> None:
        show(next(lines_of_group(Group(place, everything[place], (replace(sample, reward=reward),)), "kept")))
        if sample.ended == "died":
            died.append(str(reward.error))

    async def play() -> None:
        try:
            await play_episodes(player, everything, engine, NoScorer(), prompting.config, keep)
        finally:
            await engine.close()

    run_async(play)
    if died:
        raise RewardError(f"{counted(len(died), 'episode')} died: {died[0]}")
