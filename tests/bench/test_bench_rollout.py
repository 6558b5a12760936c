"""The rollout benchmark: its arithmetic, and every command from end to end on a CPU, vLLM's side with a stand-in."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollout
import runner
import steady
import work
from work import SHAPES, Cost, Limits, Shape, rollout_cost, step_cost

STAND_IN = '''
"""As much of vLLM as the benchmark calls. Fails, as asked to, with 256 sequences; sleeps with 512."""
import os, time
from types import SimpleNamespace as Record


class SamplingParams:
    def __init__(self, **settings):
        self.__dict__.update(settings)


class LLM:
    def __init__(self, model, dtype, seed, max_num_seqs=0, **settings):
        assert os.path.isfile(f"{model}/config.json")
        if max_num_seqs == 256:
            raise MemoryError("no room for 256")
        if max_num_seqs == 512:
            print("going to sleep", flush=True)
            time.sleep(60)

    def generate(self, prompts, params, use_tqdm):
        responses = [[Record(token_ids=[0] * p.max_tokens) for _ in range(p.n)] for p in params]
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        if len(prompts) == 2 and params[0].max_tokens > 32:
            raise MemoryError("no room for 2 long rows")
        time.sleep(1e-3 * max(p.max_tokens for p in params))
        return [Record(outputs=several) for several in responses]

    def reset_prefix_cache(self):
        pass
'''

SMALL = ["--device", "cpu", "--shape", "tiny", "--prompts", "3", "--samples", "2", "--limit", "4", "--concurrent", "4"]


@pytest.fixture
def peer(tmp_path: Path) -> list[str]:
    """Options for a folder that holds the stand-in."""
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(STAND_IN)
    return ["--peer-path", str(tmp_path / "site")]


def run(tmp_path: Path, command: str, *more: str) -> dict[str, Any]:
    places = ["--out", str(tmp_path), "--settings", str(tmp_path / "settings.json")]
    found = rollout.main([command, *places, *SMALL, *more])
    assert json.loads((tmp_path / f"{command}.json").read_text()) == json.loads(json.dumps(found))
    return found


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"), [("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("7b", 7_615_616_512)]
)
def test_shapes_have_as_many_parameters_as_the_published_models(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


def test_the_shape_that_is_written_is_the_one_that_transformers_makes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for number, tied in enumerate((True, False)):
        shape = replace(SHAPES["tiny"], tie_word_embeddings=tied)
        folder = shape.write(tmp_path / str(number))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        assert Shape.read(folder) == shape
        assert sum(p.numel() for p in model.parameters()) == shape.parameters
        assert model.config.rope_parameters["rope_theta"] == 1e6


def test_a_decode_step_of_one_row_counts_what_is_written_out_here() -> None:
    shape = Shape(1, 4, 2, 1, 2, 8, 10, False)
    layer = (4 * 4 + 4) + 2 * (4 * 2 + 2) + 4 * 4 + 3 * 4 * 8 + 2 * 4  # q, k and v, o, mlp, norms
    assert shape.parameters == layer + 4 + 2 * 10 * 4
    used = layer + 4 + 10 * 4
    cost = step_cost(shape, rows=1, context=3)
    assert cost.bytes == 2 * used + 4 * (2 * 2 * 2) + 2 * 4 * 10  # weights, 4 tokens' keys and values, logits
    assert cost.operations == 2 * used + 4 * 2 * 2 * 3
    shares = Cost(bytes=40, operations=60).shares(Limits("card", 10, 5), seconds=8)
    assert (shares["share_of_bytes"], shares["share_of_operations"]) == (0.5, 1.5)


def test_a_rollout_without_prefill_costs_the_sum_of_its_steps() -> None:
    shape = SHAPES["tiny"]
    steps = [step_cost(shape, 5, 100 + i + 0.5) for i in range(8)]
    cost = rollout_cost(shape, [(100, 8)] * 5, prompts=[], rows=5)
    assert cost.bytes == pytest.approx(sum(step.bytes for step in steps) - 8 * 5 * 0.5 * shape.kv_bytes, rel=0.01)
    assert cost.operations == pytest.approx(sum(step.operations for step in steps), rel=0.01)


def test_drawn_lengths_are_distributed_like_the_whole_list() -> None:
    whole = [n for _, n in json.loads(work.LENGTHS.read_text())["lengths"]]
    drawn = [n for _, n in work.drawn_lengths(128)]
    assert sum(drawn) / 128 == pytest.approx(sum(whole) / len(whole), rel=0.03)
    assert drawn == [n for _, n in work.drawn_lengths(128)] != sorted(drawn)


def test_a_comparison_is_void_below_what_is_known_of_the_peer(tmp_path: Path) -> None:
    def side(name: str, speed: float | None, setting: str = "") -> dict[str, Any]:
        return {"name": name, "setting": setting, "speed": speed, "runs": [{"samples": 2048, "tokens": 1000}]}

    best, defaults = partial(side, "vLLM best"), side("vLLM defaults", 15_000, "defaults")

    folder = SHAPES["0.5b"].write(tmp_path)
    real = work.Rollout(str(folder), False, [[1]] * 128, [768] * 128, 16, [], 1.0, 1024, "cuda", "bfloat16")
    assert rollout.void_reasons(real, [side("ours", 90_000), best(18_500), defaults]) == []
    reasons = rollout.void_reasons(real, [side("ours", 90_000), best(17_500), defaults])
    assert reasons == ["vLLM reached 17,500 tokens/s, and 18,000 are known of it on an NVIDIA H100 80GB"]
    assert rollout.void_reasons(real, [side("ours", None), defaults])[:2] == [
        "ours was not measured",
        "vLLM's best setting or its defaults are missing",
    ]
    assert rollout.void_reasons(real, [side("ours", 90_000), best(18_500, "defaults")]) == []  # they are the best


# --- from end to end --------------------------------------------------------------------------------------------------


def test_a_comparison_runs_the_same_work_on_both_sides_and_ends_with_the_ratio(
    tmp_path: Path, peer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    searched = run(tmp_path, "search", *peer, "--search", "seqs256", "flat+nodetok")
    failed, fine = searched["sides"]
    assert failed["speed"] is None and "no room for 256" in failed["error"]
    assert fine["speed"] > 0

    found = run(tmp_path, "compare", *peer, "--repeats", "1", "--keep")
    assert [side["name"] for side in found["sides"]] == ["ours", "vLLM best", "vLLM defaults"]
    ours, best, defaults = found["sides"]
    assert best["setting"] == "flat+nodetok" and best["speed"] == fine["speed"]  # not run again
    assert len({run["tokens"] for side in found["sides"] for run in side["runs"]}) == 1
    for side in found["sides"]:
        assert side["runs"][0]["samples"] == 6 and side["seconds_to"]["first batch"] > 0 and side["share_of_bytes"] > 0
        assert "torch" in side["machine"]["versions"]
    assert found["ratios"] == {f"ours / {side['name']}": ours["speed"] / side["speed"] for side in (best, defaults)}
    assert found["void"] == [] and found["known_rate"] is None
    told = capsys.readouterr().out
    assert "no room for 256" in told and "vllm-flat+nodetok: as measured before" in told
    assert f"ours / vLLM defaults: {ours['speed'] / defaults['speed']:.2f}x" in told


@pytest.mark.usefixtures("in_this_process")
def test_steady_decoding_is_the_difference_of_two_rollouts(tmp_path: Path) -> None:
    points = ["--points", "3x80", "2x1k", "--limit", "48"]
    options = rollout.parse(["ours", "--out", str(tmp_path), *SMALL, *points])
    works = rollout.make_works(options)
    for rows, context, short, long in ((3, 80, *works[:2]), (2, 1024, *works[2:])):
        assert {len(prompt) + 32 + 48 / 2 for prompt in short.prompts} == {context}
        assert len({tuple(prompt) for prompt in short.prompts}) == rows
        assert (short.limits, long.limits) == ([32] * rows, [80] * rows)
    cut = replace(works[2], prompts=[[1] * 40_000, [2] * 40_000]).warmup()
    assert [len(prompt) for prompt in cut.prompts] == [40_000, 16]
    side = run(tmp_path, "ours", *points)["sides"][0]
    marks = side["seconds_to"]
    assert side["error"] is None and marks["first batch"] < marks["3x80"] < marks["2x1k"] < marks["end"]


def test_figures_of_a_point_are_those_of_its_steps_and_of_both_kinds_of_limits(tmp_path: Path) -> None:
    points = ["--points", "3x80", "2x1k", "--limit", "16"]
    options = rollout.parse(["ours", "--out", str(tmp_path), *SMALL, *points])
    works = rollout.make_works(options)
    records = [
        {"kind": "rollout", "work": i, "time": t, "seconds": s, "lengths": [(1, n)] * 3}
        for i, n, t, s in ((0, 32, 9, 5.0), (1, 48, 10, 7.0), (2, 32, 11, 1.0), (0, 32, 13, 4.0), (1, 48, 14, 5.0))
    ]
    card = Limits("NVIDIA H200", 1e6, 1e6)
    side = runner.Outcome("ours", 4.0, records, None)
    found = steady.figures(options.points, side, works, card)
    assert found["rate"] == {"3x80": 48.0} and found["milliseconds"] == {"3x80": 62.5}  # the shortest: 5 - 4 s
    assert found["reading"] == {"3x80": 4.0} and found["seconds_to"]["3x80"] == 6.0
    assert found["speed"] is None  # 2x1k was not measured
    cost = step_cost(SHAPES["tiny"], 3, 80)
    assert found["bytes"]["3x80"] == cost.bytes
    assert found["share_of_bytes"]["3x80"] == pytest.approx(cost.bytes / 0.0625 / 1e6)
    assert found["share_of_peak_bytes"]["3x80"] == pytest.approx(cost.bytes / 0.0625 / 4.8e12)
    assert found["share_of_peak_operations"]["3x80"] == pytest.approx(cost.operations / 0.0625 / 989e12)
    records[1]["lengths"][2] = (1, 47)  # not all tokens came
    assert steady.figures(options.points, side, works, card)["rate"] == {}


def test_points_are_compared_as_far_as_each_side_came(
    tmp_path: Path, peer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--points", "3x80", "2x1k", "1x64", "--limit", "30", "--best", "async+flat"]
    found = run(tmp_path, "compare", *peer, *more)
    ours, theirs = found["sides"]
    assert ours["error"] is None and list(ours["seconds_to"])[-1] == "end"
    assert "no room for 2 long rows" in theirs["error"] and not {"2x1k", "1x64"} & set(theirs["rate"])
    assert {f"vLLM best has no figure at {name}" for name in ("2x1k", "1x64")} <= set(found["void"])
    engine = json.loads((tmp_path / "vllm-async+flat.job.json").read_text())["engine"]
    assert engine["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 3]}
    assert engine["max_num_seqs"] == 3 and not engine["enable_prefix_caching"]
    assert engine["max_model_len"] == 1024 + 15  # the mean, and half of the steps
    told = capsys.readouterr().out
    assert "tokens/s: 3x80" in told and "VOID: vLLM best has no figure at 1x64" in told


def test_a_point_that_a_side_lacks_is_void_and_the_others_hold() -> None:
    points = [steady.point("3x80"), steady.point("2x1k"), steady.point("1x64")]
    ours, theirs = {"3x80": 30.0, "2x1k": 8.0}, {"3x80": 20.0, "1x64": 5.0}
    found = steady.conclude(points, [{"name": "ours", "rate": ours}, {"name": "vLLM", "rate": theirs}])
    assert found["ratios"] == {"3x80, ours / vLLM": 1.5}
    assert found["void"] == ["vLLM has no figure at 2x1k", "ours has no figure at 1x64"]


def test_sides_that_have_no_time_left_are_ended_and_the_table_is_printed(
    tmp_path: Path, peer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, "compare", *peer, "--points", "3x80", "--best", "flat", "--within", "0", "--limit", "8")
    assert all("not started: --within is over" in side["error"] for side in found["sides"])
    assert found["ratios"] == {} and "VOID: ours has no figure at 3x80" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["256", "0x1k", "4x", "ax1k", "4x1m"])
def test_a_point_is_rows_and_context(text: str) -> None:
    assert steady.point("64x4k") == ("64x4k", 64, 4096) and steady.point("8x480") == ("8x480", 8, 480)
    with pytest.raises(argparse.ArgumentTypeError, match="such as 256x1k"):
        steady.point(text)


def test_a_start_is_timed_with_a_folder_of_compiled_code_of_its_own(tmp_path: Path, peer: list[str]) -> None:
    caches = tmp_path / "caches"
    found = run(tmp_path, "compare", *peer, "--best", "flat", "--repeats", "1", "--caches", str(caches))
    for side in found["sides"]:
        seconds = side["seconds_to"]
        assert 0 < seconds["ready"] < seconds["first token"] < seconds["first batch"] and side["error"] is None
    told = json.loads((tmp_path / "vllm-flat.job.json").read_text())["environment"]
    assert told["VLLM_CACHE_ROOT"] == str(caches / "vllm_cache_root") and len(told) == 6


def test_a_side_that_takes_too_long_is_ended_and_reported(tmp_path: Path, peer: list[str]) -> None:
    found = run(tmp_path, "search", *peer, "--search", "seqs512", "--patience", "15")
    assert "not done after 15 s" in found["sides"][0]["error"] and "going to sleep" in found["sides"][0]["error"]


@pytest.mark.usefixtures("in_this_process")
def test_the_real_rollout_reads_prompts_and_compares_with_the_trainer(tmp_path: Path) -> None:
    from dapo.commands.demo.task import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    make_model(0, len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "7+8="}\n')
    places = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.jsonl")]
    found = run(tmp_path, "ours", *places, "--repeats", "2")
    assert found["work"]["prompts"] == 2 and not found["work"]["random"]
    (side,) = found["sides"]
    tokens = [run["tokens"] for run in side["runs"]]
    assert len(tokens) == 2 and all(4 <= n <= 16 for n in tokens)
    assert side["mismatch"]["tokens"] == tokens[-1] and 0 < side["mismatch"]["mean"] < 0.05
