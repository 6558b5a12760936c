"""One rollout step as it lies in the run folder, as the records that went through training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dapo.errors import UserError
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import (
    STATUSES,
    TokenArrays,
    checksum,
    episode_of,
    read_samples,
    samples_path,
    tokens_path,
    updates_path,
)
from dapo.records import FinishReason, Group, Prompt, Reward, Sample
from dapo.util.differences import shown
from dapo.util.files import read_json

_Number = Annotated[float, Field(ge=-1e38, le=1e38)]  # of a size that float32 holds
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Length = Annotated[int, Field(ge=0, lt=2**31)]


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Line(_Stored):
    """A line of ``samples/step-NNNNN.jsonl``."""

    draw: _Count
    row: _Count
    index: _Count
    length: _Length
    prompt: str
    response: str
    status: Literal[tuple(STATUSES)]  # type: ignore[valid-type]
    finish_reason: FinishReason
    gold: str | None
    error: str | None
    extracted: str | None
    correct: bool | None
    reward: _Number | None
    shaped_reward: _Number | None
    advantage: _Number | None
    in_loss: bool
    parts: dict[str, _Number | None]


class _Mismatch(_Stored):
    tokens: _Length = 0
    absolute_sum: _Number | None = None


class _Report(_Stored):
    loss: _Number | None
    grad_norm: _Number | None
    learning_rate: _Number | None
    tokens: _Length
    response_tokens: _Length
    loss_tokens: _Length
    skipped: str | None
    statistics: dict[str, Annotated[list[_Number | None], Field(min_length=2, max_length=2)]] = {}  # sum and count
    mismatch: _Mismatch = _Mismatch()


def check_sample(line: Mapping[str, Any], place: str) -> None:
    """``line``: of a file of samples.
    Raises UserError: it is not that of a sample: names place, keys, what they should be and what they are."""
    _check(_Line, line, place)
    for key, needed, why in (
        ("reward", line["error"] is None, "scored"),
        ("advantage", line["in_loss"], "in the loss"),
    ):
        if needed and line[key] is None:
            _refuse(f"{key}: should be a number, as the sample was {why}, found null", place)


def _check(kind: type[_Stored], values: Any, place: str) -> None:
    try:
        kind.model_validate(values)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}, found {shown(e['input'], 40)}" for e in error.errors())
        _refuse("; ".join(wrong), place)


def _refuse(wrong: str, place: str) -> NoReturn:
    raise UserError(f"{place}: {wrong}; the file was changed after the run wrote it") from None


@dataclass(frozen=True, slots=True)
class StoredStep:
    """``groups``: all of the step, each with its status, in the order of the file; samples carry what was recorded of
    reward, shaped reward and advantage. ``reports``: of the updates, as JSON. ``faults``: where tokens, or what is said
    of them, were changed after they were written."""

    step: int
    groups: tuple[tuple[Group, str], ...]
    reports: list[dict[str, Any]]
    faults: tuple[tuple[int, int, str], ...]

    @property
    def trained(self) -> list[Group]:
        return [group for group, status in self.groups if status == "kept"]


def read_step(folder: RunFolder, step: int) -> StoredStep:
    """Raises UserError: a file is damaged, or is not of the same step as the others."""
    path = samples_path(folder.samples, step)
    lines = read_samples(path)
    for number, line in enumerate(lines, start=1):
        check_sample(line, f"{path}:{number}")
    twice = [name for name, times in Counter((line["draw"], line["index"]) for line in lines).items() if times > 1]
    if twice:
        draw, index = twice[0]
        raise UserError(f"{path}: sample {draw}:{index} is there twice; the file was changed after the run wrote it")
    file = tokens_path(folder.samples, step)
    arrays = TokenArrays.read(file)
    if arrays.lengths.tolist() != [line["length"] for line in lines]:
        raise UserError(f"{file}: holds other samples than {path.name}: their number or lengths differ")
    groups, faults = _groups(lines, arrays, str(file))
    return StoredStep(step, groups, _reports(folder, step), faults)


def differing_texts(stored: StoredStep, decode: Callable[[Sequence[int]], str]) -> list[tuple[int, int, str]]:
    """Draw, index and what is wrong of each sample whose tokens do not say what its text says."""
    return [
        (group.draw, sample.index, "its tokens do not decode to its response")
        for group, _ in stored.groups
        for sample in group.samples
        if (sample.token_ids < 0).any() or decode(sample.token_ids.tolist()) != sample.text
    ]


def _reports(folder: RunFolder, step: int) -> list[dict[str, Any]]:
    path = updates_path(folder.samples, step)
    try:
        found: list[dict[str, Any]] = read_json(path)
        if not isinstance(found, list):
            raise ValueError("expected a list of reports")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the reports of a step's updates: {error}") from None
    for number, report in enumerate(found):
        _check(_Report, report, f"{path}: update {number}")
    return found


def _groups(
    lines: Sequence[Mapping[str, Any]], arrays: TokenArrays, file: str
) -> tuple[tuple[tuple[Group, str], ...], tuple[tuple[int, int, str], ...]]:
    blocks = [list(block) for _, block in groupby(lines, key=lambda line: line["draw"])]
    if len(arrays.prompt_lengths) != len(blocks):
        raise UserError(f"{file}: holds {len(arrays.prompt_lengths)} groups where the samples are of {len(blocks)}")
    groups, faults = [], []
    number = token = prompt_token = 0
    for place, block in enumerate(blocks):
        size = int(arrays.prompt_lengths[place])
        prompt = arrays.prompt_ids[prompt_token : prompt_token + size]
        prompt_token += size
        samples = []
        for line in block:
            span = slice(token, token + line["length"])
            numbers = arrays.token_ids[span], arrays.logprobs[span], arrays.versions[span]
            if checksum(prompt, *numbers) != int(arrays.checksums[number]):
                faults.append((line["draw"], line["index"], "its stored tokens were changed: their checksum differs"))
            samples.append(_sample(line, *numbers))
            versions = [*(samples[-1].version_range or ())]
            if line.get("versions", versions) != versions:
                faults.append((line["draw"], line["index"], f"its versions are not those of its tokens, {versions}"))
            number, token = number + 1, span.stop
        first = block[0]
        ids = tuple(int(token_id) for token_id in prompt)
        group = Group(first["draw"], Prompt(first["row"], first["prompt"], ids, first["gold"]), tuple(samples))
        groups.append((group, first["status"]))
    return tuple(groups), tuple(faults)


def stored_reward(line: Mapping[str, Any]) -> Reward:
    """The verdict in a line of ``samples/``."""
    value = 0.0 if line["reward"] is None else float(line["reward"])
    return Reward(line["correct"], value, line["parts"], line["error"], line["extracted"])


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _sample(line: Mapping[str, Any], token_ids: Any, logprobs: Any, versions: Any) -> Sample:
    return Sample(
        request_id=line["draw"],
        index=line["index"],
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=line["finish_reason"],
        text=line["response"],
        reward=stored_reward(line),
        shaped_reward=_float(line["shaped_reward"]),
        advantage=_float(line["advantage"]),
        in_loss=line["in_loss"],
        **episode_of(line),
    )
