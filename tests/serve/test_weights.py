"""Weights over HTTP: updates in buckets and from checkpoints, what is in flight meanwhile, and who may not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from command_cases import save_model
from dapo.model.adapters import adapter_parameters, new_adapter, save_adapter
from dapo.model.loading import load_model
from dapo.observe.progress import QuietListener
from dapo.rollout.engine import Request, Sampling, some_elements
from dapo.rollout.native.engine import NativeEngine
from dapo.serve import door as module
from dapo.serve.app import Service, create_app
from dapo.serve.door import Begin, Restarted
from dapo.serve.model import Job, Limits, prepare_served
from run_cases import TOKENIZER, tiny_model

Client = httpx.AsyncClient
TOKEN = "a-token"
PROMPT = [5, 6, 7]
STOPS = [TOKENIZER.eos_token_id]
SETTINGS = ("data.template=plain", "runtime.deterministic=true", "rollout.max_response_length=200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "tiny")


def with_server(
    model: Path,
    ask: Callable[[Client], Awaitable[Any]],
    folder: Path | None = None,
    token: str | None = TOKEN,
    **more: Any,
) -> Any:
    """What ``ask`` returns, called with a client of a server in this process."""

    async def run() -> Any:
        served = prepare_served(str(model), QuietListener(), overrides=SETTINGS, **more)()
        service = Service(Limits(), token, served)
        service.state = "ready"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        transport = httpx.ASGITransport(create_app(service, folder))
        try:
            async with Client(transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=30) as client:
                return await asyncio.wait_for(ask(client), 60)
        finally:
            await served.close()

    return asyncio.run(run())


async def sampled(client: Client, tokens: int = 8, **more: Any) -> dict[str, Any]:
    """The choice of a greedy completion."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0, "return_token_ids": True}
    reply = await client.post("/v1/completions", json=body | {"seeds": [1]} | more)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0])


def expected(model: Any, tokens: int = 8, temperature: float = 0.0) -> list[int]:
    """Of the same request, by an engine with these weights."""

    async def run() -> list[int]:
        sizes = {"max_sequence_tokens": 512, "max_concurrent_samples": 256}
        engine = NativeEngine(load_model(model, torch.float32), STOPS, deterministic=True, **sizes)
        request = Request(0, tuple(PROMPT), (1,), Sampling(temperature, tokens))
        try:
            [sample] = [sample async for sample in engine.generate([request])]
            return list(sample.token_ids.tolist())
        finally:
            await engine.close()

    return asyncio.run(run())


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def fingerprint(tensors: dict[str, torch.Tensor]) -> bytes:
    return save({name: some_elements(tensor) for name, tensor in tensors.items()})


