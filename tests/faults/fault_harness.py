"""Does faults to runs and says which of them survived.

A :class:`Fault` declares beforehand how the process ends, within how many seconds, what its last words must name and
what must have been kept. :func:`try_fault` starts ``dapo train`` in a process of its own on a recipe of seconds, lets
the fault happen, and holds what came against the declaration. Nothing is repeated and nothing is forgiven: a fault that
did not strike is a failure too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from fault_inside import Start, Strike, become

from dapo.observe.checkpoints import Checkpoints
from dapo.observe.metrics import read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.util.files import json_line
from run_cases import PROMPTS, TOKENIZER, config_for, tiny_model, without_times

STEPS = 8
SETTINGS: dict[str, Any] = {
    "training.steps": STEPS,
    "training.warmup_steps": 3,
    "run.save_every": 2,
    "evaluation.every": 4,
    "algorithm.filter_groups.on_starved": "train",
}
LIMIT_S = 120.0
"""Longest time for any process here, whatever its fault; a fault declares less."""
GRACE_S = 5.0
"""How long processes that a run has started may outlive it."""
LOADED = ["dapo.orchestrator.experiment", "dapo.orchestrator.launch", "dapo.commands", "fault_inside", "run_cases"]
LOADED += [f"transformers.models.qwen2.{part}_qwen2" for part in ("modeling", "tokenization")]
"""What a process has loaded that others are made from: nearly all that a run takes its first seconds for."""
_MARK = "DAPO_FAULT_RUN"


class Kept(Enum):
    """What must be there after the fault."""

    DONE = "the run came to its end, as if nothing had been"
    RESUMED = "the run, resumed, comes to the same end as one that was not disturbed"
    GOES_ON = "the newest checkpoint loads, and the run goes on from it"
    FINISHED = "the run came to its end"
    NOTHING_BEGUN = "nothing was written"


@dataclass(frozen=True)
class Ended:
    """How the process came to its end that the fault was done to."""

    code: int | None
    """None: it did not end, and was killed."""
    seconds: float
    """From the fault to the end."""
    output: str
    left: tuple[str, ...] = ()
    """Processes that it left behind."""
    note: str = ""
    """What was left to chance, and how it fell."""


@dataclass(frozen=True)
class Fault:
    """A fault and what is demanded of a run that suffers it."""

    name: str
    do: Callable[[Stage], Ended]
    """Starts a run, does the fault, waits for the end."""
    exit: tuple[int, ...]
    kept: Kept
    says: tuple[str, ...] = ()
    """Words that the output must hold, in any case of letters."""
    seconds: float = 60.0
    """From the fault (or, where it was there from the start, from the start) to the end of the process."""
    mend: Callable[[Stage], None] = lambda stage: None
    """What a person would do before going on with the run."""
    ci: bool = False
    """Whether it is one of those tried at each change."""
    also: Callable[[Stage], str | None] = lambda stage: None
    """One more demand: what is wrong, or None."""


@dataclass(frozen=True)
class Verdict:
    """What became of a fault."""

    fault: Fault
    ended: Ended
    lost: tuple[str, ...]
    """What was not as declared; empty: survived."""


class Stage:
    """Where a fault is tried: a folder with a recipe, its data and model, and processes that run it."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self.folder, self.scene = folder, scene
        self.run = folder / "run"
        self.overrides: list[str] = []
        """Changes to the recipe."""
        self.again: list[str] = []
        """What has to be said when the run is resumed."""
        self.marker = folder / "struck"
        self.clean_up = contextlib.ExitStack()

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *changes: str, recipe: Path | None = None, **around: Any) -> Running:
        """``dapo train RECIPE``, with these changes, and faults inside of it."""
        words = ["train", str(recipe or self.scene.recipe), f"run.dir={self.run}", *self.overrides, *changes]
        return Running(self, words, **around)

    def resume(self, **around: Any) -> Running:
        """``dapo train --resume RUN``."""
        return Running(self, ["train", "--resume", str(self.run), *self.again], **around)

    def lines(self) -> int:
        """Of the metrics so far."""
        metrics = RunFolder(self.run).metrics
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


