"""``dapo.train``: a model, prompts and a reward function are a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.api import SIZES, Result
from dapo.config import build_config, nested
from dapo.errors import ConfigError, DataError, ModelError, RewardError
from dapo.files import json_line
from run_cases import PROMPTS, SETTINGS, TOKENIZER, Recorder, loads_whole, text_sum, tiny_model, weights_hash


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {k: v for k, v in SETTINGS.items() if k != "model.path"} | {"run.dir": str(tmp_path / "run")}


def test_a_loaded_model_rows_and_a_function_are_a_run(settings: dict[str, Any], tmp_path: Path) -> None:
    found = dapo.train(
        tiny_model(), PROMPTS, text_sum, settings, tokenizer=TOKENIZER, heldout=PROMPTS[:3], listener=Recorder()
    )
    assert isinstance(found, Result)
    assert found.run_dir == tmp_path / "run" and found.model_path == tmp_path / "run" / "model-after"
    assert found.summary["steps"] == 1 and found.summary["heldout_rows"] == 3
    assert [entry["step"] for entry in found.metrics] == [1]
    loads_whole(found.model_path)


def test_a_folder_and_files_are_the_same_run(settings: dict[str, Any], tmp_path: Path) -> None:
    """From disk and from memory the same bits come out; a second run keeps the first one."""
    tiny_model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(json_line, PROMPTS)))
    hashes = set()
    for prompts in (PROMPTS, file, str(file), [str(file)]):
        found = dapo.train(tmp_path / "model", prompts, text_sum, settings, listener=Recorder())
        hashes.add(weights_hash(found.model_path))
    assert len(hashes) == 1
    assert len(list(tmp_path.glob("run-2*"))) == 3


def test_an_async_function_and_a_bool_will_do(settings: dict[str, Any]) -> None:
    async def ends_with_a_digit(response: str, answer: str) -> bool:
        return response[-1:].isdigit() and answer is not None

    found = dapo.train(tiny_model(), PROMPTS, ends_with_a_digit, settings, tokenizer=TOKENIZER, listener=Recorder())
    assert found.summary["updates"] == 2


def test_without_a_function_the_settings_say_what_is_right(settings: dict[str, Any]) -> None:
    changes = {"reward.kind": "exact", "algorithm.filter_groups.enable": False}
    found = dapo.train(tiny_model(), PROMPTS, None, settings | changes, tokenizer=TOKENIZER, listener=Recorder())
    assert found.summary["updates"] == 2
    rows = [{"prompt": "1+1="}] * 4
    with pytest.raises(DataError, match=r"prompts\[0\]: no key 'answer'"):
        dapo.train(tiny_model(), rows, None, settings | changes, tokenizer=TOKENIZER, listener=Recorder())


def test_the_sizes_for_a_laptop_are_a_valid_recipe() -> None:
    config = build_config(nested(dict(SIZES) | {"model.path": "m"}))
    assert config.updates_per_step == 4


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ({"settings": {"training.stepz": 1}}, ConfigError, "did you mean training.steps"),
        ({"prompts": []}, DataError, "prompts: there are none"),
        ({"prompts": [PROMPTS[0], "rows.jsonl"]}, DataError, "prompts: 1 files and 1 rows together"),
        ({"prompts": PROMPTS[0]}, DataError, "prompts: expected a list of rows or files, got a single row"),
        ({"prompts": [3]}, DataError, r"prompts\[0\]: expected an object"),
        ({"prompts": ["2+2="]}, DataError, "2\\+2=: no such file"),
        ({"heldout": {"prompt": "1"}}, DataError, "heldout: expected a list"),
        ({"tokenizer": None}, ModelError, r"a loaded model needs its own: train\(model, ..., tokenizer=...\)"),
        ({"reward": 3}, RewardError, "expected a function, got int 3"),
        ({"reward": lambda answer, nothing: 1.0}, RewardError, "it demands the parameter 'nothing'"),
        ({"reward": lambda response: None}, RewardError, "is a `return` missing"),
    ],
)
def test_what_is_wrong_is_named(
    settings: dict[str, Any], change: dict[str, Any], kind: type[Exception], expected: str
) -> None:
    given = {"model": tiny_model(), "prompts": PROMPTS, "reward": text_sum, "tokenizer": TOKENIZER} | change
    given["settings"] = settings | given.get("settings", {})
    with pytest.raises(kind, match=expected):
        dapo.train(**given, listener=Recorder())


def test_a_listener_of_the_callers_hears_the_end(settings: dict[str, Any]) -> None:
    class Ends(Recorder):
        heard: tuple[str, ...] = ()

        def finished(self, summary: dict[str, Any]) -> None:
            self.heard += (summary["stopped"],)

        def close(self) -> None:
            self.heard += ("closed",)

    listener = Ends()
    dapo.train(tiny_model(), PROMPTS, text_sum, settings, tokenizer=TOKENIZER, listener=listener)
    assert listener.heard == ("all steps are done", "closed")
