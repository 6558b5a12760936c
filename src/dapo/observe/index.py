"""The samples of a whole run in one columnar index, so that a question about all of them opens a few files.

Consumes: the files of the steps (``observe/samples.py``), which stay what they are: the index is made from them, and
anew if it is damaged. Produces: Parquet segments under ``samples/index/``, and a DuckDB view ``samples`` over them with
the columns of :data:`~dapo.observe.sample_rows.COLUMNS`. Waits for: the disk. Needs the extra ``ui``.

Each update adds one segment; many small ones become one, so that there are few whatever the number of steps.
``manifest.json`` says which segments count, and which of their steps: a step that was made again after a resume is
hidden in the old segment. It is replaced in one move, so readers see the index before or after an update. A segment
that went into a larger one stays for a while, for readers who still have the manifest before.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from dapo.errors import UserError, install
from dapo.observe.sample_rows import COLUMNS, rows_of
from dapo.observe.samples import samples_path, steps_with_samples
from dapo.util.files import json_line, lock_file, read_json, write_atomic, writing

if TYPE_CHECKING:
    import duckdb

_FORMAT = 1
"""Of the manifest and of :data:`COLUMNS`: an index of another one is made anew."""
_MANY = 16  # so many small segments become one
_PLAIN = "hive_partitioning=false"
"""Else DuckDB takes a column from a run folder such as ``length=20``, instead of that in the file."""
_ROWS = 65_536  # rows that are brought in at once
_MOST_ROWS = 1_000_000  # a segment with more is left as it is
_MEMORY, _SPILLED, _THREADS = "1GB", "8GB", 4
"""What DuckDB may take: memory, then disk for what does not fit into it, and threads at most. Left to itself it would
take four fifths of the memory and all cores, and write into the working folder."""
_GRACE = 60.0  # seconds that a segment stays after it went into a larger one

Stamp = list[int]  # size and time (ns) of a step's file: another one has other samples


def has_duckdb() -> bool:
    return importlib.util.find_spec("duckdb") is not None


@dataclass(frozen=True, slots=True)
class Segment:
    """One Parquet file: ``steps`` are those of its steps that count, ``hidden`` those that do not."""

    file: str
    bytes: int
    rows: int
    steps: Mapping[int, Stamp]
    hidden: tuple[int, ...] = ()

    def without(self, steps: Iterable[int]) -> Segment:
        gone = self.steps.keys() & set(steps)
        kept = {step: stamp for step, stamp in self.steps.items() if step not in gone}
        return replace(self, steps=kept, hidden=tuple(sorted({*self.hidden, *gone})))


def read_segments(folder: Path) -> list[Segment]:
    """Those of an index that are neither missing nor cut; none if its manifest cannot be read."""
    try:
        found = read_json(folder / "manifest.json")
        if found["format"] != _FORMAT:
            return []
        segments = TypeAdapter(list[Segment]).validate_python(found["segments"])
        return [s for s in segments if (stamp := stamp_of(folder / s.file)) and stamp[0] == s.bytes]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _write_segments(folder: Path, segments: Iterable[Segment]) -> None:
    value = {"format": _FORMAT, "segments": [asdict(segment) for segment in segments]}
    write_atomic(folder / "manifest.json", json_line(value))


def _steps_of(segments: Iterable[Segment]) -> dict[int, Stamp]:
    return {step: stamp for segment in segments for step, stamp in segment.steps.items()}


class SampleIndex:
    """The index of one run. Any number of readers, in any processes; a writer that finds another at work leaves it so.

    Attributes:
        samples: the folder ``samples`` of the run.
        folder: where the index is: in it, or in a temporary place if that cannot be written to.
        damaged: step -> what is wrong with its file, which is why it is not in the index.
    """

    def __init__(self, run: Path, threads: int = _THREADS) -> None:
        self.samples = run / "samples"
        self.folder = self.samples / "index"
        self.damaged: dict[int, str] = {}
        self._threads = threads
        self._elsewhere: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()
        self._database: duckdb.DuckDBPyConnection | None = None
        self._shown: Any = None  # which manifest the view is of

    def connection(self) -> duckdb.DuckDBPyConnection:
        """For one thread, with the view ``samples`` as the index is now. Raises UserError if DuckDB is missing."""
        with self._lock:
            newest = (self.folder, stamp_of(self.folder / "manifest.json"))
            if newest != self._shown:
                select = _select(self.folder, read_segments(self.folder))
                self._db.execute(f"CREATE OR REPLACE VIEW samples AS {select}")
                self._shown = newest
            return self._db.cursor()

    @property
    def steps(self) -> list[int]:
        return sorted(_steps_of(read_segments(self.folder)))

    @property
    def _db(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._database is None:
                self._database = open_database(self._threads, self.folder / f".spill-{uuid.uuid4().hex[:8]}")
            return self._database

    def update(self) -> int:
        """Bring in the steps that are missing or were made again: how many there were.

        A step whose file is gone stays; one whose file is damaged is left out, see :attr:`damaged`. Raises UserError
        if DuckDB is not installed.
        """
        there = _stamps(self.samples)
        if not there:
            return 0
        with self._writing() as free:
            if not free:
                return 0
            segments = read_segments(self.folder)
            known, brought = _steps_of(segments), 0
            missing = iter(sorted(step for step, stamp in there.items() if known.get(step) != stamp))
            while new := self._segment(missing, there):
                segments = self._merged([*(old.without(new.steps) for old in segments), new])
                _write_segments(self.folder, segments)
                brought += len(new.steps)
            known_files = {segment.file for segment in segments}
            for path in [*self.folder.glob("*.parquet"), *self.folder.glob(".*.tmp")] if brought else ():
                # merged ones that no reader needs any longer, and those of a killed process
                if path.name not in known_files and time.time() - path.stat().st_mtime > _GRACE:
                    path.unlink(missing_ok=True)
            return brought

    def refresh(self) -> None:
        """As :meth:`update`, for readers: if the disk of the run is full, it goes on in a temporary place.
        Raises UserError: DuckDB is not installed, or there is no room for an index in either place."""
        with writing(self.folder):
            try:
                self.update()
            except Exception:  # to DuckDB a full disk is no OSError
                if self._elsewhere is not None:
                    raise
                self._move_elsewhere()
                self.update()

    def add(self, select: str, steps: Iterable[int]) -> None:
        """Bring in the rows of a query with the columns of :data:`COLUMNS`: for steps whose rows are not from files."""
        with self._writing():
            stamps = _stamps(self.samples)
            new = self._copied(select, {step: stamps.get(step, [0, 0]) for step in steps})
            old = [segment.without(new.steps) for segment in read_segments(self.folder)]
            _write_segments(self.folder, [*old, new])

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """Be the only writer; whether that came about."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.folder / ".lock").open("a"))
            except OSError:  # not ours to write to: an index for this process alone
                self._move_elsewhere()
                lock = stack.enter_context((self.folder / ".lock").open("a"))
            try:
                lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            except BlockingIOError:
                free = False
            yield free

    def _move_elsewhere(self) -> None:
        self._elsewhere = tempfile.TemporaryDirectory(prefix="dapo-index-")
        segments, home = read_segments(self.folder), self.folder.resolve()
        self.folder = Path(self._elsewhere.name)
        _write_segments(self.folder, [replace(s, file=str(home / s.file)) for s in segments])

    def _segment(self, steps: Iterator[int], there: Mapping[int, Stamp]) -> Segment | None:
        """Of the next steps that are not damaged, as many as have :data:`_ROWS` rows; None: there are no more."""
        brought: dict[int, Stamp] = {}
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix=".", suffix=".tmp", encoding="utf-8") as file:
            count = 0
            for step in steps:
                try:
                    rows = rows_of(self.samples, step)
                except UserError as error:
                    self.damaged[step] = str(error)
                    continue
                self.damaged.pop(step, None)
                file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
                brought[step], count = there[step], count + len(rows)
                if count >= _ROWS:
                    break
            file.flush()
            types = ", ".join(f"{name}: '{kind}'" for name, kind in COLUMNS.items())
            source = f"read_json({_quoted(file.name)}, format='newline_delimited', columns={{{types}}}, {_PLAIN})"
            return self._copied(f"SELECT * FROM {source}", brought) if brought else None

    def _copied(self, select: str, steps: Mapping[int, Stamp]) -> Segment:
        name = f"{min(steps, default=0):05d}-{max(steps, default=0):05d}-{uuid.uuid4().hex[:8]}.parquet"
        path, temporary = self.folder / name, self.folder / f".{name}.tmp"
        names = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in COLUMNS.items())
        try:
            done = self._db.cursor().execute(
                f"COPY (SELECT {names} FROM ({select}) ORDER BY step, text_offset) TO {_quoted(temporary)} "
                "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 65536)"
            )
            (rows,) = done.fetchone() or (0,)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return Segment(name, path.stat().st_size, int(rows), dict(steps))

    def _merged(self, segments: list[Segment]) -> list[Segment]:
        small = [s for s in segments if s.rows < _MOST_ROWS]
        if len(small) < _MANY:
            return segments
        one = self._copied(_select(self.folder, small), _steps_of(small))
        for segment in small:
            with contextlib.suppress(OSError):  # of another's folder
                os.utime(self.folder / segment.file)  # from now on it stays for a while
        return [*(s for s in segments if s not in small), one]


