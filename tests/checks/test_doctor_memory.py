"""The predicted memory of a training, beside what a process really takes for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from dapo.checks import memory
from dapo.checks.memory import GIB, Memory, checkpoint_bytes, predict_memory, predicted_from
from dapo.config import Config, build_config, nested
from dapo.config.reading import with_values
from dapo.errors import ModelError, UserError
from dapo.model.forward import hidden_states
from dapo.model.loading import load_model
from dapo.model.packed import PackedAttention
from dapo.training.lora import trainable_shape
from dapo.util import memory as system_memory
from helpers import most_allocated, random_model

FACTOR = 1.4
"""Prediction and measurement lie within this factor of each other."""

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
SETTINGS: dict[str, Any] = {
    "model.path": "tiny",
    "data.max_prompt_length": 8,
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 8,
    "rollout.max_response_length": 120,
    "rollout.max_concurrent_samples": 64,
    "algorithm.overlong_buffer.len": 4,
    "algorithm.filter_groups.enable": False,
    "training.groups_per_update": 4,
    "training.tokens_per_micro_batch": 2048,
}
MEASURED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from dapo.util.memory import peak_memory
from run_cases import Recorder, TOKENIZER, run, text_sum, tiny_model
from test_doctor_memory import SETTINGS, SHAPE, random_model

folder = Path(sys.argv[2])
run(folder / "first", {"training.steps": 1})  # what is loaded when it is first used
before = peak_memory()
settings = SETTINGS | {"training.steps": 1, "runtime.deterministic": False, "run.save_every": 0}
summary = run(folder / "second", settings, model=random_model("qwen2", **SHAPE))
print(json.dumps({"bytes": peak_memory() - before, "updates": summary["updates"]}))
"""
"""A whole run: rollout, updates, checkpoint. A random model over 8,192 tokens hardly ever ends a response."""


def config(**changes: Any) -> Config:
    given = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    return build_config(nested(given))


def predicted(**changes: Any) -> Memory:
    return predict_memory(config(**changes), random_model("qwen2", **SHAPE))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is counted otherwise")
