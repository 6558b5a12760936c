"""The scorer around a reward model. One thread tokenizes and one runs the network, so that the event loop is not
blocked and the next batch is read while the last one is scored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dapo.config import ModelReward
from dapo.data.template import letters, letters_lost_in
from dapo.model.hub import LOADING
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.batching import Batcher, retrieve
from dapo.reward.contract import Doubt, Scorer
from dapo.reward.convert import LARGEST

if TYPE_CHECKING:
    from dapo.reward.model.network import RewardNetwork
    from dapo.reward.model.text import Encoded


def pick_alike(lengths: Sequence[int], budget: int) -> list[int]:
    """Positions of the oldest item and of those nearest to it in length, as long as the padded batch (longest item
    times number of items) has at most ``budget`` tokens. The oldest is always among them, so that none waits for ever.
    ``lengths``: of the waiting items in tokens, the oldest first."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    low = order.index(0)
    high = low + 1
    while low > 0 or high < len(order):
        shorter = lengths[0] - lengths[order[low - 1]] if low > 0 else None
        longer = lengths[order[high]] - lengths[0] if high < len(order) else None
        if longer is None or (shorter is not None and shorter <= longer):
            start, end = low - 1, high
        else:
            start, end = low, high + 1
        if lengths[order[end - 1]] * (end - start) > budget:
            break
        low, high = start, end
    return order[low:high]


class ModelScorer(Scorer):
    """The raw score of a reward model (:class:`~dapo.config.ModelReward`). Belongs to one event loop. Too long a text,
    too slow a batch and a score that is not finite are failed scores."""

    def __init__(self, config: ModelReward) -> None:
        self._config = config
        self._network: RewardNetwork | None = None
        self._loading = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, "reward tokenizer")
        self._runner = ThreadPoolExecutor(1, "reward model")
        self._running: asyncio.Future[list[float]] | None = None
        self._batches: Batcher[Encoded, Reward] = Batcher(
            self._score_batch, pick=lambda items: pick_alike([item.length for item in items], config.tokens_per_batch)
        )

    async def start(self) -> None:
        """Raises RewardError: model or tokenizer cannot be loaded, or this is not a reward model."""
        await self._loaded()

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        lost = await self.lost_letters([(prompt.text, "") for prompt in prompts])
        several = ("".join(sorted(lost & letters(prompt.text))) for prompt in prompts)
        told = "the reward model's tokenizer has no token for"
        return [Doubt(place, f"{told} {some!r}") for place, some in enumerate(several) if some]

    async def lost_letters(self, texts: Sequence[tuple[str, str]]) -> set[str]:
        read_back = (await self._loaded()).text.read_back
        return await asyncio.get_running_loop().run_in_executor(self._reader, letters_lost_in, texts, read_back)

    async def score(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> Reward:
        """See :class:`Scorer`. ``parts`` holds ``score``; ``correct`` is whether it is above ``correct_above``."""
        return (await self.score_all(prompt, [response]))[0]

    async def score_all(self, prompt: Prompt, responses: Sequence[str]) -> list[Reward]:
        """All are read before the first one is scored, so that they are one batch."""
        encode = (await self._loaded()).text.encode
        read = asyncio.get_running_loop().run_in_executor(
            self._reader, lambda: [encode(prompt.text, response) for response in responses]
        )
        return list(await asyncio.gather(*(self._score_encoded(item) for item in await read)))

    async def _score_encoded(self, item: Encoded) -> Reward:
        limit = self._config.max_length
        if item.length > limit:
            return _failed(f"prompt and response are {item.length} tokens, more than reward.max_length={limit}")
        if not item.length:
            return _failed("prompt and response are no tokens at all")
        return await self._batches.submit(item)

    async def close(self) -> None:
        """A batch that is being scored cannot be stopped, and is not waited for."""
        await self._batches.close()
        for thread in (self._reader, self._runner):
            thread.shutdown(wait=False, cancel_futures=True)
        self._network = None

    async def _loaded(self) -> RewardNetwork:
        async with self._loading:
            if self._network is None:
                self._network = await asyncio.get_running_loop().run_in_executor(self._runner, _load, self._config)
            return self._network

    async def _score_batch(self, items: Sequence[Encoded]) -> Sequence[Reward]:
        limit = self._config.timeout_s
        if not await _done(self._running, limit):  # left behind by a time-out: a thread cannot be stopped
            return [_failed(f"the model was busy for another {limit:g} s with a batch that had timed out")] * len(items)
        network = await self._loaded()
        self._running = asyncio.get_running_loop().run_in_executor(self._runner, network.score, items)
        self._running.add_done_callback(retrieve)
        if not await _done(self._running, limit):
            size = len(items) * max(item.length for item in items)
            text = f"timed out after {limit:g} s in a batch of {size} tokens; raise reward.timeout_s or lower "
            return [_failed(f"{text}reward.tokens_per_batch={self._config.tokens_per_batch}")] * len(items)
        error = self._running.exception()
        if error is not None:
            return [_failed(self._explain(error))] * len(items)
        return [self._verdict(score) for score in self._running.result()]

    def _verdict(self, score: float) -> Reward:
        if not abs(score) <= LARGEST:
            return _failed(f"the score is {score}, not a finite number of ordinary size")
        above = self._config.correct_above
        return Reward(None if above is None else score > above, score, {"score": score})

    def _explain(self, error: BaseException) -> str:
        if type(error).__name__ == "OutOfMemoryError":
            return f"out of memory; lower reward.tokens_per_batch={self._config.tokens_per_batch}"
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


async def _done(call: asyncio.Future[list[float]] | None, limit_s: float) -> bool:
    """Whether ``call`` ends within ``limit_s``. It goes on otherwise."""
    if call is None:
        return True
    await asyncio.wait({call}, timeout=limit_s)
    return call.done()


def _load(config: ModelReward) -> RewardNetwork:
    with LOADING:
        from dapo.reward.model.network import load_network  # torch and Transformers

        return load_network(config)


def _failed(text: str) -> Reward:
    return Reward(None, 0.0, error=f"reward model: {text}")
