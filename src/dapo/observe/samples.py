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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of one file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


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
