"""Running an experiment to its end, from code that knows nothing of event loops."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

from dapo.config import Config
from dapo.observe.progress import Listener
from dapo.orchestrator.experiment import Experiment
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.kept_run import KeptRun
from dapo.util.asynchronous import event_loop
from dapo.util.shutdown import Shutdown, Stopped, awake_for_signals


def run_experiment(
    config: Config, listener: Listener, inputs: RunOverrides | None = None, shutdown: Shutdown | None = None
) -> dict[str, Any]:
    """Train as ``config`` says and return the summary, which is also written to the run folder.
    ``shutdown``: entered by the caller, who owns the process; None: a signal does what it does in any Python program.
    Raises Stopped: ``shutdown`` heard a signal; how far the run came was said, and is in the run folder; UserError:
    something in recipe, data, model or reward is wrong, or training had to stop; what had been learned is in the run
    folder."""
    return run_to_end(Experiment(config, listener, inputs or RunOverrides()), shutdown)


def run_to_end(experiment: KeptRun, shutdown: Shutdown | None = None) -> dict[str, Any]:
    """Run an experiment from code that is not asynchronous, inside of a notebook's event loop too.

    Arguments and errors as for :func:`run_experiment`.
    """
    if shutdown is not None:
        shutdown.within_s = experiment.config.run.stop_within_s
        shutdown.run = shutdown.run or experiment.shutdown.run
        experiment.shutdown = shutdown

    async def guarded(work: Coroutine[Any, Any, Any], last: bool = False) -> Any:
        """``work``, which a signal cancels; what the experiment holds is closed after the last one and after errors."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if shutdown is not None:
            shutdown.ask(lambda: loop.call_soon_threadsafe(task.cancel))
        error: BaseException | None = None
        try:
            with awake_for_signals():
                result = await work
                if last:
                    await experiment.close()
                return result
        except BaseException as found:
            error = found
            if shutdown is not None and shutdown.signal and isinstance(found, asyncio.CancelledError):
                error = Stopped(f"stopped by {shutdown.signal.name}")
            await _close_after(experiment, error)
            if error is not found:
                raise error from None
            raise
        finally:
            if shutdown is not None:
                shutdown.ask(None)
                if last or error is not None:
                    shutdown.leave(error)

    with event_loop() as run:
        run(guarded(experiment.check()))
        if not gc.isenabled():  # put off by util.memory.collecting_later; a model leaves larger things behind
            gc.freeze()
            gc.enable()
        try:  # not in the loop, which would hear a signal only once the model is loaded
            experiment.load(lambda work: run(guarded(work)))
        except BaseException as error:
            run(_close_after(experiment, error))
            raise
        return dict(run(guarded(experiment.run(), last=True)))


async def _close_after(experiment: KeptRun, error: BaseException) -> None:
    try:
        await experiment.close()
    except Exception as fault:  # must not hide what went wrong first
        error.add_note(f"and closing failed: {fault}")
