"""The native engine against Transformers' own ``generate`` and forward pass, for every supported architecture."""

from __future__ import annotations

import copy

import pytest
import torch

from dapo.model.loading import copy_model, load_model
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.decoder import Decoder
from helpers import ARCHITECTURES, VOCAB, random_model

PROMPT_LENGTHS = (1, 3, 7, 20, 33)
NEW_TOKENS = 24
GAP = 1e-4


def _prompts(seed: int = 3) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]


def _decode(model, prompts, seeds=(0,), temperature=0.0, slots=4, stop=(1,), dtype=torch.float32, **options):
    decoder = Decoder(
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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_generate(name: str, deterministic: bool) -> None:
    """Equal up to a first place where the two best logits are closer than 1e-4; such places are counted."""
    model = random_model(name)
    prompts = _prompts()
    samples = _decode(model, prompts, deterministic=deterministic)
    ties = 0
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )[0, len(prompt) :].tolist()
        ours = samples[i, 0].token_ids.tolist()
        place = _first_difference(ours, out)
        if place is None:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ours[:place]]])).logits[0, -1]
        best = logits.topk(2).values
        assert float(best[0] - best[1]) < GAP, f"{name}, prompt {i}: tokens differ at {place}: {ours} against {out}"
        ties += 1
    assert ties <= 1, f"{name}: {ties} of {len(prompts)} responses met a tie"


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
