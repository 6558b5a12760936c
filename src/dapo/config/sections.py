"""The sections of the tree, each key with its type, its default and what it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from dapo.config.common import HeldOutConfig, OptimizerConfig
from dapo.config.request_template import RequestTemplate
from dapo.config.secrets import is_secret
from dapo.config.section import Named, OneOf, PathText, Section, check_address

MOST_STALE = 64
"""Versions that a token which is trained on may be old at most."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0, le=4096)
    """Train an adapter of this rank on the frozen model (LoRA, needs `dapo-rl[lora]`). 0: train all parameters, or the
    adapter that model.path holds."""
    alpha: float | None = Field(None, gt=0)
    """What the adapter adds is multiplied by alpha / rank. By default twice the rank. There is no dropout: the policy
    that is sampled from must be the one that is trained."""
    base: Literal["full", "nf4"] = "full"
    """How the frozen base is held. full: in model.compute_dtype. nf4: its linear layers in 4 bits, for less memory, and
    slower; with rollout.engine=native. The adapter is saved alone, for the base as it was (models.md)."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers with an adapter, such as `[q_proj, v_proj]`. all-linear: all between embedding and output head."""

    @field_validator("target_modules")
    @classmethod
    def _some_module(cls, value: list[str] | str) -> list[str] | str:
        if not value or not all(value):
            raise ValueError("names no module; use all-linear, or names such as [q_proj, v_proj]")
        return value


class ModelConfig(Section):
    path: PathText
    """Folder in Hugging Face layout, or a name on the hub."""
    tokenizer: PathText | None = None
    """Folder or name of the tokenizer; by default the model's own."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of rollout, of matrix products in training, and of the frozen base under a LoRA adapter. Masters of what is
    trained, and logits, are always float32."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""
    export_dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    """Type of the weights in `model-after/` (float32 if one of them is too large for it), and in `model-before/` where
    it can hold them exactly. `source`: that of the model trained; of a LoRA adapter float32. Checkpoints, from which
    training goes on, hold float32."""
    lora: LoraConfig = LoraConfig()
    """What of the model is trained."""


def _stop_texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    for text in texts if isinstance(texts, list) else ():
        if text == "":
            raise ValueError("a stop text is empty, which would end every response at once; leave it out")
        if isinstance(text, str) and "\N{REPLACEMENT CHARACTER}" in text:
            raise ValueError("a stop text holds U+FFFD, which stands for bytes that are no text; leave it out")
    return texts


StopTexts = Annotated[list[str], BeforeValidator(_stop_texts)]


def _is_an_address(value: str) -> str:
    check_address(value, "http://127.0.0.1:8000", "rollout.token_env")
    return value


class RolloutConfig(Section):
    engine: Annotated[PathText, AfterValidator(OneOf(("native", "vllm", "openai")))] = "native"
    """What samples in training, and is handed the weights: this process, vLLM in its own, or with `openai` the server
    at rollout.url. `dapo evaluate`, `generate` and `serve` sample by `native` or `vllm`, as a recipe or run says;
    `--server` names a server instead."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs, from rollout.device on, that share the model with engine=vllm; on a CPU processes."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by the names it has for them, such as enforce_eager."""
    url: Annotated[str, AfterValidator(_is_an_address)] | None = None
    """Address of the `dapo serve` that samples, with engine=openai."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the server."""
    model: str | None = None
    """Name that the server has for the model. null: that of the only one it has."""
    request: RequestTemplate | None = None
    """For evaluations on a server that does not speak OpenAI's API, such as Triton's `generate`: the body of a POST to
    rollout.url, in which `$prompt` (text), `$max_tokens`, `$temperature`, `$top_p`, `$top_k`, `$min_p`, `$seed` and
    `$stop` are filled in as in `reward.request`."""
    text: str = "text"
    """With `request`: where the text of the response stands in the reply; dots lead into mappings."""
    timeout_s: float = Field(1800.0, gt=0)
    """Longest time for one request to the server, such as all responses to a prompt."""
    give_up_after_s: float = Field(120.0, gt=0)
    """How long a request is made again while the server is down or busy. Then the run ends, with a checkpoint."""
    cache_gib: float | None = Field(None, gt=0, le=2**20)
    """Memory of a GPU for keys and values, in GiB. null: what is free, as far as it can be of use. Beyond it sequences
    wait, or are interrupted and started again from the tokens they have. A cache of a given size stays during updates
    where max_staleness is 1 or more; otherwise its memory is the learner's meanwhile."""
    prompts_per_step: int = Field(512, ge=1)
    """N: groups that one rollout step trains on."""
    samples_per_prompt: int = Field(16, ge=1)
    """G: responses sampled for each prompt."""
    max_response_length: int = Field(20480, ge=1)
    """L_max: longest response in tokens, the stop token counted."""
    temperature: float = Field(1.0, ge=1e-4)
    """Sampling temperature. Greedy rollouts (0) hold nothing to learn from and are refused."""
    top_p: float = 1.0
    """Must stay 1: a truncated sampler is not the policy whose log-probabilities training uses."""
    top_k: int = 0
    """Must stay 0 (off), for the same reason."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Stop tokens beside those that the model and its tokenizer name."""
    stop: StopTexts = Field(default_factory=list)
    """Texts that end a response. The token that completes one is the last of the response, and is trained on."""
    max_concurrent_samples: int = Field(256, ge=1, le=2**20)
    """Samples that the engine decodes at once."""
    max_staleness: int = Field(0, ge=0, le=MOST_STALE)
    """S: how many versions old a group may be when it is trained on, 64 at most. 0 is on-policy: sampling and updates
    take turns, and surplus groups are discarded. With 1 or more, sampling goes on during updates."""
    ahead: int | None = Field(None, ge=0)
    """Batches that may be sampled before they are wanted, at most S. null: S. 0: none is drawn early. Samples that are
    late go on beside the updates all the same, and surplus groups are carried over to the next step."""
    in_flight: Literal["auto", "keep", "drain", "restart"] = "auto"
    """Samples that are being written when new weights come (S >= 1): they are continued under the new weights, waited
    for, or begun again. `auto`: `keep` with an engine that can continue samples and without runtime.exact, else
    `drain`."""
    device: str | None = None
    """Device of the engine, such as `cuda:1`. null: the learner's, runtime.device."""

    @field_validator("top_p", "top_k")
    @classmethod
    def _not_truncated(cls, value: float, info: ValidationInfo) -> float:
        off = cls.model_fields[info.field_name or ""].default
        if value != off:
            raise ValueError(f"truncated sampling is refused for rollouts (it changes the distribution): use {off}")
        return value


