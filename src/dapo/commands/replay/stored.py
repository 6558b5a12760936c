"""One rollout step as it lies in the run folder, as the records that went through training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

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
from dapo.records import Group, Prompt, Reward, Sample
from dapo.util.differences import shown
from dapo.util.files import read_json

Kind = tuple[str, Callable[[Any], bool]]  # what a value must be: in words, and whether one is


def _is_number(value: Any) -> bool:
    """Of a size that float32 holds; NaN is smaller than nothing."""
    return type(value) in (int, float) and abs(value) <= 1e38


def _one_of(names: Iterable[str]) -> Kind:
    known = tuple(names)
    return (f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def _or_null(kind: Kind) -> Kind:
    return (f"{kind[0]} or null", lambda value: value is None or kind[1](value))


_NUMBER = ("a finite number", _is_number)
_COUNT = ("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < 2**53)
_LENGTH = ("a number of tokens", lambda value: type(value) is int and 0 <= value < 2**31)
_TEXT = ("text", lambda value: isinstance(value, str))
_TRUTH = ("true or false", lambda value: isinstance(value, bool))
_PARTS = (
    "an object of finite numbers or null",
    lambda value: isinstance(value, dict) and all(one is None or _is_number(one) for one in value.values()),
)
_PAIR = (
    "a sum and a count, or null",
    lambda value: isinstance(value, list) and len(value) == 2 and all(one is None or _is_number(one) for one in value),
)
NUMBER_OR_NULL = _or_null(_NUMBER)

SAMPLE: Mapping[str, Kind] = {
    **dict.fromkeys(("draw", "row", "index"), _COUNT),
    "length": _LENGTH,
    **dict.fromkeys(("prompt", "response"), _TEXT),
    "status": _one_of(STATUSES),
    "finish_reason": _one_of(("stop", "length")),
    **dict.fromkeys(("gold", "error", "extracted"), _or_null(_TEXT)),
    "correct": _or_null(_TRUTH),
    **dict.fromkeys(("reward", "shaped_reward", "advantage"), NUMBER_OR_NULL),
    "in_loss": _TRUTH,
    "parts": _PARTS,
}
"""A line of ``samples/step-NNNNN.jsonl``."""

_REPORT: Mapping[str, Kind] = {
    **dict.fromkeys(("loss", "grad_norm", "learning_rate"), NUMBER_OR_NULL),
    **dict.fromkeys(("tokens", "response_tokens", "loss_tokens"), _LENGTH),
    "skipped": _or_null(_TEXT),
}
"""The report of an update, but for what is nested in it."""

_MISMATCH: Mapping[str, Kind] = {"tokens": _LENGTH, "absolute_sum": NUMBER_OR_NULL}


_WHY = {"reward": "scored", "advantage": "in the loss"}


def check_sample(line: Mapping[str, Any], place: str) -> None:
    """``line``: of a file of samples.
    Raises UserError: it is not that of a sample: names place, keys, what they should be and what they are."""
    wrong = [f"{key}: missing" for key in SAMPLE if key not in line]
    wrong += _wrong(line, SAMPLE)
    for key, needed in (("reward", line.get("error") is None), ("advantage", line.get("in_loss"))):
        if not wrong and needed and line[key] is None:
            wrong = [f"{key}: expected a finite number, as the sample was {_WHY[key]}, found null"]
    _refuse(wrong, place)


def check_report(report: Mapping[str, Any], place: str) -> None:
    """``report``: of an update, as JSON. Raises UserError: as :func:`check_sample`."""
    wrong = [f"{key}: missing" for key in _REPORT if key not in report]
    wrong += _wrong(report, _REPORT)
    for name in ("statistics", "mismatch"):
        nested = report.get(name, {})
        if not isinstance(nested, dict):
            wrong.append(f"{name}: expected an object, found {shown(nested, 40)}")
            continue
        kinds = _MISMATCH if name == "mismatch" else dict.fromkeys(nested, _PAIR)
        wrong += [f"{name}.{text}" for text in _wrong(nested, kinds)]
    _refuse(wrong, place)


def _wrong(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Iterator[str]:
    for key, kind in kinds.items():
        if key in values and not kind[1](values[key]):
            yield f"{key}: expected {kind[0]}, found {shown(values[key], 40)}"


def _refuse(wrong: list[str], place: str) -> None:
    if wrong:
        raise UserError(f"{place}: {'; '.join(wrong)}; the file was changed after the run wrote it")


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
        found = read_json(path)
        if not isinstance(found, list) or not all(isinstance(report, dict) for report in found):
            raise ValueError("expected a list of reports")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the reports of a step's updates: {error}") from None
    for number, report in enumerate(found):
        check_report(report, f"{path}: update {number}")
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
