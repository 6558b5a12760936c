"""How many samples a second the orchestrator carries: the real loop and collector over simulated engines and learners.

usage: python bench/scale.py run --tokenizer FOLDER --out FOLDER [--gpus 0 64 128 256 512 1024] [--transport ray]

Half of the GPUs sample and half train. A GPU samples ``--rate`` tokens a second in ``--rows`` samples at once; a step
is 4 prompts a GPU (the paper has 512 on 128) with 16 samples of 1,000 tokens of real text, 60% of whose groups are
kept, with one step sampled ahead (``--staleness`` 1). Learners take as long for a step as engines need for it. With
``--gpus 0`` neither takes time, so what is measured is what the orchestrator itself carries at most.

Real are the loop, the collector, the batches, the metrics and the files of samples; simulated are engines, learners
and verdicts. Samples come group by group: with ``--transport memory`` each group is unpickled as it comes; with ``ray``
engines are actors behind the fleet of a Ray run. ``--text none`` leaves decoding out. ``--reward ray`` scores in reward
actors. Processor time is of the driver's process, all of its threads together.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import pickle
import random
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Request, hand_over
from dapo.training.update_report import Mismatch, UpdateReport
from dapo.util.asynchronous import in_thread
from runner import HERE, Report, make_parser, run_command, run_side, script, show

LENGTH, SIZE, KEPT, READY = 1000, 16, 0.6, 64
"""Tokens of a sample, samples of a group, the share of groups that is kept, and groups made before."""
RAY = {"runtime.kind": "ray", "runtime.placement": "disaggregated", "runtime.reward.workers": 1}
Arrays = list[tuple[Any, Any]]
"""Ids and log-probabilities of the samples of a group."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__, ["run"])
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, help="folder of a tokenizer")
    add("--gpus", type=int, nargs="+", default=[0, 64, 128, 256, 512, 1024])
    add("--transport", default="memory", choices=["memory", "ray"])
    add("--text", default="driver", choices=["driver", "none"])
    add("--reward", default="here", choices=["here", "ray"])
    add("--rate", type=float, default=7000.0, help="tokens a second of an engine's GPU")
    add("--rows", type=int, default=64, help="samples at once of an engine's GPU")
    add("--prompts", type=int, help="of a step, in place of 4 a GPU (512 with --gpus 0)")
    add("--steps", type=int, default=5, help="the speed is that of all but the first and the last")
    add("--staleness", type=int, default=1, help="max_staleness: steps that may be sampled ahead")
    add("--actors", type=int, default=2, help="processes of the engines, with --transport ray")
    parser.set_defaults(device="cpu")
    return run_command(parser.parse_args(arguments), {"run": run})


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = ("transport", "text", "reward", "rate", "rows", "steps", "staleness", "actors")
    common = {name: getattr(options, name) for name in names} | {"tokenizer": str(options.tokenizer)}
    sides = []
    for gpus in options.gpus:
        name = f"run-{options.transport}-{options.text}-{options.reward}-{gpus}"
        job = {"do": "scale:carry", "gpus": gpus, "prompts": options.prompts or 4 * gpus or 512, **common}
        outcome = run_side(options, name, job | {"folder": str(options.out / f"{name}-run")})
        sides.append(outcome.facts() | {"name": f"{gpus} GPUs"} | outcome.first("carried"))
    figures = (
        ("samples_s", "samples/s", ",.0f", 1),
        ("limit", "engines' limit (0: none)", ",.0f", 1),
        ("cpu_ms", "ms of CPU a sample", ".3f", 1),
        ("loop_ms", "of it event loop", ".3f", 1),
        ("carries", "samples/s that a core carries", ",.0f", 1),
    )
    show("what the orchestrator carries", {"sides": sides}, figures)
    return {"work": common, "sides": sides}


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
    """GPUs as the collector, or a fleet, asks them (``InterruptibleEngine``)."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled, self.version, self._coming = sampled, 0, 0

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        began = self.version
        async for number, message in self._sampled.stream([request.id for request in requests]):
            for index, (ids, logprobs) in enumerate(pickle.loads(message)):
                yield Sample(number, index, ids, logprobs, np.full(len(ids), began, np.int32), "stop")

    async def begin(self, version: int) -> None:
        self._coming = version

    async def commit(self, fingerprint: Any) -> None:
        self.version = self._coming

    async def nothing(self, *given: Any) -> Any: ...

    put = sleep = wake = close = stream = cancel = pause = resume = nothing


def make_engine(job: Mapping[str, Any], groups: Sequence[Arrays], share: int = 1) -> Engine:
    sent = [pickle.dumps(group, protocol=5) for group in groups]
    return Engine(Sampled(Slots(job["gpus"] // 2 // share, job["rate"], job["rows"]), sent))


async def over_ray(job: Mapping[str, Any], groups: Sequence[Arrays], cluster: Any) -> Any:
    """Engines in actors."""
    from dapo.orchestrator.runtime.ray.actors import Worker
    from dapo.orchestrator.runtime.ray.fleet import Fleet

    class Simulated(Worker):
        async def make(self, groups: Sequence[Arrays]) -> None:
            self._engine: Any = make_engine(job, groups, job["actors"])

    actors = await asyncio.gather(*(cluster.actor(Simulated, bundle) for bundle in cluster.of("engine")))
    for actor in actors:
        await actor.call("make", groups)
    return Fleet(actors, None, print)


# --- the other roles --------------------------------------------------------------------------------------------------


class Rows:
    """Prompts without end, of 100 tokens."""

    def __init__(self) -> None:
        self._row = 0

    def next(self) -> Prompt:
        self._row += 1
        return Prompt(self._row, "What is it? " * 10, tuple(range(100)), "42", {"row": self._row})

    def feedback(self, groups: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state(self, state: Any) -> None: ...


async def verdict(prompt: str, response: str, answer: str, row: int) -> bool:
    return random.Random(row).random() < KEPT and random.random() < 0.5


class Scores(Scorer):
    async def score(self, prompt: Prompt, response: str, finish_reason: str | None = None) -> Reward:
        right = await verdict(prompt.text, response, "42", prompt.row)
        return Reward(right, float(right), extracted="42")


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
        self.times: list[tuple[float, float, float, int]] = []
        """At the begin and after each step: the clock, processor time of the process and of its event loop, and samples
        that have come."""

    def look(self, samples: int) -> None:
        self.times.append((time.perf_counter(), time.process_time(), time.thread_time(), samples))

    async def push(self, learner: Learner, engine: Any) -> None:
        learner.version += 1
        await hand_over(engine, learner.version, ())

    async def maybe(self, after: Budget) -> dict[str, float]:
        return {}

    def begin(self, step: Any) -> None: ...

    async def write(self, step: Any, after: Budget, evaluation: Mapping[str, float]) -> None:
        self._log.append(after.steps, step.metrics(self._config))
        await in_thread(step.write_samples, self._samples, after.steps, 1.0, 0)
        self.look(self.times[-1][3] + step.rollout.stats.window_tokens // LENGTH)

    async def maybe_save(self, last: bool) -> None: ...


def settings(job: Mapping[str, Any]) -> Config:
    prompts, rows = job["prompts"], max(job["gpus"] // 2 * job["rows"], SIZE)
    ray = RAY | {"runtime.engine.workers": job["actors"]} if "ray" in (job["transport"], job["reward"]) else {}
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": SIZE, "max_response_length": LENGTH}
    rollout |= {"max_concurrent_samples": rows, "max_staleness": job["staleness"]}
    training = {"tokens_per_micro_batch": 8192, "steps": job["steps"], "groups_per_update": max(1, prompts // 4)}
    algorithm = {"proximal": "interpolate", "overlong_buffer": {"enable": False}}
    parts = {"model": {"path": "none"}, "rollout": rollout, "training": training, "algorithm": algorithm}
    return build_config(parts | {"evaluation": {"every": 0}} | nested(ray))


# --- a side -----------------------------------------------------------------------------------------------------------


def make_groups(template: PromptTemplate) -> list[Arrays]:
    """Samples of this repository's documentation."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((HERE.parent / "docs").glob("*.md")))
    ids = np.array(template.encode_text(text), np.int32)
    numbers = np.random.default_rng(1)
    starts = numbers.integers(0, len(ids) - LENGTH, (READY, SIZE))
    return [[(ids[at : at + LENGTH].copy(), -numbers.random(LENGTH, np.float32)) for at in group] for group in starts]


