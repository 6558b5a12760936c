"""The ``reward`` section: one class for each kind of reward, and those that are put together from others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from dapo.config.section import PathText, Section


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

    workers: int = Field(2, ge=1)
    """Processes that score responses."""


class MathReward(WorkerReward):
    kind: Literal["math"] = "math"
    """+1 if the final answer is mathematically equal to the reference, -1 otherwise (Eq. 7)."""
    extract: list[Literal["boxed", "answer_line"]] = Field(["boxed", "answer_line"], min_length=1)
    """Rules that find the final answer, in order: the last complete \\boxed{}, the last "Answer:" line."""
    memory_mb: int = Field(1024, ge=128)
    """Memory in MiB that one scoring process may take beyond what it holds after its start."""


class ExactReward(WorkerReward):
    kind: Literal["exact"]
    """+1 if the answer text equals the reference after trimming white space, -1 otherwise."""
    after: str | None = None
    """The answer is what follows the last occurrence of this text; without it, the whole response."""


class FunctionReward(WorkerReward):
    FILES: ClassVar[tuple[str, ...]] = ("function",)

    kind: Literal["function"]
    """The user's own function."""
    function: PathText
    """`package.module:name`, or `file.py:name` with the file beside the recipe (or in the working folder)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the function."""

    @field_validator("args")
    @classmethod
    def _args_can_be_written_down(cls, value: dict[str, Any]) -> dict[str, Any]:
        for problem in _not_json(value):
            raise ValueError(problem)
        return value


class CodeReward(WorkerReward):
    kind: Literal["code"]
    """Runs the program in the response against the row's tests, in a sandbox. Python."""
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
    """Longest time for one test."""
    memory_mb: int = Field(1024, ge=64)
    """Memory in MiB that one program may take."""
    max_processes: int = Field(32, ge=1)
    """Processes and threads of one program."""
    max_output_kb: int = Field(1024, ge=1)
    """Output in KiB of one test; beyond, the test fails."""
    scratch_mb: int = Field(64, ge=1)
    """Size in MiB of the folder that a program may write to."""
    parts: list[Literal["compiles", "style", "efficiency"]] = Field(default_factory=list)
    """What to measure beside the tests, each between 0 and 1: it compiles; a linter has nothing to say (needs
    `dapo[code]`); its time and memory beside those of the row's reference solution."""
    solution_key: str = "solution"
    """Key of the reference solution (for `efficiency`)."""


class ModelReward(RewardBase):
    kind: Literal["model"]
    """The score of a reward model: a sequence classifier with one output, or a causal model with a value head."""
    path: PathText
    """Folder in Hugging Face layout, or a name on the hub."""
    tokenizer: PathText | None = None
    """Folder or name of the tokenizer; by default the model's own."""
    template: Literal["chat", "plain"] = "chat"
    """How prompt and response become one text: by the tokenizer's chat template, or one after the other."""
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


class JudgeReward(RewardBase):
    FILES: ClassVar[tuple[str, ...]] = ("rubric",)

    kind: Literal["judge"]
    """The grade that a language model behind an OpenAI-compatible endpoint gives."""
    url: str
    """Base address of the endpoint, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model there."""
    rubric: PathText | None = None
    """File with the message to the judge (Jinja: prompt, response, answer and the row's other keys), beside the recipe;
    null: a built-in one."""
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
    retries: int = Field(4, ge=0)
    """Times that a call is made again when it failed or its answer holds no grade."""
    concurrency: int = Field(16, ge=1)
    """Calls at once."""
    cache: PathText | None = None
    """Folder of answers that are kept, so that the same question is asked once; null: none are kept."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time for one call."""


class RemoteReward(RewardBase):
    """A reward that another program computes and serves over HTTP."""

    url: str
    """Address of the server."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the server."""
    batch_size: int = Field(32, ge=1)
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


class ServerReward(RemoteReward):
    kind: Literal["server"]
    """A `dapo reward-server`."""


class HttpReward(RemoteReward):
    kind: Literal["http"]
    """A service of the user's own: a POST of JSON, and JSON that comes back."""
    request: dict[str, Any] = Field(default_factory=lambda: {"items": ["$item"]})
    """The body. In a list, an element that holds `$item` stands for every response of the batch; `$prompt`,
    `$response`, `$answer` and `$meta` (or `$meta.KEY`) are its fields, `$item` all of them."""
    results: str = "results"
    """Where the list of results (one for each response, in order) stands in the reply; dots lead into mappings, empty
    for the reply itself."""
    value: str = ""
    """Where the reward stands in a result: a number, a bool or a dict as a reward function returns; empty: the result
    itself."""


class KServeReward(RemoteReward):
    kind: Literal["kserve"]
    """A model behind the Open Inference Protocol (KServe V2, as Triton Inference Server speaks it); needs
    `dapo[kserve]`."""
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


class Part(Section):
    """One part of a reward that is put together."""

    reward: PlainReward
    """What scores it: a reward of any other kind, with its own time limit and its own policy for failed scores."""
    weight: float = 1.0
    """Its factor in the sum (without `tiers`)."""
    only_if: str | None = None
    """Name of another part: this one counts only where that one is right (or above 0, if it knows no right and
    wrong); elsewhere it is 0 and is not computed."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value; what is beyond is cut."""
    from_range: tuple[float, float] | None = None
    """Map this range of values to 0..1 (before `clip`; values outside of it go beyond)."""
    passes_at: float = 0.0
    """In `tiers`: the value above which the tier is passed, where the part knows no right and wrong."""


class ComposeReward(RewardBase):
    kind: Literal["compose"]
    """Several rewards put together: a weighted sum, or ordered tiers."""
    parts: dict[str, Part] = Field(min_length=1)
    """The parts by name. Each one appears in the metrics and in the stored samples."""
    correct: str | None = None
    """The part that says whether a response is correct; null: right and wrong are left open."""
    tiers: list[str] | None = None
    """In place of a sum: parts in order, such as format, correctness, quality. A part counts only if all before it are
    passed; the value is the share of the way, between -1 (not even the first) and 1."""


_Plain = (
    MathReward | ExactReward | FunctionReward | CodeReward | ModelReward | JudgeReward | ServerReward | HttpReward
) | KServeReward
PlainReward = Annotated[_Plain, Field(discriminator="kind")]
"""A reward that is not put together from others."""

RewardConfig = Annotated[_Plain | ComposeReward, Field(discriminator="kind")]

Part.model_rebuild()
ComposeReward.model_rebuild()

REWARD_KINDS: dict[str, type[RewardBase]] = {
    str(get_args(kind.model_fields["kind"].annotation)[0]): kind for kind in get_args(_Plain | ComposeReward)
}
"""The classes of the union, by the value of ``kind``."""


def plain_rewards(reward: RewardBase) -> Iterator[RewardBase]:
    """The rewards that ``reward`` is put together from, or itself."""
    if isinstance(reward, ComposeReward):
        yield from (part.reward for part in reward.parts.values())
    else:
        yield reward


def _not_json(value: Any, key: str = "") -> Iterator[str]:
    """What in ``value`` a run folder cannot hold: all but text, numbers, true, false, null, lists and mappings."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                yield f"{key}: the key {name!r} must be text; put it in quotes"
            yield from _not_json(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _not_json(item, f"{key}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: must be a finite number"
    elif isinstance(value, str) and not value.isprintable():
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"{key}: holds half of a letter, which cannot be written as UTF-8"
    elif not isinstance(value, str | int | float | None):
        yield f"{key}: holds a {type(value).__name__}, where text, a number, a list or a mapping can stand"
