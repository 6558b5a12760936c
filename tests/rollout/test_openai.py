"""The engine over HTTP: what it asks, what it believes of the answers, and what it does when a server fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from dapo.config import Config, build_config, nested
from dapo.errors import ConfigError
from dapo.rollout import openai
from dapo.rollout.engine import InterruptibleEngine, Request, Sampling, hand_over
from dapo.rollout.openai import OpenAIEngine, RemoteError
from run_cases import SETTINGS

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[str, Any] | None]]
SEEDS = (2**64 - 1, 8, 9)
STOP = 2


def config_of(address: str, **changes: Any) -> Config:
    remote = {"rollout.engine": "openai", "rollout.url": address, "rollout.give_up_after_s": 2.0}
    return build_config(nested(SETTINGS | remote | {f"rollout.{key}": value for key, value in changes.items()}))


def choice(index: int, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    ids = [5] * (tokens - 1) + [STOP]
    logprobs = {"tokens": ["x"] * tokens, "token_logprobs": [-0.5] * tokens}
    return {
        **{"index": index, "text": "x" * tokens, "finish_reason": "stop", "token_ids": ids},
        **{"logprobs": logprobs, "versions": [0] * tokens, **changes},
    }


class Scripted:
    """A policy server that answers as a test says: status and JSON, or None to hang up."""

    def __init__(self, answer: Answer, owner: str = "dapo") -> None:
        self._answer, self._owner = answer, owner
        self.asked: list[tuple[str, Any]] = []
        self.lost = self.version = 0

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        what = " ".join(head.split()[:2])
        lengths = [line for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
        if what == "GET /v1/models":
            found: tuple[str, Any] | None = (
                "200 OK",
                {"data": [{"id": "tiny", "owned_by": self._owner, "version": self.version}]},
            )
        else:
            sent = json.loads(body) if body.startswith(b"{") else body
            self.asked.append((what, sent))
            answering = asyncio.ensure_future(self._answer(what, sent))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.lost += 1
                answering.cancel()
                writer.close()
                return
            found = answering.result()
        if found is not None:
            data = json.dumps(found[1]).encode()
            writer.write(f"HTTP/1.1 {found[0]}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
            writer.write(data)
        writer.close()


def samples_of(
    answer: Answer, count: int = 1, tokenizer: Any = None, sampling: Sampling | None = None, **changes: Any
) -> tuple[list[Any], Scripted]:
    async def run() -> tuple[list[Any], Scripted]:
        async with Scripted(answer, "dapo" if tokenizer is None else "others") as server:
            engine = OpenAIEngine(config_of(server.url, **changes), 20, [STOP], tokenizer)
            requests = [Request(i, (3, 4), SEEDS, sampling or Sampling(1.0, 6, stop=())) for i in range(count)]
            try:
                return [sample async for sample in engine.generate(requests)], server
            finally:
                await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def always(*choices: dict[str, Any]) -> Answer:
    async def answer(what: str, body: Any) -> tuple[str, Any]:
        return "200 OK", {"choices": list(choices)}

    return answer


def test_a_request_is_asked_for_at_once_with_a_seed_for_each_sample() -> None:
    assert isinstance(OpenAIEngine(config_of("http://a"), 20), InterruptibleEngine)
    found, server = samples_of(always(choice(2, 1), choice(0, 6), choice(1, finish_reason="length", tokens=6)))
    assert [(s.index, s.length, s.finish_reason) for s in found] == [(0, 6, "stop"), (1, 6, "length"), (2, 1, "stop")]
    assert found[0].logprobs.tolist() == [-0.5] * 6 and found[0].versions.tolist() == [0] * 6
    [(what, body)] = server.asked
    assert what == "POST /v1/completions" and body == {
        **{"model": "tiny", "prompt": [3, 4], "n": 3, "max_tokens": 6, "temperature": 1.0, "top_p": 1.0},
        **{
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "seeds": list(SEEDS),
            "stop_token_ids": [STOP],
        },
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": None}, "no token ids"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"versions": None}, "no versions"),
        ({"token_ids": [5, STOP]}, "2 token ids, 3 log-probabilities and 3 versions"),
        ({"token_ids": [5, 20, STOP]}, "token ids from 2 to 20.*is it another model"),
        ({"token_ids": [-1, 5, STOP]}, "token ids from -1 to 5"),
        ({"token_ids": [10**12, 5, STOP]}, "not as it should be"),
        ({"token_ids": [5, 5, 5]}, "ends with token 5, which is no stop token"),
        ({"token_ids": ["a", 5, STOP]}, "token_ids"),
        ({"logprobs": {"token_logprobs": [-0.5, math.nan, -0.5]}}, "must be finite and at most 0"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.5, -0.5]}}, "must be finite and at most 0"),
        ({"versions": [1, 0, 0]}, "versions 1 to 0, which fall"),
        ({"finish_reason": "length"}, r"a response of 3 tokens came \(length\), where 6 may be"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"index": 1}, r"choices \[1, 1, 2\] came for 3"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said_with_the_address(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RemoteError, match=rf"^policy server http://127\.0\.0\.1:\d+: .*{said}"):
        samples_of(always(choice(0) | changes, choice(1), choice(2)))


@pytest.mark.parametrize("reply", [{}, [], {"choices": 1}, {"choices": [choice(0)]}, "text"])
def test_an_answer_of_another_shape_is_refused(reply: Any) -> None:
    async def answer(what: str, body: Any) -> tuple[str, Any]:
        return "200 OK", reply

    with pytest.raises(RemoteError, match="policy server"):
        samples_of(answer)


def test_what_fails_before_its_answer_is_asked_again_with_the_same_seeds_and_comes_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: Iterator[Any] = iter([None, ("503 Service Unavailable", {}), ("429 Too Many Requests", {}), None])

    async def answer(what: str, body: Any) -> tuple[str, Any] | None:
        return next(failures, ("200 OK", {"choices": [choice(i) for i in range(3)]}))

    found, server = samples_of(answer, count=2)
    assert sorted((s.request_id, s.index) for s in found) == [(r, i) for r in range(2) for i in range(3)]
    assert len(server.asked) == 6 and {tuple(body["seeds"]) for _, body in server.asked} == {SEEDS}
    assert 1 <= sum("asking again for up to 2 s" in message for message in caplog.messages) <= 2  # once per outage


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("503 Service Unavailable", "503.*too much; it was tried for 0.3 s"),
        ("400 Bad Request", "400 Bad Request: too much"),
        ("401 Unauthorized", "401.*rollout.token_env names"),
        ("413 Too Large", "413"),
    ],
)
def test_what_stays_wrong_ends_within_bounds(status: str, said: str) -> None:
    async def answer(what: str, body: Any) -> tuple[str, Any]:
        return status, {"error": {"message": "too much"}}

    with pytest.raises(RemoteError, match=said):
        samples_of(answer, give_up_after_s=0.3)


def test_a_server_that_never_answers_ends_within_bounds() -> None:
    async def answer(what: str, body: Any) -> None:
        await asyncio.sleep(60)

    with pytest.raises(RemoteError, match=r"no answer within 0.2 s \(rollout.timeout_s\)"):
        samples_of(answer, timeout_s=0.2)


def test_requests_at_once_are_bounded() -> None:
    running, most = [0], [0]

    async def answer(what: str, body: Any) -> tuple[str, Any]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.02)
        running[0] -= 1
        return "200 OK", {"choices": [choice(i) for i in range(3)]}

    async def run() -> None:
        async with Scripted(answer) as server:
            # 4 samples a prompt: 2 requests
            engine = OpenAIEngine(config_of(server.url, max_concurrent_samples=8), 20, [STOP])
            requests = [Request(i, (3,), SEEDS, Sampling(1.0, 6)) for i in range(12)]
            assert len([sample async for sample in engine.generate(requests)]) == 36
            await engine.close()

    asyncio.run(run())
    assert most[0] == 2


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_what_is_not_wanted_any_more_closes_its_connection(how: str) -> None:
    async def answer(what: str, body: Any) -> tuple[str, Any]:
        if body["prompt"] == [4]:
            await asyncio.sleep(60)
        return "200 OK", {"choices": [choice(i) for i in range(3)]}

    async def run() -> tuple[int, int]:
        async with Scripted(answer) as server:
            engine = OpenAIEngine(config_of(server.url, in_flight="restart"), 20, [STOP])
            stream = engine.generate([Request(i, (i,), SEEDS, Sampling(1.0, 6)) for i in (3, 4)])
            count = 0
            async for _ in stream:
                count += 1
                if count == 3:
                    if how == "close":
                        break
                    assert await engine.cancel([4]) == []
            await stream.aclose()
            await asyncio.sleep(0.1)
            await engine.close()
            return count, server.lost

    assert asyncio.run(asyncio.wait_for(run(), 20)) == (3, 1)


class Letters:
    """A tokenizer: a is 1."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(one) - 96 for one in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(one + 96) for one in ids)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": "abc"}, None),
        ({"text": " a c\ufffd"}, None),
        ({"text": ""}, None),
        ({"text": "cab"}, "its text is not that of its token ids"),
        ({"text": "abcc"}, "its text is not that of its token ids"),
        ({"token_ids": [1] * 7, "text": "a" * 7, "logprobs": None}, "a response of 7 tokens came .stop., where 6 may"),
        ({"finish_reason": "length"}, "a response of 3 tokens came .length., where 6 may be"),
        ({"logprobs": {"token_logprobs": [-0.5, -0.5]}}, "3 token ids, 2 log-probabilities"),
        ({"logprobs": {"token_logprobs": [-0.5, math.nan, -0.5]}}, "must be finite"),
        ({"token_ids": [1, 2, 20]}, "token ids from 1 to 20"),
    ],
)
def test_what_is_evaluated_is_checked_too(changes: dict[str, Any], said: str | None) -> None:
    answer = always({**choice(0), "token_ids": [1, 2, 3], "versions": None, "text": "abc", **changes})
    if said is None:
        assert samples_of(answer, tokenizer=Letters())[0][0].logprobs.tolist() == [-0.5] * 3
        return
    with pytest.raises(RemoteError, match=said):
        samples_of(answer, tokenizer=Letters())


