"""The stored samples of a run, scored again (``dapo reward score``). The run folder is only read.

Samples are stored without the further keys of their rows (tests and the like). For a reward that may need them they are
read from the run's data, where the row must still have the prompt of the sample.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dapo.algorithm.admission import GroupVerdict, judge
from dapo.commands.replay.stored import check_sample, stored_reward
from dapo.config import CodeReward, Config, ExactReward, MathReward, ModelReward, RewardConfig
from dapo.config.composed_reward import plain_rewards
from dapo.data.parts import Rows, open_parts
from dapo.data.rows import BadRow
from dapo.errors import DataError, UserError
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples, samples_path
from dapo.records import FinishReason, Group, Prompt, Reward, Sample
from dapo.reward.build import make_scorer
from dapo.reward.check import running, score_each
from dapo.reward.contract import Scorer, in_place_of_failed
from dapo.reward.convert import reward_to_json

KINDS: Mapping[str, str] = {
    "right_to_wrong": "right -> wrong",
    "wrong_to_right": "wrong -> right",
    "failed": "now failed",
    "recovered": "now scored",
    "value": "otherwise",
}
"""How the reward of a sample can change, the most important first, and its column header."""

_TOLERANCE = 1e-9  # rewards that differ by less, absolutely or relatively, are equal


@dataclass(frozen=True, slots=True)
class Change:
    """A sample whose reward changed. ``sample``: its line in samples/, with ``step``. ``kind``: of :data:`KINDS`."""

    kind: str
    sample: Mapping[str, Any]
    before: Reward
    after: Reward

    def as_json(self) -> dict[str, Any]:
        """Which sample, and both rewards."""
        place = {key: self.sample.get(key) for key in ("step", "draw", "row", "index")}
        return {**place, "kind": self.kind, "before": reward_to_json(self.before), "after": reward_to_json(self.after)}


@dataclass(frozen=True, slots=True)
class StepChange:
    """One step, scored again.

    ``numbers`` can be added up over steps. ``compared`` counts samples with a verdict both times, and the two sums are
    over their rewards; groups are ``kept`` that are mixed; each of :data:`KINDS` has the number of its samples.
    """

    step: int
    numbers: Mapping[str, float]
    changes: tuple[Change, ...]

    def as_json(self) -> dict[str, Any]:
        """Without the texts."""
        return {"step": self.step, **self.numbers, "changes": [change.as_json() for change in self.changes]}


async def rescore(
    folder: RunFolder,
    steps: Sequence[int],
    reward: RewardConfig,
    config: Config,
    rows: StoredRows,
    hear: Callable[[StepChange], None],
    advance: Callable[[int], None] = lambda step: None,
) -> None:
    """Score the samples of some steps again. ``hear``: called for each step; ``advance``: for each sample, with its
    step. Raises UserError: a line is damaged, a row is not there, or the reward breaks its contract; names the
    place."""
    if config.environment.on:
        raise UserError("the reward of an episode is its environment's, or for its last answer; neither is made again")
    async with running(make_scorer(reward)) as scorer:
        for step in steps:
            hear(await _rescore_step(folder, step, scorer, config, rows, partial(advance, step)))


async def _rescore_step(
    folder: RunFolder, step: int, scorer: Scorer, config: Config, rows: StoredRows, advance: Callable[[], None]
) -> StepChange:
    path = samples_path(folder.samples, step)

    def read() -> tuple[list[dict[str, Any]], list[tuple[str, Prompt, str, FinishReason | None]]]:
        samples, items = read_samples(path), []
        for number, sample in enumerate(samples, start=1):
            place = f"{path}:{number}"
            check_sample(sample, place)
            items.append((place, rows.prompt(sample, place), sample["response"], sample.get("finish_reason")))
        return samples, items

    samples, items = await asyncio.to_thread(read)
    policy, metric = config.reward, config.algorithm.filter_groups.metric
    rewards = [in_place_of_failed(r, policy, metric) for r in await score_each(scorer, items, advance)]
    before = [stored_reward(sample) for sample in samples]
    return _compare(step, [{"step": step, **sample} for sample in samples], before, rewards, config)


class StoredRows:
    """The prompts of stored samples, with the further keys of their rows if the reward may need them."""

    def __init__(self, config: Config, reward: RewardConfig, warn: Callable[[str], None]) -> None:
        """``warn``: called if the rows cannot be read. Raises DataError: they hold the tests that the reward runs."""
        self._rows: Rows | None = None
        if all(isinstance(one, MathReward | ExactReward | ModelReward) for one in plain_rewards(reward)):
            return
        try:
            if not config.data.train:
                raise DataError("data.train names no files; rows that are given from Python are not stored")
            self._rows = Rows(open_parts(config.data, config.data.train, answer_required=False)[0])
        except DataError as error:
            text = f"the rows of the run's data, which hold what else reward.kind={reward.kind} may want: {error}"
            if any(isinstance(one, CodeReward) for one in plain_rewards(reward)):
                raise DataError(f"cannot read {text}") from None
            warn(f"going on without {text}")

    def prompt(self, sample: Mapping[str, Any], place: str) -> Prompt:
        """Raises DataError: the row of the sample is no longer there, or another one."""
        number, meta = sample["row"], {}
        if self._rows is not None:
            there = 0 <= number < len(self._rows)
            try:
                row = self._rows[number] if there else None
            except BadRow as fault:
                raise DataError(f"{self._rows.place(number)}: {fault} ({place} was sampled from it)") from None
            if row is None or row.text != sample["prompt"]:
                found = f"{row.place} is another prompt" if row else f"there are {len(self._rows)} rows"
                raise DataError(f"{place}: sampled from row {number + 1} of the data, which has changed: {found}")
            meta = dict(row.meta)
        return Prompt(number, sample["prompt"], (), sample["gold"], meta, sample.get("prompt_end") or "")


def _compare(
    step: int, samples: Sequence[Mapping[str, Any]], before: Sequence[Reward], after: Sequence[Reward], config: Config
) -> StepChange:
    changes = [
        Change(kind, sample, old, new)
        for sample, old, new in zip(samples, before, after, strict=True)
        if (kind := kind_of_change(old, new)) is not None
    ]
    both = [(a.value, b.value) for a, b in zip(before, after, strict=True) if a.error is None and b.error is None]
    kept = Counter(_groups(samples, before, after, config))  # whether each group was kept, and would be now
    counts = Counter(change.kind for change in changes)
    numbers = {
        "samples": len(samples),
        "changed": len(changes),
        "compared": len(both),
        "sum_before": math.fsum(a for a, _ in both),
        "sum_after": math.fsum(b for _, b in both),
        "groups": kept.total(),
        "kept_before": kept[True, True] + kept[True, False],
        "kept_after": kept[True, True] + kept[False, True],
        "no_longer_kept": kept[True, False],
        "newly_kept": kept[False, True],
        **{kind: counts[kind] for kind in KINDS},
    }
    return StepChange(step, numbers, tuple(changes))


def kind_of_change(before: Reward, after: Reward) -> str | None:
    """Of :data:`KINDS`; None: the reward is the same."""
    if before.error is not None or after.error is not None:
        both = before.error is not None and after.error is not None
        return None if both else "failed" if after.error is not None else "recovered"
    if {before.correct, after.correct} == {True, False}:
        return "right_to_wrong" if before.correct else "wrong_to_right"
    same = math.isclose(before.value, after.value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return None if same and before.correct is after.correct else "value"


def _groups(
    samples: Sequence[Mapping[str, Any]], before: Sequence[Reward], after: Sequence[Reward], config: Config
) -> Iterator[tuple[bool, bool]]:
    """Whether each group is kept with the old rewards, and with the new ones."""
    places: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample["draw"], []).append(place)
    for members in places.values():
        first = samples[members[0]]
        was, now = (_is_kept([rewards[k] for k in members], first, config) for rewards in (before, after))
        yield was, now


def _is_kept(rewards: Sequence[Reward], sample: Mapping[str, Any], config: Config) -> bool:
    """By the run's dynamic sampling; by the spread of the rewards where right and wrong are open."""
    none: Any = np.zeros(0)
    made = [Sample(0, k, none, none, none, "stop", reward=reward) for k, reward in enumerate(rewards)]
    group = Group(sample["draw"], Prompt(sample["row"], sample["prompt"], ()), tuple(made))
    is_open = any(reward.correct is None for reward in rewards if reward.error is None)
    filters = config.algorithm.filter_groups
    verdict = judge(group, metric="score" if is_open else filters.metric, tolerance=filters.tolerance)
    return verdict is GroupVerdict.MIXED
