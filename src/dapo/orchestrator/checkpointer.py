"""Keeps what a run has learned: weights and checkpoints in its folder, and reads them back when it goes on.

Consumes: the state of a run between two optimizer updates. Produces: ``checkpoints/``, ``model-before/`` and
``model-after/``. Waits for: the copy of a state; the disk only where that is asked for.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dapo.config.sections import RunConfig
from dapo.errors import UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.model.export import rounded_back
from dapo.model.tokenizer import save_tokenizer
from dapo.observe.checkpoints import FORMAT, CheckpointId, Checkpoints, CheckpointWriter, Snapshot
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.state import EncodedState, read_state
from dapo.orchestrator.step_state import StepState
from dapo.training.snapshot import expected_bytes, snapshot, snapshot_bytes
from dapo.training.trainer import Trainer
from dapo.util.files import flush_to_disk, new_folder, writing
from dapo.util.process import Clock, Shutdown, in_thread

CLOSE_SECONDS = 30.0
EXPECTED_RATE = 100e6
"""Bytes a second that a disk is taken to write, flush and read again for the hashes, before it has shown what it does.
Two busy cores with an ordinary disk did 125 to 230 million."""
_AT_LEAST_S = 2.0
_ROUNDED = 0.05
"""Share of the changed weights that an export may lose before it is told."""
_SINCE_LATER = ("alarms", "budget", "laps")
"""What older checkpoints lack."""


class Stateful(Protocol):
    """Something that remembers from step to step, in mappings, lists, numbers, text, arrays and records."""

    def state(self) -> Mapping[str, Any]:
        """As it is now."""
        ...

    def load_state(self, state: Any, /) -> None:
        """Go on from :meth:`state`."""
        ...


@dataclass
class RunState:
    """Where a run stands, beside what its roles remember."""

    budget: Budget
    """What has been used of steps and minutes."""
    step: StepState | None = None
    """The one between its rollout and its end."""
    laps: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of the next one, if its rollout was broken off."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the evaluations before and after training."""
    seconds: Clock = field(default_factory=Clock)

    @property
    def steps_done(self) -> int:
        """Rollout steps that are complete."""
        return self.budget.steps

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "steps_done": self.steps_done,
            "budget": self.budget.state(),
            "step": vars(self.step) if self.step else None,
            "laps": self.laps,
            "scores": self.scores,
            "seconds": self.seconds.laps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.budget.load_state(int(state["steps_done"]), state.get("budget", {}))
        self.step = StepState(**state["step"]) if state["step"] else None
        self.laps = state.get("laps", {})
        self.scores = state["scores"]
        for phase, seconds in state["seconds"].items():
            self.seconds.add(phase, seconds)


