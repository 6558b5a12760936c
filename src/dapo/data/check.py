"""``dapo data check`` without its printing: every row of every file, and what files have in common.

Consumes items of a recipe's ``data.train`` and ``evaluation.data``; produces a :class:`CheckReport`. What was found out
about a file is kept in the cache under the hash of its content and the settings, so that a second check takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo.config import DataConfig
from dapo.config.data import DataItem
from dapo.data.cache import cached, key_of
from dapo.data.overlap import METHOD, Hit, exact_key, find_overlap, words_of
from dapo.data.parts import Part, Rows, encode, keys_of, open_table
from dapo.data.rows import SHOWN_FAULTS, SHOWN_PLACES, BadRow, Keys, by_reason
from dapo.data.template import PromptTemplate, lost_letters
from dapo.errors import DataError

_VERSION = 5
_ROWS = "rows.bin"
_EXAMPLES = 5

Places = npt.NDArray[np.int64]
Progress = Callable[[str], None]
"""Called with what is being done, and how far it is."""


@dataclass(slots=True)
class Lengths:
    """Prompts by length. ``unit`` says what a length counts: tokens, or words where there is no tokenizer."""

    unit: str
    counts: Counter[int] = field(default_factory=Counter)

    def at(self, share: float) -> int:
        """The shortest length that at least this share of the prompts do not exceed; 0 if there are none."""
        reached, wanted = 0, share * self.counts.total()
        for length in sorted(self.counts):
            reached += self.counts[length]
            if reached >= wanted:
                return length
        return 0

    def above(self, limit: int) -> int:
        return sum(count for length, count in self.counts.items() if length > limit)

    def histogram(self) -> list[tuple[int, int, int]]:
        """First and last length of each bin, and the prompts in it. Bins double, from the first to the last in use."""
        bins: Counter[int] = Counter()
        for length, count in self.counts.items():
            bins[length.bit_length()] += count
        if not bins:
            return []
        used = range(min(bins), max(bins) + 1)
        return [(2 ** (k - 1) if k else 0, 2**k - 1, bins[k]) for k in used]


@dataclass(frozen=True, slots=True)
class Measure:
    """How prompts are measured. ``load``: makes the template, once a file needs it; None: words are counted.

    ``identity``: what the lengths depend on, in JSON types."""

    load: Callable[[], PromptTemplate] | None = None
    identity: Any = None

    @property
    def unit(self) -> str:
        return "tokens" if self.load else "words"


@dataclass(frozen=True, slots=True)
class FileReport:
    """What is in one file. All counts are rows.

    ``missing_answers`` are bad only where the reward needs answers. ``duplicates`` repeat the prompt of an earlier row
    of the file, ``conflicts`` are those of them with another answer than the first one."""

    file: str
    content: str
    rows: int
    bad: int
    faults: list[str]
    """As ``file:line: reason``, a line for each reason."""
    doubts: dict[str, tuple[int, list[str]]]
    """Rows that can be used and may be wrong (:meth:`Row.doubts`), by kind: how many, and the first of them, as
    ``file:line: key holds ...``."""
    missing_answers: int
    too_long: int | None
    """None: nothing counts tokens."""
    duplicates: int
    conflicts: int
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of ``file`` whose prompt stands in ``other``, an earlier one, too. ``near``: of training against evaluation
    files, rows that share a long run of words."""

    file: str
    other: str
    exact: int
    near: int = 0
    conflicts: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CheckReport:
    train: list[FileReport]
    evaluation: list[FileReport]
    between: list[Shared]
    """Between training files: equal prompts, and how many of them with another answer."""
    overlap: list[Shared]
    """Of training files with evaluation files."""
    conflicts: list[str]
    """Examples of equal prompts with different answers."""

    @property
    def bad(self) -> int:
        return sum(report.bad for report in (*self.train, *self.evaluation))

    @property
    def doubts(self) -> bool:
        inside = any(report.conflicts for report in self.train)
        return inside or bool(self.overlap) or any(pair.conflicts for pair in self.between)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        written = (*found["train"], *found["evaluation"])
        for report, source in zip(written, (*self.train, *self.evaluation), strict=True):
            lengths = source.lengths
            some = {name: lengths.at(share) for name, share in (("median", 0.5), ("p95", 0.95), ("longest", 1.0))}
            report["lengths"] = {"unit": lengths.unit, **some, "histogram": lengths.histogram()}
        return found