def body(content: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return content

    return read


async def hand_over(client: Client, tensors: dict[str, torch.Tensor], version: int, **more: Any) -> httpx.Response:
    begun = await client.post("/weights/begin", json={"version": version} | more)
    assert begun.status_code == 200, begun.text
    update = {"update": begun.json()["update"]}
    for name, tensor in tensors.items():
        put = await client.put("/weights/bucket", params=update, content=save({name: tensor}))
        assert put.status_code == 200, put.text
    return await client.post("/weights/commit", params=update, content=fingerprint(tensors))


def test_buckets_change_what_is_sampled_and_its_version(model: Path) -> None:
    other = tiny_model(1)

    async def ask(client: Client) -> tuple[Any, ...]:
        before = await sampled(client)
        committed = await hand_over(client, tensors_of(other), 7)
        models = (await client.get("/v1/models")).json()["data"]
        return before, committed.json(), await sampled(client), models[0]["version"]

    before, committed, after, listed = with_server(model, ask)
    assert before["token_ids"] == expected(tiny_model(0)) and set(before["versions"]) == {0}
    assert after["token_ids"] == expected(other) and set(after["versions"]) == {7}
    assert committed == {"version": 7} and listed == 7


def test_every_engine_behind_the_server_gets_them(model: Path) -> None:
    other = tiny_model(1)

    async def ask(client: Client) -> list[Any]:
        await hand_over(client, tensors_of(other), 1)
        return await asyncio.gather(*(sampled(client) for _ in range(4)))

    found = with_server(model, ask, copies=2)
    assert [choice["token_ids"] for choice in found] == [expected(other)] * 4
    assert {version for choice in found for version in choice["versions"]} == {1}


@pytest.mark.parametrize("in_flight", ["keep", "drain", "restart"])
def test_what_is_in_flight_goes_on_is_waited_for_or_begins_anew(model: Path, in_flight: str) -> None:
    other = tiny_model(1)
    tokens = 90

    async def ask(client: Client) -> Any:
        await sampled(client)  # the first one takes longer
        running = asyncio.create_task(sampled(client, tokens))
        await asyncio.sleep(0.1)
        assert not running.done()
        await hand_over(client, tensors_of(other), 1, in_flight=in_flight)
        return await running

    choice = with_server(model, ask)
    versions, ids = choice["versions"], choice["token_ids"]
    assert versions == sorted(versions) and len(ids) == tokens
    if in_flight == "drain":
        assert set(versions) == {0} and ids == expected(tiny_model(0), tokens)
    elif in_flight == "restart":
        assert set(versions) == {1} and ids == expected(other, tokens)
    else:
        first = versions.count(0)
        assert set(versions) == {0, 1} and ids[:first] == expected(tiny_model(0), tokens)[:first]


def test_a_begin_that_is_asked_for_again_restarts_nothing(model: Path) -> None:
    async def ask(client: Client) -> dict[str, Any]:
        await sampled(client)  # the first one takes longer
        running = asyncio.create_task(sampled(client, 90))
        await asyncio.sleep(0.1)
        assert not running.done()
        await client.post("/weights/begin", json={"version": 1, "update": "mine"})
        await hand_over(client, tensors_of(tiny_model(1)), 1, update="mine")
        return await running

    assert set(with_server(model, ask)["versions"]) == {0, 1}


def test_who_does_not_read_holds_no_update_and_who_takes_too_long_begins_anew(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        served = prepare_served(str(model), QuietListener(), overrides=SETTINGS)()
        updates = served.doors["tiny"]
        engine = updates.engines[0]
        job = Job("tiny", [Request(0, tuple(PROMPT), (1,), Sampling(0.0, 20))], drafts=True)
        unread = served.submit(job)
        await anext(unread)
        await updates.begin(Begin(version=1, in_flight="drain", update="a"))
        assert [part.versions async for _, part in unread]  # nothing of it is lost
        tensors = tensors_of(tiny_model(1))
        await updates.put("a", body(save(tensors)))
        await updates.commit("a", body(fingerprint(tensors)))
        await engine.pause()
        late = served.submit(job)
        first = asyncio.create_task(anext(late))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(module, "DEADLINE_S", 0.2)
        await updates.begin(Begin(version=2, in_flight="drain"))
        with pytest.raises(Restarted):
            await first
        await served.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_client_that_is_lost_blocks_nobody_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.5)
    other = tiny_model(1)

    async def ask(client: Client) -> tuple[Any, ...]:
        running = asyncio.create_task(client.post("/v1/completions", json=long))
        await asyncio.sleep(0.1)
        await client.post("/weights/begin", json={"version": 1, "update": "mine"})
        waiting = asyncio.create_task(client.post("/v1/completions", json=long))
        ended = await asyncio.gather(running, waiting)
        late = await client.put("/weights/bucket", params={"update": "mine"}, content=save({"x": torch.ones(1)}))
        refused, ready = await client.post("/v1/completions", json=long), await client.get("/ready")
        await hand_over(client, tensors_of(other), 1)
        return [*ended, refused], late, ready, await sampled(client)

    long = {"model": "tiny", "prompt": PROMPT, "max_tokens": 90, "temperature": 0.0}
    ended, late, ready, after = with_server(model, ask)
    for reply in ended:
        assert reply.status_code == 503 and "new ones have to be handed over" in reply.json()["error"]["message"]
    assert late.status_code == 409 and (ready.status_code, ready.json()["state"]) == (503, "waiting")
    assert after["token_ids"] == expected(other)


def test_two_runs_on_one_server_do_not_take_each_others_weights_for_theirs(model: Path) -> None:
    """Each update has a version and a name of its own, which replies tell."""
    other = tensors_of(tiny_model(1))

    async def ask(client: Client) -> tuple[Any, ...]:
        before = await client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
        await hand_over(client, other, 1, update="mine")
        theirs = await client.post("/weights/begin", json={"version": 1, "update": "theirs"})
        again = await hand_over(client, other, 1, update="mine")  # its word was lost
        after = await client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
        return before.json(), theirs, again, after.json()

    before, theirs, again, after = with_server(model, ask)
    assert theirs.status_code == 409 and "do two runs share this server" in theirs.json()["error"]["message"]
    assert again.json() == {"version": 1}
    assert "update" not in before and after["update"] == "mine"


def test_who_waits_for_requests_to_end_holds_up_no_other_update(model: Path) -> None:
    async def ask(client: Client) -> tuple[int, ...]:
        await sampled(client)
        running = asyncio.create_task(sampled(client, 200, temperature=3.0))
        await asyncio.sleep(0.1)
        waits = asyncio.create_task(client.post("/weights/begin", json={"version": 1, "in_flight": "drain"}))
        await asyncio.sleep(0.05)
        assert not running.done() and not waits.done()
        taken = await hand_over(client, tensors_of(tiny_model(1)), 2)
        late = (await waits).status_code
        return late, taken.status_code, max((await running)["versions"])

    assert with_server(model, ask) == (409, 200, 2)


def test_a_body_that_comes_slowly_is_no_silence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.2)
    tensors = tensors_of(tiny_model(1))

    async def run() -> int:
        served = prepare_served(str(model), QuietListener(), overrides=SETTINGS)()
        updates = served.doors["tiny"]
        await updates.begin(Begin(version=1, update="a"))

        async def slow() -> bytes:
            await asyncio.sleep(0.5)
            return save(tensors)

        await updates.put("a", slow)
        version = await updates.commit("a", body(fingerprint(tensors)))
        await served.close()
        return version

    assert asyncio.run(run()) == 1


