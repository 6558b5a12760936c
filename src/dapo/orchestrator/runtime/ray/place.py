"""A run's learner and engines on Ray: ranks and engines in one process each, or apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from dapo.algorithm.kl import AdaptiveKL
from dapo.config.placement import Bundle, shards
from dapo.errors import ConfigError
from dapo.model.adapters import find_adapter
from dapo.model.loading import stop_token_ids
from dapo.orchestrator.build import Setup
from dapo.orchestrator.inputs import model_elsewhere
from dapo.orchestrator.runtime.placed import Placed
from dapo.orchestrator.runtime.ray.actors import Worker
from dapo.orchestrator.runtime.ray.cluster import Cluster, in_worker
from dapo.orchestrator.runtime.ray.fleet import Fleet
from dapo.orchestrator.runtime.ray.handles import GoneError, Packer, Rank, Remote
from dapo.orchestrator.runtime.ray.weights import RaySync
from dapo.rollout.engine import EngineError
from dapo.training.parallel.front import RankedLearner, RankError


async def place_on_ray(setup: Setup, kl: AdaptiveKL, tell: Callable[[str], object]) -> Placed:
    """As :func:`dapo.orchestrator.runtime.place`. ``tell``: hears of engines that died."""
    config, overrides = setup.config, setup.overrides
    if overrides.model is not None:
        raise ConfigError(
            "model: with runtime.kind=ray its workers load it from a folder; save it, and give model.path"
        )
    cluster = Cluster.join(config)
    try:
        await cluster.start()
        return await _placed(setup, kl, tell, cluster)
    except GoneError as error:
        await cluster.leave()
        raise EngineError(f"runtime: {error}") from None
    except BaseException:
        await cluster.leave()
        raise


async def _placed(setup: Setup, kl: AdaptiveKL, tell: Callable[[str], object], cluster: Cluster) -> Placed:
    config, overrides = setup.config, setup.overrides
    learners, engines = cluster.of("learner"), cluster.of("engine")
    workers = await asyncio.gather(*(cluster.actor(Worker, bundle) for bundle in learners))
    for number, (worker, bundle) in enumerate(zip(workers, learners, strict=True)):
        await worker.call("make_rank", number, len(workers), bundle.device)
    packer = Packer()
    learner = RankedLearner([Rank(worker, packer) for worker in workers], kl)
    adapted = find_adapter(config.model.path) is not None
    sharded = shards(config) and (config.runtime.learner.sharded or not adapted)
    await learner.start(
        workers[0].node,
        in_worker(config, learners[0]),
        sharded=sharded,
        cpu_offload=config.runtime.learner.cpu_offload,
        objective=overrides.objective,
    )
    model = model_elsewhere(config)
    stop_ids = stop_token_ids(model, setup.tokenizer, config.rollout.stop_token_ids)
    longest = sorted(setup.heldout, key=lambda prompt: len(prompt.token_ids))[-1:]
    given = setup.template, longest, overrides.engine, stop_ids

    async def engine_in(worker: Remote, bundle: Bundle) -> Remote:
        await worker.call("make_engine", in_worker(config, bundle), *given)
        return worker

    async def another(number: int) -> Remote:
        return await engine_in(await cluster.actor(Worker, engines[number]), engines[number])

    sync = RaySync()
    if engines:
        found = await asyncio.gather(*map(another, range(len(engines))))
        fleet = Fleet(found, another, tell, partial(sync.give, learner), config.runtime.deterministic, cluster.leave)
    else:
        found = [await engine_in(*pair) for pair in zip(workers, learners, strict=True)]  # a whole model at a time
        fleet = Fleet(found, None, tell, None, config.runtime.deterministic, cluster.leave)
    for number, worker in enumerate(workers):
        fleet.watch(worker, partial(_of_rank, number, len(workers)))
    return Placed(learner, fleet, None, sync, model, stop_ids, learner.built.fingerprint)


def _of_rank(number: int, size: int, error: GoneError) -> RankError:
    return RankError(f"rank {number} of {size} failed: {error}")
