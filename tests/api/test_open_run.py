"""``dapo.open_run``: a run folder as tables, without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dapo
from dapo.config import load_config
from dapo.errors import UserError
from dapo.observe.run_view import RunView
from run_cases import PROMPTS, run
from stored_run import RIGHT, WRONG, group, stored_run
from test_imports import HEAVY, loaded_by

NAMES = ("evaluate", "generate", "open_run", "train")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return stored_run(
        tmp_path / "run", {1: [group(0, 0, [("4", RIGHT), ("5", WRONG)])], 2: [group(1, 1, [("6", RIGHT)])]}
    ).root


def test_the_tables_of_a_run_are_its_files(tmp_path: Path) -> None:
    summary = run(tmp_path, {"training.steps": 2, "evaluation.every": 1}, heldout=PROMPTS[:3])
    found = dapo.open_run(tmp_path)
    assert list(found.metrics["step"]) == [1, 2] and found.metrics["reward/mean"].notna().all()
    assert list(found.evaluations["step"]) == [0, 1, 2] and set(found.evaluations["eval/rows"]) == {3}
    assert {name.partition("/")[0] for name in found.evaluations.columns} == {"step", "eval"}
    assert found.summary == summary and found.config["training"]["steps"] == 2
    assert found.config["reward"] == "a Python function: text_sum"
    assert found.config["data"]["train"] == found.config["evaluation"]["data"] == "rows passed from Python"
    assert repr(found).startswith("Run(accuracy ") and repr(found).endswith("; finished: all steps are done)")


def test_samples_are_those_of_the_steps_that_are_asked_for(stored: Path) -> None:
    found = dapo.open_run(str(stored))
    assert list(found.samples()["response"]) == ["6"]  # of the last step
    assert list(found.samples(1)["response"]) == ["4", "5"] and list(found.samples(step=1)["correct"]) == [True, False]
    assert list(found.samples((1, 2))["step"]) == [1, 1, 2]
    with pytest.raises(UserError, match="no samples of step 3; there are those of steps 1 to 2"):
        found.samples(3)


def test_a_run_under_way_is_read_as_far_as_it_is(stored: Path) -> None:
    found = dapo.open_run(stored)
    assert len(found.metrics) == 2 and len(found.evaluations) == 0 and found.summary == {}
    with (stored / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "accuracy": 0.75}\n{"step": 4, "accu')
    assert list(found.metrics["accuracy"]) == [0.5, 0.5, 0.75]


def test_the_recipe_of_an_earlier_version_is_checked_without_the_keys_that_are_gone(stored: Path) -> None:
    """Where they held nothing; :meth:`RunView.settings` is what page and report go by."""
    (stored / "fingerprint.json").write_text("{}")
    file = stored / "config.yaml"
    recipe = file.read_text()
    file.write_text(recipe + "bygone: null\n")
    assert RunView.read(stored).settings() == load_config(file)
    file.write_text(recipe + "bygone: 1\n")
    with pytest.raises(UserError, match="bygone: unknown key"):
        RunView.read(stored).settings()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        dapo.open_run(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        dapo.open_run(tmp_path / "gone")


def test_without_pandas_the_extra_is_named(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"need pandas: pip install 'dapo-rl\[data\]'"):
        dapo.open_run(stored).metrics  # noqa: B018
    assert dapo.open_run(stored).config["model"]["path"] == "some/model"


def test_a_run_is_read_without_torch(stored: Path) -> None:
    seen = loaded_by(f"import dapo; run = dapo.open_run({str(stored)!r}); run.metrics, run.samples()")
    assert "pandas" in seen and not seen & set(HEAVY)


def test_what_there_is_shows_before_it_is_loaded() -> None:
    code = f"import dapo, sys; assert set(dir(dapo)) >= {set(NAMES)}, dir(dapo); assert 'dapo.api' not in sys.modules"
    assert not loaded_by(code) & {*HEAVY, "numpy", "pydantic"}
    assert all(callable(getattr(dapo, name)) for name in NAMES)
