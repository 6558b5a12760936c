"""What a run's models can be asked: rows of its held-out data, or else prompts that it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo.commands.ui.texts import sendable
from dapo.config import Config, load_config
from dapo.config.data import DataItem
from dapo.data.parts import Rows, open_parts
from dapo.data.rows import BadRow, Messages
from dapo.errors import DataError, UserError
from dapo.observe.checkpoints import Checkpoints
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.observe.samples import read_samples, samples_path
from dapo.util.files import holds_model


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt. ``row``: its number in the data; None: it was typed. ``answer``: the reference, if one is known."""

    prompt: str | Messages
    text: str
    answer: str | None = None
    row: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"row": self.row, "prompt": sendable(self.text), "answer": self.answer and sendable(self.answer)}


class Questions:
    """The rows that a run's models can be asked, by number. ``held_out``: whether they are those of its evaluation."""

    def __init__(self, root: Path) -> None:
        """Raises UserError if the run has neither rows that can be read nor samples."""
        run = RunView.read(root)
        self._rows = _held_out(run)
        self.held_out = self._rows is not None
        self._asked = _asked(run) if self._rows is None else []
        if not len(self):
            raise UserError(
                f"{root}: there are no prompts to pick: its held-out rows (evaluation.data) cannot be read, and no "
                "samples are stored; type a prompt"
            )

    def __len__(self) -> int:
        return len(self._asked) if self._rows is None else len(self._rows)

    def __getitem__(self, number: int) -> Question:
        """Raises UserError if there is no such row, or it cannot be used."""
        if not 0 <= number < len(self):
            raise UserError(f"there is no row {number}; there are {len(self)}, from 0 on")
        if self._rows is None:
            return self._asked[number]
        try:
            row = self._rows[number]
        except BadRow as error:
            raise DataError(f"{self._rows.place(number)}: {error}") from None
        return Question(row.prompt, row.text, row.answer, number, dict(row.meta))

    def some(self, first: int, count: int) -> list[Question]:
        """Those from ``first`` on that can be used, at most ``count``."""
        found = []
        for number in range(first, min(first + count, len(self))):
            try:
                found.append(self[number])
            except DataError:
                continue
        return found


def _held_out(run: RunView) -> Rows | None:
    """The rows of its evaluation, where they can be read here."""
    try:
        config = load_config(run.folder.config)
        items = [_found_again(item, run) for item in config.evaluation.data]
        rows = Rows(open_parts(config.data, items, False)[0]) if items else None
    except UserError:  # moved, or of an earlier version: there are others to ask
        return None
    return rows if rows is not None and len(rows) else None


def _found_again(item: DataItem, run: RunView) -> DataItem:
    """A relative path is one from where the run was started."""
    there = Path(str(run.environment.get("folder") or ".")) / item.path
    return item.model_copy(update={"path": str(there)}) if there.exists() and not Path(item.path).exists() else item


def _asked(run: RunView) -> list[Question]:
    """The prompts of the last step with samples."""
    steps = run.steps_with_samples
    samples = read_samples(samples_path(run.folder.samples, steps[-1])) if steps else []
    lines = {sample.get("row"): sample for sample in samples if isinstance(sample.get("prompt"), str)}
    return [
        Question(line["prompt"], line["prompt"], line.get("gold"), number) for number, line in enumerate(lines.values())
    ]


def recipe_of(root: Path) -> Config:
    """The recipe of a run. Raises ConfigError if this version does not read it."""
    return load_config(RunFolder(root).config)


def models_of(root: Path) -> dict[str, Path]:
    """Folders of the models that a run has kept, by name, in the order of the run."""
    folder = RunFolder(root)
    steps = Checkpoints(folder.checkpoints).places() if folder.checkpoints.is_dir() else []
    found = {"model-before": folder.model_before}
    found |= {place.name: folder.checkpoints / place.name / "model" for place in steps}
    found["model-after"] = folder.model_after
    return {name: path for name, path in found.items() if holds_model(path)}


def pick_models(root: Path, names: Sequence[str]) -> list[Path]:
    """Their folders. Raises UserError if one is not there, and says which are."""
    known = models_of(root)
    missing = [name for name in names if name not in known]
    if missing:
        raise UserError(f"{root.name} has no model {missing[0]!r}; it has {', '.join(known) or 'none yet'}")
    return [known[name] for name in names]
