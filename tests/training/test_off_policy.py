"""Stale tokens in the learner: their age in optimizer updates, and pi_prox interpolated by it."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import SHAPE, distance, make_inputs, make_trainer, packed, random_groups, weights_of

from dapo.algorithm.kl import AdaptiveKL
from dapo.algorithm.objective import DapoObjective
from dapo.config import build_config, nested
from dapo.config.sections import MOST_STALE
from dapo.records import TokenBatch
from dapo.training.learner import LocalLearner
from dapo.training.mismatch import measure_mismatch
from dapo.training.snapshot import snapshot
from dapo.training.trainer import Trainer
from dapo.training.update_report import Mismatch, UpdateReport

STALE = {"model.path": "tiny", "rollout.max_staleness": 2, "rollout.max_response_length": 20,
         "algorithm.overlong_buffer.len": 4, "algorithm.proximal": "interpolate",
         "data.max_prompt_length": 8, "rollout.prompts_per_step": 4, "training.groups_per_update": 2,
         "training.tokens_per_micro_batch": 64}  # fmt: skip


@dataclass
class Step:
    reports: list[UpdateReport] = field(default_factory=list)


def learner_of(trainer: Trainer, objective: Any = None, **changes: Any) -> LocalLearner:
    config = build_config(nested(STALE | {key.replace("__", "."): value for key, value in changes.items()}))
    return LocalLearner(trainer, config, AdaptiveKL(0.0, None, 1), objective)


def train(trainer: Trainer, *updates: int) -> None:
    """Publish after each of these numbers of updates."""
    batch = packed(random_groups([(2, [3, 4])]))
    for count in updates:
        for _ in range(count):
            assert trainer.update(batch, make_inputs(batch), DapoObjective()).skipped is None
        trainer.publish()


def batch_of(versions: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> TokenBatch:
    """Groups with tokens of some versions, in turn."""
    batch = packed(random_groups(SHAPE, seed))
    return replace(batch, versions=np.resize(np.array(versions), batch.num_response_tokens))


# --- versions in optimizer updates --------------------------------------------------------------------------------


def test_versions_are_counted_in_optimizer_updates() -> None:
    """Pitfall 4: with several updates a push, the lag is theirs and not that of the pushes."""
    trainer = make_trainer()
    versions = np.array([2, 0, 1, 2, 0])
    assert trainer.updates_behind(np.zeros(2, np.int64)).tolist() == [0, 0]
    train(trainer, 3, 0, 2)  # a publication without an update is no version
    assert trainer.version == 2 and trainer.updates_behind(versions).tolist() == [0, 5, 2, 0, 5]
    batch = packed(random_groups([(2, [3, 4])]))
    trainer.update(batch, make_inputs(batch), DapoObjective())
    found = trainer.updates_behind(versions)
    assert found.tolist() == [1, 6, 3, 1, 6] and found.dtype == np.float32
    assert trainer.updates_behind(np.empty(0, np.int64)).shape == (0,)


def test_the_column_is_there_where_groups_may_be_stale_and_only_there() -> None:
    trainer = make_trainer()
    train(trainer, 4, 2)
    batch = learner_of(trainer).annotated(batch_of())
    assert set(batch.columns) == {"advantages", "updates_behind"}  # no forward pass
    assert batch.columns["updates_behind"][:4].tolist() == [6, 2, 0, 6]
    batch = learner_of(trainer, algorithm__proximal="auto").annotated(batch_of())
    assert set(batch.columns) == {"advantages", "updates_behind", "proximal"}
    fresh = learner_of(trainer, algorithm__proximal="auto", rollout__max_staleness=0)
    assert set(fresh.annotated(batch_of()).columns) == {"advantages"}


def test_what_is_known_of_versions_is_kept_and_a_snapshot_has_that_of_its_moment(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 3, 2)
    frozen = snapshot(trainer)
    train(trainer, 7)
    frozen.save_state(tmp_path / "then")
    again = make_trainer()
    again.load_state(tmp_path / "then")
    assert again.version == 2 and again.updates_behind(np.arange(3)).tolist() == [5, 2, 0]
    train(again, 7)
    assert again.updates_behind(np.arange(4)).tolist() == trainer.updates_behind(np.arange(4)).tolist()


@pytest.mark.parametrize("unpublished", [False, True])
def test_of_an_older_checkpoint_a_version_is_one_update_at_least(tmp_path: Path, unpublished: bool) -> None:
    trainer = make_trainer()
    train(trainer, 3, 2)
    trainer.save_state(tmp_path / "state")
    (file,) = (tmp_path / "state").glob("*.json")
    state = json.loads(file.read_text())
    del state["updates_at"]
    file.write_text(json.dumps(state | {"unpublished": unpublished}))
    trainer.load_state(tmp_path / "state")
    assert trainer.updates_behind(np.arange(3)).tolist() == [2 + unpublished, 1 + unpublished, unpublished]
    train(trainer, 4)
    assert trainer.updates_behind(np.arange(4)).tolist() == [6 + unpublished, 5 + unpublished, 4 + unpublished, 0]


def test_the_versions_that_may_be_trained_on_are_remembered_and_no_others() -> None:
    trainer, newest = make_trainer(), MOST_STALE + 3
    train(trainer, *[1] * newest)
    assert trainer.updates_behind(np.arange(3, newest + 1)).tolist() == list(range(MOST_STALE, -1, -1))
    assert len(trainer._updates_at) == MOST_STALE + 1


# --- interpolated -------------------------------------------------------------------------------------------------


def test_each_update_interpolates_by_the_weights_that_it_starts_from() -> None:
    """Sampled 6, 2 and 0 updates before training began, which has made one more by the second update."""
    trainer = make_trainer()
    train(trainer, 4, 2)
    learner, step, seen = learner_of(trainer), Step(), []
    batch = learner.annotated(batch_of())
    for index, mini in enumerate(batch.minibatches(2)):
        inputs = learner.inputs(mini)
        assert inputs.proximal_share is not None
        ages = mini.columns["updates_behind"].tolist()
        seen.append(dict(zip(ages, inputs.proximal_share.tolist(), strict=True)))
        learner._update(index, mini, step)
    assert seen == [{6: 1, 2: 1, 0: 1}, {6: pytest.approx(6 / 7), 2: pytest.approx(2 / 3), 0: 0}]
    ratio, kl = (
        [total / count for total, count in (r.statistics[name] for r in step.reports)]
        for name in ("ratio", "proximal_kl")
    )
    assert ratio[0] == 1 and kl[0] == 0 and ratio[1] != 1 and kl[1] > 0


def second_update(objective: Any = None, tokens: int = 64, **changes: Any) -> tuple[torch.Tensor, UpdateReport]:
    """Weights after, and the report of, the second update on a stale batch, in micro-batches of so many tokens."""
    trainer = make_trainer(tokens_per_micro_batch=tokens)
    train(trainer, 2, 1)
    learner, step = learner_of(trainer, objective, **changes), Step()
    batch = learner.annotated(batch_of())
    for index, mini in enumerate(batch.minibatches(2)):
        learner._update(index, mini, step)
    return weights_of(trainer), step.reports[1]


TRUNCATE = {"algorithm__correction__kind": "truncate", "algorithm__correction__cap": 1.5}


def test_the_cut_into_micro_batches_changes_nothing() -> None:
    whole, report = second_update(tokens=64, **TRUNCATE)
    parts, cut = second_update(tokens=20, **TRUNCATE)
    assert cut.micro_batches > report.micro_batches and distance(parts, whole) < 1e-6
    for name, (total, count) in report.statistics.items():
        assert cut.statistics[name] == (pytest.approx(total, rel=1e-4, abs=1e-5), count)
    weight, count = report.statistics["importance"]
    assert 0 < weight / count < 1.5 and weight / count != 1


def test_an_objective_of_the_user_gets_the_same() -> None:
    ours = DapoObjective(clip_ratio_c=10.0)

    def objective(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any) -> Any:
        assert inputs.proximal_share is None
        return ours(logprobs, entropy, inputs)

    def whole(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any) -> Any:
        return objective(logprobs, entropy, inputs)

    whole.unit = "sequence"  # type: ignore[attr-defined]
    expected, report = second_update(**TRUNCATE)
    for own in (objective, whole):
        weights, found = second_update(own, **TRUNCATE)
        assert distance(weights, expected) < 1e-6
        for name in ("ratio", "importance", "proximal_kl"):
            assert found.statistics[name] == pytest.approx(report.statistics[name], rel=1e-4)


def test_an_update_that_is_skipped_does_not_age_a_token() -> None:
    trainer = make_trainer()
    train(trainer, 2)
    learner, step = learner_of(trainer), Step()
    batch = learner.annotated(batch_of((0, 1)))
    first, second = batch.minibatches(2)
    bad = first.with_columns(advantages=np.full(first.num_response_tokens, math.nan, np.float32))
    learner._update(0, bad, step)
    assert step.reports[0].skipped is not None
    share = learner.inputs(second).proximal_share
    assert share is not None and set(share.tolist()) == {1.0}


def test_a_learner_that_goes_on_inside_a_step_ends_with_the_same_weights(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 2, 1)
    learner, resumed = learner_of(trainer, **TRUNCATE), learner_of(make_trainer(), **TRUNCATE)

    async def twice() -> None:
        first, second = (await learner.annotate(batch_of())).minibatches(2)
        step = Step()
        await learner.update(0, 0, first, step)
        (await learner.snapshot()).write(tmp_path, ())
        await learner.update(0, 1, second, step)
        await resumed.load(tmp_path)
        await resumed.update(0, 1, second, Step(step.reports[:1]))

    asyncio.run(twice())
    asyncio.run(learner.close())
    asyncio.run(resumed.close())
    assert torch.equal(weights_of(resumed.trainer), weights_of(trainer))


# --- mismatch -----------------------------------------------------------------------------------------------------


def test_mismatch_is_of_samples_wholly_of_the_version() -> None:
    """The later tokens of a continued sample stand on keys and values of older weights."""
    batch = packed(random_groups([(2, [3, 2, 0, 4])]))
    batch = replace(batch, versions=np.array([1, 1, 1, 1, 2, 2, 2, 2, 2]))
    trainer = torch.from_numpy(batch.behaviour_logprobs).clone()
    trainer[-4:] += torch.tensor([0.09, -0.09, 0.11, -0.11])
    found = measure_mismatch(batch, trainer, 2)
    assert (found.tokens, found.tail) == (4, 2)  # exp(0.09) and exp(-0.09) are inside of [0.9, 1.1]
    assert found.mean == pytest.approx(0.1, rel=1e-4)
    assert measure_mismatch(batch, trainer, 3) == Mismatch()
    trainer[-1] = math.nan
    assert measure_mismatch(batch, trainer, 2).tail == 2
