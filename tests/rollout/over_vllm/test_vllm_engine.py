"""Whole runs with vLLM, and what becomes of its processes. What any engine has to do is in ``rollout/contract``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dapo.config import build_config, nested
from dapo.errors import ConfigError, ModelError, UserError
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples, samples_path
from dapo.orchestrator.inputs import RunOverrides, described_model
from dapo.rollout.engine import EngineError, Request, Sampling, hand_over
from run_cases import PROMPTS, SETTINGS, TOKENIZER, Recorder, run, steps_of, tiny_model

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # that vLLM's kernels for CPUs have
CHANGES: dict[str, Any] = {
    "rollout.engine": "vllm",
    "runtime.deterministic": False,
    "model.compute_dtype": "float32",
    "training.steps": 2,
}


def engine_of(**changes: Any) -> Any:
    from dapo.rollout.vllm.engine import VLLMEngine

    config = build_config(nested(SETTINGS | CHANGES | changes))
    return VLLMEngine(config, tiny_model(**SHAPE), [1], max_sequence_tokens=256, max_concurrent_samples=16)


def stat_of(process: str) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def below(parent: int) -> list[int]:
    """Processes that ``parent`` has started, and those that these have, and so on; not Python's resource tracker, which
    stays to remove what others leave in shared memory."""
    found = {int(p.name): stat_of(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()}
    own = [number for number, stat in found.items() if stat.get("PPid") == str(parent) and stat["State"][0] != "Z"]
    own = [number for number in own if b"resource_tracker" not in Path(f"/proc/{number}/cmdline").read_bytes()]
    return own + [one for number in own for one in below(number)]


def gone(processes: list[int], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(stat_of(str(p)).get("State", "Z")[0] != "Z" for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runtime.deterministic": True}, "runtime.deterministic: vLLM's results depend on"),
        ({"rollout.temperature": 2.5}, "rollout.temperature: is 2.5, but vLLM samples at 0"),
        ({"evaluation.min_p": 0.1, "evaluation.top_p": 0.9}, "evaluation.min_p: vLLM applies it before top_p"),
        ({"runtime.sync": "copy"}, "rollout.engine=vllm by ipc or nccl or files; use auto"),
        ({"rollout.engine": "native", "runtime.sync": "files"}, "rollout.engine=native by copy; use auto"),
        ({"rollout.engine": "native", "rollout.tensor_parallel": 2}, "rollout.tensor_parallel: is for"),
        ({"rollout.engine": "native", "rollout.engine_args": {"block_size": 16}}, "rollout.engine_args: is for"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config(nested(SETTINGS | CHANGES | changes))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.engine_args": {"max_num_seqs": 3}}, "max_num_seqs: follows from rollout.max_concurrent_samples"),
        ({"rollout.engine_args": {"data_parallel_size": 2}}, "data_parallel_size: is not supported by dapo"),
        ({"rollout.engine_args": {"load_format": "auto"}}, "load_format: is set by the run; leave it out"),
        ({"rollout.engine_args": {"blocksize": 3}}, "blocksize: vllm has no such argument"),
        ({"runtime.sync": "nccl"}, "runtime.sync: nccl is for GPUs, but the engine is on a CPU; use auto or files"),
        ({"rollout.tensor_parallel": 3}, "3 cannot share its 2 attention heads; rollout.tensor_parallel can be 1, 2"),
    ],
)
def test_what_vllm_cannot_be_given_is_refused_before_it_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=words):
        engine_of(**changes)
    with pytest.raises((ConfigError, ModelError), match=words):  # and before a model is loaded
        described_model(build_config(nested(SETTINGS | CHANGES | changes)), RunOverrides(tiny_model(**SHAPE)))
    assert not below(os.getpid())


@pytest.mark.vllm
def test_a_model_that_vllm_does_not_know_is_refused() -> None:
    from types import SimpleNamespace

    from dapo.rollout.vllm.options import why_not

    assert why_not(SimpleNamespace(architectures=["OurOwnForCausalLM"])) == (
        "it does not know the architecture OurOwnForCausalLM"
    )


@pytest.mark.vllm
def test_a_run_trains_on_what_vllm_sampled(tmp_path: Path) -> None:
    """One update a step, so all tokens of a step are of the version that is trained."""
    run(tmp_path / "run", CHANGES, listener := Recorder(), model=tiny_model(**SHAPE))
    packages = json.loads(RunFolder(tmp_path / "run").environment.read_text())["packages"]
    assert f"sampling: vLLM {packages['vllm']}, weights by files" in listener.phases
    steps = steps_of(tmp_path / "run")
    assert [step["version"] for step in steps] == [1, 2]
    assert all(step["mismatch/max"] < 1e-4 for step in steps), "the weights of a step did not reach vLLM"
    assert not below(os.getpid())


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        {"model.compute_dtype": "bfloat16"},
        {"rollout.max_staleness": 1, "rollout.in_flight": "keep", "training.steps": 4},
        {"rollout.max_staleness": 1, "rollout.in_flight": "drain", "training.steps": 4},
        {"model.lora.rank": 4, "training.learning_rate": 1e-2},
        {"model.lora.rank": 4, "rollout.max_staleness": 1, "training.steps": 4},
    ],
    ids=["bfloat16", "keep", "drain", "lora", "lora-keep"],
)
def test_runs_of_all_kinds(tmp_path: Path, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"model": tiny_model(**SHAPE)}
    if "model.lora.rank" in changes:
        given["model"].save_pretrained(tmp_path / "model")
        given, changes = {"model": None}, changes | {"model.path": str(tmp_path / "model")}
    run(tmp_path / "run", CHANGES | changes, **given)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == (CHANGES | changes)["training.steps"]
    known = [step["mismatch/max"] for step in steps if step["mismatch/max"] is not None]
    assert known and max(known) < (0.1 if changes.get("model.compute_dtype") else 1e-4)
    oldest = changes.get("rollout.max_staleness", 0)
    for step in range(1, len(steps) + 1):
        kept = read_samples(samples_path(RunFolder(tmp_path / "run").samples, step))
        first, last = zip(*(sample["versions"] for sample in kept if sample["status"] == "kept"), strict=True)
        assert step - 1 - oldest <= min(first) and max(last) <= step - 1
    assert not below(os.getpid())


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    folder, changes = (
        tmp_path / "run",
        CHANGES | {"rollout.max_staleness": 1, "training.steps": 30, "run.save_every": 1},
    )
    model = tmp_path / "model"
    tiny_model(**SHAPE).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    (tmp_path / "reward.py").write_text(
        "def score(prompt, response, **_):\n    return sum(map(ord, response)) % 4 / 4\n"
    )
    changes |= {"model.path": str(model), "data.train": [str(tmp_path / "prompts.jsonl")], "run.dir": str(folder)}
    changes |= {"reward.kind": "function", "reward.function": f"{tmp_path / 'reward.py'}:score"}
    changes |= {"algorithm.filter_groups.metric": "score"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(nested(SETTINGS | changes)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "dapo", "train"]
    with subprocess.Popen([*command, str(recipe)], stdout=subprocess.DEVNULL, env=environment) as first:
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        started = below(first.pid)
        assert len(started) >= 2
        first.kill()
    assert gone(started)
    resumed = subprocess.run([*command, "--resume", str(folder), "training.steps=6"], env=environment, timeout=200)
    assert resumed.returncode == 0
    assert [step["step"] for step in steps_of(folder)][-1] >= 6


@pytest.mark.vllm
@pytest.mark.nightly
def test_an_engine_that_dies_says_what_died_and_leaves_nothing() -> None:
    engine = engine_of()
    model = tiny_model(**SHAPE)

    async def work() -> None:
        await hand_over(engine, 0, ((name, p.detach()) for name, p in model.named_parameters()))
        stream = engine.generate([Request(0, (3, 4), tuple(range(8)), Sampling(1.0, 250))])
        pending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.3)
        worker = next(p for p in below(os.getpid()) if "Worker" in stat_of(str(p))["Name"])
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"vLLM ended: .*Worker-0 died unexpectedly \(all that it said: "):
            while True:
                await pending
                pending = asyncio.ensure_future(anext(stream))
        with pytest.raises(EngineError, match="vLLM ended"):
            await engine.begin(1)
        await engine.close()

    asyncio.run(work())
    assert not below(os.getpid())


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(UserError, match=r"vLLM does not start: .*block size"):
        engine_of(**{"rollout.engine_args": {"block_size": 7}})
    assert not below(os.getpid())


@pytest.mark.vllm
def test_a_value_that_vllm_refuses_is_named_without_an_empty_log() -> None:
    with pytest.raises(UserError, match=r"vLLM does not start: [a-z_]*: Input should be ") as raised:
        engine_of(**{"rollout.engine_args": {"kv_cache_dtype": "round"}})
    cited = re.search(r"\(all that it said: (.*)\)$", str(raised.value))
    assert cited is None or Path(cited[1]).read_text()
