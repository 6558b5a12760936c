"""The checkpoints of a run: named by where in the run they were taken (docs/runs.md), each there whole or not at all.

Each holds ``model/`` (Hugging Face layout), ``optimizer/``, the state of everything else and, written last,
``manifest.json``: names, sizes and SHA-256 of the other files.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from dapo.errors import LostError, UserError
from dapo.util.files import file_hash, new_folder, read_json, size_text, write_json, writing

MANIFEST = "manifest.json"
FORMAT = 2  # of the state in a checkpoint
RETRY_AFTER_S = 1.0
WAIT_S, SLOWEST_DISK = 600.0, 20e6  # a write is waited for so many seconds, and one more for so many bytes

_NAME = re.compile(r"step-(\d+)(?:-(?:(rollout)|update-(\d+)))?(?:\.(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Where in a run: ``steps`` rollout steps are done, and of the next one so many updates, or some sampling."""

    steps: int
    updates: int = 0
    sampling: bool = False
    repeat: int = 1  # stopped at the same place again: each time more may have been sampled

    @property
    def name(self) -> str:
        inside = f"-update-{self.updates:05d}" if self.updates else "-rollout" if self.sampling else ""
        return f"step-{self.steps:05d}{inside}" + (f".{self.repeat}" if self.repeat > 1 else "")

    @property
    def between_steps(self) -> bool:
        """Whether there is but one state that a run can have there."""
        return not self.updates and not self.sampling

    @property
    def begun(self) -> int:
        """The last rollout step, from 1, that has been begun."""
        return self.steps + (not self.between_steps)

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """From the name of a folder; None: it is no checkpoint's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        steps, rollout, updates, repeat = found.groups()
        return cls(int(steps), int(updates or 0), bool(rollout), int(repeat or 1))


@dataclass(frozen=True, slots=True)
class Snapshot:
    place: CheckpointId
    write: Callable[[Path], None]  # Fills the folder that it is given. Runs in another thread than the run.
    bytes: int  # what it will take on the disk, but for small files
    best: Mapping[str, Any] | None = None  # if it is the best one so far: for ``best.json``


class Checkpoints:
    def __init__(self, folder: Path, keep_last: int | None = None, keep_every: int = 0) -> None:
        """
        Args:
            keep_last: how many to keep beside the best one; None: all. Those from inside of a step go with the next.
            keep_every: those after a multiple of so many steps stay for good; 0: none does.
        """
        self._folder = folder
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._small_files = 0  # their size in the checkpoint before

    def places(self) -> list[CheckpointId]:
        """Of all complete checkpoints, in the order of the run."""
        there = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(found for path in there if path.is_dir() and (found := CheckpointId.parse(path.name)))

    def latest(self) -> Path | None:
        """The checkpoint that is furthest in the run, damaged or not."""
        places = self.places()
        return self._folder / places[-1].name if places else None

    def latest_intact(self, tell: Callable[[str], object]) -> Path | None:
        """The furthest checkpoint whose files are those that were written. Damaged ones are put out of the way.
        Raises UserError: there are checkpoints, and all are damaged."""
        intact, damaged = self.find_intact()
        if intact is None and damaged:
            lines = "\n".join(f"{bad} is damaged: {why}" for bad, why in damaged)
            raise UserError(
                f"{lines}\nThere is no other checkpoint to go on from. Bring the files back, or start a new run; a "
                "model/ that is intact can be its model.path"
            )
        if intact is not None:
            for bad, why in damaged:
                names = (f"damaged-{bad.name}" + (f".{number}" if number > 1 else "") for number in count(1))
                aside = bad.replace(next(path for name in names if not (path := bad.with_name(name)).exists()))
                tell(f"{bad} is damaged ({why}): going on from {intact.name}; it is kept as {aside.name}")
        return intact

    def find_intact(self) -> tuple[Path | None, list[tuple[Path, str]]]:
        """The furthest checkpoint whose files are those that were written, and the damaged ones after it, with what is
        wrong with them. Reads all of their files, and changes nothing."""
        damaged: list[tuple[Path, str]] = []
        for place in reversed(self.places()):
            folder = self._folder / place.name
            if not (problems := damages(folder)):
                return folder, damaged
            damaged.append((folder, "; ".join(problems)))
        return None, damaged

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint and, once it is complete, remove those that are no longer wanted.

        Between two steps there is one state only, which is not written twice.
        Raises UserError: it cannot be written, or there is no room for it. Those that exist stay.
        """
        place = snapshot.place
        while not place.between_steps and (self._folder / place.name).exists():
            place = replace(place, repeat=place.repeat + 1)
        target = self._folder / place.name
        with writing(target):
            if not target.is_dir():
                self._require_space(snapshot, target)
                with new_folder(target) as staging:
                    snapshot.write(staging)
                    files = _describe(staging)
                    write_json(staging / MANIFEST, {"format": FORMAT, "files": files})
                self._small_files = max(0, sum(file["bytes"] for file in files.values()) - snapshot.bytes)
            if snapshot.best is not None:
                write_json(self._folder / "best.json", snapshot.best)
        self.prune()
        return target

    def holds(self, place: CheckpointId) -> Path | None:
        """The checkpoint of a place with one state only, if there is one."""
        folder = self._folder / place.name
        return folder if place.between_steps and folder.is_dir() else None

    @property
    def best(self) -> dict[str, Any] | None:
        """``step``, ``metric``, ``value`` and ``path`` (in the run folder, of its weights) of the best evaluation."""
        try:
            found = read_json(self._folder / "best.json")
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def set_best(self, best: Mapping[str, Any]) -> None:
        """Record which step is the best one, whose checkpoint is then kept. Raises UserError: it cannot be written."""
        with writing(self._folder / "best.json"):
            write_json(self._folder / "best.json", best)
        self.prune()

    def prune(self) -> None:
        if self._keep_last is None:
            return
        best = (self.best or {}).get("step")
        places = self.places()
        between = [place for place in places if place.between_steps]
        wanted = {*between[-self._keep_last :], *places[-1:], CheckpointId(best if isinstance(best, int) else -1)}
        if self._keep_every:
            wanted |= {place for place in between if place.steps % self._keep_every == 0}
        for place in places:
            if place not in wanted:
                # renamed first: what is half removed must not look like a checkpoint
                doomed = self._folder / f".{place.name}.tmp"
                with contextlib.suppress(OSError):  # it takes room, and does no other harm
                    (self._folder / place.name).replace(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _require_space(self, snapshot: Snapshot, target: Path) -> None:
        needed, free = snapshot.bytes + self._small_files, shutil.disk_usage(self._folder).free
        if free < needed:
            raise UserError(
                f"{target}: cannot be written: No space left on device: it takes {size_text(needed)}, and "
                f"{size_text(free)} are free. The old one goes only once the new one is complete, so there has to be "
                f"room for both; a lower run.keep_last keeps fewer"
            )


def damages(folder: Path, quick: bool = False) -> list[str]:
    """What is wrong with the files of a checkpoint, compared with its manifest.
    ``quick``: compare their sizes only, and read none of them."""
    try:
        manifest = read_json(folder / MANIFEST)
        files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"]
    if not files:
        return [f"{MANIFEST} names no files"]
    found = (_damage(folder / name, name, size, None if quick else digest) for name, (size, digest) in files.items())
    return [problem for problem in found if problem]


def _damage(path: Path, name: str, size: int, digest: str | None) -> str | None:
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes, not {size:,}"
        return None if digest in (None, file_hash(path)) else f"{name} is not what was written: its SHA-256 differs"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {path: {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in paths}
    return {path.relative_to(folder).as_posix(): said for path, said in found.items()}


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time, while the run goes on.

    A write that fails is tried once more, unless what it needs is lost. What failed is told if that works; otherwise
    :meth:`check` and :meth:`settle` raise the last error.
    """

    def __init__(self, checkpoints: Checkpoints, tell: Callable[[str], object]) -> None:
        """``tell``: hears of a failure that is not the last word. Called on the event loop."""
        self._checkpoints = checkpoints
        self._tell = tell
        self._under_way: tuple[Future[Path | BaseException], Snapshot, float] | None = None
        self.longest_s = 0.0  # what the slowest write so far took

    @property
    def under_way(self) -> str | None:
        """Name of the checkpoint that is being written."""
        return self._under_way and self._under_way[1].place.name

    def begin(self, snapshot: Snapshot) -> None:
        """Start to write. The one before has to be settled: two at once would take the memory of two snapshots."""
        if self._under_way is not None:
            raise RuntimeError("a checkpoint is being written already")
        loop, done = asyncio.get_running_loop(), Future[Path | BaseException]()

        def write() -> None:
            started = time.monotonic()
            try:
                result: Path | BaseException = self._save(snapshot, loop)
            except BaseException as error:  # for the waiter, which may be gone by now
                result = error
            if snapshot.bytes:  # otherwise there was nothing to write
                self.longest_s = max(self.longest_s, time.monotonic() - started)
            done.set_result(result)

        limit = time.monotonic() + WAIT_S + snapshot.bytes / SLOWEST_DISK
        self._under_way = done, snapshot, limit
        # a daemon, so that a disk that hangs does not keep the process
        threading.Thread(target=write, name="dapo-checkpoint", daemon=True).start()

    def _save(self, snapshot: Snapshot, loop: asyncio.AbstractEventLoop) -> Path:
        try:
            return self._checkpoints.save(snapshot)
        except LostError:
            raise
        except UserError as error:
            time.sleep(RETRY_AFTER_S)
            saved = self._checkpoints.save(snapshot)
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody listens
                loop.call_soon_threadsafe(self._tell, f"{error}; tried again, and written")
            return saved

    def check(self) -> None:
        """Raises UserError: the last checkpoint could not be written."""
        if self._under_way is not None and self._under_way[0].done():
            self._result()

    async def settle(self) -> Path | None:
        """Wait for the checkpoint that is being written, if there is one. Cancelled, it goes on being written.
        Raises UserError: it could not be written, or the disk does not get on with it."""
        if self._under_way is None:
            return None
        done, snapshot, limit = self._under_way
        await asyncio.wait({asyncio.wrap_future(done)}, timeout=max(0.0, limit - time.monotonic()))
        if not done.done():  # it stays under way: a second one would write into the same places
            raise UserError(
                f"{snapshot.place.name}: the checkpoint of {size_text(snapshot.bytes)} is still not written; the disk "
                "was waited for long enough"
            )
        return self._result()

    async def close(self, limit_s: float, then: Callable[[], object]) -> None:
        """Wait for the checkpoint that is being written, but not for long; one that is not done is named.
        ``then``: called once nothing is being written any more, be that later and in another thread."""
        if self._under_way is None:
            then()
            return
        done, snapshot, _ = self._under_way
        done.add_done_callback(lambda _: then())
        await asyncio.wait({asyncio.wrap_future(done)}, timeout=limit_s)
        if not done.done():
            self._tell(
                f"{snapshot.place.name}: was waited for another {limit_s:g} s and is still not written; "
                "the run folder stays locked until it is, or until this process ends"
            )
        elif isinstance(error := done.result(), BaseException):
            self._tell(str(error))

    def _result(self) -> Path:
        assert self._under_way is not None
        outcome, self._under_way = self._under_way[0].result(), None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
