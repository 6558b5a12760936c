"""Sampling by difficulty: its posterior, its floor, exact resume, and how much less it wastes than uniform draws."""

import math
from collections import Counter

import numpy as np
import pytest
from data_cases import PLAIN, draws, numbered, source
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.config import DataConfig
from dapo.data.difficulty import DifficultyStream, chance_mixed, told_by
from dapo.data.parts import Rows, open_parts
from dapo.data.source import load_prompts
from dapo.data.stream import Stream
from dapo.errors import DataError
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.encoded_state import EncodedState, read_state
from dapo.records import Group, Prompt, Reward, Sample
from run_cases import PROMPTS, run, steps_of, weights_hash

ONE = np.zeros(1, np.int32)


def group(row, right, size=8, version=0, draw=0):
    rewards = [Reward(k < right, float(k < right)) for k in range(size)]
    samples = [
        Sample(draw, k, ONE, ONE.astype(np.float32), ONE + version, "stop", reward=reward)
        for k, reward in enumerate(rewards)
    ]
    return Group(draw, Prompt(row, "", ()), tuple(samples))


def config(**keys):
    return DataConfig(template="plain", sampling="difficulty", **keys)


def bank(count, **columns):
    """Rows that differ in these columns only."""
    return in_memory([{"prompt": "p"} | {name: column[k] for name, column in columns.items()} for k in range(count)])


def in_memory(rows):
    return Rows(open_parts(DataConfig(), rows, answer_required=False)[0])


def planted(sampling, seed, rows=400, steps=80, centre=0.0, told=None, **keys):
    """Right samples of each group by step, and how often each row was drawn, where the pass rate of each row is known
    and rises as the policy learns. ``told``: how much of the variance of the difficulty a column explains."""
    rng = np.random.default_rng(seed)
    skill = rng.normal(centre, 3.0, rows)
    share = told or 0
    column = math.sqrt(share) * (skill - centre) / 3 + math.sqrt(1 - share) * rng.normal(size=rows)
    found = bank(rows, level=column) if told is not None else bank(rows)
    data = DataConfig(template="plain", sampling=sampling, **keys)
    stream = (DifficultyStream if sampling == "difficulty" else Stream)(
        found, 0, data, seed, *[8][: sampling[0] == "d"]
    )
    seen, right = Counter(), []
    for step in range(steps):
        drawn = [stream.next() for _ in range(32)]
        seen.update(drawn)
        right.append(rng.binomial(8, 1 / (1 + np.exp(-skill[drawn] - 2 * step / steps))))
        stream.heard({row: [group(row, k, version=step)] for row, k in zip(drawn, right[-1], strict=True)})
    return np.array(right), seen


def wasted(right):
    return np.isin(right, (0, 8)).mean()


@pytest.mark.parametrize("seed", [1, 2])
def test_at_least_30_percent_fewer_samples_are_wasted_and_no_prompt_is_forgotten(seed):
    uniform, _ = planted("uniform", seed)
    right, seen = planted("difficulty", seed)
    assert wasted(right) < 0.7 * wasted(uniform)
    assert len(seen) > 0.97 * 400


def test_columns_that_tell_the_difficulty_save_first_visits_and_others_cost_nothing():
    none, noise, some = (wasted(planted("difficulty", 3, 4000, 40, -5.0, told)[0]) for told in (None, 0.0, 0.5))
    assert some < 0.75 * none and noise < 1.1 * none, (none, noise, some)


def test_a_curriculum_goes_from_easy_to_hard():
    targets = ((0.5, 0.5, 1), (0.8, 0.3, 60))
    even, moving = (planted("difficulty", 1, sampling_target=target)[0].mean(axis=1) / 8 for target in targets)
    assert moving[10:25].mean() > even[10:25].mean() + 0.05 and moving[-15:].mean() < even[-15:].mean() - 0.05


def test_what_rows_tell_is_ranks_whatever_is_missing_or_no_number():
    rows = [
        {"prompt": "a1" * (k + 1), "answer": k, "level": f"Level {9 - k}", "rate": [0.5, None][k % 2]} for k in range(4)
    ]
    told = told_by(in_memory([*rows, {"prompt": "ab", "answer": "x", "note": "no", "flag": True, "list": [1]}]))
    assert told.shape == (5, 6) and (told[:, 0] == 1).all()
    assert (np.argsort(told[:4, 3]) == np.arange(4)).all() and (np.argsort(told[:4, 1]) == np.arange(3, -1, -1)).all()
    assert told[4, 1] == 0 and not told[:, 2].any() and told[:, [1, 3, 4, 5]].std(axis=0) == pytest.approx(1)


@given(st.floats(0.1, 40), st.floats(0.1, 40), st.integers(1, 16))
def test_the_chance_of_a_mixed_group_is_that_of_the_beta_distribution(right, wrong, size):
    def beta(a, b):
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    alike = sum(math.exp(beta(a + size, b) - beta(a, b)) for a, b in ((right, wrong), (wrong, right)))
    assert chance_mixed(np.array(right), np.array(wrong), size) == pytest.approx(1 - alike, abs=1e-9)


