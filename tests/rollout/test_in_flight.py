"""Samples in flight while weights change, and samples that are stopped and continued, in both decoders.

Each is held against Transformers' own models, one for each version, with a cache that is kept across a change of
weights and computed anew where a sample was continued.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.model.loading import copy_model, load_model
from dapo.records import Sample
from dapo.rollout.engine import Draft, Request, Sampling, hand_over
from dapo.rollout.native.decoder import Decoder
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.paged import build
from dapo.rollout.native.pages import minimum_pages
from dapo.rollout.native.slots import slot_decoder
from helpers import random_model

PLAIN = [random_model("qwen2", num_hidden_layers=2, seed=seed) for seed in range(3)]
"""The weights of each version; versions beyond repeat them."""
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")  # its new name is not in all versions

STOP, LONGEST, LIMIT = 1, 40, 24
ASKED = [
    Request(n, tuple(range(3, 4 + 2 * n)), (7 * n + 1, 7 * n + 2, 7 * n + 3), Sampling(1.0, LIMIT)) for n in range(3)
]
STEPS = 3  # of a stretch on a device


def engine_model() -> Any:
    return copy_model(load_model(copy.deepcopy(PLAIN[0])), torch.float32)


def slots(rows: int = 5, **options: Any) -> Decoder:
    return slot_decoder(
        engine_model(), (STOP,), max_sequence_tokens=LONGEST, max_concurrent_samples=rows, deterministic=True, **options
    )


def paged(rows: int = 5, pages: int | None = None, device: str = "cpu", **options: Any) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PAGE_TOKENS", 4)
        patch.setattr(build, "STRETCH", STEPS)
        model = engine_model().to(device)
        size = 200 if pages is None else pages
        return build.paged_decoder(
            model,
            (STOP,),
            max_sequence_tokens=LONGEST,
            max_concurrent_samples=rows,
            cache_bytes=size * build.pool_shape(model).page_bytes,
            **options,
        )


def crowded(rows: int = 6, device: str = "cpu") -> Decoder:
    """Its pool holds one sequence of full length: others are interrupted, and begin again from what they had."""
    return paged(rows, minimum_pages(LONGEST, 4), device)


def model_of(decoder: Decoder) -> Any:
    return decoder._runner.model  # type: ignore[attr-defined]


@torch.no_grad()
def push(decoder: Decoder, version: int) -> None:
    theirs = dict(PLAIN[version % len(PLAIN)].named_parameters())
    for name, parameter in model_of(decoder).named_parameters():
        parameter.copy_(theirs[name])
    decoder.use_weights(version)


@torch.no_grad()
def expected_logprobs(prompt: Iterable[int], sample: Sample, continued: Iterable[int] = ()) -> np.ndarray:
    """Of each token, given the version that it carries: keys and values are kept as they were, and computed anew by the
    weights at hand where the sample was ``continued`` with so many tokens."""
    tokens, versions = sample.token_ids.tolist(), sample.versions.tolist()
    whole = [*prompt, *tokens]
    first = len(whole) - len(tokens)
    begins = sorted({0, *continued, *(t for t in range(1, len(tokens)) if versions[t] != versions[t - 1])})
    out: list[np.ndarray] = []
    cache = None
    for begin, end in itertools.pairwise([*begins, len(tokens)]):
        anew = begin == 0 or begin in continued
        known = 0 if anew else first + begin - 1  # the token before has no key yet
        model = PLAIN[versions[begin] % len(PLAIN)]
        ids = torch.tensor([whole[known : first + end - 1]])
        found = model(ids, past_key_values=None if anew else cache, use_cache=True)
        cache = found.past_key_values
        logprobs = torch.log_softmax(found.logits[0, -(end - begin) :].float(), -1)
        out.append(logprobs.gather(1, torch.tensor(tokens[begin:end])[:, None])[:, 0].numpy())
    return np.concatenate(out)


def uncut(make: Callable[..., Decoder]) -> dict[tuple[int, int], Sample]:
    """What the first weights say without any interruption."""
    decoder = make()
    for request in ASKED:
        decoder.submit(0, request)
    found: list[tuple[int, Sample]] = []
    while decoder.busy:
        found += decoder.step()
    return {(s.request_id, s.index): s for _, s in found}


WHOLE = {make: uncut(make) for make in (slots, paged, crowded)}
EVENTS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["push", "push", "continue", "sleep", 1, 2, 4, 5, 6, 7])),
    min_size=4,
    max_size=12,
)
"""After so many steps: new weights, a cancellation of some of the requests (bits of a number), a nap of all, ..."""


@pytest.mark.parametrize("make", [slots, paged, crowded])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=EVENTS, rows=st.integers(1, 6))
def test_each_token_is_of_the_version_that_it_carries(make: Any, events: list[tuple[int, Any]], rows: int) -> None:
    check_run(make, events, rows)


def test_who_is_interrupted_keeps_its_versions() -> None:
    assert check_run(crowded, [(2, "push")] * 9, 6).preemptions > 3


def check_run(make: Any, events: list[tuple[int, Any]], rows: int, **options: Any) -> Any:
    decoder = make(rows, **options)
    found: dict[tuple[int, int], Sample] = {}
    cut: dict[tuple[int, int], set[int]] = {}  # lengths with which each sample was continued
    drafts: dict[tuple[int, int], Draft] = {}
    asked: dict[int, tuple[int, list[int]]] = {}  # request in flight: the one it is part of, and which samples
    away: dict[int, list[int]] = {}  # samples that were cancelled, by request
    named: dict[int, tuple[int, int]] = {}  # samples by seed
    version, new_id = 0, itertools.count()
    start = decoder._runner.start

    def noted(starts: Any) -> None:
        for one in starts:
            cut[named[one.seed]].add(len(one.done.tokens))
        start(starts)

    decoder._runner.start = noted  # type: ignore[method-assign]

    def submit(number: int, which: list[int]) -> None:
        request, have = ASKED[number], [(place, drafts.get((number, i))) for place, i in enumerate(which)]
        for i in which:
            cut.setdefault((number, i), set()).add(len(drafts[number, i].token_ids) if (number, i) in drafts else 0)
            named[request.seeds[i]] = number, i
        again = tuple(replace(draft, index=place) for place, draft in have if draft is not None)
        ready = replace(request, id=next(new_id), seeds=tuple(request.seeds[i] for i in which), drafts=again)
        asked[ready.id] = number, which
        decoder.check(ready)
        decoder.submit(0, ready)

    def receive(samples: Iterable[tuple[int, Sample]]) -> None:
        for _, sample in samples:
            number, which = asked[sample.request_id]
            assert found.setdefault((number, which[sample.index]), sample) is sample, "came twice"

    def cancel(numbers: list[int]) -> None:
        receive(decoder.finished())
        ids = [i for i, (number, _) in asked.items() if number in numbers]
        for _, draft in decoder.drafts():
            if draft.request_id in ids:
                number, which = asked[draft.request_id]
                drafts[number, which[draft.index]] = draft
        decoder.cancel(lambda _, request: request.id in ids)
        assert decoder.cancel(lambda _, request: request.id in ids) == []
        for i in ids:
            number, which = asked.pop(i)
            if left := [j for j in which if (number, j) not in found]:
                away.setdefault(number, []).extend(left)

    def go_on() -> None:
        for number in list(away):
            submit(number, away.pop(number))

    for number in range(len(ASKED)):
        submit(number, [0, 1, 2])
    for steps, what in [*events, (0, "continue")]:
        for _ in range(steps):
            receive(decoder.step() if decoder.busy else [])
        if what == "push":
            version += 1
            push(decoder, version)
        elif what == "continue":
            go_on()
        else:
            cancel([n for n in range(3) if what == "sleep" or what >> n & 1])
        if what == "sleep":
            decoder.sleep()
            decoder.wake()
    while decoder.busy:
        receive(decoder.step())
    check_samples(make, found, cut, drafts, version)
    return decoder


def check_samples(make: Any, found: Any, cut: Any, drafts: Any, version: int) -> None:
    assert sorted(found) == sorted(WHOLE[make])
    for (number, i), sample in found.items():
        assert (np.diff(sample.versions) >= 0).all() and set(sample.versions.tolist()) <= set(range(version + 1))
        if draft := drafts.get((number, i)):
            n = len(draft.token_ids)
            arrays = [a[:n].tolist() for a in (sample.token_ids, sample.logprobs, sample.versions)]
            assert arrays == [list(a) for a in (draft.token_ids, draft.logprobs, draft.versions)] and n < sample.length
        if not version:
            assert sample.token_ids.tolist() == WHOLE[make][number, i].token_ids.tolist()
        wanted = expected_logprobs(ASKED[number].prompt_ids, sample, cut[number, i])
        np.testing.assert_allclose(sample.logprobs, wanted, atol=1e-3)


@pytest.mark.parametrize("make", [slots, paged])
def test_a_stop_text_half_written_is_found_after_a_continuation(make: Any) -> None:
    """The text is that of tokens 6 and 7 of a sample, which is cancelled with 6."""
    whole = WHOLE[make][2, 0]
    text = read(whole.token_ids[5:7])
    request = replace(ASKED[2], seeds=ASKED[2].seeds[:1], sampling=Sampling(1.0, LIMIT, stop=(text,)))
    decoder = make(decode=read)
    decoder.submit(0, request)
    while not (found := decoder.drafts()) or len(found[0][1].token_ids) < 6:
        assert decoder.step() == []
    decoder.cancel(lambda *_: True)
    decoder.submit(0, replace(request, drafts=(found[0][1],)))
    samples: list[tuple[int, Sample]] = []
    while decoder.busy:
        samples += decoder.step()
    ((_, sample),) = samples
    assert (sample.token_ids.tolist(), sample.finish_reason) == (whole.token_ids[:7].tolist(), "stop")


def read(ids: Iterable[int]) -> str:
    return "".join(chr(0x4E00 + int(i)) for i in ids)


@pytest.mark.parametrize("make", [slots, paged])
def test_a_stream_whose_requests_are_all_cancelled_ends_at_once(make: Any) -> None:
    """While weights come, while paused, before the first token: what there is comes back as drafts, and that once."""

    async def run() -> None:
        engine = NativeEngine(engine_model(), (STOP,), max_sequence_tokens=LONGEST, max_concurrent_samples=4)
        engine._decoder = make(2)
        engine._parameters = dict(model_of(engine._decoder).named_parameters())
        weights = list(PLAIN[1].named_parameters())
        asked = replace(ASKED[2], sampling=Sampling(1.0, LIMIT))
        stream = engine.stream([asked])
        begun = await anext(stream)
        await engine.begin(1)
        await engine.put(weights[:2])
        drafts = await engine.cancel({asked.id, 99})
        assert isinstance(begun, Draft) and 0 < len(drafts) <= 2 and await engine.cancel({asked.id}) == []
        assert all(isinstance(e, Draft | Sample) for e in await asyncio.wait_for(rest(stream), 5))
        await hand_over(engine, 1, weights)
        await engine.sleep()
        await engine.wake()
        await engine.pause()
        waiting = asyncio.ensure_future(rest(engine.generate([asked])))
        while not engine._decoder.busy:
            await asyncio.sleep(0)
        assert await engine.cancel({asked.id}) == [] and await asyncio.wait_for(waiting, 5) == []
        await engine.resume()
        again = {s.index: s for s in await rest(engine.generate([replace(asked, drafts=tuple(drafts))]))}
        for draft in drafts:
            sample, n = again[draft.index], len(draft.token_ids)
            assert sample.token_ids[:n].tolist() == list(draft.token_ids)
            assert sample.versions.tolist() == [0] * n + [1] * (sample.length - n)
        assert sorted(again) == [0, 1, 2]
        await engine.close()

    async def rest(stream: Any) -> list[Any]:
        return [event async for event in stream]

    asyncio.run(run())


def check_stream(decoder: Decoder) -> None:
    """What is told of samples, while the device is at the next tokens of theirs and weights change, is how they begin:
    tokens, log-probabilities and versions to the bit."""

    async def run() -> list[Draft | Sample]:
        engine = NativeEngine(engine_model(), (STOP,), max_sequence_tokens=LONGEST, max_concurrent_samples=4)
        engine._decoder, engine._parameters = decoder, dict(model_of(decoder).named_parameters())
        events: list[Draft | Sample] = []
        async for event in engine.stream(ASKED):
            events.append(event)
            if len(events) in (5, 15, 25):
                await engine.pause()
                await hand_over(engine, engine.version + 1, PLAIN[len(events) // 10].named_parameters())
                await engine.resume()
        await engine.close()
        return events

    shown: dict[tuple[int, int], list[tuple[int, float, int]]] = {}
    found: dict[tuple[int, int], Sample] = {}
    for event in asyncio.run(run()):
        place = event.request_id, event.index
        told = shown.setdefault(place, [])
        assert place not in found
        if isinstance(event, Draft):
            assert event.start == len(told)
            told += zip(event.token_ids, event.logprobs, event.versions, strict=True)
        else:
            found[place] = event
            whole = [*zip(*(a.tolist() for a in (event.token_ids, event.logprobs, event.versions)), strict=True)]
            assert told == whole[: len(told)] and len(told) < len(whole) and (np.diff(event.versions) >= 0).all()
    assert found.keys() == WHOLE[slots].keys() and sum(map(len, shown.values())) > 20
    assert len({version for told in shown.values() for *_, version in told}) > 1


@pytest.mark.parametrize("make", [slots, paged, crowded])
def test_what_a_stream_tells_of_a_sample_is_how_it_begins(make: Any) -> None:
    check_stream(make(4))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [paged, crowded])
def test_what_a_stream_tells_of_a_sample_on_a_gpu_is_how_it_begins(make: Any) -> None:
    check_stream(make(4, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [paged, crowded])
def test_on_a_gpu_each_token_is_of_the_version_that_it_carries(make: Any) -> None:
    """Compiled layers and captured graphs: one decoder, so that what it keeps from before is found."""
    rng = np.random.default_rng(3)
    kinds: list[Any] = ["push", "push", "continue", "sleep", 1, 2, 4, 7]
    for rows in (2, 6):
        events = [(int(rng.integers(0, 4)), kinds[int(rng.integers(len(kinds)))]) for _ in range(60)]
        check_run(make, events, rows, device="cuda")
