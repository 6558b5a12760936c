"""Text as it is written: in whatever pieces tokens come, the pieces are the text, and no stop text is among them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.inference.stream import Part, Pieces, _Writer, written
from dapo.records import Sample
from dapo.rollout.engine import Draft, Request, Sampling

WORDS = ["", "▁a", "b", "▁", "▁c"]  # of a tokenizer that writes spaces before words; the first is a control token


def bytes_of(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def words_of(ids: Sequence[int]) -> str:
    """As sentencepiece: bytes that are no text (ids from 10 on) are read together, and are all lost if one is."""
    text, run = "", b""
    for one in [*ids, None]:
        if one is not None and one >= 10:
            run += bytes([one - 10])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run, text = b"", text + (WORDS[one] if one is not None else "")
    return text.replace("▁", " ").removeprefix(" ")


SNIPPETS = st.lists(st.sampled_from(["a", "é", "€", "😀", " ", "ab"]), max_size=12)
CUTS = st.lists(st.integers(1, 5), max_size=40)


def in_cuts(ids: list[int], cuts: list[int]) -> list[list[int]]:
    found, rest = [], ids
    for cut in cuts:
        found.append(rest[:cut])
        rest = rest[cut:]
    return [*found, rest]


@given(SNIPPETS, CUTS)
def test_bytes_in_any_cuts_make_the_text_and_no_half_character(snippets: list[str], cuts: list[int]) -> None:
    ids, pieces = list("".join(snippets).encode()), Pieces(bytes_of)
    told = [pieces.join(some) for some in in_cuts(ids, cuts)]
    told.append(pieces.join([], last=True))  # what is open is not read each time
    assert "".join(told) == bytes_of(ids) and "\ufffd" not in "".join(told)
    assert "".join(Pieces(bytes_of).add(ids, last=True)) == bytes_of(ids)


@given(st.lists(st.one_of(st.integers(0, 4), SNIPPETS), max_size=12), CUTS)
def test_words_with_bytes_between_them_too(parts: list[int | list[str]], cuts: list[int]) -> None:
    ids = [i for p in parts for i in ([p] if isinstance(p, int) else [10 + b for b in "".join(p).encode()])]
    pieces = Pieces(words_of)
    told = "".join(pieces.join(some) for some in in_cuts(ids, cuts)) + pieces.join([], last=True)
    assert told == words_of(ids)


@given(st.binary(max_size=30), CUTS)
def test_bytes_that_are_no_text_come_at_the_end_at_the_latest(data: bytes, cuts: list[int]) -> None:
    pieces = Pieces(bytes_of)
    told = "".join(pieces.join(some) for some in in_cuts(list(data), cuts)) + pieces.join([], last=True)
    assert told == bytes_of(data)


@given(SNIPPETS, CUTS)
def test_text_comes_as_soon_as_it_is_whole_as_by_reading_everything_each_time(
    snippets: list[str], cuts: list[int]
) -> None:
    pieces, told, read = Pieces(bytes_of), "", list[int]()
    for some in in_cuts(list("".join(snippets).encode()), cuts):
        read += some
        told += pieces.join(some)
        whole = bytes_of(read).rstrip("\ufffd")
        assert told == whole or (len(read) >= 16 and whole.startswith(told))  # what is long open is not read each time


@pytest.mark.parametrize(
    "one",
    [[*"é€😀".encode()], [0x80], [*"\ufffd".encode()], [0xF0, 0x9F], [97]],
    ids=["characters of several tokens", "no text", "the sign for no text", "halves", "letters"],
)
@pytest.mark.parametrize("each", [False, True])
def test_text_that_never_closes_is_read_in_linear_time(one: list[int], each: bool) -> None:
    read = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal read
        read += len(ids)
        return bytes_of(ids)

    ids, pieces = (one * 4000)[:4000], Pieces(decode)
    told = pieces.add(ids) if each else [pieces.join(ids[at : at + 3]) for at in range(0, len(ids), 3)]
    assert "".join(told) + pieces.join([], last=True) == bytes_of(ids)
    assert read < 30 * len(ids)


def draft(ids: Sequence[int], last: bool) -> Draft | Sample:
    if not last:
        return Draft(0, 0, tuple(ids), (0.0,) * len(ids), (0,) * len(ids))
    zeros = np.zeros(len(ids), np.float32)
    return Sample(0, 0, np.array(ids, np.int32), zeros, zeros.astype(np.int32), "stop")


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), CUTS)
def test_the_text_ends_before_the_first_stop_text_and_none_of_it_is_ever_shown(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    text = text[: min((text.find(s) + len(s) for s in stops if s in text), default=len(text))]  # the engine ends there
    whole = text[: min((text.find(s) for s in stops if s in text), default=len(text))]
    writer, told, ids = _Writer(bytes_of, False, stops), "", list(text.encode())
    for size in np.cumsum(cuts).tolist():
        if size < len(ids):
            told += writer.part([draft(ids[:size], False)]).text
            assert whole.startswith(told)
    assert told + writer.part([draft(ids, True)]).text == whole


class FakeEngine:
    """Writes a token at a time to each of its requests, without a pause between them; the second hears all again."""

    def __init__(self, length: int) -> None:
        self.length, self.closed = length, False

    async def stream(self, requests: Sequence[Request], only_new: bool):
        try:
            for size in range(1, self.length):
                for request in requests:
                    start = 0 if request.id else size - 1
                    count = size - start
                    yield Draft(request.id, 0, (97,) * count, (-1.0,) * count, (0,) * count, start)
                await asyncio.sleep(0)
            for request in requests:
                ids = np.full(self.length, 97, np.int32)
                yield Sample(request.id, 0, ids, ids.astype(np.float32), ids, "length")
        finally:
            self.closed = True


class FakeTemplate:
    decode = staticmethod(bytes_of)


def test_a_slow_reader_gets_larger_parts_and_nothing_twice() -> None:
    async def run(reads: float) -> list[Part]:
        requests = [Request(k, (1,), (0,), Sampling(1.0, 50)) for k in range(2)]
        found = []
        async for part in written(FakeEngine(50), FakeTemplate(), requests):  # type: ignore[arg-type]
            found.append(part)
            await asyncio.sleep(reads)
        return found

    slow, fast = asyncio.run(run(0.01)), asyncio.run(run(0))
    assert len(slow) < 10 < len(fast)
    for parts in (slow, fast):
        for request in range(2):
            mine = [part for part in parts if part.request_id == request]
            assert [p.start for p in mine] == np.cumsum([0, *(len(p.token_ids) for p in mine[:-1])]).tolist()
            assert "".join(p.text for p in mine) == "a" * 50
            assert [p.sample is not None for p in mine] == [False] * (len(mine) - 1) + [True]


def test_whoever_stops_reading_ends_the_stream() -> None:
    engine = FakeEngine(10_000)

    async def run() -> None:
        parts = written(engine, FakeTemplate(), [Request(0, (1,), (0,), Sampling(1.0, 10_000))])  # type: ignore[arg-type]
        await anext(parts)
        await parts.aclose()
        await asyncio.sleep(0.05)
        assert engine.closed

    asyncio.run(run())
