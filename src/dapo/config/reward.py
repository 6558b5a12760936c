"""The ``reward`` section: one class for each kind of reward, and those that are put together from others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from dapo.config.compose import compose_problems
from dapo.config.section import PathText, Problems, Section, not_json


class RewardBase(Section):
    """What all kinds have. ``FILES``: the keys that may name a file beside the recipe."""

    FILES: ClassVar[tuple[str, ...]] = ()

    timeout_s: float = Field(10.0, gt=0)
    """Longest time for one score; then it has failed (and a process that was at work on it is killed)."""
    on_error: Literal["drop", "value"] = "drop"
    """What becomes of a sample whose score failed: left out of its group, or given `error_value`."""
    error_value: float = -1.0
    """Reward of a failed score when `on_error` is `value`."""
    max_error_rate: float = Field(0.2, ge=0, le=1)
    """Share of failed scores in one step above which the run stops."""


class WorkerReward(RewardBase):
    """A reward that is computed in processes on this machine."""

    workers: int = Field(2, ge=1, le=256)
    """Processes that score responses."""


class MathReward(WorkerReward):
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


class FunctionReward(WorkerReward):
    FILES: ClassVar[tuple[str, ...]] = ("function",)

    kind: Literal["function"]
    """The user's own function."""
    function: PathText
    """`package.module:name`, or `file.py:name` with the file beside the recipe (or in the working folder); the name is
    that of the function, or the one that `@dapo.reward_function(name=...)` gave it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the function."""
    responses_per_call: int | None = Field(None, ge=1)
    """Most responses in one call, for a function that takes lists (`prompts`, `responses`, `answers`); null: as it is
    declared, and one at a time if it is not. `timeout_s` is the limit of a call."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if value.endswith(".py"):
            raise ValueError(f"names a file; name the function in it, too: {value}:NAME")
        return value

    @field_validator("args")
    @classmethod
    def _args_can_be_written_down(cls, value: dict[str, Any]) -> dict[str, Any]:
        for problem in not_json(value):
            raise ValueError(problem)
        return value


class CodeReward(WorkerReward):
    kind: Literal["code"]
    """Runs the program in the response against the row's tests, in a sandbox. Python with its standard library."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for all tests of one response; those that are not reached by then have failed."""
    tests_key: str = "tests"
    """Key of the tests in a row: a list of assert statements, of `{assert: ...}` or of `{stdin: ..., stdout: ...}`."""
    entry_point_key: str = "entry_point"
    """Key of the name that the tests call; it decides which code block of a response is the answer."""
    score: Literal["all", "fraction"] = "all"
    """`all`: +1 if every test passes, -1 otherwise. `fraction`: 2 x (share of tests that pass) - 1. Either way a
    response is correct only if every test passes."""
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs programs with the rights of this process, and says so on every run: never on responses that you
    would not run yourself."""
    test_timeout_s: float = Field(5.0, gt=0)
    """Longest time for one test, in seconds; what a program waits for a busy machine does not count. With `score: all`
    the tests after one that took longer are not run."""
    memory_mb: int = Field(1024, ge=64)
    """Memory in MiB that one program may take, each of its processes and all of them together."""
    max_processes: int = Field(32, ge=1)
    """Processes and threads of one program."""
    max_output_kb: int = Field(1024, ge=1)
    """Output in KiB of one test; beyond, the test fails."""
    scratch_mb: int = Field(64, ge=1)
    """Size in MiB of the folder that a program may write to."""
    packages: list[str] = Field(default_factory=list)
    """Installed packages that programs may import beside the standard library, such as `numpy`."""
    parts: list[Literal["compiles", "style", "efficiency"]] = Field(default_factory=list)
    """What to measure beside the tests, each between 0 and 1: it compiles; a linter has nothing to say (needs
    `dapo-rl[code]`); its time and memory beside those of the row's reference solution."""
    solution_key: str = "solution"
    """Key of the reference solution (for `efficiency`)."""


