"""``dapo doctor`` through the real command: nothing to say of a good recipe, and each planted mistake by its name."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from doctor_cases import MISTAKES, edit_json, make_good, rows, write_recipe, write_rows
from typer.testing import CliRunner

import own_methods
from dapo.checks import memory, model, rewards, sampling, settings
from dapo.checks import rows as prompt_rows
from dapo.checks.checklist import Entry, brief, entries, run_check, run_checks
from dapo.checks.cluster import check_cluster
from dapo.checks.context import CheckContext, Finding, NotAtHand, exit_code
from dapo.commands import app
from dapo.commands.demo.task import make_tokenizer
from dapo.config import build_config, load_config
from dapo.data.source import load_prompts, read_prompts
from dapo.data.template import PromptTemplate
from dapo.errors import ConfigError
from dapo.model import placement
from dapo.model.loading import load_model, load_tokenizer
from dapo.model.packed import PackedAttention
from dapo.records import Group, Prompt, Reward, Sample
from dapo.reward.build import make_scorer
from dapo.reward.check import running
from dapo.reward.contract import Doubt
from dapo.rollout.engine import in_flight_policy
from dapo.rollout.native.engine import NativeEngine
from dapo.training.lora import trainable_shape
from dapo.util import memory as system_memory
from helpers import put_operations_back, random_model

OWN = f"{own_methods.__file__}:PlainEngine"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_good(folder)
    return folder


@pytest.fixture
def case(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the good folder, to plant something in, which is the working folder."""
    shutil.copytree(good, tmp_path / "case")
    monkeypatch.chdir(tmp_path / "case")
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rewards, "REACHED_WITHIN_S", 0.1)
    return tmp_path / "case"


def doctor(*options: str, code: int | None = None) -> list[dict[str, Any]]:
    """The findings, by the command with --json."""
    done = CliRunner().invoke(app, ["doctor", "recipe.yaml", "model.path=./model", "--json", *options])
    assert done.stdout.startswith("{"), done.output
    told = json.loads(done.stdout)
    assert done.exit_code == told["exit_code"]
    assert code is None or done.exit_code == code
    found: list[dict[str, Any]] = told["findings"]
    return found


def complaints(findings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in findings if one["status"] in ("warn", "fail")}


def test_a_good_recipe_has_every_check_pass(case: Path) -> None:
    before = sorted(str(path) for path in case.rglob("*"))
    findings = doctor(code=0)
    assert not complaints(findings), complaints(findings)
    assert {one["status"] for one in findings} == {"pass"}
    names = {one["name"] for one in findings}
    assert names >= {
        *("recipe", "settings", "files", "run-folder", "device", "tokenizer", "architecture", "vocabulary"),
        *(
            "engine",
            "stop-tokens",
            "rows",
            "overlap",
            "prompt",
            "bos",
            "context",
            "disk",
            "memory",
            "weights",
            "reward",
        ),
        *("gold-is-right", "shuffled-is-wrong", "empty-is-wrong", "agreement"),
    }
    assert sorted(str(path) for path in case.rglob("*")) == before, "it writes nothing"


def test_rows_of_an_environment_that_scores_its_episodes_need_no_answers_and_a_probe_plays_them(case: Path) -> None:
    game = (
        "class Game:\n    def reply(self, text):\n        return 'more'\n\n"
        "    def reward(self, messages):\n        return {'value': 1.0, 'correct': len(messages) == 5}\n"
    )
    (case / "game.py").write_text(game)
    write_rows(case, [{"prompt": row["prompt"]} for row in rows(0, 6)])
    write_rows(case, [{"prompt": row["prompt"]} for row in rows(6, 8)], "heldout.jsonl")
    given = ("environment.name=game.py:Game", "algorithm.overlong_buffer=false", "environment.max_turns=2")
    findings = doctor(*given)
    assert not complaints(findings), complaints(findings)
    assert "reward" not in {one["name"] for one in findings}
    (case / "bad.py").write_text("class Bad:\n    def tool(self, x):\n        return x\n")
    assert "type hints" in complaints(doctor("environment.name=bad.py:Bad", code=2))["environment"]["found"]
    probed = complaints(doctor(*given, "environment.max_turn_tokens=3", "--probe", "2"))
    assert "of 2 prompts at G=4: 2 all right" in probed["probe"]["found"]  # each episode had two turns


