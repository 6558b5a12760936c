"""A server of dapo's in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any, Self

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """``command``, as Python code, with ``words``; started again on the same port. It is ready when it answers one of
    ``ready`` to a request with ``headers``."""

    def __init__(
        self,
        command: str,
        *words: str,
        env: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        ready: Collection[int] = (200,),
        start_s: float = 60.0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._words, self._env = [sys.executable, "-c", command, *words, "--port", str(self.port)], env or {}
        self._asking: dict[str, Any] = {"headers": headers, "trust_env": False}
        self._ready, self._start_s = ready, start_s
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | self._env
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=20)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and output."""
        assert self.process is not None
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output

    def wait_ready(self) -> None:
        end = time.monotonic() + self._start_s
        while time.monotonic() < end:
            try:
                if httpx.get(f"{self.url}/ready", **self._asking).status_code in self._ready:
                    return
            except httpx.TransportError:
                pass
            assert self.process is not None and self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready after {self._start_s:g} s")

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
