"""``dapo.train``: a model, prompts and a reward function are a run."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset, DatasetDict
from typer.testing import CliRunner

import dapo
from dapo.api import SIZES, Interrupted, Result, rows
from dapo.commands import app
from dapo.config import build_config, nested
from dapo.errors import ConfigError, DataError, ModelError, RewardError
from dapo.util.files import json_line
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


def test_from_files_and_from_all_kinds_of_rows_it_is_the_same_run(settings: dict[str, Any], tmp_path: Path) -> None:
    """From disk and from memory the same bits come out; a second run keeps the first one."""
    tiny_model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(json_line, PROMPTS)))
    hashes = set()
    in_memory = [PROMPTS, (row for row in PROMPTS), pandas.DataFrame(PROMPTS), Dataset.from_list(PROMPTS)]
    for prompts in (*in_memory, str(file), [file]):
        found = dapo.train(tmp_path / "model", prompts, text_sum, settings, listener=Recorder())
        hashes.add(weights_hash(found.model_path))
    assert len(hashes) == 1
    assert len(list(tmp_path.glob("run-2*"))) == 5


def test_an_async_function_and_a_bool_will_do(settings: dict[str, Any]) -> None:
    async def ends_with_a_digit(response: str, answer: str) -> bool:
        return response[-1:].isdigit() and answer is not None

    found = dapo.train(tiny_model(), PROMPTS, ends_with_a_digit, settings, tokenizer=TOKENIZER, listener=Recorder())
    assert found.summary["updates"] == 2


def test_without_a_function_the_settings_say_what_is_right(settings: dict[str, Any]) -> None:
    changes = {"reward.kind": "exact", "algorithm.filter_groups.enable": False}
    found = dapo.train(tiny_model(), PROMPTS, None, settings | changes, tokenizer=TOKENIZER, listener=Recorder())
    assert found.summary["updates"] == 2
    unanswered = [{"prompt": "1+1="}] * 4
    with pytest.raises(DataError, match=r"prompts\[0\]: no key 'answer'"):
        dapo.train(tiny_model(), unanswered, None, settings | changes, tokenizer=TOKENIZER, listener=Recorder())


def test_the_sizes_for_a_laptop_are_a_valid_recipe() -> None:
    config = build_config(nested(dict(SIZES) | {"model.path": "m"}))
    assert config.updates_per_step == 4


TWICE = pandas.DataFrame([["1=", "1", "2"]], columns=["prompt", "answer", "answer"])


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ({"settings": {"training.stepz": 1}}, ConfigError, "did you mean training.steps"),
        (
            {"heldout": ["a"], "settings": {"evaluation.data": "b"}},
            ConfigError,
            "heldout: is a, and evaluation.data is b",
        ),
        ({"prompts": []}, DataError, "prompts: there are no rows in the list"),
        ({"prompts": [PROMPTS[0], "rows.jsonl"]}, DataError, "prompts: 1 files and 1 rows together"),
        ({"prompts": PROMPTS[0]}, DataError, "prompts: expected a list of rows or files, got a single row"),
        ({"prompts": [3]}, DataError, r"prompts\[0\]: expected an object"),
        ({"prompts": ["2+2="]}, DataError, "2\\+2=: no such file"),
        ({"heldout": {"prompt": "1"}}, DataError, "heldout: expected a list"),
        ({"heldout": [{"answer": "1"}]}, DataError, r"heldout\[0\]: no key 'prompt'"),
        ({"prompts": 3}, DataError, "prompts: expected rows or files, got int 3"),
        ({"prompts": iter(())}, DataError, "prompts: the tuple_iterator gave no rows; was it read to its end before"),
        (
            {"prompts": itertools.repeat(PROMPTS[0])},
            DataError,
            r"the repeat did not end after 100 rows.*islice\(prompts",
        ),
        (
            {"prompts": DatasetDict(train=Dataset.from_list(PROMPTS))},
            DataError,
            r"holds the splits train; .*\['train'\]",
        ),
        ({"tokenizer": None}, ModelError, "a loaded model needs its own: give tokenizer="),
        ({"tokenizer": "m"}, ModelError, "expected a loaded one, got str 'm'; the name of one goes into the setting"),
        ({"model": 5}, ModelError, "a loaded PreTrainedModel, got int"),
        ({"model": tiny_model().to("meta")}, ModelError, "on the meta device"),
        ({"prompts": ["2+2=", "3+3="]}, DataError, "'2\\+2=' is none; rows are dicts, such as"),
        ({"prompts": TWICE}, DataError, "got a DataFrame with two columns answer"),
        ({"prompts": TWICE["prompt"]}, DataError, "got a Series"),
        (
            {"reward": lambda response: response[5] == "a"},
            RewardError,
            "the reward function fails, on the first reference",
        ),
        ({"reward": 3}, RewardError, "expected a function, got int 3"),
        ({"reward": lambda answer, nothing: 1.0}, RewardError, "it requires the parameter 'nothing'"),
        ({"reward": lambda response: None}, RewardError, "is a `return` missing"),
    ],
)
def test_what_is_wrong_is_named(
    settings: dict[str, Any],
    change: dict[str, Any],
    kind: type[Exception],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "MOST_ROWS", 100)
    given = {"model": tiny_model(), "prompts": PROMPTS, "reward": text_sum, "tokenizer": TOKENIZER} | change
    given["settings"] = settings | given.get("settings", {})
    with pytest.raises(kind, match=expected):
        dapo.train(**given, listener=Recorder())


def test_a_second_run_does_not_take_the_folder_of_the_first(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    del settings["run.dir"]
    given = {"tokenizer": TOKENIZER, "settings": settings | {"training.steps": 1}, "listener": Recorder()}
    first, second = (dapo.train(tiny_model(), PROMPTS, text_sum, **given) for _ in range(2))
    assert [str(found.run_dir) for found in (first, second)] == ["runs/python", "runs/python-2"]


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


def test_what_is_missing_in_a_data_frame_is_missing_in_the_row() -> None:
    frame = pandas.DataFrame(
        {"prompt": ["1", "2"], "answer": pandas.array([3, None], "Int64"), "level": [float("nan"), 1.5]}
    )
    found = rows.files_or_rows(frame, "prompts", print)[1]
    assert found is not None and [found.raw(0), found.raw(1)] == [
        {"prompt": "1", "answer": 3, "level": None},
        {"prompt": "2", "answer": None, "level": 1.5},
    ]


def test_a_slow_generator_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = itertools.count(step=3.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    rows.files_or_rows(iter(PROMPTS[:4]), "heldout", said.append)
    assert said == ["heldout: 2 rows read, and more to come", "heldout: 4 rows read, and more to come"]


def test_a_result_is_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    summary = {"accuracy_before": 0.125, "accuracy_after": 0.5, "stopped": "all steps are done"}
    told = repr(Result(summary, [{"step": 1}, {"step": 2}], Path("runs/r"), Path("m")))
    assert told == "Result(accuracy 12.5% -> 50.0%, 2 steps, runs/r; all steps are done)"


# --- stopped by hand ----------------------------------------------------------------------------------------------


LONG = {"training.steps": 3, "runtime.deterministic": True}


def interrupted(settings: dict[str, Any], **changes: Any) -> tuple[Result, Recorder]:
    """The result of a run that Ctrl-C ends after its first step, at the prompt of a notebook."""
    listener = Recorder(on_step=lambda step: signal.raise_signal(signal.SIGINT))
    given = {"model": tiny_model(), "prompts": PROMPTS, "reward": text_sum, "tokenizer": TOKENIZER} | changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "ps1", ">>> ", raising=False)
        return dapo.train(**given, settings=settings | LONG, listener=listener), listener


def test_ctrl_c_in_a_notebook_gives_the_result_up_to_there_and_the_run_goes_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    found, listener = interrupted(settings)
    assert (found.stopped, len(found.metrics), found.run_dir) == ("interrupted", 1, tmp_path / "run")
    assert found.model_path.parent.parent == tmp_path / "run" / "checkpoints"
    loads_whole(found.model_path)
    assert repr(found).endswith("1 step, " + str(tmp_path / "run") + "; interrupted)")
    said = listener.warnings[-1]
    begun_with = tmp_path / "run" / "model-before"  # the loaded model has been trained in place
    how = f'to go on: dapo.train("{begun_with}", ..., resume="{tmp_path}/run") with the same '
    assert said.endswith(how + "prompts, reward, settings")

    whole = dapo.train(begun_with, PROMPTS, text_sum, resume=found.run_dir, listener=Recorder())  # its settings stay
    given = {"settings": settings | LONG, "listener": Recorder(), "tokenizer": TOKENIZER}
    assert whole.stopped == "all steps are done" and whole.model_path == tmp_path / "run" / "model-after"
    given["settings"] = given["settings"] | {"run.dir": str(tmp_path / "in-one-go")}
    assert weights_hash(dapo.train(tiny_model(), PROMPTS, text_sum, **given).model_path) == weights_hash(
        whole.model_path
    )


def test_ctrl_c_in_a_script_ends_it_and_the_error_has_the_result(settings: dict[str, Any], tmp_path: Path) -> None:
    assert not hasattr(sys, "ps1")
    listener = Recorder(on_step=lambda step: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as found:
        dapo.train(tiny_model(), PROMPTS, text_sum, settings | LONG, tokenizer=TOKENIZER, listener=listener)
    assert isinstance(found.value, Interrupted) and found.value.result.summary["steps"] == 1


def test_ctrl_c_before_training_has_nothing_to_give(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stops(Recorder):
        def phase(self, text: str) -> None:
            if text.startswith("evaluating"):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt) as found:
        dapo.train(
            tiny_model(), PROMPTS, text_sum, settings, tokenizer=TOKENIZER, heldout=PROMPTS[:2], listener=Stops()
        )
    assert not isinstance(found.value, Interrupted)


def test_ctrl_c_before_a_run_goes_on_does_not_give_its_old_result(settings: dict[str, Any], tmp_path: Path) -> None:
    given = {"prompts": PROMPTS, "reward": text_sum, "tokenizer": TOKENIZER}
    dapo.train(tiny_model(), settings=settings | {"training.steps": 1}, listener=Recorder(), **given)

    class Stops(Recorder):
        def phase(self, text: str) -> None:
            if text.startswith("going on from"):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as found:
        more = settings | {"training.steps": 2}
        dapo.train(tiny_model(), settings=more, listener=Stops(), resume=tmp_path / "run", **given)
    assert not isinstance(found.value, Interrupted)


def test_the_command_line_refuses_to_go_on_with_what_only_python_has(settings: dict[str, Any], tmp_path: Path) -> None:
    found, _ = interrupted(settings)
    named = json.loads((found.run_dir / "fingerprint.json").read_text())["in_memory"]
    assert named == ["model", "tokenizer", "prompts", "reward"]
    done = CliRunner().invoke(app, ["train", "--resume", str(found.run_dir)])
    assert done.exit_code == 2
    assert f"does not hold what was passed there as {', '.join(named)}; go on in Python" in " ".join(
        done.stderr.split()
    )
    assert 'dapo.train("' in done.stderr


def test_what_the_run_folder_names_goes_on_from_the_command_line(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(json_line, PROMPTS)))
    by_name = {"model": tmp_path / "model", "tokenizer": None, "prompts": file, "reward": None}
    open_to_all = {"reward.kind": "exact", "algorithm.filter_groups.enable": False}
    found, listener = interrupted(settings | open_to_all, **by_name)
    assert listener.warnings[-1].endswith(f"to go on: dapo train --resume {found.run_dir}")
    done = CliRunner().invoke(app, ["train", "--resume", str(found.run_dir), "--quiet"])
    assert done.exit_code == 0, done.output
    assert len(dapo.open_run(found.run_dir).metrics) == 3