def check_data(
    train: Sequence[DataItem],
    evaluation: Sequence[DataItem],
    data: DataConfig,
    measure: Measure,
    *,
    answer_required: bool | None = False,
    progress: Progress = lambda text: None,
) -> CheckReport:
    """Read all rows of all files. ``answer_required``: whether a row without an answer is bad; None: not known.
    Raises DataError: a file cannot be read at all."""
    scans: list[_Scan] = []
    faults: list[str] = []
    template = cache(measure.load or (lambda: None))
    for item in [*train, *evaluation]:
        try:
            keys = keys_of(item, data, answer_required)
            rows = Rows([Part(open_table(item), keys, item.path)])
        except DataError as error:
            faults.append(str(error))
            continue
        scans.append(_scan(rows, keys, data.max_prompt_length, measure, template, progress))
    if faults:
        raise DataError("\n".join(faults))
    to_train, to_evaluate = scans[: len(train)], scans[len(train) :]
    between, conflicts = _between(to_train)
    return CheckReport(
        train=[scan.report for scan in to_train],
        evaluation=[scan.report for scan in to_evaluate],
        between=between,
        overlap=_overlap(to_train, to_evaluate, progress),
        conflicts=conflicts,
    )


# --- one file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scan:
    rows: Rows
    keys: Keys
    report: FileReport
    good: npt.NDArray[np.uint64]
    """``[rows, 3]``: number of the row, key of its prompt, key of its answer."""

    @property
    def identity(self) -> list[Any]:
        return [self.report.content, asdict(self.keys)]


Load = Callable[[], PromptTemplate | None]


def _scan(rows: Rows, keys: Keys, limit: int, measure: Measure, template: Load, progress: Progress) -> _Scan:
    table = rows.parts[0].table

    def build(folder: Path) -> dict[str, Any]:
        return _read_all(rows, folder, measure.unit, template(), progress)

    settings = [_VERSION, table.content(), asdict(keys), measure.identity]
    folder, facts = cached("checks", key_of(settings), build)
    good = np.fromfile(folder / _ROWS, dtype="<u8").reshape(-1, 3)
    lengths = Lengths(measure.unit, Counter({int(length): count for length, count in facts["lengths"].items()}))
    duplicates, _, conflicts = _repeated(good)
    report = FileReport(
        file=table.name,
        content=table.content(),
        rows=len(table),
        bad=facts["bad"],
        faults=by_reason(
            {reason: (count, [*map(table.place, first)]) for reason, (count, first) in facts["faults"].items()},
            facts["bad"],
        ),
        doubts={
            what: (count, [f"{table.place(row)}: {said}" for row, said in first])
            for what, (count, first) in facts["doubts"].items()
        },
        missing_answers=facts["missing_answers"],
        too_long=lengths.above(limit) if measure.load else None,
        duplicates=len(duplicates),
        conflicts=int(np.count_nonzero(conflicts)),
        lengths=lengths,
    )
    return _Scan(rows, keys, report, good)


def _read_all(
    rows: Rows, folder: Path, unit: str, template: PromptTemplate | None, progress: Progress
) -> dict[str, Any]:
    lengths = Lengths(unit)
    faults: dict[str, tuple[int, list[int]]] = {}
    doubts: dict[str, tuple[int, list[tuple[int, str]]]] = {}
    bad = missing = 0
    with (folder / _ROWS).open("wb") as found:
        for number in range(len(rows)):
            if number % 1000 == 0:
                progress(f"{rows.parts[0].table.name}: {number:,} of {len(rows):,} rows")
            try:
                row = rows[number]
                ids = encode(row, template) if template else ()
            except BadRow as fault:
                bad += 1
                if (reason := str(fault)) in faults or len(faults) < SHOWN_FAULTS:
                    count, numbers = faults.get(reason, (0, []))
                    faults[reason] = (count + 1, [*numbers, number][:SHOWN_PLACES])
                continue
            lost = lost_letters(row.text, template.text(list(ids))) if template else ()
            unknown = [("hold letters that the tokenizer has no token for", repr("".join(lost)))] if lost else []
            for what, said in (*row.doubts(rows.parts[0].keys), *unknown):
                count, first = doubts.get(what, (0, []))
                doubts[what] = (count + 1, [*first, (number, said)][:_EXAMPLES])
            lengths.counts[len(ids) if template else len(words_of(row.text))] += 1
            missing += row.answer is None or not row.answer.strip()
            answer = blake2b((row.answer or "").strip().encode(), digest_size=8).digest()
            found.write(number.to_bytes(8, "little") + exact_key(row.text).to_bytes(8, "little") + answer)
    facts = {"bad": bad, "faults": faults, "missing_answers": missing, "lengths": lengths.counts}
    return {**facts, "doubts": doubts}


