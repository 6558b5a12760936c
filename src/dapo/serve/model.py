"""A model that is served: engines by name, and what stands before them.

Consumes prompts in tokens (:class:`Job`), produces the parts of their samples as they are written. Waits for a free
engine never: engines batch what they are given; what is more than may wait is refused. While weights change, new
requests wait (:meth:`ServedModel.hold`).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import load_config
from dapo.config.plan import existing_recipe
from dapo.config.reading import with_values
from dapo.errors import ConfigError, ModelError
from dapo.evaluation.evaluate import evaluation_sampling
from dapo.inference.model import (
    ONE_EACH,
    Prompting,
    engine_for,
    load_prompting,
    load_weights,
    room_for,
    settings_for,
)
from dapo.inference.stream import Part, written
from dapo.observe.progress import Listener
from dapo.rollout.engine import EngineError, Request, Sampling
from dapo.rollout.seeds import sample_seed

if TYPE_CHECKING:
    from dapo.rollout.native.engine import NativeEngine  # loads torch


class Refused(Exception):
    """A request is turned away. ``status``: of HTTP; ``param``: what of the request is wrong, if that is it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Restarted(Refused):
    """Other weights came, under which the request is to begin again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is more is refused. ``max_waiting``: samples that wait or are written, of all requests; ``max_choices``: of
    one request; ``max_body``: bytes of one request; ``seconds``: from its arrival to its end."""

    max_waiting: int = 1024
    max_choices: int = 128
    max_body: int = 16 * 2**20
    seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """Samples of several prompts (token ids). ``seeds``: of each prompt one for each sample, as many for all.
    ``pieces``: as :func:`~dapo.inference.stream.written` has it. ``hidden``: whether the text ends at a stop text."""

    model: str
    prompts: Sequence[tuple[int, ...]]
    seeds: Sequence[tuple[int, ...]]
    sampling: Sampling
    drafts: bool = False
    pieces: bool = False
    hidden: bool = True

    @property
    def samples(self) -> int:
        return sum(map(len, self.seeds))


@dataclass(slots=True, eq=False)
class ServedModel:
    """``engines``: by the names that requests give, the model's own first, then those of adapters. ``context``: tokens
    of a prompt and its response together. ``longest_token``: characters of the longest one there is."""

    name: str
    prompting: Prompting
    engines: Mapping[str, Sequence[NativeEngine]]
    context: int
    stop_ids: tuple[int, ...]
    longest_token: int
    limits: Limits = field(default_factory=Limits)
    waiting: int = 0
    """Samples that wait or are written."""
    refusal: str | None = None
    """Why no request is served; None: they are."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _running: dict[int, NativeEngine] = field(default_factory=dict)  # requests in engines

    def __post_init__(self) -> None:
        self._open.set()

    @property
    def default_sampling(self) -> Sampling:
        """Of requests that do not say otherwise: that of ``dapo generate``, at temperature 1 if none is named."""
        return evaluation_sampling(self.prompting.config)

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        return self.engines[self.name][0].version

    def seeds(self, prompts: int, each: int, seed: int | None) -> list[tuple[int, ...]]:
        """Seeds for ``each`` samples of every prompt: those of ``dapo generate --seed``; None: new ones."""
        start = secrets.randbits(63) if seed is None else seed
        return [tuple(sample_seed(start, place, 0, index) for index in range(each)) for place in range(prompts)]

    async def submit(self, job: Job) -> AsyncGenerator[tuple[int, Part]]:
        """The parts of all samples, each with the number of its sample in the job. To be closed, which frees what they
        hold. Raises Refused: at the first step, and later if the time is over; EngineError: the engine failed;
        Restarted: see :meth:`restart`."""
        left, end = job.samples, asyncio.get_running_loop().time() + self.limits.seconds
        requests = [
            Request(next(self._ids), prompt, seeds, job.sampling)
            for prompt, seeds in zip(job.prompts, job.seeds, strict=True)
        ]

        def done() -> None:  # a client that does not read holds no update
            for request in requests:
                self._running.pop(request.id, None)

        with self.reserved(job.model, job.samples):
            try:
                self._check(job)
                async with asyncio.timeout_at(end):
                    await self._open.wait()
                if self.refusal is not None:
                    raise Refused(503, self.refusal)
                engine = min(self.engines[job.model], key=list(self._running.values()).count)
                self._running |= {request.id: engine for request in requests}
                hidden, template = job.sampling.stop if job.hidden else (), self.prompting.template
                how = {"drafts": job.drafts, "pieces": job.pieces}
                parts = written(engine, template, requests, **how, hidden=hidden, done=done)
                async with aclosing(parts):
                    while left:
                        async with asyncio.timeout_at(end):  # of each step: another task may take the next one
                            part = await anext(parts, None)
                        if part is None:  # cancelled
                            raise Restarted(503, "new weights came while this was written; ask again")
                        left -= part.sample is not None
                        yield (part.request_id - requests[0].id) * len(job.seeds[0]) + part.index, part
            except EngineError as error:
                if self._open.is_set():
                    raise
                raise Restarted(503, str(error)) from None  # it met weights that had come in part
            except TimeoutError:
                raise Refused(504, f"not done after {self.limits.seconds:g} s (--timeout-s), and given up") from None
            finally:
                done()

    @contextmanager
    def reserved(self, model: str, samples: int) -> Iterator[None]:
        """Have ``samples`` count as waiting. Raises Refused: they cannot be served, or not now."""
        if model not in self.engines:
            known = ", ".join(self.engines)
            raise Refused(404, f"model {model!r}: not served here; there is {known}", "model", "model_not_found")
        if self.refusal is not None:
            raise Refused(503, self.refusal)
        if samples > self.limits.max_choices:
            most = f"{samples} samples in one request; this server takes {self.limits.max_choices} (--max-choices)"
            raise Refused(400, most, "n")
        if self.waiting + samples > self.limits.max_waiting:
            most = f"{self.waiting} samples wait; with {samples} more it would be more than {self.limits.max_waiting}"
            raise Refused(429, f"{most} (--max-waiting)")
        self.waiting += samples
        try:
            yield
        finally:
            self.waiting -= samples

    def check_text(self, characters: int, param: str) -> None:
        """Before one is made tokens, which takes a while. Raises Refused: it cannot fit."""
        if characters > (most := self.context * self.longest_token):
            text = f"{param}: {characters} characters; {self.context} tokens of this model have {most} at most"
            raise Refused(400, text, param)

    def _check(self, job: Job) -> None:
        """Raises Refused: an engine cannot serve it."""
        for place, (prompt, seeds) in enumerate(zip(job.prompts, job.seeds, strict=True)):
            try:
                self.engines[job.model][0].check(Request(0, prompt, seeds, job.sampling))
            except EngineError as error:
                which = f"prompt {place + 1}: " if len(job.prompts) > 1 else ""
                raise Refused(400, which + str(error).removeprefix("request 0: ")) from None

    # -- while weights change ----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on requests wait before they get to an engine, until :meth:`release`."""
        self._open.clear()

    def release(self, refusal: str | None = None) -> None:
        """Let requests go on, or turn them all away with this reason."""
        self.refusal = refusal
        self._open.set()

    async def drained(self) -> None:
        """Returns when no engine has a request. To be called while they are held."""
        while self._running:
            await asyncio.sleep(0.01)

    async def restart(self) -> None:
        """End the requests in engines with :class:`Restarted`: whose client has seen nothing begin again by themselves,
        the others are an error. To be called while requests are held."""
        for _ in range(3):
            await asyncio.sleep(0)  # what passed before the hold is in its engine then
        for engine in {id(engine): engine for engine in self._running.values()}.values():
            await engine.cancel(set(self._running))

    async def close(self) -> None:
        for engine in itertools.chain(*self.engines.values()):
            await engine.close()


