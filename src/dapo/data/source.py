"""Where prompts come from: rows become prompts when they are drawn, without end and from any position.

Consumes tables (``parts.py``) and a template; produces :class:`~dapo.records.Prompt` records. Waits for nothing. The
first 10,000 rows are checked at once, the others when they are drawn. The position is a few numbers, from which a
resumed run draws the very same prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from statistics import fmean
from typing import Any

from dapo.config import DataConfig
from dapo.data.beside import Beside, Side
from dapo.data.difficulty import DifficultyStream
from dapo.data.live import LiveRows
from dapo.data.order import Choice, point
from dapo.data.parts import CHECKED_ROWS, DataInput, Rows, encode, encode_all, left_out, names_of, open_parts, spread
from dapo.data.rows import SHOWN_FAULTS, BadRow, listed
from dapo.data.stream import Stream
from dapo.data.template import PromptTemplate
from dapo.errors import DataError
from dapo.records import Group, Prompt
from dapo.util.differences import differences


@dataclass(frozen=True, slots=True)
class DataReport:
    """What is in the rows that were checked. All counts are rows.

    ``duplicates``: rows whose prompt stood in an earlier row already; ``conflicts``: those of them whose answer
    differs from that of the first one. They are kept: a row is a prompt of its own."""

    rows: int
    """In all the data."""
    checked: int
    too_long: int
    duplicates: int
    conflicts: int
    longest: int
    """Length in tokens of the longest prompt that is used."""
    bad: int = 0
    doubts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Rows that can be used and may be wrong (:meth:`Row.doubts`), by kind, as ``file:line: key holds ...``."""
    faults: tuple[str, ...] = ()
    """Why rows are bad, as ``file:line: reason``, a line for each reason."""

    @property
    def usable(self) -> int:
        return self.checked - self.too_long - self.bad

    @property
    def whole(self) -> bool:
        return self.checked == self.rows


def preview(
    streams: Sequence[Rows], template: PromptTemplate, data: DataConfig
) -> tuple[list[tuple[int, int]], set[tuple[int, int]], DataReport]:
    """Stream and number of each row that can be used and of each that cannot, among the first ones, and what they hold.
    Raises DataError: as the recipe's policy says, or if no row is left."""
    places = list(spread(streams))
    good: list[tuple[int, int]] = []
    bad: dict[tuple[int, int], str] = {}
    lengths: list[int] = []
    doubts: dict[str, list[str]] = {}
    answers: dict[bytes, str | None] = {}
    duplicates = conflicts = 0
    for (stream, number), found in zip(places, encode_all(((streams[s], n) for s, n in places), template), strict=True):
        rows = streams[stream]
        if isinstance(found, BadRow):
            bad[stream, number] = f"{rows.place(number)}: {found}"
            continue
        row, ids = found
        lengths.append(len(ids))
        for what, said in row.doubts(rows.keys(number)):
            doubts.setdefault(what, []).append(f"{row.place}: {said}")
        text = blake2b(row.text.encode(), digest_size=16).digest()
        duplicates += text in answers
        conflicts += answers.setdefault(text, row.answer) != row.answer
        if lengths[-1] <= data.max_prompt_length:
            good.append((stream, number))
    _refuse(streams, data, places, good, list(bad.values()), lengths)
    fitting = [length for length in lengths if length <= data.max_prompt_length]
    report = DataReport(
        rows=sum(map(len, streams)),
        checked=len(places),
        too_long=len(lengths) - len(fitting),
        duplicates=duplicates,
        conflicts=conflicts,
        longest=max(fitting),
        bad=len(bad),
        doubts=doubts,
        faults=tuple(listed(list(bad.values())).splitlines()),
    )
    return good, set(bad), report


def _refuse(
    streams: Sequence[Rows],
    data: DataConfig,
    places: Sequence[tuple[int, int]],
    good: Sequence[tuple[int, int]],
    faults: list[str],
    lengths: Sequence[int],
) -> None:
    if faults and data.on_bad_row == "fail":
        raise DataError(listed(faults))
    count = len(places)
    if len(faults) > data.max_bad_rows * count:
        raise DataError(
            f"{len(faults)} of {count} rows are bad ({len(faults) / count:.1%}), more than "
            f"data.max_bad_rows={data.max_bad_rows:g} allows:\n{listed(faults)}"
        )
    if not good:
        read = f"{'' if count == sum(map(len, streams)) else 'the first '}{count} rows were read, all of them"
        if not lengths:
            raise DataError(f"no prompt is left: {read} bad:\n{listed(faults)}")
        raise DataError(
            f"no prompt is left: {read} longer than data.max_prompt_length={data.max_prompt_length} tokens (the "
            f"shortest has {min(lengths)})"
        )
    usable, looked_at = Counter(s for s, _ in good), Counter(s for s, _ in places)
    for number, rows in enumerate(streams):
        if not usable[number] and looked_at[number] == len(rows):
            raise DataError(f"{names_of(rows)}: none of its {len(rows)} rows can be used")


