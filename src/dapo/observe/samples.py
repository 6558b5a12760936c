"""samples/step-00012.jsonl: every sample of a step as a person wants to see it, one JSON object per line.

Consumes: groups as they left the buffer, each with its status. Produces: one file per step, whole or not at all; a step
that is made again after a resume replaces its file.

Fields: ``draw`` ``row`` ``index`` (which sample), ``prompt`` ``response`` ``extracted`` ``gold`` (the texts),
``correct`` ``reward`` ``parts`` ``error`` (the verdict), ``shaped_reward`` ``advantage`` ``in_loss`` (what training
sees; null and false where the group was not trained on), ``length`` ``finish_reason`` ``versions`` (first and last
policy version of its tokens) and ``status``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.errors import UserError
from dapo.files import json_line, write_atomic
from dapo.records import Group, Sample

STATUSES: Mapping[str, str] = {
    "kept": "trained on",
    "all_right": "filtered: every sample right",
    "all_wrong": "filtered: every sample wrong",
    "flat": "filtered: no spread in the reward",
    "too_few_scored": "filtered: fewer than two samples with a verdict",
    "surplus": "a good group beyond N, discarded",
    "carried": "a good group beyond N, kept for the next step",
    "stale": "carried over for too long, dropped",
}
"""What became of a group."""


def samples_path(folder: Path, step: int) -> Path:
    """The file of one step."""
    return folder / f"step-{step:05d}.jsonl"


def write_samples(folder: Path, step: int, groups: Iterable[tuple[Group, str]]) -> Path:
    """Write all samples of ``groups`` (each with its status, one of :data:`STATUSES`) and return the file."""
    path = samples_path(folder, step)
    write_atomic(path, (json_line(line) for group, status in groups for line in _lines(group, status)))
    return path


def discard_samples(folder: Path, after: int) -> None:
    """Remove the files of steps later than ``after``, which a resumed run makes again."""
    for path in folder.glob("step-*.jsonl"):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) > after:
            path.unlink(missing_ok=True)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of one file; a last line that was cut off while being written is left out.

    Raises:
        UserError: another line is not a sample.
    """
    samples = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                samples.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            if number == len(lines):  # without a line end
                break
            raise UserError(f"{path}:{number}: not a line of samples") from None
    return samples


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which samples to look at. None, or empty: no matter."""

    statuses: tuple[str, ...] = ()
    correct: bool | None = None
    longer_than: int | None = None
    shorter_than: int | None = None
    truncated: bool = False
    row: int | None = None
    draw: int | None = None
    contains: str = ""
    """Text in prompt or response, whatever the case of its letters."""

    def admits(self, sample: Mapping[str, Any]) -> bool:
        """Whether the sample is one of those asked for."""
        length = sample.get("length") or 0
        text = f"{sample.get('prompt')}\n{sample.get('response')}"
        return (
            (not self.statuses or sample.get("status") in self.statuses)
            and (self.correct is None or sample.get("correct") is self.correct)
            and (self.longer_than is None or length > self.longer_than)
            and (self.shorter_than is None or length < self.shorter_than)
            and (not self.truncated or sample.get("finish_reason") == "length")
            and (self.row is None or sample.get("row") == self.row)
            and (self.draw is None or sample.get("draw") == self.draw)
            and self.contains.casefold() in text.casefold()
        )


def steps_with_samples(folder: Path) -> list[int]:
    """The steps that have a file of samples, in order."""
    names = (re.fullmatch(r"step-(\d+)\.jsonl", path.name) for path in folder.glob("step-*.jsonl"))
    return sorted(int(name.group(1)) for name in names if name)


def _lines(group: Group, status: str) -> Iterator[dict[str, Any]]:
    if status not in STATUSES:
        raise ValueError(f"status {status!r} of draw {group.draw} is not one of {', '.join(STATUSES)}")
    for sample in group.samples:
        yield {
            "draw": group.draw,
            "row": group.prompt.row,
            "index": sample.index,
            "status": status,
            "prompt": group.prompt.text,
            "response": sample.text,
            "gold": group.prompt.answer,
            **_verdict(sample),
            "shaped_reward": sample.shaped_reward,  # NaN, where there is none, becomes null
            "advantage": sample.advantage,
            "in_loss": sample.in_loss and status == "kept",
            "length": sample.length,
            "finish_reason": sample.finish_reason,
            "versions": [int(sample.versions[0]), int(sample.versions[-1])] if sample.length else [],
        }


def _verdict(sample: Sample) -> dict[str, Any]:
    reward = sample.reward
    if reward is None:
        return {"extracted": None, "correct": None, "reward": None, "parts": {}, "error": "not scored"}
    return {
        "extracted": reward.extracted,
        "correct": reward.correct,
        "reward": reward.value if reward.error is None else None,
        "parts": dict(reward.parts),
        "error": reward.error,
    }
