"""A handler for the worker that does what the item says: answer, sleep, spin, die, fork, leave children behind."""

import os
import signal
import subprocess
import time
from pathlib import Path


def make_handler(options):
    state = Path(options["state"])

    def note(pid):
        (state / f"{pid}.pid").touch()

    def handle(item):
        note(os.getpid())
        match item["does"]:
            case "sleep":
                time.sleep(600)
            case "spin":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    pass
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "fork":  # two processes go on from here
                if os.fork() == 0:
                    note(os.getpid())
            case "child":
                note(subprocess.Popen(["sleep", "600"]).pid)
        return {"number": item["number"]}

    return handle
