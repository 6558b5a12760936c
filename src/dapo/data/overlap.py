"""Whether training rows hold what is evaluated on: equal prompts, and prompts that share a long run of words.

Words are lower-cased runs of letters and runs of digits (of Chinese and Japanese, single characters); what stands
between them does not count. A training prompt is *near* an evaluation prompt if both hold the same 13 words in a row
(an evaluation prompt of 8 to 12 words counts as one run of its whole length). Left out are runs with 8 words in a row
that occur in more than 10 different prompts ("where m and n are relatively prime positive integers" and the like), and
runs with fewer than 4 words of two letters or more, which are formulas.
*Exact* is a prompt whose characters are the same, white space and case apart."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import numpy as np
import numpy.typing as npt

LONGEST, SHORTEST = 13, 8
"""Words of a run; of an evaluation prompt that is shorter, the fewest that are looked for."""
BOILERPLATE = 10
"""Different prompts above which the fewest words say nothing."""
LETTER_WORDS = 4
METHOD = [3, LONGEST, SHORTEST, BOILERPLATE, LETTER_WORDS]
"""What results that are kept depend on."""

_BATCH = 2000
_PARTS = 0
"""In place of a size: the fewest words that are looked for, which are counted wherever they stand."""
_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\W\d_{_IDEOGRAPH}]+|\d+")
_FACTOR = 0x9E3779B97F4A7C15

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def exact_key(text: str) -> int:
    """A number that equal prompts have in common, white space and case apart."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return _hash(plain)


def words_of(text: str) -> list[str]:
    """Runs of letters and runs of digits, in lower case."""
    return _WORD.findall(text.lower())


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Hit:
    """A training row and an evaluation row. Files and rows by number, from 0; ``words`` is what they share."""

    train_file: int
    train_row: int
    eval_file: int
    eval_row: int
    exact: bool
    words: str = ""


Texts = Iterable[tuple[int, str]]
"""Row numbers and prompts of a file."""


def find_overlap(evaluation: Sequence[Texts], training: Sequence[Texts]) -> list[Hit]:
    """One hit for each training row and evaluation file that have anything in common, exact ones before near ones.

    Memory: that of the evaluation prompts and of what is shared; training files are read once, in batches."""
    index = _Index(evaluation)
    exact: list[Hit] = []
    matches: list[_Matches] = []
    for file, texts in enumerate(training):
        for batch in _batches(texts):
            exact += index.exact_hits(file, batch)
            matches += index.matches(file, batch)
    seen = {(hit.train_file, hit.train_row, hit.eval_file) for hit in exact}
    near = [h for h in index.near_hits(matches) if (h.train_file, h.train_row, h.eval_file) not in seen]
    return exact + near


def _batches(texts: Texts) -> Iterator[_Batch]:
    rows = iter(texts)
    while part := list(islice(rows, _BATCH)):
        yield _Batch(part)


class _Batch:
    known: dict[str, int] = {}  # noqa: RUF012  (word -> hash, shared so that each word is hashed once)

    def __init__(self, rows: Sequence[tuple[int, str]]) -> None:
        self.rows = np.array([row for row, _ in rows], dtype=np.int64)
        self.keys = np.array([exact_key(text) for _, text in rows], dtype=np.uint64)
        self.words = [words_of(text) for _, text in rows]
        self.lengths = np.array([len(words) for words in self.words], dtype=np.int64)
        self._begins = np.cumsum(self.lengths) - self.lengths
        self._ends = np.repeat(np.cumsum(self.lengths), self.lengths)
        self._owners = np.repeat(np.arange(len(rows)), self.lengths)
        flat = [word for words in self.words for word in words]
        known = self.known
        if len(known) > 1_000_000:
            known.clear()
        for word in set(flat).difference(known):
            known[word] = _hash(word)
        self._hashes = np.array([known[word] for word in flat], dtype=np.uint64)
        language = [(len(word) > 1 and word[0].isalpha()) or word > "\u3000" for word in flat]
        self._letters = np.concatenate([[0], np.cumsum(language)]).astype(np.int64)

    def runs(self, size: int) -> tuple[Hashes, Numbers, Numbers]:
        """Every run of ``size`` words: its hash, the place of its prompt in the batch, and its first word there."""
        total = self._every(size)
        count = len(total)
        starts = np.arange(count)
        good = starts + size <= self._ends[:count]
        good &= self._letters[size:][:count] - self._letters[:count] >= LETTER_WORDS
        owners = self._owners[:count][good]
        return total[good], owners, starts[good] - self._begins[owners]

    def parts(self, size: int, owners: Numbers, firsts: Numbers) -> Hashes:
        """Of each run the hashes of all ``SHORTEST`` words in a row, [runs, 6]; the last one as often as needed."""
        places = np.minimum(np.arange(LONGEST - SHORTEST + 1), size - SHORTEST)
        found: Hashes = self._every(SHORTEST)[(firsts + self._begins[owners])[:, None] + places]
        return found

    def _every(self, size: int) -> Hashes:
        count = max(len(self._hashes) - size + 1, 0)
        total = np.zeros(count, np.uint64)
        for k in range(size):
            total = total * np.uint64(_FACTOR) + self._hashes[k : k + count]
        return total


