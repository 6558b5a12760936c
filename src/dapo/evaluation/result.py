"""What an evaluation found: scored samples of every prompt, the numbers over them, and both as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from dapo.config.secrets import redact
from dapo.evaluation.statistics import Estimate, budgets, count_votes, estimate_means, majority_at, pass_at
from dapo.records import Group, Reward, Sample
from dapo.reward.math.notation import canonical

INTERVAL = (
    "95%: Wilson's where each prompt is right or wrong or all are the same, else percentile bootstrap over prompts"
)
_LONGEST_ANSWER = 4000
"""Characters of an answer that are looked into for its class; longer ones are compared as they are."""
_DIGITS = r"[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?"
_NUMBER = re.compile(rf"(?:(?<![\w)}}])-)?{_DIGITS}")  # a minus sign, but no subtraction and no hyphen
_REFERENCE = re.compile(rf"\$?-?{_DIGITS}%?")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scored samples of every prompt, in the order of the prompts. ``own``: what the user's metrics gave, by name."""

    groups: tuple[Group, ...]
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """Those that have a verdict."""
        return [s for g in self.groups for s in g.scored]

    @property
    def samples_per_prompt(self) -> int:
        """k: samples taken of each prompt, failed scores included."""
        return max((len(g.samples) for g in self.groups), default=0)

    @property
    def accuracy(self) -> float | None:
        """avg@k: the share of correct samples, as the mean over prompts; None if the reward has no notion of it."""
        if not self._has_right_and_wrong:
            return None
        shares = [sum(bool(s.verdict.correct) for s in g.scored) / len(g.scored) for g in self.groups if g.scored]
        return sum(shares) / len(shares)

    @property
    def response_length(self) -> float:
        lengths = [s.length for g in self.groups for s in g.samples]
        return sum(lengths) / max(len(lengths), 1)

    def metrics(self) -> dict[str, float]:
        """By the names of ``observe/metrics.py``."""
        shares, k = self.shares(), self.samples_per_prompt
        parts: dict[str, list[float]] = {}  # over the samples that have them
        for name, value in (part for sample in self.samples for part in sample.verdict.parts.items()):
            parts.setdefault(name, []).append(value)
        parts.pop("answer_found", None)  # told as no_answer
        found: dict[str, float | None] = {
            "rows": len(self.groups),
            "response_length": self.response_length,
            "truncated": shares["truncated"],
            "errors": shares["failed"] or None,
            **{name: shares.get(name) for name in ("no_answer", "lenient")},
            **{f"part/{name}": sum(values) / len(values) for name, values in parts.items()},
            **{f"metric/{name}": value for name, value in self.own.items()},
        }
        estimates = self.estimates([k])
        if "reward" in estimates:
            found["reward"] = estimates["reward"].value
        if average := estimates.get(f"avg@{k}"):
            found |= {"accuracy": average.value, "accuracy_low": average.low, "accuracy_high": average.high}
        for name in (f"pass@{k}", f"maj@{k}"):
            if k > 1 and name in estimates:
                found[name] = estimates[name].value
        return {f"eval/{name}": value for name, value in found.items() if value is not None}

    def shares(self) -> dict[str, float]:
        """Shares by name: ``truncated`` and ``failed`` (scores) of all samples, the others of those with a verdict.

        ``correct``, ``wrong`` (an answer that is not right) and ``no_answer`` (none was found: the format, not the
        mathematics) add up to 1. ``lenient``: correct, or the last number of the response is the reference; only of a
        reward that looks for an answer, where all references are numbers. What the reward has no notion of is left out.
        """
        samples, scored = [s for g in self.groups for s in g.samples], self.samples
        found = {
            "truncated": sum(s.truncated for s in samples) / max(len(samples), 1),
            "failed": 1 - len(scored) / len(samples) if samples else 0.0,
        }
        told = [s.verdict for s in scored if "answer_found" in s.verdict.parts]
        if told:
            found["no_answer"] = sum(not v.parts["answer_found"] for v in told) / len(told)
        if self._has_right_and_wrong:
            found["correct"] = sum(bool(s.verdict.correct) for s in scored) / len(scored)
            if len(told) == len(scored):
                found["wrong"] = sum(not v.correct and bool(v.parts["answer_found"]) for v in told) / len(told)
                references = [reference_number(g.prompt.answer) for g in self.groups]
                if None not in references:
                    pairs = [(s, ref) for g, ref in zip(self.groups, references, strict=True) for s in g.scored]
                    right = sum(bool(s.verdict.correct) or last_number(s.text) == ref for s, ref in pairs)
                    found["lenient"] = right / len(pairs)
        return found

    def estimates(self, wanted: Sequence[int] | None = None) -> dict[str, Estimate]:
        """``avg@k``, ``pass@j``, ``maj@j`` (if the reward tells answers) and ``reward``, each with its interval.
        ``wanted``: the j; by default powers of two up to k and k itself."""
        groups = [g for g in self.groups if g.scored]
        if not groups:
            return {}
        columns = {"reward": np.array([np.mean([s.verdict.value for s in g.scored]) for g in groups])}
        if self._has_right_and_wrong:
            columns = self._columns(groups, budgets(self.samples_per_prompt) if wanted is None else wanted) | columns
        values, shares = np.stack(list(columns.values()), axis=1), [name != "reward" for name in columns]
        return dict(zip(columns, estimate_means(values, shares), strict=True))

    def _columns(self, groups: Sequence[Group], wanted: Sequence[int]) -> dict[str, Any]:
        verdicts_of = [[s.verdict for s in g.scored] for g in groups]
        votes = [count_votes([bool(v.correct) for v in of], [_answer_class(v) for v in of]) for of in verdicts_of]
        verdicts, right = np.array([v.verdicts for v in votes]), np.array([v.right for v in votes])
        columns: dict[str, Any] = {f"avg@{self.samples_per_prompt}": right / verdicts}
        columns |= {f"pass@{j}": pass_at(verdicts, right, j) for j in wanted}
        if any(s.verdict.extracted is not None for g in groups for s in g.scored):
            for j in wanted:
                majority = [majority_at(v, j) for v in votes]
                if None not in majority:
                    columns[f"maj@{j}"] = np.array(majority)
        return columns

    @property
    def _has_right_and_wrong(self) -> bool:
        verdicts = [s.verdict.correct for s in self.samples]
        return bool(verdicts) and None not in verdicts

    def as_json(self) -> dict[str, Any]:
        """Everything but the texts: sizes, metrics with intervals, shares, lengths, and counts of each row.

        ``prompts_short``: prompts with fewer than k verdicts, ``prompts_unscored``: those with none, left out of the
        metrics. ``interval``: how the bounds were made.
        """
        lengths = [s.length for g in self.groups for s in g.samples] or [0]
        return {
            "prompts": len(self.groups),
            "samples_per_prompt": self.samples_per_prompt,
            "prompts_short": sum(0 < len(g.scored) < len(g.samples) for g in self.groups),
            "prompts_unscored": sum(not g.scored for g in self.groups),
            "metrics": {name: asdict(estimate) for name, estimate in self.estimates().items()},
            "interval": INTERVAL,
            "shares": self.shares(),
            "own": dict(self.own),
            "response_length": {"mean": self.response_length, "median": float(np.median(lengths)), "max": max(lengths)},
            "rows": [_row_counts(group) for group in self.groups],
        }

    def sample_lines(self) -> Iterator[dict[str, Any]]:
        """Every sample as a person wants to see it: one object each, in the order of the prompts."""
        for group in self.groups:
            for sample in group.samples:
                reward = sample.reward or Reward(None, 0.0, error="not scored")
                yield {
                    "row": group.prompt.row,
                    "index": sample.index,
                    "prompt": group.prompt.text,
                    "response": sample.text,
                    "extracted": reward.extracted,
                    "gold": group.prompt.answer,
                    "correct": reward.correct,
                    "reward": reward.value if reward.error is None else None,
                    "error": redact(reward.error),
                    "length": sample.length,
                    "finish_reason": sample.finish_reason,
                }


