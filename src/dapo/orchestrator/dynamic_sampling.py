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
from dapo.util.spans import Span


class DynamicSampling:
    """The draws of one step, carried-over ones first, in the order in which they are admitted.

    Where groups may be stale (``rollout.max_staleness`` >= 1), draws go on from step to step: each counts in the step
    that settles it, which is all up to the last admitted one.

    Attributes:
        wanted: groups to find.
        version: policy version that will be trained, as far as it is known.
        rounds: times that prompts were drawn for this step.
        scores: of this step.
        exhausted: whether the source has no more prompts.
        reward_wait_s: seconds from the last sample's arrival to the end of the round; for the counts, as is
        decode_steps: of the engine in the round.
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
        going_on: Sequence[PendingGroup] = (),
    ) -> None:
        """
        Args:
            rate: of earlier steps.
            carried: good groups of earlier steps that counted them.
            resumed: the draws of an interrupted round of this step, each with the samples that it had.
            rounds: times that it had drawn prompts.
            going_on: the draws that the step before has not settled.
        """
        self._config = config
        self._version = version
        self._rate = rate
        self.wanted = wanted
        self.rounds = rounds
        self.exhausted = False
        self.scores = Scores(config.reward, config.algorithm.filter_groups.metric, step)
        self.reward_wait_s, self.decode_steps = 0.0, 0
        self._draws = [PendingGroup.carry(g) for g in sorted(carried, key=lambda g: g.draw)]
        self._most = wanted * config.max_draw_rounds
        """Draws that one step may choose from, without those that are too old for it."""
        self.resumed = [PendingGroup.resume(g) for g in resumed]
        """The draws of an interrupted round."""
        self._draws += [*going_on, *self.resumed]
        self._count_all()

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._count_all()  # other draws are too old

    def begin(self, step: int, wanted: int, version: int) -> None:
        """A step waits for these groups."""
        self.scores.step = step
        self.wanted, self.version = wanted, version

    # -- drawing -------------------------------------------------------------------------------------------------------

    def add(self, draw: PendingGroup) -> PendingGroup:
        self._draws.append(draw)
        self._count(draw)
        return draw

    def _count_all(self) -> None:
        """A step may have thousands of draws, which are not to be looked at each time that one of them finishes."""
        self._counts: Counter[str] = Counter()
        for draw in self._draws:
            self._count(draw)

    def _count(self, draw: PendingGroup, times: int = 1) -> None:
        """Add a draw as it is now to the counts; ``times`` -1: take it out, before it changes."""
        own, kept = not draw.carried, self._outcome(draw)
        self._counts["own"] += times * own
        self._counts["charged"] += times * (own and not self._too_old(draw))
        self._counts["pending"] += times * (kept is None)
        self._counts["kept"] += times * (kept is True)
        self._counts["finished"] += times * (own and kept is not None)
        self._counts["mixed"] += times * (own and draw.verdict is GroupVerdict.MIXED)

    def refill(self, batches: int = 1, waits: bool = True) -> int:
        """How many prompts will probably do for so many steps, to be drawn now. ``waits``: the first step waits for
        them; for the others a few are held back, as groups beyond those of all steps become stale."""
        streaming, in_flight = not self._config.runtime.deterministic, self.pending
        if in_flight and not streaming:
            return 0  # what to draw must not depend on what happens to have finished
        finished = self._counts["finished"]
        # the first round is N prompts; what comes of them sizes the others
        known = self._config.algorithm.filter_groups.enable and (self.rounds or self.drawn)
        keep_rate = self._rate.value(self._counts["mixed"], finished) if known else 1.0
        wanted = self._missing + self.wanted * (batches - 1)
        if self._config.rollout.max_staleness and wanted > 0:  # less the standard deviation of how many will be kept
            wanted = max(self._missing if waits else 0, wanted - round((wanted * (1 - keep_rate)) ** 0.5))
        budget = self._most * batches - self._counts["charged"]
        count = refill_size(wanted=wanted, in_flight=in_flight, keep_rate=keep_rate, budget_left=budget)
        count = max(min(count, self._slots(finished, batches) - in_flight) if streaming else count, 0)
        self.rounds += bool(count)
        return count

    def _slots(self, finished: int, batches: int = 1) -> int:
        """Draws that the engine has room for. More would only queue, and be in vain if the keep-rate rises.

        N at most (of each step) while fewer than N draws have ``finished``: the first ones are few, and the short ones.
        """
        at_once = -(-self._config.rollout.max_concurrent_samples // self._config.rollout.samples_per_prompt)
        trusted = self._rate.finished + finished >= self.wanted
        return max(self.wanted * batches, at_once) if trusted else self.wanted * batches

    @property
    def pending(self) -> int:
        """Draws that are not whole groups yet."""
        return self._counts["pending"]

    @property
    def drawn(self) -> int:
        """Draws but for those that an earlier step counted."""
        return self._counts["own"]

    @property
    def decided(self) -> bool:
        """Whether no draw that this step may choose from is still to come, unless there is room for more of them."""
        return not self.pending or all(d.verdict is not None for d in self.usable)

    @property
    def complete(self) -> bool:
        """Whether the groups of this step are found, which no draw that is pending can change."""
        if self._counts["charged"] > self._most:  # not all are usable
            return self.admission().complete
        counts = self._counts  # of the first draws, up to one that is pending
        while counts["first"] < len(self._draws) and (kept := self._outcome(self._draws[counts["first"]])) is not None:
            counts.update(first=1, first_kept=kept)
        return counts["first_kept"] >= self.wanted

    @property
    def _missing(self) -> int:
        return self.wanted - self._counts["kept"]

    @property
    def kept(self) -> int:
        """Groups found so far."""
        return self.wanted - max(self._missing, 0)

    @property
    def own(self) -> list[PendingGroup]:
        """All draws but those that an earlier step counted."""
        return [d for d in self._draws if not d.carried]

    @property
    def usable(self) -> list[PendingGroup]:
        """The draws that this step may choose from: as many as ``max_num_gen_batches`` allows, in order."""
        left = self._most
        for place, draw in enumerate(self._draws):
            left -= not (draw.carried or self._too_old(draw))
            if left < 0:
                return self._draws[:place]
        return self._draws

    @property
    def settled(self) -> list[PendingGroup]:
        """The draws whose fate this step decides."""
        admission, usable = self.admission(), self.usable
        ends = self._config.rollout.max_staleness and admission.complete
        return usable[: admission.admitted[-1] + 1] if ends else usable

    @property
    def going_on(self) -> list[PendingGroup]:
        """The others, which the next step goes on with."""
        return self._draws[len(self.settled) :]

    def under_way(self) -> tuple[Group, ...]:
        """Draws with the samples that have come, for a round that goes on later."""
        return tuple(d.under_way() for d in self.own)

    def waiting(self) -> tuple[Group, ...]:
        """Groups that an earlier step counted."""
        return tuple(d.group for d in self._draws if d.carried and d.group)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def finish(self, draw: PendingGroup) -> None:
        group = Group(draw.number, draw.prompt, tuple(draw.scored[i] for i in sorted(draw.scored)))
        verdict = self._judge(group)
        self._count(draw, -1)
        draw.finish(group, verdict)
        self._count(draw)

    def _judge(self, group: Group) -> GroupVerdict:
        filters = self._config.algorithm.filter_groups
        metric = filters.metric
        open_verdict = any(s.verdict.correct is None for s in group.scored)
        if metric == "acc" and open_verdict:
            if filters.enable:
                raise RewardError(
                    f"step {self.scores.step + 1}: the reward of prompt row {group.prompt.row} does not say whether "
                    "the response is correct, which algorithm.filter_groups.metric=acc decides by; return a bool or "
                    "dapo.records.Reward(correct=..., value=...), or use algorithm.filter_groups.metric=score"
                )
            metric = "score"  # for the counts only
        least = 1 if self._config.algorithm.kind == "ppo" else 2
        return judge(group, metric=metric, tolerance=filters.tolerance, least=least)

    def admission(self) -> Admission:
        """Which draws are trained on, as far as that is settled."""
        return admit(self._outcomes()[: len(self.usable)], self.wanted)

    @property
    def starved(self) -> bool:
        """Whether too few groups were found, as filtering left too few."""
        return self._config.algorithm.filter_groups.enable and not self.admission().complete

    def _outcomes(self) -> list[bool | None]:
        """For each draw, in order: good, not good, or None while pending."""
        return [self._outcome(draw) for draw in self._draws]

    def _outcome(self, draw: PendingGroup) -> bool | None:
        return None if draw.verdict is None else self._good(draw) and not self._too_old(draw)

    def _too_old(self, draw: PendingGroup) -> bool:
        """Whether a finished draw is too old for the version that will be trained."""
        return draw.oldest is not None and draw.oldest < self.version - self._config.rollout.max_staleness

    def _good(self, draw: PendingGroup) -> bool:
        if self._config.algorithm.filter_groups.enable:
            return draw.verdict is GroupVerdict.MIXED
        return draw.verdict is not GroupVerdict.TOO_FEW_SCORED

    # -- what came of it -----------------------------------------------------------------------------------------------

    def settled_draws(self) -> tuple[int, int]:
        """(kept, all) of this step's draws up to the last admitted one: free of the bias to what finishes early."""
        admission = self.admission()
        until = admission.admitted[-1] + 1 if admission.complete else len(self.usable)
        draws = [d for d in self._draws[:until] if not d.carried]
        return sum(d.verdict is GroupVerdict.MIXED for d in draws), len(draws)

    def batch(self, keep_rate: float, spans: Sequence[Span] = ()) -> RolloutBatch:
        """The groups, each with what became of it, and the counts."""
        admitted, outcomes = set(self.admission().admitted), self._outcomes()
        finished = [(place, d) for place, d in enumerate(self.settled) if d.group is not None]
        groups = [d for place, d in finished if place in admitted]
        rejected = [(d, self._status(d, outcomes[place] is True)) for place, d in finished if place not in admitted]
        own = [d for d in self.settled if not d.carried]
        return RolloutBatch(
            step=self.scores.step,
            first_draw=next((d.number for d in own), self._draws[-1].number + 1),
            groups=tuple(d.group for d in groups if d.group),
            rejected=tuple((d.group, status) for d, status in rejected if d.group),
            stats=self._stats(own, groups, rejected, keep_rate),
            spans=tuple(spans),
        )

    def _status(self, draw: PendingGroup, good: bool) -> str:
        """What became of a finished draw that is not trained on."""
        if good:
            return "surplus"
        return "stale" if self._good(draw) else str(draw.verdict)

    def _stats(
        self,
        own: list[PendingGroup],
        kept: list[PendingGroup],
        rejected: list[tuple[PendingGroup, str]],
        keep_rate: float,
    ) -> RolloutStats:
        verdicts = Counter(d.verdict for d in own)
        statuses = Counter(status for _, status in rejected)
        lost = [d for d, status in rejected if status in ("surplus", "stale")] + [d for d in own if d.group is None]
        ages = Counter(self.version - d.oldest for d in kept if d.oldest is not None)
        unfinished = sum(d.verdict is None for d in self.going_on)
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
            carried=len(self.going_on) - unfinished,
            stale=statuses["stale"],
            cancelled=verdicts[None],
            wasted_tokens=sum(d.tokens for d in lost) + sum(d.dropped_tokens for d in own),
            scores=self.scores.made,
            failed_scores=self.scores.failed,
            keep_rate=keep_rate,
            staleness_mean=sum(age * count for age, count in ages.items()) / max(ages.total(), 1),
            staleness_max=max(ages, default=0),
            reward_wait_s=self.reward_wait_s,
            decode_steps=self.decode_steps,
            ages=tuple(ages[age] for age in range(max(ages, default=-1) + 1)),
            unfinished=unfinished,
            continued=sum(s.continued for d in own for s in d.received.values()),
            restarted=sum(d.restarted for d in own),
        )


