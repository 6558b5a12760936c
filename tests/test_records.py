"""Records: shapes that belong together, and what a checkpoint keeps of them, one of an older version too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.errors import UserError
from dapo.orchestrator.encoded_state import STATE, EncodedState, read_state
from dapo.records import Reward, Sample
from dapo.util.verdict import LONGEST_TEXT


def a_sample(tokens: int = 3, **changes: Any) -> Sample:
    ids = np.arange(tokens, dtype=np.int32)
    return Sample(0, 0, ids, -ids.astype(np.float32), ids, "stop", **changes)


def test_likeliest_tokens_are_of_every_place_or_of_none() -> None:
    ids, logprobs = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    assert a_sample(top_ids=ids, top_logprobs=logprobs).length == 3 and a_sample().top_ids is None
    for wrong in ({"top_ids": ids}, {"top_ids": ids[:2], "top_logprobs": logprobs[:2]}, {"top_logprobs": logprobs}):
        with pytest.raises(ValueError, match=r"\[T, k\]"):
            a_sample(**wrong)


def test_a_checkpoint_brings_likeliest_tokens_back_and_an_older_one_has_none(tmp_path: Path) -> None:
    top = {
        "top_ids": np.array([[4, 1], [2, 0]], np.int32),
        "top_logprobs": np.array([[-0.5, -1], [-2, -3]], np.float32),
    }
    EncodedState({"samples": [a_sample(2, **top), a_sample()]}).write(tmp_path)
    told, plain = read_state(tmp_path)["samples"]
    for name, values in top.items():
        assert getattr(told, name).tolist() == values.tolist() and getattr(told, name).dtype == values.dtype
    assert plain.top_ids is None and plain.top_logprobs is None
    tree = json.loads((tmp_path / STATE).read_text())
    for record in tree["samples"]:
        del record["top_ids"], record["top_logprobs"]
    (tmp_path / STATE).write_text(json.dumps(tree))
    assert [s.top_ids for s in read_state(tmp_path)["samples"]] == [None, None]


def test_a_step_under_way_of_an_older_version_is_read(tmp_path: Path) -> None:
    names = ("loss", "grad_norm", "learning_rate", "seconds_forward", "seconds_backward", "seconds_optimizer")
    counts = ("tokens", "response_tokens", "loss_tokens", "micro_batches")
    EncodedState({"reports": []}).write(tmp_path)
    report = {"$record": "UpdateReport", **dict.fromkeys(names, 0.5), **dict.fromkeys(counts, 3), "skipped": None}
    mismatch = {"$record": "Mismatch", "tokens": 0, "absolute_sum": 0.0, "maximum": 0.0, "k3_sum": 0.0}
    (tmp_path / STATE).write_text(json.dumps({"reports": [{**report, "statistics": {}, "mismatch": mismatch}]}))
    assert read_state(tmp_path)["reports"][0].loss_tokens == 3


def test_a_batch_of_an_older_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    EncodedState({"step": None}).write(tmp_path)
    (tmp_path / STATE).write_text(json.dumps({"step": {"batch": {"$record": "PackedBatch", "lengths": []}}}))
    with pytest.raises(UserError, match="holds a PackedBatch, as another version of dapo wrote it inside of a step"):
        read_state(tmp_path)


def test_what_a_reward_says_of_a_response_is_cut_with_a_mark() -> None:
    found = Reward(True, 1.0, error=None, extracted="7" * 10_000_000)
    assert found.extracted is not None and len(found.extracted) == LONGEST_TEXT
    assert found.extracted.endswith("7 ... (cut, it had 10,000,000 characters)")
    assert Reward(None, 0.0, error="e" * 10**6).error != "e" * 10**6
    again = replace(found, value=0.5)
    assert again.extracted is not None and again.extracted.count("cut, it had") == 1, "it is cut once"
    assert Reward(True, 1.0, extracted="7" * LONGEST_TEXT).extracted == "7" * LONGEST_TEXT
