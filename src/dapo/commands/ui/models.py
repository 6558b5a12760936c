"""What can be asked: the models of a run, loaded once and at most two at a time, and prompts, of its held-out data or
else of its training.

A model takes prompts and responses as long as the recipe says, but for :data:`MOST_TOKENS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.commands.ui.texts import sendable
from dapo.config import Config, load_config
from dapo.data.parts import Rows, open_parts
from dapo.data.rows import BadRow, Messages
from dapo.errors import DataError, UserError
from dapo.inference.model import Prompting
from dapo.observe.checkpoints import Checkpoints
from dapo.observe.progress import QuietListener
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.observe.samples import read_samples, samples_path
from dapo.serve.model import prepare_served
from dapo.util.files import holds_model

if TYPE_CHECKING:
    from dapo.inference.model import LocalEngine  # loads torch

HELD = 2  # models in memory
MOST_SAMPLES = 8  # of one model at a time
MOST_TOKENS = 1024  # of a response


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt. ``row``: its number in the data; None: it was typed. ``answer``: the reference, if one is known."""

    prompt: str | Messages
    text: str
    answer: str | None = None
    row: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
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
        found = []
        for number in range(first, min(first + count, len(self))):
            with suppress(DataError):  # a row that cannot be used
                found.append(self[number])
        return found


def _held_out(run: RunView) -> Rows | None:
    try:
        config = load_config(run.folder.config)
        items = []
        for item in config.evaluation.data:  # a relative path is one from where the run was started
            there = Path(str(run.environment.get("folder") or ".")) / item.path
            moved = there.exists() and not Path(item.path).exists()
            items.append(item.model_copy(update={"path": str(there)}) if moved else item)
        rows = Rows(open_parts(config.data, items, False)[0]) if items else None
    except UserError:  # moved, or of an earlier version: there are others to ask
        return None
    return rows if rows is not None and len(rows) else None


def _asked(run: RunView) -> list[Question]:
    steps = run.steps_with_samples
    samples = read_samples(samples_path(run.folder.samples, steps[-1])) if steps else []
    lines = {one.get("row"): one for one in samples if isinstance(one.get("prompt"), str)}.values()
    return [Question(one["prompt"], one["prompt"], one.get("gold"), number) for number, one in enumerate(lines)]


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


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer and template. ``max_tokens``: of a response; ``max_prompt``: tokens of a prompt."""

    prompting: Prompting
    engine: LocalEngine
    max_tokens: int
    max_prompt: int

    def encode(self, question: Question) -> tuple[int, ...]:
        """Token ids of the prompt, written as the run writes its own.
        Raises DataError: nothing in it is known to the tokenizer, or it is too long."""
        ids = tuple(self.prompting.template.encode(question.prompt))
        if not ids:
            raise DataError(f"the tokenizer makes no tokens of {question.text[:60]!r}")
        if len(ids) > self.max_prompt:
            raise DataError(
                f"the prompt has {len(ids)} tokens, but the run was made for prompts of up to {self.max_prompt} "
                "(data.max_prompt_length)"
            )
        return ids


class Models:
    """The models that were asked last. For one event loop, and for one that asks at a time."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, Loaded]] = {}  # the one asked last comes last

    async def holds(self, path: Path) -> bool:
        return path in self._held and self._held[path][0] == await asyncio.to_thread(_stamp, path)

    async def get(self, path: Path) -> Loaded:
        """The model in a folder of a run; another one makes way for it. Raises UserError if it cannot be loaded."""
        stamp = await asyncio.to_thread(_stamp, path)
        known = self._held.pop(path, None)
        if known is not None and known[0] == stamp:
            self._held[path] = known
            return known[1]
        if known is not None:  # the run has written it anew
            await known[1].engine.close()
        while len(self._held) >= HELD:
            await self._held.pop(next(iter(self._held)))[1].engine.close()
        loaded = await asyncio.to_thread(load, path)
        self._held[path] = stamp, loaded
        return loaded

    async def close(self) -> None:
        while self._held:
            await self._held.popitem()[1][1].engine.close()


def load(path: Path) -> Loaded:
    """Load the model in a folder inside a run folder, by that run's recipe. Raises UserError if it cannot be loaded."""
    run = path.parent if path.name.startswith("model-") else path.parents[2]
    limit = min(recipe_of(run).evaluated_length, MOST_TOKENS)
    bounds = ["runtime.device=cpu", f"rollout.max_concurrent_samples={MOST_SAMPLES * HELD}"]  # a run may need its GPU
    overrides = [*bounds, "rollout.engine=native", f"evaluation.max_response_length={limit}"]
    served = prepare_served(str(path), QuietListener(), overrides=overrides)()
    return Loaded(served.prompting, served.doors[served.name].engines[0], limit, served.context - limit)


def _stamp(path: Path) -> int:
    try:
        return max((file.stat().st_mtime_ns for file in path.iterdir()), default=0)
    except OSError:
        return 0
