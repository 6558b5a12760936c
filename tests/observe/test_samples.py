"""The samples file: every field there, nothing invented."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.algorithm.admission import GroupVerdict
from dapo.errors import UserError
from dapo.observe.samples import STATUSES, TokenArrays, read_samples, tokens_path, write_samples
from dapo.records import Group, Prompt, Reward, Sample


def make_sample(index: int, length: int = 3, **more: object) -> Sample:
    sample = Sample(
        request_id=7,
        index=index,
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.array([4, 4, 5][:length], dtype=np.int32),
        finish_reason="stop",
        text=f"text {index}",
    )
    return replace(sample, **more)  # type: ignore[arg-type]


def arrays_of(tokens: int) -> dict[str, Any]:
    whole = np.arange(tokens, dtype=np.int32)
    return {"token_ids": whole, "logprobs": np.zeros(tokens, np.float32), "versions": whole}


def make_group(draw: int, *samples: Sample) -> Group:
    return Group(draw, Prompt(row=12, text="1+1=", token_ids=(1, 2), answer="2"), samples)


def test_a_trained_sample_has_every_field(tmp_path: Path) -> None:
    reward = Reward(True, 1.0, parts={"math": 1.0}, extracted="2")
    sample = make_sample(0, reward=reward, shaped_reward=0.5, advantage=np.float32(1.5), finish_reason="length")
    path = write_samples(tmp_path, 12, [(make_group(3, sample), "kept")])
    assert path.name == "step-00012.jsonl"
    assert read_samples(path) == [
        {
            "draw": 3,
            "row": 12,
            "index": 0,
            "status": "kept",
            "prompt": "1+1=",
            "prompt_end": "",
            "response": "text 0",
            "gold": "2",
            "extracted": "2",
            "correct": True,
            "reward": 1.0,
            "parts": {"math": 1.0},
            "error": None,
            "shaped_reward": 0.5,
            "advantage": 1.5,
            "in_loss": True,
            "length": 3,
            "finish_reason": "length",
            "versions": [4, 5],
        }
    ]


def test_what_does_not_exist_is_null(tmp_path: Path) -> None:
    failed = Reward(None, float("nan"), error="timed out after 10 s")
    group = make_group(0, make_sample(0, reward=failed), make_sample(1, length=0))
    one, two = read_samples(write_samples(tmp_path, 1, [(group, "too_few_scored")]))
    assert one["error"] == "timed out after 10 s" and one["reward"] is None and one["correct"] is None
    assert one["shaped_reward"] is None and one["advantage"] is None and one["in_loss"] is False
    assert two["error"] == "not scored" and two["versions"] == [] and two["length"] == 0


def test_any_text_fits_on_one_line(tmp_path: Path) -> None:
    texts = [
        "two\nlines",
        "\u2028 separator",
        "lone \ud800 surrogate",
        'quote " and \\',
        "\x00\x1b[31m",
        "naïve 漢字 🙂",
    ]
    group = make_group(0, *(make_sample(i, text=text) for i, text in enumerate(texts)))
    path = write_samples(tmp_path, 1, [(group, "all_wrong")])
    assert [line["response"] for line in read_samples(path)] == texts
    assert path.read_bytes().count(b"\n") == len(texts)
    assert "漢字" in path.read_text(encoding="utf-8")  # legible as it lies there


def test_every_status_is_written_as_given(tmp_path: Path) -> None:
    groups = [(make_group(i, make_sample(0)), status) for i, status in enumerate(STATUSES)]
    assert [line["status"] for line in read_samples(write_samples(tmp_path, 1, groups))] == list(STATUSES)


def test_the_statuses_cover_the_verdicts_of_admission() -> None:
    assert {str(verdict) for verdict in GroupVerdict} - {"mixed"} <= set(STATUSES)


def test_reading_tokens_takes_their_memory_once(tmp_path: Path) -> None:
    tokens = 500_000
    write_samples(tmp_path, 1, [(make_group(3, replace(make_sample(0), **arrays_of(tokens))), "kept")])
    path = tokens_path(tmp_path, 1)
    TokenArrays.read(path)  # what is imported meanwhile does not count
    tracemalloc.start()
    try:
        arrays = TokenArrays.read(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(arrays.token_ids) == tokens and most < 1.5 * path.stat().st_size


def test_a_failure_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 1, [(make_group(0, make_sample(0)), "kept")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="status 'odd' of draw 2"):
        write_samples(tmp_path, 1, [(make_group(1, make_sample(0)), "kept"), (make_group(2, make_sample(0)), "odd")])
    assert path.read_bytes() == before
    names = ("step-00001.jsonl", "step-00001.safetensors", "step-00001.updates.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_a_file_with_nothing_but_half_a_line_is_named(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 1, [(make_group(0, make_sample(0), make_sample(1)), "kept")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert len(read_samples(path)) == 1
    path.write_bytes(whole[:40])
    with pytest.raises(UserError, match=r"step-00001\.jsonl:1: not a line of samples"):
        read_samples(path)


def test_no_groups_make_an_empty_file(tmp_path: Path) -> None:
    assert read_samples(write_samples(tmp_path, 1, [])) == []
    assert [json.loads(line) for line in (tmp_path / "step-00001.jsonl").read_text().splitlines()] == []
