"""The configuration of a run: one tree, read from YAML, checked as a whole before anything is loaded.

Unknown keys are refused with the nearest valid one named; impossible combinations are refused with the numbers shown
and a working value proposed. Defaults are the paper's (arXiv 2503.14476) and, where it is silent, its released code's.
Names of sizes say what they count: prompts, samples, groups or tokens.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dapo.errors import ConfigError


class Section(BaseModel):
    """A part of the tree: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_yaml_means_it(cls, data: Any) -> Any:
        """Three traps of YAML: an empty section is null, `off` is false, and true would pass for the number 1."""
        if not isinstance(data, dict):
            return data
        return {
            key: _meant(value, cls.model_fields[key].annotation) if key in cls.model_fields else value
            for key, value in data.items()
        }


class ModelConfig(Section):
    path: str
    """Folder in Hugging Face layout, or a name on the hub."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer; by default the model's own."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of rollout and of matrix products in training. Master weights and the output head are always float32."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""


class DataConfig(Section):
    train: list[str] = Field(default_factory=list)
    """Files to train on (JSONL). Relative paths are looked up beside the recipe first, then in the working folder."""
    prompt_key: str = "prompt"
    """Key of the prompt in a row: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Key of the reference answer in a row."""
    template: Literal["plain", "chat", "dapo"] = "chat"
    """How a row becomes a prompt: `plain` (as it stands), `chat` (the tokenizer's chat template), `dapo` (the paper's
    "Answer:" instruction around it, then the chat template)."""
    instruction: str = ""
    """Text put after every prompt (templates `plain` and `chat`)."""
    system: str | None = None
    """System message (templates `chat` and `dapo`)."""
    max_prompt_length: int = Field(2048, ge=1)
    """Longest prompt in tokens, template included. Longer ones are skipped and counted."""
    shuffle: bool = True
    """Draw rows in a seeded random order, another one each epoch. Off: in the order of the files."""
    shuffle_answers: bool = False
    """Control experiment: permute the answers over the training rows. What is still learned is not from the reward."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class RolloutConfig(Section):
    engine: Literal["native"] = "native"
    """Rollout engine."""
    prompts_per_step: int = Field(512, ge=1)
    """N: groups that one rollout step trains on."""
    samples_per_prompt: int = Field(16, ge=1)
    """G: responses sampled for each prompt."""
    max_response_length: int = Field(20480, ge=1)
    """L_max: longest response in tokens, the stop token counted."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. Greedy rollouts (0) hold nothing to learn from and are refused."""
    top_p: float = 1.0
    """Must stay 1: a truncated sampler is not the policy whose log-probabilities training uses."""
    top_k: int = 0
    """Must stay 0 (off), for the same reason."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Stop tokens beside those that the model and its tokenizer name."""
    max_concurrent_samples: int = Field(256, ge=1)
    """Samples that the engine decodes at once."""
    max_staleness: int = Field(0, ge=0)
    """S: how many versions old a group may be when it is trained on. 0 is on-policy: surplus groups are discarded;
    with 1 or more they are carried over to the next step."""

    @field_validator("top_p")
    @classmethod
    def _no_top_p(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("truncated sampling is refused for rollouts (it changes the distribution): use 1.0")
        return value

    @field_validator("top_k")
    @classmethod
    def _no_top_k(cls, value: int) -> int:
        if value != 0:
            raise ValueError("truncated sampling is refused for rollouts (it changes the distribution): use 0")
        return value


class RewardBase(Section):
    workers: int = Field(2, ge=1)
    """Processes that score responses."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest time for one score. Then its worker is killed."""
    on_error: Literal["drop", "value"] = "drop"
    """What becomes of a sample whose score failed: left out of its group, or given `error_value`."""
    error_value: float = -1.0
    """Reward of a failed score when `on_error` is `value`."""
    max_error_rate: float = Field(0.2, ge=0, le=1)
    """Share of failed scores in one step above which the run stops."""


class MathReward(RewardBase):
    kind: Literal["math"] = "math"
    """+1 if the final answer is mathematically equal to the reference, -1 otherwise (Eq. 7)."""
    extract: list[Literal["boxed", "answer_line"]] = Field(["boxed", "answer_line"], min_length=1)
    """Rules that find the final answer, in order: the last complete \\boxed{}, the last "Answer:" line."""
    memory_mb: int = Field(1024, ge=128)
    """Memory in MiB that one scoring process may take beyond what it holds after its start."""


class ExactReward(RewardBase):
    kind: Literal["exact"]
    """+1 if the answer text equals the reference after trimming white space, -1 otherwise."""
    after: str | None = None
    """The answer is what follows the last occurrence of this text; without it, the whole response."""


class FunctionReward(RewardBase):
    kind: Literal["function"]
    """The user's own function."""
    function: str
    """`package.module:name`, or `file.py:name` with the file beside the recipe (or in the working folder)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the function."""


RewardConfig = Annotated[MathReward | ExactReward | FunctionReward, Field(discriminator="kind")]


class FilterGroupsConfig(Section):
    enable: bool = True
    """Dynamic sampling (Eq. 11): keep groups that hold both right and wrong responses, sample until N are kept."""
    metric: Literal["acc", "score"] = "acc"
    """`acc`: by `correct`. `score`: by the spread of the raw reward, for tasks without right and wrong."""
    tolerance: float = Field(1e-6, ge=0)
    """Smallest spread of the raw reward that counts (metric `score`)."""
    max_num_gen_batches: int = Field(10, ge=1)
    """Draw at most this many times N prompts in one step."""
    on_starved: Literal["stop", "train"] = "stop"
    """When that many did not give N groups: stop with a checkpoint, or train on the groups there are."""


class OverlongBufferConfig(Section):
    enable: bool = True
    """Soft overlong punishment (Eq. 13)."""
    len: int = Field(4096, ge=0)
    """L_cache: the last tokens before L_max in which the punishment grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Size of the punishment at L_max."""


class AdvantageConfig(Section):
    kind: Literal["group-norm", "group-mean", "leave-one-out"] = "group-norm"
    """`group-norm`: (R - mean) / (std + epsilon) (Eq. 9). `group-mean`: R - mean (Dr. GRPO). `leave-one-out`: R - mean
    of the others (RLOO)."""
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


class KLConfig(Section):
    mode: Literal["off", "measure", "loss", "reward"] = "off"
    """KL to the initial policy: not computed, a metric only, a term of the loss, or taken off the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = log pi_theta - log pi_ref."""
    coef: float = Field(0.001, ge=0)
    """beta."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient so that the KL stays near this value."""
    horizon: int = Field(10000, ge=1)
    """Samples over which the coefficient adapts."""


class AlgorithmConfig(Section):
    clip_ratio_low: float = Field(0.2, ge=0, lt=1)
    """epsilon_low (Eq. 10)."""
    clip_ratio_high: float = Field(0.28, ge=0)
    """epsilon_high (Eq. 10): above epsilon_low, so that unlikely tokens can still grow (Clip-Higher)."""
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
    proximal: Literal["auto", "engine", "recompute"] = "auto"
    """Where log pi_prox comes from: the engine's log-probabilities, or a forward pass before the first update.
    `auto`: `engine` when max_staleness is 0, else `recompute`."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()


class TrainingConfig(Section):
    steps: int = Field(100, ge=0)
    """Rollout steps."""
    groups_per_update: int = Field(32, ge=1)
    """Groups in one optimizer mini-batch."""
    epochs_per_rollout: int = Field(1, ge=1)
    """mu: passes over each rollout batch."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW, constant after the warm-up."""
    warmup_steps: int = Field(20, ge=0)
    """W: rollout steps of linear warm-up. In rollout step k (from 0) the rate is lr (k + 1) / W."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping by global norm."""
    tokens_per_micro_batch: int = Field(32768, ge=1)
    """Strict token budget of one forward and backward pass, prompts and responses counted."""
    max_skipped_updates: int = Field(3, ge=1)
    """Updates in a row with a loss or gradient that is not finite before the run stops. Each one is skipped."""
    mismatch_alarm: float = Field(0.1, gt=0)
    """Mean |log pi_engine - log pi_trainer| on tokens of the current version above which a warning is given."""

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in value):
            raise ValueError("each must be at least 0 and below 1, such as [0.9, 0.999]")
        return value


