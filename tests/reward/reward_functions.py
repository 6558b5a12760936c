"""Reward functions, good and bad, that the tests run in worker processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

not_a_function = 5


def length(prompt, response, answer):
    return float(len(response))


def everything(prompt, response, answer, **meta):
    return {"value": len(prompt), "correct": answer == "4", "level": meta["level"], "scale": meta.get("scale", 0)}


def forks(response):
    """A child of the worker goes on in the worker's own code and would answer too."""
    os.fork()
    return float(response)


class _Rude(BaseException):
    pass


def rude(response):
    raise _Rude("no ordinary exception")


async def slow_but_async(response):
    await asyncio.sleep(0.01)
    return response == "yes"


def by_name(response, answer, state):
    """Does what the response says. ``state`` is a folder, for what must outlive a worker."""
    (Path(state) / f"{os.getpid()}.pid").touch()
    if response == "loop":
        while True:
            pass
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "die once":
        flag = Path(state) / "died"
        if not flag.exists():
            flag.touch()
            os._exit(3)
    if response == "print":
        print("noise on stdout " * 1000)
        os.write(1, b"\x00\x00\x00\x05junk!")
        subprocess.run([sys.executable, "-c", "print('noise of a child')"], check=True)
        sys.stdin.read()
    if response == "child":
        child = subprocess.Popen(["sleep", "60"])
        (Path(state) / f"{child.pid}.pid").touch()
        time.sleep(60)
    if response == "daemon":  # in a session of its own, and its parent is gone
        line = 'setsid sh -c \'echo $$ > "$0/daemon"; exec sleep 60\' "$0" &'
        subprocess.run(["sh", "-c", line, state], check=True)
        while not (Path(state) / "daemon").exists() or not (Path(state) / "daemon").read_text():
            time.sleep(0.01)
        (Path(state) / f"{(Path(state) / 'daemon').read_text().strip()}.pid").touch()
        time.sleep(60)
    if response == "raise":
        raise ValueError("no good")
    if response == "exit":
        sys.exit("bye")
    if response == "none":
        return None
    return 1.0


def needs_more(response, temperature):
    return 0.0


def threads(response):
    return float(os.environ[f"{response}_NUM_THREADS"])
