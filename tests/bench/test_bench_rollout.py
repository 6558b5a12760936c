"""The rollout benchmark: its arithmetic, and every command from end to end on a CPU, vLLM's side with a stand-in."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import rollout_vllm  # noqa: E402
import rollout_work  # noqa: E402
from rollout_work import SHAPES, Cost, Limits, Shape, rollout_cost, step_cost  # noqa: E402

import rollout  # noqa: E402

STAND_IN = '''
"""As much of vLLM as the benchmark calls. Fails, as asked to, with 256 sequences."""
import os
from types import SimpleNamespace as Record


class SamplingParams:
    def __init__(self, **settings):
        self.__dict__.update(settings)


class LLM:
    def __init__(self, model, dtype, seed, max_num_seqs=0, **settings):
        assert os.path.isfile(f"{model}/config.json")
        if max_num_seqs == 256:
            raise MemoryError("no room for 256")

    def generate(self, prompts, params, use_tqdm):
        responses = [[Record(token_ids=[0] * p.max_tokens) for _ in range(p.n)] for p in params]
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
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
    return ["--vllm-path", str(tmp_path / "site")]


def run(tmp_path: Path, command: str, *more: str) -> dict[str, Any]:
    found = rollout.main([command, "--out", str(tmp_path), *SMALL, *more])
    assert json.loads((tmp_path / f"{command}.json").read_text()) == found
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
        shape = replace(SHAPES["tiny"], tied=tied)
        folder = shape.write(tmp_path / str(number))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        assert Shape.read(folder) == shape
        assert sum(p.numel() for p in model.parameters()) == shape.parameters
        assert model.config.rope_parameters["rope_theta"] == 1e6


def test_a_decode_step_of_one_row_counts_what_is_written_out_here() -> None:
    shape = Shape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp=8, vocabulary=10, tied=False)
    layer = (4 * 4 + 4) + 2 * (4 * 2 + 2) + 4 * 4 + 3 * 4 * 8 + 2 * 4  # q, k and v, o, mlp, norms
    assert shape.parameters == layer + 4 + 2 * 10 * 4
    used = layer + 4 + 10 * 4
    cost = step_cost(shape, rows=1, context=3)
    assert cost.bytes == 2 * used + 4 * (2 * 2 * 2) + 2 * 4 * 10  # weights, 4 tokens' keys and values, logits
    assert cost.operations == 2 * used + 4 * 2 * 2 * 3


def test_a_rollout_without_prefill_costs_the_sum_of_its_steps() -> None:
    shape = SHAPES["tiny"]
    steps = [step_cost(shape, 5, 100 + i + 0.5) for i in range(8)]
    cost = rollout_cost(shape, [(100, 8)] * 5, prompts=[], rows=5)
    assert cost.bytes == pytest.approx(sum(step.bytes for step in steps) - 8 * 5 * 0.5 * shape.kv_bytes, rel=0.01)
    assert cost.operations == pytest.approx(sum(step.operations for step in steps), rel=0.01)


def test_shares_are_of_the_measured_limits() -> None:
    assert Cost(bytes=20, operations=30).seconds(Limits("card", 10, 5)) == (2, 6)


def test_drawn_lengths_are_distributed_like_the_whole_list() -> None:
    whole = [n for _, n in json.loads(rollout_work.LENGTHS.read_text())["lengths"]]
    drawn = [n for _, n in rollout_work.drawn_lengths(128)]
    assert sum(drawn) / 128 == pytest.approx(sum(whole) / len(whole), rel=0.03)
    assert drawn == [n for _, n in rollout_work.drawn_lengths(128)] != sorted(drawn)


def test_steady_rates_come_from_the_difference_of_two_rollouts() -> None:
    found = rollout_work.steady_result({"short": [5.0, 5.2, 5.1], "long": [7.1, 7.0, 7.3]}, rows=100, steps=50)
    assert found["step_seconds"] == pytest.approx(2 / 50)
    assert found["tokens_per_second"] == pytest.approx(100 * 50 / 2)
    job = {"model": "m", "lead": 32, "steps": 64, "device": "cpu", "dtype": "float32"}
    short, long = rollout_work.steady_works(job, 64, rows=3, context=400)
    assert {len(p) + 32 + 64 / 2 for p in short.prompts} == {400}
    assert len({tuple(p) for p in short.prompts}) == 3
    assert (short.limits, long.limits) == ([32] * 3, [96] * 3)


def test_names_of_settings_are_joined_and_unknown_ones_refused() -> None:
    setting = rollout_vllm.named("sync+graphs1024+full+flat+runner2")
    assert setting.engine == {"async_scheduling": False}
    assert setting.compilation == {"max_cudagraph_capture_size": 1024, "cudagraph_mode": "FULL"}
    assert setting.sampling == {"flat_logprobs": True}
    assert setting.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    with pytest.raises(ValueError, match="unknown vLLM setting 'quick'"):
        rollout_vllm.named("sync+quick")


def test_a_comparison_is_void_below_what_is_known_of_the_peer(tmp_path: Path) -> None:
    def side(name: str, rate: float) -> dict[str, Any]:
        return {"name": name, "rate": rate, "runs": [{"samples": 2048, "tokens": 1000}]}

    folder = SHAPES["0.5b"].write(tmp_path)
    work = rollout_work.Work(str(folder), False, [[1]] * 128, [768] * 128, 16, [], 1.0, 1024, "cuda", "bfloat16")
    assert rollout.void_reasons(work, [side("ours", 90_000), side("best", 18_500), side("defaults", 15_000)]) == []
    reasons = rollout.void_reasons(work, [side("ours", 90_000), side("best", 17_500), side("defaults", 15_000)])
    assert reasons == ["vLLM reached 17,500 tokens/s, and 18,000 are known of it on an NVIDIA H100 80GB"]


# --- from end to end --------------------------------------------------------------------------------------------------


def test_a_comparison_runs_the_same_work_on_both_sides_and_ends_with_the_ratio(
    tmp_path: Path, peer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    searched = run(tmp_path, "vllm", *peer, "--search", "seqs256", "flat+nodetok")
    failed, fine = searched["sides"]
    assert failed["rate"] is None and "no room for 256" in failed["error"]
    assert fine["rate"] > 0

    found = run(tmp_path, "compare", *peer, "--repeats", "1")
    assert [side["name"] for side in found["sides"]] == ["ours", "vLLM best", "vLLM defaults"]
    assert found["sides"][1]["setting"] == "flat+nodetok"
    assert len({run["tokens"] for side in found["sides"] for run in side["runs"]}) == 1
    for side in found["sides"]:
        assert side["runs"][0]["samples"] == 6 and side["start_seconds"] > 0
        assert side["runs"][0]["share_of_bytes"] > 0
    for theirs in found["sides"][1:]:
        assert theirs["ratio"] == found["sides"][0]["rate"] / theirs["rate"]
    assert found["void"] == [] and found["known_rate"] is None
    assert "no room for 256" in capsys.readouterr().out


def test_steady_states_are_measured_or_skipped_one_by_one(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        *("steady", "--shapes", "tiny", "--rows", "4", "--contexts", "24", "10000000"),
        *("--lead", "2", "--steps", "16", "--repeats", "3", "--dtype", "float32"),
    )
    measured, skipped = found["cells"]
    assert (measured["rows"], measured["context"]) == (4, 24)
    assert measured["tokens_per_second"] * measured["step_seconds"] == pytest.approx(4)
    assert measured["bytes"] == step_cost(SHAPES["tiny"], 4, 24).bytes
    assert "needed" in skipped["skipped"]


def test_starts_are_timed_with_empty_caches_and_with_those_left_behind(tmp_path: Path, peer: list[str]) -> None:
    starts = run(tmp_path, "startup", *peer, "--sides", "ours", "vllm")["starts"]
    assert [(s["side"], s["state"]) for s in starts] == [(a, b) for a in ("ours", "vllm") for b in ("cold", "warm")]
    for start in starts:
        assert start["error"] is None
        assert 0 < start["seconds"]["ready"] < start["seconds"]["first token"] < start["seconds"]["first batch"]


def test_a_side_that_takes_too_long_is_ended_and_reported(tmp_path: Path, peer: list[str]) -> None:
    init = tmp_path / "site" / "vllm" / "__init__.py"
    init.write_text(init.read_text() + "\nimport time\nprint('going to sleep', flush=True)\ntime.sleep(60)\n")
    found = run(tmp_path, "vllm", *peer, "--patience", "15")
    assert "not done after 15 s" in found["sides"][0]["error"] and "going to sleep" in found["sides"][0]["error"]


def test_the_real_rollout_reads_prompts_and_compares_with_the_trainer(tmp_path: Path) -> None:
    from dapo.commands.demo.task import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    make_model(0, len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "7+8="}\n')
    found = run(
        tmp_path,
        *("ours", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.jsonl")),
        *("--dtype", "float32", "--repeats", "2", "--write-lengths", str(tmp_path / "lengths.json")),
    )
    assert found["work"]["prompts"] == 2 and not found["work"]["random"]
    tokens = [run["tokens"] for run in found["sides"][0]["runs"]]
    assert len(tokens) == 2 and all(4 <= n <= 16 for n in tokens)
    assert found["mismatch"]["tokens"] == tokens[-1]
    written = json.loads((tmp_path / "lengths.json").read_text())
    assert sum(n for _, n in written["lengths"]) == tokens[0] and written["model"] == "model"
    assert 0 < found["mismatch"]["mean"] < 0.05
