"""A run with models that answer at once, and the routes of the page that ask them, over real HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from dapo.commands.demo.task import make_model, make_tokenizer
from dapo.commands.ui import playground
from dapo.commands.ui.answering import Answerer
from dapo.commands.ui.runs import NotHere, Run
from dapo.commands.ui.server import tell_errors
from dapo.config import build_config, nested
from dapo.observe.run_folder import RunFolder

HELD_OUT = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(5) for b in range(5)]


def run_with_models(root: Path, seeds: Mapping[str, int], settings: Mapping[str, Any] | None = None) -> Path:
    """A run of the demo's task. ``seeds``: of each model's random weights, by its name."""
    data = root.with_name(f"{root.name}-rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT), encoding="utf-8")
    given = {
        "model.path": "gone",
        "run.dir": str(root),
        "reward.kind": "exact",
        "reward.after": "#",
        "data.template": "plain",
        "data.max_prompt_length": 16,
        "rollout.max_response_length": 24,
        "evaluation.data": str(data),
        "algorithm.overlong_buffer.enable": False,
    }
    folder = RunFolder.create(build_config(nested({**given, **(settings or {})})), ["dapo", "train", "r.yaml"])
    (folder.root / "metrics.jsonl").touch()
    tokenizer = make_tokenizer()
    for name, seed in seeds.items():
        place = folder.root / name if name.startswith("model-") else folder.checkpoints / name / "model"
        make_model(seed, len(tokenizer)).save_pretrained(place)
        tokenizer.save_pretrained(place)
    return folder.root


@contextmanager
def serving(
    root: Path, answerer: Answerer | None = None, extend: Callable[[FastAPI], object] = lambda app: None
) -> Iterator[httpx.Client]:
    """A client of the routes; the only run is called ``r``. ``extend``: adds others."""

    def run_of(name: str) -> Run:
        if name != "r":
            raise NotHere(f"there is no run {name!r} here")
        return Run("r", root)

    app = FastAPI()
    app.state.runs = SimpleNamespace(get=run_of)
    playground.add_to(app, answerer or Answerer())
    tell_errors(app)
    extend(app)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/api/"
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()


def stream(client: httpx.Client, **wanted: Any) -> list[dict[str, Any]]:
    """All events of the answers to a question."""
    body = {"run": "r", "models": ["model-before", "model-after"], **wanted}
    with client.stream("POST", "playground", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
