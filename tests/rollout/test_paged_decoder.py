"""The paged decoder's scheduling with a fake device, which holds token ids where a real one holds keys and values.

The fake draws each token from *all tokens that it finds through the block table*. So a page that is shared, copied,
released or handed on wrongly shows as a wrong response, not only as a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request, Sampling
from dapo.rollout.native import in_flight
from dapo.rollout.native.decoder import Decoder
from dapo.rollout.native.pages import BlockTables, PageAllocator, PageArray, minimum_pages, slots_of
from dapo.rollout.native.runner import Progress, Response, RowStart, Variant
from dapo.rollout.native.stopping import StopTexts

VOCABULARY = 50
STOP = 7
GARBAGE = -999


def next_token(context: Sequence[int], seed: int) -> int:
    """What the fake model says after ``context``."""
    state = seed & 0xFFFFFFFF
    for token in context:
        state = (state * 1_000_003 + token + 1) % 2**61
    return state % VOCABULARY


def expected(request: Request, index: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens and (not tokens or tokens[-1] != STOP):
        tokens.append(next_token([*request.prompt_ids, *tokens], request.seeds[index]))
    return tokens


class FakeDevice:
    """Rows and pages of token ids."""

    def __init__(self, rows: int, pages: int, page_tokens: int) -> None:
        self.rows = rows
        self.page_tokens = page_tokens
        self.pool = np.full((pages, page_tokens), GARBAGE)
        self.lengths = np.full(rows, -1)
        self.generated = np.zeros(rows, np.int64)
        self.starts: dict[int, RowStart] = {}
        self.last = np.zeros(rows, np.int64)
        self.tokens: dict[int, list[int]] = {}
        self.computed = 0
        self.steps = 0
        self.awake = True

    def rung(self, rows: int) -> int:
        return next(r for r in (1, 2, 4, 8, 16, 32, 64) if r >= rows)

    def prefill(self, prompts: Sequence[np.ndarray], pages: Sequence[PageArray]) -> list[int]:
        assert self.awake and len(prompts) == len(pages)
        for prompt, own in zip(prompts, pages, strict=True):
            slots = slots_of(own, len(prompt) - 1, self.page_tokens)
            assert (slots >= self.page_tokens).all(), "page 0 belongs to nobody"
            self.pool.reshape(-1)[slots] = prompt[:-1]
            self.computed += len(slots)
        return [len(prompt) for prompt in prompts]

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self.pool[targets] = self.pool[sources]

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            row = start.row
            assert self.lengths[row] < 0 and start.prompt == start.cached + 1
            self.starts[row], self.last[row], self.lengths[row] = start, start.last_token, start.cached
            self.tokens[row] = start.done.tokens.tolist()
            self.generated[row] = len(self.tokens[row])

    def stop(self, rows: Sequence[int]) -> None:
        self.lengths[list(rows)] = -1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            assert self.lengths[target] < 0
            self.starts[target], self.tokens[target] = self.starts.pop(source), self.tokens.pop(source)
            for state in (self.lengths, self.generated, self.last):
                state[target] = state[source]
            self.lengths[source] = -1

    def run(self, rows: int, steps: int, variant: Variant, table: np.ndarray) -> None:
        assert self.awake
        for _ in range(steps):
            for row in np.flatnonzero(self.lengths >= 0).tolist():
                assert row < rows, "a row in use is not computed"
                self._decode(row, table[row])
            self.steps += 1

    def _decode(self, row: int, table: np.ndarray) -> None:
        length = int(self.lengths[row])
        place = np.arange(length + 1)
        pages = table[place // self.page_tokens]
        assert pages.min() > 0, "a row has no page for a token"
        self.pool[pages[-1], length % self.page_tokens] = self.last[row]
        context = self.pool[pages, place % self.page_tokens].tolist()
        start = self.starts[row]
        token = next_token(context, start.seed)
        self.tokens[row].append(token)
        self.last[row] = token
        self.generated[row] += 1
        done = token == STOP or self.generated[row] >= start.sampling.max_tokens
        self.lengths[row] = -1 if done else length + 1

    def progress(self) -> Progress:
        return Progress(self.lengths.copy(), self.generated.copy())

    def fetch(self, rows: Sequence[int], counts: Sequence[int], top: int) -> Arrived:
        return Arrived([self.tokens[row][:count] for row, count in zip(rows, counts, strict=True)])

    def use_weights(self) -> None:
        pass

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True


class Arrived:
    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = [np.array(t, np.int32) for t in tokens]

    def result(self) -> list[Response]:
        return [Response(t, -np.arange(len(t), dtype=np.float32)) for t in self.tokens]


def make(rows: int, pages: int, page_tokens: int, max_sequence: int, **options: Any) -> tuple[Decoder, FakeDevice]:
    device = FakeDevice(rows, pages, page_tokens)
    decoder = Decoder(
        device,
        pages=pages,
        page_tokens=page_tokens,
        max_sequence_tokens=max_sequence,
        vocabulary=VOCABULARY,
        stop_token_ids=[STOP],
        **options,
    )
    return decoder, device


def drain(decoder: Decoder) -> list[tuple[int, Sample]]:
    out = []
    idle = 0
    while decoder.busy:
        new = decoder.step()
        idle = 0 if new else idle + 1
        assert idle < 500, "no progress"
        out += new
    return out


def check_answers(requests: Sequence[tuple[int, Request]], answers: Sequence[tuple[int, Sample]]) -> None:
    """Each sample exactly once, with the very tokens the fake model says."""
    wanted = {(key, r.id, i): expected(r, i) for key, r in requests for i in range(len(r.seeds))}
    got = {(key, s.request_id, s.index): s for key, s in answers}
    assert len(got) == len(answers) and got.keys() == wanted.keys()
    for place, sample in got.items():
        assert sample.token_ids.tolist() == wanted[place]
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == STOP else "length")
        np.testing.assert_array_equal(sample.logprobs, -np.arange(sample.length, dtype=np.float32))


def random_requests(rng: np.random.Generator, count: int, max_sequence: int) -> list[tuple[int, Request]]:
    out = []
    for i in range(count):
        prompt = int(rng.integers(1, max_sequence))
        limit = 1 if rng.random() < 0.2 else int(rng.integers(1, max_sequence - prompt + 1))
        seeds = tuple(rng.integers(0, 2**63, int(rng.integers(1, 6))).tolist())
        ids = tuple(rng.integers(0, VOCABULARY, prompt).tolist())
        out.append((int(rng.integers(3)), Request(i, ids, seeds, Sampling(1.0, limit))))
    return out


def test_every_request_is_answered_exactly_once_over_ten_thousand() -> None:
    """Small and large pools, one-token responses, limits, preemptions; requests arrive while others run."""
    rng = np.random.default_rng(0)
    preempted = total = 0
    while total < 10_000:  # 25 s
        page_tokens = int(rng.integers(1, 9))
        max_sequence = int(rng.integers(2, 40))
        least = minimum_pages(max_sequence, page_tokens)
        pages = int(rng.integers(least, 4 * least))
        rows = int(rng.integers(1, 33))
        stretch, prefill = int(rng.integers(1, 9)), int(rng.integers(1, 60))
        decoder, _ = make(rows, pages, page_tokens, max_sequence, stretch=stretch, prefill_tokens=prefill)
        requests = random_requests(rng, 250, max_sequence)
        answers = []
        for key, request in requests:
            decoder.check(request)
            decoder.submit(key, request)
            if rng.random() < 0.3 and decoder.busy:
                answers += decoder.step()
        answers += drain(decoder)
        check_answers(requests, answers)
        assert decoder._pages.free == pages - 1, "pages were lost"
        preempted += decoder.preemptions
        total += len(requests)
    assert preempted > 100


@pytest.mark.parametrize(("stretch", "seeds"), [(4, [13, 14, 15, 20]), (1, [])])
def test_numbers_of_samples_that_start_next_are_drawn_while_the_device_works(
    monkeypatch: pytest.MonkeyPatch, stretch: int, seeds: list[int]
) -> None:
    """Of the first four that wait here. A CPU has no such time."""
    drawn: list[int] = []
    monkeypatch.setattr(in_flight, "DRAWN_AHEAD", 4)
    monkeypatch.setattr(in_flight, "uniforms", lambda seed, count: drawn.append(seed))
    decoder, _ = make(3, 40, 4, 20, stretch=stretch)
    requests = [(0, Request(i, (5, 6), tuple(range(10 * i, 10 * i + 6)), Sampling(1.0, 12))) for i in (1, 2)]
    for key, request in requests:
        decoder.submit(key, request)
    answers = decoder.step()
    assert drawn == seeds
    check_answers(requests, answers + drain(decoder))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_cancelled_requests_leave_nothing_behind(data: st.DataObject) -> None:
    page_tokens = data.draw(st.integers(1, 5))
    max_sequence = data.draw(st.integers(2, 24))
    least = minimum_pages(max_sequence, page_tokens)
    pages = data.draw(st.integers(least, 3 * least))
    decoder, device = make(
        data.draw(st.integers(1, 8)), pages, page_tokens, max_sequence, stretch=data.draw(st.integers(1, 4))
    )
    requests = random_requests(np.random.default_rng(data.draw(st.integers(0, 999))), 12, max_sequence)
    for key, request in requests:
        decoder.submit(key, request)
    gone = data.draw(st.integers(0, 2))
    answers = []
    for _ in range(data.draw(st.integers(0, 12))):
        answers += decoder.step()
    decoder.cancel(lambda key, _: key == gone)
    answers = [a for a in answers if a[0] != gone]
    later = drain(decoder)
    assert all(key != gone for key, _ in later)
    check_answers([r for r in requests if r[0] != gone], answers + later)
    assert decoder._pages.free == pages - 1
    assert (device.lengths < 0).all()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_cancelled_samples_continue_from_their_drafts(data: st.DataObject) -> None:
    """In another decoder, after any number of stretches and preemptions, some of them under new weights."""
    page_tokens, max_sequence = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 24))
    least = minimum_pages(max_sequence, page_tokens)
    size = data.draw(st.integers(1, 8)), data.draw(st.integers(least, 3 * least)), page_tokens, max_sequence
    drawn = random_requests(np.random.default_rng(data.draw(st.integers(0, 999))), 12, max_sequence)
    requests = [(key, replace(request, seeds=request.seeds[:1])) for key, request in drawn]
    answers: list[tuple[int, Sample]] = []
    drafts: dict[int, Draft] = {}
    for version, steps in enumerate([*data.draw(st.lists(st.integers(0, 9), max_size=4)), 10**6]):
        decoder, device = make(*size, stretch=data.draw(st.integers(1, 4)))
        decoder.use_weights(version)
        came = {sample.request_id for _, sample in answers}
        left = [(key, request) for key, request in requests if request.id not in came]
        for key, request in left:
            ready = replace(request, drafts=(drafts[request.id],) if request.id in drafts else ())
            decoder.check(ready)
            decoder.submit(key, ready)
        before = len(answers)
        while decoder.busy and (steps := steps - 1) >= 0:
            answers += decoder.step()
        answers += decoder.finished()
        for _, draft in decoder.drafts():
            had = drafts[draft.request_id].versions if draft.request_id in drafts else ()
            assert draft.versions == had + (version,) * (len(draft.token_ids) - len(had))
            drafts[draft.request_id] = draft
        assert len(decoder.cancel(lambda key, request: True)) == len(left) - (len(answers) - before)
        assert not decoder.busy and decoder._pages.free == size[1] - 1 and (device.lengths < 0).all()
    check_answers(requests, answers)


def test_a_group_computes_its_prompt_once_and_shares_its_pages() -> None:
    decoder, device = make(rows=16, pages=200, page_tokens=4, max_sequence=60)
    request = Request(0, tuple(range(8, 8 + 30)), tuple(range(16)), Sampling(1.0, 20))
    decoder.submit(0, request)
    decoder.step()
    assert device.computed == 29
    # 7 full pages once, not 16 times; beyond them each sample has its own
    assert 200 - 1 - decoder._pages.free <= 7 + 16 * (1 + 20 // 4 + 1)
    check_answers([(0, request)], drain(decoder))


def test_new_weights_mark_later_tokens_and_prompts_are_computed_anew() -> None:
    decoder, device = make(rows=2, pages=100, page_tokens=4, max_sequence=60, stretch=4)
    request = Request(0, (8, 9, 10, 11, 12), tuple(range(100, 106)), Sampling(1.0, 40))
    decoder.submit(0, request)
    answers = decoder.step()
    decoder.use_weights(3)
    answers += drain(decoder)
    check_answers([(0, request)], answers)
    versions = {s.index: s.versions.tolist() for _, s in answers}
    for index in (0, 1):  # in flight when the weights changed
        n = len(versions[index])
        assert versions[index] == ([0] * 4 + [3] * (n - 4) if n > 4 else [0] * n)
    assert all(set(versions[index]) == {3} for index in range(2, 6))
    assert device.computed == 2 * 4


def test_the_youngest_is_preempted_and_the_oldest_never_starts_again() -> None:
    """15 pages of one token for two responses of 10 after a prompt of 2: they do not fit, and the second one leaves."""
    decoder, device = make(rows=2, pages=16, page_tokens=1, max_sequence=12, stretch=1)
    requests = [(0, Request(number, (8, 9), (seed,), Sampling(1.0, 10))) for number, seed in ((4, 1), (2, 3))]
    assert [len(expected(request, 0)) for _, request in requests] == [10, 10]  # neither stops early
    begun = noted_starts(device)
    for key, request in requests:
        decoder.submit(key, request)
    answers = drain(decoder)
    check_answers(requests, answers)
    assert decoder.preemptions >= 1 and [s.request_id for _, s in answers] == [4, 2]
    assert begun[:2] == [(1, 0), (3, 0)]
    assert len(begun) == 2 + decoder.preemptions and all(seed == 3 and had > 0 for seed, had in begun[2:])


def test_a_draining_tail_computes_fewer_rows() -> None:
    decoder, device = make(rows=8, pages=400, page_tokens=4, max_sequence=80, stretch=2)
    computed: list[int] = []
    run = device.run
    device.run = lambda rows, *rest: (computed.append(rows), run(rows, *rest))[1]  # type: ignore[method-assign]
    requests = [(0, Request(i, (8 + i,), (i,), Sampling(1.0, 60))) for i in range(8)]
    for key, request in requests:
        decoder.submit(key, request)
    check_answers(requests, drain(decoder))
    assert computed[0] == 8 and computed[-1] <= 2 and sorted(computed, reverse=True) == computed


def test_a_pool_too_small_for_one_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(EngineError, match=r"7 pages of 4 tokens.*24 tokens takes 8"):
        make(rows=1, pages=7, page_tokens=4, max_sequence=24)


def test_logprobs_that_are_no_numbers_stop_the_stream() -> None:
    decoder, device = make(rows=1, pages=20, page_tokens=4, max_sequence=20)

    class Broken(Arrived):
        def result(self) -> list[Response]:
            return [Response(r.tokens, np.full(len(r.tokens), np.nan, np.float32)) for r in super().result()]

    fetch = device.fetch
    device.fetch = lambda *args: Broken([t.tolist() for t in fetch(*args).tokens])  # type: ignore[method-assign]
    decoder.submit(0, Request(5, (8,), (1,), Sampling(1.0, 3)))
    with pytest.raises(EngineError, match=r"request 5, sample 0.*response token 1 are not finite"):
        drain(decoder)


@given(st.lists(st.integers(0, 6), max_size=60), st.randoms())
def test_pages_are_free_when_their_last_owner_has_gone(sizes: list[int], random: object) -> None:
    allocator = PageAllocator(41)
    owned: list[np.ndarray] = []
    for size in sizes:
        if size <= allocator.free:
            pages = allocator.take(size)
            held = [p for o in owned for p in o.tolist()]
            assert not set(pages.tolist()) & set(held) and 0 not in pages
            owned.append(pages)
        if owned and random.random() < 0.3:  # type: ignore[attr-defined]
            allocator.share(owned[0])
            owned.append(owned[0])
        if owned and random.random() < 0.5:  # type: ignore[attr-defined]
            allocator.release(owned.pop(random.randrange(len(owned))))  # type: ignore[attr-defined]
        assert allocator.free == 40 - len({p for o in owned for p in o.tolist()})


def test_tables_grow_all_rows_at_once() -> None:
    allocator = PageAllocator(15)
    tables = BlockTables(allocator, rows=3, max_tokens=20, page_tokens=4)
    tables.begin(1, allocator.take(1))
    tables.grow(np.array([0, 1, 2]), np.array([1, 9, 4]))
    assert tables.held.tolist() == [1, 3, 1] and allocator.free == 14 - 5
    used = [tables.table[row, : tables.held[row]].tolist() for row in range(3)]
    assert len({p for pages in used for p in pages}) == 5
    tables.grow(np.array([2, 0]), np.array([20, 2]))
    assert tables.table[2].min() > 0 and tables.held.tolist() == [1, 3, 5]
    with pytest.raises(ValueError, match="pages asked for"):
        tables.grow(np.array([0, 1]), np.array([20, 20]))
    tables.end(2)
    assert allocator.free == 14 - 4 and tables.table[2].max() == 0


def test_drafts_are_what_each_row_has_after_a_stretch() -> None:
    decoder, _ = make(rows=4, pages=200, page_tokens=4, max_sequence=60, stretch=3)
    request = Request(9, (8, 9), (1, 2, 3), Sampling(1.0, 40))
    assert decoder.drafts() == []
    decoder.submit(0, request)
    seen = 0
    while decoder.busy:
        decoder.step()
        for _, draft in decoder.drafts():
            size = len(draft.token_ids)
            assert draft.request_id == 9 and list(draft.token_ids) == expected(request, draft.index)[:size]
            assert list(draft.logprobs) == [-float(place) for place in range(size)]
            seen += 1
            new = dict(decoder.drafts({0: {(9, draft.index): size - 1}, 5: {}}))[0]
            assert new.index != draft.index or (new.start, new.token_ids) == (size - 1, draft.token_ids[-1:])
        assert decoder.drafts({1: {}}) == []
    assert seen > 3


def noted_starts(device: FakeDevice) -> list[tuple[int, int]]:
    """(seed, tokens that it had) of each sequence that the device starts, as it starts them."""
    begun: list[tuple[int, int]] = []
    start = device.start

    def noted(starts: Sequence[RowStart]) -> None:
        begun.extend((one.seed, len(one.done.tokens)) for one in starts)
        start(starts)

    device.start = noted  # type: ignore[method-assign]
    return begun


def test_who_was_preempted_comes_before_those_that_wait_and_keeps_the_versions_of_its_tokens() -> None:
    """15 pages of one token for responses of 10 after prompts of 2: one and a bit. The weights change meanwhile."""
    decoder, device = make(rows=2, pages=16, page_tokens=1, max_sequence=12, stretch=1)
    requests = [(0, Request(number, (8, 9), (seed,), Sampling(1.0, 10))) for number, seed in ((4, 1), (2, 3), (6, 8))]
    assert [len(expected(request, 0)) for _, request in requests][:2] == [10, 10]
    begun = noted_starts(device)
    for key, request in requests:
        decoder.submit(key, request)
    answers = []
    while not decoder.preemptions:
        answers += decoder.step()
    decoder.use_weights(3)
    answers += drain(decoder)
    check_answers(requests, answers)
    seeds = [seed for seed, _ in begun]
    assert seeds[:3] == [1, 3, 3] and seeds.index(8) > 2
    had = begun[2][1]
    assert 0 < had < 10
    (second,) = [sample for _, sample in answers if sample.request_id == 2]
    assert second.versions.tolist() == [0] * had + [3] * (10 - had)


def test_of_prompts_computed_ahead_the_last_one_is_dropped_first() -> None:
    """One row, whose response grows into the pages of two prompts that wait: that of 5 tokens is computed twice."""
    decoder, device = make(rows=1, pages=16, page_tokens=1, max_sequence=13, stretch=1)
    requests = [
        (0, Request(number, (8,) * size, (1,), Sampling(1.0, limit)))
        for number, size, limit in ((0, 1, 9), (1, 4, 1), (2, 6, 1))
    ]
    assert len(expected(requests[0][1], 0)) == 9
    for key, request in requests:
        decoder.submit(key, request)
    check_answers(requests, drain(decoder))
    assert device.computed == 0 + 3 + 2 * 5  # all tokens of a prompt but the last are computed ahead


def test_a_stretch_is_as_long_as_the_longest_row_needs() -> None:
    """Of two rows one ends after its second token; nobody looks at the device for that."""
    decoder, device = make(rows=2, pages=100, page_tokens=4, max_sequence=20, stretch=8)
    requests = [(0, Request(number, (8, 9), (seed,), Sampling(1.0, n))) for number, seed, n in ((4, 1, 10), (2, 3, 2))]
    assert [len(expected(request, 0)) for _, request in requests] == [10, 2]
    looks: list[int] = []
    run = device.run
    device.run = lambda rows, steps, *rest: (looks.append(steps), run(rows, steps, *rest))[1]  # type: ignore[method-assign]
    for key, request in requests:
        decoder.submit(key, request)
    check_answers(requests, drain(decoder))
    assert looks == [8, 2] and decoder.decode_steps == device.steps == 10


def test_a_stretch_serves_the_row_that_asks_for_most() -> None:
    """One row asks for the 2 likeliest tokens, the next one for none, and one for a truncation."""
    decoder, device = make(rows=4, pages=100, page_tokens=4, max_sequence=20, stretch=8)
    variants: list[Variant] = []
    run = device.run
    device.run = lambda *args: (variants.append(args[2]), run(*args))[1]  # type: ignore[method-assign]
    asked = (Sampling(1.0, 4, top_logprobs=2), Sampling(1.0, 4, top_p=0.5), Sampling(1.0, 4))
    for number, sampling in enumerate(asked):
        decoder.submit(0, Request(number, (8, 9), (1,), sampling))
    drain(decoder)
    assert variants == [Variant(truncate=True, top=2)]


def test_a_pass_over_prompts_is_bounded_and_a_longer_one_goes_alone() -> None:
    decoder, device = make(rows=8, pages=200, page_tokens=4, max_sequence=30, stretch=2, prefill_tokens=9)
    passes: list[list[int]] = []
    prefill = device.prefill
    device.prefill = lambda prompts, pages: (  # type: ignore[method-assign]
        passes.append([len(prompt) - 1 for prompt in prompts]),
        prefill(prompts, pages),
    )[1]
    for number, size in enumerate((5, 6, 5, 16, 2)):
        decoder.submit(0, Request(number, (8,) * size, (1,), Sampling(1.0, 2)))
    drain(decoder)
    assert passes == [[4, 5], [4], [15], [1]]  # all tokens of a prompt but its last


def test_what_is_on_its_way_out_is_forgotten_with_the_rest() -> None:
    decoder, _ = make(rows=2, pages=100, page_tokens=4, max_sequence=20, stretch=8)
    decoder.submit(0, Request(0, (8, 9), (1,), Sampling(1.0, 2)))
    assert decoder.step() == [] and decoder.busy  # it is finished, and its arrays are on their way
    decoder.reset()
    assert not decoder.busy and decoder.step() == []
    request = Request(1, (8, 9), (3,), Sampling(1.0, 5))
    decoder.submit(0, request)
    check_answers([(0, request)], drain(decoder))


def test_what_is_there_is_handed_out_while_the_device_is_at_work() -> None:
    decoder, device = make(rows=2, pages=100, page_tokens=4, max_sequence=20, stretch=2)
    decoder.submit(0, Request(0, (8, 9), (1,), Sampling(1.0, 2)))
    decoder.submit(1, Request(1, (8, 9), (1,), Sampling(1.0, 9)))
    decoder.step()
    looks: list[None] = []
    progress = device.progress
    device.progress = lambda: (looks.append(None), progress())[1]  # type: ignore[method-assign]
    stretch = decoder.stretch({1: {}})
    sample, draft = next(stretch)
    assert not looks and (sample[0], draft[0]) == (0, 1) and isinstance(draft[1], Draft)
    assert len(sample[1].token_ids) == len(draft[1].token_ids) == 2 and device.steps == 4
    assert next(stretch, None) is None and looks


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(0x4E00 + i) for i in ids)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_what_is_told_while_the_device_is_at_work_is_how_the_samples_begin(data: st.DataObject) -> None:
    """Keys 0 and 1 are watched; 1 is forgotten within a stretch. Pages are short, weights change, texts stop."""
    page_tokens, max_sequence = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 24))
    least = minimum_pages(max_sequence, page_tokens)
    pages, rows = data.draw(st.integers(least, 3 * least)), data.draw(st.integers(1, 8))
    stop_texts, stretch = StopTexts(letters), data.draw(st.integers(1, 4))
    decoder, device = make(rows, pages, page_tokens, max_sequence, stretch=stretch, stop_texts=stop_texts)
    wanted: dict[tuple[int, int, int], list[int]] = {}
    for key, plain in random_requests(np.random.default_rng(data.draw(st.integers(0, 999))), 12, max_sequence):
        end = data.draw(st.none() | st.integers(0, VOCABULARY - 1))
        stop = () if end is None else (letters([end]),)
        request = replace(plain, sampling=replace(plain.sampling, stop=stop))
        for index in range(len(request.seeds)):
            tokens = expected(request, index)
            wanted[key, request.id, index] = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        decoder.submit(key, request)
    told: dict[int, dict[tuple[int, int], int] | None] = {0: {}, 1: {}}
    shown: dict[tuple[int, int, int], list[tuple[int, float, int]]] = {}
    found: dict[tuple[int, int, int], Sample] = {}
    forgotten, changes = data.draw(st.integers(0, 20)), data.draw(st.sets(st.integers(1, 20)))
    for turn in range(10_000):
        if not decoder.busy:
            break
        for events in decoder.stretch(told):
            for key, event in events:
                place = key, event.request_id, event.index
                assert place not in found
                if isinstance(event, Sample):
                    found[place] = event
                    continue
                assert event.start == len(shown.setdefault(place, []))
                shown[place] += zip(event.token_ids, event.logprobs, event.versions, strict=True)
                told[key][place[1:]] = len(shown[place])  # type: ignore[index]
            if turn == forgotten and told.pop(1, None) is not None:
                decoder.cancel(lambda key, _: key == 1)
        if turn in changes:
            decoder.use_weights(turn)
    assert found.keys() <= wanted.keys() and {place for place in wanted if place[0] != 1} <= found.keys()
    for place, sample in found.items():
        columns = zip(sample.token_ids.tolist(), sample.logprobs.tolist(), sample.versions.tolist(), strict=True)
        begins = shown.get(place, [])
        assert sample.token_ids.tolist() == wanted[place] and [*columns][: len(begins)] == begins
        assert len(begins) < sample.length and (place[0] in (0, 1) or not begins)
    assert decoder._pages.free == pages - 1 and (device.lengths < 0).all()


def test_stop_texts_are_looked_for_in_the_new_tokens_only() -> None:
    """A response of 150 tokens, 4 at a time: what is decoded does not grow with it."""
    read: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return "".join(chr(97 + i % 26) for i in ids)

    decoder, _ = make(1, 100, 4, 160, stretch=4, stop_texts=StopTexts(decode))  # type: ignore[arg-type]
    seed = next(n for n in range(1000) if len(expected(Request(0, (8, 9), (n,), Sampling(1.0, 150)), 0)) == 150)
    request = Request(0, (8, 9), (seed,), Sampling(1.0, 150, stop=("?!",)))
    decoder.submit(0, request)
    check_answers([(0, request)], drain(decoder))
    assert len(read) > 30 and max(read) < 20
