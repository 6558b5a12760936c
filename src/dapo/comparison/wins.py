"""Win rates between recipes: their models' answers to the same held-out prompts, compared in pairs.

A judge sees both answers, once in each order. A reward that scores one answer at a time prefers the higher score. What
people think is in votes.jsonl, cast on the page. All say of a pair that one is better, or neither; a tie is half a win.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from dapo.comparison.folder import Cell, Comparison
from dapo.config import JudgeReward, RewardConfig, load_reward
from dapo.errors import UserError
from dapo.evaluation.statistics import Estimate, estimate_means
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.reward.contract import Scorer
from dapo.util.asynchronous import run_async
from dapo.util.files import lines_of, parse_json, read_json, write_json, writing

WINS = "wins.json"
Answer = Mapping[str, Any]


class Verdict(NamedTuple):
    """Of ``other`` against ``first`` on one prompt: 1 it is better, 0 worse, 1/2 neither; None: not known.
    ``places``: in each order in which a judge saw them, its grade of what came first, from -1 to 1."""

    row: str
    won: float | None
    places: tuple[float, ...] = ()


def answers_of(cell: Cell) -> dict[str, Answer]:
    """By file and row the answers of a cell that is done. Raises UserError: the file is damaged."""
    path = cell.file("answers.jsonl")
    try:
        lines = [parse_json(line) for line in lines_of(path)] if path.is_file() else []
        return {f"{line['file']}:{line['row']}": line for line in lines}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def count(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """``wins``, ``ties`` and ``losses``, and pairs that ``failed``; ``rate`` with ``low`` and ``high``: a tie is half a
    win, the seeds of a prompt are averaged, bootstrap over prompts. Of a judge ``first_place``: how often it preferred
    what it saw first, and ``swayed``: the share of pairs in which it preferred the same place in both orders."""
    rows: dict[str, list[float]] = {}
    for row, won, _ in verdicts:
        if won is not None:
            rows.setdefault(row, []).append(won)
    known = [won for several in rows.values() for won in several]
    means = np.array([[fmean(several)] for several in rows.values()])
    rate = estimate_means(means, [True])[0] if rows else Estimate(float("nan"))
    both = [places for _, _, places in verdicts if places]
    preferred = [grade > 0 for places in both for grade in places if grade]
    return {
        **{name: known.count(value) for name, value in (("wins", 1.0), ("ties", 0.5), ("losses", 0.0))},
        **{"failed": len(verdicts) - len(known), "rate": rate.value, "low": rate.low, "high": rate.high},
        "first_place": fmean(preferred) if preferred else None,
        "swayed": fmean(a * b > 0 for a, b in both) if both else None,
    }


def judge(root: Path, reward: str, tell: Callable[[str], object]) -> None:
    """Compare each recipe's answers with those of the first one, seed by seed, and write wins.json.
    ``reward``: a recipe whose reward is the judge, a reward model or any other.
    Raises UserError: it cannot be read or reached, or there are no answers of two recipes."""
    config, comparison = load_reward(reward), Comparison.read(root)
    first, *others = comparison.recipes
    found = {name: [answers_of(Cell(root, name, seed)) for seed in comparison.seeds] for name in comparison.recipes}
    pairs = {
        other: [(row, a[row], b[row]) for a, b in zip(found[first], found[other], strict=True) for row in a if row in b]
        for other in others
    }
    if not any(pairs.values()):
        raise UserError(f"{root}: there are no answers of {first} and another recipe with the same seed yet")
    tell(f"{config.kind} compares {sum(map(len, pairs.values())):,} pairs of answers")
    verdicts = run_async(lambda: _compare(config, pairs))
    wins = [{"by": config.kind, "first": first, "other": n, **count(of)} for n, of in verdicts.items() if of]
    with writing(root / WINS):
        write_json(root / WINS, wins)


def read_wins(root: Path) -> list[dict[str, Any]]:
    try:
        return list(read_json(root / WINS))
    except (OSError, ValueError):
        return []


async def _compare(config: RewardConfig, pairs: Mapping[str, Sequence[Any]]) -> dict[str, list[Verdict]]:
    scorer, found, sees_both = make_scorer(config), {}, isinstance(config, JudgeReward)
    try:
        await scorer.start()
        for other, several in pairs.items():
            found[other] = await asyncio.gather(*(_verdict(scorer, sees_both, *pair) for pair in several))
    finally:
        await scorer.close()
    return found


async def _verdict(scorer: Scorer, sees_both: bool, row: str, first: Answer, other: Answer) -> Verdict:
    """By a judge an answer wins if it is preferred in both places: one that prefers a place prefers neither answer."""
    rewards = []
    for answer, against in ((other, first), (first, other)):
        meta = {"compared_with": against["response"]} if sees_both else {}
        prompt = Prompt(int(answer["row"]), str(answer["prompt"]), (), answer.get("gold"), meta)
        rewards.append(scorer.score(prompt, answer["response"]))
    found = await asyncio.gather(*rewards)
    if any(one.error is not None for one in found):
        return Verdict(row, None)
    a, b = (one.value for one in found)
    if sees_both:
        return Verdict(row, 1.0 if a > 0 > b else 0.0 if a < 0 < b else 0.5, (a, b))
    return Verdict(row, 0.5 + 0.5 * ((a > b) - (a < b)))
