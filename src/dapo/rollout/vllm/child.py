"""What vLLM's processes run first: their output goes to a log, and they end with the process that started them.

A script: ``child.py LOG [interpreter options] -c CODE [arguments]``, as multiprocessing calls an interpreter.
"""

from __future__ import annotations

import os
import sys
import threading
import time


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Be the interpreter that was asked for."""
    log, place = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.argv.index("-c")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()  # a Ctrl-C in the terminal is for the run, which ends us
    code, sys.argv = sys.argv[place + 1], ["-c", *sys.argv[place + 2 :]]
    if "resource_tracker" not in code:  # which removes what the others leave behind
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
