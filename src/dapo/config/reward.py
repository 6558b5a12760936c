"""The kinds of reward that are not put together from others: one class for each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from dapo.config.section import JsonMapping, PathText, Section, check_address

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


def _sends_the_response(template: Any) -> Any:
    known = "known are $item, $prompt, $response, $answer, $finish_reason, $prompt_end, $meta and $meta.KEY"
    unknown = re.search(r"\$[A-Za-z_]\w*", FIELD.sub("", json.dumps(template)))
    if unknown:
        raise ValueError(f"{unknown[0]} is no field of a response; {known}")
    if not any(name in ("$item", "$response") for name, _ in fields_of(template)):
        raise ValueError(f"must send the response; {known}")
    return template


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
    args: JsonMapping = Field(default_factory=dict)
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
    """The score of a reward model: a sequence classifier with one output."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the reward model runs. auto: on a GPU, if PyTorch finds one."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights."""
    correct_above: float | None = None
    """A response is correct if its score is above this; null: right and wrong are left open."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one batch; then its scores have failed."""

    def problems(self) -> Iterator[str]:
        if self.max_length > self.tokens_per_batch:
            yield (
                f"tokens_per_batch: {self.tokens_per_batch} cannot hold one text of max_length={self.max_length}; "
                f"use {self.max_length} or more"
            )


class RemoteReward(RewardBase):
    """A reward that another program computes and serves over HTTP. ``EXAMPLE``: of an address. ``TAKES_QUERY``: whether
    the address may end with one; to that of most kinds, paths are added."""

    EXAMPLE: ClassVar[str] = "http://127.0.0.1:8000"
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

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        check_address(value, cls.EXAMPLE, "token_env", query=cls.TAKES_QUERY)
        return value


class JudgeReward(RemoteReward):
    FILES: ClassVar[tuple[str, ...]] = ("rubric",)
    EXAMPLE: ClassVar[str] = "http://127.0.0.1:8000/v1"

    kind: Literal["judge"]
    """The grade that a language model behind an OpenAI-compatible endpoint gives."""
    model: str
    """Name of the model there."""
    rubric: PathText | None = None
    """File with the message to the judge, beside the recipe: a Jinja template over `prompt`, `response`, `answer`,
    `meta` (the row's other keys), `scale` and `fence` (a line that the response cannot hold, to put around it). It must
    ask for a last line `Grade: N`. Null: a built-in one."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest grade that the rubric asks for; a grade outside is no grade."""
    correct_at: float | None = None
    """A response is correct if its grade is at least this; null: right and wrong are left open."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(1024, ge=1)
    """Longest answer of the judge."""
    cache: PathText | None = None
    """Folder of answers that are kept, so that the same question is asked once; null: none are kept."""
    responses_per_call: Literal[1] = 1
    """Each question is asked by itself."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time for one question; after it the question is asked again."""

    def problems(self) -> Iterator[str]:
        low, high = self.scale
        if low >= high:
            yield f"scale: the lowest grade {low:g} must be below the highest {high:g}, as in [0, 10]"
        elif self.correct_at is not None and not low <= self.correct_at <= high:
            yield (
                f"correct_at: {self.correct_at:g} is not on the scale; use a grade from {low:g} to {high:g}, or null"
            )


class ServerReward(RemoteReward):
    kind: Literal["server"]
    """A `dapo reward-server`."""


class HttpReward(RemoteReward):
    TAKES_QUERY: ClassVar[bool] = True

    kind: Literal["http"]
    """A service of the user's own: a POST of JSON, and JSON that comes back."""
    request: Annotated[JsonMapping, AfterValidator(_sends_the_response)] = Field(
        default_factory=lambda: {"items": ["$item"]}
    )
    """The body. `$prompt`, `$response`, `$answer` and `$meta` (or `$meta.KEY`) are the fields of a response, `$item`
    all of them; they may also stand inside of text. In a list, an element that holds one stands for every response of
    the batch. With fields outside of lists a request is for one response (`responses_per_call: 1`)."""
    results: str = "results"
    """Where the list of results (one for each response, in order) stands in the reply; dots lead into mappings, empty
    for the reply itself. Where the request has no list, the one result itself stands there."""
    value: str = ""
    """Where the reward stands in a result: a number, a bool or a dict as a reward function returns; empty: the result
    itself."""

    def problems(self) -> Iterator[str]:
        if self.responses_per_call > 1 and not all(in_list for _, in_list in fields_of(self.request)):
            yield (
                "request: fields outside of a list make it a request for one response; set responses_per_call=1 or "
                'put what is said of each response into a list, as in {"items": ["$item"]}'
            )


class KServeReward(RemoteReward):
    kind: Literal["kserve"]
    """A model behind the Open Inference Protocol (KServe V2, as Triton Inference Server speaks it)."""
    model: str
    """Name of the model."""
    version: str = ""
    """Its version; empty: the server's choice."""
    inputs: Annotated[dict[str, str], AfterValidator(_sends_the_response)] = Field(
        default_factory=lambda: {"prompt": "$prompt", "response": "$response"}
    )
    """Input tensors (BYTES, one row a response) by name: which field each is filled with, as in kind `http`."""
    output: str = "reward"
    """Output tensor that holds the rewards, one for each response."""
    correct: str | None = None
    """Output tensor that holds right and wrong; null: left open."""


Plain = (
    MathReward | ExactReward | FunctionReward | CodeReward | ModelReward | JudgeReward | ServerReward | HttpReward
) | KServeReward
PlainReward = Annotated[Plain, Field(discriminator="kind")]
"""A reward that is not put together from others."""