class Running:
    """A process of ``dapo``; made by one that has loaded torch already, if the scene has one: it starts at once."""

    def __init__(
        self,
        stage: Stage,
        words: list[str],
        strikes: Sequence[Strike] = (),
        environment: Mapping[str, str] | None = None,
        reader: str = "",
    ) -> None:
        self._mark = f"{stage.folder.name}-{random.getrandbits(48)}"
        self._output = stage.folder / f"output-{self._mark}.txt"
        self.stage, self.started = stage, time.monotonic()
        around = {_MARK: self._mark, "NO_COLOR": "1", "DAPO_CACHE": str(stage.folder / "cache"), **(environment or {})}
        start = Start(
            words,
            str(stage.run),
            str(self._output),
            str(stage.marker),
            str(stage.folder),
            around,
            list(strikes),
            reader,
        )
        if stage.scene.server is None:
            here = [sys.executable, str(Path(__file__).with_name("fault_inside.py")), start.as_json()]
            self._process: Any = subprocess.Popen(here, start_new_session=True, env=_environment() | around)
        else:
            self._process = stage.scene.server.Process(target=become, args=(start,))
            self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, if it has ended; minus the signal that ended it."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def until(self, there: Callable[[], bool], limit: float = LIMIT_S) -> None:
        """Wait for something, or for the end of the process."""
        deadline = time.monotonic() + limit
        while self.poll() is None and not there() and time.monotonic() < deadline:
            time.sleep(0.002)

    def end(self, since: float | None = None) -> Ended:
        """Wait for the end, as long as is bearable, and see what is left.

        Args:
            since: when the fault happened; by default when it struck inside of the process, or else the start.
        """
        self.until(lambda: False)
        now, code = time.monotonic(), self.poll()
        if since is None:
            marker = self.stage.marker
            since = float(marker.read_text()) if marker.exists() else self.started
        if code is None:
            self.send(signal.SIGKILL)
        return Ended(code, now - since, self.output, self._left())

    def _left(self) -> tuple[str, ...]:
        """Processes with this run's mark, after a moment for them to see that it has ended. They are killed."""
        deadline = time.monotonic() + GRACE_S
        while (left := list(_marked(self._mark, but=self.pid))) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return tuple(f"{pid}: {words}" for pid, words in left)


def _environment() -> dict[str, str]:
    tests = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def _marked(mark: str, but: int) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != but and f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]


@dataclass
class Scene:
    """What all stages share: model, data, recipe, and what the run comes to that is not disturbed."""

    folder: Path
    server: Any = None
    """A multiprocessing context that starts processes with everything heavy loaded; None: each loads for itself."""
    recipe: Path = field(init=False)
    whole: dict[str, Any] = field(init=False)
    stopped: Path = field(init=False)
    """A run that was killed in its eighth step, with checkpoints of steps 4 and 6, for stages to copy."""

    def __post_init__(self) -> None:
        self.recipe = write_scene(self.folder)
        whole = self.stage("whole")
        ended = whole.start().end()
        assert ended.code == 0, ended.output
        self.whole = outcome(whole.run)
        killed = self.stage("killed")
        never, newest = killed.folder / "never", RunFolder(killed.run).checkpoints / "step-00006"
        running = killed.start(strikes=[Strike("update", "wait", lines=7, target=str(never))])
        running.until(lambda: newest.exists() and Path(f"{never}.waiting").exists())  # it is written meanwhile
        running.send(signal.SIGKILL)
        ended = running.end()
        assert ended.code == -signal.SIGKILL, ended.output
        self.stopped = killed.run

    def stage(self, name: str) -> Stage:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return Stage(folder, self)


def make_scene(folder: Path, fast: bool) -> Scene:
    """What faults are tried in.

    Args:
        folder: exists.
        fast: processes are made by one that has loaded torch already, in place of starting Python anew.
    """
    server = None
    if fast:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(LOADED)
    return Scene(folder, server)


