"""A run as it lies on the disk: finished, stopped, still running or killed. Reads a run folder, writes nothing.

What is missing, or half written, because the run is young or was killed is None or empty.
"""

from __future__ import annotations

import fcntl
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dapo.config import build_config, load_yaml
from dapo.config.plan import budget_of
from dapo.config.stages import STAGES, build_stage
from dapo.errors import UserError
from dapo.observe.alarms import Alarms
from dapo.observe.changes import Change, changes_in
from dapo.observe.checkpoints import Checkpoints, damages
from dapo.observe.metrics import LENIENT, read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import STATUSES, steps_with_samples
from dapo.util.differences import differences
from dapo.util.files import lock_file, parse_json, read_text
from dapo.util.terminal import counted

if TYPE_CHECKING:
    from dapo.config import Config

HACKING = {
    "false_right": "the held-out check calls wrong what the reward calls right",
    "divergence": "the reward has risen, and the held-out check has not risen with it",
    "length": "reward and length go together within groups, and lengths have moved that way",
}
"""Signs of reward hacking (``reward/monitor.py``), as in the names of their metrics."""

OUTCOMES = {status: why for status, why in STATUSES.items() if status != "carried"} | {
    "cancelled": "stopped, as N groups had been found before its samples were there"
}
"""What became of a draw in the end: what is carried is trained on or stale later."""

_ENDS = ("all steps are done", "the minutes are over", "the samples are over", "the tokens are over", "converged")
"""How the reason begins that summary.json gives for the end of a run, if it ended as planned."""


