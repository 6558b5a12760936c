"""The log-prob and entropy operation against the formula written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from dapo.model.forward import Head, products_of
from dapo.model.head import for_chunks, token_logprobs


def plain(hidden, head, targets, temperature):
    """The same numbers from whole logits, by autograd."""
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make(rows, vocabulary=11, width=5, dtype=torch.float64, bias=True, softcap=None, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    head = Head(draw(vocabulary, width), draw(vocabulary) if bias else None, softcap, scale)
    return draw(rows, width), head, torch.randint(vocabulary, (rows,), generator=generator)


VARIANTS = [
    {"bias": False},
    {"bias": True},
    {"bias": True, "scale": 0.25},
    {"bias": False, "softcap": 3.0},
    {"bias": True, "softcap": 2.0, "scale": 1.5},
]


def test_temperature_is_applied_once_failures_12():
    """Logits [2, 0] at T 0.5, token 0: -0.01815, and not the -0.12693 of T 1."""
    head = Head(torch.tensor([[2.0], [0.0]]))
    logprobs, entropy = token_logprobs(torch.ones(1, 1), head, torch.tensor([0]), 0.5)
    assert logprobs.item() == pytest.approx(-0.01815, abs=5e-6)
    p = 1 / (1 + math.exp(-4))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows, chunk", [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (9, 4), (9, 1), (9, 100)])
def test_parity_with_the_formula_at_chunk_borders(variant, rows, chunk):
    results = []
    for function in (plain, lambda *args: token_logprobs(*args, chunk_tokens=chunk)):
        hidden, head, targets = make(rows, **variant)
        logprobs, entropy = function(hidden, head, targets, 0.7)
        weights = torch.arange(1, rows + 1, dtype=torch.float64)
        (logprobs @ weights + (entropy**2) @ weights).backward()
        grads = [t.grad for t in (hidden, head.weight, head.bias) if t is not None]
        results.append([logprobs, entropy, *grads])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)], ids=["logprob", "entropy", "both"])
def test_gradcheck(variant, outputs):
    hidden, head, targets = make(5, **variant)

    def function(hidden, weight, bias):
        out = token_logprobs(hidden, Head(weight, bias, head.softcap, head.scale), targets, 1.3, chunk_tokens=2)
        return tuple(out[i] for i in outputs)

    assert gradcheck(function, (hidden, head.weight, head.bias))


def test_agrees_with_the_logits_the_engine_samples_from():
    hidden, head, targets = make(6, dtype=torch.float32, softcap=4.0, scale=0.5)
    expected = torch.log_softmax(head.logits(hidden) / 0.8, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(token_logprobs(hidden, head, targets, 0.8)[0], expected, rtol=1e-5, atol=1e-6)


def test_no_rows():
    hidden, head, targets = make(0, dtype=torch.float32)
    logprobs, entropy = token_logprobs(hidden, head, targets, 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 5)
    assert not head.weight.grad.any() and not head.bias.grad.any()


def test_only_the_gradients_asked_for():
    hidden, head, targets = make(3, dtype=torch.float32)
    frozen = Head(head.weight.detach(), head.bias.detach())
    token_logprobs(hidden, frozen, targets, 1.0)[0].sum().backward()
    assert hidden.grad is not None and frozen.weight.grad is None
    with torch.no_grad():
        assert not token_logprobs(hidden, head, targets, 1.0)[0].requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_hidden_states_are_widened_before_the_head(autocast):
    """The only rounding is that of the hidden states themselves, also under autocast."""
    hidden, head, targets = make(64, vocabulary=50, width=32, dtype=torch.float32)
    narrow = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs, entropy = token_logprobs(narrow, head, targets, 1.0, chunk_tokens=7)
    expected = plain(narrow.detach().float(), head, targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert narrow.grad.dtype == torch.bfloat16 and head.weight.grad.dtype == torch.float32


def test_bfloat16_weight_gradient_is_summed_in_float32():
    """4,096 equal contributions: a bfloat16 sum would stop growing at 256 times one of them."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    token_logprobs(hidden, Head(weight), torch.zeros(4096, dtype=torch.long), 1.0, chunk_tokens=1)[0].sum().backward()
    assert weight.grad.flatten().tolist() == [2048.0, -2048.0]


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_logits_never_exist_whole_failures_99():
    rows, vocabulary, chunk = 512, 300, 16
    hidden, head, targets = make(rows, vocabulary=vocabulary, width=8, dtype=torch.float32, softcap=5.0)
    kept = []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        logprobs, entropy = token_logprobs(hidden, head, targets, 1.0, chunk_tokens=chunk)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.elements == chunk * vocabulary  # above R x d = 4,096, far below R x V = 153,600
    assert max(kept) == rows * 8


