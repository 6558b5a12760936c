"""What people prefer: votes between the answers of two models of a run, kept as preference pairs.

``votes.jsonl`` in the run folder has one JSON object for each vote, and is only ever added to. Fields: ``prompt``,
``chosen`` and ``rejected`` (null where neither was better), ``vote`` (``left``, ``right``, ``tie``, ``both_bad``),
``who``, ``time`` (Unix seconds), ``row`` (of the held-out data), ``temperature``, and what was shown, ``left`` and
``right``: ``model`` and ``response`` each. The voter did not know the models.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dapo.errors import UserError
from dapo.evaluation.statistics import Estimate, estimate_share
from dapo.util.files import append_lines, json_line, lines_of, parse_json, write_atomic, writing

Choice = Literal["left", "right", "tie", "both_bad"]
CHOICES: Sequence[Choice] = ("left", "right", "tie", "both_bad")


def votes_path(root: Path) -> Path:
    return root / "votes.jsonl"


@dataclass(frozen=True, slots=True)
class Shown:
    model: str
    response: str


@dataclass(frozen=True, slots=True)
class Vote:
    prompt: str
    left: Shown
    right: Shown
    choice: Choice
    who: str
    time: float
    row: int | None = None
    temperature: float | None = None

    @property
    def chosen(self) -> Shown | None:
        """The better one; None: neither."""
        return {"left": self.left, "right": self.right}.get(self.choice)

    @property
    def rejected(self) -> Shown | None:
        return {"left": self.right, "right": self.left}.get(self.choice)

    def as_json(self) -> dict[str, Any]:
        """The line of votes.jsonl."""
        told = asdict(self)
        better = {"chosen": self.chosen and self.chosen.response, "rejected": self.rejected and self.rejected.response}
        first = {"prompt": told.pop("prompt"), **better, "vote": told.pop("choice")}
        return first | {name: told[name] for name in ("who", "time", "row", "temperature", "left", "right")}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Vote:
        """Raises KeyError, TypeError or ValueError if the line is not a vote."""
        left, right = (Shown(str(line[side]["model"]), str(line[side]["response"])) for side in ("left", "right"))
        if line["vote"] not in CHOICES:
            raise ValueError(f"vote is {line['vote']!r}")
        time, who = float(line["time"]), str(line["who"])
        return cls(str(line["prompt"]), left, right, line["vote"], who, time, line.get("row"), line.get("temperature"))


def add_vote(root: Path, vote: Vote) -> None:
    """Add to the votes of a run. Raises UserError: the file cannot be written; it is as it was before."""
    path = votes_path(root)
    try:
        append_lines(path, [vote.as_json()])
    except OSError as error:
        raise UserError(f"{path}: cannot keep the vote: {error.strerror or error}") from None


def read_votes(root: Path) -> list[Vote]:
    """All votes of a run; a last line that was cut off while being written is left out.
    Raises UserError: another line is not a vote, or the file cannot be read."""
    path, votes = votes_path(root), []
    try:
        for number, line in enumerate(lines_of(path), start=1):
            if line.endswith(b"\n"):
                try:
                    votes.append(Vote.from_json(parse_json(line)))
                except (ValueError, TypeError, KeyError):
                    raise UserError(f"{path}:{number}: not a vote") from None
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return votes


def preference_pairs(votes: Sequence[Vote]) -> Iterator[dict[str, Any]]:
    """The votes that found one answer better, as reward models and DPO are trained on."""
    for vote in votes:
        if (chosen := vote.chosen) and (rejected := vote.rejected):
            texts = {"prompt": vote.prompt, "chosen": chosen.response, "rejected": rejected.response}
            models = {"chosen_model": chosen.model, "rejected_model": rejected.model}
            yield {**texts, **models, "who": vote.who, "time": vote.time}


def live_pairs(file: Path) -> Iterator[dict[str, Any]]:
    """Pairs of a response with a thumb up and one with a thumb down to the same prompt, oldest first, each response
    once; and of each edit and the response that it mends. ``file``: prompts with responses, and feedback on them, as
    ``dapo serve --live`` writes it.
    Raises UserError: a line is neither, or the file cannot be read."""
    known, number = dict[str, dict[str, Any]](), 0
    waiting = defaultdict[str, dict[int, list[dict[str, Any]]]](lambda: {1: [], -1: []})
    try:
        for line in lines_of(file):
            number += 1
            row = parse_json(line.decode("utf-8-sig"))
            if "feedback" not in row:
                known[row["id"]] = {"prompt": row["prompt"], **row, "texts": {row.get("response")}, "voted": False}
                continue
            edit, thumbs = (row["feedback"].get(kind) for kind in ("edit", "thumbs"))
            if not (said := known.get(row["id"], {})).get("response"):
                continue
            if edit and edit not in said["texts"]:
                said["texts"].add(edit)
                texts = {"prompt": said["prompt"], "chosen": edit, "rejected": said["response"]}
                yield {**texts, "chosen_id": None, "rejected_id": row["id"]}
            if thumbs and not said["voted"]:
                said["voted"], mine = True, waiting[json.dumps(said["prompt"])]
                mine[thumbs].append(said)
                if mine[1] and mine[-1]:
                    up, down = mine[1].pop(0), mine[-1].pop(0)
                    yield {
                        **{"prompt": said["prompt"], "chosen": up["response"], "rejected": down["response"]},
                        **{f"{side}_id": one["id"] for side, one in (("chosen", up), ("rejected", down))},
                    }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        where = file if isinstance(error, OSError) else f"{file}:{number}"
        raise UserError(f"{where}: neither a prompt nor feedback, as dapo serve --live writes them") from None


def write_pairs(pairs: Sequence[Mapping[str, Any]], output: Path) -> int:
    """Write preference pairs as JSON lines: how many there are. Raises UserError if the file cannot be written."""
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, map(json_line, pairs))
    return len(pairs)


@dataclass(frozen=True, slots=True)
class Tally:
    """The votes between two models, ``models`` in the order of the run: the second is the one that learned longer."""

    models: tuple[str, str]
    first: int
    second: int
    ties: int
    both_bad: int
    voters: int
    prompts: int

    @property
    def share(self) -> Estimate | None:
        """How often the second one was the better one, of the votes that found one better; None: there are none."""
        decided = self.first + self.second
        return estimate_share(self.second, decided) if decided else None

    @property
    def verdict(self) -> str:
        share = self.share
        if share is None or share.low is None or share.high is None:
            return "no vote found one of them better"
        if share.low > 0.5 or share.high < 0.5:
            return f"{self.models[share.low > 0.5]} is preferred"
        return "too few votes to tell them apart"


def tallies(votes: Sequence[Vote]) -> list[Tally]:
    order = {"model-before": 0, "model-after": 2}  # checkpoints lie between
    pairs: dict[tuple[str, str], list[Vote]] = {}
    for vote in votes:
        first, second = sorted((vote.left.model, vote.right.model), key=lambda model: (order.get(model, 1), model))
        pairs.setdefault((first, second), []).append(vote)
    found = []
    for models, several in sorted(pairs.items()):
        better = [vote.chosen.model for vote in several if vote.chosen is not None]
        counts = Counter(vote.choice for vote in several)
        voters, prompts = ({getattr(vote, name) for vote in several} for name in ("who", "prompt"))
        wins = [better.count(model) for model in models]
        ties, bad = counts["tie"], counts["both_bad"]
        found.append(Tally(models, wins[0], wins[1], ties, bad, len(voters), len(prompts)))
    return found
