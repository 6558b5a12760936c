"""Thresholds keep their promise on rows they were not chosen on; drift is found where it is, at the stated rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from command_cases import write_rows as write
from dapo.commands import app
from dapo.errors import ConfigError, DataError, TakenError
from dapo.ranking.calibrate import (
    Labelled,
    calibrate,
    labelled_of,
    measure,
    passing,
    read_thresholds,
    write_calibrations,
)
from dapo.ranking.drift import FALSE_ALARMS, chance_of_fall, compare, rows_wanted, since
from dapo.ranking.quantise import quantise, small_layers
from dapo.ranking.rows import Candidates
from dapo.ranking.score import Scored
from ranking_cases import save_tiny


def planted(seed: int, rows: int = 600, gap: float = 2.5) -> Labelled:
    """Pairs whose better response scores ``gap`` higher, in units of the noise."""
    rng = np.random.default_rng(seed)
    right = np.tile([True, False], rows)
    return Labelled(rng.normal(size=2 * rows) + gap * right, right, np.repeat(np.arange(rows), 2))


@pytest.mark.parametrize("goal", ["precision", "recall"])
def test_a_promise_is_kept_on_other_rows(goal: str) -> None:
    """In 15 draws: within its 95% interval nearly always, and not by keeping nothing."""
    found = [calibrate(planted(seed), goal, 0.95, seed=seed) for seed in range(15)]  # type: ignore[arg-type]
    assert sum(one.verdict == "missed" for one in found) <= 3
    assert all(one.check.recall.value > 0.6 and one.check.precision.value > 0.7 for one in found)
    assert all(not np.isnan(getattr(one.check, goal).low) for one in found)


def test_nothing_reached_is_refused_in_words() -> None:
    with pytest.raises(DataError, match=r"no threshold reaches a precision of 0.95 .* the best is 0.*--curve"):
        calibrate(planted(0, gap=0.0), "precision", 0.95)
    with pytest.raises(DataError, match="5 right and 5 wrong"):
        calibrate(planted(0, rows=10), "precision", 0.95)


def test_equal_scores_are_kept_or_dropped_together() -> None:
    data = Labelled(np.repeat([2.0, 1.0, 0.0], 30), np.repeat([True, True, False], 30), np.arange(90))
    threshold = calibrate(data, "precision", 0.95).threshold
    assert 0 < threshold < 1
    found = measure(data, threshold)
    assert (found.kept, found.precision.value, found.recall.value) == (60, 1.0, 1.0)
    assert found.precision.low == pytest.approx(0.9398, abs=1e-4)  # Wilson's, of 60 of 60
    assert np.isnan(measure(data, 9.0).precision.value)


def test_each_writer_has_its_own_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(model: str, shift: float) -> tuple[list[Candidates], list[list[Scored]]]:
        data = planted(len(model))
        found = [Candidates(f"p{k}", ("a", "b"), (1.0, 0.0), model=model) for k in range(600)]
        return found, [[Scored(j, "ab"[j], float(data.scores[2 * k + j]) + shift) for j in (0, 1)] for k in range(600)]

    given = [rows("m1", 0.0), rows("other", 10.0)]
    every, scored = ([*a, *b] for a, b in zip(*given, strict=True))
    found = {name: calibrate(one, "precision", 0.95) for name, one in labelled_of(every, scored).items()}
    assert 8 < found["other"].threshold - found["m1"].threshold < 12
    file = tmp_path / "thresholds.json"
    write_calibrations(file, "rm", {"m1": found["m1"]})
    write_calibrations(file, "rm", {"other": found["other"]})
    thresholds = read_thresholds(file, "rm")
    assert capsys.readouterr().err == ""
    assert read_thresholds(file, "rm2") == thresholds
    assert "of the ranker rm, and rm2 scores here" in " ".join(capsys.readouterr().err.split())
    assert thresholds == {name: one.threshold for name, one in found.items()}
    kept = passing([Candidates("p", (), model="other"), every[0]], [[], scored[0]], thresholds)
    assert kept[0] == [] and [one.text for one in kept[1]] in (["a"], [], ["a", "b"])
    with pytest.raises(ConfigError, match="no threshold for responses of new, only for m1, other"):
        passing([Candidates("p", (), model="new")], [[]], thresholds)
    with pytest.raises(ConfigError, match="of the ranker rm; give another file"):
        write_calibrations(file, "another", found)
    with pytest.raises(ConfigError, match="holds no thresholds"):
        read_thresholds(tmp_path / "none.json", "rm")


def test_labels_must_be_of_right_and_wrong() -> None:
    with pytest.raises(DataError, match="f:3: a threshold needs labels of right"):
        labelled_of([Candidates("p", ("a",), (0.5,), place="f:3")], [[Scored(0, "a", 1.0)]])


# --- drift --------------------------------------------------------------------------------------------------------


def test_planted_drift_is_found_and_none_is_seen_without_one() -> None:
    """1,000 null and 1,000 planted cases: 80% right, then 65%, of 200 and 150 rows."""
    rng = np.random.default_rng(0)

    def alarms(share: float, cases: int = 1000) -> float:
        draws = ((rng.random(200) < 0.8, rng.random(150) < share) for _ in range(cases))
        return (
            sum(chance_of_fall(old.astype(float), new.astype(float), 0) <= FALSE_ALARMS for old, new in draws) / cases
        )

    assert alarms(0.8) <= FALSE_ALARMS + 0.015  # three standard errors of 1,000 cases
    assert alarms(0.65) > 0.85


def test_values_of_any_kind_are_tested_by_permutation() -> None:
    rng = np.random.default_rng(1)
    ps = [compare(rng.normal(size=60).tolist(), rng.normal(size=40).tolist()).p for _ in range(40)]
    assert 0.3 < np.mean(ps) < 0.7 and sum(p <= FALSE_ALARMS for p in ps) <= 6
    assert compare(rng.normal(size=60).tolist(), (rng.normal(size=40) - 1).tolist()).p < 0.01
    assert compare([1.0] * 50, [1.0] * 50).p == 1.0
    with pytest.raises(DataError, match="1 reference rows and 3 new"):
        compare([1.0], [0.0] * 3)


def test_dates_split_rows() -> None:
    rows = [{"time": 0}, {"time": "2026-11-29T23:00:00+00:00"}, {"time": "2026-11-30"}, {"time": 1.8e9}]
    assert since(rows, "2026-11-30") == [False, False, True, True]
    with pytest.raises(ConfigError, match="neither a file nor a date"):
        since(rows, "yesterday")
    with pytest.raises(DataError, match="row 1: has no time"):
        since([{}], "2026-11-30")


def test_a_learning_curve_says_how_many_rows_are_wanted() -> None:
    curve = [(rows, 1 - rows**-0.25) for rows in (100, 200, 400)]
    assert rows_wanted(curve, 1 - 1600**-0.25) in (1600, 1601)
    assert rows_wanted([(100, 0.7), (200, 0.7)], 0.8) is None
    with pytest.raises(DataError, match="two points"):
        rows_wanted(curve[:1], 0.9)


# --- the commands -------------------------------------------------------------------------------------------------

RECIPE = """
reward: {kind: function, function: "length.py:length", workers: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "length.py").write_text("def length(response):\n    return float(len(response))\n")
    path = tmp_path / "length.yaml"
    path.write_text(RECIPE)
    return path


