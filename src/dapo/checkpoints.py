"""The checkpoints of a run: named by where in the run they were taken, each there whole or not at all.

::

    checkpoints/
      step-00012/                after 12 rollout steps
      step-00012-rollout/        stopped inside of the 13th one, while sampling
      step-00012-update-00003/   stopped inside of the 13th one, after 3 of its optimizer updates
      best.json                  which step had the best evaluation

Each holds ``model/`` (Hugging Face layout), ``optimizer/`` and the state of everything else (``state.py``).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dapo.errors import UserError
from dapo.files import new_folder, write_json

_NAME = re.compile(r"step-(\d+)(?:-(?:(rollout)|update-(\d+)))?(?:\.(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where in a run: ``steps`` rollout steps are done, and of the next one so many updates, or some sampling."""

    steps: int
    updates: int = 0
    sampling: bool = False
    repeat: int = 1
    """Stopped at the same place again: each time more may have been sampled."""

    @property
    def name(self) -> str:
        """Of the folder."""
        inside = f"-update-{self.updates:05d}" if self.updates else "-rollout" if self.sampling else ""
        return f"step-{self.steps:05d}{inside}" + (f".{self.repeat}" if self.repeat > 1 else "")

    @property
    def between_steps(self) -> bool:
        """Whether there is but one state that a run can have there."""
        return not self.updates and not self.sampling

    @classmethod
    def parse(cls, name: str) -> Place | None:
        """From the name of a folder; None: it is no checkpoint's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        steps, rollout, updates, repeat = found.groups()
        return cls(int(steps), int(updates or 0), bool(rollout), int(repeat or 1))


class Checkpoints:
    """The folder ``checkpoints`` of one run."""

    def __init__(self, folder: Path, keep_last: int | None = None) -> None:
        """
        Args:
            folder: exists.
            keep_last: how many to keep beside the best one; None: all. Those from inside of a step go with the next.
        """
        self._folder = folder
        self._keep_last = keep_last

    def places(self) -> list[Place]:
        """Of all complete checkpoints, in the order of the run."""
        found = (Place.parse(path.name) for path in self._folder.iterdir() if path.is_dir())
        return sorted(place for place in found if place is not None)

    def latest(self) -> Path | None:
        """The checkpoint that is furthest in the run."""
        places = self.places()
        return self._folder / places[-1].name if places else None

    def save(self, place: Place, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint and, once it is complete, remove those that are no longer wanted.

        Args:
            place: where the run is. Between two steps there is one state only, which is not written twice.
            write: fills the folder that it is given.

        Raises:
            UserError: it cannot be written. Those that exist stay.
        """
        if place.between_steps and (self._folder / place.name).is_dir():
            return self._folder / place.name
        while (self._folder / place.name).exists():
            place = Place(place.steps, place.updates, place.sampling, place.repeat + 1)
        target = self._folder / place.name
        try:
            with new_folder(target) as staging:
                write(staging)
        except (OSError, SafetensorError) as error:  # the latter is what a full disk is to safetensors
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{target}: cannot write the checkpoint: {reason}") from None
        self._prune()
        return target

    @property
    def best(self) -> dict[str, Any] | None:
        """``step``, ``metric``, ``value`` and ``path`` (in the run folder, of its weights) of the best evaluation."""
        try:
            found = json.loads((self._folder / "best.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def set_best(self, best: Mapping[str, Any]) -> None:
        """Record which step is the best one. Its checkpoint is kept from now on."""
        write_json(self._folder / "best.json", best)
        self._prune()

    def _prune(self) -> None:
        if self._keep_last is None:
            return
        best = (self.best or {}).get("step")
        places = self.places()
        between = [place for place in places if place.between_steps]
        wanted = {*between[-self._keep_last :], *places[-1:], Place(best if isinstance(best, int) else -1)}
        for place in places:
            if place not in wanted:
                # renamed first: what is half removed must not look like a checkpoint
                doomed = self._folder / f".{place.name}.tmp"
                (self._folder / place.name).replace(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
