"""Each kind of prompt source trains: a tiny model learns what is rewarded, wherever its prompts come from."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dapo.records import Reward
from run_cases import run, steps_of

TASKS = "def sums(index, seed):\n    return {'prompt': f'{index % 9}+{index // 9 % 9}=', 'answer': index % 9}\n"


def begins_with_a_digit(prompt: str, response: str) -> Reward:
    correct = response[:1].isdigit()
    return Reward(correct, 1.0 if correct else -1.0)


class Proposes(BaseHTTPRequestHandler):
    made = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Proposes.made += 4
        rows = [{"prompt": f"{k % 10}{k // 10 % 10}*{k % 7}=", "answer": "1"} for k in range(self.made, self.made + 4)]
        said = "\n".join(map(json.dumps, rows))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

    def log_message(self, *args: Any) -> None:
        pass


def keys_of(kind: str, folder: Path, port: int) -> dict[str, Any]:
    if kind == "live":
        lines = [json.dumps({"id": k, "prompt": f"{k % 9}{k // 9}-1="}) for k in range(400)]
        (folder / "live.jsonl").write_text("\n".join(lines) + "\n")
        return {"data.live": {"path": str(folder / "live.jsonl"), "share": 0.8}}
    (folder / "any.py").write_text("def right(prompt, answer):\n    return True\n")
    proposer = {"url": f"http://127.0.0.1:{port}/v1", "share": 0.5, "verify": f"{folder}/any.py:right"}
    return {"data.sampling": "difficulty"} if kind == "difficulty" else {"data.proposer": proposer}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["difficulty", "live", "proposer", "program"])
def test_a_model_learns_from_each_source(tmp_path: Path, kind: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proposes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows: dict[str, Any] = {}
    if kind == "program":
        (tmp_path / "tasks.py").write_text(TASKS)
        keys, rows = {"data.train": [f"{tmp_path}/tasks.py:sums?size=81"]}, {"rows": None}
    else:
        keys = keys_of(kind, tmp_path, server.server_port)
    keys |= {"training.steps": 25, "algorithm.filter_groups.enable": False, "rollout.prompts_per_step": 8}
    try:
        run(tmp_path / "run", keys, reward=begins_with_a_digit, **rows)
    finally:
        server.shutdown()
    found = steps_of(tmp_path / "run")
    first, last = (sum(entry["accuracy"] for entry in part) / 3 for part in (found[:3], found[-3:]))
    assert last > first + 0.3, (first, last)
    used = {"live": "live/drawn", "proposer": "proposer/drawn", "difficulty": "sampling/known"}.get(kind)
    assert used is None or found[-1][used] > (0.5 if kind == "difficulty" else 10)
