"""What the stage of reward models leaves is a reward model: for Transformers, and for `reward: {kind: model}`."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dapo.config import ModelReward
from dapo.config.stages import RewardModelConfig, build_stage
from dapo.errors import ConfigError, ModelError, RewardError
from dapo.evaluation.statistics import calibration_error
from dapo.model.loading import load_model
from dapo.observe.run_folder import RunFolder
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.stages.batches import labels, rankings
from dapo.stages.reward_model import RewardModel
from data.tokenizers_for_tests import CHAT, char_tokenizer
from helpers import ARCHITECTURES
from run_cases import TOKENIZER, steps_of, tiny_model, without_times
from stage_cases import ROWS, run

LORA = {"model.lora.rank": 2}


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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "run"
    run("reward_model", folder, LORA | {"training.steps": 4}, model=base)
    return folder


def test_an_adapter_and_its_head_are_what_peft_and_the_reward_load(adapted, base):
    from peft import AutoPeftModelForSequenceClassification

    model = AutoPeftModelForSequenceClassification.from_pretrained(adapted / "model-after", num_labels=1).eval()
    texts = [(row["prompt"], row["chosen"]) for row in ROWS["dpo"][:6]]
    with torch.no_grad():
        alone = [float(model(**TOKENIZER(p + r, return_tensors="pt")).logits) for p, r in texts]
    assert len({round(score, 4) for score in alone}) > 3
    assert scores_of(adapted / "model-after", texts) == pytest.approx(alone, abs=1e-5)
    stored = load_file(adapted / "model-after/adapter_model.safetensors")
    assert [name for name in stored if "lora_" not in name] == ["base_model.model.score.weight"]


def test_an_adapter_killed_and_resumed_equals_one_that_was_not(adapted, base, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(adapted, folder)
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))
    shutil.rmtree(folder / "model-after")
    run("reward_model", folder, LORA | {"training.steps": 4}, model=base, resume=True)
    files = [one / "model-after/adapter_model.safetensors" for one in (adapted, folder)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert without_times(steps_of(folder)[-1]) == without_times(steps_of(adapted)[-1])


def test_a_policys_adapter_becomes_that_of_a_reward_model(base, tmp_path):
    run("sft", tmp_path / "sft", LORA | {"training.steps": 2}, model=base)
    run("reward_model", tmp_path / "rm", {"training.steps": 2}, model=str(tmp_path / "sft/model-after"))
    weights = [
        load_file(tmp_path / f"{name}/adapter_model.safetensors") for name in ("sft/model-after", "rm/model-before")
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert len(set(scores_of(tmp_path / "rm/model-after", [("1+2=", "#3"), ("1+2=", "#4")]))) == 2


def test_an_adapter_that_peft_made_is_a_reward(base, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        alone = float(model.eval()(**TOKENIZER("1+2=#3", return_tensors="pt")).logits)
    TOKENIZER.save_pretrained(tmp_path)
    assert scores_of(tmp_path, [("1+2=", "#3")]) == pytest.approx([alone], abs=1e-5)


def test_a_reward_model_is_no_policy_and_a_policys_adapter_no_reward(trained, adapted, base, tmp_path):
    for folder in (trained / "model-after", adapted / "model-after"):
        with pytest.raises(ModelError, match=r"of a reward model|is a reward model.*reward: \{kind: model, path: /"):
            load_model(folder)
    run("sft", tmp_path / "sft", LORA | {"training.steps": 1}, model=base)
    with pytest.raises(RewardError, match="is of a policy, which writes text"):
        scores_of(tmp_path / "sft/model-after", [("1+2=", "#3")])


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