def test_the_next_client_takes_over_and_a_commit_may_be_asked_for_again(model: Path) -> None:
    async def ask(client: Client) -> tuple[Any, ...]:
        await client.post("/weights/begin", json={"version": 1, "update": "lost"})
        done = await hand_over(client, tensors_of(tiny_model(1)), 2, update="mine")
        again = await client.post("/weights/commit", params={"update": "mine"}, content=b"")
        lost = await client.put("/weights/bucket", params={"update": "lost"}, content=save({}))
        fallen = await client.post("/weights/begin", json={"version": 1})
        return done.json(), again.json(), lost.status_code, fallen.json()["error"]["message"], await sampled(client)

    done, again, lost, fallen, after = with_server(model, ask)
    assert done == again == {"version": 2} and lost == 409
    assert fallen.startswith("version: 1 was given, and 2 is in use: versions rise with each update")
    assert set(after["versions"]) == {2}


def other_values(tensors: dict[str, torch.Tensor]) -> bytes:
    return fingerprint({name: tensor + 1 for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("bucket", "commit", "said"),
    [
        (b"not safetensors", None, "is not safetensors"),
        (b"\xff" * 8 + b"{}", None, "is not safetensors"),
        (save({"nothing": torch.ones(2)}), None, "no such parameter"),
        (save({"model.norm.weight": torch.ones(3)}), None, "shape"),
        (save({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), None, "floating-point numbers"),
        (None, save({}), "the fingerprint is not of all weights"),
        (None, fingerprint(tensors_of(tiny_model(1))), "parameters were not given"),
        (None, fingerprint(tensors_of(tiny_model(1)) | {"x": torch.ones(1)}), "1 differ, such as x"),
    ],
)
def test_buckets_that_are_wrong_are_refused(model: Path, bucket: bytes | None, commit: bytes | None, said: str) -> None:
    async def ask(client: Client) -> httpx.Response:
        update = {"update": (await client.post("/weights/begin", json={"version": 1})).json()["update"]}
        if bucket is not None:
            return await client.put("/weights/bucket", params=update, content=bucket)
        return await client.post("/weights/commit", params=update, content=commit)

    reply = with_server(model, ask)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


def test_weights_that_were_damaged_on_the_way_are_never_sampled_from(model: Path) -> None:
    tensors = tensors_of(tiny_model(1))

    async def ask(client: Client) -> tuple[httpx.Response, httpx.Response]:
        update = {"update": (await client.post("/weights/begin", json={"version": 1})).json()["update"]}
        await client.put("/weights/bucket", params=update, content=save(tensors))
        damaged = await client.post("/weights/commit", params=update, content=other_values(tensors))
        return damaged, await client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT})

    damaged, after = with_server(model, ask)
    assert damaged.status_code == 400 and "not what was sent" in damaged.json()["error"]["message"]
    assert after.status_code == 503 and "not what was sent" in after.json()["error"]["message"]


