"""A run folder as a long run leaves it, made up within a minute: for trying and timing what looks at runs.

usage: python bench/synthetic_run.py FOLDER [--steps 2000] [--groups 64] [--samples 8] [--texts 3]

By default 2,000 steps of 64 groups of 8 samples: 1,024,000 samples, in the index of samples (needs ``dapo-rl[ui]``),
with metrics for each step. Texts and tokens are of so many steps only, the first and the last among them: of all
steps they would be gigabytes. The numbers hang together (a group is filtered if all of its samples are right), and
the same arguments give the same run.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dapo.config import build_config, nested
from dapo.observe.index import SampleIndex
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import write_samples
from dapo.records import Group, Prompt, Reward, Sample

ROWS = 4096
"""Of the data that prompts are drawn from."""
STEPS_AT_ONCE = 256
"""In one segment of the index."""


def make_run(root: Path, steps: int = 2000, groups: int = 64, samples: int = 8, texts: int = 3) -> RunFolder:
    """Write the folder; it must not exist. ``groups`` and ``samples`` (of a group) are those drawn in each step."""
    settings: dict[str, Any] = {
        "model.path": "some/model",
        "run.dir": str(root),
        "reward.kind": "exact",
        "training.steps": steps,
        "rollout.prompts_per_step": groups // 2,
        "rollout.samples_per_prompt": samples,
        "training.groups_per_update": groups // 2,
    }
    folder = RunFolder.create(build_config(nested(settings)), ["dapo", "train", "synthetic.yaml"])
    with MetricsLog(folder.metrics) as log:
        log.append(0, _evaluation(0))
        for step in range(1, steps + 1):
            log.append(step, _metrics(step, steps, groups, samples))
    told = sorted({round(1 + place * (steps - 1) / max(1, texts - 1)) for place in range(min(texts, steps))})
    for step in told:
        drawn = [_group(step, number, groups, samples) for number in range(groups)]
        write_samples(folder.samples, step, sorted(drawn, key=lambda pair: pair[1] != "kept"))
    index = SampleIndex(root)
    for first in range(1, steps + 1, STEPS_AT_ONCE):
        wanted = [step for step in range(first, min(first + STEPS_AT_ONCE, steps + 1)) if step not in told]
        if wanted:
            index.add(_rows(wanted, groups, samples), wanted)
    index.update()
    folder.write_summary({"run_dir": str(root), "steps": steps, "stopped": "all steps are done", "seconds_total": 9e4})
    return folder


def skill(step: int) -> float:
    """How good the policy is, 0 to 1."""
    return 0.2 + 0.55 * (1 - math.exp(-step / 600))


# --- rows of the index ------------------------------------------------------------------------------------------------


def _rows(steps: list[int], groups: int, samples: int) -> str:
    """A query that makes up all rows of some steps."""

    def chance(*of: str) -> str:
        return f"(hash({', '.join(of)}) % 1000003) / 1000003.0"

    drawn = f"""
        SELECT s::INTEGER AS step, (s * {groups} + g)::BIGINT AS draw, (hash(s, g) % {ROWS})::BIGINT AS row,
            i::SMALLINT AS sample, 0.2 + 0.55 * (1 - exp(-s / 600.0)) AS skill, {chance("s", "g", "1")} AS hard,
            {chance("s", "g", "i", "2")} AS luck, {chance("s", "g", "i", "3")} AS noise
        FROM (SELECT unnest({steps}) AS s), range({groups}) AS of_groups(g), range({samples}) AS of_samples(i)"""
    judged = f"""
        SELECT *, luck < 1 / (1 + exp(-8 * (skill - hard))) AS correct,
            least(20480, 200 + 2000 * skill * (0.5 + hard) * (0.2 + noise) * 4)::INTEGER AS length FROM ({drawn})"""
    grouped = f"""
        SELECT *, avg(correct::INTEGER) OVER one AS share, stddev_pop(2.0 * correct::INTEGER) OVER one AS spread
        FROM ({judged}) WINDOW one AS (PARTITION BY draw)"""
    return f"""
        SELECT step, draw, row, sample,
            CASE share WHEN 0 THEN 'all_wrong' WHEN 1 THEN 'all_right' ELSE 'kept' END AS status, correct,
            CASE WHEN correct THEN 1.0 ELSE -1.0 END AS reward,
            CASE WHEN share > 0 AND share < 1 THEN reward END AS shaped_reward,
            CASE WHEN share > 0 AND share < 1 THEN 2 * (correct::INTEGER - share) / (spread + 1e-6) END AS advantage,
            share > 0 AND share < 1 AS in_loss, length, (20 + hash(row) % 200)::INTEGER AS prompt_length,
            CASE WHEN length = 20480 THEN 'length' ELSE 'stop' END AS finish_reason,
            (hash(row) % 100 + (NOT correct)::INTEGER)::VARCHAR AS extracted, (hash(row) % 100)::VARCHAR AS gold,
            NULL::VARCHAR AS error, step - 1 AS version_first, step - 1 AS version_last,
            MAP {{'math': CASE WHEN correct THEN 1.0 ELSE 0.0 END, 'format': round(noise)}} AS parts,
            CASE WHEN sample = 0 THEN correct AND noise > 0.05 END AS check_correct,
            CASE WHEN sample = 0 THEN (correct AND noise > 0.05)::INTEGER::DOUBLE END AS check_reward,
            -0.9 + 0.5 * skill - 0.1 * noise AS logprob_engine,
            CASE WHEN in_loss THEN logprob_engine + 0.001 * (luck - 0.5) END AS logprob_trainer,
            CASE WHEN in_loss THEN 1.2 - skill + 0.1 * noise END AS entropy,
            CASE WHEN in_loss THEN 0.01 + 0.05 * noise END AS gap_max,
            NULL::BIGINT AS text_offset, NULL::INTEGER AS text_length FROM ({grouped})"""


# --- steps with texts -------------------------------------------------------------------------------------------------


def _group(step: int, number: int, groups: int, samples: int) -> tuple[Group, str]:
    chance = np.random.default_rng([step, number])
    row, hard = int(chance.integers(ROWS)), float(chance.random())
    gold = str(row % 100)
    right = chance.random(samples) < 1 / (1 + math.exp(-8 * (skill(step) - hard)))
    status = "all_right" if right.all() else "kept" if right.any() else "all_wrong"
    advantages = (right - right.mean()) / (right.std() + 1e-6)
    scored = []
    for index, (ok, advantage) in enumerate(zip(map(bool, right), advantages, strict=True)):
        answer = gold if ok else str(row % 100 + 1)
        reward = Reward(ok, 1.0 if ok else -1.0, {"math": float(ok)}, None, answer)
        shaped = {"shaped_reward": reward.value, "advantage": float(advantage)} if status == "kept" else {}
        scored.append(replace(_sample(chance, step, index, answer), reward=reward, **shaped))
    prompt = Prompt(row, f"What is {row} modulo 100? <b>Think</b> step by step.", tuple(range(20)), gold)
    return Group(step * groups + number, prompt, tuple(scored)), status


def _sample(chance: np.random.Generator, step: int, index: int, answer: str) -> Sample:
    words = ["so", "we", "divide", "the", "number", "and", "look", "at", "what", "<script>", "is", "left", "over\n"]
    length = int(chance.integers(50, 400))
    text = " ".join(chance.choice(words, length - 2)) + f"\nAnswer: {answer}"
    ids = chance.integers(0, 1000, length).astype(np.int32)
    logprobs = -chance.exponential(0.9 - 0.5 * skill(step), length).astype(np.float32)
    return Sample(step, index, ids, logprobs, np.full(length, step - 1, np.int32), "stop", text=text)


# --- metrics ----------------------------------------------------------------------------------------------------------


_NAMES = """accuracy reward/mean reward/std response_length/mean response_length/max response_length/truncated entropy
    probability/mean loss clip/low clip/high clip/high_probability grad_norm grad_norm/max lr updates groups/rounds
    mismatch/mean mismatch/max mismatch/k3 staleness/mean time/rollout time/prepare time/update time/sync time/step
    tokens/generated tokens/wasted tokens_per_second/total memory/rss epoch monitor/reward monitor/check
    monitor/false_right"""
NAMES = _NAMES.split()
"""Metrics that are the policy's skill with some noise."""