def test_the_prediction_is_near_what_a_training_takes(tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", MEASURED, json.dumps([str(here), str(here.parent)]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["updates"] == 2
    measured = found["bytes"]
    total = predicted().total(on_gpu=False)
    print(f"predicted {total / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert 1 / FACTOR <= total / measured <= FACTOR, (total / 2**20, measured / 2**20, predicted())


def test_each_part_grows_with_what_it_is_for() -> None:
    base = predicted()
    parameters = sum(p.numel() for p in random_model("qwen2", **SHAPE).parameters())
    assert (base.weights, base.gradients, base.adam, base.engine) == (
        *(4 * parameters, 4 * parameters, 8 * parameters, 4 * parameters),
    )
    assert base.reference == 0 and predicted(algorithm__kl__mode="loss").reference == 4 * parameters
    # 64 sequences of 128 tokens, 4 layers, 2 key heads of 64 numbers, keys and values, 4 bytes
    assert base.cache == 64 * 128 * 4 * 2 * 2 * 64 * 4
    assert predicted(rollout__max_concurrent_samples=16).cache == base.cache // 4
    assert predicted(rollout__max_concurrent_samples=1000).cache == base.cache, "a step has 64 samples"
    pinned = predicted(rollout__max_concurrent_samples=1000, runtime__deterministic=True)
    assert pinned.cache == base.cache // 64 * 1000, "there the shape of the cache does not depend on the samples"
    assert predicted(training__tokens_per_micro_batch=1024).activations == base.activations // 2
    assert predicted(model__compute_dtype="bfloat16").engine == base.engine // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_on_a_cpu_are_what_a_forward_pass_keeps(dtype: str) -> None:
    model, ids, positions = load_model(random_model("qwen2", **SHAPE)), torch.ones(2048).long(), torch.arange(128)
    context = PackedAttention([128] * 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False):
        kept = most_allocated(lambda: hidden_states(model, ids, positions.repeat(16), context))
    told = predict_memory(config(model__compute_dtype=dtype), model)
    assert (told.activations + told.casts) / kept == pytest.approx(1.0, abs=0.1)


def test_an_engine_elsewhere_takes_nothing_and_what_is_ahead_takes_more() -> None:
    base, ahead = predicted(rollout__max_concurrent_samples=1000), {"rollout__max_staleness": 2, "rollout__ahead": 1}
    apart = predicted(rollout__device="cuda:1")
    assert apart.engine == apart.cache == apart.decoding == 0 and apart.weights == base.weights
    assert predicted(rollout__device="cpu") == predicted()
    assert predicted(rollout__max_concurrent_samples=1000, **ahead).cache == 2 * base.cache
    beside = {"evaluation__while_sampling": "copy"}
    assert predicted(**ahead, **beside).engine == 2 * base.engine and predicted(**beside).engine == base.engine


def test_on_a_gpu_rollout_and_update_take_turns() -> None:
    base = predicted()
    lasting = base.weights + base.adam + base.engine
    update = base.gradients + base.activations + base.logits
    assert base.total(on_gpu=True) == lasting + max(update, base.cache + base.decoding)
    assert base.total(on_gpu=False) == int(1.25 * (lasting + update + base.cache))
    bounded = predict_memory(config(rollout__cache_gib=0.001), random_model("qwen2", **SHAPE), on_gpu=True)
    assert bounded.cache == int(0.001 * GIB)


def test_vllm_loads_a_base_of_its_own_which_goes_to_the_host_while_it_sleeps() -> None:
    pytest.importorskip("peft")
    given = {"model__lora__rank": 8, "rollout__cache_gib": 0.001}
    native, vllm = config(**given), config(**given, rollout__engine="vllm", runtime__deterministic=False)
    shape = trainable_shape(native.model, random_model("qwen2", **SHAPE).config)
    one, other = (predict_memory(which, shape, on_gpu=True) for which in (native, vllm))
    weights = 4 * sum(p.numel() for p in shape.parameters())
    assert one.engine < weights == other.engine == other.host and one.host == 0
    assert (other.cache, other.cache_that_stays) == (int(0.001 * GIB), 0), "all of cache_gib, while it is awake"


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is counted otherwise")
def test_the_peak_of_a_program_is_not_that_of_the_one_that_started_it() -> None:
    code = "from dapo.util.memory import peak_memory; print(peak_memory())"
    large = torch.ones(2**27, dtype=torch.uint8)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < len(large)


def test_free_memory_is_that_of_the_container_where_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system_memory.free_memory() is None:
        pytest.skip("how much is free cannot be told here")
    monkeypatch.setattr(system_memory, "_left_in_containers", lambda: iter([12345]))
    assert system_memory.free_memory() == 12345


def test_of_an_adapter_little_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shape = random_model("qwen2", **SHAPE)
    given = config(model__lora__rank=8, model__compute_dtype="bfloat16", algorithm__kl__mode="loss")
    every = sum(p.numel() for p in shape.parameters())
    found = predict_memory(given, trainable_shape(given.model, shape.config), on_gpu=True)
    # q, o: 256 + 256; k, v: 256 + 128; gate, up, down: 256 + 1024
    adapter = 8 * 4 * (2 * 512 + 2 * 384 + 3 * 1280)
    assert found.weights == 2 * every + 4 * adapter, "the base in bfloat16 is there once"
    assert (found.gradients, found.adam, found.engine, found.reference) == (
        *(4 * adapter, 8 * adapter, 2 * adapter, 4 * adapter),
    )
    assert found.casts == 2 * adapter


def test_of_a_tensor_larger_than_a_part_a_part_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.training.moments.PART", 1000)
    found = predict_memory(config(training__offload_optimizer=True), random_model("qwen2", **SHAPE), on_gpu=True)
    assert found.streamed == 8 * 1000


def test_a_base_in_4_bits_takes_half_a_byte_and_is_shared() -> None:
    pytest.importorskip("peft")
    full, narrow = (
        config(model__compute_dtype="bfloat16", model__lora__rank=8, model__lora__base=base) for base in ("full", "nf4")
    )
    shape = random_model("qwen2", **SHAPE)
    linear = sum(p.numel() for n, p in shape.model.layers.named_parameters() if n.endswith("proj.weight"))
    one, other = (
        predict_memory(which, trainable_shape(which.model, shape.config), on_gpu=True) for which in (full, narrow)
    )
    assert one.weights - other.weights == 2 * linear - linear // 2 - 2 * linear // 64
    assert (other.engine, other.gradients, other.adam) == (one.engine, one.gradients, one.adam)
    assert other.at_work - one.at_work == 2 * 256 * 1024, "the largest matrix, wide"
    assert other.loading == pytest.approx(
        2 * sum(p.numel() for p in shape.parameters()) + other.gradients // 2, rel=0.01
    )
    assert other.total(on_gpu=True) >= other.loading > one.loading == 0


def test_moments_in_8_bits_take_two_bytes_and_a_scale_for_each_block() -> None:
    shape = random_model("qwen2", **SHAPE)
    plain, narrow = (predict_memory(config(training__moments=kind), shape, on_gpu=True) for kind in ("float32", "int8"))
    small = sum(p.numel() for p in shape.parameters() if p.dim() == 1)  # norms and biases
    wide = plain.adam // 8 - small
    assert narrow.adam == 8 * small + 2 * wide + 8 * wide // 128
    assert narrow.streamed == 24 * (small + wide)
    assert checkpoint_bytes(config(training__moments="int8"), shape) == 4 * (small + wide) + narrow.adam
    offloaded = predict_memory(config(training__moments="int8", training__offload_optimizer=True), shape, on_gpu=True)
    assert (offloaded.adam, offloaded.host) == (0, narrow.adam)


def test_memory_that_just_does_is_tight_and_a_byte_less_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = predicted().total(on_gpu=False)
    context = SimpleNamespace(config=config(), shape=random_model("qwen2", **SHAPE), device=torch.device("cpu"))
    context.model, context.need = None, lambda value, name: value
    seen = []
    for free in (needed - 1, needed, int(needed / 0.85) - 1, int(needed / 0.85) + 2):
        monkeypatch.setattr(system_memory, "free_memory", lambda free=free: free)
        (finding,) = memory.check_memory(context)  # type: ignore[arg-type]
        seen.append((finding.status, context.fits))
    assert seen == [("fail", None), ("warn", True), ("warn", True), ("pass", True)]


def test_what_offloading_and_checkpointing_save() -> None:
    shape = random_model("qwen2", **SHAPE)
    parameters = sum(p.numel() for p in shape.parameters())
    plain = predict_memory(config(model__compute_dtype="bfloat16"), shape, on_gpu=True)
    options = {"model__compute_dtype": "bfloat16", "training__offload_optimizer": True}
    offloaded = predict_memory(config(**options), shape, on_gpu=True)
    assert (plain.adam, offloaded.adam, offloaded.host) == (8 * parameters, 0, 8 * parameters)
    assert offloaded.streamed == 8 * parameters, "a small model is one part"
    assert predict_memory(config(**options), shape).adam == 8 * parameters, "on a CPU it is the same memory"
    in_layers = sum(p.numel() for p in shape.model.layers.parameters())
    assert plain.casts == 2 * in_layers
    exact = [config(model__compute_dtype=dtype, runtime__exact=True) for dtype in ("bfloat16", "float32")]
    assert [predict_memory(one, shape).casts for one in exact] == [2 * parameters, 0]
    again = predict_memory(
        config(model__compute_dtype="bfloat16", training__activation_checkpointing=True), shape, on_gpu=True
    )
    assert again.casts == plain.casts // 4
    # four layers' worth against one, and the inputs of four in float32; one is at work either way
    assert again.activations == pytest.approx(plain.activations / 4 + 2048 * 4 * 4 * 256)
    assert again.at_work == plain.at_work == pytest.approx(plain.activations / 4)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.4])
