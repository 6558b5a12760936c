"""Compiled layers give what the layers themselves give, from one piece of code for all layers of a kind.

Traced and not translated here (``aot_eager``): that takes seconds. Translated for a GPU they are tested in
tests/rollout/test_paged_runner.py.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from dapo.model.compiling import compile_ends, compile_layers, decoder_layers, keep_compiled_code
from dapo.model.forward import hidden_states
from dapo.model.loading import load_model
from dapo.model.packed import PackedAttention
from dapo.rollout.native.paged.runner import FIRST_TOKENS
from helpers import ARCHITECTURES, VOCAB, random_model


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def forward(model: Any, lengths: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.inference_mode():
        return hidden_states(model, tokens, positions, PackedAttention(lengths))


@pytest.mark.parametrize(("architecture", "kinds"), [("qwen2", 1), ("gemma2", 2), ("gpt2", 1)])
def test_all_layers_of_a_kind_share_one_piece_of_code(architecture: str, kinds: int) -> None:
    layers = {"n_layer" if architecture == "gpt2" else "num_hidden_layers": 4}
    model = load_model(random_model(architecture, **layers))
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled, backend="aot_eager")
    for lengths in ([FIRST_TOKENS], [5, 3], [16], [7, 9, 21], [40, 2]):
        torch.testing.assert_close(forward(compiled, lengths), forward(model, lengths), atol=1e-6, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == kinds
    assert not compiled.state_dict().keys() - model.state_dict().keys(), "layer numbers are no weights"


@pytest.mark.parametrize(("architecture", "pieces"), [("qwen2", 2), ("gemma3_text", 2), ("gpt2", 0)])
def test_what_surrounds_the_layers_is_compiled_once_for_all_lengths(architecture: str, pieces: int) -> None:
    model = load_model(random_model(architecture))
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    counters.clear()
    compile_ends(compiled, backend="aot_eager")
    for lengths in ([FIRST_TOKENS], [5, 3], [16], [7, 9, 21]):
        torch.testing.assert_close(forward(compiled, lengths), forward(model, lengths), atol=1e-6, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == pieces and not counters["graph_break"]


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_compiled_layers_have_the_gradient_of_plain_ones(architecture: str) -> None:
    plain = load_model(random_model(architecture))
    compiled = copy.deepcopy(plain)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled, backend="aot_eager")
    token_ids, positions = torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([0, 1, 2, 3, 2, 3])

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        # two sequences of four tokens that share the first two; nobody but the graph holds on to the layout
        place = torch.tensor([0, 1, 2, 3, 0, 1, 4, 5])
        hidden = hidden_states(model, token_ids, positions, PackedAttention([4, 4], place=place, shared=[0, 2]))
        model.zero_grad()
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    torch.testing.assert_close(gradients(compiled), gradients(plain), atol=1e-6, rtol=1e-5)
    before = counters["stats"]["unique_graphs"]
    token_ids, positions = token_ids.repeat(3), positions.repeat(3)
    hidden_states(compiled, token_ids, positions, PackedAttention([18])).sum().backward()
    assert counters["stats"]["unique_graphs"] == before > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_layers_are_found(architecture: str) -> None:
    model = random_model(architecture)
    assert len(decoder_layers(model)) == model.config.get_text_config().num_hidden_layers


def test_compiled_code_is_kept_where_the_next_process_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_layers_that_cannot_be_traced_stay_as_they_are() -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.inject_adapter_in_model(adapter, load_model(random_model("qwen2")))
    compile_layers(model, backend="aot_eager")
    hidden = hidden_states(model, torch.tensor([5, 6, 7]), torch.arange(3), PackedAttention([3]))
    hidden.sum().backward()  # with one compiled layer it would be refused: training asks for whole graphs
