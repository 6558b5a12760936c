"""Runs that all tests here may read, and copies of them to plant something in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from replay_cases import make_run

from run_cases import Recorder, run


@pytest.fixture(scope="session")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, of which the weights before the first and after the last are kept."""
    return make_run(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def copied_run(kept_run: Path, tmp_path: Path) -> Path:
    """A copy to plant something in."""
    return Path(shutil.copytree(kept_run, tmp_path / "copy"))


@pytest.fixture(scope="session")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after the second step and after the first update of the third, and resumed both times."""
    from replay_cases import recipe

    from dapo.errors import NumericalError
    from dapo.observe.run_folder import RunFolder
    from dapo.training.trainer import Trainer

    folder = tmp_path_factory.mktemp("resumed")
    keep_all = {"run.keep_last": None}
    make_run(folder, keep_all | {"training.steps": 2})

    def resume() -> None:
        settings = recipe(folder) | keep_all
        run(folder / "run", settings, Recorder(), rows=None, reward=None, resume=RunFolder(folder / "run"))

    update, calls = Trainer.update, []

    def stopped(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise NumericalError("stopped by a test")
        return update(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", stopped)
        with pytest.raises(NumericalError):
            resume()
    resume()
    return folder / "run"
