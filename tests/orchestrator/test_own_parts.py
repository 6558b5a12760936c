"""Prompt source, engine, observer, metric and benchmark from a user's file or from Python, through whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import dapo
import own_methods
from command_cases import dapo as dapo_command
from command_cases import save_model, sums, write_rows
from dapo.config import load_config, warnings_for
from dapo.errors import ConfigError, UserError
from dapo.observe.run_folder import RunFolder
from dapo.util.user_code import load_named
from run_cases import (
    PROMPTS,
    SETTINGS,
    TOKENIZER,
    Recorder,
    run,
    steps_of,
    text_sum,
    tiny_model,
    weights_hash,
    without_times,
)

STEPS = {"training.steps": 4, "run.save_every": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(own_methods.__file__, tmp_path / "own_parts.py"))


def fingerprint_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "fingerprint.json").read_text())
    return found


def rows_drawn(folder: Path) -> list[int]:
    files = sorted((folder / "samples").glob("step-*.jsonl"))
    return [json.loads(line)["row"] for file in files for line in file.read_text().splitlines()]


def test_a_source_of_a_file_is_drawn_from_and_goes_on_where_it_was(tmp_path: Path, file: Path) -> None:
    named = STEPS | {"data.source": f"{file}:Curriculum"}
    run(tmp_path / "whole", named, rows=PROMPTS[:12])
    run(tmp_path / "two", named | {"training.steps": 2}, rows=PROMPTS[:12])
    run(tmp_path / "two", named, rows=PROMPTS[:12], resume=RunFolder(tmp_path / "two"))
    assert weights_hash(tmp_path / "two/model-after") == weights_hash(tmp_path / "whole/model-after")
    assert rows_drawn(tmp_path / "two") == rows_drawn(tmp_path / "whole")
    run(tmp_path / "plain", STEPS, rows=PROMPTS[:12])
    assert rows_drawn(tmp_path / "plain") != rows_drawn(tmp_path / "whole")  # what was solved is left out
    found = fingerprint_of(tmp_path / "whole")["source"]
    assert found["function"] == "Curriculum" and len(found["file"]) == 16


def test_a_source_whose_state_no_checkpoint_can_keep_is_refused(tmp_path: Path) -> None:
    """Before anything is written, or in the step in which it becomes so; what was learned is saved all the same."""

    class Seen(own_methods.Curriculum):
        def state(self) -> dict[str, Any]:
            return super().state() | {"seen": set()}

    class ByRow(own_methods.Curriculum):
        def state(self) -> dict[str, Any]:
            return super().state() | {"by_row": {7: 1} if self.draws else {}}

    with pytest.raises(UserError, match=r"data.source: state\(\)\['seen'\] is a set, which a checkpoint cannot"):
        run(tmp_path / "seen", source=Seen)
    assert not (tmp_path / "seen").exists()
    with pytest.raises(
        UserError, match=r"(?s)\['by_row'\] has the key 7, .*1 step was done; the state is in .*step-00001"
    ):
        run(tmp_path / "run", source=ByRow)
    with pytest.raises(UserError, match="this checkpoint lacks the source's state"):
        run(tmp_path / "run", source=ByRow, resume=RunFolder(tmp_path / "run"))


def test_another_source_is_refused_when_a_run_goes_on_and_mended_code_is_said(tmp_path: Path, file: Path) -> None:
    named = {"data.source": f"{file}:Curriculum"}
    run(tmp_path / "run", named)
    more, listener = {"training.steps": 2}, Recorder()
    with pytest.raises(ConfigError, match=r"data.source.*prompts or their order would be others"):
        dapo.train("tiny", PROMPTS, text_sum, {"data.source": None}, resume=tmp_path / "run")
    with pytest.raises(UserError, match="what it started from has changed:\nsource"):
        run(tmp_path / "run", more, resume=RunFolder(tmp_path / "run"))
    file.write_text(file.read_text() + "\n# changed\n")
    run(tmp_path / "run", named | more, listener, resume=RunFolder(tmp_path / "run"))
    assert any(text.startswith("the source is not the one that the run started with") for text in listener.warnings)


def test_an_engine_of_a_file_samples_with_the_weights_it_is_handed(tmp_path: Path, file: Path) -> None:
    named = {"rollout.engine": f"{file}:PlainEngine", "training.steps": 3, "run.save_every": 1}
    run(tmp_path / "whole", named)
    run(tmp_path / "two", named | {"training.steps": 2})
    run(tmp_path / "two", named, resume=RunFolder(tmp_path / "two"))
    assert weights_hash(tmp_path / "two/model-after") == weights_hash(tmp_path / "whole/model-after")
    steps = steps_of(tmp_path / "whole")
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(step["mismatch/mean"] < 1e-4 for step in steps)  # stale weights would show
    assert yaml.safe_load((tmp_path / "whole/config.yaml").read_text())["algorithm"]["proximal"] == "auto"
    assert fingerprint_of(tmp_path / "whole")["engine"]["function"] == "PlainEngine"
    with pytest.raises(UserError, match="it would be another policy"):
        dapo.train("tiny", PROMPTS, text_sum, {"rollout.engine": "native"}, resume=tmp_path / "whole")


def test_observers_hear_and_one_that_fails_does_not_stop_the_run(tmp_path: Path, file: Path) -> None:
    listener = Recorder()
    named = {"run.trackers": [f"{file}:Notes", f"{file}:Falls"], "training.steps": 2}
    run(tmp_path / "run", named, listener, heldout=PROMPTS[:3])
    lines = (tmp_path / "run/notes.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("step ")] == ["step 0 True", "step 1 False", "step 2 True"]
    assert lines.count("seed 9") == 2 and "steps 2" in lines and lines[-1] == "closed"
    (said,) = [text for text in listener.warnings if "tracker" in text]
    assert said.endswith("own_parts.py:Falls failed, and the run goes on without it: RuntimeError: no room")
    assert fingerprint_of(tmp_path / "run")["run.trackers"]["0"]["function"] == "Notes"
    run(tmp_path / "plain", {"training.steps": 2}, heldout=PROMPTS[:3])
    pairs = zip(steps_of(tmp_path / "plain"), steps_of(tmp_path / "run"), strict=True)
    assert all(without_times(one) == without_times(other) for one, other in pairs)
    # other observers on resume are nobody's concern
    run(tmp_path / "run", {"training.steps": 3}, heldout=PROMPTS[:3], resume=RunFolder(tmp_path / "run"))


def test_a_metric_of_a_file_is_among_those_of_each_evaluation(tmp_path: Path, file: Path) -> None:
    named = {"evaluation.metrics.distinct": f"{file}:distinct", "evaluation.temperature": 1.0}
    run(tmp_path / "run", named, heldout=PROMPTS[:5])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [0 < line["eval/metric/distinct"] <= 1 for line in lines] == [True, True]
    assert fingerprint_of(tmp_path / "run")["evaluation.metrics"]["distinct"]["function"] == "distinct"
    # they may come and go, and evaluations can still be compared
    listener = Recorder()
    more = {"training.steps": 2, "evaluation.temperature": 1.0}
    run(tmp_path / "run", more, listener, heldout=PROMPTS[:5], resume=RunFolder(tmp_path / "run"))
    assert not any("cannot be compared" in text for text in listener.warnings)
    with pytest.raises(ConfigError, match=r"evaluation.metrics.bad: ZeroDivisionError.*own_parts.py:\d+ in broken"):
        run(tmp_path / "bad", {"evaluation.metrics.bad": f"{file}:broken"}, heldout=PROMPTS[:5])


def test_a_run_whose_metric_failed_goes_on_once_it_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("seen = []\n\ndef size(groups):\n    seen.append(1)\n    return 1 / (2 - len(seen))\n")
    named = {"evaluation.metrics.size": f"{file}:size", "evaluation.every": 1, "training.steps": 2}
    with pytest.raises(ConfigError, match=r"evaluation.metrics.size: ZeroDivisionError"):
        run(tmp_path / "run", named, heldout=PROMPTS[:3])
    file.write_text("def size(groups):\n    return len(groups)\n")
    run(tmp_path / "run", named, heldout=PROMPTS[:3], resume=RunFolder(tmp_path / "run"))
    assert [step["eval/metric/size"] for step in steps_of(tmp_path / "run")] == [3, 3]
    run(tmp_path / "whole", named, heldout=PROMPTS[:3])
    assert weights_hash(tmp_path / "run/model-after") == weights_hash(tmp_path / "whole/model-after")


def test_what_is_given_in_python_is_used(tmp_path: Path) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "model.path"}
    settings |= {"run.dir": str(tmp_path / "run"), "training.steps": 2}
    model, made = tiny_model(), []

    def engine(config: Any, model: Any, stop_ids: Any, decode: Any) -> own_methods.PlainEngine:
        made.append(own_methods.PlainEngine(config, model, stop_ids, decode))
        made[-1].about = "one sample after the other"
        return made[-1]

    given: dict[str, Any] = {"source": own_methods.Curriculum, "engine": engine, "trackers": [own_methods.Notes]}
    listener = Recorder()
    given |= {"metrics": {"distinct": own_methods.distinct}, "heldout": PROMPTS[:3], "listener": listener}
    result = dapo.train(model, PROMPTS, text_sum, settings, tokenizer=TOKENIZER, **given)
    assert "sampling: one sample after the other" in listener.phases
    assert made[0].version == 2 and (result.run_dir / "notes.txt").is_file()
    assert "eval/metric/distinct" in result.metrics[-1]
    assert result.run.config["algorithm"]["proximal"] == "recompute"
    fingerprint = fingerprint_of(result.run_dir)
    assert {"kind": "python", "function": "Curriculum"}.items() <= fingerprint["source"].items()
    assert {"source", "engine"} <= set(fingerprint["in_memory"])
    assert {"kind": "python", "function": "distinct"}.items() <= fingerprint["evaluation.metrics"]["distinct"].items()


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.source", "mine", r"data.source: can be file.py:name or package.module:name"),
        ("data.source", "nowhere.py:Source", r"data.source nowhere.py:Source: no such file"),
        ("data.source", "own_methods:Curiculum", r"has no 'Curiculum'; did you mean Curriculum"),
        ("data.source", "own_methods:constant", r"'constant' is a int, not a function"),
        ("data.source", "own_methods:distinct", r"data.source: .*Error"),
        ("rollout.engine", "sglang", r"rollout.engine: can be native, vllm, openai, file.py:name"),
        ("rollout.engine", "own_methods:PlainEngin", r"rollout.engine .*did you mean PlainEngine"),
        ("rollout.engine", "own_methods:engineless", r"rollout.engine: a dict has no version, generate, begin"),
        ("run.trackers", ["tensorbord"], r"run.trackers.0: can be tensorboard, wandb"),
        ("run.trackers", ["own_methods:Nots"], r"run.trackers.0 own_methods:Nots: .*did you mean Notes"),
        ("evaluation.metrics", {"a/b": "own_methods:distinct"}, r"evaluation.metrics: 'a/b' is no name for a metric"),
        ("evaluation.metrics", {"a": "own_methods:distinc"}, r"evaluation.metrics.a .*did you mean distinct"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", {key: value})
    assert not (tmp_path / "run").exists()


def test_an_engine_that_cannot_restart_samples_is_refused_before_the_first_evaluation(tmp_path: Path) -> None:
    """A function says what its engine can do only once it has made it."""
    stale = {"rollout.max_staleness": 1, "rollout.in_flight": "restart", "runtime.deterministic": False}
    for engine in (own_methods.PlainEngine, lambda *given: own_methods.PlainEngine(*given)):
        with pytest.raises(ConfigError, match=r"rollout.in_flight: restart needs an engine"):
            run(tmp_path / "run", stale, engine=engine)
        assert not (tmp_path / "run").exists()


def test_files_are_looked_for_beside_the_recipe(tmp_path: Path, file: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    keys = {"data": {"source": f"{file.name}:Curriculum"}, "rollout": {"engine": f"{file.name}:PlainEngine"}}
    keys |= {"run": {"trackers": [f"{file.name}:Notes"]}, "evaluation": {"metrics": {"d": f"{file.name}:distinct"}}}
    recipe.write_text(yaml.safe_dump({"model": {"path": "tiny"}} | keys))
    config = load_config(recipe)
    found = (config.data.source, config.rollout.engine, *config.run.trackers, *config.evaluation.metrics.values())
    assert found == (f"{file}:Curriculum", f"{file}:PlainEngine", f"{file}:Notes", f"{file}:distinct")
    assert config.proximal == "recompute"
    assert any(text.startswith("evaluation.metrics: has no effect without") for text in warnings_for(config))


def test_dapo_evaluate_takes_a_benchmark_and_metrics_of_a_file(tmp_path: Path, file: Path) -> None:
    save_model(tmp_path / "model")
    write_rows(tmp_path / "a.jsonl", sums(4))
    words = [tmp_path / "a.jsonl", "--max-tokens", 3, f"evaluation.metrics.distinct={file}:distinct"]
    named = ["--benchmark", f"{file}:last_digit", "--output", tmp_path / "out"]
    result = dapo_command("evaluate", tmp_path / "model", *words, *named)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert report["benchmark"] == f"{file}:last_digit" and len(report["benchmark_sha256"]) == 64
    assert report["settings"]["reward"]["kind"] == "exact" and report["files"][0]["samples_per_prompt"] == 2
    assert 0 < report["files"][0]["own"]["distinct"] <= 1 and "distinct" in result.stdout
    for name, said in (("nowhere.py:f", "no such file"), (f"{file}:distinct", "TypeError"), ("math:sin", "TypeError")):
        refused = dapo_command("evaluate", tmp_path / "model", tmp_path / "a.jsonl", "--benchmark", name)
        assert refused.exit_code == 2 and f"--benchmark {name}" in refused.stderr and said in refused.stderr


def test_doctor_and_a_dry_run_name_them(tmp_path: Path, file: Path) -> None:
    save_model(tmp_path / "model")
    write_rows(tmp_path / "a.jsonl", sums(40))
    recipe = tmp_path / "recipe.yaml"
    tree = {"model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "a.jsonl")}}
    tree["data"] |= {"template": "plain", "source": f"{file}:Curriculum"}
    recipe.write_text(yaml.safe_dump(tree))
    told = dapo_command("train", recipe, "--dry-run")
    assert told.exit_code == 0 and f"# data.source: {file}:Curriculum" in told.stdout, told.output
    missing = f"data.source={file}:Curriculm"
    assert "did you mean Curriculum?" in dapo_command("train", recipe, "--dry-run", missing).stderr
    assert "did you mean Curriculum?" in dapo_command("doctor", recipe, missing).output.replace("\n", " ")


def test_two_names_of_one_file_share_its_module_and_files_of_one_name_do_not(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(
            f"seen = ['{folder}']\ndef first(): return seen\ndef second(): return seen\n"
        )
    first, second = (load_named(f"{tmp_path}/a/own.py:{name}", "part")() for name in ("first", "second"))
    assert first is second and first == ["a"]
    assert load_named(f"{tmp_path}/b/own.py:first", "part")() == ["b"]
    (tmp_path / "a/own.py").write_text("def first(): return 'edited'\n")
    assert load_named(f"{tmp_path}/a/own.py:first", "part")() == "edited"
