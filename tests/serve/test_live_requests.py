"""What becomes of requests with consent, and of feedback on them: lines that a run reads; and nothing of others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi.testclient import TestClient

from dapo.config.data import LiveConfig
from dapo.data.live import LiveRows
from dapo.serve.app import _entry
from dapo.serve.live import Journal, create_receiver
from dapo.serve.protocol import ChatRequest
from dapo.util.asynchronous import in_thread
from dapo.util.serving import Address, Progress
from served import PINNED, served

ASK: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 12, "messages": [{"role": "user", "content": "1+2="}]}
CONSENT = {"metadata": {"consent": "training"}}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def taken(file: Path) -> list[tuple[Any, Any]]:
    rows = LiveRows(LiveConfig(path=str(file)), True, lambda text: None)
    return [(row.meta["id"], row.answer) for row in iter(rows.take, None)]


def test_requests_with_consent_are_kept_and_feedback_makes_rows_of_them(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "live.jsonl"
    hook = tmp_path / "hook.py"
    hook.write_text("def keep(entry):\n    return None if 'secret' in str(entry) else {**entry, 'seen': True}\n")
    with served(folder, *PINNED, token="t", journal=Journal(file, f"{hook}:keep")) as server:
        client = server.openai(api_key="t")
        whole = client.chat.completions.create(**ASK, **CONSENT)
        streamed = list(client.chat.completions.create(**ASK, **CONSENT, stream=True))
        done = client.completions.create(model="tiny", prompt="2+2=", max_tokens=5, extra_body=CONSENT)
        client.chat.completions.create(**ASK)
        client.chat.completions.create(**ASK, metadata={"consent": "no"})
        secret = {"messages": [{"role": "user", "content": "secret"}]}
        client.chat.completions.create(**(ASK | secret), **CONSENT)
        assert server.post("/v1/chat/completions", "t", **(ASK | CONSENT | {"max_tokens": -1})).status_code == 400
        assert server.post("/v1/feedback", id=whole.id, thumbs=1).status_code == 401
        assert server.post("/v1/feedback", "t", id=whole.id).status_code == 400
        assert server.post("/v1/feedback", "t", id=whole.id, edit="3").json() == {"id": whole.id, "kept": True}
    told = lines(file)
    assert [line["id"] for line in told] == [whole.id, streamed[0].id, done.id, whole.id]
    assert told[0]["prompt"] == ASK["messages"] and told[2]["prompt"] == "2+2=" and all(line["seen"] for line in told)
    assert told[0]["response"] == told[1]["response"] == whole.choices[0].message.content
    assert told[2]["response"] == done.choices[0].text
    assert taken(file) == [(whole.id, "3")]


def test_only_what_is_kept_takes_a_thread(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    async def counted(work: Any, *given: Any, **how: Any) -> Any:
        begun.append(work)
        return await in_thread(work, *given, **how)

    monkeypatch.setattr("dapo.serve.app.in_thread", counted)
    monkeypatch.setattr("starlette.background.run_in_threadpool", counted)
    journal = Journal(tmp_path / "live.jsonl")
    with served(folder, *PINNED, journal=journal) as server:
        for more in ({}, {"stream": True}, CONSENT, CONSENT | {"stream": True}):
            assert server.post("/v1/chat/completions", **(ASK | more)).status_code == 200
    assert begun == [journal.add, journal.add] and len(lines(journal.file)) == 2


def test_half_an_answer_is_not_kept() -> None:
    body = ChatRequest(**ASK, **CONSENT, stream=True)
    for ended, kept in ((False, None), (True, {"id": "x", "prompt": ASK["messages"], "response": "3"})):
        assert _entry(body, cast("Any", SimpleNamespace(id="x", first="3", ended=ended))) == kept


def test_an_application_posts_prompts_and_feedback(tmp_path: Path) -> None:
    file, progress = tmp_path / "live.jsonl", Progress()
    progress.state = "ready"
    app = create_receiver(Journal(file), Address("127.0.0.1", 0, "t"), progress)
    client = TestClient(app, headers={"Authorization": "Bearer t"}, base_url="http://127.0.0.1")
    assert client.post("/v1/prompts", json={"prompt": "p", "answer": "1"}).status_code == 422  # no consent
    name = client.post("/v1/prompts", json={"prompt": "p", "answer": "1", "consent": "training"}).json()["id"]
    client.post("/v1/prompts", json={"id": "mine", "prompt": "q", "consent": "training"})
    client.post("/v1/feedback", json={"id": "mine", "outcome": 7})
    assert client.post("/v1/prompts", json={}, headers={"Authorization": "Bearer x"}).status_code == 401
    assert 'path="/v1/feedback"' in client.get("/metrics").text
    assert taken(file) == [(name, "1"), ("mine", "7")]


@pytest.mark.parametrize("stream", [False, True])
def test_the_entry_of_an_answer_is_written_before_the_answer_ends(folder: Path, tmp_path: Path, stream: bool) -> None:
    file, hook = tmp_path / "live.jsonl", tmp_path / "hook.py"
    hook.write_text(
        "import time\ndef slow(entry):\n    time.sleep(0 if 'feedback' in entry else 0.5)\n    return entry\n"
    )
    with served(folder, *PINNED, journal=Journal(file, f"{hook}:slow")) as server:
        told = server.post("/v1/chat/completions", **(ASK | CONSENT), stream=stream).text.removeprefix("data: ")
        name = json.loads(told.splitlines()[0])["id"]
        assert [line["id"] for line in lines(file)] == [name]
        server.post("/v1/feedback", id=name, edit="3")
    assert taken(file) == [(name, "3")]


@pytest.mark.parametrize(
    ("redaction", "why"),
    [
        ("raise KeyError('user')", "KeyError: 'user'"),
        ("return 'text'", "it returned a str"),
        ("entry.update(file.mkdir() or {}) if not file.exists() else 0; return entry", "Is a directory"),
    ],
)
def test_what_cannot_be_kept_costs_no_answer_and_feedback_hears_of_it(
    folder: Path, tmp_path: Path, redaction: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, hook = tmp_path / "live.jsonl", tmp_path / "hook.py"
    hook.write_text(f"from pathlib import Path\nfile = Path({str(file)!r})\ndef keep(entry):\n    {redaction}\n")
    with (
        served(folder, *PINNED, journal=Journal(file, f"{hook}:keep")) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,  # of one connection
    ):
        for _ in range(2):
            assert client.post("/v1/chat/completions", json=ASK | CONSENT | {"model": server.model.name}).is_success
            reply = client.post("/v1/feedback", json={"id": "x", "edit": "3"})
            assert reply.status_code == 503 and why in reply.text and "nothing was kept of x" in reply.text
    assert sum(why in line for line in caplog.messages) == 2 and "Traceback" not in caplog.text
