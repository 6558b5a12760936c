"""Processes that are the ranks of a test, with a pipe to each: what Ray's actors are in a run."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from dapo.training.parallel.front import RankDied


def _serve(pipe: Connection, make: Any, args: tuple[Any, ...], path: list[str]) -> None:
    """The life of a rank: an object, and one call after the other of its methods."""
    sys.path[:] = path
    torch.set_num_threads(1)
    target = make(*args)
    while True:
        try:
            method, args, keywords = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(target, method)(*args, **keywords), None))
        except Exception as error:
            error.__notes__ = [traceback.format_exc()]
            try:
                pipe.send((None, error))
            except Exception:  # it cannot be pickled
                pipe.send((None, RuntimeError(traceback.format_exc())))


class RankProcess:
    """One of them: a ``RankHandle``."""

    def __init__(self, make: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, args, sys.path), daemon=True)
        self.process.start()
        theirs.close()
        self._reaping = threading.Lock()  # two threads that wait for one process may both miss its end

    def send(self, method: str, *args: Any, **keywords: Any) -> None:
        self._pipe.send((method, args, keywords))

    def receive(self) -> Any:
        try:
            result, error = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RankDied(f"its process ended with exit code {self.exit_code()}") from None
        if error is not None:
            raise error
        return result

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        try:
            self.send(method, *args, **keywords)
        except OSError:
            raise RankDied(f"its process ended with exit code {self.exit_code()}") from None
        return await asyncio.get_running_loop().run_in_executor(None, self.receive)

    async def end(self) -> None:
        self.stop()

    def stop(self) -> None:
        self.process.kill()
        self.exit_code()

    def exit_code(self) -> int | None:
        """Of a process that is ending; None: it does not."""
        with self._reaping:
            self.process.join(10)
            return self.process.exitcode


def on_all(processes: list[RankProcess], method: str, *args: Any, **keywords: Any) -> list[Any]:
    """The results of all, which work side by side."""
    for process in processes:
        process.send(method, *args, **keywords)
    found, failure = [], None
    for process in processes:
        try:
            found.append(process.receive())
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return found
