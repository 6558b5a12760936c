"""The whole tree: its sections together, what follows from several of them, and which combinations are impossible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any, Literal

from pydantic import Field, field_validator

from dapo.config import sections
from dapo.config.algorithm import AlgorithmConfig
from dapo.config.composed_reward import MonitorConfig, RewardConfig
from dapo.config.data import DataConfig
from dapo.config.environment import EnvironmentConfig
from dapo.config.placement import conflicts_of_exact, conflicts_of_placement
from dapo.config.reward import MathReward
from dapo.config.runtime import RuntimeConfig
from dapo.config.section import Section
from dapo.util.escapes import eaten_in


class Config(Section):
    """A whole recipe."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random follows from it."""
    model: sections.ModelConfig
    data: DataConfig = DataConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = MathReward()
    monitor: MonitorConfig = MonitorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: sections.TrainingConfig = sections.TrainingConfig()
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    run: sections.RunConfig = sections.RunConfig()

    @field_validator("reward", mode="before")
    @classmethod
    def _math_unless_said(cls, value: Any) -> Any:
        return {"kind": "math"} | value if isinstance(value, dict) else value

    def problems(self) -> Iterator[str]:
        return conflicts(self)

    @property
    def proximal(self) -> Literal["engine", "recompute", "interpolate"]:
        """`algorithm.proximal` with `auto` resolved."""
        if self.algorithm.proximal != "auto":
            return self.algorithm.proximal
        same = self.rollout.max_staleness == 0 and self.rollout.engine == "native"
        return "engine" if same and self.algorithm.correction.kind == "none" else "recompute"

    @property
    def ahead(self) -> int:
        """`rollout.ahead` with null resolved."""
        return self.rollout.max_staleness if self.rollout.ahead is None else self.rollout.ahead

    @property
    def max_draw_rounds(self) -> int:
        """A step has at most so many times N prompts to choose its groups from."""
        staleness, filters = self.rollout.max_staleness, self.algorithm.filter_groups
        return filters.max_num_gen_batches if filters.enable or staleness else 1

    @property
    def cache_stays(self) -> bool:
        """Whether a GPU that engine and learner share keeps the engine's cache during updates: samples in flight, which
        sampling ahead leaves, need not be read in again then. A cache of unnamed size takes what is free."""
        return self.rollout.max_staleness > 0 and self.rollout.cache_gib is not None

    @property
    def evaluated_length(self) -> int:
        return self.evaluation.max_response_length or self.rollout.max_response_length

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one rollout step, all epochs counted."""
        per_epoch = self.rollout.prompts_per_step // self.training.groups_per_update
        return per_epoch * self.training.epochs_per_rollout


def conflicts(config: Config) -> Iterator[str]:
    """Every impossible combination, as `key: what is wrong, with the numbers; what would work`."""
    yield from _conflicting_sizes(config)
    yield from _conflicts_of_engine(config)
    yield from conflicts_of_placement(config)
    yield from conflicts_of_exact(config)
    yield from _conflicts_of_algorithm(config)
    yield from _conflicts_of_staleness(config)
    yield from _conflicts_of_critic(config)


def _conflicting_sizes(config: Config) -> Iterator[str]:
    rollout, algorithm, training = config.rollout, config.algorithm, config.training
    if config.data.prompt_key == config.data.answer_key:
        yield (
            f"data.prompt_key: is the same key as data.answer_key ({config.data.answer_key!r}), which would show the "
            "model the answer; the defaults are prompt and answer"
        )
    if rollout.samples_per_prompt < 2 and algorithm.kind == "group":
        yield (
            f"rollout.samples_per_prompt: is {rollout.samples_per_prompt}, but {algorithm.advantage.kind} compares the "
            "samples of one prompt and needs at least 2; the paper uses 16 (algorithm.kind=ppo compares none)"
        )
    n, per_update = rollout.prompts_per_step, training.groups_per_update
    if n % per_update:
        works = " or ".join(map(str, _divisors_near(n, per_update)))
        yield (
            f"training.groups_per_update: {n} groups (rollout.prompts_per_step) cannot be cut into mini-batches of "
            f"{per_update}; use {works}, or prompts_per_step={max(1, n // per_update) * per_update}"
        )
    buffer = algorithm.overlong_buffer
    if buffer.enable and buffer.len > rollout.max_response_length:
        yield (
            f"algorithm.overlong_buffer.len: is {buffer.len}, longer than rollout.max_response_length="
            f"{rollout.max_response_length}; use {max(1, rollout.max_response_length // 5)} (the paper: a fifth), or "
            "algorithm.overlong_buffer.enable=false"
        )
    if buffer.enable and algorithm.overlong_hard_punishment:
        yield (
            "algorithm.overlong_hard_punishment: the hard and the soft punishment (algorithm.overlong_buffer) exclude "
            "each other; set one of them to false"
        )
    ppo = algorithm.kind == "ppo"
    longest = config.data.max_prompt_length + rollout.max_response_length + ppo
    if training.tokens_per_micro_batch < longest:
        yield (
            f"training.tokens_per_micro_batch: is {training.tokens_per_micro_batch}, but one sample may have "
            f"{config.data.max_prompt_length} (data.max_prompt_length) + {rollout.max_response_length} "
            f"(rollout.max_response_length){' + 1 (the critic)' * ppo} = {longest} tokens; use at least {longest}"
        )


def vllm_problems(sampling: Any) -> Iterator[str]:
    """Why vLLM would not sample as asked. ``sampling``: has the settings as attributes; each text begins with one."""
    cut, min_p = sampling.top_p < 1 or sampling.top_k, getattr(sampling, "min_p", 0)
    if sampling.temperature and not 0.01 <= sampling.temperature <= 2:
        yield f"temperature: is {sampling.temperature}, but vLLM samples at 0 (greedy) or from 0.01 to 2"
    if min_p and cut:
        yield "min_p: vLLM applies it before top_p and top_k, not after them; leave it or them out"
    if (min_p or cut) and getattr(sampling, "top_logprobs", 0):
        yield "top_logprobs: goes without top_p, top_k and min_p, as vLLM reports the likeliest tokens after truncation"


def _conflicts_of_engine(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if (rollout.engine == "openai") != bool(rollout.url):
        yield (
            f"rollout.url: goes with rollout.engine=openai, and that with rollout.url; engine is {rollout.engine}, and "
            f"url is {rollout.url or 'not given'}, which can be http://127.0.0.1:8000"
        )
    if rollout.engine != "native" and config.model.lora.base != "full":
        yield (
            f"model.lora.base: {rollout.engine} would sample from the base as it is, and 4 bits are trained on; use "
            "rollout.engine=native, or base=full"
        )
    if rollout.engine != "vllm":
        for name, given in (("tensor_parallel", rollout.tensor_parallel > 1), ("engine_args", rollout.engine_args)):
            if given:
                yield f"rollout.{name}: is for rollout.engine=vllm, and engine is {rollout.engine}; leave it out"
    else:
        if config.runtime.deterministic:
            yield (
                "runtime.deterministic: vLLM's results depend on which samples it computes together, so the same seed "
                "does not give the same bits; use rollout.engine=native, or deterministic=false"
            )
        for section, asked in (("rollout", rollout), ("evaluation", config.evaluation)):
            yield from (f"{section}.{problem}" for problem in vllm_problems(asked))


_SAYS_RIGHT = {"compose": "correct", "model": "correct_above", "judge": "correct_at", "kserve": "correct"}
"""By kind of reward the key that says what is right; null: it is left open."""


def kl_in_loss_of_another(objective: str) -> str:
    return (
        "algorithm.kl.mode: loss is a term of the objectives dapo, gspo and cispo, and algorithm.objective is "
        f"{objective}; use mode=reward or mode=measure, or put the term into your objective"
    )


def _conflicts_of_algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.correction.kind != "none" and algorithm.proximal == "engine":
        yield (
            f"algorithm.correction.kind: {algorithm.correction.kind} weighs pi_prox against pi_engine, which are the "
            "same with proximal=engine; use algorithm.proximal=recompute"
        )
    if algorithm.correction.low >= algorithm.correction.high:
        yield (
            f"algorithm.correction.low: {algorithm.correction.low} must be below algorithm.correction.high="
            f"{algorithm.correction.high}; such as 0.5 and 2.0"
        )
    if ":" in algorithm.objective and algorithm.kl.mode == "loss":
        yield kl_in_loss_of_another(algorithm.objective)
    if algorithm.kl.target is not None and algorithm.kl.mode not in ("loss", "reward"):
        yield (
            f"algorithm.kl.target: adapts the coefficient of the KL term, but algorithm.kl.mode is "
            f"{algorithm.kl.mode}; use mode=loss or mode=reward, or target=null"
        )
    n, per_prompt = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    samples = n * per_prompt
    if algorithm.kl.target is not None and samples >= 5 * algorithm.kl.horizon:
        yield (
            f"algorithm.kl.horizon: is {algorithm.kl.horizon}, but one step has {n} x {per_prompt} = {samples} "
            f"samples, on which the coefficient would fall below zero; use at least {samples}"
        )
    key = _SAYS_RIGHT.get(config.reward.kind)
    if (
        key is not None
        and getattr(config.reward, key) is None
        and algorithm.filter_groups.enable
        and algorithm.filter_groups.metric == "acc"
    ):
        yield (
            f"reward.{key}: is null, so that right and wrong are left open, but algorithm.filter_groups.metric=acc "
            "decides by them; give it, or use algorithm.filter_groups.metric=score"
        )
    if algorithm.loss_constant is not None and algorithm.loss_agg_mode != "constant":
        yield (
            f"algorithm.loss_constant: is used by loss_agg_mode=constant only, which is "
            f"{algorithm.loss_agg_mode}; use loss_agg_mode=constant or loss_constant=null"
        )


def _conflicts_of_critic(config: Config) -> Iterator[str]:
    algorithm, lora = config.algorithm, config.model.lora.rank > 0
    apart, reference = config.runtime.kind == "ray", algorithm.kl.reference
    if reference != "copy" and (apart or lora != (reference == "base")):
        works = "use copy" if apart else "use base with model.lora, and copy or offload without"
        yield f"algorithm.kl.reference: {reference} does not go with runtime.kind={config.runtime.kind}" + (
            f" and model.lora.rank={config.model.lora.rank}; {works}"
        )
    if config.environment.credit == "turn" and algorithm.advantage.kind == "batch-norm":
        yield (
            "environment.credit: turn compares the turns of one prompt's episodes, and algorithm.advantage.kind="
            "batch-norm all samples of a step; use credit=outcome, or kind=group-mean"
        )
    ppo = algorithm.kind == "ppo"
    if algorithm.objective == "gspo" and (ppo or config.environment.credit == "turn"):
        yield (
            "algorithm.objective: gspo has one ratio for a whole response, in which advantages of tokens or turns are "
            f"averaged; use objective=dapo or cispo, or {'algorithm.kind=group' if ppo else 'credit=outcome'}"
        )
    if not ppo:
        return
    if (kind := algorithm.advantage.kind) != AlgorithmConfig().advantage.kind:
        yield (
            f"algorithm.advantage.kind: {kind} compares the samples of a prompt, but with algorithm.kind=ppo the "
            "advantages come from the critic; leave it out, or use algorithm.kind=group"
        )
    if apart:
        yield "algorithm.kind: ppo trains in one process; use runtime.kind=local, or kind=group"
    asked = {"algorithm.filter_groups.enable=false": algorithm.filter_groups.enable}
    for works, mixed in (asked | {"data.sampling=uniform": config.data.sampling == "difficulty"}).items():
        if mixed and config.rollout.samples_per_prompt < 2:
            key = works.partition("=")[0]
            yield f"{key}: one sample is never right and wrong; use {works} or rollout.samples_per_prompt=2"
    if algorithm.critic.bootstrap and (algorithm.overlong_buffer.enable or algorithm.overlong_hard_punishment):
        yield (
            "algorithm.critic.bootstrap: is in place of a cut response's score, so the length punishment would be too; "
            "use overlong_buffer.enable=false and overlong_hard_punishment=false, or bootstrap=false"
        )
    if algorithm.critic.share_backbone and (algorithm.critic.model is not None or lora):
        yield (
            "algorithm.critic.share_backbone: is a head on the backbone of a policy that is trained whole; leave "
            "critic.model and model.lora out, or use share_backbone=false"
        )


_NEVER_CLIPS = 10.0
"""A clip_ratio_high above this is none: training meets no such ratio."""


def _conflicts_of_staleness(config: Config) -> Iterator[str]:
    algorithm, staleness, ahead = config.algorithm, config.rollout.max_staleness, config.ahead
    kind, level = algorithm.correction.kind, algorithm.correction.level
    if ahead > staleness:
        yield (
            f"rollout.ahead: is {ahead}, but groups that are more than {staleness} versions old "
            f"(rollout.max_staleness) are dropped; use at most {staleness}, or max_staleness={ahead}"
        )
    if staleness and config.runtime.deterministic:
        yield (
            f"runtime.deterministic: with rollout.max_staleness={staleness} samples are drawn during updates, and the "
            "clock decides which weights each token comes from; use rollout.max_staleness=0 or deterministic=false"
        )
    alone = staleness and ":" not in algorithm.objective and kind == "none"  # only clipping bounds older samples
    if alone and algorithm.clip_ratio_high > _NEVER_CLIPS:
        yield (
            f"algorithm.clip_ratio_high: {algorithm.clip_ratio_high:g} never clips, and with "
            f"rollout.max_staleness={staleness} samples come from older weights; use clip_ratio_high=0.28 (the paper), "
            "algorithm.correction.kind=truncate or max_staleness=0"
        )
    if alone and config.proximal != "engine" and config.updates_per_step == 1:
        yield (
            f"algorithm.proximal: with {config.proximal} and one update a step the ratio is 1 and nothing is clipped, "
            f"so nothing bounds samples of older weights (rollout.max_staleness={staleness}); use "
            "algorithm.correction.kind=truncate, proximal=engine, training.epochs_per_rollout=2 or max_staleness=0"
        )
    interpolated = algorithm.proximal == "interpolate"
    if interpolated and not staleness:
        yield (
            "algorithm.proximal: interpolate goes by the age of a token, and with rollout.max_staleness=0 all are of "
            "the present weights; use proximal=auto or rollout.max_staleness=1"
        )
    if interpolated and (kind == "mask" or (kind == "truncate" and level == "sequence")):
        yield (
            "algorithm.correction: kind=mask and level=sequence need the log-probs of whole responses before the loss, "
            "and with proximal=interpolate they come with it; use kind=truncate with level=token, or "
            "algorithm.proximal=recompute"
        )


_WIDE_FOR_A_RESPONSE = 0.05
"""Of a clip in GSPO: a hundred times the paper's."""


