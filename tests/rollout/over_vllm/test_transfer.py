"""Weights that certainly arrive: whatever goes astray on the way to vLLM, or inside of it, is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.errors import ConfigError, UserError
from dapo.model.adapters import adapter_parameters, new_adapter
from dapo.rollout.engine import EngineError, check_arrived
from dapo.rollout.group import Group, meeting_point, packed, unpacked
from dapo.rollout.vllm import transfer
from dapo.rollout.vllm.options import own_folder
from dapo.rollout.vllm.transfer import WeightTransfer, chosen
from dapo.rollout.vllm.worker import _shard
from helpers import random_model
from vllm_subject import SHAPE, Tensors, Vllm, started

K, GATE, EMBEDDING = (
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.embed_tokens.weight",
)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    """A tied head, biases, and query and key of unlike sizes."""
    yield from started(random_model("qwen2", **SHAPE, tie_word_embeddings=True))


SENT: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "one of a fused matrix is not sent": (
        lambda sent: [one for one in sent if one[0] != K],
        f"1 parameters were not given, such as {K}",
    ),
    "twice, with other values": (lambda sent: [*sent, (K, dict(sent)[K] * 2)], f"{K} came twice, with other values"),
    "another shape": (lambda sent: [(n, t[:-1] if n == K else t) for n, t in sent], rf"{K} \(31, 64\): .* has shape"),
    "not of the model": (lambda sent: [*sent, ("model.other", torch.ones(2))], "model.other .* no such parameter"),
    "a tied head": (lambda sent: [*sent, ("lm_head.weight", dict(sent)[EMBEDDING])], "lm_head.weight .* no such param"),
}
INSIDE = {
    ("lost", K): f"1 of .* parameters, such as {K}, did not arrive",
    ("altered", K): f"1 of .* parameters, such as {K}, are not what was sent",
    ("nowhere", ""): "modules of vLLM's model got none of what arrived, such as model.embed_tokens",
    ("half", K): f"1 of .* parameters, such as {K}, arrived but did not reach",
    ("swapped", GATE): f"2 of .* parameters, such as {GATE}, arrived but did not reach",
    ("untied", ""): f"1 of .*, such as the output head tied to {EMBEDDING}, arrived but did not reach",
    ("unknown", ""): "modules of vLLM's model got none of what arrived, such as model.embed_tokens",
}


@pytest.mark.vllm
@pytest.mark.parametrize("fault", SENT)
def test_a_wrong_update_is_refused_by_name(vllm: Vllm, fault: str) -> None:
    spoil, message = SENT[fault]
    vllm.change()
    with pytest.raises(EngineError, match=message):
        vllm.push(spoil)
    with pytest.raises(EngineError, match="arrived in part"):
        vllm.mismatch()
    vllm.push()
    assert vllm.mismatch() < 1e-5


@pytest.mark.vllm
@pytest.mark.parametrize("fault", INSIDE)
def test_what_goes_astray_behind_the_learner_is_named(vllm: Vllm, fault: tuple[str, str]) -> None:
    vllm.change()
    vllm.push()
    vllm.change()
    vllm.call("dapo_fault", *fault)
    with pytest.raises(EngineError, match=INSIDE[fault]):
        vllm.push()
    vllm.call("dapo_fault")
    vllm.push()
    assert vllm.mismatch() < 1e-5


@pytest.mark.vllm
def test_the_same_tensor_twice_is_no_fault_and_small_steps_arrive(vllm: Vllm) -> None:
    for _ in range(3):
        vllm.change(1e-6)
        vllm.push(lambda sent: [*sent, *sent[:3]])
        assert vllm.mismatch() < 1e-5
    vllm.push()  # the same again: nothing has to change


@pytest.mark.vllm
def test_a_worker_that_dies_in_the_middle_is_told(vllm: Vllm) -> None:
    vllm.push()
    vllm.call("dapo_fault", "exit", K)
    with pytest.raises(EngineError, match=r"while it was handed new ones .*: vLLM ended: "):
        vllm.push()
    with pytest.raises(EngineError):
        vllm.mismatch()


@pytest.mark.vllm
@pytest.mark.nightly
def test_an_adapter_arrives_at_each_version_or_is_named(tmp_path: Path) -> None:
    base = random_model("llama", **SHAPE)
    base.save_pretrained(tmp_path)
    model = new_adapter(AutoModelForCausalLM.from_pretrained(tmp_path), 4, 8.0, ["q_proj", "v_proj", "down_proj"], 0)
    for parameter in adapter_parameters(model).values():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    b = "model.layers.1.self_attn.v_proj.lora_B.default.weight"
    for vllm in started(model, tmp_path, **{"model.lora.rank": 4}):
        vllm.push()
        assert vllm.mismatch() < 1e-5
        for fault, spoil, message in (
            ("", lambda sent: [one for one in sent if one[0] != b], f"1 parameters were not given, such as {b}"),
            ("", lambda sent: [(n, t[:-1] if n == b else t) for n, t in sent], f"{b} .* has shape"),
            ("unbound", list, "18 of 18 tensors of the adapter, such as .*lora_.*, arrived but are on no layer"),
        ):
            vllm.change(0.1)
            vllm.call("dapo_fault", fault)
            with pytest.raises(EngineError, match=message):
                vllm.push(spoil)
            vllm.call("dapo_fault")
            vllm.push()
            assert vllm.mismatch() < 1e-5


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_processes_and_ranks_that_have_parts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "chosen", lambda *_: "gloo")  # in place of nccl, which needs GPUs
    model = random_model("qwen2", **(SHAPE | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}))
    for vllm in started(model, **{"rollout.tensor_parallel": ranks}):
        vllm.push()
        assert vllm.mismatch() < 1e-5
        for name, message in ((K, f"such as {K}, did not arrive"), ("", "")):
            vllm.change()
            vllm.call("dapo_fault", "lost", name)
            with pytest.raises(EngineError, match=message) if name else nullcontext():
                vllm.push()
        vllm.call("dapo_fault", "swapped", GATE)
        with pytest.raises(EngineError, match=f"such as {GATE}, arrived but did not reach"):
            vllm.push()
        assert vllm.engine._transfer._group is not None


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, shape", [("gpt2", {"n_embd": 64, "n_head": 2}), ("qwen3", {"head_dim": 32, "hidden_size": 64})]
)
def test_models_that_vllm_lays_out_in_other_ways(name: str, shape: dict[str, int]) -> None:
    for vllm in started(random_model(name, **shape)):
        for _ in range(2):
            vllm.change(1e-3)
            vllm.push()
            assert vllm.mismatch() < 1e-4
        vllm.call("dapo_fault", "nowhere")
        vllm.change(1e-3)
        with pytest.raises(EngineError, match="modules of vLLM's model got none of what arrived"):
            vllm.push()


# -- without vLLM --------------------------------------------------------------------------------------------------


def test_what_an_engine_has_is_compared_with_what_was_sent() -> None:
    sent = {name: torch.randn(64) for name in "abc"}
    check_arrived(sent, {name: elements.bfloat16() for name, elements in sent.items()})
    for change, message in (
        ({"b": sent["b"] + 1}, "1 of 3 parameters, such as b, are not what was sent"),
        ({"b": sent["b"][:-1]}, "such as b, are not what was sent"),
        ({"b": torch.full((64,), torch.nan)}, "such as b, are not what was sent"),
    ):
        with pytest.raises(EngineError, match=message):
            check_arrived(sent, sent | change)
    with pytest.raises(EngineError, match="1 of 3 parameters, such as c, did not arrive"):
        check_arrived(sent, {name: sent[name] for name in "ab"})


def test_the_kind_follows_from_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "one"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    workers = {
        name: [{"type": "cuda", "uuid": uuid} for uuid in name.split()] for name in ("one", "two three", "one two")
    }
    workers["cpu"] = [{"type": "cpu", "uuid": ""}]
    table = {(gpu, "one"): "ipc", (gpu, "two three"): "nccl", (gpu, "one two"): "files", (gpu, "cpu"): "files"}
    for (device, name), kind in (table | {(cpu, "cpu"): "files", (cpu, "one"): "files"}).items():
        assert chosen("auto", device, workers[name]) == kind
        assert chosen("files", device, workers[name]) == "files"
        for asked in ("ipc", "nccl"):
            if asked == kind:
                assert chosen(asked, device, workers[name]) == asked
            else:
                with pytest.raises(ConfigError, match=f"runtime.sync: {asked} needs learner and engine on"):
                    chosen(asked, device, workers[name])


def test_what_does_not_fit_into_shared_memory_goes_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = WeightTransfer(None, random_model("qwen2"), torch.float32)  # type: ignore[arg-type]
    vars(sender)["_folders"] = [SimpleNamespace(name=name) for name in ("/memory/x", "/disk/x")]
    free = {"/memory/x": 2**22, "/disk/x": 2**25}
    monkeypatch.setattr("shutil.disk_usage", lambda name: SimpleNamespace(free=free[name]))
    small, large = ({"a": torch.zeros(size, dtype=torch.uint8)} for size in (2**20, 2**24))
    assert sender._room_for("1", small) == Path("/memory/x/1") and sender._room_for("2", large) == Path("/disk/x/2")
    free["/disk/x"] = 2**24
    with pytest.raises(UserError, match=r"no room for 17.0 MiB in /memory and /disk; give TMPDIR a folder"):
        sender._room_for("3", large)


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    with own_folder(str(tmp_path)) as mine:
        dead = mine.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-")  # above the largest number of a process
        Path(dead).mkdir()
        Path(f"{dead}.log").touch()
        (tmp_path / "dapo-vllm-1-1-x").mkdir()
        own_folder(str(tmp_path)).cleanup()
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {Path(mine).name, f"{Path(dead).name}.log", "dapo-vllm-1-1-x"}


def test_rows_of_a_rank_and_what_is_split_in_unknown_ways() -> None:
    assert [_shard(64, 32, rank, 2) for rank in range(2)] == [0, 32]
    assert [_shard(64, 64, rank, 2) for rank in range(2)] == [0, 0]  # each has all of it
    assert [_shard(64, 32, rank, 4) for rank in range(4)] == [
        0,
        0,
        32,
        32,
    ]  # keys and values, of fewer heads than ranks
    assert _shard(64, 48, 0, 2) is None and _shard(64, 16, 0, 2) is None and _shard(64, 0, 0, 1) is None


def test_a_bucket_goes_through_a_group_of_processes_in_one_piece() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.arange(5), "d": torch.tensor(2.0)}
    buffer, layout = packed(tensors, torch.device("cpu"), torch.bfloat16)
    store, where = meeting_point("127.0.0.1")
    with ThreadPoolExecutor(1) as other:
        work = other.submit(lambda: Group("gloo", where, 1, 2, "cpu").receive(buffer.numel()))
        Group("gloo", store, 0, 2, "cpu").broadcast(buffer)
        arrived = work.result(60)
    found = unpacked(arrived, layout)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wire = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert found[name].dtype == wire.dtype and torch.equal(found[name], wire)
