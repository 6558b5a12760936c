"""The native engine as the rest of the program uses it: every sample once, exact ends, weights, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.errors import ModelError
from dapo.model.loading import check_supported, copy_model, load_model, stop_token_ids
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request, Sampling, hand_over, some_elements
from dapo.rollout.native import slots
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.slots import slot_decoder
from helpers import random_model

MODEL = load_model(random_model("qwen2", num_hidden_layers=1))
PLAIN = Sampling(1.0, 8)


def make_engine(stop=(1,), slots=4, **options) -> NativeEngine:
    return NativeEngine(
        copy_model(MODEL, torch.float32), stop, max_sequence_tokens=32, max_concurrent_samples=slots, **options
    )


def collect(engine: NativeEngine, requests: list[Request]) -> dict:
    async def run() -> dict:
        try:
            return {(s.request_id, s.index): s async for s in engine.generate(requests)}
        finally:
            await engine.close()

    return asyncio.run(run())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    slots=st.integers(1, 7),
    deterministic=st.booleans(),
)
def test_every_requested_sample_comes_back_exactly_once(requests, slots, deterministic) -> None:
    """Any mix of samples per prompt, prompt lengths and limits, in fewer or more slots than samples."""
    decoder = slot_decoder(
        MODEL, (1, 2, 3, 4), max_sequence_tokens=20, max_concurrent_samples=slots, deterministic=deterministic
    )
    for i, (samples, prompt, limit) in enumerate(requests):
        decoder.submit(i, Request(i, (5,) * prompt, tuple(range(samples)), Sampling(1.0, limit)))
    found = []
    while decoder.busy:
        found += [(key, s) for key, s in decoder.step()]
    expected = [(i, index) for i, (samples, _, _) in enumerate(requests) for index in range(samples)]
    assert sorted((key, s.index) for key, s in found) == expected
    assert all(key == s.request_id for key, s in found)
    for key, s in found:
        limit = requests[key][2]
        assert 1 <= s.length <= limit
        stopped = int(s.token_ids[-1]) in (1, 2, 3, 4)
        assert s.finish_reason == ("stop" if stopped else "length")
        assert stopped or s.length == limit
        assert not set(s.token_ids[:-1].tolist()) & {1, 2, 3, 4}


def test_a_sample_depends_on_its_seed_alone() -> None:
    """Neither on the number of slots, nor on the order of requests, nor on what else is in flight."""
    requests = [Request(i, (5 + i, 6, 7), (100 + i, 200 + i, 300 + i), PLAIN) for i in range(5)]
    wide = collect(make_engine(slots=15), requests)
    narrow = collect(make_engine(slots=2), requests[::-1])
    alone = collect(make_engine(slots=3), requests[2:3])
    for key, sample in wide.items():
        assert sample.token_ids.tolist() == narrow[key].token_ids.tolist()
    for index in range(3):
        assert alone[2, index].token_ids.tolist() == wide[2, index].token_ids.tolist()
    assert len({tuple(s.token_ids.tolist()) for s in wide.values()}) > 5


def test_a_prompt_is_computed_once_for_its_group() -> None:
    decoder = slot_decoder(MODEL, (), max_sequence_tokens=32, max_concurrent_samples=3)
    prefilled, prefill = [], decoder._runner.prefill
    decoder._runner.prefill = lambda prompts, pages: prefilled.extend(map(len, prompts)) or prefill(prompts, pages)
    for i in range(4):
        decoder.submit(0, Request(i, tuple(range(2, 5 + i)), (1, 2, 3, 4, 5), Sampling(1.0, 4)))
    finished = []
    while decoder.busy:
        finished += decoder.step()
    assert len(finished) == 20
    assert sorted(prefilled) == [3, 4, 5, 6]


def test_stored_prompts_are_released_with_their_last_sample() -> None:
    decoder = slot_decoder(MODEL, (), max_sequence_tokens=32, max_concurrent_samples=2)
    decoder.submit(0, Request(0, (2, 3), (1, 2, 3), Sampling(1.0, 2)))
    waiting = decoder._waiting[0]
    decoder.step()
    prompt = weakref.ref(waiting.prompt.keys[0])
    assert len(waiting.sequences) == 1
    del waiting
    while decoder.busy:
        assert prompt() is not None or not decoder._waiting
        decoder.step()
    assert prompt() is None


def test_new_weights_reach_the_head_that_is_held_in_float32() -> None:
    """An engine in bfloat16 that is given weights samples as one that was made with them, log-probabilities and all."""
    changed = load_model(random_model("qwen2", num_hidden_layers=1, seed=5))
    request = Request(0, (5, 6), (1, 2, 3), PLAIN)

    def engine(model) -> NativeEngine:
        return NativeEngine(copy_model(model, torch.bfloat16), (), max_sequence_tokens=32, max_concurrent_samples=4)

    async def updated() -> dict:
        old = engine(MODEL)
        await hand_over(old, 1, changed.named_parameters())
        found = {s.index: s async for s in old.generate([request])}
        await old.close()
        return found

    expected, found = collect(engine(changed), [request]), asyncio.run(updated())
    for index, sample in found.items():
        assert sample.token_ids.tolist() == expected[0, index].token_ids.tolist()
        assert sample.logprobs.tolist() == expected[0, index].logprobs.tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(3, (), (1,), PLAIN), "request 3: the prompt is empty"),
        (Request(3, (5, 48), (1,), PLAIN), "request 3: token ids must be in 0..47"),
        (Request(3, (5,) * 25, (1,), PLAIN), "25 prompt tokens and up to 8 .*'s 32: max_tokens can be 7 at most"),
        (
            Request(3, (5,) * 32, (1,), PLAIN),
            "32 prompt tokens .*: shorten the prompt, or raise data.max_prompt_length",
        ),
        (Request(3, (5,), (1,), Sampling(1.0, 0)), "max_tokens is 0"),
        (Request(3, (5,), (1,), Sampling(-0.1, 8)), "request 3: temperature is -0.1"),
        (Request(3, (5,), (1,), Sampling(float("nan"), 8)), "temperature is nan"),
        (Request(3, (5,), (1,), Sampling(float("inf"), 8)), "temperature is inf"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, top_p=0.0)), "top_p is 0.0"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, top_p=1.1)), "top_p is 1.1"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, top_p=float("nan"))), "top_p is nan"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, min_p=1.0)), "min_p is 1.0"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, min_p=-0.1)), "min_p is -0.1"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, top_k=-1)), "top_k is -1"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, top_logprobs=-1)), "top_logprobs is -1, it must be in 0..20"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, top_logprobs=21)), "top_logprobs is 21, it must be in 0..20"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, stop=("a", ""))), "a stop text is empty"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, stop=("\ufffd",))), "U\\+FFFD"),
        (Request(3, (5,), (1,), Sampling(1.0, 8, stop="ab")), "stop is the text 'ab'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        collect(make_engine(), [request_])


def test_a_failure_reaches_every_waiter_and_the_engine_recovers() -> None:
    async def run() -> None:
        engine = make_engine()
        stretch, engine._decoder.stretch = engine._decoder.stretch, lambda told: 1 / 0
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            async for _ in engine.generate([Request(0, (5,), (1,), PLAIN)]):
                pass
        engine._decoder.stretch = stretch
        assert len([s async for s in engine.generate([Request(0, (5,), (1,), PLAIN)])]) == 1
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("deterministic", [False, True])
def test_cancelling_one_of_two_streams_leaves_the_other_whole(deterministic: bool) -> None:
    """The rows of the cancelled stream lie between those of the other, which move; their samples stay the same."""

    async def run(cancel: bool) -> dict:
        engine = make_engine(slots=6, deterministic=deterministic)
        kept = {}

        async def keep() -> None:
            async for s in engine.generate([Request(i, (5 + i,), (1, 2), Sampling(1.0, 30)) for i in range(4)]):
                kept[s.request_id, s.index] = s.token_ids.tolist()

        async def leave() -> None:
            async for _ in engine.generate([Request(9, (5,), tuple(range(40)), Sampling(1.0, 12))]):
                break

        await asyncio.gather(*([leave()] if cancel else []), keep())
        await engine.close()
        return kept

    assert asyncio.run(run(cancel=True)) == asyncio.run(run(cancel=False))


def test_a_consumer_may_be_cancelled_at_any_moment() -> None:
    """Also while its requests are only being handed over: the engine goes on, and nothing of it is left."""

    async def run() -> None:
        engine = make_engine(slots=2)

        async def consume(i: int) -> None:
            async for _ in engine.generate([Request(i, (5,), tuple(range(20)), Sampling(1.0, 20))]):
                pass

        for i in range(60):
            task = asyncio.create_task(consume(i))
            await asyncio.sleep(0.0005 * (i % 7))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len([s async for s in engine.generate([Request(99, (5,), (1, 2), PLAIN)])]) == 2
        await engine.sleep()  # after what was posted before it; refuses if anything is left
        assert not engine._streams
        await engine.close()

    asyncio.run(run())


def test_a_thread_that_dies_leaves_nobody_waiting() -> None:
    async def run() -> None:
        engine = make_engine(slots=1)
        engine._decoder.cancel = lambda key: 1 / 0

        async def wait() -> None:
            async for _ in engine.generate([Request(1, (5,), tuple(range(1000)), Sampling(1.0, 30))]):
                pass

        waiting = asyncio.create_task(wait())
        stream = engine.generate([Request(0, (5,), (1, 2), PLAIN)])
        await asyncio.sleep(0.1)
        leaving = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.1)
        leaving.cancel()
        with pytest.raises(EngineError, match="broke down: ZeroDivisionError"):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(EngineError, match="broke down"):
            await hand_over(engine, 1, [])
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("little", [False, True])
def test_sleep_gives_the_cache_back_unless_it_is_little(little: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it has the same bits, on pages that others have written to and on new ones."""
    if not little:
        monkeypatch.setattr(slots, "KEPT_BYTES", 0)

    async def tokens(engine: Any, seed: int) -> list[tuple[bytes, bytes]]:
        request = Request(0, (5,), (seed,), PLAIN)
        return [(s.token_ids.tobytes(), s.logprobs.tobytes()) async for s in engine.generate([request])]

    async def run() -> None:
        engine = make_engine()
        before, _ = await tokens(engine, 1), await tokens(engine, 2)
        assert engine._decoder._runner.keys
        await engine.sleep()
        assert bool(engine._decoder._runner.keys) == little
        await engine.wake()
        assert len(before) == 1 and await tokens(engine, 1) == before
        await engine.close()

    asyncio.run(run())


