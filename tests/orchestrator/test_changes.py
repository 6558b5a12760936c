"""Settings that change when a run goes on: what stays, from which step they hold, what is refused, where it is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dapo.orchestrator.kept_run
from dapo.algorithm.objective import DapoObjective
from dapo.commands import app
from dapo.commands.report.content import sections_of
from dapo.commands.ui.curves import marks
from dapo.config.on_resume import (
    BETWEEN_STEPS,
    BY_CONTENT,
    FIXED,
    FROM_THE_NEXT_STEP,
    MAY_CHANGE,
    MAY_CHANGE_UNLESS_DETERMINISTIC,
    may_change,
)
from dapo.config.reference import all_values
from dapo.errors import ConfigError, UserError
from dapo.observe.changes import Change, read_changes
from dapo.observe.checkpoints import Checkpoints
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.orchestrator.resume import changes_at, resume_config
from dapo.training.checkpoint import load_tensors
from dapo.training.learner import LocalLearner
from dapo.training.trainer import Trainer
from dapo.util.differences import Difference
from dapo.util.pages import as_markdown
from run_cases import (
    PROMPTS,
    TOKENIZER,
    Recorder,
    config_for,
    last_checkpoint,
    run,
    steps_of,
    text_sum,
    tiny_model,
    weights_hash,
)

TWO: dict[str, Any] = {"training.steps": 2, "run.save_every": 1, "run.keep_last": None}


class Stopped(Exception):
    """What stops a run in these tests."""


def go_on(folder: Path, *overrides: str, listener: Recorder | None = None, **inputs: Any) -> dict[str, Any]:
    """As `dapo train --resume` does, with what a test passes from Python."""
    given = {"model": tiny_model(), "tokenizer": TOKENIZER, "rows": PROMPTS, "reward": text_sum} | inputs
    config = resume_config(folder, None, overrides)
    return run_experiment(config, listener or Recorder(), RunOverrides(**given, resume=RunFolder(folder)))


def stopped_at(folder: Path, owner: type, method: str, number: int) -> None:
    """A run of three steps, until the ``number``-th call of a method."""
    original, calls = getattr(owner, method), []

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise Stopped
        return original(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, counted)
        with pytest.raises(Stopped):
            run(folder, TWO | {"training.steps": 3})


def changes_of(folder: Path) -> list[str]:
    return [str(change) for change in read_changes(RunFolder(folder).fingerprint)]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    run(folder, TWO)
    return folder


@pytest.fixture
def two(two_steps: Path, tmp_path: Path) -> Path:
    """A copy of a run of two steps. Its settings name another folder, as those of any copy do."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


# --- which keys -----------------------------------------------------------------------------------------------------


def test_every_key_has_one_decision() -> None:
    """Whoever adds a key decides whether it may change on resume; of a whole section, what stands for it holds."""
    tables = [MAY_CHANGE, FROM_THE_NEXT_STEP, BETWEEN_STEPS, MAY_CHANGE_UNLESS_DETERMINISTIC, BY_CONTENT]
    named = [key for table in [*tables, *FIXED.values()] for key in table]
    assert len(named) == len(set(named))
    wholes = ("reward", "monitor", "run", "model.lora", "runtime.learner", "runtime.engine", "runtime.reward")
    wholes += ("data.live", "data.proposer")
    unknown = [key for key in named if key not in all_values() and key not in wholes]
    undecided = [key for key in all_values() if key not in named and not key.startswith(tuple(f"{w}." for w in wholes))]
    assert (unknown, undecided) == ([], [])


