"""What is kept of every sample of a step: its text for people, its tokens for ``dapo replay``.

Consumes: groups as they left the buffer, each with its status, and the reports of the step's updates. Produces: three
files per step, each whole or not at all; a step that is made again after a resume replaces its files.

``step-00012.jsonl`` holds one JSON object per sample. Fields: ``draw`` ``row`` ``index`` (which sample), ``prompt``
``prompt_end`` ``response`` ``extracted`` ``gold`` (texts), ``correct`` ``reward`` ``parts`` ``error`` (the verdict),
``shaped_reward`` ``advantage`` ``in_loss`` (what training sees; null and false where the group was not trained on),
``length`` ``finish_reason`` ``versions`` (first and last policy version of its tokens) and ``status``; where the
held-out check was asked ``check_correct`` and ``check_reward``, too. Of an episode ``length`` counts all tokens behind
the first prompt and ``sampled`` those of the model; ``ended`` and ``turns`` (of each: start, end, stop, reward,
advantage, chars) are as in :class:`~dapo.records.Sample`, ``prompt_ids`` is what it began with if that was not the
prompt, and ``more`` holds its further sequences whole.

``step-00012.safetensors`` holds what is a number per token, in the order of these lines: see :class:`TokenArrays`.
``step-00012.updates.json`` holds the report of each optimizer update, but for times.
"""

from __future__ import annotations

import math
import operator
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dapo.config.secrets import redact
from dapo.errors import UserError
from dapo.records import Group, Reward, Sample, Turn
from dapo.util.files import json_line, lines_of, parse_json, write_atomic, write_json

if TYPE_CHECKING:
    from dapo.training.update_report import UpdateReport

STATUSES: Mapping[str, str] = {
    "kept": "trained on",
    "all_right": "filtered: every sample right",
    "all_wrong": "filtered: every sample wrong",
    "flat": "filtered: no spread in the reward",
    "too_few_scored": "filtered: fewer than two samples with a verdict",
    "surplus": "a good group beyond N, discarded",
    "carried": "a good group beyond N, kept for the next step",
    "stale": "too old when it was its turn (rollout.max_staleness), dropped",
}
"""What became of a group."""


def samples_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:05d}.jsonl"


def tokens_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:05d}.safetensors"


def updates_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:05d}.updates.json"


_WITH_TOKENS = ("logprobs", "entropy")

Key = tuple[int, int]  # draw and index of a sample


def write_samples(
    folder: Path,
    step: int,
    groups: Iterable[tuple[Group, str]],
    reports: Sequence[UpdateReport] = (),
    seen: Mapping[Key, tuple[Any, Any]] | None = None,
    checks: Mapping[Key, Reward] | None = None,
) -> Path:
    """Write what is kept of a step; the samples themselves come last, so that what they need is there before them.

    Args:
        folder: ``samples`` of the run.
        groups: all of them, each with its status, one of :data:`STATUSES`; what was trained on as it was trained on,
            and in its order.
        reports: of the step's optimizer updates.
        seen: the trainer's log-probs and entropies of a sample's tokens, of those that it has computed.
        checks: what the held-out check said, of those that it was asked about.

    Returns the file with the samples."""
    found = list(groups)
    lines = [json_line(line) for group, status in found for line in lines_of_group(group, status, checks)]
    write_atomic(tokens_path(folder, step), TokenArrays.of([group for group, _ in found], seen or {}).to_bytes())
    told = [asdict(replace(report, logprobs=None, entropy=None)) for report in reports]  # those are with the tokens
    kept = [{k: v for k, v in one.items() if k not in _WITH_TOKENS and not k.startswith("seconds_")} for one in told]
    write_json(updates_path(folder, step), kept)
    path = samples_path(folder, step)
    write_atomic(path, lines)
    return path