def test_every_stop_id_is_found_wherever_it_is_named() -> None:
    """Failures 11: generation config [2, 9], tokenizer 2, one more from the recipe; lists and None."""

    class Tokenizer:
        eos_token_id = 2

    model = random_model("qwen2", num_hidden_layers=1)
    model.generation_config.eos_token_id = [2, 9]
    assert stop_token_ids(model, Tokenizer(), [4]) == (2, 9, 1, 4)
    Tokenizer.eos_token_id = None
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert stop_token_ids(model, Tokenizer()) == ()


@pytest.mark.parametrize("kind", ["mamba", "gpt_oss", "t5", "qwen3_next"])
def test_an_unsupported_architecture_is_refused_by_name(kind: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(ModelError, match=f"'{kind}' is not supported.*Qwen2"):
        check_supported(AutoConfig.for_model(kind))


def test_a_cancelled_command_does_not_keep_others_waiting_when_the_engine_closes() -> None:
    async def run() -> list[Any]:
        engine = make_engine()
        hold, held = threading.Event(), threading.Event()

        def wait() -> None:
            held.set()
            hold.wait(10)

        first = asyncio.ensure_future(engine._call(wait))
        await asyncio.to_thread(held.wait, 10)
        second, third = (asyncio.ensure_future(engine.wake()) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.05)
        hold.set()
        await closing
        return await asyncio.wait_for(asyncio.gather(first, second, third, return_exceptions=True), 5)

    outcomes = asyncio.run(run())
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert isinstance(outcomes[2], EngineError) and "closed" in str(outcomes[2])


def test_a_stream_leaves_nothing_behind_and_wakes_its_loop_once_a_step() -> None:
    """Of samples that end together, and of no samples; refused ones are told why."""

    async def run() -> None:
        engine, loop = make_engine(stop=()), asyncio.get_running_loop()
        wakes: list[Any] = []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **how: (wakes.append(args), wake(*args, **how))[1]  # type: ignore
        assert len([s async for s in engine.generate([Request(0, (3,), (1, 2, 3, 4), PLAIN)])]) == 4
        assert len(wakes) == 1
        for requests in ([], [Request(0, (3,), (), PLAIN)]):
            assert [event async for event in engine.stream(requests)] == []
        await engine.begin(1)
        with pytest.raises(EngineError, match="version 1 arrived in part"):
            await anext(engine.stream([Request(0, (3,), (1,), PLAIN)]))
        await hand_over(engine, 1, MODEL.named_parameters())
        watched = engine.stream([Request(0, (3,), (1,), PLAIN)])
        await anext(watched)
        await watched.aclose()
        await engine.sleep()  # behind all of that, and refuses if anything is left
        assert not engine._streams and not engine._watched
        await engine.close()

    asyncio.run(run())


def test_the_engine_outlives_the_event_loop_of_a_consumer() -> None:
    engine = make_engine()

    async def leave_early() -> None:
        stream = engine.generate([Request(0, (3, 4), tuple(range(4)), Sampling(1.0, 20))])
        await anext(stream)

    async def ask() -> int:
        found = [s async for s in engine.generate([Request(1, (3, 4), (1,), Sampling(1.0, 5))])]
        await engine.close()
        return len(found)

    for _ in range(5):
        asyncio.run(leave_early())
    assert asyncio.run(ask()) == 1


def test_a_fault_while_samples_start_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = slot_decoder(MODEL, (1,), max_sequence_tokens=40, max_concurrent_samples=4)
    good = Request(0, (3, 4), (5, 6, 7), Sampling(1.0, 5))
    begin, calls = decoder._runner._begin, itertools.count()

    def failing(start: Any) -> None:
        if next(calls) == 2:
            raise MemoryError
        begin(start)

    monkeypatch.setattr(decoder._runner, "_begin", failing)
    decoder.submit(0, good)
    with pytest.raises(MemoryError):
        decoder.step()
    decoder.reset()
    assert not decoder._rows and (decoder._runner.progress().lengths < 0).all()
    decoder.submit(0, good)
    found = []
    while decoder.busy:
        found += decoder.step()
    assert sorted(s.index for _, s in found) == [0, 1, 2]


def test_requests_without_samples_and_odd_seeds() -> None:
    decoder = slot_decoder(MODEL, (1,), max_sequence_tokens=40, max_concurrent_samples=4)
    decoder.submit(0, Request(0, (3,), (), Sampling(1.0, 5)))
    assert not decoder.busy
    with pytest.raises(EngineError, match="a seed is -1"):
        decoder.check(Request(0, (3,), (-1,), Sampling(1.0, 5)))
    with pytest.raises(EngineError, match="temperature is 1e-40"):
        decoder.check(Request(0, (3,), (1,), Sampling(1e-40, 5)))


def test_prompts_that_wait_are_computed_with_the_weights_in_use() -> None:
    """Two rows, four samples: the last two start after the weights have become zero, so every token is as likely."""
    model = copy_model(load_model(random_model("qwen2")), torch.float32)
    decoder = slot_decoder(model, (1,), max_sequence_tokens=40, max_concurrent_samples=2)
    decoder.submit(0, Request(0, (3, 4), (5, 6, 7, 8), Sampling(1.0, 3)))
    found = decoder.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    decoder.use_weights(1)
    while decoder.busy:
        found += decoder.step()
    later = [s for _, s in found if s.index >= 2]
    assert len(later) == 2 and all(set(s.versions.tolist()) == {1} for s in later)
    for sample in later:
        np.testing.assert_allclose(sample.logprobs, -np.log(model.config.vocab_size), atol=1e-5)


@pytest.mark.parametrize(
    ("deterministic", "expected"), [(False, [[4, 5], [4], [12], [1]]), (True, [[4], [5], [4], [12], [1]])]
)
def test_a_pass_over_prompts_is_bounded_and_pinned_shapes_have_one_prompt_each(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, expected: list[list[int]]
) -> None:
    monkeypatch.setattr("dapo.rollout.native.slots.PREFILL_TOKENS", 9)
    decoder = slot_decoder(MODEL, (), max_sequence_tokens=20, max_concurrent_samples=8, deterministic=deterministic)
    passes: list[list[int]] = []
    prefill = decoder._runner.prefill

    def noted(prompts: Any, pages: Any) -> Any:
        passes.append([len(prompt) for prompt in prompts])
        return prefill(prompts, pages)

    monkeypatch.setattr(decoder._runner, "prefill", noted)
    for number, size in enumerate((4, 5, 4, 12, 1)):
        decoder.submit(0, Request(number, (5,) * size, (1,), Sampling(1.0, 2)))
    decoder.step()
    assert passes == expected


def test_streams_are_told_of_drafts_a_while_apart_but_of_the_first_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.rollout.native.engine.DRAFT_SECONDS", 1e9)

    async def run() -> None:
        engine = make_engine(stop=())
        first, second = (engine.stream([Request(n, (5, 6), (1,), PLAIN)]) for n in (0, 1))
        assert (await anext(first)).token_ids and (await anext(second)).token_ids
        for stream in (first, second):
            (sample,) = [event async for event in stream]
            assert isinstance(sample, Sample) and sample.length == 8
        await engine.close()

    asyncio.run(run())


def test_a_response_is_told_of_with_the_step_that_drew_it() -> None:
    decoder = slot_decoder(MODEL, (), max_sequence_tokens=20, max_concurrent_samples=2)
    decoder.submit(0, Request(0, (5, 6), (1, 2), PLAIN))
    drafts = [event for events in decoder.stretch({0: {}}) for _, event in events]
    assert [len(draft.token_ids) for draft in drafts] == [2, 2]  # one after the prompt, one of the step


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of pages")
def test_a_long_limit_takes_no_memory_until_responses_reach_it() -> None:
    """The state of 8 rows of a million tokens would be 128 MiB, and 320 more with five likeliest tokens each."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    decoder = slot_decoder(MODEL, (), max_sequence_tokens=2**20, max_concurrent_samples=8)
    for limit in (2, 20, 3, 4):  # the others move down when the first has ended
        decoder.submit(0, Request(0, (5, 6), (1, 2), Sampling(1.0, limit, top_logprobs=5)))
    while decoder.busy:
        decoder.step()
    assert resident() - before < 32 * 2**20


def test_a_cache_that_no_machine_has_is_refused_before_there_is_work() -> None:
    with pytest.raises(ModelError, match=r"1,000,000,000,000 sequences .* lower rollout\.max_concurrent_samples"):
        make_engine(slots=10**12)


# -- what only some engines can do ----------------------------------------------------------------------------------


def bits(sample: Sample) -> tuple:
    arrays = sample.token_ids, sample.logprobs, sample.versions
    return *(a.tolist() for a in arrays), sample.finish_reason


def check_equal(sample: Sample, whole: Sample) -> None:
    """Equal to the bit, but for the rounding of log-probabilities where a context was computed in another shape."""
    found, expected = bits(sample), bits(whole)
    assert found[0] == expected[0] and found[2:] == expected[2:]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cancelled_requests_lose_nothing(deterministic: bool) -> None:
    """Cancelled again and again, at any place; one request of the same stream goes on, and the stream ends by itself.
    Of the cancelled samples some are on their way, some wait with tokens and some have none yet."""
    cut = Request(0, (5, 6), tuple(range(6)), Sampling(1.0, 28))
    kept = Request(1, (7,), (9, 8), Sampling(1.0, 28))
    whole = collect(make_engine(deterministic=deterministic), [cut, kept])

    async def run() -> None:
        engine, found, drafts, cancelled = make_engine(deterministic=deterministic), {}, [], 0
        for _ in range(100):
            left = [i for i in range(6) if (0, i) not in found]
            if not left and (1, 0) in found:
                break
            # the samples of a request are numbered as its seeds are
            have = tuple(replace(draft, index=left.index(draft.index)) for draft in drafts)
            again = replace(cut, seeds=tuple(cut.seeds[i] for i in left), drafts=have)
            watched = engine.stream([again] + [kept] * ((1, 0) not in found))
            seen, gone = 0, False
            async for event in watched:
                if isinstance(event, Sample):
                    index = left[event.index] if event.request_id == 0 else event.index
                    found[event.request_id, index] = event
                elif event.request_id == 0 and not gone and (seen := seen + 1) == 12:
                    drafts, gone = [replace(d, index=left[d.index]) for d in await engine.cancel({0, 77})], True
                    cancelled += len(drafts)
            drafts = [d for d in drafts if gone and (0, d.index) not in found]
        assert found.keys() == whole.keys() and cancelled > 3
        for key, sample in found.items():
            check_equal(sample, whole[key])
        await engine.sleep()  # refuses if anything is left
        await engine.close()

    asyncio.run(run())


def test_a_draft_is_taken_at_its_word_and_only_its_rest_is_sampled() -> None:
    """Tokens, log-probabilities and versions of before are the draft's; place i takes draw i of the seed's stream."""
    whole = collect(make_engine(stop=()), [Request(0, (5, 6), (1, 2), PLAIN)])
    tokens = tuple(whole[0, 1].token_ids[:5].tolist())
    draft = Draft(3, 1, tokens, (-9.0,) * 5, (2, 2, 3, 3, 3))
    engine = make_engine(stop=())
    found = collect(engine, [Request(0, (5, 6), (1, 2), PLAIN, (draft,))])
    check_equal(found[0, 0], whole[0, 0])
    assert found[0, 1].token_ids.tolist() == whole[0, 1].token_ids.tolist()
    assert found[0, 1].logprobs[:5].tolist() == [-9.0] * 5 and found[0, 1].versions.tolist() == [2, 2, 3, 3, 3, 0, 0, 0]
    assert engine.decode_steps == 7  # those of the sample without a draft


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([(2, 3)], r"drafts of samples \[2\]: one of each of 2"),
        ([(0, 3), (0, 3)], r"drafts of samples \[0, 0\]"),
        ([(1, 8)], "the draft of sample 1 is a whole response of 8 tokens"),
        ([(1, 0)], "the draft of sample 1 has 0 tokens"),
    ],
)
def test_drafts_that_cannot_be_continued_are_refused(drafts: list, message: str) -> None:
    made = tuple(Draft(0, index, (5,) * n, (-1.0,) * n, (0,) * n) for index, n in drafts)
    with pytest.raises(EngineError, match=message):
        collect(make_engine(), [Request(3, (5,), (1, 2), PLAIN, made)])
    stopped = Draft(0, 0, (5, 1), (-1.0, -1.0), (0, 0))
    with pytest.raises(EngineError, match="a whole response of 2 tokens"):
        collect(make_engine(), [Request(3, (5,), (1, 2), PLAIN, (stopped,))])


def test_a_stream_shows_each_sample_growing_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    # a draft at every step, however fast the steps are
    monkeypatch.setattr("dapo.rollout.native.engine.DRAFT_SECONDS", 0)
    request = Request(7, (5, 6), (1, 2, 3), Sampling(1.0, 12))

    async def run() -> list:
        engine = make_engine(stop=(), slots=2)
        events = [event async for event in engine.stream([request])]
        await engine.close()
        return events

    events = asyncio.run(run())
    samples = {e.index: e for e in events if isinstance(e, Sample)}
    for index, sample in samples.items():
        grown = [e for e in events if e.index == index]
        assert [len(e.token_ids) for e in grown] == [2, *[1] * 9, 12] and grown.pop() is sample
        assert [token for e in grown for token in e.token_ids] == sample.token_ids[:11].tolist()
    assert sorted(samples) == [0, 1, 2]


def test_nothing_is_sampled_while_paused_or_while_weights_come() -> None:
    """Requests stay in flight, new ones may be made; tokens drawn afterwards carry the new version."""

    async def run() -> None:
        engine = make_engine(stop=(), slots=2)
        changed = {name: p + 0.05 * torch.randn_like(p) for name, p in MODEL.named_parameters()}
        stream = engine.stream([Request(0, (5, 6), (1, 2), Sampling(1.0, 28))])

        async def rests() -> None:
            steps = engine.decode_steps
            await asyncio.sleep(0.05)
            assert engine.decode_steps == steps

        await anext(stream)
        await engine.pause()
        await rests()
        other = asyncio.ensure_future(anext(engine.generate([Request(1, (5,), (3,), PLAIN)])))
        await rests()
        await hand_over(engine, 4, changed.items())
        await rests()
        await engine.resume()
        await engine.resume()
        found = [e async for e in stream if isinstance(e, Sample)]
        assert all(set(s.versions.tolist()) == {0, 4} and sorted(s.versions) == s.versions.tolist() for s in found)
        assert set((await other).versions.tolist()) == {4}
        stream = engine.stream([Request(0, (5, 6), (1, 2), Sampling(1.0, 28))])
        await anext(stream)
        await engine.begin(5)
        await engine.put(list(changed.items())[:1])
        await rests()
        await hand_over(engine, 5, changed.items())
        assert {v for e in [e async for e in stream if isinstance(e, Sample)] for v in e.versions.tolist()} == {4, 5}
        await engine.pause()
        last = asyncio.ensure_future(anext(engine.generate([Request(1, (5,), (3,), PLAIN)])))
        await asyncio.sleep(0.01)
        await engine.close()  # also while paused
        with pytest.raises(EngineError, match="closed"):
            await last

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["lost", "zeroed", "another"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_were_lost_on_the_way_are_an_error(fault: str, dtype: torch.dtype) -> None:
    """A bucket that the engine believes to have, but whose tensors never reached it, arrived as zeros, or stale."""

    async def run() -> None:
        engine = NativeEngine(copy_model(MODEL, dtype), (), max_sequence_tokens=32, max_concurrent_samples=4)
        changed = {name: p + 0.05 * torch.randn_like(p) for name, p in MODEL.named_parameters()}
        await hand_over(engine, 1, changed.items())  # what arrives is no error in a narrower type either
        name, put = list(changed)[3], engine._put

        def faulty(bucket: Any) -> None:
            spoilt = {"lost": engine._parameters[name], "zeroed": torch.zeros_like(changed[name])}
            put([(n, spoilt.get(fault, MODEL.state_dict()[n]) if n == name else p) for n, p in bucket])

        engine._put = faulty
        again = {name: p + 0.05 * torch.randn_like(p) for name, p in changed.items()}
        with pytest.raises(
            EngineError, match=rf"1 of {len(changed)} parameters, such as {name}, are not what was sent"
        ):
            await hand_over(engine, 2, again.items())
        assert engine.version == 1
        engine._put = put
        await hand_over(engine, 2, again.items())
        assert engine.version == 2
        await engine.close()

    asyncio.run(run())


def test_a_tensor_that_comes_twice_with_other_values_is_named() -> None:
    async def run() -> None:
        engine = NativeEngine(copy_model(MODEL, torch.bfloat16), (), max_sequence_tokens=32, max_concurrent_samples=4)
        sent = [(name, p + 0.05 * torch.randn_like(p)) for name, p in MODEL.named_parameters()]
        name, tensor = sent[3]
        for again in ([*sent, (name, tensor * 2)], [(name, tensor * 2), *sent]):
            for buckets in ([again], [[one] for one in again]):
                await engine.begin(1)
                with pytest.raises(EngineError, match=f"{name} came twice, with other values"):
                    for bucket in buckets:
                        await engine.put(bucket)
        await hand_over(engine, 1, [*sent, *sent[:4]])  # the same values are no fault
        await engine.close()

    asyncio.run(run())


def test_a_fingerprint_keeps_no_tensor_in_memory() -> None:
    tensor = torch.arange(64 * 1000.0).reshape(64, 1000)
    found = some_elements(tensor)
    assert len(found) == 64 and found.untyped_storage().nbytes() == 64 * 4
    assert len({int(x) % 1000 for x in found}) > 32  # not all of one column
    assert some_elements(torch.zeros(0)).numel() == 0 and some_elements(torch.tensor(3.0)).tolist() == [3.0]


SLOW = """
import asyncio, sys, time
sys.path[:0] = {paths!r}
import torch
from dapo.model.loading import copy_model
from dapo.rollout.engine import EngineError, Request, Sampling
from dapo.rollout.native import engine
from helpers import random_model

engine.CLOSE_SECONDS = 0.05

async def run():
    model = copy_model(random_model("qwen2", num_hidden_layers=1), torch.float32)
    slow = engine.NativeEngine(model, (1,), max_sequence_tokens=32, max_concurrent_samples=4)

    def stretch(told):
        end, matrix = time.monotonic() + 1, torch.randn(800, 800)
        while time.monotonic() < end:
            torch.linalg.matrix_power(matrix, 30)
        yield []

    slow._decoder.stretch = stretch
    waiting = asyncio.ensure_future(anext(slow.generate([Request(0, (3,), (1,), Sampling(1.0, 8))])))
    await asyncio.sleep(0.2)
    for closed in (slow.close(), asyncio.wait_for(waiting, 0.2)):
        try:
            await closed
        except EngineError as error:
            print(error)

asyncio.run(run())
"""


def test_a_step_that_outlasts_the_close_does_not_abort_the_process() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SLOW.format(paths=sys.path)], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["the engine's thread did not stop within 0.05 s"] * 2
