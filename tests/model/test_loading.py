"""Which models are loaded, which are refused with what words, and what the documents say of that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dapo.errors import ModelError
from dapo.model.loading import ROPE_TYPES, SUPPORTED, check_supported, is_finite, load_model
from helpers import ARCHITECTURES, most_allocated, random_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "rope_theta": 10_000.0,
}


def config_of(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**ARCHITECTURES[name] | changes)


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "gpt_oss", "llama4_text", "gemma3n_text", "gemma4_text"),
        *("phi", "phi3", "granite", "cohere", "mamba", "falcon_h1", "deepseek_v3", "olmo2", "t5"),
    ],
)
def test_an_architecture_without_proof_is_refused_by_name(kind: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(ModelError) as refusal:
        check_supported(AutoConfig.for_model(kind))
    message = str(refusal.value)
    assert f"'{kind}' is not supported by the native engine" in message
    assert all(name in message for name in SUPPORTED.values())
    assert "serve, evaluate, generate (rollout.engine=vllm): vLLM may know it, if it is a causal" in message
    assert "docs/models.md" in message


def test_gemma_3_with_images_is_told_from_its_text_model() -> None:
    from transformers import AutoConfig

    with pytest.raises(ModelError, match=r"'gemma3' is not supported .*the text models, gemma3_text, are"):
        check_supported(AutoConfig.for_model("gemma3"))


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope type 'dynamic'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ("qwen2", {"rope_parameters": LONG_ROPE}, "rope type 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope type 'proportional'"),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
            }
        },
        "rope type 'dynamic'",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
        "partial_rotary_factor",
    ),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "type chunked_attention"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
]


@pytest.mark.parametrize("name, changes, message", OPTIONS)
def test_an_option_that_would_be_computed_wrongly_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}' with .*{message}.*not supported.*vLLM may know it"):
        check_supported(config_of(name, **changes))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_usual_options_are_not_refused(name: str) -> None:
    check_supported(config_of(name))


def test_dynamic_rope_depends_on_the_longest_neighbour() -> None:
    """Why it is refused: the same tokens at the same positions, with a longer sequence beside them."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = random_model("llama", rope_parameters=rope, max_position_embeddings=8)
    short = torch.arange(6)[None]
    long = torch.arange(30)[None]
    with torch.no_grad():
        alone = model.model.rotary_emb(torch.zeros(1), short)[0]
        model.model.rotary_emb(torch.zeros(1), long)
        beside = model.model.rotary_emb(torch.zeros(1), torch.cat([short, long], 1))[0][:, :6]
    assert not torch.allclose(alone, beside, atol=1e-3)


def test_a_loaded_model_is_cast_but_for_its_rotary_frequencies() -> None:
    model = random_model("qwen2")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    same = load_model(model, torch.bfloat16)
    assert same is model and {p.dtype for p in same.parameters()} == {torch.bfloat16}
    assert same.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(same.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("installed", [True, False])
def test_another_device_is_named_to_transformers_where_it_can_load_to_it(
    installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without accelerate it cannot: then the model is loaded on the CPU and moved."""
    from transformers import AutoModelForCausalLM

    random_model("qwen2").save_pretrained(tmp_path)
    asked = {}

    def loading(path: str, **arguments: Any) -> Any:
        asked.update(arguments)
        raise OSError("heard")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    with pytest.raises(ModelError, match="heard"):
        load_model(tmp_path, device="cuda:1")
    assert asked.get("device_map") == ({"": "cuda:1"} if installed else None)


@pytest.mark.gpu
def test_a_model_is_loaded_onto_the_gpu(tmp_path: Path) -> None:
    random_model("gemma3_text").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.bfloat16, device="cuda")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}


# --- the page -----------------------------------------------------------------------------------------------------


def rows_of_the_matrix() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").split("## What is supported")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_support_matrix_has_the_families_that_the_code_has() -> None:
    assert {row[1].strip("`"): row[0] for row in rows_of_the_matrix()} == SUPPORTED


def test_each_family_of_the_matrix_is_tested() -> None:
    assert {settings["model_type"] for settings in ARCHITECTURES.values()} == set(SUPPORTED)


def test_the_page_names_the_rope_types_and_the_options_that_are_refused() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in ROPE_TYPES)
    for *_, message in OPTIONS:
        word = re.sub(r"rope type |type |'", "", message)
        assert f"`{word}`" in text, word


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_too_large_for_the_gpu_says_what_it_takes(
    loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("qwen2")
    numbers = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 3 * 2**30))
    monkeypatch.setattr(type(model), "to", full)
    if not loaded:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(ModelError) as caught:
        load_model(model if loaded else tmp_path, torch.float32, device="cuda")
    size = f"{numbers * 4 / 2**30:.1f} GiB in float32"
    assert size in str(caught.value) and "1.0 of 3.0 GiB of cuda are free" in str(caught.value)
    assert "bfloat16 takes half" in str(caught.value)


def test_numbers_are_looked_at_without_a_copy() -> None:
    many = torch.ones(2**16)
    assert most_allocated(lambda: is_finite(many)) < 2**10
    assert is_finite(torch.arange(3)) and is_finite(torch.empty(0)) and not is_finite(torch.tensor(torch.inf))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite_are_refused_by_name(dtype: torch.dtype, value: float) -> None:
    model = random_model("qwen2").to(dtype)
    model.model.embed_tokens.weight.data[3, 1] = torch.finfo(dtype).max  # which is finite
    load_model(model, dtype)
    model.model.norm.weight.data[-1] = value
    with pytest.raises(ModelError, match=r"the weights model\.norm\.weight hold NaN or infinity"):
        load_model(model, dtype)
