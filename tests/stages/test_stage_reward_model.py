"""What the stage of reward models leaves is a reward model: for Transformers, and for `reward: {kind: model}`."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

from dapo.config import ModelReward
from dapo.config.stages import RewardModelConfig, build_stage
from dapo.errors import ConfigError
from dapo.evaluation.statistics import calibration_error
from dapo.observe.run_folder import RunFolder
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.stages.batches import labels, rankings
from dapo.stages.reward_model import RewardModel
from data.tokenizers_for_tests import CHAT, char_tokenizer
from helpers import ARCHITECTURES
from run_cases import TOKENIZER, tiny_model
from stage_cases import ROWS, run


def stage_of(tokenizer=TOKENIZER, **section):
    template = "chat" if tokenizer.chat_template else "plain"
    tree = {"model": {"path": "tiny"}, "reward_model": {"template": template} | section}
    config = build_stage("reward_model", tree)
    assert isinstance(config, RewardModelConfig)
    return RewardModel(config, tokenizer, "tiny")


def scores_of(folder, texts, batch=1000):
    async def all_of():
        config = {
            "kind": "model",
            "path": str(folder),
            "template": "plain",
            "max_length": 64,
            "tokens_per_batch": batch,
        }
        scorer = make_scorer(ModelReward(**config))
        await scorer.start()
        found = await asyncio.gather(*(scorer.score(Prompt(0, p, (), None), r) for p, r in texts))
        await scorer.close()
        return [one.value for one in found]

    return asyncio.run(all_of())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm") / "run"
    run("reward_model", folder, {"training.steps": 4})
    return folder


def test_it_is_a_classifier_that_the_reward_loads_at_once(trained):
    """The scores are those of Transformers for a text alone, in any batch; of the trainer's too."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(trained / "model-after")
    assert type(model).__name__ == "Qwen2ForSequenceClassification" and model.config.num_labels == 1
    texts = [(row["prompt"], row[key]) for row in ROWS["dpo"][:6] for key in ("chosen", "rejected")]
    texts += [("1+2=", "#3;1+2=3;4*4=6;#6")]
    with torch.no_grad():
        alone = [float(model(**TOKENIZER(p + r, return_tensors="pt")).logits) for p, r in texts]
    assert len({round(score, 4) for score in alone}) > 6
    assert scores_of(trained / "model-after", texts) == pytest.approx(alone, abs=1e-5)
    assert scores_of(trained / "model-after", texts, batch=64) == pytest.approx(alone, abs=1e-5)


def test_the_trainer_scores_as_the_saved_model_does(trained):
    """Accuracy and margins of the held-out rows in the summary are those of the reward."""
    summary = json.loads((trained / "summary.json").read_text())
    rows = ROWS["dpo"][:10]
    better, worse = (
        scores_of(trained / "model-after", [(r["prompt"], r[k]) for r in rows]) for k in ("chosen", "rejected")
    )
    margins = np.array(better) - np.array(worse)
    assert summary["margin_after"] == pytest.approx(margins.mean(), abs=1e-5)
    assert summary["accuracy_after"] == pytest.approx((margins > 0).mean())
    assert summary["calibration_error_after"] == pytest.approx(calibration_error(margins), abs=1e-4)


def test_a_pair_computes_what_both_begin_with_once_and_reads_the_last_real_token():
    stage = stage_of()
    (example,) = stage.encode({"prompt": "1+2=", "chosen": "#3", "rejected": "#45"})
    ids = TOKENIZER("1+2=#3").input_ids
    assert example.prompt == tuple(ids[:5])  # "#" too
    assert [len(r) for r in example.responses] == [2, 3]
    assert (*example.prompt, *example.responses[0][:-1]) == tuple(ids)
    batch = rankings([example], scored=True)
    assert batch.columns["weights"].tolist() == [0, 1, 0, 0, 1]  # at the token that the last real one predicts


def test_what_cannot_be_is_said_in_the_keys_of_the_stage():
    for changes, message in (
        ({"template": "chat"}, r"use reward_model\.template=plain, or .* \(model\.tokenizer\)"),
        ({"loss": "outcome", "centring": 0.1}, r"centring: is for loss=preference"),
    ):
        with pytest.raises(ConfigError, match=message):
            stage_of(**changes)


def test_of_two_texts_one_may_begin_the_other():
    (example,) = stage_of().encode({"chosen": "#3", "rejected": "#34"})
    assert [len(r) for r in example.responses] == [1, 2] and len(example.prompt) == 2


def test_padding_is_a_token_that_no_text_ends_with():
    """Where padding is the end of a text, classifiers of Transformers read the score before it."""
    tokenizer = char_tokenizer(chat_template=CHAT)
    tokenizer.pad_token = tokenizer.eos_token  # as Llama's often is
    stage = stage_of(tokenizer)
    stage.encode({"prompt": "1", "chosen": "2", "rejected": "3"})
    assert stage._pad_token() == tokenizer.bos_token_id != tokenizer.eos_token_id
    stage._ends |= set(tokenizer.all_special_ids)
    with pytest.raises(ConfigError, match="none of them can be the padding"):
        stage._pad_token()


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n in ("qwen2", "llama", "gpt2", "mistral", "qwen3")])
def test_architectures(name, tmp_path):
    run("reward_model", tmp_path / "run", {"training.steps": 1}, model=tiny_model(name=name))
    assert len(set(scores_of(tmp_path / "run/model-after", [("1+2=", "#3"), ("1+2=", "#4")]))) == 2


def test_rankings_and_labels(tmp_path):
    ranked = [{"prompt": f"{a}+1=", "responses": [f"#{a + 1}", f"#{a}", "#;"], "scores": [2, 1, 1]} for a in range(8)]
    summary = run("reward_model", tmp_path / "ranked", {"training.steps": 4}, rows=ranked)
    assert summary["loss_after"] < summary["loss_before"]
    labelled = [{"prompt": f"{a}+1=", "response": f"#{b}", "label": b == a + 1} for a in range(6) for b in (a, a + 1)]
    summary = run(
        "reward_model", tmp_path / "labels", {"training.steps": 4, "reward_model.loss": "outcome"}, rows=labelled
    )
    assert summary["loss_after"] < summary["loss_before"] == pytest.approx(np.log(2), abs=1e-5)
    assert {"accuracy_after", "accuracy_low_after", "calibration_error_after"} < summary.keys()
    assert labels(stage_of(loss="outcome").encode(labelled[0])).columns["weights"].tolist()[-1:] == [1.0]


def test_calibration_error():
    """All sure and half of them wrong; and margins that say what they are."""
    assert calibration_error(np.array([9.0, -9.0])) == pytest.approx(0.5, abs=1e-3)
    p = np.array([0.55, 0.65, 0.75, 0.85, 0.95])
    rng = np.random.default_rng(0)
    draws = np.repeat(np.log(p / (1 - p)), 20_000)
    truth = np.where(rng.random(len(draws)) < np.repeat(p, 20_000), draws, -draws)
    assert calibration_error(truth) < 0.01


def test_the_weights_of_a_checkpoint_are_refused_by_another_model(trained, tmp_path):
    from dapo.errors import UserError

    run("reward_model", tmp_path / "run", {"training.steps": 2})
    for file in RunFolder(tmp_path / "run").checkpoints.glob("*/model/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="is damaged"):
        run("reward_model", tmp_path / "run", {"training.steps": 3}, resume=True)
