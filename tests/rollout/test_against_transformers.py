"""The native engine against Transformers' own ``generate`` and forward pass, for every supported architecture.

``ARCHITECTURES`` has each with its usual options; the variants here have the others that docs/models.md names.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

from dapo.model.loading import copy_model, load_model
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.slots import slot_decoder
from helpers import ARCHITECTURES, VOCAB, random_model

PROMPT_LENGTHS = (1, 3, 7, 20, 33)
NEW_TOKENS = 24
GAP = 1e-4

_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10_000.0,
}
_FULL, _WINDOW = "full_attention", "sliding_attention"

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen2, window in every layer": ("qwen2-sliding", {"max_window_layers": 0, "sliding_window": 3}),
    "qwen2, window in the layers named": ("qwen2-sliding", {"layer_types": [_WINDOW, _FULL, _WINDOW]}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": _YARN}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "llama, linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama, yarn, mscale": ("llama", {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window of two": ("mistral", {"sliding_window": 2}),
    "mistral, yarn": ("mistral", {"rope_parameters": _YARN}),
    "gemma, linear": ("gemma", {"rope_parameters": _LINEAR}),
    "gemma2, no soft-capping": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, scale of another width": ("gemma2", {"query_pre_attn_scalar": 3}),
    "gemma2, window last": ("gemma2", {"layer_types": [_FULL, _FULL, _WINDOW], "sliding_window": 4}),
    "gemma3, rope of long ones": (
        "gemma3_text",
        {
            "layer_types": [_WINDOW, _WINDOW, _FULL],
            "rope_parameters": {
                _WINDOW: {"rope_type": "default", "rope_theta": 100.0},
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            },
        },
    ),
    "gemma3, head soft-capped": ("gemma3_text", {"final_logit_softcapping": 1.0}),
    "gemma3, scale of another width": ("gemma3_text", {"query_pre_attn_scalar": 3}),
    "gpt2, attention not scaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, relu": ("gpt2", {"activation_function": "relu"}),
}
"""Options that change what the same weights give."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "mistral, tied, wide heads": ("mistral", {"tie_word_embeddings": True, "head_dim": 16}),
    "gemma, untied, biases": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2, untied, biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3, untied, biases": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3, every sixth layer full": ("gemma3_text", {"num_hidden_layers": 7}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2, narrow inside": ("gpt2", {"n_inner": 48}),
}
"""Options that change which weights there are."""
VARIANTS = OPTIONS | SHAPES


def _variant(name: str) -> Any:
    """A random model whose biases and norms are random, too: fresh ones are zeros and ones."""
    architecture, changes = VARIANTS[name]
    model = random_model(architecture, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def _prompts(seed: int = 3) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]


def _decode(model, prompts, seeds=(0,), temperature=0.0, slots=4, stop=(1,), dtype=torch.float32, **options):
    decoder = slot_decoder(
        copy_model(load_model(copy.deepcopy(model)), dtype),
        stop,
        max_sequence_tokens=64,
        max_concurrent_samples=slots,
        **options,
    )
    for i, prompt in enumerate(prompts):
        decoder.submit(0, Request(i, prompt, tuple(seeds), Sampling(temperature, NEW_TOKENS)))
    samples = []
    while decoder.busy:
        samples += [s for _, s in decoder.step()]
    return {(s.request_id, s.index): s for s in samples}


def _first_difference(ours: list[int], theirs: list[int]) -> int | None:
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probabilities_equal_the_forward_pass(name: str) -> None:
    """Sampled at temperature 0.7, against float32 log-softmax of the plain model's logits over 0.7."""
    model = random_model(name)
    prompts = _prompts()
    samples = _decode(model, prompts, seeds=(1, 2, 3), temperature=0.7)
    assert len(samples) == 3 * len(prompts)
    for (i, _), sample in samples.items():
        ids = torch.tensor([[*prompts[i], *sample.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompts[i]) - 1 : -1]
        expected = torch.log_softmax(logits.float() / 0.7, -1).gather(1, ids[0, len(prompts[i]) :, None])[:, 0]
        difference = (torch.from_numpy(sample.logprobs) - expected).abs().max()
        assert float(difference) < 1e-4, f"{name}: {float(difference)}"


@pytest.mark.parametrize(
    ("name", "deterministic"), [*product(ARCHITECTURES, (False, True)), *((name, False) for name in VARIANTS)]
)
def test_greedy_tokens_and_log_probabilities_equal_generate(name: str, deterministic: bool) -> None:
    """Up to a first place where the two best logits are closer than 1e-4; such places are counted."""
    model = random_model(name) if name in ARCHITECTURES else _variant(name)
    prompts = _prompts()
    samples = _decode(model, prompts, deterministic=deterministic)
    compared = ties = 0
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        theirs = out.sequences[0, len(prompt) :].tolist()
        ours = samples[i, 0].token_ids.tolist()
        place = _first_difference(ours, theirs)
        if place is not None:
            best = out.logits[place][0].topk(2).values
            assert float(best[0] - best[1]) < GAP, f"{name}, prompt {i}: tokens differ at {place}: {ours}, {theirs}"
            ties += 1
        equal = len(ours) if place is None else place
        expected = [float(out.logits[k][0].float().log_softmax(-1)[ours[k]]) for k in range(equal)]
        assert samples[i, 0].logprobs[:equal].tolist() == pytest.approx(expected, abs=1e-4), f"{name}, prompt {i}"
        compared += equal
    assert ties <= 1, f"{name}: {ties} of {len(prompts)} responses met a tie"
    assert compared >= NEW_TOKENS, f"{name}: only {compared} tokens before ties and ends"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_what_the_model_says(name: str) -> None:
    """Else the test above would show nothing about it."""
    model = _variant(name)
    plain = random_model(OPTIONS[name][0])
    plain.load_state_dict(model.state_dict())
    ids = torch.tensor([_prompts()[-1]])
    with torch.no_grad():
        assert float((model(ids).logits - plain(ids).logits).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_in_bfloat16_log_probabilities_are_near_those_of_the_same_weights(name: str) -> None:
    """The backbone rounds, the log-softmax does not. Weights as large as in practice; the helper's own are larger."""
    model = random_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    samples = _decode(model, _prompts(), seeds=(1, 2), temperature=0.7, dtype=torch.bfloat16)
    narrow = copy_model(model, torch.bfloat16).float()
    for (i, _), sample in samples.items():
        prompt = _prompts()[i]
        ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = torch.log_softmax(narrow(ids).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert float((torch.from_numpy(sample.logprobs) - expected).abs().mean()) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2"])
def test_a_sample_does_not_depend_on_its_neighbours(name: str, dtype: torch.dtype) -> None:
    """In deterministic mode the very bits of a sample are those of a run of its own."""
    model = random_model(name)
    prompts = _prompts()
    together = _decode(model, prompts, seeds=(5, 6), temperature=1.0, deterministic=True, dtype=dtype)
    for i, prompt in enumerate(prompts):
        alone = _decode(model, [prompt], seeds=(5, 6), temperature=1.0, deterministic=True, dtype=dtype)
        for index in (0, 1):
            assert alone[0, index].token_ids.tolist() == together[i, index].token_ids.tolist()
            assert alone[0, index].logprobs.tobytes() == together[i, index].logprobs.tobytes()
