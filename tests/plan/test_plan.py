"""Plans: against what was measured, part by part, and what is said of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo.commands import app
from dapo.config import Config, load_config
from dapo.config.plan import recipe_path
from dapo.errors import ConfigError, ModelError
from dapo.model.loading import check_supported
from dapo.plan.estimate import Assumed, Estimate, estimate_for
from dapo.plan.hardware import Cluster, _table, published_shape, rates_for, read_cluster
from dapo.plan.rollout import Decoding, Sampling, sample
from dapo.training.lora import trainable_shape

MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))["steps"]
DOCS = Path(__file__).parents[2] / "docs"
PAPER = [
    *("data.max_prompt_length=2048", "rollout.max_response_length=20480", "algorithm.overlong_buffer.len=4096"),
    *("rollout.prompts_per_step=512", "rollout.max_concurrent_samples=256", "rollout.cache_gib=null"),
]


def recipe(*settings: str) -> Config:
    return load_config(recipe_path("gsm8k-1gpu"), ["training.minutes=null", "training.steps=100", *settings])


def estimated(cluster: str, *settings: str, assumed: Assumed | None = None) -> Estimate:
    return estimate_for(recipe(*settings), cluster, assumed or Assumed(300, 100, 0.6))[0]


# --- against measurements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", MEASURED, ids=[run["name"] for run in MEASURED])
def test_steps_within_a_quarter_and_memory_within_15_percent_of_what_was_measured(run: dict[str, Any]) -> None:
    if any("lora" in setting for setting in run["settings"]):
        pytest.importorskip("peft")
    found = estimated(run.get("cluster", "H200"), *run["settings"], assumed=Assumed(*run["assumed"]))
    seconds = found.seconds()
    for phase, measured in run["seconds"].items():
        print(
            f"{run['name']}: {phase} {seconds[phase]:.2f} s, measured {measured}: {seconds[phase] / measured - 1:+.0%}"
        )
    for phase in {"step", "update", "sync"} & set(run["seconds"]):  # a rollout may be further off, as printed
        assert seconds[phase] == pytest.approx(run["seconds"][phase], rel=0.25)
    if "memory" in run:
        in_use = found.needed() / found.kept / 1e9
        print(f"{run['name']}: {in_use:.1f} GB, measured {run['memory']}")
        assert in_use == pytest.approx(run["memory"], rel=0.15)
    text = (DOCS / run["source"]).read_text(encoding="utf-8")
    assert all(f"{number:g}" in text for number in run["seconds"].values())


def test_rates_name_a_page_that_is_there_and_steps_of_decoding_are_near_what_was_measured() -> None:
    assert all((DOCS / re.search(r"docs/(\w+\.md)", row["source"])[1]).is_file() for row in rates_for("H200"))  # type: ignore[index]
    points = json.loads((DOCS.parent / "bench" / "decode_points.json").read_text(encoding="utf-8"))["steps"]
    off = {("Qwen2.5-1.5B", 256): 0.19}  # its products take longer for their size than those of 0.5B and 7B
    for point in points:
        cost = estimated("H200", f"model.path={point['model']}").decoding
        seconds = cost.step + point["rows"] * (cost.row + point["context"] * cost.token)
        bound = off.get((point["model"], point["rows"]), 0.08)
        assert seconds == pytest.approx(point["seconds"], rel=bound), point


# --- hardware and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known", "parameters"),
    [
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-0.5B", 494_032_768),
        ("1.5B", "Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-Math-7B", "Qwen2.5-7B", 7_615_616_512),
        ("qwen2.5-32b-instruct", "Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen3-4B", "Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", "Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B", 1_235_814_400),
        ("13B", "Llama-2-13B", 13_015_864_320),
        ("70B", "Llama-3.1-70B", 70_553_706_496),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M", 134_515_008),
    ],
)
def test_a_published_model_has_its_number_of_parameters(name: str, known: str, parameters: int) -> None:
    found, config = published_shape(name)
    check_supported(config)
    model = trainable_shape(recipe().model.model_copy(update={"path": name}), config)
    assert found == known and sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["gpt-5", "Qwen/Qwen2.5-9B", "17B", "my/Qwen2.5", "0.5"])
def test_a_model_that_is_not_known_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ModelError, match=r"a size such as 7B, or one of Qwen2\.5-0\.5B, "):
        published_shape(name)


def test_every_shape_of_the_table_is_found_by_its_own_name() -> None:
    assert all(published_shape(f"owner/{name}")[0] == name for name in _table("shapes"))


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("8x8xH100", Cluster(8, 8, "H100")),
        ("4xH200", Cluster(1, 4, "H200")),
        ("h100", Cluster(1, 1, "H100")),
        ("2xH100-PCIe", Cluster(1, 2, "H100 PCIe")),
        ("2x1xA100-80GB", Cluster(2, 1, "A100 80GB")),
        ("8xA100-SXM4-80GB", Cluster(1, 8, "A100-SXM4-80GB")),
        ("RTX4090", Cluster(1, 1, "RTX 4090")),
    ],
)
def test_clusters(text: str, cluster: Cluster) -> None:
    assert read_cluster(text) == cluster and cluster.card.memory > 20


@pytest.mark.parametrize(
    "text",
    ["", "8", "8x8", "0xH100", "8x8x8xH100", "8xH999", "-1xH100", "L40", "H2000", "H100-NVL", "H100foo", "A100-SXM4"],
)
def test_no_cluster(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 8x8xH100.*known: B200, "):
        read_cluster(text)


# --- memory over ranks ------------------------------------------------------------------------------------------------


def test_whole_copies_share_nothing_and_main_memory_takes_what_it_is_told_to() -> None:
    ray = ("model.path=7B", "runtime.kind=ray", "runtime.learner.workers=8", "training.activation_checkpointing=true")
    ray += ("training.tokens_per_micro_batch=2048",)
    shared = estimated("8xH200", *ray)
    whole = estimated("8xH200", *ray, "runtime.learner.sharded=false")
    offloaded = estimated("8xH200", *ray, "runtime.learner.cpu_offload=true")
    for part in ("weights", "gradients", "adam"):
        assert getattr(whole.memory(), part) == pytest.approx(8 * getattr(shared.memory(), part), abs=64)
        assert getattr(offloaded.memory(), part) == 0
    assert shared.fits and not whole.fits
    assert 0 < whole.network() < shared.network()
    assert any("(whole on each)" in text for text in whole.assumptions())
    moved = offloaded.main_memory() - shared.main_memory()
    assert moved == pytest.approx(16 * 7_615_616_512, rel=1e-6) and offloaded.needed() < shared.needed()


def test_only_the_gpus_that_train_exchange() -> None:
    ray = ("model.path=7B", "runtime.kind=ray", "runtime.learner.workers=4", "training.tokens_per_micro_batch=2048")
    beside = estimated("8xH100", *ray, "runtime.placement=disaggregated", "runtime.engine.workers=4")
    assert beside.ranks == 4 and beside.network() == estimated("4xH100", *ray).network() > 0


def test_a_forward_pass_is_a_third_of_an_update_whatever_the_prompts() -> None:
    for prompt, response in ((100, 300), (500, 20)):
        forward, both = estimated("H200", assumed=Assumed(response, prompt, 1.0)).operations()
        assert 3 <= both / forward <= 3.5
    assert estimated("H200", assumed=Assumed(20, 500, 1.0)).passes(0, 0) == (0, 0)
    found = estimated("H200", "model.path=7B").passes(10, 0)[0]  # tokens that are not predicted need no head
    assert found == pytest.approx(20 * (7_615_616_512 - 2 * 152_064 * 3_584) + 4 * 10 * 50 * 3_584 * 28, rel=1e-6)


def test_ranks_share_what_is_trained_and_each_has_a_whole_engine() -> None:
    one, eight = estimated("H200", "model.path=7B").memory(), estimated("8xH200", "model.path=7B").memory()
    for part in ("weights", "gradients", "adam"):
        assert getattr(eight, part) == pytest.approx(getattr(one, part) / 8, abs=8)
    assert eight.engine == one.engine
    head, layer = 152_064 * 3584, (7_615_616_512 - 2 * 152_064 * 3584 - 3584) // 28
    assert eight.casts == pytest.approx(8 * 2 * head - 4 * head + 8 * layer, rel=1e-3), "tables, and layers in turn"
    assert eight.cache < one.cache, "fewer samples of a step on each"


def test_an_adapter_is_whole_on_every_rank() -> None:
    pytest.importorskip("peft")
    one, eight = (estimated(n, "model.path=7B", "model.lora.rank=16").memory() for n in ("H200", "8xH200"))
    assert (one.weights, one.gradients, one.adam, one.casts) == (
        eight.weights,
        eight.gradients,
        eight.adam,
        eight.casts,
    )


def test_a_cache_without_a_size_takes_what_is_left_and_bounds_the_sequences() -> None:
    found = estimated(
        "H200", "model.path=7B", "training.tokens_per_micro_batch=4096", "rollout.max_concurrent_samples=256"
    )
    long = estimated("H200", "model.path=7B", *PAPER, assumed=Assumed(10_000, 1000, 0.6))
    assert found.rows == 256 and long.rows < 256
    assert long.memory().cache + long.memory().lasting + long.memory().decoding <= long.usable / long.kept


def test_what_would_fit_does() -> None:
    pytest.importorskip("peft")
    found = estimated("8xH100", "model.path=7B")
    assert not found.fits
    told = {change: size for change, size, _ in found.would_fit()}
    at_once = {change: rows for change, _, rows in found.would_fit()}
    fitting = {change: size for change, size in told.items() if size <= found.usable}
    assert "training.tokens_per_micro_batch=1280" in fitting and any(change.endswith("GPUs") for change in fitting)
    assert {"model.lora.rank=16", "model.lora.rank=16 model.lora.base=nf4"} <= told.keys()
    for change, size in told.items():
        gpus = re.match(r"(\d+) GPUs ?", change)
        settings = change.removeprefix(gpus[0] if gpus else "").split()
        other = estimated(f"{gpus[1]}xH100" if gpus and int(gpus[1]) < 999 else "8xH100", "model.path=7B", *settings)
        assert (other.needed(), other.rows) == (size, at_once[change]), change


def test_settings_that_fill_a_gpu_alike_differ_in_how_much_they_sample_at_once() -> None:
    pytest.importorskip("peft")
    done = CliRunner().invoke(app, ["plan", "gsm8k-1gpu", "--cluster", "RTX-4090", "model.path=7B"])
    found = re.findall(r"22.80 fits +(\d+)  model.lora.rank=16 (.*nf4)?", done.stdout)
    (wide, _), (narrow, base) = sorted(found, key=lambda one: one[1])
    assert base and int(narrow) > 2 * int(wide) > 100


def test_the_papers_run_is_refused_on_80_gb_with_the_engine_that_would_do() -> None:
    found = estimated("16x8xH100", "model.path=Qwen/Qwen2.5-32B", *PAPER)
    assert not found.fits
    assert {"base=nf4" in change for change, size, _ in found.would_fit() if size <= found.usable} == {True}
    assert "vLLM, tensor parallelism of 4" in found.engine_note()
    assert estimated("8xH200", "model.path=7B").engine_note() == ""
    assert "parallelism of 8" in estimated("L4", "model.path=32B").engine_note(), "40 heads over 16 do not divide"
    assert estimated("L4", "model.path=32B", "rollout.engine=vllm").engine_note() == "", "vLLM is there already"


def test_more_gpus_are_advised_only_where_they_are_needed_and_to_be_had() -> None:
    told = [change for change, *_ in estimated("8xH100", "model.path=7B").would_fit()]
    assert not any(re.match(r"\d+ GPUs .*tokens_per_micro_batch", change) for change in told), "fits on these"
    assert not any("GPUs" in change for change, *_ in estimated("9999x8xL4", "model.path=70B").would_fit())


def test_an_adapter_leaves_less_of_a_gpu_to_use() -> None:
    pytest.importorskip("peft")
    found = estimated("H200", "model.path=7B", "model.lora.rank=16")
    assert found.needed() == int(1.17 * found.memory().total(True))


def test_a_step_longer_than_the_minutes_is_done_once() -> None:
    assert estimated("H200", "training.minutes=0.01").steps(100.0) == 1


def test_a_reward_model_is_in_the_memory_where_it_is_at_hand(tmp_path: Path) -> None:
    published_shape("0.5B")[1].save_pretrained(tmp_path)
    judge = f"reward={{kind: model, path: {tmp_path}, correct_above: 0}}"
    alone, judged = estimated("H200"), estimated("H200", judge)
    weights = judged.memory().reward_model
    assert weights == pytest.approx(4 * 494_032_768, rel=1e-4) and judged.needed() >= alone.needed() + weights
    gone = estimated("H200", judge.replace(str(tmp_path), "no/such"))
    assert any("of the reward model no/such, which is not here" in text for text in gone.assumptions())


def test_budgets_of_samples_and_tokens_end_a_run() -> None:
    """A step has 128 prompts of 16 samples of 300 tokens: 2,048 samples, 614,400 tokens."""
    ends = {"samples=22000": 10, "tokens=6500000": 10, "samples=22000 tokens=3300000": 5, "samples=1": 1}
    for budgets, steps in (ends | {"samples=22000 steps=3": 3, "samples=22000 steps=0": 0}).items():
        settings = ("training.steps=1000000", *(f"training.{budget}" for budget in budgets.split()))
        assert estimated("H200", *settings, assumed=Assumed(300, 100, 1.0)).steps(10.0) == steps, budgets


# --- seconds ----------------------------------------------------------------------------------------------------------

COST = Decoding(step=1e-3, row=1e-6, token=1e-9, prompt_token=1e-6)
WORK = Sampling(groups=32, samples=8, keep=1.0, prompt=100, length=200, limit=400, rows=256)


def test_sampling() -> None:
    seconds, tokens, drawn = sample(WORK, COST)
    assert drawn == 32 and tokens == pytest.approx(32 * 8 * 200, rel=0.05)
    assert seconds > 0.001 * 250, "the longest of 256 has more than 250 tokens"
    assert sample(replace(WORK, rows=64), COST)[0] > 2 * seconds
    assert sample(WORK, COST, ahead=True)[0] < seconds, "no tail"
    slow, _, more = sample(replace(WORK, keep=0.5), COST)
    assert slow > 1.5 * seconds and 50 < more < 90
    full = sample(replace(WORK, length=400.0), COST)
    assert full[1] == 32 * 8 * 400, "responses of full length are all of full length"


def test_a_step_by_its_parts() -> None:
    base = estimated("H200").seconds()
    assert base["step"] == pytest.approx(sum(value for phase, value in base.items() if phase != "step"))
    assert estimated("H200", "algorithm.proximal=recompute").seconds()["annotate"] == pytest.approx(
        base["update"] / 3, rel=0.1
    )
    again = estimated("H200", "training.activation_checkpointing=true").seconds()["update"]
    assert again == pytest.approx(4 / 3 * base["update"], rel=0.1)
    assert estimated("H200", "training.offload_optimizer=true").seconds()["update"] > base["update"]
    twice = estimated("H200", "training.epochs_per_rollout=2").seconds()["update"]
    assert twice == pytest.approx(2 * base["update"])
    waits = estimated("H200", assumed=Assumed(300, 100, 0.6, reward_s=5)).seconds()
    assert waits["step"] == pytest.approx(base["step"] + 5)
    eight = estimated("8xH200").seconds()
    assert eight["update"] == pytest.approx(base["update"] / 8, rel=0.05) and eight["rollout"] < base["rollout"]
    hosts = estimated("64x1xH100", "model.path=32B", "training.tokens_per_micro_batch=1280")
    assert hosts.seconds()["update"] == pytest.approx(hosts.network()), "a slow network, not the products"


def test_a_critic_has_passes_updates_and_a_checkpoint_of_its_own() -> None:
    base, ppo = estimated("H200"), estimated("H200", "algorithm.kind=ppo")
    one_pass = base.seconds()["update"] / 3
    assert ppo.seconds()["annotate"] - base.seconds()["annotate"] == pytest.approx(one_pass, rel=0.1)
    assert ppo.seconds()["update"] == pytest.approx(2 * base.seconds()["update"])
    assert ppo.disk(10, 1.0)["checkpoint"] == 2 * base.disk(10, 1.0)["checkpoint"]
    assert any("critic" in text for text in ppo.assumptions())
    shared = estimated("H200", "algorithm.kind=ppo", "algorithm.critic.share_backbone=true")
    assert shared.seconds()["update"] == pytest.approx(4 / 3 * base.seconds()["update"], rel=0.1)
    assert shared.memory().critic == 0 < ppo.memory().critic


# --- the command ------------------------------------------------------------------------------------------------------


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "gsm8k-1gpu", *arguments])


@pytest.mark.parametrize(("option", "most"), [("--response", 768), ("--prompt", 512)])
def test_lengths_beyond_the_recipes_limits_are_refused(option: str, most: int) -> None:
    found = plan(option, "5000")
    assert found.exit_code == 2 and f"{option}: is 5000, but the recipe allows {most} tokens at most" in found.output


def test_the_command_tells_all_and_agrees_with_its_json() -> None:
    options = (
        "--cluster",
        "2x4xH100",
        "--price",
        "3",
        "--response",
        "250",
        "training.minutes=null",
        "training.steps=40",
    )
    found = json.loads(plan(*options, "--json").stdout)
    assert found["fits"] and found["cluster"] == {"hosts": 2, "gpus_of_each": 4, "card": "H100"}
    hours = 40 * found["step_seconds"]["step"] * 8 / 3600
    assert found["gpu_hours"] == pytest.approx(hours, rel=0.01) and found["usd"] == pytest.approx(3 * hours, rel=0.01)
    text = plan(*options)
    assert text.exit_code == 0 and f"not yet      {found['not_yet']}" in text.stdout and "one GPU" in found["not_yet"]
    assert json.loads(plan("--json").stdout)["not_yet"] == ""
    for said in ("Qwen2.5-0.5B, 0.49 B", "2 hosts x 4 x H", "fits", "activations", "a checkpoint", "40 steps", "USD"):
        assert said in text.stdout, said
    for assumption in (
        "responses of 250",
        "60% of the groups",
        "scaled to the H100",
        "FSDP2",
        "evaluations are not in it",
    ):
        assert assumption in text.stdout, assumption


def test_what_does_not_fit_is_exit_code_1_with_what_would() -> None:
    found = plan("--cluster", "L4")
    assert (
        found.exit_code == 1
        and "DOES NOT FIT" in found.stdout
        and "training.tokens_per_micro_batch=1280" in found.stdout
    )


def test_evaluations_of_known_rows_count(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n' * 512)
    common = ("--json", "training.minutes=null", "training.steps=12", "evaluation.every=6", f"evaluation.data={rows}")
    some, more = (json.loads(plan(*common, f"evaluation.samples_per_prompt={k}").stdout) for k in (1, 4))
    assert 0 < some["evaluation_seconds"] < more["evaluation_seconds"] and some["gpu_hours"] < more["gpu_hours"]
    assert json.loads(plan("--json", "training.steps=0", f"evaluation.data={rows}").stdout)["gpu_hours"] > 0


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("--cluster", "8xX1"), "--cluster", 2),
        (("rollout.device=cuda:1", "--cluster", "H200"), "give 2xH200", 2),
        (
            ("rollout.device=cuda:1", "--cluster", "8xH100-PCIe"),
            "asks for 2 GPUs (1 for learner, 1 for engine); give 2xH100-PCIe",
            2,
        ),
        (("model.path=no/such",), "published", 1),
    ],
)
def test_errors_of_the_command(arguments: tuple[str, ...], said: str, code: int) -> None:
    found = plan(*arguments)
    assert found.exit_code == code and said in found.stderr and "fault of dapo" not in found.stderr


def test_a_plan_says_that_it_is_not_of_exact_mode() -> None:
    said = "times and activations are those without runtime.exact, which takes more of both"
    assert said in list(estimated("H200", "runtime.exact=true").assumptions())
    assert said not in list(estimated("H200").assumptions())
