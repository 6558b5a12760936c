"""A model that is served: engines by name, and what stands before them.

Consumes prompts in tokens (:class:`Job`), produces the parts of their samples as they are written. Waits for a free
engine never: engines batch what they are given; what is more than may wait is refused. While weights of a model change,
new requests to it wait (:class:`Door`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dapo.config import Config, load_config
from dapo.config.plan import existing_recipe
from dapo.config.reading import with_values
from dapo.errors import ConfigError, ModelError
from dapo.inference.model import ONE_EACH, Prompting, engine_for, load_prompting, load_weights, room_for, settings_for
from dapo.inference.stream import Part, written
from dapo.model.adapters import require_adapter
from dapo.model.loading import embedding_rows
from dapo.model.placement import engine_device
from dapo.observe.progress import Listener
from dapo.rollout.engine import EngineError, Request
from dapo.rollout.process import EngineProcess, ProcessEngine
from dapo.rollout.vllm.options import find_vllm
from dapo.serve.door import Door, Refused, Restarted
from dapo.util.gate import Room

if TYPE_CHECKING:
    from dapo.inference.model import LocalEngine

_PART_S = 1e-3  # for each sample, between its parts: several times what it takes to send one
_UNUSED = ("evaluation.data", "evaluation.samples_per_prompt", "data.prompt_key", "data.answer_key", "environment")
_Names = Mapping[str, str | None]
"""Of models, with the folders of their adapters."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is more is refused. ``max_waiting``: samples that wait or are written, of all requests; ``max_body``: bytes
    of one request; ``seconds``: from its arrival to its end, more than runs wait (``rollout.timeout_s``)."""

    max_waiting: int = 1024
    max_body: int = 16 * 2**20
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """Samples of several prompts, of each as many. ``requests``: their ids are given when they are made. ``pieces``: as
    :func:`~dapo.inference.stream.written` has it. ``hidden``: whether the text ends at a stop text."""

    model: str
    requests: Sequence[Request]
    drafts: bool = False
    pieces: bool = False
    hidden: bool = True

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


@dataclass(slots=True, eq=False)
class ServedModel:
    """``doors``: by the names that requests give, the model's own first, then those of adapters. ``context``: tokens
    of a prompt and its response together. ``longest_token``: characters of the longest one there is."""

    name: str
    prompting: Prompting
    doors: Mapping[str, Door]
    context: int
    stop_ids: tuple[int, ...]
    longest_token: int
    limits: Limits = field(default_factory=Limits)
    room: Room = field(init=False)
    """For samples that wait or are written."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.room = Room(self.limits.max_waiting, "samples")

    @property
    def refusal(self) -> str | None:
        """Why nothing is served; None: something is."""
        every = [door.refusal for door in self.doors.values()]
        return None if None in every else every[0]

    @property
    def ended(self) -> str | None:
        """That an engine has ended, and why; None: they all work."""
        return next(filter(None, (door.ended for door in self.doors.values())), None)

    async def submit(self, job: Job) -> AsyncGenerator[tuple[int, Part]]:
        """The parts of all samples, each with the number of its sample in the job. To be closed, which frees what they
        hold. Raises Refused: at the first step, and later if the time is over; EngineError: the engine failed;
        Restarted: other weights came meanwhile."""
        end = asyncio.get_running_loop().time() + self.limits.seconds
        requests = [replace(request, id=next(self._ids)) for request in job.requests]
        each = len(requests[0].seeds)
        left = each * len(requests)

        def done() -> None:  # a client that does not read holds no update
            for request in requests:
                door.running.pop(request.id, None)

        with self.reserved(job.model, left) as door:
            try:
                _check(door.engines[0], job.requests)
                async with asyncio.timeout_at(end):
                    engine = await door.enter(requests)
                hidden, template = requests[0].sampling.stop if job.hidden else (), self.prompting.template
                how: dict[str, Any] = {"drafts": job.drafts, "pieces": job.pieces, "hidden": hidden, "done": done}
                parts = written(engine, template, requests, **how, period=lambda: _PART_S * self.room.waiting)
                async with aclosing(parts):
                    while left:
                        async with asyncio.timeout_at(end):  # of each step: another task may take the next one
                            part = await anext(parts, None)
                        if part is None:  # cancelled
                            raise Restarted(503, "new weights came while this was written; ask again")
                        left -= part.sample is not None
                        yield (part.request_id - requests[0].id) * each + part.index, part
            except EngineError as error:
                if door.is_open:
                    raise
                raise Restarted(503, str(error)) from None  # it met weights that had come in part
            except TimeoutError:
                raise Refused(504, f"not done after {self.limits.seconds:g} s (--timeout-s), and given up") from None
            finally:
                done()

    @contextmanager
    def reserved(self, model: str, samples: int) -> Iterator[Door]:
        """Have ``samples`` count as waiting. Raises Refused: they cannot be served; HTTPException: not now."""
        door, most = self.door(model), self.room.most
        if door.refusal is not None:
            raise Refused(503, door.refusal)
        if samples > most:
            raise Refused(400, f"{samples} samples in one request; this server takes {most} (--max-waiting)", "n")
        with self.room.taken(samples):
            yield door

    def door(self, model: str) -> Door:
        """Raises Refused: there is no model of this name."""
        if model not in self.doors:
            known = ", ".join(self.doors)
            raise Refused(404, f"model {model!r}: not served here; there is {known}", "model", "model_not_found")
        return self.doors[model]

    def check_text(self, characters: int, param: str) -> None:
        """Before one is made tokens, which takes a while. Raises Refused: it cannot fit."""
        if characters > (most := self.context * self.longest_token):
            text = f"{param}: {characters} characters; {self.context} tokens of this model have {most} at most"
            raise Refused(400, text, param)

    def turn_away(self, reason: str) -> None:
        """All who wait for an update that will not come to its end."""
        for door in self.doors.values():
            door.release(reason)

    async def close(self) -> list[str]:
        """What went wrong with it."""
        self.turn_away("the server has ended")
        every = (engine.close() for door in self.doors.values() for engine in door.engines)
        return [str(found) for found in await asyncio.gather(*every, return_exceptions=True) if found]


