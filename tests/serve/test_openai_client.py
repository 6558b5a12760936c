"""The official client, unchanged: what it asks for, and errors as its own exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from dapo.inference.found_model import FoundModel
from dapo.inference.generate import Response, generate_responses
from dapo.inference.model import inference_config
from dapo.inference.stream import Part, Pieces
from dapo.observe.progress import QuietListener
from dapo.records import Sample
from dapo.serve.model import Limits
from dapo.serve.protocol import CompletionRequest, Reply
from served import PINNED, Served, served

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.openai()


def test_models_are_listed(client: OpenAI, server: Served) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == server.model.context == 160  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-4")


def test_a_chat_in_whole_and_streamed_is_the_same(client: OpenAI) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "seed": 3, "n": 3, "max_completion_tokens": 20, "logprobs": True}
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage is not None and whole.usage.prompt_tokens == len("[system]be brief[user]1+2=[assistant]")
    texts, tokens, ends = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}, dict[int, str]()
    usage = None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content
            ends[choice.index] = choice.finish_reason
    assert usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert choice.logprobs is not None and tokens[choice.index] == choice.logprobs.content
        assert b"".join(bytes(token.bytes or []) for token in tokens[choice.index]).decode() == texts[choice.index]
        assert ends[choice.index] == choice.finish_reason


def test_a_seed_gives_its_texts_again_and_each_prompt_its_own(client: OpenAI) -> None:
    def texts(seed: int | None) -> list[str]:
        got = client.completions.create(model="tiny", prompt=["1+2=", "9-4="], n=2, seed=seed, max_tokens=12)
        return [choice.text for choice in got.choices]

    assert texts(7) == texts(7) != texts(8)
    assert len({*texts(7), *texts(None), *texts(None)}) > 8  # some may be empty


def test_a_stop_text_ends_the_response_and_is_never_sent(client: OpenAI) -> None:
    def create(seed: int, **how: Any) -> Any:
        return client.completions.create(model="tiny", prompt="7*8=", seed=seed, temperature=2, max_tokens=60, **how)

    texts = ((seed, create(seed).choices[0].text) for seed in range(50))
    pairs = ((seed, text, text[k : k + 2]) for seed, text in texts for k in range(10, len(text) - 1))
    seed, whole, stop = next(found for found in pairs if "\ufffd" not in found[2])
    cut = whole[: whole.index(stop)]
    found = create(seed, stop=[stop, "never there"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == (cut, "stop")
    told = ""
    for chunk in create(seed, stop=stop, stream=True):
        told += chunk.choices[0].text
        assert cut.startswith(told)
    assert told == cut


def test_log_probabilities_of_tokens_and_of_the_likeliest(client: OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="1+1=", logprobs=3, max_tokens=9, temperature=0)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs and logprobs.token_logprobs
    assert "".join(logprobs.tokens) == found.choices[0].text and len(logprobs.tokens) == 9
    for start, token in zip(logprobs.text_offset or [], logprobs.tokens, strict=True):
        assert found.choices[0].text[start : start + len(token)] == token
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob == max(top.values()) <= 0
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=5, stream=True, temperature=0
    )
    content = [token for chunk in chat for token in chunk.choices[0].logprobs.content]  # type: ignore[union-attr]
    assert [len(token.top_logprobs) for token in content] == [2] * 5
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)


def test_greedy_answers_are_those_of_dapo_generate(client: OpenAI, folder: Path) -> None:
    def generated(prompt: str, template: str) -> Response:
        found: list[Response] = []
        settings = [*PINNED, f"data.template={template}", "evaluation.temperature=0"]
        generate_responses(
            inference_config(FoundModel(str(folder)), overrides=settings), [prompt], QuietListener(), found.append
        )
        return found[0]

    for prompt in ("1+2=", "9*9-3=", "é€😀"):
        plain = generated(prompt, "plain")
        text = client.completions.create(model="tiny", prompt=prompt, temperature=0).choices[0].text
        streamed = client.completions.create(model="tiny", prompt=prompt, temperature=0, stream=True)
        assert text == plain.text == "".join(chunk.choices[0].text for chunk in streamed)
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": prompt}], temperature=0
        )
        assert chat.choices[0].message.content == generated(prompt, "chat").text


def test_token_ids_in_and_out(client: OpenAI, server: Served) -> None:
    ids = [[3, 4, 5], [9]]
    extra = {"return_token_ids": True, "seeds": [1, 2, 3, 4]}
    found = client.completions.create(model="tiny", prompt=ids, n=2, max_tokens=6, logprobs=0, extra_body=extra)
    for choice in found.choices:
        more = choice.model_extra or {}
        assert more["prompt_token_ids"] == ids[choice.index // 2]
        assert len(more["token_ids"]) == len(more["versions"]) == len(choice.logprobs.token_logprobs)  # type: ignore
        assert server.model.prompting.template.decode(more["token_ids"]) == choice.text
    assert (found.model_extra or {})["version"] == 0
    one = client.completions.create(model="tiny", prompt=[9], max_tokens=6, extra_body={"seeds": [4]})
    assert one.choices[0].text == found.choices[3].text
    short = {"seeds": [4], "return_tokens_as_token_ids": True, "return_token_ids": True}
    same = client.completions.create(model="tiny", prompt=[9], max_tokens=6, logprobs=0, extra_body=short).choices[0]
    assert same.text == one.choices[0].text and same.logprobs is not None
    assert same.logprobs.tokens == [f"token_id:{i}" for i in (same.model_extra or {})["token_ids"]]
    raw = client.completions.with_raw_response.create(model="tiny", prompt=[9], max_tokens=1)
    assert raw.headers["version"] == "0"


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "there is tiny"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "greater than or equal to 0"),
        ({"n": 1025}, openai.BadRequestError, "n", "1025"),
        ({"max_tokens": 1000}, openai.BadRequestError, None, "exceed the engine's 160"),
        ({"prompt": "x" * 200}, openai.BadRequestError, None, "200 prompt tokens"),
        ({"prompt": "x" * 801}, openai.BadRequestError, "prompt", "801 characters; 160 tokens of this model have 800"),
        ({"prompt": ""}, openai.BadRequestError, "prompt", "empty"),
        ({"prompt": []}, openai.BadRequestError, "prompt", "there is none"),
        ({"prompt": [10**30]}, openai.BadRequestError, None, "token ids must be in"),
        ({"echo": True}, openai.BadRequestError, "echo", "not served"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty", "not served"),
        ({"extra_body": {"top_kk": 3}}, openai.BadRequestError, "top_kk", "not a parameter"),
        ({"extra_body": {"seeds": [1, 2]}}, openai.BadRequestError, "seeds", "there are 2, for 1 prompts"),
        ({"extra_body": {"stop_token_ids": [77]}}, openai.BadRequestError, "stop_token_ids", "it stops at [1]"),
        ({"stop": ["x", 3]}, openai.BadRequestError, "stop", "valid string"),
        ({"stop": [""]}, openai.BadRequestError, None, "a stop text is empty"),
    ],
)
def test_what_is_wrong_is_named(
    client: OpenAI, body: dict[str, Any], status: type, param: str | None, said: str
) -> None:
    for stream in (False, True):
        with pytest.raises(status) as caught:
            client.completions.create(**{"model": "tiny", "prompt": "1+1=", "stream": stream} | body)
        assert said in caught.value.body["message"] and caught.value.body["param"] == param


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"tool_calls": [{"id": "a"}]}, r"messages\[1\].tool_calls: not served"),
        ({"name": "me"}, r"messages\[1\].name: not served"),
        ({"content": None}, "'content' must be text"),
        ({"content": [{"type": "text", "text": "1"}, {"type": "text", "text": None}]}, r"messages\[1\].content\[1\]"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, r"messages\[1\].content\[0\]: must be"),
        ({"content": [{"type": "text", "text": "1", "weight": 0}]}, r"messages\[1\].content\[0\]: must be"),
        ({"content": ["1"]}, r"messages\[1\].content\[0\]: must be"),
    ],
)
def test_what_of_a_message_is_not_served_is_named(client: OpenAI, message: dict[str, Any], said: str) -> None:
    asked = [MESSAGES[0], {**MESSAGES[1], **message}]
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="tiny", messages=asked, max_tokens=1)


def test_content_in_parts_and_nulls_of_a_message_are_as_its_text(client: OpenAI) -> None:
    def told(**message: Any) -> Any:
        asked: Any = [MESSAGES[0], {**MESSAGES[1], **message}]
        return client.chat.completions.create(model="tiny", messages=asked, max_tokens=9, seed=1).choices[0].message

    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
    assert told(content=parts, tool_calls=None, refusal=None) == told()


def test_neutral_values_of_what_is_not_served_pass(client: OpenAI) -> None:
    neutral = {"echo": False, "best_of": 1, "presence_penalty": 0.0, "logit_bias": {}, "suffix": None, "user": "me"}
    assert client.completions.create(model="tiny", prompt="1+1=", max_tokens=1, **neutral).choices
    nulls: Any = dict.fromkeys(("n", "stream", "logprobs", "echo", "stop", "seed", "stream_options"))
    assert client.completions.create(model="tiny", prompt="1+1=", max_tokens=1, **nulls).choices
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    chat: Any = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=1, response_format={"type": "text"}
    )
    assert chat.usage.prompt_tokens == len("[user]1+1=[assistant]")
    with pytest.raises(openai.BadRequestError, match="messages"):
        image: Any = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": image}])


def test_tokens_queues_and_bodies_have_exceptions_of_their_own(folder: Path) -> None:
    limits = Limits(max_waiting=4, max_body=2000)
    with served(folder, limits=limits, token="secret") as server:
        with pytest.raises(openai.AuthenticationError, match="bearer token"):
            server.openai().models.list()
        client = server.openai(api_key="secret")
        assert client.models.list().data
        with pytest.raises(openai.APIStatusError, match="larger than") as caught:
            client.completions.create(model="tiny", prompt="x" * 3000)
        assert caught.value.status_code == 413
        running = client.completions.create(model="tiny", prompt="1=", n=4, max_tokens=60, stream=True)
        next(iter(running))
        with pytest.raises(openai.RateLimitError, match="max-waiting") as limited:
            client.completions.create(model="tiny", prompt="1=")
        assert limited.value.response.headers["Retry-After"] == "1"
        running.close()
        server.wait_idle()
        server.model.doors["tiny"].release("the weights of version 3 arrived in part")
        with pytest.raises(openai.InternalServerError, match="arrived in part") as refused:
            client.completions.create(model="tiny", prompt="1=")
        assert refused.value.status_code == 503


def test_a_stream_whose_engine_fails_ends_with_an_error(folder: Path) -> None:
    with served(folder) as server:
        asked: dict[str, Any] = {"prompt": "1=", "n": 64, "max_tokens": 60, "temperature": 3}  # more than one stretch
        chunks = iter(server.openai().completions.create(model="tiny", stream=True, **asked))
        next(chunks)

        def broken(told: object) -> None:
            raise RuntimeError("the card fell off")

        server.model.doors["tiny"].engines[0]._decoder.stretch = broken  # type: ignore[assignment,method-assign]
        with pytest.raises(openai.APIError, match="the card fell off"):
            list(chunks)


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_likeliest_are_all_there_and_the_drawn_one_by_its_name(server: Served, as_ids: bool) -> None:
    top_ids = np.array([[5, 200, 201], [200, 201, 6], [201, 6, 200]], np.int32)  # bytes that are no text alone
    tops = np.log(np.array([[0.5, 0.3, 0.1]] * 3, np.float32))
    ids, zeros = [200, 201, 6], np.zeros(3, np.int32)
    sample = Sample(0, 0, np.array(ids, np.int32), tops[:, 1], zeros, "stop", top_ids=top_ids, top_logprobs=tops)
    request = CompletionRequest(model="tiny", prompt="1", logprobs=3, return_tokens_as_token_ids=as_ids)
    pieces = Pieces(server.model.prompting.template.decode).add(ids, last=True)
    part = Part(0, 0, 0, ids, tops[:, 1].tolist(), [0] * 3, "".join(pieces), pieces, sample)
    told = Reply(request, request.job(server.model), server.model).whole([(0, part)])["choices"][0]["logprobs"]
    for token, drawn, best, logprobs, named in zip(
        told["tokens"], ids, top_ids, tops, told["top_logprobs"], strict=True
    ):
        assert sorted(named.values()) == pytest.approx(sorted(logprobs.tolist()))
        assert named[token] == pytest.approx(logprobs[best.tolist().index(drawn)])
        if as_ids:
            assert list(named) == [f"token_id:{one}" for one in best]
