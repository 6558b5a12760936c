"""Where the engine's weights are: rollout.device, and a second engine for evaluations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo.config import Config
from dapo.data.template import PromptTemplate
from dapo.errors import ConfigError
from dapo.evaluation.evaluate import evaluate, evaluation_sampling
from dapo.model.loading import copy_model, load_model
from dapo.model.placement import device_of, engine_device, take_turns
from dapo.orchestrator.inputs import RunOverrides, evaluation_engine, make_engine
from dapo.records import Prompt, Reward, Sample
from dapo.rollout.engine import Request, hand_over
from helpers import random_model
from run_cases import ON_GPU, PROMPTS, TOKENIZER, config_for, run, steps_of, weights_hash, wide_model


def config(tmp_path: Path, **changes: Any) -> Config:
    return config_for(tmp_path / "run", {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "mps", ""])
def test_what_is_no_device_is_refused_by_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.device: '{name}' is no device; use cpu, cuda, cuda:N"):
        engine_device(config(tmp_path, rollout__device=name))


@pytest.mark.parametrize(
    ("count", "found"),
    [(0, "there is no GPU here"), (1, "there is only cuda:0"), (2, "2 were found, cuda:0 to cuda:1")],
)
def test_a_gpu_that_is_not_here_is_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=rf"rollout.device: cuda:2, but {found}"):
        run(tmp_path / "run", {"rollout.device": "cuda:2"})
    assert not (tmp_path / "run").exists()


def test_engine_and_learner_have_equal_devices_where_they_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    expected: dict[tuple[str, str | None], str | None] = {
        ("cuda", None): None,
        ("cuda", "cuda"): None,
        ("cuda", "cuda:0"): None,
        ("cuda", "cuda:1"): "cuda:1",
        ("cuda", "cpu"): "cpu",
        ("cpu", None): None,
        ("cpu", "cpu"): None,
        ("cpu", "cuda"): "cuda:0",
    }
    for (learner, name), apart in expected.items():
        given = config(tmp_path, runtime__device=learner, rollout__device=name)
        assert (engine_device(given) == device_of(given)) == (apart is None)
        assert apart is None or engine_device(given) == torch.device(apart)


@pytest.mark.parametrize(
    ("learner", "engine", "on_policy", "ahead"),
    [("cuda", None, True, True), ("cuda", "cuda:1", False, False), ("cuda", "cpu", False, False),
     ("cpu", None, True, False), ("cpu", "cuda", False, False)],
)  # fmt: skip
def test_those_that_share_memory_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: str, engine: str | None, on_policy: bool, ahead: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = {"runtime__device": learner, "rollout__device": engine, "runtime__deterministic": False}
    found = [take_turns(config(tmp_path, **given, rollout__max_staleness=bound)) for bound in (0, 1)]
    assert found == [on_policy, ahead]


def test_an_engine_that_stays_awake_during_updates_samples_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a device of its own does, on-policy."""
    for turns in (True, False):
        monkeypatch.setattr("dapo.orchestrator.experiment.take_turns", lambda config, turns=turns: turns)
        run(tmp_path / str(turns), {"training.steps": 3, "evaluation.every": 1}, heldout=PROMPTS[:2])
    assert weights_hash(tmp_path / "True" / "model-after") == weights_hash(tmp_path / "False" / "model-after")


def test_a_copy_on_another_device_shares_nothing_and_ties_what_is_tied() -> None:
    model = load_model(random_model("qwen2", num_hidden_layers=1))
    frozen = model.get_parameter("model.norm.weight").requires_grad_(False)
    here, there = copy_model(model, torch.bfloat16), copy_model(model, torch.bfloat16, torch.device("meta"))
    same = copy_model(model, torch.float32, torch.device("cpu"))
    assert {p.device.type for p in there.parameters()} == {p.device.type for p in there.buffers()} == {"meta"}
    assert {(p.dtype, p.requires_grad) for p in there.parameters()} == {(torch.bfloat16, False)}
    for copied in (here, there, same):
        assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    assert same.get_parameter("model.norm.weight") is frozen
    theirs = {p.data_ptr() for p in model.parameters() if p.requires_grad}
    assert not theirs & {p.data_ptr() for p in same.parameters()}