def test_a_server_that_shows_no_sign_of_life_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "LOOK_S", 0.1)
    monkeypatch.setattr(openai, "SILENT_S", 0.4)
    alive = [True]

    async def answer(what: str, body: Any) -> tuple[str, Any]:
        if what == "GET /health":
            await asyncio.sleep(0 if alive[0] else 60)
            return "200 OK", {}
        await asyncio.sleep(1.0)
        return "200 OK", {"choices": [choice(i) for i in range(3)]}

    found, server = samples_of(answer)
    assert len(found) == 3 and [what for what, _ in server.asked].count("GET /health") > 2
    alive[0] = False
    with pytest.raises(RemoteError, match=r"no sign of life for 0.4 s; it was tried for 0.1 s"):
        samples_of(answer, give_up_after_s=0.1)


def test_a_service_of_the_users_own_can_be_evaluated_with_a_mapping() -> None:
    """As Triton's generate has it."""

    async def answer(what: str, body: Any) -> tuple[str, Any]:
        return "200 OK", {"text_output": "abc" if body["text_input"] == "Q: cd" else 3}

    more = {"max_tokens": "$max_tokens", "temperature": "$temperature", "random_seed": "$seed", "stop_words": "$stop"}
    request = {"text_input": "Q: $prompt", "parameters": more}
    found, server = samples_of(answer, tokenizer=Letters(), request=request, text="text_output")
    assert sorted((s.index, tuple(s.token_ids.tolist())) for s in found) == [(i, (1, 2, 3)) for i in range(3)]
    assert {what for what, _ in server.asked} == {"POST /"}
    assert sorted(body["parameters"]["random_seed"] for _, body in server.asked) == sorted(s % 2**63 for s in SEEDS)
    assert server.asked[0][1]["parameters"] | {"random_seed": 0} == {
        **{"max_tokens": 6, "temperature": 1.0, "random_seed": 0, "stop_words": []}
    }
    for changes, said in (
        ({"text": "output"}, r"has no 'output' \(rollout.text=output\)"),
        ({"request": {"text_input": "$prompt"}}, "text was expected .rollout.text=text_output., got int 3"),
    ):
        with pytest.raises(RemoteError, match=said):
            samples_of(answer, tokenizer=Letters(), **({"request": request, "text": "text_output"} | changes))

    async def start() -> None:
        await OpenAIEngine(config_of("http://127.0.0.1:1", request=request), 20).start([3], 10)

    with pytest.raises(RemoteError, match=r"rollout\.request: the server takes no weights"):
        asyncio.run(start())