def starved_message(batch: RolloutBatch, config: Config) -> str:
    """That a step found too few groups, and what may help."""
    stats, wanted, filters = batch.stats, config.rollout.prompts_per_step, config.algorithm.filter_groups
    others = {"without spread in the reward": stats.flat, "with fewer than two scores": stats.too_few_scored}
    old = f" ({stats.stale} of them too old: rollout.max_staleness={config.rollout.max_staleness})" * (stats.stale > 0)
    counts = {"all wrong": stats.all_wrong, f"mixed{old}": stats.mixed, "all right": stats.all_right}
    counts |= {name: count for name, count in others.items() if count}
    failed = f"{stats.failed_scores} of {stats.scores} scores failed. " if stats.failed_scores else ""
    kept, run = float(config.run.save_samples), config.run.dir or "runs/run"
    shown = f"\nWhat was drawn: dapo inspect {run} --samples" if kept else ""
    prompts = "harder prompts" if stats.all_right > stats.all_wrong else "easier prompts"
    if stats.stale > stats.kept:
        prompts = "a larger rollout.max_staleness, as most good groups were too old"
    return (
        f"step {batch.step + 1}: dynamic sampling kept {stats.kept} of the {wanted} groups wanted; in {stats.drawn} "
        f"draws (algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} x {wanted}"
        f"{', and those that are too old' * (stats.stale > 0)}) there were "
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}.\n"
        f"{failed}What may help: {prompts}; a larger rollout.samples_per_prompt (now "
        f"{config.rollout.samples_per_prompt}); a larger "
        "algorithm.filter_groups.max_num_gen_batches; algorithm.filter_groups.on_starved=train, to train on the groups "
        "there are. If nearly all are wrong, check that the reward finds the answer in the responses at all."
        f"{shown}"
    )
