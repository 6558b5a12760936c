"""N ranks give what one process gives, whatever the cut: two or three processes of one pool."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_cases import SHAPE, make_group, make_inputs, make_sample, make_trainer, packed, random_groups

from dapo.algorithm.objective import DapoObjective
from dapo.errors import ConfigError, UserError
from dapo.training.packing import cut
from dapo.training.parallel.ranks import Ranks
from own_methods import Gspo, preference
from rank_cases import (
    RankOfTests,
    compiled,
    interrupted,
    nowhere,
    restored,
    stopped,
    stored,
    train,
    trainer_of,
    undiagnosed,
)
from rank_processes import RankProcess, on_all

UPDATES = [packed(random_groups(SHAPE, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def pool():
    processes = [RankProcess(RankOfTests, rank, 3) for rank in range(3)]
    try:
        processes[0].send("open", "127.0.0.1")
        on_all(processes, "join", processes[0].receive(), 60)
        yield lambda size, function, *args, **keywords: on_all(processes, "run", size, function, *args, **keywords)[
            : max(1, size)
        ]
    finally:
        for process in processes:
            process.stop()


def assert_same(found, expected, tolerance=1e-5):
    """Log-probs, gradient, reports and the weights after them, but for the noise of float32."""
    np.testing.assert_allclose(found["logprobs"], expected["logprobs"], atol=tolerance)
    np.testing.assert_allclose(found["weights"], expected["weights"], atol=tolerance)
    gradient = found.get("gradient", np.zeros(1))  # of the last update; none: nothing was in the loss
    np.testing.assert_allclose(gradient, expected.get("gradient", np.zeros(1)), atol=tolerance)
    for one, other in zip(found["reports"], expected["reports"], strict=True):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=1e-6), name
        for name in ("tokens", "response_tokens", "loss_tokens", "skipped"):
            assert one[name] == other[name]
        assert one["statistics"].keys() == other["statistics"].keys()
        for name, pair in one["statistics"].items():
            assert pair == pytest.approx(other["statistics"][name], rel=1e-4, abs=1e-4), name
        assert one["mismatch"].tokens == other["mismatch"].tokens
        assert one["mismatch"].mean == pytest.approx(other["mismatch"].mean, rel=1e-4, nan_ok=True)
        for name in ("logprobs", "entropy"):
            assert (one[name] is None) == (other[name] is None)
            if one[name] is not None:
                np.testing.assert_allclose(one[name], other[name], atol=2e-3 if name == "entropy" else tolerance)


@pytest.mark.parametrize("how", ["whole", "sharded", "offloaded"])
@pytest.mark.parametrize("objective, mode", [(DapoObjective(), "token-mean"), (Gspo(0.2, 0.3), "seq-mean-token-mean")])
def test_two_updates_are_those_of_one_process(pool, how, objective, mode):
    expected = train(Ranks(), "whole", UPDATES, objective, mode)
    for size in (1, 2, 3):
        found = pool(size, train, how, UPDATES, objective, mode)
        assert len(found) == size
        for one in found:
            assert_same(one, expected)
            np.testing.assert_array_equal(one["weights"], found[0]["weights"])  # all ranks have the same ones


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_number_of_ranks_and_no_budget_changes_an_update(pool, data):
    """Fewer sequences than ranks, empty responses and groups larger than the budget included."""
    lengths = st.lists(st.integers(0, 14), min_size=1, max_size=4)
    shape = data.draw(st.lists(st.tuples(st.integers(1, 6), lengths), min_size=1, max_size=4))
    out = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
    batch = packed(random_groups(shape, data.draw(st.integers(0, 2**16)), lambda *place: place not in out))
    budget = int(batch.lengths.max()) + data.draw(st.integers(0, 60))
    objective = data.draw(st.sampled_from([DapoObjective(), Gspo(0.2, 0.3)]))
    size, how = data.draw(st.sampled_from([(2, "whole"), (2, "sharded"), (3, "sharded")]))
    expected = train(Ranks(), "whole", [batch], objective, tokens_per_micro_batch=budget)
    for one in pool(size, train, how, [batch], objective, tokens_per_micro_batch=budget):
        assert_same(one, expected, 1e-4)


def test_pairs_stay_whole(pool):
    samples = [[make_sample(np.arange(n) % 40, advantage=a) for n, a in pair] for pair in ([(5, 1.0), (3, -1.0)],) * 3]
    batch = packed([make_group(draw, [1, 2], two) for draw, two in enumerate(samples)])
    batch = batch.with_columns(reference=batch.behaviour_logprobs)
    expected = train(Ranks(), "whole", [batch], preference, "seq-mean-token-mean")
    for one in pool(2, train, "sharded", [batch], preference, "seq-mean-token-mean"):
        assert_same(one, expected)


@pytest.mark.parametrize("model", ["qwen2", "llama"])  # of the second the head is a tensor of its own
@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_a_rank_that_has_nothing_adds_nothing(pool, how, model):
    batch = packed(random_groups([(3, [5])]))  # one sequence for three ranks
    expected = train(Ranks(), "whole", [batch, UPDATES[0]], model=model)
    for one in pool(3, train, how, [batch, UPDATES[0]], model=model):
        assert_same(one, expected)


@pytest.mark.parametrize(
    "change", [{"model": "llama"}, {"activation_checkpointing": True}, {"offload_optimizer": True}]
)
def test_options_of_the_trainer_do_as_in_one_process(pool, change):
    expected = train(Ranks(), "whole", UPDATES, **change)
    for one in pool(2, train, "sharded", UPDATES, **change):
        assert_same(one, expected)


def test_bfloat16_differs_by_its_rounding_alone(pool):
    expected = train(Ranks(), "whole", UPDATES[:1], dtype="bfloat16")
    for one in pool(2, train, "sharded", UPDATES[:1], dtype="bfloat16"):
        np.testing.assert_allclose(one["logprobs"], expected["logprobs"], atol=0.02)
        assert one["reports"][0]["grad_norm"] == pytest.approx(expected["reports"][0]["grad_norm"], rel=0.01)


def test_two_ranks_repeat_to_the_bit(pool):
    first, second = (pool(2, train, "sharded", UPDATES) for _ in range(2))
    assert first[0]["reports"] and str(first) == str(second)
    np.testing.assert_array_equal(first[0]["weights"], second[0]["weights"])


def test_an_adapter_is_trained_on_whole_copies(pool, tmp_path):
    expected = train(Ranks(), "whole", UPDATES, lora=tmp_path)
    for one in pool(2, train, "whole", UPDATES, lora=tmp_path):
        assert_same(one, expected)
        assert len(one["weights"]) == len(expected["weights"]) < 20_000
    with pytest.raises(ConfigError, match=r"model\.lora: .* whole on every rank"):
        pool(2, train, "sharded", UPDATES, lora=tmp_path)


def test_compiled_layers_are_sharded_ones_too(pool):
    """In whole graphs, and one for all layers of a kind."""
    expected = train(Ranks(), "whole", UPDATES[:1])
    for found, graphs in pool(2, compiled, "sharded", UPDATES[:1]):
        assert_same(found, expected)
        assert graphs <= 2  # with a gradient and without


def test_what_is_not_finite_is_skipped_on_all_ranks_and_found(pool, tmp_path):
    for place, (report, weights, before) in enumerate(pool(2, stopped, "sharded", UPDATES[0], tmp_path)):
        assert report.skipped is not None and "draw 2" in report.skipped
        np.testing.assert_array_equal(weights, before)
        assert ("batch and a report are in" in report.skipped) == (place == 0)


@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_an_update_that_failed_midway_leaves_no_gradient(pool, how):
    expected, weights = interrupted(Ranks(), "whole", UPDATES[0])
    for report, found in pool(2, interrupted, how, UPDATES[0]):
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        np.testing.assert_allclose(found, weights, atol=1e-5)


def test_whole_copies_skip_an_update_that_one_of_them_cannot_diagnose(pool):
    one, other = pool(2, undiagnosed, "whole", UPDATES[0])
    assert "draw 2" in one and other.startswith("not finite")


# --- the weights, handed over and stored --------------------------------------------------------------------------


def test_published_are_whole_tensors_once_each_and_the_tied_one_is_one_storage(pool):
    trainer = trainer_of()
    shapes = {name: tuple(p.shape) for name, p in trainer.publish()[1]}
    for names, tied in pool(2, nowhere, "sharded"):
        assert names == shapes and "lm_head.weight" not in names and tied


@pytest.mark.parametrize("how, size, then", [("sharded", 2, 1), ("sharded", 2, 3), ("sharded", 3, 2), ("whole", 2, 1)])
def test_a_checkpoint_goes_on_on_another_number_of_ranks(pool, tmp_path, how, size, then):
    """And in one process, from which it goes on on any number of ranks."""
    expected = train(Ranks(), "whole", [*UPDATES, UPDATES[0]])
    pool(size, stored, how, UPDATES, tmp_path / "by-ranks")
    if how == "sharded":  # one rank did not write it all
        index = json.loads((tmp_path / "by-ranks/model/model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) == size
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*.bin"))
    for found in [restored(Ranks(), "whole", UPDATES[0], tmp_path / "by-ranks"),
                  *pool(then, restored, "sharded", UPDATES[0], tmp_path / "by-ranks")]:  # fmt: skip
        np.testing.assert_allclose(found[0], expected["weights"], atol=1e-5)
        assert found[1].loss == pytest.approx(expected["reports"][2]["loss"], abs=1e-5)
        assert found[2] == 3
    stored(Ranks(), "whole", UPDATES, tmp_path / "alone")
    for found in pool(size, restored, how, UPDATES[0], tmp_path / "alone"):
        np.testing.assert_allclose(found[0], expected["weights"], atol=1e-5)


def test_a_rank_that_cannot_write_leaves_nothing(pool, tmp_path):
    with pytest.raises(
        UserError, match="rank 1: OSError: the disk is full"
    ):  # rank 0, whose error this is, says so too
        pool(2, stored, "sharded", UPDATES[:1], tmp_path / "run", full=1)
    assert not list((tmp_path / "run").glob("*"))
    pool(2, stored, "sharded", UPDATES[:1], tmp_path / "run")


def test_transformers_reads_what_ranks_wrote(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    (weights, _), *_ = pool(2, stored, "sharded", UPDATES, tmp_path, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.tie_word_embeddings and model.dtype == torch.bfloat16
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    np.testing.assert_array_equal(found.float(), torch.from_numpy(weights).bfloat16().float())


# --- the cut ------------------------------------------------------------------------------------------------------


def computed_tokens(batch, rows):
    """A prompt that rows share is computed once."""
    _, first = np.unique(batch.prompt_numbers[rows], return_index=True)
    return int(batch.response_lengths[rows].sum() + batch.prompt_lengths[rows][first].sum())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_rank_gets_as_many_parts_of_like_size(data):
    lengths = st.lists(st.integers(0, 30), min_size=1, max_size=8)
    shape = data.draw(st.lists(st.tuples(st.integers(1, 9), lengths), min_size=1, max_size=6))
    batch = packed(random_groups(shape))
    ranks, budget = data.draw(st.integers(1, 4)), int(batch.lengths.max()) + data.draw(st.integers(0, 90))
    parts = cut(batch, budget, ranks=ranks)
    assert len(parts) % ranks == 0
    assert sorted(np.concatenate(parts).tolist()) == list(range(batch.num_samples))
    rounds = [[computed_tokens(batch, rows) for rows in parts[k : k + ranks]] for k in range(0, len(parts), ranks)]
    if len(rounds) == 1 and ranks > 1:  # no rank waits for more than one sequence longer than it had to
        assert max(rounds[0]) - batch.lengths.max() <= batch.lengths.sum() / ranks


def test_groups_stay_together_where_that_costs_nothing():
    batch = packed(random_groups([(20, [5] * 4)] * 4))
    assert [np.unique(batch.draws[rows]).size for rows in cut(batch, 1000, ranks=2)] == [2, 2]
    alone = packed(random_groups([(2, [20] * 4)]))  # one group for two ranks
    assert [len(rows) for rows in cut(alone, 1000, ranks=2)] == [2, 2]


def test_the_reports_of_one_process_count_its_own_parts():
    trainer = make_trainer(tokens_per_micro_batch=20)
    report = trainer.update(UPDATES[0], make_inputs(UPDATES[0]), DapoObjective())
    assert report.micro_batches == len(cut(UPDATES[0], 20))
