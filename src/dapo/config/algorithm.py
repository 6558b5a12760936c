"""What is trained on: which groups are kept, rewards shaped, advantages, the loss and its KL term."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dapo.config.section import OneOf, PathText, Section


class FilterGroupsConfig(Section):
    enable: bool = True
    """Dynamic sampling (Eq. 11): keep groups that hold both right and wrong responses, sample until N are kept."""
    metric: Literal["acc", "score"] = "acc"
    """`acc`: by `correct`. `score`: by the spread of the raw reward, for tasks without right and wrong."""
    tolerance: float = Field(1e-6, ge=0)
    """Smallest spread of the raw reward that counts (metric `score`)."""
    max_num_gen_batches: int = Field(10, ge=1)
    """A step chooses its groups from at most this many times N prompts; those too old for it are not counted."""
    on_starved: Literal["stop", "train"] = "stop"
    """When that many did not give N groups: stop with a checkpoint, or train on the groups there are."""


class OverlongBufferConfig(Section):
    enable: bool = True
    """Soft overlong punishment (Eq. 13)."""
    len: int = Field(4096, ge=0)
    """L_cache: the last tokens before L_max in which the punishment grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Size of the punishment at L_max."""


ADVANTAGES = ("group-norm", "group-mean", "leave-one-out", "batch-norm")
OBJECTIVES = ("dapo", "gspo", "cispo")


class AdvantageConfig(Section):
    kind: Annotated[PathText, AfterValidator(OneOf(ADVANTAGES))] = "group-norm"
    """`group-norm`: (R - mean) / (std + epsilon) (Eq. 9). `group-mean`: R - mean (Dr. GRPO). `leave-one-out`: R - mean
    of the others (RLOO). `batch-norm`: R - mean, then normalised over the loss tokens of the batch (REINFORCE++)."""
    epsilon: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""


class CorrectionConfig(Section):
    kind: Literal["none", "truncate", "mask"] = "none"
    """Weight of a token for pi_prox / pi_engine: none, min(ratio, cap), or leave tokens outside [low, high] out."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of the whole response."""
    cap: float = Field(2.0, gt=0)
    """C of truncated importance sampling."""
    low: float = Field(0.5, ge=0)
    """Lower border of the band (kind `mask`)."""
    high: float = Field(2.0, gt=0)
    """Upper border of the band (kind `mask`)."""


class CriticConfig(Section):
    model: PathText | None = None
    """Folder or name of the model that becomes the critic, such as a reward model. null: the policy as it begins."""
    share_backbone: bool = False
    """A head on the policy's own backbone, which learns nothing from the critic's loss: no second model in memory."""
    learning_rate: float = Field(1e-5, gt=0)
    """Of the critic; its warm-up and the other settings of the optimizer are those of `training`."""
    warmup_steps: int = Field(0, ge=0)
    """Rollout steps at the start in which the critic alone is trained."""
    clip: float | None = Field(0.5, gt=0)
    """A value may move so far in a step, in units of the reward, before its loss stops to fall. null: off."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards, by token."""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of GAE: 1 is the return less the value, 0 one step of look-ahead. Below 1 the score at the end reaches a
    token n before it times lambda^n, and what is missing has to come from the critic."""
    bootstrap: bool = False
    """A response that the limit cut is worth what the critic expects of going on, in place of its score."""
    whiten: bool = True
    """Advantages get mean 0 and deviation 1 over the loss tokens of the batch."""


class KLConfig(Section):
    mode: Literal["off", "measure", "loss", "reward"] = "off"
    """KL to the initial policy: not computed, a metric only, a term of the loss, or taken off the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = log pi_theta - log pi_ref."""
    coef: float = Field(0.001, ge=0)
    """beta."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient so that the KL stays near this value, in nats for each token."""
    horizon: int = Field(10000, ge=1)
    """Samples over which the coefficient adapts."""
    reference: Literal["copy", "base", "offload"] = "copy"
    """The initial policy is a copy beside the policy, the base under its adapter (LoRA, no copy at all), or a copy in
    main memory that is moved to the GPU when it is asked."""


class AlgorithmConfig(Section):
    kind: Literal["group", "ppo"] = "group"
    """Where advantages come from: the other samples of the prompt (`algorithm.advantage`), or a critic
    (`algorithm.critic`), which has one for each token. With `ppo` these are set unless they are given:
    filter_groups.enable=false, and kl.estimator=k1 with kl.mode=reward."""
    objective: Annotated[PathText, AfterValidator(OneOf(OBJECTIVES))] = "dapo"
    """What each update minimises. `dapo`: the clipped loss (Eq. 8, 10, 12). `gspo`: the same on the ratio of a whole
    response. `cispo`: the ratio is clipped as a weight, and clipped tokens keep a gradient. One of
    yours knows neither the keys clip_ratio_* nor a KL in the loss."""
    clip_ratio_low: float = Field(0.2, ge=0, le=1)
    """epsilon_low (Eq. 10). 1: no ratio is too small, as CISPO has it. GSPO: 3e-4."""
    clip_ratio_high: float = Field(0.28, ge=0)
    """epsilon_high (Eq. 10): above epsilon_low, so that unlikely tokens can still grow (Clip-Higher). GSPO: 4e-4."""
    clip_ratio_c: float | None = Field(10.0, gt=1)
    """Dual clip: with a negative advantage the loss of a token is at most c |A|. null: off."""
    loss_agg_mode: Literal["token-mean", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] = (
        "token-mean"
    )
    """How token losses become one number. The divisor always runs over the whole optimizer mini-batch."""
    loss_constant: int | None = Field(None, ge=1)
    """C of mode `constant`; by default L_max."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss; they still count in the statistics of their group."""
    overlong_hard_punishment: bool = False
    """The reward of a truncated response is -1 whatever it says. Refused together with the soft punishment."""
    advantage: AdvantageConfig = AdvantageConfig()
    proximal: Literal["auto", "engine", "recompute", "interpolate"] = "auto"
    """Where log pi_prox comes from: the engine's log-probabilities; a forward pass before the first update; or, without
    that pass, a point between the engine's and the present policy's, by the optimizer updates between them. `auto`:
    `engine` when max_staleness is 0, rollout.engine is `native` and no correction is asked for, else `recompute`."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="before")
    @classmethod
    def _implied_by_ppo(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("kind") != "ppo":
            return data
        implied: dict[str, dict[str, Any]] = {"filter_groups": {"enable": False}}
        if isinstance(data.get("kl"), dict) and data["kl"].get("mode") == "reward":
            implied["kl"] = {"estimator": "k1"}
        for name, values in implied.items():
            given = data.get(name)
            if given is None or isinstance(given, dict):  # what else it may be is judged by its section
                data = {**data, name: values | (given or {})}
        return data
