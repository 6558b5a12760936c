"""The benchmarks of training and of whole cycles: their arithmetic, and a run of each on a CPU, TRL's without vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cycle
import runner
import train
import work
from ours_training import rows_of, settings_of
from peers import trl, trl_jobs
from work import SHAPES, Shape, Task

pytestmark = pytest.mark.usefixtures("in_this_process")
SMALL = ["--device", "cpu", "--prompts", "4", "--samples", "2", "--updates", "2", "--cycles", "3"]


# --- train ------------------------------------------------------------------------------------------------------------


def test_operations_count_the_head_for_response_tokens_only() -> None:
    shape = Shape(1, 4, 2, 1, 2, 8, 10, True)
    layers = (4 * 4 + 4) + 2 * (4 * 2 + 2) + 4 * 4 + 3 * 4 * 8 + 2 * 4 + 4  # with the last norm
    assert work.training_operations(shape, computed=7, predicted=5) == 6 * (layers * 7 + 40 * 5)
    untied = replace(shape, tie_word_embeddings=False)
    assert work.training_operations(untied, 7, 5) == work.training_operations(shape, 7, 5)


def test_the_work_of_a_mini_batch_is_like_the_real_one() -> None:
    made = work.make_groups(32, 16, 1000, 768)
    sizes = work.sizes_of(made)
    assert sizes["sequences"] == 512 and len(made) == 32
    assert 250 < sizes["response_tokens"] / 512 < 350
    assert 60 < sizes["shared_tokens"] - sizes["response_tokens"] < 32 * 250
    assert sizes["tokens"] - sizes["response_tokens"] == sum(16 * len(prompt) for prompt, _ in made)


def test_training_is_timed_with_and_without_shared_prompts(tmp_path: Path) -> None:
    found = train.main(["ours", "--out", str(tmp_path), "--device", "cpu", "--set", "training.weight_decay=0.0"])
    shared, alone = found["sides"]
    assert alone["tokens"] == shared["tokens"]
    assert alone["computed"] == alone["tokens"] - alone["sequences"]  # the last token of a response predicts nothing
    assert shared["shared_tokens"] - shared["sequences"] <= shared["computed"] < alone["computed"]
    for side in found["sides"]:
        assert side["seconds"] == pytest.approx(sum(side["phases"].values()))
        assert side["hand_over"] > 0
        assert side["share_of_operations"] > 0 and side["skipped"] == 0 and len(side["updates"]) == 2


def test_memory_is_predicted_beside_what_is_taken(tmp_path: Path) -> None:
    keys = ["--set", "training.weight_decay=0.0", "7b:a.b=1"]
    (size,) = train.main(["sizes", "--out", str(tmp_path), "--device", "cpu", *keys])["sides"]
    parts = size["parts"]
    in_turn = [parts.get(name, 0) for name in ("logits", "at_work", "decoding")]
    at_once = sum(parts.values()) - sum(in_turn) + max(in_turn)
    assert size["error"] is None and size["predicted"] == at_once * 5 // 4
    assert size["seconds"] > 0 and size["ratio"] is None  # a CPU counts no device memory


# --- cycle ------------------------------------------------------------------------------------------------------------


def test_both_sides_sample_and_train_on_the_same_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cycle.main(["compare", "--out", str(tmp_path), *SMALL, "--limit", "5", "--rounds", "1"])
    assert [(side["name"], side.get("setting")) for side in found["sides"]] == [("ours", None), ("TRL", "defaults")]
    for side in found["sides"]:
        assert [one["counts"] for one in side["cycles"]] == [False, True, True, True]
        for one in side["cycles"]:
            assert one["generated"] == one["trained"] == 4 * 2 * 5 and one["updates"] == 2
            assert one["seconds"] == pytest.approx(sum(one["phases"].values()))
            assert min(one["phases"][name] for name in ("rollout", "update")) > 0 and one["cpu_seconds"] > 0
    assert found["void"] == [] and set(found["ratios"]) == {"ours / TRL", "ours / TRL, processor time"}
    assert f"ours / TRL: {found['ratios']['ours / TRL']:.2f}x" in capsys.readouterr().out


def test_a_side_is_taken_from_the_folder_if_it_did_the_same(tmp_path: Path) -> None:
    arguments = ["ours", "--keep", "--out", str(tmp_path), *SMALL, "--limit", "5"]
    first, again, other = (cycle.main([*arguments, *more]) for more in ([], [], ["--set", "seed=7"]))
    assert again["sides"] == first["sides"]
    assert other["sides"][0]["cycles"] != first["sides"][0]["cycles"]


def test_every_prompt_is_used_once_and_both_kinds_of_verdict_occur() -> None:
    rows = [row["prompt"] for row in rows_of(Task("demo", prompts=4, warmup=1, cycles=2))]
    assert len(set(rows)) == len(rows) == 4 * 3
    assert 400 < sum(work.verdict(str(i)) for i in range(1000)) < 600


def test_phases_of_trl_add_up_to_its_cycle() -> None:
    times = {"generate": 45.0, "sync": 1.0, "reward": 2.0, "whole": 57.0}
    theirs = trl_jobs.their_cycle({"seconds": 100.0}, times)
    assert theirs["phases"] == {"rollout": 44, "sync": 1, "reward": 2, "prepare": 10, "update": 43, "rest": 0}


def test_a_comparison_has_a_ratio_for_ours_with_and_without_old_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds, asked = {"ours-1": 10.0, "ours-recompute-1": 12.5, "trl-micro8-1": 100.0}, {}

    def side(options: Any, name: str, job: dict[str, Any]) -> runner.Outcome:
        asked[name] = job.get("set")
        counts = {"updates": 4, "generated": 9, "trained": 9, "counts": True}
        one = {"kind": "cycle", "seconds": seconds.get(name, 1.0), "phases": {}, "inside": {}, **counts}
        return runner.Outcome(name, 0.0, [one] * (job["task"]["cycles"] if "task" in job else 1), None)

    monkeypatch.setattr(cycle, "run_side", side)
    monkeypatch.setattr(runner, "run_side", side)
    monkeypatch.setattr(runner, "require_gpu", lambda device: None)
    model, rows = tmp_path / "model", tmp_path / "rows"
    SHAPES["tiny"].write(model), rows.touch()
    places = ["--out", str(tmp_path), "--model", str(model), "--rows", str(rows)]
    found = cycle.main(["compare", *places, "--best", "micro8", "--set", "seed=3"])
    assert found["ratios"] == {"ours / TRL": 10.0, "ours, old log-probs recomputed / TRL": 8.0} and not found["void"]
    assert asked["ours-1"] == {"seed": 3}
    assert asked["ours-recompute-1"] == {"seed": 3, "algorithm.proximal": "recompute"}
    assert "ours, old log-probs recomputed / TRL: 8.00x" in capsys.readouterr().out


def test_the_median_cycle_counts(tmp_path: Path) -> None:
    shared = {"kind": "cycle", "inside": {}, "updates": 1, "generated": 1, "trained": 1}
    times = [(90.0, False), (3.0, True), (1.0, True), (2.0, True)]
    cycles = [shared | {"seconds": s, "counts": counts, "phases": {"update": s}} for s, counts in times]
    side, task = runner.Outcome("ours", 0.0, cycles, None), Task("m", cycles=3)
    found = cycle.summary(side, task)
    assert found["seconds"] == found["phases"]["update"] == 2.0 and found["speed"] == 0.5
    assert cycle.summary(side, replace(task, cycles=5))["speed"] is None  # it did not come to its end
    assert cycle.parse(["ours", "--out", str(tmp_path), "--device", "cpu"]).cycles == 11


def test_a_comparison_is_void_where_the_peer_is_slower_than_known_or_the_work_differs(tmp_path: Path) -> None:
    task = Task(str(SHAPES["0.5b"].write(tmp_path)))

    def reasons(seconds: tuple[float, float | None], tokens: tuple[int, int] = (9, 9), task: Task = task) -> list[str]:
        sides = [
            {"seconds": s, "speed": s and 1 / s, "generated": n, "trained": n, "updates": 4}
            for s, n in zip(seconds, tokens, strict=True)
        ]
        return cycle.void_reasons(task, {"ours": sides[:1], "TRL": sides[1:]})

    assert reasons((12.0, 80.0)) == []
    assert "97 s are known" in reasons((12.0, 99.0))[0]
    assert reasons((12.0, 99.0), task=replace(task, prompts=64)) == []  # nothing is known of other work
    assert reasons((12.0, None)) == ["TRL was not measured"]
    assert "500,000 to 600,000" in reasons((12.0, 80.0), (500_000, 600_000))[0]
    assert reasons((12.0, 80.0), (99, 100)) == []
    assert "sampled 99 to 100 tokens" in reasons((12.0, 80.0), (99, 100), replace(task, natural=False))[0]


@pytest.mark.parametrize("name", trl.PARTS)
def test_settings_are_those_that_trl_has(name: str, tmp_path: Path) -> None:
    from trl import GRPOConfig

    settings = trl.grpo_settings(Task("m"), name, 8, tmp_path)
    config = GRPOConfig(**(settings | {"use_cpu": True, "bf16": False}))
    assert config.shuffle_dataset
    assert config.generation_batch_size == 128 * 16
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 128 * 16 // 4


def test_both_sides_of_a_cycle_take_the_rows_in_their_order_and_have_as_many_reward_workers(tmp_path: Path) -> None:
    task = cycle.task_of(cycle.parse(["ours", "--out", str(tmp_path), "--device", "cpu"]))
    assert not trl.grpo_settings(task, "defaults", 8, tmp_path)["shuffle_dataset"]
    ours = settings_of(task)
    assert not ours["data.shuffle"] and ours["reward.workers"] == work.REWARD_WORKERS


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_learning_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import cpu_learning

    pytest.importorskip("trl")
    difference = cpu_learning.main(["--seeds", "1", "--steps", "2", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] == f"{difference:+.1f} points"


def test_the_peer_is_evaluated_by_our_own_numbers() -> None:
    from dapo.reward.math.score import score_math

    class Here:
        def verdicts(self, texts: list[str], answers: list[str]) -> list[Any]:
            return [score_math(*pair, ["boxed", "answer_line"]) for pair in zip(texts, answers, strict=True)]

    heldout = [{"prompt": "p", "answer": "72"}] * 4
    answers = [
        (r"\boxed{72}", [1, 2], "stop"),
        ("it is 72", [1], "stop"),
        ("so", [3], "length"),
        (r"\boxed{7}", [], "stop"),
    ]
    found = trl_jobs.measured(heldout, answers, Here())  # type: ignore[arg-type]
    assert (found["eval/accuracy"], found["eval/lenient"], found["eval/no_answer"]) == (0.25, 0.5, 0.5)
    assert found["eval/truncated"] == 0.25 and found["eval/response_length"] == 1.0