def run(*words: object) -> list[str]:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_rank_and_filter_as_commands(recipe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [("x" * int(rng.integers(30, 60)), "x" * int(rng.integers(1, 40))) for _ in range(120)]
    pairs = [{"prompt": f"p{k}", "correct_code": a, "incorrect_code": b} for k, (a, b) in enumerate(texts)]
    labelled = write(tmp_path / "pairs.jsonl", pairs)
    lines = [json.loads(line) for line in run("rank", recipe, labelled)]
    assert len(lines) == 120 and lines[0]["ranking"][0]["score"] >= lines[0]["ranking"][1]["score"]
    assert lines[0]["prompt"] == "p0"
    unsure = [json.loads(line) for line in run("rank", recipe, labelled, "--unsure", "3")]
    assert len(unsure) == 3 and unsure[0]["margin"] <= unsure[2]["margin"]

    file, out = tmp_path / "t.json", tmp_path / "kept.jsonl"
    told = run("filter", recipe, "--labelled", labelled, "--precision", "0.9", "--calibration", file)
    assert "for a precision of 0.9" in told[0] and len(told) == 3
    held = json.loads(file.read_text())["models"]["*"]
    assert held["check"]["precision"]["value"] > 0.8 and held["verdict"] in ("met", "met within the interval", "missed")
    told = run("filter", recipe, labelled, "--calibration", file, "--output", out)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert told == [f"kept {len(kept)} of 240 responses"] and 0 < len(kept) < 240
    assert all(row["score"] > held["threshold"] and len(row["response"]) == row["score"] for row in kept)
    assert run("filter", recipe, labelled, "--threshold", "1e6") == []
    done = CliRunner().invoke(app, ["rank", str(recipe), str(labelled), "--output", str(tmp_path)])
    assert done.exit_code == 1 and "it is a folder" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--labelled", "f"], "--precision P or --recall R"),
        (["--precision", "0.9", "f"], "need labelled rows"),
        (["f"], "give one of --labelled"),
        (["--threshold", "1"], "FILES: required"),
        (["--threshold", "nan", "f"], "--threshold nan: must be a number"),
    ],
)
def test_filter_says_what_it_lacks(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["filter", "math", *words])
    assert done.exit_code == 2 and said in " ".join(done.output.split())