def test_every_prompt_keeps_the_floor_whatever_is_known_of_it():
    stream = DifficultyStream(bank(20), 0, config(sampling_floor=0.4, sampling_half_life=1e9), 1, 8)
    for version in range(30):
        stream.heard({row: [group(row, 4 if row == 0 else 8, version=version)] for row in range(20)})
    found = Counter()
    for _ in range(4000):
        found[stream.next()] += 1
        stream._busy.clear()
    assert min(found[row] for row in range(20)) > 4000 * 0.4 / 20 * 0.6 and found[0] > 0.5 * 4000


def test_what_is_known_fades_with_the_versions():
    stream = DifficultyStream(bank(40), 0, config(sampling_half_life=2), 1, 8)
    stream.heard({row: [group(row, 8 if row % 2 else 4)] for row in range(40)})
    before = stream.metrics()["sampling/expected_uniform"], stream._mixed[1], stream._mixed[0]
    stream.heard({0: [group(0, 4, version=30)]})
    assert before[1] < 0.45 < 0.9 < before[2] and stream._mixed[1] > before[1] + 0.2
    assert stream._mixed[0] > 0.9 and stream.metrics()["sampling/known"] == 1


@pytest.mark.parametrize("right", [0, 8])
@pytest.mark.parametrize("rows", [1, 40])
def test_where_nothing_is_mixed_all_prompts_are_drawn_alike(rows, right):
    found, counts = source([{"prompt": f"p{k}", "answer": k} for k in range(rows)], sampling="difficulty"), Counter()
    for version in range(100):
        drawn = draws(found, 4)
        counts.update(drawn)
        found.feedback([group(row, right, version=version) for row in drawn])
    assert len(counts) == rows and max(counts.values()) < 3 * 400 / rows
    assert 0 < found.metrics()["sampling/expected_uniform"] < 0.05


def test_a_file_that_is_named_twice_has_two_posteriors_and_a_changed_one_is_named(tmp_path):
    file = numbered(tmp_path, 20)
    found = source({"path": str(file), "weight": 1}, {"path": str(file), "weight": 3}, sampling="difficulty")
    counts = Counter(row // 20 for row in draws(found, 400))
    assert 60 < counts[0] < 140 and counts[0] + counts[1] == 400
    state = found.state()
    numbered(tmp_path, 21)
    with pytest.raises(DataError, match=r"the data has changed since the checkpoint:\n1 rows.jsonl.rows: was 20"):
        source(file, sampling="difficulty").load_state(state)


def test_no_prompt_is_drawn_twice_before_it_is_heard_of_and_unusable_ones_are_left_out():
    rows = [{"prompt": "x" * (9 if k % 3 else 3), "answer": k} for k in range(30)]
    found = source(rows, max_prompt_length=5, sampling="difficulty")
    first = draws(found, 5)
    assert len(set(first)) == 5 and all(row % 3 == 0 for row in first)
    found.feedback([group(row, 4) for row in first])
    assert set(draws(found, 300)) == set(range(0, 30, 3)) and found.too_long == 20
    with pytest.raises(DataError, match="no prompt is left"):
        source(rows[1:3], max_prompt_length=5, sampling="difficulty")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.lists(st.integers(0, 8), min_size=30, max_size=30), st.integers(0, 29))
def test_a_position_that_was_saved_anywhere_gives_the_same_draws(tmp_path_factory, seed, rights, cut):
    files = [{"prompt": f"p{k}", "answer": k} for k in range(12)]

    def fresh():
        return load_prompts(config(), files, PLAIN, seed=seed, group=8)

    def play(prompts, begin, end, pending):
        drawn = []
        for number in range(begin, end):
            drawn.append(prompts.next().row)
            pending.append(group(drawn[-1], rights[number], version=number))
            if number % 3 == 2:
                prompts.feedback(pending)
                pending.clear()
        return drawn

    whole, first, other, pending = fresh(), fresh(), fresh(), []
    before = play(first, 0, cut, pending)
    folder = tmp_path_factory.mktemp("state")
    EncodedState(first.state()).write(folder)
    other.load_state(read_state(folder))
    assert other.metrics() == first.metrics()
    assert before + play(other, cut, 30, pending) == play(whole, 0, 30, [])
    assert other.metrics() == whole.metrics() and other.epoch == whole.epoch


def test_a_resumed_run_draws_the_same_prompts(tmp_path):
    keys = {"data.sampling": "difficulty", "data.sampling_target": [0.9, 0.1, 3]}
    keys |= {"training.steps": 4, "run.save_every": 1}
    run(tmp_path / "whole", keys)
    run(tmp_path / "two", keys | {"training.steps": 2})
    run(tmp_path / "two", keys, resume=RunFolder(tmp_path / "two"))
    assert weights_hash(tmp_path / "two/model-after") == weights_hash(tmp_path / "whole/model-after")
    told = [entry["sampling/expected"] for entry in steps_of(tmp_path / "whole")]
    assert told == [entry["sampling/expected"] for entry in steps_of(tmp_path / "two")] and 0 < min(told) < 1
    run(tmp_path / "uniform", keys | {"data.sampling": "uniform"})
    assert weights_hash(tmp_path / "uniform/model-after") != weights_hash(tmp_path / "whole/model-after")
    assert len(PROMPTS) == 40
