"""The published Parquet layouts: repeats are left out, prompts stay as they stand, a carried instruction is found."""

import json
import re
from pathlib import Path

import pytest
from data_cases import items
from tokenizers_for_tests import CHAT, char_tokenizer

from dapo.config import DataConfig, load_config
from dapo.data.source import load_prompts, read_prompts
from dapo.data.template import PromptTemplate
from dapo.plan.estimate import Assumed, estimate_for
from dapo.plan.hardware import cluster_of
from dapo.reward.math.score import score_math

datasets = pytest.importorskip("datasets")
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def published(path, problems, copies):
    """Rows in the layout of DAPO-Math-17k, each of them ``copies`` times."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{BEFORE}{problem}{AFTER}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"uuid-{number}"},
        }
        for _ in range(copies)
        for number, (problem, answer) in enumerate(problems)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def test_repeats_of_the_published_files_are_left_out_and_told(tmp_path):
    problems = [("What is 1+1?", "2"), ("What is 2+2?", "4"), ("What is 2+2?", "5")]
    file = published(tmp_path / "dapo-math-17k.parquet", problems, 100)
    template, told = PromptTemplate(DataConfig(), char_tokenizer(chat_template=CHAT)), []
    found = load_prompts(DataConfig(), items(file), template, warn=told.append)
    assert [(p.answer, p.meta["extra_info"]["index"]) for p in found.prompts] == [
        *(("2", "uuid-0"), ("4", "uuid-1"), ("5", "uuid-2"))
    ]
    assert told == [f"data.train: {file}: 297 rows repeat an earlier one and are left out, 3 are left"]
    assert found.report.conflicts == 1  # of them nobody knows which is right
    assert len(read_prompts(DataConfig(), items(file), template)) == 3
    every = load_prompts(DataConfig(), items({"path": str(file), "unique": False}), template)
    assert every.rows == 300 and every.fingerprint != found.fingerprint


def test_other_files_keep_their_repeats_unless_they_are_told_to(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "p", "answer": 1 + k % 2}) + "\n" for k in range(6)) + "{broken\n")
    template = PromptTemplate(DataConfig(template="plain"), char_tokenizer())
    data = DataConfig(template="plain", on_bad_row="skip", max_bad_rows=1)
    assert load_prompts(data, items(file), template).rows == 7
    unique = load_prompts(data, items({"path": str(file), "unique": True}), template)
    assert [p.answer for p in unique.prompts] == ["1", "2"] and "rows.jsonl:7" in unique.report.faults[0]


@pytest.mark.parametrize("template", ["plain", "chat", "dapo"])
def test_an_instruction_that_a_row_carries_is_not_added_again(template):
    said = f"{BEFORE}What is 1+1?{AFTER}"
    data = DataConfig(template=template, instruction="" if template == "dapo" else AFTER)
    writer = PromptTemplate(data, char_tokenizer(chat_template=CHAT))
    bare = said if template == "plain" else f"[user]{said}<e>[assistant]"
    for prompt in (said, ({"role": "user", "content": said},)):
        assert writer.text(writer.encode(prompt)) == bare
    assert writer.text(writer.encode("What is 1+1?")).count("Remember to put") == 1


def test_the_papers_recipe_has_its_numbers_and_runs_dry(tmp_path):
    """arXiv 2503.14476, section 4.1; over files of the published layouts, as far as one gets without 128 GPUs."""
    file = Path(__file__).parents[2] / "recipes" / "dapo-32b-paper.yaml"
    for name, copies in (("dapo-math-17k", 4), ("aime-2024", 2)):
        published(tmp_path / f"{name}.parquet", [(f"What is {k}+1?", str(k + 1)) for k in range(600)], copies)
    changes = [f"data.train={tmp_path}/dapo-math-17k.parquet", f"evaluation.data={tmp_path}/aime-2024.parquet"]
    config = load_config(file, changes)
    rollout, algorithm, training = config.rollout, config.algorithm, config.training
    assert config.model.path == "Qwen/Qwen2.5-32B" and config.reward.kind == "math"
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.temperature) == (512, 16, 1.0)
    assert training.groups_per_update * rollout.samples_per_prompt == 512 and training.epochs_per_rollout == 1
    assert (rollout.max_response_length, algorithm.overlong_buffer.len) == (16_384 + 4_096, 4_096)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert algorithm.filter_groups.enable and algorithm.overlong_buffer.enable and not algorithm.overlong_filtering
    assert (training.learning_rate, training.warmup_steps, algorithm.kl.mode) == (1e-6, 20, "off")
    held = config.evaluation
    assert (held.samples_per_prompt, held.temperature, held.top_p) == (32, 1.0, 0.7)

    [(name, cluster)] = re.findall(r"dapo plan recipes/(\S+) --cluster (\S+)", file.read_text("utf-8"))
    assert name == file.name and cluster_of(config, "H100") == cluster
    estimate, _ = estimate_for(config, cluster, Assumed(10_240, 512, 0.6))
    assert estimate.fits and estimate.ranks == 64 and estimate.engines == 16
    template = PromptTemplate(config.data, char_tokenizer(chat_template=CHAT))
    prompts = load_prompts(config.data, config.data.train, template)
    assert prompts.rows == len(prompts.prompts) == 600 >= rollout.prompts_per_step
    assert template.text(prompts.next().token_ids).count("Answer: $Answer") == 1
    heldout = read_prompts(config.data, held.data, template)
    assert len(heldout) == 600 and score_math(f"So\nAnswer: {heldout[3].answer}", "4", config.reward.extract).correct