@pytest.mark.parametrize("what", MISTAKES)
def test_a_planted_mistake_is_told_by_name_and_nothing_else_is(case: Path, what: str) -> None:
    mistake = MISTAKES[what]
    mistake.plant(case)
    arguments = [] if what in ("a model that is not there", "a file for a model") else ["model.path=./model"]
    done = CliRunner().invoke(app, ["doctor", "recipe.yaml", *arguments, "--json", *mistake.options])
    told = json.loads(done.stdout)
    found = complaints(told["findings"])
    assert set(found) == {mistake.name} | mistake.also, found
    one = found[mistake.name]
    assert one["status"] == mistake.status
    assert mistake.says in one["found"] + one["fix"], one
    if mistake.name == "chat-template":
        assert "template=plain" not in one["found"], "the fix is told once"
    assert done.exit_code == {"warn": 0, "fail": 2 if one["area"] in ("recipe", "data") else 1}[mistake.status]


@pytest.mark.parametrize(
    ("settings", "reason", "status", "said"),
    [
        ((), None, "pass", "native covers Qwen2, Qwen2.5; vLLM is "),
        (("rollout.engine=openai", "rollout.url=http://127.0.0.1:1"), None, "pass", "the engine of the server has to"),
        ((f"rollout.engine={OWN}",), None, "pass", "yours, what it covers is not known; native covers"),
        (("rollout.engine=vllm",), None, "pass", "vLLM 9.9 covers Qwen2ForCausalLM; native covers"),
        (("rollout.engine=vllm",), "it does not know", "fail", "vllm cannot sample from ./model: it does not know"),
        (("rollout.engine=vllm",), ConfigError("not installed"), "fail", "not installed; native covers Qwen2"),
        (
            ("rollout.engine=vllm", "rollout.engine_args={bogus: 1}"),
            None,
            "fail",
            "engine_args.bogus: vllm has no such",
        ),
        (
            ("rollout.engine=vllm", "rollout.engine_args={dtype: half}"),
            None,
            "fail",
            "follows from model.compute_dtype",
        ),
        (("rollout.engine=vllm", "runtime.sync=ipc"), None, "fail", "runtime.sync: ipc is for GPUs, but the engine"),
    ],
)
def test_which_engine_covers_the_model_is_told_with_the_reason(
    case: Path, settings: tuple[str, ...], reason: Any, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(model_config: Any, tensor_parallel: int = 1) -> str | None:
        if isinstance(reason, Exception):
            raise reason
        return None if reason is None else str(reason)

    monkeypatch.setattr("dapo.rollout.vllm.options.why_not", why_not)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    package = SimpleNamespace(__version__="9.9", AsyncEngineArgs=lambda dtype: None)
    monkeypatch.setattr("dapo.rollout.vllm.options.find_vllm", lambda: package)
    (found,) = [one for one in doctor(*settings) if one["name"] == "engine"]
    assert found["status"] == status and said in found["found"]
    assert ("rollout.engine=native" in found["fix"]) == (status == "fail")


def test_at_least_25_mistakes_are_planted() -> None:
    assert len(MISTAKES) >= 25


# --- what depends on the machine ----------------------------------------------------------------------------------


def test_minutes_bound_the_samples_that_a_disk_has_to_hold() -> None:
    tree: dict[str, Any] = {"model": {"path": "m"}, "training": {"steps": 1000}}
    whole = settings._samples_bytes(build_config(tree))
    tree["training"]["minutes"] = 10
    assert settings._samples_bytes(build_config(tree)) == 600 * 10**6 * 22 < whole / 10


def test_a_disk_that_is_too_small(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10**5))
    found = complaints(doctor(code=1))
    assert set(found) == {"disk"}
    assert "checkpoints" in found["disk"]["found"]


