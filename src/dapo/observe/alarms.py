"""Alarms: what in the course of a run's metrics says that it is going wrong, since when, and what to do.

Consumes: the metrics of each rollout step. Produces: warnings, and the number of alarms that are on. A rule is a pure
function of the newest steps, the first ones and the recipe, so that a run that is resumed raises what the uninterrupted
one would have. Reward hacking has a module of its own, ``reward/monitor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from dapo.config import Config
from dapo.observe.changes import Change, config_of_step

Entry = Mapping[str, float | None]

FIRST = 5  # steps at the start of a run whose mean later ones are compared with
WINDOW = 20  # steps that are remembered
LAST = 3  # steps in a row, or whose mean or median, that it takes where one odd step says nothing
REPEAT = 4  # steps until an alarm that stays on is said again; then twice as many, and so on

SPIKE = 20.0  # gradient norm over its running median; over 16 runs of the demo the largest of all was 13
SPIKE_HISTORY = 8  # steps that the median needs before it is one
ENTROPY_SHARE = 0.05  # of the entropy at the start; a run that learns well may lose nine tenths of it: the demo does
ENTROPY_FLOOR = 0.01  # nats per token; the samples of a group then differ in a token or two, or not at all
SOLVED = 0.9  # accuracy from which on low entropy is certainty, and no loss
TRUNCATED = 0.25  # share of truncated responses; a share that was there from the start has to be twice this
TRUNCATED_RISE = 0.15  # what it must have risen by since the start to be called a rise
NEAR_LIMIT = 0.8  # prompts drawn, over the most that a step may draw before the run stops
UNFILLED = 0.75  # groups kept over groups wanted, where the step goes on with what there is
WASTE = 5.0  # prompts drawn for each group kept: four of five samples then cost time and teach nothing
ERRORS = 0.1  # share of scores that failed; single time-outs are much rarer
REFERENCE_KL = 1.0  # nats per token to the initial policy: other tokens at most places; useful runs stay below 0.5
PROXIMAL_KL = 0.1  # nats per token that the updates of one step move the policy; trust regions aim at 0.01 to 0.05
AHEAD = 5  # steps in a row: what is sampled ahead shows some steps later
WON = 0.05  # share of the time that sampling beside the updates saves; less is not worth older samples
STALE = 0.2  # groups dropped as too old, for each one trained on
TAIL = 0.05  # share of tokens whose probabilities differ by more than a tenth; rounding in bfloat16 has caused 8%
CHOSEN_FALL = 0.2  # of the log-probability of the chosen responses: batches of pairs differ by less among themselves
BLIND = 10  # steps in a row with an explained variance below 0: a critic takes some to learn what a constant would say
COLD = 100.0  # gradient norm of a critic over that which it is clipped to: its updates all have one length then
WAITING, WAITING_S = 0.5, 5.0  # share of a step, and seconds of it, that are spent on nothing but scores
CLIPPED = 0.3  # share of loss tokens that are clipped and teach nothing; a few per cent is usual


@dataclass(frozen=True, slots=True)
class History:
    """The first steps of a run and the newest ones, oldest first, and its recipe."""

    first: Sequence[Entry]
    last: Sequence[Entry]
    config: Config

    def newest(self, name: str, count: int = LAST) -> list[float]:
        """The values of the last ``count`` steps; empty unless every one of them has one."""
        return self.known(name, count) if all(entry.get(name) is not None for entry in self.last[-count:]) else []

    def known(self, name: str, count: int = LAST) -> list[float]:
        """The last ``count`` values that there are, of whatever steps; empty unless there are so many."""
        values = [value for entry in self.last if (value := entry.get(name)) is not None]
        return values[-count:] if len(values) >= count else []

    def start(self, name: str) -> float | None:
        """Mean over the first steps, once they are over; None: no such number."""
        values = [value for entry in self.first if (value := entry.get(name)) is not None]
        return fmean(values) if len(self.first) == FIRST and values else None


@dataclass(frozen=True, slots=True)
class Rule:
    """``find`` gives what was seen, or None; ``advice`` what to do about it; ``reads`` the metrics that it needs."""

    name: str
    find: Callable[[History], str | None]
    advice: str
    reads: tuple[str, ...]


RULES: list[Rule] = []


def _rule(name: str, advice: str, *reads: str) -> Callable[[Callable[[History], str | None]], object]:
    return lambda find: RULES.append(Rule(name, find, advice, reads))


@_rule(
    "gradient spike",
    "look at the samples of that step; if it comes again, lower training.learning_rate or training.max_grad_norm",
    "grad_norm/max",
)
def _gradient_spike(history: History) -> str | None:
    """One step's largest norm against the running median, where clipping has to hold it."""
    now = history.newest("grad_norm/max", 1)
    before = [value for entry in history.last[:-1] if (value := entry.get("grad_norm/max")) is not None]
    if not now or len(before) < SPIKE_HISTORY:
        return None
    usual, limit = median(before), history.config.training.max_grad_norm
    if now[0] <= max(SPIKE * usual, limit):
        return None
    return f"a gradient norm of {now[0]:.3g}, where {usual:.3g} is usual (it is clipped at {limit:g})"


