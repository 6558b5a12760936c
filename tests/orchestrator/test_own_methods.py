"""Objectives and advantages from a user's file or from Python, through whole runs; and a preference stage."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dapo
import own_methods
from dapo.algorithm.kl import AdaptiveKL
from dapo.commands.replay.replay import replay
from dapo.config import Config, build_config, load_config, nested
from dapo.errors import ConfigError, UserError
from dapo.observe.run_folder import RunFolder
from dapo.records import TokenBatch
from dapo.training.learner import LocalLearner
from dapo.training.packing import pack_demonstrations
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport
from run_cases import (
    PROMPTS,
    SETTINGS,
    TOKENIZER,
    Recorder,
    config_for,
    run,
    steps_of,
    text_sum,
    tiny_model,
    weights_hash,
)

GSPO = {
    "algorithm.loss_agg_mode": "seq-mean-token-mean",
    "training.epochs_per_rollout": 2,
    "training.steps": 2,
    "run.save_every": 1,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(own_methods.__file__, tmp_path / "own_file.py"))


def test_a_run_trains_with_the_objective_of_a_file_and_goes_on_with_it(tmp_path: Path, file: Path) -> None:
    named = GSPO | {"algorithm.objective": f"{file}:Gspo"}
    run(tmp_path / "whole", named)
    first, second = steps_of(tmp_path / "whole")
    assert first["updates"] == second["updates"] == 4
    assert 0 < first["objective/clipped"] <= 1 and first["objective/s"] == pytest.approx(1, abs=0.1)
    assert first["entropy"] > 0 and first["ratio/mean"] > 0 and first["clip/high"] is None  # clips are dapo's own
    run(tmp_path / "dapo", GSPO)
    assert weights_hash(tmp_path / "whole/model-after") != weights_hash(tmp_path / "dapo/model-after")

    run(tmp_path / "run", named | {"training.steps": 1})
    run(tmp_path / "run", named, resume=RunFolder(tmp_path / "run"))
    assert weights_hash(tmp_path / "run/model-after") == weights_hash(tmp_path / "whole/model-after")
    found = replay(tmp_path / "whole", 2)
    first = found.updates[0]
    assert found.differences == [] and first["recomputed"]["objective/s"] == first["recorded"]["objective/s"]
    file.write_text(file.read_text() + "\n# edited\n")
    (note,) = [text for text in replay(tmp_path / "whole", 2).notes if "started with" in text]
    assert note.startswith("the algorithm is not the one that the run started with: objective.file")


def test_an_object_from_python_is_the_same_and_its_run_goes_on_in_python_alone(tmp_path: Path, file: Path) -> None:
    run(tmp_path / "named", GSPO | {"algorithm.objective": f"{file}:Gspo"})
    run(tmp_path / "given", GSPO, objective=own_methods.Gspo())
    assert weights_hash(tmp_path / "named/model-after") == weights_hash(tmp_path / "given/model-after")
    fingerprint = json.loads((tmp_path / "given/fingerprint.json").read_text())
    recorded = fingerprint["objective"]
    assert (recorded["kind"], recorded["function"]) == ("python", "Gspo") and len(recorded["source"]) > 8
    assert "objective" in fingerprint["in_memory"]
    assert any("objective from Python" in text for text in replay(tmp_path / "given", 1).missing)


def test_another_content_of_the_file_is_said_when_a_run_goes_on(tmp_path: Path, file: Path) -> None:
    named = GSPO | {"algorithm.objective": f"{file}:Gspo", "algorithm.advantage.kind": f"{file}:centred"}
    run(tmp_path / "run", named | {"training.steps": 1})
    fingerprint = json.loads((tmp_path / "run/fingerprint.json").read_text())
    assert fingerprint["objective"]["file"] == fingerprint["advantage"]["file"] and "in_memory" in fingerprint
    file.write_text(file.read_text() + "\n# changed\n")
    listener = Recorder()
    run(tmp_path / "run", named, listener, resume=RunFolder(tmp_path / "run"))
    for name in ("objective", "advantage"):
        assert any(
            text.startswith(f"the {name} is not the one that the run started with") for text in listener.warnings
        )


def test_a_run_goes_on_between_steps_with_a_file_that_has_moved(tmp_path: Path, file: Path) -> None:
    named = GSPO | {"algorithm.objective": f"{file}:Gspo", "algorithm.advantage.kind": f"{file}:centred"}
    run(tmp_path / "run", named | {"training.steps": 1})
    moved = file.rename(tmp_path / "moved.py")
    named |= {"algorithm.objective": f"{moved}:Gspo", "algorithm.advantage.kind": f"{moved}:centred"}
    run(tmp_path / "run", named, resume=RunFolder(tmp_path / "run"))
    assert len(steps_of(tmp_path / "run")) == 2


def test_an_advantage_of_a_file_or_from_python_is_that_of_the_samples(tmp_path: Path, file: Path) -> None:
    run(tmp_path / "named", {"algorithm.advantage.kind": f"{file}:centred"})
    run(tmp_path / "given", advantage=own_methods.centred)
    assert weights_hash(tmp_path / "named/model-after") == weights_hash(tmp_path / "given/model-after")
    lines = [json.loads(line) for line in (tmp_path / "named/samples/step-00001.jsonl").read_text().splitlines()]
    for draw in {line["draw"] for line in lines if line["status"] == "kept"}:
        of_group = [line for line in lines if line["draw"] == draw]
        rewards = torch.tensor([line["shaped_reward"] for line in of_group], dtype=torch.float64)
        assert [line["advantage"] for line in of_group] == pytest.approx((rewards - rewards.median()).tolist())


def test_preferences_between_two_samples_are_a_recipe(tmp_path: Path, file: Path) -> None:
    """Online DPO: of two samples the better one is preferred, measured against the initial policy."""
    changes = GSPO | {
        "algorithm.objective": f"{file}:preference",
        "algorithm.kl.mode": "measure",
        "rollout.samples_per_prompt": 2,
        "algorithm.filter_groups.metric": "score",
    }
    run(tmp_path / "run", changes)
    first, second = steps_of(tmp_path / "run")
    assert 0 < first["objective/right"] < 1 and first["loss"] < 0.7  # log 2 where nothing is preferred yet
    assert first["kl/reference"] > 0 < second["kl/reference"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm.objective": "nowhere.py:f"}, "algorithm.objective nowhere.py:f: no such file"),
        ({"algorithm.objective": "dapo.records:Prompt"}, "algorithm.objective: dapo.records:Prompt: .*missing 3"),
        ({"algorithm.advantage.kind": "math:tua"}, "advantage.kind math:tua: math has no 'tua'; did you mean ta"),
    ],
)
def test_what_cannot_be_loaded_is_said_first(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"algorithm.objective": "vtrace"},
            r"objective: can be dapo, gspo, cispo, file.py:name or package.module:name",
        ),
        (
            {"algorithm.advantage.kind": "mine.py"},
            r"advantage.kind: names a file; name the function in it, too: mine.py",
        ),
        (
            {"algorithm.objective": "a.py:f", "algorithm.kl.mode": "loss"},
            r"kl.mode: loss is a term of the objectives dapo",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_recipe(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_for(tmp_path, changes)


def test_a_file_is_looked_for_beside_the_recipe(tmp_path: Path, file: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: tiny}\nalgorithm: {objective: 'own_file.py:Gspo', advantage: {kind: 'own_file.py:centred'}}\n"
    )
    algorithm = load_config(recipe).algorithm
    assert (algorithm.objective, algorithm.advantage.kind) == (f"{file}:Gspo", f"{file}:centred")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"advantage": lambda rewards, epsilon: rewards * float("nan")}, "4 rewards must get as many finite numbers"),
        ({"advantage": lambda rewards: rewards}, "takes 1 positional argument but 2 were given"),
        ({"advantage": "median"}, "not callable"),
        (
            {"objective": lambda logprobs, entropy, inputs: (inputs.weight, {})},
            r"no attribute 'weight'.*test_own_methods",
        ),
        ({"objective": lambda logprobs, entropy, inputs: logprobs.sum()}, "must return a loss and a dict"),
        ({"objective": lambda logprobs, entropy, inputs: (logprobs, {})}, "a tensor of one number"),
        ({"objective": lambda logprobs, entropy, inputs: (logprobs.sum(), {"x": 1.0})}, "'x' must be a pair"),
        ({"objective": lambda logprobs, entropy, inputs: (logprobs.sum(), {"a b": (0, 1)})}, "not 'a b'"),
    ],
)
def test_what_fails_is_tried_before_the_model_loads(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_an_objective_that_fails_later_is_named_with_its_line(tmp_path: Path) -> None:
    def objective(logprobs: Any, entropy: Any, inputs: Any) -> Any:
        known = inputs.selected()
        if len(logprobs) != 12:  # of the trial
            raise RuntimeError("boom")
        return (known.weights * logprobs).sum(), {}

    with pytest.raises(
        UserError, match=r"algorithm.objective: RuntimeError: boom \(.*test_own_methods.py:\d+ in objective"
    ):
        run(tmp_path / "run", objective=objective)


# --- a loop of one's own over the learner's door --------------------------------------------------------------------


@dataclass
class Step:
    reports: list[UpdateReport] = field(default_factory=list)


def pairs_of(config: Config) -> TokenBatch:
    """Twelve prompts, each with a response to prefer and one not to: the batch of a preference stage."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 12, 3).tolist() for _ in range(12)]
    responses = [[rng.integers(2, 12, rng.integers(2, 6)).tolist() for _ in range(2)] for _ in prompts]
    batch = pack_demonstrations((p, r) for p, both in zip(prompts, responses, strict=True) for r in both)
    sign = np.tile(np.array([1, -1], np.float32), len(prompts))
    batch = replace(batch, draws=np.repeat(np.arange(len(prompts)), 2), indices=np.tile([0, 1], len(prompts)))
    return batch.with_columns(advantages=np.repeat(sign, batch.response_lengths))