def load_prompts(
    data: DataConfig,
    source: DataInput,
    template: PromptTemplate,
    *,
    seed: int = 0,
    group: int = 2,
    beside: Sequence[Side] = (),
    answer_required: bool = True,
    warn: Callable[[str], None] = lambda text: None,
) -> PromptSource:
    """Prompts to train on, without end.
    ``template``: the one that the rollout uses too. ``group``: samples of a prompt. ``beside``: what is drawn from
    beside the rows. ``answer_required``: whether a row without an answer is a fault (``reward.build.needs_answer``).
    ``warn``: hears of bad rows that are skipped when they
    are drawn, and of repeats that are left out.
    Raises DataError: a file or one of the first rows is bad, or no prompt is short enough."""
    parts, weights = open_parts(data, source, answer_required)
    for told in left_out(parts):
        warn(f"data.train: {told}")
    streams = [Rows([part]) for part in parts] if weights else [Rows(parts)]
    beside = [*beside, *([LiveRows(data.live, answer_required, warn)] if data.live.path else [])]
    return PromptSource(streams, template, data, seed=seed, group=group, weights=weights, beside=beside, warn=warn)


def read_prompts(
    data: DataConfig,
    source: DataInput,
    template: PromptTemplate,
    *,
    answer_required: bool = True,
    limit: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[Prompt, ...]:
    """Prompts to evaluate on: exactly the rows given, in their order, however long they are.
    ``limit``: use the first so many rows. ``warn``: hears of rows that may be wrong (:meth:`Row.doubts`).
    Raises DataError: a file or a row is bad; names all of them."""
    parts, _ = open_parts(data, source, answer_required)
    rows = Rows(parts)
    for told in left_out(parts):
        warn(told)
    prompts: list[Prompt] = []
    faults: list[str] = []
    doubts: dict[str, list[str]] = {}
    numbers = range(len(rows) if limit is None else min(limit, len(rows)))
    for number, found in enumerate(encode_all(((rows, number) for number in numbers), template)):
        if isinstance(found, BadRow):
            faults.append(f"{rows.place(number)}: {found}")
            continue
        row, ids = found
        for what, said in row.doubts(rows.keys(number)):
            doubts.setdefault(what, []).append(f"{row.place}: {said}")
        prompts.append(Prompt(number, row.text, ids, row.answer, row.meta, template.end(ids), row.messages))
    if faults:
        raise DataError(listed(faults))
    for what, places in doubts.items():
        warn(f"{len(places)} of {len(prompts)} rows {what}, such as {places[0]}")
    return tuple(prompts)


class PromptSource:
    """Prompts to draw from, without end: each epoch of a stream holds every usable row once."""

    def __init__(
        self,
        streams: Sequence[Rows],
        template: PromptTemplate,
        data: DataConfig,
        *,
        seed: int,
        group: int = 2,
        weights: Sequence[float] | None = None,
        beside: Sequence[Side] = (),
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``streams``: one, or the sources of a mixture. The place of a row in all of them, one after the other, is its
        identity (``Prompt.row``). ``group``: samples of a prompt. ``weights``: of the streams; each draw is from one of
        them, chosen at random in this proportion. ``beside``: sources that are asked first for their share of draws.
        Raises DataError: a row is bad, or none is short enough."""
        self._template, self._data, self._warn = template, data, warn
        make = partial(DifficultyStream, group=group) if data.sampling == "difficulty" else Stream
        self._streams = [make(rows, number, data, seed) for number, rows in enumerate(streams)]
        self._starts = [0, *accumulate(len(rows) for rows in streams)]
        self._choice = Choice(list(weights), seed, "mixture") if weights and len(weights) > 1 else None
        self._beside = Beside(beside, template, data.max_prompt_length, self.rows) if beside else None
        self._seed = seed
        self._draws = self.seen = self.too_long = self.bad = 0
        self._warned = 0
        self._good, self._named, self.report = preview(streams, template, data)
        self.prompts: Sequence[Prompt] = _Prompts(self, self._good)
        """The usable ones among the rows that were checked. Made when they are asked for, and not kept."""

    @property
    def rows(self) -> int:
        return self._starts[-1]

    def next(self) -> Prompt:
        """The next prompt.
        Raises DataError: a row is bad and ``data.on_bad_row`` is ``fail``; too many are bad; or none can be used."""
        number = self._choice[self._draws] if self._choice else 0
        stream = self._streams[number]
        self._draws += 1
        if self._beside and (prompt := self._beside.next(point(self._seed, "beside", self._draws))):
            return prompt
        for _ in range(2 * len(stream.rows)):  # wherever it stands, these hold a whole epoch
            row = stream.next()
            self.seen += 1
            try:
                prompt = self.make(number, row)
            except BadRow as fault:
                stream.leave_out(row)
                self._skip(
                    f"{stream.rows.place(row)}: {fault}", new=not stream.epoch and (number, row) not in self._named
                )
                continue
            if len(prompt.token_ids) <= self._data.max_prompt_length:
                return prompt
            self.too_long += 1
            stream.leave_out(row)
        raise DataError(
            f"{names_of(stream.rows)}: none of the {len(stream.rows)} rows can be used: {self.too_long} times a prompt "
            f"was longer than data.max_prompt_length={self._data.max_prompt_length}, {self.bad} times a row was bad"
        )

    def feedback(self, groups: Sequence[Group]) -> None:
        """What became of prompts, for streams that go by it."""
        for stream, start in zip(self._streams, self._starts, strict=False):
            heard: dict[int, list[Group]] = {}
            for group in groups:
                if start <= group.prompt.row < start + len(stream.rows):
                    heard.setdefault(group.prompt.row - start, []).append(group)
            stream.heard(heard)
        if self._beside:
            self._beside.heard(groups)

    def metrics(self) -> dict[str, float]:
        """Of how prompts are drawn; in a mixture, the mean over its sources."""
        every = [stream.metrics() for stream in self._streams]
        names = dict.fromkeys(name for found in every for name in found)
        found = {name: fmean(found[name] for found in every if name in found) for name in names}
        return found | (self._beside.metrics() if self._beside else {})

    def untokenized(self) -> Iterator[Prompt]:
        """The same prompts without token ids, read one by one: what a reward gets to see of them."""
        for stream, number in self._good:
            source = self._streams[stream]
            row = source.rows[number]
            yield Prompt(self._starts[stream] + number, row.text, (), source.answer(number, row), row.meta)

    def make(self, stream: int, number: int) -> Prompt:
        """The prompt of a row, however long it is. Raises BadRow: the row cannot be used."""
        source = self._streams[stream]
        row = source.rows[number]
        ids = encode(row, self._template)
        end = self._template.end(ids)
        start, answer = self._starts[stream], source.answer(number, row)
        return Prompt(start + number, row.text, ids, answer, row.meta, end, row.messages)

    def _skip(self, fault: str, new: bool) -> None:
        """Go on without a row, or stop; ``new``: nobody heard of it yet."""
        self.bad += 1
        if self._data.on_bad_row == "fail":
            raise DataError(f"{fault}\n(data.on_bad_row=skip goes on without such rows)")
        allowed = self._data.max_bad_rows * max(self.seen, CHECKED_ROWS)
        # three standard deviations above the share: not by chance
        if not self.report.whole and self.bad > allowed + 3 * math.sqrt(allowed):
            raise DataError(
                f"{fault}\nThis is bad row {self.bad} of {self.seen} drawn, more than data.max_bad_rows="
                f"{self._data.max_bad_rows:g} allows"
            )
        self._warned += new
        if new and self._warned <= SHOWN_FAULTS:
            last = "; further ones are counted and not named" if self._warned == SHOWN_FAULTS else ""
            self._warn(f"data.train: a bad row is skipped: {fault}{last}")

    @property
    def epoch(self) -> float:
        """Passes over the rows so far; of a mixture, all its rows taken together."""
        return sum(stream.drawn for stream in self._streams) / self.rows

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What tells this data from other data, in JSON types: rows and a content hash for each part, by its number and
        file name. A file that was moved is still the same."""
        return {part.label: part.fingerprint() for stream in self._streams for part in stream.rows.parts}

    def state(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "positions": [stream.state() for stream in self._streams],
            "seen": self.seen,
            "too_long": self.too_long,
            "bad": self.bad,
            "data": self.fingerprint,
            **({"beside": self._beside.state()} if self._beside else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state` gave.
        Raises DataError: it was given over other data; says what differs."""
        if changes := [str(found) for found in differences(state["data"], self.fingerprint)]:
            raise DataError("the data has changed since the checkpoint:\n" + "\n".join(changes))
        self._draws, self.seen = state["draws"], state["seen"]
        self.too_long, self.bad = state["too_long"], state["bad"]
        for stream, position in zip(self._streams, state["positions"], strict=True):
            stream.load_state(position)
        if self._beside and "beside" in state:
            self._beside.load_state(state["beside"])


class _Prompts(Sequence[Prompt]):
    def __init__(self, source: PromptSource, rows: Sequence[tuple[int, int]]) -> None:
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        return self._source.make(*self._rows[place])