def _check(engine: LocalEngine, requests: Sequence[Request]) -> None:
    """Raises Refused: an engine cannot serve them."""
    for place, request in enumerate(requests):
        try:
            engine.check(request)
        except EngineError as error:
            which = f"prompt {place + 1}: " if len(requests) > 1 else ""
            raise Refused(400, which + str(error).removeprefix(f"request {request.id}: ")) from None


def prepare_served(
    model: str,
    listener: Listener,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    adapters: Mapping[str, str] | None = None,
    copies: int = 1,
    limits: Limits | None = None,
    apart: bool | None = None,
) -> Callable[[], ServedModel]:
    """Look at all settings. What is returned loads what is served, and raises UserError: the model is wrong.

    Args:
        model: a recipe (its model by its settings), a run or checkpoint folder, a folder in Hugging Face layout, or a
            name on the hub.
        name: that requests give; None: the last part of the model's path.
        adapters: folders of LoRA adapters on that model, by the names that requests give.
        copies: engines of each; on several GPUs one on each.
        apart: whether the engines have processes of their own; None: on GPUs, which HTTP would slow down. vLLM has some
            anyway.

    Raises UserError: a setting is wrong, or there is no such model or adapter."""
    recipe = existing_recipe(model)
    is_recipe = recipe.suffix in (".yaml", ".yml")
    path = load_config(recipe).model.path if is_recipe else model
    name = name or Path(path).name
    if name in (adapters or {}):
        raise ConfigError(f"--adapter {name}: the model has this name; give it another one with --name")
    given: dict[str, Any] = {"recipe": recipe if is_recipe else None, "overrides": overrides}
    _, config = settings_for(path, {}, ONE_EACH, **given, unused=_UNUSED)
    if config.rollout.engine == "vllm":
        find_vllm()
    if "temperature" not in config.evaluation.model_fields_set:  # what clients of this API expect
        config = with_values(config, {"evaluation.temperature": 1.0})
    tokens = sum(room_for(config))
    if config.rollout.engine == "vllm" and copies > 1:
        raise ConfigError("--engines: is for the native engine; with vLLM use rollout.tensor_parallel or more servers")
    for folder in (adapters or {}).values():
        require_adapter(folder)
    if apart is None:
        apart = config.rollout.engine == "native" and engine_device(config).type == "cuda"
    names = {name: None, **(adapters or {})}

    def load() -> ServedModel:
        listener.phase("loading the model")
        prompting = load_prompting(config)
        if apart:
            engines, stop_ids = _in_processes(prompting.config, names, tokens, copies, listener)
        else:
            found = [_load_engines(prompting, names, tokens, listener) for _ in range(copies)]
            engines, stop_ids = [several for several, _ in found], found[0][1]
        prompting.template.ends_with(stop_ids)
        doors = {one: Door([several[one] for several in engines]) for one in names}
        longest_token = max(map(len, prompting.tokenizer.get_vocab()))
        return ServedModel(next(iter(names)), prompting, doors, tokens, stop_ids, longest_token, limits or Limits())

    return load


