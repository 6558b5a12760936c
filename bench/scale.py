"""How many samples a second the orchestrator carries: the real loop and collector over engines and learners of given rates.

usage: python bench/scale.py run --tokenizer FOLDER --out FOLDER [--gpus 0 64 128 256 512 1024] [--transport ray]
       python bench/scale.py profile --tokenizer FOLDER --out FOLDER

Half of the GPUs sample and half train. A GPU samples ``--rate`` tokens a second in ``--rows`` samples at once; a step
is 2 prompts a GPU with 16 samples of 1,000 tokens of real text, 60% of whose groups are kept, with one step sampled
ahead (``max_staleness`` 1). Learners take as long as the engines need for it. With ``--gpus 0`` engines and learners
take no time at all, so what is measured is what the orchestrator itself carries at most.

Real are the loop, the collector, the batches, the metrics and the files of samples; simulated are engines, learners
and verdicts. Samples come group by group: with ``--transport memory`` each group is unpickled as it comes, with
``ray`` it comes out of an actor's stream. ``--text driver`` decodes in this process, as a run without Ray does;
``worker`` in reward actors, ``none`` nowhere. Processor time is of the driver's process, all of its threads together,
and does not depend on what else the machine does; samples a second do.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import heapq
import itertools
import os
import pickle
import pstats
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dapo.config import Config, build_config, nested
from dapo.config.data import DataConfig
from dapo.data.template import PromptTemplate
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.observe.metrics import MetricsLog
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.collector import Collector
from dapo.orchestrator.loop import train
from dapo.orchestrator.run_state import Plan, RunState
from dapo.records import Prompt, Reward, Sample, TokenBatch
from dapo.reward.batching import Batcher
from dapo.rollout.engine import Request
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.asynchronous import in_thread
from runner import HERE, Report, console, make_parser, run_command, run_side, script

LENGTH, SIZE, KEPT, READY = 1000, 16, 0.6, 64
"""Tokens of a sample, samples of a group, the share of groups that is kept, and groups made before."""
Arrays = list[tuple[Any, Any]]
"""Ids and log-probabilities of the samples of a group."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, ["run", "profile"])
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, help="folder of a tokenizer")
    add("--gpus", type=int, nargs="+", default=[0, 64, 128, 256, 512, 1024])
    add("--transport", default="memory", choices=["memory", "ray"])
    add("--text", default="driver", choices=["driver", "worker", "none"])
    add("--rate", type=float, default=7000.0, help="tokens a second of an engine's GPU")
    add("--rows", type=int, default=64, help="samples at once of an engine's GPU")
    add("--prompts", type=int, help="of a step, in place of 2 a GPU (512 with --gpus 0)")
    add("--steps", type=int, default=4, help="the first is left out")
    add("--actors", type=int, default=2, help="processes of the engines, with --transport ray")
    parser.set_defaults(device="cpu")
    return run_command(parser.parse_args(arguments), {"run": run, "profile": run})


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = ("transport", "text", "rate", "rows", "steps", "actors")
    common = {name: getattr(options, name) for name in names} | {"tokenizer": str(options.tokenizer)}
    sides = []
    for gpus in options.gpus:
        name = f"{options.command}-{options.transport}-{options.text}-{gpus}"
        job = {"do": "scale:carry", "gpus": gpus, "prompts": options.prompts or 2 * gpus or 512, **common}
        job |= {"folder": str(options.out / f"{name}-run"), "profile": options.command == "profile"}
        outcome = run_side(options, name, job)
        sides.append(outcome.facts() | {"gpus": gpus} | outcome.first("carried"))
    show(sides, options)
    return {"work": common, "sides": sides}


