"""OpenAI's API for the agents of a run: each episode has an address of its own, on this machine only.

Consumes chat completions, which it has the episode answer, so that each token is in its trace. A request to an episode
that is over is refused; one whose client has gone ends. Sampling is the run's: a request for another one is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dapo.environments.calls import Message
from dapo.environments.episode import Answer, Episode, Over
from dapo.errors import DataError
from dapo.util.files import parse_json
from dapo.util.gate import unless_gone
from dapo.util.serving import LOCAL, OwnSignals, listening_socket

_LARGEST = 2**26
_TAKEN = {
    *("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),  # of no effect
}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"}
_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "top_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "stop": ([],)},
    **{"response_format": ({"type": "text"},), "modalities": (["text"],), "logit_bias": ({},), "functions": ([],)},
    **{"logprobs": (False,), "top_logprobs": (0,), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True,)},
}
"""What is refused, but for these values, which say what is done anyway."""


class _Refused(Exception):
    pass


class Endpoint:
    """Serves while its context is entered."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._episodes: dict[str, Episode] = {}
        self._raw: dict[str, tuple[Episode, str]] = {}
        """Answers with calls, by the id of the first: whose they are, and the text that the model wrote."""
        route = Route("/{key}/v1/chat/completions", self._answer, methods=["POST"])
        self._server = OwnSignals(Starlette(routes=[route]), lifespan="off")

    async def __aenter__(self) -> Endpoint:
        listening = listening_socket(LOCAL, [0])
        self._url = f"http://{LOCAL}:{listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)

    @contextlib.contextmanager
    def address(self, episode: Episode) -> Iterator[str]:
        """Inside, the episode answers at this ``base_url``."""
        key = secrets.token_urlsafe(24)
        self._episodes[key] = episode
        try:
            yield f"{self._url}/{key}/v1"
        finally:
            del self._episodes[key]
            self._raw = {name: raw for name, raw in self._raw.items() if raw[0] is not episode}

    async def _answer(self, request: Request) -> Response:
        episode = self._episodes.get(request.path_params["key"])
        try:
            if episode is None:
                raise Over("done")
            body = await _body(request)
            messages = [self._as_it_was(message) for message in _checked(body, self._temperature)]
            limits = body.get("max_completion_tokens"), body.get("max_tokens")
            most = next((limit for limit in limits if limit is not None), None)
            if most is not None and (type(most) is not int or most < 1):
                raise _Refused(f"max_tokens: must be a whole number from 1 on; it is {most!r}")
            tools, may_call = _listed("tools", body.get("tools")), body.get("tool_choice") != "none"
            answer = await unless_gone(request, episode.complete(messages, tools, most, may_call=may_call))
        except Over as error:
            return _error(410, f"this episode is over: {error}")
        except (_Refused, DataError) as error:
            return _error(400, str(error))
        except Exception as error:  # of the engine: the episode has it, and ends the run
            return _error(503, f"the model could not answer: {type(error).__name__}")
        return _reply(self._message(episode, answer), answer, str(body.get("model", "")), bool(body.get("stream")))

    def _message(self, episode: Episode, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in answer.calls
            ]
            self._raw[message["tool_calls"][0]["id"]] = episode, answer.raw
        return message

    def _as_it_was(self, message: dict[str, Any]) -> Message:
        """An answer with calls gets the text back that the model has written."""
        calls = message.get("tool_calls")
        if calls and (found := self._raw.get(calls[0]["id"])) is not None:
            return {"role": "assistant", "content": found[1]}
        return message


async def _body(request: Request) -> dict[str, Any]:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _LARGEST:
            raise _Refused(f"the request has more than {_LARGEST:,} bytes")
    try:
        body = parse_json(bytes(content))
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _Refused("the body must be a JSON object")
    return body


def _checked(body: dict[str, Any], temperature: float) -> list[dict[str, Any]]:
    """The messages. Raises _Refused: something is asked for that is not done."""
    as_it_is = _AS_IT_IS | {"temperature": (temperature,)}
    for name, value in body.items():
        if value is None or name in _TAKEN or value in as_it_is.get(name, ()):
            continue
        run = f"sampling is that of the run (temperature {temperature:g}, nothing cut)"
        raise _Refused(f"{name}: {run if name in _SAMPLING else 'not served to agents'}; leave it out")
    if not (messages := _listed("messages", body.get("messages"))):
        raise _Refused("messages: there are none")
    return [_plain(place, dict(one)) for place, one in enumerate(messages)]


def _listed(where: str, value: Any) -> list[dict[str, Any]]:
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise _Refused(f"{where}: must be a list of objects")
    return value or []


def _plain(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """Content in parts as one text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _Refused(f"messages[{place}].content: only text is served")
        content = "".join(map(str, parts))
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise _Refused(f"messages[{place}]: must have a role, and text as content")
    if not all(isinstance(one.get("id"), str) for one in _listed("tool_calls", message.get("tool_calls"))):
        raise _Refused(f"messages[{place}].tool_calls: each must have an id")
    return {key: value for key, value in message.items() if value is not None} | {"content": content or ""}


def _reply(message: dict[str, Any], answer: Answer, model: str, stream: bool) -> Response:
    reason = {"tool_calls": "tool_calls", "length": "length"}.get(answer.stop, "stop")
    usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens}
    head: dict[str, Any] = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
    usage["total_tokens"], head["turns_left"] = sum(usage.values()), answer.turns_left
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
    calls = message.get("tool_calls", ())
    delta = message | ({"tool_calls": [call | {"index": i} for i, call in enumerate(calls)]} if calls else {})
    chunk = head | {"object": "chat.completion.chunk", "usage": usage}  # in one piece: it is said when it is whole
    chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
    return Response(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)