@_rule(
    "entropy collapse",
    "the policy no longer explores; raise algorithm.clip_ratio_high, lower training.learning_rate, or go back to an "
    "earlier checkpoint",
    *("entropy", "accuracy"),
)
def _entropy_collapse(history: History) -> str | None:
    """Low for itself or by what it was, and the task is not solved."""
    values, start, accuracy = history.newest("entropy"), history.start("entropy"), history.newest("accuracy")
    if not values or start is None or (accuracy and fmean(accuracy) >= SOLVED):
        return None
    now = fmean(values)
    if now >= max(ENTROPY_SHARE * start, ENTROPY_FLOOR):
        return None
    return f"an entropy of {now:.2g} nats, from {start:.2g} at the start"


@_rule(
    "length blow-up",
    "see whether the long responses are of use; if so raise rollout.max_response_length, otherwise keep "
    "algorithm.overlong_buffer on and look for repetition in samples",
    *("response_length/truncated", "response_length/mean"),
)
def _length_blow_up(history: History) -> str | None:
    """Responses run into the limit, more of them than at first or most of them."""
    cut, start = history.newest("response_length/truncated"), history.start("response_length/truncated")
    lengths, limit = history.newest("response_length/mean"), history.config.rollout.max_response_length
    if not cut or start is None:
        return None
    now = fmean(cut)
    rose = now >= TRUNCATED and now - start >= TRUNCATED_RISE
    if not rose and min(now, start) < 2 * TRUNCATED:
        return None
    length = f"; their mean length is {fmean(lengths):.0f}" if lengths else ""
    return f"{now:.0%} of the responses are cut at {limit} tokens, from {start:.0%} at the start{length}"


@_rule(
    "mismatch",
    "do both have the same weights, temperature and type? Set algorithm.correction.kind=truncate if they have",
    "mismatch/mean",
)
def _mismatch(history: History) -> str | None:
    """Engine against trainer on the same tokens; not a number counts as a difference. The last step that had tokens to
    compare counts: with sampling ahead few steps have samples of the present version."""
    alarm, now = history.config.training.mismatch_alarm, history.known("mismatch/mean", 1)
    if not now or now[0] <= alarm:
        return None
    differ = f"log-probabilities of engine and trainer differ by {now[0]:.3g} on average"
    return f"{differ} (training.mismatch_alarm={alarm:g})"


@_rule(
    "mismatch tail",
    "do both compute in the same type? Try model.compute_dtype=float32, or algorithm.correction.kind=truncate",
    "mismatch/tail",
)
def _mismatch_tail(history: History) -> str | None:
    values = history.known("mismatch/tail")
    if not values or median(values) <= TAIL:
        return None
    return f"engine and trainer differ by more than a tenth in the probability of {median(values):.0%} of the tokens"


@_rule(
    "overlap wins nothing",
    "there is nothing to win where sampling is most of a step, or the updates are: rollout.max_staleness=0 is then as "
    "fast, and on-policy. A faster device for the longer part, or fewer tokens to sample, change it",
    *("overlap/won", "overlap/wall", "idle/learner", "idle/engine"),
)
def _no_overlap(history: History) -> str | None:
    won, wall = history.newest("overlap/won", AHEAD), sum(history.newest("overlap/wall", AHEAD))
    if not won or max(won) >= WON or not wall or not history.config.ahead:
        return None
    waiting, idle = (sum(history.newest(f"idle/{who}", AHEAD)) / wall for who in ("learner", "engine"))
    share = f"the learner waited for samples {waiting:.0%} of the time, the engine had nothing to sample {idle:.0%}"
    return f"sampling beside the updates saved {fmean(won):.1%} of the time in the last {AHEAD} steps: {share}"


@_rule(
    "staleness at its bound",
    "long responses outlive several updates: rollout.in_flight=drain or restart keeps them young, a larger "
    "rollout.max_staleness with algorithm.correction.kind=truncate admits them",
    "staleness/mean",
)
def _at_the_bound(history: History) -> str | None:
    """A mean within a tenth of S: nine of ten groups or more are that old, and no deeper queue is the reason."""
    bound, ages = history.config.rollout.max_staleness, history.newest("staleness/mean", AHEAD)
    if not ages or history.config.ahead >= bound or min(ages) < bound - 0.1:
        return None
    return f"nearly all groups are as old as they may be, {bound} versions, and rollout.ahead={history.config.ahead}"


