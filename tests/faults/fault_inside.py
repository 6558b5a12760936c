"""What happens inside of a run to which a fault is done: ``dapo`` as from the command line, and one thing gone wrong.

Runs in a process of its own, which :func:`become` turns into one that was started with a command line. A fault waits at
a point of the program until the run has come far enough, and is noted in a file at the moment it strikes.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

POINTS = {
    "metrics": "dapo.observe.metrics:MetricsLog.append",
    "rollout": "dapo.rollout.native.decoder:Decoder.stretch",
    "prepare": "dapo.training.learner:LocalLearner.annotated",
    "update": "dapo.training.trainer:Trainer.update",
    "evaluation": "dapo.orchestrator.evaluator:evaluate",
    "metrics file": "dapo.observe.metrics:json_line",
    "samples": "dapo.observe.samples:write_atomic",
    "model": "dapo.training.parallel.holding:save_model",
    "tokenizer": "transformers:PreTrainedTokenizerBase.save_pretrained",
    "optimizer": "dapo.training.parallel.holding:save_tensors",
}
"""Calls of the program that a fault can wait for, beside "save": a file opened in ``checkpoints/``, whoever does it."""


@dataclass(frozen=True)
class Strike:
    """One fault inside of a run: ``what`` at the ``call``-th call of ``point`` after ``lines`` lines of metrics."""

    point: str
    what: str
    lines: int = 0
    call: int = 1
    target: str = ""
    """A file, a message, or the name of a signal, as ``what`` needs it."""
    always: bool = False
    """At each later call too."""


@dataclass(frozen=True)
class Start:
    """A process to be: the words of its command line and what surrounds them."""

    words: list[str]
    run: str
    """The run folder."""
    output: str
    """The file that standard output and error go to."""
    marker: str
    """The file that notes when the fault struck, in seconds of the monotonic clock."""
    folder: str
    environment: dict[str, str] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)
    reader: str = ""
    """A named pipe to write standard output to, if its reader matters."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def become(start: Start) -> None:
    """Run the command line of ``start`` in this process, to its end (SystemExit)."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.environ |= start.environment
    os.chdir(start.folder)
    for number in (1, 2):
        where = start.reader if number == 1 and start.reader else start.output
        handle = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # what they were is past
    for strike in start.strikes:
        _lay(strike, start)
    sys.argv = ["dapo", *start.words]
    from dapo.commands import main

    main()


def _lay(strike: Strike, start: Start) -> None:
    """Put a fault where it is to strike."""
    calls, struck = [0], [False]
    metrics, inside = Path(start.run, "metrics.jsonl"), str(Path(start.run, "checkpoints")) + "/"

    def due() -> bool:
        if struck[0] and not strike.always:
            return False
        if not struck[0]:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            calls[0] += lines >= strike.lines
            if calls[0] < strike.call:
                return False
            struck[0] = True
            Path(start.marker).write_text(str(time.monotonic()))
        return True

    if strike.point == "save":

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(args[0], str | Path) and str(args[0]).startswith(inside) and due():
                _strike(strike, None)

        return sys.addaudithook(audit)
    module, _, name = POINTS[strike.point].partition(":")
    owner: Any = import_module(module)
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    setattr(owner, last, _struck(getattr(owner, last), strike, due))


def _struck(original: Callable[..., Any], strike: Strike, due: Callable[[], bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if due():
            _strike(strike, args[0] if args else None)
        return original(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(original) else call


def _strike(strike: Strike, of: Any) -> None:
    """The fault itself. ``of``: the object whose method was called."""
    target = strike.target
    if strike.what == "signal":  # and time for it to be heard before the call goes on
        os.kill(os.getpid(), getattr(signal, target))
        time.sleep(0.0 if target == "SIGKILL" else 0.3)
    elif strike.what == "signal twice":  # in a call that does not end
        for _ in range(2):
            os.kill(os.getpid(), getattr(signal, target))
            time.sleep(1.5)  # on a busy machine the first one is heard late, and two at a time are one
        time.sleep(60)
    elif strike.what == "signal and hang":
        os.kill(os.getpid(), getattr(signal, target))
        time.sleep(60)
    elif strike.what == "raise":
        raise RuntimeError(target)
    elif strike.what == "touch":
        Path(target).touch()
    elif strike.what == "wait":  # until the file is there
        Path(f"{target}.waiting").touch()
        until = time.monotonic() + 120
        while not Path(target).exists() and time.monotonic() < until:
            time.sleep(0.02)
    elif strike.what == "no memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
        import torch

        torch.empty(2**40, dtype=torch.uint8)
    elif strike.what == "fill the disk":
        _fill(Path(target))
    elif strike.what == "no space":  # what stands for a full disk where none can be mounted
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif strike.what == "clock":
        now, jump = time.time, float(target)
        time.time = lambda: now() + jump
    elif strike.what == "nan":
        _poison(of)
    else:
        raise ValueError(strike.what)


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        for size in (2**16, 1):
            try:
                while True:
                    ballast.write(b"\0" * size)
            except OSError:
                continue


def _poison(trainer: Any) -> None:
    """Make the gradient of one parameter NaN in the update that follows, and in no other one."""
    model = trainer.policy.model
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("down_proj.weight"))

    def nan(gradient: Any) -> Any:
        handle.remove()
        return gradient * float("nan")

    handle = parameter.register_hook(nan)
    print(f"(the gradient of {name} is made NaN)", file=sys.stderr)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    become(Start(**given | {"strikes": [Strike(**strike) for strike in given["strikes"]]}))
