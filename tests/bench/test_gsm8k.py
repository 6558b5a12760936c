"""GSM8K: the data, what is refused, and curves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import gsm8k
import runner
from dapo.config import load_config
from dapo.config.plan import recipe_path


def test_the_judged_rows_are_always_the_same_and_are_not_trained_on(tmp_path: Path) -> None:
    train_file, test_file = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rows = [{"question": f"What is {i}?", "answer": f"It is\n#### {i},000"} for i in range(2000)]
    train_file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[7]]))
    test_file.write_text(json.dumps({"prompt": "what is  9?", "answer": "9"}) + "\n")
    arguments = ["data", "--train", str(train_file), "--test", str(test_file), "--out"]
    counts = gsm8k.main([*arguments, str(tmp_path / "one")])
    assert counts["train"] == 2000 and counts["judge"] == 512 and counts["test"] == 1  # 2001, but that of the test
    assert gsm8k.main([*arguments, str(tmp_path / "two")]) == counts
    read = {name: (tmp_path / "one" / f"{name}.jsonl").read_text() for name in counts}
    assert read == {name: (tmp_path / "two" / f"{name}.jsonl").read_text() for name in counts}
    rest, judge = (set(read[name].splitlines()) for name in ("rest", "judge"))
    assert not rest & judge and rest | judge == set(read["train"].splitlines())
    assert json.loads(read["train"].splitlines()[1]) == {"prompt": "What is 1?", "answer": "1000"}


def test_a_run_that_is_judged_does_not_train_on_the_judged_rows() -> None:
    arguments = ["run", "--split", "judge", "--minutes", "3", "--seed", "5", "training.eta=1"]
    *values, last = gsm8k.overrides(gsm8k.parse(arguments))
    config = load_config(recipe_path("gsm8k-1gpu"), values)
    assert last == "training.eta=1" and config.training.minutes == 3 and config.updates_per_step == 4
    assert config.data.train[0].path.endswith("rest.jsonl") and config.evaluation.data[0].path.endswith("judge.jsonl")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["data", "--train", "gone.jsonl", "--test", "gone.jsonl"], "gone.jsonl: no such file"),
        (["data", "--train", "bad.jsonl", "--test", "bad.jsonl"], "error: bad.jsonl:2: not valid JSON"),
        (["run", "--split", "test", "training.foo=1"], "error: .*training.foo: unknown key"),
        (["run", "--split", "judge", "training.learning_rte=1"], "^error: .*did you mean training.learning_rate"),
        (["run", "--split", "test"], "^error: runtime.device: cuda, but "),
        (["run", "--split", "judge"], "^error: runtime.device: cuda, but "),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n')
    with pytest.raises(SystemExit, match=told):
        gsm8k.main(arguments)


def test_the_value_at_a_minute_is_the_last_one_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    accuracies = {0: 0.28, 1: None, 2: 0.5, 3: 0.45, 4: 0.7}
    lines = [
        {"step": step, "eval/accuracy": value, "eval/lenient": 0.6, "time/training": 290.0 * step}
        for step, value in accuracies.items()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = gsm8k.main(["report", str(run), "--minute", "15", "--out", str(tmp_path)])
    assert found["before"]["accuracy"] == 0.28
    assert (found["after"]["accuracy"], found["after"]["step"]) == (0.45, 3)
    assert "45.0%" in capsys.readouterr().out
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 4
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


ROW = '{"prompt": "p", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        (ROW, "holds 1 problems"),
        (ROW + '{"prompt": "q"}\n[1]\n', r"a.jsonl:2: no key 'answer'.*\n.*a.jsonl:3: expected an object"),
        (ROW + '{"prompt": "q", "answer": null}\n', "'answer' is null"),
        (ROW + '{"question": "q", "answer": "seven"}\n', "has to end with '#### 72'"),
        (ROW + '{"question": "q", "answ', "a.jsonl:2: not valid JSON"),
    ],
)
def test_rows_without_a_problem_are_named_and_not_learned_from(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl").write_text(ROW.replace('"p"', '"of the test"'))
    files = ["--train", str(tmp_path / "a.jsonl"), "--test", str(tmp_path / "b.jsonl"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=f"(?s)^error: .*{says}"):
        gsm8k.main(["data", *files])
    assert not (tmp_path / "rest.jsonl").exists()


def test_rows_of_any_line_ends_blank_lines_and_compressed_are_read(tmp_path: Path) -> None:
    text = '\ufeff{"question": "a\u2028b?", "answer": "#### 1,000"}\r\n\r\n' + ROW
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    found = gsm8k.read_rows(tmp_path / "a.jsonl.gz")
    assert found == [{"prompt": "a\u2028b?", "answer": "1000"}, {"prompt": "p", "answer": "1"}]


POINT = '{"step": 2, "eval/accuracy": 0.5, "time/training": 60.0}\n'


@pytest.mark.parametrize(
    ("metrics", "card", "says"),
    [
        (None, "{}", "metrics.jsonl: cannot be read"),
        ("", "{}", "no evaluation in metrics.jsonl"),
        (POINT[:20], "{}", "no evaluation in metrics.jsonl"),
        ("[]\n" + POINT, "{}", "metrics.jsonl:1: not a line of metrics"),
        (POINT, '{"device', "card.json: cannot be read"),
        (POINT, "[1]", "card.json: cannot be read"),
        (POINT.replace("60.0", "660.0"), "{}", "the first evaluation is at minute 11; use --minute 11"),
    ],
)
def test_a_run_without_a_curve_is_named(metrics: str | None, card: str, says: str, tmp_path: Path) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    (tmp_path / "card.json").write_text(card)
    with pytest.raises(SystemExit, match=f"^error: .*{says}"):
        gsm8k.main(["report", str(tmp_path)])


def test_a_half_written_line_costs_no_report_and_any_name_can_be_drawn(tmp_path: Path) -> None:
    run = tmp_path / "lr<1e-5 & more"
    run.mkdir()
    (run / "metrics.jsonl").write_text(POINT + POINT[:30])
    (found,) = gsm8k.main(["report", str(run), "--out", str(tmp_path)])
    assert found["after"]["accuracy"] == 0.5
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--minutes", "0"], "--minutes 0.0: must be a number above 0"),
        (["--minutes", "nan"], "--minutes nan: must be a number above 0"),
        (["--every", "inf"], "--every inf: must be a number above 0"),
        ([], "has no train.jsonl"),
    ],
)
def test_a_curve_of_the_peer_that_would_never_end_is_not_begun(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gsm8k.parse(["trl", "--data", str(tmp_path), *arguments])
    assert told in capsys.readouterr().err


def test_the_peer_gets_the_work_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, card = [], {"device": "card", "bytes_per_second": 1.0, "operations_per_second": 2.0}

    def side(options: Any, name: str, job: dict[str, Any]) -> runner.Outcome:
        jobs.append(job)
        if name == "trl":
            (options.out / "metrics.jsonl").write_text(POINT)
        return runner.Outcome(name, 0.0, [{"kind": "limits", **card}], None)

    monkeypatch.setattr(runner, "run_side", side)
    monkeypatch.setattr(runner, "require_gpu", lambda device: None)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(ROW)
    places = ["--data", str(tmp_path), "--out", str(tmp_path), "--model", "m", "--seed", "3"]
    gsm8k.main(["trl", *places, "--setting", "micro32+async", "training.learning_rate=1e-5"])
    job = jobs[1]
    wanted = {"model": "m", "prompts": 128, "samples": 16, "updates": 4, "limit": 768, "overlong": 128, "seed": 3}
    wanted |= {"longest_prompt": 512, "learning_rate": 1e-5, "warmup_rollouts": 3, "weight_decay": 0.1}
    assert wanted.items() <= job["task"].items() and job["task"]["natural"] and job["task"]["shuffle"]
    assert (job["setting"], job["seconds"], job["every"]) == ("micro32+async", 600, 60)
    folder = tmp_path / "gsm8k-test-trl-seed3"
    assert job["out"] == str(folder) and json.loads((folder / "card.json").read_text()) == card


def test_minutes_are_those_between_evaluations_on_both_sides(tmp_path: Path) -> None:
    ours = [
        {"time/training": 0.0},
        {"time/training": 50.0, "time/wall": 56.0},
        {"time/training": 110.0, "time/wall": 74.0, "time/evaluation": 10.0},
    ]
    theirs = [{"time/training": 0.0}, {"time/training": 57.0}, {"time/training": 120.0}]
    for name, lines in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        entries = ({"step": step, "eval/accuracy": 0.5} | line for step, line in enumerate(lines))
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    points = [gsm8k.read_curve(tmp_path / name)["points"] for name in ("ours", "theirs")]
    assert [point["minutes"] for point in points[0]] == pytest.approx([0, 56 / 60, 2])  # with the six seconds of files
    assert [point["minutes"] for point in points[1]] == pytest.approx([0, 57 / 60, 2])
