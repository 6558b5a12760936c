"""Policy servers for tests: one in this process, and `dapo serve` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dapo.observe.progress import QuietListener
from dapo.serve.app import Service, create_app
from dapo.serve.model import Limits, ServedModel, load_served
from dapo.util.serving import Server
from helpers import random_model

COMMAND = "import typer; from dapo.commands.serve import serve; typer.run(serve)"
SMALL = ("data.max_prompt_length=100", "evaluation.max_response_length=60", "rollout.max_concurrent_samples=16")
PINNED = (*SMALL, "runtime.deterministic=true")
CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that a random model writes halves of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate(("<pad>", "<end>", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def save_byte_model(folder: Path, **changes: Any) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    random_model("qwen2", **({"vocab_size": len(tokenizer)} | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Served:
    """A server in a thread of this process. ``model``: what it serves."""

    url: str
    model: ServedModel

    def post(self, path: str, token: str | None = None, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        given = {"model": self.model.name, **body}
        return httpx.post(f"{self.url}{path}", json=given, headers=headers, timeout=60, trust_env=False)

    def complete(self, prompt: Any = "1+2=", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **body)

    def openai(self, **how: Any) -> OpenAI:
        http = httpx.Client(trust_env=False, timeout=60)
        return OpenAI(**({"base_url": f"{self.url}/v1", "api_key": "x", "max_retries": 0, "http_client": http} | how))

    @property
    def busy(self) -> bool:
        return any(engine._decoder.busy for each in self.model.engines.values() for engine in each)

    def wait_idle(self) -> None:
        """Until nothing waits and no engine has a sample in flight."""
        end = time.monotonic() + 20
        while self.model.waiting or self.busy:
            assert time.monotonic() < end, "the engine is still at work"
            time.sleep(0.02)


@contextmanager
def served(
    folder: Path, *overrides: str, limits: Limits | None = None, token: str | None = None, **how: Any
) -> Iterator[Served]:
    limits = limits or Limits()
    model = load_served(str(folder), QuietListener(), overrides=overrides or SMALL, limits=limits, **how)
    service = Service(limits, token, model)
    service.state = "ready"
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(service), lifespan="off")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", model)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=20)
        asyncio.run(model.close())


class ServeProcess:
    """`dapo serve` in a process of its own; started again on the same port."""

    def __init__(self, *words: str, token: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._words, self._token = (*words, *(("--token-env", "SECRET") if token else ())), token
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = [sys.executable, "-c", COMMAND, *self._words, "--port", str(self.port)]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"SECRET": self._token}
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
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                headers = {"Authorization": f"Bearer {self._token or 'none'}"}
                if httpx.get(f"{self.url}/ready", headers=headers, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process is not None and self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError("the server is not ready after 60 s")

    def __enter__(self) -> ServeProcess:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