def test_a_preference_stage_is_a_batch_an_objective_and_the_same_learner() -> None:
    changes = {"algorithm.kl.mode": "measure", "algorithm.loss_agg_mode": "seq-mean-token-mean"}
    config = build_config(nested(SETTINGS | changes))
    trainer = Trainer(tiny_model(), config.training, 1.0)
    learner = LocalLearner(trainer, config, AdaptiveKL(0.0, None, 1), own_methods.preference)

    async def epochs(count: int) -> list[UpdateReport]:
        batch = await learner.annotate(pairs_of(config))
        step = Step()
        for _ in range(count):
            for mini in batch.minibatches(4):
                await learner.update(0, len(step.reports), mini, step)
        return step.reports

    reports = asyncio.run(epochs(8))
    asyncio.run(learner.close())
    right = [total / count for total, count in (report.statistics["objective/right"] for report in reports)]
    assert reports[0].loss == pytest.approx(np.log(2), abs=1e-6)  # the reference is the policy itself
    assert np.mean(right[-3:]) == 1 and all(report.loss < 0.4 for report in reports[-3:])


def test_given_methods(tmp_path: Path) -> None:
    """What :func:`dapo.train` takes reaches the run."""
    seen: list[Any] = []

    def objective(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any) -> Any:
        seen.append(inputs.sample_ids)
        return -(inputs.weights * inputs.advantages * logprobs).sum(), {}

    settings = {key: value for key, value in SETTINGS.items() if key != "model.path"} | {
        "run.dir": str(tmp_path / "run")
    }
    settings["run.dir"] = str(tmp_path / "run")
    given: dict[str, Any] = {"objective": objective, "advantage": own_methods.centred}
    dapo.train(tiny_model(), PROMPTS, text_sum, settings, tokenizer=TOKENIZER, listener=Recorder(), **given)
    assert int(seen[0].max()) > 0 and [ids.tolist() for ids in seen].count(seen[0].tolist()) == 1  # the trial's, once