def test_a_server_of_text_alone_can_be_evaluated() -> None:
    answer = always({"index": 0, "text": "abc", "finish_reason": "stop"})
    found, server = samples_of(answer, tokenizer=Letters())
    assert sorted((s.index, tuple(s.token_ids.tolist())) for s in found) == [(i, (1, 2, 3)) for i in range(3)]
    assert [body["n"] for _, body in server.asked] == [1, 1, 1] and all(math.isnan(p) for p in found[0].logprobs)
    assert sorted(body["seed"] for _, body in server.asked) == sorted(seed % 2**63 for seed in SEEDS)


@pytest.mark.parametrize(
    ("text", "ids", "reason"), [("abcb", (1, 2), "stop"), ("a" * 9, (1,) * 6, "length"), ("ac", (1, 3), "stop")]
)
def test_a_text_that_goes_beyond_its_limits_is_cut(text: str, ids: tuple[int, ...], reason: str) -> None:
    answer = always({"index": 0, "text": text, "finish_reason": "stop"})
    found, _ = samples_of(answer, tokenizer=Letters(), sampling=Sampling(1.0, 6, stop=("b",)))
    assert {(tuple(one.token_ids.tolist()), one.finish_reason) for one in found} == {(ids, reason)}


def test_versions_are_those_of_the_run_whatever_the_server_counted_before() -> None:
    served, updates = [0], [""]

    async def answer(what: str, body: Any) -> tuple[str, Any]:
        if what.startswith("POST /weights/begin"):
            served[0] = body["version"]
            updates.append(body["update"])
        choices = [choice(i, versions=[served[0]] * 3) for i in range(3)]
        return "200 OK", {"version": served[0], "choices": choices, "update": updates[-1]}

    async def run() -> list[Any]:
        async with Scripted(answer) as server:
            engine = OpenAIEngine(config_of(server.url), 20, [STOP])
            server.version = 41
            seen: list[Any] = [engine.version]
            for version in (5, 6):
                await hand_over(engine, version, [("w", torch.ones(3))])
                [*samples] = [s async for s in engine.generate([Request(0, (3,), SEEDS, Sampling(1.0, 6))])]
                seen += [engine.version, samples[0].versions.tolist(), served[0]]
            await hand_over(engine, 6, [("w", torch.ones(3))])  # the word of it was lost
            assert len(set(updates)) == 3
            updates.append("theirs")
            with pytest.raises(RemoteError, match="its weights are not of this run"):
                [_ async for _ in engine.generate([Request(0, (3,), SEEDS, Sampling(1.0, 6))])]
            del updates[-1]
            served[0] = 0  # it was started again
            with pytest.raises(RemoteError, match=r"versions -37 to -37 came where 6 to 6 .* started again"):
                [_ async for _ in engine.generate([Request(0, (3,), SEEDS, Sampling(1.0, 6))])]
            await engine.close()
            return seen

    assert asyncio.run(run()) == [-1, 5, [5] * 3, 42, 6, [6] * 3, 43]


