"""Requests and replies as OpenAI's API has them, with the extensions that vLLM has (``return_token_ids``,
``stop_token_ids``) and our own (``seeds``, ``versions``, ``version``, ``update``).

What would change a response and is not served is refused by name, never ignored.
"""

from __future__ import annotations

import itertools
import operator
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dapo.data.rows import BadRow, Keys, Messages, check_row
from dapo.errors import DataError
from dapo.evaluation.evaluate import evaluation_sampling
from dapo.inference.stream import Part, likeliest
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.seeds import sample_seed
from dapo.serve.door import Refused
from dapo.serve.model import Job, ServedModel

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MOST_STOPS = 16
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_T = TypeVar("_T")


Listed = Annotated[list[_T], Field(fail_fast=True)]
"""A million bad items are one error."""
_PROMPT, _MESSAGES = Keys("prompt", "answer", None), Keys("messages", "answer", None)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


_NOT_SERVED: Mapping[str, Sequence[Any]] = {
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Parameters of OpenAI's that are refused, but for these values, which say what is done anyway."""
_WITHOUT_EFFECT = {*("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")}


class SamplingRequest(BaseModel):
    """What both kinds of requests have. None: as the server's settings say."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str
    n: int = Field(1, ge=1)
    best_of: int | None = Field(None, ge=1)
    ranker: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    seed: Seed | None = None
    seeds: Listed[Annotated[int, Field(ge=0, lt=2**64)]] | None = None
    metadata: Any = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, body: Any) -> Any:
        def says(name: str, value: Any) -> bool:
            return not (value is None or name in _WITHOUT_EFFECT or value in _NOT_SERVED.get(name, ()))

        return {k: v for k, v in body.items() if says(k, v)} if isinstance(body, dict) else body

    @property
    def likely(self) -> int | None:
        """How many of the likeliest tokens to tell; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def each(self) -> int:
        """Samples of every prompt: those that a ranker chooses from, or all that are asked for."""
        return self.best_of or self.n

    @property
    def given(self) -> list[Any]:
        """The prompts as they came; a chat is one."""
        return [self]

    def rankable(self, served: ServedModel) -> list[str | Messages]:
        """The prompts as a ranker reads them."""
        decode = served.prompting.template.decode
        return [one if isinstance(one, str) else decode(one) for one in self.given]

    def prompts(self, served: ServedModel) -> list[tuple[int, ...]]:
        """Token ids. Raises Refused: there are none, or the template refuses the messages."""
        raise NotImplementedError

    def job(self, served: ServedModel) -> Job:
        """What an engine is to do. Reads texts, which takes a while. Raises Refused: a parameter is wrong."""
        self._check(served)
        prompts = self.prompts(served)
        sampling = self._sampling(served, max(map(len, prompts)))
        seeds, n = self._seeds(len(prompts)), self.each
        return Job(
            self.model,
            [Request(k, prompt, tuple(seeds[k * n : k * n + n]), sampling) for k, prompt in enumerate(prompts)],
            # the likeliest tokens come with finished samples only
            drafts=self.stream and not self.likely,
            pieces=self.likely is not None and not self.return_tokens_as_token_ids,
            hidden=self.stop is not None,
        )

    def _seeds(self, prompts: int) -> list[int]:
        """For all samples of every prompt: those that are given, or of ``dapo generate --seed``, or new ones."""
        if self.seeds is None:
            start = secrets.randbits(63) if self.seed is None else self.seed
            return [sample_seed(start, place, 0, index) for place in range(prompts) for index in range(self.each)]
        if len(self.seeds) != prompts * self.each:
            many = f"there are {len(self.seeds)}, for {prompts} prompts with {self.each} choices each"
            raise Refused(400, f"seeds: {many}", "seeds")
        return self.seeds

    def _sampling(self, served: ServedModel, longest: int) -> Sampling:
        default = evaluation_sampling(served.prompting.config)
        stop = default.stop if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p")}
        room = max(served.context - longest, 1)  # none left: the engine says so
        sampling = Sampling(
            max_tokens=self.max_tokens or min(default.max_tokens, room),
            top_k=default.top_k if self.top_k is None else max(self.top_k, 0),  # vLLM's -1 is off
            stop=stop,
            top_logprobs=self.likely or 0,
            **{name: getattr(default, name) if value is None else value for name, value in given.items()},
        )
        if self.best_of and not sampling.temperature:
            raise Refused(400, "temperature: at 0 all best_of samples are the same; give one above 0", "temperature")
        return sampling

    def _check(self, served: ServedModel) -> None:
        for name in self.model_extra or ():
            what = "not served" if name in _NOT_SERVED else "not a parameter that this server knows"
            raise Refused(400, f"{name}: {what}; leave it out", name)
        if not isinstance(self.stop, str) and len(self.stop or ()) > _MOST_STOPS:
            raise Refused(400, f"stop: {len(self.stop or ())} texts; this server takes {_MOST_STOPS}", "stop")
        if unknown := set(self.stop_token_ids or ()) - set(served.stop_ids):
            raise Refused(
                400,
                f"stop_token_ids: {sorted(unknown)}: stop tokens are set when the server starts, with --set "
                f"rollout.stop_token_ids=[...]; it stops at {sorted(served.stop_ids)}",
                "stop_token_ids",
            )


class CompletionRequest(SamplingRequest):
    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def likely(self) -> int | None:
        return self.logprobs

    @property
    def given(self) -> list[Any]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if one else list(self.prompt)

    def prompts(self, served: ServedModel) -> list[tuple[int, ...]]:
        if not self.given:
            raise Refused(400, "prompt: there is none", "prompt")
        for text in filter(lambda one: isinstance(one, str), self.given):
            served.check_text(len(text), "prompt")
        encode = served.prompting.template.encode_text
        try:
            return [
                tuple(encode(str(check_row({"prompt": one}, _PROMPT, "").prompt)) if isinstance(one, str) else one)
                for one in self.given
            ]
        except (BadRow, DataError) as error:
            raise Refused(400, f"prompt: {error}", "prompt") from None


class ChatRequest(SamplingRequest):
    messages: Listed[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def rankable(self, served: ServedModel) -> list[str | Messages]:
        return [tuple(_message(f"messages[{place}]", one) for place, one in enumerate(self.messages))]

    def prompts(self, served: ServedModel) -> list[tuple[int, ...]]:
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        messages = [_message(f"messages[{place}]", one) for place, one in enumerate(self.messages)]
        served.check_text(sum(len(str(one.get("content"))) for one in messages), "messages")
        try:
            return [tuple(served.prompting.template.encode(check_row({"messages": messages}, _MESSAGES, "").prompt))]
        except (BadRow, DataError) as error:
            raise Refused(400, f"messages: {error}", "messages") from None


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """One of text, whose content may come in parts. Raises Refused: it holds something else."""
    given = {key: value for key, value in message.items() if value is not None}
    if other := given.keys() - {"role", "content"}:
        raise Refused(400, f"{where}.{min(other)}: not served; leave it out", "messages")
    if isinstance(parts := given.get("content"), list):
        for place, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str) or part != {"type": "text", "text": text}:
                raise Refused(400, f'{where}.content[{place}]: must be {{"type": "text", "text": "..."}}', "messages")
        given["content"] = "".join(part["text"] for part in parts)
    return given


# --- replies ----------------------------------------------------------------------------------------------------------


class Reply:
    """What a client is told, in whole or in chunks of a stream, of the samples of one job."""

    def __init__(self, request: SamplingRequest, job: Job, served: ServedModel) -> None:
        self._request, self._job, self._template = request, job, served.prompting.template
        self._door = served.doors[job.model]
        self._chat = isinstance(request, ChatRequest)
        name, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self.id, self.first = f"{name}-{secrets.token_hex(12)}", ""
        self._head = {
            "id": self.id,
            "object": f"{kind}.chunk" if self._chat and request.stream else kind,
            "created": int(time.time()),
            "model": job.model,
        }
        self._offsets: dict[int, int] = {}  # by choice that was begun: characters of its tokens so far
        self._left = sum(len(one.seeds) for one in job.requests)
        self.completion_tokens = self.version = 0
        """``version``: the newest that a token was sampled under. ``first``: text of the first choice so far."""

    def whole(self, parts: Iterable[tuple[int, Part]]) -> dict[str, Any]:
        """``parts``: one of each sample."""
        choices = [self._choice(*one) for one in sorted(parts, key=operator.itemgetter(0))]
        return self._message(choices) | self._usage()

    def chunk(self, number: int, part: Part) -> dict[str, Any] | None:
        """None: there is nothing to tell."""
        new, request = number not in self._offsets, self._request
        choice = self._choice(number, part)
        tells = new or part.text or part.sample or request.return_token_ids or request.likely is not None
        return self._message([choice]) if tells else None

    def last_chunk(self) -> dict[str, Any] | None:
        """What follows all others, if it is asked for; None: there is nothing to tell, or not yet."""
        options = self._request.stream_options
        return self._message([]) | self._usage() if self.ended and options and options.include_usage else None

    @property
    def ended(self) -> bool:
        return self._left == 0

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._job.prompt_tokens, self.completion_tokens
        total = prompt + completion
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}

    def _message(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        update = {"update": self._door.update} if self._door.update else {}
        return {**self._head, "choices": choices, "version": self.version, **update}

    def _choice(self, number: int, part: Part) -> dict[str, Any]:
        request, new, offset = self._request, number not in self._offsets, self._offsets.get(number, 0)
        self._left -= part.sample is not None
        self.completion_tokens += len(part.token_ids)
        self.first += "" if number else part.text
        self.version = max(self.version, *part.versions, 0)
        choice: dict[str, Any] = {"index": number, "finish_reason": part.sample and part.sample.finish_reason}
        if not self._chat:
            choice["text"] = part.text
        elif request.stream:
            choice["delta"] = ({"role": "assistant"} if new else {}) | {"content": part.text}
        else:
            choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
        texts = [f"token_id:{i}" for i in part.token_ids] if request.return_tokens_as_token_ids else part.pieces
        choice["logprobs"] = None if request.likely is None else self._logprobs(texts, part, offset)
        self._offsets[number] = offset + sum(map(len, texts))
        if request.return_token_ids:
            choice |= {"token_ids": part.token_ids, "versions": part.versions}
            choice |= {"prompt_token_ids": self._job.requests[number // request.n].prompt_ids} if new else {}
        return choice

    def _logprobs(self, texts: Sequence[str], part: Part, offset: int) -> dict[str, Any]:
        tops: list[dict[str, float]] = [{} for _ in texts]
        if part.sample is not None and self._request.likely:
            as_ids, every = self._request.return_tokens_as_token_ids, likeliest(self._template, part.sample)
            for names, told, ((own, *_), top) in zip(tops, texts, every, strict=True):
                for i, text, logprob in top:  # by its id where another one has its text, so that none is lost
                    other = f"token_id:{i}" if as_ids or text == told or text in names else text
                    names[told if i == own else other] = logprob
        drawn = list(zip(texts, part.logprobs, tops, strict=True))
        if self._chat:
            return {
                "content": [_token(t, p) | {"top_logprobs": [_token(*o) for o in top.items()]} for t, p, top in drawn]
            }
        return {
            "tokens": texts,
            "token_logprobs": part.logprobs,
            "top_logprobs": [top | {token: logprob} for token, logprob, top in drawn],
            "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
        }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