@dataclass(frozen=True)
class RunView:
    """One run folder, read once. ``metrics`` holds the lines of metrics.jsonl, step 0 included; ``changes`` the
    settings that were changed under way."""

    folder: RunFolder
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def read(cls, root: Path, brief: bool = False) -> RunView:
        """Read a run folder. ``brief``: of the metrics only the first line, the last one and those of evaluations.
        Raises UserError: it is none, or a line of its metrics or changes is spoilt."""
        if not is_run(root):
            what = "is not a run folder: it has no config.yaml" if root.is_dir() else "no such folder"
            raise UserError(f"{root}: {what}; a run prints its folder at the end, such as runs/cpu-demo")
        folder = RunFolder(root)
        metrics = list(read_metrics(folder.metrics, brief)) if folder.metrics.is_file() else []
        summary, fingerprint = _known(_mapping(folder.summary)), _mapping(folder.fingerprint)
        recorded = (_recipe(folder.config), _mapping(folder.environment), summary, fingerprint)
        return cls(folder, *recorded, metrics, changes_in(fingerprint, folder.fingerprint))

    @cached_property
    def steps_done(self) -> int:
        return max((entry.get("step", 0) for entry in self.metrics), default=0)

    @property
    def reward_from_python(self) -> str | None:
        """Name of the function that was passed as reward from Python: the recipe's reward is not what it trained on."""
        reward = _section(self.fingerprint, "reward")
        return str(reward.get("function")) if reward.get("kind") == "python" else None

    @property
    def algorithm_from_python(self) -> list[str]:
        found = _mapping(self.folder.fingerprint)
        return [name for name in ("objective", "advantage") if _section(found, name).get("kind") == "python"]

    @property
    def started_from(self) -> list[Any]:
        """What stands for the content of model, rows and reward."""
        return [self.fingerprint.get(key) for key in ("model", "data.train", "evaluation.data", "reward")]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe to show: where a function or rows were passed from Python, it says so."""
        recipe = dict(self.config)
        if self.reward_from_python is not None:
            recipe["reward"] = f"a Python function: {self.reward_from_python}"
        for section, key in (("data", "train"), ("evaluation", "data")):
            named, there = _section(recipe, section), _section(self.fingerprint, f"{section}.{key}")
            if (there.get("rows") or "prompts" in there) and named.get(key) == []:
                recipe[section] = {**named, key: "rows passed from Python"}
        return recipe

    @property
    def outcomes(self) -> dict[str, float]:
        """What became of the groups that were drawn: counts by status, those that there are none of left out."""
        names = {status: "unscored" if status == "too_few_scored" else status for status in OUTCOMES}
        counts = {status: sum(e.get(f"groups/{name}") or 0 for e in self.metrics) for status, name in names.items()}
        return {status: count for status, count in counts.items() if count}

    @property
    def hacking(self) -> dict[str, list[int]]:
        found = {sign: [e["step"] for e in self.metrics if e.get(f"monitor/alarms/{sign}")] for sign in HACKING}
        return {sign: steps for sign, steps in found.items() if steps}

    def changes_of_reward(self, config: Config) -> list[str]:
        """What is not the same in the recipe's reward as when the run was started, such as the content of a file."""
        from dapo.observe.fingerprint import fingerprint_reward  # loads torch

        then = _section(self.fingerprint, "reward")
        return [str(found) for found in differences(then, fingerprint_reward(config))] if then else []

    def changes_of_algorithm(self, config: Config) -> list[str]:
        """As :meth:`changes_of_reward`, of the objective and advantage that the recipe names in files of the user's."""
        from dapo.observe.fingerprint import fingerprint_methods

        now = fingerprint_methods(config)
        return [str(found) for found in differences({name: self.fingerprint.get(name) for name in now}, now)]

    def settings(self) -> Any:
        """The recipe, checked: of a run, or of a stage. Raises UserError: it is of another version."""
        tree = dict(self.config)
        if tree.get("stage") in STAGES:
            return build_stage(tree["stage"], tree)
        return build_config(tree, file=self.folder.config)

    def alarms(self) -> Iterator[tuple[int, Mapping[str, str], list[str]]]:
        """Of each step, of a run or a stage, what the alarms found by their names, and what they said: they see nothing
        but metrics and recipe, so it is what they say now. Raises UserError: the recipe is of another version."""
        alarms = Alarms(self.settings(), self.changes)
        for entry in self.metrics:
            if entry["step"]:
                said = alarms.observe(entry["step"], entry)[1]
                alarms.settle()
                yield entry["step"], alarms.found, said

    @property
    def command(self) -> str:
        """That of the run, as one types it: what is recorded is the path of a file. Empty: none is recorded."""
        program, *words = [str(word) for word in self.environment.get("command") or [""]]
        program = "dapo" if re.search(r"(^|/)dapo(/__main__\.py)?$", program) else program
        return shlex.join([program, *words] if program else [])

    @property
    def steps_planned(self) -> int | None:
        """None: not known, or another budget ends the run."""
        steps = _section(self.config, "training").get("steps")
        return steps if isinstance(steps, int) and self.budget is None else None

    @property
    def budget(self) -> str | None:
        """What ends the run in place of its steps."""
        return budget_of(_section(self.config, "training"))

    @property
    def progress(self) -> str:
        """``12 of 100``, or ``12 in 10 minutes at most``."""
        if self.budget is not None:
            return f"{self.steps_done} in {self.budget} at most"
        return f"{self.steps_done} of {'?' if self.steps_planned is None else self.steps_planned}"

    @property
    def seconds(self) -> float | None:
        elapsed = next((e["time/elapsed"] for e in reversed(self.metrics) if e.get("time/elapsed") is not None), None)
        return self.summary.get("seconds_total", elapsed) if self.state in ("finished", "stopped") else elapsed

    @cached_property
    def state(self) -> str:
        """``running``, ``finished``, ``stopped`` (it said why) or ``killed`` (it said nothing)."""
        if _in_use(self.folder.root):
            return "running"
        if not self.summary or self.summary.get("steps", 0) < self.steps_done:  # the summary of an earlier part
            return "killed"
        return "finished" if str(self.summary.get("stopped")).startswith(_ENDS) else "stopped"

    @property
    def why(self) -> str:
        if self.state in ("finished", "stopped"):
            return f"{self.state}: {self.summary.get('stopped') or 'it does not say why'}"
        files = (self.folder.config, self.folder.metrics, self.folder.samples, self.folder.checkpoints)
        silence = time.time() - max((file.stat().st_mtime for file in files if file.exists()), default=time.time())
        units = {"days": 86400, "hours": 3600, "minutes": 60}.items()
        unit, size = next((one for one in units if silence >= 2 * one[1]), ("seconds", 1))
        ago = f"last written {max(0.0, silence) / size:.0f} {unit} ago"
        return f"running, {ago}" if self.state == "running" else f"killed, it seems: no end was recorded, {ago}"

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of metrics with an evaluation. The one before the first step has a line of its own, of step 0."""
        return [e for e in self.metrics if e.get("eval/rows") is not None]

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        return [{n: v for n, v in e.items() if n == "step" or n.startswith("eval/")} for e in self.evaluations]

    @property
    def accuracies(self) -> tuple[float | None, float | None]:
        """On the evaluation rows, before training and at the last evaluation after it began."""
        found = [(e["step"], e["eval/accuracy"]) for e in self.metrics if e.get("eval/accuracy") is not None]
        before = next((value for step, value in found if step == 0), self.summary.get("accuracy_before"))
        after = next((value for step, value in reversed(found) if step), self.summary.get("accuracy_after"))
        return None if self.comparable_from else before, after

    @property
    def checkpoints(self) -> list[str]:
        """Names of the complete ones, in the order of the run."""
        return [place.name for place in Checkpoints(self.folder.checkpoints).places()]

    @property
    def comparable_from(self) -> int:
        """The step from which evaluations are of the same rows and settings as the last one; 0: all are."""
        return max((c.step for c in self.changes if c.of_evaluation and c.step <= self.steps_done), default=0)

    @cached_property
    def damage(self) -> str | None:
        """What is wrong with the newest checkpoint, as far as it shows without reading its files; None: nothing."""
        problems = damages(self.folder.checkpoints / self.checkpoints[-1], quick=True) if self.checkpoints else None
        return "; ".join(problems) if problems else None

    @property
    def damaged_checkpoints(self) -> list[str]:
        """Those that a resumed run put aside."""
        return sorted(path.name for path in self.folder.checkpoints.glob("damaged-*"))

    @property
    def best(self) -> Mapping[str, Any]:
        """As :attr:`Checkpoints.best`; empty if the run recorded none, or has one evaluation: that is no best one."""
        return Checkpoints(self.folder.checkpoints).best or {} if len(self.evaluations) > 1 else {}

    @property
    def steps_with_samples(self) -> list[int]:
        return steps_with_samples(self.folder.samples)

    @property
    def share_of_samples(self) -> float:
        """``run.save_samples`` of the recipe, 0 to 1."""
        share = _section(self.config, "run").get("save_samples", True)
        return float(share) if isinstance(share, int | float) else 1.0

    @property
    def saves_samples(self) -> bool:
        return self.share_of_samples > 0

    def warnings(self) -> list[str]:
        """What in the metrics a person should know, each with how many steps, or evaluations, it concerns and which was
        the last."""
        alarm = _section(self.config, "training").get("mismatch_alarm") or float("inf")
        signs: dict[str, Callable[[dict[str, Any]], bool]] = {
            "a number was not finite": lambda e: bool(e.get("non_finite")),
            "an update was skipped": lambda e: (e.get("updates/skipped") or 0) > 0,
            "nothing to train on": lambda e: e.get("groups/kept") == 0,
            "scores failed": lambda e: (e.get("reward/errors") or 0) > 0,
            "evaluation scores failed": lambda e: (e.get("eval/errors") or 0) > 0,
            "more than half of the responses were truncated": lambda e: (e.get("response_length/truncated") or 0) > 0.5,
            f"engine and trainer differed by more than {alarm:g}": lambda e: (e.get("mismatch/mean") or 0) > alarm,
        }
        steps, found = [e for e in self.metrics if e["step"]], []
        for what, sign in signs.items():
            of_evaluations = what.startswith("evaluation")
            looked_at, unit = (self.evaluations, "evaluation") if of_evaluations else (steps, "step")
            seen = [e["step"] for e in looked_at if sign(e)]
            if seen:
                last = f"in step {seen[-1]}" if seen[-1] else "before training"
                found.append(f"{what}: in {len(seen)} of {counted(len(looked_at), unit)}, last {last}")
        return found


def is_run(folder: Path) -> bool:
    """Whether a run has written its recipe and something else into this folder."""
    others = ("environment.json", "metrics.jsonl", "samples")
    try:
        return (folder / "config.yaml").is_file() and any((folder / name).exists() for name in others)
    except OSError:  # somebody else's, beside ours, or a name that no file can have
        return False


def runs_in(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):  # it may be removed meanwhile
        return sorted(path for path in folder.iterdir() if is_run(path))
    return []


def _in_use(root: Path) -> bool:
    """Whether a process of this machine holds the lock of the run."""
    try:
        with (root / ".lock").open() as file:
            lock_file(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock: the run is of another machine, or was just made
        return False
    return False


def _recipe(path: Path) -> dict[str, Any]:
    """Raises UserError: it is too large, or nested too deeply, so it is none that a run of ours wrote."""
    try:
        value = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError):
        return {}
    except (ValueError, yaml.YAMLError) as error:
        problem = getattr(error, "problem", None) or str(error)
        if isinstance(error, ValueError | yaml.composer.ComposerError) or "nest" in problem:
            raise UserError(f"{path}: cannot be read: {problem}") from None
        return {}  # half written
    return value if isinstance(value, dict) else {}


def _mapping(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_text(path), LENIENT)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _known(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Without what should be a number and is none."""
    numbers = ("steps", "seconds_total", "accuracy_before", "accuracy_after")
    return {name: v for name, v in summary.items() if name not in numbers or type(v) in (int, float)}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