def test_what_does_not_go_with_an_objective_from_python_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss is a term of the objectives dapo"):
        run(tmp_path / "kl", GSPO | {"algorithm.kl.mode": "loss"}, objective=own_methods.Gspo())
    small = {"training.tokens_per_micro_batch": 50}  # a group may have 8 + 4 x 12 tokens
    with pytest.raises(ConfigError, match=r"8 \(prompt\) \+ 4 x 12 \(responses\) = 56 tokens"):
        run(tmp_path / "pair", GSPO | small | {"algorithm.kl.mode": "measure"}, objective=own_methods.preference)
    assert not (tmp_path / "kl").exists() and not (tmp_path / "pair").exists()


def test_stale_samples_need_an_objective_that_says_it_bears_them_or_a_correction(tmp_path: Path, file: Path) -> None:
    stale = GSPO | {"rollout.max_staleness": 1, "runtime.deterministic": False, "training.steps": 1}
    for changes, given in (({}, own_methods.Gspo()), ({"algorithm.objective": f"{file}:Gspo"}, None)):
        with pytest.raises(ConfigError, match=r"max_staleness: is 1, .* the attribute off_policy = True"):
            run(tmp_path / "run", stale | changes, objective=given)
    assert not (tmp_path / "run").exists()

    class OffPolicy(own_methods.Gspo):
        off_policy = True

    run(tmp_path / "said", stale, objective=OffPolicy())
    run(tmp_path / "corrected", stale | {"algorithm.correction.kind": "truncate"}, objective=own_methods.Gspo())
    assert steps_of(tmp_path / "said") and steps_of(tmp_path / "corrected")