class ModelReward(RewardBase):
    kind: Literal["model"]
    """The score of a reward model: a sequence classifier with one output, or a causal model with a value head."""
    path: PathText
    """Folder in Hugging Face layout, or a name on the hub."""
    tokenizer: PathText | None = None
    """Folder or name of the tokenizer; by default the model's own."""
    template: Literal["chat", "plain", "pair"] = "chat"
    """How prompt and response become one input: by the tokenizer's chat template (the prompt is one message of the
    user), one text right after the other, or as a pair, which models like BERT are trained on."""
    max_length: int = Field(4096, ge=1)
    """Longest prompt and response together, in tokens; a longer one is a failed score."""
    tokens_per_batch: int = Field(16384, ge=1)
    """Most tokens of one batch, padding counted."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the reward model runs."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights."""
    correct_above: float | None = None
    """A response is correct if its score is above this; null: right and wrong are left open."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one batch; then its scores have failed."""

    @model_validator(mode="after")
    def _longest_text_fits(self) -> ModelReward:
        if self.max_length > self.tokens_per_batch:
            raise Problems(
                [
                    f"tokens_per_batch: {self.tokens_per_batch} cannot hold one text of max_length={self.max_length}; "
                    f"use {self.max_length} or more"
                ]
            )
        return self


class JudgeReward(RewardBase):
    FILES: ClassVar[tuple[str, ...]] = ("rubric",)

    kind: Literal["judge"]
    """The grade that a language model behind an OpenAI-compatible endpoint gives."""
    url: str
    """Base address of the endpoint, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model there."""
    rubric: PathText | None = None
    """File with the message to the judge, beside the recipe: a Jinja template over `prompt`, `response`, `answer`,
    `meta` (the row's other keys), `scale` and `fence` (a line that the response cannot hold, to put around it). It must
    ask for a last line `Grade: N`. Null: a built-in one."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the endpoint."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest grade that the rubric asks for; a grade outside is no grade."""
    correct_at: float | None = None
    """A response is correct if its grade is at least this; null: right and wrong are left open."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(1024, ge=1)
    """Longest answer of the judge."""
    retries: int = Field(8, ge=0)
    """Times that a call is made again when it failed, with pauses that grow from 1 s to 30 s; when its answer holds no
    grade, at most twice and without a pause."""
    concurrency: int = Field(16, ge=1)
    """Calls at once."""
    cache: PathText | None = None
    """Folder of answers that are kept, so that the same question is asked once; null: none are kept."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time for one call."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        _check_address(value, "http://127.0.0.1:8000/v1", "api_key_env")
        return value

    @model_validator(mode="after")
    def _grades_are_on_the_scale(self) -> JudgeReward:
        low, high = self.scale
        if low >= high:
            raise Problems([f"scale: the lowest grade {low:g} must be below the highest {high:g}, as in [0, 10]"])
        if self.correct_at is not None and not low <= self.correct_at <= high:
            raise Problems(
                [f"correct_at: {self.correct_at:g} is not on the scale; use a grade from {low:g} to {high:g}, or null"]
            )
        return self


class RemoteReward(RewardBase):
    """A reward that another program computes and serves over HTTP. ``TAKES_QUERY``: whether the address may end with
    one; to that of most kinds, paths are added."""

    TAKES_QUERY: ClassVar[bool] = False

    url: str
    """Address of the server."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the server."""
    responses_per_call: int = Field(32, ge=1)
    """Most responses in one request. Those that wait are sent together; none waits for others."""
    concurrency: int = Field(16, ge=1)
    """Requests at once."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one request; after it the request is made again."""
    give_up_after_s: float = Field(600.0, gt=0)
    """How long a score is asked for again (with growing pauses) while the server is down, busy or answers with an
    error. Then it has failed."""
    hedge_after_s: float | None = Field(None, gt=0)
    """Ask a second time in parallel when a request takes longer than this, and take the answer that is first."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        _check_address(value, "http://127.0.0.1:8000", "token_env", query=cls.TAKES_QUERY)
        return value


class ServerReward(RemoteReward):
    kind: Literal["server"]
    """A `dapo reward-server`."""


class HttpReward(RemoteReward):
    TAKES_QUERY: ClassVar[bool] = True

    kind: Literal["http"]
    """A service of the user's own: a POST of JSON, and JSON that comes back."""
    request: dict[str, Any] = Field(default_factory=lambda: {"items": ["$item"]})
    """The body. `$prompt`, `$response`, `$answer` and `$meta` (or `$meta.KEY`) are the fields of a response, `$item`
    all of them; they may also stand inside of text. In a list, an element that holds one stands for every response of
    the batch. With fields outside of lists a request is for one response (`responses_per_call: 1`)."""
    results: str = "results"
    """Where the list of results (one for each response, in order) stands in the reply; dots lead into mappings, empty
    for the reply itself. Where the request has no list, the one result itself stands there."""
    value: str = ""
    """Where the reward stands in a result: a number, a bool or a dict as a reward function returns; empty: the result
    itself."""

    @field_validator("request")
    @classmethod
    def _can_be_filled(cls, value: dict[str, Any]) -> dict[str, Any]:
        for problem in not_json(value):
            raise ValueError(problem)
        _check_fields(value)
        return value

    @model_validator(mode="after")
    def _holds_a_batch(self) -> HttpReward:
        if self.responses_per_call > 1 and not all(in_list for _, in_list in fields_of(self.request)):
            raise Problems(
                [
                    "request: fields outside of a list make it a request for one response; set responses_per_call=1 or "
                    'put what is said of each response into a list, as in {"items": ["$item"]}'
                ]
            )
        return self