async def run_through(job: Mapping[str, Any], config: Config, template: PromptTemplate, rest: Any) -> None:
    groups, cluster, engine = make_groups(template), None, None
    scorer: Scorer = Scores()
    try:
        if config.runtime.kind == "ray":
            from dapo.orchestrator.runtime.ray.cluster import Cluster
            from dapo.orchestrator.runtime.ray.rewards import RayScorer

            cluster = Cluster.join(config)
            await cluster.start()
            engine = await over_ray(job, groups, cluster) if job["transport"] == "ray" else None
            scorer = RayScorer(config, verdict, print) if job["reward"] == "ray" else scorer
            await scorer.start()
        decode = template.decode if job["text"] == "driver" else lambda ids: ""
        decode([])  # reads the vocabulary
        limit = job["gpus"] // 2 * job["rate"] / LENGTH
        learner: Any = Learner(config, job["prompts"] * SIZE / KEPT / limit if limit else 0.0)
        collector = Collector(Rows(), engine or make_engine(job, groups), scorer, decode, config)
        plan = Plan(job["prompts"], EarlyStopping(config.evaluation), colocated=False)
        rest.look(0)
        state = RunState(Budget(config.training))
        await train(state, plan, collector, BatchBuilder(config), learner, rest, rest, rest, rest)
    finally:
        if cluster is not None:
            await cluster.close()


def speed(times: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    """Samples a second but for the first step and the last, in which there is nothing more to sample, and processor
    time of all."""
    (began, *_, before), (ended, *_, after), samples = times[1], times[-2], times[-1][3]
    cpu, loop = (times[-1][place] - times[0][place] for place in (1, 2))
    found = {"samples_s": (after - before) / (ended - began), "cpu_ms": 1000 * cpu / samples}
    return found | {"loop_ms": 1000 * loop / samples, "carries": samples / cpu}


def carry(job: dict[str, Any], report: Report) -> None:
    """A run of so many steps, and what it carried."""
    from transformers import AutoTokenizer

    folder = Path(job["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    template = PromptTemplate(
        DataConfig(train="none", template="plain"), AutoTokenizer.from_pretrained(job["tokenizer"])
    )
    config, rest = settings(job), Rest(settings(job), folder)
    asyncio.run(run_through(job, config, template, rest))
    report.say("carried", limit=job["gpus"] // 2 * job["rate"] / LENGTH, **speed(rest.times))
    shutil.rmtree(folder)


if __name__ == "__main__":
    script(main)
