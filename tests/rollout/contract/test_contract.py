"""What every engine has to do, whichever it is: one suite, over both decoders of the native engine, `dapo serve`
and vLLM.

What an engine does not offer is a row of :data:`LACKS`, with the reason. Log-probabilities are held against the
trainer's own float32 forward pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import subjects
import torch
from subjects import PROMPT, RESPONSE, STOPS, VOCABULARY, Subject, events, started

from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, InterruptibleEngine, Request, Sampling

LACKS = {
    ("openai", "drafts"): "each token would cost a message",
    ("openai", "cancel keeps tokens"): "what samples have so far is not known before they come whole",
    ("openai", "continue"): "the completions API has no way to say it; its restart begins samples anew",
    ("openai", "pause"): "the server may have others to serve",
    ("openai", "refuse sleep"): "the server's memory is its own, so sleep does nothing",
    ("openai", "likeliest"): "training has no use for them, and evaluation shows none",
    ("openai", "likeliest before truncation"): "as before",
    ("vllm", "likeliest before truncation"): "its engine reports all log-probabilities after truncation",
    ("vllm", "min_p beside top_k"): "its engine applies min_p first",
    ("vllm", "temperature 3"): "its engine refuses more than 2",
    ("vllm", "temperature 0.005"): "its engine makes 0.01 of it",
}
"""What an engine does not offer, and why."""
PLAIN, LONG = Sampling(1.0, 12), Sampling(1.0, RESPONSE)
NOISE = 1e-3
"""Nats: float32 in other orders of summation."""


def _marked(kind: str, *more: str) -> Any:
    return pytest.param(kind, *more, marks=[pytest.mark.vllm] if kind == "vllm" else [])


def who(*abilities: str) -> Any:
    """The test is for engines that offer all of these."""
    kinds = [kind for kind in subjects.MAKERS if not any((kind, ability) in LACKS for ability in abilities)]
    return pytest.mark.parametrize("kind", [_marked(kind) for kind in kinds], indirect=True)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The engine of a kind, started once."""
    folder = subjects.save(tmp_path_factory.mktemp("contract") / "tiny")
    running: dict[str, Subject] = {}
    with ExitStack() as stack:

        def find(kind: str) -> Subject:
            if kind not in running or running[kind].closed:
                running[kind] = stack.enter_context(started(kind, folder))
            return running[kind]

        yield find


@pytest.fixture(scope="module")  # so that tests come kind by kind, and one of pytest's workers starts it
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def subject(kind: str, engines: Any) -> Subject:
    found: Subject = engines(kind)
    if found.seed:
        found.run(found.give(0))
    return found


# -- samples -------------------------------------------------------------------------------------------------------


@who()
def test_every_sample_comes_once_in_the_place_of_its_seed_and_ends_as_it_says(subject: Subject) -> None:
    """More samples than the engine has rows for. The last token, and no other, is a stop token, also at the limit."""
    requests = [subject.request(range(30, 31 + n), range(10 * n, 10 * n + n), LONG) for n in range(1, 8)]
    requests.append(subject.request([40, 41], range(60), Sampling(1.0, 1)))
    found = subject.run(subject.collect(*requests))
    assert sorted(found) == [(r.id, index) for r in requests for index in range(len(r.seeds))]
    for (number, _), sample in found.items():
        limit = next(r.sampling.max_tokens for r in requests if r.id == number)
        *before, last = sample.token_ids.tolist()
        assert not set(before) & set(STOPS) and sample.length <= limit
        assert sample.finish_reason == ("stop" if last in STOPS else "length")
        assert last in STOPS or sample.length == limit
        assert (sample.versions == subject.engine.version).all()
        assert (sample.token_ids.dtype, sample.logprobs.dtype) == (np.int32, np.float32)
    assert {(s.length == 1, s.finish_reason) for s in found.values()} >= {(True, "stop"), (True, "length")}
    assert isinstance(subject.engine, InterruptibleEngine)


@who()
def test_seeds_decide_samples_whatever_else_is_in_flight(subject: Subject) -> None:
    """Of one prompt, and of others around it; equal seeds give equal samples, others differ."""
    seeds = (3, 2**64 - 1, 3, 2**63)
    first, again = (subject.request([50, 60, 70], seeds, LONG) for _ in range(2))
    alone = [s.token_ids.tolist() for s in subject.samples(first)]
    others = [subject.request([50 + n, 60], range(3), PLAIN) for n in range(4)]
    crowd = subject.run(subject.collect(*others, again))
    assert [crowd[again.id, index].token_ids.tolist() for index in range(4)] == alone
    assert alone[0] == alone[2] and len({tuple(ids) for ids in alone}) == 3