class KServeReward(RemoteReward):
    kind: Literal["kserve"]
    """A model behind the Open Inference Protocol (KServe V2, as Triton Inference Server speaks it); needs
    `dapo-rl[kserve]`."""
    model: str
    """Name of the model."""
    version: str = ""
    """Its version; empty: the server's choice."""
    inputs: dict[str, str] = Field(default_factory=lambda: {"prompt": "$prompt", "response": "$response"})
    """Input tensors (BYTES, one row a response) by name: which field each is filled with, as in kind `http`."""
    output: str = "reward"
    """Output tensor that holds the rewards, one for each response."""
    correct: str | None = None
    """Output tensor that holds right and wrong; null: left open."""

    @field_validator("inputs")
    @classmethod
    def _can_be_filled(cls, value: dict[str, str]) -> dict[str, str]:
        _check_fields(value)
        return value


class Part(Section):
    """One part of a reward that is put together. Its value is what its reward gave, after `from_range` and `clip`. It
    passes where it is right, or, if it knows no right and wrong, where its value is above `passes_at`."""

    reward: PlainReward | None = None
    """What scores it: a reward of any other kind, with its own time limit and its own policy for failed scores. With
    `on_error` = `drop` a failed part leaves the whole without a verdict; with `value`, `error_value` stands in for what
    it would have given, it is not right, and `NAME/failed` among the parts tells how often. If its share of failed
    scores exceeds its `max_error_rate`, the run stops."""
    of: str | None = None
    """In place of a reward: PART/KEY, the part KEY of what the reward of another part gave, such as `solved/style`. It
    knows no right and wrong; where the other one failed or was not computed, it is 0 and does not pass."""
    weight: float = 1.0
    """Its factor in the sum; with 0 it is measured only. (With `tiers`: 0 for a part outside of them, else 1.)"""
    only_if: str | None = None
    """Name of another part: this one counts only where that one passes. Elsewhere it is 0, is not right, and is not
    computed."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value; what is beyond is cut."""
    from_range: tuple[float, float] | None = None
    """Map this range of values to 0..1 (before `clip`; values outside of it go beyond), such as [-1, 1] for the kinds
    `math` and `code`."""
    passes_at: float = 0.0
    """The value above which it passes, where it knows no right and wrong: for `tiers` and `only_if`."""

    @field_validator("clip", "from_range")
    @classmethod
    def _low_is_below_high(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the first must be below the second, such as [0, 1]")
        return value


class ComposeReward(RewardBase):
    kind: Literal["compose"]
    """Several rewards put together: a weighted sum, or ordered tiers. The value is the sum of weight x value over the
    parts, or what `tiers` say."""
    parts: dict[str, Part] = Field(min_length=1)
    """The parts by name. Each one appears in the metrics and in the stored samples with its value (before its weight),
    and its own parts as NAME/PART."""
    correct: str | None = None
    """The part that says whether a response is correct; null: right and wrong are left open. The answer that it took
    from the response is shown as that of the whole."""
    tiers: list[str] | None = Field(None, min_length=1)
    """In place of a sum: parts in order, such as format, correctness, quality. A part counts only if all before it
    pass. With n tiers, of which the first t pass, the value is 2 (t + s) / n - 1, where s is the value of the next one,
    cut to 0..1: between -1 (nothing of the first) and 1. The last tier is graded in this way too, unless it is right,
    which is 1."""
    timeout_s: float = Field(3600.0, gt=0)
    """Longest time for all parts of one response, waiting for a free worker or server included. Each part has its own
    limit for the work itself."""

    @property
    def rewards(self) -> dict[str, PlainReward]:
        """The rewards of those parts that have one of their own."""
        return {name: part.reward for name, part in self.parts.items() if part.reward is not None}

    @model_validator(mode="after")
    def _parts_fit_together(self) -> ComposeReward:
        problems = list(compose_problems(self))
        if problems:
            raise Problems(problems)
        return self


_Plain = (
    MathReward | ExactReward | FunctionReward | CodeReward | ModelReward | JudgeReward | ServerReward | HttpReward
) | KServeReward
PlainReward = Annotated[_Plain, Field(discriminator="kind")]
"""A reward that is not put together from others."""

RewardConfig = Annotated[_Plain | ComposeReward, Field(discriminator="kind")]

Part.model_rebuild()
ComposeReward.model_rebuild()


class MonitorConfig(Section):
    """Watching for reward hacking."""

    check: RewardConfig | None = None
    """A second reward that is never trained on, such as another verifier: the held-out check."""
    share: float = Field(0.25, gt=0, le=1)
    """Share of the samples that it scores."""
    window: int = Field(5, ge=1)
    """Rollout steps that are averaged, at the start of the run and now, before anything is said."""
    max_false_right: float = Field(0.2, ge=0, le=1)
    """Share of the responses that the reward calls right and the check calls wrong above which an alarm is raised."""
    max_divergence: float = Field(1.0, gt=0)
    """How much more the reward may rise than the check, each in its own standard deviations at the start."""
    max_length_correlation: float = Field(0.7, ge=0, le=1)
    """Correlation of reward and length within groups above which lengths that move the same way raise an alarm."""


REWARD_KINDS: dict[str, type[RewardBase]] = {
    str(get_args(kind.model_fields["kind"].annotation)[0]): kind for kind in get_args(_Plain | ComposeReward)
}
"""The classes of the union, by the value of ``kind``."""


def plain_rewards(reward: RewardBase) -> Iterator[RewardBase]:
    """The rewards that ``reward`` is put together from, or itself."""
    if isinstance(reward, ComposeReward):
        yield from reward.rewards.values()
    else:
        yield reward


FIELD = re.compile(r"\$(?:(?:item|prompt|response|answer|finish_reason|prompt_end)\b|meta\b(?:\.\w+)*)")
"""A field of a response in the template of a request to a server."""


def fields_of(template: Any, in_list: bool = False) -> Iterator[tuple[str, bool]]:
    """The fields that a request to a server is made from, each with whether it stands in a list."""
    if isinstance(template, str):
        for found in FIELD.finditer(template):
            yield found[0], in_list
    elif isinstance(template, list):
        for element in template:
            yield from fields_of(element, True)
    elif isinstance(template, dict):
        for element in template.values():
            yield from fields_of(element, in_list)


def _check_address(url: str, example: str, key: str, *, query: bool = False) -> None:
    """``key``: of the recipe, which names the environment variable with a login. ``query``: whether it may hold one.
    Raises ValueError: it is no address, or holds a login, or a query that it may not hold."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # raises for what cannot be the name of a host
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"must be the address of a server, such as {example}")
    if "@" in parts.netloc:
        raise ValueError(f"must hold no user and password; put a token into the environment and name it ({key})")
    if not query and ("?" in url or "#" in url):
        raise ValueError(f"must hold no query; put a key into the environment and name it ({key})")


def _check_fields(template: dict[str, Any]) -> None:
    """Raises ValueError: it has a field that there is not, or does not send the response."""
    known = "known are $item, $prompt, $response, $answer, $finish_reason, $prompt_end, $meta and $meta.KEY"
    unknown = re.search(r"\$[A-Za-z_]\w*", FIELD.sub("", json.dumps(template)))
    if unknown:
        raise ValueError(f"{unknown[0]} is no field of a response; {known}")
    if not any(name in ("$item", "$response") for name, _ in fields_of(template)):
        raise ValueError(f"must send the response; {known}")
