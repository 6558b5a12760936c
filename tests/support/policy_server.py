"""A `dapo serve` in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from run_cases import TOKENIZER, tiny_model

TOKEN = "a-token-of-the-tests"
COMMAND = "import typer; from dapo.commands.serve import serve; typer.run(serve)"


def saved_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny model with its tokenizer, in Hugging Face layout."""
    tiny_model(seed, **changes).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


class PolicyServer:
    """Started when entered, and again by :meth:`start` on the same port."""

    def __init__(self, model: Path, *words: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = [str(model), "--port", str(self.port), "--token-env", "POLICY_TOKEN", *words]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = [sys.executable, "-c", COMMAND, *self._words]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"POLICY_TOKEN": TOKEN}
        )

    def wait_ready(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx.get(f"{self.url}/ready", headers=self.headers, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process is not None and self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError("the server is not ready after 60 s")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {TOKEN}"}

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=20)

    def __enter__(self) -> PolicyServer:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
