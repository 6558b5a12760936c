"""Roles without tensors for the loop: an engine that answers at random, a learner whose weights are one number, and a
world that a run can be cancelled in, saved from and resumed in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dapo.config import build_config, nested
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.encoded_state import EncodedState, read_state
from dapo.orchestrator.loop import train
from dapo.orchestrator.run_state import Plan, RunState
from dapo.records import Prompt, Reward, Sample, TokenBatch
from dapo.rollout.engine import hand_over
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.asynchronous import in_thread

SETTINGS = {
    "model.path": "none",
    "seed": 3,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 2,
    "training.steps": 2,
    "training.groups_per_update": 2,
    "evaluation.every": 1,
    "runtime.deterministic": True,
}


class FakeSource:
    """Rows 0, 1, 2, ...; the sum of what it heard decides which row comes next, as in a curriculum."""

    def __init__(self) -> None:
        self.position = self.heard = 0

    def next(self) -> Prompt:
        self.position += 1
        return Prompt(self.position + 100 * self.heard, "p", (1, 2))

    def feedback(self, groups: Any) -> None:
        self.heard += sum(int(s.reward.correct) for group in groups for s in group.samples) % 7

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "heard": self.heard}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position, self.heard = state["position"], state["heard"]


class FakeEngine:
    """Two tokens for each seed, by seed and weights."""

    def __init__(self) -> None:
        self.version, self.weights, self.asleep = 0, 0.0, False

    async def generate(self, requests: Any) -> Any:
        assert not self.asleep
        for request in requests:
            for index, seed in enumerate(request.seeds):
                await asyncio.sleep(0)
                tokens = np.array([seed % 97, int(1e6 * self.weights) % 89], np.int32)
                logprobs = np.full(2, -0.5, np.float32)
                yield Sample(request.id, index, tokens, logprobs, tokens * 0 + self.version, "stop")

    async def begin(self, version: int) -> None:
        await asyncio.sleep(0)
        self.coming = version

    async def put(self, bucket: Any) -> None:
        await asyncio.sleep(0)
        self.weights = float(dict(bucket).get("weights", self.weights))

    async def commit(self, fingerprint: Any) -> None:
        await asyncio.sleep(0)
        self.version = self.coming

    async def sleep(self) -> None:
        await asyncio.sleep(0)
        self.asleep = True

    async def wake(self) -> None:
        await asyncio.sleep(0)
        self.asleep = False

    async def close(self) -> None: ...


class FakeScorer:
    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def score(self, prompt: Prompt, text: str, finish_reason: str | None = None) -> Reward:
        await asyncio.sleep(0)
        right = random.Random(f"{prompt.row} {text}").random() < 0.5
        return Reward(right, float(right))


class FakeBuilder:
    """Flattens; the advantage of a token is its group's number of right samples."""

    def build(self, groups: Any) -> TokenBatch:
        samples = [(group, s) for group in groups for s in group.samples]
        ones = np.ones(len(samples), np.int64)
        return TokenBatch(
            lengths=4 * ones,
            prompt_lengths=2 * ones,
            draws=np.array([group.draw for group, _ in samples]),
            indices=np.array([s.index for _, s in samples]),
            token_ids=np.concatenate([np.r_[1, 2, s.token_ids] for _, s in samples]).astype(np.int64),
            mask=np.ones(2 * len(samples), bool),
            behaviour_logprobs=np.concatenate([s.logprobs for _, s in samples]),
            versions=np.concatenate([s.versions for _, s in samples]).astype(np.int64),
        )

    def finish(self, groups: Any, batch: TokenBatch, version: int) -> tuple[Any, TokenBatch]:
        advantages = [g.draw + s.reward.value for g in groups for s in g.samples for _ in range(2)]
        return groups, batch.with_columns(advantages=np.array(advantages, np.float32))

    def minibatches(self, batch: TokenBatch, start: int = 0) -> Iterator[tuple[int, TokenBatch]]:
        return iter(list(enumerate(batch.minibatches(2)))[start:])

    def count(self, batch: TokenBatch) -> int:
        return -(-batch.num_groups // 2)


class FakeLearner:
    """One weight, moved by the mean of advantage, proximal and rate; updates are made in a thread."""

    def __init__(self) -> None:
        self.weights, self.version, self.unpublished, self.rate = 0.0, 0, False, 0.0

    def begin_step(self, step: int, spent: float) -> None:
        self.rate = 1.0 / (1 + step)

    async def annotate(self, batch: TokenBatch) -> TokenBatch:
        await asyncio.sleep(0)
        return batch.with_columns(proximal=np.full(batch.num_response_tokens, self.weights, np.float32))

    async def update(self, step: int, index: int, mini: TokenBatch, into: Any) -> None:
        assert index == len(into.reports)
        await in_thread(self._update, mini, into)

    def _update(self, mini: TokenBatch, into: Any) -> None:
        loss = float(np.mean(mini.columns["advantages"] + mini.columns["proximal"]))
        self.weights += 0.01 * self.rate * loss
        self.unpublished = True
        into.reports.append(UpdateReport(loss, 1.0, self.rate, None, 4, 2, 2, 1, {}, Mismatch(), 0.0, 0.0, 0.0))

    def publish(self) -> tuple[int, Any]:
        self.version += self.unpublished
        self.unpublished = False
        return self.version, {"weights": np.float64(self.weights)}.items()

    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...


class World:
    """A run over fakes: its roles, what it wrote, and the state that it can be saved in."""

    def __init__(self, changes: Mapping[str, Any] | None = None, source: Any = None, engine: Any = None) -> None:
        self.config = build_config(nested(SETTINGS | dict(changes or {})))
        self.state = RunState(Budget(self.config.training))
        self.source, self.engine, self.learner = source or FakeSource(), engine or FakeEngine(), FakeLearner()
        self.collector = Collector(self.source, self.engine, FakeScorer(), str, self.config)
        self.early_stopping = EarlyStopping(self.config.evaluation)
        self.written: dict[int, Any] = {}
        self.saved: list[int] = []

    async def run(self) -> None:
        plan = Plan(self.config.rollout.prompts_per_step, self.early_stopping)
        builder: Any = FakeBuilder()
        await train(self.state, plan, self.collector, builder, self.learner, self, self, self, self)

    # -- weight sync, evaluator, recorder and checkpointer -----------------------------------------------------------

    async def push(self, learner: Any, engine: Any) -> None:
        await hand_over(engine, *learner.publish())

    async def maybe(self, after: Budget) -> Mapping[str, float]:
        await asyncio.sleep(0)
        self.early_stopping.observe(after.steps, {"eval/accuracy": self.engine.weights})
        return {"eval/accuracy": self.engine.weights}

    def begin(self, step: Any) -> None: ...

    async def write(self, step: Any, after: Budget, evaluation: Mapping[str, float]) -> None:
        await asyncio.sleep(0)
        groups = [(g.draw, g.prompt.row, [s.token_ids.tolist() for s in g.samples]) for g in step.rollout.groups]
        losses = [(report.loss, report.learning_rate) for report in step.reports]
        self.written[after.steps] = groups, losses, dict(evaluation), self.learner.version

    async def maybe_save(self, last: bool) -> None:
        await asyncio.sleep(0)
        self.saved.append(self.state.steps_done)

    # -- between two processes ---------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        roles = {"collector": self.collector.state(), "best": self.early_stopping.state()}
        EncodedState({"run": self.state.state(), "learner": vars(self.learner), **roles}).write(folder)

    def load(self, folder: Path, written: Mapping[int, Any]) -> None:
        state = read_state(folder)
        self.state.load_state(state["run"])
        self.collector.load_state(state["collector"])
        vars(self.learner).update(state["learner"])
        self.early_stopping.load_state(state["best"])
        if self.state.step is None:
            self.engine.version, self.engine.weights = self.learner.version, self.learner.weights
        self.written = {step: entry for step, entry in written.items() if step <= self.state.steps_done}

    def result(self) -> Any:
        """All that two runs to the same end must have in common."""
        state = self.collector.state()
        kept = {name: state[name] for name in ("draws", "source", "keep_rate_kept", "keep_rate_finished", "untaken")}
        return vars(self.learner), kept, self.written, self.early_stopping.state(), self.engine.version


class Cancelled(Awaitable[None]):
    """A coroutine that is cancelled at its ``at``-th wait: as that begins, or (``late``) in the moment in which what it
    waits for is there. ``waits``: those that it came to."""

    def __init__(self, work: Any, at: int = 0, late: bool = False) -> None:
        self._work, self._at, self._late, self.waits = work, at, late, 0

    def __await__(self) -> Generator[Any, None, None]:
        inner, error = self._work.__await__(), None
        while True:
            try:
                waited_for = inner.send(None) if error is None else inner.throw(error)
            except StopIteration:
                return
            self.waits, error = self.waits + 1, None
            if self.waits == self._at:
                self._cancel(waited_for)
            try:
                yield waited_for
            except BaseException as thrown:
                error = thrown

    def _cancel(self, waited_for: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._late and waited_for is not None:
            waited_for.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