ROUTES = [("GET", ""), ("POST", ""), ("POST", "/begin"), ("PUT", "/bucket?update=a"), ("POST", "/commit?update=a")]


@pytest.mark.parametrize(("token", "sent", "status"), [(None, TOKEN, 403), (TOKEN, "another", 401), (TOKEN, "", 401)])
def test_no_weights_without_the_token(model: Path, tmp_path: Path, token: str | None, sent: str, status: int) -> None:
    save_model(tmp_path / "other", seed=1)

    async def ask(client: Client) -> list[int]:
        client.headers["Authorization"] = f"Bearer {sent}"
        bodies = {"": {"checkpoint": "other"}, "/begin": {"version": 1}}
        asked = [(method, path, bodies.get(path)) for method, path in ROUTES]
        return [(await client.request(m, f"/weights{path}", json=body)).status_code for m, path, body in asked]

    assert set(with_server(model, ask, tmp_path, token)) == {status}


def test_a_checkpoint_below_the_folder_is_taken(model: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "run" / "checkpoint" / "model", seed=1)
    save_model(tmp_path / "wide", seed=1, intermediate_size=48)

    async def ask(client: Client) -> tuple[Any, ...]:
        taken = await client.post("/weights", json={"checkpoint": "run/checkpoint"})
        wide = await client.post("/weights", json={"checkpoint": "wide"})
        return taken.json(), wide, await sampled(client)

    taken, wide, after = with_server(model, ask, tmp_path)
    assert taken == {"version": 1} and set(after["versions"]) == {1} and after["token_ids"] == expected(tiny_model(1))
    assert wide.status_code == 400 and "is of another model" in wide.json()["error"]["message"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_weights_is_refused_before_an_update_begins(model: Path, tmp_path: Path, value: float) -> None:
    other = tiny_model(1)
    other.model.norm.weight.data[0] = value
    other.save_pretrained(tmp_path / "other")

    async def ask(client: Client) -> tuple[Any, ...]:
        bodies: list[dict[str, Any]] = [{"checkpoint": "other"}, {"checkpoint": "other", "inflight": "drain"}]
        return [await client.post("/weights", json=one) for one in bodies], await sampled(client)

    (broken, unknown), after = with_server(model, ask, tmp_path)
    assert broken.status_code == unknown.status_code == 400 and set(after["versions"]) == {0}
    assert "model.norm.weight, are no finite" in broken.json()["error"]["message"]
    assert "inflight: Extra inputs" in unknown.json()["error"]["message"]


def test_a_server_whose_engine_has_ended_says_so_everywhere(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise SystemExit("out of order")

    async def ask(client: Client) -> list[httpx.Response]:
        await client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT})
        paths = ("/v1/completions", "/weights/begin")
        bodies: list[dict[str, Any]] = [{"model": "tiny", "prompt": PROMPT}, {"version": 1}]
        posted = [await client.post(path, json=body) for path, body in zip(paths, bodies, strict=True)]
        return [*posted, await client.get("/weights"), await client.get("/ready")]

    monkeypatch.setattr(NativeEngine, "_advance", broken)
    for reply in with_server(model, ask):
        assert reply.status_code == 503 and "out of order; restart the server" in reply.text


@pytest.mark.parametrize(
    "name",
    ["../outside", "{outside}", "out", "file", "nowhere", "", ".", "~", "a\0b", "x" * 5000, "inside/../../outside"],
)
def test_no_checkpoint_from_elsewhere(model: Path, tmp_path: Path, name: str) -> None:
    outside, root = save_model(tmp_path / "outside", seed=1), tmp_path / "root"
    (root / "file").mkdir(parents=True)
    (root / "inside").mkdir()
    (root / "out").symlink_to(outside)
    for one in ("config.json", "model.safetensors"):
        (root / "file" / one).symlink_to(outside / one)

    async def ask(client: Client) -> tuple[httpx.Response, Any]:
        return await client.post("/weights", json={"checkpoint": name.format(outside=outside)}), await sampled(client)

    reply, after = with_server(model, ask, root)
    assert reply.status_code == 404 and "no such one below --weights-dir" in reply.json()["error"]["message"]
    assert set(after["versions"]) == {0}