def write_scene(folder: Path) -> Path:
    """Model, rows, reward and recipe; returns the recipe."""
    tiny_model().save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(map(json_line, PROMPTS)))
    (folder / "heldout.jsonl").write_text("".join(map(json_line, PROMPTS[:4])))
    (folder / "reward.py").write_text(REWARD)
    named = {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "evaluation.data": str(folder / "heldout.jsonl"),
        "reward.kind": "function",
        "reward.function": f"{folder}/reward.py:reward",
        "reward.workers": 1,
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config_for(folder / "run", SETTINGS | named).model_dump(mode="json")))
    return recipe


REWARD = """
def reward(prompt, response, answer):
    return sum(map(ord, response)) % 4 == 0
"""


def outcome(run: Path) -> dict[str, Any]:
    """What a run has learned and written, but for times."""
    paths = RunFolder(run)
    weights = hashlib.sha256()
    for file in sorted(paths.model_after.glob("*.safetensors")):
        weights.update(file.read_bytes())
    return {
        "weights": weights.hexdigest(),
        "samples": {path.name: path.read_bytes() for path in sorted(paths.samples.glob("step-*"))},
        "metrics": [without_times(entry) for entry in read_metrics(paths.metrics)],
    }


# --- trying them --------------------------------------------------------------------------------------------------


def try_fault(fault: Fault, scene: Scene) -> Verdict:
    """Do a fault, and hold what comes against what was declared."""
    stage = scene.stage("".join(c if c.isalnum() else "-" for c in fault.name))
    with stage.clean_up:
        ended = fault.do(stage)
        lost = list(differences(fault, ended))
        fault.mend(stage)
        lost += [what for what in (_not_kept(fault.kept, stage), fault.also(stage)) if what]
    return Verdict(fault, ended, tuple(lost))


def differences(fault: Fault, ended: Ended) -> Iterator[str]:
    """What is not as declared about the end of the process."""
    if ended.code is None:
        yield f"did not end within {LIMIT_S:g} s"
    elif ended.code not in fault.exit:
        yield f"exit code {ended.code}, declared {' or '.join(map(str, fault.exit))}"
    if ended.seconds > fault.seconds:
        yield f"took {ended.seconds:.1f} s, declared {fault.seconds:g} s"
    for word in fault.says:
        if word.lower() not in ended.output.lower():
            yield f"does not say {word!r}"
    if "Traceback (most recent call last)" in ended.output:
        yield "prints a traceback"
    for process in ended.left:
        yield f"left a process behind: {process}"


def _not_kept(kept: Kept, stage: Stage) -> str | None:
    """What was lost of what must be there."""
    if kept is Kept.NOTHING_BEGUN:
        return f"{stage.run} was begun" if stage.run.exists() and any(stage.run.iterdir()) else None
    if kept in (Kept.RESUMED, Kept.GOES_ON):
        if kept is Kept.GOES_ON and newest(stage) is None:
            return "there is no checkpoint"
        stage.marker.unlink(missing_ok=True)
        ended = stage.resume().end()
        if ended.code != 0:
            return f"resuming ends with exit code {ended.code}: {ended.output.strip()[-400:]}"
    done = _done(stage.run)
    if not done:
        return "the run did not come to its end"
    if kept in (Kept.DONE, Kept.RESUMED):
        found = outcome(stage.run)
        odd = [name for name in found if found[name] != stage.scene.whole[name]]
        if odd:
            return f"not what the run comes to that is not disturbed: {', '.join(odd)} differ"
    return None


def newest(stage: Stage) -> Path | None:
    """The newest checkpoint."""
    folder = RunFolder(stage.run).checkpoints
    return Checkpoints(folder).latest() if folder.is_dir() else None


def _done(run: Path) -> bool:
    summary = RunFolder(run).summary
    if not summary.exists() or not RunFolder(run).model_after.is_dir():
        return False
    return int(json.loads(summary.read_text())["steps"]) == STEPS
