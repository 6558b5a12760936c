"""What another reward would have said: the stored samples of a run, scored again (``dapo reward score``).

Consumes a run folder, of which nothing is changed, and a ``reward`` section; produces a :class:`StepChange` for each
step that has samples, one step at a time. Waits for the scorer, with many samples at once.

Samples are stored without the further keys of their rows (tests and the like). For a reward that may want them they are
read from the run's data, where the row's prompt must still be the one that was sampled from.
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
from dapo.config import CodeReward, Config, ExactReward, MathReward, ModelReward, RewardConfig
from dapo.config.compose import plain_rewards
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
    "answer_lost": "answer lost",
    "answer_found": "answer found",
    "opened": "now open",
    "decided": "now decided",
    "value": "other value",
}
"""How the reward of a sample can change, the most telling first, in words.

``failed``: there is no verdict any more; ``answer_lost``: an answer is no longer found; ``opened``: right or wrong is
no longer said; and the other way round. ``value``: all else is the same.
"""

_SAME = 1e-9
"""Values of a reward that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Change:
    """A sample whose reward changed. ``sample``: its line in samples/, with ``step``. ``kinds``: of :data:`KINDS`."""

    kinds: tuple[str, ...]
    sample: Mapping[str, Any]
    before: Reward
    after: Reward

    def as_json(self) -> dict[str, Any]:
        """Which sample, and both rewards."""
        place = {key: self.sample.get(key) for key in ("step", "draw", "row", "index")}
        return {
            **place,
            "kinds": self.kinds,
            "before": reward_to_json(self.before),
            "after": reward_to_json(self.after),
        }


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group that dynamic sampling would have decided otherwise about."""

    step: int
    draw: int
    row: int
    before: GroupVerdict
    after: GroupVerdict

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, "draw": self.draw, "row": self.row, "before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True)
class StepChange:
    """One step, scored again.

    ``compared``: samples that have a verdict both times; the two sums are over their rewards. ``kept_before`` and
    ``kept_after``: groups with something to learn from (mixed ones).
    """

    step: int
    samples: int
    compared: int
    sum_before: float
    sum_after: float
    failed_before: int
    failed_after: int
    groups: int
    kept_before: int
    kept_after: int
    changes: tuple[Change, ...]
    group_changes: tuple[GroupChange, ...]

    def numbers(self) -> dict[str, float]:
        """Everything that can be added up over steps; of every kind of change how many samples have it."""
        counts = Counter(kind for change in self.changes for kind in change.kinds)
        no_longer = sum(change.before is GroupVerdict.MIXED for change in self.group_changes)
        return {
            "samples": self.samples,
            "changed": len(self.changes),
            "compared": self.compared,
            "sum_before": self.sum_before,
            "sum_after": self.sum_after,
            "failed_before": self.failed_before,
            "failed_after": self.failed_after,
            "groups": self.groups,
            "kept_before": self.kept_before,
            "kept_after": self.kept_after,
            "no_longer_kept": no_longer,
            "newly_kept": len(self.group_changes) - no_longer,
            **{kind: counts[kind] for kind in KINDS},
        }

    def as_json(self) -> dict[str, Any]:
        """Numbers and changes, without the texts."""
        return {
            "step": self.step,
            **self.numbers(),
            "changes": [change.as_json() for change in self.changes],
            "group_changes": [change.as_json() for change in self.group_changes],
        }


async def rescore(
    folder: RunFolder,
    steps: Sequence[int],
    reward: RewardConfig,
    config: Config,
    rows: StoredRows,
    hear: Callable[[StepChange], None],
    advance: Callable[[int], None] = lambda step: None,
) -> None:
    """Score the samples of some steps again, one step after the other.

    Args:
        hear: called for each step with what changed.
        advance: called with its step for every sample that is done.

    Raises:
        UserError: a line is damaged, a row is not there, or the reward breaks its contract; names the place.
    """
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
            _check(sample, place)
            items.append((place, rows.prompt(sample, place), sample["response"], sample.get("finish_reason")))
        return samples, items

    samples, items = await asyncio.to_thread(read)
    policy, metric = config.reward, config.algorithm.filter_groups.metric
    rewards = [in_place_of_failed(r, policy, metric) for r in await score_each(scorer, items, advance)]
    before = [_stored_reward(sample) for sample in samples]
    return _compare(step, [{"step": step, **sample} for sample in samples], before, rewards, config)


# --- what is stored -----------------------------------------------------------------------------------------------

_TEXT, _WHOLE = (str,), (int,)
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "draw": _WHOLE,
    "row": _WHOLE,
    "index": _WHOLE,
    "prompt": _TEXT,
    "response": _TEXT,
    "gold": (str, type(None)),
    "correct": (bool, type(None)),
    "reward": (int, float, type(None)),
    "error": (str, type(None)),
    "extracted": (str, type(None)),
    "parts": (dict,),
}


def _check(sample: Mapping[str, Any], place: str) -> None:
    """Raises UserError: it is not what a run writes."""
    bad = [key for key, kinds in _FIELDS.items() if key not in sample or type(sample[key]) not in kinds]
    if not bad and sample["error"] is None and sample["reward"] is None:
        bad = ["reward"]
    if bad:
        raise UserError(f"{place}: not a sample of a run: {', '.join(bad)} missing or not what it should be")


def _stored_reward(sample: Mapping[str, Any]) -> Reward:
    value = 0.0 if sample["reward"] is None else float(sample["reward"])
    return Reward(sample["correct"], value, sample["parts"], sample["error"], sample["extracted"])


def needs_rows(reward: RewardConfig) -> bool:
    """Whether a reward may look at further keys of a row."""
    return not all(isinstance(one, MathReward | ExactReward | ModelReward) for one in plain_rewards(reward))


class StoredRows:
    """The prompts of stored samples, with the further keys of their rows if the reward may want them."""

    def __init__(self, config: Config, reward: RewardConfig, warn: Callable[[str], None]) -> None:
        """``warn``: hears that the data is not there; only a reward that cannot do without it ends here.
        Raises DataError: the reward runs tests, and the rows that hold them cannot be read."""
        self._rows: Rows | None = None
        self._config = config.data
        if not needs_rows(reward):
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
        """What the reward got to see of a sample's row.
        Raises DataError: the row is no longer there, or another one."""
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


# --- what changed -------------------------------------------------------------------------------------------------


def _compare(
    step: int, samples: Sequence[Mapping[str, Any]], before: Sequence[Reward], after: Sequence[Reward], config: Config
) -> StepChange:
    changes = []
    for sample, old, new in zip(samples, before, after, strict=True):
        kinds = kinds_of_change(old, new)
        if kinds:
            changes.append(Change(kinds, sample, old, new))
    both = [(a.value, b.value) for a, b in zip(before, after, strict=True) if a.error is None and b.error is None]
    groups = list(_groups(samples, before, after, config))
    return StepChange(
        step=step,
        samples=len(samples),
        compared=len(both),
        sum_before=math.fsum(a for a, _ in both),
        sum_after=math.fsum(b for _, b in both),
        failed_before=sum(reward.error is not None for reward in before),
        failed_after=sum(reward.error is not None for reward in after),
        groups=len(groups),
        kept_before=sum(was is GroupVerdict.MIXED for _, was, _ in groups),
        kept_after=sum(now is GroupVerdict.MIXED for _, _, now in groups),
        changes=tuple(changes),
        group_changes=tuple(
            GroupChange(step, sample["draw"], sample["row"], was, now)
            for sample, was, now in groups
            if (was is GroupVerdict.MIXED) is not (now is GroupVerdict.MIXED)
        ),
    )


def kinds_of_change(before: Reward, after: Reward) -> tuple[str, ...]:
    """What of :data:`KINDS` is true, in their order; nothing if the reward is the same."""
    if before.error is not None or after.error is not None:
        if before.error is not None and after.error is not None:
            return ()
        return ("failed",) if after.error is not None else ("recovered",)
    found: list[str] = []
    if before.correct is not after.correct:
        if before.correct is None or after.correct is None:
            found.append("decided" if before.correct is None else "opened")
        else:
            found.append("right_to_wrong" if before.correct else "wrong_to_right")
    had, has = _answer_found(before), _answer_found(after)
    if None not in (had, has) and had is not has:
        found.append("answer_lost" if had else "answer_found")
    if not found and not math.isclose(before.value, after.value, rel_tol=_SAME, abs_tol=_SAME):
        found.append("value")
    return tuple(sorted(found, key=list(KINDS).index))


def _answer_found(reward: Reward) -> bool | None:
    """None: the reward does not look for an answer, or does not say."""
    if "answer_found" in reward.parts:
        return reward.parts["answer_found"] > 0
    return True if reward.extracted is not None else None


def _groups(
    samples: Sequence[Mapping[str, Any]], before: Sequence[Reward], after: Sequence[Reward], config: Config
) -> Iterator[tuple[Mapping[str, Any], GroupVerdict, GroupVerdict]]:
    """For every group its first sample, and what it is worth with the old and the new rewards."""
    places: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample["draw"], []).append(place)
    for members in places.values():
        first = samples[members[0]]
        was, now = (_worth([rewards[k] for k in members], first, config) for rewards in (before, after))
        yield first, was, now


def _worth(rewards: Sequence[Reward], sample: Mapping[str, Any], config: Config) -> GroupVerdict:
    """What the run's dynamic sampling makes of a group; by the spread of the rewards where right and wrong are open."""
    none: Any = np.zeros(0)
    made = [Sample(0, k, none, none, none, "stop", reward=reward) for k, reward in enumerate(rewards)]
    group = Group(sample["draw"], Prompt(sample["row"], sample["prompt"], ()), tuple(made))
    is_open = any(reward.correct is None for reward in rewards if reward.error is None)
    filters = config.algorithm.filter_groups
    return judge(group, metric="score" if is_open else filters.metric, tolerance=filters.tolerance)
