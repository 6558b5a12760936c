"""The engines of the contract, each made as a run makes it, over the same tiny models with the same settings."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dapo.config import Config, build_config, nested
from dapo.data.template import PromptTemplate
from dapo.model.loading import load_model, load_tokenizer
from dapo.observe.progress import QuietListener
from dapo.orchestrator.inputs import RunOverrides, make_engine
from dapo.records import Group, Prompt, Reward, Sample
from dapo.rollout.engine import Request, hand_over
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.paged import build
from dapo.serve.model import prepare_served
from dapo.training.mismatch import measure_mismatch
from dapo.training.packing import pack
from dapo.training.policy import Policy
from helpers import random_model
from served import ServeProcess, save_byte_model

T = TypeVar("T")
# heads that vLLM's kernels for CPUs have
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
VOCABULARY, PROMPT, RESPONSE, SAMPLES = 258, 200, 40, 16
STOPS = (1, *range(20, 240, 11))  # so that about half of the responses end with one
TOKEN = "a-token"
SETTINGS = {
    "model.compute_dtype": "float32",
    "data.template": "plain",
    "data.max_prompt_length": PROMPT,
    "evaluation.max_response_length": RESPONSE,
    "rollout.max_response_length": RESPONSE,
    "rollout.max_concurrent_samples": SAMPLES,
    "rollout.stop_token_ids": list(STOPS[1:]),
}


@functools.cache
def model_of(seed: int) -> Any:
    """The plain model; seed 0 is that of the folder."""
    return random_model("qwen2", seed, vocab_size=VOCABULARY, **SHAPE)


@dataclass
class Subject:
    """An engine, the loop that it lives in, and the model whose weights it was given last."""

    kind: str
    engine: Any
    template: PromptTemplate
    runner: asyncio.Runner
    seed: int = 0
    closed: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 60))

    def request(self, prompt: Sequence[int], seeds: Sequence[int], sampling: Any, **more: Any) -> Request:
        """With an id of its own."""
        return Request(next(self.numbers), tuple(prompt), tuple(seeds), sampling, **more)

    async def collect(self, *requests: Request) -> dict[tuple[int, int], Sample]:
        found: dict[tuple[int, int], Sample] = {}
        async for sample in self.engine.generate(requests):
            assert found.setdefault((sample.request_id, sample.index), sample) is sample, "came twice"
        return found

    def samples(self, request: Request) -> list[Sample]:
        """Of one request, in the order of its seeds."""
        found = self.run(self.collect(request))
        assert sorted(found) == [(request.id, index) for index in range(len(request.seeds))]
        return [found[key] for key in sorted(found)]

    async def give(
        self, seed: int, spoil: Callable[[list[Any]], Iterable[Any]] = list, version: int | None = None
    ) -> None:
        """New weights; ``spoil`` changes what is sent of them."""
        tensors = [(name, parameter.detach()) for name, parameter in model_of(seed).named_parameters()]
        await hand_over(self.engine, self.engine.version + 1 if version is None else version, spoil(tensors))
        self.seed = seed

    def differs_from_trainer(self, request: Request, samples: Sequence[Sample]) -> float:
        """Largest difference of log-probabilities to the trainer's float32 forward pass, in nats."""
        told = tuple(replace(s, reward=Reward(None, 0.0), advantage=0.0) for s in samples)
        batch = pack([Group(0, Prompt(0, "", request.prompt_ids), told)])
        policy = Policy(load_model(copy.deepcopy(model_of(self.seed))), request.sampling.temperature, 4096)
        found = measure_mismatch(batch, policy.logprobs(batch), version=self.engine.version)
        assert found.tokens == sum(s.length for s in samples), "some tokens are of another version"
        return found.maximum

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.run(self.engine.close())


async def events(stream: AsyncIterator[T]) -> list[T]:
    return [event async for event in stream]


def _config(folder: Path, **changes: Any) -> Config:
    changed = {f"rollout.{key}": value for key, value in changes.items()} | {"algorithm.overlong_buffer.enable": False}
    return build_config(nested({"model.path": str(folder)} | SETTINGS | changed))


def _made(config: Config) -> tuple[Any, PromptTemplate]:
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(config.data, tokenizer, VOCABULARY)
    return make_engine(config, RunOverrides(), load_model(config.model.path), STOPS, template, (), 0), template


def native(folder: Path, stack: ExitStack) -> tuple[Any, PromptTemplate]:
    return _made(_config(folder))


def paged(folder: Path, stack: ExitStack) -> tuple[Any, PromptTemplate]:
    """What the native engine is on a GPU, computed here."""
    engine, template = _made(_config(folder))
    assert isinstance(engine, NativeEngine)
    sizes = {"max_sequence_tokens": PROMPT + RESPONSE, "max_concurrent_samples": SAMPLES}
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(build, "STRETCH", 3)  # otherwise a sample is one stretch
    engine._decoder = build.paged_decoder(engine._decoder._runner.model, STOPS, decode=template.decode, **sizes)  # type: ignore
    return engine, template


def process(folder: Path, stack: ExitStack) -> tuple[Any, PromptTemplate]:
    """What `dapo serve` has on a GPU."""
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    served = prepare_served(str(folder), QuietListener(), overrides=settings, apart=True)()
    return served.doors[served.name].engines[0], served.prompting.template


def openai(folder: Path, stack: ExitStack) -> tuple[Any, PromptTemplate]:
    """Over a `dapo serve` in a process of its own."""
    words = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    server = stack.enter_context(ServeProcess(str(folder), *words, token=TOKEN))
    stack.enter_context(pytest.MonkeyPatch.context()).setenv("SECRET", TOKEN)
    remote = {"engine": "openai", "url": server.url, "token_env": "SECRET", "give_up_after_s": 1.0}
    return _made(_config(folder, in_flight="restart", **remote))


def vllm(folder: Path, stack: ExitStack) -> tuple[Any, PromptTemplate]:
    return _made(_config(folder, engine="vllm"))


async def ray(folder: Path, stack: ExitStack) -> tuple[Any, PromptTemplate]:
    """Two native engines in processes of Ray's."""
    from ray_cases import fleet_of

    template = PromptTemplate((config := _config(folder)).data, load_tokenizer(str(folder)), VOCABULARY)
    return await fleet_of(config, template, STOPS), template


MAKERS = {"native": native, "paged": paged, "process": process, "openai": openai, "ray": ray, "vllm": vllm}


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Subject]:
    """An engine with the weights of seed 0 in use."""
    with ExitStack() as stack, asyncio.Runner() as runner:
        made = MAKERS[kind](folder, stack)
        engine, template = runner.run(made) if asyncio.iscoroutine(made) else made
        subject = Subject(kind, engine, template, runner)
        try:
            subject.run(subject.give(0))
            yield subject
        finally:
            subject.close()


def save(folder: Path) -> Path:
    return save_byte_model(folder, **SHAPE)