def test_what_is_proposed_where_memory_is_short_is_enough(on_gpu: bool, share: float) -> None:
    shape, given = random_model("qwen2", **SHAPE), config()
    free = share * predict_memory(given, shape, on_gpu).total(on_gpu)
    fix = memory.smaller(given, shape, free, on_gpu)
    settings = [item.split("=") for item in fix.split()]
    changed = config(**{key.replace(".", "__"): yaml.safe_load(value) for key, value in settings})
    assert settings and predict_memory(changed, shape, on_gpu).total(on_gpu) <= 0.85 * free


def test_where_no_setting_is_enough_it_says_what_is() -> None:
    given = config()
    shape = random_model("qwen2", **SHAPE)
    assert memory.smaller(given, shape, 1e6, True).startswith("model.lora.rank=16, ")
    adapted = config(model__lora__rank=4)
    fix = memory.smaller(adapted, trainable_shape(adapted.model, shape.config), 1e6, True)
    assert fix.startswith("a smaller model, or ") and "training.activation_checkpointing=true" in fix


def test_an_adapter_is_for_a_new_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out in a run, which cannot go on with one."""
    monkeypatch.setattr(memory, "_SHORT", 0.0)
    given = config(runtime__deterministic=False)
    with pytest.raises(UserError) as found, memory.shortage_explained(given, random_model("qwen2", **SHAPE)):
        raise MemoryError("out of memory")
    said = str(found.value)
    assert "What takes less: model.lora.rank=16, which" in said and " and training.tokens_per_micro_batch=" in said
    assert said.endswith("(model.lora.rank, model.compute_dtype: for a new run, this one cannot go on with another)")


def test_on_a_gpu_the_head_and_the_layer_at_work_take_turns() -> None:
    shape = random_model("qwen2", **SHAPE)
    memory = predict_memory(config(model__compute_dtype="bfloat16"), shape, on_gpu=True)
    passes = memory.casts + memory.activations
    rollout = memory.cache + memory.decoding
    for wider, narrower in ((memory.logits + 1, 0), (0, memory.logits + 1)):
        one = replace(memory, logits=wider, at_work=narrower)
        update = one.gradients + passes + max(wider, narrower)
        assert one.total(on_gpu=True) == one.lasting + max(update, rollout)
    adapted = config(model__compute_dtype="bfloat16", model__lora__rank=4)
    frozen = predict_memory(adapted, trainable_shape(adapted.model, shape.config), on_gpu=True)
    assert memory.logits - frozen.logits == 6 * shape.get_output_embeddings().weight.numel()


def test_the_forecast_names_its_parts_or_says_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    random_model("qwen2", **SHAPE).save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    text = predicted_from(config(model__path=path))
    assert text.startswith("about 0.6 GiB of RAM, with texts of full length, without the libraries' own 0.5 GiB (")
    assert "(weights 0.02, gradients 0.02, adam 0.04, " in text and "logits 0.09" in text
    gpu = predicted_from(config(model__path=path, runtime__device="cuda", training__offload_optimizer=True))
    assert " of GPU memory, with" in gpu and "in the host's memory 4" in gpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert " of GPU memory, with" in predicted_from(config(model__path=path)), "auto: where there is one"
    assert " of RAM, with" in predicted_from(config(model__path=path, runtime__device="cpu"))
    judged = config(model__path=path, reward={"kind": "model", "path": "r", "correct_above": 0})
    assert "GiB, without the reward model r, which is not here (" in predicted_from(judged)
    assert "reward model" not in gpu + predicted_from(with_values(judged, {"reward.device": "cpu"}))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "not predicted: model architecture 'bert'" in predicted_from(config(model__path=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 0}, "division"),
        ({"num_key_value_heads": "2"}, "expected int, got str"),
        ({"hidden_size": -32}, "negative dimension"),
        ({"hidden_act": "nope"}, "'nope' is not known"),
        ({"pad_token_id": 9999}, "Padding_idx"),
        ({"rope_parameters": 3}, "rope_parameters"),
    ],
)
def test_a_config_that_describes_no_model_is_said_wherever_it_is_read(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    random_model("qwen2").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    told = predicted_from(config(model__path=str(tmp_path)))
    assert told.startswith(f"not predicted: model {tmp_path}: ") and says in told and "\n" not in told
    with pytest.raises(ModelError, match=says):
        load_model(tmp_path)


def test_a_model_of_no_size_is_no_list_of_nothing(tmp_path: Path) -> None:
    random_model("qwen2").save_pretrained(tmp_path)
    told = predicted_from(config(model__path=str(tmp_path), training__tokens_per_micro_batch=128))
    assert told.endswith(" (each part less than 0.01 GiB)"), told


def test_the_forecast_does_not_wait_for_a_hub_that_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(name: str, **how: Any) -> Any:
        asked.update(how)
        raise OSError("not in the cache")

    monkeypatch.setattr("dapo.model.hub.hub_answers", lambda: False)
    monkeypatch.setattr("dapo.model.loading.hub_answers", lambda: False)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    told = predicted_from(config(model__path="owner/name"))
    assert told.startswith("not predicted: model owner/name: neither a folder nor in the cache of downloads")
    assert asked["local_files_only"]