def load_served(
    model: str,
    listener: Listener,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    adapters: Mapping[str, str] | None = None,
    copies: int = 1,
    limits: Limits | None = None,
) -> ServedModel:
    """Load what is served.

    Args:
        model: a recipe (its model by its settings), a run or checkpoint folder, a folder in Hugging Face layout, or a
            name on the hub.
        name: that requests give; None: the last part of the model's path.
        adapters: folders of LoRA adapters on that model, by the names that requests give.
        copies: engines of each; on several GPUs one on each.

    Raises:
        UserError: a setting, the model or an adapter is wrong.
    """
    recipe = existing_recipe(model)
    is_recipe = recipe.suffix in (".yaml", ".yml")
    path = load_config(recipe).model.path if is_recipe else model
    _, config = settings_for(path, {}, ONE_EACH, recipe=recipe if is_recipe else None, overrides=overrides)
    if "temperature" not in config.evaluation.model_fields_set:  # what clients of this API expect
        config = with_values(config, {"evaluation.temperature": 1.0})
    listener.phase("loading the model")
    prompting = load_prompting(config)
    longest, limit = room_for(config)
    weights, stop_ids = load_weights(prompting, listener)
    name = name or Path(path).name
    if name in (adapters or {}):
        raise ConfigError(f"--adapter {name}: the model has this name; give it another one with --name")
    engines: dict[str, list[NativeEngine]] = {}
    for one, adapter in {name: None, **(adapters or {})}.items():
        twin = weights if adapter is None else _with_adapter(weights, adapter, prompting)
        models = [twin, *(_copied(twin, number) for number in range(1, copies))]
        engines[one] = [engine_for(prompting, each, stop_ids, longest + limit, 2**20) for each in models]
    longest_token = max(map(len, prompting.tokenizer.get_vocab()))
    return ServedModel(name, prompting, engines, longest + limit, stop_ids, longest_token, limits or Limits())


def _with_adapter(model: Any, folder: str, prompting: Prompting) -> Any:
    """``model`` with an adapter on it; the weights below are the same ones in both.
    Raises ModelError: the folder holds none, or it is not for this model."""
    from dapo.model.adapters import has_adapter, put_on, require_adapter
    from dapo.model.loading import copy_model

    if has_adapter(model):
        raise ModelError(f"adapter {folder}: the served model has an adapter itself; serve their base, and name both")
    if next(model.parameters()).device.type != "cpu" and prompting.config.rollout.cache_gib is None:
        raise ConfigError(
            "--adapter: on a GPU each adapter has a cache of its own; say how large each may be, such as "
            "--set rollout.cache_gib=8"
        )
    adapter = require_adapter(folder)
    served = prompting.config.model.path
    if os.path.realpath(adapter.base) != os.path.realpath(served) and adapter.base != served:
        raise ModelError(f"adapter {folder}: its base is {adapter.base}, and {served} is served")
    return put_on(copy_model(model), adapter, next(model.parameters()).dtype).requires_grad_(False).eval()


def _copied(model: Any, number: int) -> Any:
    """A model with weights of its own, on another GPU if there are several."""
    import torch

    twin = copy.deepcopy(model)
    several = torch.cuda.device_count() > 1 and next(model.parameters()).device.type == "cuda"
    return twin.to(f"cuda:{number % torch.cuda.device_count()}") if several else twin