def show(sides: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    table = Table("GPUs", "samples/s", "engines' limit", "ms of CPU a sample", "of it event loop", "a core carries")
    for side in (side for side in sides if not side["error"]):
        limit = f"{side['limit']:,.0f}" if side["gpus"] else ""
        own = (f"{side['cpu_ms']:.3f}", f"{side['loop_ms']:.3f}", f"{1000 / side['cpu_ms']:,.0f} samples/s")
        table.add_row(str(side["gpus"] or "no limit"), f"{side['samples_s']:,.0f}", limit, *own)
    console.print(table)
    if options.command == "profile":
        console.print((options.out / "profile.txt").read_text(encoding="utf-8"), markup=False)


# --- engines ----------------------------------------------------------------------------------------------------------


class Slots:
    """Places for groups on GPUs of one rate: when a group that is asked for now will be done."""

    def __init__(self, gpus: int, rate: float, rows: int) -> None:
        self._seconds = rows * LENGTH / rate if gpus else 0.0
        self._free = [0.0] * max(1, gpus * rows // SIZE)
        self._random = random.Random(1)

    def done_in(self, now: float) -> float:
        seconds = self._seconds * self._random.uniform(0.5, 1.5)
        done = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, done)
        return done - now


class Sampled:
    """Groups of samples as they are done, each as the bytes that a process would send."""

    def __init__(self, slots: Slots, ready: Sequence[Any]) -> None:
        self._slots, self._ready, self._next = slots, ready, itertools.count()

    async def stream(self, ids: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        loop, done = asyncio.get_running_loop(), asyncio.Queue[int]()
        for number in ids:
            loop.call_later(self._slots.done_in(loop.time()), done.put_nowait, number)
        for _ in ids:
            yield await done.get(), self._ready[next(self._next) % len(self._ready)]
            await asyncio.sleep(0)


class Engine:
    """What the collector asks. ``source(ids)`` streams pairs of a request's id and its samples."""

    def __init__(self, source: Callable[[Sequence[int]], AsyncIterator[tuple[int, Arrays]]]) -> None:
        self._source, self.version = source, 0

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        began = self.version
        async for number, arrays in self._source([request.id for request in requests]):
            for index, (ids, logprobs) in enumerate(arrays):
                yield Sample(number, index, ids, logprobs, np.full(len(ids), began, np.int32), "stop")

    async def begin(self, version: int) -> None: ...
    async def put(self, bucket: Any) -> None: ...
    async def commit(self, fingerprint: Any) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...
    async def stream(self, requests: Any) -> Any: ...
    async def cancel(self, request_ids: Any) -> Any: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...


def in_memory(job: Mapping[str, Any], groups: Sequence[Arrays]) -> Engine:
    sent = [pickle.dumps(group, protocol=5) for group in groups]
    sampled = Sampled(Slots(job["gpus"] // 2, job["rate"], job["rows"]), sent)

    async def source(ids: Sequence[int]) -> AsyncIterator[tuple[int, Arrays]]:
        async for number, message in sampled.stream(ids):
            yield number, pickle.loads(message)

    return Engine(source)


def over_ray(job: Mapping[str, Any], groups: Sequence[Arrays]) -> Engine:
    import ray

    @ray.remote
    class Engines:
        def __init__(self, gpus: int) -> None:
            self._sampled = Sampled(Slots(gpus, job["rate"], job["rows"]), groups)

        async def stream(self, ids: list[int]) -> AsyncIterator[Any]:
            async for pair in self._sampled.stream(ids):
                yield pair

    count = job["actors"]
    actors = [Engines.options(num_cpus=0, max_concurrency=10_000).remote(job["gpus"] // 2 // count) for _ in range(count)]  # type: ignore[attr-defined]
    turn = itertools.count()

    async def source(ids: Sequence[int]) -> AsyncIterator[tuple[int, Arrays]]:
        """Each request goes whole to one of the actors."""
        first, found = next(turn), asyncio.Queue[Any]()
        streams = [actors[(first + k) % count].stream.remote(list(ids[k::count])) for k in range(min(count, len(ids)))]

        async def read(stream: Any) -> None:
            async for reference in stream:
                found.put_nowait(await reference)

        readers = [asyncio.create_task(read(stream)) for stream in streams]
        for _ in ids:
            yield await found.get()
        await asyncio.gather(*readers)

    return Engine(source)


# --- the other roles --------------------------------------------------------------------------------------------------


class Rows:
    """Prompts without end, of 100 tokens."""

    def __init__(self) -> None:
        self._row = 0

    def next(self) -> Prompt:
        self._row += 1
        return Prompt(self._row, "What is it? " * 10, tuple(range(100)), "42")

    def feedback(self, groups: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state(self, state: Any) -> None: ...


def verdict(row: int) -> Reward:
    mixed = random.Random(row).random() < KEPT
    right = mixed and random.random() < 0.5
    return Reward(right, float(right), extracted="42")


class Scores:
    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def score(self, prompt: Prompt, response: str, finish_reason: str | None = None) -> Reward:
        return verdict(prompt.row)


class Learner:
    """Takes ``seconds`` for the updates of a step."""

    def __init__(self, config: Config, seconds: float) -> None:
        self._pause, self.version = seconds / config.updates_per_step, 0

    def begin_step(self, step: int, spent: float) -> None: ...

    async def annotate(self, batch: TokenBatch) -> TokenBatch:
        return batch.with_columns(proximal=batch.behaviour_logprobs)

    async def update(self, step: int, index: int, mini: TokenBatch, into: Any) -> None:
        await asyncio.sleep(self._pause)
        tokens = mini.num_response_tokens
        report = UpdateReport(0.1, 1.0, 1e-6, None, mini.num_tokens, tokens, tokens, 1, {}, Mismatch(), 0, 0, 0)
        into.reports.append(report)

    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...


class Rest:
    """Weight sync, evaluator, recorder and checkpointer, and the clock."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._log, self._samples = config, MetricsLog(folder / "metrics.jsonl"), folder / "samples"
        self._samples.mkdir()
        self.times = [(time.perf_counter(), time.process_time(), time.thread_time(), 0)]

    async def push(self, learner: Learner, engine: Engine) -> None:
        learner.version = engine.version = learner.version + 1

    async def maybe(self, after: Budget) -> dict[str, float]:
        return {}

    def begin(self, step: Any) -> None: ...

    async def write(self, step: Any, after: Budget, evaluation: Mapping[str, float]) -> None:
        self._log.append(after.steps, step.metrics(self._config))
        await in_thread(step.write_samples, self._samples, after.steps, 1.0, 0)
        samples = self.times[-1][3] + step.rollout.stats.samples
        self.times.append((time.perf_counter(), time.process_time(), time.thread_time(), samples))

    async def maybe_save(self, last: bool) -> None: ...


def settings(job: Mapping[str, Any]) -> Config:
    return build_config(
        nested(
            {
                "model.path": "none",
                "rollout.prompts_per_step": job["prompts"],
                "rollout.samples_per_prompt": SIZE,
                "rollout.max_response_length": LENGTH,
                "rollout.max_concurrent_samples": max(job["gpus"] // 2 * job["rows"], SIZE),
                "rollout.max_staleness": 1,
                "algorithm.proximal": "interpolate",
                "training.tokens_per_micro_batch": 8192,
                "training.steps": job["steps"],
                "training.groups_per_update": max(1, job["prompts"] // 4),
                "algorithm.overlong_buffer.enable": False,
                "evaluation.every": 0,
            }
        )
    )


# --- a side -----------------------------------------------------------------------------------------------------------


def make_groups(template: PromptTemplate) -> list[Arrays]:
    """Samples of this repository's documentation."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((HERE.parent / "docs").glob("*.md")))
    ids = np.array(template.encode_text(text), np.int32)
    numbers = np.random.default_rng(1)
    starts = numbers.integers(0, len(ids) - LENGTH, (READY, SIZE))
    return [[(ids[at : at + LENGTH].copy(), -numbers.random(LENGTH, np.float32)) for at in group] for group in starts]


def carry(job: dict[str, Any], report: Report) -> None:
    """A run of so many steps; what it carried in all but the first one."""
    from transformers import AutoTokenizer

    folder = Path(job["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    template = PromptTemplate(DataConfig(train="none", template="plain"), AutoTokenizer.from_pretrained(job["tokenizer"]))
    groups, config = make_groups(template), settings(job)
    limit = job["gpus"] // 2 * job["rate"] / LENGTH  # samples a second of all engines
    engine = {"memory": in_memory, "ray": over_ray}[job["transport"]](job, groups)
    decode = template.decode if job["text"] == "driver" else lambda ids: ""
    learner = Learner(config, job["prompts"] * SIZE / KEPT / limit if limit else 0.0)
    collector = Collector(Rows(), engine, Scores(), decode, config)  # type: ignore[arg-type]
    plan = Plan(job["prompts"], EarlyStopping(config.evaluation), colocated=False)
    rest: Any = Rest(config, folder)
    profile = cProfile.Profile()
    if job["profile"]:
        profile.enable()
    run = train(RunState(Budget(config.training)), plan, collector, BatchBuilder(config), learner, rest, rest, rest, rest)
    asyncio.run(run)
    profile.disable()
    if job["profile"]:
        with (folder.parent / "profile.txt").open("w") as text:
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
    (began, cpu, thread, before), (ended, cpu_end, thread_end, after) = rest.times[1], rest.times[-1]
    wall, samples = ended - began, after - before
    report.say(
        "carried",
        samples_s=samples / wall,
        limit=limit,
        cpu_ms=1000 * (cpu_end - cpu) / samples,
        loop_ms=1000 * (thread_end - thread) / samples,
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    script(main)
