"""A run's learner and engines on Ray: ranks and engines in one process each, or apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from dapo.algorithm.kl import AdaptiveKL
from dapo.config.placement import Bundle, backend_of, shards
from dapo.errors import ConfigError, UserError
from dapo.model.adapters import find_adapter
from dapo.model.loading import stop_token_ids
from dapo.orchestrator.build import Setup
from dapo.orchestrator.inputs import model_elsewhere
from dapo.orchestrator.runtime.placed import Placed
from dapo.orchestrator.runtime.ray.actors import Worker
from dapo.orchestrator.runtime.ray.cluster import Cluster, in_worker
from dapo.orchestrator.runtime.ray.fleet import Fleet
from dapo.orchestrator.runtime.ray.handles import GoneError, Packer, Rank, Remote, in_time
from dapo.orchestrator.runtime.ray.nodes import Nodes
from dapo.orchestrator.runtime.ray.weights import RaySync
from dapo.training.parallel.front import RankedLearner


async def place_on_ray(setup: Setup, kl: AdaptiveKL, tell: Callable[[str], object]) -> Placed:
    """As :func:`dapo.orchestrator.runtime.place`. ``tell``: hears of engines that died."""
    config, overrides = setup.config, setup.overrides
    if overrides.model is not None:
        raise ConfigError("model: with runtime.kind=ray its workers load it from a folder; save it and give model.path")
    cluster = Cluster.join(config)
    try:
        await cluster.start()
        return await _placed(setup, kl, tell, cluster)
    except GoneError as error:
        await cluster.leave()
        raise UserError(f"runtime: {error}") from None
    except BaseException:
        await cluster.leave()
        raise


async def _placed(setup: Setup, kl: AdaptiveKL, tell: Callable[[str], object], cluster: Cluster) -> Placed:
    config, overrides = setup.config, setup.overrides
    model = model_elsewhere(config)
    stop_ids = stop_token_ids(model, setup.tokenizer, config.rollout.stop_token_ids)
    longest = sorted(setup.heldout, key=lambda prompt: len(prompt.token_ids))[-1:]
    given = setup.template, longest, overrides.engine, stop_ids
    engines = cluster.of("engine")

    async def engine_in(worker: Remote, bundle: Bundle) -> Remote:
        loading = worker.call("make_engine", in_worker(config, bundle), *given)
        await in_time(loading, f"{worker}: to load {config.model.path}")
        return worker

    async def another(number: int) -> Remote:
        return await engine_in(await cluster.actor(Worker, engines[number]), engines[number])

    made: list[Any] = await asyncio.gather(_learner(setup, kl, cluster), *map(another, range(len(engines))))
    (learner, workers), found = made[0], made[1:]
    sync, in_turn = RaySync(backend_of(config, cluster.bundles), tell), config.runtime.deterministic
    if engines:
        version = await found[0].call("version")  # vLLM begins without weights
        fleet = Fleet(found, another, tell, partial(sync.give, learner), in_turn, cluster.leave, version)
    else:  # a whole model in main memory at a time
        found = [await engine_in(*pair) for pair in zip(workers, cluster.of("learner"), strict=True)]
        fleet = Fleet(found, None, tell, None, in_turn, cluster.leave)
    for number, worker in enumerate(workers):
        fleet.watch(worker, f"rank {number} of {len(workers)} failed")
    look = Nodes(cluster, fleet.facts).look
    return Placed(learner, fleet, None, sync, model, stop_ids, learner.built.fingerprint, None, fleet.counts, look)


async def _learner(setup: Setup, kl: AdaptiveKL, cluster: Cluster) -> tuple[RankedLearner, list[Remote]]:
    config, bundles = setup.config, cluster.of("learner")
    workers = await asyncio.gather(*(cluster.actor(Worker, bundle) for bundle in bundles))
    for number, (worker, bundle) in enumerate(zip(workers, bundles, strict=True)):
        await worker.call("make_rank", number, len(workers), "cuda:0" if bundle.gpus else "cpu")
    packer = Packer()
    learner = RankedLearner([Rank(worker, packer) for worker in workers], kl)
    adapted = find_adapter(config.model.path) is not None
    loading = learner.start(
        workers[0].node,
        in_worker(config, bundles[0]),
        sharded=shards(config) and (config.runtime.learner.sharded or not adapted),
        cpu_offload=config.runtime.learner.cpu_offload,
        objective=setup.overrides.objective,
    )
    await in_time(loading, f"{', '.join(map(str, workers))}: to load {config.model.path}")
    return learner, workers
