"""Whole runs over episodes: a tiny random model, real engine, learner, checkpoints and samples on disk."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dapo.algorithm.credit import with_turn_advantages
from dapo.commands.inspect.sample_report import show
from dapo.config import build_config, nested
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples, samples_path
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.records import NOBODY, Group, Prompt, Reward, Sample, Turn
from episodes import chat_tokenizer
from run_cases import Recorder, run, steps_of, tiny_model, weights_hash, without_times

SUPPORT = Path(__file__).parents[1] / "support"
CHANGES = {
    "data.template": "chat",
    "data.max_prompt_length": 400,
    "rollout.max_response_length": 120,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 3,
    "training.groups_per_update": 1,
    "training.steps": 2,
    "training.tokens_per_micro_batch": 1600,
    "algorithm.overlong_buffer.enable": False,
    "algorithm.filter_groups.enable": False,
    "environment.name": f"{SUPPORT}/environments_for_tests.py:Chatter",
    "environment.max_turn_tokens": 12,
    "environment.workers": 2,
    "run.save_samples": 1.0,
}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]


def train(folder, changes=None, tokenizer=None, listener=None, **inputs):
    tokenizer = tokenizer or chat_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024)
    given = {"model": model, "tokenizer": tokenizer, "rows": ROWS, "reward": None} | inputs
    return run(folder, CHANGES | (changes or {}), listener or Recorder(), **given)


def lines_of(folder, step=1):
    return read_samples(samples_path(RunFolder(folder).samples, step))


def test_a_run_over_episodes_learns_from_what_the_model_said(tmp_path):
    for name in ("a", "b"):
        train(tmp_path / name, {"evaluation.every": 1, "evaluation.samples_per_prompt": 2}, heldout=ROWS[:2])
    first, again = (list(map(without_times, steps_of(tmp_path / name))) for name in ("a", "b"))
    assert first == again  # deterministic, whenever environments answer
    assert weights_hash(tmp_path / "a" / "model-after") == weights_hash(tmp_path / "b" / "model-after")
    assert weights_hash(tmp_path / "a" / "model-after") != weights_hash(tmp_path / "a" / "model-before")
    lines = lines_of(tmp_path / "a")
    for metrics, step in zip(first, (1, 2), strict=True):
        lines = lines_of(tmp_path / "a", step)
        assert metrics["mismatch/max"] < 1e-4  # the learner sees what the engine saw, environment and all
        own = [b - a for line in lines for a, b, stop, *_ in line["turns"]]
        whole = [b - a for line in lines for a, b, stop, *_ in line["turns"] if stop != "length"]
        assert metrics["tokens/loss"] == sum(whole) < sum(own) == metrics["tokens/generated"]
        assert metrics["response_length/mean"] == pytest.approx(sum(own) / len(lines))
        assert 0 <= metrics["eval/accuracy"] <= 1 and 0 < metrics["eval/response_length"] <= 36
    shown = "\n".join(show({**lines[0], "sample": 0, "step": 2}, 100, True))
    assert "turn 1" in shown and "reply    | <tool" not in shown and "ended" in shown


def test_the_run_is_replayed_to_the_same(tmp_path):
    from dapo.commands.replay.replay import replay
    from dapo.commands.replay.stored import read_step

    train(tmp_path / "run", {"training.steps": 1}, chat_tokenizer(shorten=True))
    stored = read_step(RunFolder(tmp_path / "run"), 1)
    samples = [sample for group, _ in stored.groups for sample in group.samples]
    assert not stored.faults and any(sample.more for sample in samples)
    for sample in samples:
        assert all((part.versions[~part.loss_mask] == NOBODY).any() or len(part.turns) for part in sample.parts)
        assert sample.length == sum(turn.end - turn.start for part in sample.parts for turn in part.turns)
    again = replay(tmp_path / "run", 1)
    assert not again.differences and again.updates and all(one["recomputed"] for one in again.updates)
    assert [text.partition(":")[0] for text in again.missing] == ["rewards"]


def test_conversations_that_cannot_be_appended_are_trained_on_as_they_were_sampled(tmp_path):
    train(tmp_path, {"algorithm.kl.mode": "reward", "environment.credit": "turn"}, chat_tokenizer(shorten=True))
    lines = lines_of(tmp_path)
    assert sum(len(line["more"]) for line in lines) > len(lines)
    for metrics in steps_of(tmp_path):
        assert metrics["mismatch/max"] < 1e-4


@pytest.mark.parametrize("policy", ["keep", "drain", "restart"])
def test_new_weights_within_an_episode(tmp_path, policy):
    listener = Recorder()
    changes = {"rollout.max_staleness": 1, "rollout.in_flight": policy, "runtime.deterministic": False}
    train(tmp_path, changes | {"training.steps": 4}, listener=listener)
    metrics = steps_of(tmp_path)
    fates = [key for key in metrics[-1] if key.startswith("draws/")]
    last = {key.removeprefix("draws/"): metrics[-1][key] for key in fates}
    assert last.pop("produced") == sum(last.values())
    if policy != "keep":
        versions = [line["versions"] for step in (1, 2, 3, 4) for line in lines_of(tmp_path, step)]
        assert all(first == last for first, last in versions)


def test_a_run_that_was_interrupted_begins_unfinished_episodes_anew(tmp_path):
    from dapo.errors import UserError

    seen = itertools.count()

    def stop(step):
        if step == 2 and next(seen) == 0:
            raise UserError("stopped by the test")

    changes = {"rollout.max_staleness": 1, "runtime.deterministic": False, "run.save_every": 1}
    with pytest.raises(UserError, match="stopped by the test"):
        train(tmp_path, changes | {"training.steps": 4}, listener=Recorder(stop))
    train(tmp_path, changes | {"training.steps": 4}, resume=RunFolder(tmp_path))
    assert [entry["step"] for entry in steps_of(tmp_path)] == [1, 2, 3, 4]


def test_an_agent_with_openais_client_is_trained_through_its_address(tmp_path):
    agent = {"environment.name": None, "environment.agent": f"{SUPPORT}/openai_agents.py:guess"}
    ends = {"rollout.stop": list("abcdefghijklmnopqrstuvwxyz"), "environment.max_turn_tokens": 60}
    train(tmp_path, agent | ends | {"training.steps": 1})
    (metrics,) = steps_of(tmp_path)
    assert metrics["mismatch/max"] < 1e-4 and metrics["groups/drawn"] == 2
    assert all(line["ended"] == "done" and line["correct"] is False for line in lines_of(tmp_path))


def test_a_critic_values_the_turns_of_an_episode(tmp_path):
    """Rewards by turn, and conversations that cannot be appended."""
    ppo = {"algorithm.kind": "ppo", "algorithm.kl.mode": "reward", "environment.credit": "turn"}
    train(tmp_path, ppo | {"rollout.prompts_per_step": 4, "training.steps": 1}, chat_tokenizer(shorten=True))
    (metrics,) = steps_of(tmp_path)
    assert any(line["more"] for line in lines_of(tmp_path))
    assert metrics["critic/loss"] > 0 and metrics["critic/values"] == 0  # its first ones


def episode(index, reward, *turn_rewards):
    turns = tuple(Turn(2 * i, 2 * i + 1, reward=value) for i, value in enumerate(turn_rewards))
    size = 2 * len(turns)
    arrays = np.zeros(size, np.int32), np.zeros(size, np.float32), np.zeros(size, np.int32)
    verdict = Reward(None, reward)
    return Sample(0, index, *arrays, "stop", turns=turns, reward=verdict, shaped_reward=reward)


def test_credit_by_turn_is_for_what_comes_from_it_on():
    samples = (episode(0, 3.0, 1.0, 0.0, 2.0), episode(1, 1.0, 1.0), episode(2, 2.0, 0.0, 1.0))
    group = with_turn_advantages(Group(0, Prompt(0, "", (1,)), samples), kind="group-mean")
    found = [[turn.advantage for turn in sample.turns] for sample in group.samples]
    # returns: [3, 2, 2], [1, 1, 1], [2, 2, 2], an episode that has ended with that of its last turn
    assert found == [[1.0, pytest.approx(1 / 3), pytest.approx(1 / 3)], [-1.0], [0.0, pytest.approx(1 / 3)]]


@pytest.mark.parametrize("credit", ["turn", "outcome"])
def test_gae_runs_over_the_tokens_that_the_model_sampled(credit):
    """Two turns of two tokens with three of the environment between them, the second turn in a conversation of its own:
    as a response of four tokens."""
    long = {"versions": np.array([0, 0, *[NOBODY] * 3], np.int32), "turns": (Turn(0, 2, reward=0.5),)}
    more = {"versions": np.zeros(2, np.int32), "turns": (Turn(0, 2, reward=-0.5),), "prompt_ids": np.array([1, 2])}

    def part(versions, **rest):
        size = len(versions)
        arrays = np.zeros(size, np.int32), np.zeros(size, np.float32), versions
        return Sample(0, 0, *arrays, "stop", reward=Reward(None, 1.0), **rest)

    group = Group(0, Prompt(0, "", (1,)), (part(**long, more=(part(**more),)),))
    tree = {"model.path": "tiny", "algorithm.kind": "ppo", "algorithm.critic.whiten": False}
    tree |= {"rollout.samples_per_prompt": 1, "environment.name": "a.py:B", "environment.credit": credit}
    builder = BatchBuilder(build_config(nested(tree | {"algorithm.overlong_buffer.enable": False})))
    batch = builder.build([group])
    values = np.array([0.1, 0.2, 9, 9, 9, 0.3, 0.4])
    (found,), batch = builder.finish([group], batch.with_columns(values=values, after=values))
    by_turn = credit == "turn"
    rewards = [0, 0.5 * by_turn, 0, 1.0 - 0.5 * by_turn]
    deltas = [r + n - v for r, n, v in zip(rewards, [0.2, 0.3, 0.4, 0], [0.1, 0.2, 0.3, 0.4], strict=True)]
    lam = builder.config.algorithm.critic.lam
    expected = [sum(lam**k * d for k, d in enumerate(deltas[t:])) for t in range(4)]
    place = [0, 1, 5, 6]
    assert batch.columns["advantages"][place] == pytest.approx(expected)
    assert batch.columns["returns"][place] == pytest.approx(np.add(expected, values[place]))
    assert not batch.columns["advantages"][2:5].any() and not batch.mask[2:5].any()
    assert found.samples[0].advantage == pytest.approx(np.mean(expected))


def test_without_rewards_by_turn_credit_is_that_of_the_outcome():
    samples = tuple(episode(i, value, *[0.0] * (i + 1)) for i, value in enumerate((1.0, -1.0, 0.5)))
    group = with_turn_advantages(Group(0, Prompt(0, "", (1,)), samples), kind="group-norm")
    for sample in group.samples:
        assert len({turn.advantage for turn in sample.turns}) == 1
    json.dumps([turn.advantage for turn in group.samples[0].turns])
