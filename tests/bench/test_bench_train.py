"""The benchmarks of training, of whole cycles and of GSM8K: their arithmetic, and a dry run of each on a CPU.

The sides run in this process here, TRL's without vLLM.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import cycle  # noqa: E402
import cycle_sides  # noqa: E402
import gsm8k  # noqa: E402
import rollout_ours  # noqa: E402
import train  # noqa: E402
import train_sides  # noqa: E402
import train_work  # noqa: E402
import trl_learning  # noqa: E402
import trl_side  # noqa: E402
from rollout_work import SHAPES, Shape  # noqa: E402

import dapo.orchestrator.inputs  # noqa: E402
import rollout  # noqa: E402
from dapo.config import load_config  # noqa: E402
from dapo.config.plan import recipe_path  # noqa: E402


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side's process costs ten seconds of imports."""
    monkeypatch.setattr(
        dapo.orchestrator.inputs, "NativeEngine", dapo.orchestrator.inputs.NativeEngine
    )  # the cycle's side replaces it
    scripts = {module.__name__: module for module in (cycle_sides, train_sides, rollout_ours)}

    def here(options: Namespace, name: str, script: Path, job: dict[str, Any], *_: Any) -> rollout.Outcome:
        report, started = options.out / f"{name}.jsonl", time.time()
        path = options.out / f"{name}.job.json"
        path.write_text(json.dumps(job | {"report": str(report)}))
        scripts[script.stem].main(str(path))
        return rollout.Outcome(name, started, [json.loads(line) for line in report.read_text().splitlines()], None)

    for module in (rollout, cycle, train):
        monkeypatch.setattr(module, "run_script", here)


# --- train ------------------------------------------------------------------------------------------------------------


def test_operations_count_the_head_for_response_tokens_only() -> None:
    shape = Shape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp=8, vocabulary=10, tied=True)
    layers = (4 * 4 + 4) + 2 * (4 * 2 + 2) + 4 * 4 + 3 * 4 * 8 + 2 * 4 + 4  # with the last norm
    assert train_work.training_operations(shape, computed=7, predicted=5) == 6 * (layers * 7 + 40 * 5)
    untied = Shape(1, 4, 2, 1, 2, 8, 10, tied=False)
    assert train_work.training_operations(untied, 7, 5) == train_work.training_operations(shape, 7, 5)


def test_the_work_of_a_mini_batch_is_like_the_real_one() -> None:
    made = train_work.make_sequences(32, 16, 1000, 768)
    assert made.samples == 512 and len(made.groups) == 32
    assert 250 < made.response_tokens / 512 < 350
    assert 60 < made.shared_tokens - made.response_tokens < 32 * 250
    assert made.tokens - made.response_tokens == sum(16 * len(prompt) for prompt, _ in made.groups)
    assert train_work.make_sequences(2, 2, 9, 40, fixed=True).response_tokens == 160


def test_training_is_timed_with_and_without_shared_prompts(tmp_path: Path) -> None:
    found = train.main(["ours", "--out", str(tmp_path), "--tiny"])
    shared, alone = found["sides"]
    assert alone["computed"] == alone["tokens"] == shared["tokens"]
    assert shared["shared_tokens"] <= shared["computed"] < shared["tokens"]
    for side in found["sides"]:
        assert side["seconds"] == pytest.approx(sum(side["phases"].values()))
        assert side["hand_over"] > 0
        assert side["share"] > 0 and side["skipped"] == 0 and len(side["updates"]) == 2


def test_the_peer_trains_on_the_same_tokens_without_its_rollout(tmp_path: Path) -> None:
    found = train.main(["trl", "--out", str(tmp_path), "--tiny", "--settings", "nockpt+micro4"])
    (side,) = found["sides"]
    assert train.parse(["trl", "--out", "x", "--tiny"]).settings == ["defaults", side["setting"]]
    assert side["micro_batches"] == 2 and len(side["updates"]) == 2
    made = train_work.make_sequences(2, 4, SHAPES["tiny"].vocabulary, 48)
    padded = train_sides.padded(made, "cpu")
    assert int(padded["completion_mask"].sum()) == side["response_tokens"] == made.response_tokens
    assert side["phases"] == {}  # TRL's host does not wait for the card between forward and backward
    assert side["computed"] == padded["prompt_ids"].numel() + padded["completion_ids"].numel()
    assert int(padded["prompt_mask"].sum()) == made.tokens - made.response_tokens


def test_memory_is_predicted_beside_what_is_taken(tmp_path: Path) -> None:
    found = train.main(["sizes", "--out", str(tmp_path), "--tiny", "--set", "training.weight_decay=0.0", "7b:a.b=1"])
    (size,) = found["sizes"]
    parts = size["parts"]
    at_once = sum(parts.values()) - min(parts["logits"], parts["decoding"])  # training and rollout take turns
    assert size["error"] is None and size["predicted"] == at_once * 5 // 4
    assert size["seconds"] > 0 and size["ratio"] is None  # a CPU counts no device memory