class Checkpointer:
    """The one that writes a run's weights and checkpoints. The run folder is locked until it has written the last."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        at: RunState,
        best: EarlyStopping,
        roles: Mapping[str, Stateful],
        trainer: Trainer,
        tokenizer: Any,
        stopping: Shutdown,
        tell: Callable[[str], object],
        stop_ids: Sequence[int] = (),
        export_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            at: where the run stands; changed by :meth:`load`, read by all others.
            best: of the evaluations so far.
            roles: what else remembers, by the names that their states have in a checkpoint.
            stopping: hears what the last checkpoint is.
            stop_ids: tokens that end a response; go with the weights too.
            export_dtype: of the weights in ``model-after/``, and in ``model-before/`` if it holds them; None: float32.

        Raises:
            UserError: another process is writing to this run.
        """
        self._folder, self._config, self._at, self._best = folder, config, at, best
        self._roles = {**roles, "best": best}
        self._trainer, self._tokenizer, self._stopping = trainer, tokenizer, stopping
        self._stop_ids, self._export_dtype, self._tell = stop_ids, export_dtype, tell
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep_last, config.keep_every)
        self._writer = CheckpointWriter(self.checkpoints, tell)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(folder.lock(tell))  # the last: whoever fails to come to be holds no lock

    async def close(self) -> None:
        """Let go of the run folder, once no checkpoint is being written to it any more.

        One that is not done in half a minute is named and not waited for; the folder stays locked until it is done or
        the process ends.
        """
        if self._writer.under_way:
            self._stopping.doing = f"the checkpoint {self._writer.under_way} to be written"
        await self._writer.close(CLOSE_SECONDS, then=self._lock.close)

    # -- weights ---------------------------------------------------------------------------------------------------

    def save_model(self, folder: Path, exact: bool = False) -> None:
        """Weights and tokenizer in Hugging Face layout, for other programs too. ``exact``: lose nothing of the weights.
        Raises UserError: they cannot be written."""
        with writing(folder):
            self._write(self._trainer, folder, dtype=self._export_dtype, exact=exact)

    def _write(self, trainer: Trainer, folder: Path, **how: Any) -> None:
        with new_folder(folder) as staging:
            trainer.save(staging, stop_ids=self._stop_ids, **how)
            save_tokenizer(self._tokenizer, staging)

    def save_model_before(self) -> None:
        """Those at the start of the run, which its reference policy and a replay are read from."""
        self.save_model(self._folder.model_before, exact=True)

    def save_model_after(self) -> None:
        """Those at the end of the run."""
        shutil.rmtree(self._folder.model_after, ignore_errors=True)  # of a run that was done, and was resumed
        self.save_model(self._folder.model_after)
        dtype, policy = self._export_dtype, self._trainer.policy
        if dtype is None or dtype.itemsize >= policy.compute_dtype.itemsize:  # as it was sampled and evaluated
            return
        lost = rounded_back(policy.model, self._folder.model_before, dtype)
        if lost > _ROUNDED:
            self._tell(
                f"{self._folder.model_after}: {str(dtype)[6:]} rounds {lost:.0%} of the trained weights back to where "
                "they were, so it is not quite the model that was evaluated. With model.export_dtype=float32 it is; "
                "the checkpoints' models are in float32 too"
            )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def maybe_save(self, last: bool) -> None:
        """Between two steps: after every so many, after the best one so far, and after the last one.
        Raises UserError: a checkpoint could not be written."""
        done = self._at.steps_done
        due = any(every and done % every == 0 for every in (self._config.save_every, self._config.keep_every))
        if last or due or self.is_best():
            await self.save_checkpoint(wait=last)
        self._writer.check()

    async def save_checkpoint(self, sampling: bool = False, wait: bool = False) -> None:
        """Weights, optimizer and the position of everything, between two optimizer updates or inside of a rollout.

        What is written is the state as it is now; it is copied, which is waited for, as is a checkpoint that is still
        being written. The files are written while the run goes on, or waited for (``wait``). ``sampling``: it is inside
        of a rollout. Raises UserError: this checkpoint (if waited for) or the one before cannot be written.
        """
        await self.settle()
        step = self._at.step
        updates = len(step.reports) if step else 0
        place = CheckpointId(self._at.steps_done, updates, not updates and (step is not None or sampling))
        self._stopping.doing = f"the state to be copied for the checkpoint {place.name}"
        self._writer.begin(await in_thread(self._snapshot, place))
        if wait:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises UserError: it cannot be written."""
        if self._writer.under_way:
            self._stopping.doing = f"the checkpoint {self._writer.under_way} to be written"
        saved = await self._writer.settle()
        self._stopping.saved = saved or self._stopping.saved

    def _snapshot(self, place: CheckpointId) -> Snapshot:
        self._trainer.check_finite()
        best = self.best_at(place) if self.is_best() and place.between_steps else None
        if self.checkpoints.holds(place):  # the only state that there can be: nothing to write
            return Snapshot(place, lambda folder: None, 0, best)
        trainer = snapshot(self._trainer)
        roles = {name: role.state() for name, role in self._roles.items()}
        state = EncodedState({"format": FORMAT, **self._at.state(), **roles})

        def write(folder: Path) -> None:
            self._write(trainer, folder / "model")  # masters, from which training goes on
            trainer.save_state(folder / "optimizer")
            state.write(folder)
            if self._folder.metrics.exists():  # the lines up to here are as safe as what goes on after them
                flush_to_disk(self._folder.metrics)

        return Snapshot(place, write, snapshot_bytes(trainer) + state.bytes, best)

    async def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises UserError: it is damaged, or of another model."""
        expected = [name for name in (*self._at.state(), *self._roles) if name not in _SINCE_LATER]
        state = await in_thread(read_state, folder, expected)
        if state.get("format", 0) > FORMAT:
            raise UserError(
                f"{folder}: is of format {state['format']}, and this version of dapo reads up to {FORMAT}; go on with "
                "the version that wrote it (environment.json)"
            )
        await in_thread(self._trainer.load, folder / "model")
        await in_thread(self._trainer.load_state, folder / "optimizer")
        try:
            self._at.load_state(state)
            for name, role in self._roles.items():
                if name in state:
                    role.load_state(state[name])
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"{folder}: the state of the run cannot be read: {type(error).__name__}: {error}") from None
        self._stopping.saved = folder
        self._find_best()
        self.checkpoints.prune()  # it may be fewer that are to be kept now

    # -- the best one ----------------------------------------------------------------------------------------------

    def is_best(self) -> bool:
        """Whether the present weights are to be kept as the best ones so far."""
        return self._config.keep_best and self._best.step == self._at.steps_done

    def best_at(self, place: CheckpointId) -> dict[str, Any]:
        """For ``best.json``: the best step, which is that of ``place``."""
        saved = self._folder.checkpoints / place.name if place.steps else self._folder.model_before
        best = {"step": self._best.step, "metric": self._best.metric, "value": self._best.value}
        return {**best, "path": str(saved.relative_to(self._folder.root))}

    def note_best(self) -> None:
        """Record the weights before training as the best ones, if they are to be kept as such."""
        if self.is_best():
            self.checkpoints.set_best(self.best_at(CheckpointId(self._best.step)))

    def _find_best(self) -> None:
        """Record the best step again if the record is of what is gone, or was not written before the process died."""
        recorded = (self.checkpoints.best or {}).get("step")
        ahead = isinstance(recorded, int) and recorded > self._at.steps_done  # its checkpoint was damaged
        lost = recorded is None or ahead or (self._at.step is None and self.is_best())
        if self._config.keep_best and self._best.step >= 0 and lost:  # without it the best one would be pruned
            self.checkpoints.set_best(self.best_at(CheckpointId(self._best.step)))

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def seconds_to_save(self) -> float:
        """What to set aside of the time that a signal leaves: half of it, or three times what a checkpoint takes.

        That is what the longest one took, or, as long as there was none, what its size lets expect.
        """
        takes = self._writer.longest_s or expected_bytes(self._trainer) / EXPECTED_RATE
        return min(float(self._config.stop_within_s) / 2, 3 * takes + _AT_LEAST_S)