def _metrics(step: int, steps: int, groups: int, samples: int) -> dict[str, float]:
    noise = np.random.default_rng(step).normal(1, 0.05, len(NAMES) + 1)
    now = skill(step)
    right, wrong = (round(groups * max(0.0, share)) for share in (0.5 * now - 0.05, 0.5 - 0.4 * now * noise[-1]))
    kept = groups - right - wrong
    found: dict[str, float] = dict(zip(NAMES, now * noise[:-1], strict=True))
    found |= {"groups/drawn": groups, "groups/kept": kept, "groups/mixed": kept, "groups/keep_rate": kept / groups}
    for name, count in (("all_right", right), ("all_wrong", wrong)):
        found |= {f"groups/{name}": count, f"groups/share_{name}": count / groups}
    found |= {"version": step, "time/elapsed": 45.0 * step, "time/training": 38.5 * step}
    return found | (_evaluation(step) if step % 50 == 0 or step == steps else {})


def _evaluation(step: int) -> dict[str, float]:
    now = skill(step)
    return {"eval/accuracy": now, "eval/accuracy_low": now - 0.03, "eval/accuracy_high": now + 0.03, "eval/rows": 500}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("folder", type=Path)
    for option, default in (("--steps", 2000), ("--groups", 64), ("--samples", 8), ("--texts", 3)):
        parser.add_argument(option, type=int, default=default)
    given = parser.parse_args()
    print(make_run(given.folder, given.steps, given.groups, given.samples, given.texts).root)
