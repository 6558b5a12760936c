"""Easy word problems for a small pretrained model: one addition, subtraction or multiplication, told as a story.

python examples/word_problems.py 1    # the seed; writes word-problems-train.jsonl and word-problems-heldout.jsonl
dapo train examples/word_problems.yaml

A pair of numbers that occurs in training problems, in whatever order, story and operation, never occurs in held-out
ones: these cannot be answered by remembering a sum. ``score``, the reward, keeps format and reasoning apart: a response
is right if it states the right number after "Answer:"; its parts say whether there was such an answer, and whether the
last number of the response, wherever it stands, is the right one."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NUMBERS = range(2, 21)
SMALL = 9  # products are of numbers up to here
HELD_OUT_SHARE = 0.3  # of the pairs of numbers

NAMES = ("Ann", "Ben", "Carla", "Dan", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jack", "Lena", "Max", "Nora", "Tom")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "toys")
STORIES = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "{name} has {a} {things}. {other} has {b} {things}. How many {things} do they have together?",
        "There are {a} {things} on the table and {b} {things} in a bag. How many {things} are there in all?",
        "{name} found {a} {things} on Monday and {b} {things} on Tuesday. How many {things} did {name} find in all?",
    ),
    "-": (
        "{name} has {a} {things} and gives {b} of them to {other}. How many {things} are left?",
        "{name} had {a} {things} and lost {b} of them. How many {things} does {name} have now?",
        "There are {a} {things} in a box. {name} takes {b} of them out. How many {things} are still in the box?",
        "{name} has {a} {things}. {other} has {b} {things}. How many more {things} does {name} have than {other}?",
    ),
    "*": (
        "There are {a} boxes with {b} {things} in each box. How many {things} are there in all?",
        "{name} buys {a} bags. Each bag holds {b} {things}. How many {things} does {name} buy?",
        "{name} has {a} rows of {b} {things}. How many {things} does {name} have?",
    ),
}

SYSTEM = "You solve word problems. Write the calculation, then the answer."
EXAMPLES = (
    ("Sam has 31 pens and gets 25 more. How many pens does Sam have now?", "31 + 25 = 56\nAnswer: 56"),
    ("There are 40 cups in a shop. Lea buys 26 of them. How many cups are left?", "40 - 26 = 14\nAnswer: 14"),
    ("Kim has 22 bags of 3 nuts. How many nuts does Kim have?", "22 * 3 = 66\nAnswer: 66"),
)
"""Shown before every problem. Each has a number beyond :data:`NUMBERS`, so it gives no pair away."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WordProblem:
    text: str
    operation: str
    numbers: Pair  # in the order of the story

    @property
    def messages(self) -> list[dict[str, str]]:
        turns = [("system", SYSTEM)]
        for question, reply in EXAMPLES:
            turns += [("user", question), ("assistant", reply)]
        return [{"role": role, "content": content} for role, content in (*turns, ("user", self.text))]

    @property
    def answer(self) -> str:
        a, b = self.numbers
        return str({"+": a + b, "-": a - b, "*": a * b}[self.operation])


def split_pairs(rng: np.random.Generator) -> tuple[list[Pair], list[Pair]]:
    """All pairs of different numbers, the smaller one first: ``(training, held out)``.

    Pairs that may be multiplied are split on their own, so that each side has its share of them."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a < b]
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for kind in ([p for p in pairs if p[1] <= SMALL], [p for p in pairs if p[1] > SMALL]):
        held_out = set(rng.permutation(len(kind))[: round(HELD_OUT_SHARE * len(kind))].tolist())
        for i, pair in enumerate(kind):
            sides[i in held_out].append(pair)
    return sides


def draw_problems(rng: np.random.Generator, pairs: list[Pair], count: int) -> list[WordProblem]:
    """``count`` different problems with numbers from ``pairs``, each operation as often as the others."""
    operations = list(STORIES)
    found: dict[str, WordProblem] = {}
    while len(found) < count:
        operation = operations[len(found) % len(operations)]
        problem = _draw(rng, pairs, operation)
        found.setdefault(problem.text, problem)
    return list(found.values())


def _draw(rng: np.random.Generator, pairs: list[Pair], operation: str) -> WordProblem:
    usable = [p for p in pairs if p[1] <= SMALL] if operation == "*" else pairs
    small, large = usable[rng.integers(len(usable))]
    smaller_first = operation != "-" and rng.random() < 0.5
    numbers = (small, large) if smaller_first else (large, small)
    name, other = (NAMES[i] for i in rng.choice(len(NAMES), 2, replace=False))
    story = STORIES[operation][rng.integers(len(STORIES[operation]))]
    things = THINGS[rng.integers(len(THINGS))]
    text = story.format(name=name, other=other, things=things, a=numbers[0], b=numbers[1])
    return WordProblem(text, operation, numbers)


_ANSWER = re.compile(r"answer:\s*\$?(-?\d[\d,]*)(?![\d.,]*\d)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(response, answer):
    """+1 if the number after the last "Answer:" is ``answer``, -1 otherwise (Eq. 7).

    Parts, each 0 or 1: ``answer_found``, whether there is a whole number after an "Answer:" (the format);
    ``last_number``, whether the last number of the response, however it is written there, is right (the reasoning)."""
    stated, numbers = ([n.replace(",", "") for n in pattern.findall(response)] for pattern in (_ANSWER, _NUMBER))
    right = bool(stated) and stated[-1] == answer
    parts = {"answer_found": float(bool(stated)), "last_number": float(bool(numbers) and numbers[-1] == answer)}
    return {"value": 1.0 if right else -1.0, "correct": right, "extracted": stated[-1] if stated else None, **parts}


def write_rows(seed: int, folder: Path) -> None:
    """The same files for the same seed."""
    rng = np.random.default_rng(seed)
    for name, pairs, count in zip(("train", "heldout"), split_pairs(rng), (2000, 240), strict=True):
        problems = draw_problems(rng, pairs, count)
        rows = ({"prompt": p.messages, "answer": p.answer, "operation": p.operation} for p in problems)
        (folder / f"word-problems-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1, Path())