def test_memory_that_is_too_small_is_told_before_the_weights_are_loaded(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_memory, "free_memory", lambda: 10_000)
    findings = doctor(code=1)
    assert set(complaints(findings)) == {"memory"}
    assert "weights" not in {one["name"] for one in findings}
    assert any(one["name"] == "not-checked" and "weights" in one["found"] for one in findings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_memory_of_a_gpu_that_is_elsewhere_is_predicted(case: Path) -> None:
    findings = doctor("runtime.device=cuda", code=2)
    assert set(complaints(findings)) == {"device"}
    told = {one["name"]: one for one in findings}
    assert told["memory"]["status"] == "skip"
    assert re.search(r"\d MiB predicted; there is no GPU here", told["memory"]["found"])
    lacking = {one["found"] for one in findings if one["name"] == "not-checked"}
    assert "snapshot, weights: the device is missing" in lacking and not any("the memory" in line for line in lacking)


def test_a_sandbox_that_is_not_there(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [{**row, "tests": ["assert f() == 1"], "solution": "def f():\n return 1"} for row in rows(0, 6)]
    write_rows(case, tests)
    write_recipe(case, {"reward": {"kind": "code", "workers": 1}})
    monkeypatch.setenv("PATH", str(case))
    found = complaints(doctor(code=1))
    assert set(found) == {"sandbox"}
    assert "bubblewrap" in found["sandbox"]["fix"]


def test_an_engine_that_disagrees_with_the_trainer(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*arguments: Any) -> Any:
        twin = copy(*arguments)
        with torch.no_grad():
            next(twin.parameters()).mul_(1.2)
        return twin

    copy = sampling.copy_model
    monkeypatch.setattr(sampling, "copy_model", stale)
    assert set(complaints(doctor(code=0))) == {"agreement"}


def test_an_exact_recipe_is_tried_as_one(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def agreement(code: int) -> dict[str, Any]:
        findings = doctor("runtime.exact=true", "model.compute_dtype=bfloat16", code=code)
        return {one["name"]: one for one in findings}["agreement"]

    try:
        assert "differ by 0 on average, 0 at most" in agreement(0)["found"]
        monkeypatch.setattr(sampling, "exact_attention", lambda _: PackedAttention)  # whose bits are others
        assert agreement(1)["fix"] == "runtime.exact=false"
    finally:
        put_operations_back()


@pytest.mark.parametrize(
    ("extracted", "status", "says"),
    [((None, None), "warn", "data.instruction=' Write # and"), ((None, "3"), "pass", "1 hold an answer")],
)
def test_a_probe_tells_whether_answers_can_be_read(
    case: Path, extracted: tuple[str | None, ...], status: str, says: str
) -> None:
    config = load_config("recipe.yaml", ["model.path=./model"])
    ids, zeros = np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32)
    samples = tuple(
        Sample(0, k, ids, zeros, ids, "stop", reward=Reward(False, -1.0, {"answer_found": float(text is not None)}))
        for k, text in enumerate(extracted)
    )
    found = {one.name: one for one in sampling.judged(config, [Group(0, Prompt(0, "1+1=", (1,), "2"), samples)])}
    one = found["probe-format"]
    assert one.status == status and says in one.found + one.fix
    assert "0 are right, 0 were cut" in one.found


def _open_group() -> Group:
    ids, zeros = np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32)
    rewards = (Reward(None, -1.0), Reward(None, 1.0))
    samples = tuple(Sample(0, k, ids, zeros, ids, "stop", reward=reward) for k, reward in enumerate(rewards))
    return Group(0, Prompt(0, "1+1=", (1,), "2"), samples)


def test_a_probe_without_dynamic_sampling_counts_open_verdicts_by_their_spread(case: Path) -> None:
    config = load_config("recipe.yaml", ["model.path=./model", "algorithm.filter_groups.enable=false"])
    found = {one.name: one for one in sampling.judged(config, [_open_group()])}
    assert found["probe"].status == "pass" and "1 mixed" in found["probe"].found


def test_a_probe_of_a_reward_that_leaves_right_and_wrong_open_is_no_fault_of_dapos(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scored(*_: object) -> list[Group]:
        return [_open_group()]

    monkeypatch.setattr(sampling, "_scored", scored)
    monkeypatch.setattr(sampling, "set_threads", lambda *_: None)
    source = SimpleNamespace(next=lambda: Prompt(0, "1+1=", (1,), "2"))
    config = load_config("recipe.yaml", ["model.path=./model"])
    context = CheckContext(config, probe=1, model=object(), source=cast("Any", source), reward_works=True)
    with pytest.raises(NotAtHand, match="right or wrong"):
        list(sampling.check_probe(context))


def test_a_snapshot_that_does_not_fit_beside_the_run(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = load_model("./model")
    parameters = sum(p.numel() for p in shape.parameters())
    run = memory.predict_memory(load_config("recipe.yaml", ["model.path=./model"]), shape).total(on_gpu=False)
    monkeypatch.setattr(memory, "_TIGHT", 1.0)
    monkeypatch.setattr(system_memory, "free_memory", lambda: run + 11 * parameters)
    found = complaints(doctor(code=1))
    assert set(found) == {"snapshot"}
    monkeypatch.setattr(system_memory, "free_memory", lambda: run + 12 * parameters)
    assert not complaints(doctor(code=0))


def test_a_snapshot_takes_main_memory_on_a_gpu_too(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = load_model("./model")
    parameters = sum(p.numel() for p in shape.parameters())
    context = CheckContext(load_config("recipe.yaml", ["model.path=./model"]), shape=shape, device=torch.device("cuda"))
    for bytes_, status in ((12 * parameters, "pass"), (12 * parameters - 1, "fail")):
        monkeypatch.setattr(system_memory, "free_memory", lambda bytes_=bytes_: bytes_)
        assert [one.status for one in settings.check_snapshot(context)] == [status]


def test_it_says_how_much_of_a_base_fits_into_4_bits(case: Path) -> None:
    for base, told in (("nf4", True), ("full", False)):
        keys = ["model.path=./model", "model.lora.rank=1", f"model.lora.base={base}"]
        (finding,) = model.check_architecture(CheckContext(load_config("recipe.yaml", keys)))
        assert (" linear layers, " in finding.found, finding.status) == (told, "pass")


def test_a_snapshot_of_an_adapter_is_small_and_moments_in_main_memory_count(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("recipe.yaml", ["model.path=./model", "training.offload_optimizer=true"])
    context = CheckContext(config, shape=load_model("./model"), device=torch.device("cuda"))
    every = memory.trained_of(context.shape)

    def statuses(*free: int) -> list[str]:
        found = []
        for bytes_ in free:
            monkeypatch.setattr(system_memory, "free_memory", lambda bytes_=bytes_: bytes_)
            found += [one.status for one in settings.check_snapshot(context)]
        return found

    assert statuses(20 * every, 20 * every - 1) == ["pass", "fail"]
    context.config = load_config("recipe.yaml", ["model.path=./model", "model.lora.rank=1"])
    context.shape = trainable_shape(context.config.model, context.shape.config)
    adapter = memory.trained_of(context.shape)
    assert adapter < every / 4 and statuses(12 * adapter, 12 * adapter - 1) == ["pass", "fail"]


def test_responses_that_never_end(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.loading, "stop_token_ids", lambda *owners: ())
    found = complaints(doctor(code=0))
    assert set(found) == {"stop-tokens"} and "rollout.stop_token_ids" in found["stop-tokens"]["fix"]


@pytest.mark.parametrize("name", ["somebody/some-model", "some-model-of-old"])
def test_what_would_have_to_be_downloaded_is_said_and_is_no_failure(
    case: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "hub_answers", lambda: True)
    done = CliRunner().invoke(app, ["doctor", "recipe.yaml", f"model.path={name}", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and not complaints(told["findings"])
    assert any("not downloaded" in one["found"] for one in told["findings"] if one["status"] == "skip")


@pytest.mark.parametrize("there", [False, True])
def test_a_base_that_the_hub_lacks_fails_and_one_that_it_has_is_no_failure(
    case: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(case / "model/adapter_config.json", peft_type="LORA", base_model_name_or_path="runs/base", r=4)
    shutil.copy(case / "model/model.safetensors", case / "model/adapter_model.safetensors")
    for where in ("dapo.checks.model.hub_answers", "dapo.model.hub.hub_answers"):
        monkeypatch.setattr(where, lambda: True)
    monkeypatch.setattr("huggingface_hub.repo_exists", lambda name: there)
    found = complaints(doctor(code=0 if there else 1))
    assert set(found) == (set() if there else {"model"})
    said = "base_model_name_or_path in adapter_config.json: runs/base: neither a folder nor on the hub"
    assert there or f"adapter model: {said}" in found["model"]["found"]


def test_quiet_names_what_was_not_checked(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "hub_answers", lambda: True)
    done = CliRunner().invoke(app, ["doctor", "recipe.yaml", "model.path=somebody/some-model", "--quiet"])
    line = next(line for line in done.stdout.splitlines() if line.startswith("skip  not checked: "))
    assert {"tokenizer", "model", "tokens", "weights", "memory"} <= set(
        line.removeprefix("skip  not checked: ").split(", ")
    )


@pytest.mark.parametrize("command", ["doctor", "train", "evaluate", "generate"])
def test_without_a_network_a_model_that_is_not_here_fails_without_one_try_to_download_it(
    case: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda s: pytest.fail("it tries again"))
    name = "somebody/some-model"
    arguments = {
        "doctor": ["recipe.yaml", f"model.path={name}"],
        "train": ["recipe.yaml", f"model.path={name}"],
        "evaluate": [name, "--data", "heldout.jsonl"],
        "generate": [name, "1+1="],
    }[command]
    done = CliRunner().invoke(app, [command, *arguments])
    assert done.exit_code == 1, done.output
    assert "the hub cannot be reached" in done.output and name in done.output


REFUSED = [
    *("a chat without a template", "an end that is no token", "a GPU that is not there"),
    *("an adapter whose base is no model", "an adapter whose base is gone", "a run folder that exists"),
    *("only prompts that are too long", "another name of the answer"),
]


@pytest.mark.parametrize("what", REFUSED)
def test_a_training_ends_with_the_same_exit_code(case: Path, what: str) -> None:
    MISTAKES[what].plant(case)
    codes = [
        CliRunner().invoke(app, [command, "recipe.yaml", "model.path=./model"]).exit_code
        for command in ("doctor", "train")
    ]
    assert codes[0] == codes[1] != 0


def test_rows_that_cannot_be_scored_are_a_fault_of_the_data(case: Path) -> None:
    class Refuses:
        async def examine(self, prompts: Any) -> Any:
            return [Doubt(0, "has no tests", unusable=True)]

    config = load_config("recipe.yaml", ["model.path=./model"])
    found = asyncio.run(rewards.verify(config, Refuses(), [Prompt(0, "1+1=", (), "2")]))  # type: ignore[arg-type]
    assert [(one.area, one.status) for one in found] == [("data", "fail")]


def test_the_demos_recipe_has_no_warning_where_its_files_are_still_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[2] / "recipes" / "cpu-demo.yaml"
    done = CliRunner().invoke(app, ["doctor", str(recipe)])
    assert done.exit_code == 0, done.output
    assert " 0 warn, 0 fail, " in done.output and "made by `dapo demo" in done.output


# --- in brief -----------------------------------------------------------------------------------------------------


def in_brief(*changes: str) -> list[Finding]:
    """What a training hears that has loaded all of the recipe."""
    config = load_config("recipe.yaml", ["model.path=./model", *changes])
    tokenizer = load_tokenizer("./model")
    template = PromptTemplate(config.data, tokenizer)
    source = load_prompts(config.data, config.data.train, template)

    async def examined() -> list[Finding]:
        async with running(make_scorer(config.reward)) as scorer:
            return await brief(
                config,
                model=load_model("./model"),
                tokenizer=tokenizer,
                template=template,
                source=source,
                heldout=read_prompts(config.data, config.evaluation.data, template),
                device=torch.device("cpu"),
                scorer=scorer,
            )

    return asyncio.run(examined())


def test_in_brief_a_good_recipe_passes_and_a_bad_verifier_is_told(case: Path) -> None:
    assert {one.status for one in in_brief()} == {"pass"}
    MISTAKES["a verifier that likes everything"].plant(case)
    told = [one.name for one in in_brief() if one.status != "pass"]
    assert told == ["shuffled-is-wrong"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            [*rows(0, 6), *rows(6, 7)],
            "10 of 20 rows to evaluate on (50.0%) are to be trained on, too, such as row 1: '6+0",
        ),
        (rows(6, 8), "20 of 20 rows to evaluate on (100.0%)"),
    ],
)
def test_a_training_hears_how_much_of_its_evaluation_it_trains_on(case: Path, lines: Any, says: str) -> None:
    write_rows(case, lines)
    (found,) = [one for one in in_brief() if one.status != "pass"]
    assert (found.name, found.status) == ("overlap", "warn") and says in found.found


def test_rows_of_an_environment_are_the_same_where_all_their_keys_are(case: Path) -> None:
    write_rows(case, [{"prompt": "0+1=", "answer": "1", "board": k} for k in range(8)])
    write_rows(case, [{"prompt": "0+1=", "answer": "1", "board": k} for k in (7, 8)], "heldout.jsonl")
    found = in_brief("environment.name=python", "algorithm.overlong_buffer=false")
    assert ["1 of 2 rows" in one.found for one in found if one.name == "overlap"] == [True]


def test_tools_that_the_model_is_not_shown_are_told_with_what_would_work(case: Path) -> None:
    tool = '    def {}(self, a: int) -> str:\n        """Do.\n\n        Args:\n            a: It.\n        """\n\n'
    reward = "    def reward(self, response):\n        return 1.0\n"
    (case / "game.py").write_text(f"class Game:\n{tool.format('look')}{tool.format('move')}{reward}")
    given = ("environment.name=game.py:Game", "algorithm.overlong_buffer=false")
    found = complaints(doctor(*given))
    assert set(found) == {"tools"} and found["tools"]["status"] == "warn"
    assert "game.py:Game: look, move;" in found["tools"]["found"] and "data.template=chat" in found["tools"]["fix"]
    assert [one.found for one in in_brief(*given) if one.name == "tools"] == [found["tools"]["found"]]


def test_a_reward_from_python_is_not_taken_for_the_recipes(case: Path) -> None:
    """The recipe's is then at its default, ``math``, and no prompt need ask for a box."""
    config = build_config(
        load_config("recipe.yaml", ["model.path=./model"]).model_dump() | {"reward": {"kind": "math"}}
    )
    tokenizer = load_tokenizer("./model")
    source = load_prompts(config.data, config.data.train, PromptTemplate(config.data, tokenizer))
    names = {}
    for own in (False, True):
        context = CheckContext(config, files=True, tokenizer=tokenizer, source=source, own_reward=own, at_start=True)
        names[own] = {one.name for one in prompt_rows.check_sample(context)}
    assert names[False] - names[True] == {"answer-format"}


# --- how it is told -----------------------------------------------------------------------------------------------


def test_plain_lines_where_there_is_no_terminal(case: Path) -> None:
    write_recipe(case, {"training.learning_rate": 0.1})
    done = CliRunner().invoke(app, ["doctor", "recipe.yaml", "model.path=./model", "--quiet"])
    first, last = done.stdout.splitlines()
    assert (
        first.startswith("warn  settings: training.learning_rate=0.1 ") and "; to do: training.learning_rate" in first
    )
    assert last.endswith("1 warn, 0 fail") and done.exit_code == 0


def _context() -> CheckContext:
    return CheckContext(build_config({"model": {"path": "m"}}))


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"rollout": {"engine": OWN, "in_flight": "restart"}}, "restart needs an engine"),
        (
            {"algorithm": {"objective": f"{own_methods.__file__}:Gspo"}},
            "multiply each token's loss by inputs.importance",
        ),
    ],
)
def test_an_own_part_that_older_samples_do_not_go_with_is_refused_before_the_weights_load(
    keys: dict[str, Any], refused: str
) -> None:
    def found(staleness: int) -> str:
        rollout = {"max_staleness": staleness} | keys.get("rollout", {})
        config = build_config({"model": {"path": "m"}} | keys | {"rollout": rollout})
        return " ".join(one.found for one in settings.check_settings(CheckContext(config)) if one.status == "fail")

    assert found(0) == "" and refused in found(1)


def test_samples_in_flight_go_by_what_the_engine_can_do() -> None:
    def policy(asked: str, engine: Any, exact: bool = False) -> str:
        keys = {"rollout": {"in_flight": asked, "max_staleness": 1}, "runtime": {"exact": exact}}
        return in_flight_policy(build_config({"model": {"path": "m"}} | keys), engine)

    plain, whole = own_methods.PlainEngine, NativeEngine
    made = plain(None, None, [0], None)  # type: ignore[arg-type]
    assert [policy("auto", one) for one in (None, whole, plain, made)] == ["keep", "keep", "drain", "drain"]
    assert policy("auto", whole, exact=True) == "drain"  # keys of older weights would stay
    assert policy("restart", whole) == policy("restart", lambda config: made) == "restart"
    for engine in (plain, made):
        with pytest.raises(ConfigError, match="use drain or keep"):
            policy("restart", engine)


@pytest.mark.parametrize(
    ("recipe", "devices", "wanted"),
    [
        ({"max_staleness": 0, "engine": OWN}, ("cuda", "cuda:1"), {}),
        (
            {"max_staleness": 2},
            ("cuda", "cuda:1"),
            {"ahead": ("pass", "beside updates on cuda; the engine is on cuda:1")},
        ),
        (
            {"max_staleness": 2},
            ("cpu", "cpu"),
            {"ahead": ("warn", "up to 2 steps ahead (rollout.in_flight=keep), on the CPU")},
        ),
        (
            {"max_staleness": 2, "ahead": 0},
            ("cpu", "cpu"),
            {"ahead": ("pass", "late samples go on beside the updates")},
        ),
        ({"max_staleness": 2}, ("cuda", "cuda"), {"ahead": ("warn", "take turns on cuda: only")}),
        (
            {"max_staleness": 2, "engine": OWN},
            ("cuda", "cuda"),
            {"ahead": ("pass", "in_flight=drain), beside updates")},
        ),
        ({"max_staleness": 2, "engine": OWN}, ("cpu", "cpu"), {"ahead": ("pass", "your engine samples is not known")}),
    ],
)
def test_what_is_sampled_ahead_is_told_by_device(
    monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any], devices: tuple[str, str], wanted: dict[str, Any]
) -> None:
    learner, engine = map(torch.device, devices)
    for module in (settings, placement):
        monkeypatch.setattr(module, "device_of", lambda config: learner)
        monkeypatch.setattr(module, "engine_device", lambda config: engine)
    corrected = {"correction": {"kind": "truncate"}}
    for algorithm in (corrected, {"proximal": "engine"}, {}):
        config = build_config({"model": {"path": "m"}, "rollout": recipe, "algorithm": algorithm})
        found = {one.name: one for one in settings.check_ahead(CheckContext(config, device=learner))}
        assert found.keys() - {"correction"} == wanted.keys()
        assert ("correction" in found) == (bool(wanted) and config.proximal != "engine" and algorithm != corrected)
        assert all(
            found[name].status == status and text in found[name].found for name, (status, text) in wanted.items()
        )


def test_a_check_that_hangs_or_breaks_hides_no_other() -> None:
    def hangs(context: CheckContext) -> Any:
        import time

        yield Finding("model", "begun", "pass", "")
        time.sleep(3)

    def breaks(context: CheckContext) -> Any:
        raise ZeroDivisionError("oh")
        yield

    def works(context: CheckContext) -> Any:
        yield Finding("data", "works", "pass", "")

    def waits(context: CheckContext) -> Any:
        context.need(None, "moon")
        yield

    checks = [Entry("hangs", "model", hangs, 0.1), Entry("breaks", "data", breaks), Entry("waits", "data", waits)]
    found = list(run_checks(_context(), [*checks, Entry("works", "data", works)]))
    assert [(one.name, one.status) for one in found] == [
        *(("begun", "pass"), ("hangs", "fail"), ("breaks", "fail"), ("works", "pass"), ("not-checked", "skip"))
    ]
    assert "moon" in found[-1].found and "waits" in found[-1].found


def test_every_check_has_a_deadline_and_a_name_of_its_own() -> None:
    listed = entries()
    assert len({entry.name for entry in listed}) == len(listed)
    assert all(0 < entry.seconds <= 660 for entry in listed)


def test_the_exit_code_is_that_of_the_command_that_would_have_failed() -> None:
    model_fails, data_fails = Finding("model", "m", "fail", ""), Finding("data", "d", "fail", "")
    assert exit_code([Finding("data", "d", "warn", ""), Finding("reward", "r", "skip", "")]) == 0
    assert exit_code([model_fails]) == 1
    assert exit_code([model_fails, data_fails]) == 2


def test_a_check_keeps_what_it_found_before_it_broke() -> None:
    def half(context: CheckContext) -> Any:
        yield Finding("model", "half", "pass", "")
        raise RuntimeError("gone")

    found, missing = run_check(_context(), Entry("half", "model", half))
    assert [one.status for one in found] == ["pass", "fail"] and missing is None
    assert "RuntimeError: gone" in found[1].found


def test_rows_of_the_model_without_a_token_are_counted(case: Path) -> None:
    size = len(make_tokenizer())
    random_model("qwen2", vocab_size=size + 30).save_pretrained(case / "model")
    (found,) = (one for one in doctor(code=0) if one["name"] == "vocabulary")
    assert found["status"] == "pass" and "; 30 rows have no token" in found["found"]


def test_what_no_model_wrote_is_scored_as_a_whole_response_to_a_prompt_that_opens_nothing() -> None:
    """A reward that wants finish_reason "stop" is no broken one; a bare answer is no thinking."""
    seen = []

    class Asked:
        async def score(self, prompt: Prompt, response: str, finish_reason: str | None = None) -> Reward:
            seen.append((prompt.end, response, finish_reason))
            return Reward(True, 1.0)

    prompt = Prompt(0, "1+1=", (1,), "2", {}, "<think>")
    asyncio.run(rewards.scores(cast(Any, Asked()), [(prompt, "2")]))
    assert seen == [("", "2", "stop")]


@pytest.mark.parametrize(
    ("runtime", "status", "found"),
    [
        ({}, "pass", "this machine: 1 node with .* CPUs and .* GPUs, for 1 learner worker"),
        ({"learner": {"workers": 4000}}, "warn", "4000 CPUs are asked for, and this machine has"),
        ({"learner": {"memory_gib": 1e6}}, "fail", r"this machine: 1e\+06 GiB are asked for \(1e\+06 for learner\)"),
        ({"address": "127.0.0.1:1"}, "fail", "the Ray cluster at 127.0.0.1:1 does not answer"),
    ],
)
def test_what_a_recipe_asks_of_a_cluster_is_held_against_it(runtime, status, found):
    context = CheckContext(build_config({"model": {"path": "m"}, "runtime": {"kind": "ray", **runtime}}))
    finding = next(iter(check_cluster(context)))
    assert finding.status == status and re.match(found, finding.found)