@pytest.mark.parametrize("temperature", [0.0, -0.1, math.nan])
def test_temperature_must_be_positive(temperature):
    hidden, head, targets = make(2)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(hidden, head, targets, temperature)


def test_shapes_and_chunk_size_are_checked():
    hidden, head, targets = make(2)
    with pytest.raises(ValueError, match="chunk_tokens"):
        token_logprobs(hidden, head, targets, 1.0, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"targets \[R\]"):
        token_logprobs(hidden, head, targets[:1], 1.0)


def test_bfloat16_products_round_their_inputs_and_nothing_else():
    """Output and sums stay float32: the same numbers as from inputs that had been rounded before."""
    hidden, head, targets = make(40, vocabulary=300, width=64, dtype=torch.float32, bias=True)

    def rounded(tensor):
        return tensor.detach().to(torch.bfloat16).float().requires_grad_()

    narrow = token_logprobs(hidden, head, targets, 0.9, product_dtype=torch.bfloat16)
    exact = Head(rounded(head.weight), head.bias)
    wide = token_logprobs(rounded(hidden), exact, targets, 0.9)
    for got, expected in zip(narrow, wide, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(narrow[0], token_logprobs(hidden, head, targets, 0.9)[0], atol=1e-4)  # it was rounded


def test_gradients_of_bfloat16_products_are_close():
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head, targets = make(40, vocabulary=300, width=64, dtype=torch.float32, bias=False)
        token_logprobs(hidden, head, targets, 0.9, product_dtype=dtype)[0].sum().backward()
        gradients.append((hidden.grad, head.weight.grad))
    for wide, narrow in zip(*gradients, strict=True):
        assert narrow.dtype == torch.float32
        assert float((narrow - wide).norm() / wide.norm()) < 0.01


def test_the_precision_of_other_products_is_as_it_was():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), products_of(torch.bfloat16):
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        1 / 0  # noqa: B018
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    with products_of(torch.float32):
        assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_head_of_bfloat16_weights_loses_nothing_in_float32():
    hidden, head, _ = make(5, vocabulary=30, width=16, dtype=torch.bfloat16)
    assert torch.equal(head.in_float32().logits(hidden), head.logits(hidden))
    assert head.logits(hidden).dtype == torch.float32


def test_the_precision_of_other_products_is_as_it_was_whoever_comes_last() -> None:
    """Engine and trainer may be inside at once, and leave in either order."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    first, second = products_of(torch.bfloat16), products_of(torch.bfloat16)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert matmul.fp32_precision == "bf16"
    second.__exit__(None, None, None)
    assert matmul.fp32_precision == before


@pytest.mark.parametrize("product_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [False, True])
def test_chunks_with_a_backward_pass_each_add_up_in_the_weights_gradient(before, product_dtype):
    hidden, head, targets = make(9, dtype=torch.float32, softcap=2.0)
    results = []
    for chunked in (False, True):
        hidden.grad = head.bias.grad = None
        head.weight.grad = torch.ones_like(head.weight) if before else None
        use = for_chunks(head, hidden, product_dtype) if chunked else head
        kept, found = head.weight.grad, []
        for rows in (slice(0, 4), slice(4, 8), slice(8, 9)) if chunked else (slice(0, 9),):
            logprobs, entropy = token_logprobs(hidden[rows], use, targets[rows], 0.7, product_dtype=product_dtype)
            (logprobs.sum() + entropy.square().sum()).backward()
            found.append(torch.stack([logprobs, entropy]))
        if chunked:
            assert head.weight.grad is kept
        results.append([torch.cat(found, 1), hidden.grad, head.bias.grad, head.weight.grad])
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient_from_chunks():
    hidden, head, targets = make(3, dtype=torch.float32)
    head = for_chunks(Head(head.weight.detach(), head.bias), hidden, torch.float32)
    token_logprobs(hidden, head, targets, 1.0)[0].sum().backward()
    assert head.weight.grad is head.gradient is None and head.bias.grad.any()