class TrainingConfig(OptimizerConfig):
    steps: int = Field(100, ge=0)
    """Rollout steps."""
    groups_per_update: int = Field(32, ge=1)
    """Groups in one optimizer mini-batch."""
    epochs_per_rollout: int = Field(1, ge=1)
    """mu: passes over each rollout batch."""
    mismatch_alarm: float = Field(0.1, gt=0)
    """Mean |log pi_engine - log pi_trainer| on tokens of the current version above which a warning is given."""


class EvaluationConfig(HeldOutConfig):
    samples_per_prompt: int = Field(1, ge=1)
    """k: samples of each row, for avg@k, and for pass@k and maj@k if it is above 1."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy (the paper evaluates avg@32 at 1.0 with top_p 0.7)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that together hold this much probability. 1: from all."""
    top_k: int = Field(0, ge=0)
    """Sample from the so many most likely tokens. 0: from all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from the tokens that are at least this many times as likely as the most likely one. 0: from all."""
    stop: StopTexts | None = None
    """Texts that end a response. By default those of the rollout."""
    max_response_length: int | None = Field(None, ge=1)
    """By default that of the rollout."""
    while_sampling: Literal["pause", "copy"] = "pause"
    """What sampling ahead (rollout.max_staleness >= 1) does during an evaluation: pause, or go on beside it, while the
    evaluation has an engine of its own with a copy of the weights."""
    metrics: dict[str, Named] = Field(default_factory=dict)
    """Functions of yours by name, each a number over the evaluated groups: the metric `eval/metric/NAME`. One that is
    called `best` decides which evaluation is the best, in place of accuracy: the higher the better."""

    @field_validator("temperature")
    @classmethod
    def _no_overflow(cls, value: float) -> float:
        if 0 < value < 1e-4:
            raise ValueError("must be 0 (greedy) or at least 0.0001")
        return value

    @field_validator("metrics")
    @classmethod
    def _names_of_metrics(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in value if not name.isidentifier() or is_secret(name)]:
            raise ValueError(f"{wrong[0]!r} is no name for a metric; use letters, digits and _, no name of a secret")
        return value


Tracker = Annotated[PathText, AfterValidator(OneOf(("tensorboard", "wandb", "mlflow", "trackio")))]


class RunConfig(Section):
    dir: PathText | None = None
    """Run folder; by default runs/<name of the recipe>."""
    if_exists: Literal["fail", "rename"] = "fail"
    """When the run folder exists: stop, or keep it under another name (with its date)."""
    save_every: int = Field(10, ge=0)
    """Write a checkpoint after every so many rollout steps; 0: only at the end (and when the run stops early)."""
    keep_last: int | None = Field(2, ge=1)
    """Checkpoints to keep, the newest ones. null: all."""
    keep_every: int = Field(0, ge=0)
    """Write and keep for good a checkpoint after every so many rollout steps too; 0: none."""
    keep_best: bool = True
    """Write and keep a checkpoint of the step with the best evaluation too."""
    stop_within_s: float = Field(120.0, gt=0)
    """After SIGTERM, Ctrl-C, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU: seconds until the process has ended, with a
    checkpoint if there is time for one."""
    save_samples: bool | Annotated[float, Field(gt=0, lt=1)] = True
    """Write every sample (text, reward, advantage, kept or why not) to samples/step-*.jsonl, and its tokens and
    log-probabilities beside it. A number, such as 0.1: this share of the groups, from which a step cannot be
    replayed."""
    trackers: Annotated[list[Tracker], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = (
        Field(default_factory=list)
    )
    """Where metrics, recipe and summary go beside the run folder (each needs the extra of its name; trackers.md), and
    observers of yours (extending.md)."""
    resources_every_s: float = Field(5.0, ge=0)
    """Look at CPU, memory, GPUs, disk and network every so many seconds, for resources.jsonl (needs
    `dapo-rl[resources]`, else nothing is looked at); 0: never."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Serve metrics and resources for Prometheus at http://127.0.0.1:PORT/metrics as long as the run goes on (needs
    `dapo-rl[prometheus]`)."""