@pytest.mark.parametrize("key", ["reward.device", "reward.parts.taste.reward.device"])
def test_a_reward_model_may_move_off_a_full_card_and_an_older_run_begun_on_the_processor_goes_on(key: str) -> None:
    assert may_change(key, deterministic=False, inside=True) and not may_change(key, deterministic=True)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("training.betas=[0.8,0.99]", "training.betas: was [0.9, 0.999], is now [0.8, 0.99] (Adam's moments"),
        ("rollout.temperature=0.5", "rollout.temperature: was 1.0, is now 0.5 (it would be another policy)"),
        ("data.max_prompt_length=9", "(prompts or their order would be others)"),
        ("runtime.threads=2", "(with runtime.deterministic it would change the last bits)"),
        ("reward.on_error=value", "(rewards so far would mean something else)"),
    ],
)
def test_what_is_refused_says_why(two_steps: Path, override: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resume_config(two_steps, None, [override])
    assert why in str(caught.value)


# --- between two steps ----------------------------------------------------------------------------------------------


def test_rate_and_decay_change_and_the_moments_stay(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is AdamW's, made by hand from the stored moments and weights, at the new rate and decay."""
    stored, counters = load_tensors(last_checkpoint(two) / "optimizer")
    seen: list[tuple[Any, ...]] = []
    apply = Trainer._apply

    def watched(self: Trainer, totals: Any) -> Any:
        before = {name: p.detach().double().clone() for name, p in self._parameters.items()}
        state = {name: dict(self._optimizer.state[p]) for name, p in self._parameters.items()}
        state = {name: {k: v.clone() for k, v in one.items()} for name, one in state.items()}
        done = apply(self, totals)
        clipped = {name: p.grad.double().clone() for name, p in self._parameters.items()}
        seen.append((before, state, clipped, {name: p.detach().clone() for name, p in self._parameters.items()}))
        return done

    monkeypatch.setattr(Trainer, "_apply", watched)
    go_on(two, "training.steps=3", "training.learning_rate=1e-3", "training.weight_decay=0.5")
    assert [entry["lr"] for entry in steps_of(two)] == [3e-3, 3e-3, 1e-3]
    before, state, gradient, after = seen[0]
    assert {f"{name}/{key}" for name, one in state.items() for key in one} == set(stored)
    assert all(torch.equal(state[name][key], stored[f"{name}/{key}"]) for name in state for key in state[name])
    assert counters["updates"] == 4
    for name, weights in before.items():
        g, m, v = gradient[name], state[name]["exp_avg"].double(), state[name]["exp_avg_sq"].double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        root = (v / (1 - 0.999**5)).sqrt() + 1e-8
        by_hand = weights * (1 - 1e-3 * 0.5) - 1e-3 * m / (1 - 0.9**5) / root
        torch.testing.assert_close(after[name].double(), by_hand, rtol=1e-5, atol=1e-7)


def test_a_changed_warm_up_is_that_of_the_present_step(two: Path) -> None:
    """Step 3 of a warm-up over 10 has 3 tenths of the rate."""
    go_on(two, "training.steps=3", "training.warmup_steps=10")
    assert steps_of(two)[2]["lr"] == pytest.approx(3e-3 * 3 / 10)


def objectives(patch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Groups per update and upper clip bound of the objectives from now on, those alike in a row once."""
    made: list[tuple[int, float]] = []
    original = LocalLearner.objective.fget  # type: ignore[attr-defined]

    def watched(self: LocalLearner) -> DapoObjective:
        found: DapoObjective = original(self)
        now = (self._config.training.groups_per_update, found.clip_ratio_high)
        made.extend([now] if [now] != made[-1:] else [])
        return found

    patch.setattr(LocalLearner, "objective", property(watched))
    return made


def test_a_run_keeps_what_was_changed_when_it_goes_on_again(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped inside of the step after, without overrides: the bits of a run that was not stopped."""
    whole = Path(shutil.copytree(two, two.with_name("whole")))
    changes = ("algorithm.clip_ratio_high=0.02", "training.learning_rate=1e-3")
    go_on(whole, "training.steps=4", *changes)
    made = objectives(monkeypatch)
    go_on(two, "training.steps=3", *changes)
    with pytest.MonkeyPatch.context() as patch:
        update, calls = Trainer.update, []

        def second(*given: Any) -> Any:
            calls.append(None)
            if len(calls) == 2:
                raise Stopped
            return update(*given)

        patch.setattr(Trainer, "update", second)
        with pytest.raises(Stopped):
            go_on(two, "training.steps=4")
    assert last_checkpoint(two).name == "step-00003-update-00001"
    go_on(two)
    assert {high for _, high in made} == {0.02}
    assert weights_hash(RunFolder(two).model_after) == weights_hash(RunFolder(whole).model_after)
    wanted = ["step 3: algorithm.clip_ratio_high 0.28 -> 0.02", "step 3: training.learning_rate 0.003 -> 0.001"]
    assert set(wanted) <= set(changes_of(two)) and len(changes_of(two)) == 4  # and training.steps, twice
    fingerprint = json.loads(RunFolder(two).fingerprint.read_text())
    assert fingerprint["settings"]["training"]["learning_rate"] == 1e-3


def test_what_was_changed_after_the_checkpoint_is_changed_there_now(two: Path) -> None:
    """Its own checkpoints are damaged, so the run goes back to before the change: the record goes with it."""
    go_on(two, "training.steps=3", "training.learning_rate=1e-3")
    for name in ("step-00002", "step-00003"):
        (RunFolder(two).checkpoints / name / "state.json").unlink()
    go_on(two)
    assert [entry["lr"] for entry in steps_of(two)] == [3e-3, 1e-3, 1e-3]
    assert "step 2: training.learning_rate 0.003 -> 0.001" in changes_of(two)
    shutil.rmtree(RunFolder(two).checkpoints)
    go_on(two)  # from the start: no step has had another rate
    assert [entry["lr"] for entry in steps_of(two)] == [1e-3, 1e-3, 1e-3] and changes_of(two) == []


def fails(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def stop(*given: Any, **named: Any) -> None:
        raise Stopped

    patch.setattr(owner, name, stop)


def test_a_kill_while_changes_are_recorded_records_each_once(two: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="cannot be written"):
        fails(patch, dapo.orchestrator.kept_run, "write_json")
        go_on(two, "training.steps=3", "training.learning_rate=1e-3")
    go_on(two)  # config.yaml has them already
    assert changes_of(two) == [SAID, "step 3: training.steps 2 -> 3"]


@pytest.mark.parametrize("place", ["step-00002", "step-00002-rollout"])
def test_a_change_that_is_taken_back_before_any_step_had_it_leaves_no_trace(tmp_path: Path, place: str) -> None:
    """The comparison before and after training and the best step stay, too."""
    folder = tmp_path / "run"
    before = run(folder, TWO | {"evaluation.every": 1}, heldout=PROMPTS[:4])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        fails(patch, *((Collector, "take") if place == "step-00002" else (LocalLearner, "annotated")))
        go_on(folder, "training.steps=3", "training.learning_rate=1e-3", "evaluation.top_k=3", heldout=PROMPTS[4:9])
    assert last_checkpoint(folder).name == place and len(changes_of(folder)) == 5
    listener = Recorder()
    back = ("training.learning_rate=3e-3", "evaluation.top_k=0")
    summary = go_on(folder, *back, listener=listener, heldout=PROMPTS[:4])
    kept = [] if place == "step-00002" else [SAID, "step 4: training.learning_rate 0.001 -> 0.003"]  # its step began
    assert set(changes_of(folder)) == {"step 3: training.steps 2 -> 3", *kept}
    assert [entry["lr"] for entry in steps_of(folder)] == [3e-3, 3e-3, 1e-3 if kept else 3e-3]
    assert summary["accuracy_before"] == before["accuracy_before"] and RunView.read(folder).comparable_from == 0
    assert not any("cannot be compared" in text for text in listener.warnings)


def test_an_adaptive_kl_coefficient_stays_unless_it_is_changed_itself() -> None:
    def config(**kl: Any) -> Any:
        return config_for(Path("run"), {f"algorithm.kl.{key}": value for key, value in kl.items()})

    preparer = BatchBuilder(config(mode="loss", coef=0.1, target=0.01, horizon=1000))
    preparer.kl.load_state({"coef": 0.25})
    preparer.use(config(mode="loss", coef=0.1, target=0.02, horizon=2000))
    assert preparer.kl.coef == 0.25 and preparer.kl.target == 0.02
    preparer.use(config(mode="loss", coef=0.5, target=0.02, horizon=2000))
    assert preparer.kl.coef == 0.5
    preparer.use(config(mode="loss", coef=0.3))
    assert preparer.kl.coef == 0.3 and preparer.kl.target is None


# --- inside of a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "method", "number", "name"),
    [(Trainer, "update", 4, "step-00001-update-00001"), (LocalLearner, "annotated", 2, "step-00001-rollout")],
)
def test_a_step_under_way_is_finished_with_the_settings_it_began_with(
    tmp_path: Path, owner: type, method: str, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    stopped_at(folder, owner, method, number)
    assert last_checkpoint(folder).name == name
    made, listener = objectives(monkeypatch), Recorder()
    changes = ("algorithm.clip_ratio_high=0.02", "training.groups_per_update=4", "training.learning_rate=1e-3")
    go_on(folder, *changes, "training.max_skipped_updates=9", listener=listener)
    assert made == [(2, 0.28), (4, 0.02)]
    assert [entry["lr"] for entry in steps_of(folder)] == [3e-3, 3e-3, 1e-3]
    assert [entry["updates"] for entry in steps_of(folder)] == [2, 2, 1]
    assert "changed from step 3: algorithm.clip_ratio_high 0.28 -> 0.02" in listener.phases
    assert "changed from step 2: training.max_skipped_updates 3 -> 9" in listener.phases  # a limit holds at once


@pytest.mark.parametrize(
    ("override", "name", "steps"),
    [
        (
            "run.save_every=1",
            "step-00001-update-00001",
            [2, 3],
        ),  # edited: the objective is loaded anew, advantages are there
        ("run.save_every=1", "step-00001-rollout", [2, 2]),
        ("algorithm.objective=own.py:one", "step-00001-rollout", [3, 2]),  # the step is finished with the other file
    ],
)
def test_the_code_of_a_file_is_another_one_from_the_step_that_first_runs_it(
    two: Path, override: str, name: str, steps: list[int]
) -> None:
    edited = [Difference(f"{part}.file", "a", "b") for part in ("objective", "advantage")]
    config = resume_config(two, None, ["training.steps=3", override])
    changes = {change.key: change.step for change in changes_at(RunFolder(two), config, Path(name), edited)}
    assert [changes["fingerprint.objective.file"], changes["fingerprint.advantage.file"]] == steps


def test_what_a_step_is_sampled_by_is_refused_inside_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped_at(folder, Trainer, "update", 4)
    with pytest.raises(ConfigError) as caught:
        go_on(folder, "rollout.samples_per_prompt=3")
    said = str(caught.value)
    assert (
        "step-00001-update-00001 is inside of step 2" in said and "rollout.samples_per_prompt: was 4, is now 3" in said
    )
    assert "training.steps=2" in said and "move checkpoints/step-00001-update-00001 elsewhere" in said
    go_on(folder, "training.steps=2")  # the first of the two ways that it names
    go_on(folder, "training.steps=3", "rollout.samples_per_prompt=3")
    assert [entry["updates/total"] for entry in steps_of(folder)] == [2, 4, 6]
    lines = (RunFolder(folder).samples / "step-00003.jsonl").read_text().splitlines()
    assert {json.loads(line)["index"] for line in lines} == {0, 1, 2}


def test_the_checkpoint_before_takes_what_is_refused_inside_of_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped_at(folder, Trainer, "update", 4)
    (RunFolder(folder).checkpoints / "step-00001-update-00001").rename(tmp_path / "elsewhere")
    go_on(folder, "rollout.samples_per_prompt=3")
    assert "step 2: rollout.samples_per_prompt 4 -> 3" in changes_of(folder)


# --- evaluation -----------------------------------------------------------------------------------------------------


def test_other_rows_to_evaluate_on_are_told_and_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, TWO | {"evaluation.every": 1}, heldout=PROMPTS[:4])
    listener = Recorder()
    summary = go_on(folder, "training.steps=3", listener=listener, heldout=PROMPTS[4:10])
    assert any("the evaluation is not the one that the run started with" in text for text in listener.warnings)
    assert any("cannot be compared with those from now on" in text for text in listener.warnings)
    assert "accuracy_before" not in summary and summary["heldout_rows"] == 6 and summary["best"]["step"] == 3
    assert (Checkpoints(RunFolder(folder).checkpoints).best or {})["step"] == 3  # though an earlier one had more
    view = RunView.read(folder)
    assert view.comparable_from == 3 and view.accuracies[0] is None
    assert "step 3: fingerprint.evaluation.data.rows 4 -> 6" in changes_of(folder)
    page = as_markdown("r", sections_of(view))
    assert "Those before step 3 are of other rows or settings" in page and "Accuracy changed by" not in page
    go_on(folder, "training.steps=4", heldout=PROMPTS[4:10])  # now they are the run's own
    assert RunView.read(folder).comparable_from == 3


def test_a_finished_run_keeps_its_evaluations_until_another_step_follows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = run(folder, TWO | {"evaluation.every": 1}, heldout=PROMPTS[:4])
    listener = Recorder()
    summary = go_on(folder, "evaluation.max_response_length=3", listener=listener, heldout=PROMPTS[:4])
    assert {key: summary[key] for key in ("accuracy_before", "accuracy_after", "best")} == {
        key: before[key] for key in ("accuracy_before", "accuracy_after", "best")
    }
    assert RunView.read(folder).comparable_from == 0
    assert not any("cannot be compared" in text for text in listener.warnings)
    summary = go_on(folder, "training.steps=3", listener=listener, heldout=PROMPTS[:4])
    assert "accuracy_before" not in summary and summary["best"]["step"] == 3
    assert any("cannot be compared" in text for text in listener.warnings)


def test_a_run_without_evaluations_is_told_of_none(two: Path) -> None:
    listener = Recorder()
    go_on(two, "training.steps=3", "rollout.max_response_length=5", listener=listener)
    assert not any("evaluation" in text for text in listener.warnings)


def test_a_patience_does_not_make_it_another_evaluation(tmp_path: Path) -> None:
    assert not Change(2, "evaluation.patience", None, 3, "").of_evaluation
    assert Change(2, "evaluation.temperature", 0.0, 1.0, "").of_evaluation
    assert Change(2, "fingerprint.reward.file", "a", "b", "").of_evaluation
    assert not Change(2, "training.learning_rate", 1, 2, "").of_evaluation


# --- where it is told -----------------------------------------------------------------------------------------------

SAID = "step 3: training.learning_rate 0.003 -> 0.001"


def test_fewer_steps_than_are_done_are_refused(two: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.steps=1: 2 steps of .* are done"):
        go_on(two, "training.steps=1")


def test_a_dry_run_inspect_report_and_page_tell_of_it(two: Path) -> None:
    record = RunFolder(two).fingerprint  # as of a run whose model, rows and reward lie in files
    record.write_text(json.dumps(json.loads(record.read_text()) | {"in_memory": []}))
    dry = ["train", "--resume", str(two), "--dry-run", "training.steps=3", "training.learning_rate=1e-3"]
    result = CliRunner().invoke(app, dry)  # the model is not there, which it says last
    assert f"# changes: {SAID}; step 3: " in result.output and changes_of(two) == []
    go_on(two, "training.steps=3", "training.learning_rate=1e-3")
    inspected = CliRunner().invoke(app, ["inspect", str(two)]).output
    assert "changed " in inspected and SAID in inspected
    found = json.loads(CliRunner().invoke(app, ["inspect", str(two), "--json"]).output)["changes"]
    assert {"step": 3, "key": "training.learning_rate", "old": 0.003, "new": 0.001} in [
        {name: value for name, value in one.items() if name != "date"} for one in found
    ]
    view = RunView.read(two)
    assert "| from step 3 | training.learning\\_rate | 0.003 | 0.001 |" in as_markdown("r", sections_of(view))
    ((x, text),) = marks(view.metrics, view.changes)
    assert x == 3 and SAID in text.splitlines()
    elapsed = view.metrics[-1]["time/elapsed"]
    assert [place for place, _ in marks(view.metrics, view.changes, "time/elapsed")] == [elapsed]


def test_relative_paths_are_looked_for_where_the_run_was_at_work(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work := two.parent / "work").mkdir()
    for name in ("rows.jsonl", "own.py"):
        (work / name).touch()
    environment = json.loads(RunFolder(two).environment.read_text())
    RunFolder(two).environment.write_text(json.dumps(environment | {"folder": str(work)}))
    named = ["data.train=rows.jsonl", "algorithm.objective=own.py:one"]
    with pytest.raises(ConfigError) as caught:
        resume_config(two, None, named)
    assert f"not found in {Path.cwd()}" in str(caught.value) and f"They are in {work}" in str(caught.value)
    assert "data.train: rows.jsonl, algorithm.objective: own.py." in str(caught.value)
    monkeypatch.chdir(work)
    resume_config(two, None, named)


def test_a_damaged_record_is_named(two: Path) -> None:
    record = RunFolder(two).fingerprint
    record.write_text(json.dumps(json.loads(record.read_text()) | {"changes": [{"step": 3}]}))
    with pytest.raises(UserError, match=r"fingerprint\.json: changes: one is not a change of a setting"):
        resume_config(two, None, ["training.steps=3"])
