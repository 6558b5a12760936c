"""A frozen base in 4 bits: the paper's numbers, one set of codes for all, and gradients of what they mean."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from training_cases import SHAPE, make_inputs, packed, random_groups

from dapo.algorithm.objective import DapoObjective
from dapo.commands.demo.task import make_tokenizer
from dapo.config.sections import ModelConfig, TrainingConfig
from dapo.errors import ModelError
from dapo.inference.model import find_model, inference_config, load_prompting, load_weights
from dapo.model.adapters import adapter_parameters
from dapo.model.forward import hidden_states
from dapo.model.loading import copy_model
from dapo.model.nf4 import NF4Linear, in_4_bits, levels, quantise, widened
from dapo.model.packed import PackedAttention
from dapo.training.lora import begin_adapter, load_trainable, trainable_shape
from dapo.training.trainer import Trainer
from helpers import random_model
from run_cases import Recorder

pytest.importorskip("peft")

BATCH = packed(random_groups(SHAPE))
INPUTS = make_inputs(BATCH)
PAPER = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
"""Appendix E of arXiv 2305.14314."""


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    random_model("qwen2", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def settings(path: Path | str, base: str = "nf4", **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(path), lora={"rank": 4, "base": base}, **fields)


def trained(config: ModelConfig) -> Any:
    return begin_adapter(load_trainable(config.path, config), config, 0)


def trainer_of(model: Any, dtype: torch.dtype = torch.float32) -> Trainer:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return Trainer(model, TrainingConfig(learning_rate=1e-2, warmup_steps=0, tokens_per_micro_batch=64), 1.0, dtype)


def test_the_numbers_are_those_of_the_paper() -> None:
    assert levels() == pytest.approx(PAPER, abs=1e-6)


def test_each_number_becomes_the_nearest_one_of_its_block() -> None:
    """Of 2: 0.045 lies nearer to 0.0796 than to 0, 0.035 does not; -0.85 is nearer to -1 than to -0.7, -0.8 is not."""
    weight = torch.zeros(2, 128)
    weight[0, :5] = torch.tensor([2.0, 0.09, 0.07, -1.7, -1.6])
    weight[1, 64:] = torch.linspace(-0.5, 0.5, 64)
    layer = NF4Linear(nn.Linear(128, 2))
    layer.codes.data, layer.scales.data = quantise(weight)
    found = widened(layer.codes, layer.scales, layer.pairs)
    assert found[0, :5].tolist() == pytest.approx([2.0, 2 * 0.0795803, 0.0, -2.0, -2 * 0.6961928], abs=1e-6)
    assert not found[0, 5:].any() and not found[1, :64].any()
    gaps = torch.tensor(PAPER).diff().max() / 2 * 0.5
    assert float((found[1] - weight[1]).abs().max()) <= float(gaps) + 1e-6
    assert layer.codes.shape == (2, 64) and layer.scales.tolist() == [[2.0, 0.0], [0.0, 0.5]]


def test_gradients_are_those_of_the_widened_weights() -> None:
    layer = NF4Linear(nn.Linear(64, 48))
    plain = nn.Linear(64, 48)
    plain.weight.data, plain.bias = widened(layer.codes, layer.scales, layer.pairs), layer.bias
    one, other = (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    for inputs, module in ((one, layer), (other, plain)):
        found = module(inputs)
        (found**2).sum().backward()
    torch.testing.assert_close(layer(one), plain(other))
    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("backend", [None, "aot_eager", "aot_eager_decomp_partition"])
def test_no_wide_weights_are_kept_for_the_backward_pass(backend: str | None) -> None:
    """The compiler's own choice would be to keep those of all layers."""
    layers = nn.Sequential(NF4Linear(nn.Linear(256, 512)), nn.SiLU(), NF4Linear(nn.Linear(512, 256)))
    plain = copy.deepcopy(layers)
    kept: list[torch.Tensor] = []
    if backend:
        torch._dynamo.reset()
        layers.compile(dynamic=True, fullgraph=True, backend=backend)
    one, other = (torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        found = layers(one)
    (found**2).sum().backward()
    (plain(other) ** 2).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert {tuple(t.shape) for t in kept if t.numel() > 5 * 512} == {(512, 128), (256, 256)}
    assert all(t.dtype == torch.uint8 for t in kept if t.numel() > 5 * 512), "nothing but the codes"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_trainer_and_reference_share_the_codes(wide: Path, dtype: str) -> None:
    model = trained(settings(wide, compute_dtype=dtype))
    trainer = trainer_of(model, getattr(torch, dtype))
    narrow = {name: p for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(narrow) == 3 * 7, "of three layers all linear ones"
    before = {name: p.clone() for name, p in narrow.items()}
    for twin in (copy_model(model, getattr(torch, dtype)), trainer.policy.frozen_copy().model):
        for name, parameter in narrow.items():
            assert twin.get_parameter(name).data_ptr() == parameter.data_ptr(), name
    for _ in range(2):
        assert trainer.update(BATCH, INPUTS, DapoObjective()).skipped is None
    assert all(torch.equal(p, before[name]) for name, p in narrow.items())
    assert dict(trainer.publish()[1]).keys() == adapter_parameters(model).keys()


def test_what_is_trained_is_the_adapter_on_the_widened_base(wide: Path, tmp_path: Path) -> None:
    """The same update as on a float32 base that holds what the codes mean; written is an adapter of the base."""
    ours = trainer_of(trained(settings(wide)))
    plain = trained(settings(wide, base="full"))
    narrow = dict(ours.policy.model.named_modules())
    for name, module in plain.named_modules():
        if isinstance(twin := narrow[name], NF4Linear):
            module.weight.data = widened(twin.codes, twin.scales, twin.pairs)
    theirs = trainer_of(plain)
    for trainer in (ours, theirs):
        assert trainer.update(BATCH, INPUTS, DapoObjective()).skipped is None
    torch.testing.assert_close(ours.logprobs(BATCH), theirs.logprobs(BATCH), atol=1e-4, rtol=1e-4)
    ours.save(tmp_path / "adapter")
    again = load_trainable(tmp_path / "adapter", settings(tmp_path / "adapter"))
    loaded = Trainer(again, TrainingConfig(tokens_per_micro_batch=64), 1.0)
    assert torch.equal(loaded.logprobs(BATCH), ours.logprobs(BATCH)), "a run that goes on narrows the base again"
    wide_again = load_trainable(tmp_path / "adapter", settings(tmp_path / "adapter", base="full"))
    assert not any(isinstance(module, NF4Linear) for module in wide_again.modules())


@pytest.mark.parametrize("base", ["nf4", "full"])
def test_a_run_is_sampled_from_as_it_was_trained(wide: Path, tmp_path: Path, base: str) -> None:
    model = trained(settings(wide, base))
    trainer_of(model).save(tmp_path / "run/model-after")
    (tmp_path / "run/environment.json").touch()
    (tmp_path / "run/config.yaml").write_text(f"model: {{path: {wide}, lora: {{rank: 4, base: {base}}}}}\n")
    prompting = load_prompting(inference_config(find_model(str(tmp_path / "run"))), tokenizer=make_tokenizer())
    listener = Recorder()
    found, _ = load_weights(prompting, listener)
    assert ["the base in 4 bits: 21 of 21" in text for text in listener.phases] == [True] * (base == "nf4")
    ids = torch.arange(12)
    with torch.no_grad():
        ours, theirs = (hidden_states(one, ids, ids, PackedAttention([12])) for one in (found, model))
    assert torch.equal(ours, theirs)
    assert sum(isinstance(module, NF4Linear) for module in found.modules()) == 21 * (base == "nf4")
    own = inference_config(find_model(str(wide)), overrides=["model.lora.base=nf4"])
    load_weights(load_prompting(own, tokenizer=make_tokenizer()), listener)
    assert [text.partition(":")[0] for text in listener.warnings] == ["model.lora.base=nf4"]


def test_shapes_are_foretold(wide: Path) -> None:
    config = settings(wide)
    model = trained(config)
    shape = trainable_shape(config, model.config)
    found, made = ({n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (shape, model))
    assert found == made


def test_it_is_said_how_many_layers_fit_and_what_is_saved(tmp_path: Path) -> None:
    """Of 48 inputs there are no whole blocks, so of the MLP only the product back, of 128 inputs, becomes small."""
    model = random_model("qwen2", hidden_size=48, num_attention_heads=4, head_dim=16, intermediate_size=128)
    model.save_pretrained(tmp_path / "odd")
    config = settings(tmp_path / "odd")
    for made in (trained(config), trainable_shape(config, model.config)):
        layers = 3 * (48 * 128 + 48 * 64)  # down_proj and o_proj
        mib = layers * (0.5 + 4 / 64) / 2**20, layers * 4 / 2**20
        assert in_4_bits(made) == (
            f"the base in 4 bits: 6 of 21 linear layers, {mib[0]:.1f} MiB in place of {mib[1]:.1f}"
        )


@pytest.mark.parametrize(
    ("name", "rank", "message"), [("qwen2", 0, "give model.lora.rank"), ("gpt2", 4, "gpt2 has none")]
)
def test_without_an_adapter_or_a_layer_for_it_it_is_refused(tmp_path: Path, name: str, rank: int, message: str) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"), lora={"rank": rank, "base": "nf4"})
    for make in (lambda: trained(config), lambda: trainable_shape(config, model.config)):
        with pytest.raises(ModelError, match=message):
            make()