@pytest.mark.parametrize("held", ["{", "[1]", '{"ranker": "math"}'])
def test_a_damaged_file_of_thresholds_is_named(tmp_path: Path, held: str) -> None:
    (tmp_path / "t.json").write_text(held)
    for use in (lambda file: read_thresholds(file, "math"), lambda file: write_calibrations(file, "math", {})):
        with pytest.raises(ConfigError, match=r"t\.json: holds no thresholds"):
            use(tmp_path / "t.json")


def test_reference_rows_that_tell_nothing_do_not_make_new_ones_old(recipe: Path, tmp_path: Path) -> None:
    def row(*labels: int) -> dict:
        return {"prompt": "p", "candidates": ["xx", "x"], "labels": labels}

    reference = write(tmp_path / "old.jsonl", [row(1, 0)] * 3 + [row(1, 1)] * 5)
    told = run("evaluate", recipe, "--data", write(tmp_path / "new.jsonl", [row(1, 0)] * 4), "--since", reference)
    assert "on 3 reference rows" in told[-2] and "on 4 new ones" in told[-2]


def test_evaluate_tells_of_drift_of_a_ranker(recipe: Path, tmp_path: Path) -> None:
    """The longer response was the better one; since the 2nd of January it is the shorter one half of the time."""
    rng = np.random.default_rng(3)

    def pairs(count: int, wrong: float, day: int) -> list[dict]:
        words = [("xx", "x") if rng.random() > wrong else ("x", "xx") for _ in range(count)]
        return [{"prompt": "p", "chosen": a, "rejected": b, "time": f"2026-01-0{day}"} for a, b in words]

    old, new, same = pairs(80, 0.1, 1), pairs(60, 0.5, 2), pairs(60, 0.1, 2)
    reference = write(tmp_path / "old.jsonl", old)
    for rows, verdict in ((new, "is due"), (same, "is not due")):
        both = write(tmp_path / "both.jsonl", [*old, *rows])
        by_date = run("evaluate", recipe, "--data", both, "--since", "2026-01-02", "--output", tmp_path / "d.json")
        by_file = run("evaluate", recipe, "--data", write(tmp_path / "new.jsonl", rows), "--since", reference)
        assert by_date == by_file and verdict in by_date[-1]
        assert json.loads((tmp_path / "d.json").read_text())["drift"]["rows"] == [80, 60]
    curve = [{"rows": rows, "accuracy_after": 1 - 0.9 * rows**-0.3} for rows in (100, 200, 400)]
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    told = run("evaluate", recipe, "--data", write(both, [*old, *new]), "--since", "2026-01-02", "--curve", tmp_path)
    assert "takes about" in told[-1] and "made with 400" in told[-1]