@who()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_trainer(subject: Subject, temperature: float) -> None:
    request = subject.request(range(30, 45), range(6), Sampling(temperature, RESPONSE))
    assert subject.differs_from_trainer(request, subject.samples(request)) < NOISE


@who()
def test_at_temperature_0_the_likeliest_token_comes(subject: Subject) -> None:
    request = subject.request([65, 66, 67], (1, 2), Sampling(0.0, RESPONSE))
    ids = [s.token_ids.tolist() for s in subject.samples(request)]
    with torch.no_grad():
        logits = subjects.model_of(0)(torch.tensor([[65, 66, 67, *ids[0]]])).logits[0, 2:-1]
    assert ids[0] == ids[1] == logits.argmax(-1).tolist()


@who()
def test_a_response_ends_with_the_token_that_completes_a_stop_text(subject: Subject) -> None:
    """The same tokens as without, up to that one, which belongs to the response."""
    free = subject.samples(subject.request([70, 71], range(8), LONG))
    read = [[subject.template.decode(s.token_ids[:n].tolist()) for n in range(1, s.length + 1)] for s in free]
    pairs = [text[-1][n : n + 2] for text in read for n in range(len(text[-1]) - 1)]
    texts = tuple(pair for pair in pairs if pair.isascii())[::3]  # of two tokens each
    stopped = subject.samples(subject.request([70, 71], range(8), replace(LONG, stop=texts)))
    ends = [next((n for n, text in enumerate(r, 1) if any(t in text for t in texts)), None) for r in read]
    assert any(end is not None and end < s.length for end, s in zip(ends, free, strict=True)) and None in ends
    for before, after, end in zip(free, stopped, ends, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()[:end]
        assert after.finish_reason == ("stop" if end else before.finish_reason)
        assert np.allclose(after.logprobs, before.logprobs[:end], atol=NOISE)


@who()
def test_streams_at_once_each_have_their_own_samples(subject: Subject) -> None:
    groups = [[subject.request([30 + n, 40 + i], range(3), PLAIN) for i in range(3)] for n in range(4)]

    async def all_at_once() -> list[dict[tuple[int, int], Sample]]:
        return await asyncio.gather(*(subject.collect(*group) for group in groups))

    for group, found in zip(groups, subject.run(all_at_once()), strict=True):
        assert sorted(found) == [(r.id, index) for r in group for index in range(3)]


def _likeliest(subject: Subject, top_k: int) -> list[Sample]:
    request = subject.request([65, 66], (1, 2), Sampling(0.5, 6, top_k=top_k, top_logprobs=3))
    assert subject.samples(subject.request([65, 66], (1,), PLAIN))[0].top_ids is None
    samples = subject.samples(request)
    for sample in samples:
        assert sample.top_ids is not None and sample.top_logprobs is not None
        assert (sample.top_ids.dtype, sample.top_logprobs.dtype) == (np.int32, np.float32)
        with torch.no_grad():
            logits = subjects.model_of(0)(torch.tensor([[65, 66, *sample.token_ids.tolist()]])).logits[0, 1:-1]
        expected = torch.log_softmax(logits / 0.5, -1).topk(3)
        assert sample.top_ids.tolist() == expected.indices.tolist()
        assert np.allclose(sample.top_logprobs, expected.values.numpy(), atol=NOISE)
    return samples


@who("likeliest")
def test_the_likeliest_tokens_come_with_the_sample_if_they_are_asked_for(subject: Subject) -> None:
    assert len(_likeliest(subject, 0)) == 2


@who("likeliest before truncation")
def test_the_likeliest_tokens_are_those_before_truncation(subject: Subject) -> None:
    """Which leaves one here."""
    for sample in _likeliest(subject, 1):
        assert sample.top_ids is not None and sample.token_ids.tolist() == sample.top_ids[:, 0].tolist()
        assert sample.logprobs.tolist() == pytest.approx([0.0] * sample.length)


REFUSED = [
    (Request(3, (), (1,), PLAIN), "the prompt is empty|prompt"),
    (Request(3, (5, VOCABULARY), (1,), PLAIN), f"token ids must be in 0..{VOCABULARY - 1}"),
    (Request(3, (5,) * (PROMPT + 29), (1,), PLAIN), "229 prompt tokens and up to 12 response tokens exceed"),
    (Request(3, (5,), (1,), Sampling(1.0, 0)), "max_tokens"),
    (Request(3, (5,), (1,), Sampling(float("nan"), 8)), "temperature|not JSON|nan"),
    (Request(3, (5,), (1,), Sampling(1.0, 8, stop=("",))), "stop"),
]


@who()
@pytest.mark.parametrize(("request_", "message"), REFUSED)
def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_is_served(
    subject: Subject, request_: Request, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        subject.run(subject.collect(request_))
    assert len(subject.samples(subject.request([5] * (PROMPT + RESPONSE - 12), (1,), PLAIN))) == 1  # exactly the limit


# -- what is in flight ---------------------------------------------------------------------------------------------


@who()
def test_a_consumer_that_stops_iterating_ends_its_samples(subject: Subject) -> None:
    async def leave() -> None:
        stream = subject.engine.generate([subject.request([5 + n], range(100), LONG) for n in range(4)])
        await anext(stream)
        await stream.aclose()
        # what is left of 400 samples would be in the way of these, and of sleep
        await asyncio.wait_for(subject.collect(subject.request([6], (1, 2), PLAIN)), 10)
        await subject.engine.sleep()
        await subject.engine.wake()

    subject.run(leave())


@who("drafts")
def test_drafts_are_the_beginnings_of_the_samples_that_come(subject: Subject) -> None:
    request = subject.request([40, 50], range(6), LONG)
    told = subject.run(events(subject.engine.stream([request])))
    samples = {event.index: event for event in told if isinstance(event, Sample)}
    assert sorted(samples) == list(range(6)) and any(isinstance(event, Draft) for event in told)
    known = dict.fromkeys(samples, 0)
    for draft in (event for event in told if isinstance(event, Draft)):
        sample, size = samples[draft.index], draft.start + len(draft.token_ids)
        assert draft.start == known[draft.index] <= size <= sample.length
        assert list(draft.token_ids) == sample.token_ids[draft.start : size].tolist()
        assert list(draft.logprobs) == pytest.approx(sample.logprobs[draft.start : size].tolist())
        known[draft.index] = size


@who()
def test_streams_of_cancelled_requests_end_and_unknown_ids_are_ignored(subject: Subject) -> None:
    gone = [subject.request([40, 41 + n], range(100), LONG) for n in range(8)]
    kept, other = (subject.request([40], range(3), PLAIN) for _ in range(2))
    ids = {request.id for request in gone}

    async def run() -> tuple[list[Any], list[Any]]:
        both = asyncio.create_task(events(subject.engine.generate([*gone[:4], kept, *gone[4:]])))
        alone = asyncio.create_task(events(subject.engine.generate([other])))
        await asyncio.sleep(0.02)
        assert await subject.engine.cancel({10**9}) == []
        await subject.engine.cancel(ids | {10**9})
        assert await subject.engine.cancel(ids) == []
        return await asyncio.wait_for(both, 20), await alone

    found, alone = subject.run(run())
    assert sorted(s.index for s in found if s.request_id == kept.id) == sorted(s.index for s in alone) == [0, 1, 2]
    assert len([s for s in found if s.request_id in ids]) < 800


@who("drafts", "cancel keeps tokens", "continue")
def test_cancelled_samples_keep_their_tokens_and_are_continued(subject: Subject) -> None:
    request = subject.request(range(30, 40), range(400), LONG)
    found: list[Any] = []

    async def cut() -> list[Draft]:
        drafts: list[Draft] = []
        async for event in subject.engine.stream([request]):
            found.append(event)
            if not drafts and sum(isinstance(event, Sample) for event in found) == 3:  # all rows are in use
                drafts = await subject.engine.cancel({request.id})
        return drafts

    drafts = subject.run(cut())
    if not drafts:  # seen once: a process of its own had sampled all before a busy machine got here
        found.clear()
        drafts = subject.run(cut())
    whole = {event.index: event for event in found if isinstance(event, Sample)}
    assert drafts and not {d.index for d in drafts} & set(whole)
    grown = {d.index: d.start + len(d.token_ids) for d in found if isinstance(d, Draft)}
    assert all(len(d.token_ids) >= grown.get(d.index, 0) for d in drafts), "tokens that were told of are lost"
    left = [index for index in range(400) if index not in whole]
    again = tuple(replace(d, index=left.index(d.index)) for d in drafts)
    rest = subject.request(request.prompt_ids, [request.seeds[i] for i in left], LONG, drafts=again)
    continued = subject.samples(rest)
    for draft in again:
        sample, size = continued[draft.index], len(draft.token_ids)
        begun = [a[:size].tolist() for a in (sample.token_ids, sample.logprobs, sample.versions)]
        assert begun == [list(a) for a in (draft.token_ids, draft.logprobs, draft.versions)] and sample.length > size
        assert sample.length == RESPONSE or sample.token_ids[-1] in STOPS
    assert subject.differs_from_trainer(rest, continued) < NOISE


@who("pause", "drafts")
def test_nothing_is_sampled_while_paused_and_all_goes_on_afterwards(subject: Subject) -> None:
    request, late = subject.request([40, 41], range(400), LONG), subject.request([42], (1, 2), PLAIN)

    async def run() -> None:
        told: list[Any] = []

        async def read() -> None:
            async for event in subject.engine.stream([request]):
                told.append(event)

        reading = asyncio.create_task(read())
        while not told:
            await asyncio.sleep(0.005)
        await subject.engine.pause()
        try:
            await asyncio.sleep(0.1)  # what was sampled before is on its way
            count, waiting = len(told), asyncio.create_task(subject.collect(late))
            await asyncio.sleep(0.3)
            assert len(told) == count and not waiting.done()  # a busy machine may have sampled all of the first before
        finally:
            await subject.engine.resume()
            await subject.engine.resume()
        await asyncio.wait_for(asyncio.gather(reading, waiting), 30)
        samples = [event for event in told if isinstance(event, Sample)]
        assert sorted(s.index for s in samples) == list(range(400)) and len(waiting.result()) == 2
        assert subject.differs_from_trainer(request, samples) < NOISE

    subject.run(run())


# -- weights and memory --------------------------------------------------------------------------------------------


@who()
def test_new_weights_are_sampled_from_at_once_and_no_cache_is_stale(subject: Subject) -> None:
    """A prompt long enough to be kept by a prefix cache, sampled from before and after."""
    request = subject.request(np.random.default_rng(0).integers(30, 200, PROMPT).tolist(), range(4), LONG)
    before = subject.samples(request)
    assert subject.differs_from_trainer(request, before) < NOISE
    version = subject.engine.version
    for seed in (1, 2):
        subject.run(subject.give(seed))
        again = replace(request, id=next(subject.numbers))
        after = subject.samples(again)
        assert subject.differs_from_trainer(again, after) < NOISE  # which also wants all of the version in use
        assert [s.token_ids.tolist() for s in after] != [s.token_ids.tolist() for s in before]
    assert subject.engine.version == version + 2
    subject.run(subject.give(2, version=version + 2))  # as after an update that was skipped: no fault


@who()
def test_versions_of_samples_in_flight_never_fall(subject: Subject) -> None:
    requests = [subject.request([40, 41 + n], range(100), LONG) for n in range(4)]
    old = subject.engine.version

    async def run() -> list[Any]:
        reading = asyncio.create_task(events(subject.engine.generate(requests)))
        await asyncio.sleep(0.05)
        await subject.give(1)
        return await asyncio.wait_for(reading, 60)

    found = subject.run(run())
    assert len({(s.request_id, s.index) for s in found}) == len(found) == 400
    assert all((np.diff(s.versions) >= 0).all() for s in found)
    assert {v for s in found for v in s.versions.tolist()} <= {old, old + 1}
    assert old + 1 in found[-1].versions


NAME = "model.layers.1.self_attn.k_proj.weight"  # some engines hold it in one tensor with those of q and v


def _altered(name: str, change: Any) -> Any:
    return lambda tensors: [(n, change(t) if n == name else t) for n, t in tensors]


SPOILT = {
    "lost": lambda tensors: [(n, t) for n, t in tensors if n != NAME],
    "unknown": lambda tensors: [*tensors, ("other.weight", torch.ones(3))],
    "of another shape": _altered(NAME, lambda t: t[:-1]),
}


@who()
@pytest.mark.parametrize("fault", SPOILT)
def test_weights_that_are_not_whole_are_refused_by_name_and_never_sampled_from(subject: Subject, fault: str) -> None:
    version = subject.engine.version
    with pytest.raises(EngineError, match="other.weight" if fault == "unknown" else NAME):
        subject.run(subject.give(1, SPOILT[fault]))
    assert subject.engine.version == version
    if fault == "lost":
        with pytest.raises(EngineError):
            subject.run(asyncio.wait_for(subject.collect(subject.request([5], (1,), PLAIN)), 20))
    subject.run(subject.give(1))
    request = subject.request([30, 31], range(4), PLAIN)
    assert subject.differs_from_trainer(request, subject.samples(request)) < NOISE


@who()
@pytest.mark.parametrize("fault", ["altered", "doubled"])
def test_weights_that_change_on_the_way_are_refused_by_name(
    subject: Subject, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = subject.engine.put

    async def altered(bucket: Any) -> None:
        changed = [(n, t * 1.5 if n == NAME else t) for n, t in bucket]
        await put(changed)
        if fault == "doubled":
            await put(bucket)

    monkeypatch.setattr(subject.engine, "put", altered)
    with pytest.raises(EngineError, match=NAME):
        subject.run(subject.give(1))
    monkeypatch.undo()
    subject.run(subject.give(1))


@who()
def test_versions_never_fall(subject: Subject) -> None:
    version = subject.engine.version
    with pytest.raises(EngineError, match=f"version {version - 1} was given after version {version}"):
        subject.run(subject.give(1, version=version - 1))
    assert len(subject.samples(subject.request([5], (1,), PLAIN))) == 1


@who()
def test_after_a_nap_log_probabilities_are_the_same(subject: Subject) -> None:
    """Also where weights came meanwhile."""

    async def nap(seed: int) -> None:
        await subject.engine.sleep()
        await subject.engine.sleep()
        if seed:
            await subject.give(seed)
        await subject.engine.wake()
        await subject.engine.wake()

    request = subject.request(range(30, 50), range(4), LONG)
    before = subject.samples(request)
    subject.run(nap(0))
    after = subject.samples(replace(request, id=next(subject.numbers)))
    assert [s.token_ids.tolist() for s in after] == [s.token_ids.tolist() for s in before]
    for one, other in zip(before, after, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=NOISE)
    subject.run(nap(1))
    again = replace(request, id=next(subject.numbers))
    assert subject.differs_from_trainer(again, subject.samples(again)) < NOISE


@who("refuse sleep")
def test_sleep_is_refused_while_samples_are_in_flight(subject: Subject) -> None:
    async def run() -> None:
        stream = subject.engine.generate([subject.request([5], range(60), LONG)])
        await anext(stream)
        with pytest.raises(EngineError, match="in flight"):
            await subject.engine.sleep()
        assert len([sample async for sample in stream]) == 59

    subject.run(run())


# -- what an engine does not offer, and its end ----------------------------------------------------------------------


def _continuation(subject: Subject) -> Request:
    return subject.request([5], (1,), LONG, drafts=(Draft(0, 0, (30,), (-1.0,), (0,)),))


ASKED = {
    "pause": lambda subject: subject.engine.pause(),
    "continue": lambda subject: subject.collect(_continuation(subject)),
    "likeliest": lambda subject: subject.collect(subject.request([5], (1,), Sampling(1.0, 4, top_logprobs=2))),
    "likeliest before truncation": lambda subject: subject.collect(
        subject.request([5], (1,), Sampling(1.0, 4, top_k=2, top_logprobs=2))
    ),
    "min_p beside top_k": lambda subject: subject.collect(
        subject.request([5], (1,), Sampling(1.0, 4, top_k=2, min_p=0.1))
    ),
    "temperature 3": lambda subject: subject.collect(subject.request([5], (1,), Sampling(3.0, 4))),
    "temperature 0.005": lambda subject: subject.collect(subject.request([5], (1,), Sampling(0.005, 4))),
}


@pytest.mark.parametrize(("kind", "ability"), [_marked(*row) for row in LACKS if row[1] in ASKED], indirect=["kind"])
def test_what_an_engine_does_not_offer_it_refuses(subject: Subject, ability: str) -> None:
    with pytest.raises(EngineError):
        subject.run(ASKED[ability](subject))


@who()
def test_closing_ends_the_wait_of_a_consumer_in_time(subject: Subject) -> None:
    """The last test of the file: the next one would start the engine again."""

    async def run() -> None:
        requests = [subject.request([5 + n], range(100), LONG) for n in range(8)]
        begun = asyncio.Event()

        async def collect() -> None:
            async for _ in subject.engine.generate(requests):
                begun.set()

        waiting = asyncio.create_task(collect())
        await begun.wait()  # the others are under way
        subject.closed = True
        await asyncio.wait_for(subject.engine.close(), 30)
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(EngineError, match="closed"):
            await subject.collect(subject.request([5], (1,), PLAIN))

    subject.run(run())