class EvaluationConfig(Section):
    data: list[str] = Field(default_factory=list)
    """Held-out files (JSONL); none: no evaluation."""
    every: int = Field(0, ge=0)
    """Evaluate after every so many rollout steps, beside before the first and after the last. 0: only those two."""
    rows: int | None = Field(None, ge=1)
    """Use the first so many rows; by default all."""
    samples_per_prompt: int = Field(1, ge=1)
    """k of avg@k."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy (the paper evaluates avg@32 at 1.0 with top_p 0.7)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that together hold this much probability. 1: from all."""
    top_k: int = Field(0, ge=0)
    """Sample from the so many most likely tokens. 0: from all."""
    max_response_length: int | None = Field(None, ge=1)
    """By default that of the rollout."""

    @field_validator("data", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class RuntimeConfig(Section):
    kind: Literal["local"] = "local"
    """Placement: one process."""
    device: Literal["cpu"] = "cpu"
    """Device of engine and trainer."""
    threads: int | None = Field(None, ge=1)
    """Threads for tensor work; by default 1 for small models (whose operations are too short to share) and all cores
    for others."""
    deterministic: bool = False
    """Pin every shape, so that the same seed gives the same bits."""


class RunConfig(Section):
    dir: str | None = None
    """Run folder; by default runs/<name of the recipe>."""
    if_exists: Literal["fail", "rename"] = "fail"
    """When the run folder exists: stop, or keep it under another name (with its date)."""
    save_every: int = Field(0, ge=0)
    """Write a checkpoint after every so many rollout steps; 0: only at the end (and when the run stops early)."""
    save_samples: bool = True
    """Write every sample (text, reward, advantage, kept or why not) to samples/step-*.jsonl."""


class Config(Section):
    """A whole recipe."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random follows from it."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = MathReward()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    run: RunConfig = RunConfig()

    @field_validator("reward", mode="before")
    @classmethod
    def _math_unless_said(cls, value: Any) -> Any:
        return {"kind": "math"} | value if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = list(_conflicts(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def proximal(self) -> Literal["engine", "recompute"]:
        """`algorithm.proximal` with `auto` resolved."""
        if self.algorithm.proximal != "auto":
            return self.algorithm.proximal
        wants_recompute = self.rollout.max_staleness > 0 or self.algorithm.correction.kind != "none"
        return "recompute" if wants_recompute else "engine"

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one rollout step, all epochs counted."""
        per_epoch = self.rollout.prompts_per_step // self.training.groups_per_update
        return per_epoch * self.training.epochs_per_rollout


# --- cross-field checks -------------------------------------------------------------------------------------------


def _conflicts(config: Config) -> Iterator[str]:
    """Every impossible combination, as `key: what is wrong, with the numbers; what would work`."""
    rollout, algorithm, training = config.rollout, config.algorithm, config.training

    if rollout.samples_per_prompt < 2:
        yield (
            f"rollout.samples_per_prompt: is {rollout.samples_per_prompt}, but {algorithm.advantage.kind} compares the "
            "samples of one prompt and needs at least 2; the paper uses 16"
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
    longest = config.data.max_prompt_length + rollout.max_response_length
    if training.tokens_per_micro_batch < longest:
        yield (
            f"training.tokens_per_micro_batch: is {training.tokens_per_micro_batch}, but one sample may have "
            f"{config.data.max_prompt_length} (data.max_prompt_length) + {rollout.max_response_length} "
            f"(rollout.max_response_length) = {longest} tokens; use at least {longest}"
        )
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
    if algorithm.kl.target is not None and algorithm.kl.mode not in ("loss", "reward"):
        yield (
            f"algorithm.kl.target: adapts the coefficient of the KL term, but algorithm.kl.mode is "
            f"{algorithm.kl.mode}; use mode=loss or mode=reward, or target=null"
        )
    if algorithm.loss_constant is not None and algorithm.loss_agg_mode != "constant":
        yield (
            f"algorithm.loss_constant: is used by loss_agg_mode=constant only, which is "
            f"{algorithm.loss_agg_mode}; use loss_agg_mode=constant or loss_constant=null"
        )


def _divisors_near(total: int, wanted: int) -> list[int]:
    small = [d for d in range(1, min(math.isqrt(total), 100_000) + 1) if total % d == 0]
    divisors = {*small, *(total // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2])


def warnings_for(config: Config) -> list[str]:
    """Combinations that run but probably are not what was meant."""
    found = []
    if config.training.steps and config.updates_per_step == 1:
        found.append(
            "one update per rollout step: the ratio stays 1 and clipping does nothing; the paper makes 16 (smaller "
            "training.groups_per_update, or more training.epochs_per_rollout)"
        )
    if config.evaluation.every and not config.evaluation.data:
        found.append("evaluation.every: has no effect without evaluation.data (files of held-out rows)")
    kl = config.algorithm.kl
    if kl.mode == "loss" and kl.estimator == "k1":
        found.append("algorithm.kl: k1 in the loss has a gradient of zero mean; use k2 or k3")
    return found


# --- reading ------------------------------------------------------------------------------------------------------


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply overrides of the form ``section.key=value`` (the value is YAML).

    Relative data files and a reward function's file are resolved beside the recipe if they exist there.

    Raises:
        ConfigError: with every problem found, each with file, line and key.
    """
    path = Path(recipe)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: cannot read the recipe: {error}") from None
    tree, lines = _parse_yaml(text, str(path))
    where = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        key, value = _parse_override(override)
        _assign(tree, key, value, override)
        where[key] = f"override {override}"
    if tree.get("run") is None:
        tree["run"] = {}
    if isinstance(tree["run"], dict) and tree["run"].get("dir") is None:
        tree["run"]["dir"] = f"runs/{path.stem}"
    return _beside(build_config(tree, str(path), where), path.parent)


def build_config(tree: Mapping[str, Any], source: str = "config", where: Mapping[str, str] | None = None) -> Config:
    """Check a nested mapping and turn it into a :class:`Config`.

    Args:
        tree: sections and keys.
        source: what to call the whole in messages.
        where: for dotted keys, the place to name in messages.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [line for item in error.errors() for line in _explain(item, source, where or {})]
        raise ConfigError("\n".join(problems)) from None


def _beside(config: Config, folder: Path) -> Config:
    def resolve(name: str) -> str:
        candidate = folder / name
        # os.path.exists and not Path.exists: the latter raises for a name that is too long
        return str(candidate) if not Path(name).is_absolute() and os.path.exists(candidate) else name  # noqa: PTH110

    reward: Any = config.reward
    if isinstance(reward, FunctionReward) and ".py:" in reward.function:
        file, _, function = reward.function.rpartition(":")
        reward = reward.model_copy(update={"function": f"{resolve(file)}:{function}"})
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"train": [resolve(f) for f in config.data.train]}),
            "evaluation": config.evaluation.model_copy(update={"data": [resolve(f) for f in config.evaluation.data]}),
            "reward": reward,
        }
    )


