"""vLLM's processes: started quietly, their last words kept, and none left behind."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from dapo.errors import UserError, first_line
from dapo.rollout.engine import EngineError
from dapo.rollout.vllm.options import environment, own_folder

_PATIENCE_S = 2.0  # some workers take five to say goodbye to nobody; they have nothing to lose
_starting = threading.Lock()
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")
_FAILED = "EngineCore failed to start"
_WHAT_FOLLOWED = ("EngineDead", "root cause", ": cancelled")  # errors that others led to
_DIED = re.compile(r"\S+ died unexpectedly")


class StartError(EngineError, UserError):
    """vLLM did not start, or has ended; the message says why."""


class Processes:
    """Those of one engine. ``core``: vLLM's client of them."""

    def __init__(self, arguments: Mapping[str, Any], device: torch.device, threads: int) -> None:
        """Start them, and wait until they can work. ``arguments``: of vLLM's engine. ``device``: of the first one, the
        others follow. ``threads``: of each on a CPU. Raises StartError: they do not."""
        self._folder = own_folder()
        self._log = Path(self._folder.name, "log")
        self._log.touch()
        self._children: list[Any] = []
        self.core: Any = None
        variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if len(self._folder.name) < 70:  # with a name in it a socket may have 107 characters
            variables["VLLM_RPC_BASE_PATH"] = self._folder.name
        if device.type == "cpu":
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        elif device.index:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(_visible()[device.index :])
        with _starting, environment(variables), self._quiet():
            before = set(multiprocessing.active_children())
            # this one may have an event loop, which vLLM would take for its own; the processes end with their thread
            self._thread = ThreadPoolExecutor(1)
            try:
                work = self._thread.submit(_core, dict(arguments))
                while not wait(
                    [work], _PATIENCE_S
                ).done:  # one that has failed may hang at its end: vLLM waits for that
                    if _FAILED in self._log.read_text(errors="replace"):
                        for process in set(multiprocessing.active_children()) - before:
                            process.kill()
                self.core = work.result()
            except Exception as error:
                faults = error.errors() if isinstance(error, ValidationError) else ()
                named = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in faults)
                words = self.last_words(named or first_line(error))
                raise StartError(f"rollout.engine=vllm: vLLM does not start: {words}") from error
            finally:
                self._children = [one for one in multiprocessing.active_children() if one not in before]
                if self.core is None:
                    self.close()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Inside, what this process and those that it starts say of vLLM goes to the log."""
        logger, executable = logging.getLogger("vllm"), spawn.get_executable()
        starter = self._log.with_name("python")
        python, log = shlex.quote(sys.executable), shlex.quote(str(self._log))
        # in a session of its own, as a Ctrl-C in the terminal is for the run; ended by the kernel with the thread that
        # started it, but for the tracker, which removes what others leave behind
        starter.write_text(
            f'#!/bin/sh\nexec >>{log} 2>&1\ncase "$*" in *resource_tracker*) exec setsid {python} "$@";; esac\n'
            f'exec setsid setpriv --pdeathsig KILL {python} "$@"\n'
        )
        starter.chmod(0o700)
        handler = logging.FileHandler(self._log)
        spawn.set_executable(str(starter))
        resource_tracker.ensure_running()  # it removes what is left in shared memory, and tells of it
        logger.addHandler(handler)
        try:
            yield
        finally:
            spawn.set_executable(executable)
            logger.removeHandler(handler)
            handler.close()

    def last_words(self, otherwise: str) -> str:
        """The error that they ended with, and where their log is, which is kept under another name."""
        kept, text = Path(f"{self._folder.name}.log"), self._log.read_text(errors="replace")
        errors = [one for one in _ERROR.findall(text) if not any(map(one.__contains__, _WHAT_FOLLOWED))]
        killed = [f"exit code {one.exitcode}" for one in self._children if (one.exitcode or 0) < 0]
        cause: str = [otherwise, *killed, *_DIED.findall(text), *errors][-1]
        if not text:
            return cause
        if not kept.exists():
            kept.hardlink_to(self._log)
        return f"{cause} (all that it said: {kept})"

    def close(self) -> None:
        """End them, within a bounded time."""
        if self.core is not None:
            self.core.shutdown(timeout=_PATIENCE_S)
        for process in self._children:
            with contextlib.suppress(ProcessLookupError):  # its own children are in its group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(_PATIENCE_S)
        self._thread.shutdown(wait=False)
        self._folder.cleanup()


def _core(arguments: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    config = AsyncEngineArgs(**arguments).create_engine_config()
    return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=False)


def _visible() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