def _load_engines(
    prompting: Prompting, names: _Names, tokens: int, listener: Listener
) -> tuple[dict[str, LocalEngine], tuple[int, ...]]:
    """Engines by the names that requests give, and the ids that end a response. Their models share the weights below
    the adapters."""
    weights, stop_ids = load_weights(prompting, listener)
    engines: dict[str, LocalEngine] = {}
    for name, adapter in names.items():
        model = weights if adapter is None else _with_adapter(weights, adapter, prompting)
        engines[name] = engine_for(prompting, model, stop_ids, tokens, 2**20, adapter)
    return engines, stop_ids


def _load_there(config: Config, *how: Any) -> Any:
    return _load_engines(load_prompting(config), *how)


def _in_processes(
    config: Config, names: _Names, tokens: int, copies: int, listener: Listener
) -> tuple[list[dict[str, LocalEngine]], tuple[int, ...]]:
    """The same in processes, each of which loads the model; on several GPUs one on each."""
    rows = embedding_rows(config.model.path, config.model.trust_remote_code) or 2**31
    first, count = engine_device(config).index or 0, torch.cuda.device_count()
    if 0 < count < copies and config.rollout.cache_gib is None:
        text = f"--engines {copies}: more than the GPUs here ({count}), and those that share one have a cache each"
        raise ConfigError(f"{text}; say how large each may be, such as --set rollout.cache_gib=8")
    places = [{"rollout.device": f"cuda:{(first + n) % count}"} if count > 1 else {} for n in range(copies)]
    processes = [EngineProcess(partial(_load_there, with_values(config, place), names, tokens)) for place in places]
    engines: list[dict[str, LocalEngine]] = []
    try:
        for process in processes:
            shapes, stop_ids = process.loaded(listener)
            limits = {"vocabulary": rows, "max_sequence": tokens, "stop_ids": stop_ids}
            engines.append({name: ProcessEngine(process, name, shapes[name], **limits) for name in names})
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return engines, stop_ids


def _with_adapter(model: Any, folder: str, prompting: Prompting) -> Any:
    """``model`` with an adapter on it; the weights below are the same ones in both.
    Raises ModelError: the folder holds none, or it is not for this model."""
    from dapo.model.adapters import has_adapter, put_on
    from dapo.model.loading import copy_model

    if has_adapter(model):
        raise ModelError(f"adapter {folder}: the served model has an adapter itself; serve their base, and name both")
    if engine_device(prompting.config).type != "cpu" and prompting.config.rollout.cache_gib is None:
        raise ConfigError(
            "--adapter: on a GPU each adapter has a cache of its own; say how large each may be, such as "
            "--set rollout.cache_gib=8"
        )
    adapter = require_adapter(folder)
    served = prompting.config.model.path
    if os.path.realpath(adapter.base) != os.path.realpath(served) and adapter.base != served:
        raise ModelError(f"adapter {folder}: its base is {adapter.base}, and {served} is served")
    twin = put_on(copy_model(model), adapter, next(model.parameters()).dtype)
    return twin.requires_grad_(False).eval()