def _parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in ``text`` and, for each dotted key, its line."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = _unshared(yaml.safe_load(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None
    except Exception as error:  # the YAML reader lets through whatever an impossible date or number raises
        raise ConfigError(f"{source}: not valid YAML: {_reason(error)}") from None
    if node is None:
        raise ConfigError(f"{source}: the recipe is empty; it needs at least model.path")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: a recipe is a mapping of sections, found {type(tree).__name__}")
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines, source)
    return tree, lines


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error) or type(error).__name__


def _unshared(node: Any, depth: int = 0) -> Any:
    """A copy in which no two keys share a mapping (YAML aliases do), so that an override changes one of them."""
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(node, dict):
        return {key: _unshared(value, depth + 1) for key, value in node.items()}
    return [_unshared(value, depth + 1) for value in node] if isinstance(node, list) else node


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], source: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen and key != "<<":
            raise ConfigError(f"{source}:{line}: {prefix}{key}: given twice (first in line {seen[key]})")
        seen[key] = line
        lines[prefix + key] = line
        _collect_lines(value_node, f"{prefix}{key}.", lines, source)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A tree from dotted keys: ``{"a.b": 1}`` becomes ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        _assign(tree, key, value, f"{key}={value}")
    return tree


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key.strip()):
        raise ConfigError(f"override {text!r}: expected section.key=value, such as training.steps=20")
    try:
        return key.strip(), _unshared(yaml.safe_load(value))
    except Exception:  # not only YAMLError: see _parse_yaml
        raise ConfigError(f"override {text!r}: the value is not valid YAML; quote it") from None


