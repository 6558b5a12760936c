"""Dynamic sampling (Eq. 11) of one rollout step: how many prompts to draw, which groups are admitted, and what becomes
of the others. Knows draws and their verdicts; ``group_sampler.py`` samples and scores them. Waits for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dapo.algorithm.admission import Admission, GroupVerdict, admit, judge, refill_size
from dapo.config import Config
from dapo.errors import RewardError
from dapo.orchestrator.pending_group import AcceptanceRate, PendingGroup, Scores
from dapo.orchestrator.rollout_batch import RolloutBatch, RolloutStats
from dapo.records import Group
from dapo.util.spans import Spans


class DynamicSampling:
    """The draws of one step, carried-over ones first, in the order in which they are admitted.

    Attributes:
        wanted: groups to find.
        rounds: times that prompts were drawn for this step.
        scores: of this step.
        reward_wait_s: seconds from the last sample's arrival to the end of the round; for the counts, as is
        decode_steps: of the engine in the round, and the spans of its sampling and scoring.
    """

    def __init__(
        self,
        config: Config,
        step: int,
        wanted: int,
        version: int,
        rate: AcceptanceRate,
        carried: Sequence[Group] = (),
        resumed: Sequence[Group] = (),
        rounds: int = 0,
    ) -> None:
        """
        Args:
            version: policy version that will be trained.
            rate: of earlier steps.
            carried: good groups of earlier steps.
            resumed: the draws of an interrupted round of this step, each with the samples that it had.
            rounds: times that it had drawn prompts.
        """
        self._config = config
        self._step = step
        self._version = version
        self._rate = rate
        self.wanted = wanted
        self.rounds = rounds
        self.scores = Scores(config.reward, config.algorithm.filter_groups.metric, step)
        self.reward_wait_s, self.decode_steps = 0.0, 0
        self.spans = Spans()
        self._draws = [PendingGroup.carry(g) for g in sorted(carried, key=lambda g: g.draw)]
        filters = config.algorithm.filter_groups
        self._budget = wanted * filters.max_num_gen_batches if filters.enable else self._missing
        self.resumed = [self.add(PendingGroup.resume(g)) for g in resumed]
        """The draws of an interrupted round."""

    # -- drawing -------------------------------------------------------------------------------------------------------

    def add(self, draw: PendingGroup) -> PendingGroup:
        """Another draw of this step."""
        self._budget -= 1
        self._draws.append(draw)
        return draw

    def refill(self, in_flight: int) -> int:
        """How many prompts will probably do, to be drawn now."""
        streaming = not self._config.runtime.deterministic
        if in_flight and not streaming:
            return 0  # what to draw must not depend on what happens to have finished
        new = [d for d in self.own if d.verdict is not None]
        count = refill_size(
            wanted=self._missing,
            in_flight=in_flight,
            # the first round is N prompts; what comes of them sizes the others
            keep_rate=self._rate.value(_mixed(new), len(new)) if self.rounds else 1.0,
            budget_left=self._budget,
        )
        count = max(min(count, self._slots(len(new)) - in_flight) if streaming else count, 0)
        self.rounds += bool(count)
        return count

    def _slots(self, finished: int) -> int:
        """Draws that the engine has room for. More would only queue, and be in vain if the keep-rate rises.

        N at most while fewer than N draws have ``finished``: the first ones are few, and the short ones.
        """
        at_once = -(-self._config.rollout.max_concurrent_samples // self._config.rollout.samples_per_prompt)
        trusted = self._rate.finished + finished >= self.wanted
        return max(self.wanted, at_once) if trusted else self.wanted

    @property
    def _missing(self) -> int:
        return self.wanted - sum(outcome is True for outcome in self._outcomes())

    @property
    def kept(self) -> int:
        """Groups found so far."""
        return self.wanted - max(self._missing, 0)

    @property
    def own(self) -> list[PendingGroup]:
        """This step's draws, without those carried over."""
        return [d for d in self._draws if not d.carried]

    def under_way(self) -> tuple[Group, ...]:
        """This step's draws with the samples that have come, for a round that goes on later."""
        return tuple(d.under_way() for d in self.own)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def finish(self, draw: PendingGroup) -> None:
        """All samples of ``draw`` are scored."""
        group = Group(draw.number, draw.prompt, tuple(draw.scored[i] for i in sorted(draw.scored)))
        draw.finish(group, self._judge(group))

    def _judge(self, group: Group) -> GroupVerdict:
        filters = self._config.algorithm.filter_groups
        metric = filters.metric
        open_verdict = any(s.verdict.correct is None for s in group.scored)
        if metric == "acc" and open_verdict:
            if filters.enable:
                raise RewardError(
                    f"step {self._step + 1}: the reward of prompt row {group.prompt.row} does not say whether the "
                    "response is correct, which algorithm.filter_groups.metric=acc decides by; return a bool or "
                    "dapo.records.Reward(correct=..., value=...), or use algorithm.filter_groups.metric=score"
                )
            metric = "score"  # for the counts only
        return judge(group, metric=metric, tolerance=filters.tolerance)

    def admission(self) -> Admission:
        """Which draws are trained on, as far as that is settled."""
        return admit(self._outcomes(), self.wanted)

    @property
    def starved(self) -> bool:
        """Whether too few groups were found, as filtering left too few."""
        return self._config.algorithm.filter_groups.enable and not self.admission().complete

    def _outcomes(self) -> list[bool | None]:
        """For each draw, in order: good, not good, or None while pending."""
        horizon = self._version - self._config.rollout.max_staleness
        return [
            None if d.verdict is None else self._good(d) and (d.oldest is None or d.oldest >= horizon)
            for d in self._draws
        ]

    def _good(self, draw: PendingGroup) -> bool:
        if self._config.algorithm.filter_groups.enable:
            return draw.verdict is GroupVerdict.MIXED
        return draw.verdict is not GroupVerdict.TOO_FEW_SCORED

    # -- what came of it -----------------------------------------------------------------------------------------------

    def settled_draws(self) -> tuple[int, int]:
        """(kept, all) of this step's draws up to the last admitted one: free of the bias to what finishes early."""
        admission = self.admission()
        until = admission.admitted[-1] + 1 if admission.complete else len(self._draws)
        draws = [d for d in self._draws[:until] if not d.carried]
        return _mixed(draws), len(draws)

    def batch(self, keep_rate: float) -> RolloutBatch:
        """The groups, each with what became of it, and the counts."""
        admitted, outcomes = set(self.admission().admitted), self._outcomes()
        finished = [(place, d) for place, d in enumerate(self._draws) if d.group is not None]
        groups = [d for place, d in finished if place in admitted]
        rejected = [(d, self._status(d, outcomes[place] is True)) for place, d in finished if place not in admitted]
        return RolloutBatch(
            step=self._step,
            first_draw=next((d.number for d in self.own), self._draws[-1].number + 1),
            groups=tuple(d.group for d in groups if d.group),
            rejected=tuple((d.group, status) for d, status in rejected if d.group),
            stats=self._stats(groups, rejected, keep_rate),
            spans=tuple(self.spans.cut()[1]),
        )

    def _status(self, draw: PendingGroup, good: bool) -> str:
        """What became of a finished draw that is not trained on now."""
        if good:
            return "carried" if self._config.rollout.max_staleness else "surplus"
        return "stale" if self._good(draw) else str(draw.verdict)

    def _stats(
        self, kept: list[PendingGroup], rejected: list[tuple[PendingGroup, str]], keep_rate: float
    ) -> RolloutStats:
        own = self.own
        verdicts = Counter(d.verdict for d in own)
        statuses = Counter(status for _, status in rejected)
        lost = [d for d, status in rejected if status in ("surplus", "stale")] + [d for d in own if d.group is None]
        ages = [self._version - d.oldest for d in kept if d.oldest is not None]
        return RolloutStats(
            drawn=len(own),
            rounds=self.rounds,
            samples=sum(len(d.received) for d in own),
            tokens=sum(d.tokens for d in own),
            all_right=verdicts[GroupVerdict.ALL_RIGHT],
            mixed=verdicts[GroupVerdict.MIXED],
            all_wrong=verdicts[GroupVerdict.ALL_WRONG],
            flat=verdicts[GroupVerdict.FLAT],
            too_few_scored=verdicts[GroupVerdict.TOO_FEW_SCORED],
            kept=len(kept),
            surplus=statuses["surplus"],
            carried=statuses["carried"],
            stale=statuses["stale"],
            cancelled=verdicts[None],
            wasted_tokens=sum(d.tokens for d in lost),
            scores=self.scores.made,
            failed_scores=self.scores.failed,
            keep_rate=keep_rate,
            staleness_mean=sum(ages) / len(ages) if ages else 0.0,
            staleness_max=max(ages, default=0),
            reward_wait_s=self.reward_wait_s,
            decode_steps=self.decode_steps,
        )


def _mixed(draws: Sequence[PendingGroup]) -> int:
    return sum(d.verdict is GroupVerdict.MIXED for d in draws)