def test_a_pipe_below_the_folder_is_no_checkpoint_and_blocks_nothing(model: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "odd", seed=1)
    (tmp_path / "odd" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "odd" / "model.safetensors")
    reply = with_server(model, lambda client: client.post("/weights", json={"checkpoint": "odd"}), tmp_path)
    assert reply.status_code == 404


def test_without_a_folder_no_checkpoint_is_taken(model: Path) -> None:
    reply = with_server(model, lambda client: client.post("/weights", json={"checkpoint": "."}))
    assert reply.status_code == 403 and "--weights-dir" in reply.json()["error"]["message"]


def test_a_body_that_is_larger_than_the_weights_is_not_read(model: Path) -> None:
    async def ask(client: Client) -> list[tuple[int, str]]:
        await client.post("/weights/begin", json={"version": 1, "update": "a"})
        sizes = {"/weights/bucket?update=a": 2**22, "/weights/begin": 2**25}
        methods = {"/weights/bucket?update=a": "PUT", "/weights/begin": "POST"}
        got = [await client.request(methods[path], path, content=bytes(size)) for path, size in sizes.items()]
        return [(one.status_code, one.json()["error"]["message"].rpartition(" (")[2]) for one in got]

    assert with_server(model, ask) == [(413, "all weights of its model)"), (413, "--max-body-mb)")]


def adapter_in(folder: Path, base: Path, seed: int) -> Path:
    """One that changes what is sampled."""
    folder.mkdir()
    model = new_adapter(load_model(str(base), torch.float32), 2, 4.0, "all-linear", seed)
    with torch.no_grad():
        torch.manual_seed(seed)
        for parameter in adapter_parameters(model).values():
            parameter.normal_()
    save_adapter(model, folder)
    return folder


@pytest.mark.parametrize("apart", [False, True])
def test_an_adapter_is_given_weights_by_its_name_and_the_model_below_stays(
    model: Path, tmp_path: Path, apart: bool
) -> None:
    adapters = {seed: adapter_in(tmp_path / f"adapter{seed}", model, seed) for seed in (1, 2)}
    loaded = load_model(str(adapters[2]), torch.float32)
    tensors = {name: parameter.detach() for name, parameter in adapter_parameters(loaded).items()}

    async def ask(client: Client) -> dict[str, Any]:
        found = {"base": await sampled(client), "first": await sampled(client, model="poet")}
        await hand_over(client, tensors, 3, model="poet")
        found["second"] = await sampled(client, model="poet")
        await client.post("/weights", json={"checkpoint": "adapter1", "model": "poet"})
        found |= {"again": await sampled(client, model="poet"), "still": await sampled(client)}
        update = (await client.post("/weights/begin", json={"version": 9, "model": "poet"})).json()
        found["state"] = (await client.get("/weights", params={"model": "poet"})).json()
        found["failed"] = (await client.put("/weights/bucket", params=update, content=b"x" * 20)).status_code
        await client.put("/weights/bucket", params=update, content=save({"nothing": torch.ones(1)}))
        found["down"] = (await client.post("/v1/completions", json={"model": "poet", "prompt": PROMPT})).status_code
        found |= {"others": await sampled(client), "ready": (await client.get("/ready")).json()["state"]}
        for name in (None, "nobody"):
            found[f"{name}"] = (await client.post("/weights/begin", json={"version": 9, "model": name})).status_code
        return found

    found = with_server(model, ask, tmp_path, adapters={"poet": str(adapters[1])}, apart=apart)
    assert found.pop("state") == {"version": 4, "reason": "an update is under way", "adapter_rank": 2}
    ids = {name: choice["token_ids"] for name, choice in found.items() if isinstance(choice, dict)}
    assert ids["base"] == ids["still"] == ids["others"] == expected(tiny_model(0)) and ids["second"] == expected(loaded)
    assert ids["first"] == ids["again"] and len({tuple(one) for one in ids.values()}) == 3
    assert set(found["second"]["versions"]) == {3} and set(found["again"]["versions"]) == {4}
    assert (found["None"], found["nobody"]) == (409, 404)
    assert (found["failed"], found["down"], found["ready"]) == (400, 503, "ready")
