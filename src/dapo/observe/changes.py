"""Settings that were changed when a run went on, as ``fingerprint.json`` lists them: old and new value, and the first
rollout step with the new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import Config, build_config
from dapo.errors import UserError
from dapo.util.differences import shown
from dapo.util.files import read_json

_LEARNED = ("algorithm.", "rollout.", "training.")
_EVALUATED = ("evaluation.", "rollout.max_response_length", "fingerprint.evaluation", "fingerprint.reward")
_GOES_ON = ("evaluation.every", "evaluation.patience", "evaluation.min_improvement", "evaluation.metrics")
"""Keys of evaluation that leave what is measured as it is."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key. ``fingerprint.NAME`` is what lies in a file, such as the rows to evaluate on. ``step``: from 1."""

    step: int
    key: str
    old: Any
    new: Any
    date: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.key} {shown(self.old)} -> {shown(self.new)}"

    @property
    def of_evaluation(self) -> bool:
        """Whether evaluations before it cannot be compared with those after it."""
        return self.key.startswith(_EVALUATED) and not self.key.removeprefix("fingerprint.").startswith(_GOES_ON)


def read_changes(file: Path) -> list[Change]:
    """The changes of a run, from its fingerprint.json; none if it cannot be read. Raises UserError: one is damaged."""
    try:
        return changes_in(read_json(file), file)
    except (OSError, ValueError):
        return []


def changes_in(found: Any, file: Path) -> list[Change]:
    """Those in what fingerprint.json holds. Raises UserError: one is damaged."""
    changes = found.get("changes", ()) if isinstance(found, Mapping) else ()
    try:
        return [Change(**one) for one in changes]
    except TypeError as error:
        raise UserError(f"{file}: changes: one is not a change of a setting: {error}; mend or remove it") from None


def config_of_step(config: Config, changes: Sequence[Change], step: int) -> Config:
    """``config``, the newest of a run, with what algorithm, rollout and training had in ``step`` (from 1).
    Raises ConfigError: a recorded value is none that its key can have."""
    later = [change for change in changes if change.step > step and change.key.startswith(_LEARNED)]
    tree = config.model_dump(mode="json")
    for change in reversed(later):
        place: Any = tree
        *sections, last = change.key.split(".")
        for name in sections:
            place = place[name]
        place[last] = change.old
    return build_config(tree, "fingerprint.json: changes") if later else config
