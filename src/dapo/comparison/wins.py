"""Win rates between recipes: their models' answers to the same held-out prompts, compared in pairs.

A judge sees both answers, once in each order. A reward that scores one answer at a time prefers the higher score. What
people think is in votes.jsonl, cast on the page. All say of a pair that one is better, or neither; a tie is half a win.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dapo.comparison.folder import Cell, Declared
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of ``other`` against ``first`` on one prompt: 1 it is better, 0 worse, 1/2 neither; None: not known.
    ``places``: of each order in which a judge saw them, its grade of the answer that came first, from -1 to 1."""

    row: str
    won: float | None
    places: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Wins:
    """Of ``other`` against ``first``, over prompts. ``rate``: ties count half; with the bootstrap over prompts, whose
    seeds are averaged. ``first_place``: how often a judge preferred what it saw first, ties left out; ``swayed``: the
    share of pairs in which it said otherwise once they were swapped, which are ties."""

    first: str
    other: str
    wins: int
    ties: int
    losses: int
    failed: int
    rate: Estimate | None
    first_place: float | None = None
    swayed: float | None = None


def answers_of(cell: Cell) -> dict[str, Answer]:
    """By file and row the answers of a cell that is done. Raises UserError: the file is damaged."""
    path = cell.file("answers.jsonl")
    try:
        lines = [parse_json(line) for line in lines_of(path)] if path.is_file() else []
        return {f"{line['file']}:{line['row']}": line for line in lines}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def count(first: str, other: str, verdicts: Sequence[Verdict]) -> Wins:
    known = [one for one in verdicts if one.won is not None]
    rows: dict[str, list[float]] = {}
    for one in known:
        rows.setdefault(one.row, []).append(float(one.won or 0.0))
    values = np.array([[fmean(won)] for won in rows.values()])
    rate = estimate_means(values, [True])[0] if rows else None
    both = [one.places for one in known if one.places]
    preferred = [place for places in both for place in places if place]
    swayed = fmean(a * b > 0 for a, b in both) if both else None  # the same place, and so another answer
    place = fmean(one > 0 for one in preferred) if preferred else None
    won = [sum(one.won == value for one in known) for value in (1.0, 0.5, 0.0)]
    return Wins(first, other, *won, len(verdicts) - len(known), rate, place, swayed)


def judge(root: Path, reward: str, changes: Sequence[str] = (), tell: Callable[[str], object] = print) -> list[Wins]:
    """Compare each recipe's answers with those of the first one, seed by seed, and write wins.json.
    ``reward``: a recipe whose reward is the judge, a reward model or any other.
    Raises UserError: it cannot be read or reached, or there are no answers of two recipes."""
    config, declared = load_reward(reward, changes), Declared.read(root)
    if isinstance(config, JudgeReward) and config.rubric is None:
        rubric = resources.files("dapo.reward.judge").joinpath("pair.jinja")
        config = config.model_copy(update={"rubric": str(rubric)})
    first, *others = declared.variants
    seeds: Sequence[int] = declared.tree["seeds"]
    pairs = {
        other: [(answers_of(Cell(root, first, seed)), answers_of(Cell(root, other, seed))) for seed in seeds]
        for other in others
    }
    wanted = {
        other: [(row, a[row], b[row]) for a, b in found for row in a if row in b] for other, found in pairs.items()
    }
    if not any(wanted.values()):
        raise UserError(f"{root}: there are no answers of {first} and another recipe with the same seed yet")
    tell(f"{config.kind} compares {sum(map(len, wanted.values())):,} pairs of answers")
    found = run_async(lambda: _compare(config, first, wanted))
    with writing(root / WINS):
        write_json(root / WINS, [{"by": config.kind, **_plain(one)} for one in found])
    return found


def read_wins(root: Path) -> list[dict[str, Any]]:
    try:
        return list(read_json(root / WINS))
    except (OSError, ValueError):
        return []


def _plain(wins: Wins) -> dict[str, Any]:
    names = ("first", "other", "wins", "ties", "losses", "failed", "first_place", "swayed")
    rate = wins.rate
    ends = {"rate": rate and rate.value, "low": rate and rate.low, "high": rate and rate.high}
    return {name: getattr(wins, name) for name in names} | ends


async def _compare(
    config: RewardConfig, first: str, wanted: Mapping[str, Sequence[tuple[str, Answer, Answer]]]
) -> list[Wins]:
    scorer = make_scorer(config)
    one = _in_both_orders if isinstance(config, JudgeReward) else _one_by_one
    try:
        await scorer.start()
        return [
            count(first, other, await asyncio.gather(*(one(scorer, *pair) for pair in pairs)))
            for other, pairs in wanted.items()
            if pairs
        ]
    finally:
        await scorer.close()


async def _in_both_orders(scorer: Scorer, row: str, first: Answer, other: Answer) -> Verdict:
    """An answer wins if it is preferred in both places; a judge that prefers a place prefers neither answer."""
    orders = [(other, first), (first, other)]
    asked = (scorer.score(_prompt(a, other=b["response"]), a["response"]) for a, b in orders)
    seen = await asyncio.gather(*asked)
    if any(one.error is not None for one in seen):
        return Verdict(row, None)
    shown_first, swapped = (one.value for one in seen)
    won = 1.0 if shown_first > 0 > swapped else 0.0 if shown_first < 0 < swapped else 0.5
    return Verdict(row, won, (shown_first, swapped))


async def _one_by_one(scorer: Scorer, row: str, first: Answer, other: Answer) -> Verdict:
    seen = await asyncio.gather(*(scorer.score(_prompt(one), one["response"]) for one in (other, first)))
    if any(one.error is not None for one in seen):
        return Verdict(row, None)
    gain = seen[0].value - seen[1].value
    return Verdict(row, 0.5 + 0.5 * ((gain > 0) - (gain < 0)))


def _prompt(answer: Answer, **meta: str) -> Prompt:
    return Prompt(int(answer["row"]), str(answer["prompt"]), (), answer.get("gold"), meta)