def _assign(tree: dict[str, Any], key: str, value: Any, override: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
    tree[last] = value


# --- messages -----------------------------------------------------------------------------------------------------


def _explain(item: Any, source: str, where: Mapping[str, str]) -> Iterator[str]:
    """One pydantic error as lines for a person."""
    path = [str(p) for p in item["loc"]]
    kind = path.pop(1) if path[:1] == ["reward"] and len(path) > 1 and path[1] in _UNION_TAGS else None
    key = ".".join(path)
    if item["type"] == "value_error" and not path:
        for line in str(item["ctx"]["error"]).splitlines():
            found = line.partition(":")[0]
            yield f"{_place(found, source, where)}: {line}"
        return
    place = _place(key, source, where)
    if item["type"] == "extra_forbidden":
        if kind and key in all_keys():
            yield f"{place}: {key}: not a key of reward.kind={kind}; it belongs to {', '.join(_kinds_with(path[-1]))}"
        else:
            yield f"{place}: {key}: unknown key; {_suggest(path)}"
    elif item["type"] == "missing":
        yield f"{place}: {key}: required but not given"
    elif item["type"] == "union_tag_invalid":
        kinds, place = ", ".join(sorted(_UNION_TAGS)), _place(f"{key}.kind", source, where)
        yield f"{place}: {key}.kind: {_shown(item['input'].get('kind'))} is not one of {kinds}"
    elif item["type"] in ("model_type", "dict_type", "model_attributes_type"):
        yield f"{place}: {key}: is a section with keys of its own, got {_shown(item['input'])}"
    else:
        hint = "; put text that YAML reads as something else in quotes" if item["type"] == "string_type" else ""
        yield f"{place}: {key}: {item['msg'].removeprefix('Value error, ')}, got {_shown(item['input'])}{hint}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python will print
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _kinds_with(key: str) -> list[str]:
    kinds: list[type[BaseModel]] = [MathReward, ExactReward, FunctionReward]
    return [str(get_args(k.model_fields["kind"].annotation)[0]) for k in kinds if key in k.model_fields]


def _place(key: str, source: str, where: Mapping[str, str]) -> str:
    while key:
        if key in where:
            return where[key]
        key = key.rpartition(".")[0]
    return source


def _suggest(path: list[str]) -> str:
    """The nearest valid key: the same name elsewhere, else the most similar one (in the same section if possible)."""
    known = all_keys()
    *parents, last = path
    elsewhere = [k for k in known if k.rpartition(".")[2] == last]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    section = ".".join(parents)
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last, [k.rpartition(".")[2] for k in siblings], n=1, cutoff=0.6)
    if near:
        return f"did you mean {section + '.' if section else ''}{near[0]}?"
    names = {k.rpartition(".")[2]: k for k in reversed(known)}
    near = difflib.get_close_matches(last, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {names[near[0]]}?"
    return f"valid here: {', '.join(k.rpartition('.')[2] for k in siblings)}"


def all_keys() -> list[str]:
    """Every dotted key of the tree, sections included, in order."""
    return list(dict.fromkeys(_keys(Config, "")))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        for kind in _section_types(info.annotation):
            yield from _keys(kind, f"{prefix}{name}.")


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        return _section_types(get_args(annotation)[0])
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [kind for arg in get_args(annotation) for kind in _section_types(arg)]


def _meant(value: Any, annotation: Any) -> Any:
    if value is None and _section_types(annotation):
        return {}
    if isinstance(value, bool):
        leaves = _leaves(annotation)
        if value is False and "off" in leaves:
            return "off"
        if bool not in leaves and (int in leaves or float in leaves):
            return str(value).lower()  # not a number, and refused as such
    return value


def _leaves(annotation: Any) -> list[Any]:
    """The types and literal values that an annotation is made of, the element types of lists left out."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType, Literal):
        return [leaf for arg in get_args(annotation) for leaf in _leaves(arg)]
    return [annotation]


_UNION_TAGS = {"math", "exact", "function"}
_DEEPEST = 50
