"""The ``data`` section, and the files and data sets that are named in it."""

from __future__ import annotations

import os
import re
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from dapo.config.section import JsonMapping, Named, PathText, Section, check_address

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = (".jsonl", ".json", ".ndjson", ".parquet", ".txt", ".gz", ".zst")


class DataItem(Section):
    """One file or data set. In a recipe its path alone will do; otherwise a mapping with these keys."""

    path: PathText
    """File (JSON lines or JSON array, also .gz and .zst; Parquet), folder of a saved data set, a name on the hub, or a
    program: `reasoning_gym:TASK?size=5000&seed=1`, `file.py:function?size=5000`."""
    name: str | None = None
    """Which of several data sets under one name on the hub."""
    split: str | None = None
    """Split of a data set; by default `train`, or the only one."""
    weight: float | None = Field(None, gt=0)
    """Share of the draws, relative to the other items (for all items or for none)."""
    prompt_key: str | None = None
    """In place of data.prompt_key."""
    answer_key: str | None = None
    """In place of data.answer_key."""
    unique: bool | None = None
    """Leave out rows that repeat prompt and answer of an earlier one. By default in Parquet files of verl's layout, as
    the published DAPO-Math-17k and AIME-2024 hold each row many times."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"path": value}
        known = cls.model_fields
        if not isinstance(value, dict):
            raise ValueError("must be a file's name, or a mapping such as {path: rows.jsonl, weight: 2}")
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            raise ValueError(f"unknown key {', '.join(unknown)}; an item may have {', '.join(known)}")
        return value

    @model_serializer(mode="wrap")
    def _written_as_short_as_it_can_be(self, handler: SerializerFunctionWrapHandler) -> Any:
        given = {key: value for key, value in handler(self).items() if value is not None}
        return self.path if given.keys() == {"path"} else given


def _one_item_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict | DataItem) else [] if value is None else value


Rate = Annotated[float, Field(gt=0, lt=1)]
Files = Annotated[list[DataItem], BeforeValidator(_one_item_is_a_list)]
"""Files and data sets; one alone may be written without brackets."""


NO_VARIABLES = frozenset(
    {
        *("conversation", "messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("tokenizer_kwargs", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "strftime_now", "raise_exception"),
    }
)
"""Names that a chat template is given by the program itself, or that are no variables of a template."""


class WritingConfig(Section):
    WRITING: ClassVar = ("template", "chat_template", "chat_template_kwargs", "today", "instruction", "system")
    """Keys that say how a row becomes a prompt."""
    template: Literal["plain", "chat", "dapo"] = "chat"
    """How a row becomes a prompt: `plain` (as it stands), `chat` (the tokenizer's chat template), `dapo` (the "Answer:"
    instruction of the paper's training data around it, then the chat template). For a tokenizer without a chat template
    (a base model) `chat` is refused, and `dapo` writes plain text."""
    chat_template: PathText | None = None
    """File with a chat template (Jinja) to use in place of the tokenizer's own, beside the recipe."""
    chat_template_kwargs: JsonMapping = Field(default_factory=dict)
    """Variables of the chat template, such as `{enable_thinking: false}` for Qwen3. One that it does not have is
    refused."""
    today: date | None = None
    """What a chat template that writes the date (Llama 3's) takes for today. By default the day on which a run starts;
    its config.yaml keeps it, so that prompts stay the same."""
    instruction: str = ""
    """Text put after every prompt (templates `plain` and `chat`)."""
    system: str | None = None
    """System message (templates `chat` and `dapo`)."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables_of_a_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := NO_VARIABLES & value.keys():
            raise ValueError(f"{', '.join(sorted(taken))}: is set by the program, and cannot be given; leave it out")
        return value


class LiveConfig(Section):
    path: PathText | None = None
    """Growing file of JSON lines with prompts and feedback by id; it need not exist yet. null: off."""
    share: float = Field(0.25, gt=0, lt=1)
    """Share of the draws that go to such prompts, as long as some wait."""
    expire_s: float = Field(86400.0, gt=0)
    """Seconds after which a prompt, and feedback on it, is stale and dropped."""


class ProposerConfig(Section):
    url: str | None = None
    """Base address of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1. null: off."""
    model: str = "proposer"
    """Name of the model there."""
    token_env: str | None = None
    """Environment variable that holds the key of the endpoint."""
    share: float = Field(0.1, gt=0, lt=1)
    """Share of the draws that go to proposals, as long as some wait."""
    verify: Named | None = None
    """Function of yours, given prompt and answer, that says whether the answer is right. null: the model has to come to
    its answer again, twice."""
    feed: PathText | None = None
    """File that prompt, answer, pass rate and reward of each proposal are appended to, to train the proposer on."""
    max_requests: int = Field(10_000, ge=1)
    """Requests for proposals in the whole run."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time of one request."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            check_address(value, "http://127.0.0.1:8000/v1", "token_env")
        return value and value.rstrip("/")


class DataConfig(WritingConfig):
    train: Files = Field(default_factory=list)
    """What to train on: files (JSON lines or JSON arrays, plain, .gz or .zst; Parquet), folders of saved data sets, or
    names on the hub. An item is a path, or a mapping with `path` and, as needed, `name` and `split` (of a data set),
    `prompt_key`, `answer_key` and `weight`. With weights the items are a mixture, each drawn from in that proportion;
    without, they follow one another. Relative paths are looked up beside the recipe, then in the working folder."""
    source: Named | None = None
    """A prompt source of yours, such as a curriculum, that is put around the prompts of `train` and gives the next one.
    By default they are drawn as `shuffle` and weights say."""
    live: LiveConfig = Field(default_factory=LiveConfig)
    """Prompts that arrive while the run goes on."""
    proposer: ProposerConfig = Field(default_factory=ProposerConfig)
    """A language model that makes up prompts which the policy half solves."""
    prompt_key: str = "prompt"
    """Key of the prompt in a row: text, or a list of chat messages. Dots lead into mappings."""
    answer_key: str = "answer"
    """Key of the reference answer in a row. Dots lead into mappings. Where a row has no `answer`, the
    `reward_model.ground_truth` of verl's Parquet files is taken."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row that cannot be used (not JSON, no prompt, no answer): stop and name it, or name it and go on without it.
    Rows to evaluate on are never skipped."""
    max_bad_rows: float = Field(0.01, ge=0, le=1)
    """Share of bad rows above which `skip` stops too."""
    max_prompt_length: int = Field(2048, ge=1)
    """Longest prompt in tokens, template included. Longer ones are skipped and counted in training; an evaluation
    leaves none out."""
    shuffle: bool = True
    """Draw rows in a seeded random order, another one each epoch. Off: in the order of the files."""
    sampling: Literal["uniform", "difficulty"] = "uniform"
    """Which prompts are drawn: each once in a pass over the rows (`uniform`), or those that are likely to give right
    and wrong samples (`difficulty`), by a posterior of each prompt's pass rate. Other prompts weigh more then, which
    changes the objective."""
    sampling_floor: float = Field(0.1, gt=0, le=1)
    """Share of `difficulty`'s draws that is uniform: no prompt is forgotten."""
    sampling_half_life: float = Field(20.0, gt=0)
    """Policy versions after which what is known of a prompt's pass rate counts half."""
    sampling_target: tuple[Rate, Rate, Annotated[int, Field(ge=1)]] = (0.5, 0.5, 1)
    """Pass rate that `difficulty` prefers: at the start, at the end, and how many policy versions lie between;
    `[0.8, 0.5, 100]` goes from easy to hard."""
    shuffle_answers: bool = False
    """Control experiment: permute the answers over the training rows. What is still learned is not from the reward."""

    @field_validator("train")
    @classmethod
    def _all_weights_or_none(cls, value: list[DataItem]) -> list[DataItem]:
        without = [item.path for item in value if item.weight is None]
        if without and len(without) < len(value):
            raise ValueError(f"some items have a weight, but {', '.join(without)} has none; give all one, or none")
        return value


def names_a_data_set(item: DataItem) -> bool:
    if os.path.isdir(item.path):  # noqa: PTH112  (Path.is_dir raises for a name that is too long)
        return True
    if os.path.exists(item.path):  # noqa: PTH110
        return False
    looks_like_a_file = item.path.endswith(_FILE)
    named = item.name is not None or item.split is not None
    return not looks_like_a_file and (named or _HUB_NAME.fullmatch(item.path) is not None)
