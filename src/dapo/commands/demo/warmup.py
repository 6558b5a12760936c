"""The demo's warm-up: imitation of step-by-step demonstrations, frequent at first and rare at the end.

After it the model *can* work in steps but mostly jumps to an answer: reinforcement learning never teaches to copy an
operand, but finds out that writing the steps pays. So the first phase goes on until the steps themselves are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.commands.demo.task import ANSWER_MARK, Expression
from dapo.config import DataConfig, TrainingConfig
from dapo.data.template import PromptTemplate
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.slots import slot_decoder
from dapo.stages.sft import Demonstration, imitate
from dapo.training.trainer import Trainer

OPERATORS = range(3, 6)
BATCH = 32
PEAK_RATE = 3e-3
RAMP = 60  # optimizer steps in which the rate rises
SKILL_STEPS = 200  # between two exams
SKILL, SETTLED_SKILL = 0.9, 0.97  # at the peak rate, and after the rate has fallen
HABIT_STEPS = 200
USUAL_STEPS, MAX_STEPS = 800, 3000
SKILL_SHARE, HABIT_SHARE = 0.9, 0.2  # of demonstrations that show the steps


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What it came to: steps taken and the accuracy when the model is made to write the first step."""

    steps: int
    skill: float


class Tutor:
    def __init__(self, pool: list[Expression], tokenizer: Any, rng: np.random.Generator) -> None:
        self._ids = [
            (
                tokenizer(e.prompt).input_ids,
                *([*tokenizer(e.response(think)).input_ids, tokenizer.eos_token_id] for think in (False, True)),
            )
            for e in pool
        ]
        self._rng = rng

    def batch(self, think_share: float) -> list[Demonstration]:
        rows = self._rng.integers(0, len(self._ids), BATCH)
        thinks = self._rng.random(BATCH) < think_share
        return [(self._ids[row][0], self._ids[row][1 + think]) for row, think in zip(rows, thinks, strict=True)]


def warm_up(
    model: Any,
    tokenizer: Any,
    pool: list[Expression],
    exam: list[Expression],
    rng: np.random.Generator,
    progress: Callable[[int, int, str], None],
) -> WarmUp:
    """Teach ``model`` the steps with a pool of expressions, then the habit of skipping them. The skill is tested in an
    exam with others. ``progress`` is called with steps done, steps expected and a note."""
    trainer = Trainer(model, TrainingConfig(weight_decay=0.01, betas=(0.9, 0.98), tokens_per_micro_batch=1 << 16), 1.0)
    tutor = Tutor(pool, tokenizer, rng)
    skill, step = 0.0, 0
    while skill < SETTLED_SKILL and step < MAX_STEPS:
        while True:  # the skill
            for _ in range(SKILL_STEPS):
                step += 1
                imitate(trainer, tutor.batch(SKILL_SHARE), PEAK_RATE * min(1.0, step / RAMP))
                progress(step, max(step, USUAL_STEPS), f"steps right {skill:.0%}")
            skill = _skill(model, tokenizer, exam)
            if skill >= SKILL or step >= MAX_STEPS - HABIT_STEPS:
                break
        for i in range(HABIT_STEPS):  # the habit; the rate falls, which also settles what was learned
            step += 1
            imitate(trainer, tutor.batch(HABIT_SHARE), PEAK_RATE * (1 - i / HABIT_STEPS))
            progress(step, max(step, USUAL_STEPS), f"steps right {skill:.0%}")
        skill = _skill(model, tokenizer, exam)
    return WarmUp(step, skill)


def _skill(model: Any, tokenizer: Any, exam: list[Expression]) -> float:
    """Share of right answers when the response is made to begin with the first step."""
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    decoder = slot_decoder(model, [tokenizer.eos_token_id], max_sequence_tokens=96, max_concurrent_samples=256)
    for i, expression in enumerate(exam):
        ids = tokenizer(expression.prompt + expression.steps[0][0]).input_ids
        decoder.submit(0, Request(i, tuple(ids), (0,), Sampling(0.0, 48)))
    right = 0
    while decoder.busy:
        for _, sample in decoder.step():
            text = template.decode(sample.token_ids.tolist())
            right += text.rpartition(ANSWER_MARK)[2] == exam[sample.request_id].answer
    return right / len(exam)
