"""Many streams at once, on several engines and through a crash: each is told its own tokens, all of them, once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from dapo.errors import ConfigError, ModelError
from dapo.evaluation.evaluate import evaluation_sampling
from dapo.observe.progress import QuietListener
from dapo.rollout.engine import Request
from dapo.serve.model import prepare_served
from served import PINNED, SMALL, Served, ServeProcess, served

STREAMS = 50
PROMPTS = [f"{a}{op}{b}=" for a in range(10) for b in range(10) for op in "+-*"]


async def chunks(client: httpx.AsyncClient, **body: Any) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        last = ""
        async for line in reply.aiter_lines():
            if line and last:
                yield json.loads(last.removeprefix("data: "))
            last = line or last
        assert last == "data: [DONE]"


async def expected(server: Served, bodies: list[dict[str, Any]]) -> dict[int, list[int]]:
    """What the engine itself gives to each, by the seed of its request."""
    model = server.model
    encode, sampling = model.prompting.template.encode_text, evaluation_sampling(model.prompting.config)
    requests = [
        Request(10**9 + k, tuple(encode(b["prompt"])), (b["seeds"][0],), sampling) for k, b in enumerate(bodies)
    ]
    samples = model.doors["tiny"].engines[0].generate(requests)
    return {bodies[s.request_id - 10**9]["seeds"][0]: s.token_ids.tolist() async for s in samples}


async def stream_for(server: Served, seconds: float, clients: int) -> tuple[list[dict[str, Any]], dict[int, list[int]]]:
    """The requests of ``clients`` that each send one after the other, and the tokens that each was told."""
    bodies, told, end = [], dict[int, list[int]](), time.monotonic() + seconds
    numbers = iter(range(10**9))
    how = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=how) as http:

        async def client(rng: random.Random) -> None:
            while time.monotonic() < end:
                seed = next(numbers)
                body = {"model": "tiny", "prompt": rng.choice(PROMPTS), "seeds": [seed]}
                bodies.append(body)
                ids: list[int] = []
                text = ""
                async for chunk in chunks(http, **body, stream=True, return_token_ids=True):
                    ids += chunk["choices"][0]["token_ids"]
                    text += chunk["choices"][0]["text"]
                    if rng.random() < 0.05:  # a slow reader now and then
                        await asyncio.sleep(0.05)
                assert text == server.model.prompting.template.decode(ids)
                told[seed] = ids

        await asyncio.gather(*(client(random.Random(k)) for k in range(clients)))
    return bodies, told


def check_streams(server: Served, seconds: float) -> int:
    bodies, told = asyncio.run(stream_for(server, seconds, STREAMS))
    assert len(told) == len(bodies) >= STREAMS  # none lost
    assert told == asyncio.run(expected(server, bodies))  # none mixed, doubled or cut
    server.wait_idle()
    return len(bodies)


def test_streams_at_once_are_each_told_what_the_engine_says(server: Served) -> None:
    check_streams(server, 10)


@pytest.mark.nightly
def test_fifty_streams_for_two_minutes(server: Served) -> None:
    check_streams(server, 120)


def test_several_engines_share_the_work(folder: Path) -> None:
    with served(folder, *PINNED, copies=2) as server:
        check_streams(server, 1)
        assert [engine.decode_steps > 0 for engine in server.model.doors["tiny"].engines] == [True, True]
        first, second = (next(iter(engine._parameters.values())) for engine in server.model.doors["tiny"].engines)
        assert first.data_ptr() != second.data_ptr()  # each takes weights of its own


def test_adapters_are_asked_for_by_name_and_share_the_weights_below(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from dapo.inference.found_model import FoundModel
    from dapo.inference.generate import Response, generate_responses
    from dapo.inference.model import inference_config
    from helpers import random_model
    from served import save_byte_model

    base = save_byte_model(tmp_path / "base")
    other = save_byte_model(tmp_path / "other", num_hidden_layers=2)
    for name, scale in (("poet", 3.0), ("judge", -3.0)):
        wrapped = peft.get_peft_model(
            random_model("qwen2", vocab_size=258),
            peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        )
        for parameter_name, parameter in wrapped.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data.fill_(scale)
        wrapped.peft_config["default"].base_model_name_or_path = str(base)
        wrapped.save_pretrained(tmp_path / name)
        save_tokenizer(base, tmp_path / name)

    def generated(path: Path) -> str:
        found: list[Response] = []
        config = inference_config(FoundModel(str(path)), overrides=[*PINNED, "data.template=plain"])
        generate_responses(config, ["1+2="], QuietListener(), found.append)
        return found[0].text

    adapters = {name: str(tmp_path / name) for name in ("poet", "judge")}
    with served(base, *PINNED, adapters=adapters) as server:
        assert [model.id for model in server.openai().models.list()] == ["base", "poet", "judge"]
        texts = {
            name: server.complete("1+2=", model=name, temperature=0).json()["choices"][0]["text"]
            for name in ("base", "poet", "judge")
        }
        assert texts == {name: generated(tmp_path / name) for name in texts} and len(set(texts.values())) == 3
        assert server.complete(model="singer").status_code == 404
        below = [
            engine._decoder._runner.model.get_input_embeddings().weight.data_ptr()
            for engine in (door.engines[0] for door in server.model.doors.values())
        ]  # type: ignore[attr-defined]
        assert len(set(below)) == 1
    with pytest.raises(ModelError, match="its base is"):
        prepare_served(str(other), QuietListener(), overrides=SMALL, adapters=adapters)()
    with pytest.raises(ModelError, match="holds no adapter_config"):
        prepare_served(str(base), QuietListener(), overrides=SMALL, adapters={"x": str(other)})()


def save_tokenizer(base: Path, folder: Path) -> None:
    for file in base.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


def test_a_recipe_is_served_by_its_settings(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{path: {folder}}}\ndata: {{template: plain, max_prompt_length: 30}}\n"
        "rollout: {max_response_length: 20, stop: ['5']}\nreward: {kind: exact}\nevaluation: {temperature: 0.5}\n"
        "algorithm: {overlong_buffer: {enable: false}}\n"
    )
    model = prepare_served(str(recipe), QuietListener())()
    sampling = evaluation_sampling(model.prompting.config)
    assert (model.name, model.context) == ("tiny", 50)
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.5, 20, ("5",))
    with pytest.raises(ConfigError, match="recipe"):
        prepare_served(str(tmp_path / "gone.yaml"), QuietListener())()


def test_a_server_that_is_killed_under_load_and_started_again(folder: Path) -> None:
    """Clients hear of it at once, in whole requests as in streams, and those that ask again get their texts."""
    words = [str(folder), *(word for one in PINNED for word in ("--set", one))]
    with ServeProcess(*words, token="hunter2") as process:
        texts: dict[int, set[str]] = {}
        errors: list[Exception] = []

        async def run() -> None:
            halfway, again = asyncio.Event(), asyncio.Event()

            async def client(number: int, api: AsyncOpenAI) -> None:
                for k in range(6):
                    seed = number * 6 + k
                    while seed not in texts:
                        try:
                            ask = {"model": "tiny", "prompt": PROMPTS[seed], "seed": seed, "max_tokens": 40}
                            if k % 2:
                                reply = await api.completions.create(**ask)
                                texts[seed] = {reply.choices[0].text}
                            else:
                                parts = [c.choices[0] async for c in await api.completions.create(**ask, stream=True)]
                                if parts[-1].finish_reason:
                                    texts[seed] = {"".join(part.text for part in parts)}
                        except (openai.APIError, httpx.HTTPError) as error:
                            errors.append(error)
                            await asyncio.wait_for(again.wait(), 60)
                    if len(texts) > 15:
                        halfway.set()

            how: Any = {"base_url": f"{process.url}/v1", "api_key": "hunter2", "timeout": 30, "max_retries": 0}
            async with AsyncOpenAI(**how) as api:
                clients = [asyncio.create_task(client(number, api)) for number in range(10)]
                await halfway.wait()
                await asyncio.to_thread(process.kill)
                killed = time.monotonic()
                while not errors:
                    assert time.monotonic() < killed + 10, "nobody has heard of it"
                    await asyncio.sleep(0.01)
                process.start()
                await asyncio.to_thread(process.wait_ready)
                again.set()
                await asyncio.wait_for(asyncio.gather(*clients), 60)
                for seed in range(0, 60, 7):
                    reply = await api.completions.create(model="tiny", prompt=PROMPTS[seed], seed=seed, max_tokens=40)
                    texts[seed].add(reply.choices[0].text)
                last = await api.completions.create(model="tiny", prompt="1=", n=8, seed=1, stream=True)
                parts = [(await anext(aiter(last))).choices[0]]
                code, output = await asyncio.to_thread(process.stop)  # which finishes what runs
                parts += [chunk.choices[0] async for chunk in last]
                assert {part.index for part in parts if part.finish_reason} == set(range(8))
                assert code == 0 and "1 requests to finish" in output and "hunter2" not in output

        asyncio.run(run())
        assert set(texts) == set(range(60)) and all(len(found) == 1 for found in texts.values())
        assert all(isinstance(e, openai.APIConnectionError | httpx.HTTPError) for e in errors)