def test_an_engine_on_the_learners_device_by_name_is_the_engine_without_one(tmp_path: Path) -> None:
    for name in (None, "cpu"):
        run(tmp_path / str(name), {"rollout.device": name, "training.steps": 2})
    assert weights_hash(tmp_path / "None" / "model-after") == weights_hash(tmp_path / "cpu" / "model-after")


def engines(tmp_path: Path, **changes: Any) -> tuple[Config, Any, list[Prompt], Any, Any]:
    given = config(tmp_path, evaluation__samples_per_prompt=2, evaluation__max_response_length=5, **changes)
    model = load_model(wide_model())
    template = PromptTemplate(given.data, TOKENIZER)
    heldout = [Prompt(row, text, tuple(TOKENIZER(text)["input_ids"])) for row, text in enumerate(("1+2=", "3*4="))]
    second = evaluation_engine(given, model, (1,), template, heldout)
    return given, model, heldout, make_engine(given, RunOverrides(), model, (1,), template, heldout, 0), second


def test_the_second_engine_is_not_exact(tmp_path: Path) -> None:
    *_, first, second = engines(tmp_path, runtime__exact=True)
    assert first._exact and not second._exact


def test_the_second_engine_evaluates_as_the_first_with_weights_of_its_own(tmp_path: Path) -> None:
    """Requests of the two are in flight side by side, under weights of another version each."""
    given, model, heldout, first, second = engines(tmp_path)
    seen: list[Request] = []

    class Scorer:
        async def score(self, prompt: Prompt, text: str, finish_reason: str) -> Reward:
            return Reward(True, 1.0)

    async def evaluated(engine: Any) -> list[list[int]]:
        stream = type(engine).generate
        engine.generate = lambda requests: (seen.extend(requests), stream(engine, requests))[1]
        found = await evaluate(heldout, engine, Scorer(), lambda ids: "", given)  # type: ignore[arg-type]
        assert [group.prompt.row for group in found.groups] == [0, 1]
        return [s.token_ids.tolist() for group in found.groups for s in group.samples]

    async def both() -> None:
        assert await evaluated(second) == (before := await evaluated(first))
        assert all(request.id < 0 for request in seen) and {request.id for request in seen} == {-1, -2}
        draws = Request(0, (5, 6), tuple(range(40)), seen[0].sampling)
        drawn = first.stream([draws])
        await anext(drawn)
        changed = {name: p + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
        await hand_over(first, 1, changed.items())
        assert await evaluated(second) == before != await evaluated(first)
        await hand_over(second, 1, changed.items())
        assert await evaluated(second) == await evaluated(first)
        samples = [s async for s in drawn if isinstance(s, Sample)]
        assert len(samples) == 40 and all(s.request_id == 0 for s in samples)
        await first.close()
        await second.close()

    asyncio.run(both())
    assert second._decoder._runner.rows == 4 and second._decoder._runner.max_tokens == 4 + 5


@pytest.mark.gpu
@pytest.mark.parametrize("learner", ["cpu", "cuda"])
def test_learner_and_engine_on_devices_of_their_own(tmp_path: Path, learner: str) -> None:
    """Weights are copied from one to the other and sampled from: the log-probabilities of both agree in each step."""
    engine = "cuda" if learner == "cpu" else "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    changes = {"runtime.device": learner, "rollout.device": engine, "training.steps": 3}
    run(tmp_path / "run", ON_GPU | changes | {"runtime.deterministic": False}, model=wide_model())
    found = [entry["mismatch/mean"] for entry in steps_of(tmp_path / "run")]
    print(f"{learner}, {engine}: mean differences {found}")
    assert len(found) == 3 and max(found) < 0.1


@pytest.mark.gpu
def test_two_engines_share_a_gpu(tmp_path: Path) -> None:
    """The second leaves memory to the first, and both may capture steps at the same time."""
    given, _, _, first, second = engines(tmp_path, runtime__device="cuda", runtime__deterministic=False)
    assert engine_device(given).type == "cuda"

    async def sampled(engine: Any) -> int:
        found = 0
        for count in (1, 2, 4):
            asked = [Request(n, (5, 6), (1, 2), evaluation_sampling(given)) for n in range(count)]
            found += len([s async for s in engine.generate(asked)])
        await engine.close()
        return found

    async def both() -> None:
        assert await asyncio.gather(sampled(first), sampled(second)) == [14, 14]

    asyncio.run(both())