def _repeated(good: npt.NDArray[np.uint64]) -> tuple[Places, Places, npt.NDArray[np.bool_]]:
    """Places of rows whose prompt stands earlier, of the first that has it, and whether that has another answer."""
    _, first, inverse = np.unique(good[:, 1], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(good)))
    originals = first[inverse][again]
    return again, originals, good[again, 2] != good[originals, 2]


# --- several files ------------------------------------------------------------------------------------------------


def _between(scans: Sequence[_Scan]) -> tuple[list[Shared], list[str]]:
    """Equal prompts of training files, each against the first file that holds it; and conflicts to show."""
    if not scans:
        return [], []
    good = np.concatenate([scan.good for scan in scans])
    files = np.repeat(np.arange(len(scans)), [len(scan.good) for scan in scans])
    again, originals, other = _repeated(good)

    def told(place: int) -> str:
        rows, number = scans[int(files[place])].rows, int(good[place, 0])
        return f"{rows.place(number)} has {rows[number].answer!r}"

    pairs = list(zip(originals[other].tolist(), again[other].tolist(), strict=True))[:_EXAMPLES]
    examples = [f"{told(first)}, {told(second)}" for first, second in pairs]
    shared = []
    for a, b in sorted({(int(x), int(y)) for x, y in zip(files[again], files[originals], strict=True) if x != y}):
        pair = (files[again] == a) & (files[originals] == b)
        names = scans[a].report.file, scans[b].report.file
        shared.append(Shared(*names, exact=int(pair.sum()), conflicts=int((pair & other).sum())))
    return shared, examples


def _overlap(train: Sequence[_Scan], evaluation: Sequence[_Scan], progress: Progress) -> list[Shared]:
    if not train or not evaluation:
        return []
    identity = [_VERSION, METHOD, [scan.identity for scan in train], [scan.identity for scan in evaluation]]

    def build(folder: Path) -> dict[str, Any]:
        hits = find_overlap(
            [_texts(scan, "reading", progress) for scan in evaluation],
            [_texts(scan, "comparing", progress) for scan in train],
        )
        return {"hits": [asdict(hit) for hit in hits]}

    _, facts = cached("overlap", key_of(identity), build)
    pairs: dict[tuple[int, int], list[Hit]] = {}
    for found in facts["hits"]:
        hit = Hit(**found)
        pairs.setdefault((hit.train_file, hit.eval_file), []).append(hit)
    return [_shared(train[a], evaluation[b], hits) for (a, b), hits in sorted(pairs.items())]


def _texts(scan: _Scan, what: str, progress: Progress) -> Iterator[tuple[int, str]]:
    for done, number in enumerate(scan.good[:, 0].tolist()):
        if done % 1000 == 0:
            progress(f"{what} {scan.report.file}: {done:,} of {len(scan.good):,} rows")
        yield number, scan.rows[number].text


def _shared(train: _Scan, evaluation: _Scan, hits: Sequence[Hit]) -> Shared:
    exact = sum(hit.exact for hit in hits)
    examples = [
        f"{train.rows.place(hit.train_row)} and {evaluation.rows.place(hit.eval_row)}: "
        + ("the same prompt" if hit.exact else f"both hold: {hit.words}")
        for hit in sorted(hits, key=lambda hit: not hit.exact)[:_EXAMPLES]
    ]
    return Shared(train.report.file, evaluation.report.file, exact, near=len(hits) - exact, examples=examples)


def prompt_identity(data: DataConfig, tokenizer: str, unnamed: bool = False) -> list[Any]:
    """:attr:`Measure.identity` of a recipe's prompts. ``unnamed``: the tokenizer decides on a template."""
    said = data.model_dump(mode="json", include=set(data.WRITING))
    files = [Path(tokenizer)] + ([Path(data.chat_template).parent] if data.chat_template else [])
    return [tokenizer, unnamed, said, [_file_identity(file) for file in files]]


def _file_identity(path: Path) -> Mapping[str, Any]:
    told = (one for one in sorted(path.glob("*")) if one.suffix in (".json", ".model", ".jinja", ".txt"))
    return {one.name: [one.stat().st_size, one.stat().st_mtime_ns] for one in told if one.is_file()}