@dataclass(frozen=True, slots=True)
class _Matches:
    file: int
    runs: Numbers
    """Their numbers in the index."""
    rows: Numbers
    prompts: Hashes
    """Exact keys of the prompts that they are in."""
    words: dict[int, str]
    """Of each run that is looked for, the words."""


class _Index:
    def __init__(self, files: Sequence[Texts]) -> None:
        self._exact: defaultdict[int, dict[int, int]] = defaultdict(dict)  # key -> file -> first row
        found: dict[int, list[tuple[Hashes, Hashes, Numbers, Hashes]]] = defaultdict(list)
        places: list[Numbers] = []
        count = 0
        for file, texts in enumerate(files):
            for batch in _batches(texts):
                for row, key in zip(batch.rows.tolist(), batch.keys.tolist(), strict=True):
                    self._exact[key].setdefault(file, row)
                places.append(np.stack([np.full(len(batch.rows), file), batch.rows], axis=1))
                for size in (_PARTS, *range(SHORTEST, LONGEST + 1)):
                    hashes, owners, firsts = batch.runs(size or SHORTEST)
                    if _PARTS < size < LONGEST:
                        whole = batch.lengths[owners] == size
                        hashes, owners, firsts = hashes[whole], owners[whole], firsts[whole]
                    parts = batch.parts(size or SHORTEST, owners, firsts)
                    found[size].append((hashes, batch.keys[owners], owners + count, parts))
                count += len(batch.rows)
        self._places = np.concatenate(places) if places else np.empty((0, 2), np.int64)
        self._sizes: dict[int, tuple[Hashes, int]] = {}
        runs: list[Numbers] = [np.empty(0, np.int64)]
        start = 0
        of_runs: list[Hashes] = [np.empty((0, LONGEST - SHORTEST + 1), np.uint64)]
        for size, batches in found.items():
            hashes, parts = (np.concatenate([of_batch[k] for of_batch in batches]) for k in (0, 3))
            unique, example, inverse = np.unique(hashes, return_index=True, return_inverse=True)
            self._sizes[size] = unique, start
            runs.append(inverse + start)
            of_runs.append(parts[example])
            start += len(unique)
        known, of_run = self._sizes.get(_PARTS, (np.empty(0, np.uint64), 0))[0], np.concatenate(of_runs)
        own = np.arange(start)[:, None]
        self._parts: Numbers = np.where(np.isin(of_run, known), np.searchsorted(known, of_run), own)
        """Of each run the numbers of its parts; its own in place of a formula."""
        every = [of_batch for batches in found.values() for of_batch in batches]
        by_run = np.concatenate(runs)
        order = np.argsort(by_run, kind="stable")
        self._runs: Numbers = by_run[order]
        self._keys: Hashes = np.concatenate([np.empty(0, np.uint64), *(part[1] for part in every)])[order]
        self._owners: Numbers = np.concatenate([np.empty(0, np.int64), *(part[2] for part in every)])[order]

    def exact_hits(self, file: int, batch: _Batch) -> Iterator[Hit]:
        for row, key in zip(batch.rows.tolist(), batch.keys.tolist(), strict=True):
            for eval_file, eval_row in self._exact.get(key, {}).items():
                yield Hit(file, row, eval_file, eval_row, exact=True)

    def matches(self, file: int, batch: _Batch) -> Iterator[_Matches]:
        for size, (known, start) in self._sizes.items():
            if not len(known):
                continue
            hashes, owners, firsts = batch.runs(size or SHORTEST)
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            same = known[at] == hashes
            at, owners, firsts = at[same], owners[same], firsts[same]
            runs, example = np.unique(at, return_index=True)
            words = {
                run + start: " ".join(batch.words[owners[k]][firsts[k] : firsts[k] + size])
                for run, k in zip(runs.tolist(), example.tolist(), strict=True)
                if size != _PARTS
            }
            yield _Matches(file, at + start, batch.rows[owners], batch.keys[owners], words)

    def near_hits(self, matches: Sequence[_Matches]) -> Iterator[Hit]:
        """Runs that are no boilerplate, as the first hit of each training row and evaluation file."""
        if not matches:
            return
        runs = np.concatenate([self._runs, *(m.runs for m in matches)])
        keys = np.concatenate([self._keys, *(m.prompts for m in matches)])
        pairs = np.unique(np.stack([runs.astype(np.uint64), keys], axis=1), axis=0)
        prompts = np.bincount(pairs[:, 0].astype(np.int64), minlength=len(self._parts))
        prompts = prompts[self._parts].max(axis=1)
        seen: set[tuple[int, int, int]] = set()
        for match in (match for match in matches if match.words):
            telling = prompts[match.runs] <= BOILERPLATE
            for run, row in zip(match.runs[telling].tolist(), match.rows[telling].tolist(), strict=True):
                low, high = np.searchsorted(self._runs, [run, run + 1])
                for eval_file, eval_row in self._places[self._owners[low:high]].tolist():
                    if (match.file, row, eval_file) not in seen:
                        seen.add((match.file, row, eval_file))
                        yield Hit(match.file, row, eval_file, eval_row, exact=False, words=match.words[run])
