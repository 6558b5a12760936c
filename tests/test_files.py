"""Writing whole files or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo.files import plain, write_atomic, write_json


def test_json_holds_plain_types_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    value = {
        "f": np.float32(0.5),
        "i": np.int64(3),
        "b": np.bool_(True),
        "a": np.array([1.0, np.nan]),
        "t": torch.tensor([[1, 2]]),
        "p": Path("x/y"),
        "n": float("inf"),
        1: (None, {2}),
    }
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "f": 0.5, "i": 3, "b": True, "a": [1.0, None], "t": [[1, 2]], "p": "x/y", "n": None, "1": [None, [2]]
    }  # fmt: skip


def test_flags_stay_flags() -> None:
    assert plain([True, 1, 1.0, "1"]) == [True, 1, 1.0, "1"]
    assert isinstance(plain(np.bool_(False)), bool)


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def pieces() -> Iterator[str]:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, pieces())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
