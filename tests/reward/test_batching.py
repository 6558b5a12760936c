"""Scores made in batches: each item gets its own result, nothing waits in order to fill a batch."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.reward.batching import Batcher


def gather(work, items, **options):
    async def run():
        batcher = Batcher(work, **options)
        try:
            return await asyncio.gather(*(batcher.submit(i) for i in items), return_exceptions=True)
        finally:
            await batcher.close()

    return asyncio.run(run())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-99, 99), max_size=40), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_every_item_gets_its_own_result_whatever_the_batches(items, size, concurrency, sort):
    sizes, at_once = [], [0, 0]

    async def square(batch):
        sizes.append(len(batch))
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0)
        at_once[0] -= 1
        return [x * x for x in batch]

    def by_size(waiting):
        return sorted(range(len(waiting)), key=lambda place: waiting[place])

    found = gather(square, items, size=size, concurrency=concurrency, pick=by_size if sort else None)
    assert found == [x * x for x in items]
    assert sum(sizes) == len(items) and max(sizes, default=0) <= size and at_once[1] <= concurrency


def test_a_lone_item_is_not_kept_waiting_and_those_that_wait_go_together():
    batches = []

    async def run():
        release = asyncio.Event()

        async def work(batch):
            batches.append(list(batch))
            await release.wait()
            return batch

        batcher = Batcher(work, size=8)
        tasks = [asyncio.create_task(batcher.submit(0))]
        await asyncio.sleep(0.01)
        assert batches == [[0]]
        tasks += [asyncio.create_task(batcher.submit(i)) for i in (1, 2, 3)]
        await asyncio.sleep(0.01)
        release.set()
        await asyncio.gather(*tasks)
        await batcher.close()

    asyncio.run(run())
    assert batches == [[0], [1, 2, 3]]


def test_without_a_size_a_batch_is_what_is_picked_or_all_that_waits():
    sizes = []

    async def work(batch):
        sizes.append(len(batch))
        await asyncio.sleep(0)
        return batch

    assert gather(work, list(range(9)), pick=lambda waiting: range(min(4, len(waiting)))) == list(range(9))
    assert gather(work, list(range(9))) == list(range(9))
    assert sizes == [4, 4, 1, 9]


def test_who_is_cancelled_while_it_closes_a_batcher_is_cancelled():
    async def run():
        async def work(batch):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.2)  # as a connection that is closed

        batcher = Batcher(work, size=1)
        waits = asyncio.create_task(batcher.submit(1))
        await asyncio.sleep(0.01)
        closes = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        closes.cancel()
        await asyncio.wait({closes, waits})
        assert closes.cancelled() and waits.cancelled()

    asyncio.run(run())


def test_an_error_reaches_the_batch_it_happened_in_and_no_other():
    async def work(batch):
        if 13 in batch:
            raise OSError("down")
        return batch

    found = gather(work, [1, 13, 2], size=1)
    assert found[0] == 1 and found[2] == 2 and isinstance(found[1], OSError)


def test_a_wrong_number_of_results_is_an_error():
    async def work(batch):
        return batch[:-1]

    (found,) = gather(work, [5], size=3)
    assert isinstance(found, ValueError) and "1 items gave 0 results" in str(found)


def test_who_is_cancelled_before_its_batch_is_not_worked_for():
    async def run():
        seen = []
        release = asyncio.Event()

        async def work(batch):
            seen.extend(batch)
            await release.wait()
            return batch

        batcher = Batcher(work, size=1)
        first, second = (asyncio.create_task(batcher.submit(i)) for i in (1, 2))
        await asyncio.sleep(0.01)
        second.cancel()
        release.set()
        assert await first == 1
        await asyncio.sleep(0.01)
        await batcher.close()
        assert seen == [1]
        with pytest.raises(RuntimeError, match="closed"):
            await batcher.submit(3)

    asyncio.run(run())


def test_who_is_cancelled_while_others_are_picked_is_not_among_them():
    async def run():
        seen, shown = [], []
        release = asyncio.Event()

        async def work(batch):
            seen.append(list(batch))
            await release.wait()
            return batch

        def pick(waiting):
            shown.append(list(waiting))
            return [place for place, _ in enumerate(waiting)]

        batcher = Batcher(work, pick=pick)
        tasks = [asyncio.create_task(batcher.submit(1))]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(batcher.submit(i)) for i in (2, 3, 4)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        release.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert (found[0], *found[2:]) == (1, 3, 4) and isinstance(found[1], asyncio.CancelledError)
        assert seen == shown == [[1], [3, 4]]
        await batcher.close()

    asyncio.run(run())
