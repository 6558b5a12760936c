"""The paged decoder with real models, on the CPU: the same tokens as the slot decoder, for every architecture.

The slot decoder is compared with Transformers in test_against_transformers.py. Kernels, compiled layers and graphs are
tested where there is a GPU (those marked gpu).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dapo.errors import ModelError, UserError
from dapo.model.adapters import new_adapter
from dapo.model.loading import copy_model, load_model
from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request, Sampling
from dapo.rollout.native.decoder import Decoder
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.paged import build
from dapo.rollout.native.paged import runner as runner_module
from dapo.rollout.native.paged.runner import ladder
from dapo.rollout.native.pages import minimum_pages
from dapo.rollout.native.runner import Variant
from dapo.rollout.native.slots import slot_decoder
from helpers import ARCHITECTURES, VOCAB, random_model

PAGE = 4
LONGEST = 64
PROMPT_LENGTHS = (1, 2, 5, 9, 23, 36)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PAGE_TOKENS", PAGE)
    monkeypatch.setattr(build, "STRETCH", 5)


def requests(sampling: Sampling, samples: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]
    return [Request(i, p, tuple(range(10 * i, 10 * i + samples)), sampling) for i, p in enumerate(prompts)]


def run(decoder: Decoder, asked: list[Request]) -> dict[tuple[int, int], Sample]:
    for request in asked:
        decoder.check(request)
        decoder.submit(0, request)
    out = []
    while decoder.busy:
        out += [sample for _, sample in decoder.step()]
    answers = {(s.request_id, s.index): s for s in out}
    assert len(answers) == len(out) == sum(len(r.seeds) for r in asked)
    return answers


def ready(model: Any) -> Any:
    return copy_model(load_model(copy.deepcopy(model)), torch.float32)


def paged(model: Any, rows: int = 16, pages: int | None = None, **options: Any) -> Decoder:
    model = ready(model)
    size = None if pages is None else pages * build.pool_shape(model).page_bytes
    return build.paged_decoder(
        model, (1,), max_sequence_tokens=LONGEST, max_concurrent_samples=rows, cache_bytes=size, **options
    )


def slots(model: Any) -> Decoder:
    return slot_decoder(ready(model), (1,), max_sequence_tokens=LONGEST, max_concurrent_samples=8)


def check_equal(ours: dict[tuple[int, int], Sample], theirs: dict[tuple[int, int], Sample], may_part: int = 0) -> None:
    """Same tokens; of ``may_part`` samples rounding may decide one, after which nothing can be compared."""
    assert ours.keys() == theirs.keys()
    parted = 0
    for key, sample in ours.items():
        other = theirs[key]
        n = min(sample.length, other.length)
        differ = np.flatnonzero(sample.token_ids[:n] != other.token_ids[:n])
        same = int(differ[0]) if len(differ) else n
        parted += bool(len(differ))
        np.testing.assert_allclose(sample.logprobs[:same], other.logprobs[:same], atol=1e-4)
        if not len(differ):
            assert sample.length == other.length and sample.finish_reason == other.finish_reason
    assert parted <= may_part


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_those_of_the_slot_decoder(architecture: str) -> None:
    model = random_model(architecture)
    asked = requests(Sampling(1.0, 24))
    check_equal(run(paged(model), asked), run(slots(model), asked))


def test_a_small_pool_preempts_and_changes_no_token() -> None:
    model = random_model("qwen2")
    asked = requests(Sampling(1.0, 24))
    decoder = paged(model, pages=minimum_pages(LONGEST, PAGE))
    answers = run(decoder, asked)
    assert decoder.preemptions >= 2
    check_equal(answers, run(slots(model), asked))


@pytest.mark.parametrize("make", [paged, slots])
def test_cancelled_samples_continue_as_if_they_had_never_stopped(make: Any) -> None:
    """Cancelled after 3 steps, or 3 stretches of 5, when some samples are done and others have not begun."""
    model = random_model("qwen2")
    asked = requests(Sampling(1.0, 24))
    whole, decoder = run(make(model), asked), make(model)
    for request in asked:
        decoder.submit(0, request)
    found = [sample for _ in range(3) for _, sample in decoder.step()]
    found += [sample for _, sample in decoder.finished()]
    drafts = [draft for _, draft in decoder.drafts()]
    assert len(decoder.cancel(lambda key, request: request.id < 9)) == 18 - len(found) and not decoder.busy
    came = {(sample.request_id, sample.index) for sample in found}
    left = [(r, i) for r in asked for i in range(3) if (r.id, i) not in came]
    have = {(d.request_id, d.index): (replace(d, index=0),) for d in drafts}
    # a request of its own for each, so that what has come need not be asked for
    again = [replace(r, id=n, seeds=(r.seeds[i],), drafts=have.get((r.id, i), ())) for n, (r, i) in enumerate(left)]
    for request in again:
        decoder.submit(0, request)
    waiting = {draft.token_ids for _, draft in decoder.drafts()}  # cancelled before they went on, they lose nothing
    assert waiting == {draft.token_ids for draft in drafts} and len(decoder.cancel(lambda key, _: True)) == len(again)
    rest = run(decoder, again)
    ours = {(s.request_id, s.index): s for s in found} | {(r.id, i): rest[n, 0] for n, (r, i) in enumerate(left)}
    check_equal(ours, whole)
    for draft in drafts:
        assert ours[draft.request_id, draft.index].logprobs[: len(draft.logprobs)].tolist() == list(draft.logprobs)


def test_what_has_finished_on_the_device_still_comes_when_its_request_is_cancelled() -> None:
    """Of a stretch that ended with one sample done and one under way, the first comes and the second leaves a draft."""
    model = random_model("qwen2")
    asked = [Request(0, (5, 6), (1,), Sampling(1.0, 4)), Request(1, (5, 6), (1,), Sampling(1.0, 24))]
    whole = run(slots(model), asked)

    async def cancelled() -> tuple[list[Sample], list[Draft]]:
        engine = NativeEngine(ready(model), (1,), max_sequence_tokens=LONGEST, max_concurrent_samples=4)
        engine._decoder = paged(model)
        await engine.pause()
        task = asyncio.ensure_future(anext(stream := engine.generate(asked)))
        while not engine._decoder.busy:
            await asyncio.sleep(0)
        assert await engine._call(engine._decoder.step) == []
        drafts = await engine.cancel({0, 1})
        found = [await task] + [sample async for sample in stream]
        await engine.close()
        return found, drafts

    (sample,), (draft,) = asyncio.run(cancelled())
    check_equal({(0, 0): sample}, {(0, 0): whole[0, 0]})
    assert draft.request_id == 1 and list(draft.token_ids) == whole[1, 0].token_ids[:5].tolist()


def test_truncated_and_greedy_rows_and_the_most_likely_tokens() -> None:
    model = random_model("llama")
    settings = [
        Sampling(0.0, 20),
        Sampling(0.7, 20, top_k=5, top_logprobs=4),
        Sampling(1.3, 20, top_p=0.8),
        Sampling(1.0, 20, min_p=0.1, top_logprobs=2),
        Sampling(1.0, 20),
        Sampling(1.0, 20, top_k=9, top_p=0.9),
    ]
    asked = [Request(r.id, r.prompt_ids, r.seeds, s) for r, s in zip(requests(settings[0]), settings, strict=True)]
    for pages in (None, minimum_pages(LONGEST, PAGE) + 12):
        ours, theirs = run(paged(model, pages=pages), asked), run(slots(model), asked)
        check_equal(ours, theirs)
        for key, sample in ours.items():
            other = theirs[key]
            wanted = asked[key[0]].sampling.top_logprobs
            if not wanted:
                assert sample.top_ids is None and sample.top_logprobs is None
            elif sample.token_ids.tolist() == other.token_ids.tolist():
                assert sample.top_ids is not None and sample.top_ids.shape == (sample.length, wanted)
                np.testing.assert_allclose(sample.top_logprobs, other.top_logprobs, atol=1e-4)


def test_stop_texts_end_a_response_within_a_stretch() -> None:
    model = random_model("qwen2")

    def decode(ids: Any) -> str:
        return "".join(chr(0x4E00 + int(i)) for i in ids)

    free = run(slots(model), requests(Sampling(1.0, 24)))
    text = decode(free[4, 0].token_ids[7:9])
    asked = requests(Sampling(1.0, 24, stop=(text,)))
    ours = run(paged(model, decode=decode), asked)
    assert ours[4, 0].token_ids.tolist() == free[4, 0].token_ids[:9].tolist()
    assert ours[4, 0].finish_reason == "stop" and ours[4, 0].logprobs.shape == (9,)
    with pytest.raises(EngineError, match="stop"):
        paged(model).check(asked[0])


def test_sleep_gives_the_pool_back_and_waking_changes_nothing() -> None:
    model = random_model("qwen2")
    decoder = paged(model)
    asked = requests(Sampling(1.0, 24))
    before = run(decoder, asked)
    address = decoder._runner.pool.address.data_ptr()  # type: ignore[attr-defined]
    decoder.sleep()
    assert not decoder._runner.pool.attached  # type: ignore[attr-defined]
    decoder.wake()
    decoder.wake()
    again = run(decoder, asked)
    assert decoder._runner.pool.address.data_ptr() == address  # type: ignore[attr-defined]
    assert all(again[key].token_ids.tolist() == before[key].token_ids.tolist() for key in before)


def test_a_pool_that_finds_no_memory_when_it_wakes_is_no_fault_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = paged(random_model("qwen2"))
    decoder.sleep()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"give rollout\.cache_gib a smaller value"):
        patch.setattr("dapo.rollout.native.paged.runner.torch.empty", full)
        patch.setattr("torch.cuda.mem_get_info", lambda device: (2**30, 2**36))
        decoder.wake()
    decoder.wake()  # once there is


def test_warming_up_touches_no_page_of_a_sequence() -> None:
    model = random_model("qwen2")
    asked = requests(Sampling(1.0, 24))
    decoder = paged(model)
    for request in asked:
        decoder.submit(0, request)
    out = decoder.step()
    decoder._runner.warm_up()  # type: ignore[attr-defined]
    while decoder.busy:
        out += decoder.step()
    check_equal({(s.request_id, s.index): s for _, s in out}, run(slots(model), asked))


@pytest.mark.parametrize(
    ("spare", "expected"), [(1, [[32, 16], [32, 16, 8], [32, 16, 8]]), (0, [[32], [32, 16, 8], [32, 16, 8]])]
)
def test_steps_for_fewer_rows_are_captured_in_long_stretches_and_with_memory_to_spare(
    spare: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in each, the most rows first; trying them between the steps of the others changes no token. A byte short of
    what 16 rows take, their step is captured once it is wanted, in the second stretch, and that for 8 ahead."""
    model = random_model("qwen2")
    decoder = paged(model, rows=40)
    runner = cast(Any, decoder._runner)
    recording: list[Any] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            recording.append(self)

        def capture_end(self) -> None:
            recording.pop()

        def replay(self) -> None:
            self.step()

    def step(rows: int, variant: Variant) -> None:
        if recording:
            recording[0].step = functools.partial(runner._step, rows, variant)
        else:
            runner._step(rows, variant)

    for name, fake in {
        "CUDAGraph": Graph,
        "Stream": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (free, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(runner_module, "LONG_STRETCH", 5)
    free = 2 * 16 * 8 * model.config.vocab_size + spare
    steps = runner._steps = runner_module._CudaSteps(step, runner.state)
    captured = []
    asked = [Request(0, (5, 6, 7), tuple(range(17)), Sampling(1.0, 13))]
    decoder.submit(0, asked[0])
    answers = []
    while decoder.busy:
        answers += decoder.step()
        captured.append([rows for rows, _ in steps._graphs])
    check_equal({(s.request_id, s.index): s for _, s in answers}, run(slots(model), asked))
    assert captured[:3] == expected, "the third stretch has 3 steps, too few to hide it"


def test_an_engine_that_sleeps_is_not_run() -> None:
    decoder = paged(random_model("qwen2"))
    decoder.sleep()
    decoder.submit(0, Request(0, (5,), (1,), Sampling(1.0, 3)))  # a prompt of one token needs no prefill
    with pytest.raises(EngineError, match="asleep"):
        decoder.step()
    decoder.reset()
    decoder.wake()
    assert run(decoder, [Request(0, (5,), (1,), Sampling(1.0, 3))])


def test_deterministic_steps_compute_all_rows() -> None:
    """The reference attention gathers as far as the longest row, so its last bits are not held against it."""
    decoder = paged(random_model("qwen2"), deterministic=True)
    runner = decoder._runner
    assert {runner.rung(rows) for rows in (1, 5, 16)} == {16}
    alone = run(decoder, requests(Sampling(1.0, 24))[:1])
    together = run(decoder, requests(Sampling(1.0, 24)))
    check_equal(alone, {key: together[key] for key in alone})


def test_memory_for_steps_and_prompts_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("qwen2")
    config = model.config
    wide = 4 * config.hidden_size + 3 * config.intermediate_size
    got = build._working_bytes(model, rows=10, longest=100_000)
    assert got == 10 * config.vocab_size * 4 + 2 * 100_000 * wide * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    assert build._free_bytes(torch.device("cuda"), 2 * 2**30) == int(10 * 2**30 * 0.9)
    assert build._free_bytes(torch.device("cuda"), 20 * 2**30) == 0


def test_a_cache_too_small_for_one_sequence_names_what_to_change() -> None:
    with pytest.raises(ModelError, match=r"cache of one sequence of 64 tokens takes .* KiB.*rollout\.cache_gib"):
        paged(random_model("qwen2"), pages=minimum_pages(LONGEST, PAGE) - 1)


@pytest.mark.parametrize("rows", [1, 5, 8, 100, 128, 1000, 1024, 3000])
def test_the_ladder_covers_all_rows_without_much_idle_work(rows: int) -> None:
    rungs = ladder(rows)
    assert rungs == sorted(set(rungs)) and rungs[-1] == rows
    assert all(b <= max(8, 2 * a) for a, b in itertools.pairwise(rungs))
    assert all(b <= 1.34 * a for a, b in itertools.pairwise(rungs) if a >= 256)


def paged_on_gpu(model: Any, rows: int = 16) -> Decoder:
    return build.paged_decoder(model, (1,), max_sequence_tokens=LONGEST, max_concurrent_samples=rows, cache_bytes=2**24)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_and_captured_steps_give_the_tokens_of_the_cpu(architecture: str) -> None:
    model = random_model(architecture)
    asked = requests(Sampling(1.0, 24))
    on_gpu = paged_on_gpu(ready(model).to("cuda"))
    ours = run(on_gpu, asked)
    check_equal(ours, run(slots(model), asked), may_part=1)
    on_gpu.sleep()
    on_gpu.wake()  # the graphs find the pool at its new place
    again = run(on_gpu, asked)
    assert all(again[key].token_ids.tolist() == ours[key].token_ids.tolist() for key in ours)


@pytest.mark.gpu
def test_steps_that_are_captured_while_others_run_compute_with_the_weights_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "LONG_STRETCH", 5)
    model, other = (random_model("qwen2", seed=seed) for seed in (1, 2))
    decoder = paged_on_gpu(ready(model).to("cuda"), rows=40)
    runner = cast(Any, decoder._runner)
    asked = requests(Sampling(1.0, 24), samples=6)
    check_equal(run(decoder, asked), run(slots(model), asked), may_part=2)
    assert {rows for rows, _ in runner._steps._graphs} == {8, 16, 32, 40}
    parameters = dict(runner.model.named_parameters())
    with torch.no_grad():
        for name, values in other.named_parameters():
            parameters[name].copy_(values)
    decoder.use_weights(1)
    check_equal(run(decoder, asked), run(slots(other), asked), may_part=2)


@pytest.mark.gpu
def test_a_base_whose_products_are_joined_is_the_one_below_an_adapter() -> None:
    """As they are served: one in memory, each in an engine of its own."""
    pytest.importorskip("peft")
    model = random_model("qwen2")
    base = ready(model).to("cuda")
    decoder = paged_on_gpu(base)
    twin = new_adapter(copy_model(base), 2, 4.0, ["q_proj", "up_proj"], seed=0).requires_grad_(False)  # adds nothing
    places = {p.data_ptr() for p in base.parameters()}
    assert places <= {p.data_ptr() for p in twin.parameters()}
    asked = requests(Sampling(1.0, 24))
    want = run(slots(model), asked)
    for one in (decoder, paged_on_gpu(twin)):
        check_equal(run(one, asked), want, may_part=1)


@pytest.mark.gpu
def test_no_memory_growth_and_no_recompilation_over_two_hundred_cycles() -> None:
    import torch._dynamo.utils as dynamo

    decoder = paged_on_gpu(ready(random_model("qwen2")).to("cuda"))
    used, compiled = [], []
    for cycle in range(200):
        run(decoder, requests(Sampling(1.0, 4 + cycle % 20)))
        decoder.use_weights(cycle + 1)
        decoder.sleep()
        used.append(torch.cuda.memory_allocated())
        decoder.wake()
        compiled.append(dynamo.counters["stats"]["unique_graphs"])
    assert max(used[20:]) == used[20] and max(compiled[20:]) == compiled[20]
