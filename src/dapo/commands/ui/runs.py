"""The runs that the page may show: found below the folders that were given, named, and read again when they change.

A run is looked up by name among those found, never by a path that a browser sends.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Query, Request

from dapo.comparison.folder import is_comparison
from dapo.errors import UserError
from dapo.observe.index import SampleIndex, stamp_of
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView, is_run, runs_in

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class Refused(Exception):
    """What is asked for cannot be had now: ``status`` of HTTP."""

    status = 503


class NotHere(Refused):
    """What a request names is not there."""

    status = 404


class Run:
    """One run folder. Reading it is safe from several threads."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.folder = name, RunFolder(root)
        self._lock = threading.Lock()
        self._index_lock = threading.Lock()  # apart: a first index may take minutes, and the page goes on
        self._read: tuple[tuple[Any, ...], bool, RunView] | None = None
        self._index: SampleIndex | None = None
        self._indexed: tuple[Any, ...] = ()

    @property
    def view(self) -> RunView:
        """The run as it lies on the disk now; its files are read only if one has changed.
        Raises UserError: a line of its metrics is spoilt, or it is a run no longer."""
        return self._view(brief=False)

    @property
    def card(self) -> RunView:
        """The same with some lines of the metrics only: a list of hundreds of runs is there at once."""
        return self._view(brief=True)

    def _view(self, brief: bool) -> RunView:
        folder = self.folder
        stamp = stamps_of(folder.config, folder.environment, folder.fingerprint, folder.summary, folder.metrics)
        with self._lock:
            if self._read is None or self._read[0] != stamp or (self._read[1] and not brief):
                self._read = stamp, brief, RunView.read(folder.root, brief)
            return replace(self._read[2])  # whether it still runs is asked anew

    def samples(self) -> DuckDBPyConnection:
        """For this thread, with the view ``samples`` of all written steps. Raises UserError if DuckDB is missing."""
        stamp = stamps_of(self.folder.samples)
        with self._index_lock:
            if self._index is None:
                self._index = SampleIndex(self.folder.root)
            if self._indexed != stamp:
                self._index.refresh()
                self._indexed = stamps_of(self.folder.samples)  # the index lies inside
            return self._index.connection()


class Runs:
    """The runs in some folders: each is a run or holds runs. A folder may come to be later."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._known: dict[Path, Run] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        """By folder, those that changed last first; one name never means two of them."""
        with self._lock:
            roots = [root for folder in self._folders for root in _found(folder)]
            taken: dict[str, Path] = {run.name: root for root, run in self._known.items() if root in roots}
            for root in dict.fromkeys(roots):
                if root not in self._known:
                    self._known[root] = Run(_free(root, taken), root)
                taken[self._known[root].name] = root
            return sorted((self._known[root] for root in dict.fromkeys(roots)), key=_changed, reverse=True)

    def get(self, name: str) -> Run:
        """Raises NotHere if there is none of this name."""
        known = (run for run in list(self._known.values()) if run.name == name and is_run(run.folder.root))
        run = next(known, None) or next((run for run in self.all() if run.name == name), None)
        if run is None:
            raise NotHere(f"there is no run {name!r} here")
        return run


async def _while_there(request: Request) -> AsyncIterator[None]:
    """Whatever fails because a run that is asked for was removed meanwhile is NotHere."""
    request.state.asked = []
    try:
        yield
    except Exception:
        for run in request.state.asked:
            if not is_run(run.folder.root):
                raise NotHere(f"there is no run {run.name!r} here: it was just removed") from None
        raise


WHILE_THERE = [Depends(_while_there)]  # of all routes that ask for runs


def run_named(request: Request, name: Annotated[str, Query(alias="run")]) -> Run:
    """Raises NotHere if there is none of this name."""
    found: Run = request.app.state.runs.get(name)
    request.state.asked.append(found)
    return found


RunAsked = Annotated[Run, Depends(run_named)]  # The run that a request names. Raises NotHere: there is none.
Points = Annotated[int, Query(ge=10, le=5000)]


def check_folders(folders: Sequence[Path]) -> None:
    """Raises UserError if a folder does not exist, or neither is a run nor holds one."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; a run prints its folder at the end, such as runs/cpu-demo")
        if not _found(folder.resolve()):
            what = "neither is a run folder nor holds any; give a run, or the folder with your runs"
            raise UserError(f"{folder}: {what}")


def stamps_of(*paths: Path) -> tuple[Any, ...]:
    """What changes when one of these files is written, made or replaced."""
    return tuple(map(stamp_of, paths))


def _found(folder: Path) -> list[Path]:
    """Run folders there; one that a link leads to is not, if it lies elsewhere."""
    inside = [root.resolve() for root in runs_in(folder)]
    if is_comparison(folder):  # a cell of several phases holds a run for each
        with suppress(FileNotFoundError):
            inside += [root.resolve() for cell in folder.iterdir() if not is_run(cell) for root in runs_in(cell)]
    return [folder] if is_run(folder) else [root for root in inside if root.is_relative_to(folder)]


def _free(root: Path, taken: dict[str, Path]) -> str:
    name = root.name
    for parent in root.parents:
        if name not in taken:
            break
        name = f"{parent.name}/{name}"
    return name


def _changed(run: Run) -> float:
    try:
        return max(p.stat().st_mtime for p in (run.folder.metrics, run.folder.config) if p.exists())
    except (OSError, ValueError):
        return 0.0