def test_a_trial_says_what_a_server_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(what: str, body: Any) -> tuple[str, Any]:
        if what.startswith("GET /weights"):
            return "404 Not Found", {}
        return "200 OK", {"choices": [choice(0, 1, token_ids=[1], finish_reason="length")]}

    async def run(**changes: Any) -> None:
        async with Scripted(answer) as server:
            engine = OpenAIEngine(config_of(server.url, **changes), 20)
            try:
                await engine.start([3], 10)
            finally:
                await engine.close()

    with pytest.raises(RemoteError, match=r"http://.*404.*no run can train through a server that takes no weights"):
        asyncio.run(run())
    with pytest.raises(RemoteError, match=r"rollout.model: is other; its models are tiny"):
        asyncio.run(run(model="other"))
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(RemoteError, match=r"rollout.token_env: .* NO_SUCH is not set"):
        asyncio.run(run(token_env="NO_SUCH"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": None}, "rollout.url: goes with rollout.engine=openai"),
        ({"engine": "native"}, "rollout.url: goes with rollout.engine=openai"),
        ({"url": "no-address"}, "must be the address of a server"),
        ({"url": "http://user:word@host"}, "rollout.token_env"),
        ({"request": {"text": "$prompt", "n": "$many"}}, r"\$many is no field of a request; known are"),
        ({"request": {"text": "x"}}, r"it must send \$prompt"),
        ({"request": {"$prompt": 3}}, r"\$prompt fills in values, and this is a key"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of("http://127.0.0.1:1", **changes)
