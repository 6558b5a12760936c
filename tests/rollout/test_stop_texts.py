"""Stop texts: the token that completes one is found by looking at the end of a response, as if the whole were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dapo.model.loading import copy_model, load_model
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples
from dapo.rollout.engine import EngineError, Request, Sampling
from dapo.rollout.native.slots import slot_decoder
from dapo.rollout.native.stopping import StopTexts
from helpers import random_model
from run_cases import PROMPTS, run

Decode = Callable[[Sequence[int]], str]


def by_reading_everything(decode: Decode, ids: Sequence[int], new_from: int, texts: Sequence[str]) -> int | None:
    ends = (n for n in range(new_from + 1, len(ids) + 1) if any(text in decode(ids[:n]) for text in texts))
    return next(ends, None)


def byte_level(pieces: Sequence[bytes], strips: bool = False) -> Decode:
    """Token k is ``pieces[k]``, whether or not these bytes are whole characters. ``strips``: a text loses the space
    that it begins with."""

    def decode(ids: Sequence[int]) -> str:
        text = b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if strips else text

    return decode


PIECES = [b"", b"a", b"b", b" ", b" a", b"ab", b"ba\n", b"\n\n", "é".encode(), *(bytes([b]) for b in "é😀你".encode())]
PIECES += ["😀".encode()[:3], "😀".encode()[3:] + b"a", "a你".encode()[:2], b"b" * 30, b" " * 5]
TEXTS = st.text("ab \né😀你", min_size=1, max_size=6)


def chunks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ends of the chunks in which the tokens arrive, each with where it begins."""
    found, start = [], 0
    for size in [*sizes, len(ids)]:
        if start < len(ids):
            found.append((start, min(start + size, len(ids))))
            start += size
    return found


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 9), max_size=60),
    texts=st.lists(TEXTS, min_size=1, max_size=3).map(tuple),
    strips=st.booleans(),
)
def test_it_is_the_token_that_reading_everything_would_find(
    ids: list[int], sizes: list[int], texts: tuple[str, ...], strips: bool
) -> None:
    """Bytes in any order, whole characters or not, tokens of nothing; in chunks as they come from a GPU, and singly."""
    decode = byte_level(PIECES, strips)
    stops = StopTexts(decode)
    expected = by_reading_everything(decode, ids, 0, texts)
    for chunks in (chunks_of(ids, sizes), [(i, i + 1) for i in range(len(ids))]):
        found = (stops.ends_at(ids[:end], start, texts) for start, end in chunks)
        assert next((end for end in found if end is not None), None) == expected


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab é😀你", max_size=40), stop=TEXTS, sizes=st.lists(st.integers(1, 9), max_size=60), data=st.data()
)
def test_with_a_tokenizer_that_falls_back_to_bytes(text: str, stop: str, sizes: list[int], data: st.DataObject) -> None:
    """Of a run of bytes that is not whole, all become U+FFFD: what had been a character is none for a while."""
    vocabulary = {f"<0x{b:02X}>": b for b in range(256)} | {"a": 256, "b": 257, "▁": 258, "▁a": 259, "你": 260}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = {"a": [256], "b": [257], " ": [258], "你": [260]}
    ids: list[int] = []
    for character in text:
        as_bytes = list(character.encode())
        ids += data.draw(st.sampled_from([known.get(character, as_bytes), as_bytes]))
    stops = StopTexts(core.decode)
    expected = by_reading_everything(core.decode, ids, 0, (stop,))
    found = (stops.ends_at(ids[:end], start, (stop,)) for start, end in chunks_of(ids, sizes))
    assert next((end for end in found if end is not None), None) == expected


def test_what_is_complete_before_the_next_character_begins_is_found() -> None:
    """Three bytes are a character; with one more of the next they are none until that is whole."""
    whole = "你你".encode()

    def falls_back(ids: Sequence[int]) -> str:
        text = bytes(ids).decode("utf-8", errors="replace")
        return "\ufffd" * len(ids) if "\ufffd" in text else text

    assert StopTexts(falls_back).ends_at(list(whole[:4]), 0, ("你",)) == 3
    assert StopTexts(falls_back).ends_at(list(whole[:5]), 1, ("你你",)) is None
    assert StopTexts(falls_back).ends_at(list(whole), 5, ("你你",)) == 6


def test_a_long_response_is_not_read_again() -> None:
    """What is decoded depends on the stop text and not on the length of the response."""
    read: list[int] = []
    pieces = [b"word ", b"STOP", "你".encode()[:2], "你".encode()[2:]]

    def decode(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return byte_level(pieces)(ids)

    stops = StopTexts(decode)
    assert stops.ends_at([0] * 10_000, 9_999, ("STOP", "\n\n")) is None
    assert stops.ends_at([0] * 10_000 + [2], 10_000, ("STOP",)) is None
    assert stops.ends_at([0] * 10_000 + [2, 3, 0, 1, 0, 0], 10_000, ("STOP",)) == 10_004
    assert max(read) < 30


def test_nothing_new_and_no_texts_find_nothing() -> None:
    stops = StopTexts(byte_level([b"a"]))
    assert stops.ends_at([0, 0], 2, ("a",)) is None
    assert stops.ends_at([0, 0], 0, ()) is None
    assert stops.ends_at([0, 0], 0, ("aa",)) == 2


# --- in the decoder -----------------------------------------------------------------------------------------------

MODEL = load_model(random_model("qwen2", num_hidden_layers=1))
LETTERS = [bytes([97 + i % 26]) * (1 + i // 26) for i in range(48)]  # a .. z, aa .. vv


def decoded(stop: tuple[str, ...], limit: int = 30, **options: object) -> list:
    decoder = slot_decoder(
        copy_model(MODEL, torch.float32),
        (),
        max_sequence_tokens=40,
        max_concurrent_samples=8,
        decode=byte_level(LETTERS),
        **options,
    )
    request = Request(0, (5, 6), tuple(range(8)), Sampling(1.0, limit, stop=stop))
    decoder.check(request)
    decoder.submit(0, request)
    found = []
    while decoder.busy:
        found += [s for _, s in decoder.step()]
    return sorted(found, key=lambda s: s.index)


def test_a_stop_text_in_the_last_place_is_a_stop() -> None:
    anything = tuple("abcdefghijklmnopqrstuvwxyz")
    assert {(s.length, s.finish_reason) for s in decoded(anything, limit=1)} == {(1, "stop")}


def test_stop_texts_need_a_tokenizer() -> None:
    decoder = slot_decoder(MODEL, (), max_sequence_tokens=40, max_concurrent_samples=1)
    with pytest.raises(EngineError, match="request 0: stop texts need a tokenizer"):
        decoder.check(Request(0, (5,), (1,), Sampling(1.0, 8, stop=("a",))))


def test_a_run_trains_on_responses_that_end_with_a_stop_text(tmp_path: Path) -> None:
    """And its evaluations, which have no texts of their own, end with them too."""
    run(tmp_path / "run", {"rollout.stop": ["1", "23"]}, heldout=PROMPTS[:4])
    samples = [s for file in RunFolder(tmp_path / "run").samples.glob("*.jsonl") for s in read_samples(file)]
    found = [s["response"] for s in samples if "1" in s["response"] or "23" in s["response"]]
    assert len(found) > 3
    assert all(text.endswith(("1", "23")) and "1" not in text[:-1] and "23" not in text[:-1] for text in found)
    assert {s["finish_reason"] for s in samples if s["response"] in found} == {"stop"}