@_rule(
    "stale groups",
    "lower rollout.ahead, or raise rollout.max_staleness together with algorithm.correction.kind=truncate",
    *("groups/stale", "groups/kept"),
)
def _stale_groups(history: History) -> str | None:
    """Many of them. One now and then is the price of requests that outlive an update."""
    stale, kept = (sum(history.newest(f"groups/{what}", AHEAD)) for what in ("stale", "kept"))
    if not stale or stale < STALE * kept:
        return None
    return f"{stale:.0f} good groups were dropped as too old in the last {AHEAD} steps, and {kept:.0f} trained on"


@_rule(
    "starvation",
    "add prompts of other difficulty (harder if most are all right, easier if all wrong), or raise "
    "rollout.samples_per_prompt or algorithm.filter_groups.max_num_gen_batches",
    *("groups/drawn", "groups/kept", "groups/share_all_right", "groups/share_all_wrong"),
)
def _starvation(history: History) -> str | None:
    """Dynamic sampling throws most away, comes near the limit at which it stops, or does not fill the batch."""
    filters, wanted = history.config.algorithm.filter_groups, history.config.rollout.prompts_per_step
    drawn, kept = history.newest("groups/drawn"), history.newest("groups/kept")
    if not filters.enable or not drawn or not kept:
        return None
    most = history.config.max_draw_rounds * wanted
    near = filters.on_starved == "stop" and filters.max_num_gen_batches > 1 and fmean(drawn) >= NEAR_LIMIT * most
    if not (near or fmean(kept) < UNFILLED * wanted or sum(drawn) >= WASTE * sum(kept)):
        return None
    right, wrong = (history.newest(f"groups/share_all_{kind}") for kind in ("right", "wrong"))
    shares = f", {fmean(right):.0%} of them all right, {fmean(wrong):.0%} all wrong" if right and wrong else ""
    takes = f"it takes {fmean(drawn):.0f} prompts a step, of {most} allowed"
    return f"{takes}, to keep {fmean(kept):.0f} of {wanted} groups{shares}"


@_rule(
    "zero learning",
    "check training.learning_rate, that the reward tells good from bad, and that algorithm.filter_groups is on",
    *("lr", "updates", "advantage/mean_abs", "critic/loss"),
)
def _zero_learning(history: History) -> str | None:
    for name, seen in {
        "lr": f"the learning rate is 0 in the last {LAST} steps",
        "updates": f"no update was made in the last {LAST} steps",
        "advantage/mean_abs": f"all advantages are 0 in the last {LAST} steps: within each group all rewards are equal",
    }.items():
        values = history.newest(name)
        alone = name == "updates" and history.newest("critic/loss")  # the first steps may be the critic's
        if values and not any(values) and not alone:
            return seen
    return None


@_rule(
    "failing reward",
    "the warning of the step quotes an error; look whether the server or the workers keep up (reward.timeout_s, "
    "reward.workers)",
    "reward/errors",
)
def _failing_reward(history: History) -> str | None:
    """Scores that failed are no verdicts: what is left is a sample of those that the reward can do."""
    errors = history.newest("reward/errors")
    return f"{fmean(errors):.0%} of the scores failed" if errors and fmean(errors) >= ERRORS else None


@_rule(
    "slow rewards",
    "score on a GPU (reward.device), in more processes (reward.workers) or more at once (reward.concurrency)",
    *("time/reward_wait", "time/step"),
)
def _slow_rewards(history: History) -> str | None:
    waits, steps = history.newest("time/reward_wait"), history.newest("time/step")
    slow = [wait > max(WAITING * step, WAITING_S) for wait, step in zip(waits, steps, strict=False)]
    if len(slow) < LAST or not all(slow):
        return None
    return f"{sum(waits) / sum(steps):.0%} of the time is spent waiting for scores, {fmean(waits):.0f} s a step"


@_rule(
    "KL blow-up",
    "lower training.learning_rate or training.epochs_per_rollout, or raise algorithm.kl.coef where it is on",
    *("kl/reference", "kl/proximal"),
)
def _kl_blow_up(history: History) -> str | None:
    """By the median of the newest steps: an estimate has rare large values."""
    for name, limit, of in (
        ("kl/reference", REFERENCE_KL, "to the initial policy"),
        ("kl/proximal", PROXIMAL_KL, "over the updates of one step"),
    ):
        values = history.newest(name)
        if values and median(values) > limit:
            return f"a KL of {median(values):.2g} nats per token {of}"
    return None


