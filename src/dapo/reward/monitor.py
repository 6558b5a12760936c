"""Signs of reward hacking in the scored groups of each rollout step, with the help of a held-out check: a second reward
that is never trained on. Three alarms, each over several steps:

- *false right*: the check calls wrong what the reward calls right;
- *divergence*: the reward has risen and the check has not (each in its own standard deviations);
- *length*: within groups reward and length of the response correlate, and lengths have changed accordingly. It needs
  no check, and so does not say that this is hacking.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean, pstdev
from typing import Any

from dapo.config import MonitorConfig
from dapo.errors import RewardError
from dapo.records import Group, Reward, Sample
from dapo.reward.contract import Scorer
from dapo.util.asynchronous import task_group

SIGNS = ("false right", "divergence", "length")
_LENGTH_MOVED = 1.2  # factor by which the mean length must have changed for the length alarm
_CHECKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Audit:
    """Statistics of one step; None: there are no samples for it.

    ``reward`` and ``check``: mean values over the samples that were checked, and their standard deviations.
    ``false_right``: the share that the check calls wrong among those that the reward calls right. ``length``: mean
    response length in tokens; ``length_correlation``: see :func:`length_correlation`.
    """

    reward: float | None
    reward_std: float | None
    check: float | None
    check_std: float | None
    false_right: float | None
    length: float | None
    length_correlation: float | None


class Monitor:
    """Audits of all steps so far, and the alarms that follow from them."""

    def __init__(self, config: MonitorConfig, check: Scorer | None, seed: int = 0) -> None:
        """``check``: scores for ``config.check``; started and closed by the caller. ``seed``: of the samples that are
        checked."""
        self._config, self._check, self._seed = config, check, seed
        self.verdicts: dict[tuple[int, int], Reward] = {}
        """Of the check in the current step, by draw and index of the sample."""
        self._steps = 0
        self._first: list[Audit] = []
        """Of the first ``window`` steps; if the window is widened on resume, of as many as it had before."""
        self._last: deque[Audit] = deque(maxlen=config.window)
        self._raised: set[str] = set()
        self._seen: tuple[Audit, set[str]] | None = None
        self._running: asyncio.Task[tuple[dict[str, float | None], list[str]]] | None = None

    def begin(self, groups: Sequence[Group]) -> None:
        """Start to audit the groups of a step in the background."""
        assert self._running is None, "begin() twice"
        self._running = asyncio.create_task(self._observe(groups))

    async def finish(self) -> tuple[dict[str, float | None], list[str]]:
        """Metrics by the names of ``observe/metrics.py``, and a warning for each new alarm. Waits for the check."""
        running, self._running = self._running, None
        assert running is not None, "finish() without begin()"
        return await running

    def settle(self) -> None:
        """Count the finished step. One that is interrupted before is audited again when the run is resumed."""
        assert self._seen is not None, "settle() without finish()"
        (audit, self._raised), self._seen = self._seen, None
        self._steps += 1
        if len(self._first) < self._config.window and len(self._first) == self._steps - 1:
            self._first.append(audit)
        self._last.append(audit)

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {
            "steps": self._steps,
            "first": [asdict(audit) for audit in self._first],
            "last": [asdict(audit) for audit in self._last],
            "raised": sorted(self._raised),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._steps, self._raised = state["steps"], set(state["raised"])
        self._first = [Audit(**audit) for audit in state["first"]]
        self._last.clear()
        self._last.extend(Audit(**audit) for audit in state["last"])

    async def _observe(self, groups: Sequence[Group]) -> tuple[dict[str, float | None], list[str]]:
        said: list[str] = []
        self.verdicts = {}
        try:
            checked = await self._checked(groups)
        except RewardError as error:
            checked, self._check = [], None  # a broken check does not stop the run
            said.append(f"monitor.check has ended and says no more: {error}")
        failed = [check.error for _, check in checked if check.error is not None]
        blind = {"blind"} if failed and len(failed) == len(checked) else set()
        if blind - self._raised:
            said.append(f"monitor.check sees nothing: all of its {len(failed)} scores failed, such as: {failed[0]}")
        audit = _audit(groups, [(s, c) for s, c in checked if c.error is None])
        alarms = dict(self._alarms(audit))
        said += [text for name, text in alarms.items() if name not in self._raised]
        self._seen = audit, set(alarms) | blind
        found: dict[str, float | None] = {"monitor/alarms": float(len(alarms))}
        found |= {f"monitor/alarms/{name.replace(' ', '_')}": float(name in alarms) for name in SIGNS}
        if self._check is not None:
            found |= {
                "monitor/reward": audit.reward,
                "monitor/check": audit.check,
                "monitor/false_right": audit.false_right,
                "monitor/check_errors": fmean(c.error is not None for _, c in checked) if checked else None,
            }
        if audit.length_correlation is not None:
            found["monitor/length_correlation"] = audit.length_correlation
        return found, said

    async def _checked(self, groups: Sequence[Group]) -> list[tuple[Sample, Reward]]:
        check = self._check
        if check is None:
            return []
        chosen = [(group, s) for group in groups for s in group.scored if self._is_chosen(group, s)]
        room = asyncio.Semaphore(_CHECKS_AT_ONCE)

        async def score(group: Group, sample: Sample) -> tuple[Sample, Reward]:
            async with room:
                return sample, await check.score(group.prompt, sample.text, sample.finish_reason)

        async with task_group() as running:
            tasks = [running.create_task(score(*pair)) for pair in chosen]
        found = [task.result() for task in tasks]
        keys = [(group.draw, sample.index) for group, sample in chosen]
        self.verdicts = {key: check for key, (_, check) in zip(keys, found, strict=True)}
        return found

    def _is_chosen(self, group: Group, sample: Sample) -> bool:
        """At random, but the same ones if the step is run again."""
        return Random(f"{self._seed}/{group.draw}/{sample.index}").random() < self._config.share

    def _alarms(self, newest: Audit) -> Iterator[tuple[str, str]]:
        """The alarms that are on, with ``newest`` of the current step, and their texts."""
        config, window = self._config, self._config.window
        steps, last = self._steps + 1, [*self._last, newest][-window:]
        false_right = _mean(a.false_right for a in last)
        if steps >= window and false_right is not None and false_right > config.max_false_right:
            yield (
                "false right",
                f"reward hacking? Over the last {window} steps the held-out check calls {false_right:.0%} of the "
                f"responses wrong that the reward calls right (monitor.max_false_right={config.max_false_right:g}); "
                "look at samples where they disagree, and mend the reward",
            )
        if steps < 2 * window:
            return
        first = self._first
        rise = _rise([a.reward for a in first], [a.reward for a in last], [a.reward_std for a in first])
        check_rise = _rise([a.check for a in first], [a.check for a in last], [a.check_std for a in first])
        if rise is not None and check_rise is not None and rise - max(check_rise, 0.0) > config.max_divergence:
            yield (
                "divergence",
                f"reward hacking? Since the first {window} steps the reward has risen by {rise:.2f} standard "
                f"deviations, the held-out check by {check_rise:.2f} (monitor.max_divergence="
                f"{config.max_divergence:g}); compare responses of then and now",
            )
        correlation = _mean(a.length_correlation for a in last)
        before, now = _mean(a.length for a in first), _mean(a.length for a in last)
        if correlation is None or not before or not now or abs(correlation) <= config.max_length_correlation:
            return
        if now > before * _LENGTH_MOVED if correlation > 0 else now < before / _LENGTH_MOVED:
            unchecked = "; monitor.check, a second reward, would tell whether they get better" * (self._check is None)
            yield (
                "length",
                f"reward and length go together within groups (correlation {correlation:+.2f}; "
                f"monitor.max_length_correlation={config.max_length_correlation:g}), and responses went from "
                f"{before:.0f} to {now:.0f} tokens; does the reward pay for length?{unchecked}",
            )


def _audit(groups: Sequence[Group], checked: Sequence[tuple[Sample, Reward]]) -> Audit:
    values = [s.verdict.value for s, _ in checked]
    checks = [check.value for _, check in checked]
    right = [check.correct for s, check in checked if s.verdict.correct and check.correct is not None]
    scored = [s for group in groups for s in group.scored]
    return Audit(
        reward=fmean(values) if values else None,
        reward_std=pstdev(values) if values else None,
        check=fmean(checks) if checks else None,
        check_std=pstdev(checks) if checks else None,
        false_right=1 - fmean(right) if right else None,
        length=fmean(s.length for s in scored) if scored else None,
        length_correlation=length_correlation(groups),
    )


def length_correlation(groups: Sequence[Group]) -> float | None:
    """Pearson's correlation of raw reward and length, each relative to the mean of its group: a hard prompt has long
    responses and a low reward. -1 to 1; None: one of them does not vary within groups."""
    products = rewards = lengths = 0.0
    for group in groups:
        if len(group.scored) < 2:
            continue
        value = fmean(s.verdict.value for s in group.scored)
        length = fmean(s.length for s in group.scored)
        for sample in group.scored:
            up, longer = sample.verdict.value - value, sample.length - length
            products += up * longer
            rewards += up * up
            lengths += longer * longer
    if not rewards or not lengths:
        return None
    return products / math.sqrt(rewards * lengths)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rise(first: Sequence[float | None], last: Sequence[float | None], spread: Sequence[float | None]) -> float | None:
    """From the mean of ``first`` to that of ``last``, in units of the mean ``spread``; None: one of them is unknown."""
    before, now, unit = _mean(first), _mean(last), _mean(spread)
    if before is None or now is None or unit is None:
        return None
    if unit < 1e-6:  # nothing varied at first
        return 0.0 if abs(now - before) < 1e-6 else math.copysign(math.inf, now - before)
    return (now - before) / unit
