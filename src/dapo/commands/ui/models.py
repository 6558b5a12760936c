"""Models of a run, ready to answer: loaded once, at most two at a time.

A model takes prompts and responses as long as the recipe says, but for :data:`MOST_TOKENS`.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.commands.ui.questions import Question
from dapo.errors import DataError
from dapo.inference.model import FoundModel, Prompting, inference_config, load_engine, load_prompting
from dapo.observe.progress import QuietListener
from dapo.records import Prompt

if TYPE_CHECKING:
    from dapo.rollout.native.engine import NativeEngine  # loads torch

HELD = 2
"""Models in memory."""
MOST_SAMPLES = 8
"""Of one model at a time."""
MOST_TOKENS = 1024
"""Of a response."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer and template. ``max_tokens``: of a response; ``max_prompt``: tokens of a prompt."""

    prompting: Prompting
    engine: NativeEngine
    max_tokens: int
    max_prompt: int

    def encode(self, question: Question) -> tuple[int, ...]:
        """Token ids of the prompt, written as the run writes its own.
        Raises DataError: nothing in it is known to the tokenizer, or it is too long."""
        ids = tuple(self.prompting.template.encode(question.prompt))
        if not ids:
            raise DataError(f"the tokenizer makes no tokens of {question.text[:60]!r}")
        if len(ids) > self.max_prompt:
            raise DataError(
                f"the prompt has {len(ids)} tokens, but the run was made for prompts of up to {self.max_prompt} "
                "(data.max_prompt_length)"
            )
        return ids


class Models:
    """The models that were asked last. For one event loop, and for one that asks at a time."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, Loaded]] = {}  # the one asked last comes last

    async def holds(self, path: Path) -> bool:
        return path in self._held and self._held[path][0] == await asyncio.to_thread(_stamp, path)

    async def get(self, path: Path) -> Loaded:
        """The model in a folder of a run; another one makes way for it. Raises UserError if it cannot be loaded."""
        stamp = await asyncio.to_thread(_stamp, path)
        known = self._held.pop(path, None)
        if known is not None and known[0] == stamp:
            self._held[path] = known
            return known[1]
        if known is not None:  # the run has written it anew
            await known[1].engine.close()
        while len(self._held) >= HELD:
            await self._held.pop(next(iter(self._held)))[1].engine.close()
        loaded = await asyncio.to_thread(load, path)
        self._held[path] = stamp, loaded
        return loaded

    async def close(self) -> None:
        while self._held:
            await self._held.popitem()[1][1].engine.close()


_loading = threading.Lock()
"""Transformers loads one model at a time: of two at once, one finds weights missing. A thread whose asker has left goes
on loading while the next one asks."""


def load(path: Path) -> Loaded:
    """Load the model in a folder inside a run folder, by that run's recipe. Raises UserError if it cannot be loaded."""
    from dapo.model.adapters import find_adapter
    from dapo.model.loading import context_limit, read_config

    run = path.parent if path.name.startswith("model-") else path.parents[2]
    found = FoundModel(str(path), run / "config.yaml")
    # on the CPU: the run may need a GPU for itself
    bounds: dict[str, Any] = {"runtime": {"device": "cpu"}, "rollout": {"max_concurrent_samples": MOST_SAMPLES * HELD}}
    config = inference_config(found, bounds)
    limit = min(config.evaluated_length, MOST_TOKENS)
    config = inference_config(found, bounds, {"evaluation": {"max_response_length": limit}})
    prompting = load_prompting(config)
    adapter = find_adapter(path)
    positions = context_limit(read_config(adapter.base if adapter else str(path), config.model.trust_remote_code))
    longest = min(config.data.max_prompt_length, (positions or 2**20) - limit)
    room = {"prompt": [Prompt(0, "", (0,) * max(longest, 1))]}
    with _loading:
        engine = load_engine(prompting, room, MOST_SAMPLES * HELD, QuietListener())
    return Loaded(prompting, engine, limit, longest)


def _stamp(path: Path) -> int:
    try:
        return max((file.stat().st_mtime_ns for file in path.iterdir()), default=0)
    except OSError:
        return 0
