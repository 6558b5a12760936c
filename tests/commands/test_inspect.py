"""Reading a run in the terminal: finished, at work, killed, or no run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo.commands import app
from dapo.commands.inspect.tables import ASCII, curve, number
from dapo.commands.shared.output import columns
from dapo.config import build_config
from dapo.config.plan import UNBOUNDED
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.observe.samples import samples_path
from dapo.util.terminal import visible

ODD_TEXT = "[bold]é\x1b[31mred\x07\n\u202eend[/bold]"


def sample(**changes: Any) -> dict[str, Any]:
    made = {"draw": 7, "row": 3, "index": 0, "status": "kept", "prompt": "1+1=", "response": "2", "gold": "2"}
    made |= {"extracted": "2", "correct": True, "reward": 1.0, "parts": {"format": 0.5}, "error": None}
    made |= {"shaped_reward": 0.75, "advantage": 1.5, "in_loss": True, "length": 4, "finish_reason": "stop"}
    return made | {"versions": [2, 3]} | changes


SAMPLES = [
    sample(),
    sample(index=1, response="cut here", correct=False, reward=-1.0, length=12, finish_reason="length", advantage=-1.5),
    sample(draw=8, row=4, status="all_wrong", prompt="2+2=", correct=False, reward=-1.0, length=9, advantage=None),
    sample(draw=9, row=5, status="kept", response=ODD_TEXT, length=2, advantage=0.0),
    sample(draw=9, row=5, index=1, correct=None, reward=None, error="timed out", extracted=None, length=3),
]


def make_run(root: Path, steps: int = 3, planned: int = 3, engine: str = "native", **run: Any) -> RunFolder:
    """A run folder as a run leaves it while it is at work: no summary yet."""
    tree = {
        "model": {"path": "some/model"},
        "seed": 4,
        "rollout": {"engine": engine},
        "training": {"steps": planned},
        "run": {"dir": str(root), **run},
    }
    folder = RunFolder.create(build_config(tree), ["dapo", "train", "r.yaml"])
    with MetricsLog(folder.metrics) as log:
        log.append(0, {"eval/accuracy": 0.25, "eval/rows": 40, "eval/response_length": 3.0})
        for step in range(1, steps + 1):
            last = {"eval/accuracy": 0.75, "eval/rows": 40} if step == planned else {}
            metrics = {"accuracy": step / 10, "reward/mean": -1.0 + step, "groups/kept": 4, "time/elapsed": 60.0 * step}
            metrics |= {"clip/low": 0.001, "clip/high": 0.002, "objective/own": 7.5}
            log.append(step, metrics | {"grad_norm": float("nan")} | last)
    for step in range(1, steps + 1):
        path = samples_path(folder.samples, step)
        path.write_text("".join(json.dumps(s) + "\n" for s in SAMPLES), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "one")


def inspect(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def shown(*arguments: object) -> str:
    result = inspect(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def read_json(*arguments: object) -> Any:
    return json.loads(shown(*arguments, "--json"))


# --- the overview -------------------------------------------------------------------------------------------------


def test_the_overview_says_what_the_run_is_and_how_far_it_came(run: RunFolder) -> None:
    run.write_summary({"steps": 3, "stopped": "all steps are done", "seconds_total": 200.0})
    (run.checkpoints / "step-00002").mkdir()
    (run.checkpoints / ".step-00003.tmp").mkdir()
    (run.checkpoints / "best.json").write_text('{"step": 3, "metric": "eval/accuracy", "value": 0.75}')
    text = shown(run.root)
    for expected in ("finished: all steps are done", "3 of 3", "3:20", "some/model", "dapo train r.yaml", "seed"):
        assert expected in text
    assert "step-00002" in text and ".tmp" not in text
    assert "eval/accuracy 75.0% after step 3" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["step"][1:] == ["1", "2", "3", "course"]
    assert lines["accuracy"][1:4] == ["10.0%", "20.0%", "30.0%"]
    assert lines["reward/mean"][1:4] == ["0", "1", "2"]
    assert lines["objective/own"][1:4] == ["7.5"] * 3
    assert "before training" in text and "after step 3" in text and "25.0%" in text
    assert "warning: a number was not finite: in 3 of 3 steps, last in step 3" in text


def test_a_failed_evaluation_before_training_is_counted_among_the_evaluations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=0)
    run.metrics.unlink()
    with MetricsLog(run.metrics) as log:
        log.append(0, {"eval/rows": 40, "eval/errors": 0.5})
        log.append(1, {"groups/kept": 0})
        log.append(2, {"groups/kept": 4, "eval/rows": 40})
    assert RunView.read(run.root).warnings() == [
        "nothing to train on: in 1 of 2 steps, last in step 1",
        "evaluation scores failed: in 1 of 2 evaluations, last before training",
    ]


def test_a_run_of_one_step_has_no_steps(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path / "r", steps=1).root)
    assert "a number was not finite: in 1 of 1 step, last in step 1" in text and "of 1 step, 1 to 1" in text


def test_the_evaluation_before_training_alone_is_neither_the_best_nor_one_after(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=2)
    run.write_summary({"steps": 2, "stopped": "interrupted"})
    (run.checkpoints / "best.json").write_text('{"step": 0, "metric": "eval/accuracy", "value": 0.25}')
    assert "best " not in shown(run.root)
    found = read_json(run.root)
    assert (found["accuracy_before"], found["accuracy_after"], found["best"]) == (0.25, None, None)
    with MetricsLog(run.metrics, keep_until=2) as log:
        log.append(3, {"eval/accuracy": 0.1, "eval/rows": 40})
    assert "eval/accuracy 25.0% before training" in shown(run.root)


def test_the_engine_is_told_with_its_version(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", engine="vllm")
    assert read_json(run.root)["engine"] == "vllm"
    run.environment.write_text('{"packages": {"torch": "2.13.0", "vllm": "0.28.0"}}')
    assert "engine       vllm 0.28.0\n" in shown(run.root)


def test_the_overview_as_json(run: RunFolder) -> None:
    found = read_json(run.root)
    assert (found["steps"], found["steps_planned"], found["seed"]) == (3, 3, 4)
    assert (found["accuracy_before"], found["accuracy_after"]) == (0.25, 0.75)
    assert [entry["step"] for entry in found["metrics"]] == [0, 1, 2, 3]
    assert found["steps_with_samples"] == [1, 2, 3]


def test_steps_that_stand_for_no_number_are_not_shown(run: RunFolder) -> None:
    tree = yaml.safe_load(run.config.read_text())
    tree["training"] |= {"steps": UNBOUNDED, "minutes": 7.5}
    run.config.write_text(yaml.safe_dump(tree))
    assert "steps        3 in 7.5 minutes at most\n" in shown(run.root)
    assert read_json(run.root)["steps_planned"] is None
    assert "000000" not in shown(run.root) + shown(run.root.parent)
    assert " 3 in 7.5 minutes at most " in shown(run.root.parent)


@pytest.mark.parametrize("bound", [0, 1])
def test_staleness_is_shown_where_there_may_be_some(tmp_path: Path, bound: int) -> None:
    folder = RunFolder.create(
        build_config(
            {"model": {"path": "m"}, "rollout": {"max_staleness": bound}, "run": {"dir": str(tmp_path / "r")}}
        ),
        [],
    )
    with MetricsLog(folder.metrics) as log:
        log.append(1, {"staleness/mean": 0.0, "overlap/won": 0.25, "accuracy": 0.5})
    assert (f"staleness/mean{' ' * 2}" in shown(folder.root)) == ("overlap/won" in shown(folder.root)) == bool(bound)


def test_many_steps_are_thinned_and_a_range_is_kept_to(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=500, planned=500)
    header = next(line for line in shown(run.root).splitlines() if line.startswith("step "))
    steps = [int(word) for word in header.split()[1:-1]]
    assert (steps[0], steps[-1]) == (1, 500) and len(steps) <= 8
    header = next(line for line in shown(run.root, "--steps", "10:12").splitlines() if line.startswith("step "))
    assert header.split()[1:-1] == ["10", "11", "12"]


# --- states -------------------------------------------------------------------------------------------------------


def test_running_killed_stopped_and_finished_are_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=2)
    assert RunView.read(run.root).state == "killed"
    with run.lock():
        assert RunView.read(run.root).state == "running"
    run.write_summary({"steps": 2, "stopped": "interrupted"})
    view = RunView.read(run.root)
    assert (view.state, view.why) == ("stopped", "stopped: interrupted")
    with run.lock():  # resumed
        assert RunView.read(run.root).state == "running"
    with MetricsLog(run.metrics) as log:
        log.append(3, {"accuracy": 0.1})
    assert RunView.read(run.root).state == "killed"  # the summary is of the part before
    for end in ("all steps are done", "converged: eval/accuracy has not risen"):
        run.write_summary({"steps": 3, "stopped": end})
        assert RunView.read(run.root).state == "finished"


def test_looking_at_a_run_does_not_keep_it_from_starting(run: RunFolder) -> None:
    RunView.read(run.root)
    with run.lock():
        pass


def test_half_written_and_missing_files_are_no_error(run: RunFolder) -> None:
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "accur')
    with samples_path(run.samples, 3).open("a") as file:
        file.write('{"draw": 10, "prom')
    run.environment.write_text('{"star')
    run.summary.write_text("")
    assert "3 of 3" in shown(run.root)
    assert shown(run.root, "--samples").endswith("5 of 5 samples\n")
    run.environment.unlink()
    run.metrics.unlink()
    assert "0 of 3" in shown(run.root)
    run.config.write_text("a: [")
    assert "0 of ?" in shown(run.root)


# --- metrics ------------------------------------------------------------------------------------------------------


def test_chosen_metrics_by_name_and_pattern(run: RunFolder) -> None:
    lines = [line.split() for line in shown(run.root, "--metrics", "accuracy,clip/*", "--steps", "2:").splitlines()]
    assert lines == [
        ["step", "accuracy", "clip/low", "clip/high"],
        ["2", "20.0%", "0.1%", "0.2%"],
        ["3", "30.0%", "0.1%", "0.2%"],
    ]
    assert read_json(run.root, "--metrics", "eval/accuracy") == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 3, "eval/accuracy": 0.75},
    ]


def test_a_metric_that_the_run_lacks_is_an_empty_table_and_one_that_nobody_has_an_error(run: RunFolder) -> None:
    assert shown(run.root, "--metrics", "kl/reference").split() == ["step", "kl/reference"]
    result = inspect(run.root, "--metrics", "acuracy")
    assert result.exit_code == 2 and "did you mean accuracy?" in result.stderr
    assert inspect(run.root, "--metrics", "zz*").exit_code == 2


@pytest.mark.parametrize("steps", ["x", "3-5", "", ":", "1:2:3", "-1"])
def test_an_odd_range_is_refused(run: RunFolder, steps: str) -> None:
    result = inspect(run.root, f"--steps={steps}")
    assert result.exit_code == 2 and "--steps" in result.stderr


# --- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_is_shown_with_all_that_is_known_of_it(run: RunFolder) -> None:
    text = shown(run.root, "--samples", "--draw", 7, "--limit", 1)
    assert "step 3  row 3  draw 7  index 0  kept (trained on)" in text
    assert "prompt   | 1+1=" in text and "response | 2" in text
    assert "extracted 2  gold 2  right" in text
    assert "reward +1, format 0.5  shaped +0.75  advantage +1.5  length 4 (ended)  version 2-3" in text
    assert text.endswith("2 of 5 samples, 1 shown (--limit)\n")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--samples"], [0, 1, 2, 3, 4]),
        (["--step", "1"], None),
        (["--status", "kept"], [0, 1, 3, 4]),
        (["--status", "all_wrong,flat"], [2]),
        (["--correct", "true"], [0, 3]),
        (["--correct", "false"], [1, 2]),
        (["--longer-than", "8"], [1, 2]),
        (["--truncated"], [1]),
        (["--row", "5"], [3, 4]),
        (["--draw", "8"], [2]),
        (["--contains", "CUT"], [1]),
        (["--contains", "2+2"], [2]),
        (["--sort", "length"], [1, 2, 0, 4, 3]),
        (["--sort", "reward"], [0, 3, 1, 2, 4]),
        (["--sort", "advantage"], [0, 4, 3, 1, 2]),
        (["--correct", "false", "--truncated", "--row", "3"], [1]),
    ],
)
def test_filters_and_orders(run: RunFolder, options: list[str], found: list[int] | None) -> None:
    if found is None:
        options, found = [*options, "--samples"], [0, 1, 2, 3, 4]
    step = 1 if "--step" in options else 3
    assert read_json(run.root, *options) == [{"step": step, **SAMPLES[place]} for place in found]


def test_samples_of_several_steps_and_a_limit(run: RunFolder) -> None:
    assert [s["step"] for s in read_json(run.root, "--samples", "--steps", "1:2", "--row", "4")] == [1, 2]
    assert len(read_json(run.root, "--samples", "--steps", "1:", "--limit", "4")) == 4
    assert len(read_json(run.root, "--samples", "--steps", "1:", "--limit", "0")) == 15


def test_texts_are_shown_literally_and_control_characters_made_visible(run: RunFolder) -> None:
    text = shown(run.root, "--row", 5, "--limit", 1)
    assert "[bold]é\\x1b[31mred\\x07" in text and "\\u202eend[/bold]" in text
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text


def test_a_failed_score_is_no_verdict(run: RunFolder) -> None:
    assert "no verdict: timed out" in shown(run.root, "--row", 5)


def test_long_texts_are_cut_unless_all_is_asked_for(run: RunFolder) -> None:
    long = "begin " + "x" * 5000 + " end"
    samples_path(run.samples, 3).write_text(json.dumps(sample(response=long)) + "\n")
    cut = shown(run.root, "--samples")
    assert len(cut) < 2500 and "begin" in cut and "end" in cut and "4010 letters; --full" in cut
    assert shown(run.root, "--full").count("x") >= 5000


def test_what_is_missing_is_said(tmp_path: Path, run: RunFolder) -> None:
    result = inspect(run.root, "--samples", "--step", 9)
    assert result.exit_code == 1 and "no samples of step 9; there are those of steps 1 to 3" in result.stderr
    silent = make_run(tmp_path / "silent", steps=0, save_samples=False)
    result = inspect(silent.root, "--samples")
    assert result.exit_code == 1 and "run.save_samples=false" in result.stderr
    result = inspect(run.root, "--status", "right")
    assert result.exit_code == 2 and "all_wrong" in result.stderr
    for place in (tmp_path / "nothing", tmp_path / "silent" / "samples"):
        result = inspect(place)
        assert result.exit_code == 1 and str(place) in result.stderr and "Traceback" not in result.output
    samples_path(run.samples, 3).write_text("spoilt\n{}\n")
    result = inspect(run.root, "--samples")
    assert result.exit_code == 1 and "step-00003.jsonl:1: not a line of samples" in result.stderr


def with_and_without_the_index(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """What is shown, which must be the same without DuckDB."""
    found = read_json(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr("dapo.observe.sample_query.has_duckdb", lambda: False)
        assert read_json(*arguments) == found
    return found


@pytest.mark.parametrize(
    "options",
    [
        ["--status", "kept,all_wrong"],
        ["--correct", "false", "--longer-than", 8],
        ["--longer-than", 3, "--sort", "reward"],
        ["--truncated"],
        ["--row", 5, "--index", 1],
        ["--draw", 8],
        ["--contains", "CUT", "--limit", 2],
        ["--sort", "length"],
        ["--sort", "entropy", "--limit", 7],
    ],
)
def test_the_index_finds_what_the_files_hold(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, options: list[object]
) -> None:
    found = with_and_without_the_index(monkeypatch, run.root, "--steps", "1:", *options)
    assert found and {sample["step"] for sample in found} <= {1, 2, 3}
    counts = shown(run.root, "--steps", "1:", *options).splitlines()[-1]
    with monkeypatch.context() as patch:
        patch.setattr("dapo.observe.sample_query.has_duckdb", lambda: False)
        assert shown(run.root, "--steps", "1:", *options).splitlines()[-1] == counts


def test_a_damaged_file_among_several_steps_is_named(run: RunFolder) -> None:
    samples_path(run.samples, 2).write_text("spoilt\n{}\n")
    result = inspect(run.root, "--samples", "--steps", "1:3")
    assert result.exit_code == 1 and "step-00002.jsonl:1: not a line of samples" in result.stderr
    assert len(read_json(run.root, "--steps", "3:", "--samples")) == 5


def test_a_table_has_a_line_for_each_sample(run: RunFolder) -> None:
    header, *lines, last = shown(run.root, "--table", "--steps", "3", "--status", "kept").splitlines()
    assert " ".join(header.split()) == "step row draw # status verdict reward adv. length entropy answer gold response"
    assert [line.split()[:9] for line in lines[:2]] == [
        ["3", "3", "7", "0", "kept", "right", "+1", "+1.5", "4"],
        ["3", "3", "7", "1", "kept", "wrong", "-1", "-1.5", "12"],
    ]
    assert lines[1].rstrip().endswith("cut here") and lines[3].split()[5] == "failed" and len(lines) == 4
    assert "\x1b" not in "".join(lines) and "\\x1b[31mred" in lines[2]
    assert last == "4 of 5 samples"


def test_a_share_of_the_samples_is_a_setting(tmp_path: Path) -> None:
    run = make_run(tmp_path / "some", steps=0, save_samples=0.25)
    assert RunView.read(run.root).share_of_samples == 0.25
    assert "none yet" in inspect(run.root, "--samples").stderr


# --- several runs -------------------------------------------------------------------------------------------------


def test_a_run_that_is_spoilt_hides_no_other_in_the_list(tmp_path: Path, run: RunFolder) -> None:
    make_run(run.root.parent / "spoilt").metrics.write_text("no JSON\n")
    lines = shown(run.root.parent).splitlines()
    assert "one" in lines[1] and lines[2].startswith("cannot be read") and "spoilt/metrics.jsonl:1" in lines[2]
    found = {Path(one["run_dir"]).name: one["state"] for one in read_json(run.root.parent)}
    assert found == {"one": "killed", "spoilt": "unreadable"}


@pytest.mark.parametrize(
    "summary", ['{"steps": null}', '{"steps": "all"}', '{"steps": 3, "seconds_total": NaN}', "[" * 9999]
)
def test_a_spoilt_summary_is_as_good_as_none(run: RunFolder, summary: str) -> None:
    run.summary.write_text(summary)
    assert "3 of 3" in shown(run.root)


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/env/bin/dapo", "dapo"), ("/env/lib/dapo/__main__.py", "dapo"), ("/mine/train.py", "/mine/train.py"), ("", "")],
)
def test_the_command_is_shown_as_one_types_it(run: RunFolder, program: str, shown: str) -> None:
    words = [program, "train", "r.yaml", "data.instruction=in short"] if program else []
    run.environment.write_text(json.dumps({"command": words}))
    expected = f"{shown} train r.yaml 'data.instruction=in short'" if shown else ""
    assert RunView.read(run.root).command == expected
    assert not shown or expected in inspect(run.root).stdout


def test_a_folder_of_runs_is_listed(tmp_path: Path, run: RunFolder) -> None:
    make_run(tmp_path / "runs" / "two", steps=1)
    (tmp_path / "runs" / "other").mkdir()
    lines = [line.split() for line in shown(tmp_path / "runs").splitlines()]
    assert lines[1:] == [
        ["one", "killed", "3/3", "25.0%", "75.0%", "3:00"],
        ["two", "killed", "1/3", "25.0%", "-", "1:00"],
    ]
    found = read_json(tmp_path / "runs")
    assert [(r["steps"], r["accuracy_after"]) for r in found] == [(3, 0.75), (1, None)]


# --- as a process -------------------------------------------------------------------------------------------------


def process(*arguments: object, pipe: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    code = (
        "from dapo.commands import main\nimport sys\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    words = " ".join(f"'{a}'" for a in arguments)
    command = f"set -o pipefail; '{sys.executable}' -c \"{code}\" {words} {pipe}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=60, env=os.environ | environment, check=False
    )


def test_a_reader_that_goes_away_is_no_error(run: RunFolder) -> None:
    lines = "".join(json.dumps(sample(response="x" * 900)) + "\n" for _ in range(2000))
    samples_path(run.samples, 3).write_text(lines)
    done = process("inspect", run.root, "--samples", "--limit", 0, pipe="| head -n 1")
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.startswith(b"step 3  row 3")


def test_an_ascii_terminal_gets_ascii(run: RunFolder) -> None:
    done = process("inspect", run.root, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert max(done.stdout) < 128 and b"accuracy" in done.stdout
    done = process("inspect", run.root, "--row", 5, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"[bold]\\xe9\\x1b[31mred" in done.stdout


# --- parts --------------------------------------------------------------------------------------------------------


def test_a_table_wider_than_the_terminal_goes_on_below() -> None:
    lines = list(columns(["step", "aaaa", "bbbb", "cccc"], [["1", "2", "3", "4"]], width=17))
    assert lines == ["step  aaaa  bbbb", "1        2     3", "", "step  cccc", "1        4"]
    assert list(columns(["step", "aaaa"], [["1", "2"]], width=3)) == ["step  aaaa", "1        2"]


def test_curves_by_hand() -> None:
    assert curve([0, 7, None, 3], 10, ASCII) == "_# ~"
    assert curve([1, 1], 10, ASCII) == "__" and curve([], 10) == "" and curve([None], 10) == ""
    assert curve([0, 0, 7, 7], 2, ASCII) == "_#"
    assert len(curve(list(range(1000)), 16)) == 16


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.5, "50.0%"),
        ("groups/kept", 4, "4"),
        ("entropy", 1.23456, "1.235"),
        ("memory/rss", 123_456_789, "123 MB"),
        ("time/elapsed", 61.0, "1:01"),
        ("loss", None, "-"),
        ("loss", float("nan"), "-"),
        ("reward/part/format", 2.0, "2"),
    ],
)
def test_numbers_by_their_unit(name: str, value: Any, text: str) -> None:
    assert number(name, value) == text


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert visible("a\tb\r\x9b31m\u200b é\n") == "a\\tb\\r\\x9b31m\\u200b é\n"


def test_plain_output_has_no_colour(run: RunFolder) -> None:
    assert "\x1b" not in shown(run.root)
