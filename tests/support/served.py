"""Policy servers for tests: one in this process, and `dapo serve` in a process of its own."""

from __future__ import annotations

import asyncio
import socket
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
from dapo.ranking.endpoints import Rankers
from dapo.serve.app import Service, create_app
from dapo.serve.model import Limits, ServedModel, prepare_served
from dapo.util.serving import Server
from helpers import random_model
from server_process import ServerProcess

COMMAND = "import sys; from dapo.commands import main; sys.argv.insert(1, 'serve'); main()"
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
        return any(engine._decoder.busy for door in self.model.doors.values() for engine in door.engines)

    def wait_idle(self) -> None:
        """Until nothing waits and no engine has a sample in flight."""
        end = time.monotonic() + 20
        while self.model.room.waiting or self.busy:
            assert time.monotonic() < end, "the engine is still at work"
            time.sleep(0.02)


@contextmanager
def served(
    folder: Path,
    *overrides: str,
    limits: Limits | None = None,
    token: str | None = None,
    journal: Any = None,
    rankers: Rankers | None = None,
    **how: Any,
) -> Iterator[Served]:
    limits = limits or Limits()
    model = prepare_served(str(folder), QuietListener(), overrides=overrides or SMALL, limits=limits, **how)()
    service = Service(limits, token, model, rankers)
    service.state = "ready"
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(service, journal=journal), lifespan="off")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", model)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=20)
        asyncio.run(model.close())


class ServeProcess(ServerProcess):
    """`dapo serve` in a process of its own; started again on the same port."""

    def __init__(self, *words: str, token: str = "", start_s: float = 60.0) -> None:
        words = (*words, *(("--token-env", "SECRET") if token else ()))
        headers = {"Authorization": f"Bearer {token or 'none'}"}
        super().__init__(COMMAND, *words, env={"SECRET": token}, headers=headers, start_s=start_s)