def discard_samples(folder: Path, after: int) -> None:
    """Remove the files of steps later than ``after``, which a resumed run makes again."""
    for path in folder.glob("step-*"):
        found = re.fullmatch(r"step-(\d+)\.(jsonl|safetensors|updates\.json)", path.name)
        if found and int(found[1]) > after:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """The tokens of S samples in G groups, end to end: R response tokens, P prompt tokens.

    Per sample ``[S]``: ``lengths`` int32 (of responses) and ``checksums`` uint32, CRC-32 over the bytes of all that is
    stored of its tokens, so that the sample can be named whose numbers were changed. Per response token ``[R]``:
    ``token_ids`` int32, ``logprobs`` float32 (the engine's, nats) and ``versions`` int32. Of each group once:
    ``prompt_lengths`` int32 ``[G]`` and ``prompt_ids`` int32 ``[P]``. Per response token, NaN where they were not
    computed: ``trainer_logprobs`` float32, by the weights at the start of the step, and ``entropy`` float16, before the
    first update that the token is in; checksums are without these two.
    """

    lengths: Any
    checksums: Any
    token_ids: Any
    logprobs: Any
    versions: Any
    prompt_lengths: Any
    prompt_ids: Any
    trainer_logprobs: Any
    entropy: Any

    _TYPES: ClassVar[Mapping[str, Any]] = {
        **{"lengths": np.int32, "checksums": np.uint32, "token_ids": np.int32, "logprobs": np.float32},
        **{"versions": np.int32, "prompt_lengths": np.int32, "prompt_ids": np.int32},
        **{"trainer_logprobs": np.float32, "entropy": np.float16},
    }

    @classmethod
    def of(cls, groups: Sequence[Group], seen: Mapping[Key, tuple[Any, Any]] | None = None) -> TokenArrays:
        """Those of some groups, in their order. ``seen``: as for :func:`write_samples`."""
        prompts = [np.asarray(group.prompt.token_ids, np.int32) for group in groups]
        found = [(group.draw, p, s) for p, group in zip(prompts, groups, strict=True) for s in group.samples]
        samples = [sample for *_, sample in found]
        sizes = [len(sample.token_ids) for sample in samples]
        nothing = {size: (np.full(size, np.nan, np.float32),) * 2 for size in sizes}
        computed = [(seen or {}).get((draw, s.index), nothing[n]) for (draw, _, s), n in zip(found, sizes, strict=True)]
        return cls(
            lengths=np.array(sizes, np.int32),
            checksums=np.array([checksum(p, s.token_ids, s.logprobs, s.versions) for _, p, s in found], np.uint32),
            token_ids=_joined([sample.token_ids for sample in samples], np.int32),
            logprobs=_joined([sample.logprobs for sample in samples], np.float32),
            versions=_joined([sample.versions for sample in samples], np.int32),
            prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
            prompt_ids=_joined(prompts, np.int32),
            trainer_logprobs=_joined([logprobs for logprobs, _ in computed], np.float32),
            entropy=_joined([entropy for _, entropy in computed], np.float16),
        )

    def to_bytes(self) -> bytes:
        from safetensors.numpy import save

        return bytes(save({name: getattr(self, name) for name in self._TYPES}))

    @classmethod
    def read(cls, path: Path) -> TokenArrays:
        """Raises UserError if the file is damaged, or not one of these."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:  # each array is read by itself: no copy of the whole file
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            arrays = cls(**{n: found[n].astype(kind, casting="safe", copy=False) for n, kind in cls._TYPES.items()})
            arrays._check()
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise UserError(f"{path}: not the tokens of a step: {type(error).__name__}: {error}") from None
        return arrays

    def _check(self) -> None:
        per_token = ("token_ids", "logprobs", "versions", "trainer_logprobs", "entropy")
        for sizes, names in (("lengths", per_token), ("prompt_lengths", ("prompt_ids",))):
            for name in names:
                counts = getattr(self, sizes)
                if (counts < 0).any() or getattr(self, name).shape != (counts.sum(),):
                    raise ValueError(f"{name} does not have as many numbers as {sizes} says")
        if self.checksums.shape != self.lengths.shape:
            raise ValueError("there are not as many checksums as samples")


def checksum(prompt_ids: Any, token_ids: Any, logprobs: Any, versions: Any) -> int:
    """CRC-32 over the tokens of a sample as they are stored, little-endian."""
    found = 0
    for array, kind in ((prompt_ids, "<i4"), (token_ids, "<i4"), (logprobs, "<f4"), (versions, "<i4")):
        found = zlib.crc32(np.ascontiguousarray(array, dtype=kind).tobytes(), found)
    return found


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.empty(0, dtype)


def sample_lines(path: Path, errors: str = "replace") -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The samples of one file, each with the place and size of its line in bytes; a last line that was cut off is left
    out. ``errors``: of decoding. Raises UserError: another is not a sample, or there is no other."""
    offset = 0
    try:
        for number, line in enumerate(lines_of(path), start=1):  # a step may have a gigabyte of text
            text = line.removesuffix(b"\n")
            try:
                found = dict(parse_json(text.decode(errors=errors))) if text else None
            except (ValueError, TypeError):
                found = None
                if text != line or number == 1:
                    raise UserError(f"{path}:{number}: not a line of samples") from None
            if found is not None:
                yield offset, len(text), found
            offset += len(line)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_samples(path: Path) -> list[dict[str, Any]]:
    return [sample for *_, sample in sample_lines(path)]


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which samples to look at. None, or empty: no matter."""

    statuses: tuple[str, ...] = ()
    correct: bool | None = None
    longer_than: int | None = None
    truncated: bool = False
    row: int | None = None
    draw: int | None = None
    index: int | None = None
    contains: str = ""  # text in prompt or response, whatever the case of its letters

    def tests(self) -> Iterator[tuple[str, str, Any]]:
        """Those on one number each that are asked for: column of the index, ``=`` or ``>``, and with what."""
        for column, sign, value in (
            ("correct", "=", self.correct),
            ("length", ">", self.longer_than),
            ("row", "=", self.row),
            ("draw", "=", self.draw),
            ("sample", "=", self.index),
        ):
            if value is not None:
                yield column, sign, value

    def admits(self, sample: Mapping[str, Any]) -> bool:
        found = {"sample": sample.get("index"), **sample, "length": sample.get("length") or 0}
        text = f"{sample.get('prompt')}\n{sample.get('response')}"
        return (
            (not self.statuses or sample.get("status") in self.statuses)
            and (not self.truncated or sample.get("finish_reason") == "length")
            and all(_SIGNS[sign](found.get(column), value) for column, sign, value in self.tests())
            and self.contains.casefold() in text.casefold()
        )


_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {"=": operator.eq, ">": operator.gt}


def steps_with_samples(folder: Path) -> list[int]:
    names = (re.fullmatch(r"step-(\d+)\.jsonl", path.name) for path in folder.glob("step-*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def lines_of_group(group: Group, status: str, checks: Mapping[Key, Reward] | None = None) -> Iterator[dict[str, Any]]:
    """A line of each of its samples, see the module. The arguments are those of :func:`write_samples`."""
    if status not in STATUSES:
        raise ValueError(f"status {status!r} of draw {group.draw} is not one of {', '.join(STATUSES)}")
    for sample in group.samples:
        check = (checks or {}).get((group.draw, sample.index))
        checked: dict[str, Any] = {}
        if check is not None and check.error is None:
            checked = {"check_correct": check.correct, "check_reward": check.value}
        yield {
            "draw": group.draw,
            "row": group.prompt.row,
            "index": sample.index,
            "status": status,
            "prompt": group.prompt.text,
            "prompt_end": group.prompt.end,
            "response": sample.text,
            "gold": group.prompt.answer,
            **_verdict(sample),
            "shaped_reward": _finite(sample.shaped_reward),
            "advantage": _finite(sample.advantage),
            "in_loss": sample.in_loss and status == "kept",
            "length": len(sample.token_ids),
            "finish_reason": sample.finish_reason,
            "versions": [*(sample.version_range or ())],
            **(_episode(sample) if sample.turns else {}),
            **checked,
        }


def _episode(sample: Sample) -> dict[str, Any]:
    return {"sampled": sample.length, "ended": sample.ended, **_sequence(sample, _BESIDE)} | {
        "more": [_sequence(part, tuple(_WHOLE)) for part in sample.more]
    }


def _sequence(sample: Sample, names: Sequence[str]) -> dict[str, Any]:
    arrays = {name: value.tolist() for name in names if (value := getattr(sample, name)) is not None}
    return {"turns": [[*astuple(turn)] for turn in sample.turns], **arrays}


def episode_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the line of an episode adds to a sample, by its fields. Raises TypeError, ValueError: it is no such line."""
    found: dict[str, Any] = {"turns": tuple(Turn(*turn) for turn in line.get("turns", ()))}
    here = {name: _WHOLE[name] for name in (_BESIDE if "ended" in line or "turns" not in line else _WHOLE)}
    found |= {name: np.asarray(line[name], kind) for name, kind in here.items() if name in line}
    if "ended" in line:
        parts = [episode_of(part) for part in line["more"]]
        head = {"request_id": line["draw"], "index": line["index"], "finish_reason": line["finish_reason"]}
        found |= {"ended": line["ended"], "more": tuple(Sample(**head, **part) for part in parts)}
    return found


_BESIDE = ("prompt_ids",)
_WHOLE: Mapping[str, Any] = {
    **{"prompt_ids": np.int32, "token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
}
"""Of a sequence: what is kept in the line of an episode, beside the arrays, and of sequences that have none there."""


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _verdict(sample: Sample) -> dict[str, Any]:
    reward = sample.reward or Reward(None, 0.0, error="not scored")
    return {
        "extracted": reward.extracted,
        "correct": reward.correct,
        "reward": reward.value if reward.error is None else None,
        "parts": dict(reward.parts),
        "error": redact(reward.error),  # a message may quote a request
    }