def _divisors_near(total: int, wanted: int) -> list[int]:
    small = [d for d in range(1, min(math.isqrt(total), 100_000) + 1) if total % d == 0]
    divisors = {*small, *(total // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2])


def warnings_for(config: Config, heldout: Sized | None = None) -> list[str]:
    """Combinations that run but probably are not what was meant, and texts whose backslashes were eaten.
    ``heldout``: rows from Python in place of ``evaluation.data``."""
    rows = config.evaluation.data if heldout is None else heldout
    found = eaten_in(config.model_dump(mode="json"))
    if config.training.steps and config.updates_per_step == 1:
        found.append(
            "one update per rollout step: the ratio stays 1 and clipping does nothing; the paper makes 16 (smaller "
            "training.groups_per_update, or more training.epochs_per_rollout)"
        )
    for key in ("every", "metrics"):
        if getattr(config.evaluation, key) and not rows:
            found.append(f"evaluation.{key}: has no effect without evaluation.data (files of held-out rows)")
    if config.evaluation.patience and not (config.evaluation.every and rows):
        found.append("evaluation.patience: has no effect without evaluation.data and evaluation.every")
    if config.evaluation.while_sampling == "copy" and not config.ahead:
        found.append("evaluation.while_sampling=copy: has no effect where nothing is sampled ahead (rollout.ahead)")
    staleness, steps = config.rollout.max_staleness, config.training.steps
    if config.rollout.in_flight != "auto" and not staleness:
        found.append("rollout.in_flight: has no effect with rollout.max_staleness=0: nothing is in flight at a push")
    if 0 < steps < staleness:
        found.append(f"rollout.max_staleness={staleness} is more than training.steps={steps}: nothing gets so old")
    if config.data.system is not None and config.data.template == "plain":
        found.append("data.system: has no effect with data.template=plain, which has no system message")
    training = config.training
    if training.final_learning_rate is not None and training.final_learning_rate > training.learning_rate:
        found.append(
            f"training.final_learning_rate={training.final_learning_rate:g} is above training.learning_rate="
            f"{training.learning_rate:g}: the rate rises over the run"
        )
    if 0 < training.steps <= training.warmup_steps:
        steps, warmup, rate = training.steps, training.warmup_steps, training.learning_rate
        found.append(
            f"training.warmup_steps={warmup} is not below training.steps={steps}: the learning rate rises during the "
            f"whole run, to at most {rate * (steps / warmup):.3g}; use training.warmup_steps={steps // 10}"
        )
    if config.runtime.deterministic and training.minutes is not None and training.final_learning_rate is not None:
        found.append(
            "runtime.deterministic: with training.minutes the rate that falls to training.final_learning_rate follows "
            "the clock, so no two runs are the same; use training.steps alone"
        )
    low, high = config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high
    if high < low:
        found.append(f"algorithm.clip_ratio_high={high} is below clip_ratio_low={low}: the opposite of Clip-Higher")
    if config.algorithm.objective == "gspo" and high > _WIDE_FOR_A_RESPONSE:
        found.append(
            f"algorithm.clip_ratio_high={high:g} is wide for gspo: the ratio of a whole response is a mean over its "
            "tokens and stays near 1, so nothing is clipped; the paper has 3e-4 and 4e-4 (recipes/method/gspo.yaml)"
        )
    if config.algorithm.objective == "gspo" and config.algorithm.loss_agg_mode != "seq-mean-token-mean":
        found.append("algorithm.loss_agg_mode: gspo is a mean over responses; use seq-mean-token-mean")
    rewards = config.reward.rewards.values() if config.reward.kind == "compose" else (config.reward,)
    if config.runtime.deterministic and any(reward.kind == "model" for reward in rewards):
        found.append(
            "runtime.deterministic: a reward model's last bits depend on what else is in its batch; so will the run's"
        )
    kl = config.algorithm.kl
    if kl.mode == "loss" and kl.estimator == "k1":
        found.append("algorithm.kl: k1 in the loss has a gradient of zero mean; use k2 or k3")
    return found
