"""Training of LoRA adapters: PEFT's own gradient, a base that stays what it is, and files that plain PEFT reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import SHAPE, make_inputs, packed, random_groups
from transformers import AutoModelForCausalLM

from dapo.algorithm.objective import DapoObjective
from dapo.config.sections import ModelConfig, TrainingConfig
from dapo.errors import ConfigError, ModelError
from dapo.model.adapters import WEIGHTS_FILE, adapter_parameters
from dapo.model.loading import copy_model, load_model
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_experiment
from dapo.orchestrator.resume import resume_config
from dapo.training.lora import _check_same, begin_adapter, load_trainable
from dapo.training.micro_batch import micro_batch
from dapo.training.snapshot import expected_bytes, snapshot, snapshot_bytes
from dapo.training.trainer import Trainer
from dapo.util.shutdown import Stopped
from helpers import random_model
from run_cases import PROMPTS, TOKENIZER, Recorder, last_checkpoint, run, steps_of, text_sum, tiny_model, without_times

peft = pytest.importorskip("peft")

BATCH = packed(random_groups(SHAPE))
INPUTS = make_inputs(BATCH)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a model and its tokenizer."""
    tiny_model().save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A folder with a model that knows the tokens of the batch."""
    random_model("qwen2").save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def settings(base: Path, **lora: Any) -> ModelConfig:
    dtype = lora.pop("compute_dtype", "float32")
    return ModelConfig(path=str(base), compute_dtype=dtype, lora={"rank": 4, **lora})


def trainer_of(base: Path, seed: int = 0, disturb: bool = True, **lora: Any) -> Trainer:
    """On a new adapter. ``disturb``: with numbers in both of its matrices."""
    config = settings(base, **lora)
    model = begin_adapter(load_trainable(base, config), config, seed)
    if disturb:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    training = TrainingConfig(learning_rate=1e-2, warmup_steps=0, tokens_per_micro_batch=64)
    return Trainer(model, training, 1.0, getattr(torch, config.compute_dtype))


def update(trainer: Trainer) -> None:
    assert trainer.update(BATCH, INPUTS, DapoObjective()).skipped is None


def test_gradient_and_log_probabilities_are_those_of_peft(wide: Path, tmp_path: Path) -> None:
    trainer = trainer_of(wide)
    trainer.save(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(wide, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    logprobs, start = [], 0
    for length, prompt in zip(BATCH.lengths, BATCH.prompt_lengths, strict=True):
        ids = torch.from_numpy(BATCH.token_ids[start : start + length])
        found = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
        logprobs.append(found[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0])
        start += length
    expected = torch.cat(logprobs)
    found, _ = trainer.policy.evaluate(micro_batch(BATCH, np.arange(BATCH.num_samples), trainer.device))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for logprob in (found, expected):
        torch.autograd.backward(DapoObjective()(logprob, torch.zeros_like(logprob), INPUTS)[0])
    ours = {name: p.grad for name, p in trainer.policy.model.named_parameters() if p.grad is not None}
    gradients = {
        n.removeprefix("base_model.model."): p.grad for n, p in theirs.named_parameters() if p.grad is not None
    }
    assert ours.keys() == gradients.keys() == adapter_parameters(trainer.policy.model).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_changes_and_the_base_is_there_once(wide: Path, dtype: torch.dtype) -> None:
    trainer = trainer_of(wide, compute_dtype=str(dtype)[6:])
    model = trainer.policy.model
    adapter = adapter_parameters(model)
    assert {p.dtype for p in adapter.values()} == {torch.float32}
    frozen = {name: p for name, p in model.named_parameters() if name not in adapter}
    assert {p.dtype for p in frozen.values()} == {dtype}
    engine, reference = copy_model(model, dtype), trainer.policy.frozen_copy().model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for twin in (engine, reference):
        shared = {name for name, p in twin.named_parameters() if p.data_ptr() == model.get_parameter(name).data_ptr()}
        assert shared == frozen.keys()
    update(trainer)
    update(trainer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in frozen), name
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, before[name]), "the reference is the policy as it was"
    assert dict(trainer.publish()[1]).keys() == adapter.keys()


def test_a_new_adapter_adds_nothing_and_depends_on_the_seed_alone(wide: Path) -> None:
    plain = Trainer(load_model(wide), TrainingConfig(tokens_per_micro_batch=64), 1.0).logprobs(BATCH)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = trainer_of(wide, seed=1, disturb=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again, other = trainer_of(wide, seed=1, disturb=False), trainer_of(wide, seed=2, disturb=False)
    assert torch.equal(one.logprobs(BATCH), plain)
    values = [
        torch.cat([p.flatten() for p in adapter_parameters(t.policy.model).values()]) for t in (one, again, other)
    ]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    assert float(values[0].detach().abs().sum()) > 0


def test_a_snapshot_holds_the_adapter_and_goes_on_to_the_bit(wide: Path, tmp_path: Path) -> None:
    trainer = trainer_of(wide, compute_dtype="bfloat16")
    update(trainer)
    frozen = snapshot(trainer)
    numbers = sum(p.numel() for p in adapter_parameters(trainer.policy.model).values())
    assert 12 * numbers <= snapshot_bytes(frozen) < 12 * numbers + 4096
    assert expected_bytes(trainer) == 12 * numbers, "the base is not written"
    update(trainer)
    frozen.save(tmp_path / "model")
    frozen.save_state(tmp_path / "optimizer")
    files = sorted(p.name for p in (tmp_path / "model").iterdir())
    assert files == ["adapter_config.json", WEIGHTS_FILE, "generation_config.json"]
    resumed = trainer_of(wide, compute_dtype="bfloat16", seed=3, disturb=False)
    resumed.load(tmp_path / "model")
    resumed.load_state(tmp_path / "optimizer")
    update(resumed)
    for name, parameter in adapter_parameters(trainer.policy.model).items():
        assert torch.equal(parameter, adapter_parameters(resumed.policy.model)[name]), name
    with pytest.raises(ModelError, match="size mismatch"):
        trainer_of(wide, rank=8).load(tmp_path / "model")
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json"):
        trainer.load(wide)


LORA = {"model.lora.rank": 4, "training.steps": 3}


def run_lora(folder: Path, base: Path, changes: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    return run(folder, LORA | {"model.path": str(base)} | changes, model=None, tokenizer=None, **inputs)


@pytest.mark.parametrize("kind", ["full", "nf4"])
def test_a_run_trains_an_adapter_that_peft_loads(base: Path, tmp_path: Path, kind: str) -> None:
    listener = Recorder()
    changes = {"model.lora.base": kind} | {
        "algorithm.kl.mode": "loss",
        "training.offload_optimizer": True,
        "run.save_every": 2,
    }
    run_lora(tmp_path / "run", base, changes, listener=listener)
    said = [text.partition(" linear")[0] for text in listener.phases if "in 4 bits" in text]
    assert said == ["the base in 4 bits: 3 of 21"] * (kind == "nf4"), "rows of 32 numbers are no whole blocks"
    steps = steps_of(tmp_path / "run")
    assert all(step["mismatch/mean"] < 1e-4 for step in steps), "the engine's log-probabilities are the trainer's"
    for name in ("model-before", "model-after", f"checkpoints/{last_checkpoint(tmp_path / 'run').name}/model"):
        folder = tmp_path / "run" / name
        assert not (folder / "config.json").exists() and not (folder / "model.safetensors").exists()
        stated = json.loads((folder / "adapter_config.json").read_text())
        assert stated["base_model_name_or_path"] == str(base.resolve())
        assert stated["target_modules"] == sorted(stated["target_modules"])
    ours = load_model(tmp_path / "run" / "model-after")
    plain = AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "run" / "model-after").eval()
    ids = torch.tensor([[5, 9, 12, 7]])
    merged = copy.deepcopy(theirs).merge_and_unload()
    ours.set_attn_implementation("eager")
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        torch.testing.assert_close(ours(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
        start = load_model(tmp_path / "run" / "model-before")
        start.set_attn_implementation("eager")
        assert not torch.allclose(start(input_ids=ids).logits, expected, atol=1e-3)


def test_training_goes_on_from_an_adapter(base: Path, tmp_path: Path) -> None:
    run_lora(tmp_path / "first", base, {"training.steps": 1})
    after = tmp_path / "first" / "model-after"
    run_lora(tmp_path / "second", after, {"training.steps": 1, "model.lora.rank": 0})
    for name in ("first/model-after", "second/model-before"):
        assert (tmp_path / name / WEIGHTS_FILE).read_bytes() == (after / WEIGHTS_FILE).read_bytes()
    assert (tmp_path / "second" / "model-after" / WEIGHTS_FILE).read_bytes() != (after / WEIGHTS_FILE).read_bytes()
    load_trainable(after, settings(after))  # as the recipe of the first one says
    with pytest.raises(ConfigError, match=r"model.lora.rank: is 8, but the adapter .* has 4; leave model.lora out"):
        load_trainable(after, settings(after, rank=8))
    with pytest.raises(ConfigError, match=r"model.lora.alpha: is 3.0, but the adapter .* has 8"):
        load_trainable(after, settings(after, alpha=3))
    with pytest.raises(ConfigError, match=r"model.lora.target_modules: is \['q_proj'\], but"):
        load_trainable(after, settings(after, target_modules=["q_proj"]))


@pytest.mark.parametrize("kind", ["full", "nf4"])
def test_a_resumed_run_ends_with_the_same_bits(base: Path, tmp_path: Path, kind: str) -> None:
    changes = {"model.compute_dtype": "bfloat16", "model.lora.base": kind}
    run_lora(tmp_path / "whole", base, changes)

    def stop(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Stopped)):
        run_lora(tmp_path / "cut", base, changes, listener=Recorder(stop))
    config = resume_config(tmp_path / "cut")
    inputs = RunOverrides(rows=PROMPTS, reward=text_sum, resume=RunFolder(tmp_path / "cut"))
    run_experiment(config, Recorder(), inputs)
    whole, cut = (tmp_path / name / "model-after" / WEIGHTS_FILE for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    assert [*map(without_times, steps_of(tmp_path / "whole"))] == [*map(without_times, steps_of(tmp_path / "cut"))]


def test_what_cannot_be_trained_is_said(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model: an adapter's files name the folder of its base"):
        load_trainable(tiny_model(), settings(base))
    config = settings(base, target_modules=["nothing"])
    with pytest.raises(ModelError, match=r"model\.lora\.target_modules: Target modules \{'nothing'\} not found"):
        begin_adapter(load_trainable(base, config), config, 0)
    config = settings(base, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ModelError, match="the adapter changes the embedding"):
        begin_adapter(load_trainable(base, config), config, 0)


def test_the_order_in_which_modules_are_named_does_not_matter() -> None:
    settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    adapter: Any = SimpleNamespace(settings=settings, folder="there")
    for names, same in ((["v_proj", "q_proj"], True), (["v_proj", "k_proj"], False)):
        config = ModelConfig.model_validate({"path": "m", "lora": {"rank": 8, "target_modules": names}})
        if same:
            _check_same(adapter, config)
        else:
            with pytest.raises(ConfigError, match=r"model\.lora\.target_modules: is"):
                _check_same(adapter, config)