# --- cycle ------------------------------------------------------------------------------------------------------------


def test_phases_of_a_cycle_add_up_to_it(tmp_path: Path) -> None:
    sizes = ["--prompts", "4", "--samples", "2", "--updates", "2", "--limit", "24", "--cycles", "1"]
    more = ["--device", "cpu", "--shape", "tiny", "--micro-tokens", "2000", "--concurrent", "8"]
    found = cycle.main(["ours", "--out", str(tmp_path), *sizes, *more, "--set", "training.weight_decay=0.0"])
    (side,) = found["sides"]
    assert len(side["cycles"]) == 2
    for one in side["cycles"]:
        assert one["seconds"] == pytest.approx(sum(one["phases"].values())) and one["updates"] == 2
        assert one["generated"] == one["trained"] == 4 * 2 * 24
    again = cycle.main(["ours", "--keep", "--out", str(tmp_path), *sizes, *more, "--set", "training.weight_decay=0.0"])
    assert again["sides"] == found["sides"]  # not run again
    other = cycle.main(["ours", "--keep", "--out", str(tmp_path), *sizes, *more])
    assert other["sides"][0]["seconds"] != side["seconds"]  # other work
    theirs = cycle_sides.their_cycle(100.0, {"generate": 45.0, "sync": 1.0, "reward": 2.0, "whole": 57.0})
    assert theirs["phases"] == {"rollout": 44, "sync": 1, "reward": 2, "prepare": 10, "update": 43, "rest": 0}


def test_a_comparison_has_a_ratio_for_ours_with_and_without_old_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds, asked = {"ours": 10.0, "ours-recompute": 12.5, "trl-micro8": 100.0}, {}

    def side(options: Namespace, name: str, job: dict[str, Any], *_: Any) -> rollout.Outcome:
        asked[name] = job.get("set")
        one = {"kind": "cycle", "seconds": seconds[name], "phases": {}, "inside": {}, "generated": 9, "trained": 9}
        return rollout.Outcome(name, 0.0, [one] * 2, None)

    monkeypatch.setattr(cycle, "run", side)
    model, rows = tmp_path / "model", tmp_path / "rows"
    SHAPES["tiny"].write(model), rows.touch()
    places = ["--out", str(tmp_path), "--model", str(model), "--rows", str(rows), "--device", "cpu"]
    found = cycle.main(["compare", *places, "--best", "micro8", "--set", "seed=3"])
    assert [side.get("ratio") for side in found["sides"]] == [10.0, 8.0, None] and not found["void"]
    assert asked["ours"] == {"seed": 3} and asked["ours-recompute"] == {"seed": 3, "algorithm.proximal": "recompute"}
    assert "TRL / ours, old log-probs recomputed: 8.0x" in capsys.readouterr().out


def test_the_median_cycle_counts_and_even_numbers_of_them_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cycles = [
        {"kind": "cycle", "seconds": s, "phases": {"update": s}, "inside": {}, "generated": 1, "trained": 1}
        for s in (90.0, 3.0, 1.0, 2.0)
    ]
    found = cycle.summary(rollout.Outcome("ours", 0.0, cycles, None), warmup=1)
    assert found["seconds"] == found["phases"]["update"] == 2.0
    assert cycle.parse(["ours", "--out", str(tmp_path)]).cycles == 5
    with pytest.raises(SystemExit):
        cycle.parse(["ours", "--out", str(tmp_path), "--cycles", "4"])
    assert "4: must be odd" in capsys.readouterr().err


def test_a_comparison_is_void_where_the_peer_is_slower_than_known(tmp_path: Path) -> None:
    model = SHAPES["0.5b"].write(tmp_path)
    options = Namespace(prompts=128, samples=16, updates=4, limit=768, model=model)

    def side(name: str, seconds: float | None, tokens: int = 600_000) -> dict[str, Any]:
        return {"name": name, "seconds": seconds, "tokens": tokens}

    fine = [side("ours", 12.0), side("TRL", 80.0)]
    assert cycle.void_reasons(options, fine) == []
    assert "97 s are known" in cycle.void_reasons(options, [fine[0], side("TRL", 99.0)])[0]
    assert cycle.void_reasons(options, [fine[0], side("TRL", None)]) == ["not all sides were measured"]
    assert cycle.void_reasons(options, [fine[0], side("ours, old log-probs recomputed", 13.0)]) != []
    assert "500,000 to 600,000" in cycle.void_reasons(options, [side("ours", 12.0, 500_000), *fine[1:]])[0]