def _answer_class(verdict: Reward) -> str | None:
    """What equal wrong answers have in common: their canonical spelling. None: there is no answer.

    Spelling and not mathematical equality, which would take a worker for each pair; so wrong answers that are equal in
    more than spelling do not join their votes.
    """
    text = verdict.extracted
    if not text:
        return None
    return re.sub(r"\s+", "", canonical(text) if len(text) <= _LONGEST_ANSWER else text)


def _row_counts(group: Group) -> dict[str, Any]:
    scored = group.scored
    return {
        "row": group.prompt.row,
        "verdicts": len(scored),
        "correct": sum(bool(s.verdict.correct) for s in scored),
        "no_answer": sum(not s.verdict.parts.get("answer_found", 1.0) for s in scored),
        "truncated": sum(s.truncated for s in group.samples),
        "reward": float(np.mean([s.verdict.value for s in scored])) if scored else None,
        "response_length": float(np.mean([s.length for s in group.samples])) if group.samples else None,
    }


# --- right whatever the format: a measure and no reward, as a response may end with the right number by chance


def reference_number(answer: str | None) -> Decimal | None:
    """The value of a reference that is a plain number; None: it is something else."""
    text = "" if answer is None else answer.strip()
    return _value(text.strip("$%")) if _REFERENCE.fullmatch(text) else None


def last_number(response: str) -> Decimal | None:
    """The last number in a text; None: there is none."""
    found = _NUMBER.findall(response)
    return _value(found[-1]) if found else None


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
