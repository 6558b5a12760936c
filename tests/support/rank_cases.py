"""What a rank of the tests can do: updates on small models, alone or with others of its pool."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from training_cases import make_inputs, weights_of

from dapo.algorithm.objective import DapoObjective
from dapo.config import TrainingConfig
from dapo.config.sections import ModelConfig
from dapo.errors import ConfigError
from dapo.model.compiling import compile_layers
from dapo.model.loading import load_model
from dapo.training.faults import FaultFolder
from dapo.training.lora import begin_adapter, load_trainable
from dapo.training.parallel import shards
from dapo.training.parallel.holding import Replica
from dapo.training.parallel.ranks import ProcessRanks
from dapo.training.parallel.sharded import Sharded
from dapo.training.parallel.worker import RankWorker
from dapo.training.trainer import Trainer
from helpers import random_model

CPU = torch.device("cpu")


def held_by(ranks, how):
    return Sharded(ranks, CPU, how == "offloaded") if how in ("sharded", "offloaded") else Replica(ranks)


def trainer_of(held=None, model="qwen2", dtype="float32", lora=None, **settings):
    """A trainer of random weights, the same ones on every rank. ``lora``: folder of the base of an adapter."""
    loaded = random_model(model)
    if lora is None:
        loaded = load_model(loaded)
    else:
        if not (lora / "base").exists():
            loaded.save_pretrained(lora / "base")
        config = ModelConfig(path=str(lora / "base"), lora={"rank": 4})
        loaded = begin_adapter(load_trainable(config.path, config), config, 0)
    defaults = {"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.5, "tokens_per_micro_batch": 64}
    defaults["adam_epsilon"] = 1e-4  # with a small one, a gradient that is noise alone moves a weight by the whole rate
    return Trainer(loaded, TrainingConfig(**(defaults | settings)), 1.0, getattr(torch, dtype), held)


def numbers(report):
    """Of a report, but for times."""
    names = ("loss", "grad_norm", "skipped", "tokens", "response_tokens", "loss_tokens", "statistics", "mismatch")
    return {name: getattr(report, name) for name in (*names, "logprobs", "entropy")}


def results_of(trainer, updates, objective=None, mode="token-mean"):
    """Log-probs before, reports, and the weights afterwards."""
    found = {"logprobs": trainer.logprobs(updates[0]).numpy(), "reports": []}

    def take(*_):
        gradients = [trainer.policy.held.whole(name, p.grad) for name, p in trainer._parameters.items()]
        found["gradient"] = torch.cat([gradient.flatten() for gradient in gradients]).numpy()

    trainer._optimizer.register_step_pre_hook(take)
    for batch in updates:
        report = trainer.update(batch, make_inputs(batch, mode), objective or DapoObjective())
        found["reports"].append(numbers(report))
    found["weights"] = weights_of(trainer).numpy()
    found["version"] = trainer.version
    return found


class RankOfTests(RankWorker):
    """A process of the pool: rank ``rank`` of ``size``, of its first two, and alone."""

    def join(self, address, timeout_s):
        super().join(address, timeout_s)
        few = {size: dist.new_group(list(range(size))) for size in (1, 2)}
        self.sets = {size: ProcessRanks(group) for size, group in few.items() if self.rank < size}
        self.sets[self.size] = self.ranks

    def run(self, size, function, *args, **keywords):
        """``function(ranks, ...)``; None on a rank that is not among the first ``size``."""
        if self.rank < size:
            return function(self.sets[size], *args, **keywords)
        return None


class WaitingWorker(RankWorker):
    """One that can be told to wait."""

    def wait(self, seconds):
        """Rank 0 for rank 1, which sleeps."""
        if self.rank == 1:
            time.sleep(seconds)
        self.ranks.gather(None)

    def slow_disk(self, seconds):
        save = shards.save_file
        shards.save_file = lambda *args, **keywords: (time.sleep(seconds), save(*args, **keywords))

    def undiagnosed(self, batch):
        return undiagnosed(self.ranks, "sharded", batch)

    def published(self):
        """How many times; all tensors are taken."""
        version, weights = self.publish()
        return version if all(True for _ in weights) else None


# --- what they run ------------------------------------------------------------------------------------------------


def train(ranks, how, updates, objective=None, mode="token-mean", **settings):
    return results_of(trainer_of(held_by(ranks, how), **settings), updates, objective, mode)


def compiled(ranks, how, updates):
    """With layers compiled as on a GPU, but for the code: ``(results, graphs)``."""
    torch._dynamo.reset()
    counters.clear()
    trainer = trainer_of(held_by(ranks, how))
    compile_layers(trainer.policy.model, backend="eager")
    return results_of(trainer, updates), counters["stats"]["unique_graphs"]


def stopped(ranks, how, batch, folder):
    """An update with an advantage that is not finite: ``(report, weights, weights before)``."""
    trainer = trainer_of(held_by(ranks, how))
    before = weights_of(trainer).numpy()
    if folder is not None and ranks.rank == 0:
        trainer.faults = FaultFolder(folder)
    inputs = make_inputs(batch)
    inputs.advantages[int(np.flatnonzero(batch.group_ids == 2)[1])] = np.nan
    return trainer.update(batch, inputs, DapoObjective()), weights_of(trainer).numpy(), before


def interrupted(ranks, how, batch):
    """Two updates that end midway, at the first and the second micro-batch, and a whole one: ``(report, weights)``."""
    trainer = trainer_of(held_by(ranks, how), tokens_per_micro_batch=32)
    for good in (0, 1):
        objective, calls = DapoObjective(), iter(range(good))

        def ending(*args, calls=calls, objective=objective):
            if next(calls, None) is None:
                raise ConfigError("the objective does not go on")
            return objective(*args)

        with pytest.raises(ConfigError, match="does not go on"):
            trainer.update(batch, make_inputs(batch), ending)
    return trainer.update(batch, make_inputs(batch), DapoObjective()), weights_of(trainer).numpy()


def undiagnosed(ranks, how, batch):
    """An update that is not finite, whose cause rank 1 has no memory to look for."""
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:

            def fail(*args):
                raise torch.OutOfMemoryError("no memory to diagnose")

            patch.setattr("dapo.training.trainer.diagnose", fail)
        return stopped(ranks, how, batch, None)[0].skipped


def nowhere(ranks, how):
    """``(name -> shape of what is published, whether head and embedding are one storage)``."""
    trainer = trainer_of(held_by(ranks, how))
    model = trainer.policy.model
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return {name: tuple(p.shape) for name, p in trainer.publish()[1]}, head is embedding


def stored(ranks, how, updates, folder, full=None, dtype=None):
    """``(weights, files)`` after updates, written into ``folder``. ``full``: rank whose disk is full."""
    trainer = trainer_of(held_by(ranks, how))
    found = results_of(trainer, updates)["weights"]
    with pytest.MonkeyPatch.context() as patch:
        if full == ranks.rank:

            def fail(*args, **keywords):
                raise OSError("the disk is full")

            patch.setattr("dapo.training.parallel.shards.save_file", fail)
        trainer.save(folder / "model", **({} if dtype is None else {"dtype": getattr(torch, dtype)}))
        trainer.save_state(folder / "optimizer")
    return found, sorted(path.name for path in folder.rglob("*"))


def restored(ranks, how, batch, folder):
    """``(weights, report, updates)`` after one more update."""
    trainer = trainer_of(held_by(ranks, how))
    with torch.no_grad():
        for parameter in trainer._parameters.values():
            parameter.add_(1.0)  # all of it comes from the files
    trainer.load(folder / "model")
    trainer.load_state(folder / "optimizer")
    report = trainer.update(batch, make_inputs(batch), DapoObjective())
    return weights_of(trainer).numpy(), report, trainer.updates