@pytest.mark.parametrize("bench", [cycle, train])
@pytest.mark.parametrize("text", ["training.steps", "=3", "training.betas=[1"])
def test_a_key_without_a_value_is_refused_before_anything_runs(
    bench: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["ours", "--out", str(tmp_path), "--set", "training.steps=2", text])
    assert f"--set: {text}: " in capsys.readouterr().err


def test_a_side_that_was_ended_in_the_middle_of_a_line_is_known_up_to_it(tmp_path: Path) -> None:
    assert rollout.read_records(tmp_path / "none.jsonl") == []
    (tmp_path / "side.jsonl").write_text('{"kind": "cycle"}\n{"kind": "mem')
    assert rollout.read_records(tmp_path / "side.jsonl") == [{"kind": "cycle"}]


def test_what_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, text in (
        (["compare"], "compare needs --model and --rows"),
        (["ours", "--prompts", "6"], "cannot be cut into 4 updates"),
        (["search", "--search", "micro8+quick"], "unknown TRL setting 'quick'"),
    ):
        with pytest.raises(SystemExit):
            cycle.parse([*arguments, "--out", str(tmp_path)])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", trl_side.PARTS)
def test_settings_are_those_that_trl_has(name: str, tmp_path: Path) -> None:
    from trl import GRPOConfig

    settings = trl_side.grpo_settings(trl_side.Task("m"), trl_side.named(name), 8, tmp_path)
    config = GRPOConfig(**(settings | {"use_cpu": True, "bf16": False}))
    assert config.shuffle_dataset
    assert config.generation_batch_size == 128 * 16
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 128 * 16 // 4


def test_both_sides_of_a_cycle_take_the_rows_in_their_order_and_have_as_many_reward_workers(tmp_path: Path) -> None:
    task = cycle.task_of(cycle.parse(["ours", "--out", str(tmp_path), "--shape", "tiny"]))
    assert not trl_side.grpo_settings(task, trl_side.named("defaults"), 8, tmp_path)["shuffle_dataset"]
    job = {"task": task, "rows": None, "warmup": 1, "cycles": 1, "device": "cpu", "concurrent": 8, "micro_tokens": 99}
    ours = cycle_sides.settings_of(job)
    assert not ours["data.shuffle"] and ours["reward.workers"] == trl_side.REWARD_WORKERS


# --- GSM8K ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("setting", gsm8k.SETTINGS)
def test_each_setting_of_the_sweep_is_a_valid_recipe(setting: str) -> None:
    arguments = ["run", "--setting", setting, "--split", "judge", "--minutes", "3", "--seed", "5", "training.eta=1"]
    *values, last = gsm8k.overrides(gsm8k.parse(arguments))
    config = load_config(recipe_path("gsm8k-1gpu"), values)
    assert last == "training.eta=1" and config.training.minutes == 3 and config.updates_per_step == 4
    assert config.data.train[0].path.endswith("rest.jsonl") and config.evaluation.data[0].path.endswith("judge.jsonl")
    assert f"`{setting}`" in (BENCH.parent / "docs/results.md").read_text()  # declared before it was run


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


def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for bench in (train, cycle, rollout):
        with pytest.raises(SystemExit, match="no GPU is seen"):
            bench.main(["ours", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


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
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 2


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
    assert run.name in "".join(ElementTree.parse(tmp_path / "curves.svg").getroot().itertext())


def test_a_peer_that_sleeps_between_rollouts_is_not_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trl_learning.parse(["--minutes", "1", "--model", "m", "--setting", "nockpt+sleep"])
    assert "leave sleep out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--minutes", "--every", "--lr"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_curve_that_would_never_end_is_not_begun(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trl_learning.parse(["--minutes", "1", "--model", "m", option, value])
    assert f"{option} {float(value)}: must be a number above 0" in capsys.readouterr().err


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
    points = [gsm8k.read_curve(tmp_path / name).points for name in ("ours", "theirs")]
    assert [point.minutes for point in points[0]] == pytest.approx([0, 56 / 60, 2])  # with the six seconds of files
    assert [point.minutes for point in points[1]] == pytest.approx([0, 57 / 60, 2])


def test_the_peer_is_evaluated_by_our_own_numbers() -> None:
    class Here:
        def verdicts(self, texts: list[str], answers: list[str]) -> list[Any]:
            return [trl_side.verdict(*pair) for pair in zip(texts, answers, strict=True)]

    heldout = [{"prompt": "p", "answer": "72"}] * 4
    answers = [
        (r"\boxed{72}", [1, 2], "stop"),
        ("it is 72", [1], "stop"),
        ("so", [3], "length"),
        (r"\boxed{7}", [], "stop"),
    ]
    found = trl_learning.measured(heldout, answers, Here())  # type: ignore[arg-type]
    assert (found["eval/accuracy"], found["eval/lenient"], found["eval/no_answer"]) == (0.25, 0.5, 0.5)
    assert found["eval/truncated"] == 0.25 and found["eval/response_length"] == 1.0
