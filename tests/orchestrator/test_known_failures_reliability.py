"""Public failures of other trainers: section (d), reliability, of shared/cases/failures.md.

Most are tested where their mechanism is; these need several parts. The number of an entry stands in a test's name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dapo.errors import UserError
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.orchestrator.model_writer import ModelWriter
from run_cases import TOKENIZER, Recorder, config_for, run, text_sum, tiny_model


def test_a_checkpoint_that_cannot_be_removed_ends_no_run_failures_82(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).parent.name == "checkpoints" and not kwargs.get("ignore_errors") and not (args and args[0]):
            raise PermissionError(13, "Permission denied", str(path))
        if Path(path).parent.name != "checkpoints":
            remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    summary = run(tmp_path / "run", {"training.steps": 3, "run.save_every": 1, "run.keep_last": 1})
    assert summary["stopped"] == "all steps are done" and RunFolder(tmp_path / "run").model_after.is_dir()


def rows_of(folder: Path) -> list[int]:
    """Row numbers in the order of training."""
    steps = sorted(RunFolder(folder).samples.glob("*.jsonl"))
    return [sample["row"] for path in steps for sample in read_samples(path) if sample["index"] == 0]


@pytest.mark.nightly
def test_rows_after_a_resume_are_those_of_the_run_that_was_not_stopped_failures_85_86(tmp_path: Path) -> None:
    """A thousand rows, 128 a step, stopped after 8 steps, which is inside of the second epoch."""
    rows = [{"prompt": f"{n // 100}+{n % 100}=", "answer": str(n)} for n in range(1000)]
    changes = {
        "rollout.prompts_per_step": 128,
        "rollout.samples_per_prompt": 2,
        "rollout.max_response_length": 2,
        "rollout.max_concurrent_samples": 256,
        "algorithm.overlong_buffer.enable": False,
        "algorithm.filter_groups.enable": False,
        "training.groups_per_update": 128,
    }
    run(tmp_path / "whole", changes | {"training.steps": 10}, rows=rows)
    run(tmp_path / "parts", changes | {"training.steps": 8}, rows=rows)
    given = RunOverrides(
        model=tiny_model(), tokenizer=TOKENIZER, rows=rows, reward=text_sum, resume=RunFolder(tmp_path / "parts")
    )
    run_experiment(config_for(tmp_path / "parts", changes | {"training.steps": 10}), Recorder(), given)
    found = rows_of(tmp_path / "parts")
    assert found == rows_of(tmp_path / "whole") and len(found) == 1280
    assert sorted(found[:1000]) == list(range(1000)), "an epoch holds every row once"
    assert found[1000:] != found[:280], "the second epoch has an order of its own"


def test_weights_that_cannot_be_written_at_the_end_are_an_error_that_says_where_the_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_: ModelWriter) -> None:
        raise UserError("model-after: cannot be written: No space left on device")

    monkeypatch.setattr(ModelWriter, "write_after", full)
    with pytest.raises(UserError, match=r"(?s)No space left.*2 steps were done; the state is in .*step-00002.*go on: "):
        run(tmp_path, {"training.steps": 2})
