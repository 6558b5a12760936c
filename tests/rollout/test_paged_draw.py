"""Drawing on the device: the kernels against the reference in PyTorch, and that against the sampler of the CPU.

Where there is a CUDA device the kernels run on it, compiled; elsewhere Triton interprets them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from dapo.rollout.engine import Sampling  # noqa: E402
from dapo.rollout.native.paged import draw_kernels  # noqa: E402
from dapo.rollout.native.paged.draw import draw, draw_reference  # noqa: E402
from dapo.rollout.native.rows import Rows  # noqa: E402
from dapo.rollout.native.sampler import (  # noqa: E402
    ROWS_AT_ONCE,
    RowSettings,
    sample,
    thresholds,
    top_logprobs,
    uniforms,
)

ALMOST_ONE = 1 - 2**-53
INF = math.inf
PLAIN = Sampling(1.0, 1)
EVERY_KIND = [
    PLAIN,
    Sampling(0.0, 1),
    Sampling(0.6, 1),
    Sampling(2.0, 1),
    Sampling(1.0, 1, top_k=1),
    Sampling(1.0, 1, top_k=5),
    Sampling(1.0, 1, top_k=10_000),
    Sampling(1.0, 1, top_p=0.01),
    Sampling(0.8, 1, top_p=0.9),
    Sampling(1.0, 1, min_p=0.07),
    Sampling(1.0, 1, min_p=1.0),
    Sampling(0.7, 1, top_k=20, top_p=0.8, min_p=0.04),
    Sampling(1.5, 1, top_k=6, top_p=0.95),
    Sampling(0.0, 1, top_k=3, top_p=0.9),
]
# vocabulary and block: one block with room to spare, several and a last one that is not full, many
SIZES = [(7, draw_kernels.BLOCK), (1000, 128), (5000, draw_kernels.BLOCK), (5000, 1024)]

Drawn = tuple[torch.Tensor, torch.Tensor]


def _kernel(
    logits: torch.Tensor, uniform: torch.Tensor, settings: list[Sampling], truncate: bool = True, block: int = 16
) -> Drawn:
    rows = RowSettings.of(settings, DEVICE)
    tokens, logprobs = draw_kernels.draw(logits.to(DEVICE), uniform.to(DEVICE), rows, truncate=truncate, block=block)
    return tokens.cpu(), logprobs.cpu()


def _reference(logits: torch.Tensor, uniform: torch.Tensor, settings: list[Sampling], truncate: bool = True) -> Drawn:
    return draw_reference(logits, uniform, RowSettings.of(settings), truncate=truncate)


def _sampler(logits: torch.Tensor, uniform: torch.Tensor, settings: list[Sampling]) -> Drawn:
    return sample(logits.clone(), uniform, RowSettings.of(settings), truncate=True)


def _assert_same(found: Drawn, expected: Drawn) -> None:
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.float32
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=1e-6, equal_nan=True)


def _uniform(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _normal(rows: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("vocabulary", "block"), SIZES)
def test_the_kernels_draw_what_the_reference_draws(vocabulary: int, block: int) -> None:
    logits = _normal(len(EVERY_KIND), vocabulary, seed=vocabulary + block)
    uniform = uniforms(block, len(EVERY_KIND))
    _assert_same(_kernel(logits, uniform, EVERY_KIND, block=block), _reference(logits, uniform, EVERY_KIND))


def test_without_truncation_the_kernels_leave_top_k_and_its_like_aside() -> None:
    logits, uniform = _normal(len(EVERY_KIND), 50), uniforms(1, len(EVERY_KIND))
    bare = [Sampling(s.temperature, 1) for s in EVERY_KIND]
    found = _kernel(logits, uniform, EVERY_KIND, truncate=False)
    _assert_same(found, _kernel(logits, uniform, bare))
    _assert_same(found, _reference(logits, uniform, EVERY_KIND, truncate=False))


@pytest.mark.parametrize("vocabulary", [7, 1000, 5000])
def test_the_reference_draws_what_the_sampler_draws(vocabulary: int) -> None:
    settings = EVERY_KIND * 10
    logits, uniform = _normal(len(settings), vocabulary), uniforms(3, len(settings))
    _assert_same(_reference(logits, uniform, settings), _sampler(logits, uniform, settings))


def test_tokens_that_tie_with_a_threshold_stay_and_greedy_takes_the_first() -> None:
    logits = _normal(len(EVERY_KIND), 90).mul(0.5).round()  # some 10 values, each many times
    uniform = uniforms(5, len(EVERY_KIND))
    expected = _sampler(logits, uniform, EVERY_KIND)
    _assert_same(_reference(logits, uniform, EVERY_KIND), expected)
    _assert_same(_kernel(logits, uniform, EVERY_KIND), expected)
    tied = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -0.0, 0.0]]).repeat(3, 1)
    top_two = [Sampling(1.0, 1, top_k=2), Sampling(0.0, 1), Sampling(1.0, 1, top_k=5)]  # 4 stay; greedy; all stay
    tokens, logprobs = _kernel(tied, _uniform(ALMOST_ONE, 0.5, ALMOST_ONE), top_two, block=4)
    assert tokens.tolist() == [4, 1, 6]
    assert float(logprobs[0]) == pytest.approx(-math.log(3 + math.e), abs=1e-6)
    greedy, _ = _kernel(torch.tensor([[1.0] * 3 + [5.0] * 6]), _uniform(0.9), [Sampling(0.0, 1)], block=4)
    assert greedy.tolist() == [3]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_search_ends_at_zeros_of_both_signs(top_k: int) -> None:
    """Negative and positive zero are equal numbers of different bits: ties, and a trap for a search over bits."""
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0, -1e-45, 1e-45]])
    settings = [Sampling(1.0, 1, top_k=top_k), Sampling(1.0, 1, top_p=0.2 * top_k)]
    uniform = _uniform(0.7, 0.7)
    found = _kernel(logits.repeat(2, 1), uniform, settings)
    if DEVICE == "cpu":  # a GPU may take the subnormal numbers for zeros
        _assert_same(found, _sampler(logits.repeat(2, 1), uniform, settings))
    assert bool(found[1].isfinite().all())


def test_minus_infinity_is_never_drawn_not_even_at_the_ends() -> None:
    logits = _normal(4, 70)
    logits[:, :20] = logits[:, 30:33] = logits[:, 36:52] = logits[:, 60:] = -INF  # whole blocks of 16, and parts
    uniform = _uniform(0.0, ALMOST_ONE, 0.37, 0.71)
    for settings in ([PLAIN] * 4, [Sampling(1.0, 1, top_k=69)] * 4, [Sampling(0.5, 1, top_p=0.999999)] * 4):
        found = _kernel(logits, uniform, settings)
        _assert_same(found, _reference(logits, uniform, settings))
        assert bool(logits.gather(1, found[0][:, None]).isfinite().all())
    assert _kernel(logits, uniform, [PLAIN] * 4)[0].tolist()[:2] == [20, 59]


def test_one_dominating_token_is_drawn() -> None:
    logits = torch.zeros(4, 60)
    logits[:, 37] = 200.0
    uniform = _uniform(1e-9, 0.5, ALMOST_ONE, 0.0)
    settings = [PLAIN, Sampling(1.0, 1, top_p=0.5), PLAIN, Sampling(0.0, 1)]
    tokens, logprobs = _kernel(logits, uniform, settings)
    assert tokens.tolist() == [37] * 4
    assert logprobs.tolist() == [0.0] * 4


def test_the_ends_of_the_uniform_numbers() -> None:
    logits = _normal(2, 100)
    found = _kernel(logits, _uniform(0.0, ALMOST_ONE), [PLAIN] * 2)
    assert found[0].tolist() == [0, 99]
    _assert_same(found, _reference(logits, _uniform(0.0, ALMOST_ONE), [PLAIN] * 2))


def test_equal_tokens_are_counted_exactly_across_blocks() -> None:
    """Of 128 equal tokens number n has [n/128, (n+1)/128), all exact: both ends of the first of each block of 16."""
    firsts = [*range(0, 128, 16), 127]
    uniform = _uniform(*[n / 128 for n in firsts], *[np.nextafter((n + 1) / 128, 0) for n in firsts])
    logits = torch.zeros(len(uniform), 130)
    logits[:, 128:] = -INF
    tokens, logprobs = _kernel(logits, uniform, [PLAIN] * len(uniform))
    assert tokens.tolist() == firsts * 2
    torch.testing.assert_close(logprobs, torch.full((len(uniform),), -math.log(128)))


def test_a_row_that_is_not_finite_says_so_and_harms_no_other() -> None:
    kinds = [PLAIN, Sampling(0.0, 1), Sampling(0.7, 1, top_k=4, top_p=0.8, min_p=0.04)]
    settings = [kind for kind in kinds for _ in range(4)]
    logits, uniform = _normal(len(settings), 40), uniforms(2, len(settings))
    sound = _kernel(logits, uniform, settings)
    spoilt = logits.clone()
    spoilt[0::4, 3] = math.nan
    spoilt[1::4] = -INF
    spoilt[2::4, 39] = INF
    found = _kernel(spoilt, uniform, settings)
    for tokens, logprobs in (found, _reference(spoilt, uniform, settings)):
        assert bool(((tokens >= 0) & (tokens < 40)).all())
        assert bool(logprobs.view(-1, 4)[:, :3].isnan().all())
    assert torch.equal(found[0][3::4], sound[0][3::4])
    assert torch.equal(found[1][3::4], sound[1][3::4])


def test_a_row_of_nan_alone_yields_a_token_in_range() -> None:
    settings = [PLAIN, Sampling(0.0, 1), Sampling(1.0, 1, top_k=3, top_p=0.5, min_p=0.1)]
    tokens, logprobs = _kernel(torch.full((3, 20), math.nan), _uniform(0.0, 0.5, ALMOST_ONE), settings)
    assert bool(((tokens >= 0) & (tokens < 20)).all()) and bool(logprobs.isnan().all())


def test_a_row_comes_out_the_same_alone_bit_for_bit() -> None:
    settings = [PLAIN, Sampling(0.0, 1), Sampling(0.8, 1, top_k=9), Sampling(1.0, 1, top_p=0.9, min_p=0.01)]
    logits, uniform = _normal(4, 200), uniforms(8, 4)
    tokens, logprobs = _kernel(logits, uniform, settings, block=64)
    for i, one in enumerate(settings):
        token, logprob = _kernel(logits[i : i + 1].clone(), uniform[i : i + 1], [one], block=64)
        assert torch.equal(token, tokens[i : i + 1]) and torch.equal(logprob, logprobs[i : i + 1])


def test_the_logits_are_kept_and_no_rows_are_no_trouble() -> None:
    settings = [Sampling(0.5, 1), Sampling(2.0, 1, top_k=3)]
    logits, uniform = _normal(2, 30), uniforms(4, 2)
    before = logits.clone()
    found = draw(logits, uniform, RowSettings.of(settings), truncate=True)
    _assert_same(found, _kernel(logits, uniform, settings))
    assert torch.equal(logits, before)
    for empty in (_kernel(logits[:0], uniform[:0], []), _reference(logits[:0], uniform[:0], [])):
        assert [part.shape for part in empty] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("logits", "uniform", "fault"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), uniforms(0, 2), "bfloat16"),
        (torch.zeros(3, 2).T, uniforms(0, 2), "contiguous"),
        (torch.zeros(3), uniforms(0, 3), "contiguous"),
        (torch.zeros(2, 3), uniforms(0, 2).float(), "float64"),
        (torch.zeros(2, 3), uniforms(0, 3), "float64"),
    ],
)
def test_tensors_of_the_wrong_kind_are_refused(logits: torch.Tensor, uniform: torch.Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        draw(logits, uniform, RowSettings.of([PLAIN] * len(logits)), truncate=False)


TWELVE = _normal(1, 12, scale=1.2, seed=12)


def _chi_square(uniform: torch.Tensor, temperature: float = 1.0) -> float:
    """Of the tokens drawn from ``TWELVE`` by the reference, against its softmax at temperature 1."""
    count = len(uniform)
    tokens, _ = _reference(TWELVE.repeat(count, 1), uniform, [Sampling(temperature, 1)] * count, truncate=False)
    expected = torch.softmax(TWELVE[0].double(), 0) * count
    return float(((torch.bincount(tokens, minlength=12) - expected) ** 2 / expected).sum())


def test_frequencies_pass_a_chi_square_test_that_a_small_bias_fails() -> None:
    """20,000 draws; the 99.9% point of chi-square with 11 degrees of freedom is 31.3."""
    uniform = uniforms(21, 20_000)
    assert _chi_square(uniform) < 31.3
    assert _chi_square(uniform, temperature=1.1) > 31.3
    assert _chi_square(uniform**1.1) > 31.3


def test_the_kernels_divide_the_unit_interval_as_the_softmax_does() -> None:
    """At n numbers evenly apart, every token must come n p times to within one: sharper than any random draw."""
    count = 40
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, _ = _kernel(TWELVE.repeat(count, 1), uniform, [PLAIN] * count, truncate=False, block=4)
    expected = torch.softmax(TWELVE[0].double(), 0) * count
    assert float((torch.bincount(tokens, minlength=12) - expected).abs().max()) < 1
    assert tokens.tolist() == sorted(tokens.tolist())


def _kept_by_definition(z: np.ndarray, one: Sampling, top_p: float) -> np.ndarray:
    """Which tokens stay, token by token from the definition; z in float64."""
    kept = np.ones(len(z), dtype=bool)
    if one.top_k:
        kept &= np.array([np.sum(z > mine) < one.top_k for mine in z])  # fewer than k are better
    if top_p < 1:
        mass = np.where(kept, np.exp(z - z.max()), 0)
        kept &= np.array([mass[z > mine].sum() < top_p * mass.sum() for mine in z])  # the better ones do not reach p
    if one.min_p:
        kept &= z - z.max() >= math.log(one.min_p) - 1e-6
    return kept | (z == z.max())


@st.composite
def _rows(draw_from: st.DrawFn) -> tuple[list[float], float, Sampling]:
    value = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-INF, 0.0, 1.0, 1.5]))
    logits = draw_from(st.lists(value, min_size=1, max_size=40).filter(lambda row: max(row) > -INF))
    uniform = draw_from(st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, ALMOST_ONE])))
    one = Sampling(
        draw_from(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        1,
        top_p=draw_from(st.sampled_from([1.0, 0.0, 0.3, 0.9, 0.999])),
        top_k=draw_from(st.sampled_from([0, 1, 2, 7, 50])),
        min_p=draw_from(st.sampled_from([0.0, 0.02, 0.3])),
    )
    return logits, uniform, one


def _check(found: Drawn, logits: list[float], one: Sampling) -> None:
    token, logprob = int(found[0]), float(found[1])
    z = (np.array(logits, dtype=np.float32) / np.float32(one.temperature or 1.0)).astype(np.float64)
    assert 0 <= token < len(z)
    if one.temperature == 0:
        assert token == int(z.argmax())
    fits = []
    # rounding decides whether a prefix of exactly that mass reaches p: either answer is right
    for top_p in {one.top_p, one.top_p * (1 - 1e-6), one.top_p * (1 + 1e-6) if one.top_p < 1 else 1.0}:
        kept = _kept_by_definition(z, one, top_p)
        total = np.log(np.exp(z[kept] - z.max()).sum())
        fits.append(bool(kept[token]) and abs(z[token] - z.max() - total - logprob) < 1e-5)
    assert any(fits) and logits[token] > -INF


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
@given(_rows())
def test_the_reference_draws_kept_tokens_at_their_log_softmax(row: tuple[list[float], float, Sampling]) -> None:
    logits, uniform, one = row
    _check(_reference(torch.tensor([logits]), _uniform(uniform), [one]), logits, one)


@hypothesis_settings(max_examples=20, deadline=None, derandomize=True)
@given(_rows())
def test_the_kernels_draw_kept_tokens_at_their_log_softmax(row: tuple[list[float], float, Sampling]) -> None:
    logits, uniform, one = row
    _check(_kernel(torch.tensor([logits]), _uniform(uniform), [one]), logits, one)


def test_the_most_likely_tokens_are_those_of_a_sort_lowest_id_first() -> None:
    count, k = ROWS_AT_ONCE + 3, 8
    logits = _normal(count, 60).mul(2).round().div(2)  # ties
    logits[:, 5:30] = -INF
    logits[:, 40], logits[:, 41] = 0.0, -0.0
    settings = [Sampling((0.0, 0.5, 1.0)[i % 3], 1, top_k=2, top_logprobs=k) for i in range(count)]
    ids, logprobs = top_logprobs(logits, RowSettings.of(settings), k)
    assert ids.shape == logprobs.shape == (count, k)
    scaled = logits / torch.tensor([one.temperature or 1.0 for one in settings])[:, None]
    expected = torch.log_softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == expected.indices[:, :k].tolist()
    torch.testing.assert_close(logprobs, expected.values[:, :k], atol=2e-6, rtol=1e-6)


# ---- on a GPU, at the size of a real step


@pytest.mark.gpu
@pytest.mark.parametrize("truncate", [False, True])
def test_a_whole_step_agrees_with_the_reference_on_the_gpu(truncate: bool) -> None:
    """Tokens may differ where the uniform number is within 3e-6 of every border between them, and there alone."""
    count, vocabulary, chunk = 1024, 151_936, 64
    torch.manual_seed(0)
    logits = torch.randn(count, vocabulary, device=DEVICE) * 4
    uniform = uniforms(1, count).to(DEVICE)
    settings = [EVERY_KIND[i % len(EVERY_KIND)] for i in range(count)]
    rows = RowSettings.of(settings, DEVICE)
    tokens, logprobs = draw(logits, uniform, rows, truncate=truncate)
    differ = 0
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        mine = RowSettings.of(settings[part], DEVICE)
        expected, expected_logprobs = draw_reference(logits[part], uniform[part], mine, truncate=truncate)
        same = tokens[part] == expected
        assert float((logprobs[part] - expected_logprobs)[same].abs().max()) < 1e-5
        for i in (~same).nonzero()[:, 0].tolist():
            differ += 1
            first, last = sorted((int(tokens[start + i]), int(expected[i])))
            for border in (first, last - 1):
                reached = _mass_up_to(border, logits[start + i], settings[start + i], truncate)
                assert abs(reached - float(uniform[start + i])) < 3e-6
    print(f"{differ} of {count} tokens differ by rounding")
    assert differ <= count // 50


def _mass_up_to(token: int, logits: torch.Tensor, one: Sampling, truncate: bool) -> float:
    """The probability of all tokens of one row up to this one."""
    z = logits[None] / torch.tensor([one.temperature or 1.0], device=logits.device)
    if truncate:
        z = z.masked_fill(z < thresholds(z, RowSettings.of([one], logits.device))[:, None], -INF)
    return float(z[0].double().softmax(-1)[: token + 1].sum())


@pytest.mark.parametrize("stop_ids", [[], [3], [3, 7, 11]])
def test_tokens_are_written_down_by_the_kernel_as_by_rows(stop_ids: list[int]) -> None:
    """More rows than one program has; of each four one is idle, and only the first 70 are computed."""
    count, computed, longest = 75, 70, 5
    both = [Rows(count, longest, 1, stop_ids, DEVICE) for _ in range(2)]
    for rows in both:
        row = torch.arange(count, device=DEVICE)
        rows.lengths.copy_(torch.where(row % 4 == 1, -1, 10 + row))
        rows.limits.copy_(1 + row % longest)
    for step in range(longest):
        tokens = (torch.arange(computed, device=DEVICE) * 5 + step) % 13
        logprobs = -tokens.float() / 7
        both[0].record(tokens, logprobs)
        draw_kernels.record(both[1], tokens, logprobs)
        for name in ("lengths", "generated", "last_tokens"):
            assert torch.equal(*(getattr(rows, name) for rows in both)), name
    assert set(both[1].lengths.tolist()) == {-1, *(10 + row for row in range(computed, count) if row % 4 != 1)}
    written = torch.arange(longest + 1, device=DEVICE) < both[0].generated[:, None]
    for name in ("tokens", "logprobs"):
        by_rows, by_kernel = (getattr(rows, name) for rows in both)
        assert torch.equal(by_kernel, by_rows.where(written, 0)), name


@pytest.mark.gpu
def test_a_cuda_graph_holds_a_draw_and_follows_its_buffers() -> None:
    settings = EVERY_KIND * 3
    rows = RowSettings.of(settings, DEVICE)
    logits = torch.zeros(len(settings), 5000, device=DEVICE)
    uniform = torch.zeros(len(settings), dtype=torch.float64, device=DEVICE)
    draw(logits, uniform, rows, truncate=True)  # compiles
    top_logprobs(logits, rows, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw(logits, uniform, rows, truncate=True)
        best = top_logprobs(logits, rows, 5)
    for seed in range(3):
        logits.copy_(_normal(len(settings), 5000, seed=seed))
        uniform.copy_(uniforms(seed, len(settings)))
        graph.replay()
        for found, expected in zip(drawn, draw(logits, uniform, rows, truncate=True), strict=True):
            assert torch.equal(found, expected)
        for found, expected in zip(best, top_logprobs(logits, rows, 5), strict=True):
            assert torch.equal(found, expected)
