"""Public failures of other trainers, kind by kind: section (a), algorithm correctness, of shared/cases/failures.md.

Most are tested where their mechanism is; these need the whole loop. The number of an entry stands in a test's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.algorithm.shaping import overlong_penalty, shape_rewards
from dapo.config import DataConfig
from dapo.config.plan import plan_of
from dapo.data.template import PromptTemplate
from dapo.evaluation.result import Evaluation
from dapo.observe.progress import closing_lines
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.experiment import Experiment
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_to_end
from dapo.records import Group, Prompt, Reward, Sample, TokenBatch
from dapo.rollout.engine import Request
from dapo.rollout.native.engine import NativeEngine
from data.tokenizers_for_tests import CHAT_WITH_BOS, char_tokenizer
from run_cases import (
    PROMPTS,
    TOKENIZER,
    Recorder,
    config_for,
    run,
    steps_of,
    text_sum,
    tiny_model,
    weights_hash,
    without_times,
)

# --- the whole loop -----------------------------------------------------------------------------------------------


def experiment(folder: Path, changes: dict[str, Any], **inputs: Any) -> Experiment:
    given = {"model": tiny_model(), "tokenizer": TOKENIZER, "rows": PROMPTS, "reward": text_sum} | inputs
    made = Experiment(config_for(folder, changes), Recorder(), RunOverrides(**given))
    run_to_end(made)
    return made


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [s for path in sorted(RunFolder(folder).samples.glob("*.jsonl")) for s in read_samples(path)]


def test_a_run_in_which_every_response_is_masked_skips_and_says_so_failures_5(tmp_path: Path) -> None:
    """A model without a stop token: all responses are truncated, and filtering masks them all."""
    changes = {
        "algorithm.overlong_filtering": True,
        "algorithm.overlong_buffer.len": 0,
        "rollout.max_response_length": 1,
        "algorithm.filter_groups.metric": "score",
    }
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    listener = Recorder()
    summary = run(
        tmp_path / "run",
        changes,
        listener,
        model=tiny_model(vocab_size=len(tokenizer), eos_token_id=None),
        tokenizer=tokenizer,
        reward=lambda response: float(sum(map(ord, response))),
    )
    (entry,) = steps_of(tmp_path / "run")
    assert entry["response_length/truncated"] == 1.0
    assert (entry["updates"], entry["updates/skipped"], entry["tokens/loss"]) == (0, 2, 0)
    assert entry["version"] == 0 and summary["updates"] == 0
    assert "non_finite" not in entry
    assert len([w for w in listener.warnings if "no token of this mini-batch is in the loss" in w]) == 2


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_before_the_first_update_every_ratio_is_one_at_any_temperature_failures_12(
    tmp_path: Path, temperature: float
) -> None:
    """One update per rollout: under recompute exactly 1, under engine up to the mismatch. So nothing is clipped."""
    for proximal, noise in (("recompute", 0.0), ("engine", 1e-5)):
        root = tmp_path / proximal
        run(root, {"rollout.temperature": temperature, "algorithm.proximal": proximal, "training.groups_per_update": 4})
        (entry,) = steps_of(root)
        assert abs(entry["ratio/mean"] - 1) <= noise
        assert entry["clip/low"] == entry["clip/high"] == entry["clip/dual"] == 0
        assert entry["mismatch/max"] < 1e-4


@pytest.mark.parametrize("kind", ["group-norm", "group-mean", "leave-one-out"])
def test_a_reward_that_depends_on_the_prompt_alone_teaches_exactly_nothing_failures_19_20(
    tmp_path: Path, kind: str
) -> None:
    """Prompts alternate and samples of several groups finish mixed up; 0.35 has no exact float. Formed by position, or
    divided by a tiny deviation, some advantage would not be 0."""
    changes = {
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_buffer.enable": False,
        "algorithm.advantage.kind": kind,
        "data.shuffle": False,
        "runtime.deterministic": False,
    }
    run(tmp_path / "run", changes, reward=lambda prompt: 0.35 if "+" in prompt else 5.0)
    (entry,) = steps_of(tmp_path / "run")
    assert entry["reward/std"] > 1
    assert entry["advantage/mean_abs"] == 0 and entry["grad_norm/max"] == 0
    assert {s["advantage"] for s in samples_of(tmp_path / "run")} == {0.0}


def test_as_many_updates_are_made_as_were_planned_whatever_is_filtered_failures_24(tmp_path: Path) -> None:
    """100 prompts, batch 10, half of all groups filtered: about one epoch of prompts is 5 steps of one update each.

    A step is a rollout step that trains, not a batch that was generated, so plan, schedule and summary agree.
    """
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a % 2)} for a in range(10) for b in range(10)]
    seen: Counter[str] = Counter()

    def mixed_for_every_second_row(prompt: str, answer: str) -> bool:
        seen[prompt] += 1
        return answer == "1" and seen[prompt] % 2 == 0

    changes = {
        "rollout.prompts_per_step": 10,
        "training.groups_per_update": 10,
        "rollout.max_response_length": 4,
        "training.steps": 5,
        "training.warmup_steps": 5,
        "training.learning_rate": 1e-3,
    }
    root, listener = tmp_path / "run", Recorder()
    summary = run(root, changes, listener, rows=rows, reward=mixed_for_every_second_row)
    entries = steps_of(root)
    drawn = sum(e["groups/drawn"] for e in entries)
    assert 80 <= drawn <= 140 and entries[-1]["epoch"] == pytest.approx(drawn / 100)
    assert all(e["groups/kept"] == 10 and e["groups/all_wrong"] >= 1 for e in entries)
    plan = plan_of(config_for(root, changes))
    assert listener.plan == plan
    assert plan["steps"] == plan["updates in all"] == summary["updates"] == entries[-1]["updates/total"] == 5
    assert [e["lr"] for e in entries] == pytest.approx([0.2e-3, 0.4e-3, 0.6e-3, 0.8e-3, 1e-3])
    assert summary["stopped"] == "all steps are done"
    assert closing_lines(summary)[0] == "stopped: all steps are done"


def test_constant_continuous_rewards_are_dropped_failures_28(tmp_path: Path) -> None:
    """0.5 four times has nothing to learn from, though its mean is neither 0 nor 1."""
    changes = {
        "algorithm.filter_groups.metric": "score",
        "algorithm.filter_groups.on_starved": "train",
        "algorithm.filter_groups.max_num_gen_batches": 1,
    }
    run(tmp_path / "run", changes, reward=lambda response: 0.5)
    (entry,) = steps_of(tmp_path / "run")
    assert (entry["groups/kept"], entry["groups/flat"], entry["updates"]) == (0, 4, 0)


def test_a_length_is_in_tokens_whatever_the_text_failures_30() -> None:
    """90 tokens that are 360 characters, limit 100, buffer 20: -0.5."""
    sample = Sample(
        request_id=0,
        index=0,
        token_ids=np.zeros(90, np.int32),
        logprobs=np.zeros(90, np.float32),
        versions=np.zeros(90, np.int32),
        finish_reason="stop",
        text="abcd" * 90,
        reward=Reward(True, 1.0),
    )
    shaped = shape_rewards(
        Group(0, Prompt(0, "", (1,)), (sample,)),
        max_response_length=100,
        soft=True,
        buffer_len=20,
        penalty_factor=1.0,
        hard=False,
        filter_truncated=False,
    )
    assert shaped.samples[0].shaped_reward == 0.5


def test_a_fixed_response_has_one_reward_on_every_path_failures_32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training (in order, streaming, carried over; called in this process or in workers) and in evaluation, a
    response earns what the function says, and in training the length penalty of Eq. 13 on top."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(
        "from dapo.records import Reward\n\n\ndef text_sum(prompt, response):\n"
        "    correct = sum(map(ord, response)) % 4 == 0\n"
        "    return Reward(correct, (1.0 if correct else -1.0) + 0.01 * len(response), {'length': len(response)})\n"
    )
    in_workers = {"reward.kind": "function", "reward.function": "rewards.py:text_sum", "reward.workers": 1}
    paths: dict[str, dict[str, Any]] = {
        "in order": {},
        "streaming": {"runtime.deterministic": False},
        "carried": {"rollout.max_staleness": 1, "runtime.deterministic": False, "training.steps": 4},
        "everything kept": {"algorithm.filter_groups.enable": False},
        "in workers": in_workers,
    }
    by_response: dict[tuple[str, int], set[tuple[float, float | None]]] = {}
    for name, changes in paths.items():
        root = tmp_path / name
        made = experiment(root, changes, heldout=PROMPTS[:4], reward=None if changes is in_workers else text_sum)
        samples = samples_of(root)
        assert ({s["status"] for s in samples} == {"kept"}) == (name == "everything kept")
        for s in samples:
            assert s["reward"] == text_sum(s["prompt"], s["response"]).value
            if s["status"] != "kept":
                continue  # has no shaped reward: it is not trained on
            penalty = overlong_penalty(s["length"], max_response_length=12, buffer_len=4, penalty_factor=1.0)
            assert s["shaped_reward"] == pytest.approx(s["reward"] + penalty)
            by_response.setdefault((s["response"], s["length"]), set()).add((s["reward"], s["shaped_reward"]))
        for evaluation in (made.evaluator.before, made.evaluator.after):
            assert isinstance(evaluation, Evaluation) and len(evaluation.samples) == 4
            assert all(s.verdict == text_sum("", s.text) for s in evaluation.samples)
    assert all(len(found) == 1 for found in by_response.values())
    # the very same run, wherever the function is called
    one, other = (without_times(steps_of(tmp_path / name)[-1]) for name in ("in order", "in workers"))
    assert one == other
    hashes = [weights_hash(RunFolder(tmp_path / name).model_after) for name in ("in order", "in workers")]
    assert hashes[0] == hashes[1]


def test_the_first_update_of_a_run_moves_the_weights_failures_34(tmp_path: Path) -> None:
    for warmup in (0, 20):
        root = tmp_path / str(warmup)
        run(root, {"training.learning_rate": 1e-6, "training.warmup_steps": warmup})
        folder = RunFolder(root)
        assert weights_hash(folder.model_before) != weights_hash(folder.model_after)
        assert steps_of(root)[0]["lr"] == pytest.approx(1e-6 if warmup == 0 else 0.5e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_large_update_engine_and_trainer_agree_again_failures_36(tmp_path: Path, dtype: str) -> None:
    """At learning rate 1e-2 the policy moves far, and in the next step both sides give the same tokens the same
    log-probability again. Every token carries the version of the weights that it was sampled under."""
    made = experiment(
        tmp_path / "run", {"training.steps": 3, "training.learning_rate": 1e-2, "model.compute_dtype": dtype}
    )
    entries = steps_of(tmp_path / "run")
    noise = 1e-5 if dtype == "float32" else 0.02
    assert all(e["mismatch/mean"] < noise for e in entries)
    assert all(e["kl/proximal"] > 1e-3 for e in entries)  # the updates of a step moved it
    for step in (1, 2, 3):
        samples = read_samples(RunFolder(tmp_path / "run").samples / f"step-{step:05d}.jsonl")
        assert len(samples) >= 16 and all(s["versions"] == [step - 1, step - 1] for s in samples)
    assert made.roles.engine.version == made.roles.learner.trainer.version == 3
    engine = dict(made.roles.engine._decoder._runner.model.named_parameters())  # type: ignore[attr-defined]
    for name, parameter in made.roles.learner.trainer.policy.model.named_parameters():
        assert torch.equal(engine[name], parameter.to(engine[name].dtype))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_trainer_and_engine_see_the_same_ids_with_one_bos_failures_37_38(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adds_bos: bool
) -> None:
    """A chat template that writes the BOS, with a tokenizer that adds one too: exactly one, in the very ids that the
    engine decodes from and the trainer trains on. And the responses are the engine's, token by token."""
    requests: dict[int, Request] = {}
    sampled: dict[tuple[int, int], list[int]] = {}
    packed: list[TokenBatch] = []
    generate, updates = NativeEngine.generate, BatchBuilder.minibatches

    async def watched(self: NativeEngine, wanted: Sequence[Request]) -> AsyncIterator[Sample]:
        requests.update({r.id: r for r in wanted})
        async for sample in generate(self, wanted):
            sampled[sample.request_id, sample.index] = sample.token_ids.tolist()
            yield sample

    def seen(self: BatchBuilder, batch: TokenBatch, start: int = 0) -> Any:
        packed.append(batch)
        return updates(self, batch, start)

    monkeypatch.setattr(NativeEngine, "generate", watched)
    monkeypatch.setattr(BatchBuilder, "minibatches", seen)
    tokenizer = char_tokenizer(adds_bos=adds_bos, chat_template=CHAT_WITH_BOS)
    changes = {"data.template": "chat", "data.max_prompt_length": 40, "training.tokens_per_micro_batch": 128}
    run(tmp_path / "run", changes, model=tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer)

    (batch,) = packed
    template = PromptTemplate(DataConfig(template="chat"), tokenizer)
    texts = {s["draw"]: s["prompt"] for s in samples_of(tmp_path / "run")}
    ends = np.cumsum(batch.lengths)
    for end, length, prompt, draw, index in zip(
        ends, batch.lengths, batch.prompt_lengths, batch.draws, batch.indices, strict=True
    ):
        row = batch.token_ids[end - length : end].tolist()
        assert row[:prompt] == list(requests[draw].prompt_ids) == template.encode(texts[draw])
        assert row[:prompt].count(tokenizer.bos_token_id) == 1 and row[0] == tokenizer.bos_token_id
        assert row[prompt:] == sampled[draw, index]
    assert batch.num_samples == 16


def test_beta_0_and_beta_1_train_differently_failures_40(tmp_path: Path) -> None:
    """The first update is the same (the KL has no gradient where policy and reference agree), the second is not."""
    outcomes = {}
    for beta in (0.0, 1.0):
        root = tmp_path / str(beta)
        run(root, {"algorithm.kl.mode": "loss", "algorithm.kl.coef": beta})
        outcomes[beta] = weights_hash(RunFolder(root).model_after)
    run(tmp_path / "off")
    assert outcomes[0.0] == weights_hash(RunFolder(tmp_path / "off").model_after)
    assert outcomes[1.0] != outcomes[0.0]


def test_the_table_of_metrics_explains_a_loss_of_zero_failures_41() -> None:
    """A displayed loss of 0 has alarmed users: the progress line does not show it, and the table says why."""
    from dapo.observe.metrics import METRICS

    assert "near 0 by construction, see grad_norm" in METRICS["loss"].meaning