def forget_steps(samples: Path, after: int) -> None:
    """Take the steps later than ``after`` out of the index, which a resumed run makes again. Needs no DuckDB."""
    folder = samples / "index"
    if not folder.is_dir():
        return
    with (folder / ".lock").open("a") as lock:
        lock_file(lock, fcntl.LOCK_EX)  # a page that is open may be at it
        segments = read_segments(folder)
        gone = [step for step in _steps_of(segments) if step > after]
        if gone:
            _write_segments(folder, [segment.without(gone) for segment in segments])


def open_database(threads: int = _THREADS, spill: Path | None = None) -> duckdb.DuckDBPyConnection:
    """A database in memory, of bounded size. What does not fit goes to the folder ``spill``, which is made when it is
    needed and goes with the database. Raises UserError if DuckDB is not installed."""
    if not has_duckdb():
        raise UserError(f"the index of samples needs DuckDB: {install('ui')}")
    import duckdb

    config = {"autoinstall_known_extensions": False, "threads": min(threads, os.cpu_count() or 1)}
    bounds = {"memory_limit": _MEMORY, "temp_directory": str(spill or ""), "max_temp_directory_size": _SPILLED}
    return duckdb.connect(":memory:", config=config | bounds)


def _select(folder: Path, segments: Sequence[Segment]) -> str:
    whole = [folder / s.file for s in segments if not s.hidden]
    parts = [f"SELECT * FROM read_parquet([{', '.join(map(_quoted, whole))}], {_PLAIN})"] if whole else []
    for segment in segments:
        if segment.hidden:
            hidden = ", ".join(map(str, segment.hidden))
            file = _quoted(folder / segment.file)
            parts.append(f"SELECT * FROM read_parquet({file}, {_PLAIN}) WHERE step NOT IN ({hidden})")
    nothing = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    return " UNION ALL ".join(parts) or f"SELECT {nothing} WHERE false"


def _quoted(path: Path | str) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def stamp_of(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _stamps(samples: Path) -> dict[int, Stamp]:
    """The steps that have a file, each with what tells whether it is still the same."""
    found = {step: stamp_of(samples_path(samples, step)) for step in steps_with_samples(samples)}
    return {step: stamp for step, stamp in found.items() if stamp is not None}
