"""Keeps where a run stands: checkpoints in its folder, and reads them back when it goes on.

Consumes: the state of a run between two optimizer updates. Produces: ``checkpoints/``. Waits for: the copy of a state;
the disk only where that is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dapo.config.sections import RunConfig
from dapo.errors import UserError
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.observe.checkpoints import FORMAT, CheckpointId, Checkpoints, CheckpointWriter, Snapshot
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.encoded_state import EncodedState, read_state
from dapo.orchestrator.model_writer import ModelWriter
from dapo.orchestrator.run_state import RunState
from dapo.util.asynchronous import in_thread
from dapo.util.files import flush_to_disk
from dapo.util.shutdown import Shutdown

CLOSE_SECONDS = 30.0
EXPECTED_RATE = 100e6
"""Bytes a second that a disk is taken to write, flush and read again for the hashes, before it has shown what it does.
Two busy cores with an ordinary disk did 125 to 230 million."""
_AT_LEAST_S = 2.0
_SINCE_LATER = ("alarms", "budget", "laps")
"""What older checkpoints lack."""


class Stateful(Protocol):
    """Something that remembers from step to step, in mappings, lists, numbers, text, arrays and records."""

    def state(self) -> Mapping[str, Any]:
        """As it is now."""

    def load_state(self, state: Any, /) -> None:
        """Go on from :meth:`state`."""


class Checkpointer:
    """The one that writes a run's checkpoints. The run folder is locked until it has written the last."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        state: RunState,
        early_stopping: EarlyStopping,
        roles: Mapping[str, Stateful],
        models: ModelWriter,
        shutdown: Shutdown,
    ) -> None:
        """
        Args:
            state: where the run stands; changed by :meth:`load`, read by all others.
            early_stopping: knows the best of the evaluations so far.
            roles: what else remembers, by the names that their states have in a checkpoint.
            models: writes the weights, of whose learner the checkpoints are.
            shutdown: hears what the last checkpoint is.

        Raises UserError: another process is writing to this run."""
        self._folder, self._config, self._state, self._early_stopping = folder, config, state, early_stopping
        self._roles = {**roles, "best": early_stopping}
        self.models, self._shutdown = models, shutdown
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep_last, config.keep_every)
        self._writer = CheckpointWriter(self.checkpoints, models.tell)
        self._lock = contextlib.ExitStack()
        self.keeps_last = True  # False: whoever began the run drops its checkpoints at its end
        self._lock.enter_context(folder.lock(models.tell))  # acquired last, so that a failed constructor holds no lock

    async def close(self) -> None:
        """Let go of the run folder, once no checkpoint is being written to it any more.

        One that is not done in half a minute is named and not waited for; the folder stays locked until it is done or
        the process ends.
        """
        if self._writer.under_way:
            self._shutdown.doing = f"the checkpoint {self._writer.under_way} to be written"
        await self._writer.close(CLOSE_SECONDS, then=self._lock.close)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def maybe_save(self, last: bool) -> None:
        """Between two steps: after every so many, after the best one so far, and after the last one.
        Raises UserError: a checkpoint could not be written."""
        if last and not self.keeps_last:
            await self.settle()
            return
        done = self._state.steps_done
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
        step = self._state.step
        updates = len(step.reports) if step else 0
        place = CheckpointId(self._state.steps_done, updates, not updates and (step is not None or sampling))
        self._shutdown.doing = f"the state to be copied for the checkpoint {place.name}"
        self._writer.begin(await self._snapshot(place))
        if wait:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises UserError: it cannot be written."""
        if self._writer.under_way:
            self._shutdown.doing = f"the checkpoint {self._writer.under_way} to be written"
        saved = await self._writer.settle()
        self._shutdown.saved = saved or self._shutdown.saved

    async def _snapshot(self, place: CheckpointId) -> Snapshot:
        """The state of all roles, encoded in one go, and a copy of the weights. Raises NumericalError: of no use."""
        best = self.best_at(place) if self.is_best() and place.between_steps else None
        if self.checkpoints.holds(place):  # the only state that there can be: nothing to write
            return Snapshot(place, lambda folder: None, 0, best)
        roles = {name: role.state() for name, role in self._roles.items()}
        state = EncodedState({"format": FORMAT, **self._state.state(), **roles})
        snapshot = await self.models.learner.snapshot()

        def write(folder: Path) -> None:
            self.models.write(snapshot, folder)
            state.write(folder)
            if self._folder.metrics.exists():  # the lines up to here are as safe as what goes on after them
                flush_to_disk(self._folder.metrics)

        return Snapshot(place, write, snapshot.bytes + state.bytes, best)

    async def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises UserError: it is damaged, or of another model."""
        expected = [name for name in (*self._state.state(), *self._roles) if name not in _SINCE_LATER]
        state = await in_thread(read_state, folder, expected)
        if state.get("format", 0) > FORMAT:
            raise UserError(
                f"{folder}: is of format {state['format']}, and this version of dapo reads up to {FORMAT}; go on with "
                "the version that wrote it (environment.json)"
            )
        await self.models.learner.load(folder)
        try:
            self._state.load_state(state)
            for name, role in self._roles.items():
                if name in state:
                    role.load_state(state[name])
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"{folder}: the state of the run cannot be read: {type(error).__name__}: {error}") from None
        self._shutdown.saved = folder
        self._find_best()
        self.checkpoints.prune()  # it may be fewer that are to be kept now

    # -- the best one ----------------------------------------------------------------------------------------------

    def is_best(self) -> bool:
        """Whether the present weights are to be kept as the best ones so far."""
        return self._config.keep_best and self._early_stopping.step == self._state.steps_done

    def best_at(self, place: CheckpointId) -> dict[str, Any]:
        """For ``best.json``: the best step, which is that of ``place``."""
        saved = self._folder.checkpoints / place.name if place.steps else self._folder.model_before
        best, path = self._early_stopping, str(saved.relative_to(self._folder.root))
        return {"step": best.step, "metric": best.metric, "value": best.value, "path": path}

    def note_best(self) -> None:
        """Record the weights before training as the best ones, if they are to be kept as such."""
        if self.is_best():
            self.checkpoints.set_best(self.best_at(CheckpointId(self._early_stopping.step)))

    def _find_best(self) -> None:
        """Record the best step again if the record is of what is gone, or was not written before the process died."""
        recorded = (self.checkpoints.best or {}).get("step")
        ahead = isinstance(recorded, int) and recorded > self._state.steps_done  # its checkpoint was damaged
        lost = recorded is None or ahead or (self._state.step is None and self.is_best())
        if self._config.keep_best and self._early_stopping.step >= 0 and lost:  # or the best one would be pruned
            self.checkpoints.set_best(self.best_at(CheckpointId(self._early_stopping.step)))

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def seconds_to_save(self) -> float:
        """What to set aside of the time that a signal leaves: half of it, or three times what a checkpoint takes.

        That is what the longest one took, or, as long as there was none, what its size lets expect.
        """
        takes = self._writer.longest_s or self.models.learner.expected_bytes / EXPECTED_RATE
        return min(float(self._config.stop_within_s) / 2, 3 * takes + _AT_LEAST_S)