@_rule(
    "clipping",
    "updates move the policy too far from what was sampled: lower training.learning_rate or "
    "training.epochs_per_rollout, or raise training.groups_per_update",
    *("clip/low", "clip/high"),
)
def _clipping(history: History) -> str | None:
    low, high = history.newest("clip/low"), history.newest("clip/high")
    if not low or not high:
        return None
    share = median(a + b for a, b in zip(low, high, strict=True))
    return f"{share:.0%} of the loss tokens are clipped" if share > CLIPPED else None


@_rule(
    "blind critic",
    "its values are worse than a constant: raise algorithm.critic.learning_rate or warmup_steps, or begin it from a "
    "reward model (algorithm.critic.model)",
    "critic/explained_variance",
)
def _blind_critic(history: History) -> str | None:
    values = history.newest("critic/explained_variance", BLIND)
    if not values or max(values) >= 0:
        return None
    return f"the critic explains {fmean(values):.2g} of the variance of the returns in the last {BLIND} steps"


@_rule(
    "cold critic",
    "give it steps of its own first (algorithm.critic.warmup_steps), or scale the reward down",
    "critic/grad_norm",
)
def _cold_critic(history: History) -> str | None:
    values, limit = history.newest("critic/grad_norm"), history.config.training.max_grad_norm
    if not values or min(values) <= COLD * limit:
        return None
    return f"the critic's gradient norm is {fmean(values):.3g} over the last {LAST} steps, and is clipped at {limit:g}"


@_rule(
    "chosen responses less likely",
    "both responses of the pairs lose probability; add dpo.nll=0.2, or lower training.learning_rate or raise dpo.beta",
    "preference/chosen_logprob",
)
def _chosen_less_likely(history: History) -> str | None:
    """The margin grows because the worse responses fall faster than the better ones: what is left is neither."""
    start, now = history.start("preference/chosen_logprob"), history.newest("preference/chosen_logprob")
    if start is None or not now or fmean(now) >= start - CHOSEN_FALL * max(abs(start), 1.0):
        return None
    return f"the chosen responses have a log-probability of {fmean(now):.1f}, from {start:.1f} at the start"


_READ = tuple(dict.fromkeys(name for rule in RULES for name in rule.reads))


class Alarms:
    """The alarms of a run. What is said of a step counts once it is settled: one that is interrupted is seen again."""

    def __init__(self, config: Config, changes: Sequence[Change] = ()) -> None:
        self._config, self.changes = config, changes
        # of an alarm: the steps it was seen in first and last, and the step it is said again in, or ``gap`` steps later
        self._state: Mapping[str, Any] = {"first": [], "last": [], "on": {}}
        self._next: Mapping[str, Any] | None = None

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> tuple[dict[str, float], list[str]]:
        """See the metrics of a step, by registered name; steps come in order.
        Returns the metric of this module, and what to say now: new alarms, and old ones that are due again."""
        entry = {name: metrics.get(name) for name in _READ}
        old = self._state
        first = old["first"] if len(old["first"]) == FIRST else [*old["first"], entry]
        last = [*old["last"], entry][-WINDOW:]
        # each step by its own settings; steps with another algorithm or rollout are no measure
        starts = (c.step for c in self.changes if c.step <= step and c.key.startswith(("algorithm.", "rollout.")))
        config = config_of_step(self._config, self.changes, step)
        history = History(first, last[max(starts, default=0) - step - 1 :], config)
        known = {name for one in last for name, value in one.items() if value is not None}  # of stages some are not
        rules = [rule for rule in RULES if known.intersection(rule.reads)]
        self.found = found = {rule.name: seen for rule in rules if (seen := rule.find(history)) is not None}
        # one that goes on and off is one alarm: it is forgotten after as many calm steps as it would have waited
        on = {n: alarm for n, alarm in old["on"].items() if n in found or step - alarm["last"] <= alarm["gap"]}
        said = []
        for rule in RULES:
            if rule.name not in found:
                continue
            alarm = on.get(rule.name) or {"since": step, "last": step, "due": step, "gap": REPEAT}
            if step >= alarm["due"]:
                again = f" (first seen in step {alarm['since']})" if step > alarm["since"] else ""
                said.append(f"{rule.name}: {found[rule.name]}{again}; {rule.advice}")
                gap = alarm["gap"] * 2 if alarm["due"] > alarm["since"] else alarm["gap"]
                alarm = {**alarm, "due": step + gap, "gap": gap}
            on[rule.name] = {**alarm, "last": step}
        self._next = {"first": first, "last": last, "on": on}
        return {"alarms/count": float(len(found))}, said

    def settle(self) -> None:
        assert self._next is not None, "settle() without observe()"
        self._state, self._next = self._next, None

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint: of the steps that are settled."""
        return dict(self._state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._state, self._next = state, None