def test_thumbs_on_served_answers_and_edits_become_pairs(tmp_path: Path) -> None:
    def asked(prompt: str, response: str | None) -> dict[str, Any]:
        return {"id": str(response), "prompt": [{"role": "user", "content": prompt}], "response": response}

    def said(name: str, **feedback: Any) -> dict[str, Any]:
        return {"id": name, "feedback": feedback}

    lines = [*(asked("p", text) for text in ("good", "bad", "worse", None)), asked("q", "x")]
    lines += [said("good", thumbs=1), said("good", thumbs=1), said("x", thumbs=1), said("unknown", thumbs=1)]
    lines += [
        said("None", thumbs=-1),
        said("bad", edit="better"),
        said("bad", edit="better", thumbs=-1),
        said("worse", thumbs=-1),
    ]
    out = tmp_path / "pairs.jsonl"
    told = run("votes", write(tmp_path / "live.jsonl", lines), "--output", out)
    assert told[0].startswith("2 pairs of thumbs and edits")
    pair = {"prompt": asked("p", "")["prompt"], "rejected": "bad", "rejected_id": "bad"}
    edited, voted = map(json.loads, out.read_text().splitlines())
    assert edited == pair | {"chosen": "better", "chosen_id": None}
    assert voted == pair | {"chosen": "good", "chosen_id": "good"}
    for bad in ({"prompt": "p"}, {"id": "a", "feedback": "up"}, ["x"]):
        file = write(tmp_path / "bad.jsonl", [lines[0], bad])
        file.write_text(file.read_text(), encoding="utf-8-sig")
        done = CliRunner().invoke(app, ["votes", str(file)])
        assert done.exit_code and "bad.jsonl:2: neither a prompt nor feedback" in " ".join(done.output.split())


def test_four_bits_need_a_gpu_and_an_adapter_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "p", "candidates": ["a"]}])
    for kind, said in (("int4", "not on a CPU; what works here: int8"), ("int8", "num_labels=1), FOLDER).merge")):
        done = CliRunner().invoke(
            app, ["quantise", str(tmp_path), str(tmp_path / "out"), "--kind", kind, "--data", str(rows)]
        )
        assert done.exit_code and said in " ".join(done.output.split())


@pytest.mark.parametrize("option", [["--temperature", "0"], ["--rows", "3"], ["--average"], ["--benchmark", "gsm8k"]])
def test_options_for_policies_are_refused_where_a_ranker_is_measured(option: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "ranker.yaml"), "--data", "rows.jsonl", *option])
    assert done.exit_code and f"{option[0]}: is for policies" in " ".join(done.output.split())


def test_prompts_will_do_for_a_policy_and_not_for_a_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(
        tmp_path / "rows.jsonl", [{"prompt": "1+2="}, {"prompt": "3", "candidates": ["a", "b"]}, {"prompt": "5"}]
    )
    found = {"mib": (2.0, 1.0), "seconds": (1.0, 1.0), "mean_change": 0.0, "spread": 1.0, "layers": (3, 4)}
    given: list[Any] = []
    monkeypatch.setattr("dapo.ranking.quantise.quantise", lambda *asked: given.extend(asked) or found)
    command = ["quantise", str(tmp_path), str(tmp_path / "out"), "--data", str(rows), "--rows", "2"]
    (tmp_path / "config.json").write_text("{}")
    done = CliRunner().invoke(app, command)
    assert given[-1] == ["1+2=", "3a"] and "in 3 of 4 linear layers" in done.output
    (tmp_path / "config.json").write_text('{"architectures": ["XForSequenceClassification"]}')
    done = CliRunner().invoke(app, command)
    assert done.exit_code and "rows.jsonl:1: holds nothing to rank" in " ".join(done.output.split())


def test_layers_that_became_small_are_counted() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    layers[1].weight = torch.nn.Parameter(torch.zeros(64 * 32, 1, dtype=torch.uint8), requires_grad=False)
    assert small_layers(layers) == (1, 3)


def test_what_is_quantised_is_not_quantised_again_and_what_is_there_stays(tmp_path: Path) -> None:
    save_tiny(tmp_path / "small")
    with pytest.raises(TakenError, match="small exists and is not overwritten"):
        quantise(str(tmp_path / "small"), tmp_path / "small", "int8", ["1+2="])
    settings = json.loads((tmp_path / "small/config.json").read_text())
    (tmp_path / "small/config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "x"}}))
    with pytest.raises(ConfigError, match="is quantised already"):
        quantise(str(tmp_path / "small"), tmp_path / "out", "int8", ["1+2="])
