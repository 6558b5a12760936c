"""The engine on a GPU against Transformers' own ``generate`` and forward pass, with a real model if there is one.

``DAPO_TEST_MODEL`` names its folder; without it the weights are random, in the shape of a model of 0.5 B parameters.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from dapo.model.loading import copy_model, load_model
from dapo.records import Sample
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.paged.build import paged_decoder

pytestmark = pytest.mark.gpu

PROMPTS, NEW_TOKENS, GAP, CLOSE = 64, 64, 1e-4, 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    """Float32, on the GPU, with Transformers' own attention."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    path = os.environ.get("DAPO_TEST_MODEL")
    if path:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    else:
        torch.manual_seed(0)
        loaded = AutoModelForCausalLM.from_config(
            Qwen2Config(
                vocab_size=151_936,
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            ),
            attn_implementation="sdpa",
        )
    loaded.generation_config.eos_token_id = None  # nothing stops a response, as in ours
    return loaded.to("cuda").eval()


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(100, 50_000, int(n)).tolist()) for n in rng.integers(20, 160, PROMPTS)]


def ours(model: Any, prompts: list[tuple[int, ...]], sampling: Sampling) -> dict[int, Sample]:
    twin = copy_model(model, torch.float32)
    decoder = paged_decoder(load_model(twin), (), max_sequence_tokens=256, max_concurrent_samples=64)
    for i, prompt in enumerate(prompts):
        decoder.submit(0, Request(i, prompt, (i,), sampling))
    out: dict[int, Sample] = {}
    while decoder.busy:
        out |= {sample.request_id: sample for _, sample in decoder.step()}
    return out


@torch.inference_mode()
def test_greedy_tokens_equal_generate_in_float32(model: Any, prompts: list[tuple[int, ...]]) -> None:
    samples = ours(model, prompts, Sampling(0.0, NEW_TOKENS, top_logprobs=2))
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device="cuda")
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device="cuda")
    out = model.generate(
        padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.0, pad_token_id=0
    )
    ties = 0
    for i in range(PROMPTS):
        theirs, sample = out[i, longest:].cpu().numpy(), samples[i]
        differ = np.flatnonzero(theirs != sample.token_ids)
        if len(differ):
            assert sample.top_logprobs is not None
            best, second = sample.top_logprobs[int(differ[0])]
            assert best - second < GAP, f"prompt {i}: another token where the gap is {best - second:.2e}"
            ties += 1
    print(f"{PROMPTS} prompts, {ties} ended by a tie")
    assert ties <= PROMPTS // 8


@torch.inference_mode()
def test_logprobs_equal_a_forward_pass_in_float32(model: Any, prompts: list[tuple[int, ...]]) -> None:
    samples = ours(model, prompts, Sampling(1.0, NEW_TOKENS))
    largest = 0.0
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([*prompt, *samples[i].token_ids.tolist()], device="cuda")
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float()
        wanted = torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None])[:, 0].cpu().numpy()
        largest = max(largest, float(np.abs(wanted - samples[i].logprobs).max()))
    print(f"largest difference {largest:.2e}")
    assert largest < CLOSE
